"""Standard streams that are closed, full or of few characters; and strangers' words on a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perspectron import presets
from perspectron.cli.main import commands, main
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.config import dump
from perspectron.util.errors import escaped
from tests.long import some

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    {f"{name} helps": [*name.split(), "--help"] for name in commands()}
    | {f"{name} refuses": [*name.split(), "--nosuch"] for name in commands() if name != "lm-eval"}
    | {
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
    }
)
DRIVER = """
import contextlib, io, json, os, sys
from perspectron.cli.main import command_of, commands, console
(arguments, ways), results = json.load(open(sys.argv[1])), open(sys.argv[2], "w")
fresh = sys.stdin, sys.stdout, sys.stderr
saved = [os.dup(number) for number in range(3)]

def closed(*numbers):
    for number in numbers:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)

def onto(path, number):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, number)
    os.close(file)

def ascii():
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")

def gone():
    end, write = os.pipe()
    os.close(end)
    os.dup2(write, 1)
    os.close(write)

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

def called(words):
    sys.argv[1:] = words
    try:
        return console()
    except SystemExit as stop:
        return stop.code

def tell(way, name, ends):
    # ends: the interpreter, too, which writes what is left
    words = arguments[name]
    onto("out", 1)
    onto("err", 2)
    if not ends:
        WAYS[way]()
        code = called(words)
        sys.stdout = sys.stderr = None  # what is left in them is written
    elif not (child := os.fork()):
        WAYS[way]()
        sys.exit(called(words))
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, own in enumerate(saved):
        os.dup2(own, number)
    sys.stdin, sys.stdout, sys.stderr = fresh
    for stream in fresh[1:]:
        stream.reconfigure(encoding="utf-8")
    said = [open(path, "rb").read().decode("latin-1") for path in ("out", "err")]
    print(json.dumps([way, name, code, *said]), file=results, flush=True)

for way in WAYS:
    tell(way, "overview", True)  # before torch is loaded, without which a fork is quick
for name in commands():
    command_of(name)
with contextlib.suppress(ImportError):
    import lm_eval.__main__
for name in arguments:
    for way in ways[name]:
        if name != "overview":
            tell(way, name, name == "lm-eval helps")  # slow, and once a process
"""
WAYS = ("closed input", "closed output", "closed error", "all closed", "full output", "full error", "ASCII")
WAYS += ("nobody reads",)
FEW = dict.fromkeys(("overview", "list", "inspect", "an error", "chat"), WAYS) | {
    "lm-eval helps": ("full output",)
}
"""Ways beside the usual one; of the others two drawn for each command, in `.ci/nightly` all."""


def ways(name: str) -> list[str]:
    return ["as they are", *FEW.get(name, some(WAYS, 2, name))]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple[str, str], tuple[int, str, str]]:
    """(exit code, output, errors) of every command with every kind of streams, in one process: one import of torch."""
    folder = tmp_path_factory.mktemp("streams")
    asked = ARGUMENTS, {name: ways(name) for name in ARGUMENTS}
    (folder / "arguments.json").write_text(json.dumps(asked))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-c", DRIVER, "arguments.json", "results"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == done.stderr == ""
    lines = (folder / "results").read_text().splitlines()
    return {(way, name): tuple(rest) for way, name, *rest in map(json.loads, lines)}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_streams_that_cannot_be_written_or_read_give_no_traceback(ended, name):
    usual, out, _ = ended["as they are", name]
    assert {way for way, other in ended if other == name} == set(ways(name))
    for way in ways(name):
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


@pytest.mark.parametrize("way", ["0", "1"])
def test_errors_are_written_when_they_are_told(way, tmp_path):
    """Not when the program ends: a server's would stay unread. The same for output where Python does not buffer."""
    program = (
        "import os, sys; from perspectron.cli.main import _open_streams; _open_streams();"
        "print('a', file=sys.stderr); print('b'); os._exit(0)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": way if way == "1" else ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("b\n" if way == "1" else "", "a\n")


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


def test_a_long_name_in_a_table_leaves_its_numbers_whole():
    from rich.console import Console

    from perspectron.cli.options import table

    name = "Transformer[optimizer=muon, qk_norm=head, relu2, zero_outputs, first_values]"
    rows = [[name, "1.2345", "2.3456 (2.1–2.6)", "3.4567"], ["KDA", "4"]]  # gaps at the end are empty
    console = Console(width=60, record=True)
    console.print(table("loss", ["", "in windows", "memory carried", "state"], rows))
    shown = console.export_text()
    assert all(
        number in shown for number in ("1.2345", "2.3456", "(2.1–2.6)", "3.4567", "KDA", "relu2", "windows")
    )
    assert max(map(len, shown.splitlines())) <= 60
