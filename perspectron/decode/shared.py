"""Prefixes in a store that servers of several machines share: objects without an index.

    prefixes/CELL/LENGTH.KEY.CHAIN.TIME   a state after LENGTH tokens of a cell, without its per-token parts
    chains/NAME                           the pages of the states whose last one is NAME, and the slot where each ends
    pages/NAME                            the per-token parts of a state, in at most PAGE slots

Pages are named by a digest of their content and of the page before, as in `decode.disk`, and are written before
whatever refers to them; writing one again writes the same bytes. States unused for longest go first; pages that nothing
refers to go GRACE seconds later, when reads and writes under way are done.
"""

import contextlib
import logging
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from perspectron.decode.disk import Counters, Prefix, extra_of, pages_of, prefix_of
from perspectron.decode.places import Path as Text
from perspectron.model.appended import PageError, write
from perspectron.model.state import Stateful, packed
from perspectron.util.config import require
from perspectron.util.errors import PerspectronError, StorageError
from perspectron.util.lease import Lease
from perspectron.util.objects import Objects

T = TypeVar("T")
GRACE = 120.0  # seconds for which a page may still be in use that nothing refers to
USED = 600.0  # seconds after which the use of a state is noted again
REST = 5.0  # seconds for which a store that has failed is left alone
WAITING = 256 << 20  # most bytes of states that wait to be written; beyond it the oldest are dropped
WINDOW = 32  # cells that are looked up at once
log = logging.getLogger("perspectron")


class _Entry:
    """A stored state, as its object's name describes it."""

    def __init__(self, cell: str, name: str, size: int) -> None:
        length, self.key, self.chain, used = name.split(".")
        self.length, self.used = int(length), int(used)
        self.name, self.size = f"prefixes/{cell}/{name}", size
        self.place = cell, self.length, self.key


class Shared:
    """States in a store of objects, within `budget` bytes. A failure is counted, and logged once; the store is then
    left alone for REST seconds, and texts are read by the model. A thread of its own writes the states."""

    def __init__(self, objects: Objects, budget: int, model: Stateful, counters: Counters) -> None:
        require(budget >= 1, "disk_bytes", budget, "≥ 1")
        self.objects, self.budget, self.model, self.counters = objects, budget, model, counters
        self._folder = tempfile.TemporaryDirectory(prefix="perspectron-")
        self._cells = dict[bytes, dict[tuple[int, str], _Entry]]()
        self._chains = dict[str, list[tuple[str, int]]]()
        self._unnamed = dict[str, float]()
        """Pages and chains that nothing refers to, and since when."""
        self._away = {"listed": 0.0, "read": 0.0, "written to": 0.0}
        self._written = float("inf")
        self._changed = threading.Condition()
        self._waiting, self._busy, self._stopped = deque[tuple[int, Callable[[], Any]]](), False, False
        self._thread = threading.Thread(target=self._writing, name="prefixes", daemon=True)
        self._thread.start()

    def close(self, patience: float = 10.0) -> None:
        """Write what waits, for at most `patience` seconds, and close the store."""
        self.flush(patience)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(patience)
        self._folder.cleanup()

    def flush(self, patience: float = 60.0) -> None:
        """Wait until everything is written, for at most `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, patience)

    def lengths(self, text: Text) -> Mapping[bytes, list[int]]:
        """By the key of each cell of a text: offsets in tokens at which states are stored, looked up when asked for."""
        return _Lengths(self, text)

    def get(self, text: Text, at: int) -> Prefix | None:
        """The state after the first `at` tokens of a text; None if there is none. Damaged objects are deleted."""
        cell, length = text.place(at)
        entry = self._found(cell).get((length, _short(text.key(at))))
        return None if entry is None else self._asked(lambda: self._get(entry, text.key(at)), None)

    def put(self, text: Text, prefix: Prefix) -> None:
        """Queue a state to be written."""
        own = replace(prefix, state=prefix.state.fork(), last_1D=prefix.last_1D.clone())
        self._soon(own.state.nbytes, lambda: self._put(text, own))

    def look_up(self, cells: Sequence[bytes]) -> None:
        """List the states that are stored in these cells."""
        folders, none = [f"prefixes/{_short(cell)}" for cell in cells], list[dict[str, int]]()
        listed = self._asked(lambda: self.objects.all_listed(folders), none, "listed") or [{} for _ in cells]
        if len(self._cells) > 4096:
            self._cells.clear()
        for cell, names in zip(cells, listed, strict=True):
            own = (entry for name, size in names.items() if (entry := _entry(_short(cell), name, size)))
            self._cells[cell] = {
                (entry.length, entry.key): entry for entry in sorted(own, key=attrgetter("used"))
            }

    def collect(self) -> None:
        """If over budget, delete the states unused for longest, and always the objects that nothing refers to any more;
        one server at a time does this."""
        lease = Lease(self.objects, "leases/collect", 4 * GRACE)
        if not lease.taken():
            return
        try:
            self._collect()
        finally:
            lease.let_go()

    def _found(self, cell: bytes) -> dict[tuple[int, str], _Entry]:
        if cell not in self._cells:
            self.look_up([cell])
        return self._cells.get(cell, {})

    def lengths_of(self, cell: bytes) -> list[int]:
        """The offsets in tokens at which states are stored in a cell that was looked up."""
        return list({length for length, _ in self._cells.get(cell, {})})

    # Reading

    def _get(self, entry: _Entry, key: bytes) -> Prefix | None:
        if (data := self.objects.get(entry.name)) is None:
            return None
        names = [name for name, _ in self._chain(entry.chain)]
        found = self.objects.gets([f"pages/{name}" for name in names])
        pages = {f"{name}.page": page for name, page in zip(names, found, strict=True) if page is not None}
        if len(pages) < len(names) or (entry.chain != "0" and not names):
            self.objects.delete(entry.name)  # of no use
            return None
        with self._files(pages | {"entry.state": data}) as paths:
            try:
                prefix = prefix_of(paths[-1], key.hex(), paths[:-1], self.model)
            except PerspectronError as error:
                self.counters.damaged += 1
                self.objects.delete(entry.name)
                if isinstance(error, PageError):  # whoever has the right one puts it again
                    self.objects.delete(f"pages/{error.path.stem}")
                return None
        if time.time() - entry.used > USED:
            self._soon(len(data), lambda: self._use(entry, data))
        return prefix

    def _use(self, entry: _Entry, data: bytes) -> None:
        """Note the use of a state, by a new name with the present time."""
        self._put_entry(entry.place, entry.chain, data)
        self.objects.delete(entry.name)

    def _chain(self, last: str) -> list[tuple[str, int]]:
        """The chain of pages that ends with `last`, and the slot at which each ends; empty if it is not known."""
        if last == "0":
            return []
        known = self._chains.get(last)  # the writing thread may delete it meanwhile
        if known is None:
            lines = (self.objects.get(f"chains/{last}") or b"").decode("ascii", "replace").splitlines()
            pairs = [(name, stop) for name, _, stop in (line.partition(" ") for line in lines)]
            if not all(len(name) == 32 and name.isalnum() and stop.isdecimal() for name, stop in pairs):
                return []
            if len(self._chains) > 4096:
                self._chains.clear()
            known = self._chains[last] = [(name, int(stop)) for name, stop in pairs]
        return known

    @contextlib.contextmanager
    def _files(self, contents: Mapping[str, bytes]) -> Iterator[list[Path]]:
        """Temporary files with these contents, by name, for functions that read files."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            paths = list[Path]()
            for name, data in contents.items():
                paths.append(Path(folder) / name)
                paths[-1].write_bytes(data)
            yield paths

    # Writing

    def _soon(self, size: int, work: Callable[[], Any]) -> None:
        with self._changed:
            self._waiting.append((size, work))
            while len(self._waiting) > 1 and sum(size for size, _ in self._waiting) > WAITING:
                self._waiting.popleft()
                self.counters.failed += 1
            self._changed.notify_all()

    def _writing(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                wait = GRACE if self._unnamed else None
                self._changed.wait_for(lambda: self._waiting or self._stopped, wait)
                if self._stopped:
                    return
                work = self._waiting.popleft()[1] if self._waiting else None
                self._busy = True
            try:
                if work is not None:
                    self._asked(work, None, "written to")
                if work is None or self._written > self.budget / 16:
                    self._asked(self.collect, None, "written to")
                    self._written = 0.0
            except Exception as error:
                self.counters.failed += 1
                log.warning("a state was not written to the store of prefixes: %s", error)

    def _put(self, text: Text, prefix: Prefix) -> None:
        (cell, length), key, begun = text.place(prefix.tokens), text.key(prefix.tokens), time.monotonic()
        self.look_up([cell])
        if (length, _short(key)) in self._found(cell):
            return
        path = Path(self._folder.name) / "entry.state"
        contents = packed(path, prefix.state, self.model, extra_of(key.hex(), prefix))
        chain, start = list[tuple[str, int]](), 0
        if contents.slots:
            own, new = pages_of(contents, self._nearest(text, prefix.tokens))
            chain, start = own + new, own[-1][1] if own else 0
            for name, stop in new:
                head = {field: contents.header[field] for field in ("format", "model")}
                part = replace(contents, header=head, tensors={}, slots=stop)
                self._count(f"pages/{name}", self._file(part, start))
                start = stop
            lines = "\n".join(f"{name} {stop}" for name, stop in chain)
            self._count(f"chains/{chain[-1][0]}", lines.encode())
        if time.monotonic() - begun > GRACE / 2:
            raise StorageError(f"{self.objects.url}: a state took too long to be written")
        data = self._file(contents, start)
        place = _short(cell), length, _short(key)
        entry = self._put_entry(place, chain[-1][0] if chain else "0", data)
        self._cells[cell] = self._cells.get(cell, {}) | {(length, entry.key): entry}

    def _put_entry(self, place: tuple[str, int, str], chain: str, data: bytes) -> _Entry:
        cell, length, key = place
        name = f"{length}.{key}.{chain}.{int(time.time())}"
        self._count(f"prefixes/{cell}/{name}", data)
        return _Entry(cell, name, len(data))

    def _file(self, contents: Any, start: int) -> bytes:
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            path = Path(folder) / "part"
            write(path, contents, path, start)
            return path.read_bytes()

    def _count(self, name: str, data: bytes) -> None:
        self.objects.put(name, data, durable=False)
        self._written += len(data)

    def _nearest(self, text: Text, tokens: int) -> list[tuple[str, int]]:
        """The pages of the longest state before `tokens` of a text that is in the store now, so that they stay."""
        for number in range((tokens - 1) // text.chunk, -1, -1):
            cell = text.cells[number]
            self.look_up([cell])
            for (length, key), entry in sorted(self._cells.get(cell, {}).items(), reverse=True):
                at = number * text.chunk + length
                if at < tokens and text.serves(at) and key == _short(text.key(at)):
                    return self._chain(entry.chain)
        return []

    # Collecting

    def _collect(self) -> None:
        now, entries = time.monotonic(), list[_Entry]()
        for name, size in self.objects.listed("prefixes", deep=True).items():
            cell, _, own = name.rpartition("/")
            entry = _entry(cell, own, size)
            if entry is None:
                self.objects.delete(f"prefixes/{name}")
            else:
                entries.append(entry)
        # Listed after the states, whose pages and chains were written before them.
        pages, chains = self.objects.all_listed(["pages", "chains"])
        entries.sort(key=attrgetter("used"))
        needed = {entry.name: [name for name, _ in self._chain(entry.chain)] for entry in entries}
        uses = Counter(page for needs in needed.values() for page in needs)
        lists = Counter(entry.chain for entry in entries)
        last = {entry.place: entry for entry in entries}
        used = sum(entry.size for entry in entries)
        used += sum(size for name, size in pages.items() if uses[name])
        used += sum(size for name, size in chains.items() if lists[name])

        def fits(entry: _Entry) -> bool:
            own = sum(pages.get(page, 0) for page in needed[entry.name])
            return entry.size + chains.get(entry.chain, 0) + own <= self.budget

        for entry in sorted(entries, key=fits):  # what fits in no budget would have to go after all others
            missing = any(page not in pages for page in needed[entry.name]) or (
                entry.chain != "0" and not needed[entry.name]
            )
            twice = last[entry.place] is not entry
            if used <= self.budget and not missing and not twice:
                continue
            self.objects.delete(entry.name)
            self.counters.evicted += not twice
            used -= entry.size
            lists[entry.chain] -= 1
            used -= 0 if lists[entry.chain] else chains.get(entry.chain, 0)
            for page in needed[entry.name]:
                uses[page] -= 1
                used -= 0 if uses[page] else pages.get(page, 0)
        unnamed = {f"pages/{name}" for name in pages if uses[name] <= 0}
        unnamed |= {f"chains/{name}" for name in chains if lists[name] <= 0}
        since = {name: self._unnamed.get(name, now) for name in unnamed}
        for name in [name for name, at in since.items() if now - at >= GRACE]:
            self.objects.delete(name)
            self._chains.pop(name.partition("/")[2], None)
            del since[name]
        self._unnamed = since

    def _asked(self, work: Callable[[], T], default: T, way: str = "read") -> T:
        """The result of work with the store; `default` while the store fails."""
        away = self._away[way]
        if time.monotonic() < away:
            return default
        try:
            result = work()
        except (StorageError, OSError) as error:
            self.counters.failed += 1
            self._away[way] = time.monotonic() + REST
            if not away:
                log.warning("the store of prefixes cannot be %s, texts are read without: %s", way, error)
            return default
        if away:
            log.warning("the store of prefixes can be %s again: %s", way, self.objects.url)
            self._away[way] = 0.0
        return result


class _Lengths(Mapping[bytes, list[int]]):
    """Offsets by cell, looked up when asked for, backwards from that cell: one, two, four cells at once …"""

    def __init__(self, shared: Shared, text: Text) -> None:
        self._shared, self._text, self._window = shared, text, 1
        self._numbers = {cell: number for number, cell in enumerate(text.cells)}
        self._known = set[bytes]()

    def __getitem__(self, cell: bytes) -> list[int]:
        if cell not in self._known:
            number = self._numbers[cell]
            cells = self._text.cells[max(0, number + 1 - self._window) : number + 1]
            self._shared.look_up(cells)
            self._known |= {*cells}
            self._window = min(2 * self._window, WINDOW)
        return self._shared.lengths_of(cell)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._text.cells)

    def __len__(self) -> int:
        return len(self._text.cells)


def _short(key: bytes) -> str:
    return key.hex()[:32]


def _entry(cell: str, name: str, size: int) -> _Entry | None:
    """The entry that a name describes; None if it is not an entry's name."""
    with contextlib.suppress(ValueError):
        return _Entry(cell, name, size)
    return None
