"""The delta rules with gates against the plain loops, and against vectors of an implementation nobody here wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from perspectron.ops import delta, gla
from perspectron.util.errors import BackendError
from tests.refusals import refused

B, H, K, V = 2, 3, 5, 4
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 150]
VECTORS = Path(__file__).parents[1] / "vectors" / "delta"
SCANS = {"decay first": delta.scan, "read first": delta.scan_rwkv7}

every_kind = pytest.mark.parametrize(
    ("order", "A"), [(o, A) for o in SCANS for A in (K, 1)], ids=[f"{o}-{a}" for o in SCANS for a in ("wide", "scalar")]
)  # fmt: skip


def inputs(
    T: int, order: str = "decay first", A: int = K, dtype=torch.float64, seed: int = 0
) -> list[Tensor]:
    """As a projection gives them (heads behind time), keys of length 1, corrections of up to twice a key, gates from
    exactly 0 to exactly 1, and a non-zero state."""
    draw = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(B, T, H, width, generator=draw, dtype=dtype).transpose(1, 2)

    q, k, v, key = normal(K), F.normalize(normal(K), dim=-1), normal(V), F.normalize(normal(K), dim=-1)
    gate = torch.rand(B, H, T, A, generator=draw, dtype=dtype)
    gate = torch.where(gate < 0.1, 0.0, torch.where(gate > 0.6, 1.0, gate))
    beta = 2 * torch.rand(B, H, T, 1, generator=draw, dtype=dtype)
    beta = torch.where(beta < 0.2, 0.0, torch.where(beta > 1.7, 2.0, beta))
    state = torch.randn(B, H, K, V, generator=draw, dtype=dtype)
    if order == "decay first":
        return [q, k, beta * k, v, gate, state]
    return [q, k, v, -key, beta / 2 * key, gate, state]


def gradients(
    order: str, tensors: list[Tensor], backend: str = "torch", of: tuple[int, ...] = (0, 1)
) -> tuple[Tensor, ...]:
    """Of a fixed weighting of the outputs, of the final state, or of both; zero where an input has no part."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    both = SCANS[order](*tensors, backend=backend)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in both]
    loss = sum((both[i] * weights[i]).sum() for i in of)
    return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- against others


@pytest.mark.parametrize("kind", ["gdn", "kda", "gdn2", "rwkv7"])
@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_vectors_of_an_implementation_nobody_here_wrote(kind, backend):
    with np.load(VECTORS / f"delta-{kind}.npz", allow_pickle=False) as file:
        given = {name: torch.from_numpy(file[name]) for name in file.files}
    names = [n for n in given if f"d{n}" in given and n not in ("o", "final")]
    t = {name: given[name].clone().requires_grad_() for name in names}
    assert {"q", "k", "v", "alpha", "state"} < set(t)
    alpha = t["alpha"] if t["alpha"].ndim == 4 else t["alpha"][..., None]
    how = {"scale": t["q"].shape[-1] ** -0.5, "backend": backend}
    if kind == "rwkv7":
        o, final = delta.scan_rwkv7(t["q"], t["k"], t["v"], t["a"], t["b"], alpha, t["state"], **how)
    else:
        erase, write = (t["erase"], t["write"]) if kind == "gdn2" else (t["beta"][..., None],) * 2
        o, final = delta.scan(t["q"], t["k"], erase * t["k"], write * t["v"], alpha, t["state"], **how)
    loss = (o * given["do"]).sum() + (final * given["dfinal"]).sum()
    found = dict(zip(t, torch.autograd.grad(loss, list(t.values())), strict=True))
    for name, a, tolerance in (
        ("o", o, 1e-12),
        ("final", final, 1e-12),
        *((f"d{n}", g, 1e-10) for n, g in found.items()),
    ):
        assert (a - given[name]).norm() <= tolerance * given[name].norm(), name


def test_the_loops_are_the_recurrences():
    q, k, e, v, gate, state = inputs(3)
    o, end = delta.scan(q, k, e, v, gate, state, scale=2.0, backend="naive")
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(3):
                S = torch.diag(gate[b, h, t]) @ S
                S = S + torch.outer(k[b, h, t], v[b, h, t] - S.T @ e[b, h, t])
                close(o[b, h, t], 2.0 * S.T @ q[b, h, t], 1e-12)
            close(end[b, h], S, 1e-12)
    q, k, v, a, w, gate, state = inputs(3, "read first")
    o, end = delta.scan_rwkv7(q, k, v, a, w, gate, state, scale=2.0, backend="naive")
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(3):
                read = S.T @ a[b, h, t]
                S = (
                    torch.diag(gate[b, h, t]) @ S
                    + torch.outer(w[b, h, t], read)
                    + torch.outer(k[b, h, t], v[b, h, t])
                )
                close(o[b, h, t], 2.0 * S.T @ q[b, h, t], 1e-12)
            close(end[b, h], S, 1e-12)


@pytest.mark.parametrize("A", [K, 1])
def test_without_corrections_it_is_gated_linear_attention(A):
    q, k, e, v, gate, state = inputs(150, A=A)
    expected = gla.scan(q, k, v, gate, state, scale=0.7)
    none = torch.zeros_like(e)
    for found in (
        delta.scan(q, k, none, v, gate, state, scale=0.7),
        delta.scan_rwkv7(q, k, v, none, e, gate, state, scale=0.7),
        delta.scan_rwkv7(q, k, v, e, none, gate, state, scale=0.7),
    ):
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-12)


def test_the_two_orders_meet_where_the_gate_is_1():
    q, k, e, v, gate, state = inputs(150)
    gate = torch.ones_like(gate)
    found = delta.scan_rwkv7(q, k, v, -e, k, gate, state)
    for a, b in zip(found, delta.scan(q, k, e, v, gate, state), strict=True):
        close(a, b, 1e-12)


def test_orthonormal_keys_hold_the_last_value_of_each():
    draw = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(torch.randn(8, 8, generator=draw, dtype=torch.float64)).Q
    which = torch.randint(8, (200,), generator=draw)
    v = torch.randn(1, 1, 200, V, generator=draw, dtype=torch.float64)
    k = keys[which][None, None]
    _, state = delta.scan(k, k, k, v, torch.ones(1, 1, 200, 1, dtype=torch.float64))
    last = torch.stack([v[0, 0, (which == i).nonzero().max()] for i in range(8)])
    close(keys @ state[0, 0], last, 1e-13)


# ---------------------------------------------------------------- chunks against steps


@every_kind
@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_equal_the_loop(T, order, A):
    tensors = inputs(T, order, A)
    for scale in (1.0, 0.3):
        fast, slow = (SCANS[order](*tensors, scale=scale, backend=b) for b in ("torch", "naive"))
        for a, b in zip(fast, slow, strict=True):
            close(a, b, 1e-12)


@every_kind
@pytest.mark.parametrize("split", [1, 31, 32, 33, 64, 149])
def test_split_anywhere(split, order, A):
    *tensors, state = inputs(150, order, A)
    whole, end = SCANS[order](*tensors, state)
    first, middle = SCANS[order](*(x[:, :, :split] for x in tensors), state)
    second, last = SCANS[order](*(x[:, :, split:] for x in tensors), middle)
    close(torch.cat([first, second], 2), whole, 1e-12)
    close(last, end, 1e-12)


@every_kind
def test_steps_that_consume_the_state_equal_the_whole(order, A):
    *tensors, state = inputs(150, order, A)
    whole, end = SCANS[order](*tensors, state)
    outputs, start = [], state.clone()
    with torch.inference_mode():
        for t in range(150):
            o, after = SCANS[order](*(x[:, :, t : t + 1] for x in tensors), state, consume_state=t > 0)
            assert t == 0 or after.data_ptr() == state.data_ptr()
            assert t > 0 or torch.equal(state, start)
            outputs.append(o)
            state = after
    close(torch.cat(outputs, 2), whole, 1e-12)
    close(state, end, 1e-12)


@every_kind
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["outputs", "state", "both"])
def test_gradients_equal_those_of_the_loop(T, order, A, of):
    tensors = inputs(T, order, A)
    fast, slow = (gradients(order, tensors, backend, of) for backend in ("torch", "naive"))
    assert sum(x.abs().max() > 0 for x in slow) >= 4
    for i, (a, b) in enumerate(zip(fast, slow, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, n=i: f"input {n}: {m}")


@every_kind
@pytest.mark.parametrize("T", [1, 5])
def test_gradcheck_in_both_modes(T, order, A):
    *tensors, gate, state = (x[:1, :2] for x in inputs(T, order, A))
    inside = gate * 0.8 + 0.1  # so that finite differences stay valid
    tensors = [x.clone().requires_grad_() for x in (*tensors, inside, state)]
    assert torch.autograd.gradcheck(SCANS[order], tensors, check_forward_ad=True)


@every_kind
@pytest.mark.parametrize("T", [1, 33, 70])
def test_tangents_equal_those_of_the_loop(T, order, A):
    tensors, tangents = inputs(T, order, A), inputs(T, order, A, seed=1)
    for chosen in range(len(tensors)):
        only = tuple(t if i == chosen else torch.zeros_like(t) for i, t in enumerate(tangents))
        fast, slow = (
            torch.func.jvp(lambda *x, b=b: SCANS[order](*x, backend=b, checked=False), tuple(tensors), only)[
                1
            ]
            for b in ("torch", "naive")
        )
        assert slow[0].abs().max() > 0
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_kind
@pytest.mark.parametrize("T", [1, 5])
def test_forward_mode_under_no_grad_is_not_lost(T, order, A):
    tensors = inputs(T, order, A)
    with torch.no_grad(), forward_ad.dual_level():
        o, _ = SCANS[order](*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))
        assert forward_ad.unpack_dual(o).tangent.abs().max() > 0


@every_kind
def test_a_second_derivative_is_an_error_not_a_silent_zero(order, A):
    tensors = [x.requires_grad_() for x in inputs(5, order, A)]

    def loss(q):
        return SCANS[order](q, *tensors[1:])[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(tensors[0]), tensors[0], create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + tensors[0].sum(), tensors[0])
    with refused(RuntimeError, "create_graph"):
        torch.func.jvp(torch.func.grad(loss), (tensors[0],), (tensors[0],))
    close(torch.func.grad(loss)(tensors[0].detach()), gradient.detach(), 1e-12)


# ---------------------------------------------------------------- precision


@every_kind
@pytest.mark.parametrize("T", [65, 300])
def test_float32_follows_float64(T, order, A):
    single = inputs(T, order, A, dtype=torch.float32)
    double = [x.double() for x in single]
    exact = SCANS[order](*double, backend="naive")
    for a, b in zip(SCANS[order](*single), exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-6 * b.norm()
    for a, b in zip(gradients(order, single), gradients(order, double, "naive"), strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@every_kind
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-30])
def test_extreme_gates_in_float32(fill, order, A):
    *tensors, gate, state = inputs(300, order, A, dtype=torch.float32)
    single = [*tensors, torch.full_like(gate, fill), state]
    double = [x.double() for x in single]
    for a, b in zip(SCANS[order](*single), SCANS[order](*double, backend="naive"), strict=True):
        assert (a - b).norm() < 5e-6 * b.norm()
    for a, b in zip(gradients(order, single), gradients(order, double, "naive"), strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm()  # with gates of 0 the first state has none


def test_the_same_key_at_every_token_is_solved_exactly():
    """The worst that a chunk can hold: every token corrects the one before, with β = 2."""
    q, k, _, v, gate, state = inputs(150)
    k = k[:, :, :1].expand_as(k)
    tensors = [q, k, 2 * k, v, torch.ones_like(gate), state]
    for a, b in zip(delta.scan(*tensors), delta.scan(*tensors, backend="naive"), strict=True):
        close(a, b, 1e-12)


@every_kind
def test_low_precision_inputs_give_a_float32_state_even_under_autocast(order, A):
    *tensors, _ = inputs(70, order, A, dtype=torch.bfloat16)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        o, state = SCANS[order](*tensors)
    assert o.dtype == state.dtype == torch.float32
    exact = SCANS[order](*(x.double() for x in tensors), backend="naive")
    for a, b in zip((o, state), exact, strict=True):
        assert (a - b).norm() < 2e-6 * b.norm()


@pytest.mark.parametrize("order", SCANS)
def test_autocast_does_not_reach_the_backward_pass_or_the_tangents(order):
    tensors = [x.requires_grad_() for x in inputs(70, order, dtype=torch.float32)]
    exact = torch.autograd.grad(SCANS[order](*tensors)[0].sum(), tensors)
    o, _ = SCANS[order](*tensors)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for a, b in zip(torch.autograd.grad(o.sum(), tensors), exact, strict=True):
            assert torch.equal(a, b)
        q, *others = tensors
        _, tangent = torch.func.jvp(lambda q: SCANS[order](q, *others, checked=False)[0], (q,), (q,))
    torch.testing.assert_close(tangent, o)  # the output is linear in q


# ---------------------------------------------------------------- calls


@every_kind
@pytest.mark.parametrize("T", [1, 70])
def test_the_state_handed_in_stays(T, order, A):
    *tensors, state = inputs(T, order, A)
    kept = state.clone()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            found = SCANS[order](*tensors, state)
            for a, b in zip(found, SCANS[order](*tensors, kept, backend="naive"), strict=True):
                close(a, b, 1e-12)
        assert torch.equal(state, kept)
    with refused(ValueError, "consume_state"):
        SCANS[order](*tensors, state, consume_state=True)


@every_kind
@pytest.mark.parametrize("T", [1, 5])
def test_an_expanded_state_is_not_written(T, order, A):
    *tensors, state = inputs(T, order, A)
    kept, expanded = state[:1].clone(), state[:1].expand_as(state)
    expected = SCANS[order](*tensors, expanded, backend="naive")
    with torch.inference_mode():
        found = SCANS[order](*tensors, expanded, consume_state=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-12)
    assert torch.equal(expanded[:1], kept)


@pytest.mark.parametrize("order", SCANS)
def test_no_tokens_leave_the_state_and_without_one_it_starts_from_zero(order):
    *tensors, state = inputs(0, order)
    o, after = SCANS[order](*tensors, state)
    assert o.shape == (B, H, 0, V) and torch.equal(after, state) and after.data_ptr() != state.data_ptr()
    *tensors, state = inputs(70, order)
    for a, b in zip(SCANS[order](*tensors), SCANS[order](*tensors, torch.zeros_like(state)), strict=True):
        assert torch.equal(a, b)


@every_kind
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("T", [0, 1, 5, 70])
def test_no_rows_give_no_rows(T, order, A, mode):
    *tensors, state = (x[:0] for x in inputs(T, order, A))
    with mode():
        o, after = SCANS[order](*tensors, state)
    assert o.shape == (0, H, T, V) and after.shape == state.shape


@every_kind
@pytest.mark.parametrize("T", [1, 70])
def test_shapes_are_known_without_numbers(T, order, A):
    tensors = [x.to("meta") for x in inputs(T, order, A)]
    with torch.inference_mode():
        o, state = SCANS[order](*tensors)
    assert o.is_meta and o.shape == (B, H, T, V) and state.shape == (B, H, K, V)


@pytest.mark.parametrize("order", SCANS)
def test_bad_calls_say_what_is_wrong(order):
    *tensors, gate, state = inputs(4, order)
    with refused(BackendError, "backend", "cuda"):
        SCANS[order](*tensors, gate, state, backend="cuda")
    for i, x in enumerate((*tensors, gate)):
        for wrong in (x[:, :, :2], x[:, :1], x[..., :2]):
            given = [*tensors, gate]
            given[i] = wrong
            with refused(ValueError):
                SCANS[order](*given, state)
    with refused(ValueError, "state"):
        SCANS[order](*tensors, gate, state[:1])
    with refused(ValueError, "gates", 1.5):
        SCANS[order](*tensors, gate.index_fill(2, torch.tensor(1), 1.5), state)
