"""Tables by the names of their files: those of `records`, rows of .csv and .tsv, and the objects of a .json."""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perspectron.data.corpus import Corpus, Place, Shares, facts, fingerprint
from perspectron.data.reading import COMPRESSED, PIECE, examined, reading, refusal
from perspectron.data.records import (
    LINES,
    LONGEST,
    PARQUET,
    Fields,
    JsonLines,
    Parquet,
    Records,
    Row,
    Table,
    require_columns,
    row_of,
)
from perspectron.util.errors import DataError

LOOSE = (".csv", ".tsv", ".json")
"""Extensions of tables that may as well be texts: in a folder they are, unless they have the field with the text."""
DELIMITERS = ",;\t|"
AS_TEXT = "; to train on the file as it stands, name it {}.txt"


def is_table(name: str, *, loose: bool = True) -> bool:
    """True if a file of this name has records. loose: also one in LOOSE."""
    if not loose:
        return name.endswith((*LINES, PARQUET))
    return name.lower().endswith((*LINES, PARQUET)) or _extension(name) in LOOSE


def _extension(name: str) -> str:
    """The extension, in lower case and without that of a compression."""
    return Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def table_of(path: Path, name: str, fields: Fields, encoding: str = "") -> Table:
    """The records of a file. DataError for a table without a column that is asked for."""
    if name.lower().endswith(PARQUET):
        if encoding:
            raise DataError(
                f"{path}: encoding is {encoding}, must be left out: parquet has strings, not bytes"
            )
        return Parquet(path, name, fields)
    if name.lower().endswith(LINES):
        return JsonLines(path, name, fields, encoding)
    if _extension(name) == ".json":
        return Json(path, name, fields, encoding)
    return Csv(path, name, fields, encoding)


def open_table(path: Path, shares: Shares, fields: Fields, encoding: str = "") -> Corpus:
    """The records of one file."""
    try:
        return _opened(path, shares, fields, encoding)
    except DataError:
        if not path.name.lower().endswith(PARQUET) and (text := examined(path, encoding)).encoding:
            raise DataError(refusal(path, text)) from None
        raise


def _opened(path: Path, shares: Shares, fields: Fields, encoding: str) -> Corpus:
    table = table_of(path, path.name, fields, encoding)
    kind = {JsonLines: "jsonl by text", Parquet: "parquet by text"}.get(type(table), "table by text")
    lines = [
        str(path.resolve()),
        str(shares),
        *fields.facts,
        facts(path.name, path),
        *filter(None, [encoding]),
    ]
    return Records(str(path), fingerprint(kind, lines), shares, [table], fields).settle()


class Csv:
    """Rows of a text table whose first line names its columns: by tabs in a .tsv, else by the delimiter that this line
    has most of."""

    def __init__(self, path: Path, name: str, fields: Fields, encoding: str = "") -> None:
        self.name, self.size, self.identity = name, float(path.stat().st_size), facts(name, path)
        self._path, self._fields, self._encoding = path, fields, encoding
        self._delimiter, self._columns, self._first = "\t", list[str](), 0
        if _extension(name) != ".tsv":
            with reading(path, encoding) as file:
                lines = iter(lambda: file.readline(PIECE), b"")
                head = next((line for line in lines if line.strip()), b"").decode("utf-8", "replace")
            self._delimiter = max(DELIMITERS, key=head.count)
        filled = ((cells, at) for cells, at in self._cells(0) if cells)
        self._columns, self._first = next(filled, ([], 0))
        try:
            require_columns(str(path), self._columns, fields)
        except DataError as error:
            raise DataError(f"{error}{AS_TEXT.format(path)}") from None

    def rows(self, after: Place) -> Iterator[Row]:
        offset, number = after or (self._first, 0)
        for cells, at in self._cells(offset):
            if not cells:  # an empty line
                continue
            number += 1
            read = 0.0 if self._path.suffix in COMPRESSED else float(at)
            row = row_of(
                number, dict(zip(self._columns, cells, strict=False)), self._fields, [at, number], read
            )
            if len(cells) != len(self._columns):
                why = f"{len(cells)} cells where the first line has {len(self._columns)}"
                row = row._replace(text=None, prompt="", why=why)
            yield row

    def _cells(self, offset: int) -> Iterator[tuple[list[str], int]]:
        """(the cells of a row, the offset after it) from an offset on. DataError for quotes that do not end."""
        at = offset
        csv.field_size_limit(LONGEST)
        with reading(self._path, self._encoding) as file:
            file.seek(offset)

            def lines() -> Iterator[str]:
                nonlocal at
                while line := file.readline(LONGEST + 1):
                    marked = at == 0 and line.startswith(codecs.BOM_UTF8)
                    at += len(line)
                    yield line.removeprefix(codecs.BOM_UTF8 * marked).decode("utf-8", "surrogateescape")

            try:
                for cells in csv.reader(lines(), delimiter=self._delimiter, strict=True):
                    yield cells, at
            except csv.Error as error:
                raise DataError(
                    f"{self._path}: no table of cells between {self._delimiter!r}: {error}, before byte {at:,}"
                    f"{AS_TEXT.format(self._path)}"
                ) from None


class Json:
    """Objects of a .json: those of an array, or one after another."""

    def __init__(self, path: Path, name: str, fields: Fields, encoding: str = "") -> None:
        self.name, self.size, self.identity = name, float(path.stat().st_size), facts(name, path)
        self._path, self._fields, self._encoding = path, fields, encoding
        with reading(path, encoding) as file:
            self._array = file.read(PIECE).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
        for record, _ in self._values(0):
            if not isinstance(record, dict):
                raise DataError(f"{path}: not records but other JSON{AS_TEXT.format(path)}")
            if not any(name in record for name in fields.names):
                there = list(map(str, record))
                try:
                    require_columns(str(path), there, fields)
                except DataError as error:
                    raise DataError(f"{error}{AS_TEXT.format(path)}") from None
            break

    def rows(self, after: Place) -> Iterator[Row]:
        offset, before = after or (0, 0)
        for number, (record, at) in enumerate(self._values(offset), before + 1):
            read = 0.0 if self._path.suffix in COMPRESSED else float(at)
            yield row_of(number, record, self._fields, [at, number], read)

    def _values(self, offset: int) -> Iterator[tuple[Any, int]]:
        """(a value, the offset after it) from an offset on. DataError where it is not JSON."""
        decoder, parse = (
            codecs.getincrementaldecoder("utf-8")("surrogateescape"),
            json.JSONDecoder().raw_decode,
        )
        text, at, closed = "", 0, False
        with reading(self._path, self._encoding) as file:
            file.seek(offset)
            block = b"start"
            while block:
                block = file.read(max(PIECE, len(text)))
                text, at = text[at:] + decoder.decode(block, final=not block), 0
                while at < len(text):
                    between = _BETWEEN.match(text, at)
                    assert between is not None
                    closed |= "]" in between[0]
                    try:
                        value, end = parse(text, between.end())
                    except (ValueError, RecursionError):
                        break
                    offset += len(text[at:end].encode("utf-8", "surrogateescape"))
                    at = end
                    yield value, offset
                if len(text) - at > LONGEST or (not block and _BETWEEN.sub("", text[at:], 1)):
                    raise DataError(
                        f"{self._path}: no JSON from byte {offset:,} on{AS_TEXT.format(self._path)}"
                    )
        if self._array and not closed:
            raise DataError(f"{self._path}: ends inside its array, at byte {offset:,}")


_BETWEEN = re.compile(r"[\s,\[\]\ufeff]*")
