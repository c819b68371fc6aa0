"""Text of a file, plain or compressed, in pieces of bounded size. Text is the bytes decoded as UTF-8, or as the
encoding that is named; line ends and UTF-8's byte order marks are kept. Sizes and offsets are those of the text in
UTF-8."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from perspectron.util.errors import DataError
from perspectron.util.files import open_file

if TYPE_CHECKING:
    from perspectron.data.tokenizer import Tokenizer

PIECE = 2**20
"""Maximum size of a document in bytes; longer files become several documents."""
COMPRESSED = (".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
INSTALL = "pip install 'perspectron[data]'"
CHARACTERS = 100  # read of a file for each token that is asked for; a token has at most 72


def library(name: str, path: object) -> Any:
    """A package of the extra `data`, imported. DataError, with the command that installs it, where it is missing."""
    if find_spec(name.partition(".")[0]) is None or find_spec(name) is None:
        raise DataError(f"{path}: {name} is not installed: {INSTALL}")
    return import_module(name)


class Recoded(io.RawIOBase):
    """Text of an encoding as bytes of UTF-8, read forwards."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or self._text.read(PIECE).encode()
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@contextlib.contextmanager
def reading(path: Path, encoding: str = "") -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed if it is named `.gz` or `.zst`, and as UTF-8 if they are of another encoding;
    what goes wrong becomes a DataError."""
    zstd = import_module(ZSTD) if path.suffix.lower() == ".zst" else None
    broken = () if zstd is None else (zstd.ZstdError,)
    try:
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open_file(path))
            if path.suffix.lower() in COMPRESSED:
                unpacked = gzip.GzipFile(fileobj=file) if zstd is None else zstd.ZstdFile(file)
                file = stack.enter_context(unpacked)
            yield io.BufferedReader(Recoded(file, encoding)) if encoding else file
    except (OSError, EOFError, zlib.error, UnicodeError, *broken) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _forward(file: io.BufferedIOBase, offset: int) -> None:
    """Go to an offset of a file that was just opened."""
    if file.seekable():
        file.seek(offset)
        return
    while offset and (block := file.read(min(offset, PIECE))):
        offset -= len(block)


class Text(NamedTuple):
    """The text of a file. size: its bytes as UTF-8; None where it is no text. cut: bytes after them, of a character
    that the end of the file cuts off. why: what is wrong. offset: of the first wrong byte, if known."""

    size: int | None
    cut: int = 0
    why: str = ""
    offset: int | None = None


def examined(path: Path, encoding: str = "") -> Text:
    """The text of a file, found by reading all of it. A NUL byte, too, is not text. A character that the end cuts off
    is taken for one if others of several bytes precede it; alone, it is as likely to be one of another encoding."""
    decoder, at, plain = codecs.getincrementaldecoder("utf-8")(), 0, True
    with reading(path, encoding) as file:
        try:
            while block := file.read(PIECE):
                waiting, nul = len(decoder.getstate()[0]), block.find(0)
                text = decoder.decode(block if nul < 0 else block[:nul])
                if nul >= 0:
                    why = f"a NUL byte, not {encoding or 'UTF-8'} text"
                    return Text(None, 0, _with_mark(path, why), at + nul)
                at, plain = at + len(block), plain and text.isascii()
        except UnicodeDecodeError as error:
            if encoding:
                return Text(None, 0, f"not {encoding}: {error.reason}")
            return Text(None, 0, _with_mark(path, "not UTF-8 text"), at - waiting + error.start)
        except UnicodeError as error:
            return Text(None, 0, f"not {encoding}: {error}")
        cut = len(decoder.getstate()[0])
        return Text(None, 0, "not UTF-8 text", at - cut) if cut and plain else Text(at - cut, cut)


def _with_mark(path: Path, why: str) -> str:
    """`why`, and the encoding of the file if it begins with the byte order mark of one."""
    with reading(path) as file:
        head = file.read(4)
    for name, marks in _MARKS.items():
        if head.startswith(marks):
            return f"{why}, it looks like {name}"
    return why


_MARKS = {  # utf-32 first: its mark begins with that of utf-16
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def refusal(path: Path, text: Text, encoding: str = "") -> str:
    """The words for a file that is no text: what is wrong, where, and what would read it."""
    where = "" if text.offset is None else f", at byte {text.offset:,}"
    names = text.why.partition("it looks like ")[2] or "latin-1, cp1252 or what it is"
    hint = "" if encoding else f": --encoding {names} reads it (or the source {path}#encoding=NAME)"
    return f"{path}: {text.why}{where}{hint}"


def pieces(path: Path, begin: int, end: int, encoding: str = "") -> Iterator[tuple[int, str]]:
    """Text of bytes [begin, end) as (offset, text of at most PIECE bytes), cut at line ends if it has any."""
    with reading(path, encoding) as file:
        _forward(file, begin)
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


def border_at(path: Path, size: int, target: int, encoding: str = "") -> int:
    """The line end nearest to `target` in the first `size` bytes of a file, with text on both sides."""
    low, target = max(target - PIECE, 0), min(max(target, 0), size)
    with reading(path, encoding) as file:
        _forward(file, low)
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


def text_of(path: Path, characters: int = -1) -> str:
    """The text of a file, or its first characters. DataError where it is missing or not UTF-8."""
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", newline="") as file:
            return file.read(characters)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        found = examined(path)
        raise DataError(f"{path}: not UTF-8 text, at byte {found.offset or found.size or 0:,}") from None


def read_tokens(path: Path, tokenizer: "Tokenizer", limit: int) -> list[int]:
    """First `limit` tokens of a file (0: all). DataError as of `text_of`, or where it is shorter than 2 tokens."""
    ids = tokenizer.encode(text_of(path, CHARACTERS * limit if limit else -1))
    ids = ids[:limit] if limit else ids
    if len(ids) < 2:
        raise DataError(f"{path}: {len(ids)} tokens, need at least 2")
    return ids
