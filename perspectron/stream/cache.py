"""Experts in memory within a budget, read from the disk while the model computes (decisions.md §2).

Memory is slots of one expert each. Reader threads fill them: what a caller waits for first, then what was hinted. A
slot is taken from the expert that was not used for longest, of those that no open context holds. A request for what
is being read already waits for that read. Where everything fits, all is read at the start and no thread remains.

All state is under one lock; readers hold it only between reads.
"""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol, Self

from perspectron.errors import ConfigError, ShardError
from perspectron.stream.format import Bytes, Delta, ExpertLayout, Shard
from perspectron.stream.schedule import Counters, Held, Key, Schedule, Slot, State
from perspectron.stream.shards import DEADLINE, HUGE, ShardFile, aligned

READERS = 2


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


def needed(files: Sequence[ShardFile]) -> int:
    """Budget that holds all experts of these files."""
    distinct, slot_bytes = _sizes(files)
    return distinct * slot_bytes


class ShardCache:
    """An ExpertSource over the files of all layers, which it closes when nothing is to be read any more. Any number of
    threads may use it.

    budget: bytes for weights; besides, a reader holds the changes of an expert that is stored as such. readers:
    threads. deadline: seconds after which a caller gives up if nothing at all moves.
    ConfigError: a budget below one expert, or files that do not go together.

    slots: experts in memory at most, of the `distinct` ones there are; slot_bytes: of one. resident: all fit.
    """

    def __init__(
        self, files: Sequence[ShardFile], budget: int, *, readers: int = READERS, deadline: float = DEADLINE
    ) -> None:
        self.layout = _layout(files)
        self._files = {file.layer: file for file in files}
        self._keys: dict[Key, Key] = {
            (file.layer, expert): (file.layer, file.header.stored(expert).expert)
            for file in files
            for expert in file.header.by_expert
        }
        self.distinct, self.slot_bytes = _sizes(files)
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
        self._schedule = Schedule(self.slots)
        self._idle, self._closed = 0, False
        self._moved = time.monotonic()  # when anything did last
        names = [f"expert-reader-{i}" for i in range(readers)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        atexit.register(self.close)  # a thread in foreign code when the interpreter ends would abort it
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
            self._schedule.counters.hits += 1
            yield _shard(self._schedule.held[key])
            return
        held = self._acquire(key)
        try:
            yield _shard(held)
        finally:
            self._release(held)

    def hint(self, layer: int, expert: int) -> None:
        """Read an expert when nothing else is to be read and a slot is to be had, unless hints are mostly wrong."""
        key = self._keys[layer, expert]
        if not self._threads or self._pid != os.getpid():
            return
        with self._lock:
            if not self._schedule.trusts(key):
                return
            if key in self._schedule.held:
                self._schedule.held.move_to_end(key)
            elif not self._closed:
                self._schedule.hint(self._add(key))
                self._wake()

    def holds(self, layer: int, expert: int) -> bool:
        """Whether they are in memory now."""
        held = self._schedule.held.get(self._keys[layer, expert])
        return held is not None and held.state is State.READY

    @property
    def counters(self) -> Counters:
        """As they are now."""
        with self._lock:
            return replace(self._schedule.counters)

    def close(self) -> None:
        """Stop the readers and close the files; who waits gets a ShardError. Twice is fine."""
        atexit.unregister(self.close)
        if self._pid == os.getpid():
            self._stop_readers()
        if not any(
            thread.is_alive() for thread in self._threads
        ):  # one that hangs in a read still uses its file
            for file in self._files.values():
                file.close()

    # ------------------------------------------------------------ requests

    def _acquire(self, key: Key) -> Held:
        """The expert, ready and pinned."""
        if self._pid != os.getpid():  # there are no readers here, and the lock may be held forever
            raise self._error(key, "the cache was opened before this process was forked; open it anew")
        with self._lock:
            held = self._schedule.held.get(key) or self._add(key)
            held.pins += 1
            try:
                self._schedule.request(held)
                if held.state is not State.READY:
                    if self._idle < len(self._schedule.asked):
                        self._schedule.give_up_one()
                    self._wake()
                    self._wait(held)
            except BaseException:
                self._unpin(held)
                raise
            return held

    def _wait(self, held: Held) -> None:
        start = time.monotonic()
        try:
            while held.state in (State.QUEUED, State.READING):
                if self._closed:
                    raise self._error(held.key, "the cache was closed")
                left = max(start, self._moved) + self._deadline - time.monotonic()
                if left <= 0:
                    raise self._error(held.key, self._stuck(held))
                held.done.wait(left)
        finally:
            self._schedule.counters.wait_seconds += time.monotonic() - start
        if held.error is not None:
            cause = held.error.cause if isinstance(held.error, ShardError) else repr(held.error)
            raise self._error(held.key, cause) from held.error

    def _stuck(self, held: Held) -> str:
        if held.state is State.READING or any(held.pins for held in self._schedule.reading):
            return f"slow disk: nothing came in {self._deadline:g} s"
        return f"none of the {self.slots} slots was released in {self._deadline:g} s"

    def _release(self, held: Held) -> None:
        with self._lock:
            self._moved = time.monotonic()
            self._unpin(held)

    def _unpin(self, held: Held) -> None:
        held.pins -= 1
        if not held.pins:
            self._schedule.forget(held)
            self._wake()  # a slot may be had

    def _add(self, key: Key) -> Held:
        if self._closed:
            raise self._error(key, "the cache was closed")
        held = Held(key, self._files[key[0]], threading.Condition(self._lock))
        self._schedule.held[key] = held
        return held

    def _error(self, key: Key, cause: str) -> ShardError:
        return ShardError(self._files[key[0]].path, *key, cause)

    # ------------------------------------------------------------ readers

    def _run(self) -> None:
        while (found := self._next()) is not None:
            held, base = found
            count, error = 0, None
            try:
                count = self._read(held, None if base is None or base.slot is None else base.slot.buffer)
            except Exception as caught:
                error = caught
            with self._lock:
                self._moved = time.monotonic()
                if base is not None:
                    self._unpin(base)
                self._schedule.finish(held, count, error)
                held.done.notify_all()
                self._wake()

    def _read(self, held: Held, base: Bytes | None) -> int:
        if held.slot is None:
            buffer = aligned(self.layout.bytes)
            held.slot = Slot(buffer, self.layout.shard(buffer))
        return held.file.read_into(held.key[1], held.slot.buffer, lambda: self._stop(held), base)

    def _next(self) -> tuple[Held, Held | None] | None:
        """What to read now, and in memory what it is stored as changes from; None: nothing ever again."""
        with self._lock:
            while not self._closed:
                held = self._schedule.next()
                if held is not None:
                    self._wake()  # there may be more
                    return held, self._base(held)
                self._calm.notify_all()
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            return None

    def _base(self, held: Held) -> Held | None:
        entry = held.file.header.stored(held.key[1])
        base = self._schedule.held.get((held.key[0], entry.of)) if isinstance(entry, Delta) else None
        if base is None or base.state is not State.READY:
            return None
        base.pins += 1
        return base

    def _stop(self, held: Held) -> bool:
        """Asked before each piece of a read. What nobody waits for makes way for what somebody does."""
        self._moved = time.monotonic()
        if self._schedule.urgent and not held.wanted:
            with self._lock:
                while self._schedule.urgent and not (held.wanted or held.cancelled or self._closed):
                    self._calm.wait()
        return held.cancelled or self._closed

    def _wake(self) -> None:
        """After any change: those who may have something to do now."""
        if self._idle and (self._schedule.asked or self._schedule.hinted):
            self._work.notify()
        self._calm.notify_all()

    # ------------------------------------------------------------ start and end

    def _load_all(self) -> None:
        try:
            with self._lock:
                for key in dict.fromkeys(self._keys.values()):
                    self._schedule.request(self._add(key))
                self._work.notify_all()
                for held in list(self._schedule.held.values()):
                    self._wait(held)
                self._schedule.counters = Counters(bytes_read=self._schedule.counters.bytes_read)
        finally:
            self.close()  # the files too: nothing is read any more

    def _stop_readers(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._calm.notify_all()
            for held in self._schedule.held.values():
                held.done.notify_all()
        for thread in self._threads:
            thread.join(self._deadline)
        self._threads = [thread for thread in self._threads if thread.is_alive()]


def _shard(held: Held) -> Shard:
    assert held.slot is not None
    return held.slot.shard


def _sizes(files: Sequence[ShardFile]) -> tuple[int, int]:
    """Experts with weights of their own, and the memory that each takes."""
    headers = [file.header for file in files]
    distinct = sum(len({h.stored(expert).expert for expert in h.by_expert}) for h in headers)
    size = headers[0].layout.bytes
    unit = HUGE if size >= HUGE else 1  # `aligned` takes whole huge pages
    return distinct, -(-size // unit) * unit


def _layout(files: Sequence[ShardFile]) -> ExpertLayout:
    if not files:
        raise ConfigError("files = none, must be at least one layer")
    layouts = {file.header.layout for file in files}
    if len(layouts) > 1:
        found = sorted((layout.d_model, layout.hidden) for layout in layouts)
        raise ConfigError(f"widths of experts = {found}, must be the same")
    if len({file.layer for file in files}) < len(files):
        raise ConfigError(f"layers = {sorted(file.layer for file in files)}, must be different ones")
    return files[0].header.layout
