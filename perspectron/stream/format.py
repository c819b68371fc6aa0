"""The expert file of a layer: a header that says where each expert stands, then the experts, on pages of 4096 bytes.

    0   magic, 8 bytes
    8   u32 version, u32 bytes of JSON, u32 CRC of the JSON, u32 CRC of the 20 bytes before it
    24  JSON, then zeros to the next page
        what the JSON lists, in its order, each on its own pages and without a gap, to the end of the file

Numbers are little-endian, CRCs are CRC-32C, offsets count from the start of the file. An expert is stored in full; as
the changes from a full one (`perspectron.stream.delta`); or not at all, being the same as a full one. In full: the
codes of gate, up and down (ternary, see `perspectron.ops.packing`), their float32 scales, zeros to the next page.

All offsets and sizes follow from the shapes, so there is one right value for each.
"""

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.ops.packing import Packed, sizes
from perspectron.stream.crc import crc32c

MAGIC = b"PSPXPRT\0"
VERSION = 1
FORMAT = "ternary"
PAGE = 4096
MAX_JSON = 1 << 20
MAX_LAYER = 65535
MAX_EXPERTS = 65536
MAX_RICE = 40
MAX_NUMBER = 2**63 - 1
MAX_CRC = 2**32 - 1
NAMES = ("gate", "up", "down")
PREFIX = struct.Struct("<8s4I")

Bytes = NDArray[np.uint8]
Digest = tuple[int, ...]
"""CRCs of the codes of gate, up and down and of their scales."""


def page(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Shard(NamedTuple):
    """One expert: gate and up [hidden, d_model], down [d_model, hidden]."""

    gate: Packed
    up: Packed
    down: Packed


@dataclass(frozen=True)
class ExpertLayout:
    """Where the parts of an expert of these widths stand when it is stored in full."""

    d_model: int
    hidden: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.hidden, self.d_model), (self.hidden, self.d_model), (self.d_model, self.hidden)

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        """Codes of gate, up, down, then scales of gate, up, down."""
        codes = [blocks * width for (blocks, width), _, _ in (sizes(FORMAT, shape) for shape in self.shapes)]
        ends = np.cumsum([0, *codes, *(4 * shape[0] for shape in self.shapes)]).tolist()
        return tuple(slice(*pair) for pair in pairwise(ends))

    @cached_property
    def code_bytes(self) -> int:
        """All codes; the scales follow."""
        return self.parts[2].stop

    @cached_property
    def scale_bytes(self) -> int:
        return self.parts[-1].stop - self.code_bytes

    @cached_property
    def bytes(self) -> int:
        """Whole pages."""
        return page(self.parts[-1].stop)

    @property
    def trits(self) -> int:
        """Places a change can have: five in each byte of codes."""
        return 5 * self.code_bytes

    def shard(self, buffer: Bytes | Tensor) -> Shard:
        """Views of `buffer` [bytes]."""
        memory = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
        found = []
        for shape, codes, scales in zip(self.shapes, self.parts, self.parts[3:], strict=False):
            codes_shape, _, dtype = sizes(FORMAT, shape)
            found.append(Packed(memory[codes].view(codes_shape), memory[scales].view(dtype), FORMAT, shape))
        return Shard(*found)

    def digest(self, buffer: Bytes) -> Digest:
        return tuple(crc32c(buffer[part]) for part in self.parts)


@dataclass(frozen=True)
class Full:
    """Stored as it is."""

    expert: int
    offset: int
    bytes: int
    digest: Digest


@dataclass(frozen=True)
class Delta:
    """Stored as changes from expert `of`; `perspectron.stream.delta` says how. base, result: digests before, after."""

    expert: int
    of: int
    offset: int
    bytes: int
    crc32c: int
    changes: int
    rice: int
    quotient_bytes: int
    base: Digest
    result: Digest

    def parts(self, layout: ExpertLayout) -> tuple[slice, ...]:
        """Scales, quotients, remainders, steps."""
        lengths = (
            layout.scale_bytes,
            self.quotient_bytes,
            -(-self.changes * self.rice // 8),
            -(-self.changes // 8),
        )
        ends = [sum(lengths[:i]) for i in range(5)]
        return tuple(slice(*pair) for pair in pairwise(ends))


@dataclass(frozen=True)
class Alias:
    """Not stored: the same as expert `of`."""

    expert: int
    of: int


Entry = Full | Delta | Alias


@dataclass(frozen=True)
class Header:
    """entries: in the order of the file."""

    layer: int
    layout: ExpertLayout
    entries: tuple[Entry, ...]

    @property
    def experts(self) -> int:
        return len(self.entries)

    @cached_property
    def by_expert(self) -> dict[int, Entry]:
        return {entry.expert: entry for entry in self.entries}

    def stored(self, expert: int) -> Full | Delta:
        """Where the weights of `expert` stand: its own place, or that of the one it is the same as."""
        entry = self.by_expert[expert]
        found = self.by_expert[entry.of] if isinstance(entry, Alias) else entry
        assert not isinstance(found, Alias)
        return found


def dump(header: Header, room: int) -> bytes:
    """The first bytes of the file: whole pages, of which `room` are JSON, blanks at its end included."""
    text = _json(header).ljust(room)
    assert len(text) == room <= MAX_JSON
    start = PREFIX.pack(MAGIC, VERSION, room, crc32c(text), 0)[:-4]
    whole = start + struct.pack("<I", crc32c(start)) + text
    return whole.ljust(page(len(whole)), b"\0")


def room(experts: int, layout: ExpertLayout) -> int:
    """Bytes of JSON that are enough for any header of so many experts."""
    most = (MAX_NUMBER >> 8, *(MAX_CRC,) * 6)
    big = Delta(
        experts,
        experts,
        most[0],
        layout.bytes,
        most[1],
        layout.trits,
        MAX_RICE,
        layout.bytes,
        most[1:],
        most[1:],
    )
    entries = (Full(experts, most[0], layout.bytes, most[1:]), big)
    longest = max(len(_json(Header(MAX_LAYER, layout, (entry,)))) for entry in entries)
    return longest * experts


def _json(header: Header) -> bytes:
    layout = header.layout
    value = {
        "layer": header.layer,
        "experts": header.experts,
        "d_model": layout.d_model,
        "hidden": layout.hidden,
        "format": FORMAT,
        "shards": [_value(entry, layout) for entry in header.entries],
    }
    return json.dumps(value, separators=(",", ":")).encode()


def _value(entry: Entry, layout: ExpertLayout) -> dict[str, Any]:
    """An entry as its JSON says it."""
    if not isinstance(entry, Full):
        return {"expert": entry.expert, "kind": type(entry).__name__.lower()} | vars(entry)
    value: dict[str, Any] = {
        "expert": entry.expert,
        "kind": "full",
        "offset": entry.offset,
        "bytes": entry.bytes,
    }
    for i, name in enumerate(NAMES):
        codes, scales = layout.parts[i], layout.parts[i + 3]
        value[name] = {
            "offset": entry.offset + codes.start,
            "bytes": codes.stop - codes.start,
            "crc32c": entry.digest[i],
            "scale_offset": entry.offset + scales.start,
            "scale_crc32c": entry.digest[i + 3],
        }
    return value
