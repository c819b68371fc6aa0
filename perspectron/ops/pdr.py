"""Perspective Decay Recurrence: S_t = diag(γ_t) S_{t-1} + v_t k_tᵀ, o_t = scale · S_t q_t.

`scan` runs whole sequences and single steps. Its fast path is a binary tree over each chunk of tokens, in
product space: only products of gates inside the chunk are formed, never a quotient or a logarithm, so any
gate in [0, 1] is exact, 0 and 1 included. A gate of 0 forgets everything before it (a new document); a gate
of 1 with v = 0 leaves the state untouched (padding). Source: docs/designs/perspective.md#scan.

Shapes: B batch, T time, L tokens of one chunk, D value width (rows of the state), R state rank, b block of
the tree, n pairs of blocks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from perspectron import native
from perspectron.native import training
from perspectron.ops import dispatch
from perspectron.ops.sequences import packed
from perspectron.ops.tree import Recurrence, blocks, halves
from perspectron.ops.triton import scan as on_gpu
from perspectron.util.errors import BackendError

CHUNK = 128
WIDEST = 256  # columns of a state that the kernel trains; for more, the tree's matrix products may be faster
BACKENDS = ("auto", "naive", "torch", "native", "triton")


@packed("BTD", "BDR")
@dispatch.in_full_precision
def scan(
    q_BTR: Tensor,
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    state_BDR: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    consume_state: bool = False,
    checked: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T tokens from a given state: (outputs [B,T,D], final state [B,D,R]).

    Any T, also 0 and 1; gates in [0, 1]. `scale` is R^-½ when not given. Computes and returns in float32 or, if any
    input is, in float64; autocast does not reach inside. Differentiable once in every input, in reverse and in forward
    mode. `backend`: "naive" is the plain step loop, "torch" the tree, "native" the kernel for float32 on the CPU
    outside of forward mode, "triton" the kernels for float32 on a GPU, for R ≤ 256, likewise; "auto" a kernel where it
    can run and is faster (on a GPU, once `perspectron selftest --device cuda` has passed there), else the tree or, for
    one token where gradients are off, the step.

    `consume_state`: the caller gives `state_BDR` up, and the kernel and the step write into it; only without gradients.
    `checked`: gates outside [0, 1], and NaN, are a ValueError; a mixer, whose gates are sigmoids, saves that pass.
    `cu_seqlens`: several sequences in one row (`perspectron.ops.sequences`); states then have a row for each.
    Raises BackendError for an unknown backend or a kernel that cannot run, ValueError for shapes that do not fit and
    for a state to be consumed while gradients are on.

        >>> from perspectron.ops import pdr
        >>> q, k, v, gamma = torch.rand(1, 5, 4), torch.rand(1, 5, 4), torch.rand(1, 5, 3), torch.rand(1, 5, 3)
        >>> outputs, state = pdr.scan(q, k, v, gamma)
        >>> tuple(outputs.shape), tuple(state.shape)
        ((1, 5, 3), (1, 3, 4))
        >>> _, states = pdr.scan(q, k, v, gamma, cu_seqlens=torch.tensor([0, 2, 5]))
        >>> len(states)
        2
    """
    dispatch.known(backend, BACKENDS)
    dispatch.check_consumed(consume_state)
    if checked:
        dispatch.check_gates(gamma_BTD)
    _check(q_BTR, k_BTR, v_BTD, gamma_BTD, state_BDR)
    (B, T, R), D = q_BTR.shape, v_BTD.shape[-1]
    inputs = [q_BTR, k_BTR, v_BTD, gamma_BTD] + ([] if state_BDR is None else [state_BDR])
    dtype = dispatch.widest(*inputs)
    q, k, v, gamma = (x.to(dtype) for x in inputs[:4])
    state = v.new_zeros(B, D, R) if state_BDR is None else state_BDR.to(dtype)
    if v.numel() == 0:
        return v, dispatch.owned(state, consume_state)
    q = q * (R**-0.5 if scale is None else scale)
    if backend == "naive":
        return naive(q, k, v, gamma, state)
    if T == 1 and (tape := dispatch.recorder()) is not None and dtype is torch.float32:
        return tape.scanned(q, k, v, gamma, dispatch.owned(state, consume_state))
    if on_gpu.wanted(backend, R, q, k, v, gamma, state):
        owned = dispatch.owned(state, consume_state) if dispatch.gradients_off() else state
        return on_gpu.pdr(q, k, v, gamma, owned)
    narrow = R <= WIDEST or dispatch.gradients_off()
    if backend == "native" or (backend == "auto" and narrow):
        if (obstacle := _obstacle(q, k, v, gamma, state)) is None:
            if dispatch.gradients_off():
                return _native(q, k, v, gamma, dispatch.owned(state, consume_state))
            o, last = _Native.apply(*(x.contiguous() for x in (q, k, v, gamma, state)))
            return o, last
        if backend == "native":
            raise BackendError(f"backend = 'native': {obstacle}")
        where = q.device.type
        dispatch.log_once("pdr.scan: auto runs the torch tree on %s, or a step without gradients", where)
    if backend == "auto" and T == 1 and dispatch.gradients_off():
        return _step_(q, k, v, gamma, dispatch.owned(state, consume_state))
    return TREE.run(q, k, v, gamma, state)


def _check(q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor, state_BDR: Tensor | None) -> None:
    """ValueError unless the shapes fit."""
    B, T, R = q_BTR.shape
    D = v_BTD.shape[-1]
    if k_BTR.shape != (B, T, R) or v_BTD.shape != (B, T, D) or gamma_BTD.shape != (B, T, D):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BTR, k_BTR, v_BTD, gamma_BTD))
        raise ValueError(f"q, k, v, gamma have shapes {shapes}; want [B,T,R], [B,T,R], [B,T,D], [B,T,D]")
    if R < 1:
        raise ValueError(f"R = {R}, must be ≥ 1")
    if state_BDR is not None and state_BDR.shape != (B, D, R):
        raise ValueError(f"state has shape {tuple(state_BDR.shape)}, want {(B, D, R)}")


def _obstacle(*tensors: Tensor) -> str | None:
    """The reason why the native kernel cannot run on these; None if it can."""
    if dispatch.under_tracing(*(x.detach() for x in tensors)):
        return "not under a compiler, a trace or a functional transform"
    if forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    for x in tensors:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return f"got {x.dtype} on {x.device}, must be torch.float32 on cpu"
    return None if native.wanted() else native.reason()


def _native(
    q_BTR: Tensor,
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    state_BDR: Tensor,
    borders_NBDR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel, which writes into the state: at full size, the states before and after would take 500 MB."""
    q_BTR, k_BTR, v_BTD, gamma_BTD = (x.contiguous() for x in (q_BTR, k_BTR, v_BTD, gamma_BTD))
    work_BDR, o_BTD = state_BDR.contiguous(), torch.empty_like(v_BTD)
    native.pdr_scan(q_BTR, k_BTR, v_BTD, gamma_BTD, work_BDR, o_BTD, borders_NBDR)
    if work_BDR is not state_BDR:
        state_BDR.copy_(work_BDR)
    return o_BTD, state_BDR


class _Native(torch.autograd.Function):
    """The kernel with its gradients; keeps its inputs, and the state before each segment of SEGMENT tokens."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        segments = -(-q.shape[1] // native.SEGMENT)
        borders = state.new_empty(segments, *state.shape) if segments > 1 else None
        ctx.save_for_backward(q, k, v, gamma, state, borders)
        return _native(q, k, v, gamma, state.clone(), borders)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dstate.contiguous())
        return dispatch.once_differentiable("pdr.scan", _native_backward, *given)

    jvp = dispatch.refuse("pdr.scan on the native kernel has no forward-mode derivative; use backend='torch'")


def _native_backward(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, borders: Tensor | None, *out: Tensor
) -> tuple[Tensor, ...]:
    return training.scan_backward(q, k, v, gamma, state[None] if borders is None else borders, *out)


def naive(
    q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain loop, unscaled; the oracle of every other path."""
    outputs = [v_BTD[:, :0]]
    for t in range(q_BTR.shape[1]):
        update_BDR = v_BTD[:, t, :, None] * k_BTR[:, t, None, :]
        state_BDR = gamma_BTD[:, t, :, None] * state_BDR + update_BDR
        outputs.append((state_BDR @ q_BTR[:, t, :, None]).mT)
    return torch.cat(outputs, 1), state_BDR


def renormalise(state_BDR: Tensor) -> Tensor:
    """The state S · min(1, α/‖S‖_F) with α = √(D·R): shrinks a large state, leaves a small or zero one
    (docs/designs/perspective.md#state)."""
    alpha = (state_BDR.shape[-2] * state_BDR.shape[-1]) ** 0.5
    norm = torch.linalg.vector_norm(state_BDR, dim=(-2, -1), keepdim=True)
    return state_BDR * (alpha / norm.clamp_min(alpha))


def _step_(
    q_B1R: Tensor, k_B1R: Tensor, v_B1D: Tensor, gamma_B1D: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """One token; writes into the state."""
    state_BDR.mul_(gamma_B1D.mT).baddbmm_(v_B1D.mT, k_B1R)
    return torch.bmm(q_B1R, state_BDR.mT), state_BDR


def _tree(
    A_BLL: Tensor, v_BLD: Tensor, gamma_BLD: Tensor, saved: list[tuple[Tensor, ...]] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tree (o, P, X) of one chunk from a zero state: o_i = Σ_{j≤i} A_ij (Π_{j<l≤i} γ_l) v_j, the inclusive prefix
    products P of γ, and X_j = v_j Π_{l>j} γ_l. `saved` receives what `_tree_backward` needs, level by level."""
    o = A_BLL.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v_BLD
    P, X = gamma_BLD.clone(), v_BLD.clone()
    b = 1
    while b < v_BLD.shape[1]:
        (P_left, P_right), (X_left, _), (_, o_right) = halves(P, b), halves(X, b), halves(o, b)
        y = blocks(A_BLL, b, b).reshape(-1, b, b) @ X_left
        o_right.addcmul_(P_right, y)
        last_left, last_right = P_left[:, -1:].clone(), P_right[:, -1:].clone()
        if saved is not None:
            saved.append((P_right.clone(), X_left.clone(), y, last_left, last_right))
        P_right.mul_(last_left)
        X_left.mul_(last_right)
        b *= 2
    return o, P, X


def _tree_backward(
    A_BLL: Tensor, v_BLD: Tensor, saved: list[tuple[Tensor, ...]], do: Tensor, dP: Tensor, dX: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dA, dv, dγ) from those of `_tree`'s outputs; consumes `saved`, dP and dX."""
    dA = torch.zeros_like(A_BLL)
    dA.diagonal(dim1=-2, dim2=-1).copy_((do * v_BLD).sum(-1))
    b = v_BLD.shape[1]
    while b > 1:
        b //= 2
        P_right, X_left, y, last_left, last_right = saved.pop()
        (dP_left, dP_right), (dX_left, _), (_, do_right) = halves(dP, b), halves(dX, b), halves(do, b)
        dP_left[:, -1] += (dP_right * P_right).sum(1)
        dlast_right = (dX_left * X_left).sum(1)
        dP_right.mul_(last_left).addcmul_(do_right, y)
        dP_right[:, -1] += dlast_right
        dy = P_right.mul_(do_right)
        blocks(dA, b, b).copy_((dy @ X_left.mT).view(dA.shape[0], -1, b, b))
        dX_left.mul_(last_right).add_(blocks(A_BLL, b, b).reshape(-1, b, b).mT @ dy)
    dX.addcmul_(A_BLL.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), do)
    return dA, dX, dP


def _tree_tangent(
    A: Tensor, v: Tensor, gamma: Tensor, dA: Tensor, dv: Tensor, dgamma: Tensor
) -> tuple[Tensor, ...]:
    """The tree on dual numbers: (o, P, X) and their tangents."""
    diagonal, ddiagonal = (x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for x in (A, dA))
    o, do = diagonal * v, ddiagonal * v + diagonal * dv
    P, dP, X, dX = (x.clone() for x in (gamma, dgamma, v, dv))
    b = 1
    while b < v.shape[1]:
        (P_left, P_right), (dP_left, dP_right) = halves(P, b), halves(dP, b)
        X_left, dX_left, o_right, do_right = (
            halves(X, b)[0],
            halves(dX, b)[0],
            halves(o, b)[1],
            halves(do, b)[1],
        )
        block, dblock = (blocks(x, b, b).reshape(-1, b, b) for x in (A, dA))
        y, dy = block @ X_left, dblock @ X_left + block @ dX_left
        o_right.addcmul_(P_right, y)
        do_right.addcmul_(dP_right, y).addcmul_(P_right, dy)
        last_left, dlast_left, last_right, dlast_right = (
            x[:, -1:].clone() for x in (P_left, dP_left, P_right, dP_right)
        )
        dP_right.mul_(last_left).addcmul_(P_right, dlast_left)
        P_right.mul_(last_left)
        dX_left.mul_(last_right).addcmul_(X_left, dlast_right)
        X_left.mul_(last_right)
        b *= 2
    return o, P, X, do, dP, dX


def _chunk(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the next state: the tree's, and what the state before the chunk gives to both."""
    o, P, X = _tree(q @ k.mT, v, gamma)
    o.addcmul_(P, q @ state.mT)
    return o, torch.baddbmm(P[:, -1, :, None] * state, X.mT, k)


def _chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, do: Tensor, state: Tensor, dstate: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, γ and the state before the chunk; the tree is built again."""
    saved: list[tuple[Tensor, ...]] = []
    A = q @ k.mT
    _, P, X = _tree(A, v, gamma, saved)
    dread = P * do
    dP = (q @ state.mT).mul_(do)
    dP[:, -1] += (dstate * state).sum(-1)
    dX = k @ dstate.mT
    dk = X @ dstate
    dq = dread @ state
    dstate = torch.baddbmm(P[:, -1, :, None] * dstate, dread.mT, q)
    dA, dv, dgamma = _tree_backward(A, v, saved, do, dP, dX)
    dq.baddbmm_(dA, k)
    dk.baddbmm_(dA.mT, q)
    return dq, dk, dv, dgamma, dstate


def _chunk_tangent(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, dgamma: Tensor, state: Tensor, dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The tangent of the outputs, the next state and its tangent."""
    _, P, X, do, dP, dX = _tree_tangent(q @ k.mT, v, gamma, dq @ k.mT + q @ dk.mT, dv, dgamma)
    do += dP * (q @ state.mT) + P * (dq @ state.mT + q @ dstate.mT)
    P, dP = P[:, -1, :, None], dP[:, -1, :, None]
    dstate = P * dstate + dP * state + X.mT @ dk + dX.mT @ k
    return do, P * state + X.mT @ k, dstate


TREE = Recurrence("pdr.scan", CHUNK, _chunk, _chunk_backward, _chunk_tangent)
