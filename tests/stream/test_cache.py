"""The cache: right bytes at any size, one read for all who ask, demand before hints, errors that arrive."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from perspectron.stream import reader as shards
from perspectron.stream.cache import ShardCache
from perspectron.stream.reader import pread
from perspectron.stream.schedule import Entry, Schedule
from perspectron.stream.usage import Usage
from perspectron.util.errors import ConfigError, ShardError
from tests.refusals import refused
from tests.waiting import PATIENCE, until


def same(shard, want) -> bool:
    return all(a.codes.equal(b.codes) and a.scales.equal(b.scales) for a, b in zip(shard, want, strict=True))


def readers() -> int:
    return sum(thread.name.startswith("expert-reader") for thread in threading.enumerate())


class Gate:
    """Reads wait until their offset is let through; `seen` are those that began."""

    def __init__(self, *closed: int) -> None:
        self.closed = {offset: threading.Event() for offset in closed}
        self.seen: list[int] = []

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.seen.append(offset)
        if offset in self.closed:
            assert self.closed[offset].wait(10)
        return pread(fd, buffer, offset)

    def open(self, offset: int) -> None:
        self.closed[offset].set()


@pytest.fixture
def plain(tmp_path: Path, lab):
    """(path, experts, offset of each): six experts in full."""
    path = tmp_path / "layer-0"
    experts = lab.plain(path, 0, 6)
    with lab.open(path) as file:
        return path, experts, [file.header.offset(expert) for expert in range(6)]


@pytest.mark.parametrize("method", ["direct", "buffered"])
@pytest.mark.parametrize("slots", range(1, 9))
def test_any_size_gives_the_same_bytes(tmp_path: Path, lab, slots: int, method) -> None:
    """Two layers of six, of which four are stored; the same expert differs between the layers."""
    want, files = {}, []
    for layer in (0, 7):
        for expert, buffer in lab.mixed(tmp_path / f"{layer}", layer).items():
            want[layer, expert] = lab.layout.shard(buffer)
        try:
            files.append(lab.open(tmp_path / f"{layer}", method=method))
        except ConfigError:
            pytest.skip("no direct reads on this disk")
    assert not same(want[0, 0], want[7, 0])
    with ShardCache(files, slots * lab.layout.bytes) as cache:
        assert cache.slots == slots
        assert cache.distinct == 8
        assert cache.resident == (slots == 8)
        assert readers() == (0 if cache.resident else 2)
        chosen = np.random.default_rng(slots)
        for i in range(100):
            layer, expert = (0, 7)[chosen.integers(2)], int(chosen.integers(6))
            cache.hint((0, 7)[i % 2], i % 6)
            with cache.get(layer, expert) as shard:
                assert same(shard, want[layer, expert])
        counters = cache.counters
        assert counters.hits + counters.misses == 100
        assert (counters.misses > 0) == (slots < 8)
        assert counters.useful + counters.wasted <= counters.prefetched
    assert readers() == 0


def test_what_is_the_same_shares_a_slot(tmp_path: Path, lab) -> None:
    lab.mixed(tmp_path / "layer", 3)
    with ShardCache([lab.open(tmp_path / "layer")], 2 * lab.layout.bytes) as cache:
        with cache.get(3, 0) as first, cache.get(3, 5) as second:
            assert first is second
        assert (cache.counters.misses, cache.counters.hits) == (1, 1)


def test_the_least_recently_used_goes_first_and_what_is_held_stays(plain, lab) -> None:
    path, experts, offset = plain
    gate = Gate()
    with ShardCache([lab.open(path, read=gate)], 3 * lab.layout.bytes) as cache:

        def get(expert: int) -> None:
            with cache.get(0, expert) as shard:
                assert same(shard, lab.layout.shard(experts[expert]))

        for expert in (0, 1, 2, 0, 3, 0, 2, 1):
            get(expert)
        assert gate.seen == [offset[i] for i in (0, 1, 2, 3, 1)]
        with cache.get(0, 5):
            for expert in (0, 1, 2, 3):
                get(expert)
            get(5)
        assert gate.seen[5:] == [offset[i] for i in (5, 0, 2, 3)]


def test_one_read_for_all_who_ask(plain, lab) -> None:
    path, experts, offset = plain
    gate = Gate(offset[0])
    found: list[bool] = []
    with ShardCache([lab.open(path, read=gate)], 2 * lab.layout.bytes) as cache:

        def ask() -> None:
            with cache.get(0, 0) as shard:
                found.append(same(shard, lab.layout.shard(experts[0])))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: cache.counters.misses == 8)
        gate.open(offset[0])
        for thread in threads:
            thread.join()
        assert found == [True] * 8
        assert gate.seen == [offset[0]]


def test_a_hint_is_read_ahead_and_not_again(plain, lab) -> None:
    path, _, offset = plain
    gate = Gate()
    with ShardCache([lab.open(path, read=gate)], 2 * lab.layout.bytes) as cache:
        with cache.get(0, 0):
            cache.hint(0, 1)
            cache.hint(0, 1)
            cache.hint(0, 0)
            until(lambda: gate.seen == [offset[0], offset[1]])
        with cache.get(0, 1):
            pass
        assert gate.seen == offset[:2]
        counters = cache.counters
        assert (counters.prefetched, counters.useful, counters.wasted) == (1, 1, 0)


@pytest.mark.parametrize("several", [False, True])
def test_hints_are_heeded_as_long_as_most_come_true(several: bool) -> None:
    """A cache of few slots is worse off with guesses that displace what is used, and the more so where the disk is busy
    with several experts of a layer."""
    schedule = Schedule(4, several=several)

    def tokens(count: int, right: float) -> bool:
        """Whether a hint counts, after those for two layers ahead were right that often."""
        draw = np.random.default_rng(0)
        for _ in range(count):
            for layer in range(8):
                key = layer, 0
                held = schedule.entries[key] = Entry(key, None, threading.Condition())
                schedule.request(held)
                schedule.asked.clear()
                del schedule.entries[key]
                for ahead in (1, 2):
                    schedule.trusts(((layer + ahead) % 8, 0 if draw.random() < right else 1))
        return schedule.trusts((0, 0))

    assert tokens(20, 1.0) and schedule.trust == 1
    assert not tokens(40, 0.1)
    assert not tokens(40, 0.1)
    assert tokens(40, 0.9)
    assert tokens(40, 0.75) == (not several)


def test_a_hint_makes_way(plain, lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader, which is at the first piece of a hint: it goes on to what is asked for."""
    monkeypatch.setattr(shards, "PIECE", 4096)
    path, experts, offset = plain
    gate = Gate(offset[1])
    with ShardCache([lab.open(path, read=gate)], 2 * lab.layout.bytes, readers=1) as cache:
        cache.hint(0, 1)
        until(lambda: gate.seen == [offset[1]])
        found: list[bool] = []

        def ask() -> None:
            with cache.get(0, 0) as shard:
                found.append(same(shard, lab.layout.shard(experts[0])))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: cache.counters.misses == 1)
        gate.open(offset[1])
        thread.join()
        assert found == [True]
        assert gate.seen == [offset[1], offset[0], offset[0] + 4096]
        assert cache.counters.wasted == 1 and cache.counters.bytes_wasted == 4096
        with cache.get(0, 1) as shard:
            assert same(shard, lab.layout.shard(experts[1]))


def test_a_start_makes_the_only_reader_give_up_a_hint(plain, lab, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shards, "PIECE", 4096)
    path, experts, offset = plain
    usage, gate = Usage(tmp_path / "usage.json", {0: 6}), Gate(offset[1])
    for expert in (0, 0, 2):
        usage.count(0, expert, ready=False)
    with ShardCache([lab.open(path, read=gate)], 2 * lab.layout.bytes, readers=1) as cache:
        cache.hint(0, 1)
        until(lambda: gate.seen == [offset[1]])
        thread = threading.Thread(target=lambda: cache.warm(usage))
        thread.start()
        until(lambda: bool(cache._schedule.asked))
        gate.open(offset[1])
        thread.join()
        assert [cache.holds(0, expert) for expert in range(3)] == [True, False, True]
        with cache.get(0, 2) as shard:
            assert same(shard, lab.layout.shard(experts[2]))


def test_a_hint_goes_on_beside_a_reader_that_is_at_what_is_asked_for(plain, lab, monkeypatch) -> None:
    monkeypatch.setattr(shards, "PIECE", 4096)
    path, experts, offset = plain
    gate = Gate(offset[0], offset[1])
    with ShardCache([lab.open(path, read=gate)], 3 * lab.layout.bytes) as cache:
        cache.hint(0, 1)
        until(lambda: gate.seen == [offset[1]])
        thread = threading.Thread(target=lambda: cache.get(0, 0).__enter__())
        thread.start()
        until(lambda: offset[0] in gate.seen)
        gate.open(offset[1])
        until(lambda: offset[1] + 4096 in gate.seen)
        assert cache.counters.hits == 0
        gate.open(offset[0])
        thread.join()
        with cache.get(0, 1) as shard:
            assert same(shard, lab.layout.shard(experts[1]))
        assert cache.counters.useful == 1


def test_an_error_arrives_and_a_later_request_tries_again(plain, lab) -> None:
    path, experts, _ = plain
    broken = True

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, buffer, offset)

    with ShardCache([lab.open(path, read=read)], 2 * lab.layout.bytes) as cache:
        cache.hint(0, 2)  # an error nobody waits for is nobody's
        errors: list[ShardError] = []

        def ask() -> None:
            with pytest.raises(ShardError) as error, cache.get(0, 1):
                pass
            errors.append(error.value)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(error) for error in errors}) == 4
        assert all((error.layer, error.expert) == (0, 1) for error in errors)
        broken = False
        for expert in (1, 2):
            with cache.get(0, expert) as shard:
                assert same(shard, lab.layout.shard(experts[expert]))


def test_what_is_no_shard_error_arrives_as_one(plain, lab) -> None:
    def read(fd: int, buffer: memoryview, offset: int) -> int:
        raise MemoryError

    path, _, _ = plain
    with ShardCache([lab.open(plain[0], read=read)], 2 * lab.layout.bytes) as cache:
        with refused(ShardError, path, 1), cache.get(0, 1):
            pass
        assert readers() == 2
    with refused(ShardError, path):
        ShardCache([lab.open(path, read=read)], 6 * lab.layout.bytes)
    assert readers() == 0


def test_a_wait_for_a_disk_or_a_slot_ends_with_the_expert_named(plain, lab) -> None:
    """A disk that hangs, and slots that nobody releases."""
    path, experts, offset = plain
    gate = Gate(offset[0])
    with ShardCache([lab.open(path, read=gate)], 2 * lab.layout.bytes, deadline=0.2) as cache:
        with refused(ShardError, "expert", 0, 0.2), cache.get(0, 0):
            pass
        gate.open(offset[0])
        cache.hint(0, 1)
        until(lambda: cache.holds(0, 0) and cache.holds(0, 1))
        with cache.get(0, 0) as shard, cache.get(0, 1):
            assert same(shard, lab.layout.shard(experts[0]))
            with refused(ShardError, "expert", 2), cache.get(0, 2):
                pass
            assert same(shard, lab.layout.shard(experts[0]))
        cache.hint(0, 2)
        until(lambda: cache.holds(0, 2))
        with cache.get(0, 2) as shard:
            assert same(shard, lab.layout.shard(experts[2]))


def test_close_ends_what_waits(plain, lab) -> None:
    path, _, _ = plain
    before = len(os.listdir("/proc/self/fd"))
    cache = ShardCache([lab.open(path)], lab.layout.bytes)
    held = cache.get(0, 0)
    held.__enter__()
    errors: list[ShardError] = []

    def ask() -> None:
        with pytest.raises(ShardError) as error, cache.get(0, 1):
            pass
        errors.append(error.value)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: cache.counters.misses == 2)
    cache.close()
    thread.join()
    assert isinstance(errors[0], ShardError)
    held.__exit__(None, None, None)
    cache.close()
    cache.hint(0, 3)
    with refused(ShardError, path, "expert", 3), cache.get(0, 3):
        pass
    assert readers() == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_resident_cache_outlives_its_file(plain, lab) -> None:
    path, experts, _ = plain
    with ShardCache([lab.open(path)], 10**9) as cache:
        path.unlink()
        cache.hint(0, 0)
        for expert in range(6):
            with cache.get(0, expert) as shard:
                assert same(shard, lab.layout.shard(experts[expert]))


def test_a_budget_below_one_expert_is_refused(tmp_path: Path, lab) -> None:
    lab.plain(tmp_path / "0", 0, 2)
    lab.plain(tmp_path / "1", 1, 2)
    with (
        lab.open(tmp_path / "0") as zero,
        lab.open(tmp_path / "1") as one,
        refused(ConfigError, "cache", 8191, 8192),
    ):
        ShardCache([zero, one], 8191)
    assert readers() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_an_error(plain, lab) -> None:
    path, _, _ = plain
    with ShardCache([lab.open(path)], 2 * lab.layout.bytes) as cache:
        with cache.get(0, 0):
            pass
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(PATIENCE)
            try:
                with cache.get(0, 0):
                    pass
            except ShardError:
                cache.hint(0, 1)
                cache.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with cache.get(0, 1):
            pass


def test_a_process_that_does_not_close_ends(plain) -> None:
    code = f"""
import sys
from pathlib import Path
from perspectron.stream.cache import ShardCache
from perspectron.stream.reader import ShardFile
cache = ShardCache([ShardFile(Path({str(plain[0])!r}))], 3 * 8192)
for i in range(100):
    cache.hint(0, i % 6)
with cache.get(0, 5):
    print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert "Traceback" not in run.stderr
