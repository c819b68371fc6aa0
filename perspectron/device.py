"""Which device to run on, and what memory is free."""

import os
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
