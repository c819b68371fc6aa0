"""Tables, by the names of their files: lines of JSON, rows of parquet, .csv and .tsv, and the objects of a .json."""

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perspectron.data import chats
from perspectron.data.corpus import Corpus, Shares, facts, fingerprint
from perspectron.data.reading import COMPRESSED, PIECE, examined, library, reading, refusal
from perspectron.data.records import NOT_UTF8, Fields, Records, Unreadable, require_columns
from perspectron.util.errors import DataError
from perspectron.util.files import open_file

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = ".parquet"
LOOSE = (".csv", ".tsv", ".json")
"""Extensions of tables that may as well be texts: in a folder they are, unless they have the field with the text."""
DELIMITERS = ",;\t|"
AS_TEXT = "; to train on the file as it stands, name it {}.txt"
STRINGS = ("string", "large_string", "string_view", "null")
"""Types of a column with texts, as pyarrow names them."""
ROWS = 256
"""Rows of a parquet file that are decoded at once."""
LONGEST = 1 << 26
"""Bytes of a record."""


def is_table(name: str, *, loose: bool = True) -> bool:
    """True if a file of this name has records. loose: also one in LOOSE."""
    return name.lower().endswith((*LINES, PARQUET)) or (loose and _extension(name) in LOOSE)


def _extension(name: str) -> str:
    """The extension, in lower case and without that of a compression."""
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def table_of(path: Path, name: str, fields: Fields, encoding: str = "") -> "FileTable":
    """The records of a file. DataError for a table without a column that is asked for."""
    if name.lower().endswith(PARQUET):
        if encoding:
            raise DataError(
                f"{path}: encoding is {encoding}, must be left out: parquet has strings, not bytes"
            )
        return Parquet(path, name, fields)
    if name.lower().endswith(LINES):
        return JsonLines(path, name, fields, encoding)
    return (Json if _extension(name) == ".json" else Csv)(path, name, fields, encoding)


def open_table(path: Path, shares: Shares, fields: Fields, encoding: str = "") -> Corpus:
    """The records of one file."""
    try:
        table = table_of(path, path.name, fields, encoding)
        kind = {JsonLines: "jsonl by text", Parquet: "parquet by text"}.get(type(table), "table by text")
        lines = [str(path.resolve()), str(shares), *fields.facts, facts(path.name, path)]
        identity = fingerprint(kind, [*lines, *filter(None, [encoding])])
        return Records(str(path), identity, shares, [table], fields).settle()
    except DataError:
        if not path.name.lower().endswith(PARQUET) and (text := examined(path, encoding)).size is None:
            raise DataError(refusal(path, text, encoding)) from None
        raise


class FileTable:
    """Records of a file (`records.Table`). DataError: it has no column that is asked for."""

    def __init__(self, path: Path, name: str, fields: Fields, encoding: str = "") -> None:
        self.name, self.size = name, float(path.stat().st_size)
        self._path, self._fields, self._encoding = path, fields, encoding
        self._require_fields()

    def _require_fields(self) -> None:
        pass

    def records(self) -> Iterator[tuple[int, Any, float]]:
        raise NotImplementedError

    def _at(self, offset: int) -> float:
        """Progress at an offset in the text; unknown in a compressed file."""
        return 0.0 if self._path.suffix.lower() in COMPRESSED else float(offset)

    def _require_columns(self, columns: list[str]) -> None:
        """DataError, which says how to read the file as a text, unless the columns are there."""
        try:
            require_columns(str(self._path), columns, self._fields)
        except DataError as error:
            raise self._no_table(str(error)) from None

    def _no_table(self, why: str) -> DataError:
        return DataError(f"{why}{AS_TEXT.format(self._path)}")


class JsonLines(FileTable):
    """One JSON object on each line of a file, plain or compressed."""

    def records(self) -> Iterator[tuple[int, Any, float]]:
        offset, number = 0, 0
        with reading(self._path, self._encoding) as file:
            while line := file.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    raise DataError(
                        f"{self._path}: line {number} is longer than {LONGEST >> 20} MiB, a record's most"
                    )
                offset += len(line)
                if line.strip():
                    yield number, _parsed(line), self._at(offset)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Unreadable(NOT_UTF8)
    except (ValueError, RecursionError):
        return Unreadable("no JSON")


OF_TALKS = (*chats.KEYS, *chats.BESIDE)
"""Columns that may be of any type."""


class Parquet(FileTable):
    """Rows of a parquet file. A value that stands for many rows is decoded once."""

    def _require_fields(self) -> None:
        with self._opened() as file:
            kinds = {column.name: column.type for column in file.schema_arrow}
            self._rows = max(1, file.metadata.num_rows)  # what a damaged file claims
        require_columns(str(self._path), list(kinds), self._fields)
        for name, kind in kinds.items():
            kinds[name] = kind.value_type if str(kind).startswith("dictionary<") else kind
        talks = any(name in kinds for name in chats.KEYS)  # then other columns may be of any type
        there = [name for name in kinds if not talks or name in OF_TALKS or str(kinds[name]) in STRINGS]
        self._columns = self._fields.columns(there)
        for column in self._texts:
            if str(kinds[column]) not in STRINGS:
                raise DataError(
                    f"{self._path}: column {column!r} has values of type {kinds[column]}, must have strings"
                )

    @property
    def _texts(self) -> list[str]:
        return [name for name in self._columns if name not in OF_TALKS]

    @contextmanager
    def _opened(self, dictionaries: Sequence[str] = ()) -> Iterator[Any]:
        """The file in pyarrow, some columns of which it gives as dictionaries."""
        parquet, arrow = (library(name, self._path) for name in ("pyarrow.parquet", "pyarrow"))
        try:
            with open_file(self._path) as file:
                yield parquet.ParquetFile(file, read_dictionary=list(dictionaries))
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self._path}: cannot be read ({' '.join(str(error).split())})") from None

    def records(self) -> Iterator[tuple[int, Any, float]]:
        names, number = list(self._columns), 0
        with self._opened(self._texts) as file:
            for batch in file.iter_batches(ROWS, columns=names, use_threads=False):
                for row in zip(*(batch.column(name) for name in names), strict=True):
                    number += 1
                    record = {name: value.as_py() for name, value in zip(names, row, strict=True)}
                    if any(isinstance(text, str) and len(text) > LONGEST for text in record.values()):
                        raise DataError(
                            f"{self._path}: row {number} is longer than {LONGEST >> 20} MiB, a record's most"
                        )
                    yield number, record, self.size * number / self._rows


class Csv(FileTable):
    """Rows of a text table whose first line names its columns: by tabs in a .tsv, else by the delimiter that this line
    has most of."""

    def _require_fields(self) -> None:
        self._delimiter = "\t"
        if _extension(self.name) != ".tsv":
            with reading(self._path, self._encoding) as file:
                lines = iter(lambda: file.readline(PIECE), b"")
                head = next((line for line in lines if line.strip()), b"").decode("utf-8", "replace")
            self._delimiter = max(DELIMITERS, key=head.count)
        self._require_columns(next(self._rows(), (0, [], 0))[1])

    def records(self) -> Iterator[tuple[int, Any, float]]:
        rows = self._rows()
        _, columns, _ = next(rows)
        for line, cells, offset in rows:
            if len(cells) == len(columns):
                yield line, dict(zip(columns, cells, strict=True)), self._at(offset)
            else:
                why = f"{len(cells)} cells where the first line has {len(columns)}"
                yield line, Unreadable(why), self._at(offset)

    def _rows(self) -> Iterator[tuple[int, list[str], int]]:
        """(the line where a row begins that is not empty, its cells, the offset after it). DataError for quotes that do
        not end."""
        offset, line = 0, 1
        csv.field_size_limit(LONGEST)
        with reading(self._path, self._encoding) as file:

            def lines() -> Iterator[str]:
                nonlocal offset
                while line := file.readline(LONGEST + 1):
                    marked = offset == 0 and line.startswith(codecs.BOM_UTF8)
                    offset += len(line)
                    yield line.removeprefix(codecs.BOM_UTF8 * marked).decode("utf-8", "surrogateescape")

            try:
                rows = csv.reader(lines(), delimiter=self._delimiter, strict=True)
                for cells in rows:
                    if cells:
                        yield line, cells, offset
                    line = rows.line_num + 1
            except csv.Error as error:
                why = f"no table of cells between {self._delimiter!r}: {error}, before byte {offset:,}"
                raise self._no_table(f"{self._path}: {why}") from None


class Json(FileTable):
    """Objects of a .json: those of an array, or one after another."""

    def _require_fields(self) -> None:
        _, record, _ = next(self.records(), (0, {}, 0))
        if not isinstance(record, dict):
            raise self._no_table(f"{self._path}: not records but other JSON")
        if record and not any(name in record for name in self._fields.columns(record)):
            self._require_columns(list(map(str, record)))

    def records(self) -> Iterator[tuple[int, Any, float]]:
        """DataError where it is not JSON."""
        parse = json.JSONDecoder().raw_decode
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        text, at, offset, number, array = "", 0, 0, 0, ""  # array: the bracket that was read last
        with reading(self._path, self._encoding) as file:
            while True:
                block = file.read(max(PIECE, len(text)))
                text, at = text[at:] + decoder.decode(block, final=not block), 0
                while at < len(text):
                    between = _BETWEEN.match(text, at)
                    assert between is not None
                    try:
                        value, end = parse(text, between.end())
                    except (ValueError, RecursionError):
                        break
                    array = (array + re.sub(r"[^\[\]]", "", between[0]))[-1:]
                    offset += len(text[at:end].encode("utf-8", "surrogateescape"))
                    at, number = end, number + 1
                    yield number, value, self._at(offset)
                rest = _BETWEEN.sub("", text[at:], count=1)
                if len(text) - at > LONGEST or (not block and rest):
                    raise self._no_table(f"{self._path}: no JSON from byte {offset:,} on")
                if not block:
                    break
        if array == "[" and "]" not in text[at:]:
            raise DataError(f"{self._path}: ends inside its array, at byte {offset:,}")


_BETWEEN = re.compile(r"[\s,\[\]\ufeff]*")
