"""The jobs of a comparison in the tests' own process, as one of their own takes four seconds to import torch. That they
run in processes, and how these end, is tested in test_pool.py and test_run.py."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from perspectron.cli.main import main
from perspectron.compare import measure, pool
from perspectron.compare.pool import LOG, Ended, Job, last_line


def work(
    jobs: Sequence[Job],
    at_once: int,
    threads: int,
    *,
    ended: Callable[[Ended], None] = lambda _: None,
    look: Callable[[list[Job]], None] = lambda _: None,
) -> None:
    """As `pool.work`, one job after the other."""
    for job in jobs:
        start, (module, *arguments) = time.perf_counter(), job.arguments
        job.folder.mkdir(parents=True, exist_ok=True)
        with (
            (job.folder / LOG).open("a") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            code = {"perspectron": main, measure.MODULE: measure.main}[module](arguments)
        ended(Ended(job, code, time.perf_counter() - start, last_line(job.folder)))


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "work", work)
        yield
