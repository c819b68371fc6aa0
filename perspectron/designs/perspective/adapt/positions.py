"""Search of expert positions while reading, by natural evolution strategies: routing is piecewise constant, so there is
no derivative to follow.

Shapes: E experts, A axes of the torus, M trials.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perspectron.data.specials import OURS, Specials
from perspectron.decode.reading import check_ids
from perspectron.designs.perspective.adapt.gradient import Piece, losses
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import OFFSET
from perspectron.model.model import LanguageModel
from perspectron.util.config import at_least, positive, require
from perspectron.util.errors import ConfigError, DataError
from perspectron.util.streams import stream

EDGE = 0.999 * OFFSET  # of a cell, from its centre: positions never leave their order


@dataclass(frozen=True)
class SearchConfig:
    """pairs: of trials ±ε. sigma: deviation of ε, in cells. reach: most that a position moves in a step, in cells.
    pull: back to the start, in terms of the step. window: tokens to judge by, and as many fresh to accept by."""

    pairs: int = 8
    sigma: float = 0.25
    reach: float = 0.05
    pull: float = 0.1
    window: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, self, "pairs", "window")
        at_least(0, self, "pull")
        positive(self, "sigma", "reach")


@dataclass(frozen=True)
class Step:
    """One step. block: whose positions were searched. ties: share of trials that lost as much as another one did; many
    mean that sigma is too small. before, after: mean nats of the fresh tokens. accepted: whether positions moved."""

    block: int
    ties: float
    before: float
    after: float
    accepted: bool


def moved(
    place: Tensor,
    start: Tensor,
    loss: Callable[[Tensor], float],
    config: SearchConfig,
    generator: torch.Generator,
) -> tuple[Tensor, float]:
    """Positions after a step down the loss, estimated from the ranks of antithetic trials, and the share of ties.
    Positions are in cells, from the centres of cells; if all trials are alike, nothing moves."""
    noise = torch.randn(config.pairs, *place.shape, generator=generator, dtype=place.dtype)
    noise = torch.cat([noise, -noise])
    trials = (place + config.sigma * noise).clamp(-EDGE, EDGE)
    found_M = torch.tensor([loss(trial) for trial in trials], dtype=torch.float64)
    alike_MM = found_M[:, None] == found_M
    rank_M = (found_M[:, None] < found_M).sum(1) + (
        alike_MM.sum(1) - 1
    ) / 2  # of equals the mean; the best is last
    worth_M = rank_M / (len(found_M) - 1) - 0.5
    gradient = (worth_M.to(noise).view(-1, *(1,) * place.ndim) * noise).sum(0) / (len(noise) * config.sigma)
    most = float(gradient.abs().max())
    ties = float((alike_MM.sum(1) > 1).double().mean())
    if most == 0:
        return place, ties
    step = config.reach / most
    return (place + step * gradient - 2 * config.reach * config.pull * (place - start)).clamp(
        -EDGE, EDGE
    ), ties


def least(special: Specials = OURS, config: SearchConfig = SearchConfig()) -> int:
    """Tokens of the shortest text with room for a step."""
    return 2 * config.window + 1 - len(special.start)


def search(
    model: LanguageModel,
    ids: Sequence[int],
    config: SearchConfig = SearchConfig(),
    special: Specials = OURS,
) -> list[Step]:
    """Read a document and move the model's expert positions to it, a block at a time in turn, in the model itself. A
    step is kept where fresh tokens, read from the same state, lose less than before.

    ConfigError: a model whose experts have no positions to move. DataError: a text too short for a step.
    """
    layers = {
        index: ffn
        for index, block in enumerate(model.blocks)
        if isinstance(ffn := getattr(block, "ffn", None), RoutedSwiGLU) and hasattr(ffn, "offset_EA")
    }
    if not layers:
        raise ConfigError(
            f"{model.config.name} has no experts whose positions move; use a routed model, such as perspective-tiny"
        )
    check_ids(ids, model.config.vocab_size, 0)
    W, text = config.window, [*special.start, *ids]
    if len(ids) < least(special, config):
        raise DataError(
            f"the text has {len(ids)} tokens, need at least {least(special, config)}: {W} to judge by and "
            f"{W} to accept by"
        )
    generator, state, steps = stream(config.seed, "positions"), model.init_state(1), list[Step]()
    starts = {index: _places(ffn) for index, ffn in layers.items()}
    with torch.no_grad():
        for turn, at in enumerate(range(0, len(text) - 2 * W, W)):
            index = list(layers)[turn % len(layers)]
            ffn, piece = layers[index], Piece(text[at : at + W + 1], state, at == 0, special.reset)

            def loss(place: Tensor, ffn: RoutedSwiGLU = ffn, piece: Piece = piece) -> float:
                _put(ffn, place)
                return float(losses(model, piece)[0].mean())

            kept_EA = ffn.offset_EA.detach().clone()  # to the bit
            there, ties = moved(_places(ffn), starts[index], loss, config, generator)
            ffn.offset_EA.copy_(kept_EA)
            _, state = losses(model, piece)
            fresh = Piece(text[at + W : at + 2 * W + 1], state, False, special.reset)
            before = float(losses(model, fresh)[0].mean())
            _put(ffn, there)
            after = float(losses(model, fresh)[0].mean())
            if not (accepted := after < before):
                ffn.offset_EA.copy_(kept_EA)
            steps.append(Step(index, ties, before, after, accepted))
    return steps


def _places(ffn: RoutedSwiGLU) -> Tensor:
    """Positions [E,A], in cells from their centres."""
    return OFFSET * ffn.offset_EA.detach().tanh()


def _put(ffn: RoutedSwiGLU, place_EA: Tensor) -> None:
    require(math.isfinite(float(place_EA.abs().max())), "positions", "not finite", "finite")
    ffn.offset_EA.copy_((place_EA / OFFSET).atanh())
