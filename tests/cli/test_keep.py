"""`generate --keep` and `--from`: what goes on is what was not interrupted, and a folder that is another is refused."""

import json
import shutil

import pytest

from perspectron.cli.main import main
from tests.cli.small import SIZES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    (folder / "text.txt").write_text("Dear Sir, the cat sat on the mat.\n" * 200)
    command = ["train", "--preset", "perspective", "--data", str(folder / "text.txt"), "--steps", "2"]
    command += ["--batch-size", "2", "--seq-len", "32", "--eval-tokens", "64", "--dtype", "float32"]
    assert main([*command, "--set", *SIZES, "layers=2", "--out", str(folder / "run")]) == 0
    return folder / "run"


def told(capsys, *arguments) -> str:
    assert main(["generate", *map(str, arguments), "--json", "--temperature", "1"]) == 0
    return json.loads(capsys.readouterr().out)["texts"][0]


@pytest.mark.parametrize("adapt", [(), ("--adapt",)])
def test_a_text_goes_on(run, tmp_path, capsys, adapt):
    capsys.readouterr()
    whole = told(capsys, run, "Dear Sir", "--max-tokens", 20, *adapt)
    first = told(capsys, run, "Dear Sir", "--max-tokens", 9, "--keep", tmp_path / "talk", *adapt)
    assert {path.name for path in (tmp_path / "talk").iterdir()} == {
        "manifest.json", "conversation.state", *(["adapter.safetensors"] if adapt else []),
    }  # fmt: skip
    again = tmp_path / "talk"
    second = told(capsys, run, "--from", again, "--keep", again, "--max-tokens", 6)
    third = told(capsys, run, "--from", again, "--max-tokens", 5)
    assert first + second + third == whole


def test_what_cannot_go_on(run, tmp_path, capsys):
    talk = tmp_path / "talk"
    told(capsys, run, "Dear Sir", "--max-tokens", 3, "--keep", talk)
    cases = {
        "manifest.json: no such file": lambda folder: shutil.rmtree(folder),
        "not a folder that generate --keep wrote": lambda folder: (folder / "manifest.json").write_text("{}"),
        "damaged, it is not what manifest.json says": lambda folder: (
            folder / "conversation.state"
        ).write_text(""),
        "use the model that wrote it": lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"model": "', '"model": "0')
        ),
    }
    for said, change in cases.items():
        shutil.copytree(talk, tmp_path / "other")
        change(tmp_path / "other")
        assert main(["generate", str(run), "--from", str(tmp_path / "other")]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
    assert main(["generate", str(run), "--from", str(talk), "--load-state", "x"]) == 2
    assert "left out with --from" in capsys.readouterr().err
    assert main(["generate", str(run), "--warm"]) == 2
    assert "artifacts have experts on disk" in capsys.readouterr().err
