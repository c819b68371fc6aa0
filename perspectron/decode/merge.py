"""Two memories as one: S_AB = Γ_B S_A + S_B, A's state carried through what B's layers did while B was read alone.

A layer's update is affine in its state for given inputs: a decay Γ_B of each number, or, in delta rules, a matrix for
each head. Neither is kept while reading: B is read once more from its log, and beside B's own states each layer updates
A's with the inputs that B alone gave it. That is Γ_B S_A + S_B but for rounding, in every design; caches and windows
get B's keys and values behind A's. What is not exact are inputs of layers above the first, which depend on A, too.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from perspectron.decode.apart import diverging, ids_of
from perspectron.decode.history import exhausted
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.model.block import Block, ShiftedState
from perspectron.model.model import LanguageModel
from perspectron.model.parts import Shared
from perspectron.model.state import LMState
from perspectron.model.tuned import has_first
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, StateError

SAME = 1e-9
"""KL in nats a token up to which two memories count as the same but for rounding."""
DRAWN = 64
"""Maximum number of tokens that a merge is judged on if no probe is given."""


@dataclass(frozen=True)
class Merged:
    """The memory of two texts A and B. kl: KL in nats a token over the probe, from the predictions after reading A and
    then B to those of this memory. alone: the same to those after B alone. probe: its ids."""

    session: Session
    kl: float
    alone: float
    probe: tuple[int, ...]


def merge(a: Session, b: Session, on: Sequence[int] | str = ()) -> Merged:
    """Join the memories of two texts of a model, leaving both as they are. on: a probe on which the result is judged;
    without one, the most likely tokens after A and then B. The result remembers both texts but knows only B's last
    token, as a session from a bare state does.

    StateError: texts of different models, or B's beginning is not known. ConfigError: a text is empty, together they
    are too long, B has several documents that begin with a trained memory, or the merge is no better than B alone."""
    return exhausted(merging(a, b, on))


def merging(a: Session, b: Session, on: Sequence[int] | str = ()) -> Generator[int, None, Merged]:
    """`merge` as a generator, which pauses as `Session.reading` does."""
    if a.model is not b.model:
        raise StateError("the texts are of different models; merge texts of one")
    if not b.whole:
        raise StateError(
            "the beginning of the second text is remembered but not known: it cannot be read again"
        )
    ids, given = b.tokens, ids_of(a, on)
    require(
        len(ids) > 0 and len(a.tokens) > 0, "tokens of the texts", [len(a.tokens), len(ids)], "≥ 1 of each"
    )
    a.fork().append([*ids, *given])  # positions that are lacking are refused before the work
    state = yield from carrying(a, b)
    merged = a.remembered(state, ids[-1:])
    merged.note("merged", a.digest)
    merged.note("merged", b.digest)
    true = a.fork()
    yield from true.reading(ids)
    if not given:
        told, start = true.fork(), len(true.tokens)
        most = DRAWN if told.left is None else min(DRAWN, told.left - 1)  # all of them are judged
        require(most >= 1, "on: positions left for a probe", most, "≥ 1")
        yield from told.saying(most, sampling=SamplingConfig(temperature=0.0))
        given = told.tokens[start:]
    apart = yield from diverging(true.fork(), merged.fork(), given)
    alone = yield from diverging(true, b.fork(), given)
    kl, without = (sum(found) / max(1, len(found)) for found in (apart, alone))
    if not (kl < without and without > SAME):
        name, bound = a.model.config.name, f"< {without:.4g}, that of B alone, and that > {SAME}"
        raise ConfigError(f"merge: KL of a merged memory of {name} = {kl:.4g}, must be {bound}")
    return Merged(merged, kl, without, tuple(given))


@torch.inference_mode()
def carrying(a: Session, b: Session) -> Generator[int, None, LMState]:
    """A's state carried through all tokens of B but the last; a generator, which pauses as `Session.reading` does."""
    model, reset = a.model, a.tokenizer.specials.reset
    carried = yield from a.remembering()
    own = yield from b.at(0).remembering()  # the prefix of every text is in A already
    begins = reset is not None and reset in b.tokens and has_first(own)
    require(not begins, "the second text", "several documents", "one, where they begin with a trained memory")
    ids, at = b.tokens[:-1], 0
    while at < len(ids):
        yield len(ids) - at
        part = ids[at : at + a.chunk]
        ids_1T = torch.tensor([part], device=model.device)
        reset_1T = ids_1T == (-1 if reset is None else reset)
        own, carried = read_beside(model, ids_1T, own, carried, reset_1T if reset_1T.any() else None)
        at += len(part)
    return carried


def read_beside(
    model: LanguageModel, ids_BT: Tensor, own: LMState, carried: LMState, reset_BT: Tensor | None = None
) -> tuple[LMState, LMState]:
    """Read tokens after `own`, and update `carried` by the inputs that the layers get meanwhile; both are used up."""
    x_BTD, length_B = model.placed(model.embedding(ids_BT), own.length_B, reset_BT)
    shared, states, others = Shared(), list[Any](), list[Any]()
    for block, mine, other in zip(cast("list[Block]", model.blocks), own.layers, carried.layers, strict=True):
        # The previous token that a layer reads (token shift) is B's: it is no memory.
        before = (
            replace(mine, mixer=cast(ShiftedState, other).mixer) if isinstance(mine, ShiftedState) else other
        )
        seen = shared.copy()
        _, after, _ = block(x_BTD, before, None, reset_BT, None, False, seen)
        x_BTD, mine, _ = block(x_BTD, mine, model.ffn_of(block), reset_BT, None, False, shared)
        states.append(mine)
        others.append(replace(mine, mixer=after.mixer if isinstance(after, ShiftedState) else after)
                      if isinstance(mine, ShiftedState) else after)  # fmt: skip
    far_B = None
    if carried.length_B is not None:
        assert length_B is not None
        far_B = carried.length_B + ids_BT.shape[1] if reset_BT is None else length_B
    return LMState(tuple(states), length_B, model.number), LMState(tuple(others), far_B, model.number)
