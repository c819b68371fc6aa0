import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from perspectron.data import Corpus, SplitName, open_corpus
from perspectron.data import corpus as corpus_module
from perspectron.data import named as named_module
from perspectron.data import reading as reading_module
from perspectron.data import tables as tables_module
from perspectron.util.errors import DataError
from tests.refusals import refused


def texts(corpus: Corpus, split: SplitName) -> dict[str, str]:
    return {document.name: document.text for document in corpus.documents(split)}


def folder(root: Path, count: int) -> Path:
    for i in range(count):
        path = root / f"d{i % 7}" / f"f{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"text {i}\r\nand more\n".encode())
    return root


def write_records(path: Path, lines: list[bytes]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(b"\n".join(lines) + b"\n")
    return path


# Folders and the standard library


def test_folder_splits_are_disjoint_complete_sorted_and_stable(tmp_path: Path) -> None:
    corpus = open_corpus(str(folder(tmp_path, 200)), heldout=0.2)
    train, heldout = texts(corpus, "train"), texts(corpus, "heldout")
    assert not train.keys() & heldout.keys()
    assert len(train) + len(heldout) == 200
    assert 20 <= len(heldout) <= 60
    assert list(train) == sorted(train)
    assert train | heldout == {f"d{i % 7}/f{i}.txt": f"text {i}\r\nand more\n" for i in range(200)}
    assert list(texts(open_corpus(str(tmp_path), heldout=0.2), "heldout")) == list(heldout)
    (tmp_path / "new.txt").write_text("new")
    assert texts(open_corpus(str(tmp_path), heldout=0.2), "heldout").keys() - {"new.txt"} == heldout.keys()


def test_a_document_keeps_its_split_when_the_folder_moves(tmp_path: Path) -> None:
    here, there = folder(tmp_path / "a", 50), folder(tmp_path / "b", 50)
    assert texts(open_corpus(str(here)), "heldout") == texts(open_corpus(str(there)), "heldout")


@pytest.mark.parametrize("heldout", [1e-6, 1 - 1e-6])
@pytest.mark.parametrize("count", [2, 3])
def test_few_files_leave_no_split_empty(tmp_path: Path, heldout: float, count: int) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")  # must not count as the one file that a split needs
    corpus = open_corpus(str(folder(tmp_path, count)), heldout=heldout)
    sizes = [len(texts(corpus, "train")), len(texts(corpus, "heldout"))]
    assert sorted(sizes) == [1, count - 1]
    assert sizes[heldout > 0.5] == count - 1
    assert corpus.skipped == ["binary"]


def test_a_folder_of_one_text_is_cut_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    corpus = open_corpus(str(tmp_path))
    (train,), (heldout,) = texts(corpus, "train").values(), texts(corpus, "heldout").values()
    assert train + heldout == (tmp_path / "a.txt").read_text()
    assert corpus.skipped == ["b.bin"]


def test_hidden_empty_and_irregular_files_are_left_out(tmp_path: Path) -> None:
    folder(tmp_path, 20)
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    corpus = open_corpus(str(tmp_path), heldout=0.3)
    assert len(texts(corpus, "train") | texts(corpus, "heldout")) == 20
    assert corpus.skipped_count == 0


def test_undecodable_files_are_skipped_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "SKIPPED_NAMES", 4)
    folder(tmp_path, 30)
    bad = {"latin.txt": b"caf\xe9", "cut.txt": "é".encode()[:1], "nul.txt": b"a\0b"}
    bad |= {f"more{i}": b"\x80" for i in range(20)}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    corpus = open_corpus(str(tmp_path), heldout=0.5)
    for _ in range(2):  # a second pass does not count twice
        read = texts(corpus, "train") | texts(corpus, "heldout")
        assert len(read) == 30
        assert corpus.skipped_count == 23
        assert set(corpus.skipped) <= bad.keys()
        assert len(corpus.skipped) == 8


def test_long_files_come_in_pieces_that_join_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 64)
    folder(tmp_path, 10)
    long = "".join(f"zeile {i} äöü😀\r\n" for i in range(50)) + "😀ä" * 100 + "\nend"
    (tmp_path / "long.txt").write_bytes(long.encode())
    corpus = open_corpus(str(tmp_path))
    read = texts(corpus, "train") | texts(corpus, "heldout")
    pieces = {int(n.split("@")[1]): t for n, t in read.items() if n.startswith("long.txt")}
    assert "".join(pieces[at] for at in sorted(pieces)) == long
    assert all(0 < len(text.encode()) <= 64 for text in pieces.values())
    assert sum(text.endswith("\r\n") for text in pieces.values()) >= 16


def test_stdlib_is_python_source_without_tests() -> None:
    corpus = open_corpus("stdlib")
    heldout = texts(corpus, "heldout")
    names = [document.name for document in corpus.documents("train")] + list(heldout)
    assert "json/decoder.py" in names and "os.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    assert 10 < len(heldout) < 0.15 * len(names)
    assert heldout[min(heldout)] == (Path(os.__file__).parent / min(heldout)).read_bytes().decode()
    assert corpus.fingerprint == open_corpus("stdlib").fingerprint


def test_fingerprint_follows_listing_and_split(tmp_path: Path) -> None:
    folder(tmp_path, 5)
    first = open_corpus(str(tmp_path)).fingerprint
    assert open_corpus(str(tmp_path)).fingerprint == first
    seen = {first, open_corpus(str(tmp_path), heldout=0.1).fingerprint}
    file = tmp_path / "d0" / "f0.txt"
    os.utime(file, ns=(1, 1))
    seen.add(open_corpus(str(tmp_path)).fingerprint)
    file.write_text("longer than before, certainly")
    os.utime(file, ns=(1, 1))
    seen.add(open_corpus(str(tmp_path)).fingerprint)
    file.rename(file.with_name("g.txt"))
    seen.add(open_corpus(str(tmp_path)).fingerprint)
    assert len(seen) == 5


# Single files


@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
def test_a_file_holds_out_its_end_at_a_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 256)
    whole = "\ufeff" + "".join(f"line {i}: ünïcode\r\n" for i in range(500)) + "no end"
    (tmp_path / name).write_bytes(gzip.compress(whole.encode()) if name.endswith("gz") else whole.encode())
    corpus = open_corpus(str(tmp_path / name), heldout=0.1)
    train, heldout = ("".join(texts(corpus, split).values()) for split in corpus.splits)
    assert train + heldout == whole
    assert train.endswith("\r\n")
    assert len(heldout.encode()) == pytest.approx(0.1 * len(whole.encode()), abs=30)
    assert len(texts(corpus, "train")) > 10


@pytest.mark.parametrize(
    "text", ["ab", "a\n\n", "\n\n", "äöü", "one line\n", "x" * 5000, "a\nb", "😀😀", "a\nbcdef"]
)
@pytest.mark.parametrize("heldout", [0.001, 0.05, 0.999])
def test_tiny_files_give_both_splits(tmp_path: Path, text: str, heldout: float) -> None:
    path = tmp_path / "tiny"
    path.write_bytes(text.encode())
    corpus = open_corpus(str(path), heldout=heldout)
    train, heldout_text = ("".join(texts(corpus, split).values()) for split in corpus.splits)
    assert train and heldout_text
    assert train + heldout_text == text


@pytest.mark.parametrize("text", ["a", "\n", "😀"])
def test_one_character_is_too_little(tmp_path: Path, text: str) -> None:
    (tmp_path / "one").write_text(text)
    with refused(DataError, tmp_path / "one", len(text.encode())):
        open_corpus(str(tmp_path / "one"))


def test_a_file_that_shrank_since_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text("line\n" * 100)
    corpus = open_corpus(str(path))
    path.write_text("line\n" * 50)
    with refused(DataError, path, 225):
        list(corpus.documents("train"))


# JSON lines


def records(count: int) -> list[bytes]:
    return [
        json.dumps({"text": f"Ünit {i}\r\n", "id": i}, ensure_ascii=bool(i % 2)).encode()
        for i in range(count)
    ]


def test_jsonl_plain_and_gzip_are_equal(tmp_path: Path) -> None:
    plain = open_corpus(str(write_records(tmp_path / "a.jsonl", records(100))), heldout=0.3)
    zipped = open_corpus(str(write_records(tmp_path / "a.jsonl.gz", records(100))), heldout=0.3)
    for split in plain.splits:
        ours, theirs = texts(plain, split), texts(zipped, split)
        assert list(ours.values()) == list(theirs.values())
        assert ours == {name: f"Ünit {int(name.split(':')[1]) - 1}\r\n" for name in ours}
    assert not texts(plain, "train").keys() & texts(plain, "heldout").keys()
    assert 15 < len(texts(plain, "heldout")) < 45
    assert len(texts(plain, "train")) + len(texts(plain, "heldout")) == 100


def test_jsonl_names_what_it_skips(tmp_path: Path) -> None:
    bad = [b"{", b"[1]", b'{"text": 3}', b'{"other": "x"}', b'"text"', b"\xff", b'{"text": "\\ud800"}']
    bad += [b'{"text": "a\\u0000"}', b"[" * 100_000]
    good = records(20)
    lines = good[:5] + bad + [b"", b"  ", b'{"text": ""}'] + good[5:]  # blank and empty: nothing to skip
    corpus = open_corpus(str(write_records(tmp_path / "b.jsonl", lines)), heldout=0.4)
    read = [*texts(corpus, "train").values(), *texts(corpus, "heldout").values()]
    assert sorted(read) == sorted(f"Ünit {i}\r\n" for i in range(20))
    assert sorted(corpus.skipped) == sorted(f"b.jsonl:{i}" for i in range(6, 6 + len(bad)))
    assert corpus.skipped_count == len(bad)


@pytest.mark.parametrize("heldout", [1e-6, 1 - 1e-6])
def test_few_records_leave_no_split_empty(tmp_path: Path, heldout: float) -> None:
    path = write_records(tmp_path / "c.jsonl", [b"bad", *records(3), b"bad"])
    corpus = open_corpus(str(path), heldout=heldout)
    sizes = [len(texts(corpus, "train")), len(texts(corpus, "heldout"))]
    assert sizes == ([2, 1] if heldout < 0.5 else [1, 2])


def test_jsonl_reads_the_field_it_is_told(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"no {i}", "body": f"yes {i}"}).encode() for i in range(5)]
    path = str(write_records(tmp_path / "d.jsonl", lines))
    corpus = open_corpus(f"{path}#body")
    read = [*texts(corpus, "train").values(), *texts(corpus, "heldout").values()]
    assert sorted(read) == [f"yes {i}" for i in range(5)]
    assert corpus.fingerprint != open_corpus(path).fingerprint
    with refused(DataError, "d.jsonl", "nope"):
        open_corpus(f"{path}#nope")


def test_equal_records_stand_in_one_split(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}).encode() for text in ("same", "same", "same", "other", "same")]
    corpus = open_corpus(str(write_records(tmp_path / "d.jsonl", lines)))
    train, heldout = (set(texts(corpus, split).values()) for split in ("train", "heldout"))
    assert train | heldout == {"same", "other"} and not train & heldout
    with refused(DataError, "e.jsonl"):
        open_corpus(str(write_records(tmp_path / "e.jsonl", lines[:3])))


def test_a_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tables_module, "LONGEST", 100)
    lines = [b'{"text": "short"}', b'{"text": "' + b"x" * 200 + b'"}']
    with refused(DataError, "d.jsonl", 2):
        open_corpus(str(write_records(tmp_path / "d.jsonl", lines)))


def test_a_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    """Beside tables, too."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(os.urandom(3000).hex().encode())[:-100])
    with refused(DataError, "c.txt.gz"):
        open_corpus(str(tmp_path))


# Refusals


def refusals(root: Path) -> list[str]:
    (root / "empty_folder").mkdir()
    (root / "empty_file").touch()
    (root / "binary").write_bytes(b"\x00\xff")
    (root / "only_binary").mkdir()
    (root / "only_binary" / "x").write_bytes(b"\xff")
    write_records(root / "none.jsonl", [b"{}"])
    write_records(root / "single.jsonl", records(1))
    (root / "cut.txt.gz").write_bytes(gzip.compress(b"some text\n" * 50)[:-12])
    (root / "not.txt.gz").write_bytes(b"plain\n")
    (root / "cut.jsonl.gz").write_bytes(gzip.compress(b"\n".join(records(3)))[:-12])
    os.mkfifo(root / "pipe")
    return [
        "missing",
        "empty_folder",
        "empty_file",
        "binary",
        "only_binary",
        "none.jsonl",
        "single.jsonl",
        "cut.txt.gz",
        "not.txt.gz",
        "cut.jsonl.gz",
        "pipe",
    ]


def test_refusals_are_one_line_that_names_the_path(tmp_path: Path) -> None:
    for name in refusals(tmp_path):
        with refused(DataError, tmp_path / name):
            list(open_corpus(str(tmp_path / name)).documents("train"))


@pytest.mark.parametrize("heldout", [0.0, 1.0, -0.1, float("nan")])
def test_a_held_out_share_out_of_bounds_is_refused(heldout: float) -> None:
    with refused(DataError, "heldout", heldout):
        open_corpus("stdlib", heldout=heldout)


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    corpus = open_corpus(str(folder(tmp_path, 3)))
    with refused(DataError, "test", "train", "heldout"):
        corpus.documents("test")  # type: ignore[arg-type]


def test_reading_holds_one_piece_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_bytes(b"sixteen letters\n" * 2**19)  # 8 MiB
    sizes = [sys.getsizeof(d.text) for d in open_corpus(str(path)).documents("train")]
    assert len(sizes) == 8
    assert max(sizes) < 2**20 + 100


def test_equal_jsonl_records_never_stand_on_both_sides(tmp_path: Path) -> None:
    lines = [b'{"text": "record %d"}' % (i % 40) for i in range(400)]
    corpus = open_corpus(str(write_records(tmp_path / "e.jsonl", lines)), heldout=0.3)
    train, held = (set(texts(corpus, split).values()) for split in ("train", "heldout"))
    assert len(train | held) == 40 and not train & held
    assert 4 < len(held) < 20


# The dev split


def sources_of(root: Path) -> dict[str, str]:
    """A folder, a file and JSON lines of the same size."""
    folder(root / "folder", 200)
    (root / "book.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    write_records(root / "a.jsonl", records(300))
    return {name: str(root / name) for name in ("folder", "book.txt", "a.jsonl")}


@pytest.mark.parametrize("name", ["folder", "book.txt", "a.jsonl"])
def test_dev_is_taken_from_training_text_and_leaves_the_held_out_text(tmp_path: Path, name: str) -> None:
    source = sources_of(tmp_path)[name]
    plain, three = open_corpus(source, 0.2), open_corpus(source, 0.2, dev=0.1)
    assert plain.splits == ("train", "heldout") and three.splits == ("train", "dev", "heldout")
    assert plain.fingerprint != three.fingerprint
    whole = {split: "".join(texts(three, split).values()) for split in three.splits}
    assert "".join(texts(plain, "heldout").values()) == whole["heldout"]
    assert whole["train"] and whole["dev"]
    size = sum(map(len, whole.values()))
    assert len(whole["dev"]) == pytest.approx(0.1 * size, rel=0.5)
    before = sorted("".join(texts(plain, "train").values()).splitlines())
    assert sorted((whole["train"] + whole["dev"]).splitlines()) == before


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("shares", [(1e-6, 1e-6), (0.5, 0.4), (0.9, 0.09)])
def test_few_files_give_all_three_splits(tmp_path: Path, count: int, shares: tuple[float, float]) -> None:
    corpus = open_corpus(str(folder(tmp_path, count)), shares[0], dev=shares[1])
    found = [text for split in corpus.splits for text in texts(corpus, split).values()]
    assert all(texts(corpus, split) for split in corpus.splits)
    assert sorted("".join(found)) == sorted("".join(f"text {i}\r\nand more\n" for i in range(count)))


def test_few_records_give_all_three_splits(tmp_path: Path) -> None:
    path = str(write_records(tmp_path / "three.jsonl", records(3)))
    corpus = open_corpus(path, 1e-6, dev=1e-6)
    assert [len(texts(corpus, split)) for split in corpus.splits] == [1, 1, 1]
    with refused(DataError, "two.jsonl", "dev"):
        open_corpus(str(write_records(tmp_path / "two.jsonl", records(2))), dev=0.1)


def test_the_only_dev_record_is_not_left_to_the_held_out_text(tmp_path: Path) -> None:
    """Where no hash is held out, that nearest to it moves there, and may have been dev's."""
    shares = sorted(corpus_module.share_of(json.loads(record)["text"].encode()) for record in records(8))
    heldout, dev = shares[0] / 2, (shares[0] + shares[1]) / 2 - shares[0] / 2
    path = str(write_records(tmp_path / "eight.jsonl", records(8)))
    corpus = open_corpus(path, heldout, dev=dev)
    assert [len(texts(corpus, split)) for split in corpus.splits] == [6, 1, 1]


@pytest.mark.parametrize("dev", [-0.1, 0.95, float("nan")])
def test_a_dev_share_out_of_bounds_is_an_error(tmp_path: Path, dev: float) -> None:
    with refused(DataError, "dev", dev):
        open_corpus(str(folder(tmp_path, 5)), dev=dev)


@pytest.mark.parametrize("kind", ["folder", "records"])
def test_where_no_hash_is_devs_it_is_taken_from_what_would_be_trained_on(tmp_path: Path, kind: str) -> None:
    for i in range(12):
        if kind == "folder":
            source = str(folder(tmp_path / f"x{i}", 30 + i))
        else:
            source = str(write_records(tmp_path / f"{i}.jsonl", records(30 + i)))
        plain, three = open_corpus(source, 0.1), open_corpus(source, 0.1, dev=1e-9)
        assert texts(three, "heldout") == texts(plain, "heldout")
        assert len(texts(three, "dev")) == 1
        assert texts(three, "train") | texts(three, "dev") == texts(plain, "train")


# Texts that have a name


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of two packages, one with a copy of the other's licence."""
    for name in ("one", "two"):
        info = tmp_path / f"{name}-1.0.dist-info"
        (info / "licenses").mkdir(parents=True)
        (info / "licenses" / "LICENSE").write_text("the same licence\n")
        (info / "METADATA").write_text(f"Name: {name}\n")
        (info / "RECORD").write_text("digests\n")
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "code.py").write_text(f"name = {name!r}\n")
        (tmp_path / name / "README.md").write_text(f"About {name}.\n")
        (tmp_path / name / "tests" / "test.py").write_text(f"assert {name!r}\n")
    (tmp_path / "perspectron").mkdir()
    (tmp_path / "perspectron" / "code.py").write_text("ours\n")
    (tmp_path / "two" / "copy.py").write_text("name = 'one'\n")
    monkeypatch.setattr(named_module.sysconfig, "get_path", {"purelib": str(tmp_path)}.__getitem__)
    return tmp_path


def test_sources_and_prose_of_the_packages_installed_without_copies_and_without_us(packages: Path) -> None:
    found = {
        name: {d for split in ("train", "heldout") for d in texts(open_corpus(name), split)}
        for name in ("sources", "prose")
    }
    assert found["sources"] == {"one/code.py", "one/tests/test.py", "two/code.py", "two/tests/test.py"}
    assert found["prose"] == {
        "one/README.md",
        "two/README.md",
        "one-1.0.dist-info/METADATA",
        "two-1.0.dist-info/METADATA",
        "one-1.0.dist-info/licenses/LICENSE",
    }


def test_the_digest_of_a_named_text_follows_its_files_alone(packages: Path) -> None:
    first = open_corpus("prose").digest
    os.utime(packages / "one" / "README.md", (1, 1))
    assert open_corpus("prose").digest == first and len(first) == 12
    (packages / "one" / "README.md").write_text("About one, and more.\n")
    assert open_corpus("prose").digest != first
