"""Measured bandwidths in bytes per second: memory, a disk by each reading method, copies to a GPU."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perspectron import native
from perspectron.stream.cache import READERS
from perspectron.stream.reader import PIECE, Method, ShardFile
from perspectron.stream.tensors import Bytes, aligned
from perspectron.util.errors import ArtifactError, ConfigError
from perspectron.util.machine import seconds_of

BUFFER = 256 << 20
TRIES = 6
LEAST = 32 << 20  # bytes of a file that is large enough to tell how fast its disk is
SPAN = 64 << 20  # bytes of a file to read
TURNS = 3
METHODS: tuple[Method, ...] = ("direct", "buffered")
PAYS = 1.2
"""Least speed-up for which a second reader is used: it reads for the layer after next, where guesses are wrong more
often."""


def reading(bytes_N: Tensor) -> float:
    """Bandwidth of reading a tensor's memory, on its device, by all threads."""
    words = bytes_N[: len(bytes_N) // 8 * 8].view(torch.int64)
    ours = bytes_N.is_cpu and native.available()
    return _rate(lambda: native.read(bytes_N, native.threads()) if ours else words.sum(), bytes_N)


def memory(device: torch.device | str = "cpu") -> float:
    """Bandwidth of reading a buffer that no cache can hold."""
    bytes_N = torch.ones(BUFFER, dtype=torch.uint8, device=device)
    return max(reading(bytes_N) for _ in range(TRIES))


def pcie() -> float:
    """Bandwidth of copies from pinned memory to a GPU; there must be one."""
    there = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
    here = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    return max(_rate(lambda: there.copy_(here, non_blocking=True), there) for _ in range(TRIES))


def _rate(work: Callable[[], object], touched: Tensor) -> float:
    return touched.nbytes / seconds_of(work, touched.device)


class Disk(NamedTuple):
    """The faster method of reading a disk: past the page cache or through it; no way is the faster on every disk.

    bytes_per_second: of each method that the disk has. readers: how many at once are worth it."""

    method: Method
    bytes_per_second: dict[Method, float]
    readers: int = READERS

    def __str__(self) -> str:
        rates = sorted(self.bytes_per_second.items(), key=lambda item: item[0] != self.method)
        speeds = ", not ".join(f"{method} {rate / 1e9:.2f} GB/s" for method, rate in rates) or self.method
        return f"{speeds}; {self.readers} reader{'s' if self.readers > 1 else ''}"


def _together(file: ShardFile, pool: ThreadPoolExecutor, buffers: Sequence[Bytes], half: int) -> float:
    """Bytes per second of two readers, of half as many bytes each."""

    def read() -> None:
        list(pool.map(lambda i: file.rate(buffers[i], i * half, half), range(2)))

    return 2 * half / seconds_of(read, torch.device("cpu"))


def disk(path: Path) -> float | None:
    """Bandwidth of reading an expert file by the faster method; None if it is too small to tell. ArtifactError: it
    cannot be read."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    return None if path.stat().st_size < LEAST else max(probe(path).bytes_per_second.values())


def probe(path: Path, methods: Sequence[Method] = METHODS) -> Disk:
    """The faster of some methods for the disk that holds `path`, an expert file, and whether two readers pay: the best
    of some turns taken alternately.

    ArtifactError: the file is missing or malformed. ConfigError: the disk has none of the methods.
    """
    rates: dict[Method, float] = {}
    size = min(path.stat().st_size, SPAN) // PIECE * PIECE or path.stat().st_size
    buffers = [aligned(min(size, PIECE)) for _ in range(2)]
    for _ in range(TURNS):
        for method in methods:
            with contextlib.suppress(ConfigError), ShardFile(path, method) as file:
                rates[method] = max(rates.get(method, 0.0), file.rate(buffers[0], 0, size))
    if not rates:
        raise ConfigError(f"method = {methods[0]!r}, must be 'buffered' on the disk of {path}")
    best = max(rates, key=lambda method: rates[method])
    half = size // 2 // PIECE * PIECE
    if not half:
        return Disk(best, rates)
    with ShardFile(path, best) as file, ThreadPoolExecutor(2) as pool:
        together = max(_together(file, pool, buffers, half) for _ in range(TURNS))
    return Disk(best, rates, 2 if together > PAYS * rates[best] else 1)
