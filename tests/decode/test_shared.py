"""Prefixes in a store that several machines share: every bit as without, whatever others write, delete and damage."""

import itertools
import logging
import threading

import pytest
import torch

from perspectron.decode import shared
from perspectron.decode.store import PrefixStore
from perspectron.util.errors import StorageError
from perspectron.util.objects import Folder, Objects, objects_of
from tests.decode.test_rows import prompt_of
from tests.decode.test_store import CHUNK, answered, read, same, small

NUMBERS = itertools.count()


@pytest.fixture(params=["folder", "memory"])
def objects(request, tmp_path) -> Objects:
    return Folder(tmp_path) if request.param == "folder" else objects_of(f"memory://shared{next(NUMBERS)}")


def used(objects: Objects) -> int:
    return sum(sum(objects.listed(kind, deep=True).values()) for kind in ("prefixes", "pages", "chains"))


@pytest.mark.parametrize("design", ["perspective", "gpt2", "ssd"])
def test_with_a_shared_store_every_bit_is_as_without(design: str, tokenizer, objects) -> None:
    model, text, other = small(design), prompt_of(37, 1), prompt_of(37, 2)
    stores = [PrefixStore(model, chunk=CHUNK, shared=objects) for _ in range(2)]
    for prompt in (text[:20], text[:7] + other[:9], text[:15], text[:16] + other[:3], text, text[:23]):
        expected = answered(model, tokenizer, prompt, None)
        for store in stores:  # the second finds what the first has read
            same(answered(model, tokenizer, prompt, store), expected)
            store._disk.flush()
    assert stores[1].counters.misses == 0 and stores[1].counters.tokens_saved > 8 * CHUNK
    assert stores[1].counters.damaged == stores[1].counters.failed == 0
    for store in stores:
        store.close()


def test_servers_that_write_the_same_pages_at_once_do_no_harm(tokenizer, objects) -> None:
    model, texts = small("gpt2"), [prompt_of(30, seed) for seed in (1, 2)]
    expected = [answered(model, tokenizer, text, None) for text in texts]
    stores = [PrefixStore(model, chunk=CHUNK, shared=objects, memory_bytes=0) for _ in range(3)]
    for _ in range(3):
        for store in stores:  # their threads write while the next ones read
            for text, want in zip(texts, expected, strict=True):
                same(answered(model, tokenizer, text, store), want)
    for store in stores:
        store._disk.flush()
        store._disk.collect()
    assert all(store.counters.failed == store.counters.damaged == 0 for store in stores)
    fresh = PrefixStore(model, chunk=CHUNK, shared=objects)
    same(answered(model, tokenizer, texts[0], fresh), expected[0])
    assert fresh.counters.tokens_saved == len(texts[0]) + 1
    places = [name.rpartition(".")[0] for name in objects.listed("prefixes", deep=True)]
    assert len(places) == len({*places})


@pytest.mark.slow
def test_damaged_foreign_and_missing_objects_are_read_again(tokenizer, objects) -> None:
    model, text = small("gpt2"), prompt_of(30, 3)
    expected = answered(model, tokenizer, text, None)
    for kind, change in itertools.product(("pages", "prefixes", "chains"), ("flip", "cut", "other", "gone")):
        first = PrefixStore(model, chunk=CHUNK, shared=objects)
        same(answered(model, tokenizer, text, first), expected)
        first._disk.flush()
        names = sorted(objects.listed(kind, deep=True))
        for name in names:
            data = objects.get(f"{kind}/{name}")
            changed = {
                "flip": data[:-1] + bytes([data[-1] ^ 1]),
                "cut": data[: len(data) // 2],
                "other": b"x\0",
            }
            objects.delete(f"{kind}/{name}")
            if change in changed:
                objects.put(f"{kind}/{name}", changed[change])
        for _ in range(2):
            store = PrefixStore(model, chunk=CHUNK, shared=objects)
            same(answered(model, tokenizer, text, store), expected)
            store._disk.flush()
    assert names


def test_what_is_least_used_goes_and_pages_that_nothing_names_after_a_while(
    tokenizer, objects, monkeypatch
) -> None:
    model, texts = small("gpt2"), [prompt_of(40, seed) for seed in range(6)]
    store = PrefixStore(model, chunk=CHUNK, shared=objects, memory_bytes=0)
    clock = [0.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(shared.time, "time", lambda: 1e9 + clock[0])
    for text in texts:
        clock[0] += 10
        answered(model, tokenizer, text, store, count=1)
        store._disk.flush()
    whole = used(objects)
    store._disk.budget = whole // 2
    pages = {*objects.listed("pages")}
    store._disk.collect()
    assert {*objects.listed("pages")} == pages, "who reads what they belong to may still do so"
    clock[0] += shared.GRACE + 1
    store._disk.collect()
    assert whole // 4 < used(objects) <= whole // 2 and store.counters.evicted > 0
    fresh = PrefixStore(model, chunk=CHUNK, shared=objects, memory_bytes=0)
    for text in texts:
        same(answered(model, tokenizer, text, fresh), answered(model, tokenizer, text, None))
    assert fresh.counters.damaged == 0 and fresh.counters.tokens_saved > 0


def test_a_state_that_has_no_room_alone_takes_nobody_elses(tokenizer, objects) -> None:
    model = small("gpt2")
    store = PrefixStore(model, chunk=CHUNK, shared=objects, memory_bytes=0)
    for seed in range(3):
        answered(model, tokenizer, prompt_of(7, seed), store, count=1)
    store._disk.flush()
    kept = objects.listed("prefixes", deep=True)
    store._disk.budget = used(objects)
    ids, state = read(model, tokenizer, 60, 4)
    store.put(store.path(ids), 60, state, torch.zeros(1, 32), 1.0)
    store._disk.flush()
    store._disk.collect()
    assert objects.listed("prefixes", deep=True) == kept


def test_readers_and_a_collector_at_once(tokenizer, objects, monkeypatch) -> None:
    """Another server collects all it can, all the time: texts are read, or gone on with, and no bit differs."""
    monkeypatch.setattr(shared, "GRACE", 0.0)
    model, texts = small("gpt2"), [prompt_of(30, seed) for seed in range(3)]
    expected, ends = [answered(model, tokenizer, text, None) for text in texts], threading.Event()
    other = PrefixStore(model, chunk=CHUNK, shared=objects, disk_bytes=1)

    def collect() -> None:
        while not ends.is_set():
            other._disk.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for _ in range(5):
            store = PrefixStore(model, chunk=CHUNK, shared=objects)
            for text, want in zip(texts, expected, strict=True):
                same(answered(model, tokenizer, text, store), want)
            assert store.counters.damaged == 0
            store.close()
    finally:
        ends.set()
        thread.join()


class Failing(Objects):
    """A store whose puts, or all requests, fail."""

    url = "failing://"

    def __init__(self, folder: Objects) -> None:
        self.folder, self.fails = folder, ()

    def _do(self, name, *args, **options):
        if name in self.fails:
            raise StorageError(f"{self.url}: not written (No space left on device)")
        return getattr(self.folder, name)(*args, **options)

    def put(self, *args, **options):
        return self._do("put", *args, **options)

    def get(self, name):
        return self._do("get", name)

    def listed(self, *args, **options):
        return self._do("listed", *args, **options)

    def delete(self, name):
        return self._do("delete", name)


@pytest.mark.parametrize("fails", [("put",), ("put", "get", "listed", "delete"), ("get",), ("listed",)])
def test_a_store_that_is_full_or_gone_is_said_once_and_texts_are_read(
    fails, tokenizer, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(shared, "REST", 0.0)
    model, store = small("perspective"), Failing(Folder(tmp_path))
    texts = [prompt_of(30, seed) for seed in range(3)]
    kept = PrefixStore(model, chunk=CHUNK, shared=store, memory_bytes=0)
    answered(model, tokenizer, texts[0], kept)
    kept._disk.flush()
    store.fails = fails
    with caplog.at_level(logging.WARNING, "perspectron"):
        for text in texts:
            same(answered(model, tokenizer, text, kept), answered(model, tokenizer, text, None))
            kept._disk.flush()
    said = [record.message for record in caplog.records]
    assert 1 <= len(said) <= 3 and all("No space" in words for words in said) and kept.counters.failed > 0
    store.fails = ()
    same(answered(model, tokenizer, texts[0], kept), answered(model, tokenizer, texts[0], None))
    assert kept.counters.hits > 0
    kept.close()
