"""The torus on which experts live: a lattice of cell centres, and distances that wrap (decisions.md §2)."""

import math

import torch
from torch import Tensor


def lattice(shape: tuple[int, ...]) -> Tensor:
    """Cell centres (i + ½) / n of a torus lattice [E, axes], id = x + n_x y + n_x n_y z …, x fastest."""
    ids = torch.arange(math.prod(shape))
    axes = []
    for n in shape:
        axes.append((ids % n + 0.5) / n)
        ids = ids // n
    return torch.stack(axes, 1)


def distance2(query_NA: Tensor, centre_EA: Tensor) -> Tensor:
    """Squared geodesic distance [N,E] on the torus of circumference 1 per axis."""
    apart_NEA = (query_NA[:, None] - centre_EA).abs() % 1
    return torch.minimum(apart_NEA, 1 - apart_NEA).square().sum(-1)
