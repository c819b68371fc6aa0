"""Reads of a file that is damaged, slow, cut or replaced: the right bytes or a typed error."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from perspectron.stream import expert_file, tensors
from perspectron.stream import reader as shards
from perspectron.stream.reader import Cancelled, ShardFile, pread
from perspectron.util.errors import ConfigError, ShardError
from tests.refusals import in_a_line, refused


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


FAULTS = [(eio, [4096]), (half, [4096, 4095, 8192]), (nothing, [4096, 0]), (flip, ["down.codes"])]


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
            assert count == 8192
        file.verify()


@pytest.mark.parametrize(("fault", "named"), FAULTS)
def test_a_passing_fault_is_overcome_and_a_lasting_one_named(layer, lab, fault, named: list[object]) -> None:
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
    in_a_line(error.value.cause, *named)
    assert (error.value.path, error.value.layer, error.value.expert) == (path, 3, 0)


def test_a_read_in_parts_is_completed(layer, lab) -> None:
    path, experts = layer
    buffer = lab.buffer()
    with lab.open(path, read=lambda fd, view, offset: pread(fd, view[:4096], offset)) as file:
        assert file.read_into(3, buffer) == 8192
    assert np.array_equal(buffer, experts[3])


@pytest.mark.usefixtures("small_pieces")
def test_a_slow_disk_is_an_error_with_what_came_and_when(layer, lab, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = layer
    now = [0.0]
    monkeypatch.setattr(shards.time, "monotonic", lambda: now[0])

    def slow(fd: int, view: memoryview, offset: int) -> int:
        now[0] += 31
        return pread(fd, view, offset)

    with lab.open(path, read=slow) as file, refused(ShardError, 4096, 8192, 31):
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


@pytest.mark.parametrize("change", [cut, replace, remove, rewrite])
def test_a_file_that_changes_while_open_is_refused(layer, lab, change) -> None:
    path, _ = layer
    with lab.open(path) as file:
        file.read_into(0, lab.buffer())
        change(path)
        for expert in (3, 0):
            with refused(ShardError, path, "expert", expert):
                file.read_into(expert, lab.buffer())


def test_a_file_that_is_cut_during_a_read_is_refused(layer, lab) -> None:
    path, _ = layer

    def read(fd: int, view: memoryview, offset: int) -> int:
        os.truncate(path, offset + 100)
        return pread(fd, view, offset)

    with lab.open(path, read=read) as file, refused(ShardError, path):
        file.read_into(0, lab.buffer())


def test_a_flipped_bit_of_the_payload_is_found_in_its_expert(layer, lab) -> None:
    """1,000 places: whoever needs that byte gets an error, and nobody wrong bytes."""
    path, experts = layer
    whole = path.read_bytes()
    chosen = random.Random(3)
    buffer = lab.buffer()
    header = lab.open(path).header
    for _ in range(1_000):
        at = chosen.randrange(header.start, len(whole))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << chosen.randrange(8)]))
        with lab.open(path, retries=0) as file:
            for expert in range(6):
                if header.offset(expert) <= at < header.offset(expert) + header.layout.bytes:
                    with refused(ShardError, path, "expert", expert):
                        file.read_into(expert, buffer)
                else:
                    file.read_into(expert, buffer)
                    assert np.array_equal(buffer, experts[expert])
        with path.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])


def test_a_read_given_up_in_its_second_attempt_counts_both(layer, lab) -> None:
    path, _ = layer
    asked: list[bool] = []

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        count = pread(fd, buffer, offset)
        buffer[0] ^= 1
        return count

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) == 2

    with lab.open(path, read=read, retries=2, backoff=0) as file, pytest.raises(Cancelled) as raised:
        file.read_into(0, lab.buffer(), cancelled)
    assert raised.value.count == lab.layout.bytes


def test_verify_finds_illegal_codes_behind_right_digests(
    tmp_path: Path, lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, buffers = tmp_path / "layer", [lab.expert(3, 0), lab.expert(3, 1)]
    buffers[1][0] = 252
    with monkeypatch.context() as patch:
        patch.setattr(expert_file, "check", lambda *_: None)
        expert_file.write_layer(path, 3, lab.layout, [0, 1], map(lab.layout.shard, buffers))
    with lab.open(path) as file:
        file.read_into(1, lab.buffer())
        with refused(ShardError, "expert", 1, "gate"):
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
        buffer = tensors.aligned(size)
        assert len(buffer) == size
        assert buffer.ctypes.data % (4096 if size < tensors.HUGE else tensors.HUGE) == 0
