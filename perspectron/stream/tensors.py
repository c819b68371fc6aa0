"""Large safetensors files, written tensor by tensor and read into one aligned buffer.

The buffer is anonymous memory in huge pages, never a map of the file: a file that is cut short while it is in use
then costs an error, not the process.
"""

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.util.errors import ArtifactError
from perspectron.util.files import open_file
from perspectron.util.machine import memory
from perspectron.util.tensors import Place, compose, read_places

PAGE = 4096  # the data begin on a page, so that they can be read past the page cache
HUGE = 2 << 20
LINE = 64  # bytes of a cache line: tensors of whole lines stand first, so that each begins on one
PIECE = 1 << 24
MAX_HEADER = 4 << 20

Bytes = NDArray[np.uint8]
Chunks = Iterable[Any]
"""Buffers whose bytes, joined, are a tensor's."""
Kind = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape."""


class Spec(NamedTuple):
    """A tensor to be written: `chunks` is called when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Chunks]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def spec(tensor: Tensor) -> Spec:
    """Spec of a tensor in memory."""
    return Spec(tensor.dtype, tuple(tensor.shape), lambda: [raw(tensor)])


def raw(tensor: Tensor) -> Any:
    """The bytes of a tensor, as a buffer; no copy of one that is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def aligned(size: int) -> Bytes:
    """New memory [size] that begins on a huge page if it fills one, else on a page."""
    if size < HUGE:
        return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + size]


def write(path: Path, specs: dict[str, Spec]) -> None:
    """Write `specs` as safetensors, one after the other; OSError when the disk is full."""
    order = sorted(specs, key=lambda name: (specs[name].bytes % LINE != 0, -specs[name].dtype.itemsize, name))
    with path.open("wb") as file:
        file.write(compose({name: (specs[name].dtype, specs[name].shape) for name in order}, align=PAGE))
        for name in order:
            start = file.tell()
            for chunk in specs[name].chunks():
                file.write(chunk)
            assert file.tell() - start == specs[name].bytes, name


def read(path: Path, wanted: Mapping[str, Kind]) -> tuple[dict[str, Tensor], str]:
    """(the tensors, views of one buffer; the SHA-256 of the file). wanted: dtype and shape of each that there must be.

    ArtifactError, naming the file, if it is missing, cut short, not safetensors or of other tensors: before memory is
    taken for it.
    """
    try:
        with open_file(path) as file:
            text, _, places = read_places(file, MAX_HEADER)
            room = sum(place.bytes for place in places.values())
            _require(path, places, wanted)
            if room > memory():
                bound = f"≤ {memory() / 1e9:,.1f} GB, the memory of this machine"
                raise ArtifactError(f"{path}: {room / 1e9:,.1f} GB of weights, must be {bound}")
            digest = hashlib.sha256(len(text).to_bytes(8, "little") + text)
            buffer = aligned(max(1, room))[:room]
            view = buffer.data
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                if (missing := len(piece) - file.readinto(piece)) > 0:
                    raise EOFError(f"ends {missing} bytes early")
                digest.update(piece)
            if hasattr(os, "posix_fadvise"):  # it is in memory now: no second copy in the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        raise ArtifactError(f"{path}: unreadable ({error})") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: not safetensors ({error})") from None
    whole = torch.from_numpy(buffer)
    return {
        name: whole[place.start : place.start + place.bytes].view(place.dtype).view(place.shape)
        for name, place in places.items()
    }, digest.hexdigest()


def _require(path: Path, places: Mapping[str, Place], wanted: Mapping[str, Kind]) -> None:
    """ArtifactError, naming the first, unless there are exactly the wanted tensors."""
    stored = {name: (place.dtype, place.shape) for name, place in places.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        told, must = (_told(side.get(name)) for side in (stored, wanted))
        if told != must:
            raise ArtifactError(f"{path}: {name[:80]!r} is {told}, must be {must}")


def _told(kind: Kind | None) -> str:
    return "missing" if kind is None else f"{str(kind[0]).removeprefix('torch.')} {list(kind[1])}"
