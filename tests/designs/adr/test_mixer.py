"""ADR against the five laws written out, and without the faults of the document's demo (docs/designs/adr.md).

Shapes: B batch, T time, D model width, H heads, K head width.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from perspectron.designs.adr.mixer import ADR, ADRConfig, ADRState
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H, K = 12, 3, 4
CONFIGS = [
    ADRConfig(H, gamma=0.8, emit=emit, share_heads=share, cold_start=cold, couple=couple)
    for emit, share, cold, couple in itertools.product(("state", "raw"), *3 * [(False, True)])
    if not (cold and emit == "raw")
]
CONFIGS += [
    ADRConfig(H, gamma=0.0),
    ADRConfig(H, gamma=0.8, couple=False, remember="keys"),
    ADRConfig(H, gamma=0.8, couple=False, remember="keys", rope_base=50.0),
    ADRConfig(H, gamma=0.8, share_heads=True, remember="values"),
    ADRConfig(H, gamma=0.8, learned="head", cold_start=True),
    ADRConfig(H, gamma=0.8, learned="head", share_heads=True),
    ADRConfig(H, gamma=0.8, learned="layer", emit="raw"),
]


def describe(config: ADRConfig) -> str:
    flags = [name for name in ("share_heads", "cold_start", "couple") if getattr(config, name)]
    return "-".join(
        [
            config.emit,
            *flags,
            *(["no decay"] if config.gamma == 0 else []),
            *(["rotary"] if config.rope_base else []),
            *([f"a decay for each {config.learned}"] if config.learned != "none" else []),
            config.remember,
        ]
    )


every_config = pytest.mark.parametrize("config", CONFIGS, ids=describe)
each_sharing = pytest.mark.parametrize("share_heads", [False, True], ids=["own", "shared"])


def build(config: ADRConfig, seed: int = 0) -> ADR:
    """In float64, with every weight of order one over the root of its inputs."""
    module = ADR(D, 1e-6, config).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, parameter.shape[-2] ** -0.5 if parameter.ndim > 1 else 0.5, generator=draw)
        if config.learned != "none":
            module.decay.add_(1.4)  # about gamma
    return module.to(torch.get_default_device())


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def empty(module: ADR, B: int) -> ADRState:
    return module.init_state(B, torch.get_default_device(), torch.float64)


def remembering(module: ADR, B: int, seed: int = 2) -> ADRState:
    """A state with memories, and no token in the cache."""
    kinds, draw = module.config.streams, torch.Generator().manual_seed(seed)
    memory = 0.5 * torch.randn(B, kinds, H, K, generator=draw, dtype=torch.float64)
    return dataclasses.replace(empty(module, B), memory_B2HK=memory.requires_grad_())


def cell_of(module: ADR, which: int, head: int) -> tuple[nn.GRUCell, dict[str, Tensor]]:
    """torch's own cell and the module's weights for it: of keys (0) or values (1) of a head."""
    g = which if module.config.share_heads else which * H + head
    weights = {
        "weight_ih": module.input_GKF[g].T,
        "weight_hh": module.recurrent_GKF[g].T,
        "bias_ih": module.input_bias.view(-1, 3 * K)[g],
        "bias_hh": module.recurrent_bias.view(-1, 3 * K)[g],
    }
    return nn.GRUCell(K, K, dtype=torch.float64), weights


def turned(x_TK: Tensor, base: float) -> Tensor:
    """Coordinate i and i + K/2 of token t, turned together by t · base^(−2i/K)."""
    half = x_TK.shape[1] // 2
    z = torch.complex(x_TK[:, :half].contiguous(), x_TK[:, half:].contiguous())
    angle = torch.arange(len(x_TK))[:, None] * base ** (-torch.arange(half).double() / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], 1)


def laws(module: ADR, x_BTD: Tensor, memory_B2HK: Tensor) -> tuple[Tensor, Tensor]:
    """Laws 1 to 5, one batch row, head and token at a time (but for law 5's norm, which is the block's)."""
    config, (B, T, _) = module.config, x_BTD.shape
    q, k, v = module.qkv_proj(x_BTD).chunk(3, -1)
    y_BTD, last_B2HK = [], []
    for b in range(B):
        heads, memories, last = [], [], []
        for head in range(H):
            part = slice(head * K, (head + 1) * K)
            traces = []
            for kind, stream in zip(("keys", "values"), (k, v), strict=True):
                if config.remember not in ("both", kind):
                    traces.append(stream[b, :, part])
                    continue
                which = int(kind == "values" and config.remember == "both")
                cell, weights = cell_of(module, which, head)
                h, seen, kept = memory_B2HK[b, which, head], [], []
                gamma = config.gamma if config.learned == "none" else module.gamma()[head]
                for t in range(T):
                    raw = torch.func.functional_call(cell, weights, (stream[b, t, part], h))  # law 2
                    h = gamma * h + (1 - gamma) * raw  # law 3
                    emitted = raw if config.emit == "raw" else h
                    seen.append(emitted / (1 - gamma ** (t + 1)) if config.cold_start else emitted)
                    kept.append(h)
                traces.append(torch.stack(seen))
                last.append(h)
            memories.append(torch.stack(kept))  # of the values, unless there are none
            outputs, queries = [], q[b, :, part]
            if config.rope_base:
                traces[0], queries = (turned(x, config.rope_base) for x in (traces[0], queries))
            for t in range(T):  # laws 1 and 4
                weight = torch.softmax(traces[0][: t + 1] @ queries[t] / K**0.5, 0)
                outputs.append(weight @ traces[1][: t + 1])
            heads.append(torch.stack(outputs))
        y_TD = module.o_proj(torch.cat(heads, -1))
        y_BTD.append(y_TD + torch.cat(memories, -1) if config.couple else y_TD)  # law 5
        kinds = config.streams
        last_B2HK.append(torch.stack([torch.stack(last[which::kinds]) for which in range(kinds)]))
    return torch.stack(y_BTD), torch.stack(last_B2HK)


@every_config
def test_it_is_the_five_laws(config):
    module, x = build(config), tokens(2, 25).requires_grad_()
    start = remembering(module, 2)
    found, state = [], start
    for part in (x[:, :17], x[:, 17:18], x[:, 18:]):
        y, state, _ = module(part, state)
        found.append(y)
    y, memory = laws(module, x, start.memory_B2HK)
    for a, b in ((torch.cat(found, 1), y), (state.memory_B2HK, memory)):
        assert (a - b).abs().max() <= 1e-12
    wanted = {"x": x, "memory": start.memory_B2HK} | dict(module.named_parameters())
    weights = (
        tokens(2, 25, seed=3),
        torch.linspace(-1, 1, memory.numel(), dtype=torch.float64).view_as(memory),
    )

    def gradients(y: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        loss = (y * weights[0]).sum() + (memory * weights[1]).sum()
        return torch.autograd.grad(loss, list(wanted.values()), retain_graph=True)

    for name, a, b in zip(
        wanted, gradients(torch.cat(found, 1), state.memory_B2HK), gradients(y, memory), strict=True
    ):
        assert b.abs().max() > 1e-3 and (a - b).abs().max() <= 1e-9, name


# ---------------------------------------------------------------- what the demo does wrong


@every_config
def test_batches_of_any_size_follow_each_other(config):
    module, x = build(config), tokens(2, 9)
    two, _, _ = module(x, empty(module, 2))
    one, _, _ = module(x[:1], empty(module, 1))
    assert (one[0] - two[0]).abs().max() < 1e-12


@every_config
def test_training_takes_more_than_one_step(config):
    module = build(config)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    x, target, losses = tokens(2, 9), tokens(2, 9, seed=3), []
    for _ in range(10):
        loss = (module(x, empty(module, 2))[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


@every_config
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["train", "inference"])
def test_the_same_input_gives_the_same_again(config, mode):
    module, x = build(config), tokens(2, 9)
    with mode():
        first, second = (module(x, empty(module, 2)) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1].memory_B2HK, second[1].memory_B2HK)


@each_sharing
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["train", "inference"])
def test_no_head_has_a_part_in_anothers_memory(share_heads, T, mode):
    module, x = build(ADRConfig(H, gamma=0.8, share_heads=share_heads)), tokens(2, T)

    def remembered(head: int | None, *, inputs: bool) -> ADRState:
        """After one head's memories, or the rows that give its keys and values, are changed."""
        start = dataclasses.replace(
            empty(module, 2), memory_B2HK=remembering(module, 2).memory_B2HK.detach().clone()
        )
        weight = module.qkv_proj.weight.detach().clone()
        if head is not None and inputs:
            module.qkv_proj.weight.data.view(3, H, K, D)[1:, head] += 1
        elif head is not None:
            start.memory_B2HK[:, :, head] += 1
        with mode():
            after = module(x, start)[1]
        module.qkv_proj.weight.data.copy_(weight)
        return after

    before = remembered(None, inputs=False)
    for head, inputs in itertools.product(range(H), (False, True)):
        after = remembered(head, inputs=inputs)
        differs = (after.memory_B2HK - before.memory_B2HK).abs().amax((0, 1, 3)) > 1e-6
        assert differs.tolist() == [other == head for other in range(H)]
        differs = (after.cache.k_BHSK - before.cache.k_BHSK).abs().amax((0, 2, 3)) > 1e-6
        assert differs.tolist() == [other == head for other in range(H)]


@every_config
def test_nothing_sees_what_comes_later(config):
    module, x = build(config), tokens(2, 20)
    before, _, _ = module(x, empty(module, 2))
    for t in (0, 1, 10, 19):
        changed = x.clone()
        changed[:, t] += 1
        after, _, _ = module(changed, empty(module, 2))
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] - before[:, t:]).abs().amax(-1).min() > 1e-9, "every later token remembers it"


@every_config
def test_the_state_dict_holds_weights_and_loads_at_any_batch_size(config):
    module = build(config)
    module(tokens(2, 9), empty(module, 2))
    saved = module.state_dict()
    assert set(saved) == {name for name, _ in module.named_parameters()} and not list(module.buffers())
    for B in (1, 2, 5):
        other = ADR(D, 1e-6, config).double()
        other(tokens(B, 3), empty(other, B))
        other.load_state_dict(saved)
        assert torch.equal(other(tokens(B, 9), empty(other, B))[0], module(tokens(B, 9), empty(module, B))[0])


@every_config
def test_memories_stand_in_for_keys_and_values_one_for_each_token(config):
    """The demo appends one memory behind all keys."""
    module = build(config)
    _, state, _ = module(tokens(2, 9), empty(module, 2))
    assert state.cache.k_BHSK.shape == state.cache.v_BHSV.shape == (2, H, 9, K)
    if config.emit == "state":
        last = torch.stack([state.cache.k_BHSK[:, :, -1], state.cache.v_BHSV[:, :, -1]], 1)
        last = last[:, config.remembered]
        gamma = 0.8 if config.learned == "none" else module.gamma()[:, None]
        full = 1 - gamma**9 if config.cold_start else 1
        memory_B2HK = state.memory_B2HK
        if config.rope_base:  # keys as attention reads them, turned
            nine = memory_B2HK.flatten(0, 2)[:, None].expand(-1, 9, -1)
            memory_B2HK = torch.stack([turned(x, config.rope_base)[-1] for x in nine]).view_as(memory_B2HK)
        torch.testing.assert_close(last * full, memory_B2HK, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- config and weights


@pytest.mark.parametrize("options", [{"cold_start": True}, {"emit": "raw"}], ids=str)
def test_a_decay_that_rounds_to_1_gives_numbers(options):
    module = build(ADRConfig(H, gamma=0.8, learned="head", **options)).float()
    with torch.no_grad():
        module.decay.fill_(20)
    assert (torch.sigmoid(module.decay) == 1).all() and (module.gamma() < 1).all()
    x_BTD = torch.randn(2, 5, D)
    y_BTD, _, _ = module(x_BTD, module.init_state(2, x_BTD.device, x_BTD.dtype))
    y_BTD.sum().backward()
    assert y_BTD.isfinite().all() and all(
        p.grad is None or p.grad.isfinite().all() for p in module.parameters()
    )


def test_a_long_learned_decay_is_no_1_in_bfloat16():
    """There 0.999 rounds to 1, which would leave memories empty."""
    module = build(ADRConfig(H, gamma=0.8, learned="head"))
    with torch.no_grad():
        module.decay.fill_(math.log(999))
    module.bfloat16()
    torch.testing.assert_close(module.gamma(), torch.full([H], 0.999), rtol=0, atol=1e-4)
    _, state, _ = module(tokens(2, 9).bfloat16(), module.init_state(2, torch.device("cpu"), torch.bfloat16))
    assert state.memory_B2HK.abs().max() > 1e-4


def test_a_cold_start_is_made_up_for():
    """With one candidate c at every token and an open gate, h_t = (1 − γᵗ) c: corrected, it is c at once."""
    module = build(ADRConfig(H, gamma=0.8, cold_start=True))
    with torch.no_grad():
        for parameter in (module.input_GKF, module.recurrent_GKF, module.recurrent_bias):
            parameter.zero_()
        module.input_bias.view(-1, 3, K)[:, 1] = -100  # z = 0
    _, state, _ = module(tokens(2, 9), empty(module, 2))
    c_2HK = module.input_bias.view(2, H, 3, K)[:, :, 2].tanh()
    for found, c_HK in zip((state.cache.k_BHSK, state.cache.v_BHSV), c_2HK, strict=True):
        torch.testing.assert_close(found, c_HK[None, :, None].expand_as(found), rtol=1e-12, atol=1e-12)


def test_shared_heads_have_one_pair_of_cells():
    sizes = {
        share: build(ADRConfig(H, gamma=0.8, share_heads=share)).input_GKF.shape for share in (True, False)
    }
    assert sizes == {True: (2, K, 3 * K), False: (2 * H, K, 3 * K)}


def test_cells_start_as_torchs():
    module = ADR(D, 1e-6, ADRConfig(H, gamma=0.8))
    with torch.no_grad():
        module.init_weights(torch.Generator().manual_seed(0))
    for parameter in (module.input_GKF, module.recurrent_GKF, module.input_bias, module.recurrent_bias):
        assert 0.4 < parameter.abs().max() <= K**-0.5 and abs(parameter.mean()) < 0.1
    assert not torch.equal(module.input_GKF, module.recurrent_GKF)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gamma": -0.1}, ["gamma"]),
        ({"gamma": 1.0}, ["gamma"]),
        ({"cold_start": True, "gamma": 0.0}, ["cold_start", True]),
        ({"remember": "keys"}, ["couple", True]),
        ({"remember": "all"}, ["remember", "all"]),
        ({"heads": 0}, ["heads", 0]),
        ({"emit": "h"}, ["emit", "h"]),
        ({"cold_start": True, "emit": "raw"}, ["cold_start", True]),
    ],
)
def test_bad_configs_say_what_is_wrong(fields, named):
    with refused(ConfigError, *named):
        ADRConfig(**{"heads": H, "gamma": 0.8} | fields)


def test_heads_divide_the_width():
    with refused(ConfigError, "heads", 5):
        ADR(D, 1e-6, ADRConfig(5, gamma=0.8))
