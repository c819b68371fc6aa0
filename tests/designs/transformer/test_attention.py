"""Attention against its definition, with every option.

Shapes: B batch, T time, D model width, H heads, G heads of keys and values, K head width.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from perspectron.designs.transformer.attention import Attention, AttentionConfig
from perspectron.ops import rope
from perspectron.ops.rope import RopeScaling
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H = 16, 4
LLAMA3 = RopeScaling("llama3", 4.0, 16)
FORMS = {
    "gpt2": AttentionConfig(H, rope_base=None, bias=True),
    "rope": AttentionConfig(2),
    "rope 100": AttentionConfig(H, rope_base=100.0, bias=True),
    "groups": AttentionConfig(H, kv_heads=2, head_dim=10, bias=True, out_bias=False),
    "one group": AttentionConfig(H, kv_heads=1, scale=0.3),
    "head norm": AttentionConfig(
        H, kv_heads=2, head_dim=10, qk_norm="head", rope_share=0.5, rope_scaling=LLAMA3
    ),
    "whole norm": AttentionConfig(H, kv_heads=2, qk_norm="all", rope_scaling=RopeScaling("yarn", 4.0, 16)),
    "gate": AttentionConfig(H, kv_heads=2, head_dim=10, gate="sigmoid", bias=True),
    "cap": AttentionConfig(H, kv_heads=2, cap=1.5, rope_scaling=RopeScaling("linear", 4.0)),
    "window": AttentionConfig(H, kv_heads=2, head_dim=10, window=5),
    "window, all": AttentionConfig(H, 1e4, True, 0.5, 2, 10, 5, LLAMA3, False, "head", 0.4, 2.0, "sigmoid"),
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


def turned(x_BHTK: Tensor, config: AttentionConfig) -> Tensor:
    """Rotary positions: coordinate pairs as complex numbers, turned by position × frequency."""
    if config.rope_base is None:
        return x_BHTK
    width = int(x_BHTK.shape[3] * config.rope_share)
    frequency = [config.rope_base ** (-i / width) for i in range(0, width, 2)]
    half, scaling = len(frequency), config.rope_scaling
    if scaling is not None:  # compared with transformers' own below
        frequency = scaling.scaled(torch.tensor(frequency, dtype=torch.float64), config.rope_base)
    angle = torch.arange(x_BHTK.shape[2])[:, None] * torch.as_tensor(frequency, dtype=torch.float64)
    turn = torch.polar(torch.full_like(angle, 1.0 if scaling is None else scaling.amplitude), angle)
    z = torch.complex(x_BHTK[..., :half], x_BHTK[..., half : 2 * half]) * turn
    return torch.cat([z.real, z.imag, x_BHTK[..., 2 * half :]], -1)


def normed(norm, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def explicit(module: Attention, x_BTD: Tensor) -> Tensor:
    """Token by token, head by head."""
    config, (B, T, _), K = module.config, x_BTD.shape, module.width
    G = config.kv_heads or config.heads
    q, k, v = module.qkv_proj(x_BTD).split([config.heads * K, G * K, G * K], -1)
    if config.qk_norm == "all":
        q, k = normed(module.q_norm, q), normed(module.k_norm, k)
    q, k, v = (x.view(B, T, -1, K).transpose(1, 2) for x in (q, k, v))
    if config.qk_norm == "head":
        q, k = normed(module.q_norm, q), normed(module.k_norm, k)
    q, k = (turned(x, config) for x in (q, k))
    heads = []
    for h in range(config.heads):
        g, rows = h * G // config.heads, []
        for t in range(T):
            first = 0 if config.window is None else max(0, t + 1 - config.window)
            scores = (k[:, g, first : t + 1] @ q[:, h, t, :, None])[..., 0] * (config.scale or K**-0.5)
            scores = scores if config.cap is None else config.cap * (scores / config.cap).tanh()
            rows.append((scores.softmax(-1)[..., None] * v[:, g, first : t + 1]).sum(1))
        heads.append(torch.stack(rows, 1))
    o = torch.cat(heads, -1)
    o = o * module.gate_proj(x_BTD).sigmoid() if config.gate == "sigmoid" else o
    return module.o_proj(o)


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


def test_the_parts_are_there_that_are_asked_for():
    for config in FORMS.values():
        names = {name for name, _ in Attention(D, 1e-6, config).named_parameters()}
        wanted = {"qkv_proj.weight", "o_proj.weight"}
        wanted |= {"q_norm.weight", "k_norm.weight"} if config.qk_norm != "none" else set()
        wanted |= {"gate_proj.weight"} if config.gate == "sigmoid" else set()
        wanted |= {f"{x}_proj.bias" for x in ("qkv", "gate") if config.bias and f"{x}_proj.weight" in wanted}
        wanted |= {"o_proj.bias"} if (config.bias if config.out_bias is None else config.out_bias) else set()
        assert names == wanted


@every_form
@pytest.mark.parametrize("tokens_read", [1, 63, 64, 65])
def test_chunks_and_steps_after_a_state_equal_one_reading(config, tokens_read):
    module, x = build(config), tokens(2, 37 + tokens_read)
    with torch.inference_mode():
        whole = module(x, empty(module, 2))[0]
        _, state, _ = module(x[:, :37], empty(module, 2))
        chunk, _, _ = module(x[:, 37:], state)
        steps = []
        for t in range(37, x.shape[1]):
            y, state, _ = module(x[:, t : t + 1], state, consume_state=True)
            steps.append(y)
    torch.testing.assert_close(chunk, whole[:, 37:], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 37:], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_two_widths_of_each_key_head_in_the_dtype_of_the_weights(dtype):
    config = FORMS["groups"]
    module = Attention(D, 1e-6, config).to(torch.get_default_device(), dtype)
    with torch.inference_mode():
        _, state, _ = module(tokens(1, 9).to(dtype), module.init_state(1, torch.get_default_device(), dtype))
    assert state.k_BHSK.nbytes + state.v_BHSV.nbytes == 9 * 2 * 2 * 10 * dtype.itemsize


def test_a_brief_cache_gives_every_split_the_numbers_of_one_reading():
    """Rounded once, where they are made; in float64 nothing else tells the two apart."""
    for window in (None, 5):
        module, x = build(AttentionConfig(H, kv_heads=2, window=window, cache="bfloat16")), tokens(2, 40)
        full = build(AttentionConfig(H, kv_heads=2, window=window))
        with torch.inference_mode():
            whole = module(x, empty(module, 2))[0]
            state, outputs = empty(module, 2), []
            for part in x.split([1, 4, 17, 1, 17], 1):
                y, state, _ = module(part, state, consume_state=True)
                outputs.append(y)
            apart = (whole - full(x, empty(full, 2))[0]).abs().max()
        torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-11, atol=1e-11)
        assert 1e-5 < apart < 0.1


SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, mscale": {
        "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.5, "mscale_all_dim": 0.7,
        "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn, factor": {"factor": 0.5, "original_max_position_embeddings": 16, "attention_factor": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("width", "share"), [(16, 1.0), (10, 1.0), (32, 0.25)])
def test_scaled_positions_are_those_of_transformers(name, width, share):
    kind, numbers = name.split(",")[0], SCALINGS[name]
    there = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, head_dim=width, max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 5e3, "partial_rotary_factor": share, **numbers},
    )  # fmt: skip
    frequency_F, amplitude = ROPE_INIT_FUNCTIONS[kind](there, torch.device("cpu"))
    at = torch.arange(40).view(1, 40)
    angle = at[:, :, None] * frequency_F.double()
    found = rope.angles(at, int(width * share), 5e3, RopeScaling(kind, **numbers))
    for one, other in zip(found, (angle.cos() * amplitude, angle.sin() * amplitude), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads": 0}, ["heads", 0]),
        ({"heads": 3}, ["heads", 3]),
        ({"heads": 4, "kv_heads": 3}, ["kv_heads", 3]),
        ({"heads": 4, "head_dim": 5}, ["head_dim", 5]),
        ({"heads": 4, "window": 0}, ["window", 0]),
        ({"heads": 4, "cap": 0.0}, ["cap"]),
        ({"heads": 16}, ["heads", 16]),
        ({"heads": 3, "rope_base": None}, ["heads", 3]),
        ({"heads": 2, "rope_base": 1.0}, ["rope_base"]),
    ],
)
def test_mistakes_are_named(fields, named):
    with refused(ConfigError, *named):
        Attention(D, 1e-6, AttentionConfig(**fields))


def test_without_rotation_a_head_may_have_an_odd_width():
    module = Attention(D, 1e-6, AttentionConfig(16, rope_base=None)).to(
        torch.get_default_device(), torch.float64
    )
    assert module(tokens(1, 4), empty(module, 1))[0].shape == (1, 4, D)
