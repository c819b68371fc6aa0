"""Parquet files that say much in few bytes, or what is not so."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perspectron.data import open_corpus
from perspectron.util.errors import DataError
from tests.refusals import refused

MIB = 1 << 20
READ = """
import resource, sys
import pyarrow.parquet
from perspectron.data import open_corpus
from perspectron.util.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    size = sum(len(document.text) for document in open_corpus(sys.argv[1]).documents("train"))
except DataError as error:
    size = error
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, size)
"""


def written(path: Path, texts: list[str], **options: object) -> Path:
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", **options)
    return path


def test_a_value_that_stands_for_every_row_takes_little_memory(tmp_path: Path) -> None:
    """A file of a few hundred bytes that is 256 MiB of text: a dictionary of one value, and one run of rows."""
    path = written(tmp_path / "same.parquet", ["x" * (2 * MIB)] * 128, write_statistics=False)
    assert path.stat().st_size < 2000
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    grown, said = done.stdout.split(" ", 1)
    assert "need at least 2" in said  # as all its records are the same text
    assert int(grown) < 250


def test_a_value_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "long.parquet", ["x" * (65 * MIB), "y"])
    with refused(DataError, path, 1):
        open_corpus(str(path))


def test_a_page_whose_size_is_not_so_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [f"text {i}" for i in range(99)])
    metadata = pq.ParquetFile(path).metadata.row_group(0).column(0)
    data = bytearray(path.read_bytes())
    for at in (metadata.data_page_offset, metadata.dictionary_page_offset):
        for byte in (0, 12, 19, 255):
            broken = bytearray(data)
            broken[at : at + 4] = bytes([byte] * 4)
            path.write_bytes(broken)
            with refused(DataError, path):
                open_corpus(str(path))


@pytest.mark.parametrize(
    ("values", "kind"),
    [([["a"], ["b"]], "list"), ([b"a", b"b"], "binary"), ([1, 2], "int64"), ([{"a": "b"}] * 2, "struct")],
)
def test_a_column_of_other_values_is_named(tmp_path: Path, values: list[object], kind: str) -> None:
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with refused(DataError, "a.parquet", "'text'", kind):
        open_corpus(str(tmp_path / "a.parquet"))


def test_strings_of_every_layout_are_texts(tmp_path: Path) -> None:
    texts = [f"text {i % 40}" for i in range(99)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), tmp_path / "a.parquet")
        corpus = open_corpus(str(tmp_path / "a.parquet"))
        assert sorted(d.text for split in corpus.splits for d in corpus.documents(split)) == sorted(texts)
