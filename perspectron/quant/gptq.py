"""GPTQ: weights are rounded one column at a time, and the remaining columns compensate for each column's error
(Frantar et al. 2022, arXiv 2210.17323).

It minimises ‖(W − Ŵ) X‖ over the layer's inputs X on calibration text, by H = X Xᵀ.

Shapes: N rows (outputs), K columns (inputs), C columns of a block, T tokens, G groups.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from perspectron.ops import tiles
from perspectron.ops.packing import GROUP, LAYOUTS, Packed, pack, pack_tiles
from perspectron.quant.formats import check, decode, encode, grid, rows_scale, tile_grid, units, whole_units
from perspectron.util.config import one_of, require
from perspectron.util.errors import DataError

FORMATS = ("2bit", "4bit", "int8", *tiles.FORMATS)
ATTEMPTS = 5  # at a factorisation, each with ten times the damping
SQUARE = 512  # columns of H at a time


class Hessian:
    """Σ x xᵀ [K,K] over a layer's inputs x, summed in float32 within a call and in float64 over all. Only the lower
    triangle, and some of the rest, is filled."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sum_KK = torch.zeros(columns, columns, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add inputs x [..., K]."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
        for start in range(0, len(self.sum_KK), SQUARE):
            stop = start + SQUARE
            self.sum_KK[start:stop, :stop] += x_TK[:, start:stop].T @ x_TK[:, :stop]


class _Grid:
    """Scales and offsets of one matrix, determined group by group."""

    def __init__(self, weight_NK: Tensor, format: str) -> None:
        self.format, self._groups = format, list[tuple[Tensor, Tensor | None]]()
        self.width = LAYOUTS[format].group
        self._unit_N = units(weight_NK, format) if format in tiles.FORMATS else None
        self.scale_N, self.offset_N = rows_scale(weight_NK), None if self.width == 0 else weight_NK[:, 0]

    def begin(self, weight_NC: Tensor, importance_C: Tensor) -> None:
        """Determine the scales and offsets of the next group."""
        if self._unit_N is None:
            self.scale_N, self.offset_N = grid(weight_NC, self.format, importance_C)
        else:
            self.scale_N, self.offset_N = tile_grid(weight_NC, self.format, self._unit_N, importance_C)
        self._groups.append((self.scale_N, self.offset_N))

    def packed(self, codes_NK: Tensor, rows: slice) -> Packed:
        """Pack these rows of the codes."""
        if self.width == 0:
            return pack(codes_NK[rows], self.scale_N[rows], None, self.format)
        scale_NG = torch.stack([scale_N[rows] for scale_N, _ in self._groups], 1)
        offsets = [offset_N[rows] for _, offset_N in self._groups if offset_N is not None]
        offset_NG = torch.stack(offsets, 1) if offsets else None
        if self._unit_N is None:
            return pack(codes_NK[rows], scale_NG, offset_NG, self.format)
        unit_N = self._unit_N[rows]
        numbers = whole_units(scale_NG, offset_NG, unit_N[:, None])
        return pack_tiles(codes_NK[rows], unit_N, *numbers, self.format)


def together(
    weights: Sequence[Tensor], hessian: Hessian, format: str, *, damping: float = 0.05
) -> list[Packed]:
    """Pack matrices so that their products stay nearest to those of `weights` on the inputs in `hessian`. All read the
    same inputs, so their rows are treated as one matrix's.

    damping: added to the diagonal, as a share of its mean; the default was chosen on held-out text of one model.
    A column whose input was always 0 is rounded to the nearest. Columns are taken in blocks, so that later ones are
    corrected once for each block; blocks are groups, whose scales and offsets are determined in turn.
    DataError: a weight or an input is not finite, or there are too few inputs to factor H with any damping.
    """
    one_of(format, FORMATS, "format")
    require(damping > 0, "damping", damping, "> 0")
    weight_NK = torch.cat([weight.detach() for weight in weights]).float()
    check(weight_NK, format)
    if not hessian.sum_KK.diagonal().isfinite().all():
        raise DataError("calibration: the input of a layer is not finite")
    factor_KK = _factor(hessian.sum_KK, damping)
    values, ahead_KN = _Grid(weight_NK, format), weight_NK.T.contiguous()
    codes_KN = torch.empty(ahead_KN.shape, dtype=torch.uint8, device=ahead_KN.device)
    for start in range(0, len(ahead_KN), values.width or GROUP):
        stop = start + (values.width or GROUP)
        block_CN, factor_CC = ahead_KN[start:stop], factor_KK[start:stop, start:stop]
        if values.width:
            values.begin(block_CN.T.contiguous(), factor_CC.diagonal() ** -2)
        error_CN = torch.empty_like(block_CN)
        for i in range(len(block_CN)):
            codes_N = encode(block_CN[i], values.scale_N, values.offset_N, format)
            exact_N = decode(codes_N, values.scale_N, values.offset_N, format)
            error_CN[i] = (block_CN[i] - exact_N) / factor_CC[i, i]
            block_CN[i:].addr_(factor_CC[i, i:], error_CN[i], alpha=-1)
            codes_KN[start + i] = codes_N
        ahead_KN[stop:].addmm_(factor_KK[start:stop, stop:].T, error_CN, alpha=-1)
    ends = list(accumulate(len(weight) for weight in weights))
    rows = [slice(end - len(weight), end) for end, weight in zip(ends, weights, strict=True)]
    return [values.packed(codes_KN.T, part) for part in rows]


def _factor(sum_KK: Tensor, damping: float) -> Tensor:
    """Upper triangular R with Rᵀ R = H⁻¹, H damped, in float32."""
    diagonal_K = sum_KK.diagonal()
    dead_K = diagonal_K == 0
    mean = diagonal_K.mean() if not dead_K.all() else 1.0
    identity_KK = torch.eye(len(sum_KK), dtype=sum_KK.dtype, device=sum_KK.device)
    for attempt in range(ATTEMPTS):
        damped_KK = sum_KK + identity_KK * (damping * 10**attempt * mean)
        # H = U Uᵀ with U upper triangular: the Cholesky factor of H read backwards, where its lower triangle is the
        # upper. R is U's inverse.
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK.T.flip(0, 1))
        if not failed:
            upper_KK = lower_KK.flip(0, 1).float()  # damped, it is far from singular
            return torch.linalg.solve_triangular(upper_KK, identity_KK.float(), upper=True)
    raise DataError(
        f"calibration: H has no Cholesky factor with damping = {damping * 10 ** (ATTEMPTS - 1):g}"
    )
