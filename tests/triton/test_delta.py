"""Triton's kernels for the delta rules, in its interpreter, against the plain loops in float64, by the largest
difference over the largest value.

Shapes: B batch, H heads, T time, K rows and V columns of a state, A gate width.
"""

import functools
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import delta
from perspectron.ops.triton import delta_scan as on_gpu
from perspectron.ops.triton import record
from perspectron.util.errors import BackendError
from tests.refusals import refused

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'perspectron[triton]'", allow_module_level=True)

FORWARD, GRADIENTS = 1e-5, 1e-4
SCANS = {"gated delta": delta.scan, "delta": delta.scan, "rwkv7": delta.scan_rwkv7}
SIZES = {  # tokens, rows and columns: one token; around a chunk; ragged everywhere; several blocks of rows or columns
    "1 token": (1, 5, 3),
    "15 tokens": (15, 3, 2),
    "16 tokens": (16, 2, 4),
    "17 tokens": (17, 7, 5),
    "33 tokens": (33, 16, 3),
    "70 tokens": (70, 2, 2),
    "40 columns": (16, 5, 40),
    "40 rows": (16, 40, 3),
}
NAMES = {
    "scan": ["outputs", "last", "dq", "dk", "de", "dv", "dalpha", "dstate"],
    "scan_rwkv7": ["outputs", "last", "dq", "dk", "dv", "da", "db", "dalpha", "dstate"],
}

every_op = pytest.mark.parametrize("op", SCANS)


def inputs(op: str, T: int, K: int, V: int, gates: float | None = None, H: int = 2) -> list[Tensor]:
    """The inputs of an operation, with a state that is not zero; unless one gate is given for all, some are 0, 1 and
    1e-30, also in a row."""
    draw = torch.Generator().manual_seed(0)
    shapes = [
        (1, H, T, K),
        (1, H, T, K),
        (1, H, T, V),
        (1, H, T, 1 if op == "gated delta" else K),
        (1, H, K, V),
    ]
    q, k, v, gate, state = (torch.randn(shape, generator=draw) for shape in shapes)
    kind, gate = torch.rand(gate.shape, generator=draw), torch.sigmoid(3 * gate + 2)
    for i, value in enumerate((0.0, 1.0, 1e-30)):
        gate = gate.masked_fill((kind >= 0.07 * i) & (kind < 0.07 * (i + 1)), value)
        gate[..., 3 * i + 2 : 3 * i + 5, :1] = value
    gate, k = gate if gates is None else torch.full_like(gate, gates), F.normalize(k, dim=-1)
    return [q, 0.5 * k, v, -k, 0.5 * k, gate, state] if op == "rwkv7" else [q, k, 1.5 * k, v, gate, state]


def results(op: str, tensors: list[Tensor], backend: str, wanted: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """Outputs, the last state, and the gradients of a fixed weighting of those wanted."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    both = SCANS[op](*tensors, backend=backend, scale=0.3)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in both]
    loss = sum((both[i] * weights[i]).sum() for i in wanted)
    return [x.detach() for x in both] + list(
        torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
    )


def check(op: str, found: list[Tensor], exact: list[Tensor]) -> None:
    """The bounds hold, of outputs and states and then of gradients."""
    names = NAMES[SCANS[op].__name__]
    for name, bound, a, b in zip(names, [FORWARD] * 2 + [GRADIENTS] * 7, found, exact, strict=False):
        error, largest = (a.double() - b).abs().max(), b.abs().max()
        assert error <= bound * largest, f"{name}: {error / largest:.1e}"


@every_op
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_the_loop(op, size):
    tensors = inputs(op, *SIZES[size], H=2 if SIZES[size][0] == 17 else 1)
    check(op, results(op, tensors, "triton"), results(op, [x.double() for x in tensors], "naive"))


@every_op
@pytest.mark.parametrize("gates", [0.0, 1.0, 1e-30])
def test_gates_of_0_1_and_nearly_0_alone(op, gates):
    tensors = inputs(op, 17, 3, 2, gates, H=1)
    exact = results(op, [x.double() for x in tensors], "naive")
    assert exact[-2].abs().max() > 0  # a gate of 0 has a gradient
    check(op, results(op, tensors, "triton"), exact)


@every_op
@pytest.mark.parametrize("wanted", [(0,), (1,)], ids=["outputs", "state"])
def test_gradients_of_the_outputs_or_the_last_state_alone(op, wanted):
    tensors = inputs(op, 17, 3, 2, H=1)
    exact = results(op, [x.double() for x in tensors], "naive", wanted)
    check(op, results(op, tensors, "triton", wanted), exact)


def test_keys_that_repeat_do_not_cancel():
    q, k, _, v, gate, state = inputs("gated delta", 32, 8, 4, 1.0, H=1)
    k = k[:, :, :1].expand_as(k).contiguous()
    tensors = [q, k, 1.9 * k, v, gate, state]
    exact = results("gated delta", [x.double() for x in tensors], "naive")
    check("gated delta", results("gated delta", tensors, "triton"), exact)


@every_op
def test_heads_of_a_token_side_by_side(op):
    *tensors, state = inputs(op, 3, 3, 2)
    expected = results(op, [*tensors, state], "triton", (0,))
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    assert beside[0].stride(1) < beside[0].stride(2)
    o, last = SCANS[op](*beside, state, backend="triton", scale=0.3)
    assert (
        torch.equal(o, expected[0]) and torch.equal(last, expected[1]) and o.transpose(1, 2).is_contiguous()
    )
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((o * weight).sum(), beside)
    assert all(torch.equal(a, b) for a, b in zip(found, expected[2:-1], strict=True))


@every_op
@pytest.mark.parametrize("split", [1, 16])
def test_split_anywhere(op, split):
    *tensors, state = inputs(op, 21, 3, 4)
    scan = functools.partial(SCANS[op], backend="triton")
    with torch.no_grad():
        whole, end = scan(*tensors, state)
        first, middle = scan(*(x[..., :split, :] for x in tensors), state)
        second, last = scan(*(x[..., split:, :] for x in tensors), middle)
    check(op, [torch.cat([first, second], -2), last], [whole.double(), end.double()])


@every_op
def test_without_gradients_a_state_to_be_consumed_is_written(op):
    *tensors, state = inputs(op, 3, 3, 4)
    kept = state.clone()
    with torch.inference_mode():
        expected, end = SCANS[op](*tensors, state, backend="triton")
        assert torch.equal(state, kept)
        for given in (state, state.mT.contiguous().mT):
            o, after = SCANS[op](*tensors, given, backend="triton", consume_state=True)
            assert after.data_ptr() == given.data_ptr()
            assert torch.equal(o, expected) and torch.equal(given, end)


@every_op
@pytest.mark.parametrize(("batch", "T"), [(0, 5), (1, 0)])
def test_nothing_gives_nothing(op, batch, T):
    *tensors, state = (x[:batch] for x in inputs(op, 5, 3, 4))
    o, after = SCANS[op](*(x[..., :T, :] for x in tensors), state, backend="triton")
    assert o.numel() == 0 and torch.equal(after, state)


@every_op
def test_what_it_cannot_do_says_what_would_work(op, monkeypatch):
    tensors = inputs(op, 3, 5, 4)
    scan = functools.partial(SCANS[op], backend="triton")
    with refused(BackendError, "torch.float64"):
        scan(*(x.double() for x in tensors))
    with refused(BackendError, 129):
        scan(*inputs(op, 2, 129, 3))
    with torch.autograd.forward_ad.dual_level(), refused(BackendError, "triton"):
        scan(*tensors)
    monkeypatch.setattr(record, "version", lambda: None)
    with refused(BackendError, "perspectron[triton]"):
        scan(*tensors)


def test_a_second_derivative_is_an_error_not_a_silent_zero():
    tensors = [x.requires_grad_() for x in inputs("gated delta", 5, 3, 4)]
    loss = delta.scan(*tensors, backend="triton")[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + tensors[0].sum(), tensors[0])


def test_interpreted_kernels_are_not_for_auto(monkeypatch):
    monkeypatch.setattr(on_gpu, "run", lambda *_: pytest.fail("auto took Triton on a CPU"))
    delta.scan(*inputs("gated delta", 3, 5, 4))
