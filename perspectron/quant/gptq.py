"""GPTQ: weights rounded one column at a time, each column's error made up for by those still to come (Frantar et al.
2022, arXiv 2210.17323).

What is minimised is ‖(W − Ŵ) X‖ over what the layer read on calibration text, through H = X Xᵀ.

Shapes: N rows (outputs), K columns (inputs), C columns of a block, T tokens, G groups.
"""

import torch
from torch import Tensor

from perspectron.config import require
from perspectron.errors import DataError
from perspectron.ops.packing import GROUP, LAYOUTS, Packed, dequantise, pack
from perspectron.quant.formats import check, decode, encode, grid, rows_scale

FORMATS = ("2bit", "4bit", "int8")
ATTEMPTS = 5  # each with ten times the damping


class Hessian:
    """Σ x xᵀ [K,K] of what a layer read, in float64."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sum_KK = torch.zeros(columns, columns, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """x: [..., K]."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).to(self.sum_KK)
        self.sum_KK.addmm_(x_TK.T, x_TK)

    def error(self, weight_NK: Tensor, packed: Packed) -> float:
        """‖(W − Ŵ) X‖ / ‖W X‖; 0 where both are."""
        weight = weight_NK.detach().to(self.sum_KK)
        off = dequantise(packed, torch.float64) - weight
        whole, part = (((w @ self.sum_KK) * w).sum().clamp_min(0).sqrt() for w in (weight, off))
        return float(part / whole) if whole > 0 else float(part)


def gptq(
    weight_NK: Tensor, hessian: Hessian, format: str, *, damping: float = 0.05, act_order: bool = False
) -> Packed:
    """The packed matrix whose products are nearest to W's on what `hessian` saw.

    damping: added to the diagonal, as a share of its mean; the default was chosen on held-out text of one model.
    act_order: begin with the columns that read the most; scales and offsets then are those of the weights as they were.
    A column that never read anything is rounded to the nearest.
    DataError: a weight or what was read is not finite, or there is too little of it to factor H with any damping.
    """
    require(format in FORMATS, "format", format, "one of " + ", ".join(FORMATS))
    require(damping > 0, "damping", damping, "> 0")
    check(weight_NK.detach(), format)
    weight = weight_NK.detach().to(hessian.sum_KK, copy=True)
    diagonal_K = hessian.sum_KK.diagonal()
    if not diagonal_K.isfinite().all():
        raise DataError("calibration: what a layer read is not finite")
    order_K = torch.arange(weight.shape[1], device=weight.device)
    if act_order:
        order_K = diagonal_K.argsort(descending=True, stable=True)
    factor_KK = _factor(hessian.sum_KK[order_K][:, order_K], damping)
    scale, offset = _static(weight, format, diagonal_K) if act_order else _rows(weight, format)
    codes_NK = _round(weight, order_K, factor_KK, format, scale, offset)
    return pack(codes_NK, scale, offset, format)


def _factor(sum_KK: Tensor, damping: float) -> Tensor:
    """Upper triangular R with Rᵀ R = H⁻¹, H damped."""
    diagonal_K = sum_KK.diagonal()
    dead_K = diagonal_K == 0
    mean = diagonal_K.mean() if not dead_K.all() else 1.0
    identity_KK = torch.eye(len(sum_KK), dtype=sum_KK.dtype, device=sum_KK.device)
    for attempt in range(ATTEMPTS):
        damped_KK = sum_KK + identity_KK * (damping * 10**attempt * mean)
        # H = U Uᵀ with U upper triangular: the Cholesky factor of H read backwards. R is U's inverse.
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK.flip(0, 1))
        if not failed:
            return torch.linalg.solve_triangular(lower_KK.flip(0, 1), identity_KK, upper=True)
    raise DataError(
        f"calibration: H has no Cholesky factor with damping = {damping * 10 ** (ATTEMPTS - 1):g}"
    )


def _rows(weight_NK: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """Where scales go: of int8 they are known, of groups they come with the groups."""
    if LAYOUTS[format].zero is not None:
        return rows_scale(weight_NK.float()), None
    shape = (len(weight_NK), -(-weight_NK.shape[1] // GROUP))
    return weight_NK.new_zeros(shape, dtype=torch.float32), weight_NK.new_zeros(shape, dtype=torch.float32)


def _static(weight_NK: Tensor, format: str, diagonal_K: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets of all groups, of the weights as they are."""
    scale, offset = _rows(weight_NK, format)
    if offset is not None:
        for g in range(scale.shape[1]):
            columns = slice(g * GROUP, (g + 1) * GROUP)
            scale[:, g], offset[:, g] = grid(
                weight_NK[:, columns].float(), format, diagonal_K[columns].float()
            )
    return scale, offset


def _round(
    weight_NK: Tensor, order_K: Tensor, factor_KK: Tensor, format: str, scale: Tensor, offset: Tensor | None
) -> Tensor:
    """Codes [N,K]. Columns in the order asked for, in blocks, so that what lies ahead is corrected once for a block;
    where the order is their own, blocks are groups, which get their scales and offsets when they come."""
    ahead_KN = weight_NK.T[order_K].contiguous()
    codes_KN = torch.empty(ahead_KN.shape, dtype=torch.uint8, device=ahead_KN.device)
    in_order = bool((order_K.diff() == 1).all())
    for start in range(0, len(order_K), GROUP):
        stop = start + GROUP
        block_CN, factor_CC = ahead_KN[start:stop], factor_KK[start:stop, start:stop]
        if offset is not None and in_order:
            importance_C = factor_CC.diagonal().float() ** -2
            group = grid(block_CN.T.float(), format, importance_C)
            scale[:, start // GROUP], offset[:, start // GROUP] = group
        error_CN = torch.empty_like(block_CN)
        for i, column in enumerate(order_K[start:stop].tolist()):
            s_N, o_N = scale.double(), None
            if offset is not None:
                s_N, o_N = (part[:, column // GROUP].double() for part in (scale, offset))
            codes_KN[column] = encode(block_CN[i], s_N, o_N, format)
            error_CN[i] = (block_CN[i] - decode(codes_KN[column], s_N, o_N, format)) / factor_CC[i, i]
            block_CN[i:].addr_(factor_CC[i, i:], error_CN[i], alpha=-1)
        ahead_KN[stop:].addmm_(factor_KK[start:stop, stop:].T, error_CN, alpha=-1)
    return codes_KN.T
