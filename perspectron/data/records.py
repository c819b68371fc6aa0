"""Corpora of records: lines of JSON and rows of parquet, each with one text, or with a prompt and a completion."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from perspectron.data.corpus import Corpus, Document, Label, Place, Shares, SplitName, facts, share_of
from perspectron.data.pages import widest
from perspectron.data.reading import COMPRESSED, library, reading
from perspectron.data.template import Template
from perspectron.util.errors import DataError
from perspectron.util.files import open_file

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = ".parquet"
STRINGS = ("string", "large_string", "string_view", "null")
"""Types of a column with texts, as pyarrow names them."""
ROWS, AT_ONCE = 256, 1 << 26
"""Rows of a table, and bytes of them, that are decoded at once."""
LONGEST = 1 << 26
"""Bytes of a record in text, or of a page of a parquet file."""
SHOWN = 8
"""Fields of a record that are named."""
NO_UTF8 = "not UTF-8; --encoding reads others"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are its text: the string under `text`, or with a template those under `prompt`,
    which becomes a user's message, and `completion`."""

    text: str = "text"
    template: Template | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.text,) if self.template is None else ("prompt", "completion")

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that a fingerprint depends on."""
        return self.names if self.template is None else (*self.names, self.template.text)

    def __str__(self) -> str:
        return " and ".join(map(repr, self.names))

    def of(self, record: Any) -> tuple[str, str] | None:
        """(what is only read, what is learned) of a record; None where it is not a valid one."""
        found = [record.get(name) for name in self.names] if isinstance(record, dict) else []
        texts = [text for text in found if isinstance(text, str) and _valid(text)]
        if not texts or len(texts) < len(self.names):
            return None
        if self.template is None:
            return "", texts[0]
        return (self.template.question(texts[0]), texts[1]) if texts[1] else ("", "")

    def why_not(self, record: Any) -> str:
        """The reason why a record is not valid."""
        if not isinstance(record, dict):
            return "no objects"
        for name in self.names:
            if name not in record:
                there = ", ".join(map(str, list(record)[:SHOWN])) or "nothing"
                return f"no {name!r}, they have {there}"
            if not isinstance(record[name], str):
                return f"{name!r} is no string"
        if any(_NOT_UTF8.search(record[name]) for name in self.names):
            return NO_UTF8
        return f"a NUL or broken characters in {self}"


class Row(NamedTuple):
    """number: of the record, from 1. text: what is learned, after `prompt`; None for no valid record. key: by which it
    goes to a split. place: where reading goes on after it. at: bytes of the table up to here."""

    number: int
    prompt: str
    text: str | None
    key: bytes
    place: Place
    at: float
    why: str = ""


class Table(Protocol):
    """Records in order. size: bytes, for progress. identity: what a fingerprint follows."""

    name: str
    size: float
    identity: str

    def rows(self, after: Place) -> Iterator[Row]:
        """The records after a place, or all of them. DataError where they can no longer be read."""


class Records(Corpus):
    """Records of tables. They go to a split by a hash of their text, so that equal ones never stand on both sides."""

    def __init__(
        self, source: str, identity: str, shares: Shares, tables: Sequence[Table], fields: Fields
    ) -> None:
        super().__init__(source, identity, shares)
        self.completions = fields.template is not None
        self._tables = tables
        self._fields = fields
        self._moved: dict[float, SplitName] = {}

    def settle(self) -> "Records":
        """Make sure every split has a record: read until all are seen, or move those nearest in hash. DataError: there
        are fewer different records than splits."""
        seen: list[float] = []  # shares, of which equal texts have equal ones
        need, found, why = len(self.splits), set[SplitName](), ""
        for table in self._tables:
            for row in table.rows(None):
                if not row.text:
                    why = why or row.why
                    continue
                share = share_of(row.key)
                found.add(self.shares.of(share))
                if len(found) == need:
                    return self
                seen = sorted({*seen, share})
                trained = [one for one in seen if self.shares.of(one) == "train"]
                kept = {*seen[: need - 1], *trained[:1], seen[-1]}  # the first to train on may have to be dev
                seen = [one for one in seen if one in kept]
        if not seen:
            raise self._without(why)
        if len(seen) < need:
            counted = f"{len(seen)} record{'s' * (len(seen) > 1)} with text, need at least {need}"
            raise DataError(f"{self.source}: {counted}, one for each of {', '.join(self.splits)}")
        self._moved = {seen[0]: "heldout", seen[-1]: "train"}
        if "dev" in self.splits and all(self._moved.get(one, self.shares.of(one)) != "dev" for one in seen):
            rest = [one for one in seen[1:-1] if self.shares.of(one) == "train"]
            self._moved[(rest or seen[1:])[0]] = "dev"
        return self

    def require_text(self) -> None:
        """DataError unless a record has text under the fields."""
        rows = itertools.chain.from_iterable(table.rows(None) for table in self._tables)
        why = ""
        for row in rows:
            if row.text:
                return
            why = why or row.why
        raise self._without(why)

    def _without(self, why: str) -> DataError:
        return DataError(
            f"{self.source}: no record with text under {self._fields}{f' ({why})' if why else ''}"
        )

    def _stream(self, split: SplitName, after: Place) -> Iterator[Document]:
        first, inner = after or (0, None)
        whole = sum(table.size for table in self._tables) or 1
        before = sum(table.size for table in self._tables[:first])
        for i, table in enumerate(self._tables[first:], first):
            for row in table.rows(inner):
                share = share_of(row.key)
                if self._moved.get(share, self.shares.of(share)) != split:
                    continue
                name, label = f"{table.name}:{row.number}", Label("record", table.name)
                if row.text is None:
                    self._skip(split, name, label, row.why)
                elif row.text:
                    self._read[split][label] += 1
                    read = min((before + row.at) / whole, 1.0)
                    yield Document(name, row.text, row.prompt, [i, row.place], read)
            before, inner = before + table.size, None


class JsonLines:
    """One JSON object on each line of a file, plain or compressed."""

    def __init__(self, path: Path, name: str, fields: Fields, encoding: str = "") -> None:
        self.name, self.size, self.identity = name, float(path.stat().st_size), facts(name, path)
        self._path, self._fields, self._encoding = path, fields, encoding

    def rows(self, after: Place) -> Iterator[Row]:
        offset, number = after or (0, 0)
        with reading(self._path, self._encoding) as file:
            file.seek(offset)
            while line := file.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    raise DataError(
                        f"{self._path}: line {number} is longer than {LONGEST >> 20} MiB, a record's most"
                    )
                offset += len(line)
                if not line.strip():
                    continue
                record = _parsed(line)
                at = 0.0 if self._path.suffix in COMPRESSED else float(offset)
                row = row_of(number, record, self._fields, [offset, number], at)
                if row.text is None:
                    row = row._replace(key=line, why=_why_no_json(line) if record is None else row.why)
                yield row


class Parquet:
    """Rows of a parquet file, a group at a time."""

    def __init__(self, path: Path, name: str, fields: Fields) -> None:
        self.name, self.identity = name, facts(name, path)
        self._path, self._fields = path, fields
        with self._opened() as (_, table):
            kinds = {column.name: column.type for column in table.schema_arrow}
            metadata = table.metadata
            self._sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        self.size = float(sum(self._sizes))
        require_columns(str(path), list(kinds), fields)
        for column in fields.names:
            if (
                str(getattr(kinds[column], "value_type", kinds[column])) not in STRINGS
                or kinds[column].num_fields
            ):
                raise DataError(
                    f"{path}: column {column!r} has values of type {kinds[column]}, must have strings"
                )

    @contextmanager
    def _opened(self) -> Iterator[tuple[BufferedReader, Any]]:
        """The file, and what pyarrow makes of it."""
        parquet, arrow = (library(name, self._path) for name in ("pyarrow.parquet", "pyarrow"))
        try:
            with open_file(self._path) as file:
                yield file, parquet.ParquetFile(file)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self._path}: cannot be read ({' '.join(str(error).split())})") from None

    def _at_once(self, file: BufferedReader, group: Any) -> int:
        """Rows of a group that are decoded at once. DataError for a page of more than LONGEST bytes: a value may be as
        large, and be that of every row."""
        chunks = [group.column(i) for i in range(group.num_columns)]
        width = sum(widest(file, chunk) for chunk in chunks if chunk.path_in_schema in self._fields.names)
        if width > LONGEST:
            raise DataError(
                f"{self._path}: a page of {width >> 20} MiB, must be ≤ {LONGEST >> 20}; write it with smaller ones"
            )
        return max(1, min(ROWS, AT_ONCE // max(width, 1)))

    def rows(self, after: Place) -> Iterator[Row]:
        first, done, number = after or (0, 0, 0)
        with self._opened() as (opened, file):
            for group in range(first, len(self._sizes)):
                count = file.metadata.row_group(group).num_rows
                at_once = self._at_once(opened, file.metadata.row_group(group))
                before, i = sum(self._sizes[:group]), 0
                for batch in file.iter_batches(
                    at_once, row_groups=[group], columns=list(self._fields.names), use_threads=False
                ):
                    skip = min(max(done - i, 0), batch.num_rows)
                    i += skip
                    for record in batch.slice(skip).to_pylist():
                        i, number = i + 1, number + 1
                        at = before + self._sizes[group] * i / count
                        yield row_of(number, record, self._fields, [group, i, number], at)
                done = 0


def row_of(number: int, record: Any, fields: Fields, place: Place, at: float) -> Row:
    """A record of a table as a row."""
    if (pair := fields.of(record)) is None:
        key = repr(record).encode("utf-8", "backslashreplace")
        return Row(number, "", None, key, place, at, fields.why_not(record))
    return Row(number, *pair, "".join(pair).encode(), place, at)


def require_columns(source: str, columns: Sequence[str], fields: Fields) -> None:
    """DataError, with the columns that a table has, unless it has those with the text."""
    for name in fields.names:
        if name not in columns:
            there = ", ".join(columns) or "none"
            how = f"; name the one with the text: {source}#{columns[0]}" if columns else ""
            raise DataError(
                f"{source}: no column {name!r}, its columns are {there}{'' if fields.template else how}"
            )
        if (many := columns.count(name)) > 1:
            raise DataError(f"{source}: {many} columns are called {name!r}, must be one")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


def _why_no_json(line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return NO_UTF8
    return "no JSON"


def _valid(text: str) -> bool:
    """True if a string is text: without a NUL, and without half of a surrogate pair, which JSON can spell and UTF-8
    cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
