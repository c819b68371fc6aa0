"""Where the blocks of a binary tree over a chunk of tokens stand, for recurrences whose gates multiply (`pdr`, `gla`).

Shapes: B batch (and whatever else runs beside it), L tokens of one chunk, D width, b block of the tree, n pairs of
blocks.
"""

import torch
from torch import Tensor


def halves(x_BLD: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Left and right block [B·n, b, D] of every pair; views."""
    B, L, D = x_BLD.shape
    pairs = x_BLD.view(B * (L // (2 * b)), 2, b, D)
    return pairs[:, 0], pairs[:, 1]


def blocks(A_BLL: Tensor, b: int) -> Tensor:
    """The part [B, n, b, b] of A where the right block of every pair looks at the left one; a view."""
    B, L, _ = A_BLL.shape
    return A_BLL.as_strided((B, L // (2 * b), b, b), (L * L, 2 * b * (L + 1), L, 1), b * L)


def full_precision(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)
