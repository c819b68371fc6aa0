"""Triton's kernels in its interpreter against the plain loops in float64, by the largest difference over the largest
value.

Shapes: B batch, H heads, T time, D rows and R columns of a PDR state, K rows and V columns of a GLA state, A
gate width.
"""

import functools
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import presets
from perspectron.model.model import build
from perspectron.ops import gla, pdr
from perspectron.ops.triton import record
from perspectron.ops.triton import scan as on_gpu
from perspectron.util.errors import BackendError
from tests.refusals import refused

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'perspectron[triton]'", allow_module_level=True)

FORWARD, GRADIENTS = 2e-6, 1e-5
SCANS = {"pdr": pdr.scan, "gla": gla.scan, "ssd": gla.scan}
SIZES = {  # tokens, rows and columns: around a chunk; ragged everywhere; more rows than a block; wide tiles
    "one token": (1, 5, 3),
    "15 tokens": (15, 7, 5),
    "16 tokens": (16, 7, 5),
    "17 tokens": (17, 7, 5),
    "a chunk and one": (65, 33, 17),
    "3 blocks of 16": (33, 7, 5),
    "one row": (33, 1, 5),
    "one column": (33, 7, 1),
    "2 chunks": (70, 7, 5),
    "more rows than a program has": (18, 70, 5),
    "ragged": (35, 7, 5),
    "two blocks of rows": (18, 40, 16),
    "100 columns": (34, 3, 100),
    "256 columns": (33, 3, 256),
}
GATES = ["hard", "0", "1", "1e-30"]

every_op = pytest.mark.parametrize("op", SCANS)


def inputs(op: str, T: int, D: int, R: int, gates: str = "hard", dtype=torch.float32) -> list[Tensor]:
    """q, k, v, gates, and a state that is not zero. hard: gates of 0, 1 and 1e-30 among others, some in a row."""
    draw = torch.Generator().manual_seed(0)
    if op == "pdr":
        shapes = [(2, T, R), (2, T, R), (2, T, D), (2, T, D), (2, D, R)]
    else:
        G, A = (1, 1) if op == "ssd" else (2, D)
        shapes = [(1, G, T, D), (1, G, T, D), (1, 2, T, R), (1, 2, T, A), (1, 2, D, R)]
    q, k, v, gate, state = (torch.randn(shape, generator=draw) for shape in shapes)
    if gates != "hard":
        return [x.to(dtype) for x in (q, k, v, torch.full_like(gate, float(gates)), state)]
    kind, gate = torch.rand(gate.shape, generator=draw), torch.sigmoid(3 * gate + 2)
    for i, value in enumerate((0.0, 1.0, 1e-30)):
        gate = gate.masked_fill((kind >= 0.07 * i) & (kind < 0.07 * (i + 1)), value)
        gate[..., 3 * i + 2 : 3 * i + 5, :1] = value
    return [x.to(dtype) for x in (q, k, v, gate, state)]


def results(op: str, tensors: list[Tensor], backend: str, wanted: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """Outputs, the last state, and the gradients of a fixed weighting of those wanted."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    both = SCANS[op](*tensors, backend=backend)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in both]
    loss = sum((both[i] * weights[i]).sum() for i in wanted)
    found = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in both] + list(found)


def check(found: list[Tensor], exact: list[Tensor], scales: list[Tensor] | None = None) -> None:
    """The bounds hold, of outputs and states and then of gradients."""
    bounds = [FORWARD, FORWARD] + [GRADIENTS] * 5
    names = ["outputs", "state", "dq", "dk", "dv", "dgate", "dstate"]
    for name, bound, a, b in zip(names, bounds, found, exact, strict=False):
        error, largest = (a.double() - b).abs().max(), b.abs().max()
        assert error <= bound * largest, f"{name}: {error / largest:.1e}"


@every_op
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_the_loop(op, size):
    tensors = inputs(op, *SIZES[size])
    exact = results(op, [x.double() for x in tensors], "naive")
    check(results(op, tensors, "triton"), exact)


@every_op
@pytest.mark.parametrize("gates", GATES[1:])
def test_gates_of_0_1_and_nearly_0_alone(op, gates):
    tensors = inputs(op, 21, 5, 4, gates)
    exact = results(op, [x.double() for x in tensors], "naive")
    assert exact[5].abs().max() > 0  # a gate of 0 has a gradient
    check(results(op, tensors, "triton"), exact)


@every_op
@pytest.mark.parametrize("wanted", [(0,), (1,)], ids=["outputs", "state"])
def test_gradients_of_the_outputs_or_the_last_state_alone(op, wanted):
    tensors = inputs(op, 18, 5, 4)
    exact = results(op, [x.double() for x in tensors], "naive", wanted)
    check(results(op, tensors, "triton", wanted), exact)


@every_op
@pytest.mark.parametrize("split", [1, 16, 20])
def test_split_anywhere(op, split):
    *tensors, state = inputs(op, 21, 5, 4)
    scan = functools.partial(SCANS[op], backend="triton")
    with torch.no_grad():
        whole, end = scan(*tensors, state)
        first, middle = scan(*(x[..., :split, :] for x in tensors), state)
        second, last = scan(*(x[..., split:, :] for x in tensors), middle)
    check([torch.cat([first, second], -2), last], [whole.double(), end.double()])


@every_op
def test_long_sequences_without_gradients_go_by_segments(op, monkeypatch):
    monkeypatch.setattr(on_gpu, "SEGMENT", 64)
    tensors = inputs(op, 150, 5, 4)
    exact = SCANS[op](*(x.double() for x in tensors), backend="naive")
    with torch.no_grad():
        check(list(SCANS[op](*tensors, backend="triton")), list(exact))


@every_op
def test_without_gradients_a_state_to_be_consumed_is_written(op):
    *tensors, state = inputs(op, 3, 5, 4)
    kept = state.clone()
    with torch.inference_mode():
        expected, end = SCANS[op](*tensors, state, backend="triton")
        assert torch.equal(state, kept)
        strided = state.mT.contiguous().mT
        for given in (state, strided):
            o, after = SCANS[op](*tensors, given, backend="triton", consume_state=True)
            assert after.data_ptr() == given.data_ptr()
            assert torch.equal(o, expected) and torch.equal(given, end)


@every_op
def test_low_precision_inputs_give_a_float32_state(op):
    tensors = inputs(op, 18, 5, 4, dtype=torch.bfloat16)
    found, exact = (
        SCANS[op](*(x.to(dtype) for x in tensors), backend=backend)
        for dtype, backend in ((torch.bfloat16, "triton"), (torch.float64, "naive"))
    )
    assert found[0].dtype == found[1].dtype == torch.float32
    check(list(found), list(exact))


@every_op
@pytest.mark.parametrize(("batch", "T"), [(0, 5), (2, 0)])
def test_nothing_gives_nothing(op, batch, T):
    *tensors, state = (x[:batch] for x in inputs(op, 5, 5, 4))
    o, after = SCANS[op](*(x[..., :T, :] for x in tensors), state, backend="triton")
    assert o.shape == tensors[2][..., :T, :].shape and torch.equal(after, state)


@every_op
def test_what_it_cannot_do_says_what_would_work(op, monkeypatch):
    tensors = inputs(op, 3, 5, 4)
    scan = functools.partial(SCANS[op], backend="triton")
    with refused(BackendError, "torch.float64"):
        scan(*(x.double() for x in tensors))
    with refused(BackendError, 257):
        scan(*inputs(op, 2, 3, 257))
    with refused(BackendError, "triton"):
        torch.func.grad(lambda q: scan(q, *tensors[1:])[0].sum())(tensors[0])
    with refused(BackendError, "meta"):
        scan(*(x.to("meta") for x in tensors))
    monkeypatch.setattr(record, "version", lambda: None)
    with refused(BackendError, "perspectron[triton]"):
        scan(*tensors)


@every_op
def test_what_is_not_there_is_an_error_not_a_silent_zero(op):
    tensors = [x.requires_grad_() for x in inputs(op, 5, 5, 4)]
    loss = SCANS[op](*tensors, backend="triton")[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + tensors[0].sum(), tensors[0])
    with torch.autograd.forward_ad.dual_level(), refused(BackendError, "triton"):
        SCANS[op](*tensors, backend="triton")


def test_a_model_trains_the_same(monkeypatch):
    config = presets.get("perspective2-tiny", layers=2, d_model=32, hidden=32, vocab_size=64)
    model = build(config)
    ids_BT = torch.randint(64, (2, 19), generator=torch.Generator().manual_seed(0))

    def gradients() -> list[Tensor]:
        logits = model(ids_BT).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids_BT.flatten())
        return [logits.detach(), *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    expected, calls = gradients(), []

    def forced(*tensors, **options):
        calls.append(tensors[0].shape)
        return scan(*tensors, **options, backend="triton")

    scan = pdr.scan
    monkeypatch.setattr(pdr, "scan", forced)
    found = gradients()
    assert calls
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_interpreted_kernels_are_not_for_auto(monkeypatch):
    monkeypatch.setattr(on_gpu, "pdr", lambda *_: pytest.fail("auto took Triton on a CPU"))
    pdr.scan(*inputs("pdr", 3, 5, 4))
