"""The record of a selftest: a file in the cache for each machine, device and set of versions that was tested."""

import functools
import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from perspectron.util.errors import BackendError, PerspectronError, StorageError
from perspectron.util.files import cache_folder, read_json, write_json
from perspectron.util.version import __version__

OPS = Path(__file__).parents[1]
TESTS = ("selftest.py", "case.py", "cases.py", "layer_cases.py")
SOURCES = (*sorted((OPS / "triton").rglob("*.py")), *(OPS / name for name in TESTS))


@functools.cache
def version() -> str | None:
    """The version of triton; None where it is not installed."""
    if find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build of another name
        return "unknown"


def conditions(device: torch.device) -> dict[str, str]:
    """The machine, the device and the versions of a selftest, and a digest of what runs the kernels and tests them."""
    cuda = device.type == "cuda"
    return {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "torch": torch.__version__,
        "triton": version() or "not installed",
        "interpreted": os.environ.get("TRITON_INTERPRET", "0"),
        "perspectron": __version__,
        "kernels": hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16],
    }


def path(now: dict[str, str]) -> Path:
    """The file of these conditions. StorageError: there is no cache."""
    folder = cache_folder()
    if folder is None:
        raise StorageError("no folder for a cache: set XDG_CACHE_HOME, or HOME")
    return folder / f"selftest-{hashlib.sha256(json.dumps(now).encode()).hexdigest()[:16]}.json"


def write(now: dict[str, str], rows: list[dict[str, Any]], holds: bool) -> Path:
    """Write the results of a selftest, and return the file. StorageError: it cannot be written."""
    file = path(now)
    write_json(file, {"conditions": now, "holds": holds, "rows": rows})
    return file


@functools.cache
def passed(device: torch.device) -> bool:
    """True if a selftest with the present conditions, Triton's kernels included, has passed on this device."""
    now = conditions(device)
    with suppress(PerspectronError, AttributeError, KeyError, TypeError):
        found = read_json(path(now), BackendError)
        triton, held = ({row[key] for row in found["rows"]} for key in ("backend", "holds"))
        return found["conditions"] == now and found["holds"] is True and "triton" in triton and held == {True}
    return False
