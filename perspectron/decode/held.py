"""Tensors and caches of states, for steps that are recorded or captured.

Shapes: B batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.model.cache import Cache, is_cache
from perspectron.model.state import LMState
from perspectron.native.tape import Unrecordable, memory

ALIGNED = 64
MOST_UNSETTLED = 8
"""Number of steps after which a kind of state that still changes its shape counts as one that never settles."""


class Unsettled(Unrecordable):
    """The step changes the shape of its state, as after an empty one; the next step may be recordable."""


def tensors(state: LMState) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]


def caches(state: Any) -> list[Cache]:
    """The growing caches of a state."""
    parts = pytree.tree_leaves(state, is_leaf=is_cache)
    return [part for part in parts if isinstance(part, Cache)]


def like(state: LMState, rows: int, slots: Callable[[Cache], int] = lambda cache: cache.slots) -> LMState:
    """A state of the same shapes for `rows` rows, filled by `fill`. slots: number of slots for each cache."""

    def made(part: Any) -> Any:
        if isinstance(part, Cache):
            k, v = (
                x.new_zeros(rows, x.shape[1], slots(part), x.shape[3]) for x in (part.k_BHSK, part.v_BHSV)
            )
            return Cache(k, v, part.length_B.new_ones(rows), 1)
        return part.new_zeros(rows, *part.shape[1:]) if isinstance(part, Tensor) else part

    return fill(state._map(made, is_leaf=is_cache))


def overlaid(state: LMState, rows: int) -> LMState:
    """`like` for a state without caches, whose layers all share one block of memory for their numbers: enough where
    layers are read and written one after another; in full size, such a state takes a third of a gigabyte."""
    sizes = [sum(ALIGNED + x[:1].nbytes * rows for x in pytree.tree_leaves(layer)) for layer in state.layers]
    memory = np.zeros(max(sizes), np.uint8)

    def placed(layer: Any) -> Any:
        at = 0

        def made(x: Any) -> Any:
            nonlocal at
            shape = (rows, *x.shape[1:])
            if not x.is_floating_point() or x[:1].nbytes == 0:
                return x.new_zeros(shape)
            start, at = at, -(-(at + x[:1].nbytes * rows) // ALIGNED) * ALIGNED
            return torch.frombuffer(memory, dtype=x.dtype, count=math.prod(shape), offset=start).view(shape)

        return pytree.tree_map(made, layer)

    return fill(dataclasses.replace(state, layers=tuple(map(placed, state.layers))))


def fill(state: LMState) -> LMState:
    """Fill a state in place with numbers that do not depend on the text, as whether a step can be recorded must not
    either. Caches have one slot filled."""
    for part in pytree.tree_leaves(state, is_leaf=is_cache):
        if isinstance(part, Cache):
            for x in (part.k_BHSK, part.v_BHSV):
                x.zero_()
                _fill(x[:, :, :1])
            part.length_B.fill_(1)
        elif isinstance(part, Tensor):
            _fill(part)
    return state


def _fill(x: Tensor) -> None:
    if x.is_floating_point():
        x.uniform_(-0.5, 0.5, generator=torch.Generator(x.device).manual_seed(0))
    else:
        x.fill_(1)


def settled(before: list[Tensor], after: list[Tensor]) -> None:
    """Raise Unsettled unless each tensor of a state keeps its shape in the next, and none takes another's memory."""
    own = {memory(x) for x in before}
    for base, end in zip(before, after, strict=True):
        if base.shape != end.shape or (memory(end) in own and memory(end) != memory(base)):
            raise Unsettled("a state that changes its shape, or parts that change places")
