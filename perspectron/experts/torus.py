"""The torus of experts: lattice, distances with wrap-around, neighbours, load, and the losses on queries and experts
(docs/designs/perspective.md#router).

Shapes: B batch, T time, N tokens, E experts, A axes of the torus, K weights sampled of an expert.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from perspectron.ops.attention import follows
from perspectron.util import ranks

Lengths = tuple[int, ...]


def lattice(shape: Lengths) -> Tensor:
    """Cell centres (i + ½) / n of a torus lattice [E,A], id = x + n_x y + n_x n_y z …, x fastest."""
    return (cells(shape) + 0.5) / torch.tensor(shape)


def cells(shape: Lengths) -> Tensor:
    """Integer coordinates of every expert [E,A]."""
    slowest_first = torch.unravel_index(torch.arange(math.prod(shape)), shape[::-1])
    return torch.stack(slowest_first[::-1], 1)


def wrap(apart: Tensor) -> Tensor:
    """Difference of places on a circle of circumference 1, the shorter way round: in [-½, ½]."""
    return apart - apart.round()


def distance2(query_NA: Tensor, centre_EA: Tensor) -> Tensor:
    """Squared geodesic distance [N,E] on the torus of circumference 1 per axis."""
    return wrap(query_NA[:, None] - centre_EA).square().sum(-1)


def hops(shape: Lengths) -> Tensor:
    """Number of steps of ±1 along an axis, with wrap, between every two experts [E,E]. Neighbours are 1 apart, so an
    axis of length 1 has none, and one of length 2 has one."""
    cell_EA = cells(shape)
    apart_EEA = (cell_EA[:, None] - cell_EA).abs()
    return torch.minimum(apart_EEA, torch.tensor(shape) - apart_EEA).sum(-1)


def neighbour_pairs(x_EK: Tensor, shape: Lengths) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of neighbours along each axis that has any, as one side and the other; each pair once."""
    grid = x_EK.unflatten(0, shape[::-1])  # the last axis of the torus is the slowest
    for axis, n in enumerate(shape[::-1]):
        if n == 2:
            yield grid.narrow(axis, 0, 1), grid.narrow(axis, 1, 1)
        elif n > 2:
            yield grid, grid.roll(-1, axis)


# ---------------------------------------------------------------- load


def gini(load_E: Tensor) -> Tensor:
    """Gini coefficient of loads, one number: 0 where all are equal or 0, 1 − 1/E where one expert has all."""
    load_E = load_E.to(torch.promote_types(load_E.dtype, torch.float32)).sort().values
    E = len(load_E)
    rank_E = torch.arange(1, E + 1, device=load_E.device, dtype=load_E.dtype)
    total = load_E.sum()
    spread = ((2 * rank_E - E - 1) * load_E).sum() / (E * total.where(total > 0, 1))
    return spread.clamp_min(0)


def nudged(bias_E: Tensor, load_E: Tensor, step: float) -> Tensor:
    """Biases w of the power diagram, moved by the load: up by at most `step` where fewer tokens come than the mean (by
    all of it where none do), down where more come. Their mean stays 0. Without load nothing changes."""
    total = load_E.sum()
    share_E = load_E.to(bias_E.dtype) / total.clamp_min(1)
    error_E = (1 - len(load_E) * share_E).clamp(-1, 1)
    moved_E = bias_E + step * error_E
    return torch.where(total > 0, moved_E - moved_E.mean(), bias_E)


# ---------------------------------------------------------------- losses


def balance(probability_NE: Tensor, load_E: Tensor, counted_N: Tensor) -> Tensor:
    """Balance loss of the Switch Transformer: E Σ share of tokens × mean probability; 1 when both are even. counted_N:
    True for tokens that are not padding. load_E: of all ranks. Gradients go to the probabilities."""
    total = ranks.all_reduce_sum(counted_N.sum()).clamp_min(1)
    mean_E = ranks.all_reduce_sum((probability_NE * counted_N[:, None]).sum(0)) / total
    return len(load_E) * (load_E / total * mean_E).sum()


def smoothness(query_BTA: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> Tensor:
    """Mean squared wrapped difference of the queries of consecutive tokens of one document."""
    query_BTA, (reset_BT, pad_BT) = ranks.bordered(query_BTA, reset_BT, pad_BT)
    moved_BT = wrap(query_BTA[:, 1:] - query_BTA[:, :-1]).square().sum(-1)
    pairs_BT = follows(reset_BT, pad_BT, moved_BT)
    moved = ranks.all_reduce_sum(moved_BT.masked_fill(~pairs_BT, 0).sum())
    return moved / ranks.all_reduce_sum(pairs_BT.sum()).clamp_min(1)


def neighbour_delta(weight_EK: Tensor, shape: Lengths) -> Tensor:
    """Mean absolute difference between the weights of lattice neighbours; 0 where there are none."""
    total, count = weight_EK.new_zeros(()), 0
    for one, other in neighbour_pairs(weight_EK, shape):
        total = total + (one - other).abs().sum()
        count += one.numel()
    return total / max(count, 1)


def likeness(weight_EK: Tensor, shape: Lengths) -> Tensor:
    """Mean squared cosine between the weights of experts that are not neighbours; 0 if all are."""
    unit_EK = torch.nn.functional.normalize(weight_EK, dim=1)
    far_EE = (hops(shape) > 1).to(weight_EK.device)
    return ((unit_EK @ unit_EK.mT).square() * far_EE).sum() / far_EE.sum().clamp_min(1)
