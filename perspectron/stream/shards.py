"""Experts read from the file of their layer, never without a check.

What comes back has the bytes that were written, or there is a ShardError; never zeros, and nothing of a file that was
cut or replaced meanwhile. Files are not mapped: a cut one would end the process.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from perspectron.errors import ArtifactError, ConfigError, DataError, ShardError
from perspectron.ops.packing import check
from perspectron.stream import delta
from perspectron.stream.crc import Sums
from perspectron.stream.format import NAMES, PAGE, Bytes, Delta, Digest, Full, Header
from perspectron.stream.parse import parse

PIECE = 4 << 20
HUGE = 2 << 20
RETRIES = 3
BACKOFF = 0.01  # seconds before the first retry; four times as long before each further one
DEADLINE = 30.0  # seconds of reading for one expert

Method = Literal["direct", "buffered"]
Read = Callable[[int, memoryview, int], int]
"""(descriptor, buffer, offset) → bytes read, as os.preadv does."""


class Cancelled(Exception):
    """A read was not wanted any more."""


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def aligned(size: int) -> Bytes:
    """Memory of its own [size], which nothing else holds: on a huge page if it fills one, else on a page."""
    if size < HUGE:
        return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + size]


@cache
def _checkers(pid: int) -> ThreadPoolExecutor:
    """Threads that check a piece while the next one is read, so that the disk does not wait. Each process has its
    own: threads do not survive a fork."""
    return ThreadPoolExecutor(2, "expert-checker")


class ShardFile:
    """One layer's experts. Any number of threads may read at once.

    method: "direct" reads past the page cache, "buffered" through it. read: what reads; for tests.
    ArtifactError: the file is missing or malformed. ConfigError: a method that the disk does not have.
    """

    def __init__(
        self,
        path: Path,
        method: Method = "buffered",
        *,
        read: Read = pread,
        retries: int = RETRIES,
        backoff: float = BACKOFF,
        deadline: float = DEADLINE,
    ) -> None:
        self.path, self._read = path, read
        self.retries, self.backoff, self.deadline = retries, backoff, deadline
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be opened ({error.strerror})") from None
        try:
            self._identity = self._opened()
            self.header: Header = parse(self._bytes, os.fstat(self._fd).st_size, path)
            self.use(method)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def use(self, method: Method) -> None:
        """Read so from now on. ConfigError: a method that the disk does not have."""
        if method == "direct":
            self._go_direct()
        self.method = method

    @property
    def layer(self) -> int:
        return self.header.layer

    def read_into(
        self,
        expert: int,
        buffer: Bytes,
        cancelled: Callable[[], bool] = lambda: False,
        base: Bytes | None = None,
    ) -> int:
        """Fill `buffer` [layout.bytes], which begins on a page, with an expert in full; bytes read from the disk.

        base: memory that holds the expert which this one is stored as changes from, if there is such.
        cancelled: asked before each piece of 4 MiB; Cancelled follows. ShardError: not to be had, whatever was tried.
        """
        entry, layout = self.header.stored(expert), self.header.layout
        assert len(buffer) == layout.bytes
        assert buffer.ctypes.data % PAGE == 0
        if isinstance(entry, Full):
            return self._verified(expert, entry, buffer, cancelled)
        count = 0
        full = self.header.by_expert[entry.of]
        assert isinstance(full, Full)
        if base is None:
            count += self._verified(expert, full, buffer, cancelled)
        else:
            buffer[:] = base
            if layout.digest(buffer) != entry.base:
                raise self._error(
                    expert, f"expert {entry.of}, which it is stored as changes from, was damaged in memory"
                )
        payload = aligned(entry.bytes)
        count += self._verified(expert, entry, payload, cancelled)
        self._apply(expert, entry, buffer, payload)
        return count

    def verify(self) -> None:
        """Read all experts and check what CRCs cannot say: that codes are ternary and scales finite. ShardError."""
        buffer = aligned(self.header.layout.bytes)
        shard = self.header.layout.shard(buffer)
        for entry in self.header.entries:
            if entry is self.header.stored(entry.expert):
                self.read_into(entry.expert, buffer)
                for name, matrix in zip(NAMES, shard, strict=True):
                    try:
                        check(matrix, name)
                    except DataError as error:
                        raise self._error(entry.expert, str(error)) from None

    def rate(self, buffer: Bytes, size: int) -> float:
        """Bytes per second of reading the first `size` bytes from the disk, by pieces of `buffer`, unchecked.

        ConfigError: the disk lets a file be opened for direct reads, but not be read so.
        """
        self._forget(0, size)
        start = time.monotonic()
        try:
            for offset in range(0, size, len(buffer)):
                self._read(self._fd, buffer.data, offset)
        except OSError as error:
            if self.method == "direct" and error.errno == errno.EINVAL:
                raise self._no_direct() from None
            raise ArtifactError(f"{self.path}: cannot be read ({error.strerror})") from None
        return size / max(time.monotonic() - start, 1e-9)

    # ------------------------------------------------------------ opening

    def _opened(self) -> tuple[int, ...]:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{self.path}: not a file")
        return _identity(found)

    def _bytes(self, offset: int, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, offset)
        except OSError as error:
            raise ArtifactError(f"{self.path}: header cannot be read ({error.strerror})") from None

    def _go_direct(self) -> None:
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (OSError, AttributeError):
            raise self._no_direct() from None

    def _no_direct(self) -> ConfigError:
        return ConfigError(f"method = 'direct', must be 'buffered' on the disk of {self.path}")

    # ------------------------------------------------------------ reading

    def _error(self, expert: int, cause: str) -> ShardError:
        return ShardError(self.path, self.layer, expert, cause)

    def _verified(
        self, expert: int, entry: Full | Delta, buffer: Bytes, cancelled: Callable[[], bool]
    ) -> int:
        """Read what is stored for `entry`, for the sake of `expert`, until its CRCs are right."""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 4 ** (attempt - 1))
                self._forget(entry.offset, entry.bytes)
            parts = self.header.layout.parts if isinstance(entry, Full) else (slice(0, entry.bytes),)
            sums = Sums(buffer, parts)
            cause = self._pieces(expert, entry, sums, cancelled) or self._damage(entry, sums)
            self._unchanged(expert)
            if cause is None:
                return entry.bytes * (attempt + 1)
        raise self._error(expert, f"{cause}, {self.retries + 1} times")

    def _pieces(
        self, expert: int, entry: Full | Delta, sums: Sums, cancelled: Callable[[], bool]
    ) -> str | None:
        """Why the buffer of `sums` was not filled; None if it was."""
        view, at, spent = sums.buffer.data, 0, 0.0
        checked: Future[None] | None = None
        try:
            while at < entry.bytes:
                if cancelled():
                    raise Cancelled
                if spent > self.deadline:
                    raise self._error(expert, f"slow disk: {at} of {entry.bytes} bytes in {spent:.3g} s")
                piece = view[at : min(at + PIECE, entry.bytes)]
                start = time.monotonic()
                try:
                    count = self._read(self._fd, piece, entry.offset + at)
                except OSError as error:
                    return f"read error at byte {entry.offset + at} ({error.strerror or error})"
                spent += time.monotonic() - start
                if count <= 0 or (count < len(piece) and count % PAGE):
                    return f"short read at byte {entry.offset + at}: {count} bytes, must be {len(piece)}"
                at += count
                if checked is not None:
                    checked.result()
                checked = _checkers(os.getpid()).submit(sums.go_on, at) if at < entry.bytes else None
            sums.go_on(at)
        finally:
            if checked is not None:
                checked.result()
        return None

    def _damage(self, entry: Full | Delta, sums: Sums) -> str | None:
        if isinstance(entry, Delta):
            return None if sums.values == [entry.crc32c] else "CRC-32C of the changes is wrong"
        for i, (found, wanted) in enumerate(zip(sums.values, entry.digest, strict=True)):
            if found != wanted:
                return f"CRC-32C of the {'scales' if i > 2 else 'codes'} of {NAMES[i % 3]} is wrong"
        end = self.header.layout.parts[-1].stop
        return "bytes after the scales, must be 0" if sums.buffer[end:].any() else None

    def _forget(self, offset: int, size: int) -> None:
        """So that the next read asks the disk, not the page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def _unchanged(self, expert: int) -> None:
        try:
            now = _identity(os.stat(self.path))
        except OSError as error:
            raise self._error(expert, f"file was removed while open ({error.strerror})") from None
        if now != self._identity:
            same = now[:2] == self._identity[:2]
            raise self._error(expert, f"file was {'changed' if same else 'replaced'} while open")

    def _apply(self, expert: int, entry: Delta, buffer: Bytes, payload: Bytes) -> None:
        layout = self.header.layout
        scales = entry.parts(layout)[0]
        end = layout.code_bytes + layout.scale_bytes
        try:
            delta.apply(buffer[: layout.code_bytes], entry, payload, layout)
        except ValueError as error:
            raise self._error(expert, f"changes from expert {entry.of}: {error}") from None
        buffer[layout.code_bytes : end] = payload[scales]
        found: Digest = layout.digest(buffer)
        if found != entry.result:
            raise self._error(expert, f"changes from expert {entry.of} give other weights than they should")


def _identity(found: Any) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
