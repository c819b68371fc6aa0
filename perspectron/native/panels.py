"""Weights in the order in which the kernels of recurrences read them.

Shapes: K inputs, N outputs of a product y = x W.
"""

import torch.nn.functional as F
from torch import Tensor

PANEL = 32
"""Columns that lie together."""


def panels(w_KN: Tensor) -> Tensor:
    """The columns of a matrix, or of each of [..., K, N], PANEL at a time: [..., ⌈N / PANEL⌉, K, PANEL]; zeros after
    N."""
    padded = F.pad(w_KN.detach(), (0, -w_KN.shape[-1] % PANEL))
    return padded.unflatten(-1, (-1, PANEL)).transpose(-3, -2).contiguous()
