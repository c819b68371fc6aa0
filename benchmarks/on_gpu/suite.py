"""The suite's tests that take a device, run on it: `pytest --device cuda`.

A test that fails is a result: its name and its error are written. A run of tests that is cut off keeps those that
ended.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from on_gpu.frame import ROOT, Place, Result, Skip, Unit

ABOUT = "the suite's tests of mixers, models, states and decoding, on the device"
LIMIT = 240
CONTRACT = "table or split_anywhere or rows_do_not or saved_and or resets_and or follows_float64"
CONTRACT += " or autocast or bytes_are" """Of the contract's 2,600 tests of mixers, those that come first."""
MODELS = (
    "tests/model/test_state.py tests/model/test_block.py tests/model/test_model.py"
    " tests/designs/test_mixers.py tests/decode"
)
UNITS = {  # in order of worth: the paths, which of their tests, and the seconds that they may take
    "states, models, decoding and the mixers' contract": (MODELS, f"not test_mixers or {CONTRACT}", 120),
    "mixers and operations": ("tests/designs tests/ops", "", 80),
    "the mixers' contract, the rest": ("tests/designs/test_mixers.py", f"not ({CONTRACT})", 80),
}
REHEARSED = {"states": ("tests/model/test_state.py", "extra_is_empty", 60)}
WORKERS, TEST_SECONDS = 6, 40
MOST = 80  # failures that are named


def units(place: Place) -> Iterator[Unit]:
    for name, (paths, only, seconds) in (REHEARSED if place.rehearsed else UNITS).items():
        yield Unit(name, partial(tests, place, paths, only, seconds), seconds=30)


def tests(place: Place, paths: str, only: str, seconds: float) -> Result:
    """Run tests, for so many seconds at most."""
    for needed in ("pytest", "hypothesis"):
        if importlib.util.find_spec(needed) is None:
            raise Skip(f"{needed} is not installed")
    told, begun = place.folder / ".tests.jsonl", time.time()
    told.unlink(missing_ok=True)
    command = command_of(paths, only, place)
    code, tail = _run(command, told, max(5.0, min(seconds, place.left - 8)))
    said = {
        "command": command[1:],
        "exit": code,
        "cut_off": code is None,
        "seconds": round(time.time() - begun, 1),
    }
    if code not in (0, 1, None) and not told.exists():
        raise RuntimeError(f"exit code {code}: {tail}")
    return said | counts(told) | ({} if code in (0, 1, None) else {"tail": tail})


def command_of(paths: str, only: str, place: Place) -> list[str]:
    """pytest, on several processes where there is xdist, with a limit for each test where there is pytest-timeout."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        *paths.split(),
        f"--device={place.device.type}",
        "-p",
        "on_gpu.told",
    ]
    command += ["-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += ["--tb=short", "--continue-on-collection-errors", *(["-k", only] if only else [])]
    if importlib.util.find_spec("xdist") and not place.rehearsed:
        command += ["-n", str(WORKERS)]
    if importlib.util.find_spec("pytest_timeout"):
        command += [f"--timeout={TEST_SECONDS}"]
    return command


def _run(command: list[str], told: Path, seconds: float) -> tuple[int | None, str]:
    """(exit status, None if it was cut off; the end of what it said)."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TESTS_TOLD": str(told)}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said[-2000:]
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def counts(told: Path) -> dict[str, Any]:
    """Tests that passed, failed and were skipped; the failures by name with their errors; the slowest."""
    lines: list[dict[str, Any]] = []
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the last one may be cut
                lines.append(json.loads(line))
    count = Counter(line["outcome"] for line in lines)
    slow = sorted(((line["seconds"], line["test"]) for line in lines), reverse=True)[:5]
    return {
        **{outcome: count[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": [f"{line['test']}: {line['error']}" for line in lines if line["outcome"] == "failed"][
            :MOST
        ],
        "slowest": [f"{seconds:.1f} s {name}" for seconds, name in slow],
    }
