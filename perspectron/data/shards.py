"""A corpus as token ids on disk: memory-mapped little-endian shards, verified when opened.

Every document is the separator followed by its tokens. The separator is where state resets, and what the last
token of the document before predicts. A folder holds, for each split:

    train-00000.bin       ids, uint16 if the vocabulary has at most 65536 tokens, else uint32
    train-00000.starts    int64 positions in that shard where a document starts
    manifest.json         what the ids were made of and with, and each shard's size and digests

A shard ends where a document does. A document longer than a shard gets shards of its own, of which only the
first has a start.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from perspectron.data.corpus import SPLITS, Corpus, Document, SplitName
from perspectron.data.tokenizer import Tokenizer
from perspectron.errors import DataError, StorageError
from perspectron.files import (
    atomic,
    locked,
    open_file,
    opened,
    read_json,
    remove,
    safe_join,
    sha256,
    sweep,
    write_json,
)

MANIFEST = "manifest.json"
JOURNAL = "progress.json"
FORMAT = "perspectron-shards"
VERSION = 1
MOST = {"vocab_size": 2**24, "shard_tokens": 2**40, "tokens": 2**40, "documents": 2**40, "text_bytes": 2**50}
"""Numbers of a manifest are at most these."""

_START = np.dtype("<i8")
_BATCH_CHARACTERS = 2**21
_BATCH_DOCUMENTS = 1024

Ids = NDArray[Any]
T = TypeVar("T", "_Head", "_Record")


@dataclass(frozen=True, slots=True)
class _Head:
    """Everything the shards depend on; equal heads mean byte-identical shards."""

    format: str
    version: int
    dtype: str
    vocab_size: int
    tokenizer: str
    corpus: str
    shard_tokens: int


@dataclass(frozen=True, slots=True)
class _Record:
    """One shard: ids, UTF-8 bytes and number of the documents that start in it, its files' digests."""

    tokens: int
    text_bytes: int
    documents: int
    sha256: str
    starts_sha256: str


_Records = dict[SplitName, list[_Record]]


class Split:
    """One split's ids as one stream, mapped from its shards.

    `tokens` counts ids, separators too; `text_bytes` the UTF-8 bytes they stand for; `starts` (documents,)
    are the positions of the separators.
    """

    def __init__(self, name: SplitName, folder: Path, dtype: np.dtype[Any], records: list[_Record]) -> None:
        self.name = name
        self.tokens = sum(record.tokens for record in records)
        self.text_bytes = sum(record.text_bytes for record in records)
        self.documents = sum(record.documents for record in records)
        self._shards: list[Ids] = []
        for i, record in enumerate(records):
            with opened(_file(folder, name, i, "bin"), DataError) as file:
                self._shards.append(np.memmap(file, dtype, "r", shape=(record.tokens,)))
        self._offsets: NDArray[np.int64] = np.cumsum(
            [0, *(record.tokens for record in records)], dtype=np.int64
        )
        starts = [_read(_file(folder, name, i, "starts"), _START) for i in range(len(records))]
        self.starts: NDArray[np.int64] = np.concatenate(
            [
                local.astype(np.int64) + offset
                for local, offset in zip(starts, self._offsets[:-1], strict=True)
            ]
        )

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

    def document(self, i: int) -> NDArray[np.int64]:
        """Ids of document `i`, its separator first. IndexError: no such document."""
        if not 0 <= i < self.documents:
            raise IndexError(f"{self.name}: document {i} is not between 0 and {self.documents - 1}")
        stop = int(self.starts[i + 1]) if i + 1 < self.documents else self.tokens
        return self.read(int(self.starts[i]), stop)


class Shards:
    """An encoded corpus: its splits, and the fingerprints of the tokenizer and corpus it was made with."""

    def __init__(self, path: Path, head: _Head, records: _Records) -> None:
        self.path = path
        self.vocab_size = head.vocab_size
        self.tokenizer_fingerprint = head.tokenizer
        self.corpus_fingerprint = head.corpus
        self.splits = tuple(records)
        self._splits = {name: Split(name, path, np.dtype(head.dtype), part) for name, part in records.items()}

    def split(self, name: SplitName) -> Split:
        """`train`, `heldout`, or `dev` where the corpus had one. DataError: another name."""
        if name not in self._splits:
            raise DataError(f"{self.path}: split {name!r} is not one of {', '.join(self._splits)}")
        return self._splits[name]


def encode(corpus: Corpus, tokenizer: Tokenizer, out: Path, *, shard_tokens: int = 2**24) -> Shards:
    """Encode the splits of `corpus` into the folder `out`, shards of at most `shard_tokens` ids.

    An interrupted encoding continues after its last complete shard and gives the same bytes. A complete one is opened
    and verified. Shards of another corpus or tokenizer in `out` are replaced. DataError for a split without text, or a
    folder with damaged or foreign files. StorageError if it cannot be written, or another process is encoding into the
    folder.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens: {shard_tokens} is below 1")
    if out.exists() and not out.is_dir():
        raise StorageError(f"{out}: not a folder")
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    head = _Head(
        FORMAT,
        VERSION,
        dtype.str,
        tokenizer.vocab_size,
        tokenizer.fingerprint,
        corpus.fingerprint,
        shard_tokens,
    )
    if (out / MANIFEST).exists():
        _load(_named(out, MANIFEST))  # of something else: refused before anything is written
    with locked(out):
        if (out / MANIFEST).exists() and _load(_named(out, MANIFEST))[0] == head:
            shards = open_shards(out)
            remove(out / JOURNAL)
            return shards
        _encode(corpus, tokenizer, out, head)
        return open_shards(out, verify=False)


def _encode(corpus: Corpus, tokenizer: Tokenizer, out: Path, head: _Head) -> None:
    dtype, shard_tokens = np.dtype(head.dtype), head.shard_tokens
    records = _resume(out, head) or {split: [] for split in corpus.splits}
    for split in corpus.splits:
        done = records[split]
        documents = islice(corpus.documents(split), sum(record.documents for record in done), None)
        for group in _groups(_encoded(documents, tokenizer, dtype), shard_tokens):
            for ids, text_bytes in group:
                done.append(_write_shard(out, split, len(done), ids, text_bytes))
            _dump(out / JOURNAL, head, records)
        if not done:
            raise DataError(f"{corpus.source}: no text in its {split} split")
    _dump(out / MANIFEST, head, records)
    remove(out / JOURNAL)


def open_shards(path: Path, verify: bool = True) -> Shards:
    """Open a folder that `encode` completed.

    Sizes are always checked; `verify` also reads everything and checks digests, ids and document starts.
    DataError: missing, truncated, changed or foreign files; it names file, value and what was expected.
    """
    head, records = _load(_named(path, MANIFEST))
    for split in records:
        if not records[split]:
            raise DataError(f"{path / MANIFEST}: splits.{split} has 0 shards, expected at least 1")
        for i, record in enumerate(records[split]):
            _check_shard(path, split, i, record, head, verify)
    return Shards(path, head, records)


# Writing


def _resume(out: Path, head: _Head) -> _Records:
    """The shards an interrupted encoding with the same head left complete; without one, a cleared folder, {}."""
    sweep(out)
    if (out / JOURNAL).exists():
        begun, records = _load(_named(out, JOURNAL))
        if begun == head:
            for split in records:
                for i, record in enumerate(records[split]):
                    _check_shard(out, split, i, record, head, verify=True)
            return records
    shards = [f"{split}-[0-9][0-9][0-9][0-9][0-9].{kind}" for split in SPLITS for kind in ("bin", "starts")]
    try:
        for name in (MANIFEST, JOURNAL, *shards):  # without a manifest no reader takes the rest for complete
            for old in out.glob(name):
                remove(old)
    except OSError as error:
        raise StorageError(f"{out}: old shards not deleted ({error.strerror})") from error
    return {}


def _encoded(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> Iterator[tuple[Ids, int]]:
    """Each document's ids, separator first, and its text's UTF-8 bytes."""
    for batch in _batches(documents):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            yield np.array([tokenizer.end_of_text, *ids], dtype=dtype), len(text.encode())


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _groups(encoded: Iterable[tuple[Ids, int]], shard_tokens: int) -> Iterator[list[tuple[Ids, int]]]:
    """Shards as (ids, text bytes), in groups that end where a document does: where work may resume."""
    waiting: list[Ids] = []
    tokens = text_bytes = 0
    for ids, size in encoded:
        if waiting and tokens + len(ids) > shard_tokens:
            yield [(np.concatenate(waiting), text_bytes)]
            waiting, tokens, text_bytes = [], 0, 0
        if len(ids) > shard_tokens:
            cuts = range(0, len(ids), shard_tokens)
            yield [(ids[at : at + shard_tokens], 0 if at else size) for at in cuts]
            continue
        waiting.append(ids)
        tokens += len(ids)
        text_bytes += size
    if waiting:
        yield [(np.concatenate(waiting), text_bytes)]


def _write_shard(out: Path, split: SplitName, index: int, ids: Ids, text_bytes: int) -> _Record:
    starts = np.flatnonzero(ids == Tokenizer.end_of_text).astype(_START)
    digests = []
    for path, array in ((_file(out, split, index, "bin"), ids), (_file(out, split, index, "starts"), starts)):
        data = array.tobytes()
        digests.append(hashlib.sha256(data).hexdigest())
        with atomic(path) as temporary:
            temporary.write_bytes(data)
    return _Record(len(ids), text_bytes, len(starts), *digests)


def _dump(path: Path, head: _Head, records: _Records) -> None:
    write_json(
        path, asdict(head) | {"splits": {split: [asdict(r) for r in part] for split, part in records.items()}}
    )


# Reading


def _named(folder: Path, name: str) -> Path:
    return safe_join(folder, name, DataError)


def _file(folder: Path, split: SplitName, index: int, kind: Literal["bin", "starts"]) -> Path:
    return _named(folder, f"{split}-{index:05d}.{kind}")


def _read(path: Path, dtype: np.dtype[Any]) -> Ids:
    with opened(path, DataError) as file:
        return np.fromfile(file, dtype)


def _load(path: Path) -> tuple[_Head, _Records]:
    """A manifest or journal, its keys and values checked. DataError names the key."""
    value = read_json(path, DataError)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"{path}: not a manifest of encoded text (format {FORMAT!r} expected)")
    if value.get("version") != VERSION:
        raise DataError(f"{path}: version is {value.get('version')!r}, expected {VERSION}")
    splits = value.pop("splits", None)
    head = _checked(_Head, value, str(path))
    expected = "<u2" if head.vocab_size <= 2**16 else "<u4"
    if head.dtype != expected:
        raise DataError(
            f"{path}: dtype is {head.dtype!r}, expected {expected!r} for {head.vocab_size} tokens"
        )
    if not isinstance(splits, dict) or {*splits, "dev"} != set(SPLITS):
        raise DataError(
            f"{path}: the keys of splits are not exactly {', '.join(SPLITS)}, with or without dev"
        )
    records: _Records = {}
    for split in (name for name in SPLITS if name in splits):
        if not isinstance(splits[split], list):
            raise DataError(f"{path}: splits.{split} is not a list")
        records[split] = [
            _checked(_Record, record, f"{path}: splits.{split}[{i}]")
            for i, record in enumerate(splits[split])
        ]
        for i, record in enumerate(records[split]):
            least = 1 if i == 0 else 0
            if not least <= record.documents <= record.tokens:
                bound = f"{least} to {record.tokens}, its tokens"
                raise DataError(
                    f"{path}: splits.{split}[{i}].documents is {record.documents}, expected {bound}"
                )
            if record.text_bytes < record.documents:  # none of them is empty
                bound = f"at least {record.documents}, its documents"
                raise DataError(
                    f"{path}: splits.{split}[{i}].text_bytes is {record.text_bytes}, expected {bound}"
                )
    return head, records


def _checked(kind: type[T], value: Any, where: str) -> T:
    """`value` as the dataclass `kind`: exactly its keys, with strings and whole numbers where it has them."""
    names = {field.name: field.type for field in fields(kind)}
    if not isinstance(value, dict) or set(value) != set(names):
        raise DataError(f"{where}: keys are not exactly {', '.join(names)}")
    for name, type_ in names.items():
        low, most = 0 if name in ("documents", "text_bytes") else 1, MOST.get(name, 1)
        if type(value[name]) is not type_ or (type_ is int and not low <= value[name] <= most):
            wanted = "a string" if type_ is str else f"a whole number from {low} to {most}"
            raise DataError(f"{where}: {name} is {repr(value[name])[:80]}, expected {wanted}")
    return kind(**value)


def _check_shard(
    folder: Path, split: SplitName, index: int, record: _Record, head: _Head, verify: bool
) -> None:
    dtype = np.dtype(head.dtype)
    ids_file, starts_file = _file(folder, split, index, "bin"), _file(folder, split, index, "starts")
    _check_file(ids_file, record.tokens * dtype.itemsize, record.sha256 if verify else None)
    _check_file(starts_file, record.documents * _START.itemsize, record.starts_sha256 if verify else None)
    if not verify:
        return
    ids = _read(ids_file, dtype)
    if ids.max() >= head.vocab_size:
        at = int(np.argmax(ids >= head.vocab_size))
        raise DataError(f"{ids_file}: id {ids[at]} at {at}, expected below {head.vocab_size}")
    if not np.array_equal(_read(starts_file, _START), np.flatnonzero(ids == Tokenizer.end_of_text)):
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
