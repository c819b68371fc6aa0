"""Prefixes on disk: files of states, and their index, a database that several processes may share.

Shapes: D model width.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as File

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from perspectron.decode.places import Path
from perspectron.model.state import LMState, Stateful, read_state, write_state
from perspectron.util.config import require
from perspectron.util.errors import PerspectronError, StateError, StorageError
from perspectron.util.files import locked, remove, sweep, temporary_beside
from perspectron.util.schema import checked

INDEX = "index.sqlite"
AT_ONCE = 500  # cells of one query
PATIENCE = 30.0  # seconds to wait for another process that writes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of what a head reads
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  key TEXT PRIMARY KEY, parent TEXT NOT NULL, bytes INTEGER NOT NULL, seconds REAL NOT NULL,
  clock REAL NOT NULL, worth REAL NOT NULL, cell TEXT NOT NULL, length INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_worth ON entries (worth);
CREATE INDEX IF NOT EXISTS by_parent ON entries (parent);
CREATE INDEX IF NOT EXISTS by_cell ON entries (cell);
CREATE TABLE IF NOT EXISTS clock (time REAL NOT NULL);
"""
VERSION = 2  # of the schema; an index of another is begun anew


@dataclass(frozen=True)
class Prefix:
    """A stored state, as a copy of one row. tokens: how many were read. last_1D: what the head reads after them.
    seconds: what reading them took."""

    tokens: int
    state: LMState
    last_1D: Tensor
    seconds: float


class _Extra(Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds beside the state. last: `Prefix.last_1D` in float64, and its dtype."""

    key: str
    tokens: int
    seconds: float
    last: list[float]
    dtype: str


@dataclass
class Counters:
    """hits, misses: of `find`. tokens_saved: not read again. evicted: entries that made room. damaged: files that were
    not what they should be, and were dropped. failed: writes and reads that the disk or the index refused."""

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0


class Disk:
    """Files of states and their index. An entry is a file first and a row after it, both within one transaction of
    which there is one at a time among all processes: a file without a row is what a killed one left, and is deleted by
    whoever opens the folder next."""

    def __init__(self, folder: File, budget: int, model: Stateful, counters: Counters) -> None:
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
        except sqlite3.DatabaseError:  # not an index, or a damaged one: what it led to is computed again
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
            if index.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                index.executescript(f"DROP TABLE IF EXISTS entries; PRAGMA user_version = {VERSION};")
            index.executescript(SCHEMA)
            index.execute("BEGIN IMMEDIATE")
            known = {f"{key}.state" for (key,) in index.execute("SELECT key FROM entries")}
            for path in self.folder.glob("*.state"):
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

    def get(self, key: str) -> Prefix | None:
        """The state of a key. What is on disk is believed only where its digest, its key and its shapes are right."""
        with self._transaction() as index:
            if (
                index is None
                or index.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is None
            ):
                return None
        prefix = self._read(key)
        with self._transaction(write=True) as index:
            if index is not None and prefix is None:
                self._forget(index, key)
            elif index is not None:
                index.execute(
                    "UPDATE entries SET worth = worth - clock + ?1, clock = ?1 WHERE key = ?2",
                    (self._now(index), key),
                )
        return prefix

    def lengths(self, path: Path) -> dict[bytes, list[int]]:
        """By cell of a text, the tokens of it after which states are kept, of whichever text."""
        with self._transaction() as index:
            return {} if index is None else _lengths(index, path)

    def put(self, path: Path, prefix: Prefix) -> None:
        """Write an entry, of a place in a text, and make room for it."""
        key = path.key(prefix.tokens).hex()
        evicted, (cell, length), file = list[str](), path.place(prefix.tokens), self._file(key)
        with self._transaction(write=True) as index:
            if index is None or index.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone():
                return
            parent, before = self._nearest(index, path, prefix.tokens)
            try:
                size = self._write(file, key, prefix)
            except (OSError, PerspectronError):
                self.counters.failed += 1
                return
            clock = self._now(index)
            worth = clock + saved(prefix.seconds, before) / size
            index.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (key, parent, size, prefix.seconds, clock, worth, cell.hex(), length),
            )
            used = index.execute("SELECT total(bytes) FROM entries").fetchone()[0]
            while used > self.budget:
                least, size, worth = index.execute(
                    "SELECT key, bytes, worth FROM entries ORDER BY worth LIMIT 1"
                ).fetchone()
                self._forget(index, least)
                index.execute("DELETE FROM clock")
                index.execute("INSERT INTO clock VALUES (?)", (max(worth, clock),))
                evicted.append(least)
                used -= size
        for gone in evicted:
            self.counters.evicted += 1
            remove(self._file(gone))

    def _file(self, key: str) -> File:
        return self.folder / f"{key}.state"

    def _write(self, path: File, key: str, prefix: Prefix) -> int:
        """Write a file without waiting for the disk: a loss of power may damage it, which its digest shows."""
        last_1D = prefix.last_1D
        extra = _Extra(key, prefix.tokens, prefix.seconds, last_1D.double()[0].tolist(), str(last_1D.dtype))
        temporary = temporary_beside(path)
        try:
            write_state(temporary, prefix.state, self.model, extra=msgspec.to_builtins(extra))
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                remove(temporary)
        return path.stat().st_size

    def _read(self, key: str) -> Prefix | None:
        path = self._file(key)
        try:
            return self._prefix(path, key)
        except PerspectronError:
            if path.exists():  # else another process has evicted it meanwhile
                self.counters.damaged += 1
                remove(path)
            return None

    def _prefix(self, path: File, key: str) -> Prefix:
        """The prefix that a file holds. StateError: damaged, or not one row of this key."""
        state, values = read_state(path, self.model)
        extra = checked(values, _Extra, StateError, path)
        dtype = next((dtype for dtype in DTYPES if str(dtype) == extra.dtype), None)
        if (
            extra.key != key
            or state.batch_size != 1
            or len(extra.last) != self.model.config.d_model
            or not dtype
        ):
            raise StateError(f"{path}: not a prefix of this key")
        last_1D = torch.tensor([extra.last], dtype=torch.float64).to(dtype)
        return Prefix(extra.tokens, state, last_1D, max(extra.seconds, 0.0))

    def _nearest(self, index: sqlite3.Connection, path: Path, tokens: int) -> tuple[str, float]:
        """The longest entry before a place of a text, and its seconds."""
        there = _lengths(index, path)
        for number in range((tokens - 1) // path.chunk, -1, -1):
            for length in sorted(there.get(path.cells[number], ()), reverse=True):
                if (at := number * path.chunk + length) < tokens:
                    key = path.key(at).hex()
                    row = index.execute("SELECT seconds FROM entries WHERE key = ?", (key,)).fetchone()
                    if row is not None:
                        return key, row[0]
        return "", 0.0

    def _forget(self, index: sqlite3.Connection, key: str) -> None:
        """Delete a row; those that would have been computed from it are now computed from what it was."""
        row = index.execute("SELECT parent FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return
        index.execute("DELETE FROM entries WHERE key = ?", (key,))
        before = index.execute("SELECT seconds FROM entries WHERE key = ?", row).fetchone()
        index.execute(
            "UPDATE entries SET parent = ?, worth = clock + max(seconds - ?, 0) / bytes WHERE parent = ?",
            (row[0], before[0] if before else 0.0, key),
        )

    @staticmethod
    def _now(index: sqlite3.Connection) -> float:
        row = index.execute("SELECT time FROM clock").fetchone()
        return 0.0 if row is None else float(row[0])

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[sqlite3.Connection | None]:
        """A transaction; None where the index refuses one. What fails within is undone, and counted."""
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


def _lengths(index: sqlite3.Connection, path: Path) -> dict[bytes, list[int]]:
    found = dict[bytes, list[int]]()
    for start in range(0, len(path.cells), AT_ONCE):
        cells = [cell.hex() for cell in path.cells[start : start + AT_ONCE]]
        marks = ", ".join("?" * len(cells))
        rows = index.execute(f"SELECT DISTINCT cell, length FROM entries WHERE cell IN ({marks})", cells)
        for cell, length in rows:
            found.setdefault(bytes.fromhex(cell), []).append(int(length))
    return found


def saved(seconds: float, before: float) -> float:
    """Seconds that an entry saves; the clock is coarse, and no state is worth nothing."""
    return max(seconds - before, 1e-9)
