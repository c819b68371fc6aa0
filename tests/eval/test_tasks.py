"""Synthetic tasks against solvers that read a text as a person would, and chance against counting."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from perspectron.data.loader import IGNORE
from perspectron.eval.reasoning import Brevo, Depo, Mano, values
from perspectron.eval.recall import PROFILES, TEST, TRAIN, WATCH, stream
from perspectron.eval.tasks import MQAR, Needle, SelectiveCopy, Task
from perspectron.eval.tracking import Brackets, Parity, Permutations, products
from perspectron.util.errors import ConfigError
from tests.refusals import refused

SMALL = (
    MQAR(32, pairs=4, keys=16, values=16),
    MQAR(24, pairs=8, keys=8, values=8, gaps="uniform"),
    SelectiveCopy(24, letters=5, kinds=4),
    Needle(12, facts=1, keys=3, values=4, words=5),
    Needle(12, facts=4, keys=5, values=6, words=5),
    Needle(20, distance=2, facts=3, keys=3, values=4, words=5),
    Needle(20, distance=19, facts=2, keys=3, values=4, words=5),
    Permutations(12, n=3),
    Permutations(6, n=4),
    Parity(16),
    Brackets(32, kinds=3, depth=4),
    Brackets(32, kinds=3, depth=4, reach=2),
    Depo(20, things=5, hops=3, questions=4, names=7),
    Depo(24, things=6, hops=5, questions=4, names=6, fewest=5),
    Brevo(24, things=5, needs=2, names=6),
    Mano(9, operations=3, modulus=5),
)
every = pytest.mark.parametrize("task", SMALL, ids=lambda task: f"{task.name}-{task.length}")


def recall(task, ids):
    """{place: answer}, by reading from left to right; also the letters and facts of other tasks of looking up."""
    answers, value_of = {}, {}
    for t, id in enumerate(ids[: 2 * task.pairs]):
        if t % 2:
            value_of[ids[t - 1]] = id
    for t in range(2 * task.pairs, len(ids)):
        if ids[t] in value_of:
            answers[t] = value_of[ids[t]]
    return answers


def copying(task, ids):
    letters = [id for id in ids if id >= 2]
    marks = [t for t, id in enumerate(ids) if id == 1]
    return dict(zip(marks, letters, strict=True))


def needle(task, ids):
    keys = [t for t, id in enumerate(ids[:-1]) if id < task.keys]
    values = [t for t, id in enumerate(ids) if task.keys <= id < task.keys + task.values]
    assert values == [t + 1 for t in keys] and len(keys) == task.facts
    assert len({ids[t] for t in keys}) == len({ids[t] for t in values}) == task.facts
    (found,) = (t for t in keys if ids[t] == ids[-1])
    if task.distance is not None:
        assert found == len(ids) - 1 - task.distance
    return {len(ids) - 1: ids[found + 1]}


def composing(task, ids):
    every = list(itertools.permutations(range(task.n)))
    answers, where = {}, list(range(task.n))  # where[x]: where thing x stands
    for t, id in enumerate(ids):
        where = [every[id][place] for place in where]
        if t:
            answers[t] = every.index(tuple(where))
    return answers


def parity(task, ids):
    return {t: ids[: t + 1].count(1) % 2 for t in range(1, len(ids))}


def brackets(task, ids):
    answers, stack = {}, []
    for t, id in enumerate(ids):
        if id < task.kinds:
            stack.append((t, id))
        else:
            assert stack.pop()[1] == id - task.kinds
            if stack and t - stack[-1][0] >= task.reach:
                answers[t] = task.kinds + stack[-1][1]
        assert len(stack) <= task.depth
    return answers


def hopping(task, ids):
    """Every pair is read, then followed one step at a time."""
    start = len(ids) - 2 * task.questions
    told = ids[: 2 * task.things]
    after = dict(zip(told[::2], told[1::2], strict=True))
    assert set(after) == set(after.values()) and len(after) == task.things
    assert not any(ids[2 * task.things : start])
    answers = {}
    for t in range(start, len(ids), 2):
        assert task.fewest <= ids[t] - task.names <= task.hops
        thing = ids[t + 1]
        for _ in range(ids[t] - task.names):
            thing = after[thing]
        answers[t + 1] = thing
    return answers


def ordering(task, ids):
    """Of all orders of what is needed, the first by the places at which things were read in which each comes after
    what it needs."""
    mark = ids.index(1 + task.names)
    told = ids[: ids.index(0)] if 0 in ids else ids[:mark]
    pairs = list(zip(told[::2], told[1::2], strict=True))
    assert len(set(pairs)) == len(pairs) and max(Counter(a for a, _ in pairs).values()) <= task.needs
    assert max(Counter(b for _, b in pairs).values()) <= task.needs
    wanted = {ids[mark + 1]}
    while any(b in wanted and a not in wanted for a, b in pairs):
        wanted |= {a for a, b in pairs if b in wanted}
    orders = [
        order
        for order in itertools.permutations(sorted(wanted, key=told.index))
        if all(order.index(a) < order.index(b) for a, b in pairs if b in wanted)
    ]
    first = orders[0]  # permutations come in the order of places
    assert first[-1] == ids[mark + 1] and list(first[:-1]) == ids[mark + 2 :]
    return dict(enumerate(first, mark + 1))


def calculating(task, ids):
    """From right to left, with a stack."""
    equals, (mark, *expression, last) = task.modulus + 4, [id for id in ids if id]
    stack = list[int]()
    for id in reversed(expression):
        if id <= task.modulus:
            stack.append(id - 1)
        else:
            operation = (int.__add__, int.__sub__, int.__mul__)[id - task.modulus - 1]
            stack.append(operation(stack.pop(), stack.pop()))
    count = sum(id > task.modulus for id in expression)
    assert mark == equals + count and last == equals and task.fewest <= count <= task.operations
    assert len(stack) == 1 and not any(ids[: -2 * count - 3])
    return {len(ids) - 1: 1 + stack[0] % task.modulus}


SOLVERS = {
    MQAR: recall,
    SelectiveCopy: copying,
    Needle: needle,
    Permutations: composing,
    Parity: parity,
    Brackets: brackets,
    Depo: hopping,
    Brevo: ordering,
    Mano: calculating,
}


def test_every_task_is_tried():
    assert set(Task.__subclasses__()) == set(SOLVERS) == {type(task) for task in SMALL}


@every
def test_answers_are_those_of_a_plain_solver(task):
    ids_BT, targets_BT = task.draw(np.random.default_rng(1), 50)
    assert ids_BT.shape == targets_BT.shape == (50, task.length)
    assert ids_BT.dtype == targets_BT.dtype == torch.int64
    assert ids_BT.min() >= 0 and max(ids_BT.max(), targets_BT.max()) < task.vocab_size
    for ids, targets in zip(ids_BT.tolist(), targets_BT.tolist(), strict=True):
        asked = {t: answer for t, answer in enumerate(targets) if answer != IGNORE}
        assert asked == SOLVERS[type(task)](task, ids)


@every
def test_a_seed_gives_the_same_texts_and_streams_share_none(task):
    draws = {which: task.draw(stream(3, which), 20) for which in (TRAIN, WATCH, TEST)}
    for which, drawn in draws.items():
        assert all(map(torch.equal, drawn, task.draw(stream(3, which), 20)))
        assert not torch.equal(drawn[0], task.draw(stream(4, which), 20)[0])
    texts = [set(map(tuple, ids_BT.tolist())) for ids_BT, _ in draws.values()]
    for one, other in itertools.combinations(texts, 2):
        assert len(one & other) <= 1  # of parity there are only 65,536


@pytest.mark.parametrize("which", [WATCH, TEST])
def test_texts_to_measure_with_are_not_trained_on(which):
    task = MQAR(32, pairs=4, keys=16, values=16)
    trained = {tuple(ids) for ids in task.draw(stream(0, TRAIN), 20_000)[0].tolist()}
    assert len(trained) == 20_000
    assert not trained & {tuple(ids) for ids in task.draw(stream(0, which), 1000)[0].tolist()}


@every
def test_chance_is_the_best_that_place_and_token_tell(task):
    """Guess, at each place and for each token there, the commonest answer; on as many other texts that is right as
    often as chance says, within what so few texts can tell. A target at the place of its own answer would show."""
    seen = defaultdict(Counter)
    ids_BT, targets_BT = task.draw(np.random.default_rng(2), 20_000)
    for t in range(task.length):
        for id, target in zip(ids_BT[:, t].tolist(), targets_BT[:, t].tolist(), strict=True):
            if target != IGNORE:
                seen[t, id][target] += 1
    right = asked = 0
    ids_BT, targets_BT = task.draw(np.random.default_rng(5), 20_000)
    for t in range(task.length):
        for id, target in zip(ids_BT[:, t].tolist(), targets_BT[:, t].tolist(), strict=True):
            if target != IGNORE:
                asked += 1
                right += bool(seen[t, id]) and seen[t, id].most_common(1)[0][0] == target
    # answers in a text depend on each other: as if there were only the texts
    error = 4 * math.sqrt(task.chance * (1 - task.chance) / 20_000)
    assert right / asked == pytest.approx(task.chance, abs=error)


def looking_back(task, back):
    """Accuracy of who guesses by the last tokens alone, having seen as many texts as it is then asked."""
    halves = task.draw(np.random.default_rng(2), 4000), task.draw(np.random.default_rng(5), 4000)
    seen, found = defaultdict(Counter), []
    for drawn, learning in zip(halves, (True, False), strict=True):
        ids_BT, targets_BT = (each.numpy() for each in drawn)
        for b, t in zip(*(targets_BT != IGNORE).nonzero(), strict=True):
            if t >= back - 1:
                words = tuple(ids_BT[b, t - back + 1 : t + 1])
                if learning:
                    seen[words][targets_BT[b, t]] += 1
                else:
                    found.append(bool(seen[words]) and seen[words].most_common(1)[0][0] == targets_BT[b, t])
    return sum(found) / len(found)


def test_the_last_tokens_of_brackets_say_nothing():
    near, far = Brackets(32, reach=2), Brackets(32)
    assert looking_back(near, 3) > 0.5  # "( [ ]": the bracket asked for is among them
    assert looking_back(far, 3) == pytest.approx(far.chance, abs=0.03)
    assert looking_back(far, 5) < 0.3


def test_a_needle_cannot_be_answered_without_its_key():
    """Each fact is asked as often as the others, wherever it stands among them."""
    task = Needle(32)
    asked = Counter()
    for ids in task.draw(np.random.default_rng(0), 8000)[0].tolist():
        keys = [id for id in ids[:-1] if id < task.keys]
        asked[keys.index(ids[-1])] += 1
    assert all(count == pytest.approx(8000 / task.facts, abs=4 * 39) for count in asked.values())
    assert len(asked) == task.facts


@pytest.mark.parametrize("task", [Parity(64), Permutations(32), Brackets(64)], ids=lambda task: task.name)
def test_what_is_measured_cannot_be_known_by_heart(task):
    """No beginning of a text up to its first measured answer is one that training reads, lessons included."""
    (before,) = {setting.steps for setting in PROFILES["full"].settings if setting.task == task}
    rng = stream(0, TRAIN)
    trained = set()
    for lesson in (task.shorter(2), task):
        drawn = lesson.draw(rng, before * 2048 // lesson.length)[0][:, : task.first + 1]
        trained |= {tuple(ids) for ids in drawn.tolist()}
    ids_BT, targets_BT = task.exam(stream(0, TEST), 1000)
    assert not trained & {tuple(ids) for ids in ids_BT[:, : task.first + 1].tolist()}
    assert (targets_BT[:, : task.first] == IGNORE).all()
    assert torch.equal(targets_BT[:, task.first :], task.draw(stream(0, TEST), 1000)[1][:, task.first :])


def test_all_but_the_first_say_nothing_of_a_product():
    """Every product is as likely whatever the others are: counted over every text."""
    after = products(3)
    for rest in itertools.product(range(6), repeat=2):
        found = Counter()
        for first in range(6):
            state = first
            for step in rest:
                state = after[state, step]
            found[int(state)] += 1
        assert set(found.values()) == {1} and len(found) == 6


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_products_make_a_group(n):
    after, size = products(n), math.factorial(n)
    assert after.shape == (size, size)
    for line in (*after, *after.T):
        assert sorted(line) == list(range(size))
    assert (after[0] == range(size)).all() and (after[:, 0] == range(size)).all()
    i, j, k = np.random.default_rng(0).integers(size, size=(3, 200))
    assert (after[after[i, j], k] == after[i, after[j, k]]).all()


def test_most_gaps_of_a_power_law_are_short():
    """As often as zoology draws them: by g^(0.01 - 1), one without the next."""
    places = {}
    for gaps in ("power", "uniform"):
        task = MQAR(64, pairs=1, keys=4, values=4, gaps=gaps)
        targets_BT = task.draw(np.random.default_rng(0), 20_000)[1]
        places[gaps] = np.bincount((targets_BT != IGNORE).nonzero()[:, 1], minlength=64)[2:] / 20_000
    gap = np.arange(1, 63)
    law = gap ** (0.01 - 1.0)
    assert np.abs(places["power"] - law / law.sum()).max() < 0.015
    assert np.abs(places["uniform"] - 1 / 62).max() < 0.005


def test_a_longer_task_is_the_same_one():
    longer = MQAR(32, pairs=4).longer(2)
    assert longer == MQAR(64, pairs=4)
    assert Needle(32).longer(2) == Needle(64) and Brackets(32).longer(2) == Brackets(64)
    assert longer.sizes() == {"length": 64, "pairs": 4, "keys": 64, "values": 64, "gaps": "power"}


def test_a_shorter_task_still_needs_its_keys():
    assert MQAR(32, pairs=8).shorter(4) == MQAR(8, pairs=2)
    assert MQAR(16, pairs=4).shorter(4) == MQAR(6, pairs=2) and MQAR(32, pairs=1).shorter(4) == MQAR(
        8, pairs=1
    )
    assert Needle(32).shorter(4) == Needle(8, facts=2) and Needle(32, facts=1).shorter(4) == Needle(
        8, facts=1
    )
    assert Brackets(64).shorter(4) == Brackets(16, reach=2)
    assert Depo(64, things=12, hops=4).shorter(4) == Depo(16, things=3, hops=1, questions=2)
    assert Brevo(64, things=8, needs=2).shorter(2) == Brevo(32, things=4, needs=2)
    assert Brevo(32, things=4, needs=4).shorter(4) == Brevo(20, things=3, needs=4)
    assert Mano(16, operations=4, fewest=4).shorter(4) == Mano(5, operations=1)


def test_questions_follow_their_facts_at_any_length():
    """A longer text has the same facts at its beginning, the same questions at its end, and blanks between."""
    for task in (Depo(32, things=8, hops=3), Brevo(32, things=6, needs=2)):
        far = task.longer(16)
        ids_BT, targets_BT = far.draw(np.random.default_rng(0), 20)
        assert (targets_BT[:, : -task.length] == IGNORE).all() and (
            ids_BT[:, task.length : -task.length] == 0
        ).all()
        assert far.chance == task.chance and far.vocab_size == task.vocab_size


def test_values_are_as_likely_as_they_are_drawn():
    task = Mano(9, operations=3, modulus=5)
    drawn = np.bincount(task.draw(np.random.default_rng(0), 20_000)[1][:, -1] - 1, minlength=5) / 20_000
    assert np.abs(drawn - values(5, 3)[1:].mean(0)).max() < 0.015
    assert values(5, 3).sum(1) == pytest.approx(1) and task.chance == pytest.approx(drawn[0], abs=0.015)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MQAR(8, pairs=4), "length"),
        (lambda: MQAR(64, pairs=9, keys=8), "keys"),
        (lambda: MQAR(64, pairs=9, values=8), "values"),
        (lambda: MQAR(64, pairs=1, gaps="near"), "gaps"),
        (lambda: SelectiveCopy(8, letters=5), "length"),
        (lambda: Needle(8, distance=8, facts=1), "distance"),
        (lambda: Needle(8, facts=3), "length"),
        (lambda: Needle(12, keys=3), "keys"),
        (lambda: Needle(12, facts=0), "facts"),
        (lambda: Permutations(8, n=6), "n"),
        (lambda: Parity(1), "length"),
        (lambda: Brackets(8, depth=1), "depth"),
        (lambda: Brackets(8, reach=8), "reach"),
        (lambda: Depo(32, things=8, hops=8), "hops"),
        (lambda: Depo(32, things=8, hops=2, fewest=3), "fewest"),
        (lambda: Depo(31, things=8, hops=2), "length"),
        (lambda: Depo(64, things=20, hops=2), "names"),
        (lambda: Brevo(46, things=6), "length"),
        (lambda: Brevo(64, things=5, needs=0), "needs"),
        (lambda: Mano(8, operations=3), "length"),
        (lambda: Mano(8, operations=2, modulus=1), "modulus"),
        (lambda: Mano(8, operations=2, fewest=3), "fewest"),
    ],
)
def test_a_size_out_of_bounds_is_named(make, field):
    with refused(ConfigError, field):
        make()
