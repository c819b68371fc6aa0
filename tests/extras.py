"""What needs a package that is not installed is left out, and the run says so; with ALL_TESTS set, as in `.ci/run`, it
fails."""

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests import long

PACKAGES = (
    "accelerate", "axe_playwright_python", "datasets", "fastapi", "fsspec", "gguf", "httpx2",
    "jsonschema", "llguidance", "lm_eval", "mkdocs", "nbclient", "nbformat", "onnx", "onnxruntime", "onnxscript",
    "openai", "peft", "playwright", "prometheus_client", "pyarrow", "schemathesis", "sse_starlette",
    "tenacity", "tensorboard", "trackio", "transformers", "uvicorn", "wandb",
)  # fmt: skip
"""Of the extras that `ci` has and `test` has not, by the names they are imported by."""
ALL = bool(os.environ.get("ALL_TESTS"))
MISSING = re.compile(r"No module named '(\w+)|\b(\w+) is not installed: pip|needs (\w+) \d; install it")


def missing() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def wanted(text: str) -> str | None:
    """The package that a report says is not there."""
    there = (one for found in MISSING.findall(text) for one in found)
    return next((name for name in there if name in missing()), None)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    if report.failed and not ALL and (name := wanted(report.longreprtext)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed and not ALL and (name := wanted(report.longreprtext + report.capstderr)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: needs {name}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if long.is_whole(terminalreporter.config):
        more = "nothing nightly; LONG_TESTS=1" if ALL else "nothing slow; with the extra `ci`, ALL_TESTS=1"
        terminalreporter.write_line(f"of each test at most {long.CASES} cases, and {more} runs more")
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    why = Counter(str(one[2]).removeprefix("Skipped: ") for one in skipped if isinstance(one, tuple))
    for reason, count in why.most_common() if ALL else ():
        terminalreporter.write_line(f"left out, {count}: {reason}")
    if not ALL and (names := missing()):
        said = f"left out: what needs {', '.join(names)}; for those tests, too: pip install '.[ci]'"
        terminalreporter.write_line(said)
