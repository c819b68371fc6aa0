"""What --data takes: compressed files, tables, folders of them, patterns, datasets, several with weights."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from perspectron.data import Corpus, SplitName, absolute, label, open_corpus
from perspectron.data import reading as reading_module
from perspectron.errors import DataError

TEXTS = [f"Row {i} says {'well, ' * (i % 4)}ünïcode {i * 7919}.\n" for i in range(300)]


def read(corpus: Corpus) -> dict[SplitName, list[str]]:
    return {split: [d.text for d in corpus.documents(split)] for split in corpus.splits}


def everything(corpus: Corpus) -> list[str]:
    return sorted(text for part in read(corpus).values() for text in part)


def table(path: Path, texts: list[str] = TEXTS, name: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), name: texts}), path, row_group_size=70)
    return path


def lines(path: Path, texts: list[str] = TEXTS) -> Path:
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    packers = {".gz": gzip.compress, ".zst": zstd.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(data))
    return path


def test_records_are_the_same_in_every_format_and_packing(tmp_path: Path) -> None:
    plain = read(open_corpus(str(lines(tmp_path / "a.jsonl")), dev=0.1))
    assert sorted([text for part in plain.values() for text in part]) == sorted(TEXTS)
    assert min(map(len, plain.values())) > 5
    for path in (
        lines(tmp_path / "a.jsonl.gz"),
        lines(tmp_path / "a.jsonl.zst"),
        table(tmp_path / "a.parquet"),
    ):
        assert read(open_corpus(str(path), dev=0.1)) == plain


def test_a_zstd_file_of_several_frames_is_a_text_cut_at_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 1000)
    whole = "".join(TEXTS).encode()
    (tmp_path / "a.txt").write_bytes(whole)
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(whole[:5000]) + zstd.compress(whole[5000:]))
    plain, packed = (read(open_corpus(str(tmp_path / name))) for name in ("a.txt", "a.txt.zst"))
    assert packed == plain and "".join(plain["train"] + plain["heldout"]).encode() == whole
    (tmp_path / "cut.txt.zst").write_bytes(zstd.compress(whole)[:-9])
    with pytest.raises(DataError, match=r"cut\.txt\.zst: cannot be read"):
        open_corpus(str(tmp_path / "cut.txt.zst"))


def test_a_folder_may_have_texts_and_tables(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    table(tmp_path / "deep" / "a.parquet", TEXTS[:100])
    lines(tmp_path / "b.jsonl.zst", TEXTS[100:200])
    for i, text in enumerate(TEXTS[200:]):
        (tmp_path / "deep" / f"{i:03d}.txt").write_text(text)
    corpus = open_corpus(str(tmp_path), heldout=0.2)
    found = read(corpus)
    assert sorted([text for part in found.values() for text in part]) == sorted(TEXTS)
    names = [document.name for document in corpus.documents("train")]
    assert "deep/000.txt" in names and any(name.startswith("deep/a.parquet:") for name in names)
    before = corpus.fingerprint
    lines(tmp_path / "b.jsonl.zst", TEXTS[100:199])
    assert open_corpus(str(tmp_path), heldout=0.2).fingerprint != before


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for i in range(3):
        table(tmp_path / f"part-{i}.parquet", TEXTS[100 * i : 100 * i + 100])
    (tmp_path / "notes.txt").write_text("not wanted\n")
    found = read(open_corpus(str(tmp_path / "part-*.parquet")))
    assert sorted([text for part in found.values() for text in part]) == sorted(TEXTS)
    assert everything(open_corpus(str(tmp_path / "part-[02].parquet"))) == sorted(TEXTS[:100] + TEXTS[200:])
    with pytest.raises(DataError, match=r"none-\*: no file fits this pattern"):
        open_corpus(str(tmp_path / "none-*"))


def test_records_name_what_they_skip(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "two", "", "a\0b", "three"]}), path)
    corpus = open_corpus(str(path), heldout=0.3)
    assert everything(corpus) == ["one", "three", "two"]
    assert sorted(corpus.skipped) == ["a.parquet:2", "a.parquet:5"]


@pytest.mark.parametrize("kind", ["folder", "jsonl", "jsonl.gz", "parquet", "text", "hf"])
def test_a_pass_goes_on_after_any_document(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 400)
    if kind == "folder":
        for i, text in enumerate(TEXTS[:40]):
            (tmp_path / f"{i}.txt").write_text(text * (20 if i == 7 else 1))
        lines(tmp_path / "b.jsonl", TEXTS[40:60])
    elif kind == "text":
        (tmp_path / "a.text").write_text("".join(TEXTS))
    else:
        (table if kind in ("parquet", "hf") else lines)(tmp_path / f"a.{kind.replace('hf', 'parquet')}")
    source = str(tmp_path) if kind == "folder" else str(tmp_path / f"a.{kind}")
    source = f"hf:{tmp_path}" if kind == "hf" else source
    corpus = open_corpus(source, heldout=0.2)
    whole = list(corpus.documents("train"))
    assert len(whole) > 20 and all(0 <= d.share <= 1 for d in whole)
    for at in (0, 1, len(whole) // 2, len(whole) - 1):
        place = json.loads(json.dumps(whole[at].place))  # as a journal keeps it
        rest = [d.text for d in open_corpus(source, heldout=0.2).documents("train", place)]
        assert rest == [d.text for d in whole[at + 1 :]]


def test_reading_goes_on_without_what_was_read_before(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl")
    corpus = open_corpus(str(path))
    place = list(corpus.documents("train"))[200].place
    data = path.read_bytes()
    path.write_bytes(b"\0" * place[1][0] + data[place[1][0] :])  # nobody looks there again
    assert list(corpus.documents("train", place))[-1].text == TEXTS[-1]
    assert corpus.skipped_count == 0


# Datasets


def test_a_dataset_of_a_folder_is_its_rows(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet")
    corpus = open_corpus(f"hf:{tmp_path}")
    assert everything(corpus) == sorted(TEXTS)
    assert read(open_corpus(f"hf:{tmp_path}:train")) == read(corpus)
    table(tmp_path / "a.parquet", TEXTS[:-1])
    assert open_corpus(f"hf:{tmp_path}").fingerprint != corpus.fingerprint
    with pytest.raises(
        DataError, match=r"cannot be opened \(Bad split: nope\. Available splits: \['train'\]\)"
    ):
        open_corpus(f"hf:{tmp_path}:nope")
    with pytest.raises(DataError, match=r"no column 'body', its columns are id, text; name the one with"):
        open_corpus(f"hf:{tmp_path}#body")


def test_a_dataset_that_was_saved_is_its_rows(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"text": TEXTS})
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "more": made.select(range(9))}).save_to_disk(tmp_path / "all")
    for source in (f"hf:{tmp_path / 'one'}", f"hf:{tmp_path / 'all'}"):
        assert everything(open_corpus(source)) == sorted(TEXTS)
    assert everything(open_corpus(f"hf:{tmp_path / 'all'}:more")) == sorted(TEXTS[:9])
    with pytest.raises(DataError, match="split 'nope' is not one of train, more"):
        open_corpus(f"hf:{tmp_path / 'all'}:nope")


# Refusals


def test_a_table_without_a_column_of_text_says_which_it_has(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", name="body")
    with pytest.raises(
        DataError, match=rf"a\.parquet: no column 'text', its columns are id, body; .*{path}#id"
    ):
        open_corpus(str(path))
    assert everything(open_corpus(f"{path}#body")) == sorted(TEXTS)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"no\.parquet: cannot be read"):
        open_corpus(str(tmp_path / "no.parquet"))


@pytest.mark.parametrize(
    ("name", "missing"), [("a.parquet", "pyarrow"), ("a.txt.zst", "backports"), ("hf:some/name", "datasets")]
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(b"text\n"))
    table(tmp_path / "a.parquet")
    there = reading_module.find_spec
    monkeypatch.setattr(reading_module, "find_spec", lambda n: None if n.startswith(missing) else there(n))
    with pytest.raises(DataError, match=rf"{missing}.* is not installed: pip install 'perspectron\[data\]'"):
        open_corpus(name)


# Names


def test_sources_by_their_full_path_and_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    assert absolute("a.parquet#body") == f"{tmp_path}/a.parquet#body"
    assert absolute("hf:set:train#body") == f"hf:{tmp_path}/set:train#body"
    assert absolute("hf:owner/name:train") == "hf:owner/name:train"
    assert absolute("a=0.7:x.txt b=0.3:stdlib") == f"a=0.7:{tmp_path}/x.txt b=0.3:stdlib"
    assert [label(s) for s in ("x/play.txt", "a=0.7:x b=0.3:y", "hf:owner/name:train", "d/*.parquet", "stdlib")] == [
        "play", "a-b", "name", "d", "stdlib",
    ]  # fmt: skip
