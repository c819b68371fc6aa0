"""A recurrence whose gates multiply, over chunks of tokens: what `pdr`, `gla` and `delta` share.

The state goes from chunk to chunk; inside a chunk a binary tree takes all tokens at once. `halves` and `blocks` find
its blocks.

Shapes: B batch (and whatever else runs beside it), T time, L tokens of one chunk, D width, b block of the tree, n pairs
of blocks. Time is the last dimension but one of every input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops.dispatch import full_precision, gradients_off, once_differentiable

Tensors = tuple[Tensor, ...]


def halves(x_BLD: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Left and right block [B·n, b, D] of every pair; views."""
    B, L, D = x_BLD.shape
    pairs = x_BLD.view(B * (L // (2 * b)), 2, b, D)
    return pairs[:, 0], pairs[:, 1]


def blocks(A_BRC: Tensor, rows: int, columns: int) -> Tensor:
    """The part [B, n, rows, columns] of A where the right block of every pair, so many rows, looks at the left one; a
    view."""
    B, R, C = A_BRC.shape
    size, stride = (B, R // (2 * rows), rows, columns), (R * C, 2 * (rows * C + columns), C, 1)
    return A_BRC.as_strided(size, stride, rows * C)


@dataclass(frozen=True)
class Recurrence:
    """One chunk of a recurrence, forward and differentiated; `size` is the greatest number of its tokens.

    Its inputs are q, k, v, …, the last of them the gate; outputs have v's shape. forward: (*inputs, state) → (o, next
    state). backward: (*inputs, do, state, d next state) → gradients of the inputs and the state. tangent: (*inputs,
    their tangents, state, dstate) → (do, next state, its tangent).
    """

    op: str
    size: int
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Tensors]
    tangent: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def spans(self, T: int) -> list[slice]:
        """The tokens of each chunk."""
        T = int(T)  # under torch.jit.trace sizes are tensors
        return [slice(start, min(start + self.size, T)) for start in range(0, T, self.size)]

    def run(self, *inputs_and_state: Tensor) -> tuple[Tensor, Tensor]:
        """All chunks, (outputs, last state); differentiable once where gradients are on."""
        *inputs, state = inputs_and_state
        if gradients_off():
            return self._walk(inputs, state, None)
        o, state, _ = _Scan.apply(self, *inputs, state)
        return o, state

    def _walk(self, inputs: list[Tensor], state: Tensor, borders: Tensor | None) -> tuple[Tensor, Tensor]:
        """Walk over the chunks; `borders` [chunks, …] receives each chunk's first state."""
        o = torch.empty_like(inputs[2])
        for i, span in enumerate(self.spans(o.shape[-2])):
            if borders is not None:
                borders[i] = state
            o_chunk, state = self.forward(*_chunk(span, inputs), state)
            o[..., span, :] = _tokens(o_chunk, span)
        return o, state

    def _backward(self, inputs: list[Tensor], borders: Tensor, do: Tensor, dstate: Tensor) -> Tensors:
        """Gradients of the inputs and the first state: chunks from the last to the first."""
        gradients = [torch.empty_like(x) for x in inputs]
        for i, span in reversed(list(enumerate(self.spans(do.shape[-2])))):
            *parts, dstate = self.backward(*_chunk(span, inputs), _cut(span, do), borders[i], dstate)
            for whole, part in zip(gradients, parts, strict=True):
                whole[..., span, :] = _tokens(part, span)
        return *gradients, dstate

    def _tangent(self, primals: Tensors, tangents: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Tangents of the outputs and of the last state."""
        assert self.tangent is not None
        (*inputs, state), (*tangents, dstate), outputs = primals, tangents, []
        for span in self.spans(inputs[2].shape[-2]):
            d_chunk = [_cut(span, x) for x in tangents]
            do, state, dstate = self.tangent(*_chunk(span, inputs), *d_chunk, state, dstate)
            outputs.append(_tokens(do, span))
        return torch.cat(outputs, -2), dstate


def _chunk(span: slice, inputs: list[Tensor]) -> list[Tensor]:
    """The chunk of each input, the last of which is the gate. Where padding writes nothing, a gate of 1 leaves the
    state as it is."""
    *others, gate = inputs
    return [*(_cut(span, x) for x in others), _cut(span, gate, past=1.0)]


def _cut(span: slice, x: Tensor, past: float = 0.0) -> Tensor:
    """The chunk of x, padded with `past` to a power of two tokens. That is 0 for all but the gate: padding writes and
    reads nothing, and has no gradient."""
    L = span.stop - span.start
    pad = (1 << (L - 1).bit_length()) - L
    x = x[..., span, :]
    return (F.pad(x, (0, 0, 0, pad), value=past) if pad else x).contiguous()


def _tokens(chunk: Tensor, span: slice) -> Tensor:
    """The chunk without its padding."""
    return chunk[..., : span.stop - span.start, :]


class _Scan(torch.autograd.Function):
    """The backward pass walks the chunks from the last to the first and builds each tree again, so that only the
    states at chunk borders are kept."""

    @staticmethod
    def forward(kind: Recurrence, *inputs_and_state: Tensor) -> Tensors:
        *inputs, state = inputs_and_state
        borders = state.new_empty(len(kind.spans(inputs[2].shape[-2])), *state.shape)
        return *kind._walk(inputs, state, borders), borders

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.kind, *tensors = inputs
        borders = output[2]
        ctx.mark_non_differentiable(borders)
        ctx.set_materialize_grads(False)  # no zeros for the borders, which are the largest of all
        ctx.save_for_backward(*tensors, borders)
        if ctx.kind.tangent is not None:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *inputs, state, borders = ctx.saved_tensors
        do = torch.zeros_like(inputs[2]) if do is None else do
        dstate = torch.zeros_like(borders[0]) if dstate is None else dstate
        return None, *once_differentiable(
            ctx.kind.op, _backward, ctx.kind, *inputs, state, borders, do, dstate
        )

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.kind.tangent is None:
            raise RuntimeError(f"{ctx.kind.op} has no forward-mode derivative; use backend='naive'")
        primals = ctx.saved_tensors
        with full_precision(primals[0]):
            filled = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
            return *ctx.kind._tangent(primals, filled), None


def _backward(kind: Recurrence, *given: Tensor) -> Tensors:
    """The gradients. The first state, which borders hold too, is given so that they depend on it."""
    *inputs, _, borders, do, dstate = given
    return kind._backward(inputs, borders, do, dstate)
