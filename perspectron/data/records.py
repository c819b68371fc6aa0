"""Corpora of records, each with one text, or with a prompt and a completion."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from perspectron.data import chats
from perspectron.data.corpus import RULE, Corpus, Document, Shares, SplitName, share_of
from perspectron.data.template import Messages, Template, question
from perspectron.util.errors import ConfigError, DataError

SHOWN = 8
"""Most fields of a record that a message names."""
TALK = "train reads them with --template plain, or a file with one"
NOT_UTF8 = "not UTF-8; --encoding reads others"
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class Sample(NamedTuple):
    """The contents of a record. key: text whose hash decides its split. texts: (what is only read, what is learned, the
    messages that the template made the former of); none for an empty record."""

    key: str
    texts: tuple[tuple[str, str, Messages], ...]


class Unreadable(str):
    """Stands in for a record that cannot be read; its text says why."""


@dataclass(frozen=True)
class Fields:
    """The fields of a record that are its text: the string under `text`, or with a template those under `prompt`,
    which becomes a user's message, and `completion`, or a conversation (`perspectron.data.chats`)."""

    text: str = "text"
    template: Template | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.text,) if self.template is None else ("prompt", "completion")

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that a fingerprint depends on."""
        return self.names if self.template is None else (*self.names, f"rule {RULE}", self.template.text)

    def __str__(self) -> str:
        return " and ".join(map(repr, self.names))

    def columns(self, there: Collection[str]) -> tuple[str, ...]:
        """The columns that are read, of those that are there."""
        talk = [name for name in chats.KEYS if name in there] if self.template else []
        talk += [name for name in chats.BESIDE if talk and name in there]
        pair = self.names if not talk or all(name in there for name in self.names) else ()
        return (*talk, *pair)

    def of(self, record: Any) -> Sample | Unreadable:
        """The contents of a record, or why it is not a valid one."""
        if isinstance(record, Unreadable):
            return record
        if not isinstance(record, dict):
            return Unreadable("no objects")
        if self.template is not None:
            try:
                if (said := chats.of(record)) is not None:
                    return self._talk(said, self.template)
            except chats.NoTalk as error:
                return Unreadable(error)
        for name in self.names:
            talk = next((key for key in chats.KEYS if key in record), None)
            if name not in record and talk is not None:
                return Unreadable(
                    f"no {name!r} but {talk!r}; {TALK}" if self.template is None else f"{talk!r} is no list"
                )
            if name not in record:
                there = ", ".join(map(str, list(record)[:SHOWN])) or "nothing"
                return Unreadable(f"no {name!r}, they have {there}")
            if not isinstance(record[name], str):
                return Unreadable(f"{name!r} is no string")
        texts = [record[name] for name in self.names]
        if why := _no_text(texts, str(self)):
            return Unreadable(why)
        if self.template is None:
            return Sample(texts[0], (("", texts[0], ()),) if texts[0] else ())
        if not texts[1]:
            return Sample("", ())
        try:
            prompt = self.template.question(texts[0])
        except ConfigError as error:
            return Unreadable(f"the chat template fails on them: {error}")
        pair = [*question(texts[0]), {"role": "assistant", "content": texts[1]}]
        return Sample(_key(pair), ((prompt, texts[1], pair[:1]),))

    def _talk(self, said: list[chats.Message], template: Template) -> Sample | Unreadable:
        if why := _no_text([message["content"] for message in said], "a message"):
            return Unreadable(why)
        return Sample(_key(said), tuple(chats.answers(said, template)))


def _key(said: Messages) -> str:
    """The key of messages as they are: what a template makes of them may contain the day's date."""
    return json.dumps([[message["role"], message["content"]] for message in said])


def _no_text(texts: list[str], where: str) -> str:
    """What makes strings no texts; empty if they are."""
    if any(map(_ESCAPED_BYTE.search, texts)):
        return NOT_UTF8
    return "" if all(map(_valid, texts)) else f"a NUL or broken characters in {where}"


def _valid(text: str) -> bool:
    """True if a string is text: without a NUL, and without half of a surrogate pair, which JSON can spell and UTF-8
    cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


class Table(Protocol):
    """Records in order. size: bytes of its file, for progress; 0 if unknown."""

    name: str
    size: float

    def records(self) -> Iterator[tuple[int, Any, float]]:
        """(its line or row, a record or Unreadable, how much of `size` was read by then). DataError: it can no longer
        be read."""


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

    @property
    def size(self) -> float:
        return sum(table.size for table in self._tables)

    def settle(self) -> "Records":
        """Make sure every split has a record: read until each has one, or else move those nearest by hash. DataError:
        there are fewer different records than splits."""
        seen: list[float] = []  # hashes, equal for equal texts
        need, splits = len(self.splits), set[SplitName]()
        for share in self._shares_of_texts():
            splits.add(self.shares.of(share))
            if len(splits) == need:
                return self
            seen = sorted({*seen, share})
            trained = [one for one in seen if self.shares.of(one) == "train"]
            kept = {*seen[: need - 1], *trained[:1], seen[-1]}  # the first to train on may have to be dev
            seen = [one for one in seen if one in kept]
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
        next(self._shares_of_texts())

    def _shares_of_texts(self) -> Iterator[float]:
        """The hash of each record with text. DataError: there is none."""
        why, empty = "", True
        for table in self._tables:
            for _, record, _ in table.records():
                sample = self._fields.of(record)
                if isinstance(sample, Unreadable):
                    why = why or sample
                elif sample.texts:
                    empty = False
                    yield share_of(sample.key.encode())
        if empty:
            because = f" ({why})" if why else ""
            raise DataError(f"{self.source}: no record with text under {self._fields}{because}")

    def _stream(self, split: SplitName) -> Iterator[Document]:
        tally = self._tallies[split]
        whole, before = self.size or 1, 0.0
        for table in self._tables:
            kind = f"records of {table.name}"
            for number, record, at in table.records():
                name, sample = f"{table.name}:{number}", self._fields.of(record)
                key = name if isinstance(sample, Unreadable) else sample.key
                share = share_of(key.encode("utf-8", "surrogateescape"))
                if self._moved.get(share, self.shares.of(share)) != split:
                    continue
                if isinstance(sample, Unreadable):
                    tally.skip(name, kind, sample)
                    continue
                tally.read[kind] += bool(sample.texts)
                done = min((before + at) / whole, 1.0)
                for prompt, text, asked in sample.texts:
                    yield Document(name, text, prompt, done, asked, self._fields.template)
            before += table.size


def require_columns(source: str, columns: Sequence[str], fields: Fields) -> None:
    """DataError, with the columns that a table has, unless it has those with the text."""
    for name in fields.columns(columns):
        if name not in columns:
            there = ", ".join(one if one == one.strip() else repr(one) for one in columns) or "none"
            alike = {one.strip(): one for one in columns}
            talk = name == Fields.text and any(key in columns for key in chats.KEYS)
            how = (
                f"; {TALK}"
                if talk
                else f"; name the one with the text: {source}#{alike.get(name, columns[0])}"
                if columns
                else ""
            )
            raise DataError(
                f"{source}: no column {name!r}, its columns are {there}{'' if fields.template else how}"
            )
        if (many := columns.count(name)) > 1:
            raise DataError(f"{source}: {many} columns are called {name!r}, must be one")
