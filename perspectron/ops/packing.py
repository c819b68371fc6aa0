"""Matrices packed into few bits (docs/designs/perspective.md#packed-weights).

A matrix of N rows (outputs) and K columns (inputs) is bytes [blocks, S] and scales. R rows share the bytes of a
block: byte [b][k] holds the codes of rows b·R … b·R + R − 1 at column k.

| format  | R | codes | weight of code t | byte                              | scales                                 |
|---------|---|-------|------------------|-----------------------------------|----------------------------------------|
| ternary | 5 | 0–2   | s·(t − 1)        | t0 + 3·t1 + 9·t2 + 27·t3 + 84·t4  | float32 [N], s of each row             |
| 2bit    | 4 | 0–3   | s·t − o          | t0 + t1·4 + t2·16 + t3·64         | float16 [blocks, G, 8]: 4 s, then 4 o  |
| 4bit    | 2 | 0–15  | s·t − o          | t0 + t1·16                        | float16 [blocks, G, 4]: 2 s, then 2 o  |
| int8    | 1 | 1–255 | s·(t − 128)      | t0                                | float32 [N], s of each row             |

S is K rounded up to 64; G = ⌈S/128⌉ groups of 128 columns have their own s and o. Rows and columns past the end weigh
nothing. 4bit32 and 8bit32 are tiles (`perspectron.ops.tiles`): their bytes are [tiles, L], their scales float32 [N].

Shapes: N rows, K columns, S columns stored, G groups, R rows of a block, b blocks.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import tiles
from perspectron.util.errors import DataError

ALIGN = 64  # columns
GROUP = 128  # columns
CHECKED = 1 << 18  # numbers that are checked at a time
MAX_COLUMNS = 65536  # 255 · 127 · K must stay below 2³¹


class Layout(NamedTuple):
    """One format's layout.

    rows: R, the rows of a block. radix: place value in a byte of the code of each row; none for a tile. lowest,
    highest: bounds of codes. zero: code of weight 0; None: groups of columns have an offset beside their scale. group:
    columns that share a scale; 0: all of a row."""

    rows: int
    radix: tuple[int, ...]
    lowest: int
    highest: int
    zero: int | None
    group: int

    @property
    def padding(self) -> int:
        """Code of rows and columns past the end."""
        return 0 if self.zero is None else self.zero


LAYOUTS = {
    "ternary": Layout(5, (1, 3, 9, 27, 84), 0, 2, 1, 0),
    "2bit": Layout(4, (1, 4, 16, 64), 0, 3, None, GROUP),
    "4bit": Layout(2, (1, 16), 0, 15, None, GROUP),
    "int8": Layout(1, (1,), 1, 255, 128, 0),
    "4bit32": Layout(tiles.ROWS, (), 0, 15, None, tiles.GROUP),
    "8bit32": Layout(tiles.ROWS, (), 1, 255, 128, tiles.GROUP),
}


class Packed(NamedTuple):
    """A packed matrix.

    codes: uint8 [blocks, S], or the lines of tiles. scales: as the table above says. shape: (N, K)."""

    codes: Tensor
    scales: Tensor
    format: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@cache
def sizes(format: str, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, ...], torch.dtype]:
    """The sizes (shape of the codes, shape of the scales, dtype of the scales) of a matrix. ValueError: an unknown
    format, or an impossible shape."""
    if format not in LAYOUTS:
        raise ValueError(f"format = {format!r}, must be one of {', '.join(LAYOUTS)}")
    N, K = shape
    if N < 1 or not 1 <= K <= MAX_COLUMNS:
        raise ValueError(f"shape = {(N, K)}, must be at least (1, 1) and at most {MAX_COLUMNS} columns")
    layout, S = LAYOUTS[format], -(-K // ALIGN) * ALIGN
    blocks = -(-N // layout.rows)
    if layout.group == GROUP:
        return (blocks, S), (blocks, -(-S // GROUP), 2 * layout.rows), torch.float16
    return (blocks, sum(tiles.length(format, S)) if layout.group else S), (N,), torch.float32


def pack_codes(codes_NK: Tensor, format: str) -> Tensor:
    """Integer codes [N,K] as bytes [blocks, S]. DataError where a code is not one of the format's."""
    layout, padded = LAYOUTS[format], _padded(codes_NK, format)
    bytes_bS = padded[:, 0].clone()
    for row, radix in enumerate(layout.radix[1:], 1):
        bytes_bS.add_(padded[:, row] * radix)
    return bytes_bS


def _padded(codes_NK: Tensor, format: str) -> Tensor:
    """The codes of whole blocks [blocks, R, S], uint8."""
    layout, (N, K) = LAYOUTS[format], codes_NK.shape
    blocks, S = -(-N // layout.rows), -(-K // ALIGN) * ALIGN
    least, most = (int(value) for value in codes_NK.aminmax())
    if least < layout.lowest or most > layout.highest:
        bound = f"{layout.lowest} … {layout.highest}"
        raise DataError(f"codes from {least} to {most}, must be in {bound} for {format}")
    room = (0, S - K, 0, blocks * layout.rows - N)
    padded = F.pad(codes_NK.to(torch.uint8).contiguous(), room, value=layout.padding)
    return padded.view(blocks, layout.rows, S)


def pack(codes_NK: Tensor, scale: Tensor, offset_NG: Tensor | None, format: str) -> Packed:
    """Pack codes, in a format other than tiles. scale: [N], or [N,G] with `offset_NG`, in the formats with groups."""
    shape = (codes_NK.shape[0], codes_NK.shape[1])
    assert format not in tiles.FORMATS
    (blocks, _), scales_shape, dtype = sizes(format, shape)
    if offset_NG is not None:
        room = (0, 0, 0, blocks * LAYOUTS[format].rows - shape[0])
        parts = [F.pad(part.to(dtype), room).view(blocks, -1, part.shape[1]) for part in (scale, offset_NG)]
        scale = torch.cat(parts, 1).mT.contiguous()
    if scale.shape != scales_shape:
        raise ValueError(f"scales of shape {tuple(scale.shape)}, want {scales_shape} for {format} {shape}")
    return Packed(pack_codes(codes_NK, format), scale.to(dtype).contiguous(), format, shape)


def pack_tiles(
    codes_NK: Tensor, unit_N: Tensor, scale_NG: Tensor, offset_NG: Tensor | None, format: str
) -> Packed:
    """Pack codes as tiles. unit_N: u of each row. scale_NG, offset_NG: a and b of groups, whole numbers in 0 … 255."""
    codes = _padded(codes_NK, format).flatten(0, 1)
    room = (0, codes.shape[1] // tiles.GROUP - scale_NG.shape[1], 0, len(codes) - len(codes_NK))
    scale, offset = (
        None if x is None else F.pad(x.to(torch.uint8), room).contiguous() for x in (scale_NG, offset_NG)
    )
    assert scale is not None
    lines = tiles.put(codes, scale, offset, format)
    return Packed(
        lines, unit_N.to(torch.float32).contiguous(), format, (codes_NK.shape[0], codes_NK.shape[1])
    )


def columns(packed: Packed) -> int:
    """S, the number of columns stored."""
    return -(-packed.shape[1] // ALIGN) * ALIGN


def unpack(packed: Packed) -> Tensor:
    """The codes, uint8 [N,K]."""
    N, K = packed.shape
    if packed.format in tiles.FORMATS:
        return tiles.codes(packed.codes, packed.format, columns(packed))[:N, :K]
    return digits(packed.codes, packed.format)[:N, :K]


def whole(packed: Packed) -> Tensor:
    """The weights of tiles divided by u of their rows: whole numbers [N,K], exact in float32."""
    (N, K), zero = packed.shape, LAYOUTS[packed.format].zero or 0
    a_NG, b_NG = tiles.scales(packed.codes, packed.format, columns(packed))
    numbers = (
        tiles.codes(packed.codes, packed.format, columns(packed)).float().unflatten(1, (-1, tiles.GROUP))
    )
    numbers.sub_(zero).mul_(a_NG[..., None])
    if b_NG is not None:
        numbers.sub_(tiles.STEPS * b_NG[..., None].float())
    return numbers.flatten(1)[:N, :K]


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [N,K]; in float32 each is rounded once, because s·t has few bits."""
    (N, K), layout = packed.shape, LAYOUTS[packed.format]
    if packed.format in tiles.FORMATS:
        return whole(packed).to(dtype) * packed.scales.to(dtype)[:, None]
    if layout.zero is not None:
        return unpack(packed).to(dtype).sub_(layout.zero).mul_(packed.scales.to(dtype)[:, None])
    scale_NG1, offset_NG1 = (part[:N, :, None].to(dtype) for part in parameters(packed))
    G = scale_NG1.shape[1]
    wide_NGC = F.pad(unpack(packed).to(dtype), (0, G * GROUP - K)).view(N, G, GROUP)
    return wide_NGC.mul_(scale_NG1).sub_(offset_NG1).flatten(1)[:, :K]


def parameters(packed: Packed) -> tuple[Tensor, Tensor]:
    """Scale and offset (s, o) of the groups [blocks·R, G], float16."""
    scale_bGR, offset_bGR = packed.scales.chunk(2, 2)
    return scale_bGR.mT.flatten(0, 1), offset_bGR.mT.flatten(0, 1)


def check(packed: Packed, name: str = "matrix") -> None:
    """Raise DataError unless shapes, dtypes and all bytes are valid and all scales are finite."""
    codes_shape, scales_shape, dtype = sizes(packed.format, packed.shape)
    for part, tensor, shape, kind in (
        ("codes", packed.codes, codes_shape, torch.uint8),
        ("scales", packed.scales, scales_shape, dtype),
    ):
        if tensor.shape != shape or tensor.dtype != kind:
            actual = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise DataError(f"{name}: {part} are {actual}, must be {kind} {shape}")
    if not finite(packed.scales):
        raise DataError(f"{name}: a scale is not finite")
    if LAYOUTS[packed.format].zero is None:
        return  # all bytes are codes
    head = tiles.length(packed.format, columns(packed))[0] if packed.format in tiles.FORMATS else 0
    parts = packed.codes[:, head:].split(max(1, CHECKED // packed.codes.shape[1]))
    wrong = sum(int(illegal(part, packed.format).count_nonzero()) for part in parts)
    if wrong:
        raise DataError(f"{name}: {wrong} bytes, must be 0, are not {packed.format} codes")


def finite(tensor: Tensor) -> bool:
    """True if all numbers are finite."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(CHECKED))


def illegal(codes: Tensor, format: str) -> Tensor:
    """Mask, shaped like `codes`, of bytes that packing never gives."""
    if format == "ternary":  # by comparisons, which are quicker than a remainder of 84
        first, second = (codes > 80) & (codes < 84), (codes > 164) & (codes < 168)
        return first | second | (codes > 248)
    return codes == 0 if LAYOUTS[format].zero == 128 else torch.zeros_like(codes, dtype=torch.bool)


def digits(codes_bS: Tensor, format: str) -> Tensor:
    """Codes [blocks·R, S] of bytes [blocks, S]."""
    layout = LAYOUTS[format]
    if layout.rows == 1:
        return codes_bS
    if format != "ternary":
        bits = 8 // layout.rows
        parts = [(codes_bS >> bits * row) & layout.highest for row in range(layout.rows)]
        return torch.stack(parts, 1).flatten(0, 1)
    rest, rows = codes_bS.clone(), []
    for radix in reversed(layout.radix):  # by comparison: a division of bytes is slower
        digit = (rest >= radix).view(torch.uint8) + (rest >= 2 * radix).view(torch.uint8)
        rest -= digit * radix
        rows.append(digit)
    return torch.stack(rows[::-1], 1).flatten(0, 1)
