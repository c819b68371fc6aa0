"""A short causal convolution of each channel over the tokens of a document, whose state is the window of the last Z
tokens, then swish (Mamba-2's; docs/designs/baselines.md#mamba-2) or nothing.

Shapes: B batch, T time, C channels, W taps, Z = W − 1 tokens of the window, S = Z + T.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.native import training
from perspectron.ops.attention import places, tail_of
from perspectron.ops.dispatch import once_differentiable, refuse, under_tracing
from perspectron.ops.sequences import packed

BLOCK = 16


@packed("BTC", "BZC")
def convolve(
    u_BTC: Tensor,
    window_BZC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor,
    reset_BT: Tensor | None,
    pad_BT: Tensor | None,
    *,
    swish: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum each token and the Z tokens of its document before it, weighted by channel, with a bias, then take the swish
    unless `swish` is false: (outputs [B,T,C], the window after them). Computes and returns in the window's dtype.
    cu_seqlens: several sequences in one row (`perspectron.ops.sequences`), each with its own window.

        >>> from perspectron.ops import conv
        >>> u, window, weight = torch.rand(1, 5, 3), torch.zeros(1, 3, 3), torch.rand(3, 1, 4)
        >>> outputs, window = conv.convolve(u, window, weight, torch.zeros(3), None, None)
        >>> tuple(outputs.shape), torch.equal(window, u[:, 2:])
        ((1, 5, 3), True)
    """
    dtype, (B, Z, _), T = window_BZC.dtype, window_BZC.shape, u_BTC.shape[1]
    if (W := weight_C1W.shape[2]) != Z + 1:
        raise ValueError(f"window_BZC holds {Z} tokens, must hold {W - 1}: one fewer than the taps")
    weights = weight_C1W[:, 0].T.to(dtype).contiguous(), bias_C.to(dtype).contiguous()
    if reset_BT is None and pad_BT is None:
        u_BSC = torch.cat([window_BZC, u_BTC.to(dtype)], 1)
        return _Convolution.apply(u_BSC, *weights, None, swish), u_BSC[:, T:].clone()
    if reset_BT is None and not torch.is_grad_enabled() and pad_BT is not None and _alone(pad_BT):
        kept = tail_of(pad_BT)
        if kept is not None and kept > 0:  # padding behind all tokens of one row
            y_BTC, window_BZC = convolve(
                u_BTC[:, :kept], window_BZC, weight_C1W, bias_C, None, None, swish=swish
            )
            return F.pad(y_BTC, (0, 0, 0, T - kept)), window_BZC
    # The window counts as Z tokens; before a document's first it holds zeros.
    at = places(torch.full((B,), Z, device=u_BTC.device), T, reset_BT, pad_BT)
    position_BT, order_BT = at.position_BT, None
    if pad_BT is not None:  # tokens first, padding behind them: then Z tokens back is Z columns back
        order_BT = pad_BT.long().argsort(dim=1, stable=True)
        u_BTC, position_BT = _columns(u_BTC, order_BT), position_BT.gather(1, order_BT)
    u_BSC = torch.cat([window_BZC, u_BTC.to(dtype)], 1)
    back_W = torch.arange(Z, -1, -1, device=u_BTC.device)
    y_BTC = _Convolution.apply(u_BSC, *weights, (back_W <= position_BT[:, :, None]).to(dtype), swish)
    last_BZ = Z + at.valid_BT.sum(1, keepdim=True) - back_W[:Z]
    gone_BZ = back_W[:Z] > at.length_B[:, None]
    window_BZC = _columns(u_BSC, last_BZ).masked_fill(gone_BZ[:, :, None], 0)
    return y_BTC if order_BT is None else _columns(y_BTC, order_BT.argsort(1)), window_BZC


def _alone(pad_BT: Tensor) -> bool:
    """True for one row on a CPU, whose values can be read."""
    return len(pad_BT) == 1 and pad_BT.device.type == "cpu" and not under_tracing(pad_BT)


def _columns(x_BTC: Tensor, order_BS: Tensor) -> Tensor:
    return x_BTC.gather(1, order_BS[:, :, None].expand(-1, -1, x_BTC.shape[2]))


def _blocks(u_BSC: Tensor, W: int) -> list[slice]:
    """Blocks of the tokens of u, without the window before them: small ones on a CPU, for its caches, else a single
    one."""
    T = u_BSC.shape[1] - W + 1
    step = BLOCK if u_BSC.device.type == "cpu" else T
    return [slice(t, min(t + step, T)) for t in range(0, T, step)]


def _taps(
    u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None, block: slice
) -> tuple[list[Tensor], Tensor]:
    """The inputs of a block's tokens at each tap, and their weighted sum with the bias."""
    taps, y = [], bias_C
    for j, weight_C in enumerate(weight_WC):
        tap = u_BSC[:, block.start + j : block.stop + j]
        taps.append(tap if sees_BTW is None else tap * sees_BTW[:, block, j, None])
        y = torch.addcmul(y, taps[-1], weight_C)
    return taps, y


def _fast(swish: bool, *tensors: Tensor) -> bool:
    """True if the native kernel can compute these: swish of float32 on a CPU, without tracing."""
    plain = all(x.device.type == "cpu" and x.dtype is torch.float32 for x in tensors)
    some = tensors[0].numel() > 0 and tensors[0].shape[1] >= len(tensors[1])
    return swish and plain and some and not under_tracing(*(x.detach() for x in tensors)) and native.wanted()


class _Convolution(torch.autograd.Function):
    """Σ_j weight_j u_{t+j} + bias, or its swish, with zeros for what a token may not see. Keeps only its inputs for the
    backward pass, which computes the sum again."""

    @staticmethod
    def forward(
        u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None, swish: bool
    ) -> Tensor:
        if _fast(swish, u_BSC, weight_WC, bias_C):
            return training.convolve(u_BSC, weight_WC, bias_C, sees_BTW)
        y_BTC = u_BSC.new_empty(u_BSC.shape[0], u_BSC.shape[1] - len(weight_WC) + 1, u_BSC.shape[2])
        for block in _blocks(u_BSC, len(weight_WC)):
            y = _taps(u_BSC, weight_WC, bias_C, sees_BTW, block)[1]
            y_BTC[:, block] = F.silu(y) if swish else y
        return y_BTC

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.swish = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        gradients = partial(_backward, ctx.swish)
        return *once_differentiable("conv.convolve", gradients, *ctx.saved_tensors, dy_BTC), None, None

    jvp = refuse("conv.convolve has no forward-mode derivative; differentiate in reverse mode")


def _backward(
    swish: bool, u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None, dy_BTC: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of u, weight and bias."""
    if _fast(swish, u_BSC, weight_WC, bias_C):
        return training.convolve_backward(u_BSC, weight_WC, bias_C, sees_BTW, dy_BTC.contiguous())
    du_BSC, dweight_WC, dbias_C = (torch.zeros_like(x) for x in (u_BSC, weight_WC, bias_C))
    for block in _blocks(u_BSC, len(weight_WC)):
        taps, y = _taps(u_BSC, weight_WC, bias_C, sees_BTW, block)
        dy = torch.ops.aten.silu_backward(dy_BTC[:, block], y) if swish else dy_BTC[:, block]
        dbias_C += dy.sum((0, 1))
        for j, tap in enumerate(taps):
            dweight_WC[j] += (dy * tap).sum((0, 1))
            dtap = dy if sees_BTW is None else dy * sees_BTW[:, block, j, None]
            du_BSC[:, block.start + j : block.stop + j].addcmul_(dtap, weight_WC[j])
    return du_BSC, dweight_WC, dbias_C
