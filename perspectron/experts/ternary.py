"""Ternary-aware training: matrices of −s, 0 and s with one scale s each, and activations of 8 bits.

The forward pass uses rounded values. The backward pass treats rounding as the identity (straight through), so that the
float weights keep learning. Nothing is saved for it. Source: docs/designs/perspective.md#ternary-weights.

Shapes: any leading dimensions, then O × I, a matrix.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

SHARE = "ternary_share_1"
"""Name of the buffers [1] that hold the share to which a module's matrices are converted."""
Rule = Literal["absmean", "twn"]
"""Rule for which weights become 0: those below half the mean |W| ("absmean", BitNet b1.58), or below 0.7 of it ("twn",
ternary weight networks)."""
Schedule = Literal["linear", "quarters"]
"""Meaning of a share of a conversion: how far all weights have moved ("linear"), or how many weights are converted, the
largest first, in quarters ("quarters")."""
TWN = 0.7
QUARTERS = 4


def trits(weight_OI: Tensor, rule: Rule = "absmean") -> tuple[Tensor, Tensor]:
    """(T, s): T = clip(round(W / s), −1, 1), in W's dtype; s = mean |W| of each matrix [..., 1, 1]. By "twn" T is the
    sign of weights above the threshold, and s their mean |W|."""
    scale_11 = _scale(weight_OI)
    if rule == "absmean":
        return torch.div(weight_OI, scale_11).round_().clamp(-1, 1), scale_11
    size_OI = weight_OI.abs()
    kept_OI = size_OI > TWN * scale_11
    total_11 = (size_OI * kept_OI).sum(
        (-2, -1), keepdim=True, dtype=torch.promote_types(size_OI.dtype, torch.float32)
    )
    scale_11 = _not_zero((total_11 / kept_OI.sum((-2, -1), keepdim=True).clamp_min(1)).to(weight_OI.dtype))
    return weight_OI.sign() * kept_OI, scale_11


def ternary(
    weight_OI: Tensor,
    share: Tensor | float = 1.0,
    rule: Rule = "absmean",
    schedule: Schedule = "linear",
) -> Tensor:
    """(1 − share)·W + share·s·T of each matrix; exactly W at share 0 and s·T at share 1. By "quarters", below 1, s·T
    replaces the largest 25, 50 or 75% of the weights.

    share: one number in [0, 1], or a tensor of one. The gradient passes to W unchanged, and not to the share.
    """
    result: Tensor = _Ternary.apply(weight_OI, share, rule, schedule)
    return result


def int8(x_I: Tensor) -> Tensor:
    """Round each vector to whole steps of max |x| / 127, straight through."""
    result: Tensor = _Int8.apply(x_I)
    return result


def stats(weight_OI: Tensor, rule: Rule = "absmean") -> tuple[Tensor, Tensor]:
    """(fraction of zeros, s) of each matrix, [...] each."""
    trits_OI, scale_11 = trits(weight_OI.detach(), rule)
    return (trits_OI == 0).float().mean((-2, -1)), scale_11.squeeze(-1).squeeze(-1)


def share_at(step: float, start: float, end: float) -> float:
    """Share at the update that follows `step` others: 0 before `start`, then linear up to 1 at `end` updates."""
    done = step + 1
    return 1.0 if done >= end else 0.0 if done <= start else (done - start) / (end - start)


def set_share(model: nn.Module, share: float) -> None:
    """Set the share of every module that has one; it never falls in one that is `frozen`."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name == SHARE and getattr(module, "frozen", False):
                buffer.clamp_(min=share)
            elif name == SHARE:
                buffer.fill_(share)


def converted(model: nn.Module) -> bool:
    """True unless a conversion is under way: every share is 1, or there is none."""
    return all(bool(buffer == 1) for name, buffer in model.named_buffers() if name.endswith(SHARE))


def _scale(weight_OI: Tensor) -> Tensor:
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    # A norm needs no copy of |W|; summed in float32 or wider, large sums do not stagnate.
    total_11 = torch.linalg.vector_norm(weight_OI, 1, (-2, -1), keepdim=True, dtype=wide)
    mean_11 = total_11 / (weight_OI.shape[-1] * weight_OI.shape[-2])
    return _not_zero(mean_11.to(weight_OI.dtype))


def _not_zero(scale: Tensor) -> Tensor:
    """The scale, made positive where it is 0, so that a matrix or a token of zeros gives zeros."""
    return scale.clamp_min(torch.finfo(scale.dtype).tiny)


class _StraightThrough(torch.autograd.Function):
    """Base of functions whose gradient, in reverse and forward mode, passes to the first argument unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *(None,) * ctx.others

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


class _Ternary(_StraightThrough):
    @staticmethod
    def forward(weight_OI: Tensor, share: Tensor | float, rule: Rule, schedule: Schedule) -> Tensor:
        trits_OI, scale_11 = trits(weight_OI, rule)
        rounded_OI = trits_OI.mul_(scale_11)
        if schedule == "quarters":
            return torch.where(_largest(weight_OI, share), rounded_OI, weight_OI)
        if isinstance(share, Tensor):
            share = share.to(weight_OI.dtype)
        # lerp is exact at both ends: it counts from the nearer one.
        return torch.lerp(weight_OI, rounded_OI, share)


def _largest(weight_OI: Tensor, share: Tensor | float) -> Tensor:
    """Mask of the largest weights of each matrix: a `share` of them, rounded up to quarters."""
    size = weight_OI.abs().flatten(-2)
    count = math.ceil(QUARTERS * float(share)) * size.shape[-1] // QUARTERS
    chosen = torch.zeros_like(size, dtype=torch.bool)
    return chosen.scatter_(-1, size.topk(count).indices, True).view_as(weight_OI)


class _Int8(_StraightThrough):
    @staticmethod
    def forward(x_I: Tensor) -> Tensor:
        wide_I = x_I.to(torch.promote_types(x_I.dtype, torch.float32))
        step_1 = _not_zero(wide_I.abs().amax(-1, keepdim=True) / 127)
        return torch.div(wide_I, step_1).round_().mul_(step_1).to(x_I.dtype)
