"""The delta rule with gates: a matrix memory that is corrected where it is written, instead of added to.

    scan, decay first:       u_t = v_t − (diag(α_t) S_{t-1})ᵀ e_t;  S_t = diag(α_t) S_{t-1} + k_t u_tᵀ
    scan_rwkv7, read first:  u_t = S_{t-1}ᵀ a_t;  S_t = diag(α_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ
    both:                    o_t = scale · S_tᵀ q_t

With e = β k and β v for v, `scan` is the gated delta rule (arXiv 2412.06464), with a gate for each key channel that of
Kimi (arXiv 2510.26692); `scan_rwkv7` is the recurrence of RWKV-7 (arXiv 2503.14456). The gate α_t has an entry for each
key channel or one for the whole head.

The fast path takes a chunk at once: what each token reads of those before it is a sum over products of gates
(`perspectron.ops.products`: any gate in [0, 1] is exact, 0 and 1 included), and the corrections U of all its tokens
solve one triangular system. Since reading after the decay is reading α_t ⊙ e_t before it, one chunk serves both
orders. A gate of 0 forgets everything before it (a new document); a gate of 1, with all else 0, leaves the state
untouched (padding).

Shapes: B batch, H heads, T time, L tokens of one chunk, K key width, A gate width (K or 1), V value width. Rows of the
state are key channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from perspectron.ops import dispatch, memory
from perspectron.ops.fused import fits, plain
from perspectron.ops.products import Saved, within, within_backward, within_tangent
from perspectron.ops.sequences import packed
from perspectron.ops.tree import Recurrence
from perspectron.ops.triton import delta_scan as on_gpu

CHUNK = 32  # on a CPU, in training, a fifth faster than 64
BACKENDS = ("auto", "naive", "torch", "triton")
Result = tuple[Tensor, Tensor]


@packed("BHTV", "BHKV")
@dispatch.in_full_precision
def scan(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    e_BHTK: Tensor,
    v_BHTV: Tensor,
    alpha_BHTA: Tensor,
    state_BHKV: Tensor | None = None,
    *,
    scale: float = 1.0,
    backend: str = "auto",
    consume_state: bool = False,
    checked: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Run the recurrence that decays first, over T tokens from a given state: (outputs [B,H,T,V], final state
    [B,H,K,V]).

    Any T, also 0 and 1; gates in [0, 1]. I − k eᵀ must not expand: keys of length 1 and e = β k with β in [0, 2].
    Computes and returns in float32 or, if any input is, in float64; autocast does not reach inside. Differentiable once
    in every input, in reverse and in forward mode. `backend`: "naive" is the plain step loop, "torch" the chunks,
    "triton" the kernels for float32 on a GPU, for K ≤ 128 and in reverse mode alone; "auto" the chunks, those kernels
    (once `perspectron selftest --device cuda` has passed there), the native kernel (`perspectron.ops.memory`) on a CPU
    in float32, or, for one token where gradients are off, the step.

    `consume_state`: the caller gives `state_BHKV` up, and the step writes into it instead of into a copy; the numbers
    are the same. Only where gradients are off.
    `checked`: gates outside [0, 1], and NaN, are a ValueError. A mixer, whose gates are sigmoids, leaves the check out:
    it would cost every single token a pass over its gates.
    `cu_seqlens`: several sequences in one row (`perspectron.ops.sequences`); states then have a row for each.
    Raises BackendError for an unknown backend or kernels that cannot run, ValueError for shapes that do not fit and for
    a state to be consumed while gradients are on.

        >>> from perspectron.ops import delta
        >>> q, k = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
        >>> v, alpha = torch.rand(1, 2, 5, 3), torch.rand(1, 2, 5, 1)
        >>> k = k / k.norm(dim=-1, keepdim=True)
        >>> outputs, state = delta.scan(q, k, 0.5 * k, 0.5 * v, alpha)
        >>> tuple(outputs.shape), tuple(state.shape)
        ((1, 2, 5, 3), (1, 2, 4, 3))
    """
    _check(backend, consume_state, checked, "e", (q_BHTK, k_BHTK, v_BHTV, e_BHTK, alpha_BHTA), state_BHKV)
    q, k, v, e, alpha, state = _prepared((q_BHTK, k_BHTK, v_BHTV, e_BHTK, alpha_BHTA), state_BHKV)
    if v.numel() == 0:
        return v, dispatch.owned(state, consume_state)
    if _on_gpu(backend, q, k, v, e, alpha, state):
        return on_gpu.run(q, e, k, None, v, alpha, _given(state, consume_state), scale, 1.0)
    q = q * scale
    if backend == "naive":
        return naive(q, k, e, v, alpha, state)
    if _one(backend, v):
        return _step_(q, k, e, v, alpha, dispatch.owned(state, consume_state))
    if backend == "auto" and (fits(q, k, v, e, alpha, state) or plain(q, k, v, e, alpha, state)):
        return memory.scan(q, k, v, alpha * e, None, alpha, state)
    return DECAY_FIRST.run(q, k, v, alpha * e, alpha, state)


@packed("BHTV", "BHKV")
@dispatch.in_full_precision
def scan_rwkv7(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    a_BHTK: Tensor,
    b_BHTK: Tensor,
    alpha_BHTA: Tensor,
    state_BHKV: Tensor | None = None,
    *,
    scale: float = 1.0,
    backend: str = "auto",
    consume_state: bool = False,
    checked: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Run the recurrence that reads first; all else is as in `scan`. diag(α) + b aᵀ must not expand: in RWKV-7
    a = −κ and b = κ ⊙ η with κ of length 1 and η in [0, 1].

        >>> from perspectron.ops import delta
        >>> q, k = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
        >>> v, alpha = torch.rand(1, 2, 5, 3), torch.rand(1, 2, 5, 4)
        >>> k = k / k.norm(dim=-1, keepdim=True)
        >>> tuple(delta.scan_rwkv7(q, k, v, -k, 0.5 * k, alpha)[0].shape)
        (1, 2, 5, 3)
    """
    inputs = (q_BHTK, k_BHTK, v_BHTV, a_BHTK, b_BHTK, alpha_BHTA)
    _check(backend, consume_state, checked, "a, b", inputs, state_BHKV)
    q, k, v, a, b, alpha, state = _prepared(inputs, state_BHKV)
    if v.numel() == 0:
        return v, dispatch.owned(state, consume_state)
    if _on_gpu(backend, q, k, v, a, b, alpha, state):
        return on_gpu.run(q, a, b, k, v, alpha, _given(state, consume_state), scale, -1.0)
    q = q * scale
    if backend == "naive":
        return reference_rwkv7(q, k, v, a, b, alpha, state)
    if _one(backend, v):
        return _step_rwkv7_(q, k, v, a, b, alpha, dispatch.owned(state, consume_state))
    if backend == "auto" and (fits(q, k, v, a, b, alpha, state) or plain(q, k, v, a, b, alpha, state)):
        return memory.scan(q, k, v, -a, b, alpha, state)
    return READ_FIRST.run(q, k, v, -a, b, alpha, state)


def _check(
    backend: str,
    consume_state: bool,
    checked: bool,
    names: str,
    inputs: tuple[Tensor, ...],
    state: Tensor | None,
) -> None:
    """BackendError and ValueError as `scan` says; inputs are q, k, v, those with `names`, and the gate."""
    dispatch.known(backend, BACKENDS)
    dispatch.check_consumed(consume_state)
    if checked:
        dispatch.check_gates(inputs[-1])
    q, k, v, *others, gate = (tuple(x.shape) for x in inputs)
    B, H, T, V = v
    K = q[-1]
    if any(x != (B, H, T, K) for x in (q, k, *others)) or gate not in ((B, H, T, K), (B, H, T, 1)):
        shapes = ", ".join(map(str, (q, k, v, *others, gate)))
        wanted = "[B,H,T,K], [B,H,T,K], [B,H,T,V], " + "[B,H,T,K], " * len(others) + "[B,H,T,K|1]"
        raise ValueError(f"q, k, v, {names}, alpha have shapes {shapes}; want {wanted}")
    if state is not None and state.shape != (B, H, K, V):
        raise ValueError(f"state has shape {tuple(state.shape)}, want {(B, H, K, V)}")


def _prepared(inputs: tuple[Tensor, ...], state: Tensor | None) -> list[Tensor]:
    """The inputs, and the state, zeros if there is none, in the dtype to compute in."""
    q, _, v, *_ = inputs
    dtype = dispatch.widest(*inputs, *([] if state is None else [state]))
    q, *others = (x.to(dtype) for x in inputs)
    state = q.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1]) if state is None else state.to(dtype)
    return [q, *others, state]


def _given(state: Tensor, consume_state: bool) -> Tensor:
    """The state for kernels that write into it where gradients are off."""
    return dispatch.owned(state, consume_state) if dispatch.gradients_off() else state


def _on_gpu(backend: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> bool:
    """True if Triton's kernels are to run: not, by `auto`, for one token without gradients."""
    one = backend == "auto" and v.shape[2] == 1 and dispatch.gradients_off()
    return not one and on_gpu.wanted(backend, q, k, v, *others)


def _one(backend: str, v: Tensor) -> bool:
    """True if `auto` takes the step for one token; logs what `auto` runs."""
    if backend == "auto":
        dispatch.log_once(
            "delta.scan: auto runs the torch chunks on %s, the step for one token, the native kernel in float32",
            v.device.type,
        )
    return backend == "auto" and v.shape[2] == 1 and dispatch.gradients_off()


# ---------------------------------------------------------------- token by token


def naive(q: Tensor, k: Tensor, e: Tensor, v: Tensor, alpha: Tensor, state_BHKV: Tensor) -> Result:
    """The plain loop of `scan`, unscaled; the oracle of every other path."""
    return _loop(_step, (q, k, e, v, alpha), v, state_BHKV)


def reference_rwkv7(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, alpha: Tensor, state_BHKV: Tensor
) -> Result:
    """The plain loop of `scan_rwkv7`, unscaled; the oracle of every other path."""
    return _loop(_step_rwkv7, (q, k, v, a, b, alpha), v, state_BHKV)


def _loop(step: Callable[..., Result], inputs: tuple[Tensor, ...], v: Tensor, state_BHKV: Tensor) -> Result:
    outputs = [v[:, :, :0]]
    for t in range(v.shape[2]):
        o, state_BHKV = step(*(x[:, :, t : t + 1] for x in inputs), state_BHKV)
        outputs.append(o)
    return torch.cat(outputs, 2), state_BHKV


def _step(q: Tensor, k: Tensor, e: Tensor, v: Tensor, alpha: Tensor, S: Tensor) -> Result:
    """One token, by the equations above."""
    S = alpha.mT * S
    S = S + k.mT * (v - e @ S)
    return q @ S, S


def _step_rwkv7(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, alpha: Tensor, S: Tensor) -> Result:
    S = alpha.mT * S + b.mT * (a @ S) + k.mT * v
    return q @ S, S


def _step_(q: Tensor, k: Tensor, e: Tensor, v: Tensor, alpha: Tensor, S: Tensor) -> Result:
    """One token; writes into the state."""
    S.mul_(alpha.mT)
    S.addcmul_(k.mT, v - _read(e, S))
    return _read(q, S), S


def _step_rwkv7_(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, alpha: Tensor, S: Tensor) -> Result:
    u = _read(a, S)
    S.mul_(alpha.mT).addcmul_(b.mT, u).addcmul_(k.mT, v)
    return _read(q, S), S


def _read(q_BH1K: Tensor, S: Tensor) -> Tensor:
    """q S, summed in the same order for any number of rows, which a batched product does not do."""
    return (q_BH1K.mT * S).sum(2, keepdim=True)


# ---------------------------------------------------------------- chunk by chunk
#
# Inputs are q, k, v, e, then b where the order reads first, and the gate α:
#   u_t = z_t − S_{t-1}ᵀ e_t,  S_t = diag(α_t) S_{t-1} + k_t u_tᵀ             with z = v,
#   u_t = z_t − S_{t-1}ᵀ e_t,  S_t = diag(α_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ  with z = 0.
# The queries of a token are e and q, its keys J = 1 or 2: k, or b and k; beside them stand the values W: U, or U and V.
# With (A, Y, X, P) from `within`, and A_eu what e sees of the keys of U:
#   (I + A_eu) U = z − Y_e S − A_ev V,  O = Y_q S + A_q W,  S' = P S + Xᵀ W.


def _rows(*x: Tensor) -> Tensor:
    """Several rows for each token, those of a token side by side [B,H,ML,·]."""
    return torch.stack(x, 3).flatten(2, 3) if len(x) > 1 else x[0]


def _of(x: Tensor, L: int, i: int) -> Tensor:
    """The i-th row of each of L tokens [B,H,L,·]; a view."""
    return x.unflatten(2, (L, -1))[:, :, :, i]


def _solve(A_eu: Tensor, rhs: Tensor, *, transposed: bool = False) -> Tensor:
    """(I + A)⁻¹ rhs, or (I + A)⁻ᵀ rhs, with A taken below its diagonal only."""
    A = A_eu.mT if transposed else A_eu
    return torch.linalg.solve_triangular(A, rhs, upper=transposed, unitriangular=True)


def _corrected(A: Tensor, Y: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A_eu, W, Y_q S)."""
    L, J = v.shape[2], A.shape[3] // v.shape[2]
    read, A_e = Y @ state, _of(A, L, 0).unflatten(3, (L, J))
    wanted = v if J == 1 else -(A_e[..., 1] @ v)
    U = _solve(A_e[..., 0], wanted - _of(read, L, 0))
    return A_e[..., 0], U if J == 1 else _rows(U, v), _of(read, L, 1)


def _chunk(q: Tensor, k: Tensor, v: Tensor, e: Tensor, *b_gate_state: Tensor) -> Result:
    """Outputs and the next state."""
    *b, gate, state = b_gate_state
    A, Y, X, P = within(_rows(e, q), _rows(*b, k), gate)
    _, W, read = _corrected(A, Y, v, state)
    return read + _of(A, v.shape[2], 1) @ W, torch.addcmul(X.mT @ W, P.mT, state)


def _chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, *b_gate_do_state_dstate: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the inputs and the state before the chunk; the forward pass is computed again."""
    *b, gate, do, state, dstate = b_gate_do_state_dstate
    L, J, saved = v.shape[2], len(b) + 1, Saved()
    y, x = _rows(e, q), _rows(*b, k)
    A, Y, X, P = within(y, x, gate, saved)
    A_eu, W, _ = _corrected(A, Y, v, state)
    dU = _of(X, L, 0) @ dstate + _of(A, L, 1).unflatten(3, (L, J))[..., 0].mT @ do
    dR = _solve(A_eu, dU, transposed=True)
    D = _rows(-dR, do)
    dv = dR if J == 1 else A.unflatten(3, (L, J))[..., 1].mT @ D + _of(X, L, 1) @ dstate
    dP = (dstate * state).sum((-2, -1) if gate.shape[-1] == 1 else -1, keepdim=True).mT
    dA, dY, dX = D @ W.mT, D @ state.mT, W @ dstate.mT
    dstate = torch.addcmul(Y.mT @ D, P.mT, dstate)
    dy, dx, dgate = within_backward(y, x, gate, saved, dA, dY, dX, dP)
    db = [_of(dx, L, 0)] if b else []
    return _of(dy, L, 1), _of(dx, L, J - 1), dv, _of(dy, L, 0), *db, dgate, dstate


def _chunk_tangent(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tangent of the outputs, the next state and its tangent."""
    *both, state, dstate = given
    n = len(both) // 2
    (q, k, v, e, *b, gate), (dq, dk, dv, de, *db, dgate) = both[:n], both[n:]
    L, J, y, x = v.shape[2], len(b) + 1, _rows(e, q), _rows(*b, k)
    A, Y, X, P = within(y, x, gate)
    dA, dY, dX, dP = within_tangent(y, x, gate, _rows(de, dq), _rows(*db, dk), dgate)
    A_eu, W, _ = _corrected(A, Y, v, state)
    dread = dY @ state + Y @ dstate
    dwanted = dv if J == 1 else -(_of(A, L, 0).unflatten(3, (L, J))[..., 1] @ dv)
    dU = _solve(A_eu, dwanted - _of(dread, L, 0) - _of(dA, L, 0) @ W)
    dW = dU if J == 1 else _rows(dU, dv)
    do = _of(dread, L, 1) + _of(dA, L, 1) @ W + _of(A, L, 1) @ dW
    dstate = P.mT * dstate + dP.mT * state + dX.mT @ W + X.mT @ dW
    return do, torch.addcmul(X.mT @ W, P.mT, state), dstate


DECAY_FIRST = Recurrence("delta.scan", CHUNK, _chunk, _chunk_backward, _chunk_tangent)
READ_FIRST = Recurrence("delta.scan_rwkv7", CHUNK, _chunk, _chunk_backward, _chunk_tangent)
