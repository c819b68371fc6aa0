"""A pool of processes: several at once, each in its own folder, and none outlives this one."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from perspectron.util.files import append_to, locked, open_file
from perspectron.util.machine import signals

LOG = "log.txt"
TAIL = 1 << 16  # bytes of a log that hold its last line
PAUSE = 0.1  # seconds between looks
PATIENCE = 60.0  # seconds for a process that is still saving after its parent was killed
PARENT_DEATH = 1  # PR_SET_PDEATHSIG
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
HERE = Path(__file__).resolve().parents[2]


class Job(NamedTuple):
    """Command to run. arguments: after `python -m`. folder: in which it works and writes its output (log.txt)."""

    name: str
    folder: Path
    arguments: tuple[str, ...]


class Ended(NamedTuple):
    """End of a job. code: exit code, below zero for a signal. seconds: from start to end. said: last line of output."""

    job: Job
    code: int
    seconds: float
    said: str


class StoppedBy(Exception):
    """A signal ended the work; the jobs that were running have saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def work(
    jobs: Sequence[Job],
    at_once: int,
    threads: int,
    *,
    ended: Callable[[Ended], None] = lambda _: None,
    look: Callable[[list[Job]], None] = lambda _: None,
) -> None:
    """Run the jobs in order, `at_once` at a time. `ended` is called after each, `look` often with those that run.

    On SIGINT, SIGTERM or SIGHUP the running jobs get SIGTERM, save and stop; then StoppedBy is raised. If this process
    is killed, Linux sends them SIGTERM; elsewhere they go on to their end and keep the locks of their folders.
    """
    waiting, running = list(reversed(jobs)), list[_Running]()
    with signals() as caught:
        while waiting or running:
            while waiting and len(running) < at_once and not caught:
                running.append(_Running(waiting.pop(), threads))
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                ended(one.end())
            if caught:
                for one in running:
                    one.process.terminate()
                for one in running:
                    one.process.wait()
                    one.end()
                raise StoppedBy(caught[0])
            look([one.job for one in running])
            time.sleep(PAUSE)
        if caught:  # in the last pause
            raise StoppedBy(caught[0])


class _Running:
    """Job that has started."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.start = job, time.perf_counter()
        self.lock = contextlib.ExitStack()
        lock = self.lock.enter_context(locked(job.folder, patience=PATIENCE))
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # this package, from any folder
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        environment = {"MKL_NUM_THREADS": str(threads)} | environment | {"OMP_NUM_THREADS": str(threads)}
        with append_to(job.folder / LOG) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *job.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, pass_fds=(lock,), preexec_fn=_with_parent, start_new_session=True,
            )  # fmt: skip

    def end(self) -> Ended:
        self.lock.close()
        seconds = time.perf_counter() - self.start
        return Ended(self.job, self.process.returncode, seconds, last_line(self.job.folder))


def last_line(folder: Path) -> str:
    """Last line of the log in a folder; "" where there is none."""
    try:
        with open_file(folder / LOG) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else ""


def _with_parent() -> None:
    """Ask Linux, in the child before it runs, for SIGTERM when the parent dies."""
    if LIBC is not None:
        LIBC.prctl(PARENT_DEATH, signal.SIGTERM)
