"""Products of packed matrices in Triton: a byte is read once, and its codes live in registers only.

`quantise` rounds tokens to 8 bits, those that a SwiGLU's two halves make, too. `few` takes one token and some blocks of
rows: its float arithmetic is that of `perspectron.ops.packed`, in the same order, so it gives the same bits. `many` has
products of whole numbers by tensor cores; of formats whose groups have scales it sums from group to group, not by
lanes. Whole numbers are exact. Kernels are launched without fused multiply-adds, except explicit ones.

Shapes: T tokens, N rows, K columns, S columns stored, G groups of 128, b blocks of R rows with common bytes; BT tokens,
BB blocks and BC columns at a time.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FEW = 4  # most tokens for `few`, which reads the matrix again for each, from the cache
WIDE = 2048  # columns that are rounded at a time


class Tile(NamedTuple):
    """The sizes that are fixed when a product is compiled, and its warps."""

    tokens: int
    blocks: int
    columns: int
    warps: int


def tile(R: int, T: int, blocks: int, S: int) -> Tile:
    """The tile for R rows of a block (`benchmarks/triton_kernels.py` compiles them all)."""
    by_row = R in (1, 5)
    if T > FEW:
        return Tile(16 if T <= 16 else 64, 32 if by_row else 16, 64 if by_row else 128, 4)
    if not by_row:
        return Tile(1, 4, 64, 1)
    return Tile(1, 4, 512, 4) if blocks >= 1024 or S <= 1024 else Tile(1, 1, 2048, 4)


@triton.jit
def _silu(x):
    """x / (1 + e⁻ˣ), to the bit as `perspectron.ops.packed` has it."""
    minus = tl.minimum(tl.maximum(-x, -87.0), 88.0)
    n = tl.fma(minus, 1.44269504, 12582912.0) - 12582912.0
    r = tl.fma(n, -1.42860677e-6, tl.fma(n, -0.693145752, minus))
    power = tl.fma(r, 1 / 5040, 1 / 720)
    power = tl.fma(power, r, 1 / 120)
    power = tl.fma(power, r, 1 / 24)
    power = tl.fma(power, r, 1 / 6)
    power = tl.fma(power, r, 0.5)
    power = tl.fma(power, r, 1.0)
    power = tl.fma(power, r, 1.0)
    two = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    power = tl.where(x < -88.7228317, float("inf"), power * two)
    return tl.div_rn(x, 1.0 + power)


@triton.jit
def _value(x_TK, up_TK, at, inside, GATED: tl.constexpr):
    """The numbers to be rounded; 0 outside."""
    x = tl.load(x_TK + at, mask=inside, other=0.0)
    if GATED:
        x = _silu(x) * tl.load(up_TK + at, mask=inside, other=0.0)
    return x


@triton.jit(do_not_specialize=["G"])
def quantise(x_TK, up_TK, q_TS, step_T, sum_TG, K, S, G, GATED: tl.constexpr, BC: tl.constexpr):
    """Round a token to 8 bits, filled up with zeros; write its step and its groups' sums. GATED: of SiLU(x) ⊙ up."""
    t, c = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    most_c, wrong_c = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.int32)
    for start in range(0, K, BC):
        x = _value(x_TK, up_TK, t * K + start + c, start + c < K, GATED)
        most_c = tl.maximum(most_c, tl.abs(x))
        wrong_c = wrong_c | (x != x).to(tl.int32)  # the maximum of a NaN and a number is the number
    most = tl.max(most_c, 0)
    finite = (most < float("inf")) & (tl.max(wrong_c, 0) == 0)
    large = finite & (most > 3.7e-37)  # else 127 / most is infinite
    per = tl.div_rn(127.0, tl.where(large, most, 127.0))
    fits = large & (per < float("inf"))
    tl.store(step_T + t, tl.where(finite, tl.div_rn(most, 127.0), float("nan")))
    group = tl.arange(0, BC // 128)
    for start in range(0, S, BC):
        x = _value(x_TK, up_TK, t * K + start + c, start + c < K, GATED)
        whole = (tl.where(fits, x, 0.0) * per + 12582912.0) - 12582912.0  # 1.5 · 2²³: half to even
        q = whole.to(tl.int32)
        tl.store(q_TS + t * S + start + c, q.to(tl.int8), mask=start + c < S)
        sums = tl.sum(tl.reshape(q, [BC // 128, 128]), 1)
        at = start // 128 + group
        tl.store(sum_TG + t * G + at, sums.to(tl.float32), mask=at < G)


@triton.jit
def _digit(byte, r: tl.constexpr, R: tl.constexpr):
    """The code of row r of a block, as a whole number; for int8, minus 128. Ternary: radix 1, 3, 9, 27, 84, quotients
    by products and shifts."""
    if R == 1:
        return byte - 128
    elif R == 2:
        return (byte >> (4 * r)) & 15
    elif R == 4:
        return (byte >> (2 * r)) & 3
    else:
        top = (byte * 781) >> 16
        rest = byte - 84 * top
        if r == 0:
            return rest - 3 * ((rest * 171) >> 9)
        elif r == 1:
            return ((rest * 171) >> 9) - 3 * ((rest * 57) >> 9)
        elif r == 2:
            return ((rest * 57) >> 9) - 3 * ((rest * 19) >> 9)
        elif r == 3:
            return (rest * 19) >> 9
        else:
            return top


@triton.jit
def _by_row(sums, zero, scale_N, step, y_N, b, r: tl.constexpr, R: tl.constexpr, N):
    n = b * R + r
    scale = tl.load(scale_N + n, mask=n < N, other=0.0)
    tl.store(y_N + n, (tl.sum(sums, 1) - zero).to(tl.float32) * (step * scale), mask=n < N)


@triton.jit
def _lanes(lane_b16, offset_b, step, y_N, b, r: tl.constexpr, R: tl.constexpr, N, BB: tl.constexpr):
    """Add the lanes by halves, and write the products of row r."""
    lane_b8 = tl.sum(tl.reshape(lane_b16, [BB, 2, 8]), 1)
    lane_b4 = tl.sum(tl.reshape(lane_b8, [BB, 2, 4]), 1)
    lane_b2 = tl.sum(tl.reshape(lane_b4, [BB, 2, 2]), 1)
    n = b * R + r
    tl.store(y_N + n, (tl.sum(lane_b2, 1) - offset_b) * step, mask=n < N)


@triton.jit
def _group(
    low, high, q_low, q_high, sum_g, scales_b, in_b, lane_b16, offset_b,
    r: tl.constexpr, R: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """The lanes and the offset after one more group."""
    product = _digit(low, r, R) * q_low[None, :] + _digit(high, r, R) * q_high[None, :]
    sums_b16 = tl.sum(tl.reshape(product, [BB, 16, 4]), 2).to(tl.float32)
    scale_b = tl.load(scales_b + r, mask=in_b, other=0.0).to(tl.float32)
    shift_b = tl.load(scales_b + R + r, mask=in_b, other=0.0).to(tl.float32)
    scale_b16 = tl.broadcast_to(scale_b[:, None], [BB, 16])
    return tl.fma(sums_b16, scale_b16, lane_b16), tl.fma(shift_b, sum_g, offset_b)


@triton.jit
def _few(
    q_S, step_T, sum_G, codes_bS, scales, y_N, t, blocks, N, S, G,
    R: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0) * BB + tl.arange(0, BB), tl.arange(0, BC)
    in_b, step = b < blocks, tl.load(step_T + t)
    byte_bc = codes_bS + b.to(tl.int64)[:, None] * S + c[None, :]
    if R == 1 or R == 5:
        a0, total = tl.zeros([BB, BC], tl.int32), tl.zeros([BC], tl.int32)
        a1, a2, a3, a4 = a0, a0, a0, a0
        for start in range(0, S, BC):
            in_c = start + c < S
            q = tl.load(q_S + start + c, mask=in_c, other=0).to(tl.int32)
            byte = tl.load(byte_bc + start, mask=in_b[:, None] & in_c[None, :], other=0).to(tl.int32)
            a0 += _digit(byte, 0, R) * q[None, :]
            if R == 5:
                a1 += _digit(byte, 1, R) * q[None, :]
                a2 += _digit(byte, 2, R) * q[None, :]
                a3 += _digit(byte, 3, R) * q[None, :]
                a4 += _digit(byte, 4, R) * q[None, :]
                total += q
        zero = tl.sum(total, 0)
        _by_row(a0, zero, scales, step, y_N, b, 0, R, N)
        if R == 5:
            _by_row(a1, zero, scales, step, y_N, b, 1, R, N)
            _by_row(a2, zero, scales, step, y_N, b, 2, R, N)
            _by_row(a3, zero, scales, step, y_N, b, 3, R, N)
            _by_row(a4, zero, scales, step, y_N, b, 4, R, N)
    else:
        l0, o0 = tl.zeros([BB, 16], tl.float32), tl.zeros([BB], tl.float32)
        l1, l2, l3, o1, o2, o3 = l0, l0, l0, o0, o0, o0
        for g in tl.range(0, G, loop_unroll_factor=4):
            start = g * 128
            more = start + 64 + c < S  # all or none
            q_low = tl.load(q_S + start + c).to(tl.int32)
            q_high = tl.load(q_S + start + 64 + c, mask=more, other=0).to(tl.int32)
            low = tl.load(byte_bc + start, mask=in_b[:, None], other=0).to(tl.int32)
            high = tl.load(byte_bc + start + 64, mask=in_b[:, None] & more[None, :], other=0).to(tl.int32)
            sum_g, scales_b = tl.load(sum_G + g), scales + (b.to(tl.int64) * G + g) * (2 * R)
            l0, o0 = _group(low, high, q_low, q_high, sum_g, scales_b, in_b, l0, o0, 0, R, BB)
            l1, o1 = _group(low, high, q_low, q_high, sum_g, scales_b, in_b, l1, o1, 1, R, BB)
            if R == 4:
                l2, o2 = _group(low, high, q_low, q_high, sum_g, scales_b, in_b, l2, o2, 2, R, BB)
                l3, o3 = _group(low, high, q_low, q_high, sum_g, scales_b, in_b, l3, o3, 3, R, BB)
        _lanes(l0, o0, step, y_N, b, 0, R, N, BB)
        _lanes(l1, o1, step, y_N, b, 1, R, N, BB)
        if R == 4:
            _lanes(l2, o2, step, y_N, b, 2, R, N, BB)
            _lanes(l3, o3, step, y_N, b, 3, R, N, BB)


@triton.jit(do_not_specialize=["T", "blocks", "N", "G"])
def few(
    q_TS, step_T, sum_TG, codes_bS, scales, codes2_bS, scales2, y_TN, T, blocks, N, S, G,
    TWO: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One token and BB blocks of one matrix, or TWO of the same shape; y is [T,N] for each."""
    t = tl.program_id(1).to(tl.int64)
    q_S, sum_G, y_N = q_TS + t * S, sum_TG + t * G, y_TN + t * N
    if TWO:
        if tl.program_id(2) == 1:
            y_N += T * N
            _few(q_S, step_T, sum_G, codes2_bS, scales2, y_N, t, blocks, N, S, G, R, BB, BC)
        else:
            _few(q_S, step_T, sum_G, codes_bS, scales, y_N, t, blocks, N, S, G, R, BB, BC)
    else:
        _few(q_S, step_T, sum_G, codes_bS, scales, y_N, t, blocks, N, S, G, R, BB, BC)


@triton.jit
def _product(a, q, byte, sum_t, scales_b, in_b, r: tl.constexpr, R: tl.constexpr):
    """The sums of row r of each block after some more columns."""
    if R == 1:
        return tl.dot(q, tl.trans(_digit(byte, r, R).to(tl.int8)), acc=a, out_dtype=tl.int32)
    elif R == 5:
        return tl.dot(q, tl.trans((_digit(byte, r, R) - 1).to(tl.int8)), acc=a, out_dtype=tl.int32)
    else:
        sums = tl.dot(q, tl.trans(_digit(byte, r, R).to(tl.int8)), out_dtype=tl.int32).to(tl.float32)
        scale_b = tl.load(scales_b + r, mask=in_b, other=0.0).to(tl.float32)
        shift_b = tl.load(scales_b + R + r, mask=in_b, other=0.0).to(tl.float32)
        scale, shift = scale_b[None, :] + tl.zeros_like(sums), shift_b[None, :] + tl.zeros_like(sums)
        return tl.fma(sums, scale, tl.fma(sum_t[:, None] + tl.zeros_like(sums), -shift, a))


@triton.jit
def _put(a, step, scale_N, y_TN, t, b, T, N, r: tl.constexpr, R: tl.constexpr):
    n = b * R + r
    if R == 1 or R == 5:
        y = a.to(tl.float32) * (step[:, None] * tl.load(scale_N + n, mask=n < N, other=0.0)[None, :])
    else:
        y = a * step[:, None]
    tl.store(y_TN + t[:, None] * N + n[None, :], y, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def _many(
    q_TS, step_T, sum_TG, codes_bS, scales, y_TN, T, blocks, N, S, G,
    R: tl.constexpr, BT: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    b, c = tl.program_id(0) * BB + tl.arange(0, BB), tl.arange(0, BC)
    in_t, in_b = t < T, b < blocks
    a0 = tl.zeros([BT, BB], tl.int32 if R == 1 or R == 5 else tl.float32)
    a1, a2, a3, a4 = a0, a0, a0, a0
    q_tc, byte_bc = q_TS + t[:, None] * S + c[None, :], codes_bS + b.to(tl.int64)[:, None] * S + c[None, :]
    for start in range(0, S, BC):
        in_c, g = start + c < S, start // 128
        q = tl.load(q_tc + start, mask=in_t[:, None] & in_c[None, :], other=0)
        byte = tl.load(byte_bc + start, mask=in_b[:, None] & in_c[None, :], other=0).to(tl.int32)
        if R == 1 or R == 5:
            sum_t, scales_b = t, scales  # which are not read
        else:
            sum_t = tl.load(sum_TG + t * G + g, mask=in_t, other=0.0)
            scales_b = scales + (b.to(tl.int64) * G + g) * (2 * R)
        a0 = _product(a0, q, byte, sum_t, scales_b, in_b, 0, R)
        if R > 1:
            a1 = _product(a1, q, byte, sum_t, scales_b, in_b, 1, R)
        if R > 2:
            a2 = _product(a2, q, byte, sum_t, scales_b, in_b, 2, R)
            a3 = _product(a3, q, byte, sum_t, scales_b, in_b, 3, R)
        if R > 4:
            a4 = _product(a4, q, byte, sum_t, scales_b, in_b, 4, R)
    step = tl.load(step_T + t, mask=in_t, other=0.0)
    _put(a0, step, scales, y_TN, t, b, T, N, 0, R)
    if R > 1:
        _put(a1, step, scales, y_TN, t, b, T, N, 1, R)
    if R > 2:
        _put(a2, step, scales, y_TN, t, b, T, N, 2, R)
        _put(a3, step, scales, y_TN, t, b, T, N, 3, R)
    if R > 4:
        _put(a4, step, scales, y_TN, t, b, T, N, 4, R)


@triton.jit(do_not_specialize=["T", "blocks", "N", "G"])
def many(
    q_TS, step_T, sum_TG, codes_bS, scales, codes2_bS, scales2, y_TN, T, blocks, N, S, G,
    TWO: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT tokens and BB blocks of one matrix, or TWO of the same shape; y is [T,N] for each."""
    if TWO:
        if tl.program_id(2) == 1:
            y2_TN = y_TN + T.to(tl.int64) * N
            _many(q_TS, step_T, sum_TG, codes2_bS, scales2, y2_TN, T, blocks, N, S, G, R, BT, BB, BC)
        else:
            _many(q_TS, step_T, sum_TG, codes_bS, scales, y_TN, T, blocks, N, S, G, R, BT, BB, BC)
    else:
        _many(q_TS, step_T, sum_TG, codes_bS, scales, y_TN, T, blocks, N, S, G, R, BT, BB, BC)
