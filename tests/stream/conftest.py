"""Small expert files whose experts are all different."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perspectron.stream.expert_file import ExpertLayout, Header, parse, write_layer
from perspectron.stream.reader import ShardFile
from perspectron.stream.tensors import Bytes, aligned

LEGAL = np.array([84 * t4 + low for t4 in range(3) for low in range(81)], np.uint8)


class Lab:
    """Writes layers and says what their experts must come back as."""

    def __init__(self, d_model: int, hidden: int) -> None:
        self.layout = ExpertLayout(d_model, hidden)

    def expert(self, layer: int, expert: int) -> Bytes:
        """Random codes and scales that only (layer, expert) give, as they stand in the file."""
        rng = np.random.default_rng([layer, expert])
        buffer, start, end = self.buffer(), self.layout.parts[3].start, self.layout.parts[-1].start
        buffer[:start] = LEGAL[rng.integers(0, len(LEGAL), start)]
        buffer[start:end] = rng.random((end - start) // 4, dtype=np.float32).view(np.uint8)
        return buffer

    def layer(self, path: Path, layer: int, weights_of: list[int]) -> dict[int, Bytes]:
        """Write a layer; every expert's bytes."""
        stored = {expert: self.expert(layer, expert) for expert in sorted(set(weights_of))}
        write_layer(path, layer, self.layout, weights_of, map(self.layout.shard, stored.values()))
        return {expert: stored[of] for expert, of in enumerate(weights_of)}

    def plain(self, path: Path, layer: int, experts: int) -> dict[int, Bytes]:
        """A layer of experts that are all stored."""
        return self.layer(path, layer, list(range(experts)))

    def mixed(self, path: Path, layer: int) -> dict[int, Bytes]:
        """Six experts: 0 to 3 are stored, 4 is the same as 3, and 5 as 0."""
        return self.layer(path, layer, [0, 1, 2, 3, 3, 0])

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
        length = int.from_bytes(whole[:8], "little")
        self.value = json.loads(whole[8 : 8 + length])
        self.head, self.tail = whole[: 8 + length], whole[8 + length :]

    def text(self) -> bytes:
        return json.dumps(self.value, separators=(",", ":")).encode()

    def build(self, text: bytes | None = None) -> bytes:
        """The file with this JSON."""
        text = self.text() if text is None else text
        text += b" " * (-(8 + len(text)) % 4096)
        return len(text).to_bytes(8, "little") + text + self.tail

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
