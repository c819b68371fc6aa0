"""Where tokens go: the expert that each routed layer chose for them, how even the load is, and how far apart the
choices for consecutive tokens lie (what a stream of experts will gain from).

Shapes: B batch, T time, N tokens, E experts, A axes of the torus.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from perspectron.block import Block
from perspectron.data import Tokenizer
from perspectron.errors import ConfigError
from perspectron.experts import Choice, RoutedSwiGLU
from perspectron.model import LanguageModel
from perspectron.routing import Lengths, gini, hops, lattice

CHUNK = 1024  # tokens read at once
KINDS = ("code", "prose", "numbers")
DIGITS, SIGNS = 0.3, 0.05
_SIGN = re.compile(r"[_=(){}\[\]<>;\\/*+&|#@^~$%]")


class Routes(NamedTuple):
    """Of one routed layer: experts [B,T] and where the queries fell [B,T,A], in [0, 1). A switch has no queries: the
    centres of the experts stand in for them, and hops are on the lattice of their ids. guess: the experts that the
    same router takes for what the routed layer before it read; the first layer's are its own."""

    layer: int
    router: str
    torus: Lengths
    expert_BT: Tensor
    query_BTA: Tensor
    guess_BT: Tensor


@dataclass(frozen=True)
class Rates:
    """Shares of pairs of consecutive tokens, by the steps on the torus between their experts; distant: 3 or more."""

    same: float
    one_hop: float
    two_hop: float
    distant: float


@dataclass(frozen=True)
class Measures:
    """Of some tokens in one layer. load: tokens of each expert. reached: share of experts with any. pairs: consecutive
    tokens of one document, both counted; rates: theirs (None without pairs); chance: what the rates would be if
    every choice were drawn from the load, whatever the one before."""

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


def trace(model: LanguageModel, ids_BT: Tensor, reset_BT: Tensor | None = None) -> list[Routes]:
    """What each routed layer does with these tokens, from an empty state. `reset_BT`: where a document starts.
    ConfigError for a model without routed layers."""
    blocks = cast("list[Block]", model.blocks)
    layers = [(i, ffn) for i, block in enumerate(blocks) if (ffn := _routed(model, block)) is not None]
    if not layers:
        raise ConfigError(f"model = {model.config.name!r}, must be one with routed layers")
    chosen: list[list[Choice]] = [[] for _ in layers]
    guess: list[list[Tensor]] = [[] for _ in layers]

    def look(place: int, x_BTD: Tensor) -> None:
        chosen[place].append(layers[place][1].route(x_BTD.flatten(0, 1)))
        if place == 0:
            guess[0].append(chosen[0][-1].expert_N)
        if place + 1 < len(layers):
            guess[place + 1].append(layers[place + 1][1].route(x_BTD.flatten(0, 1)).expert_N)

    hooks = [
        blocks[index].ffn_norm.register_forward_hook(lambda _, inputs, out, place=place: look(place, out))
        for place, (index, _) in enumerate(layers)
    ]
    T, state = ids_BT.shape[1], None
    try:
        with torch.inference_mode():
            for start in range(0, T, CHUNK):
                part = slice(start, start + CHUNK)
                reset = None if reset_BT is None else reset_BT[:, part]
                # The way of all models: hooks see nothing of the shorter one that an artifact has for single tokens.
                _, state, _ = LanguageModel.hidden(model, ids_BT[:, part], state, reset_BT=reset)
    finally:
        for hook in hooks:
            hook.remove()
    shape = (ids_BT.shape[0], -1)
    found = []
    for place, (index, module) in enumerate(layers):
        own = chosen[place]
        expert_BT = torch.cat([c.expert_N.view(shape) for c in own], 1).cpu()
        guess_BT = torch.cat([expert_N.view(shape) for expert_N in guess[place]], 1).cpu()
        torus, router = module.config.torus, module.config.router
        if router == "switch":
            query_BTA = lattice(torus)[expert_BT]
        else:
            query_BTA = torch.cat([c.query_NA.unflatten(0, shape) for c in own], 1).cpu() % 1
        found.append(Routes(index, router, torus, expert_BT, query_BTA, guess_BT))
    return found


def _routed(model: LanguageModel, block: Block) -> RoutedSwiGLU | None:
    ffn = model.ffn_of(block)
    return ffn if isinstance(ffn, RoutedSwiGLU) else None


def joined(parts: Sequence[list[Routes]], axis: int) -> list[Routes]:
    """Traces of several texts as one: rows below each other (axis 0) or one after the other (axis 1)."""
    return [
        layers[0]._replace(
            expert_BT=torch.cat([part.expert_BT for part in layers], axis),
            query_BTA=torch.cat([part.query_BTA for part in layers], axis),
            guess_BT=torch.cat([part.guess_BT for part in layers], axis),
        )
        for layers in zip(*parts, strict=True)
    ]


def measure(routes: Routes, *, reset_BT: Tensor | None = None, counted_BT: Tensor | None = None) -> Measures:
    """`reset_BT`: True at a document's first token, which follows none. `counted_BT`: False for tokens to leave out."""
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
    """Of the same tokens in every layer."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(measures)

    def rates(found: list[Rates]) -> Rates | None:
        if len(found) < len(measures):
            return None
        return Rates(*(mean(getattr(rate, field.name) for rate in found) for field in fields(Rates)))

    return Summary(
        mean(m.gini for m in measures),
        mean(m.reached for m in measures),
        rates([m.rates for m in measures if m.rates]),
        rates([m.chance for m in measures if m.chance]),
    )


# ---------------------------------------------------------------- kinds of text


def kind_of(text: str) -> str:
    """ "numbers" where 30% or more of what is visible are digits; "code" where 5% or more are signs that programs
    are written with (brackets, =, _, /, # and so on); else "prose"."""
    visible = sum(not character.isspace() for character in text) or 1
    if sum(character.isdigit() for character in text) >= DIGITS * visible:
        return "numbers"
    return "code" if len(_SIGN.findall(text)) >= SIGNS * visible else "prose"


def paragraphs(text: str) -> list[str]:
    """The text in pieces that end after blank lines."""
    return re.findall(r"(?s).+?(?:\n[^\S\n]*(?=\n)\s*|\Z)", text)


def kinds(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Of each token of a text, the kind of the paragraph in which it begins."""
    pieces = paragraphs(text)
    ends = np.cumsum([len(piece.encode()) for piece in pieces])
    counts = tokenizer.byte_counts()[np.asarray(ids, dtype=np.int64)]
    begins = np.cumsum(counts) - counts
    of_piece = [kind_of(piece) for piece in pieces]
    return [of_piece[piece] for piece in np.searchsorted(ends, begins, side="right")]


def longest_run(wanted_T: Any, reset_T: Any, limit: int) -> tuple[int, int]:
    """[start, stop) of the longest stretch of one document where all are wanted, cut to `limit` tokens; the first of
    them."""
    best, start = (0, 0), 0
    for t, (wanted, reset) in enumerate(zip(wanted_T, reset_T, strict=True)):
        if reset or not wanted:
            start = t if wanted else t + 1
        if t + 1 - start > best[1] - best[0]:
            best = (start, t + 1)
        if best[1] - best[0] >= limit:
            break
    return best
