"""`generate --save-state` and `--load-state`: what goes on is what was not interrupted, under an adapter too."""

import json

import pytest

from perspectron.cli.main import main
from tests.cli.small import SIZES
from tests.refusals import in_a_line


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


@pytest.mark.parametrize("adapts", [False, True])
def test_a_text_goes_on(run, tmp_path, capsys, adapts):
    capsys.readouterr()
    talk, learned = tmp_path / "talk.state", tmp_path / "learned.safetensors"
    adapt, saves, loads = ["--adapt"], ["--save-adapter", learned], ["--adapter", learned]
    if not adapts:
        adapt = saves = loads = []
    whole = told(capsys, run, "Dear Sir", "--max-tokens", 20, *adapt)
    first = told(capsys, run, "Dear Sir", "--max-tokens", 9, "--save-state", talk, *adapt, *saves)
    on = ["--load-state", talk, *loads]
    second = told(capsys, run, *on, "--save-state", talk, *saves, "--max-tokens", 6)
    third = told(capsys, run, *on, "--max-tokens", 5)
    assert first + second + third == whole


def test_options_for_what_is_not_there_are_refused_by_name(run, tmp_path, capsys):
    assert main(["generate", str(run), "--save-adapter", str(tmp_path / "a")]) == 2
    in_a_line(capsys.readouterr().err, "--adapt", "--adapter")
    assert main(["generate", str(run), "--warm"]) == 2
    in_a_line(capsys.readouterr().err, "warm")
