"""Reading the header of an expert file: what is not exactly as it must be is an error of one line.

Nothing is allocated by what a file claims but its JSON, which is 1 MiB at most.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from perspectron.errors import ArtifactError
from perspectron.ops.packing import MAX_COLUMNS
from perspectron.stream.crc import crc32c
from perspectron.stream.format import (
    FORMAT,
    MAGIC,
    MAX_CRC,
    MAX_EXPERTS,
    MAX_JSON,
    MAX_LAYER,
    MAX_NUMBER,
    MAX_RICE,
    NAMES,
    PREFIX,
    VERSION,
    Alias,
    Delta,
    Digest,
    Entry,
    ExpertLayout,
    Full,
    Header,
    page,
)

DEPTH = 4  # of brackets: the header, its shards, one of them, a matrix


class _Wrong(Exception):
    """What is wrong with a header, without the file's name."""


def parse(read: Callable[[int, int], bytes], size: int, name: object) -> Header:
    """The header of a file of `size` bytes. read(offset, count) gives its bytes, fewer only past its end; `name` is
    for the message of the ArtifactError that anything wrong raises."""
    try:
        return _header(read, size)
    except _Wrong as wrong:
        raise ArtifactError(f"{name}: {wrong}") from None


def _header(read: Callable[[int, int], bytes], size: int) -> Header:
    prefix = read(0, PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise _Wrong(f"{len(prefix)} bytes, must be at least {PREFIX.size}: no expert file")
    magic, version, length, text_crc, prefix_crc = PREFIX.unpack(prefix)
    _must("magic", magic, MAGIC)
    _must("CRC-32C of the first 20 bytes", crc32c(prefix[:-4]), prefix_crc)
    _must("version", version, VERSION)
    if not 2 <= length <= MAX_JSON:
        raise _Wrong(f"bytes of JSON = {length}, must be in 2 … {MAX_JSON}")
    data = page(PREFIX.size + length)
    if data > size:
        raise _Wrong(f"{size} bytes, must be more than the {data} of its header")
    text = read(PREFIX.size, data - PREFIX.size)
    if len(text) != data - PREFIX.size:
        raise _Wrong(f"{PREFIX.size + len(text)} bytes, must be more than the {data} of its header")
    text, zeros = text[:length], text[length:]
    _must("CRC-32C of the JSON", crc32c(text), text_crc)
    if zeros.strip(b"\0"):
        raise _Wrong("bytes between the JSON and the next page, must be 0")
    return _layer(_loads(text), data, size)


def _loads(text: bytes) -> Any:
    marks = np.frombuffer(text, np.uint8) | 0x20  # [ and ], { and } now look the same
    depth = np.cumsum((marks == 0x7B).astype(np.int8) - (marks == 0x7D).astype(np.int8), dtype=np.int32)
    if depth.max() > DEPTH:
        raise _Wrong(f"JSON has {int(depth.max())} levels, must be at most {DEPTH}")
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except UnicodeDecodeError as error:
        raise _Wrong(f"JSON is not UTF-8 at byte {error.start}") from None
    except RecursionError:  # brackets within strings misled the count
        raise _Wrong(f"JSON has too many levels, must be at most {DEPTH}") from None
    except ValueError as error:
        raise _Wrong(f"JSON is malformed ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Wrong(f"JSON has the key {_short(key)} twice in one object")
        found[key] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > 19 or digits[0] == "-" or int(digits) > MAX_NUMBER:
        raise _Wrong(f"JSON has the number {_short(digits)}, must be in 0 … 2⁶³ − 1")
    return int(digits)


def _no_number(text: str) -> Any:
    raise _Wrong(f"JSON has {_short(text)}, must be a whole number")


def _layer(value: Any, data: int, size: int) -> Header:
    keys = ("layer", "experts", "d_model", "hidden", "format", "shards")
    _keys(value, keys, "header")
    layer = _within(value["layer"], "layer", 0, MAX_LAYER)
    experts = _within(value["experts"], "experts", 1, MAX_EXPERTS)
    layout = ExpertLayout(*(_within(value[key], key, 1, MAX_COLUMNS) for key in ("d_model", "hidden")))
    _must("format", value["format"], FORMAT)
    shards = value["shards"]
    if not isinstance(shards, list) or len(shards) != experts:
        found = f"a list of {len(shards)}" if isinstance(shards, list) else _short(shards)
        raise _Wrong(f"shards = {found}, must be a list of {experts}, the number of experts")
    entries: list[Entry] = []
    seen: dict[int, int] = {}
    end = data
    for i, shard in enumerate(shards):
        entry = _entry(shard, f"shards[{i}]", layout, experts, end, size)
        if entry.expert in seen:
            raise _Wrong(f"shards[{i}].expert = {entry.expert}, which shards[{seen[entry.expert]}] is, too")
        seen[entry.expert] = i
        end += 0 if isinstance(entry, Alias) else entry.bytes
        entries.append(entry)
    _must("bytes of the file", size, end)
    for i, entry in enumerate(entries):
        if not isinstance(entry, Full):
            base = entries[seen[entry.of]]
            if not isinstance(base, Full):
                raise _Wrong(f"shards[{i}].of = {entry.of}, must be an expert that is stored in full")
            if isinstance(entry, Delta):
                _must(f"shards[{i}].base", entry.base, base.digest)
    return Header(layer, layout, tuple(entries))


def _entry(value: Any, at: str, layout: ExpertLayout, experts: int, start: int, size: int) -> Entry:
    """One of the shards, which starts at `start` if it is stored."""
    kind = value.get("kind") if isinstance(value, dict) else None
    stored = ("expert", "kind", "offset", "bytes")
    changed = ("of", "crc32c", "changes", "rice", "quotient_bytes", "base", "result")
    by_kind = {"full": (*stored, *NAMES), "delta": (*stored, *changed), "alias": ("expert", "kind", "of")}
    if not isinstance(kind, str) or kind not in by_kind:
        found = f"{at}.kind = {_short(kind)}" if isinstance(value, dict) else f"{at} = {_short(value)}"
        raise _Wrong(f"{found}, must be one of {', '.join(by_kind)}")
    _keys(value, by_kind[kind], at)
    expert = _within(value["expert"], f"{at}.expert", 0, experts - 1)
    if kind == "full":
        length, digest = layout.bytes, _matrices(value, at, layout, start)
        full = Full(expert, start, length, digest)
        _place(value, at, start, length, size)
        return full
    of = _within(value["of"], f"{at}.of", 0, experts - 1)
    if kind == "alias":
        return Alias(expert, of)
    delta = Delta(
        expert,
        of,
        start,
        value["bytes"],
        _within(value["crc32c"], f"{at}.crc32c", 0, MAX_CRC),
        _within(value["changes"], f"{at}.changes", 0, layout.trits),
        _within(value["rice"], f"{at}.rice", 0, MAX_RICE),
        _within(value["quotient_bytes"], f"{at}.quotient_bytes", 0, layout.bytes),
        _digest(value["base"], f"{at}.base"),
        _digest(value["result"], f"{at}.result"),
    )
    length = page(delta.parts(layout)[-1].stop)
    if length > layout.bytes:
        raise _Wrong(
            f"{at}: its changes take {length} bytes, must be at most the {layout.bytes} of a full expert"
        )
    _place(value, at, start, length, size)
    return delta


def _place(value: dict[str, Any], at: str, start: int, length: int, size: int) -> None:
    offset = _within(value["offset"], f"{at}.offset", 0, MAX_NUMBER)
    if offset != start:
        why = "a gap before it" if offset > start else "it overlaps what comes before"
        raise _Wrong(f"{at}.offset = {offset}, must be {start}: {why}")
    _must(f"{at}.bytes", value["bytes"], length)
    if start + length > size:
        raise _Wrong(f"{at} ends at {start + length}, must be at most the {size} bytes of the file")


def _matrices(value: dict[str, Any], at: str, layout: ExpertLayout, start: int) -> Digest:
    codes_crc, scales_crc = [], []
    for i, name in enumerate(NAMES):
        matrix, where = value[name], f"{at}.{name}"
        codes, scales = layout.parts[i], layout.parts[i + 3]
        _keys(matrix, ("offset", "bytes", "crc32c", "scale_offset", "scale_crc32c"), where)
        _must(f"{where}.offset", matrix["offset"], start + codes.start)
        _must(f"{where}.bytes", matrix["bytes"], codes.stop - codes.start)
        _must(f"{where}.scale_offset", matrix["scale_offset"], start + scales.start)
        codes_crc.append(_within(matrix["crc32c"], f"{where}.crc32c", 0, MAX_CRC))
        scales_crc.append(_within(matrix["scale_crc32c"], f"{where}.scale_crc32c", 0, MAX_CRC))
    return (*codes_crc, *scales_crc)


def _digest(value: Any, at: str) -> Digest:
    if not isinstance(value, list) or len(value) != 6:
        raise _Wrong(f"{at} = {_short(value)}, must be a list of 6 CRCs")
    return tuple(_within(crc, f"{at}[{i}]", 0, MAX_CRC) for i, crc in enumerate(value))


def _keys(value: Any, keys: tuple[str, ...], at: str) -> None:
    if not isinstance(value, dict):
        raise _Wrong(f"{at} = {_short(value)}, must be an object")
    for key in value:
        if key not in keys:
            raise _Wrong(f"{at} has the key {_short(key)}, must be one of {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise _Wrong(f"{at} lacks the key {key!r}")


def _within(value: Any, at: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _Wrong(f"{at} = {_short(value)}, must be a whole number in {least} … {most}")
    return value


def _must(at: str, value: Any, wanted: Any) -> None:
    if type(value) is not type(wanted) or value != wanted:
        raise _Wrong(f"{at} = {_short(value)}, must be {wanted!r}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
