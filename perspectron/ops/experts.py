"""Many SwiGLU networks, one for each token: y_n = W_down[e] (SiLU(W_gate[e] x_n) ⊙ W_up[e] x_n), e = expert_N[n].

Tokens are sorted by expert, and each expert reads its own at once: nothing is padded, no token dropped. The
gradient is our own: autograd would fill and add a whole [E,F,D] for every expert, here each expert's part is
written once. On CUDA torch's grouped product takes all experts in one call, where it gives what the loop gives.
Source: docs/designs/perspective.md#experts.

Shapes: N tokens, D model width, F hidden width, E experts, S hidden units sampled.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops.dispatch import gradients_off, once_differentiable
from perspectron.ops.fused import batch_invariant
from perspectron.util.machine import of_process

HUGE = 1 << 22  # bytes from which huge pages are asked for
FEW = 64  # most tokens of a step of many texts, or of an expert, that are read in full groups
GROUP = 8
_silu_backward = torch.ops.aten.silu_backward

Groups = list[tuple[int, slice]] | Tensor
"""Rows sorted by expert: (expert, rows) of each that has any; or, for a grouped product, where each expert ends."""


def swiglu(
    x_ND: Tensor,
    expert_N: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    *,
    units: slice = slice(0),
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and a sample of the weights: (y [N,D], sample [E,3S,D]). All in one dtype. Differentiable once, in
    reverse and in forward mode.

    units: hidden units whose weights are returned as the sample; the fewer, the cheaper a loss on them. rounded:
    rounding of the down projection's input, row by row, with a straight-through gradient.
    """
    E = gate_EFD.shape[0]
    order_N = expert_N.argsort(stable=True)
    groups = _groups(expert_N, E, _can_group(x_ND, gate_EFD))
    few = 0 < len(x_ND) <= FEW and units == slice(0) and not x_ND.is_meta
    if few and gradients_off() and isinstance(groups, list):
        weights, none = (gate_EFD, up_EFD, down_EDF), gate_EFD[:, units]
        if len(x_ND) == 1:
            return _forward(x_ND, weights, groups, rounded)[0], none
        return _filled(x_ND, weights, order_N, groups, rounded), none
    y_ND, sample, *_ = _Experts.apply(x_ND, gate_EFD, up_EFD, down_EDF, order_N, groups, units, rounded)
    return y_ND, sample


def chosen(x_ND: Tensor, expert_NK: Tensor, *weights: Tensor) -> Tensor:
    """Outputs [N,K,D] of each token's K experts. weights: gate, up and down of SwiGLUs; or up and down of networks
    W_down relu(W_up x)², which autograd differentiates. Weights in other dtypes than x's are converted one by one.

    expert_NK: in ascending order. Without gradients a token's bits do not depend on how many others an expert has.
    """
    (N, K), E = expert_NK.shape, len(weights[0])
    x_MD, expert_M = x_ND.repeat_interleave(K, 0), expert_NK.flatten()
    quiet = gradients_off() and not x_ND.is_meta
    if not quiet and len(weights) == 3:
        gate_EFD, up_EFD, down_EDF = (weight.to(x_ND.dtype) for weight in weights)
        return swiglu(x_MD, expert_M, gate_EFD, up_EFD, down_EDF)[0].view(N, K, -1)
    order_M, groups = expert_M.argsort(stable=True), _groups(expert_M, E, False)
    assert isinstance(groups, list)
    if N == 1:
        y_MD = _forward(x_MD, weights, groups, None)[0]
    elif quiet and N > 1:
        y_MD = _filled(x_MD, weights, order_M, groups, None)
    else:
        y_MD = _put_back(_forward(x_MD.index_select(0, order_M), weights, groups, None)[0], order_M)
    return y_MD.view(N, K, -1)


def scores(x_ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """The logits of a router [N,E]. A few tokens are taken in groups of GROUP, so that their bits do not depend on how
    many there are."""
    N = len(x_ND)
    if GROUP < N <= FEW and N % GROUP == 0 and gradients_off():
        return torch.cat([F.linear(part, weight_ED, bias_E) for part in x_ND.split(GROUP)])
    return F.linear(x_ND, weight_ED, bias_E)


def naive(x_ND: Tensor, expert_N: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """The networks token by token; the oracle."""
    outputs = []
    for x_D, e in zip(x_ND, expert_N.tolist(), strict=True):
        outputs.append(down_EDF[e] @ (F.silu(gate_EFD[e] @ x_D) * (up_EFD[e] @ x_D)))
    return torch.stack(outputs)


def load(expert_N: Tensor, E: int) -> Tensor:
    """The number of tokens of each expert [E]."""
    return (expert_N[:, None] == torch.arange(E, device=expert_N.device)).sum(0)


def _groups(expert_N: Tensor, E: int, grouped: bool) -> Groups:
    if expert_N.is_meta:  # which expert it is changes no shape: the first takes all
        return [(0, slice(0, len(expert_N)))]
    load_E = load(expert_N, E)
    if grouped:
        return load_E.cumsum(0).int()
    runs, start = [], 0
    for e, count in enumerate(load_E.tolist()):
        if count:
            runs.append((e, slice(start, start + count)))
        start += count
    if start != len(expert_N):
        least, most = (int(end) for end in expert_N.aminmax())
        raise ValueError(f"experts go from {least} to {most}, must be in 0 … {E - 1}")
    return runs


class _Experts(torch.autograd.Function):
    """The networks with gradients. Also returns what its derivatives need: the sorted input and the two products
    before the SiLU."""

    @staticmethod
    def forward(
        x_ND: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        order_N: Tensor,
        groups: Groups,
        units: slice,
        rounded: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        weights = (gate_EFD, up_EFD, down_EDF)
        sample = torch.cat([gate_EFD[:, units], up_EFD[:, units], down_EDF[..., units].mT], 1)
        sorted_ND = x_ND.index_select(0, order_N)
        forward = _forward_grouped if isinstance(groups, Tensor) else _forward
        y_ND, a_NF, b_NF = forward(sorted_ND, weights, groups, rounded)
        return _put_back(y_ND, order_N), sample, sorted_ND, a_NF, b_NF

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, gate_EFD, up_EFD, down_EDF, order_N, ctx.groups, ctx.units, ctx.rounded = inputs
        kept = (*output[2:], gate_EFD, up_EFD, down_EDF, order_N)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor | None, dsample: Tensor | None, *_: None) -> tuple[Any, ...]:
        learn = any(ctx.needs_input_grad[1:4])
        run = functools.partial(_gradients, ctx.groups, ctx.units, ctx.rounded, learn)
        return (
            *once_differentiable("experts.swiglu", run, dy_ND, dsample, *ctx.saved_tensors),
            None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx_ND: Tensor | None, *tangents: Any) -> tuple[Tensor, Tensor, None, None, None]:
        sorted_ND, a_NF, b_NF, gate_EFD, up_EFD, down_EDF, order_N = ctx.saved_tensors
        dgate_EFD, dup_EFD, ddown_EDF = (
            torch.zeros_like(w) if t is None else t
            for w, t in zip((gate_EFD, up_EFD, down_EDF), tangents[:3], strict=True)
        )
        dx_ND = torch.zeros_like(sorted_ND) if dx_ND is None else dx_ND.index_select(0, order_N)
        dy_ND = torch.empty_like(sorted_ND)
        for e, rows in _listed(ctx.groups):
            x, dx, a, b = sorted_ND[rows], dx_ND[rows], a_NF[rows], b_NF[rows]
            da = dx @ gate_EFD[e].T + x @ dgate_EFD[e].T
            db = dx @ up_EFD[e].T + x @ dup_EFD[e].T
            dh = _silu_backward(da * b, a) + F.silu(a) * db
            dy_ND[rows] = dh @ down_EDF[e].T + _hidden(a, b, ctx.rounded) @ ddown_EDF[e].T
        units = ctx.units
        dsample = torch.cat([dgate_EFD[:, units], dup_EFD[:, units], ddown_EDF[..., units].mT], 1)
        return _put_back(dy_ND, order_N), dsample, None, None, None


def _gradients(
    groups: Groups,
    units: slice,
    rounded: Callable[[Tensor], Tensor] | None,
    learn: bool,
    dy_ND: Tensor | None,
    dsample: Tensor | None,
    sorted_ND: Tensor,
    a_NF: Tensor,
    b_NF: Tensor,
    *rest: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of x and, if `learn`, of the three weights."""
    *weights, order_N = rest
    dy_ND = torch.zeros_like(sorted_ND) if dy_ND is None else dy_ND.index_select(0, order_N)
    backward = _backward_grouped if isinstance(groups, Tensor) else _backward
    dx_ND, *gradients = backward(dy_ND, sorted_ND, a_NF, b_NF, weights, groups, rounded, learn)
    if not learn:
        return _put_back(dx_ND, order_N), None, None, None
    if dsample is not None:
        dgate, dup, ddown = dsample.chunk(3, 1)
        gradients[0][:, units] += dgate
        gradients[1][:, units] += dup
        gradients[2][..., units] += ddown.mT
    return _put_back(dx_ND, order_N), *gradients


def _put_back(sorted_ND: Tensor, order_N: Tensor) -> Tensor:
    """Sorted rows, back in the order of tokens. (Reading rows is twice as fast as writing them.)"""
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return sorted_ND.index_select(0, place_N)


def _hidden(a: Tensor, b: Tensor, rounded: Callable[[Tensor], Tensor] | None) -> Tensor:
    """The hidden units, as the down projection reads them."""
    h = batch_invariant(F.silu, a) * b
    return h if rounded is None else rounded(h)


def _listed(groups: Groups) -> list[tuple[int, slice]]:
    if not isinstance(groups, Tensor):
        return groups
    ends = [0, *groups.tolist()]
    return [(e, slice(ends[e], ends[e + 1])) for e in range(len(ends) - 1) if ends[e] < ends[e + 1]]


# ---------------------------------------------------------------- expert by expert


def _filled(
    x_ND: Tensor, weights: tuple[Tensor, ...], order_N: Tensor, groups: list[tuple[int, slice]], rounded: Any
) -> Tensor:
    """The outputs [N,D]. An expert's tokens are filled up to a multiple of GROUP, and few are read GROUP at a time: how
    many others it has then changes no bit of a token's, whatever a processor does with more rows at once."""
    own, full, end = list[Tensor](), list[tuple[int, slice]](), 0
    for e, rows in groups:
        count = rows.stop - rows.start
        own.append(torch.arange(end, end + count))
        first, end = end, end + count + -count % GROUP
        each = GROUP if count <= FEW else end - first
        full += [(e, slice(start, start + each)) for start in range(first, end, each)]
    place_N = torch.cat(own).to(order_N.device)
    order_P = order_N.new_zeros(end).index_copy_(0, place_N, order_N)
    y_PD, *_ = _forward(x_ND.index_select(0, order_P), weights, full, rounded)
    return _put_back(y_PD.index_select(0, place_N), order_N)


def _forward(
    x_ND: Tensor, weights: tuple[Tensor, ...], groups: Any, rounded: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if len(weights) == 2:
        return _ungated(x_ND, *weights, groups)
    a_NF = x_ND.new_empty(len(x_ND), weights[0].shape[1])
    b_NF, y_ND = torch.empty_like(a_NF), torch.empty_like(x_ND)
    for e, rows in groups:
        a, b = a_NF[rows], b_NF[rows]
        gate_FD, up_FD, down_DF = (weight[e].to(x_ND.dtype) for weight in weights)
        torch.mm(x_ND[rows], gate_FD.T, out=a)
        torch.mm(x_ND[rows], up_FD.T, out=b)
        torch.mm(_hidden(a, b, rounded), down_DF.T, out=y_ND[rows])
    return y_ND, a_NF, b_NF


def _ungated(x_ND: Tensor, up_EFD: Tensor, down_EDF: Tensor, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The networks with relu² and no gate; autograd can differentiate them."""
    found = [x_ND[:0]]
    for e, rows in groups:
        hidden = F.relu(torch.mm(x_ND[rows], up_EFD[e].to(x_ND.dtype).T)).square()
        found.append(torch.mm(hidden, down_EDF[e].to(x_ND.dtype).T))
    none = x_ND[:0]
    return torch.cat(found), none, none


def _backward(
    dy_ND: Tensor,
    x_ND: Tensor,
    a_NF: Tensor,
    b_NF: Tensor,
    weights: Any,
    groups: Any,
    rounded: Any,
    learn: bool = True,
) -> tuple[Tensor, ...]:
    """Gradients of x and, if `learn`, of the three weights."""
    gate_EFD, up_EFD, down_EDF = weights
    dx_ND = torch.empty_like(x_ND)
    gradients = tuple(_empty_like(weight) for weight in weights) if learn else ()
    for e, rows in groups:
        x, dy, a, b, dx = (tensor[rows] for tensor in (x_ND, dy_ND, a_NF, b_NF, dx_ND))
        dh, half = torch.mm(dy, down_EDF[e]), F.silu(a)
        db = dh * half
        da = _silu_backward(dh.mul_(b), a)
        torch.mm(da, gate_EFD[e], out=dx).addmm_(db, up_EFD[e])
        if learn:
            dgate_EFD, dup_EFD, ddown_EDF = gradients
            h = half.mul_(b)
            torch.mm(dy.T, h if rounded is None else rounded(h), out=ddown_EDF[e])
            torch.mm(da.T, x, out=dgate_EFD[e])
            torch.mm(db.T, x, out=dup_EFD[e])
    for e in set(range(len(gate_EFD))) - {e for e, _ in groups}:
        for gradient in gradients:
            gradient[e].zero_()
    return dx_ND, *gradients


def _empty_like(x: Tensor) -> Tensor:
    """Uninitialised memory, in huge pages where the system has them: first touches of small pages took a quarter of the
    time of a backward pass."""
    made = torch.empty_like(x)
    advise = of_process("madvise") if made.device.type == "cpu" and made.nbytes >= HUGE else None
    if advise is not None:
        page = 4096
        start = -(-made.data_ptr() // page) * page
        stop = (made.data_ptr() + made.nbytes) // page * page
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), 14)  # MADV_HUGEPAGE
    return made


# ---------------------------------------------------------------- all experts in one call


def _forward_grouped(
    x_ND: Tensor, weights: tuple[Tensor, ...], groups: Any, rounded: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gate_EFD, up_EFD, down_EDF = weights
    a_NF, b_NF = (F.grouped_mm(x_ND, weight.mT, offs=groups) for weight in (gate_EFD, up_EFD))
    return F.grouped_mm(_hidden(a_NF, b_NF, rounded), down_EDF.mT, offs=groups), a_NF, b_NF


def _backward_grouped(
    dy_ND: Tensor,
    x_ND: Tensor,
    a_NF: Tensor,
    b_NF: Tensor,
    weights: Any,
    groups: Any,
    rounded: Any,
    learn: bool = True,
) -> tuple[Tensor, ...]:
    gate_EFD, up_EFD, down_EDF = weights
    dh_NF = F.grouped_mm(dy_ND, down_EDF, offs=groups)
    da_NF, db_NF = _silu_backward(dh_NF * b_NF, a_NF), dh_NF * F.silu(a_NF)
    dx_ND = F.grouped_mm(da_NF, gate_EFD, offs=groups) + F.grouped_mm(db_NF, up_EFD, offs=groups)
    if not learn:
        return (dx_ND,)
    pairs = ((da_NF, x_ND), (db_NF, x_ND), (dy_ND, _hidden(a_NF, b_NF, rounded)))
    return dx_ND, *(F.grouped_mm(left.T, right, offs=groups) for left, right in pairs)


def _can_group(x_ND: Tensor, gate_EFD: Tensor) -> bool:
    """True if a grouped product can run. Rows must be multiples of 16 bytes; the rest is tried once."""
    if x_ND.device.type != "cuda" or x_ND.dtype != torch.bfloat16:
        return False
    aligned = all(width % 8 == 0 for width in gate_EFD.shape[1:])
    return aligned and _grouping_works(x_ND.device, x_ND.dtype)


@functools.cache
def _grouping_works(device: torch.device, dtype: torch.dtype) -> bool:
    """True if grouped products give what the loop gives, forward and backward, with an empty group and odd ones."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(21, 16), (21, 16), (4, 24, 16), (4, 24, 16), (4, 16, 24)]
    x, dy, *weights = (torch.randn(s, generator=draw).to(device, dtype) for s in shapes)
    ends = torch.tensor([3, 3, 16, 21], dtype=torch.int32, device=device)
    try:
        y, *hidden = _forward_grouped(x, tuple(weights), ends, None)
        grouped = [y, *_backward_grouped(dy, x, hidden[0], hidden[1], weights, ends, None)]
    except RuntimeError:
        return False
    rows = _listed(ends)
    y, *hidden = _forward(x, tuple(weights), rows, None)
    expected = [y, *_backward(dy, x, hidden[0], hidden[1], weights, rows, None)]
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(grouped, expected, strict=True))
