"""Expert file of a routed layer: safetensors with the packed matrices of its experts, each expert on whole pages.

    u64      bytes of the header, little-endian
    header   JSON, padded with blanks to a page of 4096 bytes
    experts  those with weights of their own, in order, without a gap, to the end of the file

Expert 5 is the tensors 5.gate.codes, 5.up.codes, 5.down.codes (see `perspectron.ops.packing`), 5.gate.scales,
5.up.scales, 5.down.scales and 5.padding, which are zeros up to the next page. One without a gate has no 5.gate.

Metadata: format, layer, d_model, hidden; codes, the format of the matrices where it is not ternary; gate, "none" where
there is none; weights_of, for each expert the one whose weights it has (itself, or an
earlier one); xxh3_64, the digest of every tensor in file order; header, the digest of the metadata before it. The whole
header follows from them, so a file is refused if a single byte of its header differs from what `dump` makes of them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from perspectron.experts.fetched import Shard
from perspectron.experts.mixture import ExpertsConfig
from perspectron.experts.router import MOST_EXPERTS, RoutedConfig
from perspectron.ops.packing import LAYOUTS, MAX_COLUMNS, Packed, check, sizes
from perspectron.stream.tensors import HUGE, PAGE, Bytes
from perspectron.util import tensors
from perspectron.util.config import one_of
from perspectron.util.errors import ArtifactError
from perspectron.util.files import atomic, parse_json

FORMAT = "perspectron-experts-2"
CODES = "ternary"
MATRICES = ("gate", "up", "down")
MAX_HEADER = 2 << 20
MAX_LAYER = 65535


@dataclass(frozen=True)
class ExpertLayout:
    """Places of the parts of an expert of these widths within its bytes. codes: the format of its matrices."""

    d_model: int
    hidden: int
    codes: str = CODES
    gated: bool = True

    @classmethod
    def of(cls, d_model: int, config: ExpertsConfig, codes: str = CODES) -> Self:
        """The layout of a layer's experts. ConfigError: a format that they cannot have."""
        routed = isinstance(config, RoutedConfig)
        one_of(codes, (CODES,) if routed else tuple(LAYOUTS), "experts.format")
        return cls(d_model, config.hidden, codes, config.gated)

    @property
    def matrices(self) -> tuple[str, ...]:
        return MATRICES if self.gated else MATRICES[1:]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return (
            *(f"{name}.codes" for name in self.matrices),
            *(f"{name}.scales" for name in self.matrices),
            "padding",
        )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        wide = (self.hidden, self.d_model)
        return *((wide,) * (1 + self.gated)), (self.d_model, self.hidden)

    @cached_property
    def tensors(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """Name, dtype and shape of each part."""
        packed = [sizes(self.codes, shape) for shape in self.shapes]
        shapes = [(torch.uint8, codes) for codes, _, _ in packed] + [
            (kind, scale) for _, scale, kind in packed
        ]
        used = sum(np.prod(shape, dtype=int).item() * dtype.itemsize for dtype, shape in shapes)
        shapes.append((torch.uint8, (-used % PAGE,)))
        return tuple((name, *pair) for name, pair in zip(self.names, shapes, strict=True))

    @property
    def slot(self) -> int:
        """Bytes that an expert takes in memory: whole huge pages (`aligned`) if it is as large as one."""
        unit = HUGE if self.bytes >= HUGE else 1
        return -(-self.bytes // unit) * unit

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        """Bytes of each part."""
        lengths = [np.prod(shape, dtype=int).item() * dtype.itemsize for _, dtype, shape in self.tensors]
        return tuple(slice(*pair) for pair in pairwise(np.cumsum([0, *lengths]).tolist()))

    @cached_property
    def bytes(self) -> int:
        """Bytes of the expert with its padding: whole pages."""
        return self.parts[-1].stop

    def shard(self, buffer: Bytes | Tensor) -> Shard:
        """Views of `buffer` [bytes]."""
        memory = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
        views = [
            memory[part].view(dtype).view(shape)
            for part, (_, dtype, shape) in zip(self.parts[:-1], self.tensors, strict=False)
        ]
        scales = views[len(self.shapes) :]
        matrices = [Packed(views[i], scales[i], self.codes, shape) for i, shape in enumerate(self.shapes)]
        return Shard(matrices[0] if self.gated else None, *matrices[-2:])


@dataclass(frozen=True)
class Header:
    """weights_of: for each expert, the one whose weights it has: itself or an earlier one. digests: xxh3_64 of every
    part of the stored experts, in file order, as 16 hexadecimal digits. start: where the first of them begins.
    ValueError: values that no file has."""

    layer: int
    layout: ExpertLayout
    weights_of: tuple[int, ...]
    digests: tuple[str, ...]
    start: int

    def __post_init__(self) -> None:
        _within("layer", self.layer, 0, MAX_LAYER)
        _within("number of experts", self.experts, 1, MOST_EXPERTS)
        _within("d_model", self.layout.d_model, 1, MAX_COLUMNS)
        _within("hidden", self.layout.hidden, 1, MAX_COLUMNS)
        for expert, of in enumerate(self.weights_of):
            if not 0 <= of <= expert or self.weights_of[of] != of:
                raise ValueError(
                    f"expert {expert} has the weights of {of}, must be itself or one stored before it"
                )
        _within("number of digests", len(self.digests), *[len(self.layout.names) * len(self.stored)] * 2)

    @property
    def experts(self) -> int:
        return len(self.weights_of)

    @cached_property
    def stored(self) -> dict[int, int]:
        """Experts with weights of their own, in file order, and their places in it."""
        own = (expert for expert, of in enumerate(self.weights_of) if of == expert)
        return {expert: place for place, expert in enumerate(own)}

    @property
    def end(self) -> int:
        """Bytes of the file."""
        return self.start + len(self.stored) * self.layout.bytes

    def offset(self, expert: int) -> int:
        """The offset at which the weights of `expert` begin."""
        return self.start + self.stored[self.weights_of[expert]] * self.layout.bytes

    def digests_of(self, expert: int) -> tuple[str, ...]:
        """Digests of the parts."""
        count = len(self.layout.names)
        first = self.stored[self.weights_of[expert]] * count
        return self.digests[first : first + count]


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} = {value}, must be in {least} … {most}")


def dump(header: Header) -> bytes:
    """The bytes of the file before its first expert."""
    fields = {
        "format": FORMAT,
        "layer": str(header.layer),
        "d_model": str(header.layout.d_model),
        "hidden": str(header.layout.hidden),
        "weights_of": " ".join(map(str, header.weights_of)),
        "xxh3_64": " ".join(header.digests),
    }
    if header.layout.codes != CODES:
        fields["codes"] = header.layout.codes
    if not header.layout.gated:
        fields["gate"] = "none"
    fields["header"] = xxh3_64(json.dumps(fields).encode()).hexdigest()
    entries = (
        (f"{expert}.{name}", dtype, shape)
        for expert in header.stored
        for name, dtype, shape in header.layout.tensors
    )
    return tensors.header(entries, fields, align=PAGE)


def parse(read: Callable[[int, int], bytes], size: int, name: object) -> Header:
    """Header of a file of `size` bytes. read(offset, count) gives its bytes, fewer only past its end.

    Whatever the file claims, no more than its header is allocated, 2 MiB at most. ArtifactError, one line that begins
    with `name`, for anything that is not as `write_layer` writes it.
    """
    try:
        first = read(0, 8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"header of {length} bytes in a file of {size}, must be at most {MAX_HEADER}")
        text = read(8, length)
        fields = parse_json(text.decode())["__metadata__"]
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("metadata that is not strings")
        if fields["format"] != FORMAT:
            raise ValueError(f"format = {fields['format'][:40]!r}, must be {FORMAT!r}")
        codes, gate = fields.get("codes", CODES), fields.get("gate")
        if codes not in LAYOUTS or gate not in (None, "none"):
            raise ValueError(f"codes = {codes[:40]!r}, gate = {str(gate)[:40]!r}, which no file has")
        layout = ExpertLayout(int(fields["d_model"]), int(fields["hidden"]), codes, gate is None)
        weights_of = tuple(map(int, fields["weights_of"].split()))
        digests = tuple(fields["xxh3_64"].split())
        header = Header(int(fields["layer"]), layout, weights_of, digests, 8 + length)
        _within("number of tensors", text.count(b'"data_offsets"'), *[len(digests)] * 2)
        if dump(header) != first + text:
            raise ValueError("header does not follow from its metadata")
        if size != header.end:
            raise ValueError(f"{size} bytes, must be {header.end}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        cause = " ".join(f"{error}".encode("utf-8", "backslashreplace").decode().split())[:200]
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ArtifactError(f"{name}: not an expert file, or a damaged one ({kind}{cause})") from None
    return header


def planned(layer: int, layout: ExpertLayout, weights_of: Sequence[int]) -> Header:
    """Header of a file that is still to be written, with no digests yet. ValueError: one that no reader takes."""
    blank = Header(
        layer, layout, tuple(weights_of), ("0" * 16,) * len(layout.names) * len(set(weights_of)), 0
    )
    start = len(dump(blank))
    if start > MAX_HEADER:
        raise ValueError(f"header of {start} bytes, must be at most {MAX_HEADER}: too many experts")
    return replace(blank, start=start)


def write_layer(
    path: Path, layer: int, layout: ExpertLayout, weights_of: Sequence[int], shards: Iterable[Shard]
) -> Header:
    """Write a layer's file, one expert in memory at a time; it appears whole or not at all.

    weights_of: for each expert, the one whose weights it has (itself or an earlier one); shards: those with weights of
    their own, in order. ArtifactError: shards that are not the layer's. DataError: weights that are not their format's
    or not finite. StorageError: not written.
    """
    try:
        blank = planned(layer, layout, weights_of)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None
    digests, source = list[str](), iter(shards)
    with atomic(path) as temporary, temporary.open("wb") as file:
        file.seek(blank.start)
        for expert in blank.stored:
            shard = next(source, None)
            if shard is None:
                raise ArtifactError(f"{path}: fewer shards than the {len(blank.stored)} experts to store")
            for part in _parts(shard, layout, f"{path}: expert {expert}"):
                digests.append(xxh3_64(part.data).hexdigest())
                file.write(part.data)
        if next(source, None) is not None:
            raise ArtifactError(f"{path}: more shards than the {len(blank.stored)} experts to store")
        header = replace(blank, digests=tuple(digests))
        file.seek(0)
        file.write(dump(header))
    return header


def _parts(shard: Shard, layout: ExpertLayout, name: str) -> list[Bytes]:
    """Bytes of each part, checked."""
    for matrix_name, matrix, shape in zip(layout.matrices, shard, layout.shapes, strict=True):
        if (matrix.format, tuple(matrix.shape)) != (layout.codes, shape):
            kind = f"{matrix.format} {tuple(matrix.shape)}"
            raise ArtifactError(f"{name}: {matrix_name} is {kind}, must be {layout.codes} {shape}")
        check(matrix, f"{name}: {matrix_name}")
    padding = torch.zeros(layout.tensors[-1][2], dtype=torch.uint8)
    ordered = [*(matrix.codes for matrix in shard), *(matrix.scales for matrix in shard), padding]
    return [tensor.contiguous().flatten().view(torch.uint8).numpy() for tensor in ordered]
