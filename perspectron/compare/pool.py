"""Pool of processes: several at once, each alone in its folder, and none outlives this one."""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from perspectron.errors import ConfigError

LOG, LOCK = "log.txt", ".lock"
PAUSE = 0.5  # seconds between looks
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


@contextlib.contextmanager
def alone(folder: Path, patience: float = 0.0) -> Iterator[int]:
    """Lock a folder; the kernel unlocks it when the last process with the lock ends.

    ConfigError when another process still has the lock after `patience` seconds.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"out = '{folder}', must be a folder to write in ({error.strerror})") from None
    until = time.monotonic() + patience
    try:
        while not _locked(descriptor):
            if time.monotonic() >= until:
                raise ConfigError(f"out = '{folder}', must be a folder that no other process works in")
            time.sleep(PAUSE)
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def work(
    jobs: Sequence[Job],
    at_once: int,
    threads: int,
    *,
    ended: Callable[[Ended], None] = lambda _: None,
    look: Callable[[list[Job]], None] = lambda _: None,
) -> None:
    """Run the jobs in order, `at_once` at a time. `ended` is called after each, `look` often with those that run.

    On SIGINT or SIGTERM the running jobs get SIGTERM, save and stop; then StoppedBy is raised. If this process is
    killed, Linux sends them SIGTERM; elsewhere they go on to their end and keep the locks of their folders.
    """
    waiting, running = list(reversed(jobs)), list[_Running]()
    with _caught() as signals:
        while waiting or running:
            while waiting and len(running) < at_once and not signals:
                running.append(_Running(waiting.pop(), threads))
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                ended(one.end())
            if signals:
                for one in running:
                    one.process.terminate()
                for one in running:
                    one.process.wait()
                    one.end()
                raise StoppedBy(signals[0])
            look([one.job for one in running])
            time.sleep(PAUSE)


class _Running:
    """Job that has started."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.start = job, time.perf_counter()
        self.lock = contextlib.ExitStack()
        lock = self.lock.enter_context(alone(job.folder, PATIENCE))
        path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # this package, from any folder
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with (job.folder / LOG).open("ab") as log:
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
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return lines[-1] if lines else ""


def _with_parent() -> None:
    """Ask Linux, in the child before it runs, for SIGTERM when the parent dies."""
    if LIBC is not None:
        LIBC.prctl(PARENT_DEATH, signal.SIGTERM)


@contextlib.contextmanager
def _caught() -> Iterator[list[int]]:
    """Collect the numbers of SIGINT and SIGTERM in place of being stopped by them."""
    numbers: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
