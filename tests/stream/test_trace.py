"""Caches replayed: what the arithmetic says, an actual cache does."""

import json
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perspectron.errors import ConfigError, DataError, PerspectronError
from perspectron.stream.plan import uniform_hit_rate
from perspectron.stream.trace import COLD, Trace, belady, load, reuse, save, stack_distances

KEYS = st.lists(st.integers(0, 9), max_size=60).map(lambda keys: np.array(keys, np.int64))


def lru(keys, slots: int) -> list[bool]:
    """Whether each was there."""
    held, hits = OrderedDict(), []
    for key in keys:
        hits.append(key in held)
        held[key] = None
        held.move_to_end(key)
        if len(held) > slots:
            held.popitem(last=False)
    return hits


def least_misses(keys: list[int], slots: int) -> int:
    """Over every way to keep, by dynamic programming over what is held."""
    states = {frozenset(): 0}
    for key in keys:
        following = dict[frozenset, int]()
        for held, missed in states.items():
            if key in held:
                choices = [(held, missed)]
            elif len(held) < slots:
                choices = [(held | {key}, missed + 1)]
            else:
                choices = [(held - {out} | {key}, missed + 1) for out in held]
            for state, count in choices:
                following[state] = min(count, following.get(state, count))
        states = following
    return min(states.values())


def random_trace(T: int = 40, experts: tuple[int, ...] = (4, 8, 4), right: float = 0.5) -> Trace:
    draw = np.random.default_rng(0)
    chosen_TL, other_TL = (draw.integers(0, experts, (T, len(experts))) for _ in "ab")
    guessed_TL = np.where(draw.random(chosen_TL.shape) < right, chosen_TL, other_TL)
    return Trace("m", tuple(range(len(experts))), experts, chosen_TL, guessed_TL)


def test_distances_by_hand():
    """a b c a a b d c: since the last a, b and c; none; c and a; then a, b and d."""
    keys_N = np.array([0, 1, 2, 0, 0, 1, 3, 2])
    assert stack_distances(keys_N).tolist() == [COLD, COLD, COLD, 2, 0, 2, COLD, 3]
    assert stack_distances(keys_N[:0]).tolist() == []
    assert stack_distances(keys_N[:1]).tolist() == [COLD]


@given(KEYS, st.integers(1, 11))
def test_distances_tell_every_caches_hits(keys_N, slots):
    distance_N = stack_distances(keys_N)
    assert ((distance_N != COLD) & (distance_N < slots)).tolist() == lru(keys_N.tolist(), slots)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
def test_no_cache_misses_less_than_beladys(keys, slots):
    assert belady(np.array(keys), slots) == least_misses(keys, slots)


def test_a_trace_is_used_token_after_token_and_layer_after_layer():
    """The same id in another layer is another expert."""
    trace = random_trace()
    keys = [(layer, e) for row in trace.chosen_TL.tolist() for layer, e in enumerate(row)]
    found = reuse(trace)
    for slots in range(1, trace.shards + 1):
        assert found.missed(slots) == found.read(slots) == lru(keys, slots).count(False)


@pytest.mark.parametrize("slots", range(1, 17))
def test_guesses_are_read_between_a_layer_and_the_next(slots):
    trace, uses = random_trace(), []
    for chosen, guessed in zip(trace.chosen_TL.tolist(), trace.guessed_TL.tolist(), strict=True):
        for layer, expert in enumerate(chosen):
            uses.append((True, (layer, expert)))
            if layer + 1 < len(chosen):
                uses.append((False, (layer + 1, guessed[layer + 1])))
    hits = lru([key for _, key in uses], slots)
    found = reuse(trace, guess=True)
    assert found.read(slots) == hits.count(False)
    assert found.missed(slots) == sum(asked and not hit for (asked, _), hit in zip(uses, hits, strict=True))


def test_right_guesses_miss_once_a_token():
    """The first layer's expert cannot be guessed; what was guessed right is there even in one slot."""
    trace = random_trace(right=1.0)
    assert trace.guessed_right_L().tolist() == [1, 1]
    assert reuse(trace, guess=True).missed(1) == reuse(trace).missed(1) * 1 / 3 == trace.tokens
    assert reuse(trace, guess=True).read(5) == reuse(trace).read(5)


@pytest.mark.parametrize(
    ("experts", "slots"), [((4,) * 6, 12), ((2, 16, 4, 4), 9), ((8,), 5), ((4, 4), 1), ((3, 1), 2)]
)
def test_uniform_routing_hits_as_often_as_counted(experts, slots):
    draw = np.random.default_rng(1)
    chosen_TL = draw.integers(0, experts, (40_000, len(experts)))
    trace = Trace("m", tuple(range(len(experts))), experts, chosen_TL, chosen_TL)
    hits = 1 - reuse(trace).missed(slots) / chosen_TL.size
    assert uniform_hit_rate(experts, slots) == pytest.approx(hits, abs=0.006)


def test_uniform_routing_at_the_ends():
    rates = [uniform_hit_rate((4, 4), slots) for slots in range(9)]
    assert rates[0] == rates[1] == 0 and rates[8] == 1
    assert all(one <= other for one, other in pairwise(rates))
    assert uniform_hit_rate((4,), 1) == pytest.approx(1 / 4)  # the same again
    assert uniform_hit_rate([128] * 60, 60) == pytest.approx(1 / 128)
    assert uniform_hit_rate([128] * 60, 59) == 0


# ---------------------------------------------------------------- the file


def test_a_trace_comes_back(tmp_path):
    trace = random_trace(300)
    save(tmp_path / "t.json", trace)
    found = load(tmp_path / "t.json")
    assert (found.model, found.layers, found.experts) == (trace.model, trace.layers, trace.experts)
    np.testing.assert_array_equal(found.chosen_TL, trace.chosen_TL)
    np.testing.assert_array_equal(found.guessed_TL, trace.guessed_TL)
    assert (tmp_path / "t.json").stat().st_size < 4 * trace.chosen_TL.size


DAMAGE = [
    {"format": "other"},
    {"layers": None},
    {"layers": [0, 1]},
    {"experts": [1, 1, 1]},
    {"experts": [4, 8, 10**9]},
    {"experts": [4, 8, "x"]},
    {"tokens": -1},
    {"tokens": 0},
    {"tokens": 299},
    {"tokens": 10**15},
    {"tokens": float("inf")},
    {"chosen": "!"},
    {"chosen": "AAAA"},
    {"guessed": 5},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_a_damaged_trace_is_one_line(tmp_path, damage):
    path = tmp_path / "t.json"
    save(path, random_trace(300))
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(DataError, match=r"t\.json: (damaged|not a) trace"):
        load(path)


@pytest.mark.parametrize("text", ["[]", "{}", "", "3"])
def test_what_is_no_trace(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(PerspectronError, match=r"t\.json"):
        load(tmp_path / "t.json")


def test_a_trace_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="tokens"):
        Trace("m", (0,), (4,), np.zeros((0, 1), int), np.zeros((0, 1), int))
