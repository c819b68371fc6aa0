"""minGRU as a module: the published layer as a plain loop, with documents and padding, its start, its size.

Shapes: B batch, T time, D model width, I inner width, W taps of the convolution, Z = W − 1.
"""

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron.designs.mingru.mixer import MinGRU, MinGRUConfig, MinGRUState
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, INNER = 6, 12


@torch.no_grad()
def build(conv: int = 4) -> MinGRU:
    """Every parameter at random; gates from almost 0 to almost 1, candidates on both sides of 0."""
    module = MinGRU(D, 1e-6, MinGRUConfig(conv=conv)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, 1.5, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warm(B: int, conv: int = 4) -> MinGRUState:
    return MinGRUState(normal(B, INNER, seed=8), normal(B, conv - 1, D, seed=9))


def masks(B: int, T: int) -> tuple[Tensor, Tensor]:
    """Documents and padding anywhere, also documents that begin in padding."""
    draw = torch.Generator().manual_seed(3)
    return tuple(torch.rand(B, T, generator=draw) < p for p in (0.15, 0.3))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def plain(module: MinGRU, x_BTD: Tensor, state: MinGRUState, reset_BT: Tensor, pad_BT: Tensor):
    """Feng et al. 2024, §3.1, one row and one token at a time; outputs at padding are zeros."""
    weight, W = dict(module.named_parameters()), module.config.conv
    outputs, ends, windows = torch.zeros_like(x_BTD), [], []
    for b, x_TD in enumerate(x_BTD):
        h, seen = state.hidden_BI[b], list(state.window_BZD[b])
        for t, x_D in enumerate(x_TD):
            if reset_BT[b, t]:
                h, seen = torch.zeros_like(h), [torch.zeros_like(x_D)] * (W - 1)
            if pad_BT[b, t]:
                continue
            seen.append(x_D)
            u = weight["conv1d.bias"] + sum(
                weight["conv1d.weight"][:, 0, j] * seen[len(seen) - W + j] for j in range(W)
            )
            u = u * sigmoid(u)
            z = sigmoid(weight["z_proj.weight"] @ u + weight["z_proj.bias"])
            a = weight["h_proj.weight"] @ u + weight["h_proj.bias"]
            candidate = torch.stack([c + 0.5 if c >= 0 else sigmoid(c) for c in a])
            h = (1 - z) * h + z * candidate
            outputs[b, t] = weight["o_proj.weight"] @ h
        ends.append(h)
        windows.append(torch.stack(seen[len(seen) - W + 1 :]) if W > 1 else state.window_BZD[b])
    return outputs, torch.stack(ends), torch.stack(windows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, 2, 140])
@pytest.mark.parametrize("conv", [1, 4])
def test_it_is_the_published_layer(T, conv, masked):
    module, x, state = build(conv), normal(3, T, D), warm(3, conv)
    reset, pad = masks(3, T) if masked else torch.zeros(2, 3, T, dtype=torch.bool)
    y, end, aux = module(x, state, reset_BT=reset if masked else None, pad_BT=pad if masked else None)
    assert aux == {} and (not masked or T < 9 or (reset & pad).any())
    found = y.masked_fill(pad[:, :, None], 0), end.hidden_BI, end.window_BZD
    for a, b in zip(found, plain(module, x, state, reset, pad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_its_gradients_are_those_of_the_published_layer(masked):
    module, x, state = build(), normal(2, 40, D).requires_grad_(), warm(2)
    reset, pad = masks(2, 40) if masked else torch.zeros(2, 2, 40, dtype=torch.bool)
    wanted = {"x": x, "hidden": state.hidden_BI.requires_grad_(), "window": state.window_BZD.requires_grad_()}
    wanted |= dict(module.named_parameters())
    y, end, _ = module(x, state, reset_BT=reset, pad_BT=pad)
    whole = (y.masked_fill(pad[:, :, None], 0), end.hidden_BI, end.window_BZD)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(parts)),
            list(wanted.values()),
        )
        for parts in (whole, plain(module, x, state, reset, pad))
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=name)


@torch.no_grad()
def test_a_gate_of_1_keeps_the_candidate_alone_and_one_of_0_the_state():
    module, x, state = build(), normal(2, 20, D), warm(2)
    module.z_proj.weight.zero_()
    module.z_proj.bias.fill_(1000)
    y, end, _ = module(x, state)
    other, _, _ = module(x, MinGRUState(state.hidden_BI + 1, state.window_BZD))
    assert torch.equal(y, other)
    module.z_proj.bias.fill_(-1000)
    y, end, _ = module(x, state)
    assert torch.equal(end.hidden_BI, state.hidden_BI)
    torch.testing.assert_close(y, module.o_proj(state.hidden_BI)[:, None].expand_as(y))


def test_it_starts_at_gates_of_a_half():
    config = ModelConfig("mingru", 11, 64, (BlockConfig(MinGRUConfig(), None),))
    mixer, other = (perspectron.build(config, seed).blocks[0].mixer for seed in (0, 1))
    for projection in (mixer.z_proj, mixer.h_proj):
        assert not projection.bias.any() and abs(projection.weight.std() * 64**0.5 - 1) < 0.05
    assert abs(mixer.o_proj.weight.std() * 256**0.5 - 1) < 0.05
    assert 0.45 < mixer.conv1d.weight.max() <= 0.5 and -0.5 <= mixer.conv1d.weight.min() < -0.45
    assert not torch.equal(mixer.conv1d.weight, other.conv1d.weight)


@pytest.mark.parametrize(("expand", "conv"), [(2, 4), (1, 3)])
def test_parameters_and_state_are_as_large_as_said(expand, conv):
    with torch.device("meta"):
        module = MinGRU(96, 1e-6, MinGRUConfig(expand, conv))
    inner = expand * 96
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == 3 * 96 * inner + 2 * inner + 96 * (conv + 1)
    start = module.init_state(3, torch.get_default_device(), torch.bfloat16)
    assert start.hidden_BI.shape == (3, inner) and start.window_BZD.shape == (3, conv - 1, 96)
    assert all(part.dtype == torch.float32 and not part.any() for part in (start.hidden_BI, start.window_BZD))


@pytest.mark.parametrize("field", ["expand", "conv"])
def test_a_wrong_config_says_which_field(field):
    with refused(ConfigError, field, 0):
        MinGRUConfig(**{field: 0})
