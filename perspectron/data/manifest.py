"""Manifests of encoded text: reading and checking them, and the files that they list."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from perspectron.data.corpus import SPLITS, SplitName
from perspectron.data.mixture import MOST_SOURCES, weight_of
from perspectron.data.tokenizer import MOST_TOKENS
from perspectron.util.errors import DataError
from perspectron.util.files import Record as File
from perspectron.util.files import opened, read_json, safe_join, write_json
from perspectron.util.schema import checked

MANIFEST = "manifest.json"
JOURNAL = "progress.json"
POSITION = np.dtype("<i8")

Ids = NDArray[Any]
Kind = Literal["bin", "starts", "learned"]
Version = Annotated[int, Meta(ge=1, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard: ids, UTF-8 bytes and number of the documents that start in it, its files' digests."""

    tokens: Positive
    text_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    documents: Count
    sha256: str
    starts_sha256: str
    learned_sha256: str = ""


class Records(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The shards of each split; dev is None where the corpus has none."""

    train: list[Record]
    dev: list[Record] | None = None
    heldout: list[Record]

    @property
    def by_split(self) -> dict[SplitName, list[Record]]:
        return {split: part for split in SPLITS if (part := getattr(self, split)) is not None}


class Manifest(
    Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True,
    tag_field="format", tag="perspectron-shards",
):  # fmt: skip
    """A folder of shards, complete or, as a journal, begun: what the shards depend on, and the shards (`splits`). If
    all else is equal, shards are byte-identical. completions: each document has a prompt, which is not learned. ended:
    nor is the id with which the next document begins, as it does not end this one (`Specials.ended`)."""

    version: Version
    dtype: Literal["<u2", "<u4"]
    vocab_size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    tokenizer: str
    corpus: str
    shard_tokens: Positive
    completions: bool = False
    ended: bool = False
    splits: Records


class Mixed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="perspectron-mixture"):
    """Several sources, each in a folder of its name. corpus: fingerprint of all. sources: weights by name."""

    version: Version
    corpus: str
    sources: Annotated[dict[str, str], Meta(min_length=1, max_length=MOST_SOURCES)]

    @property
    def weights(self) -> Mapping[str, Fraction]:
        return {name: Fraction(weight) for name, weight in self.sources.items()}


def named(folder: Path, name: str) -> Path:
    return safe_join(folder, name, DataError)


def file_of(folder: Path, split: SplitName, index: int, kind: Kind) -> Path:
    return named(folder, f"{split}-{index:05d}.{kind}")


def read(path: Path, dtype: np.dtype[Any]) -> Ids:
    with opened(path, DataError) as file:
        return np.fromfile(file, dtype)


def load(path: Path) -> Manifest | Mixed:
    """A manifest or journal. DataError names the field that is not as it must be."""
    found: Manifest | Mixed = checked(
        read_json(path, DataError), Manifest | Mixed, DataError, f"{path}: not a manifest of encoded text"
    )
    if isinstance(found, Mixed):
        total = sum(weight_of(weight, f"{path}: sources.{name}") for name, weight in found.sources.items())
        if total != 1:
            raise DataError(f"{path}: the weights sum to {float(total):g}, expected 1")
        return found
    if found.dtype != (expected := dtype_of(found.vocab_size)):
        raise DataError(
            f"{path}: dtype is {found.dtype!r}, expected {expected!r} for {found.vocab_size} tokens"
        )
    for split, records in found.splits.by_split.items():
        for i, record in enumerate(records):
            where, least = f"{path}: splits.{split}[{i}]", 1 if i == 0 else 0
            if not least <= record.documents <= record.tokens:
                bound = f"{least} to {record.tokens}, its tokens"
                raise DataError(f"{where}.documents is {record.documents}, expected {bound}")
            if record.text_bytes < record.documents:  # none of them is empty
                bound = f"at least {record.documents}, its documents"
                raise DataError(f"{where}.text_bytes is {record.text_bytes}, expected {bound}")
    return found


def dtype_of(vocab_size: int) -> Literal["<u2", "<u4"]:
    return "<u2" if vocab_size <= 2**16 else "<u4"


def dump(path: Path, manifest: Manifest | Mixed) -> None:
    """Write a manifest or journal."""
    write_json(path, msgspec.to_builtins(manifest))


def check_shard(
    folder: Path, split: SplitName, index: int, record: Record, head: Manifest, verify: bool
) -> None:
    dtype, positions = np.dtype(head.dtype), record.documents * POSITION.itemsize
    ids_file, starts_file = file_of(folder, split, index, "bin"), file_of(folder, split, index, "starts")
    files = [
        (ids_file, File(record.tokens * dtype.itemsize, record.sha256)),
        (starts_file, File(positions, record.starts_sha256)),
    ]
    if head.completions:
        files.append((file_of(folder, split, index, "learned"), File(positions, record.learned_sha256)))
    for path, file in files:
        file.check(folder, path.name, DataError, contents=verify)
    if not verify:
        return
    ids = read(ids_file, dtype)
    if ids.max() >= head.vocab_size:
        at = int(np.argmax(ids >= head.vocab_size))
        raise DataError(f"{ids_file}: id {ids[at]} at {at}, expected below {head.vocab_size}")
    starts = read(starts_file, POSITION)
    if (np.diff(starts, prepend=-1, append=len(ids)) < 1).any() or (index == 0 and starts[0] != 0):
        raise DataError(
            f"{starts_file}: not the positions of documents in {ids_file.name}, one after another"
        )
