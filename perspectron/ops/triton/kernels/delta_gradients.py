"""The gradients of the delta rules' chunks, all at once, in Triton: from the states before the chunks, the adjoints
after them, and U and its gradient (`perspectron.ops.triton.kernels.delta`, whose names and shapes these are).

With R = z − Y_e S, D the rows of −dR and do, and W those of U and v: dA = D Wᵀ, dY = D Sᵀ, dX = W Eᵀ, and dP the row
sums of S ⊙ E. The gradient of a gate is a sum over the pairs of what is written before it and read after it, with the
gates between them but its own.
"""

import triton
import triton.language as tl

from perspectron.ops.triton.kernels.delta import C, _between, _dot, _ends, _gates, _keep, _row, _tile


@triton.jit
def _part(x, place, r, d, K, V):
    """Rows r and columns d of a state; 0 outside."""
    return tl.load(
        x + place * K * V + r[:, None] * V + d[None, :], mask=(r < K)[:, None] & (d < V)[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["T", "h"])
def pairs(
    inverse, A_qv, A_ev, Xv, v, U, dU, E_NnKV, do, dR, dv, dA_qu, dA_qv, dA_eu, dA_ev,
    T, h, K, V,
    FIRST: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradients of the A [N,n,C,C] and of v, of one chunk, and dR = (I + A_e)⁻ᵀ dU, which may stand in dU's memory
    or, unless FIRST, in dv's."""
    chunks = tl.cdiv(T, C)
    n, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    i = tl.arange(0, C)
    t = chunk * C + i
    live, at = t < T, n // h * T * h + n % h + t * h
    X = tl.trans(_tile(inverse, at, i, live, C))
    qu, qv = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    eu, ev = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    for start in tl.range(0, V, BV):
        d = start + tl.arange(0, BV)
        dr, do_ = _dot(X, _tile(dU, at, d, live, V), DOT), _tile(do, at, d, live, V)
        u = tl.trans(_tile(U, at, d, live, V))
        _keep(dR, dr, at, d, live, V)
        qu += _dot(do_, u, DOT)
        eu -= _dot(dr, u, DOT)
        if FIRST:
            z = tl.trans(_tile(v, at, d, live, V))
            qv += _dot(do_, z, DOT)
            ev -= _dot(dr, z, DOT)
            dz = _dot(tl.trans(_tile(A_qv, at, i, live, C)), do_, DOT)
            dz -= _dot(tl.trans(_tile(A_ev, at, i, live, C)), dr, DOT)
            for some in tl.range(0, KP, BK):
                r = some + tl.arange(0, BK)
                dz += _dot(_tile(Xv, at, r, live, K), _part(E_NnKV, n * chunks + chunk, r, d, K, V), DOT)
            _keep(dv, dz, at, d, live, V)
    square = (n * chunks + chunk) * C * C + i[:, None] * C + i[None, :]
    seen = i[:, None] >= i[None, :]
    tl.store(dA_qu + square, tl.where(seen, qu, 0.0))
    if FIRST:
        tl.store(dA_qv + square, tl.where(seen, qv, 0.0))
    seen = i[:, None] > i[None, :]
    tl.store(dA_eu + square, tl.where(seen, eu, 0.0))
    if FIRST:
        tl.store(dA_ev + square, tl.where(seen, ev, 0.0))


@triton.jit(do_not_specialize=["T", "h"])
def inputs(
    q, e, w, k, v, gate, S_NnKV, E_NnKV, do, dR, U, dA_qu, dA_qv, dA_eu, dA_ev, dq, de, dw, dk, dgate, dP, scale,
    sign, T, h, K, V,
    WIDE: tl.constexpr, FIRST: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradients of q, e, the keys and the gates, of one chunk. WIDE: instead of Y, the X and P, for `channels`."""
    chunks = tl.cdiv(T, C)
    n, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    place, i = n * chunks + chunk, tl.arange(0, C)
    t = chunk * C + i
    live, there, first = t < T, (t + 1 < T) & (i + 1 < C), n // h * T * h + n % h
    at = first + t * h
    if not WIDE:
        G, skipped = _between(gate, at, i, live, h, 0), _between(gate, at, i, live, h, 1)
        skip, full, rest = _ends(gate, at, i, i, live, there, h, K, False)
        between, read = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
        written, kept = tl.zeros([C], dtype=tl.float32), 0.0
    for start in tl.range(0, KP, BK):
        c = start + tl.arange(0, BK)
        y, z = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
        xu, xv = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
        p = tl.zeros([BK], dtype=tl.float32)
        for some in tl.range(0, V, BV):
            d = some + tl.arange(0, BV)
            S, E = _part(S_NnKV, place, c, d, K, V), _part(E_NnKV, place, c, d, K, V)
            p += tl.sum(S * E, 1)
            S, E = tl.trans(S), tl.trans(E)
            y += _dot(_tile(do, at, d, live, V), S, DOT)
            z -= _dot(_tile(dR, at, d, live, V), S, DOT)
            xu += _dot(_tile(U, at, d, live, V), E, DOT)
            if FIRST:
                xv += _dot(_tile(v, at, d, live, V), E, DOT)
        if WIDE:
            tl.store(dP + place * K + c, p, mask=c < K)
            _keep(dq, y, at, c, live, K)
            _keep(de, z, at, c, live, K)
            _keep(dw, xu, at, c, live, K)
            if FIRST:
                _keep(dk, xv, at, c, live, K)
        else:
            q_, e_, w_ = (
                _tile(q, at, c, live, K) * scale,
                _tile(e, at, c, live, K) * sign,
                _tile(w, at, c, live, K),
            )
            read += tl.sum(y * q_ + z * e_, 1)
            written += tl.sum(xu * w_, 1)
            kept += tl.sum(p, 0)
            square = place * C * C + i[:, None] * C + i[None, :]
            qu, eu = tl.load(dA_qu + square), tl.load(dA_eu + square)  # here, for fewer registers
            between += qu * _dot(q_, tl.trans(w_), DOT) + eu * _dot(e_, tl.trans(w_), DOT)
            _keep(dq, (y * full[:, None] + _dot(qu * G, w_, DOT)) * scale, at, c, live, K)
            _keep(de, (z * full[:, None] + _dot(eu * G, w_, DOT)) * sign, at, c, live, K)
            xu = xu * rest[:, None] + _dot(tl.trans(qu * G), q_, DOT) + _dot(tl.trans(eu * G), e_, DOT)
            _keep(dw, xu, at, c, live, K)
    if not WIDE:
        dg = tl.sum(G * (_dot(between, tl.trans(skipped), DOT) + read[:, None] * skip[None, :]), 0)
        dg += rest * (tl.sum(skipped * written[None, :], 1) + skip * kept)
        tl.store(dgate + at, dg, mask=live)


@triton.jit(do_not_specialize=["T", "h", "K"])
def channels(
    q, e, w, k, gate, dA_qu, dA_qv, dA_eu, dA_ev, dq, de, dw, dk, dgate, dP, scale, sign,
    T, h, K,
    FIRST: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradients where each key channel has a gate, of a block of channels; before, dq, de and the keys' gradients
    hold those of Y and the X. Forwards, y and z become what q and e would read of all that was written so far;
    backwards, xu and xv become what all later tokens read of the keys. K is not specialized, so that no load takes
    several channels, and each thread of its one warp has a channel."""
    chunks = tl.cdiv(T, C)
    n, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    i, c = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    live, first = chunk * C + i < T, n // h * T * h + n % h
    at = first + (chunk * C + i) * h
    square = (n * chunks + chunk) * C * C
    q_, e_ = _tile(q, at, c, live, K) * scale, _tile(e, at, c, live, K) * sign
    y, z = _tile(dq, at, c, live, K), _tile(de, at, c, live, K)
    p = tl.load(dP + (n * chunks + chunk) * K + c, mask=c < K, other=0.0)
    row, own = i[:, None], _gates(gate, at, c, live, K)
    before = _gates(gate, at - h, c, live & (i > 0), K)
    for s in tl.range(0, C):
        one, inside, place = (
            (first + (chunk * C + s) * h) * K,
            (c < K) & (c * 0 + chunk * C + s < T),
            row == s,
        )
        column = square + i * C + s
        g = _row(gate, one, c, inside, 1.0)
        reach = tl.cumprod(tl.where(row > s, own, 1.0), 0)
        dg = tl.sum(tl.where(row >= s, reach * q_ * y, 0.0), 0)
        if FIRST:
            tl.store(de + one + c, tl.sum(tl.where(place, z, 0.0), 0) * sign, mask=inside)
            short = tl.cumprod(tl.where(row > s + 1, before, 1.0), 0)
            dg += tl.sum(tl.where(row > s, short * e_ * z, 0.0), 0)
        else:
            dg += tl.sum(tl.where(row >= s, reach * e_ * z, 0.0), 0)
        dg += tl.sum(tl.where(row == C - 1, reach, 0.0), 0) * p
        tl.store(dgate + one + c, dg, mask=inside)
        w_ = _row(w, one, c, inside, 0.0)
        y = g[None, :] * y + tl.load(dA_qu + column)[:, None] * w_[None, :]
        z = g[None, :] * z + tl.load(dA_eu + column)[:, None] * w_[None, :]
        p = g * p + _row(dw, one, c, inside, 0.0) * w_
        if FIRST:
            w_ = _row(k, one, c, inside, 0.0)
            y += tl.load(dA_qv + column)[:, None] * w_[None, :]
            z += tl.load(dA_ev + column)[:, None] * w_[None, :]
            p += _row(dk, one, c, inside, 0.0) * w_
        else:
            tl.store(de + one + c, tl.sum(tl.where(place, z, 0.0), 0) * sign, mask=inside)
        tl.store(dq + one + c, tl.sum(tl.where(place, y, 0.0), 0) * scale, mask=inside)
    xu = _tile(dw, at, c, live, K)
    xv = _tile(dk, at, c, live, K) if FIRST else xu
    for back in tl.range(0, C):
        s = C - 1 - back
        one, inside, place = (
            (first + (chunk * C + s) * h) * K,
            (c < K) & (c * 0 + chunk * C + s < T),
            row == s,
        )
        column = square + s * C + i
        g = _row(gate, one, c, inside, 1.0)[None, :]
        r = _row(q, one, c, inside, 0.0)[None, :] * scale
        xu += tl.load(dA_qu + column)[:, None] * r
        if FIRST:
            xv += tl.load(dA_qv + column)[:, None] * r
        r = _row(e, one, c, inside, 0.0)[None, :] * sign
        if not FIRST:
            xu += tl.load(dA_eu + column)[:, None] * r
        tl.store(dw + one + c, tl.sum(tl.where(place, xu, 0.0), 0), mask=inside)
        xu *= g
        if FIRST:
            tl.store(dk + one + c, tl.sum(tl.where(place, xv, 0.0), 0), mask=inside)
            xv *= g
            xu += tl.load(dA_eu + column)[:, None] * r
            xv += tl.load(dA_ev + column)[:, None] * r
