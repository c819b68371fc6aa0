"""Which device to run on, and what memory is free."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from perspectron.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one. ConfigError when it is not there."""
    there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        name = "cuda" if len(there) > 1 else "cpu"
    if (f"{name}:0" if name == "cuda" else name) not in there:
        raise ConfigError(f"device = {name!r}, must be one that this machine has: auto, {', '.join(there)}")
    return torch.device(name)


def free_memory() -> int:
    """Bytes that can be had without swapping."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_AVPHYS_PAGES"))


def return_memory() -> None:
    """Have large blocks given back to the system when they are freed. The C library keeps them once it has seen one
    freed, and pieces of what a prompt took stay for good: 80 MB in full size."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
