"""`perspectron quickstart --model`: a conversation with an imported model, which goes on from its file."""

import shutil

import pytest

from perspectron.cli import quickstart_model
from perspectron.cli.main import main

gguf = pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")

from tests.gguf_models import folder_of, write  # noqa: E402
from tests.refusals import in_a_line, names  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_gguf_becomes_a_conversation_that_goes_on(template, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quickstart_model, "TOKENS", 8)
    folder_of("llama", tmp_path / "hf")
    write(
        tmp_path / "model.gguf",
        tmp_path / "hf",
        "llama",
        **({"tokenizer__chat_template": template} if template else {}),
    )
    command = ["quickstart", "--model", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time it is there
        assert main(command) == 0
        assert names(capsys.readouterr().out, "yes")
    assert (tmp_path / "out" / "chat.state").exists()
    for more, name in ((["--steps", "7"], "steps"), (["--data", "x.txt"], "data")):
        assert main([*command, *more]) == 2
        in_a_line(capsys.readouterr().err, name)
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    for other in ("other.gguf", "none.gguf"):  # the one that is there is not taken for it
        assert main([*command[:2], str(tmp_path / other), *command[3:]]) == 2
        in_a_line(capsys.readouterr().err, tmp_path / other)
    assert main(["generate", str(tmp_path / "out" / "model"), "a", "--max-tokens", "2"]) == 0


def test_what_is_no_model_is_refused_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["quickstart", "--model", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out")]) == 2
    in_a_line(capsys.readouterr().err, tmp_path / "model.gguf")
    assert not (tmp_path / "out").exists()
