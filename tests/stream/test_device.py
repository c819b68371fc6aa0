"""Experts by way of a device's buffers, on a simulated device: two streams whose work is done as late as the waits
of the host and the events allow, or copies as early. A wait that is missing shows as wrong numbers."""

import gc
import logging
import random
import threading

import pytest
import torch

from perspectron.stream.cache import ShardCache
from perspectron.stream.device import DeviceExperts, Lane, Pinned
from perspectron.stream.usage import Usage
from perspectron.util.errors import ShardError

EXPERTS, LAYERS = 5, 3


class Event:
    def __init__(self, stream):
        self.stream, self.done = stream, False

    def synchronize(self):
        self.stream.until(self)


class Stream:
    """Work to be done in order. eager: at once; else when something waits for it."""

    def __init__(self, lock, eager=False):
        self.lock, self.eager, self.work = lock, eager, []

    def add(self, work):
        with self.lock:
            self.work.append(work)
            if self.eager:
                self.until(None)

    def wait_event(self, event):
        assert isinstance(event, Event)
        self.add(event.synchronize)

    def record_event(self):
        event = Event(self)
        self.add(lambda: setattr(event, "done", True))
        return event

    def until(self, event):
        with self.lock:
            while self.work if event is None else not event.done:
                self.work.pop(0)()


class Simulated(Lane):
    """forgets: kinds of waits that are left out."""

    def __init__(self, eager, forgets=()):
        self.lock = threading.RLock()
        self.copies = Stream(self.lock, eager)
        self.streams = [Stream(self.lock), Stream(self.lock)]
        self.now, self.forgets = self.streams[0], forgets
        self.pins, self.staged, self.closed = set(), [], 0

    def memory(self, size):
        return torch.zeros(size, dtype=torch.uint8)

    def staging(self, size):
        self.staged.append(torch.zeros(size, dtype=torch.uint8))
        return self.staged[-1]

    def pin(self, host):
        self.pins.add(host.data_ptr())

    def reader(self, memory):
        return _Deaf(self.now) if "copied" in self.forgets else self.now

    def copy(self, to, host, after):
        for event in () if "used" in self.forgets else after:
            self.copies.wait_event(event)
        self.copies.add(lambda: to.copy_(host))
        event = self.copies.record_event()
        if "read" in self.forgets:
            event.synchronize = lambda: None  # of the host; streams wait for another event
            return _Seen(event)
        return event

    def close(self):
        self.copies.until(None)
        self.closed += 1


class _Deaf:
    """A stream that does not wait."""

    def __init__(self, stream):
        self.stream = stream

    def wait_event(self, event):
        pass

    def record_event(self):
        return self.stream.record_event()

    def __hash__(self):
        return hash(self.stream)

    def __eq__(self, other):
        return self.stream is other.stream


class _Seen(Event):
    """An event for which streams wait and the host does not."""

    def __init__(self, event):
        self.event = event

    def synchronize(self):
        if threading.current_thread() is threading.main_thread():
            self.event.stream.until(self.event)


@pytest.fixture
def files(tmp_path, lab):
    """A function that makes a cache of so many slots over three layers, and the bytes of every expert."""
    whole = {}
    for layer in range(LAYERS):
        whole |= {
            (layer, expert): torch.from_numpy(data.copy())
            for expert, data in lab.plain(tmp_path / f"{layer}", layer, EXPERTS).items()
        }

    def made(slots):
        opened = [lab.open(tmp_path / f"{layer}") for layer in range(LAYERS)]
        return ShardCache(opened, slots * lab.layout.bytes)

    return made, whole


def walked(copies, lane, whole, count=60, streams=1):
    """What the device reads of experts asked for in a fixed random order, with hints of which some are wrong, and
    whether it is all right."""
    draw, found = random.Random(3), []
    keys = [(step % LAYERS, draw.randrange(EXPERTS)) for step in range(count)]
    for step, key in enumerate(keys):
        lane.now = lane.streams[step * streams // count]
        with copies.get(*key) as shard:
            after = keys[(step + 1) % count] if draw.random() < 0.7 else (0, draw.randrange(EXPERTS))
            copies.hint(*after)
            views = [part for matrix in shard for part in (matrix.codes, matrix.scales)]
            lane.now.add(lambda key=key, views=views: found.append((key, [view.clone() for view in views])))
    for stream in lane.streams:
        stream.until(None)
    layout = copies._cache.layout
    right = [
        all(
            torch.equal(a, b)
            for a, b in zip(
                read,
                [part for matrix in layout.shard(whole[key]) for part in (matrix.codes, matrix.scales)],
                strict=True,
            )
        )
        for key, read in found
    ]
    assert len(right) == count
    return all(right)


@pytest.mark.parametrize("eager", [True, False], ids=["copies early", "copies late"])
@pytest.mark.parametrize("slots", [1, 2, 6, 15])
@pytest.mark.parametrize("streams", [1, 2])
def test_what_the_device_reads_is_what_was_asked_for(files, eager, slots, streams):
    made, whole = files
    with made(slots) as cache:
        lane = Simulated(eager)
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        assert walked(copies, lane, whole, streams=streams)
        assert len(lane.staged) == (0 if cache.resident else 2)
        assert bool(lane.pins) == cache.resident
        copies.close()
        copies.close()
        assert lane.closed == 1


@pytest.mark.parametrize(
    ("eager", "forgets", "slots"),
    [(True, "used", 15), (False, "copied", 15), (True, "used", 3), (False, "read", 3)],
)
def test_a_wait_that_is_missing_shows_on_the_simulated_device(files, eager, forgets, slots):
    made, whole = files
    with made(slots) as cache:
        lane = Simulated(eager, (forgets,))
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        assert not walked(copies, lane, whole)
        copies.close()


@pytest.mark.parametrize("slots", [3, 6, 15])
@pytest.mark.parametrize("simulated", [False, True], ids=["copied", "streams"])
def test_requests_are_counted_and_copies_are_not(files, tmp_path, slots, simulated):
    """Wrong hints are no requests, and what the device's buffers answer are some."""
    made, _ = files
    with made(slots) as cache:
        usage = Usage(tmp_path / "usage.json", dict.fromkeys(range(LAYERS), EXPERTS))
        cache.warm(usage)
        lane = Simulated(eager=True) if simulated else None
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        with cache.get(1, 2, asked=False):  # so that the host has what is hinted
            pass
        before = cache.counters
        for key in ((0, 1), (1, 3), (1, 3)):
            with copies.get(*key):
                copies.hint(1, 2)
        copies.close()
        after = cache.counters
        assert after.hits + after.misses - before.hits - before.misses == usage.asked == 3
        assert usage.most() == [(1, 3), (0, 1)]


def test_the_host_does_not_wait_for_a_hint(files):
    made, whole = files
    with made(3) as cache:
        lane = Simulated(eager=False)
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        with cache.get(1, 2):
            pass
        held, go = threading.Event(), threading.Event()
        inner = cache.get

        def slow(layer, expert, **asked):
            if (layer, expert) == (1, 2):
                held.set()
                assert go.wait(10)
            return inner(layer, expert, **asked)

        cache.get = slow
        with copies.get(0, 0) as shard:
            copies.hint(1, 2)
            assert held.wait(10) and copies.holds(1, 2)  # the thread stands still, and the host goes on
            assert shard.gate.codes.shape == cache.layout.tensors[0][2]
        go.set()
        with copies.get(1, 2) as shard:
            lane.now.until(None)
            assert torch.equal(shard.gate.codes, cache.layout.shard(whole[1, 2]).gate.codes)
        copies.close()


def test_a_read_that_fails_is_told_to_who_asks_and_can_be_tried_again(files):
    made, whole = files
    with made(3) as cache:
        lane = Simulated(eager=True)
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        inner, broken = cache.get, [True]

        def failing(layer, expert, **asked):
            if broken and broken.pop():
                raise ShardError("file", layer, expert, "unreadable")
            return inner(layer, expert, **asked)

        with copies.get(0, 1) as shard:
            lane.now.add(lambda codes=shard.gate.codes: codes.clone())
        cache.get = failing
        with pytest.raises(ShardError, match="unreadable"), copies.get(0, 2):
            pass
        assert not copies.holds(0, 2)
        assert walked(copies, lane, whole)
        with pytest.raises(KeyError), copies.get(0, 3):
            raise KeyError("what computes may fail")
        assert walked(copies, lane, whole)
        copies.close()
        with pytest.raises(AssertionError), copies.get(0, 1):
            pass


def test_a_copy_that_failed_leaves_the_waits_to_the_next_one(files):
    """A hint that fails in the thread is displaced before anyone asks for it."""
    made, whole = files
    with made(3) as cache:
        lane = Simulated(eager=True)
        copies = DeviceExperts(cache, torch.device("cpu"), buffers=1, lane=lane)
        found = []
        with copies.get(0, 1) as shard:
            lane.now.add(lambda codes=shard.gate.codes: found.append(codes.clone()))
        inner = cache.get
        cache.get = lambda layer, expert, **asked: (_ for _ in ()).throw(
            ShardError("file", layer, expert, "gone")
        )
        with cache_holds(cache):
            copies._slots[0].hinted = False
            copies.hint(1, 1)
        assert isinstance(copies._slots[0].copied.exception(10), ShardError)
        cache.get = inner
        with copies.get(2, 1):
            pass
        lane.now.until(None)
        assert torch.equal(found[0], cache.layout.shard(whole[0, 1]).gate.codes)
        copies.close()


class cache_holds:
    """For a while, a cache says that it holds everything."""

    def __init__(self, cache):
        self.cache = cache

    def __enter__(self):
        self.cache.holds = lambda *_: True

    def __exit__(self, *_):
        del self.cache.holds


def test_copies_that_nobody_has_any_more_end_their_thread(files):
    made, _ = files
    with made(3) as cache:
        lane = Simulated(eager=False)
        copies = DeviceExperts(cache, torch.device("cpu"), lane=lane)
        with copies.get(0, 1):
            copies.hint(1, 2)
        assert any(thread.name.startswith("expert-copies") for thread in threading.enumerate())
        del copies
        gc.collect()
        assert lane.closed == 1
        assert not any(thread.name.startswith("expert-copies") for thread in threading.enumerate())


# ---------------------------------------------------------------- pinned memory


class Runtime:
    """Takes the place of CUDA's; `codes` are what registering gives in turn, then 0."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.pinned, self.calls = list(codes), set(), 0

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.calls += 1
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            assert place not in self.pinned
            self.pinned.add(place)
        return code

    def cudaHostUnregister(self, place: int) -> int:
        self.pinned.remove(place)
        return 0


def test_memory_is_pinned_once_and_released():
    one, other = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    runtime = Runtime()
    pinned = Pinned(runtime)
    assert all(pinned.pin(host) for host in (one, other, one, other))
    assert runtime.calls == 2 and runtime.pinned == {one.data_ptr(), other.data_ptr()}
    pinned.release()
    pinned.release()
    assert runtime.pinned == set()


def test_a_driver_that_refuses_is_asked_once_and_the_log_says_so(caplog):
    hosts = [torch.zeros(4096, dtype=torch.uint8) for _ in range(3)]
    runtime = Runtime(0, 2)
    pinned = Pinned(runtime)
    with caplog.at_level(logging.WARNING, "perspectron"):
        assert [pinned.pin(host) for host in hosts] == [True, False, True]
    assert runtime.calls == 2 and runtime.pinned == {hosts[0].data_ptr()}
    (line,) = caplog.messages
    assert "4096 bytes" in line and "CUDA error 2" in line and "more slowly" in line
    pinned.release()
    assert runtime.pinned == set()


def test_memory_that_is_pinned_already_is_left_to_who_pinned_it(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    runtime = Runtime()
    pinned = Pinned(runtime)
    assert pinned.pin(torch.zeros(4096, dtype=torch.uint8))
    pinned.release()
    assert runtime.calls == 0
