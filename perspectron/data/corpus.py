"""Corpora: documents in disjoint training, dev and held-out splits, streamed in a fixed order.

No corpus is held in memory. `perspectron.data.sources.open_corpus` opens one of those in `texts`, `records` and
`mixture`.
"""

import abc
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from perspectron.data.reading import PIECE
from perspectron.util.errors import DataError

SplitName = Literal["train", "dev", "heldout"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

SKIPPED_NAMES = 1000
"""Maximum number of names of skipped files or records kept per split; the count is always complete."""

RULE = 2
"""Version of the rules by which sources are read and split. Before 2 a folder's files went to splits by hashes alone,
whatever their sizes and kinds, and .csv, .tsv and .json were texts. A run keeps the rule by which it was split."""
SAID, MOST_REASONS = 5, 100
"""Kinds that are told of in a line, and that are counted for each split."""

Place = Any
"""A place in a pass over a split, as plain JSON values; None is its beginning."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text, never empty, and where it came from (`os/path.py`, `book.txt@1048571`, `chats.jsonl:17`).

    prompt: what stands before the text and is read, but not learned. place: where a pass goes on after it. share: of
    the split's source, what was read up to here.
    """

    name: str
    text: str
    prompt: str = ""
    place: Place = None
    share: float = 1.0


class Corpus(abc.ABC):
    """Documents of disjoint splits. Made by `open_corpus`.

    `splits`: "train" and "heldout", and "dev" between them if a share for it was given. `fingerprint` changes with the
    source, its files (paths, sizes, times) and the way they are split. `skipped` names what the latest pass over each
    split left out because it was not UTF-8 text or not a valid record, at most SKIPPED_NAMES per split;
    `skipped_count` counts all of it, and `notes` says it by kind.
    """

    completions = False
    """True if each document has a prompt, which is not learned."""

    def __init__(self, source: str, fingerprint: str, shares: "Shares") -> None:
        self.source = source
        self.fingerprint = fingerprint
        self.shares = shares
        self.splits = shares.splits
        self._names: dict[SplitName, list[str]] = {split: [] for split in SPLITS}
        self._read: dict[SplitName, Counter[Label]] = {split: Counter() for split in SPLITS}
        self._left: dict[SplitName, Counter[tuple[Label, str]]] = {split: Counter() for split in SPLITS}

    @property
    def digest(self) -> str:
        """The part of the fingerprint that is shown to people."""
        return self.fingerprint.partition(":")[2][:12]

    @property
    def skipped(self) -> list[str]:
        return [name for split in SPLITS for name in self._names[split]]

    @property
    def skipped_count(self) -> int:
        return self.left_out.total()

    @property
    def read(self) -> "Counter[Label]":
        """Files and records that the latest passes read, by kind."""
        return sum(self._read.values(), Counter())

    @property
    def left_out(self) -> "Counter[tuple[Label, str]]":
        """Files and records that they left out, by kind and reason."""
        return sum(self._left.values(), Counter())

    def notes(self) -> list[str]:
        """Lines that say what the latest passes read, where it was of several kinds, and what they left out and why."""
        read, left = self.read, self.left_out
        lines = []
        if len(read) > 1:
            lines.append("read " + _listed([label.said(count) for label, count in read.most_common()]))
        said = []
        for (label, why), count in left.most_common():
            whole = "all " if count > 1 and not read[label] else ""
            said.append(f"{whole}{label.said(count)} ({why})")
        return [*lines, "left out " + _listed(said)] if said else lines

    def documents(self, split: SplitName, after: Place = None) -> Iterator[Document]:
        """Stream one split, always in the same order, from its beginning or after a document's `place`; what stands
        before that is not read again, as far as the file's format allows. DataError if a source can no longer be
        read."""
        if split not in self.splits:
            raise DataError(f"split: {split!r} is not one of {', '.join(self.splits)}")
        self._names[split] = []
        self._read[split], self._left[split] = Counter(), Counter()
        return self._stream(split, after)

    @abc.abstractmethod
    def _stream(self, split: SplitName, after: Place) -> Iterator[Document]:
        """Documents of a split, in order."""

    def _skip(self, split: SplitName, name: str, label: "Label", why: str) -> None:
        left = self._left[split]
        left[(label, why if (label, why) in left or len(left) < MOST_REASONS else "other reasons")] += 1
        if len(self._names[split]) < SKIPPED_NAMES:
            self._names[split].append(name)


class Label(NamedTuple):
    """A kind of what is read: files of an extension, or the records of a table."""

    what: Literal["file", "record"]
    of: str

    def said(self, count: int) -> str:
        """So many of them, in words."""
        many = f"{count:,} {{}}{self.what}{'s' * (count != 1)}"
        return many.format(f"{self.of} ") if self.what == "file" else f"{many.format('')} of {self.of}"


def _listed(parts: list[str]) -> str:
    more = len(parts) - SAID
    return "; ".join(parts[:SAID]) + (f"; and {more:,} more kinds" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a text that are not trained on: what `share_of` a name or a record is below `heldout` is held out,
    and of the rest what is below heldout + dev is for choices, so that a dev split leaves the held-out text alone.
    rule: in RULE."""

    heldout: float
    dev: float
    rule: int = RULE

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return tuple(split for split in SPLITS if split != "dev" or self.dev)

    def of(self, share: float) -> SplitName:
        if share < self.heldout:
            return "heldout"
        return "dev" if share < self.heldout + self.dev else "train"

    def about(self, split: SplitName) -> float:
        """About how much of the text a split is."""
        return {"heldout": self.heldout, "dev": self.dev}.get(split, 1 - self.heldout - self.dev)

    def __str__(self) -> str:
        return f"{self.heldout} dev {self.dev}" if self.dev else str(self.heldout)


class Joined(Corpus):
    """Corpora one after another, as one."""

    def __init__(self, source: str, fingerprint: str, parts: list[Corpus]) -> None:
        super().__init__(source, fingerprint, parts[0].shares)
        self.parts = parts
        self.completions = any(part.completions for part in parts)

    @property
    def skipped(self) -> list[str]:
        return [name for part in self.parts for name in part.skipped]

    @property
    def read(self) -> Counter[Label]:
        return sum((part.read for part in self.parts), Counter())

    @property
    def left_out(self) -> Counter[tuple[Label, str]]:
        return sum((part.left_out for part in self.parts), Counter())

    def _stream(self, split: SplitName, after: Place) -> Iterator[Document]:
        first, inner = after or (0, None)
        for i, part in enumerate(self.parts[first:], first):
            for found in part.documents(split, inner):
                share = (i + found.share) / len(self.parts)
                yield Document(found.name, found.text, found.prompt, [i, found.place], share)
            inner = None


def facts(name: str, path: Path) -> str:
    """The facts about a file that a fingerprint depends on: its name, size and time."""
    stat = path.stat()
    return f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}"


def fingerprint(kind: str, lines: Iterable[str]) -> str:
    digest = hashlib.sha256(f"{kind}\n{PIECE}\n".encode())
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return f"{kind}:{digest.hexdigest()}"


def share_of(key: bytes) -> float:
    """A number in [0, 1) that depends on `key` alone; below `heldout` means held out."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48
