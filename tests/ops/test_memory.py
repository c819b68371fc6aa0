"""The native scan behind `gla` and `delta`, in training and in reading, against their loops in float64."""

import pytest
import torch
from torch.autograd import forward_ad

from perspectron import native
from perspectron.native import training
from perspectron.ops import delta, gla
from tests.refusals import refused

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.reason())),
    pytest.mark.cpu_only("native kernels"),
]
B, H, T, K, V = 2, 3, 21, 5, 18
WIDE = 70  # values of more than one slab


def inputs(name, heads, gates, V=V):
    """Those of an operation, heads behind time as a projection gives them; e and b of lengths that do not expand."""
    generator = torch.Generator().manual_seed(0)

    def draw(h, width):
        return torch.randn(B, T, h, width, generator=generator).transpose(1, 2)

    q, k, e, b = (draw(h, K) / K**0.5 for h in (heads, heads, H, H))
    gate = draw(H, gates).sigmoid()
    gate = torch.where(gate < 0.2, 0.0, torch.where(gate > 0.7, 1.0, gate))
    v, state = draw(H, V), torch.randn(B, H, K, V, generator=generator)
    return {
        "gla": [q, k, v, gate, state],
        "delta": [q, k, e, v, gate, state],
        "rwkv7": [q, k, v, e, b, gate, state],
    }[name]


SCANS = {"gla": gla.scan, "delta": delta.scan, "rwkv7": delta.scan_rwkv7}
CASES = [
    ("gla", H, K),
    ("gla", 1, 1),
    ("gla", 1, K),
    ("delta", H, K),
    ("delta", H, 1),
    ("rwkv7", H, K),
    ("rwkv7", H, 1),
]


@pytest.fixture
def calls(monkeypatch):
    found, kernel = [], training.memory
    monkeypatch.setattr(training, "memory", lambda *x: (found.append(1), kernel(*x))[1])
    return found


@pytest.mark.parametrize("values", [V, WIDE])
@pytest.mark.parametrize(("name", "heads", "gates"), CASES)
def test_outputs_and_gradients_are_those_of_float64(name, heads, gates, values, calls):
    tensors, scan = inputs(name, heads, gates, values), SCANS[name]

    def of(dtype, backend):
        xs = [x.to(dtype).requires_grad_() for x in tensors]
        outputs = scan(*xs, scale=0.7, backend=backend)
        return *outputs, *torch.autograd.grad(sum((y * y.detach().cos()).sum() for y in outputs), xs)

    found = of(torch.float32, "auto")
    assert len(calls) == 1
    for a, b in zip(found, of(torch.float64, "naive"), strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm()


@pytest.mark.parametrize("name", SCANS)
def test_only_float32_in_reverse_mode_takes_it(name, calls):
    tensors, scan = inputs(name, H, K), SCANS[name]
    scan(*(x.double() for x in tensors))
    scan(*(x.double().requires_grad_() for x in tensors))
    xs = [x.clone().requires_grad_() for x in tensors]
    scan(*xs, backend="torch")
    scan(*(x[:, :, :0] for x in xs[:-1]), xs[-1])
    if name != "gla":  # which has no forward mode
        with forward_ad.dual_level():
            scan(forward_ad.make_dual(xs[0], xs[0].detach()), *xs[1:])
    assert not calls


def test_a_second_derivative_is_refused():
    xs = [x.requires_grad_() for x in inputs("delta", H, K)]
    (first, *_) = torch.autograd.grad(delta.scan(*xs)[0].sum(), xs, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        first.sum().backward()


@pytest.mark.parametrize(("name", "heads", "gates"), CASES)
def test_reading_has_the_bits_of_any_pieces_and_rows(name, heads, gates):
    """Where nothing differentiates; tokens one at a time take the step, which rounds another way."""
    *given, state = inputs(name, heads, gates)
    scan = SCANS[name]
    with torch.inference_mode():
        whole, end = scan(*given, state)
        wanted, last = scan(*(x.double() for x in (*given, state)), backend="naive")
        torch.testing.assert_close(whole.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(end.double(), last, rtol=1e-5, atol=1e-5)
        parts, now = [], state
        for part in (slice(0, 2), slice(2, 19), slice(19, T)):
            o, now = scan(*(x[:, :, part] for x in given), now)
            parts.append(o)
        assert torch.equal(torch.cat(parts, 2), whole) and torch.equal(now, end)
        for row in range(B):
            alone, after = scan(*(x[row : row + 1] for x in given), state[row : row + 1])
            assert torch.equal(alone[0], whole[row]) and torch.equal(after[0], end[row])
