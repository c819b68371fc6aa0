"""Which expert is read next, and into which slot. There are no threads here: the cache calls it under its lock."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from threading import Condition
from typing import NamedTuple

from perspectron.stream.format import Bytes, Shard
from perspectron.stream.shards import Cancelled, ShardFile

HINTS = 256  # that wait at most; older ones are forgotten
TRUST = 0.6  # of hints of late that came true, below which none is read: wrong ones displace what is used
MEMORY = 1 / 64  # weight of the latest in it

Key = tuple[int, int]
"""(layer, expert), the expert one that is stored."""


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


class Slot(NamedTuple):
    """Memory of one expert, and the views of it."""

    buffer: Bytes
    shard: Shard


class State(Enum):
    QUEUED = 0
    READING = 1
    READY = 2
    FAILED = 3


class Held:
    """An expert in memory or on its way there. slot: None while it waits, or until the reader allocates one. pins:
    contexts that hold it. wanted: someone waits for it, or did. hinted: the turn it was hinted in, until it is asked
    for. done: told when it is READY or FAILED."""

    def __init__(self, key: Key, file: ShardFile, done: Condition) -> None:
        self.key, self.file, self.done = key, file, done
        self.state = State.QUEUED
        self.slot: Slot | None = None
        self.pins = 0
        self.wanted = self.cancelled = False
        self.hinted: int | None = None
        self.error: Exception | None = None


class Schedule:
    """held: all experts in memory or on their way, the least recently used first. urgent: whether someone waits
    whom no reader serves yet. Only then do hinted reads stop: one reader does not keep a disk busy (2.1 GB/s, two 2.9).

    A turn is as long as requests are for one layer. A hint is for the two turns after it: until the second begins it
    keeps its slot from other hints, then it is stale. trust: share of the hints of late for what was not in memory that
    came true, read or not.
    """

    def __init__(self, slots: int) -> None:
        self.slots, self.allocated = slots, 0
        self.held: OrderedDict[Key, Held] = OrderedDict()
        self.asked: deque[Held] = deque()
        self.hinted: deque[Held] = deque()
        self.reading: list[Held] = []
        self.free: list[Slot] = []
        self.urgent = False
        self.counters = Counters()
        self.trust = 1.0
        self._turn, self._layer = 0, -1
        self._guessed: dict[Key, int] = {}  # the turn of each hint that may still come true, in order

    def request(self, held: Held) -> None:
        """Count a request, and have what is not in memory read before any hint."""
        if held.key[0] != self._layer:
            self._turn, self._layer = self._turn + 1, held.key[0]
        self._judge(held.key)
        self.counters.hits += held.state is State.READY
        self.counters.misses += held.state is not State.READY
        self.counters.useful += held.hinted is not None and held.state is not State.QUEUED
        self.held.move_to_end(held.key)
        if held.state is State.QUEUED and not held.wanted:
            if held.hinted is not None:
                self.hinted.remove(held)
            self.asked.append(held)
        held.wanted, held.cancelled, held.hinted = True, False, None
        self._recount()

    def trusts(self, key: Key) -> bool:
        """Take note of a hint; whether to act on it."""
        if key not in self.held:
            self._guessed.setdefault(key, self._turn)
        return self.trust >= TRUST

    def hint(self, held: Held) -> None:
        """Read it when nothing else is to be read."""
        held.hinted = self._turn
        self.hinted.append(held)
        if len(self.hinted) > HINTS:
            del self.held[self.hinted.popleft().key]

    def forget(self, held: Held) -> None:
        """Nobody waits for it any more."""
        if held.state is State.QUEUED and held.wanted:
            self.asked.remove(held)
            del self.held[held.key]
            self._recount()

    def next(self) -> Held | None:
        """What to read now, if there is something and a slot for it."""
        while self.hinted and self._stale(self.hinted[0]):
            del self.held[self.hinted.popleft().key]
        found = None
        if self.asked:
            if self._take_slot(self.asked[0]):
                found = self.asked.popleft()
            else:
                self.give_up_one()
        elif self.hinted and self._take_slot(self.hinted[0]):
            found = self.hinted.popleft()
            self.counters.prefetched += 1
        if found is not None:
            found.state = State.READING
            self.reading.append(found)
            self._recount()
        return found

    def finish(self, held: Held, count: int, error: Exception | None) -> None:
        """A read of `count` bytes ended."""
        self.reading.remove(held)
        self.counters.bytes_read += count
        if error is None:
            held.state = State.READY
            self.held.move_to_end(held.key)
        else:
            if held.slot is None:
                self.allocated -= 1
            else:
                self.free.append(held.slot)
            held.slot = None
            self.counters.wasted += held.hinted is not None
            if isinstance(error, Cancelled) and held.wanted:
                held.state = State.QUEUED  # asked for after it was given up
                self.asked.appendleft(held)
            else:
                held.state, held.error = State.FAILED, error
                del self.held[held.key]
        self._recount()

    def give_up_one(self) -> None:
        """End a read that nobody waits for, for the sake of its slot and its reader."""
        for held in self.reading:
            if not held.wanted and not held.cancelled:
                held.cancelled = True
                return

    def _take_slot(self, held: Held) -> bool:
        """Give it a free slot, one that its reader allocates, or that of another expert."""
        if self.free:
            held.slot = self.free.pop()
            return True
        if self.allocated < self.slots:
            self.allocated += 1
            return True
        for other in self.held.values():
            if other.state is not State.READY or other.pins:
                continue
            unused = other.hinted is not None
            if held.wanted or not unused or self._stale(other):
                self.counters.wasted += unused
                held.slot, other.slot = other.slot, None
                del self.held[other.key]
                return True
        return False

    def _stale(self, held: Held) -> bool:
        return held.hinted is not None and self._turn > held.hinted + 1

    def _judge(self, asked: Key) -> None:
        """Count hints that came true, or can no more."""
        if self._guessed.pop(asked, None) is not None:
            self.trust += (1 - self.trust) * MEMORY
        while self._guessed and self._turn > (first := next(iter(self._guessed.items())))[1] + 2:
            del self._guessed[first[0]]
            self.trust -= self.trust * MEMORY

    def _recount(self) -> None:
        self.urgent = bool(self.asked)
