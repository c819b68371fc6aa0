"""Reading experts from their layer's file, always with a check.

A read returns the bytes that were written or raises ShardError; it never returns zeros or parts of a file that was
truncated or replaced meanwhile. Files are not mapped, because a truncated one would end the process.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Literal

from xxhash import xxh3_64

from perspectron.ops.packing import check
from perspectron.stream.expert_file import Header, parse
from perspectron.stream.tensors import PAGE, Bytes, aligned
from perspectron.util.errors import ArtifactError, ConfigError, DataError, ShardError

PIECE = 4 << 20  # bytes read at a time: between pieces a read can be given up
FIRST = 64 << 10  # bytes of the first piece of a file, before it is known how fast its disk is
SHARE = (
    1 / 8
)  # of the deadline, which a piece may take at the speed of the one before: on a slow disk pieces are smaller
RETRIES = 3
BACKOFF = 0.01  # seconds before the first retry; four times as long before each further one
DEADLINE = 30.0  # seconds of reading for one expert

Method = Literal["direct", "buffered"]
Read = Callable[[int, memoryview, int], int]
"""(descriptor, buffer, offset) → bytes read, as os.preadv does."""


class Cancelled(Exception):
    """A read was not wanted any more. count: bytes that were read of it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


@cache
def _checkers(pid: int) -> ThreadPoolExecutor:
    """Threads that check a piece while the next one is read, so that the disk does not wait. Each process has its
    own: threads do not survive a fork."""
    return ThreadPoolExecutor(2, "expert-checker")


class Digests:
    """Running xxh3_64 of the parts of a buffer that fills from its start."""

    def __init__(self, buffer: Bytes, parts: Sequence[slice]) -> None:
        self.buffer, self.parts = buffer, parts
        self._hashes = [xxh3_64() for _ in parts]
        self._at = 0

    def go_on(self, end: int) -> None:
        """Take in what was filled since the last call, up to `end`."""
        for part, hashed in zip(self.parts, self._hashes, strict=True):
            start, stop = max(self._at, part.start), min(end, part.stop)
            if start < stop:
                hashed.update(self.buffer[start:stop].data)
        self._at = end

    def values(self) -> tuple[str, ...]:
        return tuple(hashed.hexdigest() for hashed in self._hashes)


class ShardFile(AbstractContextManager["ShardFile"]):
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
        self._most = FIRST
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be opened ({error.strerror})") from None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path}: not a file")
            self._identity = _identity(status)
            self.header: Header = parse(self._bytes, status.st_size, path)
            self.use(method)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def use(self, method: Method) -> None:
        """Read by this method from now on. ConfigError: the disk does not have it."""
        if method == "direct":
            try:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            except (OSError, AttributeError):
                raise self._no_direct() from None
        self.method = method

    @property
    def layer(self) -> int:
        return self.header.layer

    def read_into(self, expert: int, buffer: Bytes, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Fill `buffer` [layout.bytes], which begins on a page, with an expert; return the bytes read from the disk.

        cancelled: asked before each piece of at most 4 MiB; Cancelled if true. ShardError: retries failed, too.
        """
        layout, offset = self.header.layout, self.header.offset(expert)
        assert len(buffer) == layout.bytes
        assert buffer.ctypes.data % PAGE == 0
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 4 ** (attempt - 1))
                self._forget(offset, layout.bytes)
            digests = Digests(buffer, layout.parts)
            try:
                cause = self._pieces(expert, offset, digests, cancelled) or self._damage(expert, digests)
            except Cancelled as gone:
                raise Cancelled(gone.count + attempt * layout.bytes) from None
            self._unchanged(expert)
            if cause is None:
                return layout.bytes * (attempt + 1)
        raise self._error(expert, f"{cause}, {self.retries + 1} times")

    def verify(self) -> None:
        """Read all experts and check what digests cannot say: that codes are of their format and scales
        finite. ShardError."""
        buffer = aligned(self.header.layout.bytes)
        shard = self.header.layout.shard(buffer)
        for expert in self.header.stored:
            self.read_into(expert, buffer)
            for name, matrix in zip(self.header.layout.matrices, shard, strict=True):
                try:
                    check(matrix, name)
                except DataError as error:
                    raise self._error(expert, str(error)) from None

    def rate(self, buffer: Bytes, start: int, size: int) -> float:
        """Bytes per second of reading `size` bytes from the disk, by pieces of `buffer`, unchecked.

        ConfigError: the disk lets a file be opened for direct reads, but not be read so.
        """
        self._forget(start, size)
        began = time.monotonic()
        try:
            for offset in range(start, start + size, len(buffer)):
                self._read(self._fd, buffer.data, offset)
        except OSError as error:
            if self.method == "direct" and error.errno == errno.EINVAL:
                raise self._no_direct() from None
            raise ArtifactError(f"{self.path}: cannot be read ({error.strerror})") from None
        return size / max(time.monotonic() - began, 1e-9)

    # ------------------------------------------------------------ opening

    def _bytes(self, offset: int, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, offset)
        except OSError as error:
            raise ArtifactError(f"{self.path}: header cannot be read ({error.strerror})") from None

    def _no_direct(self) -> ConfigError:
        return ConfigError(f"method = 'direct', must be 'buffered' on the disk of {self.path}")

    # ------------------------------------------------------------ reading

    def _error(self, expert: int, cause: str) -> ShardError:
        return ShardError(self.path, self.layer, expert, cause)

    def _pieces(
        self, expert: int, offset: int, digests: Digests, cancelled: Callable[[], bool]
    ) -> str | None:
        """Fill the buffer of `digests` piece by piece, each hashed while the next is read; the cause if it failed."""
        view, at, spent = digests.buffer.data, 0, 0.0
        checked: Future[None] | None = None
        try:
            while at < len(view):
                if cancelled():
                    raise Cancelled(at)
                if spent > self.deadline:
                    raise self._error(expert, f"slow disk: {at} of {len(view)} bytes in {spent:.3g} s")
                piece = view[at : at + min(self._most, PIECE)]
                start = time.monotonic()
                try:
                    count = self._read(self._fd, piece, offset + at)
                except OSError as error:
                    return f"read error at byte {offset + at} ({error.strerror or error})"
                took = time.monotonic() - start
                spent += took
                if count <= 0 or (count < len(piece) and count % PAGE):
                    return f"short read at byte {offset + at}: {count} bytes, must be {len(piece)}"
                at += count
                self._most = max(PAGE, int(count / max(took, 1e-9) * self.deadline * SHARE) // PAGE * PAGE)
                if checked is not None:
                    checked.result()
                checked = _checkers(os.getpid()).submit(digests.go_on, at) if at < len(view) else None
            digests.go_on(at)
        finally:
            if checked is not None:
                checked.result()
        return None

    def _damage(self, expert: int, digests: Digests) -> str | None:
        pairs = zip(self.header.layout.names, digests.values(), self.header.digests_of(expert), strict=True)
        return next((f"digest of {part} is wrong" for part, value, wanted in pairs if value != wanted), None)

    def _forget(self, offset: int, size: int) -> None:
        """Drop the file from the page cache, so that the next read asks the disk."""
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


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
