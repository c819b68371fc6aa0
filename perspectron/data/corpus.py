"""Text from Python's own library, a folder, a file or JSON lines, split into train and held-out documents.

Nothing here holds a corpus in memory: files stream in pieces of at most PIECE bytes cut at line ends,
JSON lines one record at a time. Text is the file's own bytes decoded as UTF-8; line ends and byte order
marks stay.
"""

import abc
import codecs
import contextlib
import fnmatch
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from perspectron.errors import DataError
from perspectron.files import open_file

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

PIECE = 2**20
"""Most bytes of a file that become one document; longer files become several."""

SKIPPED_NAMES = 1000
"""Most names of skipped files or records kept per split; the count goes on."""

_HIDDEN = (".*",)
_NOT_STDLIB = (*_HIDDEN, "test", "tests", "idle_test", "*-packages", "__pycache__", "config-*")


@dataclass(frozen=True, slots=True)
class Document:
    """One text, never empty, and where it came from (`os/path.py`, `book.txt@1048571`, `chats.jsonl:17`)."""

    name: str
    text: str


class Corpus(abc.ABC):
    """Documents of two disjoint splits. Made by `open_corpus`.

    `fingerprint` changes when the source, its files (paths, sizes, times) or the way they are split change.
    `skipped` names what the latest pass over each split left out because it is not UTF-8 text (or not a valid
    record), at most SKIPPED_NAMES per split; `skipped_count` counts all of it.
    """

    def __init__(self, source: str, fingerprint: str) -> None:
        self.source = source
        self.fingerprint = fingerprint
        self._names: dict[SplitName, list[str]] = {split: [] for split in SPLITS}
        self._counts: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)

    @property
    def skipped(self) -> list[str]:
        return [name for split in SPLITS for name in self._names[split]]

    @property
    def skipped_count(self) -> int:
        return sum(self._counts.values())

    def documents(self, split: SplitName) -> Iterator[Document]:
        """Stream one split, in the same order every time. DataError if a source cannot be read any more."""
        if split not in SPLITS:
            raise DataError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
        self._names[split] = []
        self._counts[split] = 0
        return self._stream(split)

    @abc.abstractmethod
    def _stream(self, split: SplitName) -> Iterator[Document]:
        """Documents of a split, in order."""

    def _skip(self, split: SplitName, name: str) -> None:
        self._counts[split] += 1
        if len(self._names[split]) < SKIPPED_NAMES:
            self._names[split].append(name)


def open_corpus(source: str, heldout: float = 0.05, text_field: str = "text") -> Corpus:
    """Open `source` and decide its held-out share (a fraction between 0 and 1).

    `source` is `"stdlib"` (the `.py` files of the running Python, tests excluded), a folder (every file in
    it, hidden ones excluded; `./stdlib` for a folder of that name), a `.jsonl` or `.jsonl.gz` file (the
    string under `text_field` of each line), or a text file, plain or `.gz`. Files and records go to a split
    by a hash of their relative path, or of a record's text; of a single text file the last `heldout` of its
    bytes is held out.

    DataError: nothing there, no text in it, too little to split, or `heldout` out of bounds.
    """
    if not 0 < heldout < 1:
        raise DataError(f"heldout: {heldout} is not between 0 and 1, both excluded")
    if source == "stdlib":
        return _open_stdlib(heldout)
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, heldout)
    if not path.is_file():
        raise DataError(
            f"{source}: " + ("not a file or folder" if path.exists() else "no such file or folder")
        )
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _JsonLines(path, heldout, text_field)
    return _open_file(path, heldout)


# Plain files


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [begin, end) of a file's text; `end` None is the whole file, not yet known to be text."""

    path: Path
    name: str
    begin: int = 0
    end: int | None = None


class _Files(Corpus):
    def __init__(self, source: str, fingerprint: str, parts: dict[SplitName, list[_Part]]) -> None:
        super().__init__(source, fingerprint)
        self._parts = parts

    def _stream(self, split: SplitName) -> Iterator[Document]:
        for part in self._parts[split]:
            end = _text_size(part.path) if part.end is None else part.end
            if not end:
                self._skip(split, part.name)
                continue
            alone = part.begin == 0 and end <= PIECE and part.end is None
            for offset, text in _pieces(part.path, part.begin, end):
                yield Document(part.name if alone else f"{part.name}@{offset}", text)


def _open_stdlib(heldout: float) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [(name, path) for name, path in _walk(root, _NOT_STDLIB) if name.endswith(".py")]
    # Sizes but no times: the same Python installed elsewhere is the same corpus.
    listing = [f"{name}\0{path.stat().st_size}" for name, path in files]
    identity = _fingerprint("stdlib", [platform.python_version(), str(heldout), *listing])
    return _Files("stdlib", identity, _divide("stdlib", files, heldout))


def _open_folder(root: Path, heldout: float) -> Corpus:
    files = _walk(root, _HIDDEN)
    identity = _fingerprint("folder", [str(root.resolve()), str(heldout), *(_facts(*file) for file in files)])
    return _Files(str(root), identity, _divide(str(root), files, heldout))


def _open_file(path: Path, heldout: float) -> Corpus:
    identity = _fingerprint("file", [str(path.resolve()), str(heldout), _facts(path.name, path)])
    size = _text_size(path)
    if not size:
        raise DataError(
            f"{path}: not UTF-8 text" if size is None else f"{path}: empty, there is no text in it"
        )
    return _Files(str(path), identity, _halves(path, path.name, size, heldout))


def _walk(root: Path, left_out: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Non-empty regular files under `root` as (relative POSIX path, path), sorted.

    Folders and files whose name matches one of the `left_out` patterns are not listed.
    """
    files: list[tuple[str, Path]] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def wanted(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatchcase(name, p) for p in left_out)]

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = wanted(folders)
        for path in (Path(folder, name) for name in wanted(names)):
            if path.is_file() and path.stat().st_size:
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


def _facts(name: str, path: Path) -> str:
    stat = path.stat()
    return f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}"


def _fingerprint(kind: str, lines: Iterable[str]) -> str:
    digest = hashlib.sha256(f"{kind}\n{PIECE}\n".encode())
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return f"{kind}:{digest.hexdigest()}"


def _share(key: bytes) -> float:
    """A number in [0, 1) that depends on `key` alone; below `heldout` means held out."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48


def _divide(source: str, files: list[tuple[str, Path]], heldout: float) -> dict[SplitName, list[_Part]]:
    """Files to splits by the hash of their name; a split without a readable file gets the nearest hash's."""
    shares = {name: _share(name.encode("utf-8", "surrogateescape")) for name, _ in files}
    ranked = sorted(files, key=lambda file: (shares[file[0]], file[0]))
    smallest = next((file for file in ranked if _text_size(file[1])), None)
    if smallest is None:
        raise DataError(f"{source}: no text in it ({len(files)} files, none of them non-empty UTF-8)")
    largest = next(file for file in reversed(ranked) if _text_size(file[1]))
    kept_back = {name for name, share in shares.items() if share < heldout}
    kept_back = (kept_back | {smallest[0]}) - {largest[0]}
    parts: dict[SplitName, list[_Part]] = {split: [] for split in SPLITS}
    for name, path in files:
        parts["heldout" if name in kept_back else "train"].append(_Part(path, name))
    if smallest == largest:
        size = _text_size(smallest[1])
        assert size is not None
        halves = _halves(smallest[1], smallest[0], size, heldout)
        parts = {
            split: [p for p in parts[split] if p.name != smallest[0]] + halves[split] for split in SPLITS
        }
    return parts


def _halves(path: Path, name: str, size: int, heldout: float) -> dict[SplitName, list[_Part]]:
    """One file's text of `size` bytes, cut at the line end nearest to where `heldout` of it begins."""
    target = min(max(round(size * (1 - heldout)), 0), size)
    low = max(target - PIECE, 0)
    with _reading(path) as file:
        file.seek(low)
        near = file.read(min(target + PIECE, size) - low)
    lines = [i + 1 for i in (near.rfind(b"\n", 0, target - low), near.find(b"\n", target - low)) if i >= 0]
    inside = [low + i for i in lines if 0 < low + i < size]
    if not inside:  # one line only, as far as we look: cut between two characters instead
        inside = [low + i for i, byte in enumerate(near) if byte & 0xC0 != 0x80 and low + i > 0]
    if not inside:
        raise DataError(
            f"{path}: {size} bytes of text, need at least 2 characters, to train on and to hold out"
        )
    cut = min(inside, key=lambda at: abs(at - target))
    return {"train": [_Part(path, name, 0, cut)], "heldout": [_Part(path, name, cut, size)]}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed if it is named `.gz`; what goes wrong becomes a DataError."""
    try:
        with open_file(path) as plain:
            if path.name.endswith(".gz"):
                with gzip.open(plain, "rb") as file:
                    yield file
            else:
                yield plain
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _text_size(path: Path) -> int | None:
    """Bytes of UTF-8 text in a file; None where it is no text: other bytes, or a NUL among them."""
    with _reading(path) as file:
        try:
            for text in codecs.iterdecode(iter(lambda: file.read(PIECE), b""), "utf-8"):
                if "\0" in text:
                    return None
        except UnicodeDecodeError:
            return None
        return file.tell()


def _pieces(path: Path, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Text of bytes [begin, end) as (offset, text of at most PIECE bytes), cut at line ends if it has any."""
    with _reading(path) as file:
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


# JSON lines


class _JsonLines(Corpus):
    def __init__(self, path: Path, heldout: float, text_field: str) -> None:
        facts = [str(path.resolve()), str(heldout), text_field, _facts(path.name, path)]
        super().__init__(str(path), _fingerprint("jsonl by text", facts))
        self._path = path
        self._heldout = heldout
        self._field = text_field
        self._moved: dict[int, SplitName] = {}
        self._settle()

    def _settle(self) -> None:
        """Make sure both splits have a record: read until both are seen, or move the one nearest in hash."""
        seen: list[tuple[float, int]] = []
        for number, text, share in self._records():
            if text:
                seen.append((share, number))
                if min(seen)[0] < self._heldout <= max(seen)[0]:
                    return
                seen = [min(seen), max(seen)]
        if not seen:
            raise DataError(f"{self._path}: no record with text under {self._field!r}")
        if min(seen) == max(seen):
            raise DataError(f"{self._path}: 1 record with text, need at least 2, to train on and to hold out")
        self._moved = {min(seen)[1]: "heldout", max(seen)[1]: "train"}

    def _records(self) -> Iterator[tuple[int, str | None, float]]:
        """(line number from 1, text or None if it is no valid record, share) of every line not blank."""
        with _reading(self._path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    text = _text_of(line, self._field)
                    yield number, text, _share(line if text is None else text.encode())

    def _stream(self, split: SplitName) -> Iterator[Document]:
        for number, text, share in self._records():
            if self._moved.get(number, "heldout" if share < self._heldout else "train") != split:
                continue
            if text is None:
                self._skip(split, f"{self._path.name}:{number}")
            elif text:
                yield Document(f"{self._path.name}:{number}", text)


def _text_of(line: bytes, field: str) -> str | None:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str) or "\0" in text:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        return None
    return text
