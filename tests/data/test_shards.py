import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from perspectron.data import Corpus, Document, Shards, SplitName, Tokenizer, encode, open_corpus, open_shards
from perspectron.data import encoding as encoding_module
from perspectron.data import manifest as manifest_module
from perspectron.util.errors import DataError, StorageError
from perspectron.util.files import sha256
from tests.refusals import refused


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def copy(shards: Shards, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards.path, tmp_path / "copy"))


def corpus_of(folder: Path) -> Corpus:
    return open_corpus(str(folder), heldout=0.2)


class Interrupted(Exception):
    pass


def interrupt(corpus: Corpus, split: SplitName, after: int) -> Corpus:
    """`corpus`, which raises after `after` documents of `split`."""
    whole = corpus.documents

    def documents(name: SplitName) -> Iterator[Document]:
        for i, document in enumerate(whole(name)):
            if name == split and i == after:
                raise Interrupted
            yield document

    setattr(corpus, "documents", documents)  # noqa: B010 (a method, to mypy)
    return corpus


# What is written


def test_the_stream_is_every_document_after_a_separator(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer
) -> None:
    corpus = corpus_of(text_folder)
    for name in ("train", "heldout"):
        split = shards.split(name)
        texts = [document.text for document in corpus.documents(name)]
        expected = [[0, *tokenizer.encode(text)] for text in texts]
        assert split.read(0, split.tokens).tolist() == [id for ids in expected for id in ids]
        assert split.tokens == sum(map(len, expected))
        assert split.documents == len(texts)
        assert split.text_bytes == sum(len(text.encode()) for text in texts)
        assert split.text_bytes == tokenizer.byte_counts()[split.read(0, split.tokens)].sum()
        assert split.starts.dtype == np.int64
        assert split.starts.tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()
        for i in (0, 1, split.documents - 1):
            assert split.document(i).tolist() == expected[i]


def test_shards_end_where_documents_do_unless_one_is_longer(shards: Shards) -> None:
    manifest = json.loads((shards.path / "manifest.json").read_text())
    assert manifest["dtype"] == "<u2" and manifest["vocab_size"] == shards.vocab_size
    train = manifest["splits"]["train"]
    assert len(train) > 5
    assert all(record["tokens"] <= 256 for record in train)
    continuations = [record for record in train if record["documents"] == 0]
    assert len(continuations) >= 2, "the long document was to be cut"
    for i, record in enumerate(train):
        ids = np.fromfile(shards.path / f"train-{i:05d}.bin", "<u2")
        assert (ids[0] == 0) == (record["documents"] > 0)
        assert len(ids) == record["tokens"]
        assert (
            np.fromfile(shards.path / f"train-{i:05d}.starts", "<i8").tolist()
            == np.flatnonzero(ids == 0).tolist()
        )
    longest = max(
        range(shards.split("train").documents), key=lambda i: len(shards.split("train").document(i))
    )
    assert len(shards.split("train").document(longest)) > 2 * 256


def test_shard_size_does_not_change_the_stream(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    one = encode(corpus_of(text_folder), tokenizer, tmp_path / "one")
    many = encode(corpus_of(text_folder), tokenizer, tmp_path / "many", shard_tokens=40)
    assert len(list((tmp_path / "one").glob("*.bin"))) == 2
    for name in ("train", "heldout"):
        split = shards.split(name)
        for other in (one.split(name), many.split(name)):
            assert np.array_equal(other.read(0, other.tokens), split.read(0, split.tokens))
            assert np.array_equal(other.starts, split.starts)
            assert other.text_bytes == split.text_bytes


def test_read_crosses_shards_anywhere(shards: Shards) -> None:
    split = shards.split("train")
    whole = split.read(0, split.tokens)
    assert whole.dtype == np.int64
    generator = np.random.default_rng(0)
    for start, stop in np.sort(generator.integers(0, split.tokens + 1, (200, 2))):
        assert np.array_equal(split.read(start, stop), whole[start:stop])
    for start, stop in ((-1, 3), (0, split.tokens + 1), (5, 4)):
        with refused(IndexError, start, stop):
            split.read(start, stop)
    for i in (-1, split.documents):
        with refused(IndexError, i):
            split.document(i)
    with refused(DataError, "'test'"):
        shards.split("test")  # type: ignore[arg-type]


def test_a_large_vocabulary_takes_four_bytes(
    text_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = encode(corpus_of(text_folder), tokenizer, tmp_path / "small")
    monkeypatch.setattr(tokenizer, "vocab_size", 2**16 + 1)
    large = encode(corpus_of(text_folder), tokenizer, tmp_path / "large")
    split = large.split("train")
    assert (tmp_path / "large" / "train-00000.bin").stat().st_size == 4 * split.tokens
    assert np.array_equal(split.read(0, split.tokens), small.split("train").read(0, split.tokens))
    open_shards(tmp_path / "large")


def test_a_separator_written_in_a_text_is_no_start(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("one <|endoftext|> two\n<|endoftext|>")
    shards = encode(open_corpus(str(tmp_path), heldout=0.5), tokenizer, tmp_path / "out")
    assert shards.split("train").starts.tolist() == [0]
    assert tokenizer.decode(shards.split("train").document(0).tolist()) == (tmp_path / "a").read_text()


# Interruption


@pytest.mark.parametrize(
    ("split", "after"), [("train", n) for n in (0, 1, 30, 55, 60, 90)] + [("heldout", 3)]
)
def test_an_interrupted_encoding_continues_to_the_same_bytes(
    shards: Shards,
    text_folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    split: SplitName,
    after: int,
) -> None:
    monkeypatch.setattr(encoding_module, "BATCH_DOCUMENTS", 4)
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        encode(interrupt(corpus_of(text_folder), split, after), tokenizer, out, shard_tokens=256)
    assert not (out / "manifest.json").exists()
    standing = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert (len(standing) > 2) == (after >= 30 or split == "heldout")
    out.mkdir(exist_ok=True)
    (out / f".{2**22 + 1}-0123456789abcdef.tmp").write_bytes(b"left by a killed process")
    (out / "notes.txt").write_text("mine")
    encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)
    assert {path: path.stat().st_mtime_ns for path in standing} == standing, (
        "complete shards are not made again"
    )
    assert contents(out) == contents(shards.path) | {"notes.txt": b"mine"}


def test_a_shard_written_but_not_yet_in_the_journal_is_made_again(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, calls = manifest_module.dump, []

    def dies(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise Interrupted
        dump(*arguments)

    monkeypatch.setattr(manifest_module, "dump", dies)
    with pytest.raises(Interrupted):
        encode(corpus_of(text_folder), tokenizer, tmp_path / "out", shard_tokens=256)
    monkeypatch.undo()
    encode(corpus_of(text_folder), tokenizer, tmp_path / "out", shard_tokens=256)
    assert contents(tmp_path / "out") == contents(shards.path)


def test_complete_shards_are_opened_without_encoding(
    text_folder: Path, tokenizer: Tokenizer, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(text_folder)
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("encoded again"))
    (copy / "progress.json").write_text("left by a process killed at the very end")
    again = encode(corpus, tokenizer, copy, shard_tokens=256)
    assert again.split("train").documents > 90
    assert not (copy / "progress.json").exists()


def test_another_tokenizer_or_corpus_starts_anew(
    text_folder: Path, tokenizer: Tokenizer, copy: Path, tmp_path: Path
) -> None:
    (copy / "notes.txt").write_text("mine")
    (copy / "train-notes.bin").write_text("mine")
    other = Tokenizer.train([document.text for document in corpus_of(text_folder).documents("train")], 300)
    corpus = open_corpus(str(text_folder), heldout=0.5)
    new = encode(corpus, other, copy, shard_tokens=512)
    assert new.tokenizer_fingerprint == other.fingerprint and new.corpus_fingerprint == corpus.fingerprint
    encode(open_corpus(str(text_folder), heldout=0.5), other, tmp_path / "fresh", shard_tokens=512)
    mine = {"notes.txt": b"mine", "train-notes.bin": b"mine"}
    assert contents(copy) == contents(tmp_path / "fresh") | mine


def test_a_journal_of_another_corpus_starts_anew(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = interrupt(open_corpus(str(text_folder), heldout=0.3), "heldout", 3)
    with pytest.raises(Interrupted):
        encode(other, tokenizer, out, shard_tokens=128)
    encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)
    assert contents(out) == contents(shards.path)


def test_a_damaged_shard_is_not_continued(text_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        encode(interrupt(corpus_of(text_folder), "heldout", 0), tokenizer, out, shard_tokens=256)
    flip(out / "train-00001.bin")
    with refused(DataError, "train-00001.bin"):
        encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)


@pytest.mark.parametrize("survives", [0, 1, 2, 3, 7, 10**6])
@pytest.mark.parametrize("call", ["replace", "write"])
def test_a_full_disk_leaves_what_stood_there(
    shards: Shards,
    text_folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    survives: int,
    call: str,
) -> None:
    out = tmp_path / "out"
    written: list[Path] = []
    owner, name = (os, "replace") if call == "replace" else (Path, "write_bytes")
    real: Callable[..., Any] = getattr(owner, name)

    def full(path: Path, *arguments: Any) -> Any:
        if len(written) == survives:
            if call == "write":
                real(path, b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return real(path, *arguments)

    monkeypatch.setattr(owner, name, full)
    if survives == 10**6:
        encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)
    else:
        with refused(StorageError, out):
            encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)
        whole = contents(shards.path)
        for file, data in contents(out).items():
            assert file == "progress.json" or whole[file] == data
    monkeypatch.undo()
    encode(corpus_of(text_folder), tokenizer, out, shard_tokens=256)
    assert contents(out) == contents(shards.path)


# Refusals


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_sound_copy_opens(copy: Path) -> None:
    assert open_shards(copy).split("train").tokens == open_shards(copy, verify=False).split("train").tokens


@pytest.mark.parametrize("file", ["train-00001.bin", "heldout-00000.bin", "train-00002.starts"])
def test_a_file_that_is_cut_off_or_missing_is_named(copy: Path, file: str) -> None:
    data = (copy / file).read_bytes()
    (copy / file).write_bytes(data[:-2])
    for verify in (True, False):
        with refused(DataError, copy / file, len(data) - 2, len(data)):
            open_shards(copy, verify)
    (copy / file).unlink()
    for verify in (True, False):
        with refused(DataError, copy / file):
            open_shards(copy, verify)


@pytest.mark.parametrize("file", ["train-00001.bin", "heldout-00000.bin", "train-00002.starts"])
def test_a_file_with_a_flipped_bit_is_named_with_its_digest(copy: Path, file: str) -> None:
    digest = sha256(copy / file)
    flip(copy / file)
    with refused(DataError, copy / file, digest[:12]):
        open_shards(copy)


def test_a_shard_of_another_encoding_is_refused(copy: Path) -> None:
    first, second = copy / "train-00000.bin", copy / "train-00001.bin"
    digest = sha256(first)
    data = second.read_bytes() * 2
    first.write_bytes(data[: first.stat().st_size])
    with refused(DataError, first, digest[:12]):
        open_shards(copy)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def overwrite(folder: Path, position: int, id: int) -> None:
    """Change one id of the first shard and vouch for it with a matching digest."""
    path = folder / "train-00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[position] = id
    path.write_bytes(ids.tobytes())
    edit(folder, lambda m: m["splits"]["train"][0].update(sha256=sha256(path)))


def test_ids_beyond_the_vocabulary_are_refused(copy: Path, shards: Shards) -> None:
    overwrite(copy, 5, shards.vocab_size)
    with refused(DataError, "train-00000.bin", shards.vocab_size, 5):
        open_shards(copy)


@pytest.mark.parametrize(("at", "value"), [(0, 3), (1, 0), (1, -1), (-1, 2**40)])
def test_starts_that_are_no_places_of_documents_are_refused(copy: Path, at: int, value: int) -> None:
    path = copy / "train-00000.starts"
    starts = np.fromfile(path, "<i8")
    starts[at] = value
    path.write_bytes(starts.tobytes())
    edit(copy, lambda m: m["splits"]["train"][0].update(starts_sha256=sha256(path)))
    with refused(DataError, path):
        open_shards(copy)


def test_a_manifest_must_say_exactly_what_it_should(copy: Path) -> None:
    sound = (copy / "manifest.json").read_text()
    changes: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("manifest.json", lambda m: m.update(format="other")),
        ("version", lambda m: m.update(version=2)),
        ("extra", lambda m: m.update(extra=1)),
        ("corpus", lambda m: m.pop("corpus")),
        ("dtype", lambda m: m.update(dtype="<i8")),
        ("dtype", lambda m: m.update(dtype="<u4")),
        ("vocab_size", lambda m: m.update(vocab_size="400")),
        ("vocab_size", lambda m: m.update(vocab_size=True)),
        ("tokenizer", lambda m: m.update(tokenizer=None)),
        ("heldout", lambda m: m["splits"].pop("heldout")),
        ("splits", lambda m: m.pop("splits")),
        ("splits.train", lambda m: m["splits"].update(train={})),
        ("splits.train", lambda m: m["splits"].update(train=[])),
        ("splits.train[1]", lambda m: m["splits"]["train"][1].update(x=1)),
        ("splits.train[1].tokens", lambda m: m["splits"]["train"][1].update(tokens=0)),
        ("splits.train[1].documents", lambda m: m["splits"]["train"][1].update(documents=-1)),
        ("splits.train[0].documents", lambda m: m["splits"]["train"][0].update(documents=0)),
        ("train-00001.bin", lambda m: m["splits"]["train"][1].update(tokens=9)),
        ("train-00001.starts", lambda m: m["splits"]["train"][1].update(documents=99)),
    ]
    for name, change in changes:
        edit(copy, change)
        with refused(DataError, copy, name):
            open_shards(copy)
        (copy / "manifest.json").write_text(sound)
    open_shards(copy)


def test_a_manifest_that_is_missing_or_no_json_is_named(copy: Path, tmp_path: Path) -> None:
    with refused(DataError, tmp_path / "nowhere" / "manifest.json"):
        open_shards(tmp_path / "nowhere")
    (copy / "manifest.json").write_text('{"format"')
    with refused(DataError, copy / "manifest.json"):
        open_shards(copy)


def test_a_folder_of_something_else_is_not_touched(
    text_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "train-00000.bin").write_bytes(b"not ours")
    before = contents(tmp_path)
    with refused(DataError, tmp_path / "manifest.json"):
        encode(corpus_of(text_folder), tokenizer, tmp_path)
    assert contents(tmp_path) == before


def test_a_length_and_a_place_that_cannot_be_are_refused_by_name(
    text_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with refused(DataError, "shard_tokens", 0):
        encode(corpus_of(text_folder), tokenizer, tmp_path / "out", shard_tokens=0)
    (tmp_path / "file").touch()
    with refused(StorageError, tmp_path / "file"):
        encode(corpus_of(text_folder), tokenizer, tmp_path / "file")


def test_head_and_records_are_what_the_manifest_holds(shards: Shards) -> None:
    found = manifest_module.load(shards.path / "manifest.json")
    manifest = json.loads((shards.path / "manifest.json").read_text())
    assert manifest == msgspec.to_builtins(found)
    assert "completions" not in manifest and not found.completions
