"""Small expert files whose experts are all different."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perspectron.stream import CloseTo, ExpertLayout, SameAs, Shard, ShardFile, write_layer
from perspectron.stream.crc import crc32c
from perspectron.stream.delta import BAD, STEPPED, TRIT
from perspectron.stream.format import MAGIC, PREFIX, VERSION, Bytes, Header, page
from perspectron.stream.parse import parse
from perspectron.stream.shards import aligned

LEGAL = np.flatnonzero(TRIT[:, 0] != BAD).astype(np.uint8)


class Lab:
    """Writes layers and says what their experts must come back as."""

    def __init__(self, d_model: int, hidden: int) -> None:
        self.layout = ExpertLayout(d_model, hidden)

    def expert(self, layer: int, expert: int) -> Bytes:
        """Random codes and scales that only (layer, expert) give, as they stand in the file."""
        rng = np.random.default_rng([layer, expert])
        buffer = aligned(self.layout.bytes)
        buffer[: self.layout.code_bytes] = LEGAL[rng.integers(0, len(LEGAL), self.layout.code_bytes)]
        return self._scales(buffer, rng)

    def near(self, base: Bytes, share: float, seed: int) -> Bytes:
        """`base` with this share of its trits changed, and other scales."""
        rng = np.random.default_rng(seed)
        buffer = aligned(self.layout.bytes)
        buffer[:] = base
        for position in np.flatnonzero(rng.random(self.layout.trits) < share).tolist():
            byte, row = divmod(position, 5)
            buffer[byte] = STEPPED[row, rng.integers(0, 2), buffer[byte]]
        return self._scales(buffer, rng)

    def _scales(self, buffer: Bytes, rng: np.random.Generator) -> Bytes:
        start, count = self.layout.code_bytes, self.layout.scale_bytes
        buffer[start : start + count] = rng.random(count // 4, dtype=np.float32).view(np.uint8)
        return buffer

    def plain(self, path: Path, layer: int, experts: int) -> dict[int, Bytes]:
        """A layer of experts that are stored in full."""
        found = {expert: self.expert(layer, expert) for expert in range(experts)}
        shards = ((expert, self.layout.shard(buffer)) for expert, buffer in found.items())
        write_layer(path, layer, self.layout, experts, shards)
        return found

    def mixed(self, path: Path, layer: int) -> dict[int, Bytes]:
        """Six experts: 0 and 3 in full, 1 and 2 close to 0, 4 the same as 3 and 5 as 0."""
        found = {expert: self.expert(layer, expert) for expert in (0, 3)}
        found |= {expert: self.near(found[0], 0.02 * expert, 10 * layer + expert) for expert in (1, 2)}
        shards: list[tuple[int, Shard | SameAs | CloseTo]] = [
            (4, SameAs(3)),
            (0, self.layout.shard(found[0])),
            (1, CloseTo(0, self.layout.shard(found[1]))),
            (2, CloseTo(0, self.layout.shard(found[2]))),
            (3, self.layout.shard(found[3])),
            (5, SameAs(0)),
        ]
        write_layer(path, layer, self.layout, 6, shards, delta_share=1.0)
        return found | {4: found[3], 5: found[0]}

    def open(self, path: Path, **options: Any) -> ShardFile:
        """Without pauses between retries."""
        return ShardFile(path, **({"backoff": 0.0} | options))

    def buffer(self) -> Bytes:
        return aligned(self.layout.bytes)


@pytest.fixture
def lab() -> Lab:
    return Lab(64, 80)


class Image:
    """An expert file in memory, to be damaged: its JSON as a value, or its bytes."""

    def __init__(self, whole: bytes) -> None:
        self.whole = whole
        length = PREFIX.unpack(whole[: PREFIX.size])[2]
        self.value = json.loads(whole[PREFIX.size : PREFIX.size + length])
        self.tail = whole[page(PREFIX.size + length) :]

    def text(self) -> bytes:
        return json.dumps(self.value, separators=(",", ":")).encode()

    def build(self, text: bytes | None = None, version: int = VERSION, magic: bytes = MAGIC) -> bytes:
        """With this JSON and right CRCs."""
        text = self.text() if text is None else text
        start = struct.pack("<8s3I", magic, version, len(text), crc32c(text))
        return (start + struct.pack("<I", crc32c(start)) + text).ljust(
            page(PREFIX.size + len(text)), b"\0"
        ) + self.tail

    @staticmethod
    def parse(whole: bytes) -> Header:
        return parse(lambda offset, count: whole[offset : offset + count], len(whole), "f")


@pytest.fixture(scope="session")
def mixed_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("image") / "f"
    Lab(64, 80).mixed(path, 3)
    return path.read_bytes()


@pytest.fixture
def image(mixed_bytes: bytes) -> Image:
    """The file of `Lab.mixed`."""
    return Image(mixed_bytes)
