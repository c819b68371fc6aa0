"""Rounding weights to the nearest values of a packed format (`perspectron.ops.packing`).

Shapes: N rows, K columns, C columns of one group, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.experts.ternary import trits
from perspectron.ops import tiles
from perspectron.ops.packing import GROUP, LAYOUTS, Packed, pack, pack_tiles, sizes
from perspectron.util.errors import DataError

SHRINK = tuple(
    1 - step / 20 for step in range(13)
)  # of a group's range: clipping the ends helps the many values between
REFITS = 4
ROWS = 1 << 21  # weights that are rounded at a time
CACHED = 1 << 17  # weights of tiles that are rounded at a time, few enough to stay in the cache
MOST = 255  # units of a tile's scale


def quantise(weight_NK: Tensor, format: str) -> Packed:
    """Round a matrix to the nearest packed one, by rows and groups; one that is ternary already comes back exactly.

    ternary: T = clip(round(W / s), −1, 1), s of each row refitted to least squared error from mean |W| on, because
    these weights were not trained to be ternary (docs/designs/perspective.md#ternary-weights). int8: max |w| of a row
    is 127. 2bit and 4bit: scale and offset, as float16, with the least squared error among some shrunken ranges; 4bit32
    as well, in whole units of the row. 8bit32: max |w| of 32 columns is at most 127. DataError for a weight that is not
    finite, or too large for float16 in formats with such scales.
    """
    sizes(format, (weight_NK.shape[0], weight_NK.shape[1]))
    weight_NK = weight_NK.detach().to(torch.float32)
    check(weight_NK, format)
    if format == "ternary":
        codes_NK, scale_N = _ternary(weight_NK)
        return pack(codes_NK, scale_N, None, format)
    if format == "int8":
        scale_N = rows_scale(weight_NK)
        return pack(encode(weight_NK, scale_N[:, None], None, format), scale_N, None, format)
    if format in tiles.FORMATS:
        parts = [_tiles(rows, format) for rows in weight_NK.split(max(1, CACHED // weight_NK.shape[1]))]
        codes_NK, unit_N, scale_NG, *offset = (torch.cat(part) for part in zip(*parts, strict=True))
        return pack_tiles(codes_NK, unit_N, scale_NG, offset[0] if offset else None, format)
    found = []
    for rows in weight_NK.split(max(1, ROWS // weight_NK.shape[1])):
        groups = [(part, *grid(part, format)) for part in rows.split(GROUP, 1)]
        codes = torch.cat([encode(part, s[:, None], o[:, None], format) for part, s, o in groups], 1)
        found.append((codes, *(torch.stack(values, 1) for values in list(zip(*groups, strict=True))[1:])))
    codes_NK, scale_NG, offset_NG = (torch.cat(parts) for parts in zip(*found, strict=True))
    return pack(codes_NK, scale_NG, offset_NG, format)


def check(weight_NK: Tensor, format: str) -> None:
    """Raise DataError for weights that are not finite, or too large for the format's scales."""
    most = weight_NK.abs().amax().item()
    if not most < torch.inf:
        raise DataError(f"weight = {most}, must be finite")
    bound = torch.finfo(torch.float16).max
    if LAYOUTS[format].group == GROUP and most > bound:
        raise DataError(f"weight = ±{most:g}, must be within ±{bound:g} for {format}")


def encode(weight: Tensor, scale: Tensor, offset: Tensor | None, format: str) -> Tensor:
    """The nearest codes, uint8, for scales and offsets that broadcast; where a scale is 0, the code of weight 0, or the
    lowest."""
    layout, scale = LAYOUTS[format], scale.where(scale > 0, torch.inf)
    codes = weight / scale + layout.padding if offset is None else (weight + offset) / scale
    return codes.round_().clamp_(layout.lowest, layout.highest).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, offset: Tensor | None, format: str) -> Tensor:
    """The values of the codes, in the scale's dtype."""
    whole = codes.to(scale.dtype)
    return (whole - LAYOUTS[format].padding) * scale if offset is None else whole * scale - offset


def rows_scale(weight_NK: Tensor) -> Tensor:
    """The scale s of int8 rows [N]."""
    return weight_NK.abs().amax(1) / 127


def units(weight_NK: Tensor, format: str) -> Tensor:
    """The unit u of the rows of tiles [N], such that the widest group of a row has a scale of 255 units."""
    weight_NGC = F.pad(weight_NK, (0, -weight_NK.shape[1] % tiles.GROUP)).unflatten(1, (-1, tiles.GROUP))
    if format == "8bit32":
        return weight_NGC.abs().amax((1, 2)) / (127 * MOST)
    range_NG = weight_NGC.amax(2).clamp_min(0) - weight_NGC.amin(2).clamp_max(0)
    return range_NG.amax(1) / (tiles.STEPS * MOST)


def _tiles(weight_NK: Tensor, format: str) -> tuple[Tensor, ...]:
    """Codes [N,K], u of the rows, and a and b of the groups, for rows of tiles."""
    (N, K), unit_N, found = weight_NK.shape, units(weight_NK, format), []
    whole = K // tiles.GROUP * tiles.GROUP
    for part_NC in (weight_NK[:, :whole], weight_NK[:, whole:]):
        if part_NC.shape[1] == 0:
            continue
        group_MC = part_NC.reshape(-1, min(tiles.GROUP, part_NC.shape[1]))  # all whole groups at once
        unit_M = unit_N.repeat_interleave(len(group_MC) // N)
        scale_M, offset_M = tile_grid(group_MC, format, unit_M)
        codes_MC = encode(group_MC, scale_M[:, None], None if offset_M is None else offset_M[:, None], format)
        numbers = [x for x in whole_units(scale_M, offset_M, unit_M) if x is not None]
        found.append([part.view(N, -1) for part in (codes_MC, *numbers)])
    codes_NK, *numbers = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return codes_NK, unit_N, *numbers


def tile_grid(
    weight_NC: Tensor, format: str, unit_N: Tensor, importance_C: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(s, o) [N] of one group of columns of tiles, as multiples of u; no offset at 8 bits."""
    if format == "4bit32":
        return grid(weight_NC, format, importance_C, unit_N)
    needed_N = (weight_NC.abs().amax(1) / (127 * unit_N)).nan_to_num(0).ceil().clamp(0, MOST)
    return needed_N * unit_N, None


def whole_units(scale: Tensor, offset: Tensor | None, unit: Tensor) -> tuple[Tensor, Tensor | None]:
    """a and b, uint8, of scales and offsets that are whole multiples of their units already."""
    a, b = (
        None if x is None else (x / per).nan_to_num(0).round().clamp(0, MOST).to(torch.uint8)
        for x, per in ((scale, unit), (offset, unit * tiles.STEPS))
    )
    assert a is not None
    return a, b


def grid(
    weight_NC: Tensor, format: str, importance_C: Tensor | None = None, unit_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(s, o) [N] of one group, as float16 or whole units of the row hold them, but in float32: of least squared error,
    each column's counted as much as it is important."""
    low_N, high_N = weight_NC.aminmax(dim=1)
    if unit_N is not None:  # units have no sign
        low_N, high_N = low_N.clamp_max(0), high_N.clamp_min(0)
    middle_N, half_N = (low_N + high_N) / 2, (high_N - low_N) / 2
    weight = torch.ones_like(weight_NC[0]) if importance_C is None else importance_C
    levels, best = LAYOUTS[format].highest, None
    for share in SHRINK:
        best = _better(
            best, weight_NC, 2 * share * half_N / levels, share * half_N - middle_N, weight, format, unit_N
        )
    assert best is not None
    for _ in range(REFITS):
        fitted = _fit(weight_NC, best[2], best[:2], weight)
        best = _better(best, weight_NC, *fitted, weight, format, unit_N)
    return best[0], best[1]


_Candidate = tuple[Tensor, Tensor, Tensor, Tensor]
"""s, o, codes and error of each row."""


def _better(
    best: _Candidate | None,
    weight_NC: Tensor,
    scale_N: Tensor,
    offset_N: Tensor,
    importance_C: Tensor,
    format: str,
    unit_N: Tensor | None,
) -> _Candidate:
    """Row by row, this grid where its error is smaller."""
    if unit_N is None:
        scale_N, offset_N = (_half(values) for values in (scale_N.clamp_min(0), offset_N))
    else:
        scale_N = (scale_N / unit_N).nan_to_num(0).round_().clamp_(1, MOST) * unit_N
        wide_N = tiles.STEPS * unit_N
        offset_N = (offset_N / wide_N).nan_to_num(0).round_().clamp_(0, MOST) * wide_N
    columns = scale_N[:, None], offset_N[:, None]
    codes_NC = encode(weight_NC, *columns, format)
    error_N = (decode(codes_NC, *columns, format) - weight_NC).square() @ importance_C
    if best is None:
        return scale_N, offset_N, codes_NC, error_N
    wins_N = error_N < best[3]
    return (
        scale_N.where(wins_N, best[0]),
        offset_N.where(wins_N, best[1]),
        codes_NC.where(wins_N[:, None], best[2]),
        error_N.where(wins_N, best[3]),
    )


def _half(values: Tensor) -> Tensor:
    return values.half().nan_to_num().float()


def _fit(
    weight_NC: Tensor, codes_NC: Tensor, old: tuple[Tensor, Tensor], importance_C: Tensor
) -> tuple[Tensor, Tensor]:
    """(s, o) of least squared error for given codes; the old ones where all codes are one."""
    share_C = importance_C / importance_C.sum().clamp_min(torch.finfo(torch.float32).tiny)
    codes_NC = codes_NC.float()
    mean_N, level_N = weight_NC @ share_C, codes_NC @ share_C
    wide_NC = codes_NC - level_N[:, None]
    spread_N = wide_NC.square() @ share_C
    scale_N = (wide_NC * weight_NC) @ share_C / spread_N
    fits_N = spread_N > 1e-6
    return scale_N.where(fits_N, old[0]), (scale_N * level_N - mean_N).where(fits_N, old[1])


def _ternary(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Ternary (codes, s of each row)."""
    most_N1 = weight_NK.abs().amax(1, keepdim=True)
    if ((weight_NK == 0) | (weight_NK.abs() == most_N1)).all():
        return (weight_NK.sign() + 1).to(torch.uint8), most_N1[:, 0]
    overflows = most_N1.amax() * weight_NK.shape[1] == torch.inf
    weight_NK = weight_NK.double() if overflows else weight_NK
    trits_NK = trits(weight_NK[:, None])[0][:, 0]
    scale_N1 = _fit_trits(weight_NK, trits_NK)
    for _ in range(REFITS):
        trits_NK = (weight_NK / scale_N1).nan_to_num(0).round_().clamp_(-1, 1)
        scale_N1 = _fit_trits(weight_NK, trits_NK)
    return (trits_NK + 1).to(torch.uint8), scale_N1[:, 0].float()


def _fit_trits(weight_NK: Tensor, trits_NK: Tensor) -> Tensor:
    """s [N,1] of least squared error for given trits."""
    count_N = trits_NK.count_nonzero(1).clamp_min(1)
    return (weight_NK * trits_NK).sum(1, keepdim=True) / count_N[:, None]
