"""The native PDR scan against the reference in float64, and when it may run."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from perspectron import native
from perspectron.ops import pdr
from perspectron.util.errors import BackendError
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")


def inputs(T, B=2, D=21, R=37, seed=0):
    """q, k, v, gates from exactly 0 to exactly 1, and a state; float32."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, n, generator=draw) for n in (R, R, D))
    gamma = torch.rand(B, T, D, generator=draw)
    gamma = torch.where(gamma < 0.1, 0.0, torch.where(gamma > 0.6, 1.0, gamma))
    return [q, k, v, gamma, torch.randn(B, D, R, generator=draw)]


def close(found, exact):
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1e-6 * b.norm().clamp_min(1e-30)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("T", "B", "D", "R"),
    [(1, 1, 1, 1), (1, 3, 21, 37), (63, 2, 21, 37), (64, 1, 16, 16), (65, 2, 5, 300), (512, 1, 18, 64)],
)
def test_equals_the_reference(isa, T, B, D, R, use_isa):
    use_isa(isa)
    tensors = inputs(T, B, D, R)
    exact = pdr.scan(*(x.double() for x in tensors), backend="naive")
    with torch.inference_mode():
        close(pdr.scan(*tensors, backend="native"), exact)


def test_threads_batch_and_cuts_do_not_change_a_bit():
    q, k, v, gamma, state = inputs(100, B=3, D=900, R=64)
    with torch.inference_mode():
        whole = pdr.scan(q, k, v, gamma, state.clone(), backend="native")
        torch.set_num_threads(3)
        try:
            again = pdr.scan(q, k, v, gamma, state.clone(), backend="native")
        finally:
            torch.set_num_threads(1)
        one = pdr.scan(*(x[1:2] for x in (q, k, v, gamma, state.clone())), backend="native")
        now, outputs = state.clone(), []
        for start, stop in ((0, 1), (1, 2), (2, 19), (19, 100)):
            o, now = pdr.scan(*(x[:, start:stop] for x in (q, k, v, gamma)), now, backend="native")
            outputs.append(o)
    for i, a in enumerate(whole):
        assert torch.equal(a, again[i])
        assert torch.equal(a[1:2], one[i])
        assert torch.equal(a, (torch.cat(outputs, 1), now)[i])


def test_padding_is_the_identity_and_a_gate_of_zero_forgets():
    q, k, v, gamma, state = inputs(3)
    gamma[:, 0], v[:, 0] = 1, 0
    with torch.inference_mode():
        _, after = pdr.scan(q[:, :1], k[:, :1], v[:, :1], gamma[:, :1], state.clone(), backend="native")
        assert torch.equal(after, state)
        gamma[:, 1] = 0
        _, after = pdr.scan(q[:, 1:2], k[:, 1:2], v[:, 1:2], gamma[:, 1:2], state.clone(), backend="native")
    assert torch.equal(after, v[:, 1, :, None] * k[:, 1, None, :])


@pytest.mark.parametrize("contiguous", [True, False])
def test_writes_into_a_state_to_be_consumed(contiguous):
    tensors = inputs(2)
    state = tensors[4] if contiguous else tensors[4].mT.contiguous().mT
    before = state.clone()
    with torch.inference_mode():
        pdr.scan(*tensors[:4], state, backend="native")
        assert torch.equal(state, before)
        _, after = pdr.scan(*tensors[:4], state, backend="native", consume_state=True)
    assert after.data_ptr() == state.data_ptr()
    exact = pdr.scan(*(x.double() for x in (*tensors[:4], before)), backend="naive")
    close([after], exact[1:])


MODES = {"training": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_auto_takes_it_outside_of_forward_mode(mode, monkeypatch):
    calls = []
    monkeypatch.setattr(native, "pdr_scan", lambda *x, kernel=native.pdr_scan: (calls.append(1), kernel(*x)))
    tensors = inputs(5)
    expected = pdr.scan(*tensors, backend="torch")
    pdr.scan(*(x.double() for x in tensors))
    with forward_ad.dual_level():
        pdr.scan(*tensors)
    assert not calls
    with mode():
        found = pdr.scan(*tensors)
    assert len(calls) == 1
    close(found, expected)


def test_wide_states_are_trained_by_the_tree(monkeypatch):
    calls = []
    monkeypatch.setattr(native, "pdr_scan", lambda *x, kernel=native.pdr_scan: (calls.append(1), kernel(*x)))
    for R, taken in ((pdr.WIDEST, 1), (pdr.WIDEST + 1, 1)):
        pdr.scan(*inputs(3, R=R))
        assert len(calls) == taken
    with torch.no_grad():
        pdr.scan(*inputs(3, R=pdr.WIDEST + 1))
    assert len(calls) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("T", "B", "D", "R"),
    [
        *((1, 1, 1, 1), (3, 3, 21, 37), (16, 2, 130, 16), (63, 2, 5, 300), (80, 1, 66, 96)),
        *((256, 2, 131, 16), (257, 2, 66, 63), (512, 1, 3, 65), (513, 2, 5, 130)),
    ],
)
def test_gradients_equal_those_of_the_reference(isa, T, B, D, R, use_isa):
    use_isa(isa)

    def gradients(backend, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in inputs(T, B, D, R)]
        outputs = pdr.scan(*tensors, backend=backend)
        weights = [x.cos() for x in pdr.scan(*(x.detach().double() for x in tensors), backend="naive")]
        return torch.autograd.grad(outputs, tensors, [w.to(dtype) for w in weights])

    for a, b in zip(gradients("native", torch.float32), gradients("naive", torch.float64), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm().clamp_min(1e-30)


def passes(T, **sizes):
    """Outputs and gradients."""
    tensors = [x.requires_grad_() for x in inputs(T, **sizes)]
    outputs = pdr.scan(*tensors, backend="native")
    return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), tensors)]


@pytest.mark.parametrize("R", [16, 48, 96])
def test_instruction_sets_and_threads_do_not_change_a_bit(R, use_isa):
    expected = passes(300, B=2, D=131, R=R)
    try:
        for isa in ISAS:
            use_isa(isa)
            for threads in (1, 3):
                native.set_threads(threads)
                assert all(map(torch.equal, passes(300, B=2, D=131, R=R), expected)), (isa, threads)
    finally:
        native.set_threads(None)


@pytest.mark.parametrize("T", [native.SEGMENT, 2 * native.SEGMENT, 2 * native.SEGMENT + 1])
def test_borders_are_the_states_between_segments(T):
    q, k, v, gamma, state = inputs(T)
    borders = torch.full((-(-T // native.SEGMENT), *state.shape), torch.nan)
    native.pdr_scan(q, k, v, gamma, state.clone(), torch.empty_like(v), borders)
    now = state.clone()
    for i, border in enumerate(borders):
        assert torch.equal(border, now)
        span = slice(i * native.SEGMENT, (i + 1) * native.SEGMENT)
        part = [x[:, span].contiguous() for x in (q, k, v, gamma)]
        native.pdr_scan(*part, now, torch.empty_like(part[2]))


@pytest.mark.parametrize("borders", [torch.empty(2, 2, 21, 37), torch.empty(1, 2, 37, 21).mT])
def test_borders_that_do_not_fit_are_refused(borders):
    with refused(ValueError, "torch.float32"):
        native.pdr_scan(*inputs(3), torch.empty(2, 3, 21), borders)


def test_a_second_derivative_of_strided_gates_is_refused():
    q, k, v, gamma, state = inputs(3)
    gamma = gamma.mT.contiguous().mT.requires_grad_()
    (first,) = torch.autograd.grad(pdr.scan(q, k, v, gamma, state)[0].sum(), gamma, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(first.square().sum() + gamma.sum(), gamma)


@pytest.mark.parametrize("T", [3, native.SEGMENT + 1])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_second_derivative_by_the_state_is_refused(T, backend):
    *tensors, gamma, state = (x.requires_grad_() for x in inputs(T, D=4, R=5))
    outputs = pdr.scan(*tensors, gamma, state, backend=backend)
    (first,) = torch.autograd.grad(outputs[0].sum(), gamma, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(first.square().sum() + state.sum(), state)


@pytest.mark.parametrize("T", [3, native.SEGMENT + 1])
def test_a_state_that_is_changed_before_its_gradients_is_noticed(T):
    *tensors, state = inputs(T)
    gamma = tensors[3].requires_grad_()
    loss = pdr.scan(*tensors, state, backend="native")[0].sum()
    state.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, gamma)


def test_a_second_derivative_is_refused():
    tensors = [x.requires_grad_() for x in inputs(3)]
    (first, *_) = torch.autograd.grad(pdr.scan(*tensors)[0].sum(), tensors, create_graph=True)
    with refused(RuntimeError, "pdr.scan", "create_graph"):
        first.sum().backward()


def test_compiled_code_runs_the_tree():
    tensors = inputs(3)
    compiled = torch.compile(pdr.scan, backend="eager")
    with torch.inference_mode():
        close(compiled(*tensors), pdr.scan(*tensors, backend="torch"))


def test_where_it_cannot_run_it_says_why():
    tensors = inputs(2)
    with forward_ad.dual_level(), refused(BackendError, "native"):
        pdr.scan(*tensors, backend="native")
    with torch.inference_mode():
        with refused(BackendError, "torch.float64"):
            pdr.scan(*(x.double() for x in tensors), backend="native")
        with refused(BackendError, "native"):
            torch.func.vmap(lambda *x: pdr.scan(*(y[None] for y in x), backend="native"))(*tensors)
        with FakeTensorMode() as mode, refused(BackendError, "native"):
            pdr.scan(*(mode.from_tensor(x) for x in tensors), backend="native")


def test_autograd_sees_that_the_state_is_no_more_what_it_was():
    tensors = inputs(3)
    state = tensors[4].requires_grad_()
    loss = (state * state).sum()
    with torch.inference_mode():
        pdr.scan(*tensors[:4], state.detach(), backend="native", consume_state=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("backend", ["native", "auto", "torch"])
def test_an_expanded_state_is_not_written(T, backend):
    *tensors, state = inputs(T)
    expanded = state[:1].expand(2, -1, -1)
    exact = pdr.scan(*(x.double() for x in (*tensors, expanded)), backend="naive")
    with torch.inference_mode():
        close(pdr.scan(*tensors, expanded, backend=backend, consume_state=True), exact)
    assert torch.equal(expanded[0], inputs(T)[4][0])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize("how", ["jit", "fx"])
def test_a_trace_computes(how, T):
    def copies(seed):
        return tuple(x.clone() for x in inputs(T, seed=seed))

    def scan(*tensors):
        return pdr.scan(*tensors)

    with torch.inference_mode():
        traced = torch.jit.trace(scan, copies(0)) if how == "jit" else make_fx(scan)(*copies(0))
        close(traced(*copies(1)), scan(*copies(1)))


def test_no_columns_are_refused():
    tensors = inputs(3, R=0)
    with torch.inference_mode(), refused(ValueError, "R", 0):
        pdr.scan(*tensors, scale=1.0, backend="native")
    with refused(ValueError, "R", 0):
        native.pdr_scan(*tensors, torch.empty(2, 3, 21))
