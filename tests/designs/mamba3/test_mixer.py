"""Mamba-3 as a module: the published step as a plain loop, with documents and padding, what it tells apart, its start,
its size.

Shapes: B batch, T time, D model width, I inner width, H heads, P head width, N state rows, F = N/4 angles.
"""

import math

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron.designs.mamba3.mixer import Mamba3, Mamba3Config, Mamba3State
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.ops import gla
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, P, N, H = 12, 6, 8, 4
INNER, EPS = 24, 1e-5
PARTS = (INNER, INNER, N, N, H, H, H, N // 4)


@torch.no_grad()
def build(size: float = 1.0) -> Mamba3:
    """Every parameter at random; gates from almost 0 to almost 1, steps that turn by more than a circle."""
    module = Mamba3(D, EPS, Mamba3Config(P, N)).to(torch.get_default_device(), torch.float64)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if name.endswith("_proj.weight") else 1.0
        parameter.normal_(0, size * scale, generator=draw)
    return module


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def empty(module: Mamba3, B: int, dtype: torch.dtype = torch.float64) -> Mamba3State:
    return module.init_state(B, torch.get_default_device(), dtype)


def warm(B: int) -> Mamba3State:
    angle = normal(B, H, N // 4, seed=9) % math.tau
    return Mamba3State(normal(B, H, N, P, seed=8), angle, normal(B, H, N, seed=10), normal(B, H, P, seed=11))


def parts(state: Mamba3State) -> tuple[Tensor, ...]:
    """Angles as points of the circle: 0 and 2π are the same."""
    angle = torch.stack([state.angle_BHF.cos(), state.angle_BHF.sin()])
    return state.memory_BHNP, angle, state.key_BHN, state.input_BHP


def masks(B: int, T: int) -> tuple[Tensor, Tensor]:
    """Documents and padding anywhere, also documents that begin in padding, and a row that ends with one."""
    draw = torch.Generator().manual_seed(3)
    reset, pad = (torch.rand(B, T, generator=draw) < p for p in (0.15, 0.3))
    if T > 4:
        pad[0, -3:], reset[0, -3:] = True, torch.tensor([False, True, False])
    return reset, pad


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


def turned(x_N: Tensor, angle_F: Tensor) -> Tensor:
    """Pairs as complex numbers times e^iΦ."""
    pairs = x_N[: 2 * len(angle_F)].view(-1, 2)
    product = torch.complex(pairs[:, 0], pairs[:, 1]) * torch.polar(torch.ones_like(angle_F), angle_F)
    return torch.cat([torch.view_as_real(product).flatten(), x_N[2 * len(angle_F) :]])


def plain(module: Mamba3, x_BTD: Tensor, state: Mamba3State, reset_BT: Tensor, pad_BT: Tensor):
    """Mamba-3's step (arXiv 2603.15569), one row, one token and one head at a time; outputs at padding are zeros."""
    weight, outputs, rows = dict(module.named_parameters()), torch.zeros_like(x_BTD), []
    for b, x_TD in enumerate(x_BTD):
        memory, angle, key, value = (list(part[b]) for part in vars(state).values())
        for t, x_D in enumerate(x_TD):
            if reset_BT[b, t]:
                memory, angle, key, value = (
                    [torch.zeros_like(one) for one in part] for part in (memory, angle, key, value)
                )
            if pad_BT[b, t]:
                continue
            z, v, k, q, delta, rate, mix, theta = (weight["in_proj.weight"] @ x_D).split(PARTS)
            k = k / torch.sqrt((k * k).mean() + EPS) * weight["b_norm.weight"]
            q = q / torch.sqrt((q * q).mean() + EPS) * weight["c_norm.weight"]
            heads = []
            for h in range(H):
                step = softplus(delta[h] + weight["dt_bias"][h])
                fade = torch.exp(step * torch.clamp(-softplus(rate[h]), max=-1e-4))
                share = sigmoid(mix[h])
                angle[h] = angle[h] + step * math.pi * torch.tanh(theta)
                new_key = turned(k + weight["b_bias"][h], angle[h])
                query = turned(q + weight["c_bias"][h], angle[h])
                new_value = v[h * P : (h + 1) * P]
                memory[h] = (
                    fade * memory[h]
                    + (1 - share) * step * fade * torch.outer(key[h], value[h])
                    + share * step * torch.outer(new_key, new_value)
                )
                key[h], value[h] = new_key, new_value
                heads.append(memory[h].T @ query + weight["D"][h] * new_value)
            outputs[b, t] = weight["o_proj.weight"] @ (torch.cat(heads) * z * sigmoid(z))
        rows.append([torch.stack(part) for part in (memory, angle, key, value)])
    return outputs, Mamba3State(*(torch.stack(part) for part in zip(*rows, strict=True)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 140])
def test_it_is_the_published_layer(T, masked):
    module, x, state = build(), normal(3, T, D), warm(3)
    reset, pad = masks(3, T) if masked else torch.zeros(2, 3, T, dtype=torch.bool)
    y, end, aux = module(x, state, reset_BT=reset if masked else None, pad_BT=pad if masked else None)
    assert aux == {} and (not masked or T < 9 or (reset & pad).any())
    assert end.angle_BHF.min() >= 0 and end.angle_BHF.max() < math.tau
    expected, expected_end = plain(module, x, state, reset, pad)
    found = y.masked_fill(pad[:, :, None], 0), *parts(end)
    for a, b in zip(found, (expected, *parts(expected_end)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
def test_its_gradients_are_those_of_the_published_layer(masked):
    module, x, state = build(), normal(2, 70, D).requires_grad_(), warm(2)
    reset, pad = masks(2, 70) if masked else torch.zeros(2, 2, 70, dtype=torch.bool)
    wanted = {"x": x} | {name: part.requires_grad_() for name, part in vars(state).items()}
    wanted |= dict(module.named_parameters())
    y, end, _ = module(x, state, reset_BT=reset, pad_BT=pad)
    expected, expected_end = plain(module, x, state, reset, pad)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(whole)),
            list(wanted.values()),
        )
        for whole in ((y.masked_fill(pad[:, :, None], 0), *parts(end)), (expected, *parts(expected_end)))
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=name)


# ---------------------------------------------------------------- the next token's part


def test_a_huge_step_after_a_document_does_not_show_in_it():
    """The next token's step, by which this one is written once more, is taken back; not if a document begins there."""
    module, x, reset = build(), normal(8, 20, D), torch.zeros(8, 20, dtype=torch.bool)
    x[:, 10:] *= 1e9
    reset[:, 10] = True
    with torch.no_grad():
        alone, _, _ = module(x[:, :10], warm(8))
        rest, rest_end, _ = module(x[:, 10:], empty(module, 8))
        y, end, _ = module(x, warm(8), reset_BT=reset)
    torch.testing.assert_close(y[:, :10], alone, rtol=1e-12, atol=1e-12)
    for a, b in ((y[:, 10:], rest), (end.memory_BHNP, rest_end.memory_BHNP)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("seed", [0, 1])
def test_in_float32_the_next_steps_part_costs_few_digits(seed):
    """With steps as spread as at the start, 0.001 to 0.1: half a part in a million of the outputs."""
    config = ModelConfig("mamba3", 11, 64, (BlockConfig(Mamba3Config(16, 32), None),))
    module = perspectron.build(config, seed).blocks[0].mixer
    x = normal(2, 300, 64, seed=seed)
    with torch.no_grad():
        single, _, _ = module(x.float(), empty(module, 2, torch.float32))
        exact, _, _ = module.double()(x, empty(module, 2))
    assert (single - exact).norm() < 1e-6 * exact.norm()


# ---------------------------------------------------------------- identities


@torch.no_grad()
def test_without_turns_and_the_token_before_it_is_the_gated_scan():
    module, x, state = build(), normal(2, 90, D), warm(2)
    weight = module.in_proj.weight
    weight[-N // 4 :], weight[-N // 4 - H : -N // 4] = 0, 0
    weight[-N // 4 - H : -N // 4, 0], x[..., 0] = 1000, 1  # λ → 1
    state = Mamba3State(state.memory_BHNP, torch.zeros(2, H, N // 4, dtype=torch.float64), *parts(state)[2:])
    z, v, k, q, delta, rate, _, _ = module.in_proj(x).split(PARTS, -1)
    delta = softplus(delta + module.dt_bias)
    k = (module.b_norm(k)[:, :, None] + module.b_bias).transpose(1, 2)
    q = (module.c_norm(q)[:, :, None] + module.c_bias).transpose(1, 2)
    v = v.unflatten(-1, (H, P))
    gate = torch.exp(-delta * softplus(rate))[..., None].transpose(1, 2)
    o, memory = gla.scan(q, k, (v * delta[..., None]).transpose(1, 2), gate, state.memory_BHNP, scale=1.0)
    expected = module.o_proj((o.transpose(1, 2) + module.D[:, None] * v).flatten(2) * z * sigmoid(z))
    y, end, _ = module(x, state)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(end.memory_BHNP, memory, rtol=1e-11, atol=1e-11)
    assert not end.angle_BHF.any()


@torch.no_grad()
def test_it_counts_parity():
    """A 1 turns by half a circle, a 0 not at all: the sign of the output is the parity, at any length."""
    module = Mamba3(2, EPS, Mamba3Config(4, 4, expand=2)).to(torch.get_default_device(), torch.float64)
    for parameter in module.parameters():
        parameter.zero_()
    z, v, _, q, _, rate, _, theta = module.in_proj.weight.split((4, 4, 4, 4, 1, 1, 1, 1))
    z[:, 1] = q[0, 1] = 1  # the second input is 1 throughout
    rate[0, 1] = -1000  # as slow as there is
    v.zero_()  # nothing is written: the state that is there turns against the query
    theta[0, 0] = 1000  # the first is the bit
    module.b_norm.weight.fill_(1)
    module.c_norm.weight.fill_(1)
    module.dt_bias.fill_(math.log(math.e - 1))  # Δ = 1
    module.o_proj.weight.fill_(1)
    bits = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    state = empty(module, 3)
    state.memory_BHNP[:, :, 0] = 1
    x = torch.stack([bits.double(), torch.ones(3, 200, dtype=torch.float64)], -1)
    y, end, _ = module(x, state)
    even = bits.long().cumsum(1) % 2 == 0
    assert ((y[..., 0] > 0) == even).all() and (y[..., 0].abs() > 1).all()
    torch.testing.assert_close(end.angle_BHF.cos()[:, 0, 0], torch.where(even[:, -1], 1.0, -1.0).double())


def test_angles_keep_their_digits_over_a_long_text():
    """10,000 turns of three quarters of a circle, in float32, in one and in pieces of 100."""
    module = Mamba3(2, EPS, Mamba3Config(4, 4)).float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.in_proj.weight[-1, 0] = 1000
        module.dt_bias.fill_(math.log(math.e**1.5 - 1))  # Δ = 1.5
        x = torch.ones(1, 10_000, 2)
        step = float(math.pi * torch.nn.functional.softplus(module.dt_bias[0]).double())
        _, whole, _ = module(x, empty(module, 1, torch.float32))
        state = empty(module, 1, torch.float32)
        for _ in range(100):
            _, state, _ = module(x[:, :100], state)
    for angle in (whole.angle_BHF, state.angle_BHF):
        off = (float(angle[0, 0, 0]) - 10_000 * step + math.pi) % math.tau - math.pi
        assert abs(off) < 10_000 * step * 2**-23, "no more than the rounding of a step, so many times"


# ---------------------------------------------------------------- start, size, errors


def test_it_starts_as_published():
    config = ModelConfig("mamba3", 11, 512, (BlockConfig(Mamba3Config(head_dim=2, state=8), None),))
    mixer, again, other = (perspectron.build(config, seed).blocks[0].mixer for seed in (0, 0, 1))
    step = torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert 0.00099 < step.min() < 0.0012 and 0.085 < step.max() < 0.1001
    assert abs(float(step.log().mean()) - (math.log(0.001) + math.log(0.1)) / 2) < 0.2
    fixed = ("D", "b_bias", "c_bias", "b_norm.weight", "c_norm.weight")
    for (name, a), b, c in zip(mixer.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert (a == 1).all() if name in fixed else not torch.equal(a, c)


@pytest.mark.parametrize(("d_model", "head_dim", "state", "expand"), [(384, 64, 128, 2), (96, 16, 32, 1)])
def test_parameters_and_state_are_as_large_as_said(d_model, head_dim, state, expand):
    with torch.device("meta"):
        module = Mamba3(d_model, EPS, Mamba3Config(head_dim, state, expand))
    inner = expand * d_model
    heads, count = inner // head_dim, sum(parameter.numel() for parameter in module.parameters())
    own = d_model * (3 * inner + 2 * state + 3 * heads + state // 4)
    assert count == own + 2 * heads * state + 2 * heads + 2 * state
    start = vars(empty(module, 3, torch.bfloat16))
    shapes = (heads, state, head_dim), (heads, state // 4), (heads, state), (heads, head_dim)
    assert [part.shape[1:] for part in start.values()] == list(shapes)
    assert all(part.dtype == torch.float32 and not part.any() for part in start.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T", [1, 70])
def test_half_precision_follows_float64(dtype, T):
    module, x, state = build(size=0.5), normal(2, T, D), warm(2)
    exact, _, _ = module(x, state)
    single = Mamba3State(*(part.float() for part in vars(state).values()))
    y, after, _ = module.to(dtype)(x.to(dtype), single)
    assert y.dtype == dtype
    assert all(part.dtype == torch.float32 for part in vars(after).values())
    assert (y - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"head_dim": 0, "state": 4}, ["head_dim", 0]),
        ({"head_dim": 4, "state": 0}, ["state", 0]),
        ({"head_dim": 4, "state": 6}, ["state", 6]),
        ({"head_dim": 4, "state": 4, "expand": 0}, ["expand", 0]),
        ({"head_dim": 5, "state": 4}, ["head_dim", 5]),
    ],
)
def test_a_wrong_config_says_which_field(fields, named):
    with refused(ConfigError, *named):
        Mamba3(D, EPS, Mamba3Config(**fields))
