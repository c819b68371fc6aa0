"""Projection on a polytope {x : N x ≤ b}, its Jacobian, and a radial correction of rounding
(docs/designs/perspective.md#safety-polytope).

The dual, min ½ λᵀGλ − λᵀr with λ ≥ 0, G = N Nᵀ and r = N h − b, is solved by block principal pivoting (Júdice and
Pires 1994); where it does not end, by Hildreth's sweeps, which are cyclic projections with the one number for each
half-space that they need to end at the nearest point; where they do not, as least squares with λ ≥ 0 (Lawson and Hanson
1974). Everything is float64.

Shapes: N points, H half-spaces, A active ones, D width.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.util.errors import ConfigError

SLACK = 1e-6  # by which a point may be outside, after rounding to its type
RIDGE, ROUNDS, SWEEPS, PATIENCE = 1e-12, 50, 1000, 3
KKT = 1e-6  # times 1 + |h|: where Hildreth's sweeps stop


class Report(NamedTuple):
    """The effect of projecting each point [N]: whether it was outside, how far it moved, rounds of pivoting (0: none;
    negative: of Hildreth's sweeps)."""

    violated_N: Tensor
    moved_N: Tensor
    rounds_N: Tensor


class Faces(NamedTuple):
    """Half-spaces N x ≤ b [H,D], [H] with G = N Nᵀ [H,H], and a point inside [D]; all float64."""

    normal_HD: Tensor
    offset_H: Tensor
    gram_HH: Tensor
    inside_D: Tensor


def faces(normal_HD: Tensor, offset_H: Tensor, inside_D: Tensor) -> Faces:
    """The faces of a polytope."""
    normal_HD = normal_HD.double()
    return Faces(normal_HD, offset_H.double(), normal_HD @ normal_HD.T, inside_D.double())


def project(h_ND: Tensor, made: Faces) -> tuple[Tensor, Report]:
    """The nearest points of the polytope, in the type of h, outside by at most `SLACK`; h itself where all are inside.
    Differentiable, once: the Jacobian is I − N_Aᵀ(N_A N_Aᵀ)⁻¹N_A of the active faces. ConfigError: another width."""
    D = made.normal_HD.shape[1]
    if h_ND.shape[-1] != D:
        raise ConfigError(f"polytope: of {D} numbers, the states have {h_ND.shape[-1]}")
    with torch.no_grad():
        excess_NH = h_ND.double() @ made.normal_HD.T - made.offset_H
        violated_N = (excess_NH > 0).any(1)
        rounds_N = torch.zeros(len(h_ND), dtype=torch.int64, device=h_ND.device)
        active_NH = torch.zeros_like(excess_NH, dtype=torch.bool)
        if not violated_N.any():
            return h_ND, Report(violated_N, torch.zeros_like(h_ND[:, 0], dtype=torch.float64), rounds_N)
        x_ND = h_ND.double().clone()  # of float64 it would be the input itself
        for row in violated_N.nonzero()[:, 0].tolist():
            multiplier_H, rounds_N[row] = _dual(made, excess_NH[row], float(h_ND[row].double().norm()))
            active_NH[row] = multiplier_H > 0
            x_ND[row] -= multiplier_H @ made.normal_HD
        moved_N = (x_ND - h_ND).norm(dim=1)
        cast_ND = _inside(x_ND, h_ND, violated_N, made)
    to_ND = _Projection.apply(h_ND, cast_ND, active_NH, made.normal_HD, made.gram_HH)
    return to_ND, Report(violated_N, moved_N, rounds_N)


def _dual(made: Faces, excess_H: Tensor, size: float) -> tuple[Tensor, int]:
    """The multipliers λ of one point, and the rounds that it took. At most D faces are free, for more are dependent."""
    gram_HH, (H, D), tolerance = made.gram_HH, made.normal_HD.shape, 1e-10 * (1 + size)
    free_H = _least(-excess_H, excess_H > 0, max(1, D // 2))
    least, patience = H + 1, PATIENCE
    for turn in range(1, ROUNDS + 1):
        multiplier_H = torch.zeros_like(excess_H)
        if (solved_A := _solved(gram_HH[free_H][:, free_H], excess_H[free_H])) is None:
            break
        multiplier_H[free_H] = solved_A
        gradient_H = gram_HH @ multiplier_H - excess_H
        out_H, in_H = free_H & (multiplier_H < -tolerance), ~free_H & (gradient_H < -tolerance)
        count = int((out_H | in_H).sum())
        if count == 0:
            return multiplier_H.clamp_min(0), turn
        least, patience = (count, PATIENCE) if count < least else (least, patience - 1)
        if patience < 0:  # one at a time
            last = int((out_H | in_H).nonzero()[-1, 0])
            free_H[last] = ~free_H[last]
        else:
            free_H &= ~out_H
            free_H |= _least(gradient_H, in_H, max(1, min(D - int(free_H.sum()), D // 4)))
    multiplier_H, sweeps = hildreth(gram_HH, excess_H, KKT * (1 + size))
    active_H = multiplier_H > 1e-9 * multiplier_H.max()
    exact_H = torch.zeros_like(multiplier_H)
    exact_H[active_H] = torch.linalg.pinv(gram_HH[active_H][:, active_H], hermitian=True) @ excess_H[active_H]
    solves = exact_H.min() >= -tolerance and (gram_HH @ exact_H - excess_H).min() >= -tolerance
    return (exact_H.clamp_min(0) if solves else _least_squares(made, excess_H, multiplier_H)), sweeps


def _least_squares(made: Faces, excess_H: Tensor, near_H: Tensor) -> Tensor:
    """The multipliers λ = u / (1 − r·u) of the u ≥ 0 with the least |Nᵀu|² + (1 − r·u)²; `near` if none are found."""
    from scipy.optimize import nnls

    size = excess_H.max()
    rows = torch.cat([made.normal_HD, (excess_H / size)[:, None]], 1).T
    wanted = torch.zeros(len(rows), dtype=rows.dtype)
    wanted[-1] = 1
    try:
        found, _ = nnls(rows.cpu().numpy(), wanted.numpy(), maxiter=100 * len(near_H))
    except RuntimeError:
        found = None
    if found is not None:
        u_H = torch.from_numpy(found).to(near_H)
        if (left := 1 - (excess_H / size) @ u_H) > 0:
            return size * u_H / left
    warnings.warn(
        "a projection on the polytope ends inside it, but perhaps not at the nearest point", stacklevel=2
    )
    return near_H


def _least(value_H: Tensor, among_H: Tensor, count: int) -> Tensor:
    """Mask [H] of the `count` smallest values among those of `among_H`."""
    chosen_H = torch.zeros_like(among_H)
    chosen_H[value_H.where(among_H, torch.inf).argsort(stable=True)[:count]] = True
    return chosen_H & among_H


def _solved(gram_AA: Tensor, excess_A: Tensor) -> Tensor | None:
    """G_AA⁻¹ r_A; None where rows are dependent."""
    ridged = gram_AA + RIDGE * torch.eye(len(gram_AA), dtype=gram_AA.dtype, device=gram_AA.device)
    factor, failed = torch.linalg.cholesky_ex(ridged)
    return None if failed else torch.cholesky_solve(excess_A[:, None], factor)[:, 0]


def hildreth(gram_HH: Tensor, excess_H: Tensor, tolerance: float) -> tuple[Tensor, int]:
    """Multipliers by coordinate ascent, up to `SWEEPS` sweeps; the sweeps, as a negative number."""
    gram, left, size = gram_HH.cpu().numpy(), -excess_H.cpu().numpy(), gram_HH.diagonal().cpu().numpy()
    found, sweeps = 0 * left, 0
    while sweeps < SWEEPS:
        sweeps += 1
        for j in range(len(found)):
            step = max(-found[j], -left[j] / size[j])
            if step:
                found[j] += step
                left += step * gram[j]
        if abs(left.clip(max=found)).max() <= tolerance:  # |min(λ, Gλ − r)|
            break
    return torch.from_numpy(found).to(gram_HH.device), -sweeps


def _inside(x_ND: Tensor, h_ND: Tensor, violated_N: Tensor, made: Faces) -> Tensor:
    """x where h was outside, in the type of h, drawn towards the inner point as far as rounding needs."""
    cast_ND = torch.where(violated_N[:, None], x_ND.to(h_ND.dtype), h_ND)
    room_H = made.offset_H - made.normal_HD @ made.inside_D
    for row in violated_N.nonzero()[:, 0].tolist():
        short = 1e-7
        while short < 1 and float((made.normal_HD @ cast_ND[row].double() - made.offset_H).max()) > SLACK:
            way_D = x_ND[row] - made.inside_D
            along_H = made.normal_HD @ way_D
            most = float((room_H / along_H).where(along_H > 0, torch.inf).min())
            cast_ND[row] = (made.inside_D + (1 - short) * min(most, 1.0) * way_D).to(h_ND.dtype)
            short *= 10
    return cast_ND


class _Projection(torch.autograd.Function):
    """h ↦ x with the Jacobian of the active faces, which is symmetric: forward and reverse are one product."""

    @staticmethod
    def forward(h_ND: Tensor, x_ND: Tensor, active_NH: Tensor, normal_HD: Tensor, gram_HH: Tensor) -> Tensor:
        return x_ND.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_ND: Tensor) -> Any:
        return _along(dx_ND, *ctx.saved_tensors), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dh_ND: Tensor, *_: Any) -> Tensor:
        return _along(dh_ND, *ctx.saved_tensors)


def _along(d_ND: Tensor, active_NH: Tensor, normal_HD: Tensor, gram_HH: Tensor) -> Tensor:
    """The part of each direction along the active faces."""
    kept_ND = d_ND.double().clone()
    for row in active_NH.any(1).nonzero()[:, 0].tolist():
        active_H = active_NH[row]
        normal_AD = normal_HD[active_H]
        inverse_AA = torch.linalg.pinv(gram_HH[active_H][:, active_H], hermitian=True)
        kept_ND[row] -= (inverse_AA @ (normal_AD @ kept_ND[row])) @ normal_AD
    return kept_ND.to(d_ND.dtype)
