"""The operations between a model's matrix products, each in one pass over memory: cross entropy of logits, RMS norms,
silu(a) · b, GELU by tanh, decays with the inputs that they scale, and mixes of a token with the one before it.

With gradients on, float32 on a CPU, and bfloat16 except for norms and mixes, takes `native.training`. All else takes
PyTorch's operations: no gradients, other devices and dtypes, forward mode, compilers and functional transforms. Second
derivatives exist: where a gradient is recorded, it is PyTorch's.

Shapes: N rows, or mixes; V vocabulary, B batch, T time, D width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from perspectron import native
from perspectron.native import training
from perspectron.ops.dispatch import gradients_off, under_tracing

IGNORE = -100
LANES = 64  # half-precision numbers in two of the widest vectors, PyTorch's unit of work
CUT = 1 << 14  # numbers up to which PyTorch does not split a tensor among threads
GRAIN = 1 << 15  # numbers in one of its pieces; for GELU it makes one piece for each thread


def fits(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """True if native kernels can train with these: gradients are on, one of them needs one, and all have one dtype of
    `dtypes`, on a CPU, outside of forward mode."""
    first = tensors[0]
    return (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in tensors)
        and first.dtype in dtypes
        and all(x.device.type == "cpu" and x.dtype is first.dtype for x in tensors)
        and forward_ad._current_level < 0
        and not under_tracing(*(x.detach() for x in tensors))
        and first.numel() > 0
        and native.wanted()
    )


def plain(*tensors: Tensor) -> bool:
    """True if native kernels can compute these without gradients: float32 on a CPU, without tracing."""
    return (
        gradients_off()
        and all(x.device.type == "cpu" and x.dtype is torch.float32 for x in tensors)
        and not under_tracing(*tensors)
        and tensors[0].numel() > 0
        and native.wanted()
    )


def recorded(function: Callable[..., Any], inputs: tuple[Tensor, ...], *dy: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a function's inputs from those of its outputs, by PyTorch, to be differentiated again."""
    with torch.enable_grad():
        inputs = tuple(x.view_as(x) for x in inputs)  # one input may be computed from another
        wanted, y = [x for x in inputs if x.requires_grad], function(*inputs)
        outputs = y if isinstance(y, tuple) else (y,)
        of, by = zip(
            *((one, d) for one, d in zip(outputs, dy, strict=True) if one.requires_grad), strict=True
        )
        gradients = iter(torch.autograd.grad(of, wanted, by, create_graph=True))
        return tuple(next(gradients) if x.requires_grad else torch.empty(0) for x in inputs)


# ---------------------------------------------------------------- the loss


def entropy(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """The sum of −log softmax(logits) at the targets, computed in float32 at least; a target of −100 is left out. The
    logits are kept for the backward pass and must not be overwritten before it."""
    if _entropy_fits(logits_NV, target_N):
        return entropies(logits_NV, target_N).sum()
    return _entropies(logits_NV, target_N, "sum")


def entropies(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """The terms of `entropy` [N]."""
    if _entropy_fits(logits_NV, target_N):
        each_N: Tensor = _Entropies.apply(logits_NV.contiguous(), target_N.contiguous())
        return each_N
    return _entropies(logits_NV, target_N)


def _entropy_fits(logits_NV: Tensor, target_N: Tensor) -> bool:
    fitting = fits(logits_NV, dtypes=(torch.float32, torch.bfloat16))
    return fitting and target_N.device.type == "cpu" and target_N.dtype is torch.int64


def _entropies(logits_NV: Tensor, target_N: Tensor, reduction: str = "none") -> Tensor:
    full = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(full, target_N, reduction=reduction, ignore_index=IGNORE)


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        losses, total = training.entropy(logits, target)
        ctx.save_for_backward(logits, target, total)
        return losses

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        logits, target, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return recorded(lambda x: _entropies(x, target), (logits,), g)[0], None
        if g.stride(0) == 0:  # the gradient of a sum: one number for all
            return training.entropy_backward(logits, target, total, float(g[0])), None
        return training.entropy_backward(logits, target, total, 1.0).mul_(g[:, None]), None


# ---------------------------------------------------------------- norms


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + eps) · weight over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.dim() > 1 and len(self.normalized_shape) == 1 and x.shape[-1:] == self.normalized_shape
        if rows and self.eps is not None and self.weight is not None and fits(x, self.weight):
            y: Tensor = _Norm.apply(x.flatten(0, -2).contiguous(), self.weight.contiguous(), self.eps)
            return y.view(x.shape)
        return super().forward(x)


class GroupedRMSNorm(nn.RMSNorm):
    """RMS norm of each of `groups` parts of the last dimension, with a weight for each number."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = training.norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, dweight = recorded(lambda x, w: F.rms_norm(x, w.shape, w, ctx.eps), (x, weight), dy)
            return dx, dweight, None
        return *training.norm_backward(x, weight, r, dy.contiguous()), None


# ---------------------------------------------------------------- gates


def gated(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b."""
    if a.shape == b.shape and fits(a, b, dtypes=(torch.float32, torch.bfloat16)):
        y: Tensor = _Gated.apply(a.contiguous(), b.contiguous())
        return y
    return _gated(a, b)


def _gated(a: Tensor, b: Tensor) -> Tensor:
    return batch_invariant(F.silu, a) * b


def batch_invariant(function: Callable[[Tensor], Tensor], x: Tensor, *, least: int = CUT) -> Tensor:
    """function(x) of each number, whose bits depend neither on how many numbers there are nor on the threads, without
    gradients and for more than `least` numbers. PyTorch splits a large tensor among its threads, and takes the
    incomplete vector at the end of a piece by other instructions, which differ by rounding: x is filled up to whole
    vectors."""
    n = x.numel()
    if under_tracing(x) or not gradients_off() or x.device.type != "cpu" or n <= least:
        return function(x)
    spare = 0
    while more := -(n + spare) % (LANES * _pieces(n + spare)):
        spare += more
    return function(F.pad(x.flatten(), (0, spare)))[:n].view_as(x) if spare else function(x)


def _pieces(n: int) -> int:
    """A number of equal pieces of n numbers, which has PyTorch's borders among its own."""
    threads = torch.get_num_threads()
    return 1 if n <= CUT else math.lcm(threads, min(threads, -(-n // GRAIN)))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return training.gated(a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return recorded(_gated, (a, b), dy)
        return training.gated_backward(a, b, dy.contiguous())


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh."""
    if fits(x, dtypes=(torch.float32, torch.bfloat16)):
        y: Tensor = _Gelu.apply(x.contiguous())
        return y
    return batch_invariant(_gelu, x)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return training.gelu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return recorded(_gelu, (x,), dy)[0]
        return training.gelu_backward(x, dy.contiguous())


def decayed(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(γ, √(1 − γ²) · v) with γ = σ(p), float32 at least: decays, and inputs scaled so that a memory keeps its size."""
    p = p if v.dtype is p.dtype else p.to(torch.promote_types(p.dtype, torch.float32))
    if p.shape == v.shape and fits(p, v, dtypes=(torch.float32, torch.bfloat16)):
        gamma, y = _Decayed.apply(p.contiguous(), v.contiguous())
        return gamma, y
    return _decayed(p, v)


def _decayed(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = p.to(torch.promote_types(p.dtype, torch.float32))
    gamma = batch_invariant(torch.sigmoid, p)
    # √(1 − γ²), by a logarithm of 1 − γ, whose gradient is finite where γ rounds to 1
    return gamma, v * (
        batch_invariant(lambda p: torch.exp(0.5 * F.logsigmoid(-p)), p) * torch.sqrt(1 + gamma)
    )


class _Decayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(p, v)
        return training.decayed(p, v)

    @staticmethod
    def backward(ctx: Any, dgamma: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        p, v = ctx.saved_tensors
        if torch.is_grad_enabled():
            return recorded(_decayed, (p, v), dgamma, dy)
        return training.decayed_backward(p, v, dgamma.contiguous(), dy.contiguous())


# ---------------------------------------------------------------- mixes


def shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, ...]:
    """x + (before − x) · mix for each of the N mixes, all of one dtype. before: the token before each in its document;
    `last` for the first token, zeros where `reset` says that a document begins."""
    if fits(x_BTD, last_BD, mix_ND):
        y: tuple[Tensor, ...] = _Shifted.apply(*(x.contiguous() for x in (x_BTD, last_BD, mix_ND)), reset_BT)
        return y
    return _shifted(x_BTD, last_BD, mix_ND, reset_BT)


def _shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, ...]:
    before_BTD = last_BD[:, None]
    if x_BTD.shape[1] > 1:
        before_BTD = torch.cat([before_BTD, x_BTD[:, :-1]], 1)
    if reset_BT is not None:
        before_BTD = before_BTD.masked_fill(reset_BT[:, :, None], 0)
    return mixed(x_BTD, before_BTD, mix_ND)


def mixed(x_BTD: Tensor, before_BTD: Tensor, mix_ND: Tensor) -> tuple[Tensor, ...]:
    """`shifted`, with the tokens before given."""
    apart_BTD = before_BTD - x_BTD
    if x_BTD.shape[1] == 1:  # of one token all mixes at once, in two operations
        return (x_BTD + apart_BTD * mix_ND[:, None, None]).unbind(0)
    return tuple(x_BTD + apart_BTD * mix_D for mix_D in mix_ND)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, last: Tensor, mix: Tensor, reset: Tensor | None) -> tuple[Tensor, ...]:
        reset = None if reset is None else reset.contiguous()
        ctx.save_for_backward(x, last, mix, reset)
        return training.shifted(x, last, mix, reset)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x, last, mix, reset = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded(lambda x, last, mix: _shifted(x, last, mix, reset), (x, last, mix), *dy), None
        return *training.shifted_backward(x, last, mix, reset, [d.contiguous() for d in dy]), None
