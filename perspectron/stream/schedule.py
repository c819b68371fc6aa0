"""The order in which experts are read, and their slots. It has no threads: the cache calls it under its lock."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from threading import Condition
from typing import NamedTuple

from perspectron.experts.fetched import Shard
from perspectron.stream.reader import Cancelled, ShardFile
from perspectron.stream.tensors import Bytes

HINTS = 256  # hints that wait at most; older ones are forgotten
TRUST = {False: 0.6, True: 0.75}
"""Share of recent hints that came true, below which none is read, by whether a token asks for several experts in a
layer: wrong hints displace what is used, and with several experts the disk has little time for guesses."""
MEMORY = 1 / 64  # weight of the latest hint in this share

Key = tuple[int, int]
"""(layer, expert), the expert one with weights of its own."""


@dataclass
class Counters:
    """hits: requests that found their expert in memory. misses: those that had to wait, `wait_seconds` in all.
    prefetched: hints that were read, or began to be; of them useful: those asked for later, wasted: those that were
    given up or displaced before. bytes_read: from disk; of them bytes_wasted: what was read of the wasted, and of what
    was given up and read again."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_wasted: int = 0
    prefetched: int = 0
    useful: int = 0
    wasted: int = 0
    wait_seconds: float = 0.0


class Slot(NamedTuple):
    """Memory of one expert, and its matrices as views."""

    buffer: Bytes
    shard: Shard


class State(Enum):
    QUEUED = 0
    READING = 1
    READY = 2
    FAILED = 3


class Entry:
    """An expert in memory or on its way there. slot: None while it waits, or until the reader allocates one. pins:
    contexts that hold it. wanted: someone waits for it, did, or will. hinted: the turn it was hinted in, until it is
    asked for. moved: when its read last made progress. done: notified when it is READY or FAILED."""

    def __init__(self, key: Key, file: ShardFile, done: Condition) -> None:
        self.key, self.file, self.done = key, file, done
        self.state = State.QUEUED
        self.slot: Slot | None = None
        self.pins = 0
        self.wanted = self.cancelled = False
        self.hinted: int | None = None
        self.moved = 0.0
        self.error: Exception | None = None


class Schedule:
    """entries: all experts in memory or on their way, the least recently used first. asked: those that are awaited and
    that no reader serves yet; only while there are any do hinted reads pause.

    A turn lasts as long as requests are for one layer. A hint is for the two turns after it: until the second begins it
    keeps its slot from other hints, then it is stale. trust: share of recent hints for what was not in memory that came
    true, whether they were read or not. several: a token asks for several experts in a layer.
    """

    def __init__(self, slots: int, *, several: bool = False) -> None:
        self.slots, self.allocated, self._enough = slots, 0, TRUST[several]
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.asked: deque[Entry] = deque()
        self.hinted: deque[Entry] = deque()
        self.reading: list[Entry] = []
        self.free: list[Slot] = []
        self.counters = Counters()
        self.trust = 1.0
        self._turn, self._layer = 0, -1
        self._guessed: dict[Key, int] = {}  # the turn of each hint that may still come true, in order

    def request(self, entry: Entry) -> None:
        """Count a request, and have what is not in memory read before any hint."""
        if entry.key[0] != self._layer:
            self._turn, self._layer = self._turn + 1, entry.key[0]
        self._judge(entry.key)
        self.counters.hits += entry.state is State.READY
        self.counters.misses += entry.state is not State.READY
        self.counters.useful += entry.hinted is not None and entry.state is not State.QUEUED
        self.entries.move_to_end(entry.key)
        if entry.state is State.QUEUED and not entry.wanted:
            if entry.hinted is not None:
                self.hinted.remove(entry)
            self.asked.append(entry)
        entry.wanted, entry.cancelled, entry.hinted = True, False, None

    def ask(self, entry: Entry) -> None:
        """Have it read before any hint, though nobody waits yet."""
        entry.wanted = True
        self.asked.append(entry)

    def trusts(self, key: Key) -> bool:
        """Record a hint; True if it is to be acted on."""
        if key not in self.entries:
            self._guessed.setdefault(key, self._turn)
        return self.trust >= self._enough

    def hint(self, entry: Entry) -> None:
        """Have it read when nothing else is to be read."""
        entry.hinted = self._turn
        self.hinted.append(entry)
        if len(self.hinted) > HINTS:
            del self.entries[self.hinted.popleft().key]

    def forget(self, entry: Entry) -> None:
        """Drop a request that nobody waits for any more."""
        if entry.state is State.QUEUED and entry.wanted:
            self.asked.remove(entry)
            del self.entries[entry.key]

    def next(self) -> Entry | None:
        """The expert to read now, if there is one and a slot for it."""
        while self.hinted and self._stale(self.hinted[0]):
            del self.entries[self.hinted.popleft().key]
        chosen = None
        if self.asked:
            if self._take_slot(self.asked[0]):
                chosen = self.asked.popleft()
            else:
                self.give_up_one()
        elif self.hinted and self._take_slot(self.hinted[0]):
            chosen = self.hinted.popleft()
            self.counters.prefetched += 1
        if chosen is not None:
            chosen.state = State.READING
            self.reading.append(chosen)
        return chosen

    def finish(self, entry: Entry, count: int, error: Exception | None) -> None:
        """Record the end of a read of `count` bytes."""
        self.reading.remove(entry)
        self.counters.bytes_read += count
        self.counters.bytes_wasted += count if error is not None else 0
        if error is None:
            entry.state = State.READY
            self.entries.move_to_end(entry.key)
        else:
            if entry.slot is None:
                self.allocated -= 1
            else:
                self.free.append(entry.slot)
            entry.slot = None
            self.counters.wasted += entry.hinted is not None
            if isinstance(error, Cancelled) and entry.wanted:
                entry.state = State.QUEUED  # asked for after it was given up
                self.asked.appendleft(entry)
            else:
                entry.state, entry.error = State.FAILED, error
                del self.entries[entry.key]

    def give_up_one(self) -> None:
        """End a read that nobody waits for, for the sake of its slot and its reader."""
        for entry in self.reading:
            if not entry.wanted and not entry.cancelled:
                entry.cancelled = True
                return

    def _take_slot(self, entry: Entry) -> bool:
        """Give it a free slot, one that its reader allocates, or that of another expert."""
        if self.free:
            entry.slot = self.free.pop()
            return True
        if self.allocated < self.slots:
            self.allocated += 1
            return True
        for other in self.entries.values():
            if other.state is not State.READY or other.pins:
                continue
            unused = other.hinted is not None
            if entry.wanted or not unused or self._stale(other):
                self.counters.wasted += unused
                self.counters.bytes_wasted += (
                    len(other.slot.buffer) if unused and other.slot is not None else 0
                )
                entry.slot, other.slot = other.slot, None
                del self.entries[other.key]
                return True
        return False

    def _stale(self, entry: Entry) -> bool:
        return entry.hinted is not None and self._turn > entry.hinted + 1

    def _judge(self, asked: Key) -> None:
        """Update `trust` by the hints that have come true, and by those that no longer can."""
        if self._guessed.pop(asked, None) is not None:
            self.trust += (1 - self.trust) * MEMORY
        while self._guessed and self._turn > (first := next(iter(self._guessed.items())))[1] + 2:
            del self._guessed[first[0]]
            self.trust -= self.trust * MEMORY
