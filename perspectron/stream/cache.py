"""Experts in memory within a budget, read from the disk while the model computes (decisions.md §2).

Memory is slots of one expert each. Reader threads fill them: what a caller waits for first, then what was hinted. A
slot is taken from the expert that was not used for longest, of those that no open context holds. A request for what
is being read already waits for that read. Where everything fits, all is read at the start and no thread remains.

All state is under one lock; readers hold it only between reads.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol, Self

from perspectron.errors import ConfigError, ShardError
from perspectron.stream.format import Bytes, Delta, ExpertLayout, Shard
from perspectron.stream.shards import DEADLINE, HUGE, Cancelled, ShardFile, aligned

READERS = 2
HINTS = 256  # that wait at most; older ones are forgotten

Key = tuple[int, int]
"""(layer, expert), the expert one that is stored."""


class ExpertSource(Protocol):
    """Where a model gets its experts from."""

    def get(self, layer: int, expert: int) -> AbstractContextManager[Shard]:
        """The weights, which stay as they are until the context ends. ShardError: they cannot be read."""
        ...

    def hint(self, layer: int, expert: int) -> None:
        """They may be asked for soon."""
        ...

    def holds(self, layer: int, expert: int) -> bool:
        """Whether they can be had at once."""
        ...


@dataclass
class Counters:
    """hits: requests that found their expert in memory. misses: those that had to wait, `wait_seconds` in all.
    prefetched: hints that were read, or began to be; of them useful: those asked for later, wasted: those that were
    given up or displaced before."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    prefetched: int = 0
    useful: int = 0
    wasted: int = 0
    wait_seconds: float = 0.0


class _Slot(NamedTuple):
    buffer: Bytes
    shard: Shard


class _State(Enum):
    QUEUED = 0
    READING = 1
    READY = 2
    FAILED = 3


class _Held:
    """An expert in the cache or on its way. pins: contexts that hold it. wanted: someone waits, or did. hinted: in
    which turn it was hinted, None once it was asked for."""

    def __init__(self, key: Key, file: ShardFile, lock: threading.Lock) -> None:
        self.key, self.file = key, file
        self.state = _State.QUEUED
        self.slot: _Slot | None = None
        self.pins = 0
        self.forever = self.wanted = self.cancelled = False
        self.hinted: int | None = None
        self.error: Exception | None = None
        self.done = threading.Condition(lock)

    def failure(self, cause: str) -> ShardError:
        return ShardError(self.file.path, *self.key, cause)


class ShardCache:
    """An ExpertSource over the files of all layers, which it closes in the end. Any number of threads may use it.

    budget: bytes for weights; besides, a reader holds the changes of an expert that is stored as such. readers:
    threads. deadline: seconds after which a caller gives up if nothing at all moves.
    ConfigError: a budget below one expert, or files that do not go together.
    """

    def __init__(
        self, files: Sequence[ShardFile], budget: int, *, readers: int = READERS, deadline: float = DEADLINE
    ) -> None:
        self._files = {file.layer: file for file in files}
        self.layout = _layout(files)
        self._keys: dict[Key, Key] = {
            (file.layer, expert): (file.layer, file.header.stored(expert).expert)
            for file in files
            for expert in file.header.by_expert
        }
        self.distinct = len(set(self._keys.values()))
        self.slot_bytes = (
            -(-self.layout.bytes // HUGE) * HUGE if self.layout.bytes >= HUGE else self.layout.bytes
        )
        self.slots = min(budget // self.slot_bytes, self.distinct)
        if self.slots < 1:
            raise ConfigError(f"budget = {budget} bytes, must be at least {self.slot_bytes}, one expert")
        if readers < 1:
            raise ConfigError(f"readers = {readers}, must be at least 1")
        self.resident = self.slots == self.distinct
        self._deadline, self._pid = deadline, os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # readers without work wait here
        self._calm = threading.Condition(self._lock)  # and here those whose work can wait
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # least recently used first
        self._asked: deque[_Held] = deque()
        self._hinted: deque[_Held] = deque()
        self._reading: list[_Held] = []
        self._free: list[_Slot] = []
        self._allocated = self._idle = 0
        self._urgent = self._closed = False
        self._turn, self._turn_layer = 0, -1  # a turn is as long as requests are for one layer
        self._moved = time.monotonic()
        self._counters = Counters()
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"expert-reader-{i}") for i in range(readers)
        ]
        for thread in self._threads:
            thread.start()
        if self.resident:
            self._load_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ for callers

    @contextlib.contextmanager
    def get(self, layer: int, expert: int) -> Iterator[Shard]:
        """The expert's weights, pinned while the context is open; after it, they may be overwritten.

        ShardError: not to be had. A later request tries again.
        """
        key = self._keys[layer, expert]
        if self.resident and not self._threads:  # nothing ever moves
            self._counters.hits += 1
            yield self._ready(self._held[key])
            return
        held = self._acquire(key)
        try:
            yield self._ready(held)
        finally:
            self._release(held)

    def hint(self, layer: int, expert: int) -> None:
        """Read an expert when nothing else is to be read, if there is a slot for it."""
        if not self._threads or self._pid != os.getpid():
            return
        key = self._keys[layer, expert]
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return
            held = self._add(key)
            held.hinted = self._turn
            self._hinted.append(held)
            if len(self._hinted) > HINTS:
                del self._held[self._hinted.popleft().key]
            self._work.notify()

    def holds(self, layer: int, expert: int) -> bool:
        """Whether they are in memory now."""
        held = self._held.get(self._keys[layer, expert])
        return held is not None and held.state is _State.READY

    def pin(self, layer: int, expert: int) -> None:
        """Keep an expert in memory until `unpin`. ConfigError: it would take the last slot."""
        held = self._acquire(self._keys[layer, expert])
        try:
            with self._lock:
                pinned = sum(other.forever for other in self._held.values() if other is not held)
                if pinned + 1 >= self.slots and not self.resident:
                    raise ConfigError(
                        f"pinned experts = {pinned + 1}, must be below the {self.slots} slots of the cache"
                    )
                held.forever = True
        finally:
            self._release(held)

    def unpin(self, layer: int, expert: int) -> None:
        """It may be displaced again."""
        with self._lock:
            held = self._held.get(self._keys[layer, expert])
            if held is not None:
                held.forever = False
                self._work.notify()

    @property
    def counters(self) -> Counters:
        """As they are now."""
        with self._lock:
            return replace(self._counters)

    def close(self) -> None:
        """Stop the readers and close the files; what waits gets a ShardError. Twice is fine."""
        if self._pid == os.getpid():
            self._stop_readers()
        if not any(
            thread.is_alive() for thread in self._threads
        ):  # one that hangs in a read still uses its file
            for file in self._files.values():
                file.close()

    # ------------------------------------------------------------ requests

    def _acquire(self, key: Key) -> _Held:
        """The expert, ready and pinned."""
        self._same_process(key)
        with self._lock:
            if key[0] != self._turn_layer:
                self._turn, self._turn_layer = self._turn + 1, key[0]
            held = self._held.get(key) or self._add(key)
            if held.hinted is not None:
                self._counters.useful += held.state in (_State.READING, _State.READY)
            held.pins += 1
            try:
                if held.state is _State.READY:
                    self._counters.hits += 1
                else:
                    self._counters.misses += 1
                    self._demand(held)
                    self._wait(held)
            except BaseException:
                self._unpin(held)
                raise
            held.hinted = None
            self._held.move_to_end(key)
            return held

    def _demand(self, held: _Held) -> None:
        """Someone waits for it now."""
        held.cancelled, held.hinted = False, None
        if held.wanted:
            return
        held.wanted = True
        if held.state is _State.QUEUED:
            with contextlib.suppress(ValueError):
                self._hinted.remove(held)
            self._asked.append(held)
            if self._idle < len(self._asked):
                self._give_up_one()
        self._recount()

    def _wait(self, held: _Held) -> None:
        start = time.monotonic()
        try:
            while held.state in (_State.QUEUED, _State.READING):
                if self._closed:
                    raise held.failure("the cache was closed")
                left = max(start, self._moved) + self._deadline - time.monotonic()
                if left <= 0:
                    raise held.failure(self._stuck(held))
                held.done.wait(left)
        finally:
            self._counters.wait_seconds += time.monotonic() - start
        if held.error is not None:
            cause = held.error.cause if isinstance(held.error, ShardError) else repr(held.error)
            raise held.failure(cause) from held.error

    def _stuck(self, held: _Held) -> str:
        if held.state is _State.READING:
            return f"slow disk: nothing came in {self._deadline:g} s"
        return f"none of the {self.slots} slots was released in {self._deadline:g} s"

    def _release(self, held: _Held) -> None:
        with self._lock:
            self._unpin(held)
            self._moved = time.monotonic()

    def _unpin(self, held: _Held) -> None:
        held.pins -= 1
        if held.pins:
            return
        if held.state is _State.QUEUED and held in self._asked:  # nobody waits any more
            self._asked.remove(held)
            del self._held[held.key]
            self._recount()
        if self._idle and (self._asked or self._hinted):
            self._work.notify()  # a slot may be had

    def _add(self, key: Key) -> _Held:
        held = _Held(key, self._files[key[0]], self._lock)
        if self._closed:
            raise held.failure("the cache was closed")
        self._held[key] = held
        return held

    def _ready(self, held: _Held) -> Shard:
        assert held.slot is not None
        return held.slot.shard

    def _same_process(self, key: Key) -> None:
        if self._pid != os.getpid():  # there are no readers here, and the lock may be held forever
            cause = "the cache was opened before this process was forked; open it anew"
            raise ShardError(self._files[key[0]].path, *key, cause)

    # ------------------------------------------------------------ readers

    def _run(self) -> None:
        while (found := self._next()) is not None:
            held, base = found
            count, error = 0, None
            try:
                if held.slot is None:
                    buffer = aligned(self.layout.bytes)
                    held.slot = _Slot(buffer, self.layout.shard(buffer))
                count = held.file.read_into(
                    held.key[1],
                    held.slot.buffer,
                    lambda held=held: self._stop(held),  # type: ignore[misc]
                    base.slot.buffer if base is not None and base.slot is not None else None,
                )
            except Exception as caught:
                error = caught
            with self._lock:
                if base is not None:
                    self._unpin(base)
                self._done(held, count, error)

    def _next(self) -> tuple[_Held, _Held | None] | None:
        """What to read now, and in memory what it is stored as changes from; None: nothing ever again."""
        with self._lock:
            while not self._closed:
                held = self._pick()
                if held is not None:
                    held.state = _State.READING
                    self._reading.append(held)
                    self._recount()
                    return held, self._base(held)
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            return None

    def _pick(self) -> _Held | None:
        if self._asked:
            if not self._take_slot(self._asked[0]):
                self._give_up_one()
                return None
            return self._asked.popleft()
        while self._hinted and self._stale(self._hinted[0]):
            del self._held[self._hinted.popleft().key]
        if self._hinted and not self._urgent and self._take_slot(self._hinted[0]):
            self._counters.prefetched += 1
            return self._hinted.popleft()
        return None

    def _take_slot(self, held: _Held) -> bool:
        """Give it a slot: a free one, a new one (allocated by the reader), or that of another expert."""
        if self._free:
            held.slot = self._free.pop()
            return True
        if self._allocated < self.slots:
            self._allocated += 1
            return True
        for other in self._held.values():
            if other.state is not _State.READY or other.pins or other.forever:
                continue
            unused = other.hinted is not None
            if held.wanted or not unused or self._stale(other):
                self._counters.wasted += unused
                held.slot, other.slot = other.slot, None
                del self._held[other.key]
                return True
        return False

    def _stale(self, held: _Held) -> bool:
        """Whether the turn for which it was hinted is over: that of the hint, or the next one."""
        return held.hinted is not None and self._turn > held.hinted + 1

    def _base(self, held: _Held) -> _Held | None:
        entry = held.file.header.stored(held.key[1])
        base = self._held.get((held.key[0], entry.of)) if isinstance(entry, Delta) else None
        if base is None or base.state is not _State.READY:
            return None
        base.pins += 1
        return base

    def _done(self, held: _Held, count: int, error: Exception | None) -> None:
        self._moved = time.monotonic()
        self._reading.remove(held)
        if error is None:
            held.state = _State.READY
            self._counters.bytes_read += count
            self._held.move_to_end(held.key)
        else:
            if held.slot is None:
                self._allocated -= 1
            else:
                self._free.append(held.slot)
            held.slot = None
            self._counters.wasted += held.hinted is not None
            if isinstance(error, Cancelled) and held.wanted and not self._closed:
                held.state = _State.QUEUED  # asked for after it was given up
                self._asked.appendleft(held)
            else:
                held.state, held.error = _State.FAILED, error
                del self._held[held.key]
        self._recount()
        held.done.notify_all()

    def _stop(self, held: _Held) -> bool:
        """Asked before each piece of a read. What nobody waits for makes way for what somebody does."""
        self._moved = time.monotonic()
        if not self._urgent or held.wanted:
            return held.cancelled or self._closed
        with self._lock:
            while self._urgent and not (held.wanted or held.cancelled or self._closed):
                self._calm.wait()
            return held.cancelled or self._closed

    def _give_up_one(self) -> None:
        """End a read that nobody waits for, for the sake of its slot and its reader."""
        for held in self._reading:
            if not held.wanted and not held.cancelled:
                held.cancelled = True
                self._calm.notify_all()
                break

    def _recount(self) -> None:
        """After any change of what is asked for or being read."""
        self._urgent = bool(self._asked) or any(held.wanted for held in self._reading)
        if self._idle and (self._asked or self._hinted):
            self._work.notify()
        self._calm.notify_all()

    # ------------------------------------------------------------ start and end

    def _load_all(self) -> None:
        try:
            with self._lock:
                for key in dict.fromkeys(self._keys.values()):
                    self._demand(self._add(key))
                for held in list(self._held.values()):
                    self._wait(held)
                self._counters = Counters(bytes_read=self._counters.bytes_read)
            self._stop_readers()
        except BaseException:
            self.close()
            raise

    def _stop_readers(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._calm.notify_all()
            for held in self._held.values():
                held.done.notify_all()
        for thread in self._threads:
            thread.join(self._deadline)
        self._threads = [thread for thread in self._threads if thread.is_alive()]


def _layout(files: Sequence[ShardFile]) -> ExpertLayout:
    if not files:
        raise ConfigError("files = none, must be at least one layer")
    layouts = {file.header.layout for file in files}
    if len(layouts) > 1:
        raise ConfigError(
            f"widths of experts = {sorted((one.d_model, one.hidden) for one in layouts)}, must be the same"
        )
    if len({file.layer for file in files}) < len(files):
        raise ConfigError(f"layers = {sorted(file.layer for file in files)}, must be different ones")
    return files[0].header.layout
