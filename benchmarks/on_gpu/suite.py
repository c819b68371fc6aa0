"""The suite's tests that take a device, run on it: `pytest --device cuda`, a unit for each of the paths.

A test that fails is a result: its name and the first line of its error are written.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from on_gpu.frame import ROOT, Place, Result, Skip, Unit

ABOUT = "the suite's tests of mixers, models, states and decoding, on the device"
LIMIT = 240
FIRST = "table or split_anywhere or rows_do_not or saved_and or resets_and or follows_float64 or autocast or bytes_are"
"""Of the contract's 2,600 tests of mixers, those that come first."""
UNITS = {  # in order of worth: the path, which of its tests, and the seconds that they may take
    "state": ("tests/test_state.py", "", 30),
    "mixers by the contract": ("tests/test_mixers.py", FIRST, 50),
    "model": ("tests/test_model.py", "", 40),
    "decode": ("tests/decode", "", 50),
    "block": ("tests/test_block.py", "", 20),
    "mixers": ("tests/mixers", "", 45),
    "operations": ("tests/ops", "", 45),
    "mixers by the contract, the rest": ("tests/test_mixers.py", f"not ({FIRST})", 60),
}
REHEARSED = {"state": ("tests/test_state.py", "extra_is_empty", 60)}
WORKERS, TEST_SECONDS = 8, 40
MOST = 80  # failures that are named


def units(place: Place) -> Iterator[Unit]:
    for name, (path, only, seconds) in (REHEARSED if place.rehearsed else UNITS).items():
        yield Unit(name, partial(tests, place, name, path, only, seconds), seconds=20)


def tests(place: Place, name: str, path: str, only: str, seconds: float) -> Result:
    """Run the tests of a path, for so many seconds at most; those that ended by then count."""
    for needed in ("pytest", "hypothesis"):
        if importlib.util.find_spec(needed) is None:
            raise Skip(f"{needed} is not installed")
    found = place.folder / f"suite-{name.replace(' ', '-').replace(',', '')}.xml"
    found.unlink(missing_ok=True)
    begun = time.time()
    command = command_of(path, only, place, found)
    code, cut, tail = _run(command, max(5.0, min(seconds, place.left - 18)))
    said = {"command": command[1:], "exit": code, "cut_off": cut, "seconds": round(time.time() - begun, 1)}
    return said | counts(found) | ({} if code in (0, 1) else {"tail": tail})


def command_of(path: str, only: str, place: Place, found: Path) -> list[str]:
    """pytest, on several processes where there is xdist, with a limit for each test where there is pytest-timeout."""
    command = [sys.executable, "-m", "pytest", path, f"--device={place.device.type}", f"--junitxml={found}"]
    command += [
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--tb=short",
    ]
    command += ["--continue-on-collection-errors"]
    command += ["-k", only] if only else []
    if importlib.util.find_spec("xdist") and not place.rehearsed:
        command += ["-n", str(WORKERS), "--dist=worksteal"]
    if importlib.util.find_spec("pytest_timeout") and not place.rehearsed:
        command += [f"--timeout={TEST_SECONDS}"]
    return command


def _run(command: list[str], seconds: float) -> tuple[int, bool, str]:
    """(exit status, whether it was interrupted, the end of what it said)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    cut = False
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        cut = True
        process.send_signal(signal.SIGINT)  # then it writes what it has
        try:
            said, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            said = ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return process.returncode, cut, said[-2000:]


def counts(found: Path) -> dict[str, Any]:
    """Tests that passed, failed and were skipped; the failures by name with the first line of their error; the
    slowest."""
    try:
        cases = list(ElementTree.parse(found).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {"passed": 0, "failed": 0, "skipped": 0, "unread": "no report was written"}
    failed, skipped, slow = [], 0, []
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        slow.append((float(case.get("time", "0")), name))
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is not None:
            failed.append(f"{name}: {_line(fault)}")
        skipped += fault is None and case.find("skipped") is not None
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": failed[:MOST],
        "slowest": [f"{seconds:.1f} s {name}" for seconds, name in sorted(slow, reverse=True)[:5]],
    }


def _line(fault: ElementTree.Element) -> str:
    """The first line of an error, and the last place in the project's own files."""
    places = [line for line in (fault.text or "").splitlines() if line.startswith(("perspectron/", "tests/"))]
    said = (fault.get("message") or "").split("\n")[0]
    return f"{said[:300]}{' at ' + places[-1][:100] if places else ''}"
