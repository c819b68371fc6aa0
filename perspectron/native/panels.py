"""Tensors as kernels take them: weights in the order in which they are read, and arrays of addresses.

Shapes: K inputs, N outputs of a product y = x W.
"""

import ctypes
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

PANEL = 32
"""Number of columns in a panel."""


def panels(w_KN: Tensor) -> Tensor:
    """The columns of a matrix, or of each of [..., K, N], PANEL at a time: [..., ⌈N / PANEL⌉, K, PANEL]; zeros after
    N."""
    padded = F.pad(w_KN.detach(), (0, -w_KN.shape[-1] % PANEL))
    return padded.unflatten(-1, (-1, PANEL)).transpose(-3, -2).contiguous()


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of tensors that the caller keeps alive; null for None."""
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))
