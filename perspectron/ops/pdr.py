"""Perspective Decay Recurrence: S_t = diag(γ_t) S_{t-1} + v_t k_tᵀ, o_t = scale · S_t q_t.

`scan` runs whole sequences and single steps. Its fast path is a binary tree over each chunk of tokens, in
product space: only products of gates inside the chunk are formed, never a quotient or a logarithm, so any
gate in [0, 1] is exact, 0 and 1 included. A gate of 0 forgets everything before it (a new document); a gate
of 1 with v = 0 leaves the state untouched (padding). Source: seeds/pdr.md §2, decisions.md §1.

Shapes: B batch, T time, L tokens of one chunk, D value width (rows of the state), R state rank, b block of
the tree, n pairs of blocks.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from perspectron import native
from perspectron.errors import BackendError
from perspectron.ops.tree import blocks, full_precision, halves

CHUNK = 128
BACKENDS = ("auto", "reference", "torch", "native")
TWICE = "pdr.scan is differentiable once; for second derivatives use backend='reference'"


def scan(
    q_BTR: Tensor,
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    state_BDR: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence over T tokens from a given state: (outputs [B,T,D], final state [B,D,R]).

    Any T, also 0 and 1; gates in [0, 1]. `scale` is R^-½ when not given. Computes and returns in float32 or, if
    any input is, in float64; autocast does not reach inside. Differentiable once in every input, in reverse and
    in forward mode. `backend`: "reference" is the plain step loop, "torch" the tree, "native" the kernel for float32
    on the CPU in inference mode, "auto" that kernel where it can run, else the tree or, for one token in inference
    mode, the step.

    Under `torch.inference_mode()` "native", and "auto" where it is native or reads one token, update `state_BDR` in
    place and return it; a state that was expanded, whose places share memory, is copied instead.
    Raises BackendError for an unknown backend or a kernel that cannot run, ValueError for shapes that do not fit.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend = {backend!r}, must be one of {', '.join(BACKENDS)}")
    B, T, R = q_BTR.shape
    D = v_BTD.shape[-1]
    if k_BTR.shape != (B, T, R) or v_BTD.shape != (B, T, D) or gamma_BTD.shape != (B, T, D):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q_BTR, k_BTR, v_BTD, gamma_BTD))
        raise ValueError(f"q, k, v, gamma have shapes {shapes}; want [B,T,R], [B,T,R], [B,T,D], [B,T,D]")
    if R < 1:
        raise ValueError(f"R = {R}, must be ≥ 1")
    if state_BDR is not None and state_BDR.shape != (B, D, R):
        raise ValueError(f"state has shape {tuple(state_BDR.shape)}, want {(B, D, R)}")
    device = q_BTR.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return scan(q_BTR, k_BTR, v_BTD, gamma_BTD, state_BDR, scale=scale, backend=backend)
    inputs = [q_BTR, k_BTR, v_BTD, gamma_BTD] + ([] if state_BDR is None else [state_BDR])
    dtype = torch.float32
    for tensor in inputs:
        dtype = torch.promote_types(dtype, tensor.dtype)
    q, k, v, gamma = (x.to(dtype) for x in inputs[:4])
    state = v.new_zeros(B, D, R) if state_BDR is None else state_BDR.to(dtype)
    q = q * (R**-0.5 if scale is None else scale)
    if backend == "reference":
        return reference(q, k, v, gamma, state)
    if T > 0 and backend in ("auto", "native"):
        if (obstacle := _obstacle(q, k, v, gamma, state)) is None:
            return _native(q, k, v, gamma, state)
        if backend == "native":
            raise BackendError(f"backend = 'native': {obstacle}")
        if not torch.compiler.is_compiling():
            _say(device)
    if backend == "auto" and T == 1 and torch.is_inference_mode_enabled():
        return _step_(q, k, v, gamma, state)
    if T == 0:
        return v, state
    if torch.is_inference_mode_enabled():
        return _forward(q, k, v, gamma, state)
    o, state, _ = _Scan.apply(q, k, v, gamma, state)
    return o, state


@functools.cache
def _say(device: str) -> None:
    """Once for each kind of device."""
    logging.getLogger("perspectron").info(
        "pdr.scan: auto runs the torch tree on %s and, in inference, the step for one token", device
    )


def _obstacle(*tensors: Tensor) -> str | None:
    """Why the native kernel cannot run on these, if it cannot."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or _get_current_dispatch_mode() is not None
    )
    if watched or any(
        type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors
    ):
        return "not under a compiler, a trace or a functional transform"
    if not torch.is_inference_mode_enabled():
        return "only under torch.inference_mode(), it has no derivatives"
    for x in tensors:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return f"got {x.dtype} on {x.device}, must be torch.float32 on cpu"
    return None if native.wanted() else native.reason()


def _native(
    q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """The kernel, which writes into the state: in full size, those before and after would take 500 MB."""
    state_BDR = _writable(state_BDR)
    q_BTR, k_BTR, v_BTD, gamma_BTD = (x.contiguous() for x in (q_BTR, k_BTR, v_BTD, gamma_BTD))
    work_BDR, o_BTD = state_BDR.contiguous(), torch.empty_like(v_BTD)
    native.pdr_scan(q_BTR, k_BTR, v_BTD, gamma_BTD, work_BDR, o_BTD)
    if work_BDR is not state_BDR:
        state_BDR.copy_(work_BDR)
    return o_BTD, state_BDR


def _writable(state_BDR: Tensor) -> Tensor:
    """Itself, or a copy where places share memory."""
    shared = any(n > 1 and stride == 0 for n, stride in zip(state_BDR.shape, state_BDR.stride(), strict=True))
    return state_BDR.clone(memory_format=torch.contiguous_format) if shared else state_BDR


def reference(
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
    """S · min(1, α/‖S‖_F) with α = √(D·R): shrinks a large state, leaves a small or zero one (decisions.md §1)."""
    alpha = (state_BDR.shape[-2] * state_BDR.shape[-1]) ** 0.5
    norm = torch.linalg.vector_norm(state_BDR, dim=(-2, -1), keepdim=True)
    return state_BDR * (alpha / norm.clamp_min(alpha))


def _step_(
    q_B1R: Tensor, k_B1R: Tensor, v_B1D: Tensor, gamma_B1D: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """One token; writes into the state."""
    state_BDR = _writable(state_BDR)
    state_BDR.mul_(gamma_B1D.mT).baddbmm_(v_B1D.mT, k_B1R)
    return torch.bmm(q_B1R, state_BDR.mT), state_BDR


def _chunks(T: int) -> list[tuple[int, int]]:
    """(start, stop) of each chunk."""
    T = int(T)  # under torch.jit.trace sizes are tensors
    return [(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]


def _cut(start: int, stop: int, *tensors: Tensor) -> list[Tensor]:
    """The chunk of q, k, v, … (zeros past the end) and, last, of gamma (ones past the end), padded to a power
    of two: the padding is the identity of the recurrence."""
    pad = (0, 0, 0, (1 << (stop - start - 1).bit_length()) - (stop - start))
    *zeros, gamma = (x[:, start:stop] for x in tensors)
    if pad[-1]:
        zeros, gamma = [F.pad(x, pad) for x in zeros], F.pad(gamma, pad, value=1.0)
    return [x.contiguous() for x in (*zeros, gamma)]


def _tree(
    A_BLL: Tensor, v_BLD: Tensor, gamma_BLD: Tensor, saved: list[tuple[Tensor, ...]] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, P, X) of one chunk from a zero state: o_i = Σ_{j≤i} A_ij (Π_{j<l≤i} γ_l) v_j, the inclusive prefix
    products P of γ, and X_j = v_j Π_{l>j} γ_l. `saved` receives what `_tree_backward` needs, level by level."""
    o = A_BLL.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * v_BLD
    P, X = gamma_BLD.clone(), v_BLD.clone()
    b = 1
    while b < v_BLD.shape[1]:
        (P_left, P_right), (X_left, _), (_, o_right) = halves(P, b), halves(X, b), halves(o, b)
        y = blocks(A_BLL, b).reshape(-1, b, b) @ X_left
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
    """(dA, dv, dγ) from the gradients of `_tree`'s outputs; consumes `saved`, dP and dX."""
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
        blocks(dA, b).copy_((dy @ X_left.mT).view(dA.shape[0], -1, b, b))
        dX_left.mul_(last_right).add_(blocks(A_BLL, b).reshape(-1, b, b).mT @ dy)
    dX.addcmul_(A_BLL.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), do)
    return dA, dX, dP


def _tree_tangent(
    A: Tensor, v: Tensor, gamma: Tensor, dA: Tensor, dv: Tensor, dgamma: Tensor
) -> tuple[Tensor, ...]:
    """`_tree` on dual numbers: (o, P, X) and their tangents."""
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
        block, dblock = (blocks(x, b).reshape(-1, b, b) for x in (A, dA))
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


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, borders: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chunks in sequence, the tree inside each; `borders` [chunks, B, D, R] receives each chunk's first state."""
    o = torch.empty_like(v)
    for i, (start, stop) in enumerate(_chunks(v.shape[1])):
        qc, kc, vc, gc = _cut(start, stop, q, k, v, gamma)
        if borders is not None:
            borders[i] = state
        oc, P, X = _tree(qc @ kc.mT, vc, gc)
        oc.addcmul_(P, qc @ state.mT)
        o[:, start:stop] = oc[:, : stop - start]
        state = torch.baddbmm(P[:, -1, :, None] * state, X.mT, kc)
    return o, state


class _Scan(torch.autograd.Function):
    """The backward pass walks the chunks from the last to the first and builds each tree again, so that only
    the states at chunk borders are kept."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        borders = state.new_empty(len(_chunks(v.shape[1])), *state.shape)
        return *_forward(q, k, v, gamma, state, borders), borders

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        *_, borders = output
        ctx.mark_non_differentiable(borders)
        ctx.save_for_backward(*inputs[:4], borders)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstate: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = _Gradient.apply(*ctx.saved_tensors, do, dstate)
        return gradients

    @staticmethod
    def jvp(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dgamma: Tensor, dstate: Tensor
    ) -> tuple[Tensor | None, ...]:
        with full_precision(dq):
            q, k, v, gamma, state = ctx.saved_tensors
            return (*_tangent(q, k, v, gamma, state, dq, dk, dv, dgamma, dstate), None)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Scan`, as a function of its own, so that differentiating it again is an error and not
    a silent zero."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, borders: Tensor, do: Tensor, dstate: Tensor
    ) -> tuple[Tensor, ...]:
        with full_precision(do):
            return _backward(q, k, v, gamma, borders, do, dstate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(TWICE)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, borders: Tensor, do: Tensor, dstate: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, γ and the first state: chunks from the last to the first."""
    gradients = [torch.empty_like(x) for x in (q, k, v, gamma)]
    dstate = dstate.clone()
    for i, (start, stop) in reversed(list(enumerate(_chunks(v.shape[1])))):
        qc, kc, vc, doc, gc = _cut(start, stop, q, k, v, do, gamma)
        state = borders[i]
        saved: list[tuple[Tensor, ...]] = []
        A = qc @ kc.mT
        _, P, X = _tree(A, vc, gc, saved)
        dread = P * doc
        dP = (qc @ state.mT).mul_(doc)
        dP[:, -1] += (dstate * state).sum(-1)
        dX = kc @ dstate.mT
        dk = X @ dstate
        dq = dread @ state
        dstate = torch.baddbmm(P[:, -1, :, None] * dstate, dread.mT, qc)
        dA, dv, dgamma = _tree_backward(A, vc, saved, doc, dP, dX)
        dq.baddbmm_(dA, kc)
        dk.baddbmm_(dA.mT, qc)
        for whole, part in zip(gradients, (dq, dk, dv, dgamma), strict=True):
            whole[:, start:stop] = part[:, : stop - start]
    return *gradients, dstate


def _tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dgamma: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tangents of the outputs and of the last state."""
    outputs = []
    for start, stop in _chunks(v.shape[1]):
        qc, kc, vc, gc = _cut(start, stop, q, k, v, gamma)
        dqc, dkc, dvc, dgc = _cut(start, stop, dq, dk, dv, dgamma)
        if (padding := gc.shape[1] - (stop - start)) > 0:
            dgc[:, -padding:] = 0
        _, P, X, do, dP, dX = _tree_tangent(qc @ kc.mT, vc, gc, dqc @ kc.mT + qc @ dkc.mT, dvc, dgc)
        do += dP * (qc @ state.mT) + P * (dqc @ state.mT + qc @ dstate.mT)
        outputs.append(do[:, : stop - start])
        P, dP = P[:, -1, :, None], dP[:, -1, :, None]
        dstate = P * dstate + dP * state + X.mT @ dkc + dX.mT @ kc
        state = P * state + X.mT @ kc
    return torch.cat(outputs, 1), dstate
