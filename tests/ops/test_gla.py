"""The gated linear attention scan against the plain loop."""

import pytest
import torch
from torch import Tensor

from perspectron.ops import gla
from perspectron.util.errors import BackendError
from tests.refusals import refused

B, H, K, V = 2, 3, 5, 4
LENGTHS = [1, 2, 63, 64, 65, 150]
NAMES = ["q", "k", "v", "gate", "state"]

every_kind = pytest.mark.parametrize(
    ("G", "A"), [(H, K), (1, K), (H, 1), (1, 1)], ids=["wide", "wide-shared", "scalar", "scalar-shared"]
)


def inputs(T: int, G: int = H, A: int = K, dtype=torch.float64, seed: int = 0) -> list[Tensor]:
    """q, k, v as a projection gives them (heads behind time), gates from exactly 0 to exactly 1, and a non-zero
    state."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(B, T, heads, n, generator=draw, dtype=dtype).transpose(1, 2)
        for heads, n in ((G, K), (G, K), (H, V))
    )
    gate = torch.rand(B, H, T, A, generator=draw, dtype=dtype)
    gate = torch.where(gate < 0.1, 0.0, torch.where(gate > 0.6, 1.0, gate))
    return [q, k, v, gate, torch.randn(B, H, K, V, generator=draw, dtype=dtype)]


def gradients(
    tensors: list[Tensor], backend: str = "torch", of: tuple[int, ...] = (0, 1)
) -> tuple[Tensor, ...]:
    """Of a fixed weighting of the outputs, of the final state, or of both; zero where an input has no part."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    both = gla.scan(*tensors, backend=backend)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in both]
    loss = sum((both[i] * weights[i]).sum() for i in of)
    return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("A", [K, 1])
@pytest.mark.parametrize("backend", ["auto", "naive"])
def test_heads_in_a_row_share_queries_and_keys(T, A, backend):
    """As if each head had a copy, gradients included."""
    tensors = inputs(T, 2, A)
    tensors[2:] = [torch.cat([x, x.flip(1)], 1)[:, :4] for x in tensors[2:]]
    copies = [x.repeat_interleave(2, 1) for x in tensors[:2]]
    for a, b in zip(gla.scan(*tensors, backend=backend), gla.scan(*copies, *tensors[2:]), strict=True):
        close(a, b, 1e-12)
    shared, each = gradients(tensors, backend), gradients([*copies, *tensors[2:]])
    for a, b in zip(shared, each, strict=True):
        close(a, b if a.shape == b.shape else b.unflatten(1, (2, 2)).sum(2), 1e-10)


@every_kind
@pytest.mark.parametrize("T", LENGTHS)
def test_tree_equals_loop(T, G, A):
    tensors = inputs(T, G, A)
    for scale in (None, 1.0):
        fast, slow = (gla.scan(*tensors, scale=scale, backend=backend) for backend in ("auto", "naive"))
        for a, b in zip(fast, slow, strict=True):
            close(a, b, 1e-12)


def test_the_loop_is_the_recurrence():
    q, k, v, gate, state = inputs(3)
    o, end = gla.scan(q, k, v, gate, state, scale=2.0, backend="naive")
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(3):
                S = torch.diag(gate[b, h, t]) @ S + torch.outer(k[b, h, t], v[b, h, t])
                close(o[b, h, t], 2.0 * S.T @ q[b, h, t], 1e-12)
            close(end[b, h], S, 1e-12)
    close(gla.scan(q, k, v, gate, state)[0], gla.scan(q * K**-0.5, k, v, gate, state, scale=1.0)[0], 1e-12)


@every_kind
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["outputs", "state", "both"])
def test_gradients_equal_those_of_the_loop(T, G, A, of):
    tensors = inputs(T, G, A)
    fast, slow = (gradients(tensors, backend, of) for backend in ("torch", "naive"))
    assert sum(x.abs().max() > 0 for x in slow) >= 3
    for name, a, b in zip(NAMES, fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


@every_kind
def test_gradients_are_those_of_finite_differences(G, A):
    q, k, v, gate, state = inputs(5, G, A)
    inside = gate * 0.8 + 0.1  # so that finite differences stay valid
    tensors = [x[:1].requires_grad_() for x in (q, k, v, inside, state)]
    assert torch.autograd.gradcheck(gla.scan, tensors)


@every_kind
def test_what_is_not_there_is_an_error_not_a_silent_zero(G, A):
    tensors = [x.requires_grad_() for x in inputs(5, G, A)]

    def loss(q):
        return gla.scan(q, *tensors[1:])[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(tensors[0]), tensors[0], create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + tensors[0].sum(), tensors[0])
    with refused(RuntimeError, "gla.scan"):
        torch.func.jvp(loss, (tensors[0],), (tensors[0],))
    close(torch.func.grad(loss)(tensors[0].detach()), gradient.detach(), 1e-12)


@every_kind
@pytest.mark.parametrize("split", [1, 63, 64, 65])
def test_split_anywhere(split, G, A):
    *tensors, state = inputs(150, G, A)
    whole, end = gla.scan(*tensors, state)
    first, middle = gla.scan(*(x[:, :, :split] for x in tensors), state)
    second, last = gla.scan(*(x[:, :, split:] for x in tensors), middle)
    close(torch.cat([first, second], 2), whole, 1e-12)
    close(last, end, 1e-12)


@every_kind
def test_one_token_writes_into_a_state_to_be_consumed(G, A):
    *tensors, state = inputs(1, G, A)
    expected = gla.scan(*tensors, state)
    with torch.inference_mode():
        o, after = gla.scan(*tensors, state, consume_state=True)
    assert after.data_ptr() == state.data_ptr()
    close(o, expected[0], 1e-12)
    close(state, expected[1], 1e-12)


@every_kind
@pytest.mark.parametrize("T", [1, 70])
def test_else_the_state_handed_in_stays(T, G, A):
    *tensors, state = inputs(T, G, A)
    kept = state.clone()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            close(gla.scan(*tensors, state)[0], gla.scan(*tensors, kept, backend="naive")[0], 1e-12)
        assert torch.equal(state, kept)


def test_no_tokens_leave_the_state():
    *tensors, state = inputs(0)
    o, after = gla.scan(*tensors, state)
    assert o.shape == (B, H, 0, V)
    assert torch.equal(after, state) and after.data_ptr() != state.data_ptr()
    for backend in ("naive", "torch"):
        assert gla.scan(*tensors, state, backend=backend)[1].data_ptr() != state.data_ptr()
    with refused(ValueError, "K", 0):
        gla.scan(*(x[..., :0] for x in tensors[:2]), *tensors[2:], state[:, :, :0])


def test_without_a_state_it_starts_from_zero():
    *tensors, state = inputs(70)
    for a, b in zip(gla.scan(*tensors), gla.scan(*tensors, torch.zeros_like(state)), strict=True):
        assert torch.equal(a, b)


@every_kind
@pytest.mark.parametrize("T", [65, 300])
def test_float32_follows_float64(T, G, A):
    single = inputs(T, G, A, dtype=torch.float32)
    double = [x.double() for x in single]
    for a, b in zip(gla.scan(*single), gla.scan(*double, backend="naive"), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-6 * b.norm()
    for a, b in zip(gradients(single), gradients(double, "naive"), strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@every_kind
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-30])
def test_extreme_gates_in_float32(fill, G, A):
    q, k, v, gate, state = inputs(300, G, A, dtype=torch.float32)
    single = [q, k, v, torch.full_like(gate, fill), state]
    double = [x.double() for x in single]
    for a, b in zip(gla.scan(*single), gla.scan(*double, backend="naive"), strict=True):
        assert (a - b).norm() < 2e-6 * b.norm()
    for a, b in zip(gradients(single), gradients(double, "naive"), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # with gates of 0 the first state has none


@every_kind
def test_low_precision_inputs_give_a_float32_state_even_under_autocast(G, A):
    *tensors, _ = inputs(70, G, A, dtype=torch.bfloat16)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        o, state = gla.scan(*tensors)
    assert o.dtype == state.dtype == torch.float32
    exact = gla.scan(*(x.double() for x in tensors), backend="naive")
    assert (o - exact[0]).norm() < 1e-6 * exact[0].norm()
    assert (state - exact[1]).norm() < 1e-6 * exact[1].norm()


def test_autocast_does_not_reach_the_backward_pass():
    tensors = [x.requires_grad_() for x in inputs(70, dtype=torch.float32)]
    exact = torch.autograd.grad(gla.scan(*tensors)[0].sum(), tensors)
    o, _ = gla.scan(*tensors)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for a, b in zip(torch.autograd.grad(o.sum(), tensors), exact, strict=True):
            assert torch.equal(a, b)


@every_kind
@pytest.mark.parametrize("T", [1, 70])
def test_shapes_are_known_without_numbers(T, G, A):
    tensors = [x.to("meta") for x in inputs(T, G, A)]
    with torch.inference_mode():
        o, state = gla.scan(*tensors)
    assert o.is_meta and o.shape == (B, H, T, V) and state.shape == (B, H, K, V)


def test_bad_calls_say_what_is_wrong():
    q, k, v, gate, state = inputs(4)
    with refused(BackendError, "backend", "cuda"):
        gla.scan(q, k, v, gate, state, backend="cuda")
    for wrong in (
        (q[:, :, :2], k, v, gate),
        (q, k[:, :1], v, gate),
        (q[:, :2], k[:, :2], v, gate),
        (q, k, v[:, :2], gate),
        (q, k, v, gate[..., :2]),
        (q, k, v, gate[:, :, :2]),
    ):
        with refused(ValueError):
            gla.scan(*wrong, state)
    with refused(ValueError, "state"):
        gla.scan(q, k, v, gate, state[:1])
    with refused(ValueError, "gates", 1.5):
        gla.scan(q, k, v, gate.detach().index_fill(2, torch.tensor(1), 1.5), state)


@every_kind
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("T", [0, 1, 5, 70])
def test_no_rows_give_no_rows(T, G, A, mode):
    *tensors, state = (x[:0] for x in inputs(T, G, A))
    with mode():
        o, after = gla.scan(*tensors, state)
    assert o.shape == tensors[2].shape and after.shape == state.shape


@every_kind
@pytest.mark.parametrize("T", [1, 5])
def test_an_expanded_state_is_not_written(T, G, A):
    *tensors, state = inputs(T, G, A)
    kept, expanded = state[:1].clone(), state[:1].expand_as(state)
    expected = gla.scan(*tensors, expanded, backend="naive")
    with torch.inference_mode():
        found = gla.scan(*tensors, expanded, consume_state=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-12)
    assert torch.equal(expanded[:1], kept)
