"""Gated linear attention: S_t = diag(a_t) S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

The gate a_t has an entry for each key channel (GLA) or one for the whole head (the state-space dual, SSD).
`scan` runs whole sequences and single steps. Its fast path is the tree of `perspectron.ops.products`, which forms only
products of gates, never a quotient or a logarithm, so any gate in [0, 1] is exact, 0 and 1 included.
A gate of 0 forgets everything before it (a new document); a gate of 1 with v = 0 leaves the state untouched
(padding). Source: docs/designs/baselines.md#gated-linear-attention; Yang et al. 2023 (arXiv 2312.06635), Dao & Gu
2024 (arXiv 2405.21060).

Shapes: B batch, H heads, G heads of queries and keys, each of which H / G heads in a row share, T time, L tokens of
one chunk, K key width, A gate width (K or 1), V value width.
"""

import torch
from torch import Tensor

from perspectron.ops import dispatch, memory
from perspectron.ops.fused import fits, plain
from perspectron.ops.products import Saved, within, within_backward
from perspectron.ops.sequences import packed
from perspectron.ops.tree import Recurrence
from perspectron.ops.triton import scan as on_gpu

CHUNK = 64
BACKENDS = ("auto", "naive", "torch", "triton")


@packed("BHTV", "BHKV")
@dispatch.in_full_precision
def scan(
    q_BGTK: Tensor,
    k_BGTK: Tensor,
    v_BHTV: Tensor,
    gate_BHTA: Tensor,
    state_BHKV: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    consume_state: bool = False,
    checked: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T tokens from a given state: (outputs [B,H,T,V], final state [B,H,K,V]).

    Any T, also 0 and 1; gates in [0, 1]. `scale` is K^-½ when not given. Computes and returns in float32 or, if
    any input is, in float64; autocast does not reach inside. Differentiable once in every input, in reverse
    mode. `backend`: "naive" is the plain step loop, "torch" the tree, "triton" the kernels for float32 on a GPU,
    for V ≤ 256; "auto" the tree, those kernels (once `perspectron selftest --device cuda` has passed there), the
    native kernel (`perspectron.ops.memory`) on a CPU in float32, or, for one token where gradients are off, the
    step.

    `consume_state`: the caller gives `state_BHKV` up, and the step writes into it instead of into a copy; the numbers
    are the same. Only where gradients are off.
    `checked`: gates outside [0, 1], and NaN, are a ValueError. A mixer, whose gates are sigmoids, leaves the check out:
    it would cost every single token a pass over its gates.
    `cu_seqlens`: several sequences in one row (`perspectron.ops.sequences`); states then have a row for each.
    Raises BackendError for an unknown backend or kernels that cannot run, ValueError for shapes that do not fit and for
    a state to be consumed while gradients are on.

        >>> from perspectron.ops import gla
        >>> q, k = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4)
        >>> v, gate = torch.rand(1, 2, 5, 3), torch.rand(1, 2, 5, 4)
        >>> outputs, state = gla.scan(q, k, v, gate)
        >>> tuple(outputs.shape), tuple(state.shape)
        ((1, 2, 5, 3), (1, 2, 4, 3))
    """
    dispatch.known(backend, BACKENDS)
    dispatch.check_consumed(consume_state)
    if checked:
        dispatch.check_gates(gate_BHTA)
    inputs = [q_BGTK, k_BGTK, v_BHTV, gate_BHTA]
    _check(inputs, state_BHKV)
    B, H, T, K = *v_BHTV.shape[:3], q_BGTK.shape[-1]
    dtype = dispatch.widest(*inputs, *([] if state_BHKV is None else [state_BHKV]))
    q, k, v, gate = (x.to(dtype) for x in inputs)
    state = v.new_zeros(B, H, K, v.shape[-1]) if state_BHKV is None else state_BHKV.to(dtype)
    if v.numel() == 0:
        return v, dispatch.owned(state, consume_state)
    q = q * (K**-0.5 if scale is None else scale)
    if 1 < (G := q.shape[1]) < H:
        q, k = (x.repeat_interleave(H // G, 1) for x in (q, k))
    if backend == "naive":
        return naive(q, k, v, gate, state)
    if on_gpu.wanted(backend, v.shape[-1], q, k, v, gate, state):
        owned = dispatch.owned(state, consume_state) if dispatch.gradients_off() else state
        return on_gpu.gla(q.expand(B, H, T, K), k.expand(B, H, T, K), v, gate, owned)
    if backend == "auto":
        dispatch.log_once(
            "gla.scan: auto runs the torch tree on %s, the step for one token, the native kernel in float32",
            q.device.type,
        )
    if backend == "auto" and T == 1 and dispatch.gradients_off():
        return _step_(q, k, v, gate, dispatch.owned(state, consume_state))
    if backend == "auto" and (fits(q, k, v, gate, state) or plain(q, k, v, gate, state)):
        return memory.scan(q, k, v, None, None, gate, state)
    if gate.shape[-1] == K:
        q, k = q.expand(B, H, T, K), k.expand(B, H, T, K)
    return TREE.run(q, k, v, gate, state)


def _check(inputs: list[Tensor], state_BHKV: Tensor | None) -> None:
    """ValueError unless the shapes of q, k, v, the gate and the state fit."""
    q, k, v, gate = (tuple(x.shape) for x in inputs)
    B, H, T, V = v
    G, K, A = q[1], q[-1], gate[-1]
    groups = G == H or (G > 0 and H % G == 0)
    if K < 1:
        raise ValueError(f"K = {K}, must be ≥ 1")
    fits = groups and A in (1, K) and q == k == (B, G, T, K) and gate == (B, H, T, A)
    if not fits:
        wanted = "[B,G,T,K], [B,G,T,K], [B,H,T,V], [B,H,T,K|1]"
        raise ValueError(f"q, k, v, gate have shapes {q}, {k}, {v}, {gate}; want {wanted}")
    if state_BHKV is not None and state_BHKV.shape != (B, H, K, V):
        raise ValueError(f"state has shape {tuple(state_BHKV.shape)}, want {(B, H, K, V)}")


def naive(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """The plain loop, unscaled; the oracle of every other path."""
    outputs = [v[:, :, :0]]
    for t in range(v.shape[2]):
        update_BHKV = k[:, :, t, :, None] * v[:, :, t, None, :]
        state_BHKV = gate[:, :, t, :, None] * state_BHKV + update_BHKV
        outputs.append(q[:, :, t, None, :] @ state_BHKV)
    return torch.cat(outputs, 2), state_BHKV


def _step_(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """One token; writes into the state."""
    state_BHKV.mul_(gate.mT).addcmul_(k.mT, v)
    return q @ state_BHKV, state_BHKV


def _sum(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The sum a b + c d, for batches of matrices."""
    a, b, c, d = (x.flatten(0, 1) for x in (a, b, c, d))
    return (a @ b).baddbmm_(c, d)


def _chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the next state."""
    A, Q, X, P = within(q, k, gate)
    return _sum(A, v, Q, state).view_as(v), torch.addcmul(X.mT @ v, P.mT, state)


def _chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, do: Tensor, state: Tensor, dstate: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the gate and the state before the chunk; the tree is built again."""
    narrow = (-2, -1) if gate.shape[-1] == 1 else (-1,)
    saved: Saved = []
    A, Q, X, P = within(q, k, gate, saved)
    dv = _sum(A.mT, do, X, dstate).view_as(v)
    dP = (dstate * state).sum(narrow, keepdim=True).mT
    dA, dQ, dX = do @ v.mT, do @ state.mT, v @ dstate.mT
    dstate = torch.addcmul(Q.mT @ do, P.mT, dstate)
    dq, dk, da = within_backward(q, k, gate, saved, dA, dQ, dX, dP)
    return dq, dk, dv, da, dstate


TREE = Recurrence("gla.scan", CHUNK, _chunk, _chunk_backward)
