"""The delta rules with gates on a GPU: what `delta.scan` and `delta.scan_rwkv7` run by the kernels of
`perspectron.ops.triton.kernels.delta` and `delta_gradients`, whose docstrings say how.

Shapes: B batch, H heads, T time, K key width, A gate width (K or 1), V value width; N memories, M rows of them all, C
tokens of a chunk, n chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perspectron.ops import dispatch
from perspectron.ops.triton.scan import _on, _written, chosen, precision
from perspectron.ops.triton.scan import obstacle as general_obstacle


def obstacle(*tensors: Tensor) -> str | None:
    """The reason why the kernels cannot run on these tensors, the first of which is the queries, and what would work;
    None if they can."""
    if (why := general_obstacle(1, *tensors)) is not None:
        return why
    from perspectron.ops.triton.kernels.delta import WIDEST

    if tensors[0].shape[-1] > WIDEST:
        return f"keys of {tensors[0].shape[-1]} channels, must be ≤ {WIDEST}; use backend='torch'"
    return None


def wanted(backend: str, *tensors: Tensor) -> bool:
    """True if the kernels are to run on these, the first of which is the queries. BackendError as `chosen`."""
    return chosen(backend, "the delta rules", tensors[0].device, lambda: obstacle(*tensors))


def run(
    q: Tensor, e: Tensor, w: Tensor, k: Tensor | None, v: Tensor, gate: Tensor, state: Tensor, scale: float, sign: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [B,H,T,V], the last state); writes into the state where gradients are off. With k, u is read before the
    decay, and written by w. q is multiplied by `scale`, e by `sign`."""
    beside = q.stride(1) < q.stride(2)  # a token's heads are side by side, as mixers make them
    gate = gate if k is None else gate.expand_as(q)
    rows = [x.transpose(1, 2) if beside else x for x in (q, e, w, w if k is None else k, v, gate)]
    tensors = [x.contiguous() for x in rows]
    fixed = Fixed(k is not None, q.shape[1] if beside else 1, scale, sign)
    flat = state.flatten(0, 1).contiguous()
    if not dispatch.gradients_off():
        o, last = _Scan.apply(fixed, *tensors, flat)
        return o.transpose(1, 2) if beside else o, last.view(state.shape)
    o = _forward(fixed, tensors, flat, flat)
    if not flat.is_inference():  # autograd must see that a tensor it may have saved was overwritten
        torch.autograd.graph.increment_version(flat)
    return o.transpose(1, 2) if beside else o, _written(flat.view(state.shape), state)


@dataclass(frozen=True)
class Fixed:
    """first: read before the decay. heads: number of heads side by side, or 1. scale, sign: factors of q and e."""

    first: bool
    heads: int
    scale: float
    sign: float


class _Scan(torch.autograd.Function):
    """The kernels with their gradients; keeps only the inputs."""

    @staticmethod
    def forward(ctx: Any, fixed: Fixed, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.fixed = fixed
        last = torch.empty_like(inputs[-1])
        return _forward(fixed, inputs[:-1], inputs[-1], last), last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dlast.contiguous())
        dq, de, dw, dk, *others = dispatch.once_differentiable(
            "the delta rule on Triton", _backward, ctx.fixed, *given
        )
        return None, dq, de, dw, dk, *others

    jvp = dispatch.refuse("the delta rule on Triton has no forward-mode derivative; use backend='torch'")


class _Call:
    """The sizes of one call, and what its kernels share."""

    def __init__(self, fixed: Fixed, q: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> None:
        from perspectron.ops.triton.kernels import delta

        self.N, self.K, self.V = state.shape
        self.M, self.A = q.numel() // self.K, gate.shape[-1]
        self.T, self.fixed, self.like = self.M // self.N, fixed, q
        self.wide = self.A > 1 or fixed.first
        self.tile = delta.tile(self.K)
        self.chunks = -(-self.T // delta.C.value)
        self.sizes = (self.T, fixed.heads, self.K, self.V)
        self.walkers = (self.N, -(-self.V // self.tile.columns))
        self.precision = precision()

    def new(self, *shape: int) -> Tensor:
        return self.like.new_empty(*shape)

    def prepared(
        self, q: Tensor, e: Tensor, w: Tensor, k: Tensor, v: Tensor, gate: Tensor
    ) -> dict[str, Tensor]:
        """The outputs of `prepare`, by its names and in its order; one that is not used stands for another."""
        from perspectron.ops.triton.kernels import delta

        M, K, first = self.M, self.K, self.fixed.first
        made = {name: self.new(M, 16) for name in ("inverse", "A_qu")}
        made |= {name: self.new(M, 16) if first else made["A_qu"] for name in ("A_qv", "A_ev")}
        made |= {name: self.new(M, K) for name in ("Z", "Y", "Xu")}
        made["Xv"] = self.new(M, K) if first else made["Xu"]
        made |= {"U": self.new(M, self.V), "P": self.new(self.N, self.chunks, self.A)}
        delta.prepare[(self.N * self.chunks,)](
            q, e, w, k, v, gate, *made.values(), self.fixed.scale, self.fixed.sign,
            *self.sizes, self.wide, first, self.tile.rows, self.tile.some, self.tile.some, self.precision,
            num_warps=self.tile.warps // 2,
        )  # fmt: skip
        return made

    def walk(
        self, made: dict[str, Tensor], v: Tensor, first: Tensor, o: Tensor, last: Tensor, border: Tensor | None
    ) -> None:  # fmt: skip
        """Go through the chunks in order; with borders, write the state before each and the whole U, and no outputs."""
        from perspectron.ops.triton.kernels import delta

        delta.forward[self.walkers](
            made["Z"], made["Y"], made["Xu"], made["Xv"], made["U"], v, made["A_qu"], made["A_qv"], made["P"], first,
            o, last, last if border is None else border, *self.sizes, self.wide, self.fixed.first, border is not None,
            self.tile.rows, self.tile.columns, self.precision, num_warps=self.tile.warps,
        )  # fmt: skip


def _forward(fixed: Fixed, inputs: Sequence[Tensor], state: Tensor, last: Tensor) -> Tensor:
    """The outputs, as v; writes the last state."""
    q, _, _, _, v, gate = inputs
    call, o = _Call(fixed, q, v, gate, state), torch.empty_like(v)
    with _on(q):
        call.walk(call.prepared(*inputs), v, state, o, last, None)
    return o


def _backward(
    fixed: Fixed, q: Tensor, e: Tensor, w: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor, do: Tensor,
    dlast: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the inputs and of the first state; all else is computed again."""
    from perspectron.ops.triton.kernels import delta, delta_gradients

    call, first = _Call(fixed, q, v, gate, state), fixed.first
    dq, de, dw, dv, dgate, dfirst = (torch.empty_like(x) for x in (q, e, w, v, gate, state))
    dk, dU = torch.empty_like(k) if first else dw, torch.empty_like(v) if first else dv
    S, E = (call.new(call.N, call.chunks, call.K, call.V) for _ in range(2))
    dA_qu, dA_eu = (call.new(call.N, call.chunks, 16, 16) for _ in range(2))
    dA_qv, dA_ev = (torch.empty_like(dA_qu) for _ in range(2)) if first else (dA_qu, dA_eu)
    tile, some, alone = call.tile, (call.tile.some, call.tile.some, call.precision), (call.N * call.chunks,)
    with _on(q):
        made = call.prepared(q, e, w, k, v, gate)
        call.walk(made, v, state, do, dlast, S)
        delta.backward[call.walkers](
            made["Z"], made["Y"], made["Xu"], made["A_qu"], made["P"], do, dlast, dU, E, dfirst,
            *call.sizes, call.wide, tile.rows, tile.columns, call.precision, num_warps=tile.warps,
        )  # fmt: skip
        delta_gradients.pairs[alone](
            made["inverse"], made["A_qv"], made["A_ev"], made["Xv"], v, made["U"], dU, E, do, dU, dv,
            dA_qu, dA_qv, dA_eu, dA_ev, *call.sizes, first, tile.rows, *some, num_warps=tile.warps // 2,
        )  # fmt: skip
        delta_gradients.inputs[alone](
            q, e, w, k, v, gate, S, E, do, dU, made["U"], dA_qu, dA_qv, dA_eu, dA_ev, dq, de, dw, dk, dgate,
            made["P"], fixed.scale, fixed.sign, *call.sizes, call.wide, first, tile.rows, *some, num_warps=tile.warps,
        )  # fmt: skip
        if call.wide:
            delta_gradients.channels[*alone, -(-call.K // 32)](
                q, e, w, k, gate, dA_qu, dA_qv, dA_eu, dA_ev, dq, de, dw, dk, dgate, made["P"],
                fixed.scale, fixed.sign, *call.sizes[:3], first, 32, num_warps=1,
            )  # fmt: skip
    return dq, de, dw, dk if first else None, dv, dgate, dfirst
