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
nothing.

Shapes: N rows, K columns, S columns stored, G groups, R rows of a block, b blocks.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.util.errors import DataError

ALIGN = 64  # columns
GROUP = 128  # columns
CHECKED = 1 << 18  # numbers at a time
MAX_COLUMNS = 65536  # 255 · 127 · K must stay below 2³¹


class Layout(NamedTuple):
    """One format's layout.

    rows: R of a block. radix: what the code of each of them counts in a byte. lowest, highest: codes. zero: code
    of weight 0 where rows have one scale; None: groups of columns have a scale and an offset."""

    rows: int
    radix: tuple[int, ...]
    lowest: int
    highest: int
    zero: int | None

    @property
    def padding(self) -> int:
        """Code of rows and columns past the end."""
        return 0 if self.zero is None else self.zero


LAYOUTS = {
    "ternary": Layout(5, (1, 3, 9, 27, 84), 0, 2, 1),
    "2bit": Layout(4, (1, 4, 16, 64), 0, 3, None),
    "4bit": Layout(2, (1, 16), 0, 15, None),
    "int8": Layout(1, (1,), 1, 255, 128),
}


class Packed(NamedTuple):
    """A packed matrix.

    codes: uint8 [blocks, S]. scales: as the table above says. shape: (N, K)."""

    codes: Tensor
    scales: Tensor
    format: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@cache
def sizes(format: str, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, ...], torch.dtype]:
    """The sizes (shape of the codes, shape of the scales, dtype of the scales) of a matrix. ValueError: not a
    possible one."""
    if format not in LAYOUTS:
        raise ValueError(f"format = {format!r}, must be one of {', '.join(LAYOUTS)}")
    N, K = shape
    if N < 1 or not 1 <= K <= MAX_COLUMNS:
        raise ValueError(f"shape = {(N, K)}, must be at least (1, 1) and at most {MAX_COLUMNS} columns")
    layout, S = LAYOUTS[format], -(-K // ALIGN) * ALIGN
    blocks = -(-N // layout.rows)
    if layout.zero is None:
        return (blocks, S), (blocks, -(-S // GROUP), 2 * layout.rows), torch.float16
    return (blocks, S), (N,), torch.float32


def pack_codes(codes_NK: Tensor, format: str) -> Tensor:
    """Integer codes [N,K] as bytes [blocks, S]. DataError where a code is not one of the format's."""
    (blocks, S), _, _ = sizes(format, (codes_NK.shape[0], codes_NK.shape[1]))
    layout, (N, K) = LAYOUTS[format], codes_NK.shape
    least, most = (int(value) for value in codes_NK.aminmax())
    if least < layout.lowest or most > layout.highest:
        bound = f"{layout.lowest} … {layout.highest}"
        raise DataError(f"codes from {least} to {most}, must be in {bound} for {format}")
    room = (0, S - K, 0, blocks * layout.rows - N)
    padded = F.pad(codes_NK.to(torch.uint8).contiguous(), room, value=layout.padding).view(
        blocks, layout.rows, S
    )
    bytes_bS = padded[:, 0].clone()
    for row, radix in enumerate(layout.radix[1:], 1):
        bytes_bS.add_(padded[:, row] * radix)
    return bytes_bS


def pack(codes_NK: Tensor, scale: Tensor, offset_NG: Tensor | None, format: str) -> Packed:
    """A matrix of these codes. scale: [N], or with `offset_NG` [N,G], in the groups' formats."""
    shape = (codes_NK.shape[0], codes_NK.shape[1])
    (blocks, _), scales_shape, dtype = sizes(format, shape)
    if offset_NG is not None:
        room = (0, 0, 0, blocks * LAYOUTS[format].rows - shape[0])
        parts = [F.pad(part.to(dtype), room).view(blocks, -1, part.shape[1]) for part in (scale, offset_NG)]
        scale = torch.cat(parts, 1).mT.contiguous()
    if scale.shape != scales_shape:
        raise ValueError(f"scales of shape {tuple(scale.shape)}, want {scales_shape} for {format} {shape}")
    return Packed(pack_codes(codes_NK, format), scale.to(dtype).contiguous(), format, shape)


def unpack(packed: Packed) -> Tensor:
    """The codes, uint8 [N,K]."""
    N, K = packed.shape
    return digits(packed.codes, packed.format)[:N, :K]


def dequantise(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [N,K]; in float32 each is rounded once, because s·t has few bits."""
    (N, K), layout = packed.shape, LAYOUTS[packed.format]
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
    """Raise DataError unless shapes, dtypes and all bytes are possible ones and all scales are finite."""
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
    parts = packed.codes.flatten().split(CHECKED)
    wrong = sum(int(illegal(part, packed.format).count_nonzero()) for part in parts)
    if wrong:
        raise DataError(f"{name}: {wrong} bytes, must be 0, are not {packed.format} codes")


def finite(tensor: Tensor) -> bool:
    """True if all numbers are finite."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(CHECKED))


def illegal(codes: Tensor, format: str) -> Tensor:
    """The places where a byte is none that packing gives, bool like `codes`."""
    if format == "ternary":  # by comparisons, which are quicker than a remainder of 84
        first, second = (codes > 80) & (codes < 84), (codes > 164) & (codes < 168)
        return first | second | (codes > 248)
    return codes == 0 if format == "int8" else torch.zeros_like(codes, dtype=torch.bool)


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
