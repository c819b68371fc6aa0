"""Prefixes on disk: files of states, and their index, a database that several processes may share.

The per-token parts of a state lie in pages: separate files, named by a digest of their content and of the page before,
so that states with a common beginning share them. `KEY.state` holds the rest of a state and the name of its last page,
which the index has, too.

Shapes: D model width.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from perspectron.decode.places import Path as Text
from perspectron.model.appended import Contents, PageError, page_ends, page_names, write
from perspectron.model.state import LMState, Stateful, packed, read_state
from perspectron.util.config import require
from perspectron.util.errors import PerspectronError, StateError, StorageError
from perspectron.util.files import locked, remove, sweep, temporary_beside
from perspectron.util.schema import checked

INDEX = "index.sqlite"
AT_ONCE = 500  # most cells in one query
PATIENCE = 30.0  # seconds to wait for another process that writes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of the head's input
VERSION = 4  # of the tables
PAGE = 128
"""Maximum number of cache slots in a page."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  key TEXT PRIMARY KEY, parent TEXT NOT NULL, bytes INTEGER NOT NULL, added INTEGER NOT NULL, seconds REAL NOT NULL,
  clock REAL NOT NULL, worth REAL NOT NULL, page TEXT NOT NULL,
  cell TEXT NOT NULL, length INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pages (
  name TEXT PRIMARY KEY, before TEXT NOT NULL, stop INTEGER NOT NULL, bytes INTEGER NOT NULL, uses INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_before ON pages (before);
CREATE INDEX IF NOT EXISTS by_worth ON entries (worth);
CREATE INDEX IF NOT EXISTS by_parent ON entries (parent);
CREATE INDEX IF NOT EXISTS by_cell ON entries (cell);
CREATE TABLE IF NOT EXISTS clock (time REAL NOT NULL);
"""


@dataclass(frozen=True)
class Prefix:
    """A copy of a stored state of one row. tokens: number of tokens read. last_1D: the head's input after the last one.
    seconds: time that reading them took."""

    tokens: int
    state: LMState
    last_1D: Tensor
    seconds: float


class _Extra(Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata in a prefix's file, beside the state. last: `Prefix.last_1D` in float64. dtype: its own dtype."""

    key: str
    tokens: int
    seconds: float
    last: list[float]
    dtype: str


@dataclass
class Counters:
    """Counters of a store. hits, misses: of `find`. tokens_saved: tokens not read again. evicted: entries removed to
    make room. damaged: files dropped for wrong content. failed: reads and writes that the disk or the index refused."""

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0


class Disk:
    """Files of states and their index. An entry's file is written first and its row in the index second, within one
    transaction; only one process at a time has such a transaction. A file without a row was left by a killed process,
    and is deleted by whoever opens the folder next."""

    def __init__(self, folder: Path, budget: int, model: Stateful, counters: Counters) -> None:
        require(budget >= 1, "disk_bytes", budget, "≥ 1")
        self.folder, self.budget, self.model, self.counters = folder, budget, model, counters
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: not a folder to write in ({error.strerror})") from None
        sweep(folder)
        try:
            with locked(folder, patience=PATIENCE):
                self._index = self._opened()
        except sqlite3.Error as error:
            raise StorageError(f"{folder}: no index can be kept there ({error})") from None

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # not an index, or a damaged one: its entries are computed again
            self.counters.damaged += 1
            for ending in ("", "-wal", "-shm"):
                remove(self.folder / (INDEX + ending))
            return self._open()

    def _open(self) -> sqlite3.Connection:
        path = self.folder / INDEX
        if path.is_symlink():
            raise StorageError(f"{path}: is a link; remove it, or name another folder")
        index = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            index.execute("PRAGMA journal_mode = WAL")
            index.execute("PRAGMA synchronous = NORMAL")
            index.execute("BEGIN IMMEDIATE")
            if index.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                for table in ("entries", "pages", "clock"):
                    index.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in SCHEMA.split(";"):
                index.execute(statement)
            index.execute(f"PRAGMA user_version = {VERSION}")
            known = {f"{key}.state" for (key,) in index.execute("SELECT key FROM entries")}
            known |= {f"{name}.page" for (name,) in index.execute("SELECT name FROM pages")}
            for path in (*self.folder.glob("*.state"), *self.folder.glob("*.page")):
                if path.name not in known:
                    remove(path)
            index.execute("COMMIT")
        except BaseException:
            index.close()
            raise
        return index

    def close(self) -> None:
        with self._lock:
            self._index.close()

    def get(self, text: Text, at: int) -> Prefix | None:
        """The state after the first `at` tokens of a text; None if there is none. Files are used only if their digests,
        their key and their shapes are right."""
        key, pages = text.key(at).hex(), None
        with self._transaction() as index:
            row = index and index.execute("SELECT page FROM entries WHERE key = ?", (key,)).fetchone()
            if index and row:
                pages = [self._page(name) for name, _ in self._chain(index, row[0])]
        if pages is None:
            return None
        prefix, bad = self._read(key, pages)
        with self._transaction(write=True) as index:
            if index is not None and bad is not None:
                self._drop_page(index, bad.stem)
            if index is not None and prefix is None:
                self._forget(index, key)
            elif index is not None:
                index.execute(
                    "UPDATE entries SET worth = worth - clock + ?1, clock = ?1 WHERE key = ?2",
                    (self._now(index), key),
                )
        return prefix

    def lengths(self, text: Text) -> dict[bytes, list[int]]:
        """By the key of each cell of a text: the offsets in tokens within it at which states of any text are stored."""
        found = dict[bytes, list[int]]()
        with self._transaction() as index:
            if index is not None:
                found = _lengths(index, text.cells)
        return found

    def put(self, text: Text, prefix: Prefix) -> None:
        """Store a prefix of a text as an entry, and evict others to make room for it."""
        key, (cell, length) = text.key(prefix.tokens).hex(), text.place(prefix.tokens)
        with self._transaction(write=True) as index:
            if index is None or index.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone():
                return
            parent, before, page = self._nearest(index, text, prefix.tokens)
            try:
                size, page, added = self._write(index, key, page, prefix)
            except (OSError, PerspectronError):
                self.counters.failed += 1
                return
            clock = self._now(index)
            worth = clock + saved(prefix.seconds, before) / (size + added)
            index.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (key, parent, size, added, prefix.seconds, clock, worth, page, cell.hex(), length),
            )
            self._use(index, page)
            if size + self._chained(index, page) > self.budget:  # it would have to go after all others
                self._forget(index, key)
            while self._used(index) > self.budget:
                least, worth = index.execute(
                    "SELECT key, worth FROM entries ORDER BY worth LIMIT 1"
                ).fetchone()
                self._forget(index, least)
                index.execute("DELETE FROM clock")
                index.execute("INSERT INTO clock VALUES (?)", (max(worth, clock),))
                self.counters.evicted += 1

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.state"

    def _page(self, name: str) -> Path:
        return self.folder / f"{name}.page"

    @staticmethod
    def _used(index: sqlite3.Connection) -> float:
        """Bytes of all files."""
        statement = "SELECT (SELECT total(bytes) FROM entries) + (SELECT total(bytes) FROM pages)"
        return float(index.execute(statement).fetchone()[0])

    @staticmethod
    def _chained(index: sqlite3.Connection, page: str) -> float:
        """Bytes of the chain of pages that ends with one."""
        statement = """WITH RECURSIVE chain(name, bytes, before) AS (
            SELECT name, bytes, before FROM pages WHERE name = ?
            UNION SELECT pages.name, pages.bytes, pages.before FROM pages JOIN chain ON pages.name = chain.before
        ) SELECT total(bytes) FROM chain"""
        return float(index.execute(statement, (page,)).fetchone()[0])

    @staticmethod
    def _chain(index: sqlite3.Connection, name: str) -> list[tuple[str, int]]:
        """The chain of pages that ends with one, in order: their names, and the slot at which each ends."""
        found = list[tuple[str, int]]()
        while name and (
            row := index.execute("SELECT stop, before FROM pages WHERE name = ?", (name,)).fetchone()
        ):
            found.append((name, row[0]))
            name = row[1]
        return found[::-1]

    def _write(self, index: sqlite3.Connection, key: str, last: str, prefix: Prefix) -> tuple[int, str, int]:
        """Write an entry's file and those of its pages that do not exist yet: (bytes of the file, name of the last
        page, bytes of the new pages). last: last page of a state that this one may continue. The files are not synced:
        a loss of power may damage them, which their digests show."""
        path = self._path(key)
        contents = packed(path, prefix.state, self.model, extra_of(key, prefix))
        added, made = 0, list[Path]()
        own, new = pages_of(contents, self._chain(index, last))
        page, start = own[-1] if own else ("", 0)
        index.execute("SAVEPOINT entry")
        try:
            for name, stop in new:
                if index.execute("SELECT 1 FROM pages WHERE name = ?", (name,)).fetchone() is None:
                    made.append(self._page(name))
                    about = {field: contents.header[field] for field in ("format", "model")}
                    own_part = replace(contents, header=about, tensors={}, slots=stop)
                    size = self._put(made[-1], own_part, start)
                    index.execute("INSERT INTO pages VALUES (?, ?, ?, ?, 0)", (name, page, stop, size))
                    self._use(index, page)
                    added += size
                page, start = name, stop
            contents = replace(contents, header=contents.header | {"page": page})
            return self._put(path, contents, start), page, added
        except (OSError, PerspectronError):
            index.execute("ROLLBACK TO entry")
            for written in made:
                with contextlib.suppress(OSError):
                    remove(written)
            raise

    @staticmethod
    def _put(path: Path, contents: Contents, start: int) -> int:
        """Write a file of the slots from `start` on: its size in bytes."""
        temporary = temporary_beside(path)
        try:
            write(temporary, contents, path, start)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                remove(temporary)
        return path.stat().st_size

    @staticmethod
    def _use(index: sqlite3.Connection, page: str) -> None:
        index.execute("UPDATE pages SET uses = uses + 1 WHERE name = ?", (page,))

    def _read(self, key: str, pages: list[Path]) -> tuple[Prefix | None, Path | None]:
        """Read an entry's files: (the prefix, None if that fails; the path of a missing or damaged page, if any)."""
        path = self._path(key)
        try:
            return prefix_of(path, key, pages, self.model), None
        except PageError as error:
            if error.path.exists():
                self.counters.damaged += 1
            return None, error.path
        except PerspectronError:
            if path.exists():  # else another process has evicted it meanwhile
                self.counters.damaged += 1
                remove(path)
            return None, None

    def _nearest(self, index: sqlite3.Connection, text: Text, tokens: int) -> tuple[str, float, str]:
        """The longest stored prefix of a text before `tokens`: its key, seconds and last page; empty without one."""
        for last in range((tokens - 1) // text.chunk + 1, 0, -AT_ONCE):
            first = max(0, last - AT_ONCE)
            there = _lengths(index, text.cells[first:last])
            most, least = min(tokens, last * text.chunk) - 1, max(0, first * text.chunk - 1)
            for at in text.places(most, least, there) if there else ():
                key = text.key(at).hex()
                row = index.execute("SELECT seconds, page FROM entries WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    return key, *row
        return "", 0.0, ""

    def _forget(self, index: sqlite3.Connection, key: str) -> None:
        """Delete an entry and the pages that no other needs. Entries whose parent it was get its parent, from which
        they would now be computed, and are valued anew."""
        row = index.execute("SELECT parent, page FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return
        index.execute("DELETE FROM entries WHERE key = ?", (key,))
        remove(self._path(key))
        page = row[1]
        while page:
            index.execute("UPDATE pages SET uses = uses - 1 WHERE name = ?", (page,))
            own = index.execute("SELECT before, uses FROM pages WHERE name = ?", (page,)).fetchone()
            if own is None or own[1] > 0:
                break
            index.execute("DELETE FROM pages WHERE name = ?", (page,))
            remove(self._page(page))
            page = own[0]
        before = index.execute("SELECT seconds FROM entries WHERE key = ?", row[:1]).fetchone()
        index.execute(
            "UPDATE entries SET parent = ?, worth = clock + max(seconds - ?, 0) / (bytes + added) WHERE parent = ?",
            (row[0], before[0] if before else 0.0, key),
        )

    def _drop_page(self, index: sqlite3.Connection, name: str) -> None:
        """Delete a page that is damaged, with all entries that need it."""
        needing = """WITH RECURSIVE after(name) AS (
            VALUES (?) UNION SELECT pages.name FROM pages JOIN after ON pages.before = after.name
        ) SELECT key FROM entries WHERE page IN (SELECT name FROM after)"""
        for (key,) in index.execute(needing, (name,)).fetchall():
            self._forget(index, key)
        remove(self._page(name))

    @staticmethod
    def _now(index: sqlite3.Connection) -> float:
        row = index.execute("SELECT time FROM clock").fetchone()
        return 0.0 if row is None else float(row[0])

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[sqlite3.Connection | None]:
        """A transaction; None if the index refuses one. A failure rolls it back; errors of the index are counted."""
        with self._lock:
            try:
                self._index.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            except sqlite3.Error:
                self.counters.failed += 1
                yield None
                return
            try:
                yield self._index
                self._index.execute("COMMIT")
            except sqlite3.Error:
                self.counters.failed += 1
            finally:
                if self._index.in_transaction:
                    self._index.execute("ROLLBACK")


def _lengths(index: sqlite3.Connection, cells: Sequence[bytes]) -> dict[bytes, list[int]]:
    found = dict[bytes, list[int]]()
    for start in range(0, len(cells), AT_ONCE):
        some = [cell.hex() for cell in cells[start : start + AT_ONCE]]
        marks = ", ".join("?" * len(some))
        rows = index.execute(f"SELECT DISTINCT cell, length FROM entries WHERE cell IN ({marks})", some)
        for cell, length in rows:
            found.setdefault(bytes.fromhex(cell), []).append(int(length))
    return found


def pages_of(
    contents: Contents, known: Sequence[tuple[str, int]]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Names and ends of the pages of a state: those of `known`, the pages of another state of the text, up to one that
    differs because another document has begun since; and the new ones after them."""
    known = [(name, stop) for name, stop in known if stop <= contents.slots]
    own, (before, start) = list[tuple[str, int]](), ("", 0)
    for page, name in zip(known, page_names(contents, [stop for _, stop in known]), strict=True):
        if page[0] != name:
            break
        own.append(page)
        before, start = page
    stops = page_ends(start, contents.slots, PAGE)
    return own, list(zip(page_names(contents, stops, start, before), stops, strict=True))


def extra_of(key: str, prefix: Prefix) -> dict[str, Any]:
    """The metadata of a prefix's file, as JSON."""
    last_1D = prefix.last_1D
    extra = _Extra(key, prefix.tokens, prefix.seconds, last_1D.double()[0].tolist(), str(last_1D.dtype))
    made: dict[str, Any] = msgspec.to_builtins(extra)
    return made


def prefix_of(path: Path, key: str, pages: Sequence[Path], model: Stateful) -> Prefix:
    """Read a prefix's file. StateError: damaged, or not one row of this key. PageError: a page is damaged, or gone."""
    state, values = read_state(path, model, pages)
    extra = checked(values, _Extra, StateError, path)
    dtype = next((dtype for dtype in DTYPES if str(dtype) == extra.dtype), None)
    if extra.key != key or state.batch_size != 1 or len(extra.last) != model.config.d_model or not dtype:
        raise StateError(f"{path}: not a prefix of this key")
    last_1D = torch.tensor([extra.last], dtype=torch.float64).to(dtype)
    return Prefix(extra.tokens, state, last_1D, max(extra.seconds, 0.0))


def saved(seconds: float, before: float) -> float:
    """Seconds that an entry saves over the shorter one before it; always positive, since the clock is coarse."""
    return max(seconds - before, 1e-9)
