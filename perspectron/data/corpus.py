"""Corpora: documents in disjoint training, dev and held-out splits, streamed in a fixed order.

No corpus is held in memory. `perspectron.data.sources.open_corpus` opens one of those in `texts`, `records` and
`mixture`.
"""

import abc
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from perspectron.data.reading import PIECE
from perspectron.data.template import Messages, Template
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError

SplitName = Literal["train", "dev", "heldout"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

SKIPPED_NAMES = 1000
"""Maximum number of names of skipped files or records kept per split; the count is always complete."""
RULE = 3
"""Version of the rules by which sources are read and split."""
RULES = (2, RULE)
"""Versions that are still read. Version 2 split prompts and completions otherwise, which is refused, and also folders
of a few kilobytes."""
SHOWN_KINDS, MOST_REASONS = 5, 100
"""Most kinds that a line names, and most pairs of a kind and a reason that are counted for each split."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text, never empty, and where it came from (`os/path.py`, `book.txt@1048571`, `chats.jsonl:17`).

    prompt: what stands before the text and is read, but not learned. share: how much of the split's source was read up
    to here. asked: the messages of which `template` made the prompt.
    """

    name: str
    text: str
    prompt: str = ""
    share: float = 1.0
    asked: Messages = ()
    template: Template | None = None

    def read_by(self, tokenizer: Tokenizer) -> str:
        """The prompt for `tokenizer.encode_items`. For a tokenizer that is not ours, what the template writes may be
        special tokens; what the user wrote never is one."""
        if self.template is None or tokenizer.specials.reset is not None:
            return self.prompt
        return self.template.read(self.asked, self.prompt, tokenizer)


@dataclass
class Tally:
    """Counts of one pass over a split, by kind, such as ".py files": what was read, and what was left out and why;
    names of what was left out."""

    read: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)

    def skip(self, name: str, kind: str, why: str) -> None:
        left = self.left_out
        left[(kind, why if (kind, why) in left or len(left) < MOST_REASONS else "other reasons")] += 1
        if len(self.names) < SKIPPED_NAMES:
            self.names.append(name)


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
        self.apart = list[str]()
        """Lines that say which folders were left out as a whole."""
        self._tallies = {split: Tally() for split in SPLITS}

    @property
    def size(self) -> float:
        """Bytes of its sources, as they are on disk; 0 if unknown."""
        return 0.0

    @property
    def digest(self) -> str:
        """The part of the fingerprint that is shown to people."""
        return self.fingerprint.partition(":")[2][:12]

    @property
    def tallies(self) -> list[Tally]:
        """The tallies of the latest pass over each split."""
        return list(self._tallies.values())

    @property
    def skipped(self) -> list[str]:
        return [name for tally in self.tallies for name in tally.names]

    @property
    def skipped_count(self) -> int:
        return sum(tally.left_out.total() for tally in self.tallies)

    def notes(self) -> list[str]:
        """Lines that say what the latest passes read, where it was of several kinds, and what they left out and why."""
        read = sum((tally.read for tally in self.tallies), Counter[str]())
        left_out = sum((tally.left_out for tally in self.tallies), Counter[tuple[str, str]]())
        lines = []
        if len(read) > 1:
            lines.append("read " + _listed([f"{kind}: {count:,}" for kind, count in read.most_common()]))
        if left_out:
            found = [f"{kind}: {count:,} ({why})" for (kind, why), count in left_out.most_common()]
            lines.append("left out " + _listed(found))
        return lines + self.apart

    def documents(self, split: SplitName) -> Iterator[Document]:
        """Stream one split, always in the same order. DataError if a source can no longer be read."""
        if split not in self.splits:
            raise DataError(f"split: {split!r} is not one of {', '.join(self.splits)}")
        self._tallies[split] = Tally()
        return self._stream(split)

    @abc.abstractmethod
    def _stream(self, split: SplitName) -> Iterator[Document]:
        """Documents of a split, in order."""


def _listed(parts: list[str]) -> str:
    more = len(parts) - SHOWN_KINDS
    return "; ".join(parts[:SHOWN_KINDS]) + (f"; and {more:,} more kinds" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of a text that are not trained on. A name or a record whose `share_of` is below `heldout` is held out;
    of the rest, those below heldout + dev are for choices, so that a dev split leaves the held-out text alone."""

    heldout: float
    dev: float

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return tuple(split for split in SPLITS if split != "dev" or self.dev)

    def of(self, share: float) -> SplitName:
        if share < self.heldout:
            return "heldout"
        return "dev" if share < self.heldout + self.dev else "train"

    def about(self, split: SplitName) -> float:
        """The approximate share of the text that a split has."""
        return {"heldout": self.heldout, "dev": self.dev}.get(split, 1 - self.heldout - self.dev)

    def __str__(self) -> str:
        return f"{self.heldout} dev {self.dev}" if self.dev else str(self.heldout)


class Joined(Corpus):
    """Several corpora, one after another, as one corpus."""

    def __init__(self, source: str, fingerprint: str, parts: list[Corpus]) -> None:
        super().__init__(source, fingerprint, parts[0].shares)
        self.parts = parts
        self.completions = any(part.completions for part in parts)

    @property
    def tallies(self) -> list[Tally]:
        return [tally for part in self.parts for tally in part.tallies]

    @property
    def size(self) -> float:
        sizes = [part.size for part in self.parts]
        return sum(sizes) if all(sizes) else 0.0

    @property
    def spans(self) -> list[tuple[float, float]]:
        """(the share of the whole before it, its own share) of each part, by bytes; equal ones if a size is unknown."""
        whole = self.size
        own = [part.size / whole if whole else 1 / len(self.parts) for part in self.parts]
        return list(zip(itertools.accumulate(own, initial=0.0), own, strict=False))

    def _stream(self, split: SplitName) -> Iterator[Document]:
        for part, (before, own) in zip(self.parts, self.spans, strict=True):
            for found in part.documents(split):
                yield replace(found, share=before + own * found.share)


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
