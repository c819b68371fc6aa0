"""Bytes that marks and stores hold."""

import random

import torch
import torch.utils._pytree as pytree

from perspectron.decode import kept
from perspectron.decode.kept import LIVE, Account, Hold, bytes_of
from perspectron.model.cache import Cache
from perspectron.model.state import LMState


def state_of(tokens: int, layers: int = 2) -> LMState:
    parts = [torch.zeros(1, 2, tokens, 4) for _ in range(2 * layers)]
    caches = [
        Cache(k, v, torch.tensor([tokens]), tokens) for k, v in zip(parts[::2], parts[1::2], strict=True)
    ]
    return LMState((*caches, torch.zeros(1, 3)))


def storages(states: list[LMState]) -> int:
    found = {}
    for state in states:
        for x in pytree.tree_leaves(state):
            if isinstance(x, torch.Tensor):
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(found.values())


@torch.inference_mode()
def test_memory_counts_once_whoever_holds_it() -> None:
    """Forks are held and let go at random; all accounts together have the bytes that are there."""
    draw, accounts = random.Random(0), [Account(order) for order in range(3)]
    states, held = [state_of(100), state_of(70)], list[tuple[int, LMState, Hold]]()
    for turn in range(200):
        if draw.random() < 0.4 and held:
            _, _, hold = held.pop(draw.randrange(len(held)))
            if turn % 2:
                hold.let_go()
            del hold
        else:
            states.append(draw.choice(states).fork() if draw.random() < 0.8 else state_of(64 + turn))
            which = draw.randrange(3)
            held.append((which, states[-1], Hold(accounts[which], states[-1])))
        for first in range(3):
            kept = [state for which, state, _ in held if which <= first]
            assert (
                sum(account.bytes for account in accounts[: first + 1]) == storages(kept) == bytes_of(*kept)
            )
    held.clear()
    assert [account.bytes for account in accounts] == [0, 0, 0]


def test_memory_in_the_place_of_what_is_gone_counts_as_it_is(monkeypatch) -> None:
    """A session may have dropped what it is still said to hold, and other memory may have got its number."""
    monkeypatch.setattr(kept, "storage_of", lambda _: (1 << 64, size))
    before, store = LIVE.bytes, Account(0)
    size = 100
    stale = Hold(LIVE, state_of(1))
    assert LIVE.bytes - before == 100
    size = 300
    hold = Hold(store, state_of(3))
    assert store.bytes == 300 and LIVE.bytes == before
    hold.let_go()
    stale.let_go()
    assert store.bytes == 0 and LIVE.bytes == before


def test_a_live_session_holds_its_caches_alone() -> None:
    before, state = LIVE.bytes, state_of(100)
    hold, marks = Hold(LIVE, state), Account(2)
    mark = Hold(marks, state.fork())
    assert LIVE.bytes - before == 4 * 2 * 100 * 4 * 4 + 2 * 8
    assert marks.bytes == 3 * 4 + 2 * 8
    hold.let_go()
    assert LIVE.bytes == before and marks.bytes == 4 * 2 * 100 * 4 * 4 + 2 * 8 + 12
    mark.let_go()
    assert marks.bytes == 0
