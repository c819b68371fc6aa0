"""Progress on standard error, for commands that take longer than a few seconds."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from perspectron.util.numbers import duration

QUIET = 5.0  # seconds before anything is said
EVERY = {
    True: 0.5,
    False: 10.0,
}  # seconds between two lines: on a terminal, where one is written over, and elsewhere
_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextmanager
def silence(wanted: bool = True) -> Iterator[None]:
    """Context in which work tells nothing of itself, if that is wanted."""
    token = _silent.set(wanted)
    try:
        yield
    finally:
        _silent.reset(token)


def silent() -> bool:
    """True within `silence`."""
    return _silent.get()


class Work:
    """`with Work("reading the prompt") as work: …`: after some seconds it tells what is done and for how long, and the
    time left once `tell` has said how much of it is done. Nothing is left of it on a terminal."""

    def __init__(self, what: str, *, quiet: float = QUIET) -> None:
        self.what, self.quiet = what, quiet
        self._done, self._total = 0, 0
        self._read: list[tuple[float, int, float]] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._shown = False

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        if silent():
            self.stop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def tell(self, done: int, total: int) -> None:
        """Report that so many of so many are done."""
        self._done, self._total = done, total

    def read(self, size: int, share: float) -> None:
        """Report that so many bytes of text are done, and which share of all, counting what was done before."""
        self._read = [*self._read[:1], (time.monotonic(), size, share)]

    def stop(self) -> None:
        """Say nothing more; it may be called again."""
        self._over.set()
        with self._lock:
            if self._shown and self._terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def line(self) -> str:
        """The line as it reads now."""
        spent = time.monotonic() - self._start
        if len(self._read) == 2:
            return f"{self.what}: {self._speed()}"
        if not 0 < self._done < self._total:
            return f"{self.what}: {duration(spent)} so far"
        left = spent * (self._total - self._done) / self._done
        return f"{self.what}: {self._done:,} of {self._total:,}, about {duration(left)} left"

    def _speed(self) -> str:
        """The text read so far, how fast, and the time left where it is known."""
        (began, first, start), (now, size, share) = self._read
        each = max(now - began, 1e-9)
        said = f"{size / 1e6:,.0f} MB of text, {(size - first) / 1e6 / each:.1f} MB/s"
        if share <= start:
            return said
        left = each * (1 - share) / (share - start) - (time.monotonic() - now)
        return f"{said}, about {duration(max(left, 0))} left"

    def _run(self) -> None:
        wait = self.quiet
        while not self._over.wait(wait):
            wait = EVERY[self._terminal]
            with self._lock:
                if self._over.is_set():
                    return
                line = f"perspectron: {self.line()}"
                if self._terminal:
                    line = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K"
                print(line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)
                self._shown = True
