"""Caches replayed: what the arithmetic says, an actual cache does."""

import json
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perspectron.stream.plan import _least, _run, uniform_hit_rate
from perspectron.stream.trace import COLD, Trace, load, missed, save, stack_distances
from perspectron.util.errors import ConfigError, DataError, PerspectronError
from tests.refusals import refused

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


def random_trace(T: int = 40, experts: tuple[int, ...] = (4, 8, 4), right: float = 0.5) -> Trace:
    draw = np.random.default_rng(0)
    chosen_TL, other_TL = (draw.integers(0, experts, (T, len(experts))) for _ in "ab")
    guessed_TL = np.where(draw.random(chosen_TL.shape) < right, chosen_TL, other_TL)
    return Trace("m", tuple(range(len(experts))), experts, chosen_TL, guessed_TL)


def test_stack_distances_are_those_counted_by_hand():
    """a b c a a b d c: since the last a, b and c; none; c and a; then a, b and d."""
    keys_N = np.array([0, 1, 2, 0, 0, 1, 3, 2])
    assert stack_distances(keys_N).tolist() == [COLD, COLD, COLD, 2, 0, 2, COLD, 3]
    assert stack_distances(keys_N[:0]).tolist() == []
    assert stack_distances(keys_N[:1]).tolist() == [COLD]


@given(KEYS, st.integers(1, 11))
def test_distances_tell_every_caches_hits(keys_N, slots):
    distance_N = stack_distances(keys_N)
    assert ((distance_N != COLD) & (distance_N < slots)).tolist() == lru(keys_N.tolist(), slots)


def test_a_trace_is_used_token_after_token_and_layer_after_layer():
    """The same id in another layer is another expert."""
    trace = random_trace()
    keys = [(layer, e) for row in trace.chosen_TL.tolist() for layer, e in enumerate(row)]
    for slots in range(1, trace.shards + 1):
        assert missed(stack_distances(trace.keys_N), slots) == lru(keys, slots).count(False)


def test_the_share_of_right_guesses_leaves_the_first_layer_out():
    trace = random_trace()
    right = [(trace.chosen_TL[:, layer] == trace.guessed_TL[:, layer]).mean() for layer in (1, 2)]
    assert trace.guessed_right_L().tolist() == pytest.approx(right)
    assert random_trace(right=1.0).guessed_right_L().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("experts", "slots"), [((4,) * 6, 12), ((2, 16, 4, 4), 9), ((8,), 5), ((4, 4), 1), ((3, 1), 2)]
)
def test_uniform_routing_hits_as_often_as_counted(experts, slots):
    draw = np.random.default_rng(1)
    chosen_TL = draw.integers(0, experts, (40_000, len(experts)))
    trace = Trace("m", tuple(range(len(experts))), experts, chosen_TL, chosen_TL)
    hits = 1 - missed(stack_distances(trace.keys_N), slots) / chosen_TL.size
    assert uniform_hit_rate(experts, slots) == pytest.approx(hits, abs=0.006)


@pytest.mark.parametrize("slots", [1, 7, 40])
def test_a_cache_of_random_uses_lacks_what_an_actual_one_does(slots):
    cache, keys_TL = OrderedDict(), np.random.default_rng(2).integers(0, 50, (300, 4))
    lacked = _run(cache, keys_TL[:100], slots), _run(cache, keys_TL[100:], slots)
    hits = lru(keys_TL.ravel().tolist(), slots)
    assert lacked == (hits[:400].count(False), hits[400:].count(False))
    assert sum(lacked) == missed(stack_distances(keys_TL.ravel()), slots)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_experts_of_a_token_are_those_of_the_least_numbers_in_order(count):
    x_TE = np.random.default_rng(3).random((40, 8))
    assert _least(x_TE, count).tolist() == x_TE.argsort(1)[:, :count].tolist()


def test_uniform_routing_at_the_ends():
    rates = [uniform_hit_rate((4, 4), slots) for slots in range(9)]
    assert rates[0] == rates[1] == 0 and rates[8] == 1
    assert all(one <= other for one, other in pairwise(rates))
    assert uniform_hit_rate((4,), 1) == pytest.approx(1 / 4, abs=0.005)  # the same again
    assert uniform_hit_rate([128] * 60, 60) == pytest.approx(1 / 128, abs=0.005)
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
    with refused(DataError, path):
        load(path)


@pytest.mark.parametrize("text", ["[]", "{}", "", "3"])
def test_what_is_no_trace_is_refused_with_its_file(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with refused(PerspectronError, tmp_path / "t.json"):
        load(tmp_path / "t.json")


def test_a_trace_of_nothing_is_refused():
    with refused(ConfigError, "tokens"):
        Trace("m", (0,), (4,), np.zeros((0, 1), int), np.zeros((0, 1), int))
