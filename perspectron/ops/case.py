"""A case of `perspectron.ops.selftest`: an operation on fixed inputs.

Some gates are 0, 1 and 1e-30, initial states are not zero, and final states are among the outputs.

Bounds: float32 sums of some hundred terms differ by a few units of 6e-8. U is the unit roundoff of bfloat16. An
operation that computes in float32 from bfloat16 inputs is compared on the same rounded inputs, so its outputs have
float32's bounds, and a gradient, which is rounded to bfloat16 once, has U more. One that computes in bfloat16 rounds a
few times, and has as many U.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
FORWARD, GRADIENTS = 2e-6, 1e-5
LOOSE = (1e-5, 1e-4)
U = 2**-8


@dataclass(frozen=True)
class Case:
    """An operation on fixed inputs. run: `run(backend, *inputs)` gives its outputs. backends: those beside "naive".
    forward, gradients: bounds of the errors; None: gradients are not computed."""

    op: str
    shape: str
    run: Callable[..., Tensors]
    backends: tuple[str, ...]
    inputs: Tensors
    forward: float = FORWARD
    gradients: float | None = GRADIENTS


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def gates(*shape: int) -> Tensor:
    """Random gates, of which one tenth each are 0, 1 and 1e-30."""
    draw = torch.Generator().manual_seed(2)
    kind, gate = torch.rand(shape, generator=draw), torch.sigmoid(3 * torch.randn(shape, generator=draw) + 2)
    for i, hard in enumerate((0.0, 1.0, 1e-30)):
        gate = gate.masked_fill((kind >= i / 10) & (kind < (i + 1) / 10), hard)
    return gate


def half(case: Case, forward: float, gradients: float | None) -> Case:
    """The case with inputs of bfloat16. (1e-30 is rounded, but does not become 0.)"""
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in case.inputs)
    return replace(case, shape=f"{case.shape}, bf16", inputs=inputs, forward=forward, gradients=gradients)


def rounded(case: Case) -> Case:
    """`half` for an operation that computes in float32."""
    return half(case, case.forward, None if case.gradients is None else U + case.gradients)


def steps(case: Case) -> Case:
    """The case without gradients, where the operation takes other paths."""
    return replace(case, op=f"{case.op}, no gradients", gradients=None)
