"""Text of a file, plain or compressed, in pieces of bounded size. Text is the bytes decoded as UTF-8; line ends and
byte order marks are kept."""

import codecs
import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perspectron.errors import DataError
from perspectron.files import open_file

PIECE = 2**20
"""Maximum size of a document in bytes; longer files become several documents."""
COMPRESSED = (".gz", ".zst")
INSTALL = "pip install 'perspectron[data]'"


def library(name: str, path: object) -> Any:
    """A package of the extra `data`, imported. DataError, with the command that installs it, where it is missing."""
    if find_spec(name.partition(".")[0]) is None or find_spec(name) is None:
        raise DataError(f"{path}: {name} is not installed: {INSTALL}")
    return import_module(name)


def _zstd(path: Path) -> Any:
    return (
        import_module("compression.zstd") if sys.version_info >= (3, 14) else library("backports.zstd", path)
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed if it is named `.gz` or `.zst`; what goes wrong becomes a DataError."""
    zstd = _zstd(path) if path.suffix == ".zst" else None
    broken = () if zstd is None else (zstd.ZstdError,)
    try:
        with open_file(path) as plain:
            if path.suffix not in COMPRESSED:
                yield plain
                return
            with gzip.open(plain, "rb") if zstd is None else zstd.ZstdFile(plain) as file:
                yield file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, *broken) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def text_size(path: Path) -> int | None:
    """Bytes of UTF-8 text in a file; None where it is no text: other bytes, or a NUL among them."""
    with reading(path) as file:
        try:
            for text in codecs.iterdecode(iter(lambda: file.read(PIECE), b""), "utf-8"):
                if "\0" in text:
                    return None
        except UnicodeDecodeError:
            return None
        return file.tell()


def pieces(path: Path, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Text of bytes [begin, end) as (offset, text of at most PIECE bytes), cut at line ends if it has any."""
    with reading(path) as file:
        file.seek(begin)
        rest = b""
        while begin < end:
            wanted = min(PIECE, end - begin)
            block = rest + file.read(wanted - len(rest))
            if len(block) < wanted:
                raise DataError(f"{path}: {end - begin - len(block)} bytes shorter than when it was opened")
            cut = wanted if begin + wanted == end else _border(block)
            yield begin, block[:cut].decode("utf-8")
            begin += cut
            rest = block[cut:]


def _border(block: bytes) -> int:
    """The end of a piece: after its last line end, or else before its last character, which may be cut."""
    at = block.rfind(b"\n") + 1
    if at == 0:
        at = len(block) - 1
        while at > 1 and block[at] & 0xC0 == 0x80:
            at -= 1
    return at


def border_at(path: Path, size: int, target: int) -> int:
    """The line end nearest to `target` in the first `size` bytes of a file, with text on both sides."""
    low, target = max(target - PIECE, 0), min(max(target, 0), size)
    with reading(path) as file:
        file.seek(low)
        near = file.read(min(target + PIECE, size) - low)
    lines = [i + 1 for i in (near.rfind(b"\n", 0, target - low), near.find(b"\n", target - low)) if i >= 0]
    inside = [low + i for i in lines if 0 < low + i < size]
    if not inside:  # one line only, as far as we look: cut between two characters instead
        inside = [low + i for i, byte in enumerate(near) if byte & 0xC0 != 0x80 and low + i > 0]
    if not inside:
        raise DataError(
            f"{path}: {size} bytes of text, need at least 2 characters for each two parts of it: "
            "to train on, to choose on and to hold out"
        )
    return min(inside, key=lambda at: abs(at - target))
