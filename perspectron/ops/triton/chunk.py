"""The state-space dual in Triton by chunks, whose products run on tensor cores: all chunks at once but for the states.

    S_t = a_t S_{t-1} + k_t v_tᵀ,  o_t = S_tᵀ q_t,  one gate a_t for all rows

With D_ij = Π_{j<l≤i} a_l for j ≤ i in a chunk, its prefixes P_i = Π_{l≤i} a_l, its suffixes X_j = Π_{l>j} a_l, and the
state S before it:

    O = ((Q Kᵀ) ⊙ D) V + P ⊙ (Q S),  S' = P_C S + (X ⊙ K)ᵀ V.

D is a running product, so any gate in [0, 1] is exact, 0, 1 and 1e-30 included: no logarithm and no quotient is formed.
The gradient of a gate is the sum over all products that have it as a factor, by what stands before and after it: with
D⁻_lj = Π_{j<m<l} a_m for j < l, E the adjoint of the state after the chunk, and dD, dP, dX the gradients of the three,

    da_l = Σ_j (Dᵀ dD)_lj D⁻_lj + P_{l-1} (Dᵀ dP)_l + X_l (D⁻ dX)_l + P_{l-1} X_l ⟨S, E⟩.

Kernels: the states before each chunk, one after the other; all outputs at once. Backwards the adjoints after each chunk
come from the first kernel and the gradients of values from the second, with what they take exchanged; two more give
those of queries and keys, and of gates. Nothing chooses this path yet: `auto` waits for measurements on a GPU.

Shapes: N memories, T time, K rows of a memory, V columns, C tokens of a chunk, n chunks.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perspectron.ops import dispatch

TOKENS = 64
"""C, of a chunk: what one warp group of a Hopper GPU multiplies at once."""


@triton.jit
def _tile(x_NTW, start, t, w, T, W):
    """Rows of tokens [C,·] of a memory that starts there; 0 outside."""
    return tl.load(
        x_NTW + (start + t)[:, None] * W + w[None, :], mask=(t < T)[:, None] & (w < W)[None, :], other=0.0
    )


@triton.jit
def _memory(k, v, K, V):
    """The place of numbers of a memory, and which of them there are."""
    return k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@triton.jit
def _gates(gate_NT, start, t, there):
    """Gates of tokens; 1, which changes nothing, where there is none."""
    return tl.load(gate_NT + start + t, mask=there, other=1.0)


@triton.jit
def _decays(gate_NT, start, t, T, C: tl.constexpr):
    """D [C,C] of a chunk."""
    i = tl.arange(0, C)
    a = _gates(gate_NT, start, t, t < T)
    later, same = i[:, None] > i[None, :], i[:, None] == i[None, :]
    return tl.where(later | same, tl.cumprod(tl.where(later, a[:, None], 1.0), 0), 0.0)


@triton.jit
def _suffixes(gate_NT, start, t, T, C: tl.constexpr):
    """X [C] of a chunk."""
    after = _gates(gate_NT, start, t + 1, (t + 1 < T) & (tl.arange(0, C) < C - 1))
    return tl.cumprod(after, 0, reverse=True)


@triton.jit(do_not_specialize=["T"])
def states(
    k_NTK, v_NTV, gate_NT, first_NKV, border_NnKV, last_NKV, T, K, V,
    BACK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states before each chunk and the last one; or, BACK, the adjoints after each chunk and the one of the first
    state, with queries in the place of keys, outputs' gradients of values, the last state's gradient of the first."""
    n = tl.program_id(0).to(tl.int64)
    k, v = tl.program_id(1) * BK + tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    place, inside = _memory(k, v, K, V)
    chunks = tl.cdiv(T, C)
    S = tl.load(first_NKV + n * K * V + place, mask=inside, other=0.0)
    for walked in tl.range(0, chunks):
        chunk = chunks - 1 - walked if BACK else walked
        tl.store(border_NnKV + (n * chunks + chunk) * K * V + place, S, mask=inside)
        t = chunk * C + tl.arange(0, C)
        a = _gates(gate_NT, n * T, t, t < T)
        P = tl.cumprod(a, 0)
        faded = P if BACK else _suffixes(gate_NT, n * T, t, T, C)
        whole = tl.sum(tl.where(tl.arange(0, C) == C - 1, P, 0.0), 0)
        x = _tile(k_NTK, n * T, t, k, T, K) * faded[:, None]
        S = S * whole + tl.dot(tl.trans(x), _tile(v_NTV, n * T, t, v, T, V), input_precision=PRECISION)
    tl.store(last_NKV + n * K * V + place, S, mask=inside)


@triton.jit(do_not_specialize=["T"])
def outputs(
    q_NTK, k_NTK, v_NTV, gate_NT, border_NnKV, o_NTV, T, K, V,
    BACK: tl.constexpr, ENDS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk, some columns; or, BACK, the gradients of values, with keys in the place of queries,
    queries of keys, outputs' gradients of values, and adjoints of states. ENDS: with what the states add."""
    chunks = tl.cdiv(T, C)
    at = tl.program_id(0).to(tl.int64)
    n, t = at // chunks, (at % chunks) * C + tl.arange(0, C)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    A, o = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, BV], dtype=tl.float32)
    for row in tl.range(0, K, BK):
        k = row + tl.arange(0, BK)
        place, inside = _memory(k, v, K, V)
        q = _tile(q_NTK, n * T, t, k, T, K)
        A += tl.dot(q, tl.trans(_tile(k_NTK, n * T, t, k, T, K)), input_precision=PRECISION)
        if ENDS:
            S = tl.load(border_NnKV + at * K * V + place, mask=inside, other=0.0)
            o += tl.dot(q, S, input_precision=PRECISION)
    D = _decays(gate_NT, n * T, t, T, C)
    if BACK:
        D, faded = tl.trans(D), _suffixes(gate_NT, n * T, t, T, C)
    else:
        faded = tl.cumprod(_gates(gate_NT, n * T, t, t < T), 0)
    o = o * faded[:, None] + tl.dot(A * D, _tile(v_NTV, n * T, t, v, T, V), input_precision=PRECISION)
    tl.store(o_NTV + (n * T + t)[:, None] * V + v[None, :], o, mask=(t < T)[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["T"])
def gradients(
    q_NTK, k_NTK, v_NTV, gate_NT, do_NTV, border_NnKV, adjoint_NnKV, dq_NTK, dk_NTK, dP_bNT, dX_bNT, both_bNn, T, K, V,
    STRICT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys of one chunk, a block b of rows; and of its sums dP, dX and ⟨S, E⟩. STRICT: a
    query does not see its own key, and keys are not in the next state."""
    chunks = tl.cdiv(T, C)
    at, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n, memories = at // chunks, tl.num_programs(0) // chunks
    t, k = (at % chunks) * C + tl.arange(0, C), block * BK + tl.arange(0, BK)
    dA, both = tl.zeros([C, C], dtype=tl.float32), tl.zeros([BK], dtype=tl.float32)
    read, written = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    for column in tl.range(0, V, BV):
        v = column + tl.arange(0, BV)
        place, inside = _memory(k, v, K, V)
        S = tl.load(border_NnKV + at * K * V + place, mask=inside, other=0.0)
        do, w = _tile(do_NTV, n * T, t, v, T, V), _tile(v_NTV, n * T, t, v, T, V)
        dA += tl.dot(do, tl.trans(w), input_precision=PRECISION)
        read += tl.dot(do, tl.trans(S), input_precision=PRECISION)
        if not STRICT:
            E = tl.load(adjoint_NnKV + at * K * V + place, mask=inside, other=0.0)
            both += tl.sum(S * E, 1)
            written += tl.dot(w, tl.trans(E), input_precision=PRECISION)
    stored, row = (t < T)[:, None] & (k < K)[None, :], (n * T + t)[:, None] * K + k[None, :]
    dA = dA * _decays(gate_NT, n * T, t, T, C)
    if STRICT:
        dA = tl.where(t[:, None] > t[None, :], dA, 0.0)
    q, x = _tile(q_NTK, n * T, t, k, T, K), _tile(k_NTK, n * T, t, k, T, K)
    place = (block * memories + n) * T + t
    tl.store(dP_bNT + place, tl.sum(q * read, 1), mask=t < T)
    tl.store(dX_bNT + place, tl.sum(x * written, 1), mask=t < T)
    tl.store(both_bNn + block * tl.num_programs(0) + at, tl.sum(both, 0))
    dq = tl.cumprod(_gates(gate_NT, n * T, t, t < T), 0)[:, None] * read
    tl.store(dq_NTK + row, dq + tl.dot(dA, x, input_precision=PRECISION), mask=stored)
    dk = _suffixes(gate_NT, n * T, t, T, C)[:, None] * written
    tl.store(dk_NTK + row, dk + tl.dot(tl.trans(dA), q, input_precision=PRECISION), mask=stored)


@triton.jit(do_not_specialize=["T"])
def gates(
    q_NTK, k_NTK, v_NTV, gate_NT, do_NTV, dP_NT, dX_NT, both_Nn, dgate_NT, T, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the gates of one chunk."""
    chunks = tl.cdiv(T, C)
    at, i = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    n, t = at // chunks, (at % chunks) * C + i
    A, dA = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for row in tl.range(0, K, BK):
        k = row + tl.arange(0, BK)
        x = _tile(k_NTK, n * T, t, k, T, K)
        A += tl.dot(_tile(q_NTK, n * T, t, k, T, K), tl.trans(x), input_precision=PRECISION)
    for column in tl.range(0, V, BV):
        v = column + tl.arange(0, BV)
        w = _tile(v_NTV, n * T, t, v, T, V)
        dA += tl.dot(_tile(do_NTV, n * T, t, v, T, V), tl.trans(w), input_precision=PRECISION)
    D = _decays(gate_NT, n * T, t, T, C)
    M = tl.dot(tl.trans(D), A * dA, input_precision=PRECISION)
    dP = tl.load(dP_NT + n * T + t, mask=t < T, other=0.0)
    dX = tl.load(dX_NT + n * T + t, mask=t < T, other=0.0)
    before = _gates(gate_NT, n * T, t - 1, (i > 0) & (t - 1 < T))
    less = tl.cumprod(tl.where(i[:, None] > i[None, :] + 1, before[:, None], 1.0), 0)
    less = tl.where(i[:, None] > i[None, :], less, 0.0)
    start, X = tl.cumprod(before, 0), _suffixes(gate_NT, n * T, t, T, C)
    dgate = tl.sum(M * less, 1) + start * tl.sum(D * dP[:, None], 0)
    dgate += X * (tl.sum(less * dX[None, :], 1) + start * tl.load(both_Nn + at))
    tl.store(dgate_NT + n * T + t, dgate, mask=t < T)


# ---------------------------------------------------------------- calls


def ssd(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    gate_BHT1: Tensor,
    state_BHKV: Tensor,
    precision: str = "tf32x3",
) -> tuple[Tensor, Tensor]:
    """(outputs [B,H,T,V], the last state) in float32; differentiable once, in reverse. precision: of the products, as
    Triton names it: "tf32x3" is about as exact as "ieee"."""
    B, H = v_BHTV.shape[:2]
    inputs = (x.reshape(B * H, *x.shape[2:]).contiguous() for x in (q_BHTK, k_BHTK, v_BHTV))
    gate, state = gate_BHT1.reshape(B * H, -1).contiguous(), state_BHKV.flatten(0, 1).contiguous()
    o, last = _Chunks.apply(precision, *inputs, gate, state)
    return o.view(v_BHTV.shape), last.view(state_BHKV.shape)


class _Chunks(torch.autograd.Function):
    """The kernels with their gradients; keeps the inputs and the states before chunks."""

    @staticmethod
    def forward(
        ctx: Any, precision: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        borders, last = _walk(k, v, gate, state, False, precision)
        o = read(q, k, v, gate, borders, False, precision)
        ctx.save_for_backward(q, k, v, gate, borders)
        ctx.precision = precision
        return o, last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dlast.contiguous())
        return None, *dispatch.once("the chunks on Triton", _backward, ctx.precision, *given)

    jvp = dispatch.refuse("the chunks on Triton have no forward-mode derivative; use backend='torch'")


def _block(width: int, most: int = 64) -> int:
    """A side of a product: a power of two of 16 at least, with which no register spills."""
    return min(most, max(16, triton.next_power_of_2(width)))


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _walk(
    x: Tensor, w: Tensor, gate: Tensor, first: Tensor, back: bool, precision: str
) -> tuple[Tensor, Tensor]:
    """`states`: those at the borders [N,n,K,V], and the one at the end of the walk."""
    (N, T, K), V = x.shape, w.shape[2]
    BK, BV = _block(K), _block(V)
    borders, last = x.new_empty(N, -(-T // TOKENS), K, V), torch.empty_like(first)
    with _on(x):
        states[(N, -(-K // BK), -(-V // BV))](
            x, w, gate, first, borders, last, T, K, V, back, TOKENS, BK, BV, precision, num_warps=4
        )
    return borders, last


def read(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, borders: Tensor | None, back: bool, precision: str
) -> Tensor:
    """`outputs` [N,T,V]."""
    (N, T, K), V = q.shape, v.shape[2]
    o, BK, BV = torch.empty_like(v), _block(K, 32), _block(V)
    with _on(q):
        outputs[(N * -(-T // TOKENS), -(-V // BV))](
            q,
            k,
            v,
            gate,
            v if borders is None else borders,
            o,
            T,
            K,
            V,
            back,
            borders is not None,
            TOKENS,
            BK,
            BV,
            precision,
            num_warps=8,
            num_stages=1,
        )
    return o


def _backward(
    precision: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, borders: Tensor, do: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the gate and the first state."""
    adjoints, dfirst = _walk(q, do, gate, dlast, True, precision)
    dv = read(k, q, do, gate, adjoints, True, precision)
    dq, dk, dgate = differentiated(q, k, v, gate, do, borders, adjoints, precision)
    return dq, dk, dv, dgate, dfirst


def differentiated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    do: Tensor,
    borders: Tensor,
    adjoints: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and the gate. Without adjoints: of a reader that does not see its own key."""
    (N, T, K), V = q.shape, v.shape[2]
    fixed = (TOKENS, _block(K, 32), _block(V, 32), precision)
    chunks, blocks = -(-T // TOKENS), -(-K // fixed[1])
    dq, dk, dgate = (torch.empty_like(x) for x in (q, k, gate))
    dP, dX, both = (
        gate.new_empty(blocks, N, T),
        gate.new_empty(blocks, N, T),
        gate.new_empty(blocks, N, chunks),
    )
    with _on(q):
        gradients[(N * chunks, blocks)](
            q, k, v, gate, do, borders, borders if adjoints is None else adjoints, dq, dk, dP, dX, both, T, K, V,
            adjoints is None, *fixed, num_warps=8, num_stages=1,
        )  # fmt: skip
        sums = (x.sum(0) for x in (dP, dX, both))
        gates[(N * chunks,)](q, k, v, gate, do, *sums, dgate, T, K, V, *fixed, num_warps=8, num_stages=1)
    return dq, dk, dgate
