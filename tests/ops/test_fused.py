"""Loss, norms, gated products and decays: which kernel runs, and every derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from perspectron import native
from perspectron.native import training
from perspectron.ops import fused
from tests.refusals import refused

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.reason())),
    pytest.mark.cpu_only("native kernels"),
]
TARGET = torch.tensor([2, -100, 0])


def entropy(x):
    return fused.entropy(x, TARGET)


def norm(x, weight):
    return torch.func.functional_call(fused.RMSNorm(len(weight), 1e-5), {"weight": weight}, (x,))


def decayed(p, v):
    gamma, y = fused.decayed(p, v)
    return gamma + y


RESET = torch.tensor([[False, True, False], [True, False, False]])


def shifted(x, last, mix):
    return torch.stack(fused.shifted(x, last, mix, RESET))


def between(x, last, mix):
    before = torch.cat([last[:, None], x[:, :-1]], 1) * (~RESET)[:, :, None]
    return x + (before - x) * mix[:, None, None]


OPERATIONS = {
    "entropy": (entropy, lambda x: F.cross_entropy(x, TARGET, reduction="sum"), [(3, 7)]),
    "entropies": (
        lambda x: fused.entropies(x, TARGET),
        lambda x: F.cross_entropy(x, TARGET, reduction="none"),
        [(3, 7)],
    ),
    "norm": (norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), [(3, 7), (7,)]),
    "gated": (fused.gated, lambda a, b: F.silu(a) * b, [(3, 7), (3, 7)]),
    "gelu": (fused.gelu, lambda x: F.gelu(x, approximate="tanh"), [(3, 7)]),
    "shifted": (shifted, between, [(2, 3, 7), (2, 7), (2, 7)]),
    "decayed": (decayed, lambda p, v: p.sigmoid() + v * (1 - p.sigmoid() ** 2).sqrt(), [(3, 7), (3, 7)]),
}


@pytest.fixture(params=OPERATIONS)
def operation(request, monkeypatch):
    """(the operation, PyTorch's, inputs, calls of its kernel)."""
    name = {"entropies": "entropy"}.get(request.param, request.param)
    calls, kernel = [], getattr(training, name)
    monkeypatch.setattr(training, name, lambda *x: (calls.append(1), kernel(*x))[1])
    function, exact, shapes = OPERATIONS[request.param]
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    return function, exact, inputs, calls


def test_a_training_takes_the_kernel_and_nothing_else_does(operation):
    function, exact, inputs, calls = operation
    with torch.no_grad():
        without = function(*inputs)
    function(*(x.double() for x in inputs))
    function(*(x.detach() for x in inputs))
    torch.func.grad(lambda *x: function(*x).sum())(*inputs)
    with forward_ad.dual_level():
        function(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))
    torch.compile(function, backend="eager")(*inputs)
    assert not calls
    torch.testing.assert_close(function(*inputs), without, rtol=1e-6, atol=1e-6)
    assert len(calls) == 1
    torch.testing.assert_close(without, exact(*inputs), rtol=1e-6, atol=1e-6)


def test_first_and_second_derivatives(operation):
    function, exact, inputs, calls = operation

    def derivatives(f, dtype):
        xs = [x.detach().to(dtype).requires_grad_() for x in inputs]
        first = torch.autograd.grad(f(*xs).cos().sum(), xs, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), xs)

    found = derivatives(function, torch.float32)
    assert calls
    for a, b in zip(found, derivatives(exact, torch.float64), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)


def test_gradients_of_one_input_alone(operation):
    """Frozen weights: nothing is asked of them."""
    function, exact, inputs, _ = operation
    for chosen in range(len(inputs)):
        xs = [x.detach().requires_grad_(i == chosen) for i, x in enumerate(inputs)]
        (wanted,) = torch.autograd.grad(exact(*xs).sum(), xs[chosen])
        for record in (False, True):
            (found,) = torch.autograd.grad(function(*xs).sum(), xs[chosen], create_graph=record)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_any_strides_and_shapes_give_what_pytorch_gives():
    """What is not contiguous, and more dimensions than two."""
    a, b = (torch.randn(5, 3, 4, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, requires_grad=True)
    for found, exact in (
        (fused.gated(a.mT, b.mT), F.silu(a.mT) * b.mT),
        (fused.gelu(a.mT), F.gelu(a.mT, approximate="tanh")),
        (norm(a.transpose(0, 2), weight), F.rms_norm(a.transpose(0, 2), (5,), weight, 1e-5)),
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
        dy = torch.randn(found.shape[::-1]).permute(2, 1, 0)
        one, other = (torch.autograd.grad(y, a, dy)[0] for y in (found, exact))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_recorded_of_inputs_that_depend_on_each_other():
    b = torch.randn(20, requires_grad=True)
    module = fused.RMSNorm(20, 1e-5)
    for function in (
        lambda: fused.gated(b, b),
        lambda: fused.gated(2 * b, b),
        lambda: fused.gelu(fused.gelu(2 * b)),
        lambda: module(module(b[None]).tanh()),
    ):
        plain, recorded = (
            torch.autograd.grad(function().sum(), b, create_graph=record)[0] for record in (False, True)
        )
        torch.testing.assert_close(plain, recorded, rtol=1e-5, atol=1e-5)


def test_what_the_kernels_do_not_take_is_computed_by_pytorch_or_refused():
    assert fused.RMSNorm(4, 1e-5)(torch.randn(4, requires_grad=True)).shape == (4,)
    assert fused.RMSNorm((2, 4), 1e-5)(torch.randn(3, 2, 4, requires_grad=True)).shape == (3, 2, 4)
    y = fused.RMSNorm(4, 1e-5)(torch.randn(3, 2, 4, requires_grad=True))
    y.mul_(2)  # as PyTorch's may be
    with refused(ValueError, "target", -1):
        fused.entropy(torch.randn(2, 5, requires_grad=True), torch.tensor([-1, 2]))
    far = fused.gated(torch.tensor([-1e38, -200.0], requires_grad=True), torch.ones(2))
    assert far.abs().max() < 1e-30


@torch.no_grad()
@pytest.mark.parametrize("threads", [2, 3, 6, 12])
@pytest.mark.parametrize("N", [(1 << 14) + 1, 1 << 15, 48 * 2730, 5 * (1 << 15) + 7])
def test_bits_of_a_curve_do_not_depend_on_the_threads(N, threads):
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    alone = fused.batch_invariant(F.silu, x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(fused.batch_invariant(F.silu, x), alone)
    finally:
        torch.set_num_threads(1)
