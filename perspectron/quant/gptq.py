"""GPTQ: weights are rounded one column at a time, and the remaining columns compensate for each column's error
(Frantar et al. 2022, arXiv 2210.17323).

It minimises ‖(W − Ŵ) X‖ over the layer's inputs X on calibration text, by H = X Xᵀ.

Shapes: N rows (outputs), K columns (inputs), C columns of a block, T tokens, G groups.
"""

import torch
from torch import Tensor

from perspectron.ops.packing import GROUP, LAYOUTS, Packed, pack
from perspectron.quant.formats import check, decode, encode, grid, rows_scale
from perspectron.util.config import one_of, require
from perspectron.util.errors import DataError

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


def gptq(weight_NK: Tensor, hessian: Hessian, format: str, *, damping: float = 0.05) -> Packed:
    """The packed matrix whose products are nearest to W's on what `hessian` saw.

    damping: added to the diagonal, as a share of its mean; the default was chosen on held-out text of one model.
    A column that never read anything is rounded to the nearest. Columns come in blocks, so that what lies ahead is
    corrected once for a block; blocks are groups, which get their scales and offsets when their turn comes.
    DataError: a weight or what was read is not finite, or there is too little of it to factor H with any damping.
    """
    one_of(format, FORMATS, "format")
    require(damping > 0, "damping", damping, "> 0")
    check(weight_NK.detach(), format)
    weight = weight_NK.detach().to(hessian.sum_KK, copy=True)
    if not hessian.sum_KK.diagonal().isfinite().all():
        raise DataError("calibration: the input of a layer is not finite")
    factor_KK = _factor(hessian.sum_KK, damping)
    grouped, groups = LAYOUTS[format].zero is None, list[tuple[Tensor, Tensor]]()
    scale_N, offset_N = rows_scale(weight.float()).double(), None
    ahead_KN = weight.T.contiguous()
    codes_KN = torch.empty(ahead_KN.shape, dtype=torch.uint8, device=ahead_KN.device)
    for start in range(0, len(ahead_KN), GROUP):
        stop = start + GROUP
        block_CN, factor_CC = ahead_KN[start:stop], factor_KK[start:stop, start:stop]
        if grouped:
            groups.append(grid(block_CN.T.float(), format, factor_CC.diagonal().float() ** -2))
            scale_N, offset_N = (part.double() for part in groups[-1])
        error_CN = torch.empty_like(block_CN)
        for i in range(len(block_CN)):
            codes_N = encode(block_CN[i], scale_N, offset_N, format)
            error_CN[i] = (block_CN[i] - decode(codes_N, scale_N, offset_N, format)) / factor_CC[i, i]
            block_CN[i:].addr_(factor_CC[i, i:], error_CN[i], alpha=-1)
            codes_KN[start + i] = codes_N
        ahead_KN[stop:].addmm_(factor_KK[start:stop, stop:].T, error_CN, alpha=-1)
    if not grouped:
        return pack(codes_KN.T, scale_N.float(), None, format)
    scale_NG, offset_NG = (torch.stack(parts, 1) for parts in zip(*groups, strict=True))
    return pack(codes_KN.T, scale_NG, offset_NG, format)


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
