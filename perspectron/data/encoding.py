"""Encodes a corpus into shards on disk; an interrupted encoding is resumed and gives the same bytes."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import replace

from perspectron.data import manifest as disk
from perspectron.data.corpus import SPLITS, Corpus, Document, SplitName
from perspectron.data.manifest import JOURNAL, MANIFEST, Ids, Manifest, Mixed, Record, Records
from perspectron.data.mixture import Mixture
from perspectron.data.shards import Shards, open_shards
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError, StorageError
from perspectron.util.files import atomic, locked, remove, sweep

BATCH_CHARACTERS, BATCH_DOCUMENTS = 2**20, 8192
"""Text that is encoded at once, on all cores: so many characters for each core, up to MOST_CORES, or documents."""
MOST_CORES = 8

Tell = Callable[[int, float], None]
"""Called with the bytes of text encoded so far and the share of all work that is done."""


class _Piece(NamedTuple):
    """A shard. starts, learned: for each document that starts in it, its position, and the one from which it is
    learned. text_bytes: UTF-8 bytes of the text that the ids stand for."""

    ids: Ids
    starts: list[int]
    learned: list[int]
    text_bytes: int


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    shard_tokens: int = 2**24,
    tell: Tell = lambda _, __: None,
) -> Shards:
    """Encode the splits of `corpus` into the folder `out`, shards of at most `shard_tokens` ids.

    An interrupted encoding continues after its last complete shard and gives the same bytes; what stands before that is
    read again, but not encoded. A complete one is opened and verified. Shards of another corpus or tokenizer in `out`
    are replaced. Several sources get a folder each. DataError for a split without text, or a folder with damaged or
    foreign files. StorageError if it cannot be written, or another process is encoding into the folder.
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens: {shard_tokens} is below 1")
    if out.exists() and not out.is_dir():
        raise StorageError(f"{out}: not a folder")
    before = _manifest(out)
    with locked(out):
        if not isinstance(corpus, Mixture):
            return _encode_one(corpus, tokenizer, out, shard_tokens, tell)
        mixed = Mixed(1, corpus.fingerprint, {part.name: str(part.weight) for part, _ in corpus.named})
        if before != mixed:
            _clear(out, kept=mixed.sources)
            disk.dump(out / JOURNAL, mixed)
        done = 0
        for (part, source), (low, own) in zip(corpus.named, corpus.spans, strict=True):

            def told(size: int, share: float, before: int = done, low: float = low, own: float = own) -> None:
                nonlocal done
                done = before + size
                tell(done, low + own * share)

            _encode_one(source, tokenizer, out / part.name, shard_tokens, told)
        disk.dump(out / MANIFEST, mixed)
        remove(out / JOURNAL)
        return open_shards(out, verify=False)


def _manifest(out: Path, name: str = MANIFEST) -> Manifest | Mixed | None:
    """The manifest of a folder, or its journal, or None. DataError: it is of something else."""
    path = disk.named(out, name)
    return disk.load(path) if path.exists() else None


def _encode_one(corpus: Corpus, tokenizer: Tokenizer, out: Path, shard_tokens: int, tell: Tell) -> Shards:
    begun = Manifest(
        version=1,
        dtype=disk.dtype_of(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        corpus=corpus.fingerprint,
        shard_tokens=shard_tokens,
        completions=corpus.completions,
        ended=tokenizer.specials.ended,
        splits=Records(train=[], dev=[] if "dev" in corpus.splits else None, heldout=[]),
    )
    out.mkdir(parents=True, exist_ok=True)
    if not _same(_manifest(out), begun):
        begun = _resume(out, begun)
        _write(corpus, out, begun, tokenizer, tell)
        disk.dump(out / MANIFEST, begun)
        remove(out / JOURNAL)
        return open_shards(out, verify=False)
    shards = open_shards(out)
    remove(out / JOURNAL)
    return shards


def _same(one: Manifest | Mixed | None, other: Manifest) -> bool:
    """True if both are of the same corpus, tokenizer and settings, whichever shards they have."""
    return isinstance(one, Manifest) and replace(one, splits=other.splits) == other


def _resume(out: Path, begun: Manifest) -> Manifest:
    """The shards that an interrupted encoding of the same left complete; without one, none and a cleared folder."""
    sweep(out)
    found = _manifest(out, JOURNAL)
    if isinstance(found, Manifest) and _same(found, begun):
        for split, records in found.splits.by_split.items():
            for i, record in enumerate(records):
                disk.check_shard(out, split, i, record, found, verify=True)
        return found
    _clear(out)
    return begun


def _write(corpus: Corpus, out: Path, begun: Manifest, tokenizer: Tokenizer, tell: Tell) -> None:
    """Encode what is left of a corpus, shard by shard."""
    size, passed = 0, 0.0

    def told(documents: Iterable[Document], split: SplitName) -> Iterator[tuple[Ids, int, int]]:
        """Each document's ids, the first that is learned, and the bytes of its text."""
        nonlocal size
        for batch in _batches(documents):
            items = [(document.read_by(tokenizer), document.text) for document in batch]
            template = batch[0].template
            end = None if template is None else template.end(tokenizer)
            sizes = [len(document.prompt.encode()) + len(document.text.encode()) for document in batch]
            for (ids, first), one in zip(tokenizer.encode_items(items, begun.dtype, end), sizes, strict=True):
                yield ids, first, one
            size += sum(sizes)
            tell(size, passed + corpus.shares.about(split) * batch[-1].share)

    for split, records in begun.splits.by_split.items():
        done = sum(record.documents for record in records)
        documents = islice(corpus.documents(split), done, None)
        for group in _groups(told(documents, split), begun.shard_tokens):
            for piece in group:
                records.append(_write_shard(out, split, len(records), piece, begun.completions))
            disk.dump(out / JOURNAL, begun)
        if not records:
            raise DataError(f"{corpus.source}: no text in its {split} split")
        passed += corpus.shares.about(split)


def _clear(out: Path, kept: Container[str] = ()) -> None:
    """Delete an encoding, whole or not, and those of several sources, but for the sources `kept`. What else is in the
    folders stays: one of them may be where a source's text is."""
    before = [_manifest(out, name) for name in (MANIFEST, JOURNAL)]
    sources = [name for one in before if isinstance(one, Mixed) for name in one.sources if name not in kept]
    shards = [f"{split}-[0-9][0-9][0-9][0-9][0-9].{kind}" for split in SPLITS for kind in get_args(disk.Kind)]
    try:
        for name in sources:  # while the manifest or the journal names them
            folder = disk.named(out, name)
            if folder.is_dir():
                sweep(folder)
                with contextlib.suppress(DataError):  # another program's
                    _clear(folder)
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
        for name in (MANIFEST, JOURNAL, *shards):  # without a manifest no reader takes the rest for complete
            for old in out.glob(name):
                remove(old)
    except OSError as error:
        raise StorageError(f"{out}: old shards not deleted ({error.strerror})") from error


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    most = BATCH_CHARACTERS * min(cores(), MOST_CORES)
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= most or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _groups(documents: Iterable[tuple[Ids, int, int]], shard_tokens: int) -> Iterator[list[_Piece]]:
    """Shards, in groups that end where a document does: where work may resume."""
    waiting: list[Ids] = []
    starts: list[int] = []
    learned: list[int] = []
    tokens = text_bytes = 0
    for ids, first, size in documents:
        if waiting and tokens + len(ids) > shard_tokens:
            yield [_Piece(np.concatenate(waiting), starts, learned, text_bytes)]
            waiting, starts, learned, tokens, text_bytes = [], [], [], 0, 0
        if len(ids) > shard_tokens:
            whole, *rest = (ids[at : at + shard_tokens] for at in range(0, len(ids), shard_tokens))
            yield [_Piece(whole, [0], [first], size), *(_Piece(part, [], [], 0) for part in rest)]
            continue
        waiting.append(ids)
        starts.append(tokens)
        learned.append(tokens + first)
        tokens += len(ids)
        text_bytes += size
    if waiting:
        yield [_Piece(np.concatenate(waiting), starts, learned, text_bytes)]


def _write_shard(out: Path, split: SplitName, index: int, piece: _Piece, completions: bool) -> Record:
    arrays: dict[disk.Kind, Ids] = {"bin": piece.ids, "starts": np.array(piece.starts, disk.POSITION)}
    if completions:
        arrays["learned"] = np.array(piece.learned, disk.POSITION)
    digests = []
    for kind, array in arrays.items():
        data = array.tobytes()
        digests.append(hashlib.sha256(data).hexdigest())
        with atomic(disk.file_of(out, split, index, kind)) as temporary:
            temporary.write_bytes(data)
    return Record(len(piece.ids), piece.text_bytes, len(piece.starts), *digests)
