"""The meaning of padding and resets for every mixer: values at padding are not read, and values that are not finite end
at a reset.

A gate of 0 forgets a number and a mask hides it, but 0·NaN and 0·∞ are NaN: neither forgets what is not finite. So
where a reset follows, a mixer never sees it, and the tokens before that reset, which would have, get NaN afterwards.

Shapes: B batch, T time, D model width; x is [B,T,D], or N of them where a mixer has N inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.model.tuned import Tuned
from perspectron.util.terms import Term

Mask = Tensor | None
"""A mask [B,T]; None if it is True nowhere."""
Inputs = Tensor | tuple[Tensor, ...]
"""The input of a mixer [B,T,D], or a tuple of all that it has."""
Forward = Callable[..., tuple[Tensor, Any, dict[str, Term]]]


def masked(forward: Forward) -> Forward:
    """Decorator that makes a mixer's forward from one that takes (self, x, state, reset, pad, consume_state). Without a
    state it starts from the empty one. It reads zeros at padding, and no token from a reset on, and no state after it,
    depends on a state or a token before it that was not finite. (Numbers that overflow inside the mixer are its own.)
    With no rows or no tokens the mixer is not called: outputs are empty, and the state stays as it is.

    A reset costs one sum over state and input, which shows that all is finite, as it usually is.
    """

    @functools.wraps(forward)
    def run(
        self: Any,
        x_BTD: Inputs,
        state: Any = None,
        *,
        reset_BT: Mask = None,
        pad_BT: Mask = None,
        consume_state: bool = False,
        **shared: Any,
    ) -> tuple[Tensor, Any, dict[str, Term]]:
        inputs = (x_BTD,) if isinstance(x_BTD, Tensor) else x_BTD
        x = inputs[0]
        state = self.init_state(len(x), x.device, x.dtype) if state is None else state
        if 0 in x.shape[:2]:  # nothing to read
            kept = state if consume_state else pytree.tree_map(_copied, state, is_leaf=_is_ragged)
            return x, kept, {}
        lost_BT, tuned = None, state if isinstance(state, Tuned) else None
        if tuned is not None:
            state, shared = tuned.mixer, {**shared, "tuned": tuned}
            if (
                reset_BT is not None and tuned.first.shape[1]
            ):  # at the first token only, as the model cuts texts there
                if reset_BT.shape[1] > 1 and not x.is_meta and reset_BT[:, 1:].any():
                    raise ValueError(
                        "reset_BT is true behind the first token, where texts begin with a trained memory"
                    )
                empty = self.init_state(len(x), x.device, x.dtype)
                state, reset_BT = tuned.restarted(empty, reset_BT[:, 0], self.kept_at_reset), None
        inputs = tuple(filled(x, pad_BT, 0) for x in inputs)
        if reset_BT is not None and not x.is_meta and not _finite(inputs, state):
            inputs, state, lost_BT = _forgotten(inputs, state, reset_BT, self.kept_at_reset)
        x_BTD = inputs[0] if isinstance(x_BTD, Tensor) else inputs
        y_BTD, state, aux = forward(self, x_BTD, state, reset_BT, pad_BT, consume_state, **shared)
        state = state if tuned is None else replace(tuned, mixer=state)
        return y_BTD if lost_BT is None else y_BTD.masked_fill(lost_BT[:, :, None], torch.nan), state, aux

    return run


def filled(x: Tensor, mask_BT: Mask, value: float) -> Tensor:
    """x [B,T,…] with a value at the tokens of a mask."""
    return x if mask_BT is None else x.masked_fill(mask_BT[(..., *[None] * (x.ndim - 2))], value)


def _copied(part: Any) -> Any:
    if _is_ragged(part):
        return part.fork()
    return part.clone() if isinstance(part, Tensor) else part


def _floats(state: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _finite(inputs: tuple[Tensor, ...], state: Any) -> bool:
    """True if all sums are finite. A sum that overflows also gives False; `_forgotten` then finds nothing to forget."""
    sums = [leaf.detach().sum(dtype=torch.float32) for leaf in (*inputs, *_floats(state))]
    return bool(torch.stack(sums).isfinite().all())


def _forgotten(
    inputs: tuple[Tensor, ...], state: Any, reset_BT: Tensor, kept_at_reset: tuple[str, ...]
) -> tuple[tuple[Tensor, ...], Any, Tensor]:
    """Inputs and state with zeros in tokens and rows that are not finite and are followed by a reset, except in fields
    of the state that a reset keeps; and the tokens [B,T] lost by this: from there to the next reset."""
    state = pytree.tree_map(_whole, state, is_leaf=_is_ragged)
    time_T = torch.arange(reset_BT.shape[1], device=reset_BT.device)
    begun_BT = (
        torch.where(reset_BT, time_T, -1).cummax(1).values
    )  # where each token's document begins; -1: in the state
    finite_BT = torch.stack([x_BTD.isfinite().all(-1) for x_BTD in inputs]).all(0)
    bad_BT = ~finite_BT & (time_T < begun_BT[:, -1:])
    bad_B = reset_BT.any(1)
    bad_B &= ~torch.stack([leaf.isfinite().flatten(1).all(1) for leaf in _floats(state)]).all(0)
    latest_BT = torch.where(bad_BT, time_T, torch.where(bad_B, -1, -2)[:, None]).cummax(1).values

    def cleared(leaf: Tensor) -> Tensor:
        return (
            leaf.masked_fill(bad_B.view(-1, *[1] * (leaf.ndim - 1)), 0) if leaf.is_floating_point() else leaf
        )

    kept = {name: getattr(state, name) for name in kept_at_reset if hasattr(state, name)}
    state = replace(pytree.tree_map_only(Tensor, cleared, state), **kept)
    inputs = tuple(x_BTD.masked_fill(bad_BT[:, :, None], 0) for x_BTD in inputs)
    return inputs, state, latest_BT >= begun_BT


def _is_ragged(part: object) -> bool:
    """True for a `state.Ragged`; this module is below `state` and does not import it."""
    return hasattr(part, "filled")


def _whole(part: Any) -> Any:
    """A cache with all it holds in tensors of all rows: its pieces have one row each. Other parts as they are."""
    return part.filled() if _is_ragged(part) else part
