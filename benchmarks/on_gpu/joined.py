"""Graphs of a step whose kernels a compiler has joined.

Shapes: K columns and N rows of a matrix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from perspectron.decode import graphs
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState

aten = torch.ops.aten


COMPILER = "inductor"
Compiled = Literal["between", "all"]
"""Parts of a step that are compiled: those between products with weights; of one row, these products too."""


class JoinedStep(graphs.Step):
    """A step of kernels that COMPILER makes, of what it does to tensors of these shapes."""

    asks = False

    def __init__(self, model: LanguageModel, state: LMState, compiled: Compiled) -> None:
        self._compiled = compiled
        super().__init__(model, state)

    def program(self, body: graphs.Body, given: tuple[Tensor, ...]) -> graphs.Body:
        sums: dict[Any, Callable[..., Tensor]] = {aten.mm.default: _product, aten.addmm.default: _biased}
        table = sums if self._compiled == "all" and len(given[0]) == 1 else {}
        traced = make_fx(body, decomposition_table=table)(*(x.clone() for x in given))
        return torch.compile(traced, dynamic=False, fullgraph=True, backend=COMPILER)

    def near(self, found: Tensor, wanted: Tensor) -> bool:
        return nearly(found, wanted)


class Joined(graphs.Graphs):
    """Graphs of such steps."""

    def __init__(self, model: LanguageModel, compiled: Compiled) -> None:
        super().__init__(model)
        self.made = partial(JoinedStep, compiled=compiled)


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
