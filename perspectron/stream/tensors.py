"""Safetensors files larger than memory should hold twice: written tensor by tensor, read into one aligned buffer.

The buffer is anonymous memory in huge pages, never a map of the file: a file that is cut short while it is in use
then costs an error, not the process.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.errors import ArtifactError
from perspectron.stream.shards import aligned

DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGN = 4096  # where the numbers begin in the file
LINE = 64  # a cache line: tensors of whole lines stand first, so that each begins one
PIECE = 1 << 24
HEADER = 1 << 24  # a longer one is no header of ours

Chunks = Iterable[Any]
"""Buffers whose bytes, joined, are a tensor's."""


class Spec(NamedTuple):
    """A tensor to come: `chunks` is called when its turn is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Chunks]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def spec(tensor: Tensor) -> Spec:
    """Of a tensor that is there."""
    return Spec(tensor.dtype, tuple(tensor.shape), lambda: [raw(tensor)])


def raw(tensor: Tensor) -> Any:
    """The bytes of a tensor, as a buffer; no copy of one that is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def write(path: Path, specs: dict[str, Spec]) -> None:
    """Write `specs` as safetensors, one after the other; OSError when the disk is full."""
    order = sorted(specs, key=lambda name: (specs[name].bytes % LINE != 0, -specs[name].dtype.itemsize, name))
    header, at = dict[str, Any](), 0
    for name in order:
        entry = specs[name]
        header[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            start = file.tell()
            for chunk in specs[name].chunks():
                file.write(chunk)
            assert file.tell() - start == specs[name].bytes, name


def read(path: Path) -> tuple[dict[str, Tensor], str]:
    """(the tensors, views of one buffer; the SHA-256 of the file).

    ArtifactError, naming the file, for one that is not there, is cut short or is no such file.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(_exactly(file, 8), "little")
            if not 2 <= length <= min(HEADER, size - 8):
                raise ArtifactError(f"{path}: header of {length} bytes, must be ≤ {min(HEADER, size - 8)}")
            text = _exactly(file, length)
            digest = hashlib.sha256(length.to_bytes(8, "little") + text)
            buffer = aligned(max(1, size - 8 - length))[: size - 8 - length]
            view = buffer.data
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                _fill(file, piece)
                digest.update(piece)
            if hasattr(os, "posix_fadvise"):  # it is in memory now: no second copy in the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _parse(path, text, buffer), digest.hexdigest()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        raise ArtifactError(f"{path}: unreadable ({error})") from None


def _exactly(file: Any, count: int) -> bytes:
    buffer = bytearray(count)
    _fill(file, memoryview(buffer))
    return bytes(buffer)


def _fill(file: Any, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise EOFError(f"ends {len(view) - done} bytes early")
        done += got


def _parse(path: Path, text: bytes, buffer: Any) -> dict[str, Tensor]:
    found, end = {}, 0
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
        whole = torch.from_numpy(buffer)
        for name, entry in entries:
            (start, stop), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], entry["shape"]
            sizes = math.prod(shape) * dtype.itemsize
            if start != end or stop - start != sizes or min(shape, default=0) < 0 or stop > len(buffer):
                raise ValueError(f"{name}: bytes {start} to {stop}, must be {sizes} from {end} on")
            found[name] = whole[start:stop].view(dtype).view(shape)
            end = stop
        if end != len(buffer):
            raise ValueError(f"{len(buffer) - end} bytes too many")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ArtifactError(f"{path}: not safetensors ({error})") from None
    return found
