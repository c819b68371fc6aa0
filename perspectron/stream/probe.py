"""Which way of reading is faster on a disk: past the page cache or through it. No way is on every disk."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from perspectron.errors import ConfigError, PerspectronError
from perspectron.files import read_json, write_json
from perspectron.stream.shards import PIECE, Method, ShardFile, aligned

SPAN = 64 << 20  # bytes of the file to read
TURNS = 3
METHODS: tuple[Method, ...] = ("direct", "buffered")


class Disk(NamedTuple):
    """bytes_per_second: of each method that the disk has, as measured once, here or in an earlier run."""

    method: Method
    bytes_per_second: dict[Method, float]

    def __str__(self) -> str:
        rates = sorted(self.bytes_per_second.items(), key=lambda item: item[0] != self.method)
        return ", not ".join(f"{method} {rate / 1e9:.2f} GB/s" for method, rate in rates) or self.method


def probe(path: Path) -> Disk:
    """The faster method for the disk that holds `path`, an expert file.

    Measured once for each disk, then remembered in the user's cache folder. A file of few megabytes says too little
    to be remembered. ArtifactError: the file is missing or malformed.
    """
    memory, key = _memory(), _disk(path)
    known = _known(memory)
    rates = known.get(key)
    if rates is None:
        rates = _measure(path)
        if path.stat().st_size >= 2 * PIECE:
            with contextlib.suppress(PerspectronError):  # it is only a memory
                write_json(memory, known | {key: rates})
    return Disk(max(rates, key=lambda method: rates[method]), rates)


def _measure(path: Path) -> dict[Method, float]:
    """Bytes per second of each method, the best of some turns taken alternately."""
    rates: dict[Method, float] = {}
    size = min(path.stat().st_size, SPAN) // PIECE * PIECE or path.stat().st_size
    buffer = aligned(min(size, PIECE))
    for _ in range(TURNS):
        for method in METHODS:
            with contextlib.suppress(ConfigError), ShardFile(path, method) as file:
                rates[method] = max(rates.get(method, 0.0), file.rate(buffer, size))
    return rates


def _memory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "perspectron" / "disks.json"


def _disk(path: Path) -> str:
    """The device's numbers and the size of its file system."""
    device, system = path.stat().st_dev, os.statvfs(path)
    return f"{os.major(device)}:{os.minor(device)} {system.f_blocks * system.f_frsize}"


def _known(memory: Path) -> dict[str, dict[Method, float]]:
    """What earlier runs measured; nothing, if it cannot be read."""
    with contextlib.suppress(PerspectronError):
        value = read_json(memory, ConfigError)
        if isinstance(value, dict):
            return {key: rates for key, rates in value.items() if _rates(rates)}
    return {}


def _rates(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and set(value) <= set(METHODS)
        and all(type(rate) is float and rate > 0 for rate in value.values())
    )
