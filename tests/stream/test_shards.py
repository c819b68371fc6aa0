"""Reads of a file that is damaged, slow, cut or replaced: the right bytes or a typed error."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from perspectron.errors import ArtifactError, ConfigError, DataError, ShardError
from perspectron.stream import CloseTo, ExpertLayout, SameAs, ShardFile, shards, write_layer
from perspectron.stream.crc import crc32c
from perspectron.stream.format import Delta, Full
from perspectron.stream.probe import probe
from perspectron.stream.shards import Cancelled, pread


@pytest.fixture
def layer(tmp_path: Path, lab):
    """(path, experts) of `Lab.mixed`."""
    path = tmp_path / "layer-3"
    return path, lab.mixed(path, 3)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PIECE", 4096)


class Faulty:
    """A reader that misbehaves in its first `times` reads."""

    def __init__(self, times: int, fault) -> None:
        self.left, self.fault, self.calls = times, fault, 0

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            return self.fault(fd, buffer, offset)
        return pread(fd, buffer, offset)


def eio(fd: int, buffer: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def half(fd: int, buffer: memoryview, offset: int) -> int:
    return pread(fd, buffer[: len(buffer) // 2 - 1], offset)


def nothing(fd: int, buffer: memoryview, offset: int) -> int:
    return 0


def flip(fd: int, buffer: memoryview, offset: int) -> int:
    count = pread(fd, buffer, offset)
    buffer[count // 3] ^= 16
    return count


FAULTS = [
    (eio, "read error at byte 4096 (Input/output error)"),
    (half, "short read at byte 4096: 4095 bytes, must be 8192"),
    (nothing, "short read at byte 4096: 0 bytes"),
    (flip, "CRC-32C of the codes of down is wrong"),
]


@pytest.mark.parametrize("method", ["direct", "buffered"])
def test_every_kind_of_expert_comes_back(layer, lab, method) -> None:
    path, experts = layer
    try:
        file = ShardFile(path, method)
    except ConfigError:
        pytest.skip("no direct reads on this disk")
    buffer = lab.buffer()
    with file:
        for expert in (5, 2, 0, 4, 1, 3):
            buffer[:] = 0xEE
            count = file.read_into(expert, buffer)
            assert np.array_equal(buffer, experts[expert])
            assert count == 8192 + 4096 * (expert in (1, 2))
        file.verify()


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_passing_fault_is_overcome_and_a_lasting_one_named(layer, lab, fault, message: str) -> None:
    path, experts = layer
    buffer = lab.buffer()
    passing = Faulty(3, fault)
    with lab.open(path, read=passing) as file:
        file.read_into(0, buffer)
        assert np.array_equal(buffer, experts[0])
        assert passing.calls == 4
    lasting = Faulty(10**6, fault)
    with lab.open(path, read=lasting) as file, pytest.raises(ShardError) as error:
        file.read_into(0, buffer)
    assert lasting.calls == 4
    assert str(error.value) == f"{path}: layer 3, expert 0: {error.value.cause}"
    assert message in error.value.cause
    assert (error.value.path, error.value.layer, error.value.expert) == (path, 3, 0)


def test_a_read_in_parts_is_completed(layer, lab) -> None:
    path, experts = layer
    buffer = lab.buffer()
    with lab.open(path, read=lambda fd, view, offset: pread(fd, view[:4096], offset)) as file:
        assert file.read_into(3, buffer) == 8192
    assert np.array_equal(buffer, experts[3])


@pytest.mark.usefixtures("small_pieces")
def test_a_slow_disk_is_reported(layer, lab, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = layer
    now = [0.0]
    monkeypatch.setattr(shards.time, "monotonic", lambda: now[0])

    def slow(fd: int, view: memoryview, offset: int) -> int:
        now[0] += 31
        return pread(fd, view, offset)

    with (
        lab.open(path, read=slow) as file,
        pytest.raises(ShardError, match=r"slow disk: 4096 of 8192 bytes in 31 s"),
    ):
        file.read_into(0, lab.buffer())


@pytest.mark.usefixtures("small_pieces")
def test_a_read_can_be_given_up_between_pieces(layer, lab) -> None:
    path, _ = layer
    seen: list[int] = []

    def read(fd: int, view: memoryview, offset: int) -> int:
        seen.append(offset)
        return pread(fd, view, offset)

    with lab.open(path, read=read) as file, pytest.raises(Cancelled):
        file.read_into(0, lab.buffer(), lambda: len(seen) == 1)
    assert seen == [4096]


def cut(path: Path) -> None:
    os.truncate(path, 12000)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def remove(path: Path) -> None:
    path.unlink()


def rewrite(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "what"), [(cut, "changed"), (replace, "replaced"), (remove, "removed"), (rewrite, "changed")]
)
def test_a_file_that_changes_while_open_is_refused(layer, lab, change, what: str) -> None:
    path, _ = layer
    with lab.open(path) as file:
        file.read_into(0, lab.buffer())
        change(path)
        for expert in (3, 0):
            with pytest.raises(ShardError, match=f"file was {what} while open"):
                file.read_into(expert, lab.buffer())


def test_a_file_cut_during_a_read(layer, lab) -> None:
    path, _ = layer

    def read(fd: int, view: memoryview, offset: int) -> int:
        os.truncate(path, offset + 100)
        return pread(fd, view, offset)

    with lab.open(path, read=read) as file, pytest.raises(ShardError, match="changed while open"):
        file.read_into(0, lab.buffer())


def test_any_bit_of_the_payload(layer, lab) -> None:
    """1,000 places: whoever needs that byte gets an error, and nobody wrong bytes."""
    path, experts = layer
    whole = path.read_bytes()
    chosen = random.Random(3)
    buffer = lab.buffer()
    header = lab.open(path).header
    needs = {expert: [header.stored(expert)] for expert in range(6)}
    for found in needs.values():
        if isinstance(found[0], Delta):
            found.append(header.by_expert[found[0].of])
    for _ in range(1_000):
        at = chosen.randrange(4096, len(whole))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << chosen.randrange(8)]))
        with lab.open(path, retries=0) as file:
            for expert, parts in needs.items():
                if any(part.offset <= at < part.offset + part.bytes for part in parts):
                    with pytest.raises(ShardError, match=f"expert {expert}: "):
                        file.read_into(expert, buffer)
                else:
                    file.read_into(expert, buffer)
                    assert np.array_equal(buffer, experts[expert])
        with path.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])


def test_a_base_in_memory_is_checked(layer, lab) -> None:
    path, experts = layer
    buffer, base = lab.buffer(), experts[0].copy()
    with lab.open(path) as file:
        assert file.read_into(1, buffer, base=base) == 4096
        assert np.array_equal(buffer, experts[1])
        base[7] ^= 1
        with pytest.raises(
            ShardError, match="expert 1: expert 0, which it is stored as changes from, was damaged in memory"
        ):
            file.read_into(1, buffer, base=base)


def forged(path: Path, image, change) -> None:
    """Rewrite the changes of expert 1 with `change`, and their CRC."""
    entry = image.value["shards"][2]
    start = entry["offset"] - (len(image.whole) - len(image.tail))
    payload = np.frombuffer(image.tail, np.uint8)[start : start + entry["bytes"]].copy()
    change(entry, payload)
    entry["crc32c"] = crc32c(payload)
    image.tail = image.tail[:start] + payload.tobytes() + image.tail[start + entry["bytes"] :]
    path.write_bytes(image.build())


def more_ones(entry: dict, payload: np.ndarray) -> None:
    payload[896 : 896 + entry["quotient_bytes"]] = 255


def no_ones(entry: dict, payload: np.ndarray) -> None:
    payload[896 : 896 + entry["quotient_bytes"]] = 0


def far(entry: dict, payload: np.ndarray) -> None:
    entry["rice"] = 15


def other_step(entry: dict, payload: np.ndarray) -> None:
    payload[896 + entry["quotient_bytes"] + -(-entry["changes"] * entry["rice"] // 8)] ^= 1


def other_result(entry: dict, payload: np.ndarray) -> None:
    entry["result"][3] ^= 1


@pytest.mark.parametrize(("change", "message"), [
    (more_ones, "more than the 383 changes"), (no_ones, "0 changes, must be 383"), (far, "a change at trit"),
    (other_step, "give other weights than they should"), (other_result, "give other weights than they should"),
])  # fmt: skip
def test_changes_with_a_right_crc_that_are_wrong(tmp_path: Path, lab, image, change, message: str) -> None:
    path = tmp_path / "layer"
    forged(path, image, change)
    with lab.open(path) as file:
        with pytest.raises(ShardError, match="layer 3, expert 1: changes from expert 0") as error:
            file.read_into(1, lab.buffer())
        assert message in str(error.value)
        file.read_into(2, lab.buffer())


def test_verify_finds_illegal_codes_behind_right_crcs(tmp_path: Path, lab, image) -> None:
    entry = image.value["shards"][1]
    tail = bytearray(image.tail)
    tail[0] = 252
    image.tail = bytes(tail)
    entry["gate"]["crc32c"] = crc32c(tail[:1024])
    for shard in image.value["shards"][2:4]:
        shard["base"][0] = entry["gate"]["crc32c"]
    path = tmp_path / "layer"
    path.write_bytes(image.build())
    with (
        lab.open(path) as file,
        pytest.raises(ShardError, match="expert 0: gate: 1 bytes, must be 0, are no ternary codes"),
    ):
        file.verify()


def test_views_are_of_the_buffer(layer, lab) -> None:
    path, experts = layer
    buffer = lab.buffer()
    shard = lab.layout.shard(buffer)
    with lab.open(path) as file:
        file.read_into(3, buffer)
    want = lab.layout.shard(experts[3])
    assert all(a.codes.equal(b.codes) and a.scales.equal(b.scales) for a, b in zip(shard, want, strict=True))
    assert [matrix.shape for matrix in shard] == [(80, 64), (80, 64), (64, 80)]
    assert shard.up.scales.dtype == torch.float32


def test_memory_of_experts_is_aligned() -> None:
    for size in (4096, 3 << 20, 27_172_864):
        buffer = shards.aligned(size)
        assert len(buffer) == size
        assert buffer.ctypes.data % (4096 if size < shards.HUGE else shards.HUGE) == 0


def test_the_sizes_of_the_full_model() -> None:
    layout = ExpertLayout(4096, 11008)
    assert (layout.code_bytes, layout.scale_bytes) == (27_065_344, 104_448)
    assert layout.bytes % 4096 == 0


def test_a_disk_is_probed_once(layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = layer
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = tmp_path / "cache" / "perspectron" / "disks.json"
    assert probe(path).method in ("direct", "buffered")
    assert not memory.exists()  # the file is too small to say much
    monkeypatch.setattr("perspectron.stream.probe.PIECE", 4096)
    first = probe(path)
    assert memory.exists()
    assert probe(path) == first
    assert str(first).startswith(f"{first.method} ") and str(first).count(first.method) == 1
    memory.write_text('{"8:1 5": {"mapped": 3}, ')
    assert probe(path).bytes_per_second.keys() == first.bytes_per_second.keys()
    memory.unlink()
    with pytest.raises(ArtifactError):
        probe(tmp_path)


def test_what_cannot_be_written(tmp_path: Path, lab) -> None:
    """And what stood there still stands."""
    path, layout = tmp_path / "layer", lab.layout
    lab.plain(path, 0, 1)
    before = path.read_bytes()
    good, other = layout.shard(lab.expert(0, 0)), ExpertLayout(64, 85)
    wrong = lab.expert(0, 1)
    wrong[5] = 255
    endless = lab.expert(0, 1)
    endless[layout.code_bytes :][:4] = np.array([np.inf], np.float32).view(np.uint8)
    cases = [
        ([(0, good)], ArtifactError, "1 experts were given, must be 2"),
        ([(0, good), (0, good)], ArtifactError, "shards[1].expert = 0"),
        ([(0, good), (2, good)], ArtifactError, "shards[1].expert = 2"),
        ([(0, good), (1, SameAs(1))], ArtifactError, "shards[1].of = 1"),
        (
            [(1, CloseTo(0, good)), (0, good)],
            ArtifactError,
            "expert 1 is close to 0, must be one stored in full before",
        ),
        (
            [(0, good), (1, other.shard(shards.aligned(other.bytes)))],
            ArtifactError,
            "gate of expert 1 is ternary (85, 64)",
        ),
        ([(0, good), (1, layout.shard(wrong))], DataError, "gate of expert 1: 1 bytes, must be 0"),
        ([(0, good), (1, layout.shard(endless))], DataError, "gate of expert 1: a scale is not finite"),
    ]
    for items, kind, message in cases:
        with pytest.raises(kind) as error:
            write_layer(path, 0, layout, 2, items)
        assert message in str(error.value)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["layer"]
    with pytest.raises(ArtifactError, match="whose header takes"):
        write_layer(path, 0, layout, 65536, [])


def test_changes_are_stored_only_where_they_save_enough(tmp_path: Path, lab) -> None:
    old = lab.expert(0, 0)
    items = [(0, lab.layout.shard(old)), (1, CloseTo(0, lab.layout.shard(lab.near(old, 0.01, 1))))]
    for share, kind in ((0.5, Delta), (0.1, Full)):
        header = write_layer(tmp_path / "layer", 0, lab.layout, 2, items, delta_share=share)
        assert type(header.by_expert[1]) is kind
