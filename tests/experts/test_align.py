"""Experts that are alike become neighbours on the torus."""

import pytest
import torch

from perspectron.designs.perspective.align import arrange, changes, cost, distances, embed
from perspectron.experts.torus import cells, hops, lattice


def scrambled(torus, seed=0):
    """Distances of experts that lie on a torus, each a little off, in random order."""
    draw = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * lattice(torus).double()
    points = torch.cat([angle.cos(), angle.sin()], 1) * torch.tensor(torus * 2)
    points += 0.05 * torch.randn(points.shape, generator=draw, dtype=torch.float64)
    order = torch.randperm(len(points), generator=draw)
    return distances(points[order]), order


@pytest.mark.parametrize("torus", [(8, 4, 4), (6, 5), (4, 4), (7,), (2, 2), (1, 2, 3), (1,)])
def test_alignment_lowers_the_distance_of_neighbours(torus):
    distance, order = scrambled(torus)
    adjacent = hops(torus) == 1
    found = arrange(distance, adjacent, torus)
    assert sorted(found.tolist()) == list(range(len(order)))
    draw = torch.Generator().manual_seed(1)
    chance = [cost(distance, adjacent, torch.randperm(len(order), generator=draw)) for _ in range(20)]
    ideal = cost(distance, adjacent, order.argsort())
    got = cost(distance, adjacent, found)
    assert got <= min(chance) + 1e-9
    if len(order) > 6:
        assert got < ideal + 0.5 * (sum(chance) / 20 - ideal)
    assert torch.equal(found, arrange(distance, adjacent, torus))


def test_experts_that_stand_well_stay():
    torus = (5, 4)
    distance, order = scrambled(torus)
    well = order.argsort()
    assert torch.equal(arrange(distance[well][:, well], hops(torus) == 1, torus), torch.arange(20))
    assert torch.equal(arrange(torch.zeros(20, 20).double(), hops(torus) == 1, torus), torch.arange(20))


def test_the_change_of_a_swap_is_the_difference_of_costs():
    torus = (4, 3)
    distance, _ = scrambled(torus)
    adjacent = (hops(torus) == 1).double()
    stay = torch.arange(12)
    found = changes(distance, adjacent)
    for c in range(12):
        for d in range(12):
            swapped = stay.clone()
            swapped[[c, d]] = stay[[d, c]]
            difference = cost(distance, adjacent, swapped) - cost(distance, adjacent, stay)
            assert found[c, d].item() == pytest.approx(difference, abs=1e-9)


def test_the_embedding_orders_a_ring():
    distance, order = scrambled((9,))
    at = torch.empty(9, dtype=torch.long)
    at[:] = order[embed(distance, (9,))]
    steps = set((at.roll(-1) - at).remainder(9).tolist())
    assert steps in ({1}, {8})
    assert cells((9,)).flatten().tolist() == list(range(9))
