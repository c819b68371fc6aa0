"""RWKV-7's time mix and channel mix: the published layers as plain recurrences, the values that the first hands on,
their start, their size.

Shapes: B batch, T time, D model width, H heads, K head width.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import perspectron
from perspectron import presets
from perspectron.designs.rwkv7.channel import RWKV7Channel, RWKV7ChannelConfig, RWKV7ChannelState
from perspectron.designs.rwkv7.mixer import RWKV7, RWKV7Config, RWKV7State
from perspectron.train.optim import OptimConfig, optimizer_of
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H, K = 12, 3, 4


@torch.no_grad()
def build(layer: int = 0, layers: int = 2, size: float = 0.5) -> RWKV7:
    """Every parameter at random."""
    module = RWKV7(D, 1e-5, RWKV7Config(K, layer, layers)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, size, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def warm(B: int) -> RWKV7State:
    return RWKV7State(normal(B, H, K, K, seed=8), normal(B, D, seed=9))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def plain(
    module: RWKV7, x_BTD: Tensor, state: RWKV7State, first_BTD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The time mix of Peng et al. 2025, §4, one row, one token and one head at a time: outputs, memories, last tokens,
    values before the first layer's are mixed in."""
    p = dict(module.named_parameters())

    def low(name: str, x: Tensor, inner) -> Tensor:
        return p[f"{name}_low.2.weight"] @ inner(p[f"{name}_low.0.weight"] @ x)

    rows, memories, lasts, values = [], [], [], []
    for x_TD, memory, last, first_TD in zip(x_BTD, state.memory_BHKK, state.last_BD, first_BTD, strict=True):
        memory, outputs, own = list(memory), [], []
        for x, first in zip(x_TD, first_TD, strict=True):
            x_r, x_w, x_k, x_v, x_a, x_g = (x + (last - x) * mu for mu in p["mix_6D"])
            r, k, v = p["r_proj.weight"] @ x_r, p["k_proj.weight"] @ x_k, p["v_proj.weight"] @ x_v
            own.append(v)
            if module.config.layer > 0:
                v = v + (first - v) * sigmoid(low("v", x_v, lambda z: z) + p["v_low.2.bias"])
            alpha = torch.exp(-math.exp(-0.5) * sigmoid(low("w", x_w, torch.tanh) + p["w_low.2.bias"]))
            eta = sigmoid(low("a", x_a, lambda z: z) + p["a_low.2.bias"])
            g = low("g", x_g, sigmoid)
            heads = []
            for h in range(H):
                s = slice(h * K, (h + 1) * K)
                kappa = k[s] * p["k_k"][s]
                kappa = kappa / torch.sqrt((kappa * kappa).sum() + 1e-6)
                key = k[s] * (1 + (eta[s] - 1) * p["k_a"][s])
                turned = torch.diag(alpha[s]) - torch.outer(kappa * eta[s], kappa)
                memory[h] = turned @ memory[h] + torch.outer(key, v[s])
                o = memory[h].T @ r[s]
                o = (o - o.mean()) / torch.sqrt(((o - o.mean()) ** 2).mean() + 64e-5)
                o = o * p["norm_weight"][s] + p["norm_bias"][s]
                heads.append(o + (r[s] * p["r_k"][s] * key).sum() * v[s])
            outputs.append(p["o_proj.weight"] @ (torch.cat(heads) * g))
            last = x
        rows.append(torch.stack(outputs))
        values.append(torch.stack(own))
        memories.append(torch.stack(memory))
        lasts.append(last)
    return torch.stack(rows), torch.stack(memories), torch.stack(lasts), torch.stack(values)


@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_the_published_layer(T, layer):
    module, x, state, first = build(layer), normal(2, T, D), warm(2), normal(2, T, D, seed=5)
    shared = {} if layer == 0 else {"v_first": first}
    y, end, aux = module(x, state, shared=shared)
    assert aux == {}
    *expected, values = plain(module, x, state, first)
    for a, b in zip((y, end.memory_BHKK, end.last_BD), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(shared["v_first"], values if layer == 0 else first, rtol=1e-12, atol=1e-12)
    if layer == 0:
        assert torch.equal(module(x, state)[0], y), "the first hands on only where somebody takes"


@pytest.mark.parametrize("layer", [0, 1])
def test_its_gradients_are_those_of_the_published_layer(layer):
    module, x, state = build(layer), normal(2, 40, D).requires_grad_(), warm(2)
    first = normal(2, 40, D, seed=5).requires_grad_()
    wanted = {"x": x, "memory": state.memory_BHKK.requires_grad_(), "last": state.last_BD.requires_grad_()}
    wanted |= dict(module.named_parameters()) | ({"first": first} if layer else {})
    shared = {"v_first": first} if layer else {}
    y, end, _ = module(x, state, shared=shared)
    both = (y, end.memory_BHKK, end.last_BD, shared["v_first"])
    expected = plain(module, x, state, first)
    expected = expected if layer == 0 else (*expected[:3], first)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(parts)),
            list(wanted.values()),
        )
        for parts in (both, expected)
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("T", [1, 40])
def test_the_channel_mix_is_the_published_one(T):
    module = RWKV7Channel(D, 1e-5, RWKV7ChannelConfig(20)).to(torch.get_default_device(), torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=20 + i))
    x, last = normal(2, T, D), normal(2, D, seed=9)
    y, end, aux = module(x, RWKV7ChannelState(last))
    assert aux == {} and torch.equal(end.last_BD, x[:, -1])
    for b in range(2):
        before = last[b]
        for t in range(T):
            read = module.k_proj.weight @ (x[b, t] + (before - x[b, t]) * module.mix_D)
            expected = module.v_proj.weight @ torch.where(read > 0, read, 0.0) ** 2
            torch.testing.assert_close(y[b, t], expected, rtol=1e-12, atol=1e-12)
            before = x[b, t]


# ---------------------------------------------------------------- in a model: values that the first layer hands on


@torch.no_grad()
def model(dtype: torch.dtype = torch.float64) -> perspectron.LanguageModel:
    """Three layers, every parameter at random."""
    config = presets.get("rwkv7", vocab_size=11, d_model=16, layers=3, head_dim=8, hidden=24)
    found = perspectron.build(config).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for parameter in found.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter)
        parameter += noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0)
    return found


def ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(11, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_steps_equal_the_whole_and_padding_and_packing_are_documents_alone():
    net, tokens = model(), ids(2, 70)
    whole = net(tokens).logits
    state, outputs = net.init_state(2), []
    for t in range(70):
        out = net(tokens[:, t : t + 1], state, consume_state=True)
        outputs.append(out.logits)
        state = out.state
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-9, atol=1e-9)
    reset, pad = torch.zeros(2, 70, dtype=torch.bool), torch.zeros(2, 70, dtype=torch.bool)
    reset[:, 30], pad[0, 28:33] = True, True  # the first row's second document begins in padding
    packed = net(tokens, reset_BT=reset, pad_BT=pad).logits
    for row, (left, right) in enumerate(((28, 33), (30, 30))):
        torch.testing.assert_close(packed[row, :left], net(tokens[row : row + 1, :left]).logits[0])
        torch.testing.assert_close(packed[row, right:], net(tokens[row : row + 1, right:]).logits[0])


def test_what_the_first_layer_hands_on_reaches_all_others_and_its_gradient_comes_back():
    net, tokens, taken = model(), ids(2, 20), []
    for block in net.blocks[2::2]:
        block.mixer.register_forward_pre_hook(
            lambda _, given, kwargs: taken.append(kwargs["shared"]["v_first"]), with_kwargs=True
        )
    net(tokens, targets=tokens).loss.backward()
    assert len(taken) == 2 and taken[0] is taken[1]
    plainly = {name: p.grad.clone() for name, p in net.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in plainly.values())
    net.zero_grad()
    net.recompute = True
    net(tokens, targets=tokens).loss.backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, plainly[name], rtol=1e-12, atol=1e-14)


def test_a_later_layer_alone_is_refused():
    module = build(1)
    for shared in (None, {}):
        with refused(ConfigError, "layer", 1):
            module(normal(1, 3, D), warm(1), shared=shared)


# ---------------------------------------------------------------- start, size, errors


@torch.no_grad()
def test_it_starts_as_published():
    net = perspectron.build(
        presets.get("rwkv7", vocab_size=11, d_model=128, layers=4, head_dim=64, hidden=64)
    )
    again = perspectron.build(
        presets.get("rwkv7", vocab_size=11, d_model=128, layers=4, head_dim=64, hidden=64)
    )
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    for layer in range(4):
        mixer, channel = net.blocks[2 * layer].mixer, net.blocks[2 * layer + 1].mixer
        up, down = layer / 3, 1 - layer / 4
        for c in (0, 1, 37, 64, 127):
            line, place = c / 127, (c % 64 - 31.5) / 31.5
            zigzag = place * abs(place)
            expected = [1 - (c / 128) ** (exponent * down) for exponent in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
            assert mixer.mix_6D[:, c].tolist() == pytest.approx(expected, abs=1e-6)
            assert float(channel.mix_D[c]) == pytest.approx(1 - (c / 128) ** down**4, abs=1e-6)
            decay = -6 + 6 * line ** (1 + up**0.3) + 0.5 + 2.5 * zigzag
            assert float(mixer.w_low[2].bias[c]) == pytest.approx(decay, abs=1e-5)
            rate = -0.19 + 0.3 * zigzag + 0.4 * (line - 0.5)
            assert float(mixer.a_low[2].bias[c]) == pytest.approx(rate, abs=1e-6)
            assert float(mixer.k_k[c]) == pytest.approx(0.71 - 0.1 * (line - 0.5), abs=1e-6)
            if layer > 0:
                assert float(mixer.v_low[2].bias[c]) == pytest.approx(0.73 - 0.4 * (line - 0.5), abs=1e-6)
        assert (mixer.k_a == 1.02).all() and (mixer.r_k == -0.04).all()
        torch.testing.assert_close(mixer.norm_weight, torch.full((128,), ((layer + 1) / 4) ** 0.7))
        assert not mixer.norm_bias.any() and not mixer.o_proj.weight.any() and not channel.v_proj.weight.any()
        for linear, gain in ((mixer.r_proj, 1.0), (mixer.k_proj, 0.1), (mixer.v_proj, 1.0)):
            square = linear.weight @ linear.weight.T
            torch.testing.assert_close(square, gain**2 * torch.eye(128), rtol=1e-4, atol=1e-5)
        for low in (mixer.w_low, mixer.a_low, mixer.g_low):
            assert not low[0].weight.any()
            square = low[2].weight.T @ low[2].weight
            torch.testing.assert_close(square, 0.01 * torch.eye(len(square)), rtol=1e-4, atol=1e-6)
        assert 0.9 < channel.k_proj.weight.abs().max() * 2 * 128**0.5 <= 1


@pytest.mark.parametrize(
    ("d_model", "head_dim", "ranks"),
    [(768, 64, (64, 128, 32)), (4096, 64, (160, 320, 96)), (160, 32, (32, 64, 32))],
)
def test_parameters_and_state_are_as_large_as_said(d_model, head_dim, ranks):
    with torch.device("meta"):
        first, second = (RWKV7(d_model, 1e-6, RWKV7Config(head_dim, layer, 2)) for layer in (0, 1))
    rank, gate, value = ranks
    count = 4 * d_model**2 + d_model * (4 * rank + 2 * gate + 6 + 2 + 3 + 2)
    assert sum(parameter.numel() for parameter in first.parameters()) == count
    assert sum(parameter.numel() for parameter in second.parameters()) == count + d_model * (2 * value + 1)
    start = first.init_state(3, torch.get_default_device(), torch.bfloat16)
    assert start.memory_BHKK.shape == (3, d_model // head_dim, head_dim, head_dim)
    assert start.last_BD.shape == (3, d_model)
    assert all(part.dtype == torch.float32 and not part.any() for part in (start.memory_BHKK, start.last_BD))


def test_vectors_do_not_decay():
    net = model()
    _, vectors = optimizer_of(net, OptimConfig()).param_groups
    kept = {id(p) for p in vectors["params"]}
    for module in net.modules():
        if isinstance(module, RWKV7):
            own = [
                p for name, p in module.named_parameters() if not name.endswith("weight") or "norm" in name
            ]
            assert len(own) >= 8 and all(id(p) in kept for p in own)
    assert not any(id(m.weight) in kept for m in net.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RWKV7Config(1), ["head_dim", 1]),
        (lambda: RWKV7Config(8, 2, 2), ["layer", 2]),
        (lambda: RWKV7ChannelConfig(0), ["hidden", 0]),
        (lambda: RWKV7ChannelConfig(8, -1), ["layer", -1]),
        (lambda: RWKV7(D, 1e-6, RWKV7Config(5)), ["head_dim", 5]),
    ],
)
def test_a_wrong_config_says_which_field(make, named):
    with refused(ConfigError, *named):
        make()
