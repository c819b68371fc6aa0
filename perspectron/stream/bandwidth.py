"""How fast bytes come, measured here: from memory, from a disk, to a GPU. Bytes per second; the best of a few tries."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from perspectron import native
from perspectron.errors import ArtifactError
from perspectron.stream.probe import probe

BUFFER = 256 << 20
TRIES = 5
LEAST = 32 << 20  # bytes of a file that is read


def memory(device: torch.device | str = "cpu") -> float:
    """Reading a buffer that no cache holds, on all threads."""
    data = torch.ones(BUFFER // 8, dtype=torch.int64, device=device)
    bytes_N = data.view(torch.uint8)
    ours = data.device.type == "cpu" and native.available()
    read = (lambda: native.read(bytes_N, native.threads())) if ours else data.sum
    return _best(BUFFER, read, data.device)


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


def disk(path: Path) -> float | None:
    """Reading an expert file in the way that is faster on its disk; None where it is too small to tell. ArtifactError
    where it cannot be read."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    if path.stat().st_size < LEAST:
        return None
    return max(probe(path).bytes_per_second.values())
