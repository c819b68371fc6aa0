"""The gated delta rule with one gate a head, in Triton by chunks.

    u_t = v_t − (a_t S_{t-1})ᵀ e_t,  S_t = a_t S_{t-1} + k_t u_tᵀ,  o_t = S_tᵀ q_t

Given the corrections U this is `perspectron.ops.triton.chunk`, whose kernels and letters it takes. They solve

    (I + A) U = V − P ⊙ (E_k S),  A = (E_k Kᵀ) ⊙ D below the diagonal, E_k the e of the chunk's tokens,

so U = M V − W S with M = (I + A)⁻¹ and W = M (P ⊙ E_k), which all chunks make at once. M comes row after row: sums of
products in the order of the equations, which stay small where powers of A would not. The states then take two products
a chunk, and their adjoints three.

Shapes: N memories, T time, K rows of a memory, V columns, C tokens of a chunk, n chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perspectron.errors import BackendError
from perspectron.ops import dispatch
from perspectron.ops.triton.chunk import (
    TOKENS,
    _block,
    _decays,
    _gates,
    _memory,
    _on,
    _suffixes,
    _tile,
    differentiated,
    read,
)


@triton.jit(do_not_specialize=["T"])
def solve(
    e_NTK, k_NTK, gate_NT, M_NnCC, T, K, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M of one chunk."""
    chunks = tl.cdiv(T, C)
    at, i = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    n, t = at // chunks, (at % chunks) * C + i
    A = tl.zeros(
        [C, C], dtype=tl.float32
    )  # transposed: a row to be solved is a column, beside which M's rows are
    for row in tl.range(0, K, BK):
        k = row + tl.arange(0, BK)
        e = _tile(e_NTK, n * T, t, k, T, K)
        A += tl.dot(_tile(k_NTK, n * T, t, k, T, K), tl.trans(e), input_precision=PRECISION)
    A = tl.where(i[:, None] < i[None, :], A * tl.trans(_decays(gate_NT, n * T, t, T, C)), 0.0)
    M = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in tl.range(1, C):
        a = tl.sum(tl.where(i[None, :] == row, A, 0.0), 1)
        M -= tl.where(i[:, None] == row, tl.sum(a[:, None] * M, 0)[None, :], 0.0)
    tl.store(M_NnCC + at * C * C + i[:, None] * C + i[None, :], M)


@triton.jit(do_not_specialize=["T"])
def times(
    M_NnCC, x_NTW, gate_NT, y_NTW, T, W,
    TRANSPOSED: tl.constexpr, FADED: tl.constexpr, C: tl.constexpr, BW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M x of one chunk, or Mᵀ x; x times P first if FADED."""
    chunks = tl.cdiv(T, C)
    at, i = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    n, t = at // chunks, (at % chunks) * C + i
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    x = _tile(x_NTW, n * T, t, w, T, W)
    if FADED:
        x = x * tl.cumprod(_gates(gate_NT, n * T, t, t < T), 0)[:, None]
    M = tl.load(M_NnCC + at * C * C + i[:, None] * C + i[None, :])
    if TRANSPOSED:
        M = tl.trans(M)
    y = tl.dot(M, x, input_precision=PRECISION)
    tl.store(y_NTW + (n * T + t)[:, None] * W + w[None, :], y, mask=(t < T)[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=["T"])
def corrections(
    k_NTK, W_NTK, wanted_NTV, gate_NT, q_NTK, do_NTV, first_NKV, u_NTV, border_NnKV, last_NKV, T, K, V,
    BACK: tl.constexpr, TWO: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """U = wanted − W S, the states before each chunk and the last one. BACK: dU = wanted + X ⊙ (K E), the adjoints
    after each chunk and the one of the first state, from that of the last. TWO: K is more than a block of rows, and the
    rest is a second one: a product of all rows at once would not fit in registers."""
    n = tl.program_id(0).to(tl.int64)
    k, v = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    place, inside = _memory(k, v, K, V)
    place_2, inside_2 = _memory(k + BK, v, K, V)
    chunks = tl.cdiv(T, C)
    S = tl.load(first_NKV + n * K * V + place, mask=inside, other=0.0)
    S_2 = tl.load(first_NKV + n * K * V + place_2, mask=inside_2, other=0.0)
    for walked in tl.range(0, chunks):
        chunk = chunks - 1 - walked if BACK else walked
        border = border_NnKV + (n * chunks + chunk) * K * V
        tl.store(border + place, S, mask=inside)
        if TWO:
            tl.store(border + place_2, S_2, mask=inside_2)
        t = chunk * C + tl.arange(0, C)
        P, X = tl.cumprod(_gates(gate_NT, n * T, t, t < T), 0), _suffixes(gate_NT, n * T, t, T, C)
        whole = tl.sum(tl.where(tl.arange(0, C) == C - 1, P, 0.0), 0)
        u = _tile(wanted_NTV, n * T, t, v, T, V)
        if BACK:
            u += tl.dot(_tile(k_NTK, n * T, t, k, T, K) * X[:, None], S, input_precision=PRECISION)
            if TWO:
                u += tl.dot(_tile(k_NTK, n * T, t, k + BK, T, K) * X[:, None], S_2, input_precision=PRECISION)
            do = _tile(do_NTV, n * T, t, v, T, V)
            S = _faded(S, whole, W_NTK, -u, q_NTK, P, do, n * T, t, k, T, K, True, PRECISION)
            if TWO:
                S_2 = _faded(S_2, whole, W_NTK, -u, q_NTK, P, do, n * T, t, k + BK, T, K, True, PRECISION)
        else:
            u -= tl.dot(_tile(W_NTK, n * T, t, k, T, K), S, input_precision=PRECISION)
            if TWO:
                u -= tl.dot(_tile(W_NTK, n * T, t, k + BK, T, K), S_2, input_precision=PRECISION)
            S = _faded(S, whole, W_NTK, u, k_NTK, X, u, n * T, t, k, T, K, False, PRECISION)
            if TWO:
                S_2 = _faded(S_2, whole, W_NTK, u, k_NTK, X, u, n * T, t, k + BK, T, K, False, PRECISION)
        tl.store(u_NTV + (n * T + t)[:, None] * V + v[None, :], u, mask=(t < T)[:, None] & (v < V)[None, :])
    tl.store(last_NKV + n * K * V + place, S, mask=inside)
    if TWO:
        tl.store(last_NKV + n * K * V + place_2, S_2, mask=inside_2)


@triton.jit
def _faded(
    S, whole, W_NTK, u, x_NTK, by, w, start, t, k, T, K, BOTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """whole · S + (by ⊙ x)ᵀ w, and, if BOTH, + Wᵀ u."""
    x = _tile(x_NTK, start, t, k, T, K) * by[:, None]
    S = S * whole + tl.dot(tl.trans(x), w, input_precision=PRECISION)
    if BOTH:
        S += tl.dot(tl.trans(_tile(W_NTK, start, t, k, T, K)), u, input_precision=PRECISION)
    return S


# ---------------------------------------------------------------- calls


def gdn(
    q_BHTK: Tensor, k_BHTK: Tensor, e_BHTK: Tensor, v_BHTV: Tensor, gate_BHT1: Tensor, state_BHKV: Tensor,
    precision: str = "tf32x3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs [B,H,T,V], the last state) in float32; differentiable once, in reverse. precision: of the products, as
    Triton names it: "tf32x3" is about as exact as "ieee"."""
    B, H = v_BHTV.shape[:2]
    inputs = (x.reshape(B * H, *x.shape[2:]).contiguous() for x in (q_BHTK, k_BHTK, e_BHTK, v_BHTV))
    gate, state = gate_BHT1.reshape(B * H, -1).contiguous(), state_BHKV.flatten(0, 1).contiguous()
    o, last = _Delta.apply(precision, *inputs, gate, state)
    return o.view(v_BHTV.shape), last.view(state_BHKV.shape)


class _Delta(torch.autograd.Function):
    """The kernels with their gradients; keeps the inputs, M, W, U and the states before chunks."""

    @staticmethod
    def forward(
        ctx: Any, precision: str, q: Tensor, k: Tensor, e: Tensor, v: Tensor, gate: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        (N, T, K), chunks = k.shape, -(-k.shape[1] // TOKENS)
        M = k.new_empty(N, chunks, TOKENS, TOKENS)
        with _on(k):
            solve[(N * chunks,)](
                e, k, gate, M, T, K, TOKENS, _block(K, 32), precision, num_warps=8, num_stages=1
            )
        W, wanted = _times(M, e, gate, False, True, precision), _times(M, v, gate, False, False, precision)
        u, borders, last = _corrected(k, W, wanted, gate, q, v, state, False, precision)
        o = read(q, k, u, gate, borders, False, precision)
        ctx.save_for_backward(q, k, e, gate, M, W, u, borders)
        ctx.precision = precision
        return o, last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dlast.contiguous())
        return None, *dispatch.once("the delta rule's chunks on Triton", _backward, ctx.precision, *given)

    jvp = dispatch.refuse("the chunks on Triton have no forward-mode derivative; use backend='torch'")


def _backward(
    precision: str, q: Tensor, k: Tensor, e: Tensor, gate: Tensor, M: Tensor, W: Tensor, u: Tensor, borders: Tensor,
    do: Tensor, dlast: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, e, v, the gate and the first state."""
    wanted = read(k, q, do, gate, None, True, precision)
    du, adjoints, dfirst = _corrected(k, W, wanted, gate, q, do, dlast, True, precision)
    dv = _times(M, du, gate, True, False, precision)
    dq, dk, dgate = differentiated(q, k, u, gate, do, borders, adjoints, precision)
    de, more, dgate_e = differentiated(e, k, u, gate, -dv, borders, None, precision)
    return dq, dk + more, de, dv, dgate + dgate_e, dfirst


def _times(M: Tensor, x: Tensor, gate: Tensor, transposed: bool, faded: bool, precision: str) -> Tensor:
    """`times`."""
    (N, T, W), y = x.shape, torch.empty_like(x)
    BW = _block(W)
    with _on(x):
        times[(N * M.shape[1], -(-W // BW))](
            M, x, gate, y, T, W, transposed, faded, TOKENS, BW, precision, num_warps=8, num_stages=1
        )
    return y


def _corrected(
    k: Tensor,
    W: Tensor,
    wanted: Tensor,
    gate: Tensor,
    q: Tensor,
    do: Tensor,
    first: Tensor,
    back: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`corrections`: U, what is at the borders [N,n,K,V], and what is at the end of the walk."""
    (N, T, K), V = k.shape, wanted.shape[2]
    BK, BV = _block(K), _block(V, 32)
    if K > 2 * BK:
        raise BackendError(f"keys of {K} channels, must be ≤ {2 * BK}; use backend='torch'")
    u, last = torch.empty_like(wanted), torch.empty_like(first)
    borders = k.new_empty(N, -(-T // TOKENS), K, V)
    with _on(k):
        corrections[(N, -(-V // BV))](
            k, W, wanted, gate, q, do, first, u, borders, last, T, K, V, back, K > BK, TOKENS, BK, BV, precision,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return u, borders, last
