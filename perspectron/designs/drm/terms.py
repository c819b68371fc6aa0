"""The terms that the DRM mixer adds to the loss, each about a property of its geometry (docs/designs/drm.md#loss).

Every term covers real tokens only, without padding.

Shapes: B batch, T time, S state width, N directions, R metric rank.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from perspectron.designs.drm.law import Trace
from perspectron.util import ranks
from perspectron.util.config import at_least, positive
from perspectron.util.terms import Term

OF_METRIC = ("action", "metric_reg", "metric_diversity", "condition", "metric_u_target", "metric_u_floor")
"""The terms that depend on the metric."""
OF_GATES = ("dim_sparsity", "dim_entropy", "dim_variance", "active_fraction")
"""The terms that depend on the gates, which there are with directions only."""
AIMS_OF_GATES = ("spread_target", "active_target")
"""What these terms aim at."""
TINY = 1e-30  # below it a gate is shut: 0 log 0 = 0


@dataclass(frozen=True)
class Losses:
    """The weight of each term, by name, and the terms' targets."""

    action: float = 0.01
    """Energy of the velocity under the metric."""
    dim_sparsity: float = 0.001
    """Σa, the active dimensions."""
    dim_entropy: float = 0.001
    """Entropy of the gates, subtracted because it should be large."""
    dim_variance: float = 0.01
    """Shortfall of the spread of Σa from `spread_target`, squared."""
    active_fraction: float = 0.01
    """Excess of the mean gate over `active_target`, squared."""
    metric_reg: float = 0.001
    """Mean squares of d and of U."""
    metric_diversity: float = 0.001
    """Minus the variance of d over time."""
    condition: float = 0.001
    """Excess of the log of the metric's mean condition number over that of `condition_target`, squared."""
    metric_u_target: float = 0.001
    """Difference between the mean norm of U and `u_target`, squared."""
    metric_u_floor: float = 0.001
    """Shortfall of the norms of U from `u_floor`, squared."""
    recurrence: float = 0.0
    """Drift of the norm of z from a document's first token to its last, squared."""
    blindspot: float = 0.0
    """Mean risk, if risk is on."""
    spread_target: float = 0.15
    active_target: float = 0.65
    condition_target: float = 100.0
    u_target: float = 1.0
    u_floor: float = 0.05

    def __post_init__(self) -> None:
        at_least(0, self, *(field.name for field in fields(self)))
        positive(self, "condition_target")


class Tokens:
    """The real tokens of a chunk, and where in it their documents begin and end."""

    def __init__(self, z_BTS: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> None:
        none_BT = torch.zeros(z_BTS.shape[:2], dtype=torch.bool, device=z_BTS.device)
        self.real_BT = ~(none_BT if pad_BT is None else pad_BT)
        self.reset_BT = none_BT if reset_BT is None else reset_BT

    def mean(self, x_BT: Tensor) -> Tensor:
        """Mean over the real tokens; 0 where there are none."""
        summed = ranks.all_reduce_sum(torch.where(self.real_BT, x_BT, 0).sum())
        return summed / ranks.all_reduce_sum(self.real_BT.sum()).clamp_min(1)

    def variance_over_time(self, x_BTS: Tensor) -> Tensor:
        """Variance over time in each row, then the mean over all rows that hold tokens."""
        real_BT1, count_B11 = self.real_BT[:, :, None], self.real_BT.sum(1)[:, None, None].clamp_min(1)
        mean_B1S = torch.where(real_BT1, x_BTS, 0).sum(1, keepdim=True) / count_B11
        square_BTS = torch.where(real_BT1, x_BTS - mean_B1S, 0).square()
        rows = ranks.all_reduce_sum(self.real_BT.any(1).sum()).clamp_min(1)
        return ranks.all_reduce_sum((square_BTS / count_B11).sum()) / (rows * x_BTS.shape[-1])

    def change(self, x_BT: Tensor) -> Tensor:
        """Mean square, over documents, of the last token's x less the first's."""
        B, T = x_BT.shape
        read_BT = self.real_BT.long()
        count_BT, document_BT = read_BT.cumsum(1), self.reset_BT.long().cumsum(1)
        earlier_BT = torch.where(self.reset_BT, count_BT - read_BT, 0).cummax(1).values
        tokens_BT = read_BT.new_zeros(B, T + 1).scatter_add_(1, document_BT, read_BT).gather(1, document_BT)
        first_BT, last_BT = (self.real_BT & (count_BT - earlier_BT == n) for n in (1, tokens_BT))
        time_T = torch.arange(T, device=x_BT.device)
        start_BT = x_BT.gather(1, torch.where(first_BT, time_T, 0).cummax(1).values)
        changed = ranks.all_reduce_sum(torch.where(last_BT, x_BT - start_BT, 0).square().sum())
        return changed / ranks.all_reduce_sum(last_BT.sum()).clamp_min(1)


def terms(
    z_BTS: Tensor, trace: Trace, risk_BT: Tensor | None, losses: Losses, tokens: Tokens
) -> dict[str, Term]:
    """Every term, with its weight; `condition_number` and `metric_u_norm` are diagnostics."""
    d_BTS, U_BTRS, v_BTS = trace.d_BTS, trace.U_BTRS, trace.v_BTS
    u_norm_BT = torch.linalg.vector_norm(U_BTRS, dim=(-2, -1))
    stretch_BT = (U_BTRS @ v_BTS[..., None]).square().sum((-2, -1))
    energy_BTS = (d_BTS if risk_BT is None else d_BTS + risk_BT[..., None]) * v_BTS.square()
    kappa = tokens.mean((d_BTS.amax(-1) + u_norm_BT.square()) / d_BTS.amin(-1))
    excess = (kappa.log() - math.log(losses.condition_target)).relu()
    square_BT = d_BTS.square().mean(-1)
    if U_BTRS.shape[2] > 0:
        square_BT = square_BT + U_BTRS.square().mean((-2, -1))
    u_norm = tokens.mean(u_norm_BT)
    floor_BT = (losses.u_floor - u_norm_BT).relu().square() * (U_BTRS.shape[2] > 0)
    named = _of_gates(trace.a_BTN, losses, tokens) | {
        "action": Term(tokens.mean(energy_BTS.sum(-1) + stretch_BT), losses.action),
        "metric_reg": Term(tokens.mean(square_BT), losses.metric_reg),
        "metric_diversity": Term(-tokens.variance_over_time(d_BTS), losses.metric_diversity),
        "condition": Term(excess.square(), losses.condition),
        "metric_u_target": Term((u_norm - losses.u_target).square(), losses.metric_u_target),
        "metric_u_floor": Term(tokens.mean(floor_BT), losses.metric_u_floor),
        "recurrence": Term(tokens.change(torch.linalg.vector_norm(z_BTS, dim=-1)), losses.recurrence),
        "condition_number": Term(kappa),
        "metric_u_norm": Term(u_norm),
    }
    if risk_BT is not None:
        named["blindspot"] = Term(tokens.mean(risk_BT), losses.blindspot)
    return named


def _of_gates(a_BTN: Tensor, losses: Losses, tokens: Tokens) -> dict[str, Term]:
    """The terms of the gates; none where there are no gates."""
    if a_BTN.shape[-1] == 0:
        return {}
    active_BT = a_BTN.sum(-1)
    active = tokens.mean(active_BT)
    variance = tokens.mean((active_BT - active.detach()).square())  # its slope in the mean is 0
    spread = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()  # a slope at 0
    excess = (active / a_BTN.shape[-1] - losses.active_target).relu()
    open_BTN = a_BTN.clamp(TINY, 1 - torch.finfo(a_BTN.dtype).eps)
    entropy_BT = -(open_BTN * open_BTN.log() + (1 - open_BTN) * (-open_BTN).log1p()).mean(-1)
    return {
        "dim_sparsity": Term(active, losses.dim_sparsity),
        "dim_entropy": Term(tokens.mean(entropy_BT), -losses.dim_entropy),
        "dim_variance": Term((losses.spread_target - spread).relu().square(), losses.dim_variance),
        "active_fraction": Term(excess.square(), losses.active_fraction),
    }
