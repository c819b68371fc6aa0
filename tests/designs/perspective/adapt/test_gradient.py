"""Estimates of the gradient: traces against backpropagation through time, forward mode against its own projection.

Shapes: B batch, T time, D value width, R state rank, r rank of the adapter.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from perspectron.designs.perspective import eligibility
from perspectron.designs.perspective.adapt.adapter import Adapter, AdapterConfig
from perspectron.designs.perspective.adapt.gradient import (
    Piece,
    Subspace,
    Weights,
    by_backprop,
    by_jvp,
    by_traces,
)
from perspectron.model.block import of_mixer
from perspectron.model.model import LanguageModel
from perspectron.ops import pdr
from perspectron.util.errors import ConfigError
from tests.designs.perspective.adapt.conftest import make, make2, text
from tests.refusals import refused


def projected(space, gradient):
    """Pᵀ g [m] of a gradient in a subspace."""
    flat_n = torch.cat([gradient[i].double().flatten() for i in space.shapes])
    return torch.zeros(space.size, dtype=torch.float64).index_add(0, space.group_n, flat_n * space.sign_n)


def started(model: LanguageModel, *, traces: bool = True, rank: int = 3) -> tuple[Adapter, Piece]:
    """An adapter that is not zero, and a text of 90 tokens of two documents."""
    adapter = Adapter(model, AdapterConfig(rank=rank))
    for i, up in adapter.up.items():
        adapter.up[i] = torch.randn(up.shape, generator=torch.Generator().manual_seed(i), dtype=up.dtype)
    ids = text(91)
    ids[40] = 0
    return adapter, Piece(ids, adapter.attach(model.init_state(1), traces=traces), fresh=True, reset=0)


def summed(model: LanguageModel, adapter: Adapter, piece: Piece, cuts: list[int]) -> Weights:
    """Gradients by traces, the text read in parts."""
    state, total = piece.state, {i: torch.zeros_like(up) for i, up in adapter.up.items()}
    for start, stop in zip([0, *cuts], [*cuts, len(piece.ids) - 1], strict=True):
        part = Piece(piece.ids[start : stop + 1], state, fresh=start == 0, reset=0)
        _, found, state = by_traces(model, part, adapter.up)
        total = {i: total[i] + found[i] for i in total}
    return total


def cosine(one: Weights, other: Weights) -> float:
    flat = [torch.cat([part.flatten() for part in each.values()]) for each in (one, other)]
    return float(torch.cosine_similarity(*flat, dim=0))


@pytest.mark.parametrize("scaled", [False, True], ids=["pdr", "pdr2"])
def test_traces_are_the_derivative_of_the_memory_by_autograd(scaled):
    """scaled: values times √(1 − γ²), by the gates before a reset."""
    B, T, D, R, r = 2, 150, 5, 3, 2
    draw = torch.Generator().manual_seed(0)
    q, k, v, p, u = (torch.randn(B, T, n, generator=draw, dtype=torch.float64) for n in (R, R, D, D, r))
    memory, up = (torch.randn(B, *n, generator=draw, dtype=torch.float64) for n in ((D, R), (D, r)))
    pad_BT, reset_BT = torch.zeros(2, B, T, dtype=torch.bool)
    pad_BT[0, 20:27], reset_BT[1, 60], reset_BT[0, 140] = True, True, True
    v = v.masked_fill(pad_BT[:, :, None], 0)

    def run(up_BDr: Tensor, stop: int) -> Tensor:
        return pdr.scan(*(x[:, :stop] for x in gated(up_BDr)[:4]), memory, backend="naive")[1]

    def gated(up_BDr: Tensor) -> tuple[Tensor, ...]:
        gamma = torch.sigmoid(p + u @ up_BDr.mT)
        values = v * (1 - gamma.square()).sqrt() if scaled else v
        slope = -gamma.square() / (1 + gamma)
        gamma = gamma.masked_fill(pad_BT[:, :, None], 1).masked_fill(reset_BT[:, :, None], 0)
        return q, k, values, gamma, slope

    _, *given, slope = gated(up)
    trace, at, start = torch.zeros(B, r, D, R, dtype=torch.float64), memory, 0
    basis = torch.eye(r, dtype=torch.float64)[:, None, None, :].expand(r, B, D, r)
    for stop in (1, 63, 64, 65, T):
        *part, own = (x[:, start:stop] for x in (*given, u, slope))
        trace = eligibility.carried(*part, at, trace, slope_BTD=own if scaled else None)
        at, start = run(up, stop), stop
        for i in range(r):  # rows do not mix, so one direction in all of them gives each row's own
            wanted = torch.func.jvp(partial(run, stop=stop), (up,), (basis[i].contiguous(),))[1]
            torch.testing.assert_close(trace[:, i], wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pdr2", [False, True])
def test_of_one_layer_the_gradient_by_traces_is_backpropagation_however_it_is_cut(pdr2):
    """Without the shift, by which the network reads what the memory gave one token before."""
    model = make2(layers=1, shift=False) if pdr2 else make(layers=1, mixers="pdr")
    adapter, piece = started(model)
    whole = by_backprop(model, [piece], adapter.up)
    for cuts in ([], [1, 2, 3, 40, 41, 80], [33]):
        found = summed(model, adapter, piece, cuts)
        torch.testing.assert_close(found[0], whole[0], rtol=0, atol=1e-10)


def test_in_a_stack_the_top_layer_is_exact_and_longer_parts_leave_less_out():
    model = make(layers=3, mixers="pdr")
    adapter, piece = started(model)
    whole = by_backprop(model, [piece], adapter.up)
    single = summed(model, adapter, piece, list(range(2, 90, 2)))
    torch.testing.assert_close(single[2], whole[2], rtol=0, atol=1e-10)  # the top
    halves = summed(model, adapter, piece, [45])
    assert 0.3 < cosine(single, whole) < cosine(halves, whole) < 0.99999


def test_traces_do_not_touch_what_is_read(model):
    adapter, piece = started(model)
    nats, _, state = by_traces(model, piece, adapter.up)
    plain = adapter.attach(model.init_state(1))
    ids = torch.tensor([piece.ids])
    reset = ids[:, :-1] == 0
    reset[:, 0] = False
    out = model(ids[:, :-1], plain, ids[:, 1:], reset_BT=reset)
    torch.testing.assert_close(nats.mean(), out.loss, rtol=0, atol=1e-12)
    one, other = (of_mixer(made.layers[0]).memory_BDR for made in (state, out.state))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_rows_with_their_own_adapters_are_as_alone(model):
    ids = torch.tensor([text(20, seed) for seed in (1, 2)])
    states = []
    for seed in (1, 2):
        adapter = Adapter(model, AdapterConfig(seed=seed))
        adapter.up = {i: torch.randn_like(up) for i, up in adapter.up.items()}
        states.append(adapter.attach(model.init_state(1), traces=True))
    with torch.no_grad():
        both = model(ids, type(states[0]).stack(states))
        for row in range(2):
            alone = model(ids[row : row + 1], states[row])
            torch.testing.assert_close(both.logits[row], alone.logits[0], rtol=0, atol=1e-12)
            one, other = (of_mixer(state.layers[1]) for state in (both.state.take(row), alone.state))
            torch.testing.assert_close(one.trace_BrDR, other.trace_BrDR, rtol=0, atol=1e-12)


def test_directions_of_a_subspace_are_orthonormal_and_come_without_replacement(model):
    adapter, _ = started(model)
    space = Subspace(adapter.up, 10, seed=3)
    columns = space.spread(torch.eye(10, dtype=torch.float64))
    P = torch.cat([part.flatten(1) for part in columns.values()], 1)
    torch.testing.assert_close(P @ P.mT, torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-12)
    turns = torch.cat([space.directions(turn, 5) for turn in range(4)])
    assert sorted(turns[:10].tolist()) == sorted(turns[10:].tolist()) == list(range(10))


def test_forward_mode_along_every_direction_is_the_projected_gradient(model):
    adapter, piece = started(model, traces=False)
    piece = Piece(piece.ids[:30], piece.state, fresh=True, reset=0)
    whole = by_backprop(model, [piece], adapter.up)
    space = Subspace(adapter.up, 6, seed=3)
    found = by_jvp(model, piece, adapter.up, space, torch.arange(6))
    wanted = {i: part[0] for i, part in space.spread(projected(space, whole)[None]).items()}
    for i in wanted:
        torch.testing.assert_close(found[i], wanted[i], rtol=0, atol=1e-10)
    three = by_jvp(model, piece, adapter.up, space, torch.tensor([4]))
    slope = projected(space, whole)[4]  # one of six, six times as large
    torch.testing.assert_close(projected(space, three)[4], 6 * slope, rtol=1e-9, atol=1e-12)


def test_forward_mode_goes_through_experts_chosen_by_a_straight_through_gate():
    model = make(experts=True)
    adapter, piece = started(model, traces=False)
    space = Subspace(adapter.up, 12, seed=4)
    found = by_jvp(model, piece, adapter.up, space, torch.arange(12))
    gradient = by_backprop(model, [piece], adapter.up)
    torch.testing.assert_close(projected(space, found), projected(space, gradient), rtol=1e-9, atol=1e-12)


def test_a_subspace_larger_than_the_adapter_is_refused(model):
    with refused(ConfigError, "subspace", 10**6):
        Subspace(Adapter(model).up, 10**6, seed=0)
