"""A corpus to shards on disk: on one process or several, with the same bytes, and from where it was interrupted."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from perspectron.data import manifest as disk
from perspectron.data import worker
from perspectron.data.corpus import SPLITS, Corpus, Document, Place, SplitName
from perspectron.data.manifest import JOURNAL, MANIFEST, Head, Ids, Journal, Mixed, Record
from perspectron.data.mixture import Mixture
from perspectron.data.shards import Shards, open_shards
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError, StorageError
from perspectron.util.files import atomic, locked, remove, sweep

BATCH_CHARACTERS = 2**20
BATCH_DOCUMENTS = 8192
ALONE = 2**24
"""Characters that one process encodes before others are started, which takes about a second."""

Tell = Callable[[int, float], None]
"""Called with the bytes of text that were encoded and the share of all that is done."""


class _Piece(NamedTuple):
    """A shard: ids, and for each document that starts in it the position from which it is learned. text_bytes: what
    they stand for. place: where reading goes on after them."""

    ids: Ids
    learned: list[int]
    text_bytes: int
    place: Place


class _Done(NamedTuple):
    """A batch of documents, encoded. places: after each of them. share: of the split's source, what was read."""

    encoded: worker.Encoded
    places: list[Place]
    share: float


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    shard_tokens: int = 2**24,
    processes: int = 1,
    tell: Tell = lambda _, __: None,
) -> Shards:
    """Encode the splits of `corpus` into the folder `out`, shards of at most `shard_tokens` ids.

    An interrupted encoding continues after its last complete shard, without reading again what stands before it, and
    gives the same bytes. So does any number of processes; more than one needs a program that can be imported again, as
    every use of `multiprocessing` does. A complete one is opened and verified. Shards of another corpus or tokenizer in
    `out` are replaced. Several sources get a folder each. DataError for a split without text, or a folder with damaged
    or foreign files. StorageError if it cannot be written, or another process is encoding into the folder.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens: {shard_tokens} is below 1")
    if processes < 1:
        raise DataError(f"processes: {processes} is below 1")
    if out.exists() and not out.is_dir():
        raise StorageError(f"{out}: not a folder")
    _require_ours(out)
    with locked(out), _Encoder(tokenizer, processes) as encoder:
        if isinstance(corpus, Mixture):
            return _encode_all(corpus, encoder, out, shard_tokens, tell)
        return _encode_one(corpus, encoder, out, shard_tokens, tell)


def _encode_all(corpus: Mixture, encoder: "_Encoder", out: Path, shard_tokens: int, tell: Tell) -> Shards:
    """Every source into a folder of its name, and a manifest that names them."""
    mixed = Mixed(corpus.fingerprint, {part.name: part.weight for part, _ in corpus.named})
    if (out / MANIFEST).exists() and disk.load_mixture(out / MANIFEST) != mixed:
        _clear(out, kept=mixed.weights)
    done = 0
    for i, (part, source) in enumerate(corpus.named):

        def told(size: int, share: float, before: int = done, i: int = i) -> None:
            nonlocal done
            done = before + size
            tell(done, (i + share) / len(corpus.named))

        _encode_one(source, encoder, out / part.name, shard_tokens, told)
    disk.dump_mixture(out / MANIFEST, mixed)
    return open_shards(out, verify=False)


def _encode_one(corpus: Corpus, encoder: "_Encoder", out: Path, shard_tokens: int, tell: Tell) -> Shards:
    tokenizer = encoder.tokenizer
    head = Head(
        disk.FORMAT,
        disk.VERSION,
        encoder.dtype,
        tokenizer.vocab_size,
        tokenizer.fingerprint,
        corpus.fingerprint,
        shard_tokens,
        corpus.completions,
    )
    out.mkdir(parents=True, exist_ok=True)
    _require_ours(out)
    whole = (out / MANIFEST).exists() and disk.load_mixture(out / MANIFEST) is None
    if whole and disk.load(out / MANIFEST).head == head:
        shards = open_shards(out)
        remove(out / JOURNAL)
        return shards
    journal = _resume(out, head) or Journal(head, {split: [] for split in corpus.splits}, {})
    _write(corpus, out, journal, encoder, tell)
    disk.dump(out / MANIFEST, replace(journal, places={}))
    remove(out / JOURNAL)
    return open_shards(out, verify=False)


def _write(corpus: Corpus, out: Path, journal: Journal, encoder: "_Encoder", tell: Tell) -> None:
    """Encode what is left of a corpus, shard by shard."""
    size, passed = 0, 0.0

    def said(batches: Iterable[_Done], split: SplitName) -> Iterator[_Done]:
        nonlocal size
        for done in batches:
            yield done
            size += int(done.encoded.bytes.sum())
            tell(size, passed + corpus.shares.about(split) * done.share)

    for split in corpus.splits:
        records = journal.records[split]
        documents = corpus.documents(split, journal.places.get(split))
        batches = said(encoder.encoded(_batches(documents)), split)
        for group in _groups(batches, journal.head.shard_tokens):
            for piece in group:
                records.append(_write_shard(out, split, len(records), piece, corpus.completions))
            journal.places[split] = group[-1].place
            disk.dump(out / JOURNAL, journal)
        if not records:
            raise DataError(f"{corpus.source}: no text in its {split} split")
        passed += corpus.shares.about(split)


def _resume(out: Path, head: Head) -> Journal | None:
    """The shards an interrupted encoding with the same head left complete; without one, None and a cleared folder."""
    sweep(out)
    if (out / JOURNAL).exists():
        begun = disk.load(disk.named(out, JOURNAL))
        if begun.head == head and all(
            begun.places.get(split) for split, part in begun.records.items() if part
        ):
            for split in begun.records:
                for i, record in enumerate(begun.records[split]):
                    disk.check_shard(out, split, i, record, head, verify=True)
            return begun
    _clear(out)
    return None


def _clear(out: Path, kept: Container[str] = ()) -> None:
    """Delete an encoding, whole or not, and those of several sources, but for the sources `kept`."""
    mixed = disk.load_mixture(out / MANIFEST) if (out / MANIFEST).exists() else None
    shards = [f"{split}-[0-9][0-9][0-9][0-9][0-9].{kind}" for split in SPLITS for kind in get_args(disk.Kind)]
    try:
        for name in (MANIFEST, JOURNAL, *shards):  # without a manifest no reader takes the rest for complete
            for old in out.glob(name):
                remove(old)
        for name in mixed.weights if mixed is not None else ():
            if name not in kept:
                remove(disk.named(out, name))
    except OSError as error:
        raise StorageError(f"{out}: old shards not deleted ({error.strerror})") from error


def _require_ours(out: Path) -> None:
    """DataError for a folder whose manifest is of something else, before anything is written."""
    path = disk.named(out, MANIFEST)
    if path.exists() and disk.load_mixture(path) is None:
        disk.load(path)


class _Encoder:
    """Batches of documents to ids, in order: the first ones in this process, then, if there are several, in others."""

    def __init__(self, tokenizer: Tokenizer, processes: int) -> None:
        self.tokenizer, self._processes = tokenizer, processes
        self.dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        self._pool: ProcessPoolExecutor | None = None
        self._alone = 0

    def __enter__(self) -> "_Encoder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encoded(self, batches: Iterable[list[Document]]) -> Iterator[_Done]:
        waiting: deque[tuple[list[Document], Future[worker.Encoded]]] = deque()
        for batch in batches:
            items = [(document.prompt, document.text) for document in batch]
            if self._processes == 1 or self._alone < ALONE:
                self._alone += sum(len(document.text) for document in batch)
                yield _done(batch, self.tokenizer.encode_items(items, self.dtype))
                continue
            waiting.append((batch, self._started().submit(worker.run, items)))
            if len(waiting) > 2 * self._processes:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            said = (self.tokenizer.to_str(), self.dtype)
            self._pool = ProcessPoolExecutor(self._processes, get_context("spawn"), worker.start, said)
        return self._pool

    @staticmethod
    def _next(waiting: "deque[tuple[list[Document], Future[worker.Encoded]]]") -> _Done:
        batch, future = waiting.popleft()
        try:
            return _done(batch, future.result())
        except BrokenProcessPool:
            raise StorageError("a process that encoded ended; start again, it goes on from there") from None


def _done(batch: list[Document], encoded: worker.Encoded) -> _Done:
    return _Done(encoded, [document.place for document in batch], batch[-1].share)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _groups(batches: Iterable[_Done], shard_tokens: int) -> Iterator[list[_Piece]]:
    """Shards, in groups that end where a document does: where work may resume."""
    waiting: list[Ids] = []
    learned: list[int] = []
    tokens = text_bytes = 0
    place: Place = None
    for ids, first, size, after in _documents(batches):
        if waiting and tokens + len(ids) > shard_tokens:
            yield [_Piece(np.concatenate(waiting), learned, text_bytes, place)]
            waiting, learned, tokens, text_bytes = [], [], 0, 0
        place = after
        if len(ids) > shard_tokens:
            cuts = range(0, len(ids), shard_tokens)
            yield [
                _Piece(ids[at : at + shard_tokens], [] if at else [first], 0 if at else size, after)
                for at in cuts
            ]
            continue
        waiting.append(ids)
        learned.append(tokens + first)
        tokens += len(ids)
        text_bytes += size
    if waiting:
        yield [_Piece(np.concatenate(waiting), learned, text_bytes, place)]


def _documents(batches: Iterable[_Done]) -> Iterator[tuple[Ids, int, int, Place]]:
    """Each document's ids, the first that is learned, the bytes of its text, and the place after it."""
    for encoded, places, _ in batches:
        ends = encoded.lengths.cumsum()
        facts = (encoded.lengths, ends, encoded.learned, encoded.bytes)
        numbers = zip(*(fact.tolist() for fact in facts), strict=True)
        for (length, end, first, size), place in zip(numbers, places, strict=True):
            yield encoded.ids[end - length : end], first, size, place


def _write_shard(out: Path, split: SplitName, index: int, piece: _Piece, completions: bool) -> Record:
    starts = np.flatnonzero(piece.ids == Tokenizer.end_of_text).astype(disk.POSITION)
    arrays: dict[disk.Kind, Ids] = {"bin": piece.ids, "starts": starts}
    if completions:
        arrays["learned"] = np.array(piece.learned, disk.POSITION)
    digests = []
    for kind, array in arrays.items():
        data = array.tobytes()
        digests.append(hashlib.sha256(data).hexdigest())
        with atomic(disk.file_of(out, split, index, kind)) as temporary:
            temporary.write_bytes(data)
    return Record(len(piece.ids), piece.text_bytes, len(starts), *digests)
