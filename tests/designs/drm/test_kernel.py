"""The kernel of the directional relational manifold against the plain loop in float64, in every instruction set."""

import pytest
import torch

from perspectron import native
from perspectron.designs.drm import loop as drm_loop
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Law, State, Weights
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")
E = 5
BASE = Law(
    directions=5, rank=3, dt=0.3, radius=2.0, squash=True, strength=0.4, damping=0.3, metric_floor=1e-4, gate_bias=-1.0,
    gate_temperature=1.5, gate_top_k=0, gate_renorm=False, direction_norm=True, geometry_interval=1,
)  # fmt: skip
VARIANTS = {
    "plain": {},
    "rank 0": {"rank": 0},
    "not squashed": {"squash": False, "radius": 1.0},
    "not clipped": {"squash": False, "clip": False},
    "long directions": {"direction_norm": False},
    "no directions": {"directions": 0},
    "one direction, more columns than coordinates": {"directions": 1, "rank": 9},
    "naturalised in full": {"strength": 1.0, "damping": 1e3},
}
ELSEWHERE = {
    "top-k": {"gate_top_k": 2},
    "interval 4": {"geometry_interval": 4},
    "not naturalised": {"strength": 0.0},
}
SIZES = [(1, 1, 7, 6), (3, 20, 7, 6), (8, 9, 16, 32), (15, 6, 40, 33)]
"""B, T, S, H."""


def case(law, B, T, S, H, masked=False, dtype=torch.float32):
    """(inputs of `drm.scan`, its leaves)."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64) * max(shape[-1], 1) ** -0.5

    M, Y, C = law.directions * (S + 1), S * (1 + law.rank), law.directions or S
    shapes = [
        (S,),
        (3 * H, S),
        (3 * H,),
        (H, E),
        (2, H, H),
        (2 * H,),
        (M, H),
        (M,),
        (Y, H),
        (Y,),
        (C, H),
        (C,),
    ]
    w = Weights(*((3 if i == 0 else 1) * drawn(*shape) for i, shape in enumerate(shapes)))
    tensors = [torch.randn(B, T, E, generator=draw), torch.randn(B, S, generator=draw), *w[:12]]
    leaves = [x.float().to(dtype).requires_grad_() for x in tensors]
    lines = law.directions * (S + 1) + S * (1 + law.rank) if law.geometry_interval > 1 else 0
    state = State(leaves[1], torch.zeros(B, lines, dtype=dtype), torch.zeros(B, dtype=torch.int64))
    masks = {}
    if masked:
        masks = {name: torch.rand(B, T, generator=draw) < 0.25 for name in ("reset_BT", "pad_BT")}
    return (leaves[0], state, Weights(*leaves[2:]), law), masks, leaves


def results(law, sizes, masked=False, dtype=torch.float32, backend="auto"):
    """All outputs, and the gradients of a fixed weighting of them."""
    inputs, masks, leaves = case(law, *sizes, masked, dtype)
    z, after, trace = drm.scan(*inputs, backend=backend, **masks)
    outputs, draw = [z, after.z_BS, *trace], torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=draw).to(dtype)).sum() for x in outputs)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in outputs], list(found)


def taken(monkeypatch):
    """A list that gets an entry for each call of the kernel."""
    calls, own = [], drm_loop.kernel.forward
    monkeypatch.setattr(
        drm_loop.kernel, "forward", lambda *args, **options: calls.append(1) or own(*args, **options)
    )
    return calls


@pytest.mark.few(32)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents and padding"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernel_equals_the_plain_loop(isa, variant, sizes, masked, use_isa, monkeypatch):
    use_isa(isa)
    law, calls = BASE._replace(**VARIANTS[variant]), taken(monkeypatch)
    found = results(law, sizes, masked)
    assert calls == [1]
    exact = results(law, sizes, masked, torch.float64, "naive")
    for ours, theirs in zip(*(outputs + gradients for outputs, gradients in (found, exact)), strict=True):
        assert (ours - theirs).norm() <= 4e-6 * theirs.norm() + 1e-12


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents and padding"])
def test_bits_do_not_depend_on_instruction_set_or_threads(use_isa, masked):
    def bits(isa, threads):
        use_isa(isa)
        native.set_threads(threads)
        try:
            return [x for part in results(BASE, (15, 6, 40, 33), masked) for x in part]
        finally:
            native.set_threads(None)

    first = bits("avx512", 1)
    for isa, threads in (("avx512", 2), ("avx2", 1), ("avx2", 2), ("scalar", 1)):
        assert all(map(torch.equal, first, bits(isa, threads))), (isa, threads)


@pytest.mark.parametrize("variant", ELSEWHERE)
def test_what_the_kernel_does_not_have_runs_on_the_loop(variant, monkeypatch):
    calls = taken(monkeypatch)
    results(BASE._replace(**ELSEWHERE[variant]), (3, 8, 7, 6))
    assert calls == []


def test_a_token_that_is_not_finite_makes_its_text_nan_from_there_on():
    inputs, _, _ = case(BASE, 3, 8, 7, 6)
    e = inputs[0].detach().clone()
    e[1, 3] = float("nan")
    z, _, _ = drm.scan(e, *inputs[1:])
    assert z[1, 3:].isnan().all() and z[1, :3].isfinite().all() and z[[0, 2]].isfinite().all()


def test_a_gradient_asked_for_alone_is_the_same():
    sizes = (3, 9, 7, 6)
    inputs, _, leaves = case(BASE, *sizes)
    whole = results(BASE, sizes)[1]
    for i, leaf in enumerate(leaves):
        given = [x.detach() for x in leaves]
        given[i] = leaf
        state = inputs[1]._replace(z_BS=given[1])
        z, after, trace = drm.scan(given[0], state, Weights(*given[2:]), BASE)
        draw = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=draw)).sum() for x in (z, after.z_BS, *trace))
        (found,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(found, whole[i])


def test_a_law_of_other_sizes_is_refused():
    inputs, _, _ = case(BASE, 2, 4, 7, 6)
    for other in ({"directions": 2}, {"rank": 1}):
        with refused(ValueError, "torch.float32"):
            drm.scan(*inputs[:3], BASE._replace(**other))


def test_shapes_that_do_not_fit_are_refused():
    inputs, _, _ = case(BASE, 2, 4, 7, 6)
    with refused(ValueError, "(5,)"):
        drm.scan(*inputs[:2], inputs[2]._replace(flow_b=inputs[2].flow_b[:-1]), BASE)
