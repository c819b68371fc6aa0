"""Tiles: 16 rows of a packed matrix side by side, a scale for each 32 columns of a row.

A tile is one line of bytes: first the scales of its groups, then their codes. The weight of code t is u·(a·(t − 128))
at 8 bits and u·(a·t − 15·b) at 4, with u of the row, in float32, and a and b, bytes, of its group; the factor of u is
a whole number.

| format | of a group                  | codes, in 4 bytes for each row                            |
|--------|-----------------------------|-----------------------------------------------------------|
| 4bit32 | a of 16 rows, b of 16 rows  | 4 × 16 × 4: columns 8j + i, times 16 columns 8j + 4 + i   |
| 8bit32 | a of 16 rows                | 8 × 16 × 4: columns 4j + i                                |

The scales of a tile are filled up to whole lines of 64 bytes.

Shapes: N rows, K columns, S columns stored, a multiple of 64, G = S / 32 groups, b tiles, L bytes of a line.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
GROUP = 32
FORMATS = ("4bit32", "8bit32")
STEPS = 15
"""The factor of b in a weight: u·(a·t − 15·b)."""


def length(format: str, S: int) -> tuple[int, int]:
    """Bytes of the scales and of the codes of a tile."""
    four = format == "4bit32"
    scales = S // GROUP * ROWS * (2 if four else 1)
    return -(-scales // 64) * 64, S * ROWS // (2 if four else 1)


def put(codes_NS: Tensor, scale_NG: Tensor, offset_NG: Tensor | None, format: str) -> Tensor:
    """The lines [b,L] of whole tiles, from codes and from a and b, uint8."""
    G = scale_NG.shape[1]
    bytes_b = codes_NS.view(-1, ROWS, G, 8, 4).permute(0, 2, 3, 1, 4)
    parts = [scale_NG.view(-1, ROWS, G).mT]
    if offset_NG is not None:
        bytes_b = bytes_b[:, :, ::2] | bytes_b[:, :, 1::2] << 4
        parts.append(offset_NG.view(-1, ROWS, G).mT)
    head = torch.cat(parts, 2).flatten(1)
    return torch.cat([F.pad(head, (0, length(format, G * GROUP)[0] - head.shape[1])), bytes_b.flatten(1)], 1)


def codes(lines_bL: Tensor, format: str, S: int) -> Tensor:
    """The codes [b·16, S]."""
    G, (head, _) = S // GROUP, length(format, S)
    if format == "4bit32":
        byte = lines_bL[:, head:].view(-1, G, 4, 1, ROWS, 4)
        parts = torch.cat([byte & 15, byte >> 4], 3).flatten(2, 3)
    else:
        parts = lines_bL[:, head:].view(-1, G, 8, ROWS, 4)
    return parts.permute(0, 3, 1, 2, 4).reshape(-1, S)


def scales(lines_bL: Tensor, format: str, S: int) -> tuple[Tensor, Tensor | None]:
    """a and b [b·16, G], uint8; None where there is no b."""
    G, four = S // GROUP, format == "4bit32"
    head = lines_bL[:, : G * ROWS * (2 if four else 1)].view(len(lines_bL), G, -1, ROWS)
    a, *rest = (part.mT.flatten(0, 1) for part in head.unbind(2))
    return a, rest[0] if rest else None


def places(ids: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """The places, in all bytes of 8-bit lines, of the codes [..., S] and of the scales [..., G] of rows `ids`."""
    head, rest = length("8bit32", S)
    tile, row = (ids // ROWS)[..., None], (ids % ROWS)[..., None]
    group, column = (torch.arange(n, device=ids.device) for n in (S // GROUP, S))
    start = tile * (head + rest)
    return start + row * 4 + (column // 4 * 64 + column % 4 + head), start + row + group * ROWS
