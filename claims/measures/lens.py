"""Measures of the lenses and the route gate, on something small.

Shapes: B batch, T time, D model width, H heads, K head width.
"""

import math
from functools import cache
from typing import cast

import torch
from torch import Tensor

from claims.claim import Evidence
from claims.measures.built import operations
from claims.measures.common import (
    apart,
    below,
    drawn,
    first,
    made,
    text,
)
from perspectron import presets
from perspectron.designs.lens import op as lens
from perspectron.designs.lens.mixer import Lens
from perspectron.designs.lens.prune import prune
from perspectron.model.block import Block, RouteGate
from perspectron.model.config import RouteGatedConfig
from perspectron.model.model import build


@cache
def _heads() -> tuple[Tensor, ...]:
    """q, k, v [1,2,16,8], u [2,8] and a mixture [2,3]."""
    q, k, v = (drawn(1, 2, 16, 8, seed=i).double() for i in range(3))
    return q, k, v, drawn(2, 8, seed=3).double(), drawn(2, 3, seed=4).double().softmax(-1)


def diagonal() -> float:
    """|S − Sᵀ| on the diagonal."""
    q, k, *_ = _heads()
    S = q @ k.mT
    return apart(S.diagonal(dim1=-2, dim2=-1), S.mT.diagonal(dim1=-2, dim2=-1))


def reciprocal_products() -> Evidence:
    """Matrix products of the document's own form that reciprocity adds, over those of attention."""
    q, k, v, u, w = _heads()
    products = len(operations(lens.naive, q, k, v, u, w).products())
    return Evidence(
        (float(products - 3),), f"{products} matrix products, q kᵀ, k u and that with v: Sᵀ adds none"
    )


def centred() -> Evidence:
    """Change of the outputs when the mean is taken off d: a shift of u by what all keys have in common."""
    q, k, v, u, w = _heads()
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)
    d = torch.einsum("bhtk,hk->bht", k, u)
    outputs = []
    for shift in (d, d - d.mean(-1, keepdim=True)):
        scores = w[:, 0, None, None] * (q @ k.mT) * 8**-0.5 + w[:, 2, None, None] * shift[:, :, None]
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    return below(apart(*outputs), 1e-12)


def as_query_bias() -> Evidence:
    """Difference between discoverability and a bias on the queries."""
    q, k, v, u, w = _heads()
    with_u = lens.naive(q, k, v, u, w * torch.tensor([1.0, 0.0, 1.0]))
    biased = q + (w[:, 2:] / w[:, :1] * 8**0.5 * u)[:, None]
    return below(apart(with_u, lens.naive(biased, k, v, u, w * torch.tensor([1.0, 0.0, 0.0]))), 1e-12)


def mixture() -> tuple[float, ...]:
    """The lenses' weights at the start."""
    return tuple(round(x, 4) for x in first("lens-tiny", Lens).weights()[0].tolist())


def mixture_sum() -> float:
    return round(first("lens-tiny", Lens).weights().sum(-1).mean().item(), 6)


def finder_spread() -> float:
    """Standard deviation of all u."""
    vectors = [m.u_HK.flatten() for m in made("lens-20m").modules() if isinstance(m, Lens)]
    return round(torch.cat(vectors).std().item(), 4)


def cache_at(g: float) -> float:
    """Bytes of a lens model's cache with every route gate at g, over those as it starts."""
    model = build(presets.get("lens-tiny", embedding_norm=False))
    with torch.no_grad():
        for block in cast("list[Block]", model.blocks):
            block.route.raw_1.fill_(math.log(g / (1 - g)))
        return model(text()).state.nbytes / made("lens-tiny")(text()).state.nbytes


def cache_without(removed: int) -> float:
    """Bytes of the cache with attention taken out of so many of ten blocks, over those with all."""
    whole = made("lens-tiny", ("layers", 10))
    sizes = [m.init_state(1, capacity=1024).nbytes for m in (whole, prune(whole, range(removed)))]
    return round(sizes[1] / sizes[0], 4)


def anneal(steps: int, delta: float = 1e-4) -> float:
    """g after so many updates of the schedule."""
    gate = RouteGate(RouteGatedConfig(1.0, delta, 0))
    with torch.no_grad():
        gate.init_weights(torch.Generator())
    gate.set_step(steps)
    return round(gate().item(), 4)


@cache
def _routed(g: float, scale: float) -> tuple[float, float]:
    """Parts of a lens block's output that are attention's and its network's; of GPT-2's they are 1 and 1."""
    model = build(presets.get("lens-tiny", route_scale=scale, context=False, embedding_norm=False))
    block, x_BTD = cast(Block, model.blocks[0]), drawn(1, 4, 128)
    with torch.no_grad():
        block.route.raw_1.fill_(math.log(g / (1 - g)))
        state = block.init_state(1, torch.device("cpu"), torch.float32)
        y_BTD = block(x_BTD, state, block.ffn, None, None)[0]
        a_BTD = block.mixer(block.mixer_norm(x_BTD), state)[0]
        m_BTD = block.ffn(block.ffn_norm(x_BTD + a_BTD), a_BTD)[0]
        parts = torch.stack([a_BTD.flatten(), m_BTD.flatten()], 1).double()
        slopes = torch.linalg.lstsq(parts, (y_BTD - x_BTD).flatten()[:, None].double()).solution[:, 0]
    attention, network = (round(slope, 3) for slope in slopes.tolist())
    return attention, network


def routed(g: float, scale: float = 1.0) -> Evidence:
    values = _routed(g, scale)
    return Evidence(values, f"attention {values[0]:.0%}, MLP {values[1]:.0%}")


def routed_part(g: float, part: str) -> float:
    """ "attention" or "mlp"."""
    return _routed(g, 1.0)[part == "mlp"]
