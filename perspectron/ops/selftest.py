"""The test of the operations on a device: each backend that runs there against the reference in float64
(`perspectron.ops.cases`).

An error is the largest difference over the largest value, of each output, final state and gradient. A case that raises
has failed, and the others go on.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from perspectron.ops.case import Case, Tensors
from perspectron.ops.cases import cases
from perspectron.util.machine import seconds_of

REPEATS = 3


@dataclass(frozen=True)
class Row:
    """The largest errors of one backend, their bounds, and the milliseconds of a pass, with its gradients. failed: what
    was raised instead."""

    op: str
    shape: str
    backend: str
    forward: float | None
    forward_bound: float
    gradients: float | None
    gradients_bound: float | None
    ms: float | None
    failed: str | None = None

    @property
    def holds(self) -> bool:
        if self.forward is None or self.failed is not None:
            return False
        return self.forward <= self.forward_bound and (
            self.gradients is None or self.gradients_bound is None or self.gradients <= self.gradients_bound
        )


def run(device: torch.device) -> Iterator[Row]:
    """A row for each operation and backend that runs on the device."""
    for case in cases(device):
        yield from rows(case, device)


def rows(case: Case, device: torch.device) -> Iterator[Row]:
    """A row for each backend of a case."""
    inputs = tuple(x.to(device) for x in case.inputs)
    exact: Tensors | str
    try:
        exact = _passed(case, "naive", tuple(x.double() if x.is_floating_point() else x for x in inputs))
    except Exception as error:
        exact = f"the reference: {_told(error)}"
    for backend in case.backends:
        forward = gradients = ms = failed = None
        try:
            if isinstance(exact, str):
                raise RuntimeError(exact)
            forward, gradients = _errors(case, _passed(case, backend, inputs), exact)
            ms = _ms(case, backend, inputs, device)
        except Exception as error:
            failed = _told(error)
        yield Row(
            case.op, case.shape, backend, forward, case.forward, gradients, case.gradients, ms, failed
        )  # fmt: skip


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _errors(case: Case, found: Tensors, exact: Tensors) -> tuple[float, float | None]:
    """The largest error of the outputs, and of the gradients."""
    errors = [_error(a, b) for a, b in zip(found, exact, strict=True)]
    leaves = 0 if case.gradients is None else sum(x.is_floating_point() for x in case.inputs)
    count = len(errors) - leaves
    return max(errors[:count]), max(errors[count:], default=None)


def _passed(case: Case, backend: str, inputs: Tensors) -> Tensors:
    """The outputs, and the gradients of a fixed weighted sum of them. Weights are exact in bfloat16, so that they are
    the same in every dtype. Without gradients, the inputs are copies: an operation may write into them."""
    if case.gradients is None:
        with torch.no_grad():
            return case.run(backend, *(x.clone() for x in inputs))
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    outputs = case.run(backend, *inputs)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).bfloat16().to(x) for x in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True)
    return *(x.detach() for x in outputs), *gradients


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest value; infinite where something is not finite, or of another shape."""
    if found.shape != exact.shape:
        return float("inf")
    error = float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


def _ms(case: Case, backend: str, inputs: Tensors, device: torch.device) -> float:
    """The median milliseconds of a pass, after one before to warm up."""
    call = partial(_passed, case, backend, inputs)
    return 1e3 * statistics.median(seconds_of(call, device) for _ in range(REPEATS))
