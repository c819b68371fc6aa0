"""The work inside blocks of 16 tokens for `perspectron.ops.triton.kernels.blocks`, where each row has its own gate.

A program is one warp. Each thread has a row and all tokens of the block in registers, so threads exchange nothing but
sums over rows.

Shapes: N memories, T time, D rows of a memory, W rows of a program, b blocks of 16 tokens, B tokens of one, p parts.
"""

import triton
import triton.language as tl

from perspectron.ops.triton.kernels.blocks import _load

WIDTH = 64
"""Rows of a program of `prepare`."""


@triton.jit(do_not_specialize=["T", "one"])
def inner(
    x_NTD, gate_NTD, r_NTD, s_NTD, e_NTD, both_NTD, M_NTB, dx_NTD, dgate_NTD, read_NTD, T, D, one,
    GRAD: tl.constexpr, READ: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The outputs or gradients of some rows of a block of 16 tokens, from what `rows` wrote. Each thread has a row and
    all tokens: `one`, which is 1, hides from the compiler that rows are neighbours, which a thread would get.

    y_i is S_k c_i, with the state after token k, while k goes from the first to i; adding -0.0 costs nothing."""
    parts, blocks = tl.cdiv(D, W), tl.cdiv(T, 16)
    program = tl.program_id(0).to(tl.int64) // parts
    start = (program % blocks).to(tl.int32) * 16
    at, left = (program // blocks) * T + start, T - start
    i, d = tl.arange(0, 16)[None, :], ((tl.program_id(0) % parts) * W + tl.arange(0, W)[:, None]) * one
    in_D, place = d < D, i * D + d
    inside = (i < left) & in_D
    y = _load(s_NTD, at, place, inside, D)
    if GRAD:
        gates = tl.load(gate_NTD + at * D + place, mask=inside, other=1.0)
        r = _load(r_NTD, at, place, inside, D)
        last = _load(both_NTD, at, d, in_D, D)  # y of a reader after the block, for the adjoint there
    for k in tl.static_range(16):
        here = d < tl.where(left > k, D, 0)
        x, m = _load(x_NTD, at + k, d, here, D), _load(M_NTB, at + k, i * one + d * 0, here & (i >= k), 16)
        g = tl.load(gate_NTD + (at + k) * D + d, mask=here, other=1.0)
        if GRAD:
            reach = tl.cumprod(tl.where(i > k, gates, 1.0), 1)
            end = tl.sum(tl.where(i == 15, reach, -0.0), 1)[:, None]
            e = _load(e_NTD, at + k, d, here, D)
            dgate = tl.sum(tl.where(i >= k, reach * r * y, -0.0), 1)[:, None] + end * last
            dx = tl.sum(tl.where(i >= k, reach * r * m, -0.0), 1)[:, None] + end * e
            tl.store(dgate_NTD + (at + k) * D + d, dgate, mask=here)
            tl.store(dx_NTD + (at + k) * D + d, dx, mask=here)
            last = g * last + x * e
        y = tl.where(i >= k, g * y + m * x, y)
    if READ:
        tl.store(read_NTD + at * D + place, y, mask=inside)


@triton.jit(do_not_specialize=["T", "one", "count"])
def prepare(
    x_NTD, gate_NTD, r_NTD, X_NTD, P_NbD, R_NTD, A_pNTB, T, D, one, count, READ: tl.constexpr, W: tl.constexpr
):
    """Some rows of a block of 16 tokens, by threads as in `inner`: X, x times the gates to the block's end, and P, the
    product of all. READ: R, r times the gates from the block's start, and the products A [N,T,16] of the tokens with
    the readers of the same block."""
    parts, blocks = tl.cdiv(D, W), tl.cdiv(T, 16)
    program, part = tl.program_id(0).to(tl.int64) // parts, tl.program_id(0) % parts
    start = (program % blocks).to(tl.int32) * 16
    at, left = (program // blocks) * T + start, T - start
    i, d = tl.arange(0, 16)[None, :], (part * W + tl.arange(0, W)[:, None]) * one
    inside = (i < left) & (d < D)
    gates = tl.load(gate_NTD + at * D + i * D + d, mask=inside, other=1.0)
    before = tl.cumprod(gates, 1)
    tl.store(P_NbD + program * D + d, tl.sum(tl.where(i == 15, before, -0.0), 1)[:, None], mask=d < D)
    if READ:
        r = _load(r_NTD, at, i * D + d, inside, D)
        tl.store(R_NTD + at * D + i * D + d, before * r, mask=inside)
        A = A_pNTB + (part.to(tl.int64) * count * T + at) * 16 + tl.arange(0, 16)
    for k in tl.static_range(16):
        here = tl.where(left > k, D, 0)
        x = _load(x_NTD, at + k, d, d < here, D)
        reach = tl.cumprod(tl.where(i > k, gates, 1.0), 1)
        end = tl.sum(tl.where(i == 15, reach, -0.0), 1)[:, None]
        tl.store(X_NTD + (at + k) * D + d, x * end, mask=d < here)
        if READ:
            found = tl.sum(tl.where(i >= k, reach * r * x, 0.0), 0)
            tl.store(A + k * 16, found, mask=tl.arange(0, 16) < here * 16)
