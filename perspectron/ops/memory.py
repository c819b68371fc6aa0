"""A matrix memory with gated key channels, token by token on the native kernel, for training and inference on a CPU:
what `gla` and `delta` run there instead of their chunks.

    u_t = z_t − S_{t-1}ᵀ e_t,  S_t = diag(α_t) S_{t-1} + w_t u_tᵀ [+ k_t v_tᵀ],  o_t = S_tᵀ q_t

with z = v and w = k, or, where there is b, z = 0, w = b and the last term. Without e, u = v.

Shapes: B batch, H heads, G heads of queries and keys, T time, K key width, A gate width (K or 1), V value width.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.native import training
from perspectron.ops.dispatch import once_differentiable, refuse


def scan(
    q_BGTK: Tensor, k_BGTK: Tensor, v_BHTV: Tensor, e_BHTK: Tensor | None, b_BHTK: Tensor | None,
    alpha_BHTA: Tensor, state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [B,H,T,V], the last state); differentiable once, in reverse mode. H / G consecutive heads share q and
    k."""
    inputs = (q_BGTK, k_BGTK, v_BHTV, e_BHTK, b_BHTK, alpha_BHTA, state_BHKV)
    o_NTV, state_NKV = _Scan.apply(*(None if x is None else x.flatten(0, 1).contiguous() for x in inputs))
    return o_NTV.view(v_BHTV.shape), state_NKV.view(state_BHKV.shape)


class _Scan(torch.autograd.Function):
    """The native kernel with its gradients; keeps its inputs and computes the states again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.there = [x is not None for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if x is not None))
        return training.memory(*inputs)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if there else None for there in ctx.there]
        return once_differentiable(
            "the scan", training.memory_backward, *inputs, do.contiguous(), dstate.contiguous()
        )

    jvp = refuse("the native scan has no forward-mode derivative; use backend='torch'")
