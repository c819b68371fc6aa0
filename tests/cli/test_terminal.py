"""Standard streams that are closed, full or of few characters; and strangers' words on a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perspectron import presets
from perspectron.cli.main import COMMANDS, main
from perspectron.config import dump
from perspectron.errors import escaped
from perspectron.train.config import RunConfig, TrainConfig

ROOT = Path(__file__).parents[2]
ARGUMENTS = {name: [name, "--help"] for name in COMMANDS} | {
    "overview": ["--help"],
    "nothing": [],
    "version": ["--version"],
    "list": ["list"],
    "inspect": ["inspect", "perspective-tiny"],
    "inspect as JSON": ["inspect", "perspective-tiny", "--json"],
    "plan": ["plan", "perspective-1t", "--ram", "24G", "--bandwidth", "9G/s", "--disk", "1G/s"],
    "completion": ["completion", "bash"],
    "an error": ["inspect", "nosuch-é"],
    "a missing run": ["generate", "nosuch", "a"],
    "chat": ["chat", "nosuch"],
    "lm-eval": ["lm-eval"],
}
DRIVER = """
import io, json, os, sys
arguments = json.load(open(sys.argv[1]))
from importlib import import_module
from perspectron.cli.main import COMMANDS, command_of, console
for name in COMMANDS:
    command_of(name)

def closed(*numbers):
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)

def onto(path, number):
    os.dup2(os.open(path, os.O_WRONLY), number)

def ascii():
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")

def gone():
    end, write = os.pipe()
    os.close(end)
    os.dup2(write, 1)

WAYS = {
    "as they are": lambda: None,
    "closed input": lambda: closed(0),
    "closed output": lambda: closed(1),
    "closed error": lambda: closed(2),
    "all closed": lambda: closed(0, 1, 2),
    "full output": lambda: onto("/dev/full", 1),
    "full error": lambda: onto("/dev/full", 2),
    "ASCII": ascii,
    "nobody reads": gone,
}
for way, set_up in WAYS.items():
    for name, words in arguments.items():
        if words[-1:] == ["--help"] and way != "full output":
            continue  # they all print alike
        out, err = (f"{way}-{name}.{end}" for end in ("out", "err"))
        sys.stdout.flush()
        if not (child := os.fork()):
            for path, number in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
            set_up()
            sys.argv[1:] = words
            sys.exit(console())  # and the end of the interpreter, which writes what is left
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [open(path, "rb").read().decode("latin-1") for path in (out, err)]
        print(json.dumps([way, name, code, *said]), flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple[str, str], tuple[int, str, str]]:
    """(exit code, output, errors) of every command with every kind of streams."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "arguments.json").write_text(json.dumps(ARGUMENTS))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", DRIVER, "arguments.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(way, name): tuple(rest) for way, name, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_streams_that_cannot_be_written_or_read_give_no_traceback(ended, name):
    usual, out, _ = ended.get(("as they are", name), (0, "help", ""))
    for way in [way for way, other in ended if other == name]:
        code, _, err = ended[way, name]
        assert "Traceback" not in err and "ignored" not in err, (way, err)
        if not out or way in ("as they are", "closed input", "closed error", "full error", "ASCII"):
            assert code == usual, (way, code, err)
        elif way == "nobody reads":
            assert (code, err) == (141, ""), (way, code, err)
        else:
            assert code == 74, (way, code, err)
            assert way == "all closed" or err.splitlines()[-1].startswith(
                "perspectron: error: standard output: not written ("
            ), (way, err)


@pytest.mark.parametrize("name", ["inspect", "list", "an error"])
def test_what_ascii_cannot_show_is_escaped(ended, name):
    code, out, err = ended["ASCII", name]
    assert (out + err).isascii() and code == ended["as they are", name][0]
    if name == "an error":
        assert "nosuch-\\xe9" in err


@pytest.fixture
def strangers(tmp_path) -> Path:
    """A run whose config names itself as a terminal would obey it."""
    config = dump(RunConfig(presets.get("perspective-tiny"), TrainConfig(data="text")))
    config["model"]["name"] = "\x1b[2J\x1b]0;title\x07[red]name\u202e"
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_inspect_escapes_a_strangers_name(strangers, capsys):
    assert main(["inspect", str(strangers)]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[2J\x1b]0;title\x07[red]name\u202e: parameters" in out
    assert escaped(out, "\n") == out
    assert main(["inspect", str(strangers), "--json"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_warnings_and_errors_escape_a_strangers_name(strangers, capsys):
    assert main(["generate", str(strangers), "a"]) == 2
    program = "import warnings; from perspectron.cli.main import _warn; _warn('a\x1b[2J b\\n c')"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.stderr == "perspectron: warning: a\\x1b[2J b c\n"


def test_consoles_show_no_markup_and_no_commands_of_others(capsys):
    from perspectron.cli.console import progress
    from perspectron.cli.options import say, table

    progress().print("a\x1b[2Jb [red]c")
    say("d\x1b[2J\re")
    progress().print(table("[red]t\x1b", ["[b]h", "i"], [["[i]r\x1b[2J", "1"]]))
    err = capsys.readouterr().err
    assert "\x1b" not in err
    for text in (
        "a\\x1b[2Jb [red]c\n",
        "perspectron: d\\x1b[2J\\re\n",
        "[red]t\\x1b",
        "[b]h",
        "[i]r\\x1b[2J",
    ):
        assert text in err


def test_a_model_commands_no_terminal(monkeypatch):
    from perspectron.cli.options import spoken

    text = "a\x1b[2J\tb\r\n\u200dc\x9b"
    assert spoken(text) == text  # to a file as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert spoken(text) == "a\\x1b[2J\tb\\r\n\u200dc\\x9b"
