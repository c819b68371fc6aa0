"""Every command as a user runs it: in a process of its own, from an empty folder, with the package that is installed.

Where none is (a checkout on PYTHONPATH), it is that of the checkout.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perspectron.cli.main import about, command_of, within
from perspectron.cli.main import commands as commands_there

SILENT = (
    "train",
    "compare",
    "scale",
    "chat",
    "state read",
    "state rebase",
)  # they say what they do on standard error, chat what it is asked
ROOT = Path(__file__).parents[2]
QUIET = {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
SIZES = "d_model=32 layers=4 hidden=32 rank=8 heads=2 kv_heads=1 window=16 vocab_size=300 torus=[2,2]"
LENS = "d_model=32 layers=3 heads=2 hidden=32 vocab_size=300"
STEPS = "--steps 3 --batch-size 2 --seq-len 32 --eval-every 0 --save-every 0 --eval-tokens 64 --dtype float32"
COMPARE = (
    "--tokens 640 --seeds 1 --seq-len 32 --batch-size 4 --rates 0.004 --warmups 0.1 --dtype float32 "
    "--suites calibration"
)

SCALE = "--seeds 1 --seq-len 32 --batch-size 4 --rates 0.004 --dtype float32"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Without PYTHONPATH, if the package is found without it."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | QUIET
    command = [sys.executable, "-c", "import perspectron.cli.main"]
    found = subprocess.run(command, cwd=tmp_path_factory.mktemp("empty"), env=plain, capture_output=True)
    return plain if found.returncode == 0 else plain | {"PYTHONPATH": str(ROOT)}


DRIVER = """
import contextlib, io, json, sys
from perspectron.cli.main import main
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = main(arguments)
        except SystemExit as stop:  # help
            code = stop.code or 0
    print(json.dumps([code, out.getvalue()]), flush=True)
    assert code == 0, arguments
"""


def run(environment: dict[str, str], folder: Path, commands: list[tuple[str, ...]]) -> list[str]:
    """What each command writes. AssertionError, with what was said, when one fails.

    They run one after the other in one process, which imports torch once.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        env=environment,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line)[1] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_command_from_an_empty_folder(tmp_path, environment):
    (tmp_path / "text").mkdir()
    for i in range(6):
        words = f"the cat sat on mat number {i}, and the dog sat on the log. " * 60
        (tmp_path / "text" / f"{i}.txt").write_text(words)
    train, sizes = ("train", "--data", "text", *STEPS.split()), SIZES.split()
    trace = ("--text", "text/0.txt", "--tokens", "64")
    cost = ("--suite", "cost", "--set", "contexts=[16]", "rounds=1", "visit=1", "seconds=0", "batch_size=2")
    speeds = ("--bandwidth", "9G/s", "--disk", "1G/s")
    commands = [
        (*train, "--preset", "perspective-tiny", "--out", "routed", "--set", *sizes, "ffn=routed"),
        (*train, "--preset", "lens-tiny", "--out", "lens", "--set", *LENS.split()),
        ("quickstart", "--out", "tour", "--data", "text", "--steps", "2"),
        ("tokenize", "text", "--out", "corpus", "--vocab-size", "280"),
        ("quantize", "routed", "--out", "packed", "--calibrate", "none"),
        ("export", "routed", "--hf", "exported"),
        ("import", "exported", "--out", "imported"),
        ("synthesize", "perspective-tiny", "--experts", "2", "--data", "text", "--out", "random", "--set", *sizes),
        *(("generate", folder, "the cat", "--max-tokens", "4") for folder in ("routed", "packed", "random")),
        ("generate", "packed", "--bench", "--max-tokens", "3"),
        *(("eval", folder) for folder in ("routed", "packed")),
        ("eval", "routed", *cost),
        ("perspective", "adapt", "routed", "--text", "text/0.txt", "--tokens", "100", "--every", "50"),
        ("perspective", "trace", "routed", *trace),
        ("plan", "packed", "--ram", "1G", "--trace", "routed/trace.json", *speeds),
        ("perspective", "routes", "packed", *trace),
        ("lens", "prune-attention", "lens", "--blocks", "1", "--context", "64"),
        *(("inspect", model) for model in ("perspective-1t", "lens-gpt2-124m", "routed", "packed")),
        ("list",),
        ("compare", "--designs", "ssd", "--params", "120k", "--data", "text", "--out", "compared",
         "--vocab-size", "300", *COMPARE.split()),
        ("scale", "--designs", "ssd", "--sizes", "120k", "--per-parameter", "0.005", "--data", "text", "--out",
         "scaled", "--vocab-size", "300", *SCALE.split()),
        ("search", "--help"),
        ("convert", "--help"),
        ("ablate", "lens"),
        ("serve", "--help"),
        ("verify", "packed", "--here"),
        ("selftest", "--device", "cpu"),
        ("perspective", "views", "--help"),
        ("perspective", "safety", "--help"),
        ("adr", "demo", "--help"),
        ("drm", "geometry", "--help"),
        ("perspective", "gate", "routed"),
        ("lm-eval", "--help"),
        ("chat", "routed"),
        ("state", "read", "text/0.txt", "--run", "routed", "--out", "a.state"),
        ("state", "read", "text/1.txt", "--run", "routed", "--out", "b.state"),
        ("state", "log", "a.state", "--run", "routed"),
        ("state", "diff", "a.state", "b.state", "--run", "routed", "--on", "the cat"),
        ("state", "bisect", "--help"),
        ("state", "rebase", "a.state", "--run", "routed", "--onto", "b.state", "--out", "c.state"),
        ("state", "merge", "--help"),
        ("completion", "bash"),
    ]  # fmt: skip
    said = run(environment, tmp_path, commands)
    asked = {f"{name} {more[0]}" if within(name) else name for name, *more in commands}
    assert asked == set(commands_there())
    assert all(
        text
        for text, (name, *words) in zip(said, commands, strict=True)
        if not {name, " ".join((name, *words[:1]))} & {*SILENT}
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"]])
def test_answers_that_do_not_wait_for_torch(arguments, tmp_path, environment):
    """In 0.4 s of a processor that is not busy; the bound here is generous."""
    program = (
        "import sys, time; from perspectron.cli.main import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "assert time.process_time() < 1, time.process_time(); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", commands_there())
def test_the_overview_says_what_a_command_says_of_itself(name):
    assert about(name) == " ".join(command_of(name).__doc__.split("\n\n")[0].split())


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_the_program_says_how_long_threads_spin_before_torch_is_loaded(given, found, tmp_path, environment):
    program = (
        "import os, sys; sys.argv[1:] = ['--version']; from perspectron.cli.main import console;"
        "console(); assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    clean = {k: v for k, v in environment.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[1:] == [str(found)], done.stderr
