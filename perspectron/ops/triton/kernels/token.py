"""The recurrence of a matrix memory whose rows decay, in Triton: PDR, gated linear attention and the state-space dual.

    S_t = diag(g_t) S_{t-1} + x_t w_tᵀ,  o_t = S_t c_t  or  o_t = S_tᵀ r_t

PDR writes x = v, w = k and reads with c = q, over columns, which gives a row of outputs for each row of S. Gated linear
attention writes x = k, w = v and reads with r = q, over rows; its gate has one entry for each row or one for all. The
gradient of either reader is the other way of reading, with the gradient of o as the other reader: so one forward and
one backward kernel serve both.

A program has some rows of one memory in registers and goes through the tokens; a step in decoding is one token. Only
products of gates are formed, no logarithm or quotient, so any gate in [0, 1] is exact, 0 and 1 included. What is summed
over rows is left in a part for each program, to be added afterwards, in one order. Backwards, states come from those
kept at the borders of chunks. The gradient of a gate needs the state before it and the adjoint after it, which come
from opposite ends of a chunk; their product is a sum over the readers i of the chunk that come after it,

    dg_l = Σ_{i ≥ l} (Π_{l<m≤i} g_m) r_i ⊙ (S_{l-1} c_i)  +  (Π_{l<m} g_m) ⊙ rowsum(S_{l-1} ⊙ E),

with E the adjoint at the chunk's end, where S_{l-1} c_i follows from one token to the next without the state.

Shapes: N memories, T time, D rows of a memory, R columns (at most 256), C tokens of one chunk, BD rows of a program, RP
columns in registers, n chunks, p parts.
"""

from typing import NamedTuple

import triton
import triton.language as tl

WIDEST = 256
"""Columns of a memory that fit in registers."""


class Tile(NamedTuple):
    """The rows of a program, its columns with those that are masked, tokens of a chunk, and warps."""

    rows: int
    columns: int
    chunk: int
    warps: int


def tile(R: int) -> Tile:
    """The tile for memories of R columns (`benchmarks/triton_kernels.py` compiles them all)."""
    columns = triton.next_power_of_2(R)
    warps = min(8, max(1, columns // 16))  # 16 numbers of the memory in each thread
    return Tile(min(32, 4096 // columns), columns, 16 if columns <= 64 else 32, warps)


@triton.jit
def _gate(gate_NTA, at, d, inside, D, WIDE: tl.constexpr):
    """The gates of rows d at tokens `at`; 1, which changes nothing, where there is none."""
    return tl.load(gate_NTA + (at * D + d if WIDE else at + d * 0), mask=inside, other=1.0)


@triton.jit
def _row(x, at, index, inside, width):
    """A token's vector; 0 outside."""
    return tl.load(x + at * width + index, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["T"])
def forward(
    x_NTD, w_NTR, gate_NTA, reader, first_NDR, o, last_NDR, border_NnDR,
    T, D, R,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, KEEP: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """All tokens of one memory's block of rows.

    WIDE: the gate has an entry for each row, else one. COLUMNS: the reader [N,T,R] reads over columns, o is [N,T,D];
    else it is [N,T,D] and o [p,N,T,R]. KEEP: the state before each chunk is kept. `last` may be `first`.
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, r = block * BD + tl.arange(0, BD), tl.arange(0, RP)
    in_D, in_R = d < D, r < R
    inside, place = in_D[:, None] & in_R[None, :], d[:, None] * R + r[None, :]
    part = block * tl.num_programs(0) * T
    S = tl.load(first_NDR + n * D * R + place, mask=inside, other=0.0)
    for t in tl.range(0, T, num_stages=3):  # so that the next tokens are read meanwhile
        if KEEP:
            border = border_NnDR + (n * tl.cdiv(T, C) + t // C) * D * R
            tl.store(border + place, S, mask=inside & (t % C == 0))
        at = n * T + t
        x, w = _row(x_NTD, at, d, in_D, D), _row(w_NTR, at, r, in_R, R)
        S = _gate(gate_NTA, at, d, in_D, D, WIDE)[:, None] * S + x[:, None] * w[None, :]
        if COLUMNS:
            tl.store(o + at * D + d, tl.sum(S * _row(reader, at, r, in_R, R)[None, :], 1), mask=in_D)
        else:
            tl.store(o + (part + at) * R + r, tl.sum(S * _row(reader, at, d, in_D, D)[:, None], 0), mask=in_R)
    tl.store(last_NDR + n * D * R + place, S, mask=inside)


@triton.jit(do_not_specialize=["T"])
def backward(
    x_NTD, w_NTR, gate_NTA, r_NTD, c_NTR, border_NnDR, dlast_NDR,
    dx_NTD, dw_pNTR, dgate_NTD, dreader, dfirst_NDR, T, D, R,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """The gradients of one memory's block of rows, chunks from the last to the first.

    One of r and c is the forward pass's reader, the other the gradient of its outputs. COLUMNS: the reader is c, and
    dreader [p,N,T,R]; else it is r, and dreader [N,T,D].
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, r, i = block * BD + tl.arange(0, BD), tl.arange(0, RP), tl.arange(0, C)
    in_D, in_R = d < D, r < R
    inside, place = in_D[:, None] & in_R[None, :], d[:, None] * R + r[None, :]
    part = block * tl.num_programs(0) * T
    E = tl.load(dlast_NDR + n * D * R + place, mask=inside, other=0.0)
    chunks = tl.cdiv(T, C)
    for back in tl.range(0, chunks):
        chunk = chunks - 1 - back
        first, L = n * T + chunk * C, tl.minimum(C, T - chunk * C)
        S = tl.load(border_NnDR + (n * chunks + chunk) * D * R + place, mask=inside, other=0.0)
        span, there = (first + i)[None, :], in_D[:, None] & (i < L)[None, :]
        gates = _gate(gate_NTA, span, d[:, None], there, D, WIDE)
        rows = _row(r_NTD, span, d[:, None], there, D)
        columns = _row(c_NTR, (first + i)[:, None], r[None, :], (i < L)[:, None] & in_R[None, :], R)
        y = tl.zeros([BD, C], dtype=tl.float32)  # S c_i
        for k in tl.range(0, L):
            c = _row(c_NTR, first + k, r, in_R, R)
            y = tl.where((i == k)[None, :], tl.sum(S * c[None, :], 1)[:, None], y)
        for k in tl.range(0, L):
            at = first + k
            x, w = _row(x_NTD, at, d, in_D, D), _row(w_NTR, at, r, in_R, R)
            g = _gate(gate_NTA, at, d, in_D, D, WIDE)
            reach = tl.cumprod(tl.where((i > k)[None, :], gates, 1.0), 1)
            end = tl.sum(tl.where((i == C - 1)[None, :], reach, 0.0), 1)
            dgate = tl.sum(tl.where((i >= k)[None, :], reach * rows * y, 0.0), 1) + end * tl.sum(S * E, 1)
            tl.store(dgate_NTD + at * D + d, dgate, mask=in_D)
            S = g[:, None] * S + x[:, None] * w[None, :]
            y = g[:, None] * y + x[:, None] * tl.sum(columns * w[None, :], 1)[None, :]
            if COLUMNS:
                dread = tl.sum(S * _row(r_NTD, at, d, in_D, D)[:, None], 0)
                tl.store(dreader + (part + at) * R + r, dread, mask=in_R)
            else:
                tl.store(dreader + at * D + d, tl.sum(tl.where((i == k)[None, :], y, 0.0), 1), mask=in_D)
        for k in tl.range(0, L):
            at = first + L - 1 - k
            x, w = _row(x_NTD, at, d, in_D, D), _row(w_NTR, at, r, in_R, R)
            E += _row(r_NTD, at, d, in_D, D)[:, None] * _row(c_NTR, at, r, in_R, R)[None, :]
            tl.store(dx_NTD + at * D + d, tl.sum(E * w[None, :], 1), mask=in_D)
            tl.store(dw_pNTR + (part + at) * R + r, tl.sum(E * x[:, None], 0), mask=in_R)
            E = _gate(gate_NTA, at, d, in_D, D, WIDE)[:, None] * E
    tl.store(dfirst_NDR + n * D * R + place, E, mask=inside)


INTERPRETED = not isinstance(forward, triton.JITFunction)
"""True if the kernels run in Triton's interpreter, on any device: TRITON_INTERPRET was 1 when this was imported."""
