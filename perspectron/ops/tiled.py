"""Causal attention whose values are narrower than its keys, tile by tile, for training on a CPU.

The fused kernel wants equal widths: padding the values of the lens mixer doubles every product with them. Here a
tile of scores is made, used and dropped, forward and backward, so that memory is that of the fused kernel.

Shapes: N batch and heads together, T time, K width of queries and keys, V of values, R rows of a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perspectron.ops.dispatch import once, refuse

ROWS = 128
SCORES = 2**18  # of one tile: they stay in the cache


def attend(q_NTK: Tensor, k_NTK: Tensor, v_NTV: Tensor, scale: float) -> Tensor:
    """Attention softmax(scale · q kᵀ) v over each token and those before it [N,T,V]; differentiable once."""
    o_NTV: Tensor = _Attend.apply(q_NTK, k_NTK, v_NTV, scale)
    return o_NTV


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q = q * scale
        o, lse_NT1 = torch.empty_like(v), q.new_empty(*q.shape[:2], 1)
        for n, rows in _tiles(*q.shape[:2]):
            scores = _scores(q, k, n, rows)
            high = scores.amax(-1, keepdim=True)
            total = scores.sub_(high).exp_().sum(-1, keepdim=True)
            o[n, rows] = (scores @ v[n, : rows.stop]).div_(total)
            lse_NT1[n, rows] = total.log_().add_(high)
        ctx.save_for_backward(q, k, v, o, lse_NT1)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        return *once("tiled.attend", _backward, *ctx.saved_tensors, do, ctx.scale), None

    jvp = refuse("tiled.attend has no forward-mode derivative; differentiate in reverse mode")


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_NT1: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mean_NT1 = (do * o).sum(-1, keepdim=True)
    for n, rows in _tiles(*q.shape[:2]):
        here = slice(0, rows.stop)
        p = _scores(q, k, n, rows).sub_(lse_NT1[n, rows]).exp_()
        dv[n, here].baddbmm_(p.mT, do[n, rows])
        ds = torch.bmm(do[n, rows], v[n, here].mT).sub_(mean_NT1[n, rows]).mul_(p)
        dq[n, rows] = ds @ k[n, here]
        dk[n, here].baddbmm_(ds.mT, q[n, rows])
    return dq.mul_(scale), dk, dv


def _tiles(N: int, T: int) -> Iterator[tuple[slice, slice]]:
    """The (heads, rows) of each tile; its columns are those up to its last row."""
    for start in range(0, T, ROWS):
        stop = min(T, start + ROWS)
        heads = max(1, SCORES // ((stop - start) * stop))
        for n in range(0, N, heads):
            yield slice(n, n + heads), slice(start, stop)


def _scores(q: Tensor, k: Tensor, n: slice, rows: slice) -> Tensor:
    """The scores q kᵀ of a tile; −∞ where the key is ahead of the query."""
    scores = q[n, rows] @ k[n, : rows.stop].mT
    R = scores.shape[1]
    ahead = torch.ones(R, R, dtype=torch.bool, device=q.device).triu_(1)
    scores[:, :, rows.start :].masked_fill_(ahead, float("-inf"))
    return scores
