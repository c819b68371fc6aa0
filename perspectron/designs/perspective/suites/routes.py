"""Routes of tokens: the expert that each routed layer chose for them, how even the load is, and how far apart the
choices for consecutive tokens lie, from which a stream of experts gains.

Shapes: B batch, T time, N tokens, E experts, A axes of the torus.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from perspectron.experts.router import Choice, Routed
from perspectron.experts.torus import Lengths, gini, hops, lattice
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.util.errors import ConfigError
from perspectron.util.hooks import hooked

CHUNK = 1024  # tokens read at once


class Routes(NamedTuple):
    """Experts [B,T] that one routed layer chose, and where the queries fell [B,T,A], in [0, 1). A switch has no
    queries: the centres of the experts stand in for them, and hops are on the lattice of their ids. guess: the experts
    that this layer's router takes for the input of the routed layer before it; the first layer's are its own choices.
    further: the same for the input of the routed layer two before, where there is one."""

    layer: int
    router: str
    torus: Lengths
    expert_BT: Tensor
    query_BTA: Tensor
    guess_BT: Tensor
    further_BT: Tensor | None = None


@dataclass(frozen=True)
class Rates:
    """Shares of pairs of consecutive tokens, by the steps on the torus between their experts; distant: 3 or more."""

    same: float
    one_hop: float
    two_hop: float
    distant: float


@dataclass(frozen=True)
class Measures:
    """Load and hops of some tokens in one layer. load: tokens of each expert. reached: share of experts with any.
    pairs: number of pairs of consecutive tokens of one document, both counted; rates: their hops (None without pairs);
    chance: the rates if every choice were drawn from the load, independent of the one before."""

    tokens: int
    load: list[int]
    gini: float
    reached: float
    pairs: int
    rates: Rates | None
    chance: Rates | None


@dataclass(frozen=True)
class Summary:
    """Means over layers."""

    gini: float
    reached: float
    rates: Rates | None
    chance: Rates | None


def _seen(
    look: Callable[[int, Tensor], None], places: Iterator[int], ffn: Any, inputs: tuple[Tensor, ...]
) -> None:
    look(next(places), ffn.read(*inputs[:2]))


def trace(model: LanguageModel, ids_BT: Tensor, reset_BT: Tensor | None = None) -> list[Routes]:
    """Routes of these tokens in each routed layer, from an empty state. `reset_BT`: where a document starts.
    ConfigError for a model without routed layers."""
    blocks = cast("list[Block]", model.blocks)
    layers = [(i, ffn) for i, block in enumerate(blocks) if (ffn := _routed(model, block)) is not None]
    if not layers:
        raise ConfigError(f"model = {model.config.name!r}, must be one with routed layers")
    chosen: list[list[Choice]] = [[] for _ in layers]
    guess: list[list[Tensor]] = [[] for _ in layers]
    further: list[list[Tensor]] = [[] for _ in layers]

    def look(place: int, x_BTD: Tensor) -> None:
        chosen[place].append(layers[place][1].router.route(x_BTD.flatten(0, 1)))
        if place == 0:
            guess[0].append(chosen[0][-1].expert_N)
        for ahead, made in ((1, guess), (2, further)):
            if place + ahead < len(layers):
                router = layers[place + ahead][1].router
                made[place + ahead].append(router.route(x_BTD.flatten(0, 1)).expert_N)

    places = dict[Routed, list[int]]()
    for place, (_, ffn) in enumerate(
        layers
    ):  # a network may be that of several layers, which call it in turn
        places.setdefault(ffn, []).append(place)
    hooks = [
        ffn.register_forward_pre_hook(partial(_seen, look, itertools.cycle(own)))
        for ffn, own in places.items()
    ]
    T, state = ids_BT.shape[1], None
    with hooked(hooks), torch.inference_mode():
        for start in range(0, T, CHUNK):
            part = slice(start, start + CHUNK)
            reset = None if reset_BT is None else reset_BT[:, part]
            # LanguageModel's own pass: an artifact's shorter one for single tokens would bypass the hooks.
            _, state, _ = LanguageModel.hidden(
                model, ids_BT[:, part], state, reset_BT=reset, consume_state=True
            )
    shape = (ids_BT.shape[0], -1)
    routes = []
    for place, (index, module) in enumerate(layers):
        own = chosen[place]
        expert_BT = torch.cat([c.expert_N.view(shape) for c in own], 1).cpu()
        guess_BT, further_BT = (
            torch.cat([expert_N.view(shape) for expert_N in made[place]], 1).cpu() if made[place] else None
            for made in (guess, further)
        )
        assert guess_BT is not None
        torus, router = module.config.torus, module.config.router
        if router == "switch":
            query_BTA = lattice(torus)[expert_BT]
        else:
            query_BTA = torch.cat([c.query_NA.unflatten(0, shape) for c in own], 1).cpu() % 1
        routes.append(Routes(index, router, torus, expert_BT, query_BTA, guess_BT, further_BT))
    return routes


def of_document(model: LanguageModel, ids: Sequence[int], prefix: Sequence[int]) -> list[Routes]:
    """Routes of a document's own tokens, in one row, without the prefix that the tokenizer puts before them."""
    n = len(prefix)
    return [
        layer._replace(
            expert_BT=layer.expert_BT[:, n:],
            query_BTA=layer.query_BTA[:, n:],
            guess_BT=layer.guess_BT[:, n:],
            further_BT=None if layer.further_BT is None else layer.further_BT[:, n:],
        )
        for layer in trace(model, torch.tensor([[*prefix, *ids]], device=model.device))
    ]


def _routed(model: LanguageModel, block: Block) -> Routed | None:
    ffn = model.ffn_of(block)
    return ffn if isinstance(ffn, Routed) else None


def joined(parts: Sequence[list[Routes]], axis: int) -> list[Routes]:
    """Join the traces of several texts, without `further_BT`: as more rows (axis 0), or one after another (axis 1)."""
    return [
        layers[0]._replace(
            expert_BT=torch.cat([part.expert_BT for part in layers], axis),
            query_BTA=torch.cat([part.query_BTA for part in layers], axis),
            guess_BT=torch.cat([part.guess_BT for part in layers], axis),
            further_BT=None,
        )
        for layers in zip(*parts, strict=True)
    ]


def measure(routes: Routes, *, reset_BT: Tensor | None = None, counted_BT: Tensor | None = None) -> Measures:
    """Measures of a layer's routes. `reset_BT`: True at the first token of a document, which follows no other.
    `counted_BT`: False for tokens to leave out."""
    expert_BT, E = routes.expert_BT, math.prod(routes.torus)
    if counted_BT is None:
        counted_BT = torch.ones_like(expert_BT, dtype=torch.bool)
    load_E = torch.bincount(expert_BT[counted_BT], minlength=E)
    follows_BT = counted_BT[:, 1:] & counted_BT[:, :-1]
    if reset_BT is not None:
        follows_BT = follows_BT & ~reset_BT[:, 1:]
    hops_EE = hops(routes.torus)
    moved_N = hops_EE[expert_BT[:, :-1][follows_BT], expert_BT[:, 1:][follows_BT]]
    tokens = int(load_E.sum())
    share_E = load_E.double() / max(tokens, 1)
    return Measures(
        tokens,
        load_E.tolist(),
        gini(load_E.double()).item(),
        (load_E > 0).double().mean().item(),
        len(moved_N),
        _rates(moved_N, torch.ones(len(moved_N), dtype=torch.float64)),
        _rates(hops_EE.flatten(), torch.outer(share_E, share_E).flatten()),
    )


def _rates(hops_N: Tensor, weight_N: Tensor) -> Rates | None:
    total_4 = torch.bincount(hops_N.clamp_max(3), weight_N, minlength=4)
    return Rates(*(total_4 / total_4.sum()).tolist()) if total_4.sum() > 0 else None


def summary(measures: Sequence[Measures]) -> Summary:
    """Means over the layers of measures of the same tokens."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(measures)

    def rates(known: list[Rates]) -> Rates | None:
        if len(known) < len(measures):
            return None
        return Rates(*(mean(getattr(rate, field.name) for rate in known) for field in fields(Rates)))

    return Summary(
        mean(m.gini for m in measures),
        mean(m.reached for m in measures),
        rates([m.rates for m in measures if m.rates]),
        rates([m.chance for m in measures if m.chance]),
    )
