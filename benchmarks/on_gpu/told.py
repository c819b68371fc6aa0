"""A plugin of pytest: each test's outcome as a line of JSON in the file TESTS_TOLD, as soon as it has ended."""

import json
import os
from pathlib import Path
from typing import Any

from on_gpu import watch


def pytest_configure() -> None:
    """A run that is cut off leaves no tests behind: it leads a group of its own, which its workers are in."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        watch.end_with(os.getppid())


def pytest_runtest_logreport(report: Any) -> None:
    """Only in the process that has all reports, not in xdist's workers."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    said = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        told = (
            report.longreprtext.splitlines()[-1:]
            if crash is None
            else [f"{crash.message} at {crash.path}:{crash.lineno}"]
        )
        said["error"] = " ".join(" ".join(told).split())[:400]
    with Path(os.environ["TESTS_TOLD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")
