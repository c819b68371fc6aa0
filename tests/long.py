"""How much of the tests runs.

`pytest` alone is for somebody who has just installed: of each function a few cases, and nothing that takes long.
`.ci/run`, which sets ALL_TESTS, runs every function but the nightly ones, with some more of its cases. With a folder
or a file named, all cases run but what is rare and slow, or one of thousands that are alike. Everything runs where
LONG_TESTS is set, as `.ci/nightly` does it, or where a test is asked for by its name (FILE::TEST).

@pytest.mark.slow: left out of `pytest` alone.
@pytest.mark.nightly: left out where LONG_TESTS is not set.
@pytest.mark.few(count, each="name"): so many of the function's cases, for each value of that argument if there is one;
always the same ones, drawn so that functions and values take different cases. `.ci/run` has half as many.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

LONG = bool(os.environ.get("LONG_TESTS"))
ALL = bool(os.environ.get("ALL_TESTS")) or LONG
CASES = 4 if ALL else 2
"""Of a function that is not marked `few`, where nothing is named."""
MARKERS = (
    "slow: runs where ALL_TESTS is set, or its file is named",
    "nightly: runs where LONG_TESTS is set",
    "few(count, each=None): so many cases of the function run where LONG_TESTS is not set",
)
T = TypeVar("T")


def length(long: T, short: T) -> T:
    return long if LONG else short


def some(cases: Sequence[T], count: int, seed: object) -> list[T]:
    """All of the cases, in the short form so many of them, in their order."""
    if LONG or len(cases) <= count:
        return list(cases)
    kept = random.Random(str(seed)).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(kept)]


def is_whole(config: pytest.Config) -> bool:
    """True for `pytest` alone, in its processes, too: with no path, and nothing that chooses tests."""
    chosen = (
        "keyword",
        "markexpr",
        "lf",
        "failedfirst",
    )  # the last two are of the cache, which may be switched off
    alone = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return not LONG and alone and not any(config.getoption(name, None) for name in chosen)


def drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests where nothing is named, of those of the short form."""
    functions: dict[str, list[str]] = {}
    kept = set[str]()
    for item in items:
        if ALL and item.get_closest_marker("few"):
            kept.add(item.nodeid)
        elif ALL or item.get_closest_marker("slow") is None:
            functions.setdefault(item.nodeid.split("[")[0], []).append(item.nodeid)
    for name, cases in functions.items():
        kept.update(random.Random(name).sample(cases, min(CASES, len(cases))))
    return [item for item in items if item.nodeid in kept]


def shortened(items: list[pytest.Item], whole: bool) -> list[pytest.Item]:
    """The tests of the short form: without what is nightly, and with few cases where a mark says so, of all tests
    (`is_whole`) with half as many."""
    functions: dict[tuple[str, object], list[pytest.Item]] = {}
    kept = set[str]()
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and hasattr(item, "callspec"):
            value = item.callspec.params.get(few.kwargs.get("each"))
            functions.setdefault((item.nodeid.split("[")[0], value), []).append(item)
        elif item.get_closest_marker("nightly") is None:
            kept.add(item.nodeid)
    for key, cases in functions.items():
        count: int = cases[0].get_closest_marker("few").args[0]
        kept.update(item.nodeid for item in some(cases, max(1, count // 2) if whole else count, key))
    return [item for item in items if item.nodeid in kept]


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Modules with slow tests come first. Processes take tests from the end of one another's lists, so these modules
    stay whole, and what their tests share is made once."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    return sorted(items, key=lambda item: item.path not in slow)
