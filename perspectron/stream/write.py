"""Writing the expert file of a layer, one expert in memory at a time."""

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from perspectron.errors import ArtifactError
from perspectron.files import atomic
from perspectron.ops.packing import check
from perspectron.stream import delta
from perspectron.stream.crc import crc32c
from perspectron.stream.format import (
    MAX_EXPERTS,
    MAX_JSON,
    MAX_LAYER,
    NAMES,
    PREFIX,
    Alias,
    Bytes,
    Delta,
    Digest,
    Entry,
    ExpertLayout,
    Full,
    Header,
    Shard,
    dump,
    page,
    room,
)
from perspectron.stream.parse import parse


class SameAs(NamedTuple):
    """An expert that is the same as `of`, which is stored in full before or after it."""

    of: int


class CloseTo(NamedTuple):
    """An expert to be stored as its changes from `of`, stored in full before it, where that saves enough."""

    of: int
    shard: Shard


def write_layer(
    path: Path,
    layer: int,
    layout: ExpertLayout,
    experts: int,
    shards: Iterable[tuple[int, Shard | SameAs | CloseTo]],
    *,
    delta_share: float = 0.5,
) -> Header:
    """Write `experts` experts, in the order in which `shards` gives (expert, what it is); the file appears whole or
    not at all.

    delta_share: what is close to another is stored as changes if these take at most this part of a full expert.
    ArtifactError: shards that are not the layer's, or an order that cannot be. DataError: weights that are not
    ternary or not finite. StorageError: not written.
    """
    if not (0 <= layer <= MAX_LAYER and 1 <= experts <= MAX_EXPERTS):
        raise ArtifactError(
            f"{path}: layer {layer} of {experts} experts, must be at most {MAX_LAYER}, {MAX_EXPERTS}"
        )
    space = room(experts, layout)
    if space > MAX_JSON:
        raise ArtifactError(
            f"{path}: {experts} experts, whose header takes {space} bytes, must be at most {MAX_JSON}"
        )
    with atomic(path) as temporary, temporary.open("w+b") as file:
        writer = _Writer(path, file, layout, page(PREFIX.size + space), delta_share)
        for expert, shard in shards:
            writer.add(expert, shard)
        if len(writer.entries) != experts:
            raise ArtifactError(f"{path}: {len(writer.entries)} experts were given, must be {experts}")
        file.seek(0)
        file.write(dump(Header(layer, layout, tuple(writer.entries)), space))

        def read(offset: int, count: int) -> bytes:
            file.seek(offset)
            return file.read(count)

        return parse(read, writer.end, path)


class _Writer:
    """Appends experts; `end` is where the next one goes."""

    def __init__(
        self, path: Path, file: BinaryIO, layout: ExpertLayout, start: int, delta_share: float
    ) -> None:
        self.path, self.file, self.layout, self.end = path, file, layout, start
        self.limit = int(delta_share * layout.bytes)
        self.entries: list[Entry] = []
        self.base: tuple[Full, Bytes] | None = None  # the one read last

    def add(self, expert: int, shard: Shard | SameAs | CloseTo) -> None:
        if isinstance(shard, SameAs):
            self.entries.append(Alias(expert, shard.of))
        elif isinstance(shard, Shard):
            self._full(expert, self._parts(expert, shard))
        else:
            parts = self._parts(expert, shard.shard)
            if not self._delta(expert, shard.of, parts):
                self._full(expert, parts)

    def _parts(self, expert: int, shard: Shard) -> list[Bytes]:
        """Codes of gate, up, down, then their scales, checked."""
        for name, matrix, shape in zip(NAMES, shard, self.layout.shapes, strict=True):
            if (matrix.format, tuple(matrix.shape)) != ("ternary", shape):
                found = f"{matrix.format} {tuple(matrix.shape)}"
                raise ArtifactError(
                    f"{self.path}: {name} of expert {expert} is {found}, must be ternary {shape}"
                )
            check(matrix, f"{self.path}: {name} of expert {expert}")
        tensors = [matrix.codes for matrix in shard] + [matrix.scales for matrix in shard]
        return [tensor.contiguous().numpy().reshape(-1).view(np.uint8) for tensor in tensors]

    def _full(self, expert: int, parts: list[Bytes]) -> None:
        digest = _digest(parts)
        self.entries.append(Full(expert, self.end, self.layout.bytes, digest))
        self._write(parts)

    def _delta(self, expert: int, of: int, parts: list[Bytes]) -> bool:
        """Store the changes from `of`; False if they are not worth it."""
        base, old = self._base(expert, of)
        scales = np.concatenate(parts[3:]).tobytes()
        new = np.concatenate(parts[:3])
        found = delta.encode(old[: self.layout.code_bytes], new, self.limit - len(scales))
        if found is None:
            return False
        payload = b"".join([scales, found.quotients, found.remainders, found.steps])
        payload = payload.ljust(page(len(payload)), b"\0")
        size, crc, quotients = len(payload), crc32c(payload), len(found.quotients)
        self.entries.append(
            Delta(
                expert,
                of,
                self.end,
                size,
                crc,
                found.changes,
                found.rice,
                quotients,
                base.digest,
                _digest(parts),
            )
        )
        self._write([np.frombuffer(payload, np.uint8)])
        return True

    def _base(self, expert: int, of: int) -> tuple[Full, Bytes]:
        """The base as it stands in the file."""
        if self.base is None or self.base[0].expert != of:
            entry = next((e for e in self.entries if e.expert == of), None)
            if not isinstance(entry, Full):
                raise ArtifactError(
                    f"{self.path}: expert {expert} is close to {of}, must be one stored in full before"
                )
            self.base = None
            self.file.seek(entry.offset)
            old = np.fromfile(self.file, np.uint8, entry.bytes)
            if self.layout.digest(old) != entry.digest:
                raise ArtifactError(f"{self.path}: expert {of} does not come back as it was written")
            self.base = (entry, old)
        return self.base

    def _write(self, parts: list[Bytes]) -> None:
        self.file.seek(self.end)
        for part in parts:
            self.file.write(part.data)
        size = sum(len(part) for part in parts)
        self.file.write(bytes(page(size) - size))
        self.end += page(size)


def _digest(parts: list[Bytes]) -> Digest:
    return tuple(crc32c(part) for part in parts)
