"""Waiting in tests: as long as the slowest machine needs, and not longer than the condition takes."""

import time
from collections.abc import Callable

PATIENCE = 900  # seconds after which something hangs, on any machine; a test has more (pyproject.toml)


def until(condition: Callable[[], object], every: float = 0.005) -> None:
    """Wait for a condition. AssertionError: it did not come to hold."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(every)
