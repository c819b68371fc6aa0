"""The delta rules with gates, in Triton: what `perspectron.ops.delta` computes by chunks, with the same formulas.

    u_t = z_t − S_{t-1}ᵀ e_t,  S_t = diag(α_t) S_{t-1} + w_t u_tᵀ [+ k_t v_tᵀ],  o_t = S_tᵀ q_t

Decay first: z = v, w = k, and e reads after the gate. FIRST, which reads first: z = 0, the last term is
there, and each row has a gate.
With G_ij the product of the gates after j up to i, a chunk of C tokens is

    A_q = q wᵀ ⊙ G,  A_e = e wᵀ ⊙ G below the diagonal,  Y the rows of q and e times the gates from the chunk's start,
    X the keys times the gates to its end,  U = (I + A_e)⁻¹ (z − Y_e S),  O = Y_q S + A_q U,  S' = P S + Xᵀ U.

What does not depend on the state is made for all chunks at once by `prepare`, which stores (I + A_e)⁻¹ times z and Y_e;
`forward` has some columns of one memory in registers and goes through its chunks. Backwards, `backward` does so with
the adjoint E; the module `delta_gradients` then takes all chunks at once. Only products of gates are
formed, no logarithm or quotient, so any gate in [0, 1] is exact, 0 and 1 included. The inverse is by substitution: its
powers would cancel where keys repeat.

Shapes: N memories, T time, C tokens of one chunk, K rows of a memory (at most 128), V columns, A gate width (K or 1), n
chunks; KP, BK and BV rows and columns of a program. Row t of memory n is at (n // h · T + t) h + n mod h: h is 1, or
the number of heads where those of a token stand side by side. DOT is the precision of products.
"""

from typing import NamedTuple

import triton
import triton.language as tl

WIDEST = 128
"""Rows of a memory that fit in registers."""


C = tl.constexpr(16)
"""Tokens of a chunk: with more, the operands of exact products would not fit in registers."""


class Tile(NamedTuple):
    """rows: in registers. columns: of a walk through chunks. some: rows and columns at a time within a chunk. warps."""

    rows: int
    columns: int
    some: int
    warps: int


def tile(K: int) -> Tile:
    """The tile for memories of K rows (`benchmarks/triton_kernels.py` compiles them)."""
    rows = max(16, triton.next_power_of_2(K))
    return Tile(rows, 32, min(rows, 32), 4)


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    return tl.dot(a, b, input_precision=DOT)


@triton.jit
def _tile(x, at, column, live, width):
    """Rows `at` of x, 0 outside."""
    inside = live[:, None] & (column < width)[None, :]
    return tl.load(x + at[:, None] * width + column[None, :], mask=inside, other=0.0)


@triton.jit
def _keep(x, value, at, column, live, width):
    inside = live[:, None] & (column < width)[None, :]
    tl.store(x + at[:, None] * width + column[None, :], value, mask=inside)


@triton.jit
def _row(x, at, column, inside, other):
    return tl.load(x + at + column, mask=inside, other=other)


@triton.jit
def _gates(gate, at, column, live, width):
    """Gates of rows `at`, 1 outside."""
    inside = live[:, None] & (column < width)[None, :]
    return tl.load(gate + at[:, None] * width + column[None, :], mask=inside, other=1.0)


@triton.jit
def _between(gate, at, i, live, h, SKIP: tl.constexpr):
    """The products of one gate a token, after j up to i [C,C]; SKIP: without i's own, below the diagonal."""
    g = tl.load(gate + at - SKIP * h, mask=live & (i >= SKIP), other=1.0)
    factors = tl.where(i[:, None] > i[None, :] + SKIP, g[:, None], 1.0)
    return tl.where(i[:, None] >= i[None, :] + SKIP, tl.cumprod(factors, 0), 0.0)


@triton.jit
def _ends(gate, at, i, column, live, there, h, K, WIDE: tl.constexpr):
    """The products of gates from the chunk's start, without and with each token's own, and to its end, without it:
    [C,K], or [C] of one gate a token (Triton 3.6 cannot compile them as [C,1])."""
    if WIDE:
        before = _gates(gate, at - h, column, live & (i > 0), K)
        after = _gates(gate, at + h, column, there, K)
        own = _gates(gate, at, column, live, K)
    else:
        before = tl.load(gate + at - h, mask=live & (i > 0), other=1.0)
        after = tl.load(gate + at + h, mask=there, other=1.0)
        own = tl.load(gate + at, mask=live, other=1.0)
    return tl.cumprod(before, 0), tl.cumprod(own, 0), tl.cumprod(after, 0, reverse=True)


@triton.jit
def _inverse(A, i):
    """(I + A)⁻¹, with A taken below its diagonal only."""
    row = i[:, None]
    one = tl.where(row == i[None, :], 1.0, 0.0)
    X = one
    for s in tl.static_range(1, C):
        a = tl.sum(tl.where(row == s, A, 0.0), 0)
        X = tl.where(row == s, one - tl.sum(a[:, None] * X, 0)[None, :], X)
    return X


@triton.jit(do_not_specialize=["T", "h"])
def prepare(
    q, e, w, k, v, gate, inverse, A_qu, A_qv, A_ev, Z, Y, Xu, Xv, U, P, scale, sign,
    T, h, K, V,
    WIDE: tl.constexpr, FIRST: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """The parts of one chunk that do not depend on the state: the inverse and the A [·,C], Z = (I + A_e)⁻¹ Y_e, Y of q
    and the X [·,K], U [·,V] without the state's part, and P [N,n,A]. q is multiplied by `scale`, e by `sign`."""
    chunks = tl.cdiv(T, C)
    n, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    i = tl.arange(0, C)
    t = chunk * C + i
    live, there, first = t < T, (t + 1 < T) & (i + 1 < C), n // h * T * h + n % h
    at = first + t * h
    qu, qv = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    eu, ev = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for start in tl.range(0, KP, BK):
        c = start + tl.arange(0, BK)
        if WIDE:  # A, transposed
            u, z = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
            for s in tl.range(0, C):
                one, inside = (first + (chunk * C + s) * h) * K, (c < K) & (c * 0 + chunk * C + s < T)
                here, place = i[None, :] == s, i[:, None] == s
                q_, e_ = _row(q, one, c, inside, 0.0)[None, :], _row(e, one, c, inside, 0.0)[None, :]
                g = _row(gate, one, c, inside, 1.0)[None, :]
                if FIRST:
                    eu = tl.where(here, eu + tl.sum(u * e_, 1)[:, None], eu)
                    ev = tl.where(here, ev + tl.sum(z * e_, 1)[:, None], ev)
                    z = tl.where(place, _row(k, one, c, inside, 0.0)[None, :], g * z)
                    qv = tl.where(here, qv + tl.sum(z * q_, 1)[:, None], qv)
                    u *= g
                else:
                    u *= g
                    eu = tl.where(here, eu + tl.sum(u * e_, 1)[:, None], eu)
                u = tl.where(place, _row(w, one, c, inside, 0.0)[None, :], u)
                qu = tl.where(here, qu + tl.sum(u * q_, 1)[:, None], qu)
        else:
            q_, e_ = _tile(q, at, c, live, K), _tile(e, at, c, live, K)
            w_ = tl.trans(_tile(w, at, c, live, K))
            qu += _dot(q_, w_, DOT)
            eu += _dot(e_, w_, DOT)
    if WIDE:
        qu, qv, eu, ev = tl.trans(qu), tl.trans(qv), tl.trans(eu), tl.trans(ev)
    else:
        G = _between(gate, at, i, live, h, 0)
        qu, eu = qu * G, tl.where(i[:, None] > i[None, :], eu * G, 0.0)
    X = _inverse(eu * sign, i)
    solved = X
    _keep(inverse, X, at, i, live, C)
    _keep(A_qu, qu * scale, at, i, live, C)
    if FIRST:
        ev *= sign
        _keep(A_qv, qv * scale, at, i, live, C)
        _keep(A_ev, ev, at, i, live, C)
        solved = -_dot(X, ev, DOT)
    for start in tl.range(0, V, BV):
        d = start + tl.arange(0, BV)
        v_ = _tile(v, at, d, live, V)
        _keep(U, _dot(solved, v_, DOT), at, d, live, V)
    for start in tl.range(0, KP, BK):
        c = start + tl.arange(0, BK)
        if WIDE:
            skip, full, rest = _ends(gate, at, i, c, live, there, h, K, True)
            tl.store(
                P + (n * chunks + chunk) * K + c,
                tl.sum(tl.where(i[:, None] == C - 1, full, 0.0), 0),
                mask=c < K,
            )
        else:
            skip, full, rest = _ends(gate, at, i, c, live, there, h, K, False)
            tl.store(P + n * chunks + chunk, tl.sum(tl.where(i == C - 1, full, 0.0), 0))
            full, rest = full[:, None], rest[:, None]
        y = _tile(e, at, c, live, K) * sign
        if FIRST:
            y *= skip
        else:
            y *= full
        _keep(Z, _dot(X, y, DOT), at, c, live, K)
        _keep(Y, _tile(q, at, c, live, K) * full * scale, at, c, live, K)
        _keep(Xu, _tile(w, at, c, live, K) * rest, at, c, live, K)
        if FIRST:
            _keep(Xv, _tile(k, at, c, live, K) * rest, at, c, live, K)


@triton.jit
def _whole(P, place, r, K, WIDE: tl.constexpr):
    """The product of a chunk's gates, for each row."""
    return tl.load(P + place * K + r, mask=r < K, other=0.0)[:, None] if WIDE else tl.load(P + place)


@triton.jit(do_not_specialize=["T", "h"])
def forward(
    Z, Y, Xu, Xv, U, v, A_qu, A_qv, P, first_NKV, o, last_NKV, border_NnKV,
    T, h, K, V,
    WIDE: tl.constexpr, FIRST: tl.constexpr, KEEP: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of one memory, for a block of columns. KEEP: store the state before each chunk, and the
    whole U; o and the last state are not written. `last` may be `first`."""
    n, i, r = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, KP)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    inside, place = (r < K)[:, None] & (d < V)[None, :], r[:, None] * V + d[None, :]
    chunks = tl.cdiv(T, C)
    S = tl.load(first_NKV + n * K * V + place, mask=inside, other=0.0)
    for chunk in tl.range(0, chunks, num_stages=2):
        t = chunk * C + i
        live, at = t < T, n // h * T * h + n % h + t * h
        u = _tile(U, at, d, live, V) - _dot(_tile(Z, at, r, live, K), S, DOT)
        if KEEP:
            tl.store(border_NnKV + (n * chunks + chunk) * K * V + place, S, mask=inside)
            _keep(U, u, at, d, live, V)
        else:
            y = _dot(_tile(Y, at, r, live, K), S, DOT) + _dot(_tile(A_qu, at, i, live, C), u, DOT)
            if FIRST:
                y += _dot(_tile(A_qv, at, i, live, C), _tile(v, at, d, live, V), DOT)
            _keep(o, y, at, d, live, V)
        S = _whole(P, n * chunks + chunk, r, K, WIDE) * S + _dot(tl.trans(_tile(Xu, at, r, live, K)), u, DOT)
        if FIRST:
            S += _dot(tl.trans(_tile(Xv, at, r, live, K)), _tile(v, at, d, live, V), DOT)
    if not KEEP:
        tl.store(last_NKV + n * K * V + place, S, mask=inside)


@triton.jit(do_not_specialize=["T", "h"])
def backward(
    Z, Y, Xu, A_qu, P, do, dlast_NKV, dU, border_NnKV, dfirst_NKV,
    T, h, K, V,
    WIDE: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Go through the chunks from the last to the first, for a block of columns: write the adjoint after each, and the
    gradient of U."""
    n, i, r = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, KP)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    inside, place = (r < K)[:, None] & (d < V)[None, :], r[:, None] * V + d[None, :]
    chunks = tl.cdiv(T, C)
    E = tl.load(dlast_NKV + n * K * V + place, mask=inside, other=0.0)
    for back in tl.range(0, chunks, num_stages=2):
        chunk = chunks - 1 - back
        t = chunk * C + i
        live, at = t < T, n // h * T * h + n % h + t * h
        tl.store(border_NnKV + (n * chunks + chunk) * K * V + place, E, mask=inside)
        do_ = _tile(do, at, d, live, V)
        du = _dot(tl.trans(_tile(A_qu, at, i, live, C)), do_, DOT) + _dot(_tile(Xu, at, r, live, K), E, DOT)
        _keep(dU, du, at, d, live, V)
        E = _whole(P, n * chunks + chunk, r, K, WIDE) * E + _dot(tl.trans(_tile(Y, at, r, live, K)), do_, DOT)
        E -= _dot(tl.trans(_tile(Z, at, r, live, K)), du, DOT)
    tl.store(dfirst_NKV + n * K * V + place, E, mask=inside)
