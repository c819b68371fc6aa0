"""Public prose that anyone can get and nobody has to host: books as Debian packages them, which books.json lists by
package, version, file and the digest of their plain text.

A book is cut at paragraphs into documents of 64 kB. A share of these, the clean split, is in no split of `--data
books`: one final measurement reads it (benchmarks/clean.py)."""

import gzip
import hashlib
import itertools
import json
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_data_path

from perspectron.data.corpus import Corpus, Shares, fingerprint, share_of
from perspectron.data.texts import Files, divide
from perspectron.util.errors import DataError
from perspectron.util.files import atomic, cache_folder, locked, remove

DOCUMENT = 1 << 16
"""Characters of a document, at least, where a book has as many left."""
Pieces = list[tuple[str, Path]]


class Book(NamedTuple):
    """sha256, bytes: of its plain text in UTF-8. form: a key of FORMS."""

    name: str
    package: str
    version: str
    file: str
    form: str
    bytes: int
    sha256: str


class Clean(NamedTuple):
    """The clean split: its share of the documents, and the digest and size of the texts of all of them in order."""

    share: float
    documents: int
    bytes: int
    sha256: str


@cache
def listed() -> tuple[tuple[Book, ...], Clean]:
    """The books and the clean split, as frozen in books.json."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Book(**book) for book in content["books"]), Clean(**content["clean"])


def open_books(shares: Shares) -> Corpus:
    """All books but for the clean split. DataError, with the command that gets them, where books are missing, and where
    their text is another than the one listed."""
    files = [(name, path) for name, path in documents() if not is_clean(name)]
    identity = fingerprint("books", [str(shares), *(book.sha256 for book in listed()[0])])
    return Files("books", identity, shares, divide("books", files, shares))


def is_clean(name: str) -> bool:
    """True if a document is of the clean split."""
    return share_of(f"clean {name}".encode()) < listed()[1].share


def clean() -> Pieces:
    """Documents of the clean split. DataError as `open_books`, or if they are not those that were frozen."""
    found, frozen = [piece for piece in documents() if is_clean(piece[0])], listed()[1]
    digest = digest_of([path for _, path in found])
    if (len(found), digest) != (frozen.documents, frozen.sha256):
        raise DataError(f"clean: sha256 = {digest}, must be {frozen.sha256}")
    return found


def documents() -> Pieces:
    """Documents of all books, made of the packages' files on first use and kept in the cache folder."""
    place = cache_folder()
    if place is None:
        raise DataError("books: no home folder, need one to keep their plain text in")
    every, folder = listed()[0], place / "books"
    texts = {book: folder / book.sha256[:16] for book in every}
    lacking = [book for book in every if digest_of(sorted(texts[book].glob("*.txt"))) != book.sha256]
    files = _installed(lacking)
    with locked(folder, patience=600.0):
        for book in lacking:
            text = FORMS[book.form](files[book].read_bytes())
            found = hashlib.sha256(text.encode()).hexdigest()
            if found != book.sha256:
                bound = f"{book.sha256}, that of {book.package} {book.version}"
                raise DataError(f"{files[book]}: sha256 of its text = {found}, must be {bound}")
            remove(texts[book])
            with atomic(texts[book]) as temporary:
                temporary.mkdir()
                for i, piece in enumerate(pieces(text)):
                    (temporary / f"{i:04}.txt").write_bytes(piece.encode())
    return [
        (f"{book.name}/{path.name}", path) for book in every for path in sorted(texts[book].glob("*.txt"))
    ]


def digest_of(paths: list[Path]) -> str:
    """SHA-256 of files one after another."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pieces(text: str) -> Iterator[str]:
    """The text in pieces, each cut at the end of the first paragraph after DOCUMENT characters."""
    start = 0
    while len(text) - start > 2 * DOCUMENT:
        end = text.find("\n\n", start + DOCUMENT)
        end = text.find("\n", start + DOCUMENT) if not 0 <= end < start + 2 * DOCUMENT else end + 1
        yield text[start : end + 1]
        start = end + 1
    yield text[start:]


def _installed(books: list[Book]) -> dict[Book, Path]:
    """Files of packages, installed or unpacked into the user's folder of data. DataError: some are missing."""
    unpacked = user_data_path("perspectron") / "books"
    places = {book: [root / book.file for root in (Path("/"), unpacked)] for book in books}
    found = {book: path for book in books for path in places[book] if path.is_file()}
    if missing := " ".join(book.package for book in books if book not in found):
        into = shlex.quote(str(unpacked))
        unpack = f'for f in *.deb; do dpkg-deb -x "$f" {into}; done'
        raise DataError(
            f"books: packages {missing} are missing; apt-get install them, or, in an empty folder: "
            f"apt-get download {missing} && mkdir -p {into} && {unpack}"
        )
    return found


def _lines(data: bytes) -> str:
    """Texts of an R package's data: compressed objects one after another, each a vector of lines."""
    texts, at = list[str](), 0
    while at < len(data):
        stream = zlib.decompressobj()
        texts.append("\n".join(_strings(stream.decompress(data[at + 4 :]))))
        at = len(data) - len(stream.unused_data)
    return "\n\n\n".join(texts) + "\n"


def _strings(data: bytes) -> Iterator[str]:
    """A vector of strings as R writes it: after a head with the name of the encoding, each with its flags and size."""
    at = 18 + struct.unpack_from(">i", data, 14)[0]
    count, at = struct.unpack_from(">i", data, at + 4)[0], at + 8
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        yield data[at + 8 : at + 8 + size].decode()
        at += 8 + size


def _windows(data: bytes) -> str:
    """The text of a file for the program `bible`: windows, each compressed on its own, whose places are at its head."""
    (count,) = struct.unpack_from(">I", data, 0x58)
    places = [*struct.unpack_from(f">{count}I", data, 0x5C), len(data)]
    return b"".join(_lzw(data[a:b]) for a, b in itertools.pairwise(places)).decode()


def _lzw(data: bytes) -> bytes:
    """Decompress LZW data of `compress`, without its head: codes of 9 to 16 bits, in groups of eight; 256 ends it."""
    table = {code: bytes([code]) for code in range(256)}
    texts, before, width, at, group = list[bytes](), b"", 9, 0, 0
    while at + width <= 8 * len(data):
        code = int.from_bytes(data[at >> 3 : (at >> 3) + 4], "little") >> (at & 7) & ((1 << width) - 1)
        at += width
        if code == 256:
            break
        text = table[code] if code in table else before + before[:1]
        texts.append(text)
        if before and len(table) < (1 << 16) - 1:
            table[len(table) + 1] = before + text[:1]
        before = text
        if len(table) + 1 >= 1 << width and width < 16:
            at = group = group - (group - at) // (8 * width) * (8 * width)
            width += 1
    return b"".join(texts)


def _dictionary(data: bytes) -> str:
    """The text of a dictionary of `dictd`, without lines that only name the source of an entry."""
    text = gzip.decompress(data).decode(errors="replace")
    return re.sub(r"(?m)^ *\[[^\[\]\n]*\]\n", "", text)


FORMS: dict[str, Callable[[bytes], str]] = {"R": _lines, "bible": _windows, "dict": _dictionary}
"""Functions that make plain text of a package's file, by its form."""
