"""The GGUF container: its header, and its tensors one at a time.

Headers are not trusted: lengths are checked against the end of the file, and files are read, not memory-mapped.
"""

import math
import os
import re
import struct
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perspectron.util.errors import CheckpointError
from perspectron.util.files import opened

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_AXES = 4
LONGEST = 65535  # bytes of a name
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""NumPy dtypes of scalar values by their type numbers in a file."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def library() -> Any:
    """The package gguf. CheckpointError with the command that installs it, where it is missing."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError("gguf is not installed: pip install 'perspectron[gguf]'") from None
    return gguf


class Stored(NamedTuple):
    """A tensor in a file: its GGML type, its shape in torch's order, and the offset of its first byte."""

    path: Path
    name: str
    kind: Any
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        block, size = library().GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def load(self) -> Tensor:
        """The tensor, unchanged if it has 32 or 16 bits, else dequantised to float32. CheckpointError: the file was cut
        short, or gguf cannot dequantise its type."""
        raw = np.empty(self.bytes, np.uint8)
        with opened(self.path, CheckpointError) as file:
            file.seek(self.start)
            if file.readinto(raw.data) < raw.nbytes:
                raise CheckpointError(f"{self.path}: {self.name}: it ends early")
        if self.kind.name in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[self.kind.name]).reshape(self.shape)
        gguf = library()
        shape = gguf.quant_shape_to_byte_shape(self.shape, self.kind)
        try:
            return torch.from_numpy(gguf.quants.dequantize(raw.reshape(shape), self.kind))
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: {self.name}: type {self.kind.name}, which gguf cannot dequantise"
            ) from None


class Container(NamedTuple):
    """Metadata of a model by key, and the tensors of all its files by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")


def read(path: Path) -> Container:
    """Read the header of a model, and the headers of its other files if it is split. CheckpointError, naming the file
    and the field: not a GGUF, cut short, a type that gguf does not know, or a missing file."""
    container = _read(path)
    count = container.metadata.get("split.count", 0)
    if count in (0, 1):
        return container
    place = _PART.search(path.name)
    if type(count) is not int:
        raise container.error(f"split.count is {count!r}, must be a whole number")
    if place is None or int(place[2]) != count or int(place[1]) != 1:
        raise container.error(f"split.count is {count}, must be of NAME-00001-of-{count:05}.gguf, the first")
    for number in range(2, count + 1):
        part = _read(path.with_name(f"{path.name[: place.start()]}-{number:05}-of-{count:05}.gguf"))
        for name in part.tensors.keys() & container.tensors.keys():
            raise part.error(f"{name}: another part has it, too")
        container.tensors.update(part.tensors)
    return container


def _read(path: Path) -> Container:
    with opened(path, CheckpointError) as file:
        return _Header(path, file).container()


class _Header:
    """Reader of a header. at: the current field, for errors."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self.file, self.at = path, file, "header"
        self.left = self.size = os.fstat(file.fileno()).st_size

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.at}: {message}")

    def container(self) -> Container:
        if self.take(4) != MAGIC:
            raise self.error("it does not begin with GGUF, so it is none")
        version = self.number("I")
        if version not in VERSIONS:
            known = " or ".join(map(str, VERSIONS))
            raise self.error(f"version {version}, must be {known}, little-endian")
        count, pairs = self.number("Q"), self.number("Q")
        metadata = dict[str, Any]()
        for _ in range(pairs):
            self.at = f"the field after {self.at}" if metadata else "the first field"
            self.at = name = self.string(LONGEST)
            metadata[name] = self.value(self.number("I"))
        tensors = [self.tensor() for _ in range(count)]
        self.at = "general.alignment"
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise self.error(f"{align!r}, must be a power of two")
        first = -(-(self.size - self.left) // align) * align
        placed = dict[str, Stored]()
        for tensor in tensors:
            self.at, tensor = tensor.name, tensor._replace(start=first + tensor.start)
            if tensor.start + tensor.bytes > self.size:
                raise self.error(f"the file ends at byte {self.size:,}, before it does")
            if placed.setdefault(tensor.name, tensor) is not tensor:
                raise self.error("it is there twice")
        return Container(self.path, metadata, placed)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.error(f"the file ends at byte {self.size:,}, before it does")
        self.left -= count
        return self.file.read(count)

    def number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0])

    def string(self, most: int) -> str:
        length = self.number("Q")
        if length > most:
            raise self.error(f"a string of {length:,} bytes, must be ≤ {most:,}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as cause:
            raise self.error(f"not UTF-8 ({cause})") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string(self.size)
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == _STRING and 8 * count <= self.left:
                return [self.string(self.size) for _ in range(count)]
            return self.scalars(kind, count)
        return self.scalars(kind, 1)[0]

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.error(f"of type {kind}, which gguf does not know, or too long")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        # The decimal that was written, not the float64 of its float32.
        return [float(str(value)) for value in values] if kind == 6 else values.tolist()

    def tensor(self) -> Stored:
        """Read the entry of a tensor; its start is relative to the first tensor's."""
        self.at = f"the tensor after {self.at}"
        self.at = name = self.string(LONGEST)
        axes = self.number("I")
        if axes > MOST_AXES:
            raise self.error(f"{axes} axes, must be ≤ {MOST_AXES}")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        number = self.number("I")
        try:
            kind = library().GGMLQuantizationType(number)
        except ValueError:
            raise self.error(f"type {number}, which gguf does not know") from None
        block = library().GGML_QUANT_SIZES[kind][0]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise self.error(f"shape {list(shape)} of {kind.name}, no possible one")
        return Stored(self.path, name, kind, shape, self.number("Q"))
