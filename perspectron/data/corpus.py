"""Corpora: text from Python's own library, a folder, a file or JSON lines, split into training, dev and held-out
documents.

No corpus is held in memory: files stream in pieces of at most PIECE bytes cut at line ends, JSON lines one record at a
time. Text is the file's bytes decoded as UTF-8; line ends and byte order marks are kept.
"""

import abc
import codecs
import contextlib
import fnmatch
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from perspectron.errors import DataError
from perspectron.files import open_file, sha256

SplitName = Literal["train", "dev", "heldout"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

PIECE = 2**20
"""Maximum size of a document in bytes; longer files become several documents."""

SKIPPED_NAMES = 1000
"""Maximum number of names of skipped files or records kept per split; the count is always complete."""

_HIDDEN = (".*",)


class _Named(NamedTuple):
    """A corpus that has a name. folder: a key of `sysconfig.get_path`. files: patterns, in lower case, of which one
    fits a file's path in it. left_out: of names of folders and files. alike: whether copies of a file stay."""

    folder: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    alike: bool


_NOT_TEXT = (*_HIDDEN, "__pycache__", "perspectron", "perspectron-*")
NAMED = {
    "stdlib": _Named(
        "stdlib",
        ("*.py",),
        (*_HIDDEN, "test", "tests", "idle_test", "*-packages", "__pycache__", "config-*"),
        alike=True,
    ),
    "sources": _Named("purelib", ("*.py",), _NOT_TEXT, alike=False),
    "prose": _Named(
        "purelib",
        ("*.md", "*.rst", "*.dist-info/metadata", "*/licen[sc]e*", "*/copying*", "*/notice*", "*/authors*"),
        (*_NOT_TEXT, "*.py", "*.pyi"),
        alike=False,
    ),
}
"""Texts that every machine with Python has: `stdlib`, the sources of Python's own library without its tests; of the
packages that are installed, `sources`, their Python files, and `prose`, what documents and licenses them."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text, never empty, and where it came from (`os/path.py`, `book.txt@1048571`, `chats.jsonl:17`)."""

    name: str
    text: str


class Corpus(abc.ABC):
    """Documents of disjoint splits. Made by `open_corpus`.

    `splits`: "train" and "heldout", and "dev" between them if a share for it was given. `fingerprint` changes with the
    source, its files (paths, sizes, times) and the way they are split. `skipped` names what the latest pass over each
    split left out because it was not UTF-8 text or not a valid record, at most SKIPPED_NAMES per split;
    `skipped_count` counts all of it.
    """

    def __init__(self, source: str, fingerprint: str, splits: tuple[SplitName, ...]) -> None:
        self.source = source
        self.fingerprint = fingerprint
        self.splits = splits
        self._names: dict[SplitName, list[str]] = {split: [] for split in SPLITS}
        self._counts: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)

    @property
    def digest(self) -> str:
        """The part of the fingerprint that is shown to people."""
        return self.fingerprint.partition(":")[2][:12]

    @property
    def skipped(self) -> list[str]:
        return [name for split in SPLITS for name in self._names[split]]

    @property
    def skipped_count(self) -> int:
        return sum(self._counts.values())

    def documents(self, split: SplitName) -> Iterator[Document]:
        """Stream one split, always in the same order. DataError if a source can no longer be read."""
        if split not in self.splits:
            raise DataError(f"split: {split!r} is not one of {', '.join(self.splits)}")
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


@dataclass(frozen=True, slots=True)
class _Shares:
    """The parts of a text that are not trained on: what `_share` of a name or a record is below `heldout` is held out,
    and of the rest what is below heldout + dev is for choices, so that a dev split leaves the held-out text alone."""

    heldout: float
    dev: float

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return tuple(split for split in SPLITS if split != "dev" or self.dev)

    def of(self, share: float) -> SplitName:
        if share < self.heldout:
            return "heldout"
        return "dev" if share < self.heldout + self.dev else "train"

    def __str__(self) -> str:
        return f"{self.heldout} dev {self.dev}" if self.dev else str(self.heldout)


def open_corpus(source: str, heldout: float = 0.05, text_field: str = "text", *, dev: float = 0.0) -> Corpus:
    """Open `source` and split off its held-out share (a fraction between 0 and 1) and its dev share.

    `source` is a name in NAMED (`"stdlib"`: the `.py` files of the running Python, tests excluded), a folder (every
    file in it, hidden ones excluded; `./stdlib` for a folder of that name), a `.jsonl` or `.jsonl.gz` file (the
    string under `text_field` of each line), or a text file, plain or `.gz`. Files and records go to a split
    by a hash of their relative path, or of a record's text; of a single text file the last `heldout` of its
    bytes is held out. `dev` is taken from what would be trained on: the held-out text is the same without it.

    DataError if nothing is there, it holds no text, it is too small to split, or a share is out of bounds.
    """
    if not 0 < heldout < 1:
        raise DataError(f"heldout: {heldout} is not between 0 and 1 (exclusive)")
    if not 0 <= dev < 1 - heldout:
        raise DataError(f"dev: {dev} is not in [0, {1 - heldout:g}), the share that is not held out")
    if "://" in source:
        name = source.rstrip("/").rpartition("/")[2] or "FILE"
        raise DataError(f"{source}: a URL; download it first (curl -LO {source}) and give the file, {name}")
    shares, path = _Shares(heldout, dev), Path(source)
    if source in NAMED:
        return _open_named(source, shares)
    if path.is_dir():
        return _open_folder(path, shares)
    if not path.is_file():
        raise DataError(
            f"{source}: " + ("not a file or folder" if path.exists() else "no such file or folder")
        )
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _JsonLines(path, shares, text_field)
    return _open_file(path, shares)


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
        super().__init__(source, fingerprint, tuple(parts))
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


def _open_named(name: str, shares: _Shares) -> Corpus:
    folder, patterns, left_out, alike = NAMED[name]
    root = Path(sysconfig.get_path(folder))
    files = [
        (path, file)
        for path, file in _walk(root, left_out)
        if any(fnmatch.fnmatchcase(path.lower(), pattern) for pattern in patterns)
    ]
    files = files if alike else _distinct(files)
    # Sizes but no times: the same Python with the same packages elsewhere is the same corpus.
    listing = [f"{path}\0{file.stat().st_size}" for path, file in files]
    identity = _fingerprint(name, [platform.python_version(), str(shares), *listing])
    return _Files(name, identity, _divide(name, files, shares))


def _distinct(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files without copies of those before them, of which one could be held out and the other trained on."""
    sizes = Counter(file.stat().st_size for _, file in files)
    seen, kept = set[str](), []
    for path, file in files:
        digest = sha256(file) if sizes[file.stat().st_size] > 1 else path
        if digest not in seen:
            seen.add(digest)
            kept.append((path, file))
    return kept


def _open_folder(root: Path, shares: _Shares) -> Corpus:
    files = _walk(root, _HIDDEN)
    identity = _fingerprint("folder", [str(root.resolve()), str(shares), *(_facts(*file) for file in files)])
    return _Files(str(root), identity, _divide(str(root), files, shares))


def _open_file(path: Path, shares: _Shares) -> Corpus:
    identity = _fingerprint("file", [str(path.resolve()), str(shares), _facts(path.name, path)])
    size = _text_size(path)
    if not size:
        raise DataError(
            f"{path}: not UTF-8 text" if size is None else f"{path}: empty, there is no text in it"
        )
    return _Files(str(path), identity, _cut(path, path.name, size, shares))


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


def _divide(source: str, files: list[tuple[str, Path]], shares: _Shares) -> dict[SplitName, list[_Part]]:
    """Files to splits by the hash of their name. A split without a readable file gets the one whose hash is nearest;
    fewer such files than splits are cut themselves."""
    ranked = sorted(files, key=lambda file: (_share(_key(file[0])), file[0]))
    split_of = {name: shares.of(_share(_key(name))) for name, _ in ranked}
    readable = (file for file in ranked if _text_size(file[1]))
    first = list(itertools.islice(readable, len(shares.splits) - 1))
    last = next((file for file in reversed(ranked) if _text_size(file[1])), None)
    if last is None:
        raise DataError(f"{source}: no text in it ({len(files)} files, none of them non-empty UTF-8)")
    parts: dict[SplitName, list[_Part]] = {split: [] for split in shares.splits}
    cut = dict[SplitName, list[_Part]]()
    if last in first:
        name, path = last
        size = _text_size(path)
        assert size is not None
        cut = _cut(path, name, size, shares)
        del split_of[name]
    else:
        split_of |= {first[0][0]: "heldout", last[0]: "train"}
        if shares.dev and not any(split_of[name] == "dev" and _text_size(path) for name, path in ranked):
            taken = (f for f in ranked if split_of[f[0]] == "train" and f != last and _text_size(f[1]))
            split_of[next(taken, first[1])[0]] = "dev"
    for name, path in files:
        if name in split_of:
            parts[split_of[name]].append(_Part(path, name))
    return {split: parts[split] + cut.get(split, []) for split in parts}


def _key(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _cut(path: Path, name: str, size: int, shares: _Shares) -> dict[SplitName, list[_Part]]:
    """One file's text of `size` bytes, cut where the dev part of it begins, if there is one, and the held-out one."""
    edges = [_border_at(path, size, round(size * (1 - shares.heldout))), size]
    if shares.dev:
        edges.insert(0, _border_at(path, edges[0], round(size * (1 - shares.heldout - shares.dev))))
    pairs = itertools.pairwise([0, *edges])
    return {split: [_Part(path, name, *pair)] for split, pair in zip(shares.splits, pairs, strict=True)}


def _border_at(path: Path, size: int, target: int) -> int:
    """The line end nearest to `target` in the first `size` bytes of a file, with text on both sides."""
    low, target = max(target - PIECE, 0), min(max(target, 0), size)
    with _reading(path) as file:
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
    def __init__(self, path: Path, shares: _Shares, text_field: str) -> None:
        facts = [str(path.resolve()), str(shares), text_field, _facts(path.name, path)]
        super().__init__(str(path), _fingerprint("jsonl by text", facts), shares.splits)
        self._path = path
        self._shares = shares
        self._field = text_field
        self._moved: dict[int, SplitName] = {}
        self._settle()

    def _settle(self) -> None:
        """Make sure every split has a record: read until all are seen, or move those nearest in hash."""
        seen: list[tuple[float, int]] = []
        need, found = len(self.splits), set[SplitName]()
        for number, text, share in self._records():
            if text:
                found.add(self._shares.of(share))
                if len(found) == need:
                    return
                seen = sorted([*seen, (share, number)])
                trained = [one for one in seen if self._shares.of(one[0]) == "train"]
                kept = {*seen[: need - 1], *trained[:1], seen[-1]}  # the first to train on may have to be dev
                seen = [one for one in seen if one in kept]
        if not seen:
            raise DataError(f"{self._path}: no record with text under {self._field!r}")
        if len(seen) < need:
            counted = f"{len(seen)} record{'s' * (len(seen) > 1)} with text, need at least {need}"
            raise DataError(f"{self._path}: {counted}, one for each of {', '.join(self.splits)}")
        self._moved = {seen[0][1]: "heldout", seen[-1][1]: "train"}
        if "dev" in self.splits and "dev" not in found:
            rest = [one for one in seen[1:-1] if self._shares.of(one[0]) == "train"]
            self._moved[(rest or seen[1:])[0][1]] = "dev"

    def _records(self) -> Iterator[tuple[int, str | None, float]]:
        """(line number from 1, text or None if it is no valid record, share) of every line not blank."""
        with _reading(self._path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    text = _text_of(line, self._field)
                    yield number, text, _share(line if text is None else text.encode())

    def _stream(self, split: SplitName) -> Iterator[Document]:
        for number, text, share in self._records():
            if self._moved.get(number, self._shares.of(share)) != split:
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
