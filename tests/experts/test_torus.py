"""The torus: geometry against brute force, balance, and the losses that training adds.

Shapes: B batch, T time, N tokens, E experts, A axes, K weights of an expert.
"""

import itertools
import math

import pytest
import torch

from perspectron.experts.torus import (
    balance,
    cells,
    distance2,
    gini,
    hops,
    lattice,
    likeness,
    neighbour_delta,
    neighbour_pairs,
    nudged,
    smoothness,
    wrap,
)

SHAPES = [(8, 4, 4), (5, 3), (4, 2), (2, 2), (1, 6), (2, 1, 3), (3,), (2,), (1,), (1, 1)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def neighbours_of(shape: tuple[int, ...], e: int) -> set[int]:
    """±1 per axis with wrap, by coordinates counted by hand; an expert is no neighbour of its own."""
    place, rest = [], e
    for n in shape:
        place.append(rest % n)
        rest //= n
    found = set()
    for axis, n in enumerate(shape):
        for step in (-1, 1):
            moved = [*place]
            moved[axis] = (moved[axis] + step) % n
            found.add(sum(c * math.prod(shape[:i]) for i, c in enumerate(moved)))
    return found - {e}


# ---------------------------------------------------------------- geometry


def test_lattice_counts_x_fastest():
    centre_EA = lattice((8, 4, 4))
    assert centre_EA.shape == (128, 3)
    for x, y, z in [(0, 0, 0), (7, 0, 0), (0, 1, 0), (3, 2, 1), (7, 3, 3)]:
        expected = [(x + 0.5) / 8, (y + 0.5) / 4, (z + 0.5) / 4]
        assert centre_EA[x + 8 * y + 32 * z].tolist() == expected
        assert cells((8, 4, 4))[x + 8 * y + 32 * z].tolist() == [x, y, z]


def test_distances_wrap_around():
    query = torch.tensor([[0.95, 0.5]], dtype=torch.float64)
    centre = torch.tensor([[0.05, 0.5], [0.05, 0.4], [0.45, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.01, 0.02, 0.5]], dtype=torch.float64)
    for turn in ([0, 0], [1, 0], [-3, 2], [0, -1]):
        moved = query + torch.tensor(turn)
        torch.testing.assert_close(distance2(moved, centre), expected, rtol=1e-9, atol=1e-9)
    eight = lattice((8,)).double()
    for z, cell in ((0.99, 7), (1.03, 0), (-0.01, 7), (0.13, 1), (-7.99, 0)):
        assert distance2(torch.tensor([[z]], dtype=torch.float64), eight).argmin() == cell


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_distances_are_the_least_over_all_images(shape):
    query_NA, centre_EA = 2 * draw(20, len(shape)), lattice(shape).double()
    images = torch.tensor([*itertools.product(range(-9, 10), repeat=1)], dtype=torch.float64)[:, 0]
    apart = (query_NA[:, None] - centre_EA)[..., None] + images
    torch.testing.assert_close(distance2(query_NA, centre_EA), apart.square().min(-1).values.sum(-1))
    assert wrap(query_NA).abs().max() <= 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbours_are_those_one_step_away_each_once(shape):
    E = math.prod(shape)
    hops_EE = hops(shape)
    assert hops_EE.shape == (E, E) and (hops_EE.diagonal() == 0).all()
    for e in range(E):
        assert set((hops_EE[e] == 1).nonzero()[:, 0].tolist()) == neighbours_of(shape, e)
    pairs = []
    ids_E1 = torch.arange(E)[:, None]
    for one, other in neighbour_pairs(ids_E1, shape):
        pairs += zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
    assert len(pairs) == len({frozenset(pair) for pair in pairs}), "no pair twice"
    assert {frozenset(p) for p in pairs} == {
        frozenset((e, f)) for e in range(E) for f in neighbours_of(shape, e)
    }


def test_hops_are_the_shortest_walk():
    shape, found = (5, 2, 4), {0: 0}
    edge = [0]
    while edge:
        e = edge.pop(0)
        for f in neighbours_of(shape, e) - found.keys():
            found[f] = found[e] + 1
            edge.append(f)
    assert hops(shape)[0].tolist() == [found[e] for e in range(40)]


# ---------------------------------------------------------------- load


def test_gini_of_known_loads():
    assert gini(torch.tensor([3, 3, 3, 3])) == 0
    assert gini(torch.tensor([0, 0, 0, 9])).item() == pytest.approx(0.75)
    assert gini(torch.zeros(5)) == 0
    load = torch.tensor([5, 1, 0, 7, 7, 2])
    pairwise = (load[:, None] - load).abs().sum() / (2 * 6 * load.sum())
    assert gini(load).item() == pytest.approx(pairwise.item())
    assert gini(load[[3, 1, 5, 0, 2, 4]]) == gini(load)


def test_biases_even_out_skewed_queries():
    """From a Gini of about 0.7 to less than 0.05; empty cells are reached."""
    centre_EA = lattice((4, 4)).double()
    query_NA = 0.1 * draw(4096, 2) + torch.tensor([0.3, 0.7])
    bias_E, ginis = torch.zeros(16, dtype=torch.float64), []
    for _ in range(800):
        load_E = torch.bincount((distance2(query_NA, centre_EA) - bias_E).argmin(1), minlength=16)
        ginis.append(gini(load_E).item())
        bias_E = nudged(bias_E, load_E, 0.001)
    assert ginis[0] > 0.6 and ginis[-1] < 0.05 and load_E.min() > 0
    assert bias_E.mean().abs() < 1e-12


def test_without_load_biases_stay_as_they_are():
    bias_E = draw(7)
    assert torch.equal(nudged(bias_E, torch.zeros(7, dtype=torch.int64), 0.1), bias_E)
    moved = nudged(torch.zeros(4), torch.tensor([100, 0, 0, 0]), 0.1)
    assert moved[0] < 0 < moved[1] == moved[2] == moved[3] and (moved.max() - moved.min()) == pytest.approx(
        0.2
    )


# ---------------------------------------------------------------- losses


def test_balance_is_1_when_even_and_E_when_all_go_to_one():
    everyone = torch.ones(8, dtype=torch.bool)
    even = torch.full((8, 4), 0.25)
    assert balance(even, torch.full((4,), 2), everyone) == 1
    one = torch.nn.functional.one_hot(torch.full((8,), 2), 4).float()
    assert balance(one, one.sum(0), everyone) == 4
    probability_NE = draw(9, 3).softmax(1)
    counted = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1]).bool()
    load_E = torch.bincount(probability_NE.argmax(1)[counted], minlength=3)
    expected = 3 * sum(load_E[e] / 7 * probability_NE[counted, e].mean() for e in range(3))
    torch.testing.assert_close(balance(probability_NE, load_E, counted), expected)
    nobody = torch.zeros(9, dtype=torch.bool)
    assert balance(probability_NE, torch.zeros(3), nobody) == 0


def test_balance_moves_probability_away_from_the_crowded():
    logit_NE = torch.zeros(10, 3, requires_grad=True)
    load_E = torch.tensor([8, 2, 0])
    balance(logit_NE.softmax(1), load_E, torch.ones(10, dtype=torch.bool)).backward()
    mean_E = logit_NE.grad.mean(0)
    assert mean_E[0] > 0 > mean_E[2]


def test_smoothness_leaves_out_borders_and_padding():
    query_BTA = draw(2, 6, 2)
    reset, pad = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    reset[0, 3] = reset[1, 0] = pad[1, 2] = True
    steps = []
    for b in range(2):
        for t in range(1, 6):
            if not (reset[b, t] or pad[b, t] or pad[b, t - 1]):
                apart = [abs(x) % 1 for x in (query_BTA[b, t] - query_BTA[b, t - 1]).tolist()]
                steps.append(sum(min(x, 1 - x) ** 2 for x in apart))
    assert len(steps) == 7
    assert smoothness(query_BTA, reset, pad).item() == pytest.approx(sum(steps) / 7)
    everywhere = torch.ones(2, 6, dtype=torch.bool)
    assert smoothness(query_BTA, None, everywhere) == 0
    assert smoothness(query_BTA[:, :1], None, None) == 0
    turned = query_BTA + torch.randint(-3, 4, (2, 6, 2), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(smoothness(turned, None, None), smoothness(query_BTA, None, None))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_compared_with_those_of_neighbours_and_of_strangers(shape):
    E, weight_EK = math.prod(shape), draw(math.prod(shape), 6)
    near = [(weight_EK[e] - weight_EK[f]).abs().mean() for e in range(E) for f in neighbours_of(shape, e)]
    expected = sum(near) / len(near) if near else 0.0
    assert neighbour_delta(weight_EK, shape).item() == pytest.approx(float(expected))
    far = [
        torch.cosine_similarity(weight_EK[e], weight_EK[f], dim=0).square()
        for e in range(E)
        for f in set(range(E)) - neighbours_of(shape, e) - {e}
    ]
    expected = sum(far) / len(far) if far else 0.0
    assert likeness(weight_EK, shape).item() == pytest.approx(float(expected))
