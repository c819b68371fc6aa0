"""A run becomes a folder of transformers and a run again; without the package the folder loads too."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import perspectron
from perspectron import presets
from perspectron.cli import export as command
from perspectron.cli.main import main
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.data.template import Template
from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM, fast_tokenizer, remote
from perspectron.interop.hf.card import card
from perspectron.interop.hf.modeling import _share
from perspectron.model.model import build
from perspectron.opening import open_model
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.config import dump
from tests.foreign_tokenizers import KINDS
from tests.hf.subject import small
from tests.refusals import in_a_line, names

TEXT = "the fox <|endoftext|> counts\n"
ALONE = """
import sys
sys.path = [path for path in sys.path if path != sys.argv[2]]
from importlib.util import find_spec
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = tokenizer("the fox", return_tensors="pt")
out = model.generate(**ids, do_sample=False, max_new_tokens=8, eos_token_id=None)
print("perspectron" not in sys.modules, type(model).__module__.startswith("transformers_modules"), out[0].tolist())
"""


@pytest.fixture
def run(tmp_path, tokenizer) -> Path:
    model = build(small("perspective-experts"), seed=4)
    config = RunConfig(model.config, TrainConfig(data="/home/me/letters.txt", steps=9, dtype="float32"))
    checkpoint.export(
        tmp_path / "run", config, tokenizer, model, checkpoint.Progress(9, 1234, 6.0, heldout=1.5)
    )
    return tmp_path / "run"


def test_run_to_transformers_to_run_is_the_same_digest(run, tmp_path, capsys):
    hf = tmp_path / "fox-hf"
    assert main(["export", str(run), "--hf", str(hf)]) == 0
    assert main(["import", str(hf), "--out", str(tmp_path / "again")]) == 0
    (a, its), (b, others) = perspectron.load(run), perspectron.load(tmp_path / "again")
    assert a.fingerprint() == b.fingerprint()
    assert its.fingerprint == others.fingerprint
    card = (hf / "README.md").read_text()
    assert "9 updates" in card and "letters.txt" in card and "/home/me" not in card


def test_the_card_has_the_numbers_of_the_weights_that_are_exported(run, tokenizer):
    """Which are the best, not the newest."""
    model, config = perspectron.load(run)[0], checkpoint.load_config(run)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(
        run, config, tokenizer, model, optimizer, checkpoint.Progress(12, 2_000_000, 8.0, heldout=2.5)
    )
    lines = [{"step": step, "dev_bits_per_byte": bits} for step, bits in ((3, 5.0), (9, 4.25), (12, 4.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = card(open_model(run), "fox")
    assert "9 updates" in text and "12 updates" not in text and "- Dev bits per byte: 4.2500." in text
    assert "4.5" not in text and "Held-out" not in text
    (run / "metrics.jsonl").write_text(json.dumps(lines[2]))
    assert "bits per byte" not in card(open_model(run), "fox")


def test_the_card_takes_no_markdown_from_a_runs_files(run):
    """Nor HTML, nor lines."""
    config = json.loads((run / "config.json").read_text())
    hostile = "x`</code>![](https://a.example/p.png)\n# Title\n<script>alert(1)</script>``[a](b)"
    config["train"]["data"] = hostile.replace("/", "\u2215")
    (run / "config.json").write_text(json.dumps(config))
    text = card(open_model(run), 'fox"\n# <b>')
    (line,) = (line for line in text.splitlines() if "- Text:" in line)
    code, _, rest = line.removeprefix("- Text: ```").partition("```")
    assert "script" in code and "\\n" in code and "script" not in rest
    assert '`fox"\\n# <b>`' in text and 'from_pretrained("fox\\"\\n# <b>", ' in text


def test_the_card_has_the_share_that_the_encoded_text_holds_out(run, tmp_path, tokenizer):
    """Not that of the training's options, which a folder of `tokenize` does not have; none where it is not at hand."""
    assert "held out" not in card(open_model(run), "fox")
    (tmp_path / "text.txt").write_text("the fox counts\n\n" * 400)
    shards = encode(open_corpus(str(tmp_path / "text.txt"), heldout=0.3), tokenizer, tmp_path / "encoded")
    sizes = [shards.split(name).text_bytes for name in ("train", "heldout")]
    config = json.loads((run / "config.json").read_text())
    config["train"]["data"] = str(tmp_path / "encoded")
    (run / "config.json").write_text(json.dumps(config))
    share = f"{sizes[1] / sum(sizes):.0%}"
    assert share != "5%" and f"`encoded`, {share} of it held out" in card(open_model(run), "fox")


def test_what_transformers_saved_in_few_bits_is_read(run, tmp_path):
    assert main(["export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    model = PerspectronForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    shutil.copy(tmp_path / "hf" / "tokenizer.json", tmp_path / "half")
    assert main(["import", str(tmp_path / "half"), "--out", str(tmp_path / "again")]) == 0
    weights = perspectron.load(tmp_path / "again")[0].state_dict()
    for name, weight in perspectron.load(run)[0].state_dict().items():
        assert weights[name].is_floating_point() == weight.is_floating_point(), name
        if weight.is_floating_point():
            torch.testing.assert_close(weights[name].float(), weight, rtol=2**-8, atol=0)


def test_the_guide_names_what_the_code_in_the_folder_needs(run):
    """Every module imports at its start what it cannot do without; those of Triton's kernels are imported for a GPU."""
    model, _ = perspectron.load(run)
    imports = [
        name
        for text in remote.sources(model.config).values()
        for node in ast.parse(text).body
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level
            else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
    ]  # fmt: skip
    needed = (
        {name.partition(".")[0] for name in imports} - sys.stdlib_module_names - {"transformers", "triton"}
    )
    assert {"torch", "msgspec"} <= needed
    guide = (Path(__file__).parents[2] / "docs/guides/transformers.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", guide.partition("That code needs")[2].partition(", and has no")[0])) - {
        "and"
    }
    assert named == needed


@pytest.mark.slow
def test_the_folder_loads_without_the_package(run, tmp_path):
    hf, here = tmp_path / "fox-hf", Path(perspectron.__file__).parents[1]
    assert main(["export", str(run), "--hf", str(hf)]) == 0
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-P", "-c", ALONE, str(hf), str(here)]
    child = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert child.returncode == 0, child.stderr[-2000:]
    ours, tokenizer = perspectron.load(run)
    model = PerspectronForCausalLM(PerspectronConfig.of(ours.config)).eval()
    model.model.load_state_dict(ours.state_dict())
    ids = fast_tokenizer(tokenizer)("the fox", return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=8, eos_token_id=None)
    assert child.stdout.splitlines()[-1] == f"True True {out[0].tolist()}"


def test_the_tokenizer_gives_our_ids_after_a_separator(tokenizer):
    assert fast_tokenizer(tokenizer)(TEXT)["input_ids"] == [0, *tokenizer.encode(TEXT)]


def test_a_prefix_that_is_said_beside_a_tokenizer_stands_before_its_texts(tmp_path):
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    said = {"bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    own = Tokenizer.of_transformers(tmp_path)
    made, ids = fast_tokenizer(own), own.encode("the fox")
    made.save_pretrained(tmp_path / "out")
    for each in (made, AutoTokenizer.from_pretrained(tmp_path / "out")):
        assert each("the fox")["input_ids"] == own.specials.begun(ids) == [1, *ids]
        assert each("the fox", "the fox")["input_ids"] == [1, *ids, 1, *ids]


def test_no_text_gives_the_separator_however_the_tokenizer_is_read(tokenizer, tmp_path):
    tokenizers = [fast_tokenizer(tokenizer)]
    for name in ("one", "two"):
        tokenizers[-1].save_pretrained(tmp_path / name)
        tokenizers.append(AutoTokenizer.from_pretrained(tmp_path / name))
    ids = tokenizer.encode(TEXT)
    for each in tokenizers:
        assert each([TEXT, TEXT])["input_ids"] == [[0, *ids]] * 2
        assert each(TEXT, TEXT)["input_ids"] == [0, *ids, 0, *ids]
        assert each.encode(TEXT, add_special_tokens=False) == ids
        asked = [{"role": "user", "content": TEXT}]
        template = Template.named("plain")
        told = each.apply_chat_template(
            asked, chat_template=template.text, tokenize=False, add_generation_prompt=True
        )
        assert each(told)["input_ids"] == [0, *tokenizer.encode(template.prompt(asked))]


def test_the_loss_in_training_has_the_terms_of_the_router():
    torch.manual_seed(0)
    model = PerspectronForCausalLM(PerspectronConfig.of(small("perspective-experts")))
    ids = torch.randint(1, 299, (2, 12))
    plain, trained = model.eval()(ids, labels=ids).loss, model.train()(ids, labels=ids).loss
    out = model.model(ids[:, :-1], targets=ids[:, 1:])
    torch.testing.assert_close(plain, out.loss)
    assert trained > plain
    assert _share(ids, 44) == 0.5


def test_every_preset_is_a_config_that_survives_transformers(tmp_path):
    for name in presets.PRESETS:
        config = presets.get(name)
        PerspectronConfig.of(config).save_pretrained(tmp_path)
        assert PerspectronConfig.from_pretrained(tmp_path).model_config() == config, name


def test_names_of_weights_survive_transformers(tmp_path):
    """It renames weights that contain some strings (gamma, beta, parametrizations): none of ours does."""
    with torch.device("meta"):
        for name in presets.DESIGNS:
            for weight in PerspectronForCausalLM(PerspectronConfig.of(small(name))).state_dict():
                assert not {"gamma", "beta", "weight_g", "weight_v"} & set(weight.split("."))


def test_a_folder_that_cannot_be_read_is_refused_in_a_line(run, tmp_path, capsys):
    whole, hf = tmp_path / "whole", tmp_path / "hf"
    assert main(["export", str(run), "--hf", str(whole)]) == 0
    for change, named in (
        (lambda: (hf / "config.json").unlink(), ["config.json"]),
        (lambda: (hf / "config.json").write_text('{"model_type": "bert"}'), ["model_type", "bert"]),
        (lambda: (hf / "model.safetensors").unlink(), []),
        (lambda: (hf / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (lambda: _wider(hf), ["embedding.weight", 300, 301]),
    ):
        shutil.copytree(whole, hf)
        change()
        assert main(["import", str(hf), "--out", str(tmp_path / "out")]) == 2
        in_a_line(capsys.readouterr().err, *named)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(hf)


def _wider(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["vocab_size"] = 301
    (folder / "config.json").write_text(json.dumps(values))


def test_export_needs_something_to_write_and_a_new_folder(run, tmp_path, capsys):
    assert main(["export", str(run)]) == 2
    assert main(["export", str(run), "--hf", str(run)]) == 2
    assert names(capsys.readouterr().err, run)
    assert main(["export", str(run), "--hf", str(tmp_path / "hf"), "--context", "64"]) == 2
    assert names(capsys.readouterr().err, "context", 64) and not (tmp_path / "hf").exists()


def test_a_folder_that_is_there_is_refused_before_the_model_is_opened(run, monkeypatch, capsys):
    monkeypatch.setattr(command, "open_model", lambda path: pytest.fail("too late"))
    assert main(["export", str(run), "--hf", str(run)]) == 2
    assert names(capsys.readouterr().err, "hf", run)


def test_the_config_is_what_the_run_says(tokenizer):
    config = small("lens")
    assert dump(PerspectronConfig.of(config).model_config()) == dump(config)
