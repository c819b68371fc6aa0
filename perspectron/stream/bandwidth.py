"""How fast bytes come, measured here: from memory, from a disk, to a GPU. Bytes per second; the best of a few tries."""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from perspectron.errors import DataError
from perspectron.stream.shards import PIECE, aligned

BUFFER = 256 << 20
TRIES = 5
LEAST, MOST = 32 << 20, 1 << 30  # bytes of a file that are read


def memory(device: torch.device | str = "cpu") -> float:
    """Reading a buffer that no cache holds, on all threads."""
    data = torch.ones(BUFFER // 8, dtype=torch.int64, device=device)
    read = _native_read() if data.device.type == "cpu" else None
    bytes_N = data.view(torch.uint8)
    return _best(
        BUFFER, data.sum if read is None else lambda: read(bytes_N, torch.get_num_threads()), data.device
    )


def pcie() -> float:
    """From pinned memory to a GPU; there must be one."""
    device = torch.device("cuda")
    there = torch.empty(BUFFER, dtype=torch.uint8, device=device)
    here = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
    return _best(BUFFER, lambda: there.copy_(here, non_blocking=True), device)


def _best(amount: int, work: Callable[[], object], device: torch.device) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return amount / min(seconds() for _ in range(TRIES + 1))


def _native_read() -> Callable[[torch.Tensor, int], object] | None:
    try:
        native = importlib.import_module("perspectron.native")
    except ImportError:
        return None
    return native.read if native.available() else None


def disk(folder: Path) -> float | None:
    """Reading the largest file below a folder once, past the page cache where the file system allows it; None where
    all are too small to tell. DataError where it cannot be read."""
    size, path = max((file.stat().st_size, file) for file in folder.rglob("*") if file.is_file())
    if size < LEAST:
        return None
    try:
        return _read(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path) -> float:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct reads
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        piece, amount, start = memoryview(aligned(PIECE).data), 0, time.perf_counter()
        while amount < MOST and (count := os.preadv(file, [piece], amount)):
            amount += count
            if count < PIECE:
                break  # the end; what follows would not be aligned
        return amount / (time.perf_counter() - start)
    finally:
        os.close(file)
