"""Mixers by a gated delta rule as modules: the published layers as plain recurrences, how they follow from each other,
their start, their size.

Shapes: B batch, T time, D model width, H heads, K key width, V value width, C channels of the convolution, W its width.
"""

import math

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import perspectron
from perspectron.designs.delta.common import Delta, DeltaState
from perspectron.designs.delta.gdn import GDN, GDNConfig
from perspectron.designs.delta.gdn2 import GDN2, GDN2Config
from perspectron.designs.delta.kda import KDA, KDAConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.ops import delta
from perspectron.util.config import MixerConfig
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H = 16, 2
KINDS = {"gdn": (GDN, GDNConfig), "kda": (KDA, KDAConfig), "gdn2": (GDN2, GDN2Config)}
WIDTHS = {"gdn": (6, 12), "kda": (8, 8), "gdn2": (8, 8)}

every_kind = pytest.mark.parametrize("kind", KINDS)


@torch.no_grad()
def build(kind: str, conv: int = 4, negative: bool = False, size: float = 1.0) -> Delta:
    """Every parameter at random; gates from almost 0 to almost 1."""
    module, config = KINDS[kind]
    module = module(D, 1e-5, config(H, conv, negative)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, size, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warm(kind: str, B: int, conv: int = 4) -> DeltaState:
    K, V = WIDTHS[kind]
    return DeltaState(normal(B, H, K, V, seed=8), normal(B, conv - 1, H * (2 * K + V), seed=9))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def plain(kind: str, module: Delta, x_BTD: Tensor, state: DeltaState) -> tuple[Tensor, Tensor, Tensor]:
    """The layers as published, one row, one token and one head at a time."""
    weight, (K, V) = dict(module.named_parameters()), WIDTHS[kind]
    W, most = module.config.conv, 2.0 if module.config.negative else 1.0
    rows, memories, windows = [], [], []
    for x_TD, memory_HKV, window_ZC in zip(x_BTD, state.memory_BHKV, state.window_BZC, strict=True):
        outputs, memory, window = [], list(memory_HKV), list(window_ZC)
        for x in x_TD:
            window.append(weight["qkv_proj.weight"] @ x)
            u = sum(weight["conv1d.weight"][:, 0, j] * window[len(window) - W + j] for j in range(W))
            u = u * sigmoid(u)
            heads = []
            for h in range(H):
                q, k = u[h * K : (h + 1) * K], u[(H + h) * K : (H + h + 1) * K]
                v = u[2 * H * K + h * V : 2 * H * K + (h + 1) * V]
                q, k = (z / torch.sqrt((z * z).sum() + 1e-6) for z in (q, k))
                key, value = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
                if kind == "gdn":
                    f = weight["a_proj.weight"][h] @ x + weight["dt_bias"][h]
                else:
                    f = (
                        weight["f_proj.1.weight"][key] @ (weight["f_proj.0.weight"] @ x)
                        + weight["dt_bias"][key]
                    )
                alpha = torch.exp(-torch.exp(weight["A_log"][h]) * torch.log(1 + torch.exp(f)))
                if kind == "gdn2":
                    erase = most * sigmoid(weight["e_proj.weight"][key] @ x) * k
                    written = sigmoid(weight["w_proj.weight"][value] @ x) * v
                else:
                    beta = most * sigmoid(weight["b_proj.weight"][h] @ x)
                    erase, written = beta * k, beta * v
                faded = alpha[:, None] * memory[h] if kind != "gdn" else alpha * memory[h]
                memory[h] = faded + torch.outer(k, written - faded.T @ erase)
                o = memory[h].T @ q / math.sqrt(K)
                heads.append(o / torch.sqrt((o * o).mean() + 1e-5) * weight["norm.weight"])
            if kind == "gdn":
                g = weight["g_proj.weight"] @ x
            else:
                g = weight["g_proj.1.weight"] @ (weight["g_proj.0.weight"] @ x) + weight["g_proj.1.bias"]
            g = sigmoid(g) if kind == "kda" else g * sigmoid(g)
            outputs.append(weight["o_proj.weight"] @ (torch.cat(heads) * g))
        rows.append(torch.stack(outputs))
        memories.append(torch.stack(memory))
        windows.append(torch.stack(window[len(window) - W + 1 :]) if W > 1 else window_ZC)
    return torch.stack(rows), torch.stack(memories), torch.stack(windows)


@every_kind
@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize(("conv", "negative"), [(4, False), (4, True), (1, False)])
def test_it_is_the_published_layer(kind, T, conv, negative):
    module, x, state = build(kind, conv, negative), normal(2, T, D), warm(kind, 2, conv)
    y, end, aux = module(x, state)
    assert aux == {}
    expected = plain(kind, module, x, state)
    for a, b in zip((y, end.memory_BHKV, end.window_BZC), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_kind
def test_its_gradients_are_those_of_the_published_layer(kind):
    module, x, state = build(kind, size=0.5), normal(2, 70, D).requires_grad_(), warm(kind, 2)
    memory, window = state.memory_BHKV.requires_grad_(), state.window_BZC.requires_grad_()
    wanted = {"x": x, "memory": memory, "window": window} | dict(module.named_parameters())
    y, end, _ = module(x, state)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(parts)),
            list(wanted.values()),
        )
        for parts in ((y, end.memory_BHKV, end.window_BZC), plain(kind, module, x, state))
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


@torch.no_grad()
def test_it_is_gated_deltanet_as_transformers_has_it():
    """With fewer heads of keys than of values, and widths of their own."""
    sizes = {"key_heads": 2, "key_dim": 6, "value_dim": 10}
    module = GDN(D, 1e-5, GDNConfig(4, conv=3, **sizes)).float()
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0, generator=draw)
    config = Qwen3_5TextConfig(
        hidden_size=D, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=6,
        linear_value_head_dim=10, linear_conv_kernel_dim=3, rms_norm_eps=1e-5, num_hidden_layers=1,
    )  # fmt: skip
    theirs = Qwen3_5GatedDeltaNet(config, 0).eval()
    names = {"qkv_proj": "in_proj_qkv", "g_proj": "in_proj_z", "a_proj": "in_proj_a", "b_proj": "in_proj_b",
             "o_proj": "out_proj"}  # fmt: skip
    parts = {name: name.partition(".") for name in module.state_dict()}
    theirs.load_state_dict(
        {names.get(part, part) + dot + rest: module.state_dict()[name]
         for name, (part, dot, rest) in parts.items()}
    )  # fmt: skip
    x = normal(2, 70, D).float()
    torch.testing.assert_close(module(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


def test_key_heads_that_are_shared_are_key_heads_repeated():
    """In outputs, states and gradients."""
    shared = GDN(D, 1e-5, GDNConfig(4, key_heads=2, key_dim=6, value_dim=10)).double()
    each = GDN(D, 1e-5, GDNConfig(4, key_dim=6, value_dim=10)).double()
    rows = torch.arange(24).view(2, 2, 6).repeat_interleave(2, 1).flatten()
    rows = torch.cat([rows, torch.arange(24, 64)])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.normal_(0, 0.5, generator=draw)
        weights = dict(shared.state_dict())
        for name in ("qkv_proj.weight", "conv1d.weight"):
            weights[name] = weights[name][rows]
        each.load_state_dict(weights)
    x = normal(2, 70, D)
    (y, after, _), (expected, end, _) = shared(x), each(x)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(after.memory_BHKV, end.memory_BHKV, rtol=1e-11, atol=1e-11)
    for out in (y, expected):
        (out * normal(2, 70, D, seed=4)).sum().backward()
    for name in ("qkv_proj.weight", "conv1d.weight"):
        one, many = (dict(module.named_parameters())[name].grad for module in (shared, each))
        summed = torch.zeros_like(one).index_add_(0, rows, many)
        torch.testing.assert_close(one, summed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"key_heads": 3}, ["key_heads", 3]),
        ({"key_heads": 0}, ["key_heads", 0]),
        ({"key_dim": 0}, ["key_dim", 0]),
        ({"value_dim": -1}, ["value_dim", -1]),
    ],
)
def test_heads_that_do_not_fit_are_named(fields, named):
    with refused(ConfigError, *named):
        GDNConfig(4, **fields)


# ---------------------------------------------------------------- how they follow from each other


@torch.no_grad()
def test_one_gate_for_erasing_and_writing_is_kimi_delta_attention():
    one, other = build("kda", size=0.5), build("gdn2", size=0.5)
    weights = {name: weight for name, weight in one.state_dict().items() if name != "b_proj.weight"}
    for name in ("e_proj.weight", "w_proj.weight"):
        weights[name] = one.b_proj.weight.repeat_interleave(D // H, 0)
    other.load_state_dict(weights)
    x, state = normal(2, 70, D), warm("kda", 2)
    expected, found = (module(x, state)[1] for module in (one, other))
    torch.testing.assert_close(found.memory_BHKV, expected.memory_BHKV, rtol=1e-12, atol=1e-12)


def test_one_gate_for_all_channels_is_the_gated_delta_rule():
    q, k, e, v = (normal(2, 3, 70, width, seed=i) for i, width in enumerate((5, 5, 5, 4)))
    k = torch.nn.functional.normalize(k, dim=-1)
    alpha, state = torch.sigmoid(normal(2, 3, 70, 1)), normal(2, 3, 5, 4)
    alpha[:, :, 20] = 0
    alpha[:, :, 30] = 1
    one = delta.scan(q, k, torch.sigmoid(e) * k, v, alpha, state)
    for a, b in zip(one, delta.scan(q, k, torch.sigmoid(e) * k, v, alpha.expand_as(q), state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@every_kind
def test_without_decay_and_with_full_gates_it_holds_the_last_value_of_each_key(kind):
    """A token's first numbers say which key it has, orthonormal ones; its others are its value's."""
    K, V = WIDTHS[kind]
    module = build(kind)
    keys = torch.zeros(K, D, dtype=torch.float64)
    keys[range(K), range(K)] = 30.0  # swish is then 30, and the key a unit vector to 1e-9
    values = normal(V, D, seed=4).abs()
    module.qkv_proj.weight.copy_(torch.cat([keys.repeat(H, 1), keys.repeat(H, 1), values.repeat(H, 1)]))
    module.conv1d.weight.zero_()
    module.conv1d.weight[..., -1] = 1
    module.A_log.fill_(-torch.inf)
    for name, weight in module.named_parameters():
        if name.split(".")[0] in ("b_proj", "e_proj", "w_proj"):
            weight.fill_(1e3)
    which = torch.randint(K, (1, 100), generator=torch.Generator().manual_seed(0))
    x = torch.zeros(1, 100, D, dtype=torch.float64)
    x.scatter_(2, which[..., None], 1.0)
    x[..., K:] = normal(1, 100, D - K, seed=5).abs()  # what the values read beside the key
    memory = module(x, module.init_state(1, torch.get_default_device(), torch.float64))[1].memory_BHKV
    u = x @ values.T
    u = u * torch.sigmoid(u)
    for i in range(K):
        last = u[0, (which[0] == i).nonzero().max()]
        for h in range(H):
            torch.testing.assert_close(memory[0, h, i], last, rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- start, size, errors


def started(config: MixerConfig, seed: int = 0) -> Delta:
    model = ModelConfig("one block", 11, 512, (BlockConfig(config, None),))
    return perspectron.build(model, seed).blocks[0].mixer


@pytest.mark.parametrize(
    ("config", "rates"), [(GDNConfig(128), (0, 16)), (KDAConfig(128), (1, 16)), (GDN2Config(128), (1, 16))]
)
def test_it_starts_as_published(config, rates):
    mixer, again, other = started(config), started(config), started(config, 1)
    rate, step = mixer.A_log.detach().exp(), torch.nn.functional.softplus(mixer.dt_bias.detach())
    low, high = rates
    assert low <= rate.min() < low + 0.5 and high - 0.5 < rate.max() <= high + 0.001
    assert abs(float(rate.mean()) - (low + high) / 2) < 1.5
    assert 0.00099 < step.min() < 0.0013 and 0.08 < step.max() < 0.1001
    assert abs(float(step.log().mean()) - (math.log(0.001) + math.log(0.1)) / 2) < 0.3
    assert 0.45 < mixer.conv1d.weight.max() <= 0.5 and -0.5 <= mixer.conv1d.weight.min() < -0.45
    for (name, a), b, c in zip(mixer.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "bias" in name or name == "norm.weight" or not torch.equal(a, c)


@pytest.mark.parametrize(("d_model", "heads", "conv"), [(384, 6, 4), (128, 4, 3)])
@every_kind
def test_parameters_and_state_are_as_large_as_said(kind, d_model, heads, conv):
    module, config = KINDS[kind]
    with torch.device("meta"):
        module = module(d_model, 1e-6, config(heads, conv))
    K = d_model // heads if kind != "gdn" else 3 * d_model // (4 * heads)
    V = 2 * K if kind == "gdn" else K
    C = heads * (2 * K + V)
    count = d_model * C + C * conv + heads + V + heads * V * d_model
    if kind == "gdn":
        count += d_model * (2 * heads + heads * V) + heads
        assert abs(count / d_model**2 - 6) < 0.2
    else:
        count += 4 * d_model * K + 2 * d_model
        count += d_model * heads if kind == "kda" else 2 * d_model**2
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    start = module.init_state(3, torch.get_default_device(), torch.bfloat16)
    assert start.memory_BHKV.shape == (3, heads, K, V) and start.window_BZC.shape == (3, conv - 1, C)
    for part in (start.memory_BHKV, start.window_BZC):
        assert part.dtype == torch.float32 and not part.any()


@every_kind
def test_gates_are_not_rounded_to_16_bits(kind):
    module = build(kind).bfloat16()
    with torch.no_grad():
        module.init_weights(torch.Generator().manual_seed(0))
        memory = warm(kind, 2).memory_BHKV.float()
        window = torch.zeros(2, 3, module.qkv_proj.out_features)
        after = module(torch.zeros(2, 100, D, dtype=torch.bfloat16), DeltaState(memory, window))[
            1
        ].memory_BHKV
        step = torch.log1p(module.dt_bias.double().exp()).unflatten(0, (H, -1))
        alpha = torch.exp(-100 * step * module.A_log.double().exp()[:, None])
    torch.testing.assert_close(after, memory * alpha.float()[:, :, None], rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: GDNConfig(0), ["heads", 0]),
        (lambda: KDAConfig(2, conv=0), ["conv", 0]),
        (lambda: GDN(D, 1e-6, GDNConfig(5)), ["heads", 5]),
        (lambda: KDA(D, 1e-6, KDAConfig(3)), ["heads", 3]),
        (lambda: GDN2(D, 1e-6, GDN2Config(3)), ["heads", 3]),
    ],
)
def test_a_wrong_config_says_which_field(config, named):
    with refused(ConfigError, *named):
        config()
