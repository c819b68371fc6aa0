"""HGRN2 as a module and as a stack, whose lowest layer hands the bounds of the gates on: the published layers as a
plain loop, with documents and padding, their start, their size.

Shapes: B batch, T time, D model width, H heads, K head width, N layers.
"""

import itertools

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron import presets
from perspectron.designs.hgrn2.mixer import HGRN2, HGRN2Config, HGRN2State
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H, K, N = 8, 2, 4, 3
EPS = 1e-6


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def build() -> list[HGRN2]:
    """The layers of one model; every parameter at random, gates from almost 0 to almost 1."""
    modules = [HGRN2(D, EPS, HGRN2Config(H, layer, N)).double() for layer in range(N)]
    draw = torch.Generator().manual_seed(0)
    for module in modules:
        for parameter in module.parameters():
            parameter.normal_(0, 1.0, generator=draw)
    return [module.to(torch.get_default_device()) for module in modules]


def warm(B: int) -> list[HGRN2State]:
    return [HGRN2State(normal(B, H, K, K, seed=8 + layer)) for layer in range(N)]


def masks(B: int, T: int) -> tuple[Tensor, Tensor]:
    """Documents and padding anywhere, also documents that begin in padding."""
    draw = torch.Generator().manual_seed(3)
    return tuple(torch.rand(B, T, generator=draw) < p for p in (0.15, 0.3))


def run(modules: list[HGRN2], x_BTD: Tensor, states: list[HGRN2State], **masks: Tensor):
    """One layer on the outputs of the other: the last outputs, and the state of each."""
    shared, ends = {}, []
    for module, state in zip(modules, states, strict=True):
        x_BTD, end, aux = module(x_BTD, state, shared=shared, **masks)
        assert aux == {}
        ends.append(end)
    return x_BTD, ends


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def plain(
    module: HGRN2, bound_D: Tensor, x_BTD: Tensor, memory_BHKK: Tensor, reset_BT: Tensor, pad_BT: Tensor
):
    """One layer (Qin et al. 2024), one row, one token and one head at a time; outputs at padding are zeros."""
    weight = dict(module.named_parameters())
    outputs, ends = torch.zeros_like(x_BTD), []
    for b, x_TD in enumerate(x_BTD):
        memory = list(memory_BHKK[b])
        for t, x_D in enumerate(x_TD):
            if reset_BT[b, t]:
                memory = [torch.zeros_like(part) for part in memory]
            if pad_BT[b, t]:
                continue
            q = weight["q_proj.weight"] @ x_D
            q, v = q * sigmoid(q), weight["i_proj.weight"] @ x_D
            forget = bound_D + (1 - bound_D) * sigmoid(weight["f_proj.weight"] @ x_D)
            heads = []
            for h in range(H):
                part = slice(h * K, (h + 1) * K)
                memory[h] = forget[part, None] * memory[h] + torch.outer(1 - forget[part], v[part])
                heads.append(memory[h].T @ q[part] / K**0.5)
            o = torch.cat(heads)
            o = o / torch.sqrt((o * o).mean() + EPS) * weight["norm.weight"]
            outputs[b, t] = weight["o_proj.weight"] @ o
        ends.append(torch.stack(memory))
    return outputs, torch.stack(ends)


def plain_stack(modules, x_BTD, states, reset_BT, pad_BT):
    share = torch.exp(modules[0].gamma_ND)
    share, ends = share / share.sum(0), []
    for layer, (module, state) in enumerate(zip(modules, states, strict=True)):
        bound = sum((share[below] for below in range(layer)), torch.zeros(D, dtype=torch.float64))
        x_BTD, end = plain(module, bound, x_BTD, state.memory_BHKK, reset_BT, pad_BT)
        ends.append(end)
    return x_BTD, ends


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("T", [1, 2, 70])
def test_a_stack_is_the_published_one(T, masked):
    modules, x, states = build(), normal(3, T, D), warm(3)
    reset, pad = masks(3, T) if masked else torch.zeros(2, 3, T, dtype=torch.bool)
    given = {"reset_BT": reset, "pad_BT": pad} if masked else {}
    y, ends = run(modules, x, states, **given)
    expected, expected_ends = plain_stack(modules, x, states, reset, pad)
    assert not masked or T < 9 or (reset & pad).any()
    torch.testing.assert_close(y.masked_fill(pad[:, :, None], 0), expected, rtol=1e-11, atol=1e-11)
    for end, memory in zip(ends, expected_ends, strict=True):
        torch.testing.assert_close(end.memory_BHKK, memory, rtol=1e-11, atol=1e-11)


def test_its_gradients_are_those_of_the_published_stack():
    modules, x, states = build(), normal(2, 40, D).requires_grad_(), warm(2)
    reset, pad = masks(2, 40)
    wanted = {"x": x} | {f"memory {i}": state.memory_BHKK.requires_grad_() for i, state in enumerate(states)}
    for layer, module in enumerate(modules):
        wanted |= {f"{layer}.{name}": parameter for name, parameter in module.named_parameters()}
    y, ends = run(modules, x, states, reset_BT=reset, pad_BT=pad)
    expected, expected_ends = plain_stack(modules, x, states, reset, pad)
    fast, slow = (
        torch.autograd.grad(
            sum((part * normal(*part.shape, seed=i)).sum() for i, part in enumerate(parts)),
            list(wanted.values()),
        )
        for parts in (
            (y.masked_fill(pad[:, :, None], 0), *(end.memory_BHKK for end in ends)),
            (expected, *expected_ends),
        )
    )
    for name, a, b in zip(wanted, fast, slow, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=name)


# ---------------------------------------------------------------- the bounds


def model(layers: int = 3, **more) -> perspectron.LanguageModel:
    config = presets.get("hgrn2", vocab_size=31, d_model=16, layers=layers, heads=2, hidden=16, **more)
    built = perspectron.build(config).double()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64), alpha=0.5)
    return built


@pytest.mark.parametrize("cuts", [[30], [1, 2, 3, 64], range(70)], ids=str)
def test_a_model_read_in_pieces_packed_and_padded(cuts):
    built, (reset, pad) = model(), masks(2, 70)
    ids = torch.randint(31, (2, 70), generator=torch.Generator().manual_seed(0))
    whole = built(ids, reset_BT=reset, pad_BT=pad)
    state, parts, edges = None, [], [0, *[cut for cut in cuts if cut], 70]
    for a, b in itertools.pairwise(edges):
        piece = built(ids[:, a:b], state, reset_BT=reset[:, a:b], pad_BT=pad[:, a:b])
        state = piece.state
        parts.append(piece.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[~pad], whole.logits[~pad], rtol=1e-10, atol=1e-10)


def test_recomputed_blocks_give_the_same_gradients():
    built = model()
    ids = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        built.recompute = recompute
        gradients.append(torch.autograd.grad(built(ids, targets=ids).loss, list(built.parameters())))
    for (name, _), a, b in zip(built.named_parameters(), *gradients, strict=True):
        assert a.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0, msg=name)


@torch.no_grad()
def test_gates_never_fall_below_the_bound():
    """Where a token would forget all, what the bound leaves of the state is left, and as much more is written."""
    modules, states = build(), warm(1)
    modules[0].gamma_ND.zero_()
    shared = {}
    for layer, (module, state) in enumerate(zip(modules, states, strict=True)):
        module.f_proj.weight.copy_(-1e4 * torch.eye(D))
        module.i_proj.weight.copy_(torch.eye(D))
        x = torch.ones(1, 1, D, dtype=torch.float64)
        _, end, _ = module(x, state, shared=shared)
        bound = layer / N
        torch.testing.assert_close(end.memory_BHKK, bound * state.memory_BHKK + (1 - bound))


def test_a_layer_alone_has_no_bound():
    modules, x, state = build(), normal(2, 20, D), warm(2)[0]
    none = torch.zeros(2, 20, dtype=torch.bool)
    for module in modules:
        expected, _ = plain(module, torch.zeros(D), x, state.memory_BHKK, none, none)
        torch.testing.assert_close(module(x, state)[0], expected, rtol=1e-11, atol=1e-11)


def test_a_layer_without_the_lowest_one_is_an_error():
    block = BlockConfig(HGRN2Config(2, 1, 2), SwiGLUConfig(8))
    built = perspectron.build(ModelConfig("half", 11, 16, (block,)))
    with refused(ConfigError, "layer", 1):
        built(torch.zeros(1, 3, dtype=torch.int64))


# ---------------------------------------------------------------- start, size, errors


def test_it_starts_with_bounds_that_rise_evenly():
    built = perspectron.build(presets.get("hgrn2", layers=4))
    names = [name for name, _ in built.named_parameters() if "gamma" in name]
    assert names == ["blocks.0.mixer.gamma_ND"] and not built.get_parameter(names[0]).any()
    shared = {}
    mixer = built.blocks[0].mixer
    mixer(
        torch.zeros(1, 1, 128), mixer.init_state(1, torch.get_default_device(), torch.float32), shared=shared
    )
    (bounds,) = shared.values()
    torch.testing.assert_close(bounds, torch.tensor([0, 0.25, 0.5, 0.75])[:, None].expand(4, 128))


def test_parameters_and_state_are_as_large_as_said():
    with torch.device("meta"):
        modules = [HGRN2(96, 1e-6, HGRN2Config(3, layer, 4)) for layer in (0, 1)]
    counts = [sum(parameter.numel() for parameter in module.parameters()) for module in modules]
    assert counts == [4 * 96 * 96 + 96 + 4 * 96, 4 * 96 * 96 + 96]
    start = modules[1].init_state(2, torch.get_default_device(), torch.bfloat16).memory_BHKK
    assert start.shape == (2, 3, 32, 32) and start.dtype == torch.float32 and not start.any()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads": 0}, ["heads", 0]),
        ({"heads": 1, "layers": 0}, ["layers", 0]),
        ({"heads": 1, "layer": 2, "layers": 2}, ["layer", 2]),
        ({"heads": 3}, ["heads", 3]),
    ],
)
def test_a_wrong_config_says_which_field(fields, named):
    with refused(ConfigError, *named):
        HGRN2(D, 1e-6, HGRN2Config(**fields))
