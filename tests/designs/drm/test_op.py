"""The directional relational manifold: the fast loop against the plain one, in every direction.

Shapes: B batch, T time, S state width, E token width, H hidden width, N directions, R metric rank, K basis.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perspectron.designs.drm import adjoint as drm_adjoint
from perspectron.designs.drm import loop as drm_loop
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Geometry, Law, State, Trace, Weights, of_lines, plan, width
from perspectron.util.errors import BackendError
from tests.refusals import refused

B, S, E, H, N, R = 3, 7, 4, 6, 5, 3
LENGTHS = [1, 63, 64, 65]
BASE = Law(
    directions=N, rank=R, dt=0.3, radius=2.0, squash=True, strength=0.4, damping=0.3, metric_floor=1e-4, gate_bias=-1.0,
    gate_temperature=1.5, gate_top_k=0, gate_renorm=False, direction_norm=True, geometry_interval=1,
)  # fmt: skip
VARIANTS = {
    "plain": {},
    "rank 0": {"rank": 0},
    "not naturalised": {"strength": 0.0},
    "not squashed": {"squash": False, "radius": 1.0},
    "not clipped": {"squash": False, "clip": False, "radius": 1.0},
    "far from the edge": {"radius": 30.0},
    "long directions": {"direction_norm": False},
    "top-k": {"gate_top_k": 2},
    "top-k renormalised": {"gate_top_k": 2, "gate_renorm": True},
    "direction basis": {"K": 4},
    "both bases": {"K": 4, "K_metric": 3},
    "interval 4": {"geometry_interval": 4},
    "no directions": {"directions": 0},
    "no directions, interval 4": {"directions": 0, "geometry_interval": 4, "K_metric": 3},
    "all at once": {"geometry_interval": 4, "K": 4, "K_metric": 3, "gate_top_k": 3, "gate_renorm": True},
}
MASKS = [(), ("reset_BT",), ("pad_BT",), ("reset_BT", "pad_BT")]

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_mask = pytest.mark.parametrize("masked", MASKS, ids=lambda names: "+".join(names) or "unmasked")


def law_of(variant: str) -> Law:
    return BASE._replace(**{key: value for key, value in VARIANTS[variant].items() if key in Law._fields})


def weights(variant: str = "plain", seed: int = 0, dtype=torch.float64) -> Weights:
    law, draw = law_of(variant), torch.Generator().manual_seed(seed)
    K, K_metric = (VARIANTS[variant].get(key) for key in ("K", "K_metric"))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype) * max(shape[-1], 1) ** -0.5

    heads, metric = law.directions * ((K or S) + 1), S + law.rank * (K_metric or S)
    flow = law.directions or S
    return Weights(
        3 * drawn(S), drawn(3 * H, S), drawn(3 * H), drawn(H, E), drawn(2, H, H), drawn(2 * H), drawn(heads, H),
        drawn(heads), drawn(metric, H), drawn(metric), drawn(flow, H), drawn(flow),
        None if K is None else drawn(K, S), None if K_metric is None else drawn(K_metric, S),
    )  # fmt: skip


def inputs(law: Law, T: int, seed: int = 1, dtype=torch.float64) -> tuple[Tensor, State]:
    """Tokens, and a state in the middle of documents: rows are 0 to 2 tokens past a refresh."""
    draw = torch.Generator().manual_seed(seed)
    e, z = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((B, T, E), (B, S)))
    lines = width(S, law) if law.geometry_interval > 1 else 0
    geometry = torch.rand(B, lines, generator=draw, dtype=dtype)
    return e, State(z, geometry, torch.arange(4, 4 + B))


def masks(names, T: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    drawn = {
        "reset_BT": torch.rand(B, T, generator=draw) < 0.2,
        "pad_BT": torch.rand(B, T, generator=draw) < 0.3,
    }
    drawn["reset_BT"][1, 0] = drawn["pad_BT"][2, -2:] = True
    return {name: drawn[name] for name in names}


def everything(variant: str, T: int, backend: str, chosen=None, empty=False, **options) -> tuple[dict, dict]:
    """(all results, gradients of a fixed weighting of them, or of the `chosen` one alone)."""
    law, w = law_of(variant), weights(variant)
    e, state = inputs(law, T)
    if empty:
        state = State(state.z_BS, torch.zeros_like(state.geometry_BF), torch.zeros_like(state.length_B))
    leaves = {"e": e, "z": state.z_BS, "geometry": state.geometry_BF}
    leaves |= {name: x for name, x in w._asdict().items() if x is not None}
    for leaf in leaves.values():
        leaf.requires_grad_()
    z_BTS, after, trace = drm.scan(e, state, w, law, backend=backend, **options)
    results = {"states": z_BTS, "z": after.z_BS, "geometry": after.geometry_BF} | trace._asdict()
    draw = torch.Generator().manual_seed(3)
    parts = {
        key: (x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for key, x in results.items()
    }
    loss = sum(part for key, part in parts.items() if chosen in (None, key))
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    assert after.length_B.dtype == torch.int64
    return results | {"length": after.length_B}, dict(zip(leaves, found, strict=True))


def same(variant: str, T: int, chosen=None, **options) -> dict[str, Tensor]:
    """Compares both backends; the gradients of the plain one."""
    (fast, fast_gradients), (slow, slow_gradients) = (
        everything(variant, T, backend, chosen, **options) for backend in ("torch", "naive")
    )
    for name, expected in slow.items():
        torch.testing.assert_close(
            fast[name], expected, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, expected in slow_gradients.items():
        error = (fast_gradients[name] - expected).norm()
        assert error <= 1e-11 * expected.norm() + 1e-14, f"gradient of {name} is off by {error:.1e}"
    return slow_gradients


@every_variant
@every_mask
def test_the_fast_loop_equals_the_plain_one(variant, masked):
    gradients = same(variant, 24, **masks(masked, 24))
    reached = {name for name, gradient in gradients.items() if gradient.norm() > 0}
    # z0 is met only after a reset, the metric of rank 0 has no U, and without an interval nothing is kept.
    absent = {name for name, gradient in gradients.items() if gradient.numel() == 0}
    assert set(gradients) - reached - absent <= {"z0_S", "geometry"}
    assert ("z0_S" in reached) == ("reset_BT" in masked)
    assert ("geometry" in reached) == (law_of(variant).geometry_interval > 1)


def test_a_row_that_waits_in_padding_with_an_empty_geometry():
    pad = torch.zeros(B, 6, dtype=torch.bool)
    pad[1, :3] = True
    same("all at once", 6, empty=True, pad_BT=pad)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("variant", ["plain", "all at once"])
def test_the_fast_path_is_the_loop_at_any_length(variant, T):
    same(variant, T)


@pytest.mark.parametrize("chosen", ["states", "z", "geometry", *Trace._fields])
@pytest.mark.parametrize("variant", ["plain", "all at once"])
def test_gradients_of_each_result_alone(variant, chosen):
    found = same(variant, 10, chosen, **masks(("reset_BT", "pad_BT"), 10))
    wanted = chosen != "geometry" or law_of(variant).geometry_interval > 1
    assert (found["read_w"].norm() > 0) == wanted


@pytest.mark.few(4, each="variant")
@every_mask
@pytest.mark.parametrize("variant", ["plain", "interval 4", "all at once"])
@pytest.mark.parametrize("bptt", [1, 4, 6])
def test_gradients_that_end(variant, masked, bptt):
    same(variant, 20, bptt=bptt, **masks(masked, 20))


def test_truncation_cuts_the_past_and_drops_the_geometry():
    law, w = law_of("interval 4"), weights()
    e, state = inputs(law, 12)
    e.requires_grad_()
    state = state._replace(length_B=torch.zeros(B, dtype=torch.int64))
    z, _, cut = drm.scan(e, state, w, law, bptt=6)
    (gradient,) = torch.autograd.grad(z[:, -1].sum(), e)
    assert gradient[:, :6].abs().max() == 0 and gradient[:, 6:].abs().amax((0, 2)).min() > 0
    _, _, whole = drm.scan(e, state, w, law)
    moved = [(trace.d_BTS.diff(dim=1) != 0).any(2).all(0).nonzero()[:, 0].tolist() for trace in (whole, cut)]
    assert moved == [[3, 7], [3, 5, 7]]


@pytest.mark.parametrize("split", [1, 4, 5, 7, 19])
@pytest.mark.parametrize("variant", ["plain", "no directions, interval 4", "all at once"])
def test_split_anywhere(variant, split):
    law, w = law_of(variant), weights(variant)
    e, state = inputs(law, 20)
    mask = masks(("reset_BT", "pad_BT"), 20)
    whole, end, trace = drm.scan(e, state, w, law, **mask)
    first, middle, _ = drm.scan(e[:, :split], state, w, law, **{k: m[:, :split] for k, m in mask.items()})
    second, last, rest = drm.scan(e[:, split:], middle, w, law, **{k: m[:, split:] for k, m in mask.items()})
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tuple(last), tuple(end), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rest.v_BTS, trace.v_BTS[:, split:], rtol=1e-12, atol=1e-12)


@every_variant
@every_mask
def test_inference_gives_the_same_states(variant, masked):
    law, w = law_of(variant), weights(variant)
    e, state = inputs(law, 20)
    expected, end, _ = drm.scan(e, state, w, law, **masks(masked, 20))
    for backend in ("torch", "naive"):
        with torch.inference_mode():
            z, last, trace = drm.scan(e, state, w, law, backend=backend, **masks(masked, 20))
        assert trace is None
        torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tuple(last), tuple(end), rtol=1e-12, atol=1e-12)


def test_inference_keeps_no_past():
    law, w = law_of("interval 4"), weights()
    _, state = inputs(law, 20)
    when = plan(state.length_B, 20, law.geometry_interval, 0, None, None)
    drive = torch.randn(20, B, 3 * H, dtype=torch.float64)
    columns, solved, made = drm_loop._forward(drive, *state[:2], w, law, when, keep=False)
    assert len(solved) == len(made) == 1
    assert all(x is column.z_BS for column in columns for x in column)


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("rank", [0, 1, 3, 9])
def test_woodbury_equals_the_dense_solve(rank):
    draw = torch.Generator().manual_seed(0)
    law = BASE._replace(rank=rank)
    d, v = torch.rand(B, S, generator=draw).double() + 1e-4, torch.randn(B, S, generator=draw).double()
    geometry = Geometry(v[:, None], d[:, :1], d, torch.randn(B, rank, S, generator=draw).double())
    solved = drm_loop._solved(geometry, law, torch.eye(rank).double())
    dense = torch.linalg.solve(drm.metric(geometry, law.damping), v)
    torch.testing.assert_close(
        drm_adjoint.naturalised(v, solved.inverse_BS, solved.Q_BRS), dense, rtol=1e-12, atol=1e-12
    )


def out_of_span(strength: float) -> Tensor:
    """How much of each velocity the directions in force cannot give."""
    law, w = law_of("interval 4")._replace(strength=strength, directions=N, geometry_interval=4), weights()
    e, state = inputs(law, 1)
    state = state._replace(length_B=torch.tensor([1, 2, 3]))  # the state's own geometry is in force
    V_BNS = of_lines(state.geometry_BF, S, law).V_BNS
    _, _, trace = drm.scan(e, state, w, law)
    v_BS1 = trace.v_BTS[:, 0, :, None]
    residual = v_BS1 - V_BNS.mT @ torch.linalg.lstsq(V_BNS.mT, v_BS1).solution
    return residual.norm(dim=1) / v_BS1.norm(dim=1)


def test_only_the_naturalised_velocity_leaves_the_span_of_the_directions():
    assert out_of_span(0.0).max() < 1e-12
    assert out_of_span(0.5).min() > 1e-3


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_without_a_clip_nothing_holds_the_state(backend):
    law, w = BASE._replace(dt=100.0, squash=False, clip=False), weights()
    e, state = inputs(law, 30)
    z_BTS, _, trace = drm.scan(e, state, w, law, backend=backend)
    assert torch.linalg.vector_norm(z_BTS, dim=-1).max() > 100 * law.radius
    torch.testing.assert_close(z_BTS, trace.before_BTS + law.dt * trace.v_BTS, rtol=1e-12, atol=0)


@pytest.mark.parametrize("squash", [True, False])
def test_the_state_cannot_leave_the_ball(squash):
    law, w = BASE._replace(dt=100.0, squash=squash), weights()
    e, state = inputs(law, 50)
    norms = drm.scan(e, state, w, law)[0].norm(dim=-1)
    assert norms.max() <= law.radius * (1 + 1e-12) and norms.max() > 0.7 * law.radius
    assert not squash or norms.max() < law.radius


def test_top_k_closes_the_other_gates_and_renorm_keeps_their_sum():
    e, state = inputs(BASE, 1)
    gates = {}
    for name, change in {
        "all": {},
        "few": {"gate_top_k": 2},
        "renormed": {"gate_top_k": 2, "gate_renorm": True},
    }.items():
        gates[name] = drm.scan(e, state, weights(), BASE._replace(**change))[2].a_BTN[:, 0]
    assert (gates["all"] > 0).all() and ((gates["few"] > 0).sum(1) == 2).all()
    assert torch.equal(gates["few"].amax(1), gates["all"].amax(1))
    torch.testing.assert_close(gates["few"].sum(1), gates["all"].topk(2).values.sum(1))
    torch.testing.assert_close(gates["renormed"].sum(1), gates["all"].sum(1))
    assert torch.equal(gates["renormed"] > 0, gates["few"] > 0)


def test_coupling_is_the_metric_between_directions():
    law = law_of("interval 4")
    now = of_lines(inputs(law, 1)[1].geometry_BF, S, law)
    C = drm.coupling(now)
    for i, j in ((0, 0), (1, 3), (4, 2)):
        V, W = now.V_BNS[:, i], now.V_BNS[:, j]
        stretch = ((now.U_BRS @ V[..., None]) * (now.U_BRS @ W[..., None])).sum((1, 2))
        torch.testing.assert_close(C[:, i, j], (now.d_BS * V * W).sum(1) + stretch)
    assert (torch.linalg.eigvalsh(C) > -1e-12).all()


# ---------------------------------------------------------------- derivatives, precision, cost


def test_gradients_are_those_of_finite_differences():
    law, w = law_of("all at once")._replace(gate_top_k=0, gate_renorm=False), weights("all at once")
    e, state = inputs(law, 3)
    tensors = [x.requires_grad_() for x in (e, state.z_BS, state.geometry_BF, *w)]

    def results(e, z, geometry, *w):
        states, after, trace = drm.scan(e, State(z, geometry, state.length_B), Weights(*w), law)
        return states, after.geometry_BF, *trace

    assert torch.autograd.gradcheck(results, tensors, fast_mode=True)


def test_other_derivatives_are_errors_not_silent_zeros():
    e, state = inputs(BASE, 4)
    e.requires_grad_()

    def loss(e):
        return drm.scan(e, state, weights(), BASE)[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(e), e, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + e.sum(), e)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jvp(loss, (e,), (e,))
    with torch.autograd.forward_ad.dual_level(), refused(RuntimeError, "drm.scan"):
        loss(torch.autograd.forward_ad.make_dual(e.detach(), torch.ones_like(e)))
    _, tangent = torch.func.jvp(
        lambda e: drm.scan(e, state, weights(), BASE, backend="naive")[0].square().sum(),
        (e.detach(),), (e.detach(),),
    )  # fmt: skip
    torch.testing.assert_close(tangent, (gradient * e).sum().detach())


def test_low_precision_is_computed_in_float32_and_autocast_does_not_reach_inside():
    e, state = inputs(BASE, 30, dtype=torch.bfloat16)
    w = weights(dtype=torch.bfloat16)
    wide = [x.double() for x in (e, state.z_BS, state.geometry_BF)]
    wide_w = Weights(*(None if x is None else x.double() for x in w))
    exact, _, _ = drm.scan(wide[0], State(*wide[1:], state.length_B), wide_w, BASE)
    for device_dtype in (None, torch.bfloat16):
        with torch.autocast(
            torch.get_default_device().type, torch.bfloat16, enabled=device_dtype is not None
        ):
            z, after, trace = drm.scan(e, state, w, BASE)
        assert all(x.dtype == torch.float32 for x in (z, after.z_BS, *trace))
        assert (z - exact).norm() < 1e-5 * exact.norm()


def test_autocast_does_not_reach_the_backward_pass():
    e, state = inputs(BASE, 20, dtype=torch.float32)
    w = Weights(*(None if x is None else x.requires_grad_() for x in weights(dtype=torch.float32)))
    leaves = [w.read_w, w.direction_w, w.flow_w, w.trunk_w]
    exact = torch.autograd.grad(drm.scan(e, state, w, BASE)[0].sum(), leaves)
    z, _, _ = drm.scan(e, state, w, BASE)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        for a, b in zip(torch.autograd.grad(z.sum(), leaves), exact, strict=True):
            assert torch.equal(a, b)


class Count(TorchDispatchMode):
    """Operations that compute; views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += not (func.is_view or "empty" in func.name() or "detach" in func.name())
        return func(*args, **(kwargs or {}))


def operations(T: int) -> tuple[int, int]:
    """(forward, backward)."""
    e, state = inputs(BASE, T)
    w = Weights(*(None if x is None else x.requires_grad_() for x in weights()))
    with Count() as forward:
        z, _, trace = drm.scan(e, state, w, BASE)
    loss = z.sum() + sum(x.sum() for x in trace)
    with Count() as backward:
        loss.backward()
    return forward.total, backward.total


def test_a_token_costs_few_operations():
    """What makes the loop fast: a loop of modules runs 118 forward and 246 backward."""
    few, many = operations(10), operations(30)
    forward, backward = ((b - a) / 20 for a, b in zip(few, many, strict=True))
    assert forward <= 35 and backward <= 31


def test_a_step_costs_the_same_anywhere():
    law, w, counts = BASE, weights(), []
    e, state = inputs(law, 400)
    with torch.inference_mode():
        for t in range(400):
            with Count() as count:
                _, state, _ = drm.scan(e[:, t : t + 1], state, w, law)
            counts.append((count.total, sum(x.nbytes for x in state)))
    assert len(set(counts)) == 1 and counts[0][0] <= 50


def test_on_the_meta_device():
    law = law_of("all at once")
    e, state = inputs(law, 3)
    meta = [x.to("meta") for x in (e, *state)]
    w = Weights(*(x.to("meta") for x in weights("all at once")))
    mask = torch.zeros(B, 3, dtype=torch.bool, device="meta")
    with torch.inference_mode():
        z, after, _ = drm.scan(meta[0], State(*meta[1:]), w, law, reset_BT=mask, pad_BT=mask)
    assert z.shape == (B, 3, S) and [x.shape for x in after] == [x.shape for x in state]


# ---------------------------------------------------------------- beside the loop


def test_logit_change_is_between_neighbours_of_a_document():
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    square = logits.diff(dim=1).square().mean(-1)
    torch.testing.assert_close(drm.logit_change(logits), square.mean())
    none = torch.zeros(2, 5, dtype=torch.bool)
    reset, pad = none.clone(), none.clone()
    reset[0, 2], pad[1, 3] = True, True
    kept = torch.cat([square[0, [0, 2, 3]], square[1, [0, 1]]])
    torch.testing.assert_close(drm.logit_change(logits, reset, pad), kept.mean())
    assert drm.logit_change(logits[:, :1]) == 0 and drm.logit_change(logits, none, ~none) == 0


def test_angles_on_the_torus_and_back():
    angle = torch.linspace(-math.pi + 0.01, math.pi, 50, dtype=torch.float64).view(5, 10)
    point = drm.on_torus(angle)
    assert point.shape == (5, 10, 2)
    torch.testing.assert_close(point.norm(dim=-1), torch.ones(5, 10).double())
    torch.testing.assert_close(drm.angles(3 * point), angle)
    torch.testing.assert_close(drm.angles(drm.on_torus(angle + 6 * math.pi)), angle)


def test_bad_calls_say_what_is_wrong():
    w = weights()
    e, state = inputs(BASE, 2)
    with refused(BackendError, "backend", "cuda"):
        drm.scan(e, state, w, BASE, backend="cuda")
    with refused(ValueError, "e"):
        drm.scan(e[:, :0], state, w, BASE)
    with refused(ValueError, "token_w"):
        drm.scan(e[..., :2], state, w, BASE)
    with refused(ValueError, "state"):
        drm.scan(e[:2], state, w, BASE)
    with refused(ValueError, "geometry"):
        drm.scan(e, state, w, law_of("interval 4"))
