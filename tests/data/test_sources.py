"""What --data takes: compressed files, tables, folders of them, patterns, datasets, several with weights."""

import csv
import gzip
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from perspectron import presets
from perspectron.cli.quickstart_model import _identity
from perspectron.data import Corpus, SplitName, absolute, encode, label, open_corpus, with_encoding
from perspectron.data import reading as reading_module
from perspectron.data.mixture import parts_of
from perspectron.data.template import Template
from perspectron.train.checkpoint import save_config
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.convert.config import ConvertConfig
from perspectron.train.convert.run import noted
from perspectron.util.errors import DataError
from tests.refusals import names, refused

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
    with refused(DataError, "cut.txt.zst"):
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


def test_tables_of_all_kinds_are_measured_in_bytes(tmp_path: Path) -> None:
    """A parquet file has few rows where a .jsonl has many bytes."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=400)) for _ in range(400)]
    first, last = lines(tmp_path / "a.jsonl", texts[:200]), table(tmp_path / "b.parquet", texts[200:])
    found = list(open_corpus(str(tmp_path)).documents("train"))
    shares = [one.share for one in found]
    own = [one.share for one in found if one.name.startswith(first.name)]
    size = first.stat().st_size
    assert own[-1] == pytest.approx(size / (size + last.stat().st_size), abs=0.01)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1, abs=0.02)


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for i in range(3):
        table(tmp_path / f"part-{i}.parquet", TEXTS[100 * i : 100 * i + 100])
    (tmp_path / "notes.txt").write_text("not wanted\n")
    found = read(open_corpus(str(tmp_path / "part-*.parquet")))
    assert sorted([text for part in found.values() for text in part]) == sorted(TEXTS)
    assert everything(open_corpus(str(tmp_path / "part-[02].parquet"))) == sorted(TEXTS[:100] + TEXTS[200:])
    with refused(DataError, tmp_path / "none-*"):
        open_corpus(str(tmp_path / "none-*"))


def test_what_is_encoded_is_no_text(tmp_path: Path) -> None:
    """Of a folder that `tokenize` wrote, the manifest and tokenizer would be read as the text."""
    (folder := tmp_path / "encoded").mkdir()
    text = lines(tmp_path / "text.jsonl")
    (folder / "manifest.json").write_text(json.dumps({"text": "no text"}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": "a vocabulary, line by line\n" * 99}))
    for source in (str(folder), f"{folder}#text", f"a=0.5:{folder} b=0.5:{text}"):
        with refused(DataError, folder):
            open_corpus(source)


def test_records_name_what_they_skip(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "two", "", "a\0b", "three"]}), path)
    corpus = open_corpus(str(path), heldout=0.3)
    assert everything(corpus) == ["one", "three", "two"]
    assert sorted(corpus.skipped) == ["a.parquet:2", "a.parquet:5"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_record_of_a_text_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    """With empty lines between and, in a .csv, a row of several lines."""
    rows = ['{"text": "two\\nlines"}'] * 2 if name == "a.jsonl" else ["text", '"two', 'lines"']
    rows += ["", *(json.dumps({"text": f"row{i}"}) if name == "a.jsonl" else f"row{i}" for i in range(60))]
    path = tmp_path / name
    path.write_text("\n\n".join(rows).replace("two\n\n", "two\n"))
    corpus, there = open_corpus(str(path), heldout=0.3), path.read_text().split("\n")
    found = [document for split in corpus.splits for document in corpus.documents(split)]
    assert len(found) > 60
    for document in found:
        assert document.text.partition("\n")[0] in there[int(document.name.partition(":")[2]) - 1]


# Datasets


def test_a_dataset_of_a_folder_is_its_rows(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet")
    corpus = open_corpus(f"hf:{tmp_path}")
    assert everything(corpus) == sorted(TEXTS)
    assert read(open_corpus(f"hf:{tmp_path}:train")) == read(corpus)
    table(tmp_path / "a.parquet", TEXTS[:-1])
    assert open_corpus(f"hf:{tmp_path}").fingerprint != corpus.fingerprint
    with refused(DataError, "nope", "train"):
        open_corpus(f"hf:{tmp_path}:nope")
    with refused(DataError, "'body'", "id", "text"):
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
    with refused(DataError, "'nope'", "train", "more"):
        open_corpus(f"hf:{tmp_path / 'all'}:nope")


# Refusals


def test_a_table_without_a_column_of_text_says_which_it_has(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", name="body")
    with refused(DataError, path, "'text'", "body", f"{path}#id"):
        open_corpus(str(path))
    assert everything(open_corpus(f"{path}#body")) == sorted(TEXTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    lines(folder / "b.jsonl")
    shouted = table(folder / "A.PARQUET", name="body")
    with refused(DataError, shouted, "'text'", "body"):
        open_corpus(str(folder))
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing else")
    with refused(DataError, "no.parquet"):
        open_corpus(str(tmp_path / "no.parquet"))


@pytest.mark.parametrize(("name", "missing"), [("a.parquet", "pyarrow"), ("hf:some/name", "datasets")])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "a.parquet")
    there = reading_module.find_spec
    monkeypatch.setattr(reading_module, "find_spec", lambda n: None if n.startswith(missing) else there(n))
    with refused(DataError, missing, "perspectron[data]"):
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


@pytest.mark.parametrize("least", ["0.7", "0.00005", "0.000001", "0.123456", "1"])
def test_every_weight_that_may_be_given_is_read_again(least: str) -> None:
    rest = 1 - Fraction(least)
    source = f"a={least}:/x.txt" + (f" b={float(rest):.6f}:/y.txt" if rest else "")
    for kept in (absolute(source), with_encoding(source, "latin-1")):
        assert [part.weight for part in parts_of(kept)] == [part.weight for part in parts_of(source)]
        assert kept.startswith(f"a={least}:")


# Tables that are text: .csv, .tsv, .json

HARD = [
    "plain",
    'a "quoted", word',
    "two\nlines\r\nand more",
    "tab\tand ; and |",
    "ünïcode 日本語",
    " x ",
] * 30


def cells(path: Path, texts: list[str], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "body"])
        writer.writerows([i, f"{i} {text}"] for i, text in enumerate(texts))
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")])
def test_the_column_of_a_text_table_is_read_and_no_other_text(
    tmp_path: Path, name: str, delimiter: str
) -> None:
    path = cells(tmp_path / name, HARD, delimiter)
    wanted = sorted(f"{i} {text}" for i, text in enumerate(HARD))
    corpus = open_corpus(f"{path}#body")
    assert everything(corpus) == wanted and corpus.notes() == []
    packed = tmp_path / f"packed-{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert everything(open_corpus(f"{packed}#body")) == wanted
    for source, named in (
        (f"{path}#nosuch", ["'nosuch'", "id", "body"]),
        (str(path), ["'text'", f"{path}#id", f"{path}.txt"]),
    ):
        with refused(DataError, *named):
            open_corpus(source)


@pytest.mark.parametrize("kind", ["array", "array.gz", "lines"])
def test_a_json_of_objects_is_read_by_record(tmp_path: Path, kind: str) -> None:
    path, records = tmp_path / "a.json", [{"text": text, "n": [1, {"]": "["}]} for text in TEXTS]
    data = (
        json.dumps(records, indent=1) if "array" in kind else "\n".join(map(json.dumps, records))
    ).encode()
    if kind.endswith("gz"):
        path, data = tmp_path / "a.json.gz", gzip.compress(data)
    path.write_bytes(data)
    corpus = open_corpus(str(path), 0.2)
    assert everything(corpus) == sorted(TEXTS) and corpus.notes() == []
    same = open_corpus(str(lines(tmp_path / "same.jsonl")), 0.2)
    assert read(corpus) == read(same)  # and the same records are held out
    with refused(DataError, path, "'nosuch'", "text", "n"):
        open_corpus(f"{path}#nosuch")


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("cut.json", '[{"text": "a"}, {"text": "b"}, {"te', [29]),
        ("open.json", '[{"text": "a"}, {"text": "b"}', [29]),
        ("words.json", '["a", "b"]', []),
        ("quote.csv", 'text\na\n"b\nc\nd\n', ["','"]),
    ],
)
def test_a_text_table_that_is_none_is_refused_with_its_place(
    tmp_path: Path, name: str, data: str, named: list[object]
) -> None:
    (tmp_path / name).write_text(data)
    with refused(DataError, name, *named):
        list(open_corpus(str(tmp_path / name)).documents("train"))


def test_a_row_of_another_width_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"row {i},{i}\n" for i in range(50)) + "a,b,c\n")
    corpus = open_corpus(str(tmp_path / "a.csv"))
    assert len(everything(corpus)) == 50
    assert corpus.notes() == ["left out records of a.csv: 1 (3 cells where the first line has 2)"]


def test_a_text_table_as_spreadsheets_write_it_is_read(tmp_path: Path) -> None:
    """A mark, quoted names, an empty line above them, a name in capitals or with another extension inside."""
    body = "".join(f'"{text}",{i}\n' for i, text in enumerate(TEXTS))
    for name, head in (
        ("a.csv", '\ufeff"text","say ""id"""\n'),
        ("b.csv", "\ufeff\n\ntext,id\n"),
        ("C.CSV", "text,id\n"),
        ("d.json.csv", "text,id\n"),
        ("e.tsv.csv", "text,id\n"),
    ):
        (tmp_path / name).write_text(head + body)
        corpus = open_corpus(str(tmp_path / name))
        assert everything(corpus) == sorted(TEXTS) and not corpus.notes()
    (tmp_path / "f.csv").write_text("\n\n")
    with refused(DataError, "f.csv"):
        open_corpus(str(tmp_path / "f.csv"))
    (tmp_path / "g.csv").write_text("text,text\na,b\nc,d\n")
    with refused(DataError, "g.csv", "'text'"):
        open_corpus(str(tmp_path / "g.csv"))


def test_a_field_beside_a_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "completion": text}) + "\n" for text in TEXTS))
    template = Template.named("plain")
    with refused(DataError, "#body", "'prompt'", "'completion'"):
        open_corpus(f"{path}#body", template=template)


def test_a_field_of_a_text_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 50)
    for source in (tmp_path / "a.txt", tmp_path):
        with refused(DataError, f"{source}#body"):
            open_corpus(f"{source}#body")
    lines(tmp_path / "b.jsonl")
    with refused(DataError, "'body'", "text"):
        open_corpus(f"{tmp_path}#body")


def test_a_folder_says_what_it_read_and_what_it_left_out_by_kind_and_reason(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.py").write_text(f"print({i})\n" * 20)
    (tmp_path / "raw.csv").write_text("a,b\n1,2\n")  # no column of texts: a text
    (tmp_path / "more.json").write_text(json.dumps([{"text": text} for text in TEXTS[:40]]))
    (tmp_path / "bin.dat").write_bytes(b"\x89PNG\xff")
    (tmp_path / "wide.txt").write_bytes("wide\n".encode("utf-16") * 20)
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n' * 70)
    corpus = open_corpus(str(tmp_path))
    everything(corpus)
    first, second = corpus.notes()
    assert first == "read records of more.json: 40; .py files: 30; .csv files: 1"
    assert second == (
        "left out records of chat.jsonl: 70 (no 'text' but 'messages'; train reads them with --template plain, "
        "or a file with one); .dat files: 1 (not UTF-8 text); "
        ".txt files: 1 (not UTF-8 text, it looks like utf-16)"
    )
    assert corpus.skipped_count == 72


# In proportion


@pytest.mark.parametrize("dev", [0.0, 0.1])
def test_each_kind_of_a_folder_is_held_out_in_proportion(tmp_path: Path, dev: float) -> None:
    """Nine files of one kind, five of another, and a large one: whole files would come nowhere near."""
    sizes = (
        {f"{i}.py": 500 + 200 * i for i in range(9)} | {f"{i}.md": 700 for i in range(5)} | {"big.log": 9000}
    )
    for name, count in sizes.items():
        (tmp_path / name).write_text("".join(f"{name} line {i}\n" for i in range(count)))
    corpus = open_corpus(str(tmp_path), 0.1, dev=dev)
    found = {split: [(d.name, d.text) for d in corpus.documents(split)] for split in corpus.splits}
    whole = sorted("".join(text for part in found.values() for _, text in part).splitlines())
    assert whole == sorted("".join((tmp_path / name).read_text() for name in sizes).splitlines())
    for kind in ("py", "md", "log"):
        bytes_of = {
            split: sum(len(text) for name, text in part if f".{kind}" in name)
            for split, part in found.items()
        }
        for split, share in (("heldout", 0.1), ("dev", dev)):
            assert bytes_of.get(split, 0) == pytest.approx(share * sum(bytes_of.values()), rel=0.02)
    assert found == {s: [(d.name, d.text) for d in open_corpus(str(tmp_path), 0.1, dev=dev).documents(s)]
                     for s in corpus.splits}  # fmt: skip
    if dev:
        plain = open_corpus(str(tmp_path), 0.1)
        assert [d.text for d in plain.documents("heldout")] == [text for _, text in found["heldout"]]


@pytest.mark.parametrize("dev", [0.01, 0.05, 0.1])
def test_what_is_held_out_of_a_small_folder_is_the_same_with_a_dev_part(tmp_path: Path, dev: float) -> None:
    """Kinds so small that whole files went to parts by hash, or a dev part that none of them had."""
    for name, count in {"a.py": 60, "b.md": 3000, "c.txt": 60, "d.txt": 2400, "e.rst": 1, "f.py": 60}.items():
        (tmp_path / name).write_text("".join(f"{name} line {i}\n" for i in range(count)))
    (tmp_path / "g.txt").write_text("é")
    plain, parted = (read(open_corpus(str(tmp_path), 0.05, dev=part)) for part in (0.0, dev))
    assert plain["heldout"] == parted["heldout"]
    sizes = {split: len("".join(texts).encode()) for split, texts in parted.items()}
    whole = sum(sizes.values())
    assert whole == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert sizes["heldout"] / whole == pytest.approx(0.05, rel=0.5)
    assert sizes["dev"] / whole == pytest.approx(dev, rel=0.5)


@pytest.mark.parametrize("seed", range(12))
def test_any_small_folder_is_held_out_in_proportion_and_the_same_with_a_dev_part(
    tmp_path: Path, seed: int
) -> None:
    """Kinds so small that whole files, by hash, would be nothing, or most of the text."""
    draw = random.Random(seed)
    for number in range(8):
        root = tmp_path / str(number)
        root.mkdir()
        for i in range(draw.choice([1, 2, 3, 6])):
            name = f"{seed}-{number}-{i}.{draw.choice(['txt', 'md', 'py'])}"
            count = draw.choice([30, 60, 300, 1200])
            (root / name).write_text("".join(f"{name} has line {j}\n" for j in range(count)))
        if draw.random() < 0.3:
            (root / "image.png").write_bytes(b"\x89PNG\xff" * draw.choice([10, 1000, 50_000]))
        plain, parted = (read(open_corpus(str(root), 0.05, dev=dev)) for dev in (0.0, 0.05))
        assert plain["heldout"] == parted["heldout"]
        whole = sorted(line for path in root.glob("*-*") for line in path.read_text().splitlines())
        for found in (plain, parted):
            assert sorted("".join(itertools.chain(*found.values())).splitlines()) == whole
            size = len("".join(itertools.chain(*found.values())))
            for split in found.keys() - {"train"}:
                assert 0.02 < len("".join(found[split])) / size < 0.11


# Encodings

WORDS = "".join(f"Zeile {i}: Straße, Übermut, façade\n" for i in range(300))


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_of_another_encoding_is_the_same_text(
    tmp_path: Path, name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "PIECE", 1000)
    text = "".join(f"行 {i} 日本\n" for i in range(300)) if name == "shift_jis" else WORDS
    (tmp_path / "plain.txt").write_text(text)
    path, data = tmp_path / ("a.txt.gz" if packed else "a.txt"), text.encode(name)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read(open_corpus(with_encoding(str(path), name))) == read(open_corpus(str(tmp_path / "plain.txt")))
    if name in ("utf-16", "utf-32"):  # with a mark
        with refused(DataError, path, name, "--encoding"):
            open_corpus(str(path))


def test_records_of_another_encoding_are_the_same_records(tmp_path: Path) -> None:
    data = "".join(json.dumps({"body": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_bytes(data.encode("utf-16"))
    (tmp_path / "a.csv").write_bytes(("id;body\n" + "".join(f'1;"{t}"\n' for t in TEXTS)).encode("latin-1"))
    assert everything(open_corpus(f"{tmp_path}/a.jsonl#body&encoding=utf-16")) == sorted(TEXTS)
    assert everything(open_corpus(with_encoding(f"{tmp_path}/a.csv#body", "latin-1"))) == sorted(TEXTS)
    table(tmp_path / "a.parquet")
    for source, named in (("a.parquet", ["a.parquet"]), ("a.jsonl", ["a.jsonl", "utf-16"])):
        with refused(DataError, *named):
            open_corpus(with_encoding(f"{tmp_path}/{source}#text&encoding=utf-16", "latin-1")
                        if source == "a.jsonl" else f"{tmp_path}/{source}#encoding=latin-1")  # fmt: skip


def test_records_that_are_not_of_the_encoding_say_so(tmp_path: Path) -> None:
    rows = "".join(f'"{i}","schön {i}"\n' if i % 9 == 0 else f'"{i}","schon {i}"\n' for i in range(90))
    for name, data in (
        ("a.csv", ('"id","text"\n' + rows).encode("latin-1")),
        (
            "b.jsonl",
            "".join(f'{{"text": {row.split(",")[1]}}}\n' for row in rows.splitlines()).encode("latin-1"),
        ),
    ):
        (tmp_path / name).write_bytes(data)
        corpus = open_corpus(str(tmp_path / name))
        assert len(everything(corpus)) == 80
        assert corpus.notes() == [f"left out records of {name}: 10 (not UTF-8; --encoding reads others)"]
    for name in ("c.csv", "d.tsv", "e.jsonl", "f.json"):
        (tmp_path / name).write_bytes((data.decode("latin-1")).encode("utf-16"))
        with refused(DataError, name, "utf-16", 0, "--encoding"):
            open_corpus(str(tmp_path / name))


def test_a_fault_is_named_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for data, encoding, named in (
        (b"x" * 1_100_000 + b"\xff\n", "", [1_100_000, "--encoding", "latin-1", "cp1252"]),
        (b"ab\0c", "", ["UTF-8", 2]),
        (b"caf\xe9", "", ["UTF-8", 3]),
        (b"caf\x81 e\n", "cp1252", ["a.txt", "cp1252"]),
        (b"ab\0c", "cp1252", ["cp1252", 2]),
        (b"x\n", "klingon", ["encoding", "klingon"]),
        (b"x\n", "rot13", ["encoding", "rot13"]),
    ):
        path.write_bytes(data)
        with refused(DataError, *named):
            open_corpus(f"{path}#encoding={encoding}" if encoding else str(path))


def test_a_character_that_the_end_cuts_off_is_left_out_and_told_of(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((WORDS + "日本語").encode()[:-1])
    for source in (tmp_path / "a.txt", tmp_path):
        corpus = open_corpus(str(source))
        found = read(corpus)
        assert "".join(found["train"] + found["heldout"]) == WORDS + "日本"
        (note,) = corpus.notes()
        assert "the last 2 bytes, a character that the end of a.txt cuts off" in note
    (tmp_path / "b.txt").write_bytes(WORDS.encode("utf-16-le")[:-1])
    with refused(DataError, "b.txt", "utf-16-le"):
        open_corpus(f"{tmp_path / 'b.txt'}#encoding=utf-16-le")


@pytest.mark.parametrize("name", ["X.JSONL.GZ", "A.TXT.GZ", "b.Csv.Gz"])
def test_a_compression_in_capitals_is_one(name, tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    plain = {
        "JSONL": "\n".join(lines),
        "TXT": "\n".join(TEXTS),
        "Csv": "text\n" + "\n".join(f'"{text}"' for text in TEXTS),
    }
    (tmp_path / name).write_bytes(gzip.compress(plain[name.split(".")[1]].encode()))
    found = "".join(everything(open_corpus(str(tmp_path / name))))
    assert all(text in found for text in TEXTS)


def test_an_encoding_beside_another_is_refused_whichever_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    for encoding in ("utf-8", "cp1252"):
        with refused(DataError, "encoding", encoding):
            with_encoding(f"{tmp_path}/a.txt#encoding=latin-1", encoding)
    assert with_encoding(f"{tmp_path}/a.txt#encoding=utf-8", "utf-8").startswith(f"{tmp_path}/a.txt")


def test_a_column_with_spaces_around_its_name_is_shown_as_it_is(tmp_path):
    (tmp_path / "a.csv").write_text("id, text\n1,one\n2,two\n")
    with pytest.raises(DataError) as caught:
        open_corpus(f"{tmp_path}/a.csv")
    assert "id, ' text'" in str(caught.value) and f"{tmp_path}/a.csv# text" in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_what_the_program_wrote_is_no_text(tmp_path, tokenizer, pattern):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"{i}: a line of the text\n" * 50)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"format": "of somebody else"}\n' * 9)
    source = str(tmp_path / pattern)
    before = open_corpus(source)
    assert any("other/manifest.json" in d.name for split in before.splits for d in before.documents(split))
    out = tmp_path / "deep" / "out"
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "notes.txt").write_text("what a command wrote\n" * 99)
    assert open_corpus(source).fingerprint != before.fingerprint
    again = open_corpus(source, out=out)
    assert again.fingerprint == before.fingerprint and not before.apart
    assert names(again.notes()[-1], out)
    tokenizer.save(out / "tokenizer.json")
    encode(before, tokenizer, out)
    (run := tmp_path / "run").mkdir()
    save_config(run, RunConfig(presets.get("transformer-tiny"), TrainConfig()))
    lines(run / "metrics.jsonl")
    again = open_corpus(f"a=1:{source}")
    assert again.parts[0].fingerprint == before.fingerprint and names(again.notes()[-1], out, run)
    assert open_corpus(f"{run}/*.jsonl").fingerprint  # what is named is read
    with refused(DataError, "out", tmp_path):
        open_corpus(str(tmp_path), out=tmp_path)
    with refused(DataError, "pattern", run):
        open_corpus(f"{tmp_path}/ru*/*.jsonl")


def test_a_quickstart_and_a_conversion_that_has_only_begun_are_no_text(tmp_path, tokenizer):
    before = open_corpus(str(lines(tmp_path / "text.jsonl").parent))
    run = RunConfig(presets.get("transformer-tiny"), TrainConfig())
    ours = [tmp_path / name for name in ("of-texts", "of-a-model", "converted")]
    for folder, name in zip(ours, ("perspective", "model", "stages"), strict=True):
        (folder / name).mkdir(parents=True)
        save_config(folder / name, run)
        (folder / "index.html").write_text("what a command wrote\n" * 99)
    (ours[0] / "transformer").mkdir()
    save_config(ours[0] / "transformer", run)
    encode(before, tokenizer, ours[0] / "corpus")
    (ours[1] / "model.json").write_text(json.dumps(_identity(tmp_path / "text.jsonl")))
    noted(ours[2], ConvertConfig("teacher", minutes=1))
    again = open_corpus(str(tmp_path))
    assert again.fingerprint == before.fingerprint and names(again.notes()[-1], *ours)


def test_a_file_that_is_deleted_before_it_is_read_is_named(tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"{i}: a line of the text\n" * 200)
    corpus = open_corpus(str(tmp_path))
    gone = next(d.name for d in corpus.documents("train") if "@" not in d.name)
    (tmp_path / gone).unlink()
    with refused(DataError, tmp_path / gone):
        list(corpus.documents("train"))
