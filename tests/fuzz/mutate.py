"""Mutations of files: of their bytes, of the JSON in them, of safetensors headers, and of chat templates."""

import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.data.templates import HOSTILE, TEMPLATES

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 10**30,
    -(2**63), 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, "", "a", "..", "../x", "/etc/passwd", "\0", "é\u202e\x1b[2J",
    "x" * 300, "x" * 70_000, [], [[]], {}, {"": 0}, [0] * 5, [None] * 1000, "step-00000001", "F64", "U8",
    "<script>alert(1)</script>",
)  # fmt: skip
WORDS = (
    *(b"NaN", b"-Infinity", b"1e999", b"\xff\xfe", b"\0", b'"', b"}", b",", b"1" * 5000),
    *(b"[" * 5000, b'{"a":' * 3000),
)


def mutated(data: bytes, draw: Random, kind: str) -> bytes:
    """One to three mutations of a file; kind: "json", "lines" (a JSON value each), "safetensors", "session" (one with
    JSON in its header), "template" or "bytes"."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        try:
            data = draw.choice(KINDS[kind])(data, draw)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error, RecursionError):
            data = of_bytes(data, draw)  # not of its kind any more
    return data


def of_bytes(data: bytes, draw: Random) -> bytes:
    at, length = draw.randint(0, len(data)), draw.choice((1, 1, 2, 4, 8, 64, 1000))
    piece = data[at : at + length]
    match draw.randrange(8):
        case 0 if piece:
            return data[:at] + bytes([piece[0] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + piece * draw.choice((2, 3, 50)) + data[at + length :]
        case 4:
            return data[:at] + draw.randbytes(len(piece)) + data[at + length :]
        case 5:
            return data[:at] + draw.choice(WORDS) + data[at:]
        case 6:
            return data[:at] + bytes(len(piece)) + data[at + length :]
        case _:
            return data + draw.choice((b"\0", b"\n", b" ", draw.randbytes(9), data[:1000]))


def of_json(data: bytes, draw: Random) -> bytes:
    """Another value somewhere, a key gone, doubled or renamed, or two values in each other's place."""
    value = json.loads(data)
    places = list(walk(value))
    (parent, key), (other, other_key) = draw.choice(places), draw.choice(places)
    match draw.randrange(7):
        case 0 | 1 | 2:
            parent[key] = draw.choice(NASTY)
        case 3 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = parent[key] * draw.choice((-1, 2, 10, 1000, 0.5, 1.0)) + draw.choice((0, 0, 1, -1))
        case 3 | 4:
            del parent[key]
        case 5:
            parent[key], other[other_key] = other[other_key], parent[key]
        case _ if isinstance(parent, dict):
            text = json.dumps(value)
            return text.replace(json.dumps(key), json.dumps(key + "x"), 1).encode()
        case _:
            parent.insert(key, parent[key])
    if draw.randrange(20) == 0:
        return json.dumps(value).encode().replace(b": 1", b": NaN", 1)
    if draw.randrange(20) == 0 and isinstance(value, dict) and value:
        return json.dumps(value)[:-1].encode() + f", {json.dumps(next(iter(value)))}: 0}}".encode()
    return json.dumps(value).encode()


def walk(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found, waiting = [], [value]
    while waiting:
        container = waiting.pop()
        keys = (
            container
            if isinstance(container, dict)
            else range(len(container))
            if isinstance(container, list)
            else ()
        )
        for key in keys:
            found.append((container, key))
            waiting += [container[key]] if isinstance(container[key], dict | list) else []
    return found


def of_lines(data: bytes, draw: Random) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, draw.choice(lines))
        case _:
            lines[at] = of_json(lines[at], draw) if draw.randrange(2) else of_bytes(lines[at], draw)
    return b"\n".join(lines)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, what follows it) of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: bytes | dict[str, Any], rest: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + rest


def of_safetensors(data: bytes, draw: Random) -> bytes:
    """Its header as JSON, its length, the type, shape or place of a tensor, a tensor of its own, or its metadata."""
    header, rest = header_of(data)
    if draw.randrange(4) == 0:
        return with_header(*of_sizes(header, rest, draw))
    names = [name for name in header if name != "__metadata__"]
    entry = header[draw.choice(names)]
    match draw.randrange(9):
        case 0 | 1:
            return with_header(of_json(json.dumps(header).encode(), draw), rest)
        case 2:
            return with_header(header, rest, draw.choice((0, 1, 2**31, 2**62, len(data), 2**64 - 1)))
        case 3:
            entry["dtype"] = draw.choice(("F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "?"))
        case 4:
            shape = entry["shape"]
            shape[draw.randrange(len(shape))] = draw.choice((0, 1, 2**31, 2**62, -1, shape[0] + 1))
        case 5:
            entry["shape"] = draw.choice(
                ([], [0], [1, *entry["shape"]], entry["shape"][1:], entry["shape"][::-1])
            )
        case 6:
            entry["data_offsets"] = [
                draw.choice((0, -1, 8, 2**62, *other["data_offsets"]))
                for other in (entry, header[draw.choice(names)])
            ]
        case 7:  # a tensor of the same name and another shape, with bytes to fit
            start, end = entry["data_offsets"]
            entry["shape"] = draw.choice(([1], [2, 2], [end - start], [0, 4], [len(rest)]))
            entry["dtype"] = "U8" if draw.randrange(2) else entry["dtype"]
        case _:
            numbers = struct.pack("<q", draw.choice((-7, -1, 0, 1, 2**62, -(2**63), 2**63 - 1)))
            start, end = entry["data_offsets"]
            size = max(0, min(end - start, len(rest) - start, len(rest))) // 8 * 8
            rest = rest[:start] + numbers * (size // 8) + rest[start + size :]
    return with_header(header, rest)


def of_sizes(header: dict[str, Any], rest: bytes, draw: Random) -> tuple[bytes | dict[str, Any], bytes]:
    """Many tensors, names twice, huge or empty shapes, places that overlap, leave gaps or change order, and large
    metadata: (header, what follows it)."""
    metadata, end = header.get("__metadata__", {}), len(rest)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    entry = tensors[draw.choice(list(tensors))]
    length = draw.choice((100, 70_000, 3 << 20))
    match draw.randrange(10):
        case 0:  # without a number in them
            empty = {"dtype": draw.choice(("F32", "I8")), "shape": [0], "data_offsets": [end, end]}
            header |= {f"t{i}": empty for i in range(draw.choice((1, 3000, 33_000)))}
        case 1:  # small ones, one after another
            count = draw.choice((10, 3000))
            for i in range(count):
                header[f"t{i}"] = {"dtype": "U8", "shape": [1], "data_offsets": [end + i, end + i + 1]}
            rest += bytes(count)
        case 2:
            again = json.dumps(draw.choice(list(header.items())))[1:-1].replace(", ", ": ", 1)
            return (
                f"{json.dumps(header)[:-1]}, {', '.join([again] * draw.choice((1, 2000)))}}}".encode(),
                rest,
            )
        case 3:
            entry["shape"] = draw.choice(
                ([2**31, 2**31], [2**40], [2**63], [0, 2**62], [2**32, 2**32, 0], [1] * 100, [1] * 9, [0] * 9)
            )
        case 4:  # of no bytes, and the rest moved up or left
            start, stop = entry["data_offsets"]
            entry |= {"shape": [0, *entry["shape"]], "data_offsets": [start, start]}
            if draw.randrange(2):
                rest = rest[:start] + rest[stop:]
                for other in tensors.values():
                    other["data_offsets"] = [
                        at - (stop - start) if at >= stop else at for at in other["data_offsets"]
                    ]
        case 5:  # each from the start of another, or from the end backwards
            places = [other["data_offsets"] for other in tensors.values()]
            draw.shuffle(places) if draw.randrange(2) else places.reverse()
            for other, place in zip(tensors.values(), places, strict=True):
                other["data_offsets"] = place
        case 6:  # a gap, of which the file has bytes or not
            gap, start = draw.choice((1, 8, 4096, length, 2**40)), entry["data_offsets"][0]
            for other in tensors.values():
                if other["data_offsets"][0] >= start:
                    other["data_offsets"] = [at + gap for at in other["data_offsets"]]
            if gap < 2**40 and draw.randrange(2):
                rest = rest[:start] + bytes(gap) + rest[start:]
        case 7:  # a large tensor that nobody asked for
            header["large"] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
            rest += bytes(length)
        case 8:
            header["__metadata__"] = metadata | {f"m{i}": "" for i in range(draw.choice((1, 1000, 200_000)))}
        case _:
            name = draw.choice([*metadata, "x"])
            header["__metadata__"] = metadata | {name: draw.choice(("a", "[]", "9", '"')) * length}
    return header, rest


def of_metadata(data: bytes, draw: Random) -> bytes:
    """One of the texts in its header that are JSON themselves: numbers, tokens, dtypes."""
    header, rest = header_of(data)
    inner = [name for name, text in header["__metadata__"].items() if text[:1] in ("{", "[")]
    name = draw.choice(inner)
    header["__metadata__"][name] = of_json(header["__metadata__"][name].encode(), draw).decode()
    return with_header(header, rest)


def of_part(data: bytes, draw: Random) -> bytes:
    """What an append wrote: the parts after the first, one of them as a file of its own."""
    fields, rest = header_of(data)
    end = max(entry["data_offsets"][1] for name, entry in fields.items() if name != "__metadata__")
    tail = rest[end:]
    if draw.randrange(3) == 0 and len(tail) > 8:
        return data[: len(data) - len(tail)] + of_part(tail, draw)
    changed = draw.choice((of_metadata, of_safetensors, of_bytes))(tail, draw)
    return data[: len(data) - len(tail)] + draw.choice((changed, changed, tail + changed))


def of_template(data: bytes, draw: Random) -> bytes:
    """Another template, a hostile one inside it, or its tags and words gone, doubled, nested or in each other's
    place."""
    others = [*TEMPLATES.values(), *HOSTILE.values()]
    parts = re.split(r"({%.*?%}|{{.*?}}|{#.*?#})", data.decode(), flags=re.DOTALL)
    at, other = (draw.randrange(len(parts)) for _ in range(2))
    match draw.randrange(8):
        case 0:
            return draw.choice(others).encode()
        case 1:
            parts.insert(at, draw.choice(list(HOSTILE.values())))
        case 2:
            del parts[at]
        case 3:
            parts[at] *= draw.choice((2, 3, 50, 5000))
        case 4:
            parts[at], parts[other] = parts[other], parts[at]
        case 5:
            words = re.split(r"(\W+)", parts[at])
            words[draw.randrange(len(words))] = draw.choice(WORDS_OF_TEMPLATES)
            parts[at] = "".join(words)
        case 6:
            parts[at] = parts[at].replace(
                draw.choice("+~|.([{'"), draw.choice(("*", "**", "%", "((", "|", ".", "~"))
            )
        case _:
            tags = re.split(r"({%.*?%}|{{.*?}})", draw.choice(others), flags=re.DOTALL)
            parts.insert(at, draw.choice(tags))
    return "".join(parts).encode()


WORDS_OF_TEMPLATES = (
    *(
        "messages",
        "tools",
        "loop",
        "self",
        "caller",
        "namespace",
        "range",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
        "none",
    ),
    *(
        "10**9",
        "'a'*10**9",
        "range(99999)",
        "messages*10**8",
        "__class__",
        "mro",
        "format",
        "tojson",
        "batch(9**9)",
    ),
    *(
        "center(10**9)",
        "indent(10**9)",
        "wordwrap(1)",
        "strftime_now('%c')",
        "[[]]*10**7",
        "urlize",
        "pprint",
        "xmlattr",
    ),
    *(
        "set",
        "block",
        "macro",
        "call",
        "filter",
        "recursive",
        "continue",
        "break",
        "generation",
        "extends",
        "\x00",
    ),
)


Mutator = Callable[[bytes, Random], bytes]
KINDS: dict[str, tuple[Mutator, ...]] = {
    "template": (of_template, of_template, of_template, of_bytes),
    "bytes": (of_bytes,),
    "json": (of_json, of_json, of_json, of_bytes),
    "lines": (of_lines,),
    "safetensors": (of_safetensors, of_safetensors, of_safetensors, of_bytes),
    "parts": (of_part, of_part, of_part, of_metadata, of_safetensors, of_bytes),
    "session": (of_metadata, of_metadata, of_safetensors),
}
