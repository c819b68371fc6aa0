import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perspectron import native
from perspectron.ops.packing import unpack
from perspectron.stream import CloseTo, ExpertLayout, SameAs, ShardFile, crc, delta, write_layer
from perspectron.stream.format import Delta
from perspectron.stream.shards import aligned


def changed(lab, old: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    new = old.copy()
    delta._step(new, positions, np.random.default_rng(seed).integers(0, 2, len(positions)).astype(np.uint8))
    return new


def roundtrip(layout: ExpertLayout, old: np.ndarray, new: np.ndarray) -> int:
    """Bytes of the changes, once applying them gave `new`."""
    found = delta.encode(old, new, 10**9)
    entry = Delta(1, 0, 0, 0, 0, found.changes, found.rice, len(found.quotients), (), ())
    sections = found.quotients + found.remainders + found.steps
    payload = np.frombuffer(bytes(layout.scale_bytes) + sections, np.uint8)
    assert entry.parts(layout)[-1].stop == len(payload)
    result = old.copy()
    delta.apply(result, entry, payload, layout)
    assert np.array_equal(result, new)
    return len(sections)


@pytest.mark.parametrize("positions", [[], [0], [-1], [0, -1], [3, 4, 5, 6, 7], "all", "half"])
def test_changes_lead_to_the_new_codes(lab, positions) -> None:
    old = lab.expert(0, 0)[: lab.layout.code_bytes]
    every = np.arange(lab.layout.trits)
    chosen = (
        {"all": every, "half": every[::2]}.get(positions) if isinstance(positions, str) else every[positions]
    )
    roundtrip(lab.layout, old, changed(lab, old, chosen, 1))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.4])
def test_they_take_little_more_than_their_entropy(lab, share: float) -> None:
    """In pieces, too: there are more than one of codes and of quotients."""
    layout = ExpertLayout(512, 1500)
    old = type(lab)(512, 1500).expert(0, 0)[: layout.code_bytes]
    positions = np.flatnonzero(np.random.default_rng(2).random(layout.trits) < share)
    entropy = layout.trits * -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    assert roundtrip(layout, old, changed(lab, old, positions, 3)) < 1.03 * (entropy + len(positions) / 8)


def test_none_where_they_take_too_much(lab) -> None:
    old, new = (lab.expert(0, expert)[: lab.layout.code_bytes] for expert in (0, 1))
    assert delta.encode(old, new, lab.layout.code_bytes // 2) is None


KINDS = st.lists(st.tuples(st.sampled_from(["full", "near", "same"]), st.integers(0, 5)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(d_model=st.integers(1, 150), hidden=st.integers(1, 150), kinds=KINDS, seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(tmp_path_factory, d_model: int, hidden: int, kinds, seed: int) -> None:
    layout, rng = ExpertLayout(d_model, hidden), np.random.default_rng(seed)

    def random() -> np.ndarray:
        buffer = aligned(layout.bytes)
        shape = (layout.code_bytes, 5)
        buffer[: layout.code_bytes] = rng.integers(0, 3, shape) @ np.array(delta.RADIX)
        end = layout.code_bytes + layout.scale_bytes
        buffer[layout.code_bytes : end] = (
            rng.normal(size=layout.scale_bytes // 4).astype(np.float32).view(np.uint8)
        )
        return buffer

    experts, items, full = [random()], [], [0]
    items.append((0, layout.shard(experts[0])))
    for kind, of in kinds:
        expert, base = len(experts), full[of % len(full)]
        if kind == "same":
            experts.append(experts[base])
            items.append((expert, SameAs(base)))
            continue
        experts.append(random())
        if kind == "near":
            experts[-1][: layout.code_bytes] = experts[base][: layout.code_bytes]
            experts[-1][0] = rng.choice([0, 124, 242])
            items.append((expert, CloseTo(base, layout.shard(experts[-1]))))
        else:
            full.append(expert)
            items.append((expert, layout.shard(experts[-1])))
    path: Path = tmp_path_factory.mktemp("written") / "layer"
    header = write_layer(path, 9, layout, len(items), items)
    buffer = aligned(layout.bytes)
    with ShardFile(path, backoff=0) as file:
        assert file.header == header
        for expert, want in enumerate(experts):
            file.read_into(expert, buffer)
            assert np.array_equal(buffer, want)
        file.verify()
    assert all(unpack(matrix).max() <= 2 for matrix in layout.shard(buffer))


# ---------------------------------------------------------------- checksums


def test_crc_of_the_standard() -> None:
    """RFC 3720, B.4."""
    vectors = [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)]
    for data, value in [*vectors, (bytes(range(32)), 0x46DD794E), (b"", 0)]:
        assert crc.crc32c(data) == value
        assert crc._portable(np.frombuffer(data, np.uint8), 0) == value


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100, 1000, 8191, 70_000, 300_001])
def test_crc_goes_on_from_what_came_before(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    whole = crc._portable(data, 0)
    for cut in {0, 1, size // 3, size - 1, size}:
        assert crc._portable(data[cut:], crc._portable(data[:cut], 0)) == whole
        assert crc.crc32c(data[cut:], crc.crc32c(data[:cut])) == whole


def test_crc_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(256, dtype=torch.uint8).numpy()
    found = crc.crc32c(data)
    monkeypatch.setattr(native, "wanted", lambda: False)
    assert crc.crc32c(data) == found
