"""Full attention against its definition, with rotary positions and as in GPT-2.

Shapes: B batch, T time, D model width, H heads, K head width.
"""

import pytest
import torch
from torch import Tensor

from perspectron.designs.transformer.attention import Attention, AttentionConfig
from perspectron.util.errors import ConfigError

D, H = 16, 2
K = D // H
FORMS = {
    "gpt2": AttentionConfig(H, rope_base=None, bias=True),
    "rope": AttentionConfig(H),
    "rope 100": AttentionConfig(H, rope_base=100.0, bias=True),
}
every_form = pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)


@torch.no_grad()
def build(config: AttentionConfig) -> Attention:
    module = Attention(D, 1e-6, config).to(torch.get_default_device(), torch.float64)
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, 1.5 * D**-0.5 if parameter.ndim > 1 else 1.0, generator=draw)
    return module


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def empty(module: Attention, B: int, capacity: int = 0):
    return module.init_state(B, torch.get_default_device(), torch.float64, capacity)


def turned(x_BHTK: Tensor, base: float | None) -> Tensor:
    """Rotary positions: coordinate pairs as complex numbers, turned by position × frequency."""
    if base is None:
        return x_BHTK
    half = K // 2
    frequency = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x_BHTK.shape[2])[:, None] * frequency
    z = torch.complex(x_BHTK[..., :half], x_BHTK[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def explicit(module: Attention, x_BTD: Tensor) -> Tensor:
    B, T, _ = x_BTD.shape
    q, k, v = (part.view(B, T, H, K).transpose(1, 2) for part in module.qkv_proj(x_BTD).split(D, -1))
    q, k = (turned(x, module.config.rope_base) for x in (q, k))
    scores = q @ k.mT / K**0.5
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    o = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
    return module.o_proj(o.transpose(1, 2).reshape(B, T, D))


@every_form
@pytest.mark.parametrize("T", [1, 2, 65])
def test_it_equals_its_definition_forward_and_backward(config, T):
    module, x = build(config), tokens(3, T).requires_grad_()
    found, expected = module(x, empty(module, 3))[0], explicit(module, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = [x, *module.parameters()]
    weighting = tokens(3, T, seed=2)
    pair = [torch.autograd.grad((y * weighting).sum(), wanted) for y in (found, expected)]
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_form
@pytest.mark.parametrize("cuts", [[], [1], [13], [5, 6, 14, 29], list(range(1, 30))], ids=str)
@pytest.mark.parametrize("capacity", [0, 40])
def test_pieces_of_packed_and_padded_documents_equal_each_alone(config, cuts, capacity):
    module, x = build(config), tokens(2, 30)
    reset, pad = (torch.zeros(2, 30, dtype=torch.bool) for _ in range(2))
    reset[0, 13], pad[1, :4], pad[1, 20:22] = True, True, True
    with torch.inference_mode():
        expected = torch.cat([explicit(module, x[:1, :13]), explicit(module, x[:1, 13:])], 1)[0]
        padded = explicit(module, x[1:, ~pad[1]])[0]
        state, outputs, start = empty(module, 2, capacity), [], 0
        for stop in [*cuts, 30]:
            part = slice(start, stop)
            y, state, _ = module(x[:, part], state, reset_BT=reset[:, part], pad_BT=pad[:, part])
            outputs.append(y)
            start = stop
    y = torch.cat(outputs, 1)
    torch.testing.assert_close(y[0], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(y[1, ~pad[1]], padded, rtol=1e-9, atol=1e-9)


def test_only_rotation_tells_tokens_of_the_past_apart():
    """Exchanging two earlier tokens changes the last output with rotary positions, and without them not at all."""
    x = tokens(1, 9)
    order = [0, 5, 2, 3, 4, 1, 6, 7, 8]
    for name, config in FORMS.items():
        module = build(config)
        a, b = (module(y, empty(module, 1))[0][:, -1] for y in (x, x[:, order]))
        assert ((a - b).abs().max() < 1e-12) == (name == "gpt2")


def test_biases_are_there_when_asked_for():
    for config in FORMS.values():
        names = {name for name, _ in Attention(D, 1e-6, config).named_parameters()}
        weights = {"qkv_proj.weight", "o_proj.weight"}
        assert names == (weights | {"qkv_proj.bias", "o_proj.bias"} if config.bias else weights)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 0}, "heads = 0, must be ≥ 1"),
        ({"heads": 3}, "heads = 3, must be a divisor of d_model / 2 = 8"),
        ({"heads": 16}, "heads = 16, must be a divisor of d_model / 2 = 8"),
        ({"heads": 3, "rope_base": None}, "heads = 3, must be a divisor of d_model = 16"),
        ({"heads": 2, "rope_base": 1.0}, "rope_base = 1.0, must be > 1"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ConfigError) as caught:
        Attention(D, 1e-6, AttentionConfig(**fields))
    assert str(caught.value) == message


def test_without_rotation_a_head_may_have_an_odd_width():
    module = Attention(D, 1e-6, AttentionConfig(16, rope_base=None)).to(
        torch.get_default_device(), torch.float64
    )
    assert module(tokens(1, 4), empty(module, 1))[0].shape == (1, 4, D)
