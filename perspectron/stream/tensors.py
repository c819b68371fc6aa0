"""Safetensors files larger than memory should hold twice: written tensor by tensor, read into one aligned buffer.

The buffer is anonymous memory in huge pages, never a map of the file: a file that is cut short while it is in use
then costs an error, not the process.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.errors import ArtifactError

DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAGE = 4096  # the data begin on a page, so that they can be read past the page cache
HUGE = 2 << 20
LINE = 64  # bytes of a cache line: tensors of whole lines stand first, so that each begins on one
PIECE = 1 << 24
MAX_HEADER = 1 << 24

Bytes = NDArray[np.uint8]
Chunks = Iterable[Any]
"""Buffers whose bytes, joined, are a tensor's."""


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


def read(path: Path) -> tuple[dict[str, Tensor], str]:
    """(the tensors, views of one buffer; the SHA-256 of the file).

    ArtifactError, naming the file, if it is missing, cut short or not safetensors.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ArtifactError(
                    f"{path}: header of {length} bytes, must be ≤ {min(MAX_HEADER, size - 8)}"
                )
            text = file.read(length)
            digest = hashlib.sha256(start + text)
            buffer = aligned(max(1, size - 8 - length))[: size - 8 - length]
            view = buffer.data
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                if (missing := len(piece) - file.readinto(piece)) > 0:
                    raise EOFError(f"ends {missing} bytes early")
                digest.update(piece)
            if hasattr(os, "posix_fadvise"):  # it is in memory now: no second copy in the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _parse(path, text, buffer), digest.hexdigest()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        raise ArtifactError(f"{path}: unreadable ({error})") from None


def _parse(path: Path, text: bytes, buffer: Bytes) -> dict[str, Tensor]:
    tensors, end = {}, 0
    try:
        fields = json.loads(text)
        fields.pop("__metadata__", None)
        entries = sorted(fields.items(), key=lambda item: item[1]["data_offsets"][0])
        whole = torch.from_numpy(buffer)
        for name, entry in entries:
            (start, stop), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], entry["shape"]
            size = math.prod(shape) * dtype.itemsize
            if start != end or stop - start != size or min(shape, default=0) < 0 or stop > len(buffer):
                raise ValueError(f"{name}: bytes {start} to {stop}, must be {size} from {end} on")
            tensors[name] = whole[start:stop].view(dtype).view(shape)
            end = stop
        if end != len(buffer):
            raise ValueError(f"{len(buffer) - end} bytes too many")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ArtifactError(f"{path}: not safetensors ({error})") from None
    return tensors
