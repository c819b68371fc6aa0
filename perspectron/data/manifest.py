"""Manifests of encoded text: what they say, checked, and the files that they vouch for."""

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perspectron.data.corpus import SPLITS, Place, SplitName
from perspectron.data.mixture import FINEST, MOST_SOURCES
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError
from perspectron.util.files import open_file, opened, read_json, safe_join, sha256, write_json

MANIFEST = "manifest.json"
JOURNAL = "progress.json"
FORMAT, MIXTURE = "perspectron-shards", "perspectron-mixture"
VERSION = 1
MOST = {"vocab_size": 2**24, "shard_tokens": 2**40, "tokens": 2**40, "documents": 2**40, "text_bytes": 2**50}
"""Numbers of a manifest are at most these."""

POSITION = np.dtype("<i8")

Ids = NDArray[Any]
Kind = Literal["bin", "starts", "learned"]
T = TypeVar("T", "Head", "Record")


@dataclass(frozen=True, slots=True)
class Head:
    """Everything the shards depend on; equal heads mean byte-identical shards. completions: each document has a prompt,
    which is not learned."""

    format: str
    version: int
    dtype: str
    vocab_size: int
    tokenizer: str
    corpus: str
    shard_tokens: int
    completions: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One shard: ids, UTF-8 bytes and number of the documents that start in it, its files' digests."""

    tokens: int
    text_bytes: int
    documents: int
    sha256: str
    starts_sha256: str
    learned_sha256: str = ""


Records = dict[SplitName, list[Record]]


@dataclass(frozen=True)
class Journal:
    """The contents of a manifest; while the encoding is incomplete, also the place where each split continues."""

    head: Head
    records: Records
    places: dict[SplitName, Place] = field(default_factory=dict)


class Mixed(NamedTuple):
    """Several sources, each in a folder of its name. corpus: fingerprint of all. weights: by name."""

    corpus: str
    weights: Mapping[str, Fraction]


def named(folder: Path, name: str) -> Path:
    return safe_join(folder, name, DataError)


def file_of(folder: Path, split: SplitName, index: int, kind: Kind) -> Path:
    return named(folder, f"{split}-{index:05d}.{kind}")


def read(path: Path, dtype: np.dtype[Any]) -> Ids:
    with opened(path, DataError) as file:
        return np.fromfile(file, dtype)


def load(path: Path) -> Journal:
    """A manifest or journal, its keys and values checked. DataError names the key."""
    value = read_json(path, DataError)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of encoded text (format {FORMAT!r} expected)")
    _require_version(value, path)
    splits, places = value.pop("splits", None), value.pop("places", {})
    head = _checked(Head, value, str(path))
    expected = "<u2" if head.vocab_size <= 2**16 else "<u4"
    if head.dtype != expected:
        raise DataError(
            f"{path}: dtype is {head.dtype!r}, expected {expected!r} for {head.vocab_size} tokens"
        )
    if not isinstance(splits, dict) or {*splits, "dev"} != set(SPLITS):
        raise DataError(
            f"{path}: the keys of splits are not exactly {', '.join(SPLITS)}, with or without dev"
        )
    if not isinstance(places, dict) or not places.keys() <= splits.keys():
        raise DataError(f"{path}: places is not an object of {', '.join(splits)}")
    records = {
        split: _records(splits[split], f"{path}: splits.{split}") for split in SPLITS if split in splits
    }
    return Journal(head, records, places)


def _records(value: Any, where: str) -> list[Record]:
    """The shards of a split."""
    if not isinstance(value, list):
        raise DataError(f"{where} is not a list")
    records = [_checked(Record, record, f"{where}[{i}]") for i, record in enumerate(value)]
    for i, record in enumerate(records):
        least = 1 if i == 0 else 0
        if not least <= record.documents <= record.tokens:
            bound = f"{least} to {record.tokens}, its tokens"
            raise DataError(f"{where}[{i}].documents is {record.documents}, expected {bound}")
        if record.text_bytes < record.documents:  # none of them is empty
            bound = f"at least {record.documents}, its documents"
            raise DataError(f"{where}[{i}].text_bytes is {record.text_bytes}, expected {bound}")
    return records


def load_mixture(path: Path) -> Mixed | None:
    """The contents of a manifest of several sources; None for one of another format. DataError names the key."""
    value = read_json(path, DataError)
    if not isinstance(value, dict) or value.get("format") != MIXTURE:
        return None
    _require_version(value, path)
    sources, corpus = value.get("sources"), value.get("corpus")
    if value.keys() != {"format", "version", "corpus", "sources"} or not isinstance(corpus, str):
        raise DataError(f"{path}: keys are not exactly format, version, corpus, sources")
    if not isinstance(sources, dict) or not 1 <= len(sources) <= MOST_SOURCES:
        raise DataError(f"{path}: sources is not an object of 1 to {MOST_SOURCES}")
    weights = {name: _weight(weight, f"{path}: sources.{name}") for name, weight in sources.items()}
    if sum(weights.values()) != 1:
        raise DataError(f"{path}: the weights sum to {float(sum(weights.values())):g}, expected 1")
    return Mixed(corpus, weights)


def _weight(value: Any, where: str) -> Fraction:
    try:
        weight = Fraction(value) if isinstance(value, str) and len(value) < 32 else Fraction(0)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if not 0 < weight <= 1 or FINEST % weight.denominator:
        raise DataError(f"{where} is {str(value)[:80]!r}, expected a weight above 0 and at most 1")
    return weight


def _require_version(value: dict[str, Any], path: Path) -> None:
    if value.get("version") != VERSION:
        raise DataError(f"{path}: version is {value.get('version')!r}, expected {VERSION}")


def dump(path: Path, journal: Journal) -> None:
    """Write a manifest, or with places a journal."""
    splits = {split: [_said(record) for record in part] for split, part in journal.records.items()}
    write_json(
        path,
        _said(journal.head) | {"splits": splits} | ({"places": journal.places} if journal.places else {}),
    )


def dump_mixture(path: Path, mixed: Mixed) -> None:
    """Write the manifest of several sources."""
    sources = {name: str(weight) for name, weight in mixed.weights.items()}
    write_json(path, {"format": MIXTURE, "version": VERSION, "corpus": mixed.corpus, "sources": sources})


def _said(value: Head | Record) -> dict[str, Any]:
    """The fields of a head or record, but for those that are as in older files."""
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}


def _checked(kind: type[T], value: Any, where: str) -> T:
    """`value` as the dataclass `kind`: exactly its keys, with strings and whole numbers where it has them. Those with a
    default may be missing."""
    names = {field.name: field.type for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(value, dict) or not needed <= value.keys() <= names.keys():
        raise DataError(f"{where}: keys are not exactly {', '.join(sorted(needed, key=list(names).index))}")
    for name, found in value.items():
        low, most = 0 if name in ("documents", "text_bytes") else 1, MOST.get(name, 1)
        if type(found) is not names[name] or (names[name] is int and not low <= found <= most):
            kinds: dict[Any, str] = {str: "a string", bool: "true or false"}
            wanted = kinds.get(names[name], f"a whole number from {low} to {most}")
            raise DataError(f"{where}: {name} is {repr(found)[:80]}, expected {wanted}")
    return kind(**value)


def check_shard(folder: Path, split: SplitName, index: int, record: Record, head: Head, verify: bool) -> None:
    dtype = np.dtype(head.dtype)
    ids_file, starts_file = file_of(folder, split, index, "bin"), file_of(folder, split, index, "starts")
    _check_file(ids_file, record.tokens * dtype.itemsize, record.sha256 if verify else None)
    _check_file(starts_file, record.documents * POSITION.itemsize, record.starts_sha256 if verify else None)
    if head.completions:
        size = record.documents * POSITION.itemsize
        _check_file(file_of(folder, split, index, "learned"), size, record.learned_sha256 if verify else None)
    if not verify:
        return
    ids = read(ids_file, dtype)
    if ids.max() >= head.vocab_size:
        at = int(np.argmax(ids >= head.vocab_size))
        raise DataError(f"{ids_file}: id {ids[at]} at {at}, expected below {head.vocab_size}")
    if not np.array_equal(read(starts_file, POSITION), np.flatnonzero(ids == Tokenizer.end_of_text)):
        raise DataError(f"{starts_file}: not the positions of the separators in {ids_file.name}")
    if index == 0 and ids[0] != Tokenizer.end_of_text:
        raise DataError(
            f"{ids_file}: starts with id {ids[0]}, expected the separator {Tokenizer.end_of_text}"
        )


def _check_file(path: Path, size: int, digest: str | None) -> None:
    try:
        with open_file(path) as file:
            actual_size = os.fstat(file.fileno()).st_size
        if actual_size != size:
            raise DataError(f"{path}: {actual_size} bytes, expected {size}")
        if digest is not None and (actual := sha256(path)) != digest:
            raise DataError(f"{path}: SHA-256 is {actual}, expected {digest}")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file, expected {size} bytes") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
