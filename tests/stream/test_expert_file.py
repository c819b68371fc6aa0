"""Expert files: what is written is read, by any reader of safetensors; and what is not as it must be, is refused."""

import copy
import json
import os
import random
import resource
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest

from perspectron.experts.router import RoutedConfig
from perspectron.model.census import packed_expert
from perspectron.ops.packing import unpack
from perspectron.stream.expert_file import MAX_HEADER, ExpertLayout, dump, write_layer
from perspectron.stream.reader import ShardFile
from perspectron.stream.tensors import aligned
from perspectron.util.errors import ArtifactError, DataError
from tests.refusals import refused

KINDS = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(d_model=st.integers(1, 150), hidden=st.integers(1, 150), kinds=KINDS, seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(tmp_path_factory, d_model: int, hidden: int, kinds, seed: int) -> None:
    """kinds: of each expert after the first, None if it is stored, else which of the stored ones it is the same as."""
    layout, rng = ExpertLayout(d_model, hidden), np.random.default_rng(seed)
    weights_of = [0]
    for kind in kinds:
        stored = sorted(set(weights_of))
        weights_of.append(len(weights_of) if kind is None else stored[kind % len(stored)])
    experts = {}
    for expert in sorted(set(weights_of)):
        experts[expert] = buffer = aligned(layout.bytes)
        codes, end = layout.parts[3].start, layout.parts[-1].start
        buffer[:codes] = rng.integers(0, 3, (codes, 5)) @ np.array([1, 3, 9, 27, 84])
        buffer[codes:end] = rng.normal(size=(end - codes) // 4).astype(np.float32).view(np.uint8)
    path: Path = tmp_path_factory.mktemp("written") / "layer"
    header = write_layer(path, 9, layout, weights_of, map(layout.shard, experts.values()))
    buffer = aligned(layout.bytes)
    with ShardFile(path, backoff=0) as file:
        assert file.header == header and header.start % 4096 == 0 and header.end == path.stat().st_size
        for expert, of in enumerate(weights_of):
            file.read_into(expert, buffer)
            assert np.array_equal(buffer, experts[of])
        file.verify()
    assert all(unpack(matrix).max() <= 2 for matrix in layout.shard(buffer))


@pytest.mark.parametrize("widths", [(64, 80), (1, 1), (65, 471), (192, 8)])
def test_any_reader_of_safetensors_reads_it(tmp_path: Path, lab, widths) -> None:
    """Also where an expert fills its pages to the last byte, and there is no padding."""
    lab = type(lab)(*widths)
    path, layout = tmp_path / "layer.safetensors", lab.layout
    experts = lab.mixed(path, 3)
    assert (widths == (192, 8)) == (layout.tensors[-1][2] == (0,))
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(
            f"{expert}.{part}" for expert in range(4) for part in lab.layout.names
        )
        metadata = file.metadata()
        digests = iter(metadata["xxh3_64"].split())
        for expert in range(4):
            shard = layout.shard(experts[expert])
            for part in lab.layout.names:
                tensor = file.get_tensor(f"{expert}.{part}")
                assert xxh3_64_hexdigest(tensor.flatten().view(torch.uint8).numpy().data) == next(digests)
                if part == "padding":
                    assert not tensor.any()
                else:
                    matrix, kind = part.split(".")
                    assert torch.equal(tensor, getattr(getattr(shard, matrix), kind))
    assert next(digests, None) is None
    kept = {"layer": "3", "d_model": str(widths[0]), "hidden": str(widths[1]), "weights_of": "0 1 2 3 3 0"}
    assert kept.items() <= metadata.items()


def test_the_sizes_of_the_full_model() -> None:
    layout = ExpertLayout(4096, 11008)
    codes, scales = packed_expert(4096, RoutedConfig(11008, (8, 4, 4)))
    assert (
        (layout.parts[3].start, layout.parts[-1].start) == (codes, codes + scales) == (27_065_344, 27_169_792)
    )
    assert layout.bytes % 4096 == 0 and layout.bytes - codes - scales < 4096


# ---------------------------------------------------------------- what is refused


def put(*path: Any, value: Any) -> Callable[[dict], None]:
    """Set the value at a path of keys; None: take it out."""

    def change(header: dict) -> None:
        for key in path[:-1]:
            header = header[key]
        if value is None:
            del header[path[-1]]
        else:
            header[path[-1]] = value

    return change


META = "__metadata__"
VALUES = [
    ("no metadata", put(META, value=None), ["__metadata__"]),
    ("metadata is a list", put(META, value=[1]), []),
    ("no layer", put(META, "layer", value=None), ["layer"]),
    ("layer is a number", put(META, "layer", value=3), ["metadata"]),
    ("another layer", put(META, "layer", value="4"), []),
    ("layer with a blank", put(META, "layer", value=" 3"), []),
    ("layer is too high", put(META, "layer", value="65536"), ["layer", 65536]),
    ("layer is negative", put(META, "layer", value="-1"), ["layer", -1]),
    ("layer is no number", put(META, "layer", value="one"), ["'one'"]),
    ("layer of 9000 digits", put(META, "layer", value="9" * 9000), []),
    ("another format", put(META, "format", value="pt"), ["format", "pt", "perspectron-experts-2"]),
    ("one field more", put(META, "owner", value="me"), []),
    ("no experts", put(META, "weights_of", value=""), ["experts", 0]),
    ("too many experts", put(META, "weights_of", value="0 " * 65537), ["experts", 65537]),
    ("the weights of a later one", put(META, "weights_of", value="1 1 2 3 3 0"), ["expert", 0, 1]),
    ("the weights of none", put(META, "weights_of", value="0 1 2 3 3 9"), ["expert", 5, 9]),
    ("the same as the same", put(META, "weights_of", value="0 1 2 3 3 4"), ["expert", 5, 4]),
    ("the same as one before", put(META, "weights_of", value="0 1 2 3 3 -6"), ["expert", 5, -6]),
    ("one stored expert more", put(META, "weights_of", value="0 1 2 3 3 5"), ["digests", 28, 35]),
    ("one expert less", put(META, "weights_of", value="0 1 2 3 3"), []),
    ("d_model of 0", put(META, "d_model", value="0"), ["d_model", 0]),
    ("absurd d_model", put(META, "d_model", value="1099511627776"), ["d_model", 2**40]),
    ("absurd hidden", put(META, "hidden", value=str(2**63)), ["hidden", 2**63]),
    ("another width", put(META, "d_model", value="128"), []),
    ("the largest widths", lambda h: h[META].update(d_model="65536", hidden="65536"), []),
    ("no digests", put(META, "xxh3_64", value=""), ["digests", 0]),
    ("a digest less", lambda h: h[META].update(xxh3_64=h[META]["xxh3_64"][:-17]), ["digests", 27]),
    ("another digest", lambda h: h[META].update(xxh3_64="0" + h[META]["xxh3_64"][1:]), []),
    ("no digest of the metadata", put(META, "header", value=None), []),
    ("a tensor less", put("2.padding", value=None), ["tensors", 27]),
    ("a tensor more", put("4.padding", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), ["tensors", 29]),
    ("an overlap", put("1.up.codes", "data_offsets", value=[0, 1024]), []),
    ("a gap", put("1.up.codes", "data_offsets", 0, value=5121), []),
    ("a tensor of nothing", put("1.up.codes", "data_offsets", value=[5120, 5120]), []),
    ("an absurd offset", put("3.padding", "data_offsets", 1, value=2**62), []),
    ("another dtype", put("1.up.scales", "dtype", value="I32"), []),
    ("another shape", put("1.up.codes", "shape", value=[8, 128]), []),
    ("another order", lambda h: h.update({"0.up.codes": h.pop("0.up.codes")}), []),
]  # fmt: skip

TEXTS = [
    ("an array", b"[1]", []),
    ("a number", b"12", []),
    ("nothing", b"  ", []),
    ("half an object", b'{"__metadata__":', []),
    ("two values", b"{} {}", []),
    ("a byte order mark", b"\xef\xbb\xbf{}", []),
    ("no UTF-8", b'{"layer": "\xff"}', []),
    ("3000 levels", b"[" * 300_000, []),
    ("a number of 9000 digits", b"9" * 9000, [64]),
    ("a lone surrogate", b'{"__metadata__": {"format": "\\ud800"}}', ["format", r"\ud800"]),
    (
        "a long format",
        b'{"__metadata__": {"format": "' + b"x" * 5000 + b'"}}',
        ["format", "perspectron-experts-2"],
    ),
]

BYTES = [
    ("empty", lambda b: b"", [0]),
    ("7 bytes", lambda b: b[:7], [7]),
    ("another magic", lambda b: b"\x7fELF" + b[4:], []),
    ("the longest header", lambda b: b"\xff" * 8 + b[8:], [2**64 - 1]),
    ("a header over the limit", lambda b: (MAX_HEADER + 1).to_bytes(8, "little") + bytes(3 << 20), [MAX_HEADER + 1]),
    ("a header past the end", lambda b: b[:3000], [3000]),
    ("only a header", lambda b: b[:4096], [4096, 36864]),
    ("last byte missing", lambda b: b[:-1], [36863, 36864]),
    ("a page more", lambda b: b + bytes(4096), [40960, 36864]),
    ("text in the padding", lambda b: b[:4095] + b"x" + b[4096:], []),
    ("a shorter header", lambda b: (len(b) - 5000).to_bytes(8, "little") + b[8:], []),
]  # fmt: skip


def unread(image, whole: bytes, named: list[object]) -> None:
    with refused(ArtifactError, "f", *named) as error:
        image.parse(whole)
    said = str(error.value)
    assert len(said) < 400
    said.encode()


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES])
def test_another_value_is_refused(image, change: Callable[[dict], None], named: list[object]) -> None:
    change(image.value)
    unread(image, image.build(), named)


@pytest.mark.parametrize(("text", "named"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS])
def test_other_json_is_refused(image, text: bytes, named: list[object]) -> None:
    unread(image, image.build(text), named)


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in BYTES], ids=[case[0] for case in BYTES])
def test_other_bytes_are_refused(image, tmp_path: Path, change, named: list[object]) -> None:
    whole = change(image.whole)
    unread(image, whole, named)
    path = tmp_path / "layer"
    path.write_bytes(whole)
    with refused(ArtifactError, path, *named):
        ShardFile(path)


def test_an_unchanged_header_is_taken(image) -> None:
    assert image.build() == image.whole
    assert dump(image.parse(image.whole)) == image.head


def test_any_byte_of_the_header(image) -> None:
    """Each byte of the header's pages, some of its bits, one at a time, and the byte replaced by a likely one."""
    chosen = random.Random(5)
    for at, byte in enumerate(image.head):
        for other in (byte ^ 1 << chosen.randrange(8), byte ^ 1, ord(chosen.choice('0 9",a'))):
            if other != byte:
                whole = bytearray(image.whole)
                whole[at] = other
                with pytest.raises(ArtifactError):
                    image.parse(bytes(whole))


HOSTILE = [
    *(0, 1, 2, 3, 5, 4095, 4096, 8192, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**64, 10**30, -1, -4096, -(2**63)),
    *(1.5, 4096.0, 1e300, float("nan"), float("inf"), True, False, None, "", "0", "-1", "3 3", "../x", "\0", "U8"),
    *([], {}, [[]], [0, 0], {"data_offsets": [0, 0]}, "x" * 100, str(2**62), "0 1 2 3"),
]  # fmt: skip


def places(value: Any, listed: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of all values inside."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        listed.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], listed)
    return listed


def mutant(image, chosen: random.Random) -> bytes:
    """One file: its JSON changed as a value or as text, or its bytes changed, cut or spliced."""
    kind, hostile = chosen.randrange(8), copy.deepcopy(HOSTILE)
    if kind < 4:
        value = json.loads(image.text())
        for _ in range(chosen.choice((1, 1, 1, 2, 3))):
            box, key = chosen.choice(
                places(value[META] if chosen.randrange(2) and META in value else value, [])
            )
            what = chosen.randrange(5)
            if what == 0:
                del box[key]
            elif what == 1 and isinstance(box, list):
                box.insert(key, chosen.choice([*hostile, copy.copy(box[key])]))
            elif what == 1:
                box[chosen.choice(("layer", "shape", "data_offsets", "x"))] = chosen.choice(hostile)
            elif what == 2 and type(box[key]) is int:
                box[key] += chosen.choice((-4096, -64, -4, -1, 1, 4, 64, 4096))
            else:
                box[key] = chosen.choice(hostile)
            if not value.get(META) or not isinstance(value[META], dict):
                break
        return image.build(json.dumps(value, separators=(",", ":")).encode())
    if kind < 6:
        text = bytearray(image.text())
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.randrange(len(text))
            pieces = (b"", b"[", b"{", b'"', b",", b"0", b"-", b"9" * 30, bytes([chosen.randrange(256)]))
            text[at : at + chosen.randrange(3)] = chosen.choice(pieces)
        return image.build(bytes(text))
    whole = bytearray(image.whole)
    if kind == 6:
        for _ in range(chosen.randrange(1, 5)):
            whole[chosen.randrange(chosen.choice((8, len(image.head))))] ^= 1 << chosen.randrange(8)
        return bytes(whole)
    a, b = sorted(chosen.choices(range(len(whole)), k=2))
    return bytes(chosen.choice((whole[:a], whole[:a] + whole[b:], whole[:b] + whole[a:], whole[a:])))


@pytest.mark.parametrize("seed", range(10))
def test_mutants_are_refused_or_the_same(image, seed: int) -> None:
    """3,000 for each seed. Only a file whose header is as it was, and whose size is right, is taken."""
    chosen = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, refusals, longest = 0.0, 0, 0
    for _ in range(3_000):
        whole = mutant(image, chosen)
        start = time.thread_time()
        try:
            image.parse(whole)
        except ArtifactError as error:
            refusals, longest = refusals + 1, max(longest, len(str(error)))
        else:
            assert whole[: len(image.head)] == image.head and len(whole) == len(image.whole)
        slowest = max(slowest, time.thread_time() - start)
    assert refusals > 2_500
    assert slowest < 1 and longest < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


MOST = MAX_HEADER - 4096
FIELDS = b'{"__metadata__":{"format":"perspectron-experts-2","d_model":"1","hidden":"1","layer":"0",'
LONG = {
    "numbers": b"[" + b"0," * (MOST // 2 - 1) + b"0]",
    "objects": b"[" + b"{}," * (MOST // 3 - 1) + b"0]",
    "lists": b"[" + b"[0]," * (MOST // 4 - 1) + b"0]",
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(MOST // 11)) + b"}",
    "experts": FIELDS + b'"xxh3_64":"0","weights_of":"' + b"0 " * (MOST // 2 - 80) + b'"}}',
    "digests": FIELDS + b'"weights_of":"0","xxh3_64":"' + b"0 " * (MOST // 2 - 80) + b'"}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_memory_is_bounded_by_the_file_and_64_mib(text: bytes, image) -> None:
    whole = image.build(text)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            image.parse(whole)
        assert tracemalloc.get_traced_memory()[1] < len(whole) + (64 << 20)
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", ".", "none", "loop"):
        with refused(ArtifactError, tmp_path / name):
            ShardFile(tmp_path / name)


def test_experts_that_cannot_be_written_leave_what_stood_there(tmp_path: Path, lab) -> None:
    """And what stood there still stands."""
    path, layout = tmp_path / "layer", lab.layout
    lab.plain(path, 0, 1)
    before = path.read_bytes()
    good, other = layout.shard(lab.expert(0, 0)), ExpertLayout(64, 85)
    wrong = lab.expert(0, 1)
    wrong[5] = 255
    endless = lab.expert(0, 1)
    endless[layout.parts[3].start :][:4] = np.array([np.inf], np.float32).view(np.uint8)
    wider = other.shard(aligned(other.bytes))
    cases = [
        ([0, 1], [good], ArtifactError, [2]),
        ([0, 0], [good, good], ArtifactError, [1]),
        ([1, 1], [good], ArtifactError, ["expert", 0, 1]),
        ([], [], ArtifactError, ["experts", 0]),
        ([0] * 65537, [good], ArtifactError, ["experts", 65537]),
        ([0, 1], [good, wider], ArtifactError, ["expert", 1, "gate", "(85,", "(80,"]),
        ([0, 1], [good, layout.shard(wrong)], DataError, ["expert", 1, "gate"]),
        ([0, 1], [good, layout.shard(endless)], DataError, ["expert", 1, "gate"]),
        (range(5000), [], ArtifactError, [MAX_HEADER]),
    ]
    for weights_of, shards, kind, named in cases:
        with refused(kind, *named):
            write_layer(path, 0, layout, weights_of, shards)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["layer"]
