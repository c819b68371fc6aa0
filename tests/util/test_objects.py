"""Stores of objects, and leases over them: what is put is whole, and a name has one writer."""

import itertools
import os
import threading
import time

import pytest

from perspectron.util import lease, objects
from perspectron.util.errors import ConfigError, StateError, StorageError
from perspectron.util.lease import Busy, Leases
from perspectron.util.objects import Folder, Objects, Remote, folder_of, objects_of
from tests.refusals import refused

NUMBERS = itertools.count()


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path) -> Objects:
    return Folder(tmp_path) if request.param == "folder" else objects_of(f"memory://objects{next(NUMBERS)}")


def test_objects_are_put_listed_read_and_deleted(store) -> None:
    store.check()
    assert store.get("a/b") is None and store.listed("a") == {} == store.listed("a", deep=True)
    store.put("a/b", b"1")
    store.put("a/b", b"22", durable=False)
    store.put("a/c/d", b"333")
    assert store.listed("a") == {"b": 2} and store.listed("a", deep=True) == {"b": 2, "c/d": 3}
    assert store.gets(["a/b", "a/x"]) == [b"22", None]
    assert store.all_listed(["a/c", "x"]) == [{"d": 3}, {}]
    for _ in range(2):
        store.delete("a/b")
    assert store.get("a/b") is None and store.listed("a") == {}


def test_a_reader_meets_whole_objects_while_others_write(store) -> None:
    ends, wrong = threading.Event(), []

    def read() -> None:
        while not ends.is_set():
            data = store.get("a/x")
            if (data is not None and len({*data}) != 1) or len(data or b"") not in (0, 100_000):
                wrong.append(data)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for byte in range(200):
        store.put("a/x", bytes([byte]) * 100_000, durable=False)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_urls_say_what_they_need(tmp_path) -> None:
    assert folder_of("a/b") is not None and folder_of("memory://x") is None
    assert isinstance(objects_of(f"file://{tmp_path}"), Folder)
    with refused(ConfigError, "store", "file://a"):
        objects_of("file://a")
    with refused(ConfigError, "store", "nothing://a"):
        objects_of("nothing://a")
    for name in ("../x", "/x", "a//b"):
        with pytest.raises(StateError):
            Folder(tmp_path).put(name, b"")


def test_a_store_that_is_gone_or_does_not_answer_is_named(tmp_path, monkeypatch) -> None:
    folder = Folder(tmp_path / "mounted")
    folder.put("a/b", b"1")
    (tmp_path / "mounted").rename(tmp_path / "away")
    for work in (lambda: folder.get("a/b"), lambda: folder.listed("a")):
        with refused(StorageError, tmp_path / "mounted"):
            work()
    (tmp_path / "mounted").mkdir()  # where its disk was
    works = (lambda: folder.get("a/b"), lambda: folder.listed("a"), lambda: folder.put("a/b", b"2"))
    for work in works:
        with refused(StorageError, tmp_path / "mounted"):
            work()
    assert list((tmp_path / "mounted").iterdir()) == []
    slow = Remote("memory://slow", patience=0.05)
    monkeypatch.setattr(slow._system, "pipe_file", lambda *_: time.sleep(0.3))
    with refused(StorageError, "memory://slow"):
        slow.put("a", b"1")
    monkeypatch.setattr(slow._system, "cat_file", lambda *_: 1 / 0)
    with refused(StorageError, "memory://slow", "ZeroDivisionError"):
        slow.get("a")


def test_what_a_killed_writer_left_is_deleted_when_it_is_old(tmp_path) -> None:
    folder = Folder(tmp_path)
    folder.put("a/b", b"1")
    for name, age in ((".1-old.tmp", 2 * objects.ABANDONED), (".1-new.tmp", 0)):
        (tmp_path / "a" / name).write_bytes(b"")
        os.utime(tmp_path / "a" / name, (time.time() - age,) * 2)
    assert folder.listed("a", deep=True) == {"b": 1}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b", ".1-new.tmp"}


def test_a_name_has_one_writer_among_many(store) -> None:
    """Threads of two processes' leases count with a gap between reading and writing: no count is lost."""
    count, leases = [0], [Leases(store), Leases(store)]

    def add(own: Leases) -> None:
        for _ in range(5):
            held = next(held for pause in own.pauses("x") if (held := own.tried("x")) or time.sleep(pause))
            now = count[0]
            time.sleep(0.001)
            held.check()
            count[0] = now + 1
            own.let_go(held)

    threads = [threading.Thread(target=add, args=(own,)) for own in leases for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [20] and store.listed("leases") == {}


def test_a_lease_is_renewed_and_that_of_a_killed_server_is_taken_over(store, monkeypatch) -> None:
    monkeypatch.setattr(lease, "SKEW", 0.05)
    ours, theirs = Leases(store, 0.4), Leases(store, 0.4)
    held = ours.tried("a.b-c")
    assert held is not None and theirs.tried("a.b-c") is None and theirs.tried("a.b") is not None
    with refused(Busy, "a.b-c"):
        for pause in theirs.pauses("states/a.b-c"):
            assert theirs.tried("a.b-c") is None
            time.sleep(pause)
    held.check()
    ours._held.clear()  # as if its server were killed: nothing renews it
    taken = next(
        taken for pause in theirs.pauses("a.b-c") if (taken := theirs.tried("a.b-c")) or time.sleep(pause)
    )
    assert held.over
    with refused(Busy, "a.b-c"):
        held.check()
    held.renew()
    ours.let_go(held)
    taken.check()


def slow(store: Objects, monkeypatch, seconds: list[float]) -> None:
    """Have objects put so many seconds later."""
    put = store.put

    def later(name: str, data: bytes, *, durable: bool = True) -> None:
        time.sleep(seconds[0])
        put(name, data, durable=durable)

    monkeypatch.setattr(store, "put", later)


def test_a_renewal_that_comes_too_late_gives_a_lease_up(store, monkeypatch) -> None:
    """Another may have it by then."""
    monkeypatch.setattr(lease, "SKEW", 0.05)
    delay = [0.0]
    slow(store, monkeypatch, delay)
    ours, theirs = Leases(store, 0.4), Leases(store, 0.4)
    held = ours.tried("a")
    assert held is not None
    ours._held.clear()
    delay[0] = 0.6
    late = threading.Thread(target=held.renew)
    late.start()
    time.sleep(0.5)
    delay[0] = 0.0
    taken = theirs.tried("a")
    late.join()
    assert taken is not None and held.over
    with refused(Busy, "a"):
        held.check()
    taken.check()
    theirs.let_go(taken)
    assert store.listed("leases") == {}


def test_many_leases_are_renewed_at_once(store, monkeypatch) -> None:
    delay = [0.0]
    own = Leases(store, 1.0)
    held = [own.tried(f"n{number}") for number in range(40)]
    slow(store, monkeypatch, delay)
    delay[0] = 0.05  # two seconds for all, one after another
    time.sleep(2.0)
    assert all(one is not None and not one.over for one in held)
    for one in held:
        own.let_go(one)
