"""Packed sequences: every operation over time gives each of them what it has alone, gradients too. Inputs are those of
the registry of cases, which names the operations."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron.designs.adr import gru
from perspectron.designs.drm import cases as drm_cases
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import State, Weights
from perspectron.designs.lens import op as lens
from perspectron.ops import attention, conv, delta, gla, pdr, sequences
from perspectron.ops.case import Case
from perspectron.ops.cases import cases
from tests.refusals import refused

CU = torch.tensor([0, 1, 6, 9, 17, 33])
NOT_OVER_TIME = {"rope", "experts", "chosen experts", "packed", "norm", "mixed", "eligibility"}


class Op(NamedTuple):
    """run(inputs, cu_seqlens): outputs, those of tokens first. time: the dimension of time of each input over it;
    states: inputs with a row for each sequence; out: that of the outputs, None for a state."""

    run: Callable[..., tuple[Tensor, ...]]
    time: dict[int, int]
    states: tuple[int, ...]
    out: tuple[int | None, ...]


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (attention.attend(q, k, v, causal=True, **options),)


def _lens(q: Tensor, k: Tensor, v: Tensor, u: Tensor, w: Tensor, **options: Any) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    return (attention.attend(*lens.features(q, k, u, w), v, causal=True, scale=scale, **options),)


def _conv(u: Tensor, window: Tensor, weight: Tensor, bias: Tensor, begins: Tensor, **options: Any) -> Any:
    return conv.convolve(u, window, weight, bias, begins, None, **options)


def _gru(x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, h: Tensor, **options: Any) -> Any:
    return gru.scan(x, gru.Cells(wi, wh, bi, bh), 0.9, h, raw=True, **options)


def _drm(e: Tensor, z: Tensor, *weights: Tensor, **options: Any) -> Any:
    length = torch.zeros(len(z), dtype=torch.int64)
    state = State(z, z.new_zeros(len(z), 0), length)
    states, after, trace = drm.scan(e, state, Weights(*weights), drm_cases.LAW, **options)
    return states, after.z_BS, trace.v_BTS


MEMORY = {0: 2, 1: 2, 2: 2, 3: 2}
OPS = {
    "pdr": Op(pdr.scan, {0: 1, 1: 1, 2: 1, 3: 1}, (4,), (1, None)),
    "gla": Op(gla.scan, MEMORY, (4,), (2, None)),
    "ssd": Op(gla.scan, MEMORY, (4,), (2, None)),
    "delta": Op(delta.scan, MEMORY | {4: 2}, (5,), (2, None)),
    "gated delta": Op(delta.scan, MEMORY | {4: 2}, (5,), (2, None)),
    "rwkv7": Op(delta.scan_rwkv7, MEMORY | {4: 2, 5: 2}, (6,), (2, None)),
    "conv": Op(_conv, {0: 1, 4: 1}, (1,), (1, None)),
    "gru": Op(_gru, {0: 1}, (5,), (1, 1, None)),
    "drm": Op(_drm, {0: 1}, (1,), (1, None, 1)),
    "attention": Op(_attention, {0: 2, 1: 2, 2: 2}, (), (2,)),
    "lens": Op(_lens, {0: 2, 1: 2, 2: 2}, (), (2,)),
}


def chosen() -> dict[str, Case]:
    """The longest case of each operation."""
    found: dict[str, Case] = {}
    for case in cases(torch.device("cpu")):
        if case.gradients is not None and case.inputs[0].dtype is torch.float32:
            tokens = case.inputs[0].numel() * (case.shape.count("T 33") + 1)
            if case.op not in found or tokens > found[case.op].inputs[0].numel():
                found[case.op] = case
    return found


def inputs_of(op: Op, case: Case, T: int) -> list[Tensor]:
    """Tokens of one row, again and again if there are too few, and a state for each sequence."""
    draw, made = torch.Generator().manual_seed(7), []
    for i, x in enumerate(case.inputs):
        if i in op.time:
            x = x[:1].index_select(op.time[i], torch.arange(T) % x.shape[op.time[i]])
        elif i in op.states:
            x = torch.randn(len(CU) - 1, *x.shape[1:], generator=draw)
        made.append(x.double() if x.is_floating_point() else x)
    return made


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]


def alone(op: Op, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Each sequence by itself, one after another."""
    parts = []
    for n, (start, stop) in enumerate(zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True)):
        own = [
            x.narrow(op.time[i], start, stop - start)
            if i in op.time
            else x[n : n + 1]
            if i in op.states
            else x
            for i, x in enumerate(inputs)
        ]
        parts.append(op.run(*own))
    return tuple(
        torch.cat(xs, 0 if at is None else at)
        for at, xs in zip(op.out, zip(*parts, strict=True), strict=True)
    )


def test_the_registry_has_no_operation_over_time_that_is_not_asked_here():
    assert not set(OPS) - set(chosen()) - {"gru", "drm"}
    over_time = {name for name in chosen() if name not in NOT_OVER_TIME}
    assert {"windowed", "cached"} <= over_time  # which have resets; tests/ops/test_attention.py
    unknown = {name for name in over_time - set(OPS) - {"windowed", "cached"} if _mixes_time(chosen()[name])}
    assert unknown == set()


def _mixes_time(case: Case) -> bool:
    """True if its first output at a token depends on one before."""
    if not case.inputs[0].is_floating_point() or "T " not in case.shape:
        return False
    at = 2 if "H " in case.shape and case.inputs[0].ndim == 4 else 1
    x = case.inputs[0]
    if x.ndim <= at or x.shape[at] < 2:
        return False
    changed = x.clone()
    changed.narrow(at, 0, 1).add_(1)
    last = [
        case.run(case.backends[-1], y, *case.inputs[1:])[0].select(at, x.shape[at] - 1) for y in (x, changed)
    ]
    return not torch.allclose(*last)


@pytest.mark.parametrize("name", OPS)
def test_packed_sequences_are_what_each_is_alone_with_gradients_and_final_states(name):
    op, case = OPS[name], chosen()[name]
    inputs = inputs_of(op, case, int(CU[-1]))
    if name == "conv":
        inputs[4] = torch.zeros_like(inputs[4])
        inputs[4][0, 12] = True  # a document within a sequence
    found = []
    for run in (lambda *xs: op.run(*xs, cu_seqlens=CU), lambda *xs: alone(op, list(xs))):
        given = leaves(inputs)
        outputs = run(*given)
        draw = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in outputs]
        wanted = [x for x in given if x.requires_grad]
        gradients = torch.autograd.grad(outputs, wanted, weights, allow_unused=True, materialize_grads=True)
        found.append([*outputs, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert found[0][0].abs().sum() > 0


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("attention", "lens")])
def test_without_gradients_in_float32_too_and_a_consumed_state_is_no_other(name):
    op, case = OPS[name], chosen()[name]
    inputs = [x.float() if x.is_floating_point() else x for x in inputs_of(op, case, int(CU[-1]))]
    with torch.no_grad():
        packed = op.run(*inputs, cu_seqlens=CU) if name != "drm" else None
        exact = alone(op, [x.double() if x.is_floating_point() else x for x in inputs]) if packed else None
    for one, other in zip(packed or (), exact or (), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4)


def test_sequences_without_a_state_begin_with_none():
    q, k, v, gamma, state = inputs_of(OPS["pdr"], chosen()["pdr"], int(CU[-1]))
    found = pdr.scan(q, k, v, gamma, cu_seqlens=CU)
    exact = pdr.scan(q, k, v, gamma, torch.zeros_like(state), cu_seqlens=CU)
    assert all(map(torch.equal, found, exact))


def test_work_is_at_most_twice_that_of_the_tokens():
    lengths = torch.tensor([900, 1, 1, 2, 3, 500, 7, 1])
    cu = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    made = list(sequences.groups(cu))
    assert sum(group.token_nL.numel() for group in made) < 2 * int(cu[-1])
    assert sorted(torch.cat([group.token_nL[~group.pad_nL] for group in made]).tolist()) == list(
        range(int(cu[-1]))
    )


def test_a_model_reads_packed_sequences_with_their_resets():
    model = perspectron.build("perspective2-tiny").double()
    ids = torch.randint(200, (1, 33), generator=torch.Generator().manual_seed(1))
    packed = model(ids, reset_BT=sequences.resets(CU)).logits
    alone = [model(ids[:, start:stop]).logits for start, stop in itertools.pairwise(CU)]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("cu", [[1, 33], [0, 5, 5, 33], [0, 9, 4, 33], [0, 32], [0], [[0, 33]], [0.0, 33.0]])
def test_cuts_that_are_none_are_refused(cu):
    q, k, v, gamma, _ = inputs_of(OPS["pdr"], chosen()["pdr"], 33)
    with refused(ValueError, "cu_seqlens"):
        pdr.scan(q, k, v, gamma, cu_seqlens=torch.tensor(cu))


def test_what_does_not_go_with_packed_sequences_is_refused_by_name():
    q, k, v, gamma, state = inputs_of(OPS["pdr"], chosen()["pdr"], 33)
    with refused(ValueError, "state_BDR"):
        pdr.scan(q, k, v, gamma, state[:1], cu_seqlens=CU)
    both = [x.expand(2, *x.shape[1:]) for x in (q, k, v, gamma)]
    with refused(ValueError, "q_BTR"):
        pdr.scan(*both, cu_seqlens=CU)
    q, k, v = inputs_of(OPS["attention"], chosen()["attention"], 33)
    with refused(ValueError, "causal"):
        attention.attend(q, k, v, cu_seqlens=CU)
    with refused(ValueError, "mask_BTS"):
        attention.attend(q, k, v, torch.ones(1, 33, 33, dtype=torch.bool), causal=True, cu_seqlens=CU)


# ---------------------------------------------------------------- docs/reference/from-fla.md


def _fla(step: Callable[..., Tensor], q: Tensor, K: int, V: int, state: Tensor, scale: float) -> Any:
    """A plain loop over [B,T,H,·], as fla lays tensors out: step(t, S) gives the next state."""
    outputs = []
    for t in range(q.shape[1]):
        state = step(t, state)
        outputs.append(torch.einsum("bhk,bhkv->bhv", scale * q[:, t], state))
    return torch.stack(outputs, 1), state


def test_the_table_of_fla():
    B, T, H, K, V = 2, 9, 2, 4, 3
    draw = torch.Generator().manual_seed(4)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, k, v, state = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H, V), rand(B, H, K, V)
    k = torch.nn.functional.normalize(k, dim=-1)
    g, w = (torch.nn.functional.logsigmoid(rand(B, T, H, K)) for _ in range(2))
    beta, erase, write = rand(B, T, H).sigmoid(), rand(B, T, H, K).sigmoid(), rand(B, T, H, V).sigmoid()
    a, b = -k, 0.5 * k
    scale = K**-0.5

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[..., None] * y[..., None, :]

    def decayed(S: Tensor, g: Tensor) -> Tensor:
        return S * g.exp()[..., None]

    def corrected(S: Tensor, t: int, e: Tensor, v: Tensor) -> Tensor:
        return S + outer(k[:, t], v[:, t] - torch.einsum("bhk,bhkv->bhv", e[:, t], S))

    one = g[..., :1]
    steps = {
        "gla": lambda t, S: decayed(S, g[:, t]) + outer(k[:, t], v[:, t]),
        "simple_gla": lambda t, S: decayed(S, one[:, t]) + outer(k[:, t], v[:, t]),
        "linear_attn": lambda t, S: S + outer(k[:, t], v[:, t]),
        "delta_rule": lambda t, S: corrected(S, t, beta[..., None] * k, beta[..., None] * v),
        "gated_delta_rule": lambda t, S: corrected(
            decayed(S, one[:, t]), t, beta[..., None] * k, beta[..., None] * v
        ),
        "kda": lambda t, S: corrected(decayed(S, g[:, t]), t, beta[..., None] * k, beta[..., None] * v),
        "gdn2": lambda t, S: corrected(decayed(S, g[:, t]), t, erase * k, write * v),
        "rwkv7": lambda t, S: (
            decayed(S, w[:, t])
            + outer(b[:, t], torch.einsum("bhk,bhkv->bhv", a[:, t], S))
            + outer(k[:, t], v[:, t])
        ),
    }
    ours = [x.transpose(1, 2) for x in (q, k, v, g, one, beta[..., None], erase, write, a, b, w)]
    Q, k_, v_, G, G1, beta_, e_, w_, a_, b_, decay = ours
    ones = torch.ones_like(G1)
    found = {
        "gla": gla.scan(Q, k_, v_, G.exp(), state),
        "simple_gla": gla.scan(Q, k_, v_, G1.exp(), state),
        "linear_attn": gla.scan(Q, k_, v_, ones, state),
        "delta_rule": delta.scan(Q, k_, beta_ * k_, beta_ * v_, ones, state, scale=scale),
        "gated_delta_rule": delta.scan(Q, k_, beta_ * k_, beta_ * v_, G1.exp(), state, scale=scale),
        "kda": delta.scan(Q, k_, beta_ * k_, beta_ * v_, G.exp(), state, scale=scale),
        "gdn2": delta.scan(Q, k_, e_ * k_, w_ * v_, G.exp(), state, scale=scale),
        "rwkv7": delta.scan_rwkv7(Q, k_, v_, a_, b_, decay.exp(), state),
    }
    for name, step in steps.items():
        o, final = _fla(step, q, K, V, state, 1.0 if name == "rwkv7" else scale)
        torch.testing.assert_close(found[name][0].transpose(1, 2), o)
        torch.testing.assert_close(found[name][1], final)
    x, gate, h = rand(B, T, V), torch.nn.functional.logsigmoid(rand(B, T, V)), rand(B, V)
    line = torch.ones(B, T, 1, dtype=torch.float64)
    o, final = pdr.scan(line, line, x, gate.exp(), h[..., None], scale=1)
    for t in range(T):
        h = gate[:, t].exp() * h + x[:, t]
        torch.testing.assert_close(o[:, t], h)
    torch.testing.assert_close(final[..., 0], h)
