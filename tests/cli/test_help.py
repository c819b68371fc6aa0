"""What every command's help shows, and the answers to mistakes."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from perspectron.cli.main import command_of, commands, main
from perspectron.cli.usage import options
from tests.refusals import in_a_line


def helped(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in commands() if name != "lm-eval"])
def test_help_shows_an_example_and_every_option_once(name, capsys):
    """First what is used most, where there are many; nothing that Python alone would say."""
    first, whole = (helped(capsys, *name.split(), *words) for words in (["--help"], ["--help", "all"]))
    command = command_of(name)
    assert f"perspectron {name}" in first.partition("\n\n")[2]
    flags = [option.name for option in options(command) if not option.positional]
    assert sorted(re.findall(r"^  (--[\w-]+)", whole, re.M)) == sorted(flags)
    shown = re.findall(r"^  (--[\w-]+)", first, re.M)
    assert shown == list(getattr(command, "FIRST", shown)) and len(shown) <= 12
    assert len(first.splitlines()) <= 50
    assert not re.search(r"None|\{|\(default: \)|False", first + whole.replace("{True}", ""))


def test_help_of_a_training_fits_a_screen(capsys):
    first = helped(capsys, "train", "--help")
    assert len(first.splitlines()) <= 40 and first.count("\n  --") == 10
    assert "perspectron train --help all" in first


@dataclass(frozen=True)
class Coloured:
    """Colours of a run: those of a page. paper: what is behind the text. Note: it may be dark. ink: one of two:
    black or white, and of a paper: any that is read.

    For example: paper first."""

    paper: str = "dark"
    ink: str = "white"


def test_a_colon_in_the_help_of_an_option_cuts_nothing():
    found = {option.name: option.text for option in options(Coloured)}
    assert found["--paper"] == "What is behind the text. Note: it may be dark. (default: dark)"
    assert found["--ink"] == "One of two: black or white, and of a paper: any that is read. (default: white)"


MISTAKES = {
    "generat runs/nope": ("'generat'", "generate"),
    "generate": ("RUN",),
    "generate runs/nope": ("runs/nope",),
    "generate runs/leters x": ("runs/leters", "runs/letters"),
    "inspect runs/nope": ("runs/nope",),
    "inspect transfomer-tiny": ("'transfomer-tiny'", "transformer-tiny"),
    "generate runs/nope --max-token 5": ("--max-token", "--max-tokens"),
    "generate runs/nope --max-tokens five": ("max_tokens", "'five'"),
    "generate runs/nope --seed": ("--seed",),
    "train --minutes 3m": ("minutes", "'3m'"),
    "train --schedule cosin": ("schedule", "'cosin'", "cosine"),
    "train --data leters.txt": ("leters.txt", "letters.txt"),
    "train --data letters.txt --template chatml": ("template", "'chatml'"),
    "train --data short.txt": ("short.txt", "--seq-len"),
    "train --data empty": ("empty",),
    "train --data letters.txt --device gpu": ("device", "'gpu'", "cpu"),
    "train --data letters.txt --out runs/letters": ("out", "runs/letters", "--resume"),
    "compare --designs gpt3,gla --out o": ("'gpt3'", "gpt2"),
    "compare --resume runs/nope": ("runs/nope",),
    "import nope.gguf --out o": ("nope.gguf",),
    "state lo x": ("lo", "log"),
    "perspective safety fitt a b --allowed c --blocked d": ("action", "'fitt'", "fit"),
}
"""Mistakes, and what the answer names: what was typed, and what was probably meant or works."""


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_what_was_meant(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("letters.txt").write_text("Dear Sir, the cat sat.\n" * 400)
    Path("short.txt").write_text("Dear Sir\n")
    Path("empty").mkdir()
    Path("runs/letters").mkdir(parents=True)
    Path("runs/letters/config.json").write_text("{}")
    assert main(typed.split()) == 2
    assert not Path("o").exists()
    in_a_line(capsys.readouterr().err.splitlines()[-1], *MISTAKES[typed])
