"""The experts of a layer over several ranks: each has an equal part, and tokens travel to their expert's and back.

Shapes: N tokens here, M tokens that arrive, D model width, F hidden width, E experts, L of them here, S hidden units
sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perspectron.ops import experts

Counts = list[int]


@dataclass(frozen=True)
class Spread:
    """The process group that holds all experts, its number of ranks, and the index of this one."""

    group: Any
    size: int
    part: int

    def swiglu(
        self,
        x_ND: Tensor,
        expert_N: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        *,
        units: slice = slice(0),
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`ops.experts.swiglu` over the experts of all ranks; `weights` are this rank's [L,F,D]. All ranks must call
        it. The sample's gradient is not collected from the others, as every rank computes the same."""
        here = len(weights[0])
        order_N = expert_N.argsort(stable=True)
        expert_N = expert_N[order_N]
        sent = torch.bincount(expert_N // here, minlength=self.size)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.group)
        out, back = came.tolist(), sent.tolist()
        expert_M = expert_N.new_empty(sum(out))
        dist.all_to_all_single(expert_M, expert_N, out, back, group=self.group)
        x_MD: Tensor = _Exchange.apply(x_ND.index_select(0, order_N), out, back, self.group)
        y_MD, sample = experts.swiglu(
            x_MD, expert_M - self.part * here, *weights, units=units, rounded=rounded
        )
        y_ND: Tensor = _Exchange.apply(y_MD, back, out, self.group)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return y_ND.index_select(0, place_N), _All.apply(sample, self)


class _Exchange(torch.autograd.Function):
    """Exchange rows with the other ranks: send as many to each as `back` says, and receive as many as `out` says."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, out: Counts, back: Counts, group: Any) -> Tensor:
        ctx.given = (back, out, group)
        y_MD = x_ND.new_empty(sum(out), x_ND.shape[1])
        dist.all_to_all_single(y_MD, x_ND.contiguous(), out, back, group=group)
        return y_MD

    @staticmethod
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(dy_MD, *ctx.given), None, None, None


class _All(torch.autograd.Function):
    """The parts of all ranks, joined along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Spread) -> Tensor:
        ctx.spread, ctx.here = spread, len(x)
        if x.numel() == 0:
            return x.new_empty(len(x) * spread.size, *x.shape[1:])
        parts = [torch.empty_like(x) for _ in range(spread.size)]
        dist.all_gather(parts, x.contiguous(), group=spread.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        spread, here = ctx.spread, ctx.here
        return dx[spread.part * here : (spread.part + 1) * here] * spread.size, None
