"""A step whose kernels a compiler has joined, for `perspectron.decode.graphs`.

Shapes: K columns and N rows of a matrix.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def joined(
    step: Callable[..., tuple[Tensor, Tensor]], given: tuple[Tensor, ...], *, backend: str, products: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The step with kernels that a compiler (`backend`) makes, of what it does to tensors of these shapes; products: of
    those with weights, too, where there is one row."""
    from torch.fx.experimental.proxy_tensor import make_fx

    sums: dict[Any, Callable[..., Tensor]] = {aten.mm.default: _product, aten.addmm.default: _biased}
    table = sums if products and len(given[0]) == 1 else {}
    traced = make_fx(step, decomposition_table=table)(*(x.clone() for x in given))
    return torch.compile(traced, dynamic=False, fullgraph=True, backend=backend)


def _product(x_1K: Tensor, w_KN: Tensor) -> Tensor:
    """x w of one row, as a sum that the compiler joins with what stands before and behind it."""
    return (x_1K.mT * w_KN).sum(0, keepdim=True) if len(x_1K) == 1 else NotImplemented


def _biased(bias_N: Tensor, x_1K: Tensor, w_KN: Tensor) -> Tensor:
    return bias_N + _product(x_1K, w_KN) if len(x_1K) == 1 else NotImplemented


def nearly(found: Tensor, wanted: Tensor) -> bool:
    """True if numbers that were rounded at other places are near."""
    if wanted.numel() == 0:
        return True
    share = 1e-2 if found.dtype in (torch.float32, torch.float64) else 0.2
    found, wanted = found.double(), wanted.double()
    return bool((found - wanted).abs().max() <= share * wanted.abs().max())
