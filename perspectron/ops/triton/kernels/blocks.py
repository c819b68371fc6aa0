"""The recurrence of the module `token` by chunks of tokens, all chunks at once, for whole sequences.

    S_t = diag(g_t) S_{t-1} + x_t w_tᵀ,  o_t = S_t c_t  or  o_t = S_tᵀ r_t

`states` alone goes through the time: it leaves the state before each chunk or, backwards, the adjoint E after it. With
them `rows` and `columns` take every chunk by itself. Inside a chunk stand the products A_ij = Σ_d r_i x_j Π g_l and
M_ij = c_i · w_j of a reader i with the tokens j ≤ i before it, with the gates j < l ≤ i between them.

Gates of rows: a binary tree, as in `perspectron.ops.products`. For blocks of b = 1, 2, 4, … tokens, the readers of each
right half, times the gates from its start, meet the tokens of its left half, times the gates to its end; a level's
product is a whole matrix product of which the pairs of that level are taken. The gradient goes down the same tree.
One gate for all rows: the products of gates between two tokens are a matrix [C,C], made by a scan, and

    dg_l = Σ_{j<l≤i} dL_ij (Π_{l<m≤i} g_m) (Π_{j<m<l} g_m),

two matrix products. So only products of gates are formed, no logarithm or quotient: any gate in [0, 1] is exact, 0 and
1 included. Matrix products are in float32 by three of TensorFloat-32, an error of some 1e-7.

Shapes: N memories, T time, D rows of a memory, R columns (at most 256), A gate width (D or 1), C tokens of a chunk, n
chunks, BD rows and BR columns in registers, W width, p parts, b block of the tree.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """Tokens of a chunk, rows and columns of a program's tiles, and warps."""

    chunk: int
    rows: int
    columns: int
    warps: int


def tile(kernel: str, R: int, both: bool = False) -> Tile:
    """The tile of a kernel for memories of R columns. both: the kernel computes a gradient and a read
    (`benchmarks/triton_kernels.py` compiles them all)."""
    columns = max(16, triton.next_power_of_2(R))
    most = {"states": 32 if R % 16 else 64, "rows": 32, "columns": 32 if both else 64, "gates": 32}[kernel]
    return Tile(64, 32, min(columns, most), 8 if kernel in ("rows", "gates") else 4)


@triton.jit
def _load(x, at, index, inside, width):
    """A tile of tokens' vectors, from token `at` on; 0 outside."""
    return tl.load(x + at * width + index, mask=inside, other=0.0)


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    return tl.dot(a, b, input_precision=DOT)


@triton.jit(do_not_specialize=["T", "start", "chunks"])
def states(
    x_NTD, w_NTR, gate_NTA, first_NDR, last_NDR, border_NnDR, T, start, chunks, D, R,
    WIDE: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Write the states before each of `chunks` chunks from `start` on, and the last one. BACK: x is r and w is c, and
    adjoints after each chunk are written, from the last to the first. `last` may be `first`."""
    n = tl.program_id(0).to(tl.int64)
    d, r = tl.program_id(1) * BD + tl.arange(0, BD), tl.program_id(2) * BR + tl.arange(0, BR)
    t, i = tl.arange(0, C), tl.arange(0, C)[:, None]
    in_D, in_R = (d < D)[None, :], (r < R)[None, :]
    inside, place = (d < D)[:, None] & in_R, d[:, None] * R + r[None, :]
    d, r = d[None, :], r[None, :]
    S = tl.load(first_NDR + n * D * R + place, mask=inside, other=0.0)
    for step in tl.range(0, chunks):
        chunk = chunks - 1 - step if BACK else step
        tl.store(border_NnDR + (n * chunks + chunk) * D * R + place, S, mask=inside)
        at, left = n * T + (start + chunk) * C, T - (start + chunk) * C
        x = _load(x_NTD, at, i * D + d, (i < left) & in_D, D)
        w = _load(w_NTR, at, i * R + r, (i < left) & in_R, R)
        if WIDE:
            base, blocks = gate_NTA + n * tl.cdiv(T, 16) * D, tl.cdiv(T, 16)
            first = (start + chunk) * (C // 16)
            whole = tl.load(base + first * D + d, mask=in_D, other=1.0)
            for b in tl.static_range(1, C // 16):
                whole *= tl.load(
                    base + (first + b) * D + d, mask=in_D & (d * 0 + (first + b) < blocks), other=1.0
                )
            x *= _reach(gate_NTA, n, start + chunk, d, in_D, T, D, 1, not BACK, C)
            x *= _reach(gate_NTA, n, start + chunk, d, in_D, T, D, 2, not BACK, C)
            S *= tl.trans(whole)
        else:
            gate = tl.load(gate_NTA + at + t, mask=t < left, other=1.0)
            if BACK:
                reach = tl.cumprod(gate, 0)
                S *= tl.sum(tl.where(t == C - 1, reach, 0.0), 0)
            else:
                later = tl.load(gate_NTA + at + t + 1, mask=(t + 1 < left) & (t + 1 < C), other=1.0)
                reach = tl.cumprod(later, 0, reverse=True)
                S *= tl.sum(tl.where(t == 0, reach * gate, 0.0), 0)
            x *= reach[:, None]
        S += _dot(tl.trans(x), w, DOT)
    tl.store(last_NDR + n * D * R + place, S, mask=inside)


# ---------------------------------------------------------------- the tree


@triton.jit
def _right(b: tl.constexpr, C: tl.constexpr):
    """True for tokens in the right block of a pair [C,1]."""
    return ((tl.arange(0, C) // b) % 2 == 1)[:, None]


@triton.jit
def _sibling(x, b: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """The sum of x [C,W] over the other block of each token's pair."""
    right = _right(b, C)
    of_left = tl.sum(tl.reshape(tl.where(right, 0.0, x), [C // (2 * b), 2 * b, W]), 1)
    of_right = tl.sum(tl.reshape(tl.where(right, x, 0.0), [C // (2 * b), 2 * b, W]), 1)
    of_left = tl.reshape(tl.broadcast_to(of_left[:, None, :], [C // (2 * b), 2 * b, W]), [C, W])
    of_right = tl.reshape(tl.broadcast_to(of_right[:, None, :], [C // (2 * b), 2 * b, W]), [C, W])
    return tl.where(right, of_left, of_right)


@triton.jit
def _pairs(A, b: tl.constexpr, C: tl.constexpr):
    """The part of A [C,C] where the right block of a pair looks at the left one; 0 elsewhere."""
    i = tl.arange(0, C) // b
    return tl.where(((i[:, None] ^ 1) == i[None, :]) & (i[:, None] > i[None, :]), A, 0.0)


@triton.jit
def _others(P_NbD, n, chunk, d, in_D, T, D, b: tl.constexpr, C: tl.constexpr):
    """The product of the gates of the other block of each token's pair, of b times 16 tokens."""
    blocks = tl.cdiv(T, 16)
    block = chunk * (C // 16) + (tl.arange(0, C)[:, None] // (16 * b) ^ 1) * b
    base = P_NbD + n * blocks * D
    other = tl.load(base + block * D + d, mask=in_D & (block < blocks), other=1.0)
    if b == 2:
        other *= tl.load(base + (block + 1) * D + d, mask=in_D & (block + 1 < blocks), other=1.0)
    return other


@triton.jit
def _reach(P_NbD, n, chunk, d, in_D, T, D, b: tl.constexpr, LEFT: tl.constexpr, C: tl.constexpr):
    """`_others` for tokens of the left block, to the pair's end, or of the right one, from its start; else 1."""
    other = _others(P_NbD, n, chunk, d, in_D, T, D, b, C)
    return tl.where(_right(16 * b, C), 1.0, other) if LEFT else tl.where(_right(16 * b, C), other, 1.0)


@triton.jit
def _down_r(dr, M, x, other, b: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr):
    """The gradient of the readers of blocks of b from that of 2b."""
    return tl.where(_right(b, C), dr * other, dr) + _dot(_pairs(M, b, C), x, DOT)


@triton.jit
def _down(dr, dx, dP, M, r, x, other, b: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr):
    """The gradients of readers, tokens and products of blocks of b from those of 2b."""
    right, M = _right(b, C), _pairs(M, b, C)
    dP = dP * other + _sibling(tl.where(right, dr * r, dx * x), b, C, W)
    dr = tl.where(right, dr * other, dr) + _dot(M, x, DOT)
    dx = tl.where(right, dx, dx * other) + _dot(tl.trans(M), r, DOT)
    return dr, dx, dP


# ---------------------------------------------------------------- one gate for all rows


@triton.jit
def _products(gates, C: tl.constexpr):
    """(L, before, after) of the gates [C] of a chunk: L_ij = Π_{j<l≤i} g_l, 0 for j > i; the products from the start to
    i, and those from j to the end."""
    i = tl.arange(0, C)
    L = tl.cumprod(tl.where(i[:, None] > i[None, :], gates[:, None], 1.0), 0)
    L = tl.where(i[:, None] >= i[None, :], L, 0.0)
    before = tl.cumprod(gates, 0)
    after = tl.sum(tl.where((i == C - 1)[:, None], L, 0.0), 0)
    return L, before, after


# ---------------------------------------------------------------- chunks


@triton.jit(do_not_specialize=["T", "start", "chunks"])
def rows(
    x_NTD, w_NTR, gate_NTA, r_NTD, c_NTR, border_NnDR, after_NnDR, dx_NTD, dgate, read_NTD, M_NTB,
    T, start, chunks, D, R,
    WIDE: tl.constexpr, GRAD: tl.constexpr, READ: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A block of rows of one chunk. READ: S_t c_t, the outputs or the gradient of r. GRAD: with r and the adjoints
    after the chunk, the gradients of x and of the products of gates, which `gates` needs, in parts [p,2,N,T].

    WIDE: what `inner` needs instead: S c_t with the state before t's block of 16 tokens; E w_t with the adjoint after
    it; rowsum(S ⊙ E), at the first token of each; and M [N,T,16] of the tokens of a block, readers last."""
    parts = tl.cdiv(D, BD)
    program = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0) % parts
    n, chunk = program // chunks, start + program % chunks
    at, left = n * T + chunk * C, T - chunk * C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    d = part * BD + tl.arange(0, BD)
    in_D = (d < D)[:, None]
    place, inside = i * D + d[None, :], (i < left) & (d < D)[None, :]
    M = tl.zeros([C, C], dtype=tl.float32)
    dr = tl.zeros([C, BD], dtype=tl.float32)
    if GRAD:
        dx, both = tl.zeros([C, BD], dtype=tl.float32), tl.zeros([BD], dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(R, BR)):
        k = (block * BR + tl.arange(0, BR))[None, :]
        c = _load(c_NTR, at, i * R + k, (i < left) & (k < R), R)
        w = _load(w_NTR, at, i * R + k, (i < left) & (k < R), R)
        S = _load(border_NnDR, program * D, d[:, None] * R + k, in_D & (k < R), R)
        M += _dot(c, tl.trans(w), DOT)
        dr += _dot(c, tl.trans(S), DOT)
        if GRAD:
            E = _load(after_NnDR, program * D, d[:, None] * R + k, in_D & (k < R), R)
            dx += _dot(w, tl.trans(E), DOT)
            both += tl.sum(S * E, 1)
    x = _load(x_NTD, at, place, inside, D)
    r = _load(r_NTD, at, place, inside, D) if GRAD else x
    if WIDE:
        n16 = _others(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 1, C)
        x32, r32 = tl.where(_right(16, C), x, x * n16), tl.where(_right(16, C), r * n16, r)
        n32 = _others(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 2, C)
        if GRAD:
            dP = tl.broadcast_to(both[None, :], [C, BD])
            dr, dx, dP = _down(dr, dx, dP, M, r32, x32, n32, 32, C, BD, DOT)
            dr, dx, dP = _down(dr, dx, dP, M, r, x, n16, 16, C, BD, DOT)
            tl.store(dgate + at * D + place, dP, mask=inside & (i % 16 == 0))
        else:
            dr = _down_r(dr, M, x32, n32, 32, C, DOT)
            dr = _down_r(dr, M, x, n16, 16, C, DOT)
        tl.store(
            M_NTB + at * 16 + j * 16 + i % 16,
            M,
            mask=(i // 16 == j // 16) & (j < tl.where(part == 0, left, 0)),
        )
    else:
        t = tl.arange(0, C)
        gates = tl.load(gate_NTA + at + t, mask=t < left, other=1.0)
        L, before, after = _products(gates, C)
        if GRAD:
            count = tl.num_programs(0) // parts // chunks
            found = dgate + (part * count * 2 + n) * T + chunk * C + t
            last = tl.where(t == tl.minimum(left, C) - 1, tl.sum(both, 0), 0.0)  # as a reader at the end
            tl.store(found, tl.sum(r * dr, 1) + last, mask=t < left)
            tl.store(found + count.to(tl.int64) * T, tl.sum(x * dx, 1), mask=t < left)
            dx = after[:, None] * dx + _dot(tl.trans(L * M), r, DOT)
        dr = before[:, None] * dr + _dot(L * M, x, DOT)
    if GRAD:
        tl.store(dx_NTD + at * D + place, dx, mask=inside)
    if READ or WIDE:
        tl.store(read_NTD + at * D + place, dr, mask=inside)


@triton.jit(do_not_specialize=["T", "start", "chunks"])
def columns(
    x_NTD, w_NTR, gate_NTA, r_NTD, c_NTR, border_NnDR, after_NnDR, A_pNTB, dw_NTR, read_NTR,
    T, start, chunks, D, R, count, splits,
    WIDE: tl.constexpr, GRAD: tl.constexpr, READ: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A block of columns of one chunk. GRAD: with c and the adjoints after the chunk, write the gradient of w. READ:
    with w and the states before, write S_tᵀ r_t, the outputs or the gradient of c. WIDE: add A of `prepare`, which is
    in `splits` parts, of `count` memories."""
    parts = tl.cdiv(R, BR)
    program = tl.program_id(0).to(tl.int64) // parts
    n, chunk = program // chunks, start + program % chunks
    at, left = n * T + chunk * C, T - chunk * C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    k = (tl.program_id(0) % parts) * BR + tl.arange(0, BR)[None, :]
    place, inside = i * R + k, (i < left) & (k < R)
    A = tl.zeros([C, C], dtype=tl.float32)
    if GRAD:
        dw = tl.zeros([C, BR], dtype=tl.float32)
    if READ:
        read = tl.zeros([C, BR], dtype=tl.float32)
    if not WIDE:
        t = tl.arange(0, C)
        L, before, after = _products(tl.load(gate_NTA + at + t, mask=t < left, other=1.0), C)
    for block in tl.range(0, tl.cdiv(D, BD)):
        d = block * BD + tl.arange(0, BD)
        in_D = (i < left) & (d < D)[None, :]
        x, r = _load(x_NTD, at, i * D + d[None, :], in_D, D), _load(r_NTD, at, i * D + d[None, :], in_D, D)
        if WIDE:
            A += _pairs(_dot(r, tl.trans(x), DOT), 16, C)
            r *= _reach(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 1, False, C)
            x *= _reach(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 1, True, C)
            A += _pairs(_dot(r, tl.trans(x), DOT), 32, C)
            r *= _reach(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 2, False, C)
            x *= _reach(gate_NTA, n, chunk, d[None, :], (d < D)[None, :], T, D, 2, True, C)
        else:
            A += _dot(r, tl.trans(x), DOT)
            r *= before[:, None]
            x *= after[:, None]
        in_place = (d < D)[:, None] & (k < R)
        if READ:
            read += _dot(r, _load(border_NnDR, program * D, d[:, None] * R + k, in_place, R), DOT)
        if GRAD:
            dw += _dot(x, _load(after_NnDR, program * D, d[:, None] * R + k, in_place, R), DOT)
    if WIDE:
        for part in tl.range(0, splits):
            own = A_pNTB + ((program * 0 + part) * count * T + at) * 16 + j * 16 + i % 16
            A += tl.load(own, mask=(i // 16 == j // 16) & (j < left), other=0.0)
    else:
        A *= L
    if READ:
        read += _dot(A, _load(w_NTR, at, place, inside, R), DOT)
        tl.store(read_NTR + at * R + place, read, mask=inside)
    if GRAD:
        dw += _dot(tl.trans(A), _load(c_NTR, at, place, inside, R), DOT)
        tl.store(dw_NTR + at * R + place, dw, mask=inside)


@triton.jit(do_not_specialize=["T", "chunks", "count", "splits"])
def gates(
    x_NTD, w_NTR, gate_NT, r_NTD, c_NTR, products_pNT, dgate_NT, T, chunks, D, R, count, splits,
    C: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradient of one chunk's gates, one for all rows, with what `rows` wrote in `splits` parts, of `count`
    memories."""
    program = tl.program_id(0).to(tl.int64)
    n, chunk = program // chunks, program % chunks
    at, left = n * T + chunk * C, T - chunk * C
    i, j, t = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C)
    dL, A = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(R, BD)):
        k = (block * BD + tl.arange(0, BD))[None, :]
        inside = (i < left) & (k < R)
        dL += _dot(
            _load(c_NTR, at, i * R + k, inside, R), tl.trans(_load(w_NTR, at, i * R + k, inside, R)), DOT
        )
    for block in tl.range(0, tl.cdiv(D, BD)):
        d = (block * BD + tl.arange(0, BD))[None, :]
        inside = (i < left) & (d < D)
        A += _dot(
            _load(r_NTD, at, i * D + d, inside, D), tl.trans(_load(x_NTD, at, i * D + d, inside, D)), DOT
        )
    dL *= A
    dbefore, dafter = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    for part in tl.range(0, splits):
        found = products_pNT + (program * 0 + part) * 2 * count * T + at + t
        dbefore += tl.load(found, mask=t < left, other=0.0)
        dafter += tl.load(found + (program * 0 + count) * T, mask=t < left, other=0.0)
    earlier = tl.load(gate_NT + at + t - 1, mask=(t <= left) & (t > 0), other=1.0)
    L, _, after = _products(tl.load(gate_NT + at + t, mask=t < left, other=1.0), C)
    strictly = tl.cumprod(tl.where(i > j + 1, earlier[:, None], 1.0), 0)
    strictly = tl.where(i > j, strictly, 0.0)  # Π_{j<m<l}
    dgate = tl.sum(_dot(tl.trans(L), dL, DOT) * strictly, 1) + after * tl.sum(strictly * dafter[None, :], 1)
    dgate += tl.cumprod(earlier, 0) * tl.sum(L * dbefore[:, None], 0)
    tl.store(dgate_NT + at + t, dgate, mask=t < left)
