"""Gated linear attention as a module: the published layer as a plain recurrence, its gates, its size.

Shapes: B batch, T time, D model width, H heads, K key width, V value width.
"""

import math

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron.designs.gla.mixer import GLA, GLAConfig, GLAState
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H = 16, 2
K, V = D // 2 // H, D // H


@torch.no_grad()
def build(seed: int = 0, temperature: float = 16.0, size: float = 1.0) -> GLA:
    """Every parameter at random; gates from almost 0 to almost 1."""
    module = GLA(D, 1e-5, GLAConfig(H, gate_rank=3, gate_temperature=temperature)).double()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.normal_(0, 30.0 if name == "gk_proj.1.bias" else size, generator=draw)
    return module.to(torch.get_default_device())


def tokens(B: int, T: int, seed: int = 1, width: int = D) -> Tensor:
    return torch.randn(B, T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warm(B: int) -> GLAState:
    return GLAState(tokens(B, H * K, seed=9, width=V).view(B, H, K, V))


def plain(module: GLA, x_BTD: Tensor, memory_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """The layer of Yang et al. 2023, §4, one row, one token and one head at a time."""
    weight = dict(module.named_parameters())
    temperature = module.config.gate_temperature
    rows, ends = [], []
    for x_TD, memory_HKV in zip(x_BTD, memory_BHKV, strict=True):
        outputs, memory = [], list(memory_HKV)
        for x_D in x_TD:
            logit = weight["gk_proj.1.weight"] @ (weight["gk_proj.0.weight"] @ x_D) + weight["gk_proj.1.bias"]
            alpha = (1 / (1 + torch.exp(-logit))) ** (1 / temperature)
            q, k, v, g = (weight[f"{name}_proj.weight"] @ x_D for name in "qkvg")
            heads = []
            for h in range(H):
                key, value = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
                memory[h] = torch.diag(alpha[key]) @ memory[h] + torch.outer(k[key], v[value])
                o = memory[h].T @ q[key] / math.sqrt(K)
                heads.append(o / torch.sqrt((o * o).mean() + 1e-5) * weight["norm.weight"])
            swish = g / (1 + torch.exp(-g))
            outputs.append(weight["o_proj.weight"] @ (torch.cat(heads) * swish))
        rows.append(torch.stack(outputs))
        ends.append(torch.stack(memory))
    return torch.stack(rows), torch.stack(ends)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("temperature", [16.0, 1.0])
def test_it_is_the_published_layer(T, temperature):
    module, x, state = build(temperature=temperature, size=0.5), tokens(2, T), warm(2)
    y, end, aux = module(x, state)
    expected, memory = plain(module, x, state.memory_BHKV)
    assert aux == {}
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end.memory_BHKV, memory, rtol=1e-12, atol=1e-12)


def test_its_gradients_are_those_of_the_published_layer():
    module, x, state = build(size=0.5), tokens(2, 70).requires_grad_(), warm(2)
    state.memory_BHKV.requires_grad_()
    wanted = {"x": x, "memory": state.memory_BHKV} | dict(module.named_parameters())
    y, end, _ = module(x, state)
    expected, memory = plain(module, x, state.memory_BHKV)
    weight, last = tokens(2, 70, seed=2), warm(2).memory_BHKV.flip(0)
    fast, slow = (
        torch.autograd.grad((a * weight).sum() + (b * last).sum(), list(wanted.values()))
        for a, b in ((y, end.memory_BHKV), (expected, memory))
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("logit", [-1e4, -200.0, 200.0])
def test_a_gate_may_close_or_open_fully(logit):
    """A power of the sigmoid would have no finite gradient where the sigmoid rounds to 0."""
    module = build(size=0.3).float()
    with torch.no_grad():
        module.gk_proj[1].bias.fill_(logit)
    x = tokens(2, 70).float().requires_grad_()
    y, state, _ = module(x, GLAState(warm(2).memory_BHKV.float()))
    (y.sum() + state.memory_BHKV.sum()).backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in [x, *module.parameters()])


def test_memory_starts_long():
    """With the model's own initialisation gates lie about 0.5^(1/16)."""
    config = ModelConfig("gla", 11, 64, (BlockConfig(GLAConfig(4), None),))
    mixer = perspectron.build(config).blocks[0].mixer
    logit = mixer.gk_proj(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)))
    gate = torch.sigmoid(logit.detach()) ** (1 / 16)
    assert abs(float(gate.median()) - 0.5 ** (1 / 16)) < 0.005
    assert float(gate.quantile(0.02)) > 0.8


@pytest.mark.parametrize(("d_model", "heads", "rank"), [(384, 6, 16), (128, 4, 8)])
def test_parameters_and_state_are_as_large_as_said(d_model, heads, rank):
    with torch.device("meta"):
        module = GLA(d_model, 1e-6, GLAConfig(heads, rank))
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == 4 * d_model**2 + rank * 3 * d_model // 2 + d_model // 2 + d_model // heads
    state = module.init_state(3, torch.get_default_device(), torch.bfloat16)
    assert state.memory_BHKV.shape == (3, heads, d_model // 2 // heads, d_model // heads)
    assert state.memory_BHKV.dtype == torch.float32 and not state.memory_BHKV.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_follows_float64(dtype):
    module, x = build(size=0.25), tokens(2, 70)
    exact, _, _ = module(x, warm(2))
    y, state, _ = module.to(dtype)(x.to(dtype), GLAState(warm(2).memory_BHKV.float()))
    assert y.dtype == dtype and state.memory_BHKV.dtype == torch.float32
    assert (y - exact).norm() < 0.05 * exact.norm()


def test_gates_are_not_rounded_to_16_bits():
    """A gate of 0.9996 is 1 in bfloat16, and memory would not fade."""
    module = build().bfloat16()
    with torch.no_grad():
        module.gk_proj[1].bias.fill_(5)
        start = warm(2).memory_BHKV.float()
        after = module(torch.zeros(2, 300, D, dtype=torch.bfloat16), GLAState(start))[1].memory_BHKV
    torch.testing.assert_close(after, start / (1 + math.exp(-5)) ** (300 / 16), rtol=1e-4, atol=0)


def test_huge_values_in_padding_do_no_harm_in_float32():
    module, pad = build(size=0.5).float(), torch.zeros(2, 70, dtype=torch.bool)
    pad[0, 30:50] = pad[1, 60:] = True
    outputs = []
    for fill in (0.0, 1e30):
        x = tokens(2, 70).float().masked_fill(pad[:, :, None], fill)
        outputs.append(module(x, GLAState(warm(2).memory_BHKV.float()), pad_BT=pad))
    assert outputs[1][0].isfinite().all()
    assert torch.equal(outputs[0][0][~pad], outputs[1][0][~pad])
    assert torch.equal(outputs[0][1].memory_BHKV, outputs[1][1].memory_BHKV)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads": 0}, ["heads", 0]),
        ({"heads": 2, "gate_rank": 0}, ["gate_rank", 0]),
        ({"heads": 2, "gate_temperature": 0.0}, ["gate_temperature"]),
        ({"heads": 3}, ["heads", 3]),
        ({"heads": 16}, ["heads", 16]),
    ],
)
def test_a_wrong_config_says_which_field(fields, named):
    with refused(ConfigError, *named):
        GLA(D, 1e-6, GLAConfig(**fields))
