"""Files of tensors (safetensors) that are not trusted: what a header claims is checked in bounded memory, and each
tensor is then read to where it stays.

They are not mapped: a file that is cut short meanwhile would end the process.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from perspectron.util.errors import PerspectronError
from perspectron.util.files import MAX_JSON, open_file, opened, parse_json
from perspectron.util.machine import memory

MOST_TENSORS = 1 << 15  # of a file: each takes a kilobyte of memory, even without a number in it
JSON_ROOM = 56 << 20  # bytes that JSON in a header may take as a value
MAX_AXES = 8
MAX_SIZE = 1 << 48  # of an axis, and of a file
DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
_LONGEST = 1000  # bytes of a name, and of the rest of an entry
_BLANK, _STRING = rb"[ \t\n\r]*", rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN = re.compile(rb"%s\{%s(\}?)" % (_BLANK, _BLANK))
_ENTRY = re.compile(
    rb'%s(%s)%s:%s(\{(?:[^"{}]++|%s)*+\}|null)%s([,}])' % (_BLANK, _STRING, _BLANK, _BLANK, _STRING, _BLANK),
    re.DOTALL,
)


class Place(NamedTuple):
    """The place of a tensor in a file's data, and its kind."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]


class _Entry(Struct, forbid_unknown_fields=True):
    """A tensor in a header's JSON."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=MAX_AXES)]
    data_offsets: tuple[_Size, _Size]


def parse_header(text: bytes, room: int | None) -> tuple[dict[str, str], dict[str, Place]]:
    """(metadata, the place of each tensor by name in the order of the data) of a header before `room` bytes of data;
    None: before any number of them. ValueError unless the tensors follow one another without a gap, each of as many
    bytes as its shape says."""
    metadata, places, at = dict[str, str](), dict[str, Place](), 0
    start = _OPEN.match(text)
    if start is None:
        raise ValueError("the header is no object")
    at, more = start.end(), not start[1]
    while more:
        entry = _ENTRY.match(text, at)
        if entry is None or len(entry[1]) > _LONGEST:
            raise ValueError(f"no tensor at byte {at} of the header")
        name, at, more = parse_json(entry[1].decode()), entry.end(), entry[3] == b","
        if name in places or (name == METADATA and metadata):
            raise ValueError(f"key {name[:80]!r} occurs twice")
        if name == METADATA:
            metadata = parse_json(entry[2].decode(), room=JSON_ROOM) or {}
        elif len(places) == MOST_TENSORS:
            raise ValueError(f"more than {MOST_TENSORS:,} tensors")
        else:
            places[name] = _place(name, entry[2])
    if text[at:].strip(b" \t\n\r\0"):
        raise ValueError(f"the header goes on at byte {at}")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata that is not strings")
    return metadata, _in_order(places, room)


def _place(name: str, text: bytes) -> Place:
    """The place of a tensor, by its entry in a header. ValueError: not a possible one."""
    if len(text) > _LONGEST or not name.isprintable():
        raise ValueError(
            f"{name[:80]!r}: {len(text)} bytes about it, must be ≤ {_LONGEST} and its name printable"
        )
    try:
        entry = msgspec.json.decode(text, type=_Entry)
    except msgspec.DecodeError as cause:
        raise ValueError(f"{name[:80]!r}: {cause}") from None
    if entry.dtype not in DTYPES:
        raise ValueError(f"{name[:80]!r}: dtype is {entry.dtype[:40]!r}, must be one of {', '.join(DTYPES)}")
    if math.prod(size or 1 for size in entry.shape) > MAX_SIZE:  # torch multiplies them around a zero, too
        raise ValueError(f"{name[:80]!r}: shape {entry.shape} is larger than any file")
    return Place(*entry.data_offsets, DTYPES[entry.dtype], tuple(entry.shape))


def _in_order(places: dict[str, Place], room: int | None) -> dict[str, Place]:
    """The tensors as they follow one another. ValueError: they leave a gap, overlap or do not fill the room."""
    ordered, end = dict(sorted(places.items(), key=lambda item: item[1][:2])), 0
    for name, place in ordered.items():
        if place.start != end or place.stop - end != place.bytes or (room is not None and place.stop > room):
            must = f"must be {place.bytes} from {end} on"
            raise ValueError(f"{name[:80]!r}: bytes {place.start} to {place.stop} of {room}, {must}")
        end = place.stop
    if room is not None and end != room:
        raise ValueError(f"{room - end} bytes too many")
    return ordered


def read_header(file: BufferedReader, most: int = MAX_JSON) -> bytes:
    """The text of a file's header. ValueError: of more than `most` bytes, or cut short."""
    length = int.from_bytes(file.read(8), "little")
    most = min(most, max(0, os.fstat(file.fileno()).st_size - 8))
    if not 2 <= length <= most:
        raise ValueError(f"header of {length} bytes, must be ≤ {most}")
    return file.read(length)


def read_places(file: BufferedReader, most: int = MAX_JSON) -> tuple[bytes, dict[str, str], dict[str, Place]]:
    """(text, metadata, the place of each tensor by name) of the header of a file, which has no more than these tensors.
    ValueError as `read_header` and `parse_header`."""
    text = read_header(file, most)
    return text, *parse_header(text, os.fstat(file.fileno()).st_size - 8 - len(text))


def check_size(path: Path, size: int, error: type[PerspectronError]) -> None:
    """Check the size of a header against the bound, the same for writing and reading. `error`, which names `path`: it
    is larger."""
    if size > MAX_JSON:
        why = f"must be ≤ {MAX_JSON:,}; a text of that length can be kept up to an earlier token"
        raise error(f"{path}: a header of {size:,} bytes, {why}")


def compose(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    align: int = 8,
) -> bytes:
    """The header of a file whose data are these tensors, by name in their order, its length included; metadata comes
    first in it, in its order. align: bytes of which it has a multiple."""
    fields, at = dict[str, Any](), 0
    if metadata is not None:
        fields[METADATA] = dict(metadata)
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def load_tensors(
    path: Path, error: type[PerspectronError], what: str
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) of a safetensors file. `error`, naming it: missing, unreadable, larger than half the memory,
    or not `what` it is to be."""
    with opened(path, error) as file:
        size, most = os.fstat(file.fileno()).st_size, memory() // 2
        if size > most:
            raise error(f"{path}: {size:,} bytes, must be ≤ {most:,}, half the memory of this machine")
        try:
            metadata, places = read_places(file)[1:]
            return metadata, {name: read_tensor(file, place) for name, place in places.items()}
        except ValueError as cause:
            raise error(f"{path}: not {what} ({cause})") from None


def unread_tensors(
    path: Path, error: type[PerspectronError], what: str
) -> dict[str, tuple[Place, Callable[[], Tensor]]]:
    """The tensors of a safetensors file by name: the place of each, and what reads it when it is called. `error` as
    `load_tensors`, then too."""
    with opened(path, error) as file:
        try:
            text, _, places = read_places(file)
        except ValueError as cause:
            raise error(f"{path}: not {what} ({cause})") from None

    def read(place: Place) -> Tensor:
        with opened(path, error) as file:
            file.seek(8 + len(text) + place.start)
            try:
                return read_tensor(file, place)
            except ValueError as cause:
                raise error(f"{path}: not {what} ({cause})") from None

    return {name: (place, partial(read, place)) for name, place in places.items()}


def read_tensor(file: BufferedReader, place: Place) -> Tensor:
    """The next tensor of a file. ValueError: the file ends before it does."""
    tensor = torch.empty(place.shape, dtype=place.dtype)
    if place.bytes and file.readinto(tensor.flatten().view(torch.uint8).numpy().data) < place.bytes:
        raise ValueError("it ends early")
    return tensor


def save_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, not atomically by itself; OSError when the disk is full, or for more than
    `load_tensors` reads."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, header)
        with open_file(path) as file:
            read_places(file)
    except (SafetensorError, ValueError) as error:
        raise OSError(str(error)) from error
