"""The state-space dual and the gated delta rule by chunks on Triton, in its interpreter, against the plain loops in
float64, by the largest difference over the largest value.

Shapes: B batch, H heads, T time, K rows and V columns of a memory.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import delta, gla

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'perspectron[triton]'", allow_module_level=True)

from perspectron.ops.triton import chunk, chunk_delta

FORWARD, GRADIENTS = 2e-6, 1e-5
SIZES = {  # tokens, rows and columns
    "one token": (1, 5, 3),
    "a token less than a chunk": (63, 16, 16),
    "a chunk": (64, 16, 8),
    "a token more than a chunk": (65, 7, 20),
    "three chunks": (130, 16, 16),
    "blocks of rows and columns": (40, 80, 100),
}


def inputs(T: int, K: int, V: int, gates: str = "hard") -> list[Tensor]:
    """q, k, v, gates, and a state that is not zero. hard: gates of 0, 1 and 1e-30 among others, some in a row."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, K), (1, 2, T, K), (1, 2, T, V), (1, 2, T, 1), (1, 2, K, V)]
    q, k, v, gate, state = (torch.randn(shape, generator=draw) for shape in shapes)
    if gates != "hard":
        return [q, k, v, torch.full_like(gate, float(gates)), state]
    kind, gate = torch.rand(gate.shape, generator=draw), torch.sigmoid(3 * gate + 2)
    for i, value in enumerate((0.0, 1.0, 1e-30)):
        gate = gate.masked_fill((kind >= 0.07 * i) & (kind < 0.07 * (i + 1)), value)
        gate[:, :1, 3 * i + 2 : 3 * i + 5] = value
    return [q, k, v, gate, state]


def results(function, tensors: list[Tensor]) -> list[Tensor]:
    """Outputs, the last state, and the gradients of a fixed weighting of both."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = function(*tensors)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, tensors, weights)]


def of_delta(tensors: list[Tensor]) -> list[Tensor]:
    """q, k, e, v, gates and a state for the delta rule: keys of length 1, e = β k with β up to 2."""
    q, k, v, gate, state = tensors
    k, beta = F.normalize(k, dim=-1), 2 * torch.rand(gate.shape, generator=torch.Generator().manual_seed(3))
    return [q, k, beta * k, v, gate, state]


def check(tensors: list[Tensor]) -> None:
    names = ("o", "state", "q", "k", *(["e"] if len(tensors) == 6 else []), "v", "gate", "first")
    function, loop = (chunk.ssd, gla.reference) if len(tensors) == 5 else (chunk_delta.gdn, delta.reference)
    found, exact = results(function, tensors), results(loop, [x.double() for x in tensors])
    for name, a, b in zip(names, found, exact, strict=True):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        assert error <= (FORWARD if name in ("o", "state") else GRADIENTS), f"{name}: {error:.1e}"


@pytest.mark.parametrize("size", SIZES)
def test_outputs_states_and_gradients_are_those_of_the_loop(size: str) -> None:
    check(inputs(*SIZES[size]))


@pytest.mark.parametrize("size", SIZES)
def test_the_delta_rule_is_that_of_the_loop(size: str) -> None:
    check(of_delta(inputs(*SIZES[size])))


@pytest.mark.parametrize("gate", ["0", "1", "1e-30"])
def test_the_delta_rule_is_exact_for_a_gate_at_the_end_of_its_range(gate: str) -> None:
    check(of_delta(inputs(67, 8, 16, gate)))


@pytest.mark.parametrize("gate", ["0", "1", "1e-30"])
def test_a_gate_at_the_end_of_its_range_is_exact(gate: str) -> None:
    check(inputs(67, 8, 16, gate))


def test_a_gate_of_0_forgets_all_before_it_bit_for_bit() -> None:
    q, k, v, gate, state = inputs(80, 8, 16)
    gate[:, :, 40] = 0
    with torch.no_grad():
        kept, last = chunk.ssd(q, k, v, gate, state)
        k[:, :, :40], v[:, :, :40], state = 7.0, -3.0, 100 * state
        other, other_last = chunk.ssd(q, k, v, gate, state)
    assert torch.equal(kept[:, :, 40:], other[:, :, 40:])
    assert torch.equal(last, other_last)


def test_padding_leaves_the_state_bit_for_bit() -> None:
    q, k, v, gate, state = inputs(70, 8, 16, "1")
    with torch.no_grad():
        _, last = chunk.ssd(q, k, torch.zeros_like(v), gate, state)
    assert torch.equal(last, state)
