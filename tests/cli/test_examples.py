"""The examples of every command's help: they parse, and those that are quick when shortened are run, in their order,
in a folder that holds two texts and a GGUF. (tests/cli/test_installed.py runs every command.)"""

import importlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from perspectron.cli.main import _parse, command_of, commands, main, within
from tests.gguf_models import folder_of, write

SHORTER = {
    r"--minutes \S+": "--steps 3",
    r"--steps 2000": "--steps 6 --cooldown 0.4",
    r"--steps 4000": "--steps 9",
    r"--steps 20\b": "--steps 2",
    r"--max-tokens \d+": "--max-tokens 4",
    r"--tokens 3000 --steps 500": "--tokens 3000 --steps 20",
    r"--out runs/letters$": "--out runs/longer",
    r"--out runs/pairs$": "--out runs/pairs --steps 3",
    r"train --data letters.txt$": "train --data letters.txt --steps 3 --out runs/letters",
    r"--recipe staged --data letters.txt": "--recipe staged --data letters.txt --steps 9 --out runs/routed",
    r"prune-attention runs/lens": "prune-attention runs/lens --context 64",
    r"^perspectron generate (?!.*--max)": "perspectron generate --max-tokens 4 ",
}
QUICK = {
    "train": "--seq-len 32 --batch-size 2 --eval-every 0 --eval-tokens 64 --dtype float32",
    "convert": "--tokens 6000 --dtype float32",
    "quantize": "--windows 4 --tokens 64",
    "plan": "--bandwidth 9G/s",
    "perspective views": "--tokens 64",
    "drm geometry": "--text letters.txt --pairs 5 --rounds 3 --points 200",
}
BEFORE = [  # what the examples take for granted
    "perspectron train --data letters.txt --preset lens-tiny --set d_model=32 layers=3 heads=2 hidden=32 "
    "vocab_size=300 --steps 2 --out runs/lens",
    "perspectron train --data letters.txt --preset drm-104k --tokenizer bytes --set d_model=8 hidden=8 emitter=8 "
    "--steps 2 --out runs/drm",
]
ELSEWHERE = (
    "compare",
    "scale",
    "search",
    "ablate",
    "quickstart",
    "adr demo",
    "synthesize",
    "lm-eval",
    "serve",
    "verify",
    "state bisect",
    "state merge",
)  # slow, endless, or of a model that has learnt something
IN_ORDER = ("train", *(name for name in commands() if name != "train"))


def examples(name: str) -> list[str]:
    """The command lines in the help of a command."""
    text = (
        command_of(name).__doc__
        if name != "lm-eval"
        else importlib.import_module("perspectron.cli.harness").HELP
    )
    return [found.strip() for found in re.findall(rf"\bperspectron {name}(?: [^\n]*)?$", text, re.MULTILINE)]


def words(line: str) -> list[str]:
    """The arguments, without what the shell redirects."""
    return shlex.split(re.sub(r" [<>] \S+", "", line))[1:]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("letters", "other"):
        Path(f"{name}.txt").write_text(
            "".join(f"Dear Sir, the cat sat on mat {i} of {name}.\n" for i in range(120))
        )
    Path("letters.toml").write_text(
        '[model]\npreset = "transformer-tiny"\n[train]\ndata = "letters.txt"\nsteps = 2\n[train.optim]\nlr = 4e-3\n'
    )
    pairs = ({"prompt": f"What is {i}?", "completion": f"It is number {i}."} for i in range(60))
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


@pytest.mark.parametrize("name", commands())
def test_every_command_has_examples_and_they_parse(name, folder):
    found = examples(name)
    assert found, name
    for line in found:
        if "--resume" not in line and name != "lm-eval":
            _parse(words(line))


@pytest.mark.slow
def test_the_examples_run_from_an_empty_folder(folder, monkeypatch, capsys):
    write(Path("model.gguf"), folder_of("llama", folder / "model-hf"), "llama")
    lines = [*BEFORE, *(line for name in IN_ORDER if name not in ELSEWHERE for line in examples(name))]
    for line in lines:
        short = line
        for long, less in SHORTER.items():
            short = re.sub(long, less, short)
        name, *rest = words(short)
        if within(name):
            name, *rest = f"{name} {rest[0]}", *rest[1:]
        if "--state" in rest:
            rest += ["--steps", "2", "--seq-len", "32", "--batch-size", "2", "--dtype", "float32"]
        elif "--resume" not in rest and "--train" not in rest:
            rest += QUICK.get(name, "").split()
        read = re.search(r" < (\S+)", line)
        with monkeypatch.context() as patch:
            if read:
                text = io.TextIOWrapper(io.BytesIO(Path(read[1]).read_bytes()[:400]), encoding="utf-8")
                patch.setattr("sys.stdin", text)
            elif name == "chat":
                patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Dear\n")))
            assert main([*name.split(), *rest]) == 0, (short, capsys.readouterr().err)
    assert {"letters", "lens", "open", "routed", "letters-2bit"} <= {
        path.name for path in Path("runs").iterdir()
    }


def test_completion_knows_commands_and_options(folder, capsys):
    assert main(["completion", "bash"]) == 0
    Path("perspectron.bash").write_text(capsys.readouterr().out)
    script = """
        source perspectron.bash
        F=$(complete -p perspectron | sed "s/.*-F \\\\([^ ]*\\\\).*/\\\\1/")
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); $F; echo "${COMPREPLY[@]}"; }
        ask perspectron t; ask perspectron train --min; ask perspectron eval --su; ask perspectron lm
        ask perspectron perspective ro
    """
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert set(said[0].split()) >= {"train", "tokenize"} and "generate" not in said[0]
    assert "--minutes" in said[1] and "--suite" in said[2] and "lm-eval" in said[3]
    assert "routes" in said[4]
