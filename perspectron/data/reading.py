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
from typing import Any, NamedTuple

from perspectron.util.errors import DataError
from perspectron.util.files import open_file

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


class Undecodable(DataError):
    """Bytes that are not of the encoding that was named. offset: of the first of them."""

    def __init__(self, path: Path, offset: int, encoding: str) -> None:
        super().__init__(f"{path}: byte {offset:,} is not {encoding}")
        self.offset = offset


class Recoded(io.RawIOBase):
    """Bytes of a file as UTF-8, read forwards. cut: those at its end that are no whole character."""

    def __init__(self, path: Path, file: io.BufferedIOBase, encoding: str) -> None:
        self.cut = 0
        self._path, self._file, self._encoding = path, file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._rest, self._at, self._read = b"", 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or offset < self._at:
            raise io.UnsupportedOperation("text of another encoding is read forwards")
        while self._at < offset and self.read(min(offset - self._at, PIECE)):
            pass
        return self._at

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (block := self._file.read(PIECE)):
            waiting = len(self._decoder.getstate()[0])
            try:
                self._rest = self._decoder.decode(block).encode()
            except UnicodeError as error:
                start = getattr(error, "start", 0)  # a lone surrogate, say, has no place in the bytes
                raise Undecodable(self._path, self._read - waiting + start, self._encoding) from None
            self._read += len(block)
        self.cut = 0 if self._rest else len(self._decoder.getstate()[0])
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        self._at += count
        return count


@contextlib.contextmanager
def reading(path: Path, encoding: str = "") -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed if it is named `.gz` or `.zst`, and as UTF-8 if they are of another encoding;
    what goes wrong becomes a DataError."""
    zstd = _zstd(path) if path.suffix == ".zst" else None
    broken = () if zstd is None else (zstd.ZstdError,)
    try:
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open_file(path))
            if path.suffix in COMPRESSED:
                unpacked = gzip.GzipFile(fileobj=file) if zstd is None else zstd.ZstdFile(file)
                file = stack.enter_context(unpacked)
            yield io.BufferedReader(Recoded(path, file, encoding)) if encoding else file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, *broken) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


class Text(NamedTuple):
    """The text of a file. size: its bytes as UTF-8; None where it is no text. cut: bytes after them, of a character
    that the end of the file cuts off. offset: of the first byte that is no text. encoding: what would read it, by its
    looks. why: what is wrong, without the offset."""

    size: int | None
    cut: int = 0
    offset: int = 0
    encoding: str = ""
    why: str = ""


def examined(path: Path, encoding: str = "") -> Text:
    """The text of a file, found by reading all of it. A NUL, too, is no text. A cut character is believed to be one
    after others of several bytes; alone, it is as likely one of another encoding."""
    decoder, at, plain = codecs.getincrementaldecoder("utf-8")(), 0, True
    with reading(path, encoding) as file:
        try:
            while block := file.read(PIECE):
                waiting, nul = len(decoder.getstate()[0]), block.find(0)
                text = decoder.decode(block if nul < 0 else block[:nul])
                if nul >= 0:
                    return _no_text(path, encoding, at + nul, f"a NUL byte, not {encoding or 'UTF-8'} text")
                at, plain = at + len(block), plain and text.isascii()
        except UnicodeDecodeError as error:
            return _no_text(path, encoding, at - waiting + error.start, "not UTF-8 text")
        except Undecodable as error:
            return Text(None, offset=error.offset, why=f"not {encoding}")
        if (cut := len(decoder.getstate()[0])) and plain:
            return _no_text(path, encoding, at - cut, "not UTF-8 text")
        raw = getattr(file, "raw", None)
        return Text(at - cut, raw.cut if isinstance(raw, Recoded) else cut)


def _no_text(path: Path, encoding: str, offset: int, why: str) -> Text:
    """A file that is no text, with a guess of what it is."""
    with reading(path) as file:
        head = file.read(4096)
        file.seek(max(0, offset - 2048))
        near = file.read(4096)
    looks = "" if encoding else _looks(head, near)
    return Text(None, 0, offset, looks, f"{why}, it looks like {looks}" if looks else why)


def _looks(head: bytes, near: bytes) -> str:
    """The encoding that a text looks like by its first bytes and those at a fault; "" for none."""
    for marks, name in (
        ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
        ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
    ):
        if head.startswith(marks):
            return name
    even, odd = (head[i::2].count(0) for i in (0, 1))
    if len(head) >= 16 and max(even, odd) > 0.2 * len(head) and min(even, odd) < 0.01 * len(head):
        return "utf-16-le" if odd > even else "utf-16-be"
    if any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head + near):
        return ""
    if sum(byte > 127 for byte in near) > 0.3 * len(near):  # Cyrillic, say: too many kinds to guess
        return ""
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in near) else "latin-1"


def iconv_name(encoding: str) -> str:
    """An encoding as iconv calls it."""
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    return "LATIN1" if name == "LATIN-1" else name


def refusal(path: Path, text: Text) -> str:
    """The words for a file that is no text: what is wrong, where, and what would read it."""
    said = f"{path}: {text.why}, at byte {text.offset:,}"
    if not text.encoding:
        return said
    name = iconv_name(text.encoding)
    said += f": --encoding {text.encoding} reads it (or the source {path}#encoding={text.encoding})"
    return said if path.suffix in COMPRESSED else f"{said}; or: iconv -f {name} -t UTF-8 {path} > NEW.txt"


def pieces(path: Path, begin: int, end: int, encoding: str = "") -> Iterator[tuple[int, str]]:
    """Text of bytes [begin, end) as (offset, text of at most PIECE bytes), cut at line ends if it has any."""
    with reading(path, encoding) as file:
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


def border_at(path: Path, size: int, target: int, encoding: str = "") -> int:
    """The line end nearest to `target` in the first `size` bytes of a file, with text on both sides."""
    low, target = max(target - PIECE, 0), min(max(target, 0), size)
    with reading(path, encoding) as file:
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
