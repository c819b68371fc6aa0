"""A cache of experts within a memory budget, filled from disk while the model computes
(docs/designs/perspective.md#streaming).

Memory is divided into slots of one expert each. Reader threads fill them, awaited experts first, then hinted ones. The
slot of the least recently used expert that no open context holds is reused. A request for an expert that is being read
waits for that read. If everything fits, all experts are read at the start and no threads remain.

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

from perspectron.experts.fetched import Shard
from perspectron.stream.reader import DEADLINE, Cancelled, ShardFile
from perspectron.stream.schedule import Counters, Entry, Key, Schedule, Slot, State
from perspectron.stream.tensors import aligned
from perspectron.stream.usage import Usage
from perspectron.util.errors import ConfigError, ShardError

READERS = 2


def needed(files: Sequence[ShardFile]) -> int:
    """Budget that holds all experts of these files."""
    distinct, slot_bytes = _sizes(files)
    return distinct * slot_bytes


class ShardCache(AbstractContextManager["ShardCache"]):
    """An ExpertSource over the files of all layers, which it closes when nothing is to be read any more. Any number of
    threads may use it.

    budget: bytes for weights. least: experts that a token asks for in a layer. readers: threads. deadline: seconds
    after which a caller gives up if nothing at all moves. files: of layers with experts of the same widths.
    ConfigError: a budget below `least` experts.

    slots: experts in memory at most, of the `distinct` ones on disk; slot_bytes: memory of one. resident: all fit.
    """

    def __init__(
        self,
        files: Sequence[ShardFile],
        budget: int,
        *,
        least: int = 1,
        readers: int = READERS,
        deadline: float = DEADLINE,
    ) -> None:
        self.layout = files[0].header.layout
        self._files = {file.layer: file for file in files}
        self._keys: dict[Key, Key] = {
            (file.layer, expert): (file.layer, of)
            for file in files
            for expert, of in enumerate(file.header.weights_of)
        }
        self.distinct, self.slot_bytes = _sizes(files)
        self.slots = min(budget // self.slot_bytes, self.distinct)
        if self.slots < min(least, self.distinct):
            what = "one expert" if least == 1 else f"the {least} experts of a token in a layer"
            raise ConfigError(f"cache = {budget} bytes, must be at least {least * self.slot_bytes}, {what}")
        self.resident = self.slots == self.distinct
        self.usage: Usage | None = None
        self._deadline, self._pid = deadline, os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # readers without work wait here
        self._calm = threading.Condition(self._lock)  # and here readers of hints, while others go first
        self._schedule = Schedule(self.slots, several=least > 1)
        self._idle, self._closed = 0, False
        self._moved = time.monotonic()  # when anything did last
        names = [f"expert-reader-{i}" for i in range(readers)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        atexit.register(self.close)  # a thread in foreign code when the interpreter ends would abort it
        for thread in self._threads:
            thread.start()
        if self.resident:
            self._load_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ for callers

    @contextlib.contextmanager
    def get(self, layer: int, expert: int, *, asked: bool = True) -> Iterator[Shard]:
        """The expert's weights, pinned while the context is open; after it, they may be overwritten. asked: False for
        one that is copied because of a hint, which counts as no request where it is there.

        ShardError: it cannot be read. A later request tries again.
        """
        key = self._keys[layer, expert]
        if asked and self.usage is not None:
            self.usage.count(layer, expert, ready=self.holds(layer, expert))
        if self.resident and not self._threads:  # nothing ever moves
            self._schedule.counters.hits += asked
            yield _shard(self._schedule.entries[key])
            return
        entry = self._acquire(key, asked)
        try:
            yield _shard(entry)
        finally:
            self._release(entry)

    def served(self, layer: int, expert: int) -> None:
        """Count a request that a copy of the expert answered, as one that found it in memory."""
        if self.usage is not None:
            self.usage.count(layer, expert, ready=True)
        with self._lock:
            entry = self._schedule.entries.get(self._keys[layer, expert])
            if entry is not None and entry.state is State.READY:
                self._schedule.request(entry)
            else:  # its memory has another expert by now
                self._schedule.counters.hits += 1

    def warm(self, usage: Usage) -> None:
        """Read the experts that were used most until the cache is full, and count from now on."""
        self.usage = usage
        chosen = list(dict.fromkeys(self._keys[pair] for pair in usage.most()))[: self.slots]
        if not self.resident:
            self._load(sorted(chosen))  # in the order of the files
            with self._lock:
                for key in reversed(chosen):  # the most used is the last to go
                    self._schedule.entries.move_to_end(key)

    def ask(self, layer: int, experts: Sequence[int]) -> None:
        """Read these experts, which will be requested in this order, before any hint: of the first ones as many as
        leave room for as many others."""
        if not self._threads or self._pid != os.getpid():
            return
        with self._lock:
            for expert in experts[: max(1, self.slots // 2 - 1)]:
                key = self._keys[layer, expert]
                if not self._closed and key not in self._schedule.entries:
                    self._schedule.ask(self._add(key))
                    self._wake()

    def hint(self, layer: int, expert: int) -> None:
        """Read an expert when nothing else is to be read and a slot can be taken, unless hints are mostly wrong."""
        key = self._keys[layer, expert]
        if not self._threads or self._pid != os.getpid():
            return
        with self._lock:
            if not self._schedule.trusts(key):
                return
            if key in self._schedule.entries:
                self._schedule.entries.move_to_end(key)
            elif not self._closed:
                self._schedule.hint(self._add(key))
                self._wake()

    def holds(self, layer: int, expert: int) -> bool:
        """True if the weights are in memory now."""
        entry = self._schedule.entries.get(self._keys[layer, expert])
        return entry is not None and entry.state is State.READY

    @property
    def counters(self) -> Counters:
        """A copy of the counters as they are now."""
        with self._lock:
            return replace(self._schedule.counters)

    def close(self) -> None:
        """Stop the readers and close the files; whoever waits gets a ShardError. Twice is fine."""
        atexit.unregister(self.close)
        if self._pid == os.getpid():
            self._stop_readers()
        if not any(
            thread.is_alive() for thread in self._threads
        ):  # one that hangs in a read still uses its file
            for file in self._files.values():
                file.close()

    # ------------------------------------------------------------ requests

    def _acquire(self, key: Key, asked: bool) -> Entry:
        """The expert, ready and pinned."""
        if self._pid != os.getpid():  # there are no readers here, and the lock may be held forever
            raise self._error(key, "the cache was opened before this process was forked; open it anew")
        with self._lock:
            entry = self._schedule.entries.get(key) or self._add(key)
            entry.pins += 1
            try:
                if asked or entry.state is not State.READY:
                    self._schedule.request(entry)
                else:
                    self._schedule.entries.move_to_end(key)
                if entry.state is not State.READY:
                    if self._idle < len(self._schedule.asked):
                        self._schedule.give_up_one()
                    self._wake()
                    self._wait(entry)
            except BaseException:
                self._unpin(entry)
                raise
            return entry

    def _wait(self, entry: Entry) -> None:
        start = time.monotonic()
        try:
            while entry.state in (State.QUEUED, State.READING):
                if self._closed:
                    raise self._error(entry.key, "the cache was closed")
                reading = entry.state is State.READING  # then only the progress of this read counts
                moved = entry.moved if reading else self._moved
                left = max(start, moved) + self._deadline - time.monotonic()
                if left <= 0:
                    raise self._error(entry.key, self._stuck(entry))
                entry.done.wait(left)
        finally:
            self._schedule.counters.wait_seconds += time.monotonic() - start
        if entry.error is not None:
            cause = entry.error.cause if isinstance(entry.error, ShardError) else repr(entry.error)
            raise self._error(entry.key, cause) from entry.error

    def _stuck(self, entry: Entry) -> str:
        if entry.state is State.READING or any(entry.pins for entry in self._schedule.reading):
            return f"slow disk: nothing came in {self._deadline:g} s"
        return f"none of the {self.slots} slots was released in {self._deadline:g} s"

    def _release(self, entry: Entry) -> None:
        with self._lock:
            self._moved = time.monotonic()
            self._unpin(entry)

    def _unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if not entry.pins:
            self._schedule.forget(entry)
            self._wake()  # a slot may be had

    def _add(self, key: Key) -> Entry:
        if self._closed:
            raise self._error(key, "the cache was closed")
        entry = Entry(key, self._files[key[0]], threading.Condition(self._lock))
        self._schedule.entries[key] = entry
        return entry

    def _error(self, key: Key, cause: str) -> ShardError:
        return ShardError(self._files[key[0]].path, *key, cause)

    # ------------------------------------------------------------ readers

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            count, error = 0, None
            try:
                count = self._read(entry)
            except Exception as caught:
                count, error = caught.count if isinstance(caught, Cancelled) else 0, caught
            with self._lock:
                self._moved = time.monotonic()
                self._schedule.finish(entry, count, error)
                entry.done.notify_all()
                self._wake()

    def _read(self, entry: Entry) -> int:
        if entry.slot is None:
            buffer = aligned(self.layout.bytes)
            entry.slot = Slot(buffer, self.layout.shard(buffer))
        return entry.file.read_into(entry.key[1], entry.slot.buffer, lambda: self._stop(entry))

    def _next(self) -> Entry | None:
        """Wait for the next expert to read; None: the cache was closed."""
        with self._lock:
            while not self._closed:
                entry = self._schedule.next()
                if entry is not None:
                    self._wake()  # there may be more
                    return entry
                self._calm.notify_all()
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            return None

    def _stop(self, entry: Entry) -> bool:
        """True if a read is to be given up. Asked before each piece: a read that nobody awaits pauses here until those
        that are awaited have begun."""
        self._moved = entry.moved = time.monotonic()
        if self._schedule.asked and not entry.wanted:
            with self._lock:
                while self._schedule.asked and not (entry.wanted or entry.cancelled or self._closed):
                    self._calm.wait()
        return entry.cancelled or self._closed

    def _wake(self) -> None:
        """Wake those who may have something to do after a change."""
        if self._idle and (self._schedule.asked or self._schedule.hinted):
            self._work.notify()
        self._calm.notify_all()

    # ------------------------------------------------------------ start and end

    def _load(self, keys: Sequence[Key]) -> None:
        """Read these experts, for all of which there are slots, and wait for them."""
        with self._lock:
            wanted = [self._schedule.entries.get(key) or self._add(key) for key in keys]
            for entry in wanted:
                self._schedule.request(entry)
            self._work.notify_all()
            if self._idle < len(self._schedule.asked):
                self._schedule.give_up_one()
            self._calm.notify_all()
            for entry in wanted:
                self._wait(entry)
            self._schedule.counters = Counters(bytes_read=self._schedule.counters.bytes_read)

    def _load_all(self) -> None:
        try:
            self._load(list(dict.fromkeys(self._keys.values())))
        finally:
            self.close()  # the files too: nothing is read any more

    def _stop_readers(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._calm.notify_all()
            for entry in self._schedule.entries.values():
                entry.done.notify_all()
        for thread in self._threads:
            thread.join(self._deadline)
        self._threads = [thread for thread in self._threads if thread.is_alive()]


def _shard(entry: Entry) -> Shard:
    assert entry.slot is not None
    return entry.slot.shard


def _sizes(files: Sequence[ShardFile]) -> tuple[int, int]:
    """Number of experts with weights of their own, and the memory that each takes."""
    distinct = sum(len(file.header.stored) for file in files)
    return distinct, files[0].header.layout.slot
