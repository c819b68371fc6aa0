"""What is recorded and run again gives what PyTorch gives, whatever lies in the memory that a run may change."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.decode.operations import HANDLERS
from perspectron.decode.recorder import Recorder
from perspectron.native.tape import CODES, Stale, Tape, Unrecordable, places_of
from perspectron.ops import packed, pdr
from perspectron.ops.dispatch import recorder
from perspectron.ops.packing import LAYOUTS
from perspectron.quant.formats import quantise
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")
OPERATIONS = {
    "sums": lambda x, y, i: x + y - 2 * x + (1 - y) - 3,
    "shares": lambda x, y, i: torch.add(x, y, alpha=0.5) + torch.sub(x, 2.0, alpha=0.25),
    "products": lambda x, y, i: x * y / (y + 4) * 0.3,
    "in place": lambda x, y, i: (x + 0).mul_(y).add_(1).sub_(y).div_(3).clamp_min_(-0.5).neg(),
    "curves in place": lambda x, y, i: (x + 0).exp_().sqrt_().rsqrt_().reciprocal_().tanh_().sigmoid_()
    + F.silu(x + 0, inplace=True).relu_().clamp_(0.1, 1) + (x + 0).lerp_(y, 0.5).addcmul_(x, y),
    "filled": lambda x, y, i: torch.full_like(x, 2).mul_(x) + x.new_full((1,), 3) + x.new_zeros(1) + x.new_ones(1)
    + torch.ones_like(x) + (x + 0).fill_(y[0, 0]) + (y + 0).fill_(2) + (y + 0).zero_() + x.clone().copy_(y),
    "laid out": lambda x, y, i: x.mT.reshape(-1) + y.mT.flatten() + x.mT.contiguous().view(-1),
    "a row and a column": lambda x, y, i: x[:, :1] * y[:1] + x[1, 2],
    "transposed": lambda x, y, i: (x.mT + y.mT).mT.contiguous() * x,
    "every second": lambda x, y, i: x[:, :-1:2] * y[:, 1::2],
    "powers": lambda x, y, i: x**2 + x.abs() ** 0.5 + (x.abs() + 1) ** -0.5 + x.abs() ** 1.7 + 2.0**y + x.square(),
    "exp and log": lambda x, y, i: torch.exp(x) + torch.log(x.abs() + 1) + torch.log1p(y.abs()),
    "far exp": lambda x, y, i: torch.exp(60 * x).clamp_max(1) + torch.exp(-200 * y.abs()),
    "roots": lambda x, y, i: x.abs().sqrt() + (y.abs() + 1).rsqrt() + (y.abs() + 1).reciprocal(),
    "curves": lambda x, y, i: torch.tanh(x) + torch.sigmoid(3 * y) + F.silu(x) + F.relu(y),
    "soft curves": lambda x, y, i: F.softplus(9 * x) + F.softplus(x, 2, 5) + F.logsigmoid(30 * y),
    "gelu": lambda x, y, i: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "double angles": lambda x, y, i: (x.double().cos() + y.double().sin()).float(),
    "bounds": lambda x, y, i: x.clamp(-0.3, 0.4)
    + torch.maximum(x, y) - torch.minimum(x, y) + y.clamp(max=0.1).clamp_min(-1),
    "lerp": lambda x, y, i: torch.lerp(x, y, 0.3) + torch.lerp(x, y, y.abs()),
    "addcmul": lambda x, y, i: torch.addcmul(x, x, y, value=0.5),
    "choices": lambda x, y, i: torch.where(x > y, x, 0.5) + x.masked_fill(y <= 0, 2) + (x == y) + (x != y).float(),
    "truth": lambda x, y, i: (((x > 0) & (y >= 0)) | ~(x < 1)).float()
    + torch.logical_or(torch.logical_and(x > 0, y > 0), torch.logical_not(x > 1)),
    "just so": lambda x, y, i: ((x.clamp(max=0.3) == 0.3) | (x.clamp(0.1, 0.2) < 0.2) | (y.clamp(0.7) >= 0.7)).float(),
    "whole numbers": lambda x, y, i: ((i + 7) % 5 - (3 * i) // 2).float() + (i.clamp(1, 2) == 2).float(),
    "joined": lambda x, y, i: torch.cat([x, y[:2], torch.ones_like(x)])
    + F.pad(torch.stack([x, y], 1).sum(1), (0, 0, 2, len(x))),
    "repeated": lambda x, y, i: x.repeat_interleave(2, 1)[:, : x.shape[1]] + y.repeat_interleave(3, 0)[: len(y)],
    "padded": lambda x, y, i: F.pad(x, (1, 2), value=3.0),
    "sum": lambda x, y, i: x.sum(-1) + y.sum(0, keepdim=True).mT[:1, 0] + x.mean(1) + y.sum(),
    "ends": lambda x, y, i: x.amax(-1) + y.amin(0)[0] + (x > 1).any(1).float(),
    "norms": lambda x, y, i: torch.linalg.vector_norm(x, dim=-1) + torch.linalg.vector_norm(y, dim=0)[0],
    "softmax": lambda x, y, i: x.softmax(-1) + torch.cat([y, y], 1).softmax(-1)[:, : y.shape[1]],
    "rms norm": lambda x, y, i: F.rms_norm(x, x.shape[-1:], y[0], 1e-5) + F.rms_norm(y, y.shape[-1:]),
    "layer norm": lambda x, y, i: F.layer_norm(x, x.shape[-1:], y[0], y[1], 1e-5),
    "picked": lambda x, y, i: F.embedding(i, x) + x.index_select(0, i) + x.gather(0, i[:, None].expand(-1, x.shape[1])),
    "put": lambda x, y, i: torch.zeros_like(x).scatter_(0, i[:1, None].expand(1, x.shape[1]), y[:1]) + x,
    "running sum": lambda x, y, i: x.cumsum(0) + y.cumsum(1),
    "linear": lambda x, y, i: F.linear(x, y, y[:, 0]) + F.linear(x[0], y) + torch.mm(x, y.mT),
    "matmul": lambda x, y, i: x @ y.mT + torch.addmm(x @ x.mT, x, y.mT, beta=2, alpha=3),
    "batches": lambda x, y, i: torch.bmm(x[:, :, None], y[:, None]).sum(1)
    + torch.baddbmm(x[:, None], x[:, None, :1], y[:, None])[:, 0],
    "columns": lambda x, y, i: x.mT @ y + x.mT.contiguous() @ y,
    "state": lambda x, y, i: (x[:, None] * y[:, :, None]).clone().mul_(0.5)
    .baddbmm_(x[:, :, None], y[:, None]).flatten(1),
    "packed": lambda x, y, i: sum(packed.linear(x + y, PACKED[format, x.shape[1]]) for format in LAYOUTS),
    "packed, one after the other": lambda x, y, i: packed.linear(
        packed.linear(x.mT.contiguous().mT, PACKED["int8", x.shape[1]]), PACKED["4bit", ROWS]
    ),
    "scan": lambda x, y, i: sum(
        part.sum(1)
        for part in pdr.scan(
            *(part[:, None] for part in (x, y, x, y.sigmoid())), (x[:, :, None] * y[:, None]).clone(),
            checked=False,
        )
    ),
    "constants": lambda x, y, i: torch.arange(x.shape[1]).float().mul_(1).add_(x[0])
    + torch.full((x.shape[1],), 2.0).exp(),
}  # fmt: skip
SHAPES = [(5, 3), (4, 16), (6, 37), (3, 300)]
ROWS = 37
PACKED = {
    (format, K): quantise(torch.randn(ROWS, K, generator=torch.Generator().manual_seed(K)), format)
    for format in LAYOUTS
    for K in (ROWS, *(columns for _, columns in SHAPES))
}


def record(operation, inputs: list[Tensor]):
    """(the tape, its result)"""
    with torch.inference_mode(), Recorder(inputs) as recorder:
        out = operation(*inputs)
    recorder.tape.done(recorder.read)
    return recorder.tape, out


def inputs_of(shape: tuple[int, int], seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=draw) for _ in "xy")
    return [x, y, torch.randint(shape[0], (shape[0],), generator=draw)]


@torch.inference_mode()
def run(tape, inputs: list[Tensor]) -> None:
    tape.run(places_of([x.data_ptr() for x in inputs]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tape_does_what_pytorch_does(name, isa, use_isa):
    use_isa(isa)
    for shape in SHAPES:
        if name == "put" and shape[0] < 4:
            continue
        tape, out = record(OPERATIONS[name], inputs_of(shape, 0))
        for seed in (1, 2, 1):  # in other memory than it was recorded in
            inputs = inputs_of(shape, seed)
            run(tape, inputs)
            expected = OPERATIONS[name](*(x.double() if x.is_floating_point() else x for x in inputs))
            near = 3e-6 * float(expected.abs().max())
            torch.testing.assert_close(out.double(), expected.double(), rtol=2e-5, atol=near)


BRIEF = (
    "sums", "products", "laid out", "a row and a column", "transposed", "every second", "curves", "gelu",
    "joined", "sum", "softmax", "rms norm", "layer norm", "picked", "linear",
)  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BRIEF)
def test_a_tape_does_in_bfloat16_what_pytorch_does(name, isa, use_isa):
    """Each result is rounded once, as PyTorch rounds it; of sums in another order."""
    use_isa(isa)
    for shape in SHAPES:
        brief = [x.bfloat16() if x.is_floating_point() else x for x in inputs_of(shape, 0)]
        tape, out = record(OPERATIONS[name], brief)
        inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs_of(shape, 1)]
        run(tape, inputs)
        expected = OPERATIONS[name](*inputs)
        assert out.dtype is expected.dtype is torch.bfloat16
        near = 2**-7 * float(expected.abs().max())
        torch.testing.assert_close(out.float(), expected.float(), rtol=2**-6, atol=near)


def test_every_operation_and_every_instruction_is_tried(monkeypatch):
    met, written = set(), set()
    for name, handler in HANDLERS.items():
        monkeypatch.setitem(HANDLERS, name, lambda *a, name=name, own=handler: (met.add(name), own(*a)))
    own = Tape.write
    monkeypatch.setattr(Tape, "write", lambda self, code, *a: (written.add(code), own(self, code, *a))[1])
    for operation in (*OPERATIONS.values(), solved):
        record(operation, inputs_of((4, 16), 0))
    assert set(CODES) - written == {"attend", "same"}, (
        "tests/decode/test_steps.py and the test below have them"
    )
    assert met == set(HANDLERS)


WEIGHTS = {
    "of a few numbers": lambda w, x: x * w[1:4, ::2].exp().sum().float(),
    "copied": lambda w, x: x @ w.mT.contiguous()[:, :4].float(),
    "turned": lambda w, x: x + w.T.reshape(-1)[: x.shape[1]].float(),
    "in brief": lambda w, x: x * w.half()[0, 0].float(),
    "asked for": lambda w, x: x * w[0, 0].item(),
    "asked for in a list": lambda w, x: x + sum(w[2].tolist()),
    "asked for a truth": lambda w, x: x * 2 if bool((w > 100).any()) else x,
    "on the way": lambda w, x: x + w.new_zeros(x.shape[1]).copy_(w.view(-1)[: x.shape[1]]).mul_(2).float(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WEIGHTS)
@torch.inference_mode()
def test_a_constant_is_no_longer_used_when_what_it_was_made_of_changes(name, dtype):
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs = inputs_of((4, 5), 0)
    tape, out = record(lambda x, y, i: WEIGHTS[name](weight, x), inputs)
    run(tape, inputs)
    wanted, other = out.clone(), [torch.full_like(x, 1) for x in inputs]
    expected = WEIGHTS[name](weight, inputs[0])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for at in ((1, 0), (0, 0), (2, 4), (3, 2)):
        before = weight[at].clone()
        weight.data[at] = 200
        changed = not torch.equal(WEIGHTS[name](weight, inputs[0]), expected)
        try:
            run(tape, other)
        except Stale:
            assert torch.equal(out, wanted), "nothing was written"
        else:
            assert not changed
        weight.data[at] = before
        run(tape, inputs)  # as before, byte for byte
        assert torch.equal(out, wanted)


def test_shapes_alone_are_not_read():
    weight = torch.ones(3, 4)
    tape, _ = record(
        lambda x, y, i: x + weight.new_zeros(weight.shape).sum() + len(weight.mT[1]), inputs_of((3, 4), 0)
    )
    weight.data.mul_(2)
    run(tape, inputs_of((3, 4), 1))


def test_what_writes_into_a_weight_is_not_recorded():
    weight = torch.ones(4)
    with refused(Unrecordable):
        record(lambda x, y, i: x + weight.add_(1), inputs_of((3, 4), 0))


def solved(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    lower, _ = torch.linalg.cholesky_ex(x @ x.mT + torch.eye(len(x)))
    return torch.linalg.solve_triangular(lower, y, upper=False) + torch.linalg.solve_triangular(
        lower.mT, y, upper=True
    )


def test_a_triangle_is_solved():
    tape, out = record(solved, inputs_of((5, 9), 0))
    inputs = inputs_of((5, 9), 3)
    run(tape, inputs)
    torch.testing.assert_close(out, solved(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bits_do_not_depend_on_the_instruction_set(name, use_isa):
    tape, out = record(OPERATIONS[name], inputs_of((6, 37), 0))
    found = []
    for isa in ISAS:
        use_isa(isa)
        run(tape, inputs_of((6, 37), 1))
        found.append(out.clone())
    assert all(torch.equal(one, found[0]) for one in found)


def test_what_is_not_finite_stays_so():
    def curves(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        parts = (
            torch.exp(x),
            torch.sigmoid(x),
            F.silu(x),
            torch.tanh(x),
            x.softmax(-1),
            F.gelu(x),
            x.clamp(-1, 1),
            x * y,
        )
        norm, top, least = F.rms_norm(x, x.shape[-1:]), torch.maximum(x, y), torch.minimum(y, x)
        return torch.stack([*parts, norm, top, least, F.softplus(x), x.sum(1, keepdim=True) + x])

    tape, out = record(curves, inputs_of((4, 16), 0))
    inputs = inputs_of((4, 16), 1)
    inputs[0][0, 3], inputs[0][1, 2], inputs[0][2, 15] = torch.nan, torch.inf, -torch.inf
    run(tape, inputs)
    for found, expected in zip(out, curves(*inputs), strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())
        finite = expected.isfinite()
        torch.testing.assert_close(found[finite], expected[finite], rtol=2e-5, atol=2e-6)
    assert torch.equal(
        out[9:11].isnan(), torch.stack([torch.maximum(*inputs[:2]), torch.minimum(*inputs[:2])]).isnan()
    )


@pytest.mark.parametrize("isa", ISAS)
def test_the_ends_of_curves_are_those_of_pytorch(isa, use_isa):
    def curves(x: Tensor) -> Tensor:
        return torch.stack([x.exp(), x.sigmoid(), F.silu(x), 1 / x.abs(), x.abs()])

    use_isa(isa)
    ends = [0.0, -0.0, 88.1, 88.6, 88.72283, 88.72284, -87.2, -88.6, -95.0, -103.0, -105.0, 2e38, -1e38]
    x = torch.tensor([*ends, torch.inf, -torch.inf, torch.nan, 1.0])
    tape, out = record(curves, [torch.ones_like(x)])
    run(tape, [x])
    expected = curves(x)
    near = 1e-43  # of the numbers below the normal ones, the last bits
    torch.testing.assert_close(out[[0, 3, 4]], expected[[0, 3, 4]], rtol=1e-6, atol=near, equal_nan=True)
    torch.testing.assert_close(out[1:3], expected[1:3], rtol=2e-5, atol=1e-36, equal_nan=True)
    assert not out[1, 12] and not out[2, 12]


FAR = {
    "copied": lambda x, y: x.clone(),
    "chosen": lambda x, y: torch.where(x > y, x, y) + x.masked_fill(y == x, 7),
    "sums": lambda x, y: x + y - 3 * x + 5 - y.neg(),
    "products": lambda x, y: x * y + x**2 + x**3 + torch.addcmul(x, x, y, value=3),
    "divided": lambda x, y: x % 3 + (-x) % 7 + x % y + x // 5 + (-x) // 9 + x // y,
    "bounds": lambda x, y: (
        torch.maximum(x, y) + torch.minimum(x, -y) + x.clamp(2**60 + 3, 2**61 + 1) + x.abs()
    ),
    "compared": lambda x, y: torch.stack([x == y, x != y, x < y, x <= y]).long(),
    "together": lambda x, y: torch.stack([x.sum(), y.amax(), x.amin(), x.cumsum(0)[-1]]),
}


@pytest.mark.parametrize("name", FAR)
def test_whole_numbers_are_exact(name):
    """Also where a double does not hold them, modulo 2⁶⁴."""
    x = torch.tensor([2**60 + 1, 2**60 + 1, 2**62 - 1, -(2**61) - 1, 2**53 + 1, -5, -(2**63)])
    y = torch.tensor([2**60, 2**60 + 1, -3, 2**53 + 1, 2**60 + 3, 3, -1])
    tape, out = record(FAR[name], [torch.ones_like(x), torch.ones_like(y)])
    run(tape, [x, y])
    assert torch.equal(out, FAR[name](x, y))


def test_a_large_product_is_shared_among_threads_bit_for_bit():
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(1000, 700, generator=draw), torch.randn(3, 700, generator=draw)
    tape, out = record(lambda x: F.linear(x, weight), [x])
    found = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        try:
            run(tape, [x])
        finally:
            native.set_threads(None)
        found.append(out.clone())
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], x @ weight.mT, rtol=1e-4, atol=1e-4)


def test_python_is_called_between_two_parts():
    def sorted_by_python(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        mixed, ascending = x * y, lambda x: x.sort(-1)[0]
        found = ascending(mixed) if (tape := recorder()) is None else tape.aside(ascending, mixed)
        return found - x

    tape, out = record(sorted_by_python, inputs_of((4, 9), 0))
    for seed in (1, 2):
        inputs = inputs_of((4, 9), seed)
        run(tape, inputs)
        torch.testing.assert_close(out, sorted_by_python(*inputs))
    with refused(Unrecordable):
        record(lambda x, y, i: recorder().aside(torch.sort, x), inputs_of((4, 9), 0))


def test_an_index_that_is_not_there_is_an_error():
    tape, _ = record(lambda i: F.embedding(i, torch.ones(5, 3)), [torch.tensor([1, 2])])
    with refused(RuntimeError, "instruction"):
        run(tape, [torch.tensor([1, 5])])
    with refused(RuntimeError, "instruction"):
        run(tape, [torch.tensor([-1, 0])])


WEIGHT = torch.ones(3)


@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda x: x * x.sum().item(), ["item"]),
        (lambda x: x[: len(x.nonzero())], ["nonzero"]),
        (lambda x: torch.tensor(x.tolist()), ["resolve_conj"]),
        (lambda x: WEIGHT.add_(x), []),
        (lambda x: torch.linalg.det(x[:, None] * x), ["linalg_det"]),
        (lambda x: torch.fft.fft(x).real, ["fft_fft"]),
        (lambda x: x.to(torch.float16), ["float16"]),
        (lambda x: x.double().softmax(-1), ["softmax", "torch.float64"]),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), ["rounding_mode"]),
        (lambda x: F.pad(x[None], (1, 1), mode="reflect"), ["pad"]),
        (lambda x: (x > 0).long() & 5, []),
        (lambda x: ~(x > 0).long(), []),
        (lambda x: x[:0] @ torch.ones(0, 2), []),
        (lambda x: x[:0].sum() + 9, ["sum"]),
        (lambda x: x.long() + (2**60 + 1), ["add_scalar"]),
        (lambda x: x[:0].mean() + 9, ["sum"]),
        (lambda x: x * torch.rand_like(x), ["rand_like"]),
        (lambda x: x if torch.allclose(x, x) else -x, ["allclose"]),
        (lambda x: (c := torch.zeros(3), x + c, c.add_(x))[1], []),
        (lambda x: (torch.ones(2, 3, 4) * x[:, None]).sum((0, 2)), []),
    ],
    ids=[
        "a number",
        "places",
        "a list",
        "a weight",
        "a determinant",
        "a transform",
        "another precision",
        "a softmax in float64",
        "a rounding",
        "a reflection",
        "bits",
        "bits turned",
        "nothing",
        "a sum of nothing",
        "a number that no double is",
        "a mean of nothing",
        "a draw",
        "a comparison",
        "a constant",
        "apart",
    ],
)
def test_what_cannot_be_recorded_is_said(operation, named):
    with refused(Unrecordable, *named):
        record(operation, [torch.rand(3)])
