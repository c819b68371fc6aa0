"""The PDR scan against the plain loop, in every direction."""

import pytest
import torch
from torch import Tensor

from perspectron import native
from perspectron.ops import pdr
from perspectron.util.errors import BackendError
from tests.refusals import refused

LENGTHS = [1, 2, 63, 64, 65, 200]


def inputs(T: int, B: int = 2, D: int = 5, R: int = 3, dtype=torch.float64, seed: int = 0) -> list[Tensor]:
    """q, k, v, gates from exactly 0 to exactly 1, and a non-zero state."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, n, generator=draw, dtype=dtype) for n in (R, R, D))
    gamma = torch.rand(B, T, D, generator=draw, dtype=dtype)
    gamma = torch.where(gamma < 0.1, 0.0, torch.where(gamma > 0.6, 1.0, gamma))
    return [q, k, v, gamma, torch.randn(B, D, R, generator=draw, dtype=dtype)]


@pytest.mark.parametrize("T", LENGTHS)
def test_tree_equals_loop(T):
    tensors = inputs(T)
    fast, slow = pdr.scan(*tensors), pdr.scan(*tensors, backend="naive")
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", LENGTHS)
def test_gradients_equal_those_of_the_loop(T):
    def gradients(backend):
        tensors = [x.requires_grad_() for x in inputs(T)]
        o, state = pdr.scan(*tensors, backend=backend)
        draw = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in (o, state))
        return torch.autograd.grad(loss, tensors)

    for name, a, b in zip(
        ["q", "k", "v", "gamma", "state"], gradients("torch"), gradients("naive"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("T", [1, 3, 65])
def test_forward_mode_equals_that_of_the_loop(T):
    tensors, tangents = inputs(T), inputs(T, seed=1)
    for chosen in range(5):
        only = [t if i == chosen else torch.zeros_like(t) for i, t in enumerate(tangents)]
        _, fast = torch.func.jvp(lambda *x: pdr.scan(*x), tuple(tensors), tuple(only))
        _, slow = torch.func.jvp(lambda *x: pdr.scan(*x, backend="naive"), tuple(tensors), tuple(only))
        assert slow[0].abs().max() > 0
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck_in_both_modes():
    tensors = [x.requires_grad_() for x in inputs(5, B=1, D=2, R=2)]
    tensors[3] = (
        tensors[3].detach() * 0.8 + 0.1
    ).requires_grad_()  # inside, so that finite differences stay valid
    assert torch.autograd.gradcheck(lambda *x: pdr.scan(*x), tensors, check_forward_ad=True)


def test_second_derivatives_are_an_error_not_a_silent_zero():
    tensors = [x.requires_grad_() for x in inputs(5)]

    def loss(q):
        return pdr.scan(q, *tensors[1:])[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(tensors[0]), tensors[0], create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + tensors[0].sum(), tensors[0])
    with refused(RuntimeError, "create_graph"):
        torch.func.jvp(torch.func.grad(loss), (tensors[0],), (tensors[0],))


def test_autocast_does_not_reach_the_backward_pass_or_the_tangents():
    tensors = [x.requires_grad_() for x in inputs(70, dtype=torch.float32)]
    exact = torch.autograd.grad(pdr.scan(*tensors)[0].sum(), tensors)
    o, _ = pdr.scan(*tensors)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for a, b in zip(torch.autograd.grad(o.sum(), tensors), exact, strict=True):
            assert torch.equal(a, b)
        _, tangent = torch.func.jvp(lambda q: pdr.scan(q, *tensors[1:])[0], (tensors[0],), (tensors[0],))
    torch.testing.assert_close(tangent, o)  # the output is linear in q


@pytest.mark.parametrize("split", [1, 63, 64, 65, 150])
def test_split_anywhere(split):
    q, k, v, gamma, state = inputs(200)
    whole, end = pdr.scan(q, k, v, gamma, state)
    first, middle = pdr.scan(*(x[:, :split] for x in (q, k, v, gamma)), state)
    second, last = pdr.scan(*(x[:, split:] for x in (q, k, v, gamma)), middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_one_token_writes_into_a_state_to_be_consumed(mode):
    q, k, v, gamma, state = inputs(1)
    expected = pdr.scan(q, k, v, gamma, state)
    with mode():
        o, after = pdr.scan(q, k, v, gamma, state, consume_state=True)
    assert after.data_ptr() == state.data_ptr()
    torch.testing.assert_close(o, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [1, 5])
def test_forward_mode_under_no_grad_keeps_its_tangents(T):
    tensors = inputs(T, dtype=torch.float32)

    def without_graph(*primals):
        with torch.no_grad():
            return pdr.scan(*primals)

    tangents = tuple(torch.ones_like(x) for x in tensors)
    _, found = torch.func.jvp(without_graph, tuple(tensors), tangents)
    _, expected = torch.func.jvp(pdr.scan, tuple(tensors), tangents)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.abs().max() > 0


@pytest.mark.cpu_only("native kernels")
@pytest.mark.skipif(not native.available(), reason="no native library")
def test_native_gives_the_same_bits_however_the_sequence_is_cut():
    q, k, v, gamma, state = inputs(70, dtype=torch.float32)
    exact, end = pdr.scan(*(x.double() for x in (q, k, v, gamma, state)), backend="naive")
    with torch.inference_mode():
        copy = state.clone()
        whole, after = pdr.scan(q, k, v, gamma, copy, backend="native", consume_state=True)
        assert after.data_ptr() == copy.data_ptr()
        steps = []
        for t in range(70):
            o, state = pdr.scan(*(x[:, t : t + 1] for x in (q, k, v, gamma)), state)
            steps.append(o)
    assert torch.equal(torch.cat(steps, 1), whole) and torch.equal(state, after)
    assert (whole - exact).norm() < 2e-6 * exact.norm() and (after - end).norm() < 2e-6 * end.norm()


def test_native_refuses_what_it_cannot_do():
    tensors = inputs(3)
    with refused(BackendError, "native"):
        pdr.scan(*tensors, backend="native")


def test_no_tokens_leave_the_state():
    q, k, v, gamma, state = inputs(0)
    o, after = pdr.scan(q, k, v, gamma, state)
    assert o.shape == (2, 0, 5)
    assert torch.equal(after, state) and after.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-30])
def test_extreme_gates_in_float32(fill):
    q, k, v, gamma, state = inputs(300, dtype=torch.float32)
    gamma = torch.full_like(gamma, fill).requires_grad_()
    o, end = pdr.scan(q, k, v, gamma, state)
    exact, _ = pdr.scan(*(x.double() for x in (q, k, v, gamma, state)), backend="naive")
    assert (o - exact).norm() < 2e-6 * exact.norm()
    (o.sum() + end.sum()).backward()
    assert gamma.grad.isfinite().all()


def test_state_is_bounded_by_values_and_gates():
    q, k, v, gamma, _ = inputs(500)
    gamma = gamma.clamp_max(0.9)
    bound = v.abs().max() * k.abs().max() / (1 - 0.9)
    assert pdr.scan(q, k, v, gamma)[1].abs().max() <= bound


def test_low_precision_inputs_give_a_float32_state_even_under_autocast():
    q, k, v, gamma, _ = inputs(70, dtype=torch.bfloat16)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        o, state = pdr.scan(q, k, v, gamma)
    assert o.dtype == state.dtype == torch.float32
    exact = pdr.scan(*(x.double() for x in (q, k, v, gamma)), backend="naive")
    assert (state - exact[1]).norm() < 1e-6 * exact[1].norm()


def test_renormalise_shrinks_and_never_grows():
    state = 0.1 * torch.randn(3, 4, 5)
    state[1] = 0
    state[2] *= 1000
    after = pdr.renormalise(state)
    assert torch.equal(after[:2], state[:2])
    torch.testing.assert_close(after[2].norm(), torch.tensor(20.0).sqrt())


def test_bad_calls_say_what_is_wrong():
    tensors = inputs(4)
    with refused(BackendError, "backend", "cuda"):
        pdr.scan(*tensors, backend="cuda")
    with refused(ValueError):
        pdr.scan(tensors[0][:, :2], *tensors[1:])
    with refused(ValueError, "state"):
        pdr.scan(*tensors[:4], tensors[4][:1])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["auto", "naive", "torch"])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("gate", [1.5, -0.25, torch.nan, torch.inf])
def test_gates_outside_of_0_and_1_are_refused(mode, backend, T, gate):
    q, k, v, gamma, state = inputs(T)
    gamma[1, -1, 2] = gate
    with mode():
        with refused(ValueError, "gates", gate):
            pdr.scan(q, k, v, gamma, state, backend=backend)
        pdr.scan(q, k, v, gamma, state, backend=backend, checked=False)
        gamma[1, -1, 2] = 1.0
        pdr.scan(q, k, v, gamma, state, backend=backend)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("T", [0, 1, 5, 70])
def test_no_rows_give_no_rows(T, mode):
    *tensors, state = (x[:0] for x in inputs(T, dtype=torch.float32))
    with mode():
        o, after = pdr.scan(*tensors, state)
    assert o.shape == tensors[2].shape and after.shape == state.shape
