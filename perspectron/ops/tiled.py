"""Causal attention whose values are narrower than its keys, tile by tile, for training on a CPU.

The fused kernel wants equal widths: padding the values of the lens mixer doubles every product with them. Here a
tile of scores is made, used and dropped, forward and backward, so that memory is that of the fused kernel.

Shapes: N batch and heads together, T time, K width of queries and keys, V of values, R rows of a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perspectron.native import training
from perspectron.ops.dispatch import once, refuse

ROWS = 128
SCORES = 2**18  # of one tile: they stay in the cache
WIDE = 2**20  # and of one in bfloat16
LONGEST = 512  # queries; beyond it the fused kernel's backward pass is as fast


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


# ---------------------------------------------------------------- bfloat16


def attend_brief(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask_BTS: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention softmax(scale · q kᵀ) v of bfloat16 [B,H,T,K]: forward by PyTorch's fused kernel, backward in tiles
    whose products are those of matrices, which is faster up to LONGEST queries. Differentiable once."""
    q, k, v = (x.contiguous() for x in (q_BHTK, k_BHSK, v_BHSK))
    if mask_BTS is not None:
        mask_BTS = mask_BTS.expand(q.shape[0], q.shape[2], k.shape[2])
    o_BHTK: Tensor = _Brief.apply(q, k, v, mask_BTS, causal, scale)
    return o_BHTK


class _Brief(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask_BTS: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        added = None
        if mask_BTS is not None:
            added = torch.zeros_like(mask_BTS, dtype=q.dtype).masked_fill_(~mask_BTS, float("-inf"))[:, None]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=added, scale=scale
        )
        ctx.save_for_backward(q, k, v, o, lse, mask_BTS)
        ctx.given = causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        gradients = once("attention", _backward_brief, *ctx.saved_tensors, do, *ctx.given)
        return *gradients, None, None, None

    jvp = refuse("attention in bfloat16 has no forward-mode derivative; differentiate in reverse mode")


def _backward_brief(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask_BTS: Tensor | None,
    do: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v; scores are float32, the products with them bfloat16."""
    (B, H, T, _), S = q.shape, k.shape[2]
    mean_NT = (do.float() * o.float()).sum(-1).flatten(0, 1)
    q_NTK, k_NSK, v_NSK, do_NTK = (x.flatten(0, 1) for x in (q, k, v, do.contiguous()))
    lse_NT, q_full, k_full = lse.flatten(0, 1), q_NTK.float(), k_NSK.float().mT
    mask = None if mask_BTS is None else mask_BTS.float()
    dq, dk, dv = torch.empty_like(q_NTK), torch.zeros_like(k_full.mT), torch.zeros_like(k_full.mT)
    rows = max(1, min(T, ROWS))
    together = max(1, WIDE // (H * rows * S))  # batches of a tile
    for b in range(0, B, together):
        batches = slice(b, min(B, b + together))
        n = slice(batches.start * H, batches.stop * H)
        for start in range(0, T, rows):
            here = slice(start, min(T, start + rows))
            seen = slice(0, here.stop if causal else S)
            p, ds = training.softmax_backward(
                torch.bmm(q_full[n, here], k_full[n, :, seen]),
                lse_NT[n, here].contiguous(),
                mean_NT[n, here].contiguous(),
                None if mask is None else mask[batches, here, seen].contiguous(),
                torch.bmm(do_NTK[n, here], v_NSK[n, seen].mT),
                scale,
                start if causal else -1,
            )
            dq[n, here] = torch.bmm(ds, k_NSK[n, seen])
            dk[n, seen] += torch.bmm(ds.mT, q_NTK[n, here])
            dv[n, seen] += torch.bmm(p.mT, do_NTK[n, here])
    return dq.view_as(q), dk.to(k.dtype).view_as(k), dv.to(v.dtype).view_as(v)
