"""Kernels of a training on a CPU, forward and backward: the loss, norms, gated products, GELU, decays, mixes
with the token before, short convolutions, attention, rotary positions and recurrences.

Numbers are float32 or, where a docstring says so, bfloat16; sums are float32. Threads: `native.threads()`. Results
depend neither on them nor on the instruction set, except that instructions for pairs of bfloat16 take denormal numbers
for 0; elsewhere these are treated as in the calling thread.

Shapes: N rows, V vocabulary, D width; B batch, T time, C channels, W taps, S = T + W − 1, R state rank; H heads of
queries, G of keys, K width of a head, V of a value's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perspectron.native import SEGMENT, _check, call
from perspectron.native.panels import addresses

ROWS = 64
"""Rows over which a weight's gradient is summed at once, in norms and mixes."""

SLAB = 64
"""Rows of a recurrence's state whose gradients of q and k are summed at once, at most 64."""


def _brief(x: Tensor) -> bool:
    """True if x is bfloat16; ValueError for anything else than that and float32, and for what is not contiguous."""
    dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    _check(x, dtype)
    return dtype is torch.bfloat16


def entropy(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """(losses [N], total [N,2]) in float32, of float32 or bfloat16 logits; total: max logit, log Σ e^(logit − max).
    Both 0 where the target is −100. ValueError: any other target below 0 or ≥ V."""
    brief, (N, V) = _brief(logits_NV), logits_NV.shape
    _check(target_N, torch.int64, (N,))
    if N > 0:
        read_N = target_N[target_N != -100]
        for worst in (int(read_N.min()), int(read_N.max())) if len(read_N) else ():
            if not 0 <= worst < V:
                raise ValueError(f"target = {worst}, must be < {V}, the vocabulary's size, and ≥ 0, or −100")
    loss_N, total_N2 = (logits_NV.new_empty(shape, dtype=torch.float32) for shape in ((N,), (N, 2)))
    call("entropy", logits_NV, brief, target_N, N, V, loss_N, total_N2)
    return loss_N, total_N2


def entropy_backward(logits_NV: Tensor, target_N: Tensor, total_N2: Tensor, g: float) -> Tensor:
    """The gradient of g · Σ losses in the logits, in their dtype."""
    brief, (N, V) = _brief(logits_NV), logits_NV.shape
    _check(target_N, torch.int64, (N,))
    _check(total_N2, torch.float32, (N, 2))
    gradient_NV = torch.empty_like(logits_NV)
    call("entropy_backward", logits_NV, brief, target_N, N, V, total_N2, g, gradient_NV)
    return gradient_NV


def _attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, first_BT: Tensor, scale: float
) -> tuple[Any, ...]:
    """The arguments that both directions of attention begin with."""
    (B, T, H, K), (G, V) = q_BTHK.shape, v_BTGV.shape[2:]
    if G < 1 or H < 1 or H % G or not scale > 0:
        raise ValueError(f"G = {G}, scale = {scale}: G must be a divisor of H = {H}, and the scale > 0")
    brief = _brief(q_BTHK)
    _check(k_BTGK, q_BTHK.dtype, (B, T, G, K))
    _check(v_BTGV, q_BTHK.dtype, (B, T, G, V))
    _check(first_BT, torch.int32, (B, T))
    return q_BTHK, k_BTGK, v_BTGV, brief, first_BT, B, T, H, G, K, V, scale


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, first_BT: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(softmax(scale · q kᵀ) v [B,T,H,V], the logarithm of each sum [B,T,H] in float32), where token t sees the keys
    from first[t] to t; H / G heads of queries share one of keys. float32 or bfloat16. `first`, which must be in 0 … t,
    is not checked. Of bfloat16, the weights are rounded to it for their products."""
    given = _attention(q_BTHK, k_BTGK, v_BTGV, first_BT, scale)
    B, T, H, V = *q_BTHK.shape[:3], v_BTGV.shape[3]
    o_BTHV, lse_BTH = q_BTHK.new_empty(B, T, H, V), q_BTHK.new_empty(B, T, H, dtype=torch.float32)
    call("attention", *given, o_BTHV, lse_BTH)
    return o_BTHV, lse_BTH


def attention_after(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, first_BT: Tensor, scale: float) -> Tensor:
    """`attention` [B,T,H,V] without gradients, in float32, where token t sees the keys from first[t] to S − T + t. Its
    bits depend on those keys and their places alone."""
    (B, T, H, K), (G, S, V) = q_BTHK.shape, v_BGSV.shape[1:]
    if G < 1 or H < 1 or H % G or not scale > 0 or S < T:
        raise ValueError(
            f"G = {G}, S = {S}, scale = {scale}: G must divide H = {H}, S be ≥ T = {T}, and the scale > 0"
        )
    _check(q_BTHK, torch.float32)
    _check(k_BGSK, torch.float32, (B, G, S, K))
    _check(v_BGSV, torch.float32, (B, G, S, V))
    _check(first_BT, torch.int32, (B, T))
    o_BTHV = q_BTHK.new_empty(B, T, H, V)
    call("attention_after", q_BTHK, k_BGSK, v_BGSV, first_BT, S - T, B, T, H, G, K, V, scale, o_BTHV)
    return o_BTHV


def attention_backward(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, first_BT: Tensor, scale: float, o_BTHV: Tensor, lse_BTH: Tensor,
    do_BTHV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, from `attention`'s results and the gradient of o."""
    given = _attention(q_BTHK, k_BTGK, v_BTGV, first_BT, scale)
    for output in (o_BTHV, do_BTHV):
        _check(output, q_BTHK.dtype, (*q_BTHK.shape[:3], v_BTGV.shape[3]))
    _check(lse_BTH, torch.float32, tuple(q_BTHK.shape[:3]))
    dq, dk, dv = (torch.empty_like(x) for x in (q_BTHK, k_BTGK, v_BTGV))
    call("attention_backward", *given, o_BTHV, lse_BTH, do_BTHV, dq, dk, dv)
    return dq, dk, dv


def turned(x_NHK: Tensor, cosine_NF: Tensor, sine_NF: Tensor) -> Tensor:
    """Rotary positions: both halves [F] of each head, rotated into each other by the angles of its row; float32 or
    bfloat16, angles float32. Rows of x may have a distance between them."""
    N, H, K = x_NHK.shape
    brief, stride = _brief(x_NHK[:1]), x_NHK.stride(0)
    if K % 2:
        raise ValueError(f"K = {K}, must be even")
    for angle in (cosine_NF, sine_NF):
        _check(angle, torch.float32, (N, K // 2))
    y_NHK = x_NHK.new_empty(N, H, K)
    call("turn", x_NHK, brief, cosine_NF, sine_NF, N, H, K, stride, y_NHK)
    return y_NHK


def norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x · r · weight, r [N]) with r = 1 / √(mean x² + eps)."""
    N, D = x_ND.shape
    _check(x_ND, torch.float32)
    _check(weight_D, torch.float32, (D,))
    y_ND, r_N = torch.empty_like(x_ND), x_ND.new_empty(N)
    call("norm_rows", x_ND, weight_D, eps, N, D, y_ND, r_N)
    return y_ND, r_N


def norm_backward(x_ND: Tensor, weight_D: Tensor, r_N: Tensor, dy_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    N, D = x_ND.shape
    for tensor, shape in ((x_ND, (N, D)), (dy_ND, (N, D)), (weight_D, (D,)), (r_N, (N,))):
        _check(tensor, torch.float32, shape)
    dx_ND, parts = torch.empty_like(x_ND), x_ND.new_zeros(-(-N // ROWS), D)
    call("norm_backward", x_ND, weight_D, r_N, dy_ND, N, D, ROWS, dx_ND, parts)
    return dx_ND, parts.sum(0)


def gated(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b, rounded once; float32 or bfloat16."""
    brief = _brief(a)
    _check(b, a.dtype, a.shape)
    y = torch.empty_like(a)
    call("gated", a, b, brief, a.numel(), y)
    return y


def gated_backward(a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a and b."""
    brief = _brief(a)
    _check(b, a.dtype, a.shape)
    _check(dy, a.dtype, a.shape)
    da, db = torch.empty_like(a), torch.empty_like(b)
    call("gated_backward", a, b, dy, brief, a.numel(), da, db)
    return da, db


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh, rounded once; float32 or bfloat16."""
    brief, y = _brief(x), torch.empty_like(x)
    call("gelu", x, brief, x.numel(), y)
    return y


def gelu_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x."""
    brief = _brief(x)
    _check(dy, x.dtype, x.shape)
    dx = torch.empty_like(x)
    call("gelu_backward", x, dy, brief, x.numel(), dx)
    return dx


def _shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Any, ...]:
    (B, T, D), N = x_BTD.shape, len(mix_ND)
    for tensor, shape in ((x_BTD, (B, T, D)), (last_BD, (B, D)), (mix_ND, (N, D))):
        _check(tensor, torch.float32, shape)
    if T < 1:
        raise ValueError(f"T = {T}, must be ≥ 1")
    if reset_BT is not None:
        _check(reset_BT, torch.bool, (B, T))
    return x_BTD, last_BD, mix_ND, reset_BT, B, T, D, N


def shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, ...]:
    """x + (before − x) · mix of each of the N mixes, N tensors [B,T,D]. before: the token before in x, `last` before
    the first, zeros where a document begins."""
    given = _shifted(x_BTD, last_BD, mix_ND, reset_BT)
    y = tuple(torch.empty_like(x_BTD) for _ in mix_ND)
    call("shifted", *given, addresses(y))
    return y


def shifted_backward(
    x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None, dy: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, last and the mixes, from those of the N results."""
    given = _shifted(x_BTD, last_BD, mix_ND, reset_BT)
    if len(dy) != len(mix_ND):
        raise ValueError(f"{len(dy)} gradients, must be one for each of {len(mix_ND)} mixes")
    for gradient in dy:
        _check(gradient, torch.float32, tuple(x_BTD.shape))
    dx_BTD, dlast_BD = torch.empty_like(x_BTD), torch.zeros_like(last_BD)
    parts = x_BTD.new_zeros(-(-x_BTD.shape[0] * x_BTD.shape[1] // ROWS), *mix_ND.shape)
    call("shifted_backward", *given, ROWS, addresses(dy), dx_BTD, dlast_BD, parts)
    return dx_BTD, dlast_BD, parts.sum(0)


def decayed(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(γ = σ(p), √(1 − γ²) · v) in float32; p and v float32 or bfloat16."""
    brief = _brief(p)
    _check(v, p.dtype, p.shape)
    gamma, y = (torch.empty_like(p, dtype=torch.float32) for _ in range(2))
    call("decayed", p, v, brief, p.numel(), gamma, y)
    return gamma, y


def decayed_backward(p: Tensor, v: Tensor, dgamma: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of p and v."""
    brief = _brief(p)
    _check(v, p.dtype, p.shape)
    for gradient in (dgamma, dy):
        _check(gradient, torch.float32, p.shape)
    dp, dv = torch.empty_like(p), torch.empty_like(v)
    call("decayed_backward", p, v, dgamma, dy, brief, p.numel(), dp, dv)
    return dp, dv


def _taps(
    u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None
) -> tuple[int, int, int, int]:
    (B, S, C), W = u_BSC.shape, len(weight_WC)
    T = S - W + 1
    if T < 1:
        raise ValueError(f"S = {S}, must be ≥ W = {W}")
    shapes = [(u_BSC, (B, S, C)), (weight_WC, (W, C)), (bias_C, (C,))]
    if sees_BTW is not None:
        shapes.append((sees_BTW, (B, T, W)))
    for tensor, shape in shapes:
        _check(tensor, torch.float32, shape)
    return B, T, W, C


def convolve(u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None) -> Tensor:
    """silu(bias + Σ_j weight_j u_{t+j}) [B,T,C]; sees: 0 where a token may not see the tap, else 1."""
    B, T, W, C = _taps(u_BSC, weight_WC, bias_C, sees_BTW)
    y_BTC = u_BSC.new_empty(B, T, C)
    call("convolve", u_BSC, weight_WC, bias_C, sees_BTW, B, T, W, C, y_BTC)
    return y_BTC


def convolve_backward(
    u_BSC: Tensor, weight_WC: Tensor, bias_C: Tensor, sees_BTW: Tensor | None, dy_BTC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, weight and bias."""
    B, T, W, C = _taps(u_BSC, weight_WC, bias_C, sees_BTW)
    _check(dy_BTC, torch.float32, (B, T, C))
    du_BSC = torch.zeros_like(u_BSC)
    dweight_BWC, dbias_BC = u_BSC.new_zeros(B, W, C), u_BSC.new_zeros(B, C)
    given = u_BSC, weight_WC, bias_C, sees_BTW, dy_BTC
    call("convolve_backward", *given, B, T, W, C, du_BSC, dweight_BWC, dbias_BC)
    return du_BSC, dweight_BWC.sum(0), dbias_BC.sum(0)


def scan_backward(
    q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor,
    borders_NBDR: Tensor, do_BTD: Tensor, dstate_BDR: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, γ and the first state of `native.pdr_scan`, from its borders and the gradients of outputs
    and last state."""
    (B, T, R), D = q_BTR.shape, v_BTD.shape[2]
    if min(T, R) < 1:
        raise ValueError(f"T = {T}, R = {R}, must be ≥ 1")
    for tensor, shape in (
        *((x, (B, T, R)) for x in (q_BTR, k_BTR)),
        *((x, (B, T, D)) for x in (v_BTD, gamma_BTD, do_BTD)),
        (dstate_BDR, (B, D, R)),
        (borders_NBDR, (-(-T // SEGMENT), B, D, R)),
    ):
        _check(tensor, torch.float32, shape)
    dq, dk = (q_BTR.new_zeros(-(-D // SLAB), B, T, R) for _ in range(2))
    dv_BTD, dgamma_BTD, dstate_BDR = torch.empty_like(v_BTD), torch.empty_like(v_BTD), dstate_BDR.clone()
    given = q_BTR, k_BTR, v_BTD, gamma_BTD, borders_NBDR, do_BTD
    call("scan_backward", *given, B, T, D, R, SLAB, SEGMENT, dq, dk, dv_BTD, dgamma_BTD, dstate_BDR)
    return dq.sum(0), dk.sum(0), dv_BTD, dgamma_BTD, dstate_BDR


def _memory(
    q_MTK: Tensor, k_MTK: Tensor, v_NTV: Tensor, e_NTK: Tensor | None, b_NTK: Tensor | None, alpha_NTA: Tensor,
    state_NKV: Tensor,
) -> tuple[int, ...]:  # fmt: skip
    """The sizes N, T, K, V, A, N / M of a memory."""
    (M, T, K), (N, _, V), A = q_MTK.shape, v_NTV.shape, alpha_NTA.shape[2]
    if A not in (1, K):
        raise ValueError(f"alpha has {A} entries for a token, must be 1 or K = {K}")
    if M < 1 or N % M:
        raise ValueError(f"{M} rows of q and k, must be a divisor of {N} rows of v")
    shapes = [
        *((x, (M, T, K)) for x in (q_MTK, k_MTK)),
        *((x, (N, T, K)) for x in (e_NTK, b_NTK) if x is not None),
        (v_NTV, (N, T, V)),
        (alpha_NTA, (N, T, A)),
        (state_NKV, (N, K, V)),
    ]
    for tensor, shape in shapes:
        _check(tensor, torch.float32, shape)
    return N, T, K, V, A, N // M


def memory(
    q_MTK: Tensor, k_MTK: Tensor, v_NTV: Tensor, e_NTK: Tensor | None, b_NTK: Tensor | None, alpha_NTA: Tensor,
    state_NKV: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u = v − Sᵀ e; S = diag(α) S + k uᵀ; o = Sᵀ q, for each token of N memories: (o, the last state). With b:
    u = −Sᵀ e; S = diag(α) S + b uᵀ + k vᵀ. Without e: u = v. N / M memories in a row share their q and k."""
    sizes = _memory(q_MTK, k_MTK, v_NTV, e_NTK, b_NTK, alpha_NTA, state_NKV)
    state_NKV, o_NTV = state_NKV.clone(), torch.empty_like(v_NTV)
    call("memory", q_MTK, k_MTK, v_NTV, e_NTK, b_NTK, alpha_NTA, *sizes, state_NKV, o_NTV)
    return o_NTV, state_NKV


def memory_backward(
    q_MTK: Tensor, k_MTK: Tensor, v_NTV: Tensor, e_NTK: Tensor | None, b_NTK: Tensor | None, alpha_NTA: Tensor,
    state_NKV: Tensor, do_NTV: Tensor, dstate_NKV: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the inputs of `memory`, from those of its outputs and of the last state."""
    given = q_MTK, k_MTK, v_NTV, e_NTK, b_NTK, alpha_NTA, state_NKV
    sizes = N, T, K, V, A, share = _memory(*given)
    _check(do_NTV, torch.float32, (N, T, V))
    _check(dstate_NKV, torch.float32, (N, K, V))
    slabs = -(-V // 64)
    widths = (K, K, K if e_NTK is not None else 0, K if b_NTK is not None else 0, A)
    parts = [v_NTV.new_zeros(slabs, N, T, width) if width else None for width in widths]
    dv, dstate = torch.empty_like(v_NTV), dstate_NKV.clone()
    call("memory_backward", *given, do_NTV, *sizes, *parts, dv, dstate)
    summed = [x if x is None else x[0] if slabs == 1 else x.sum(0) for x in parts]
    if share > 1:
        summed[:2] = [x if x is None else x.view(N // share, share, T, K).sum(1) for x in summed[:2]]
    dq, dk, de, db, dalpha = summed
    return dq, dk, dv, de, db, dalpha, dstate
