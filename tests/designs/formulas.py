"""What tests of a mixer against a plain loop of its formulas share."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def drawn(module: M) -> M:
    """The module in float64 with wide weights, every one of them drawn anew, on the device of the run."""
    draw = torch.Generator().manual_seed(0)
    for parameter in module.double().parameters():
        parameter.normal_(0, 0.5, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agree(
    found: Sequence[Tensor], wanted: Sequence[Tensor], inputs: Sequence[Tensor], tolerance: float
) -> None:
    """Two ways to compute the same tensors do so, and have the same gradients by their inputs."""
    both = []
    for parts in (found, wanted):
        total = sum((part * normal(*part.shape, seed=4)).sum() for part in parts)
        both.append((*parts, *torch.autograd.grad(total, inputs)))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
