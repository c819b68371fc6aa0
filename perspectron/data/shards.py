"""A corpus as token ids on disk: memory-mapped little-endian shards, verified when opened.

Every document is its tokens with what its tokenizer puts before and after a text (`Tokenizer.encode_items`). State
resets where it starts: a tokenizer of this library has a separator there, which is also what the last token of the
document before predicts. A folder holds, for each split:

    train-00000.bin       ids, uint16 if the vocabulary has at most 65536 tokens, else uint32
    train-00000.starts    int64 positions in that shard where a document starts
    train-00000.learned   of prompts and completions: int64 positions where each document's completion starts
    manifest.json         what the ids were made of and with, and each shard's size and digests

A shard ends where a document does. A document longer than a shard gets shards of its own, of which only the
first has a start. Of several sources each has such a folder, in one whose manifest.json has their names and weights.
"""

import hashlib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perspectron.data.corpus import SplitName
from perspectron.data.manifest import (
    MANIFEST,
    POSITION,
    Ids,
    Kind,
    Manifest,
    Mixed,
    check_shard,
    file_of,
    load,
    named,
    read,
)
from perspectron.util.errors import DataError
from perspectron.util.files import opened


class Source(NamedTuple):
    """One of several texts that stand in a split one after another: its share of what is trained on, and its
    tokens."""

    name: str
    weight: Fraction
    tokens: int


class Split:
    """One split's ids as one stream, mapped from its shards.

    `tokens` counts all ids; `text_bytes` the UTF-8 bytes of the text they stand for; `starts` (documents,) are the
    positions where documents start. `learned` (documents,) are the positions from which a document is learned,
    where prompts stand before that; None where all of it is. `ended`: the id that begins the next one is then not
    learned. `sources`: the texts that it is made of. `digest`: a number for its ids and documents, 0 for one that is
    not on disk.
    """

    def __init__(
        self, name: SplitName, shards: list[Ids], starts: NDArray[np.int64], text_bytes: int
    ) -> None:
        self.name = name
        self.text_bytes = text_bytes
        self.documents = len(starts)
        self.starts = starts
        self.learned: NDArray[np.int64] | None = None
        self.ended = False
        self.digest = 0
        self._shards = shards
        self._offsets: NDArray[np.int64] = np.cumsum([0, *map(len, shards)], dtype=np.int64)
        self.tokens = int(self._offsets[-1])
        self.sources: tuple[Source, ...] = (Source("", Fraction(1), self.tokens),)

    @classmethod
    def mapped(cls, name: SplitName, folder: Path, manifest: Manifest) -> "Split":
        """The split of a folder."""
        records, shards = manifest.splits.by_split[name], list[Ids]()
        for i, record in enumerate(records):
            with opened(file_of(folder, name, i, "bin"), DataError) as file:
                shards.append(np.memmap(file, np.dtype(manifest.dtype), "r", shape=(record.tokens,)))
        offsets = np.cumsum([0, *map(len, shards)], dtype=np.int64)

        def positions(kind: Kind) -> NDArray[np.int64]:
            found = (read(file_of(folder, name, i, kind), POSITION) for i in range(len(shards)))
            return np.concatenate([local + offset for local, offset in zip(found, offsets, strict=False)])

        split = cls(name, shards, positions("starts"), sum(record.text_bytes for record in records))
        split.learned = positions("learned") if manifest.completions else None
        split.ended = manifest.ended
        split.digest = _digest((r.sha256, r.starts_sha256, r.learned_sha256) for r in records)
        return split

    @classmethod
    def joined(cls, parts: "list[tuple[str, Fraction, Split]]") -> "Split":
        """Splits of several sources one after another."""
        splits = [split for _, _, split in parts]
        offsets = np.cumsum([0, *(split.tokens for split in splits)], dtype=np.int64)
        starts = np.concatenate([split.starts + at for split, at in zip(splits, offsets, strict=False)])
        shards = [shard for split in splits for shard in split._shards]
        whole = cls(splits[0].name, shards, starts, sum(split.text_bytes for split in splits))
        learned = [split.learned for split in splits if split.learned is not None]
        if learned:
            whole.learned = np.concatenate([its + at for its, at in zip(learned, offsets, strict=False)])
        whole.ended = splits[0].ended  # of one tokenizer
        whole.digest = _digest(split.digest for split in splits)
        whole.sources = tuple(Source(name, weight, split.tokens) for name, weight, split in parts)
        return whole

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids [start, stop) of the stream, a copy, across shard borders. IndexError: outside the stream."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{self.name}: [{start}, {stop}) is not inside [0, {self.tokens})")
        out = np.empty(stop - start, dtype=np.int64)
        done = start
        shard = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while done < stop:
            low, high = int(self._offsets[shard]), min(int(self._offsets[shard + 1]), stop)
            out[done - start : high - start] = self._shards[shard][done - low : high - low]
            done = high
            shard += 1
        return out

    def begins(self, start: int, stop: int) -> NDArray[np.bool_]:
        """A mask of the ids [start, stop) with which a document starts."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        first, last = np.searchsorted(self.starts, (start, stop))
        mask[self.starts[first:last] - start] = True
        return mask

    def ends(self, start: int, stop: int) -> NDArray[np.bool_]:
        """A mask of the ids [start, stop) with which a document ends."""
        mask = self.begins(start + 1, stop + 1)
        mask[np.arange(start, stop) == self.tokens - 1] = True
        return mask

    def document(self, i: int) -> NDArray[np.int64]:
        """Ids of document `i`. IndexError: no such document."""
        if not 0 <= i < self.documents:
            raise IndexError(f"{self.name}: document {i} is not between 0 and {self.documents - 1}")
        stop = int(self.starts[i + 1]) if i + 1 < self.documents else self.tokens
        return self.read(int(self.starts[i]), stop)

    def is_learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """A mask of the ids [start, stop) that are targets of training: of a document with a prompt, those after it
        and, where there is a separator, that which ends it."""
        at = np.arange(start, stop)
        if self.learned is None:
            return np.ones(len(at), dtype=np.bool_)
        document = np.searchsorted(self.starts, at, side="left") - 1
        learned = (document >= 0) & (at >= self.learned[document])
        return learned & ~self.begins(start, stop) if self.ended else learned

    def windows_learned(self, seq_len: int, start: int = 0, tokens: int | None = None) -> NDArray[np.int64]:
        """Numbers of the windows that have a target of training, among the `tokens` (default: all) from `start` on. A
        window is seq_len + 1 ids, from the last one of the window before; its first id is no target."""
        tokens = self.tokens - start if tokens is None else tokens
        windows = (tokens - 1) // seq_len
        if self.learned is None:
            return np.arange(windows)
        first = np.maximum(self.learned, self.starts + 1) - start
        last = np.append(self.starts[1:] - self.ended, self.tokens - 1) - start
        some = (first <= last) & (last > 0) & (first < tokens)
        edges = np.zeros(windows + 1, dtype=np.int64)
        np.add.at(edges, np.clip((first[some] - 1) // seq_len, 0, windows), 1)
        np.add.at(edges, np.minimum((last[some] - 1) // seq_len + 1, windows), -1)
        return np.flatnonzero(np.cumsum(edges)[:windows] > 0)


def _digest(parts: Iterable[object]) -> int:
    """A number for these digests."""
    return int.from_bytes(hashlib.blake2b(repr(list(parts)).encode(), digest_size=6).digest(), "big")


class Shards:
    """An encoded corpus: its splits, and the fingerprints of the tokenizer and corpus it was made with."""

    def __init__(
        self, path: Path, manifest: Manifest, splits: dict[SplitName, Split], corpus: str = ""
    ) -> None:
        self.path = path
        self.vocab_size = manifest.vocab_size
        self.tokenizer_fingerprint = manifest.tokenizer
        self.corpus_fingerprint = corpus or manifest.corpus
        self.splits = tuple(splits)
        self._splits = splits

    @property
    def digest(self) -> str:
        """A digest of the tokenizer and of the ids and documents of all splits. That of the corpus depends on the times
        of its files, too."""
        parts = [(name, split.digest) for name, split in self._splits.items()]
        return f"{_digest([self.tokenizer_fingerprint, *parts]):012x}"

    def split(self, name: SplitName) -> Split:
        """`train`, `heldout`, or `dev` where the corpus had one. DataError: another name."""
        if name not in self._splits:
            raise DataError(f"{self.path}: split {name!r} is not one of {', '.join(self._splits)}")
        return self._splits[name]


def open_shards(path: Path, verify: bool = True) -> Shards:
    """Open a folder that `encode` completed.

    Sizes are always checked; `verify` also reads everything and checks digests, ids and document starts.
    DataError: missing, truncated, changed or foreign files; it names file, value and what was expected.
    """
    found = load(named(path, MANIFEST))
    if isinstance(found, Mixed):
        return _open_mixture(path, found, verify)
    splits = found.splits.by_split
    for split, records in splits.items():
        if not records:
            raise DataError(f"{path / MANIFEST}: splits.{split} has 0 shards, expected at least 1")
        for i, record in enumerate(records):
            check_shard(path, split, i, record, found, verify)
    return Shards(path, found, {name: Split.mapped(name, path, found) for name in splits})


def _open_mixture(path: Path, mixed: Mixed, verify: bool) -> Shards:
    parts, heads = dict[str, Shards](), dict[str, Manifest]()
    for name in mixed.sources:
        head = load(named(path, f"{name}/{MANIFEST}"))
        if isinstance(head, Mixed):
            raise DataError(f"{path / name}: several sources, expected one")
        heads[name], parts[name] = head, open_shards(path / name, verify)
    first, *others = heads
    for name in others:
        for what in ("tokenizer", "vocab_size", "completions"):
            if (there := getattr(heads[name], what)) != (here := getattr(heads[first], what)):
                raise DataError(f"{path / name}: {what} is {there!r}, that of {first} is {here!r}")
        if parts[name].splits != parts[first].splits:
            raise DataError(
                f"{path / name}: splits are not those of {first}, {', '.join(parts[first].splits)}"
            )
    splits = {
        split: Split.joined([(name, mixed.weights[name], part.split(split)) for name, part in parts.items()])
        for split in parts[first].splits
    }
    return Shards(path, heads[first], splits, mixed.corpus)
