"""Files that are not as they must be: by hand, by flipped bits, and by a hundred thousand random changes."""

import json
import os
import random
import resource
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perspectron.errors import ArtifactError
from perspectron.files import read_json, safe_join
from perspectron.stream import ShardFile
from perspectron.stream.crc import crc32c
from perspectron.stream.format import MAX_JSON, PREFIX

# In the file: shards[0] the alias 4 of 3, [1] 0 in full, [2] and [3] changes 1 and 2 of 0, [4] 3 in full, [5] 5 of 0.
ALIAS, FULL, DELTA, LAST, SECOND = 0, 1, 2, 3, 5


def put(*path: Any, value: Any) -> Callable[[dict], None]:
    """Set the value at a path of keys."""

    def change(header: dict) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[dict], None]:
    def change(header: dict) -> None:
        for key in path[:-1]:
            header = header[key]
        del header[path[-1]]

    return change


def add(*path: Any, by: int) -> Callable[[dict], None]:
    def change(header: dict) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] += by

    return change


def swap(header: dict) -> None:
    shards = header["shards"]
    shards[1], shards[4] = shards[4], shards[1]


VALUES = [
    ("layer is true", put("layer", value=True), "layer = True, must be a whole number in 0 … 65535"),
    ("layer is a string", put("layer", value="3"), "layer = '3'"),
    ("layer is too high", put("layer", value=65536), "layer = 65536"),
    ("layer is null", put("layer", value=None), "layer = None"),
    ("no layer", drop("layer"), "header lacks the key 'layer'"),
    ("one key more", put("owner", value=1), "header has the key 'owner'"),
    ("no experts", put("experts", value=0), "experts = 0, must be a whole number in 1 …"),
    ("too many experts", put("experts", value=65537), "experts = 65537"),
    ("one expert more", add("experts", by=1), "shards = a list of 6, must be a list of 7"),
    ("one expert fewer", add("experts", by=-1), "shards = a list of 6, must be a list of 5"),
    ("absurd experts", put("experts", value=2**62), "experts = 4611686018427387904"),
    ("d_model of 0", put("d_model", value=0), "d_model = 0"),
    ("absurd d_model", put("d_model", value=2**40), "d_model = 1099511627776"),
    ("absurd hidden", put("hidden", value=2**63 - 1), "hidden = 9223372036854775807"),
    ("wider than its bytes", put("d_model", value=128), "shards[1].gate.bytes = 1024, must be 2048"),
    ("more hidden than its bytes", put("hidden", value=85), "shards[1].gate.bytes = 1024, must be 1088"),
    ("largest widths", lambda h: h.update(d_model=65536, hidden=65536), "shards[1].gate.bytes = 1024"),
    ("another format", put("format", value="2bit"), "format = '2bit', must be 'ternary'"),
    ("a format of no string", put("format", value=[]), "format = [], must be 'ternary'"),
    ("shards are an object", put("shards", value={}), "shards = {}, must be a list of 6"),
    ("a shard is a number", put("shards", ALIAS, value=7), "shards[0] = 7"),
    ("another kind", put("shards", ALIAS, "kind", value="copy"), "shards[0].kind = 'copy', must be one of full"),
    ("a kind of no string", put("shards", ALIAS, "kind", value=[]), "shards[0].kind = []"),
    ("no kind", drop("shards", FULL, "kind"), "shards[1].kind = None"),
    ("an alias with an offset", put("shards", ALIAS, "offset", value=1), "shards[0] has the key 'offset'"),
    ("expert out of range", put("shards", FULL, "expert", value=6), "shards[1].expert = 6, must be a whole number"),
    ("expert twice", put("shards", SECOND, "expert", value=0), "shards[5].expert = 0, which shards[1] is, too"),
    ("alias to itself", put("shards", ALIAS, "of", value=4), "shards[0].of = 4, must be an expert that"),
    ("alias to an alias", put("shards", ALIAS, "of", value=5), "shards[0].of = 5, must be an expert that"),
    ("alias to changes", put("shards", ALIAS, "of", value=1), "shards[0].of = 1, must be an expert that"),
    ("changes of changes", put("shards", DELTA, "of", value=2), "shards[2].of = 2, must be an expert that"),
    ("changes of itself", put("shards", DELTA, "of", value=1), "shards[2].of = 1, must be an expert that"),
    ("changes of another", put("shards", DELTA, "of", value=3), "shards[2].base = ("),
    ("changes of none", put("shards", DELTA, "of", value=99), "shards[2].of = 99"),
    ("a gap", add("shards", DELTA, "offset", by=4096), "a gap before it"),
    ("an overlap", add("shards", DELTA, "offset", by=-4096), "it overlaps what comes before"),
    ("not on a page", add("shards", DELTA, "offset", by=1), "a gap before it"),
    ("offset past the end", put("shards", LAST, "offset", value=2**62), "shards[3].offset = 4611686018427387904"),
    ("in the header", put("shards", FULL, "gate", "offset", value=0), "shards[1].gate.offset = 0, must be"),
    ("matrices overlap", add("shards", FULL, "up", "offset", by=-64), "shards[1].up.offset"),
    ("scales elsewhere", add("shards", FULL, "down", "scale_offset", by=4), "shards[1].down.scale_offset"),
    ("fewer bytes", add("shards", FULL, "bytes", by=-4096), "shards[1].bytes"),
    ("bytes overflow", put("shards", DELTA, "bytes", value=2**63 - 4096), "shards[2].bytes"),
    ("a CRC of 33 bits", put("shards", FULL, "up", "crc32c", value=2**32), "shards[1].up.crc32c = 4294967296"),
    ("a CRC is a string", put("shards", FULL, "up", "scale_crc32c", value="0"), "shards[1].up.scale_crc32c = '0'"),
    ("no down", drop("shards", FULL, "down"), "shards[1] lacks the key 'down'"),
    ("down is null", put("shards", FULL, "down", value=None), "shards[1].down = None, must be an object"),
    ("a matrix key more", put("shards", FULL, "down", "zero", value=0), "shards[1].down has the key 'zero'"),
    ("more changes than trits", put("shards", DELTA, "changes", value=10**9), "shards[2].changes = 1000000000"),
    ("more changes than bytes", add("shards", DELTA, "changes", by=8 * 5000), "shards[2].changes"),
    ("longer than a full one", put("shards", DELTA, "quotient_bytes", value=8192), "must be at most"),
    ("rice of 41", put("shards", DELTA, "rice", value=41), "shards[2].rice = 41"),
    ("absurd quotients", put("shards", DELTA, "quotient_bytes", value=2**50), "shards[2].quotient_bytes"),
    ("a digest of 5", drop("shards", DELTA, "result", 0), "shards[2].result ="),
    ("a digest of another base", add("shards", DELTA, "base", 2, by=-1), "shards[2].base = ("),
    ("another order", swap, "shards[1].gate.offset = 20480, must be 4096"),
]  # fmt: skip

TEXTS = [
    ("an array", b"[1]", "header = [1], must be an object"),
    ("a number", b"12", "header = 12"),
    ("nothing", b"  ", "JSON is malformed"),
    ("half an object", b'{"layer":', "JSON is malformed"),
    ("two values", b"{} {}", "JSON is malformed"),
    ("a byte order mark", b"\xef\xbb\xbf{}", "JSON is malformed"),
    ("no UTF-8", b'{"layer": "\xff"}', "JSON is not UTF-8 at byte 11"),
    ("UTF-16", '{"a":1}'.encode("utf-16-le"), "JSON is malformed"),
    ("a control character", b'{"a\n": 1}', "JSON is malformed"),
    (
        "levels behind brackets in strings",
        b'{"a":"' + b"]" * 990 + b'","b":' + b"[" * 990 + b"]" * 990 + b"}",
        "JSON has too many levels",
    ),
    ("NaN", b'{"layer": NaN}', "JSON has 'NaN', must be a whole number"),
    ("infinity", b'{"layer": -Infinity}', "JSON has '-Infinity'"),
    ("a fraction", b'{"layer": 1.5}', "JSON has '1.5'"),
    ("an exponent", b'{"layer": 1e3}', "JSON has '1e3'"),
    ("a negative number", b'{"layer": -1}', "JSON has the number '-1', must be in 0 … 2⁶³ − 1"),
    ("minus zero", b'{"layer": -0}', "JSON has the number '-0'"),
    ("2^63", b'{"layer": 9223372036854775808}', "JSON has the number '9223372036854775808'"),
    ("a number of 9000 digits", b"9" * 3000, "JSON has the number"),
    ("a key twice", b'{"layer": 1, "layer": 1}', "JSON has the key 'layer' twice"),
    ("5 levels", b"[[[[[]]]]]", "JSON has 5 levels, must be at most 4"),
    ("3000 levels", b"[" * 3000, "JSON has 3000 levels"),
    ("a lone surrogate", b'{"\\ud800": 1}', "header has the key '\\ud800'"),
    ("a long key", b'{"' + b"k" * 3000 + b'": 1}', "…, must be one of"),
]

BYTES = [
    ("empty", lambda b: b"", "0 bytes, must be at least 24"),
    ("23 bytes", lambda b: b[:23], "23 bytes, must be at least 24"),
    ("another magic", lambda b: b"\x7fELF" + b[4:], "magic = b'\\x7fELF"),
    ("cut in the JSON", lambda b: b[:100], "100 bytes, must be more than the"),
    ("only a header", lambda b: b[:4096], "shards[1] ends at"),
    ("last page missing", lambda b: b[:-4096], "must be at most the"),
    ("last byte missing", lambda b: b[:-1], "must be at most the"),
    ("a page more", lambda b: b + bytes(4096), "bytes of the file"),
    ("a byte more", lambda b: b + b"\0", "bytes of the file"),
    ("text in the padding", lambda b: b[:4095] + b"x" + b[4096:], "bytes between the JSON and the next page"),
    ("another JSON", lambda b: b.replace(b'"layer":3', b'"layer":4'), "CRC-32C of the JSON"),
    ("another prefix", lambda b: b[:12] + b"\1" + b[13:], "CRC-32C of the first 20 bytes"),
]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES]
)
def test_a_wrong_value_is_named(image, change: Callable[[dict], None], message: str) -> None:
    change(image.value)
    with pytest.raises(ArtifactError) as error:
        image.parse(image.build())
    assert str(error.value).startswith("f: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS])
def test_other_json_is_refused(image, text: bytes, message: str) -> None:
    with pytest.raises(ArtifactError) as error:
        image.parse(image.build(text))
    assert message in str(error.value).encode("utf-8", "backslashreplace").decode()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BYTES], ids=[case[0] for case in BYTES])
def test_other_bytes_are_refused(
    image, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "layer"
    path.write_bytes(change(image.whole))
    with pytest.raises(ArtifactError) as error:
        ShardFile(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_other_versions_and_lengths_are_refused(image) -> None:
    with pytest.raises(ArtifactError, match=r"f: version = 2, must be 1"):
        image.parse(image.build(version=2))
    for length in (0, 1, MAX_JSON + 1, 2**32 - 1):
        start = image.whole[:12] + struct.pack("<I", length) + image.whole[16:20]
        with pytest.raises(ArtifactError, match=rf"bytes of JSON = {length}, must be in 2 … {MAX_JSON}"):
            image.parse(start + struct.pack("<I", crc32c(start)) + image.whole[PREFIX.size :])


def test_any_bit_of_the_header(image) -> None:
    """Each byte of the header's pages, one bit of it."""
    header = len(image.whole) - len(image.tail)
    chosen = random.Random(5)
    for at in range(header):
        whole = bytearray(image.whole)
        whole[at] ^= 1 << chosen.randrange(8)
        with pytest.raises(ArtifactError):
            image.parse(bytes(whole))


HOSTILE = [
    *(
        0,
        1,
        2,
        3,
        5,
        6,
        4095,
        4096,
        8192,
        2**31,
        2**32 - 1,
        2**32,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
    ),
    *(
        -1,
        -4096,
        -(2**63),
        1.5,
        4096.0,
        1e300,
        float("nan"),
        float("inf"),
        True,
        False,
        None,
        "",
        "full",
        "delta",
    ),
    *("alias", "../x", "\0", "4096", [], {}, [[]], [0] * 6, {"offset": 0}, "x" * 100),
]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of all values inside."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], found)
    return found


def mutant(image, chosen: random.Random) -> bytes:
    """One file: its JSON changed as a value or as text, with right CRCs, or its bytes changed, cut or spliced."""
    kind = chosen.randrange(8)
    if kind < 4:
        value = json.loads(image.text())
        for _ in range(chosen.choice((1, 1, 1, 2, 3))):
            box, key = chosen.choice(places(value, []))
            what = chosen.randrange(6)
            if what == 0:
                del box[key]
            elif what == 1 and isinstance(box, list):
                box.insert(key, chosen.choice([*HOSTILE, box[key]]))
            elif what == 1:
                box[chosen.choice(("offset", "of", "kind", "x"))] = chosen.choice(HOSTILE)
            elif what == 2 and type(box[key]) is int:
                box[key] += chosen.choice((-4096, -64, -4, -1, 1, 4, 64, 4096))
            else:
                box[key] = chosen.choice(HOSTILE)
            if not value:
                break
        return image.build(json.dumps(value, separators=(",", ":")).encode())
    if kind < 6:
        text = bytearray(image.text())
        for _ in range(chosen.randrange(1, 4)):
            at = chosen.randrange(len(text))
            piece = chosen.choice(
                (b"", b"[", b"{", b'"', b",", b"0", b"-", b"9" * 30, bytes([chosen.randrange(256)]))
            )
            text[at : at + chosen.randrange(3)] = piece
        return image.build(bytes(text))
    whole = bytearray(image.whole)
    if kind == 6:
        for _ in range(chosen.randrange(1, 5)):
            whole[chosen.randrange(chosen.choice((24, 9000)))] ^= 1 << chosen.randrange(8)
        return bytes(whole)
    a, b = sorted(chosen.choices(range(len(whole)), k=2))
    return bytes(chosen.choice((whole[:a], whole[:a] + whole[b:], whole[:b] + whole[a:], whole[a:])))


@pytest.mark.parametrize("seed", range(20))
def test_mutants_are_refused_or_fit(image, seed: int) -> None:
    """5,000 for each seed. What is taken places everything within the file."""
    chosen = random.Random(seed)
    taken = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, longest = 0.0, 0
    for _ in range(5_000):
        whole = mutant(image, chosen)
        start = time.thread_time()
        try:
            header = image.parse(whole)
        except ArtifactError as error:
            longest = max(longest, len(str(error)))
        else:
            taken += 1
            end = len(image.whole) - len(image.tail)
            for entry in header.entries:
                if header.stored(entry.expert) is entry:
                    assert entry.offset == end
                    end += entry.bytes
            assert end == len(whole)
            assert sorted(header.by_expert) == list(range(header.experts))
        slowest = max(slowest, time.thread_time() - start)
    assert taken < 2_500
    assert slowest < 1
    assert longest < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("text", [b"[" + b"0," * (MAX_JSON // 2 - 40) + b"0]", b"[" + b"{}," * 349_000 + b"0]",
                                  b'[{"' + b'a":0,"' * 170_000 + b'b":0}]', b"[" + b"[0]," * 250_000 + b"0]"],
                         ids=["numbers", "objects", "keys", "lists"])  # fmt: skip
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
    for name, why in (
        ("pipe", "not a file"),
        (".", "not a file"),
        ("none", "No such file"),
        ("loop", "symbolic"),
    ):
        with pytest.raises(ArtifactError, match=why):
            ShardFile(tmp_path / name)


def test_names_do_not_lead_out_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    (folder / "sub").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "in").symlink_to("sub")
    (folder / "ring").symlink_to("ring")
    assert safe_join(folder, "a.experts") == folder / "a.experts"
    assert safe_join(folder, "in/b") == folder / "in" / "b"
    names = [
        "",
        "/etc/passwd",
        "..",
        "../a",
        "sub/../../a",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "..\\a",
        "a\0b",
        "out/a",
        "out",
    ]
    for name in [*names, "ring", "x" * 5000, "\ud800", None, 3, ["a"], b"a"]:
        with pytest.raises(ArtifactError, match="name"):
            safe_join(folder, name)


def test_json_is_read_from_files_of_some_size(tmp_path: Path) -> None:
    limit = 16 << 20
    (tmp_path / "levels").write_text("[" * 100_000)
    (tmp_path / "long").write_text(" " * limit + "1")
    (tmp_path / "fits").write_text(" " * (limit - 1) + "1")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    whys = {"levels": "too many levels", "long": "more than 16777216 bytes", "zeros": "not a file"}
    for name, why in (whys | {"pipe": "not a file", ".": "JSON", "none": "no such file"}).items():
        with pytest.raises(ArtifactError, match=why):
            read_json(tmp_path / name, ArtifactError)
    assert read_json(tmp_path / "fits", ArtifactError) == 1
    assert read_json(tmp_path / "long", ArtifactError, limit + 1) == 1
