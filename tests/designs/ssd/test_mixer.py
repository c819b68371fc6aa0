"""The state-space dual as a module: the published layer as a plain recurrence and as transformers has it, the
convolution's window, its start, its size.

Shapes: B batch, T time, D model width, I inner width, H heads, P head width, N state rows, C channels of the
convolution, W its width.
"""

import math

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

import perspectron
from perspectron.designs.ssd.mixer import SSD, SSDConfig, SSDState
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.ops.conv import convolve
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, P, N = 12, 6, 5
INNER, H = 24, 4
C = INNER + 2 * N


@torch.no_grad()
def build(seed: int = 0, conv: int = 4, size: float = 1.0) -> SSD:
    """Every parameter at random; gates from almost 0 to almost 1."""
    module = SSD(D, 1e-5, SSDConfig(P, N, conv=conv)).double()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if name.endswith("_proj.weight") else 1.0
        parameter.normal_(0, size * scale, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warm(B: int, conv: int = 4) -> SSDState:
    return SSDState(normal(B, H, N, P, seed=8), normal(B, conv - 1, C, seed=9))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def plain(module: SSD, x_BTD: Tensor, state: SSDState) -> tuple[Tensor, Tensor, Tensor]:
    """Mamba-2's layer (Dao & Gu 2024, §7), one row, one token and one head at a time."""
    weight, W = dict(module.named_parameters()), module.config.conv
    rows, memories, windows = [], [], []
    for x_TD, memory_HNP, window_ZC in zip(x_BTD, state.memory_BHNP, state.window_BZC, strict=True):
        outputs, memory, window = [], list(memory_HNP), list(window_ZC)
        for x_D in x_TD:
            projected = weight["in_proj.weight"] @ x_D
            z, delta = projected[:INNER], projected[INNER + C :]
            window.append(projected[INNER : INNER + C])
            u = weight["conv1d.bias"] + sum(
                weight["conv1d.weight"][:, 0, j] * window[len(window) - W + j] for j in range(W)
            )
            u = u * sigmoid(u)
            k, q = u[INNER : INNER + N], u[INNER + N :]
            delta = torch.log(1 + torch.exp(delta + weight["dt_bias"]))
            heads = []
            for h in range(H):
                v = u[h * P : (h + 1) * P]
                a = torch.exp(-delta[h] * torch.exp(weight["A_log"][h]))
                memory[h] = a * memory[h] + torch.outer(delta[h] * k, v)
                heads.append(memory[h].T @ q + weight["D"][h] * v)
            y = torch.cat(heads) * z * sigmoid(z)
            y = y / torch.sqrt((y * y).mean() + 1e-5) * weight["norm.weight"]
            outputs.append(weight["o_proj.weight"] @ y)
        rows.append(torch.stack(outputs))
        memories.append(torch.stack(memory))
        windows.append(torch.stack(window[len(window) - W + 1 :]) if W > 1 else window_ZC)
    return torch.stack(rows), torch.stack(memories), torch.stack(windows)


@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize("conv", [1, 2, 4])
def test_it_is_the_published_layer(T, conv):
    module, x, state = build(conv=conv), normal(2, T, D), warm(2, conv)
    y, end, aux = module(x, state)
    assert aux == {}
    for a, b in zip((y, end.memory_BHNP, end.window_BZC), plain(module, x, state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_its_gradients_are_those_of_the_published_layer():
    module, x, state = build(), normal(2, 70, D).requires_grad_(), warm(2)
    wanted = {
        "x": x,
        "memory": state.memory_BHNP.requires_grad_(),
        "window": state.window_BZC.requires_grad_(),
    }
    wanted |= dict(module.named_parameters())
    y, end, _ = module(x, state)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(parts)),
            list(wanted.values()),
        )
        for parts in ((y, end.memory_BHNP, end.window_BZC), plain(module, x, state))
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_it_is_mamba_2_as_transformers_has_it():
    """From an empty state, with the weights of one loaded into the other."""
    module = build().float()
    config = Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=P, state_size=N, n_groups=1, conv_kernel=4, expand=2,
        layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True, chunk_size=16, num_hidden_layers=1,
        time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    weights = {name.replace("o_proj", "out_proj"): value for name, value in module.state_dict().items()}
    theirs.load_state_dict(weights)
    x = normal(2, 70, D).float()
    y, _, _ = module(x, module.init_state(2, torch.get_default_device(), torch.float32))
    torch.testing.assert_close(y, theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounds", [(0.0, None), (0.3, 0.9)])
def test_groups_biases_and_bounds_are_as_transformers_has_them(bounds):
    low, high = bounds
    options = SSDConfig(P, N, groups=2, bias=True, conv_bias=False, conv=3, dt_min=low, dt_max=high)
    module = redrawn(SSD(D, 1e-5, options)).float()
    config = Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=P, state_size=N, n_groups=2, conv_kernel=3, expand=2,
        layer_norm_epsilon=1e-5, use_bias=True, use_conv_bias=False, chunk_size=16, num_hidden_layers=1,
        time_step_limit=(low, float("inf") if high is None else high),
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0).eval()
    weights = {name.replace("o_proj", "out_proj"): value for name, value in module.state_dict().items()}
    theirs.load_state_dict(weights)
    x = normal(2, 70, D).float()
    with torch.no_grad():
        torch.testing.assert_close(module(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def redrawn(module: SSD) -> SSD:
    module = module.double()
    draw = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0, generator=draw)
    return module.to(torch.get_default_device())


@torch.no_grad()
def test_each_group_is_a_mixer_of_its_own():
    """With a norm before the gate, after it or none, and any inner width."""
    for norm in ("after", "before", "none"):
        whole = redrawn(SSD(D, 1e-5, SSDConfig(P, N, heads=6, groups=2, norm=norm)))
        (inner, channels, _), part, x = whole.split, 3 * P, normal(2, 20, D)
        sums = torch.zeros_like(x)
        for g in range(2):
            one = SSD(D, 1e-5, SSDConfig(P, N, heads=3, norm=norm)).double()
            mine = torch.arange(part) + g * part
            conv = torch.cat([mine, inner + N * g + torch.arange(N), inner + N * (2 + g) + torch.arange(N)])
            rows = torch.cat([mine, inner + conv, inner + channels + 3 * g + torch.arange(3)])
            weights = dict(whole.state_dict())
            weights["in_proj.weight"] = weights["in_proj.weight"][rows]
            for name in ("conv1d.weight", "conv1d.bias"):
                weights[name] = weights[name][conv]
            for name in ("dt_bias", "A_log", "D"):
                weights[name] = weights[name][3 * g : 3 * g + 3]
            if norm != "none":
                weights["norm.weight"] = weights["norm.weight"][mine]
            weights["o_proj.weight"] = weights["o_proj.weight"][:, mine]
            one.load_state_dict(weights)
            sums += one(x)[0]
        torch.testing.assert_close(whole(x)[0], sums, rtol=1e-12, atol=1e-12)


def test_the_norm_is_before_the_gate_where_the_config_says_so():
    before, none = (SSD(D, 1e-5, SSDConfig(P, N, norm=norm)).double() for norm in ("before", "none"))
    redrawn(before)
    none.load_state_dict({k: v for k, v in before.state_dict().items() if k != "norm.weight"})
    outputs = []
    for module in (before, none):
        module.o_proj = torch.nn.Identity()
        outputs.append(module(normal(2, 20, D))[0])
    z = before.in_proj(normal(2, 20, D))[..., :INNER]
    bare = outputs[1] / torch.nn.functional.silu(z)
    expected = bare / torch.sqrt(bare.square().mean(-1, keepdim=True) + 1e-5) * before.norm.weight
    torch.testing.assert_close(outputs[0], expected * torch.nn.functional.silu(z), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the convolution


def literal(
    u_BTC: Tensor, window_BZC: Tensor, weight_C1W: Tensor, bias_C: Tensor, reset_BT: Tensor, pad_BT: Tensor,
    swish: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token, from a list of what the document has given so far; padding's outputs are zeros."""
    (B, T, _), W = u_BTC.shape, weight_C1W.shape[-1]
    rows, windows = [], []
    for b in range(B):
        seen, outputs = list(window_BZC[b]), []
        for t in range(T):
            if reset_BT[b, t]:
                seen = [torch.zeros_like(bias_C)] * (W - 1)
            if pad_BT[b, t]:
                outputs.append(torch.zeros_like(bias_C))
                continue
            seen.append(u_BTC[b, t])
            y = bias_C + sum(weight_C1W[:, 0, j] * seen[len(seen) - W + j] for j in range(W))
            outputs.append(y * sigmoid(y) if swish else y)
        rows.append(torch.stack(outputs))
        windows.append(torch.stack(seen[len(seen) - W + 1 :]) if W > 1 else window_BZC[b])
    return torch.stack(rows), torch.stack(windows)


def masks(B: int, T: int) -> tuple[Tensor, Tensor]:
    """Documents and padding anywhere; a row of padding alone, one that begins a document in it, one without."""
    draw = torch.Generator().manual_seed(3)
    reset, pad = (torch.rand(B, T, generator=draw) < p for p in (0.15, 0.4))
    pad[0], reset[0] = True, False
    pad[1], reset[1] = True, False
    reset[1, T // 2] = True
    pad[2], reset[2] = False, False
    reset[3, :3] = True
    return reset, pad


every_mask = pytest.mark.parametrize("use", ["neither", "reset", "pad", "both"])


def chosen(use: str, B: int, T: int) -> tuple[Tensor | None, Tensor | None]:
    reset, pad = masks(B, T)
    return reset if use in ("reset", "both") else None, pad if use in ("pad", "both") else None


@every_mask
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("swish", [True, False])
def test_the_convolution_sees_its_own_documents_last_tokens(use, W, T, swish):
    B, width = 5, 3
    u, window, weight, bias = (
        normal(B, T, width),
        normal(B, W - 1, width, seed=2),
        normal(width, 1, W),
        normal(width),
    )
    reset, pad = chosen(use, B, T)
    none = torch.zeros(B, T, dtype=torch.bool)
    expected, end = literal(u, window, weight, bias, *(none if m is None else m for m in (reset, pad)), swish)
    y, after = convolve(u, window, weight, bias, reset, pad, swish=swish)
    keep = ~none if pad is None else ~pad
    torch.testing.assert_close(y[keep], expected[keep], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, end, rtol=1e-12, atol=1e-12)


@every_mask
@pytest.mark.parametrize("split", [1, 2, 3, 20, 39])
def test_the_window_carries_over_any_split(use, split):
    B, T, width, W = 5, 40, 3, 4
    u, window, weight, bias = (
        normal(B, T, width),
        normal(B, W - 1, width, seed=2),
        normal(width, 1, W),
        normal(width),
    )
    reset, pad = chosen(use, B, T)
    whole, end = convolve(u, window, weight, bias, reset, pad)
    parts = []
    for part in (slice(0, split), slice(split, T)):
        some = (None if mask is None else mask[:, part] for mask in (reset, pad))
        y, window = convolve(u[:, part], window, weight, bias, *some)
        parts.append(y)
    keep = torch.ones(B, T, dtype=torch.bool) if pad is None else ~pad
    torch.testing.assert_close(torch.cat(parts, 1)[keep], whole[keep], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(window, end, rtol=1e-12, atol=1e-12)


@every_mask
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("swish", [True, False])
def test_gradients_of_the_convolution(use, T, swish):
    B, width, W = 5, 3, 4
    tensors = [normal(B, T, width), normal(B, W - 1, width, seed=2), normal(width, 1, W), normal(width)]
    for tensor in tensors:
        tensor.requires_grad_()
    reset, pad = chosen(use, B, T)
    none = torch.zeros(B, T, dtype=torch.bool)
    keep = ~none if pad is None else ~pad

    def gradients(y: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        loss = (y * normal(B, T, width, seed=4))[keep].sum() + (
            window * normal(B, W - 1, width, seed=5)
        ).sum()
        return torch.autograd.grad(loss, tensors)

    fast = gradients(*convolve(*tensors, reset, pad, swish=swish))
    slow = gradients(*literal(*tensors, *(none if mask is None else mask for mask in (reset, pad)), swish))
    for a, b in zip(fast, slow, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_second_derivatives_are_an_error_not_a_silent_zero():
    u = normal(1, 20, 3).requires_grad_()
    y, _ = convolve(u, normal(1, 3, 3), normal(3, 1, 4), normal(3), None, None)
    (gradient,) = torch.autograd.grad(y.square().sum(), u, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + u.sum(), u)


# ---------------------------------------------------------------- start, size, errors


def test_it_starts_as_published():
    config = ModelConfig("ssd", 11, 512, (BlockConfig(SSDConfig(head_dim=2, state=8), None),))
    mixer, again, other = (perspectron.build(config, seed).blocks[0].mixer for seed in (0, 0, 1))
    A, step = mixer.A_log.detach().exp(), torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert 1 <= A.min() < 1.3 and 15.7 < A.max() <= 16.001 and abs(float(A.mean()) - 8.5) < 0.6
    assert 0.00099 < step.min() < 0.0012 and 0.085 < step.max() < 0.1001
    assert abs(float(step.log().mean()) - (math.log(0.001) + math.log(0.1)) / 2) < 0.2
    assert (mixer.D == 1).all()
    assert 0.45 < mixer.conv1d.weight.max() <= 0.5 and -0.5 <= mixer.conv1d.weight.min() < -0.45
    assert 0.45 < mixer.conv1d.bias.max() <= 0.5 and -0.5 <= mixer.conv1d.bias.min() < -0.45
    for (name, a), b, c in zip(mixer.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert name in ("D", "norm.weight") or not torch.equal(a, c)


@pytest.mark.parametrize(
    ("d_model", "head_dim", "state", "expand", "conv"), [(384, 64, 64, 2, 4), (96, 16, 32, 1, 3)]
)
def test_parameters_and_state_are_as_large_as_said(d_model, head_dim, state, expand, conv):
    with torch.device("meta"):
        module = SSD(d_model, 1e-6, SSDConfig(head_dim, state, expand, conv))
    inner = expand * d_model
    heads, channels = inner // head_dim, inner + 2 * state
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == d_model * (3 * inner + 2 * state + heads) + channels * (conv + 1) + 3 * heads + inner
    start = module.init_state(3, torch.get_default_device(), torch.bfloat16)
    assert start.memory_BHNP.shape == (3, heads, state, head_dim)
    assert start.window_BZC.shape == (3, conv - 1, channels)
    assert all(
        part.dtype == torch.float32 and not part.any() for part in (start.memory_BHNP, start.window_BZC)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 70])
def test_half_precision_follows_float64(dtype, T):
    module, x, state = build(size=0.7), normal(2, T, D), warm(2)
    exact, _, _ = module(x, state)
    single = SSDState(state.memory_BHNP.float(), state.window_BZC.float())
    y, after, _ = module.to(dtype)(x.to(dtype), single)
    assert y.dtype == dtype
    assert after.memory_BHNP.dtype == after.window_BZC.dtype == torch.float32
    assert (y - exact).norm() < 0.05 * exact.norm()


def test_gates_are_not_rounded_to_16_bits():
    module = build().bfloat16()
    with torch.no_grad():
        module.init_weights(torch.Generator().manual_seed(0))
        start = SSDState(*(part.float() for part in (warm(2).memory_BHNP, torch.zeros(2, 3, C))))
        module.conv1d.bias.zero_()  # then nothing is written
        after = module(torch.zeros(2, 100, D, dtype=torch.bfloat16), start)[1].memory_BHNP
        step = torch.log1p(module.dt_bias.double().exp())
        gate_H = torch.exp(-100 * step * module.A_log.double().exp())
    expected = start.memory_BHNP * gate_H.float()[:, None, None]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=0)


def test_huge_values_in_padding_do_no_harm_in_float32():
    module, pad = build().float(), torch.zeros(2, 70, dtype=torch.bool)
    pad[0, 30:50] = pad[1, 60:] = True
    outputs = []
    for fill in (0.0, 1e30):
        x = normal(2, 70, D).float().masked_fill(pad[:, :, None], fill)
        start = SSDState(warm(2).memory_BHNP.float(), warm(2).window_BZC.float())
        outputs.append(module(x, start, pad_BT=pad))
    assert outputs[1][0].isfinite().all()
    assert torch.equal(outputs[0][0][~pad], outputs[1][0][~pad])
    assert torch.equal(outputs[0][1].memory_BHNP, outputs[1][1].memory_BHNP)
    assert torch.equal(outputs[0][1].window_BZC, outputs[1][1].window_BZC)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"head_dim": 0, "state": 4}, ["head_dim", 0]),
        ({"head_dim": 4, "state": 0}, ["state", 0]),
        ({"head_dim": 4, "state": 4, "expand": 0}, ["expand", 0]),
        ({"head_dim": 4, "state": 4, "conv": 0}, ["conv", 0]),
        ({"head_dim": 4, "state": 4, "groups": 4}, ["groups", 4]),
        ({"head_dim": 4, "state": 4, "dt_min": 1.0, "dt_max": 0.5}, ["dt_max"]),
        ({"head_dim": 4, "state": 4, "norm": "x"}, ["norm", "x"]),
        ({"head_dim": 5, "state": 4}, ["head_dim", 5]),
    ],
)
def test_a_wrong_config_says_which_field(fields, named):
    with refused(ConfigError, *named):
        SSD(D, 1e-6, SSDConfig(**fields))
