"""Large safetensors files, written tensor by tensor and read into one aligned buffer.

The buffer is anonymous memory in huge pages, never a map of the file: a file that is cut short while it is in use
then costs an error, not the process.
"""

import hashlib
import json
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

from perspectron.errors import ArtifactError
from perspectron.files import open_file, parse_json
from perspectron.machine import memory

DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAGE = 4096  # the data begin on a page, so that they can be read past the page cache
HUGE = 2 << 20
LINE = 64  # bytes of a cache line: tensors of whole lines stand first, so that each begins on one
PIECE = 1 << 24
MAX_HEADER = 4 << 20
MAX_AXES = 8
MAX_SIZE = 1 << 48  # of an axis, and of a file

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


def header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    """The first bytes of a safetensors file with these tensors (name, dtype, shape) one after the other: whole
    pages."""
    fields, at = dict[str, Any](), 0
    if metadata is not None:
        fields["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, specs: dict[str, Spec]) -> None:
    """Write `specs` as safetensors, one after the other; OSError when the disk is full."""
    order = sorted(specs, key=lambda name: (specs[name].bytes % LINE != 0, -specs[name].dtype.itemsize, name))
    with path.open("wb") as file:
        file.write(header((name, specs[name].dtype, specs[name].shape) for name in order))
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
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ArtifactError(
                    f"{path}: header of {length} bytes, must be ≤ {min(MAX_HEADER, max(0, size - 8))}"
                )
            text, room = file.read(length), size - 8 - length
            places = _places(path, text, room)
            _require(path, places, wanted)
            if room > memory():
                bound = f"≤ {memory() / 1e9:,.1f} GB, the memory of this machine"
                raise ArtifactError(f"{path}: {room / 1e9:,.1f} GB of weights, must be {bound}")
            digest = hashlib.sha256(start + text)
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
    whole = torch.from_numpy(buffer)
    tensors = {name: whole[at : at + place.bytes].view(place.dtype) for name, (at, place) in places.items()}
    return {name: flat.view(wanted[name][1]) for name, flat in tensors.items()}, digest.hexdigest()


def _places(path: Path, text: bytes, room: int) -> dict[str, tuple[int, Spec]]:
    """The offset at which each tensor of a header begins in the `room` bytes of data, and what it is. ArtifactError
    unless they follow one another without a gap, and each has as many bytes as its shape says."""
    places, end = dict[str, tuple[int, Spec]](), 0
    try:
        fields = parse_json(text.decode())
        if not isinstance(fields, dict):
            raise ValueError("the header is no object")
        fields.pop("__metadata__", None)
        for name, start, stop, place in sorted(map(_place, fields, fields.values()), key=lambda one: one[1]):
            if start != end or stop - start != place.bytes or stop > room:
                raise ValueError(
                    f"{name[:80]!r}: bytes {start} to {stop} of {room}, must be {place.bytes} from {end} on"
                )
            places[name], end = (start, place), stop
        if end != room:
            raise ValueError(f"{room - end} bytes too many")
    except ValueError as error:
        raise ArtifactError(f"{path}: not safetensors ({error})") from None
    return places


def _place(name: str, entry: Any) -> tuple[str, int, int, Spec]:
    """(name, begin, end, what it is) of an entry in a header. ValueError: not a possible one."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:80]!r}: must tell dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name[:80]!r}: dtype is {str(dtype)[:40]!r}, must be one of {', '.join(DTYPES)}")
    for what, numbers, least, most in (("shape", shape, 1, MAX_AXES), ("data_offsets", offsets, 0, 2)):
        whole = isinstance(numbers, list) and len(numbers) <= most and all(type(n) is int for n in numbers)
        if not whole or not all(least <= n <= MAX_SIZE for n in numbers):
            bound = f"at most {most} whole numbers in {least} … {MAX_SIZE}"
            raise ValueError(f"{name[:80]!r}: {what} is {str(numbers)[:80]}, must be {bound}")
    if len(offsets) != 2:
        raise ValueError(f"{name[:80]!r}: data_offsets is {offsets}, must be two")
    return name, *offsets, Spec(DTYPES[dtype], tuple(shape), list)


def _require(path: Path, places: Mapping[str, tuple[int, Spec]], wanted: Mapping[str, Kind]) -> None:
    """ArtifactError, naming the first, unless there are exactly the wanted tensors."""
    stored = {name: (place.dtype, place.shape) for name, (_, place) in places.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        told, must = (_told(side.get(name)) for side in (stored, wanted))
        if told != must:
            raise ArtifactError(f"{path}: {name[:80]!r} is {told}, must be {must}")


def _told(kind: Kind | None) -> str:
    return "missing" if kind is None else f"{str(kind[0]).removeprefix('torch.')} {list(kind[1])}"
