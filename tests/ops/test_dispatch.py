"""What operations share: autocast, the log, states that are overwritten, and derivatives that are not there."""

import logging

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from perspectron.model.half import HalfLinear
from perspectron.ops import conv, delta, dispatch, experts, gla, pdr
from perspectron.util.errors import BackendError
from tests.refusals import refused

draw = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def swiglu(x_ND: Tensor, gate_EFD: Tensor) -> Tensor:
    return experts.swiglu(x_ND, torch.tensor([0, 1, 0]), gate_EFD, normal(2, 5, 4), normal(2, 4, 5))[0]


ONCE = {
    "pdr.scan": (lambda q, v: pdr.scan(q, q, v, v.sigmoid())[0], [(2, 3, 4), (2, 3, 5)]),
    "gla.scan": (lambda q, v: gla.scan(q, q, v, q.sigmoid())[0], [(2, 1, 3, 4), (2, 1, 3, 5)]),
    "delta.scan": (lambda q, v: delta.scan(q, q, q, v, q.sigmoid())[0], [(2, 1, 3, 4), (2, 1, 3, 5)]),
    "delta.scan_rwkv7": (
        lambda q, v: delta.scan_rwkv7(q, q, v, -q, q, q.sigmoid())[0],
        [(2, 1, 3, 4), (2, 1, 3, 5)],
    ),
    "conv.convolve": (
        lambda u, w: conv.convolve(u, normal(2, 3, 5), w, normal(5), None, None)[0],
        [(2, 6, 5), (5, 1, 4)],
    ),
    "experts.swiglu": (swiglu, [(3, 4), (2, 5, 4)]),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_an_error_also_where_the_input_is_reached_another_way(name):
    op, shapes = ONCE[name]
    inputs = [normal(*shape).requires_grad_() for shape in shapes]
    loss = op(*inputs).square().sum() + sum(x.pow(3).sum() for x in inputs)
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    for gradient, x in zip(gradients, inputs, strict=True):
        with refused(RuntimeError, name, "create_graph"):
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)


@pytest.mark.parametrize("name", ["gla.scan", "conv.convolve"])
def test_forward_mode_where_there_is_none_is_an_error(name):
    op, shapes = ONCE[name]
    with forward_ad.dual_level(), refused(RuntimeError, name):
        op(*(forward_ad.make_dual(x, x) for x in (normal(*shape) for shape in shapes)))


# ---------------------------------------------------------------- around the numbers


def test_autocast_does_not_reach_inside():
    @dispatch.in_full_precision
    def product(x: Tensor, *, twice: bool) -> Tensor:
        """Of x and itself."""
        return (x @ x) * (2 if twice else 1)

    x = torch.ones(2, 2)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        found = product(x, twice=True)
        assert found.dtype == torch.float32 and found[0, 0] == 4
        assert product(x.to("meta"), twice=False).is_meta
        assert (x @ x).dtype == torch.bfloat16, "it is on again afterwards"
    assert product.__doc__ == "Of x and itself."


def test_the_first_argument_may_be_named():
    x, v = normal(2, 3, 4), normal(2, 1, 3, 4)
    found = pdr.scan(q_BTR=x, k_BTR=x, v_BTD=x, gamma_BTD=x.sigmoid())[0]
    assert torch.equal(found, pdr.scan(x, x, x, x.sigmoid())[0])
    found = delta.scan(backend="naive", q_BHTK=v, k_BHTK=v, e_BHTK=v, v_BHTV=v, alpha_BHTA=v.sigmoid())[0]
    assert torch.equal(found, delta.scan(v, v, v, v, v.sigmoid(), backend="naive")[0])


@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_a_window_of_another_length_than_the_taps_is_refused(tokens):
    with refused(ValueError, "window_BZC", tokens):
        conv.convolve(normal(2, 5, 3), normal(2, tokens, 3), normal(3, 1, 4), normal(3), None, None)


@pytest.mark.parametrize("expert", [-1, 2])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("N", [1, 3])
def test_an_expert_that_is_not_there_is_refused(expert, learns, N):
    weights = [normal(2, *shape) for shape in ((5, 4), (5, 4), (4, 5))]
    expert_N, x_ND = torch.tensor([0, 1, expert])[-N:], normal(N, 4).requires_grad_(learns)
    with torch.set_grad_enabled(learns), refused(ValueError, expert):
        experts.swiglu(x_ND, expert_N, *weights)


@pytest.mark.cpu_only("a compiler does not trace the mode that places the tests' tensors")
def test_a_line_is_said_once_and_never_to_a_compiler(caplog):
    def op(x: Tensor) -> Tensor:
        dispatch.log_once("test: auto runs the loop on %s", x.device.type)
        return x + 1

    with caplog.at_level(logging.INFO, "perspectron"):
        torch.compile(op, backend="eager", fullgraph=True)(torch.ones(2))
        assert not caplog.messages
        for _ in range(2):
            op(torch.ones(2))
        op(torch.ones(2, device="meta"))
    assert caplog.messages == [f"test: auto runs the loop on {device}" for device in ("cpu", "meta")]


def test_an_unknown_backend_is_named_with_those_there_are():
    dispatch.known("b", ("a", "b"))
    with refused(BackendError, "backend", "c"):
        dispatch.known("c", ("a", "b"))


def test_it_computes_in_float32_or_float64():
    half, single, double = (
        torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    assert dispatch.widest(half) == dispatch.widest(half, single) == torch.float32
    assert dispatch.widest(half, double) == torch.float64


class Adapted(torch.nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = layer, layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x[..., :1]


def test_a_matrix_of_16_bits_that_is_read_and_not_called_is_widened():
    layer = HalfLinear(3, 4)
    layer.weight = torch.nn.Parameter(layer.weight.bfloat16())
    x = torch.randn(5, 3)
    for either in (layer, Adapted(layer)):
        weight, bias = dispatch.affine(either)
        assert weight.dtype is torch.float32
        torch.testing.assert_close(x @ weight.T + bias, either(x))


def test_what_is_watched_is_seen():
    seen = []

    def op(x: Tensor) -> Tensor:
        seen.append(dispatch.under_tracing(x))
        return x + 1

    op(torch.ones(2))
    make_fx(op)(torch.ones(2))
    torch.func.vmap(op)(torch.ones(2))
    op(torch.nn.Parameter(torch.ones(2)))
    assert seen == [False, True, True, True]


# ---------------------------------------------------------------- states that are overwritten


def test_gradients_are_off_where_neither_mode_is_on():
    assert not dispatch.gradients_off()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert dispatch.gradients_off()
            dispatch.check_consumed(True)
    with forward_ad.dual_level(), torch.no_grad():
        assert not dispatch.gradients_off()
        with refused(ValueError, "consume_state"):
            dispatch.check_consumed(True)
    dispatch.check_consumed(False)


def test_a_state_is_owned_if_it_is_given_up_and_can_be_written():
    state = torch.ones(3, 2)
    assert dispatch.owned(state, True) is state
    assert dispatch.owned(state[:, :1], True).data_ptr() == state.data_ptr()
    with torch.inference_mode():
        frozen = torch.ones(3, 2)
        assert dispatch.owned(frozen, True) is frozen
    for tensor, consumed in ((state, False), (state[:1].expand(3, 2), True), (frozen, True)):
        own = dispatch.owned(tensor, consumed)
        own += 1
        assert tensor.eq(1).all() and own.eq(2).all() and own.is_contiguous()
