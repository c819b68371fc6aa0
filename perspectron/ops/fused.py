"""The operations between a model's matrix products, each in one pass over memory: cross entropy of logits, RMS norms,
silu(a) · b, GELU by tanh, decays with the inputs that they scale, and mixes of a token with the one before it.

With gradients on, float32 on a CPU, and bfloat16 except for norms and mixes, takes `native.training`. All else takes
PyTorch's operations: no gradients, other devices and dtypes, forward mode, compilers and functional transforms. Second
derivatives exist: where a gradient is recorded, it is PyTorch's.

Shapes: N rows, or mixes; V vocabulary, B batch, T time, D width.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


class _Op(NamedTuple):
    """An operation of `native.training`. forward: the outputs for the inputs, then what the backward pass needs beside
    them. backward: the gradients of the inputs, by the inputs, that, and the outputs' gradients. plain: by PyTorch."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    plain: Callable[..., Any]


class _Native(torch.autograd.Function):
    """The outputs of an operation of its inputs."""

    @staticmethod
    def forward(ctx: Any, op: _Op, *inputs: Tensor | None) -> Any:
        outputs, *kept = op.forward(*inputs)
        ctx.op, ctx.count = op, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *recorded(ctx.op.plain, saved[: ctx.count], *dy)
        return None, *ctx.op.backward(*saved, *dy)


def recorded(
    function: Callable[..., Any], inputs: tuple[Tensor | None, ...], *dy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a function's inputs from those of its outputs, by PyTorch, to be differentiated again; None of
    inputs that need none."""
    with torch.enable_grad():
        views = [None if x is None else x.view_as(x) for x in inputs]  # one may be computed from another
        wanted, y = [x for x in views if x is not None and x.requires_grad], function(*views)
        outputs = y if isinstance(y, tuple) else (y,)
        of, by = zip(
            *((one, d) for one, d in zip(outputs, dy, strict=True) if one.requires_grad), strict=True
        )
        gradients = iter(torch.autograd.grad(of, wanted, by, create_graph=True))
        return tuple(next(gradients) if x is not None and x.requires_grad else None for x in views)


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
        each_N: Tensor = _Native.apply(_ENTROPIES, logits_NV.contiguous(), target_N.contiguous())
        return each_N
    return _entropies(logits_NV, target_N)


def _entropy_fits(logits_NV: Tensor, target_N: Tensor) -> bool:
    fitting = fits(logits_NV, dtypes=(torch.float32, torch.bfloat16))
    return fitting and target_N.device.type == "cpu" and target_N.dtype is torch.int64


def _entropies(logits_NV: Tensor, target_N: Tensor, reduction: str = "none") -> Tensor:
    full = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(full, target_N, reduction=reduction, ignore_index=IGNORE)


def _entropies_backward(logits: Tensor, target: Tensor, total: Tensor, g: Tensor) -> tuple[Tensor, None]:
    if g.stride(0) == 0:  # the gradient of a sum: one number for all
        return training.entropy_backward(logits, target, total, float(g[0])), None
    return training.entropy_backward(logits, target, total, 1.0).mul_(g[:, None]), None


_ENTROPIES = _Op(lambda *inputs: training.entropy(*inputs), _entropies_backward, _entropies)


# ---------------------------------------------------------------- norms


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + eps) · weight over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.dim() > 1 and len(self.normalized_shape) == 1 and x.shape[-1:] == self.normalized_shape
        if rows and self.eps is not None and self.weight is not None and fits(x, self.weight):
            y: Tensor = _Native.apply(
                _norm(self.eps), x.flatten(0, -2).contiguous(), self.weight.contiguous()
            )
            return y.view(x.shape)
        return super().forward(x)


def _norm(eps: float) -> _Op:
    return _Op(
        lambda x, w: training.norm(x, w, eps),
        lambda x, w, r, dy: training.norm_backward(x, w, r, dy.contiguous()),
        lambda x, w: F.rms_norm(x, w.shape, w, eps),
    )


class GroupedRMSNorm(nn.RMSNorm):
    """RMS norm of each of `groups` parts of the last dimension, with a weight for each number."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight


# ---------------------------------------------------------------- gates


def gated(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b."""
    if a.shape == b.shape and fits(a, b, dtypes=(torch.float32, torch.bfloat16)):
        y: Tensor = _Native.apply(_GATED, a.contiguous(), b.contiguous())
        return y
    return _gated(a, b)


def _gated(a: Tensor, b: Tensor) -> Tensor:
    return batch_invariant(F.silu, a) * b


_GATED = _Op(
    lambda a, b: (training.gated(a, b),),
    lambda a, b, dy: training.gated_backward(a, b, dy.contiguous()),
    _gated,
)


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


def gelu(x: Tensor) -> Tensor:
    """GELU by tanh."""
    if fits(x, dtypes=(torch.float32, torch.bfloat16)):
        y: Tensor = _Native.apply(_GELU, x.contiguous())
        return y
    return batch_invariant(_gelu, x)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_GELU = _Op(lambda x: (training.gelu(x),), lambda x, dy: (training.gelu_backward(x, dy.contiguous()),), _gelu)


def decayed(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(γ, √(1 − γ²) · v) with γ = σ(p), float32 at least: decays, and inputs scaled so that a memory keeps its size."""
    p = p if v.dtype is p.dtype else p.to(torch.promote_types(p.dtype, torch.float32))
    if p.shape == v.shape and fits(p, v, dtypes=(torch.float32, torch.bfloat16)):
        gamma, y = _Native.apply(_DECAYED, p.contiguous(), v.contiguous())
        return gamma, y
    return _decayed(p, v)


def _decayed(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = p.to(torch.promote_types(p.dtype, torch.float32))
    gamma = batch_invariant(torch.sigmoid, p)
    # √(1 − γ²), by a logarithm of 1 − γ, whose gradient is finite where γ rounds to 1
    return gamma, v * (
        batch_invariant(lambda p: torch.exp(0.5 * F.logsigmoid(-p)), p) * torch.sqrt(1 + gamma)
    )


_DECAYED = _Op(
    lambda p, v: (training.decayed(p, v),),
    lambda p, v, *dy: training.decayed_backward(p, v, *(d.contiguous() for d in dy)),
    _decayed,
)


# ---------------------------------------------------------------- mixes


def shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, ...]:
    """x + (before − x) · mix for each of the N mixes, all of one dtype. before: the token before each in its document;
    `last` for the first token, zeros where `reset` says that a document begins."""
    if fits(x_BTD, last_BD, mix_ND):
        inputs = (None if x is None else x.contiguous() for x in (x_BTD, last_BD, mix_ND, reset_BT))
        y: tuple[Tensor, ...] = _Native.apply(_SHIFTED, *inputs)
        return y
    return _shifted(x_BTD, last_BD, mix_ND, reset_BT)


def _shifted(x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, ...]:
    before_BTD = last_BD[:, None]
    if x_BTD.shape[1] > 1:
        before_BTD = torch.cat([before_BTD, x_BTD[:, :-1]], 1)
    if reset_BT is not None:
        before_BTD = before_BTD.masked_fill(reset_BT[:, :, None], 0)
    return mixed(x_BTD, before_BTD, mix_ND)


_SHIFTED = _Op(
    lambda *inputs: (training.shifted(*inputs),),
    lambda x, last, mix, reset, *dy: (
        *training.shifted_backward(x, last, mix, reset, [d.contiguous() for d in dy]),
        None,
    ),
    _shifted,
)


def mixed(x_BTD: Tensor, before_BTD: Tensor, mix_ND: Tensor) -> tuple[Tensor, ...]:
    """`shifted`, with the tokens before given."""
    apart_BTD = before_BTD - x_BTD
    if x_BTD.shape[1] == 1:  # of one token all mixes at once, in two operations
        return (x_BTD + apart_BTD * mix_ND[:, None, None]).unbind(0)
    return tuple(x_BTD + apart_BTD * mix_D for mix_D in mix_ND)
