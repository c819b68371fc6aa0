"""Parts of a memory that were trained while the weights were frozen, kept in the state: each row of a batch has its own
(docs/guides/keep-a-memory.md#a-memory-that-was-trained).

A matrix memory S is read as S + C, of an offset C. In designs that add what they write, this is a memory that decays
toward C instead of toward 0; in those that correct what they read (delta rules), what is written does not see C. C is
not something that was read: a new document does not reset it.

Shapes: B batch, T time, H heads, G heads of queries, K key width, V value width, N logits of decays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.ops.dispatch import full_precision

KINDS = ("offset", "gates", "first")
"""Parts that can be trained, fields of `Tuned`."""


@dataclass(frozen=True)
class Tuned:
    """A mixer's state with its trained parts. mixer: its own state. offset: C, of the memory's shape. gates: added to
    the decay logits [B,N]. first: S0, the memory with which a document begins. A part that no row has is [B,0]; zeros
    are the same as none."""

    mixer: Any
    offset: Tensor
    gates: Tensor
    first: Tensor

    def decays(self, logits: Tensor) -> Tensor:
        """Decay logits [B,T,…], N numbers per token, plus the trained gates."""
        if self.gates.shape[1] == 0:
            return logits
        return logits + self.gates.view(len(logits), 1, *logits.shape[2:]).to(logits.dtype)

    def read(self, o_BHTV: Tensor, q_BGTK: Tensor, scale: float = 1.0) -> Tensor:
        """o, which was read from S, plus what is read from the offset C [B,H,K,V]: o + scale · q C. Each q serves H / G
        consecutive heads. Without heads: o [B,T,V], q [B,T,K], C [B,V,K]."""
        if self.offset.shape[1] == 0:
            return o_BHTV
        with full_precision(o_BHTV):
            C, q = self.offset.to(o_BHTV.dtype), q_BGTK.to(o_BHTV.dtype) * scale
            if C.ndim == 4:
                q = q if q.shape[1] in (1, C.shape[1]) else q.repeat_interleave(C.shape[1] // q.shape[1], 1)
                return o_BHTV + q @ C
            C = C.reshape(len(q), -1, C.shape[-1])  # PDR's groups of rows are in the batch dimension
            return o_BHTV + q @ C.mT

    def begun(self, empty: Any) -> Any:
        """A mixer's empty state with a copy of the trained first memory, which is never written into."""
        if self.first.shape[1] == 0:
            return empty
        return replace(empty, **{memory_field(empty): self.first.clone()})

    def restarted(self, empty: Any, reset_B: Tensor, kept: Sequence[str]) -> Any:
        """The mixer's state, with the rows of `reset_B` at the start of a document. kept: fields that a reset keeps."""
        begun = self.begun(empty)

        def chosen(start: Tensor, own: Tensor) -> Tensor:
            return torch.where(reset_B.view(-1, *[1] * (own.ndim - 1)), start.to(own.dtype), own)

        values = {
            field.name: own
            if field.name in kept
            else chosen(getattr(begun, field.name, torch.zeros_like(own)), own)
            for field in fields(self.mixer)
            if isinstance(own := getattr(self.mixer, field.name), Tensor)
        }
        return replace(self.mixer, **values)


pytree.register_dataclass(Tuned)
UNTUNED = Tuned(None, *[torch.empty(0, 0)] * 3)
"""A `Tuned` without any part, for mixers whose states have none."""


def memory_field(state: Any) -> str:
    """The field of a mixer's state that holds its matrix memory."""
    return next(field.name for field in fields(state) if field.name.startswith("memory_"))


def around(state: Any, decays: int, kinds: Sequence[str]) -> Tuned:
    """A mixer's empty state with zeros for the parts of these kinds. decays: N."""
    memory = getattr(state, memory_field(state))
    B = len(memory)
    sizes = {"offset": memory.shape[1:], "gates": (decays,), "first": memory.shape[1:]}
    parts = {kind: memory.new_zeros(B, *(sizes[kind] if kind in kinds else (0,))) for kind in KINDS}
    return Tuned(state, **parts)


def parts(state: Any) -> list[Tuned]:
    """Every `Tuned` in a state, in the order of its layers."""
    leaves = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, Tuned))
    return [part for part in leaves if isinstance(part, Tuned)]


def with_parts(state: Any, change: Callable[[Tuned], Tuned]) -> Any:
    """The state with `change` applied to each `Tuned`, in the order of `parts`."""
    is_tuned = lambda part: isinstance(part, Tuned)  # noqa: E731
    changed = pytree.tree_map(lambda part: change(part) if is_tuned(part) else part, state, is_leaf=is_tuned)
    return replace(changed, model=state.model)


def kinds_of(state: Any) -> tuple[str, ...]:
    """The kinds of parts that a state has."""
    found = parts(state)
    return tuple(kind for kind in KINDS if any(getattr(part, kind).shape[1] for part in found))


def has_first(state: Any) -> bool:
    """True if documents begin with a trained memory."""
    return any(part.first.shape[1] for part in parts(state))


def carried(state: Any, like: Any) -> Any:
    """A layer's empty state, with the trained parts of another state of as many rows."""
    if isinstance(like, Tuned):
        return replace(like, mixer=like.begun(state))
    return _descend(state, lambda name: carried(getattr(state, name), getattr(like, name)))


def alike(layers: Sequence[Any]) -> list[Any]:
    """A layer's states from several batches, with the same kinds of trained parts: zeros where only others have one."""
    tuned = [layer for layer in layers if isinstance(layer, Tuned)]
    if tuned:
        whole = {
            kind: max((getattr(part, kind) for part in tuned), key=Tensor.numel).shape[1:] for kind in KINDS
        }
        return [_padded(layer, tuned[0], whole) for layer in layers]
    names = [name for name in ("mixer", "beside") if all(hasattr(layer, name) for layer in layers)]
    if not names or not all(map(is_dataclass, layers)):
        return list(layers)
    columns = {name: alike([getattr(layer, name) for layer in layers]) for name in names}
    return [
        replace(layer, **{name: column[i] for name, column in columns.items()})
        for i, layer in enumerate(layers)
    ]


def _padded(layer: Any, like: Tuned, whole: dict[str, torch.Size]) -> Tuned:
    own = layer if isinstance(layer, Tuned) else None
    B = len(getattr(layer if own is None else own.mixer, memory_field(layer if own is None else own.mixer)))

    def part(kind: str) -> Tensor:
        x = None if own is None else getattr(own, kind)
        if x is not None and x.shape[1:] == whole[kind]:
            return x
        if x is not None and x.shape[1] > 0:
            return x  # from another model: stacking raises an error
        return getattr(like, kind).new_zeros(B, *whole[kind])

    return Tuned(layer if own is None else own.mixer, *(part(kind) for kind in KINDS))


def bared(layers: Sequence[Any]) -> tuple[Any, ...]:
    """Layers' states without the kinds of trained parts that are zeros in all rows of all layers."""
    found = [part for layer in layers for part in parts(layer)]
    kept = [kind for kind in KINDS if any(bool(getattr(part, kind).any()) for part in found)]
    return tuple(_bare(layer, kept) for layer in layers)


def _bare(layer: Any, kept: Sequence[str]) -> Any:
    if isinstance(layer, Tuned):
        empty = {
            kind: x.new_zeros(len(x), 0) for kind in KINDS if kind not in kept for x in [getattr(layer, kind)]
        }
        return replace(layer, **empty) if kept else layer.mixer
    return _descend(layer, lambda name: _bare(getattr(layer, name), kept))


def _descend(layer: Any, change: Any) -> Any:
    """A block's state, with the state of each of its mixers replaced by what `change` returns for its field."""
    names = [name for name in ("mixer", "beside") if hasattr(layer, name)]
    return replace(layer, **{name: change(name) for name in names}) if names else layer
