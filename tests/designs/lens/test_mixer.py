"""Lens attention as a module: the document's listing, its mixture, its cache.

Shapes: B batch, T time, D model width, H heads, K head width, L lenses.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perspectron import presets
from perspectron.designs.lens.mixer import Lens, LensConfig
from perspectron.designs.transformer.attention import Attention, AttentionConfig
from perspectron.model.state import LMState
from perspectron.ops.rope import angles, turned
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, H = 16, 2
K = D // H
NAMES = ("reciprocity", "discoverability", "gates", "disc_scale", "output_gate")
SWITCHES = [dict(zip(NAMES, on, strict=True)) for on in itertools.product([True, False], repeat=5)]
every_switch = pytest.mark.parametrize(
    "switches", SWITCHES, ids=lambda s: "".join(f"{on:d}" for on in s.values())
)
START = torch.tensor([0.80, 0.15, 0.05], dtype=torch.float64)


@torch.no_grad()
def build(seed: int = 0, **switches: bool | float) -> Lens:
    """Wide weights: lenses mix in any way, attention is from flat to sharp."""
    module = Lens(D, 1e-6, LensConfig(H, **switches)).to(torch.get_default_device(), torch.float64)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = 1.0 if name in ("u_HK", "gates_HL") or parameter.ndim == 1 else 1.5 * D**-0.5
        parameter.normal_(0, scale, generator=draw)
    return module


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def empty(module: torch.nn.Module, B: int, capacity: int = 0):
    return module.init_state(B, torch.get_default_device(), torch.float64, capacity)


def document(module: Lens, x_BTD: Tensor) -> Tensor:
    """docs/designs/lens.md#three-lenses, line by line, causal; S is scaled as attention is."""
    B, T, _ = x_BTD.shape
    config = module.config
    q, k, v = (part.view(B, T, H, K).transpose(1, 2) for part in module.qkv_proj(x_BTD).split(D, -1))
    seen = torch.ones(T, T, dtype=torch.float64).tril()
    lenses = [q @ k.mT / K**0.5]
    start = [2.773]
    if config.reciprocity:
        lenses.append(lenses[0].transpose(-2, -1))
        start.append(1.099)
    if config.discoverability:
        d_BHT = torch.einsum("bhtd,hd->bht", k, module.u_HK) / (K**0.5 if config.disc_scale else 1)
        mean_BHT = torch.einsum("ts,bhs->bht", seen, d_BHT) / seen.sum(-1)  # over the keys that row sees
        lenses.append(d_BHT[:, :, None, :] - mean_BHT[..., None])
        start.append(0.0)
    learned = config.gates and len(lenses) > 1
    gates_HL = module.gates_HL if learned else torch.tensor([start] * H, dtype=torch.float64)
    w_HL = gates_HL.softmax(-1)
    logits = sum(w_HL[:, i, None, None] * lens for i, lens in enumerate(lenses))
    o = logits.masked_fill(seen == 0, float("-inf")).softmax(-1) @ v
    o_BTD = o.transpose(1, 2).reshape(B, T, D)
    if config.output_gate:
        o_BTD = o_BTD * torch.sigmoid(module.gate_proj(x_BTD))
    return module.o_proj(o_BTD)


# ---------------------------------------------------------------- rotary positions


def test_every_lens_turns_with_the_distance_alone():
    """Logits of i and j, written out: R_i q_i · R_j k_j, R_i k_i · R_j q_j and R_i u · R_j k_j, wherever the text
    begins."""
    module, x, T = build(rope_base=50.0, output_gate=True), tokens(2, 9), 9
    q, k, v = (part.view(2, T, H, K).transpose(1, 2) for part in module.qkv_proj(x).split(D, -1))
    w = module.gates_HL.softmax(-1)[:, :, None, None]
    for begin in (0, 17):
        at = torch.arange(begin, begin + T).expand(2, T)
        u = module.u_HK[None, :, None].expand(2, H, T, K)
        turn = angles(at, K, 50.0)
        turned_q, turned_k, turned_u = (turned(part, turn) for part in (q, k, u))
        logits = w[:, 0] * turned_q @ turned_k.mT / K**0.5 + w[:, 1] * turned_k @ turned_q.mT / K**0.5
        logits = logits + w[:, 2] * turned_u @ turned_k.mT
        seen = torch.ones(T, T).tril()
        o = logits.masked_fill(seen == 0, float("-inf")).softmax(-1) @ v
        y = module.o_proj(o.transpose(1, 2).reshape(2, T, D) * torch.sigmoid(module.gate_proj(x)))
        torch.testing.assert_close(module(x, empty(module, 2))[0], y, rtol=1e-12, atol=1e-12)


def test_one_lens_with_rotary_positions_is_attention():
    module = build(rope_base=1e4, reciprocity=False, discoverability=False, gates=False, output_gate=False)
    plain = Attention(D, 1e-6, AttentionConfig(H, 1e4, bias=True)).to(
        torch.get_default_device(), torch.float64
    )
    plain.load_state_dict(module.state_dict())
    x = tokens(2, 30)
    y, expected = (m(x, empty(m, 2))[0] for m in (module, plain))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- the document


@every_switch
def test_it_equals_the_documents_listing_forward_and_backward(switches):
    """The listing takes the mean off d, the module does not: under softmax that is no difference."""
    module = build(**switches)
    for T in (1, 2, 63, 64, 65):
        x = tokens(3, T).requires_grad_()
        found, expected = module(x, empty(module, 3))[0], document(module, x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weighting = tokens(3, T, seed=3)
        wanted = {"x": x} | dict(module.named_parameters())
        pair = [torch.autograd.grad((y * weighting).sum(), list(wanted.values())) for y in (found, expected)]
        for name, a, b in zip(wanted, *pair, strict=True):
            assert T == 1 or b.abs().max() > 1e-3, name
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("T", [2, 65])
def test_the_transpose_lens_alone_is_attention_with_queries_and_keys_exchanged(T):
    standard, reciprocal = build(discoverability=False), build(discoverability=False)
    with torch.no_grad():
        standard.gates_HL.copy_(torch.tensor([1e3, 0]))
        reciprocal.gates_HL.copy_(torch.tensor([0, 1e3]))
        for name in ("weight", "bias"):
            q, k, v = getattr(standard.qkv_proj, name).split(D)
            getattr(reciprocal.qkv_proj, name).copy_(torch.cat([k, q, v]))
    x = tokens(2, T)
    a, b = (module(x, empty(module, 2))[0] for module in (standard, reciprocal))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reciprocity", [True, False])
def test_the_discoverability_lens_alone_gives_every_query_the_same_scores(reciprocity):
    """Then the outputs are running means of the values, weighted by exp(k·u)."""
    module = build(reciprocity=reciprocity)
    with torch.no_grad():
        module.gates_HL.fill_(-1e3)[:, -1] = 0
    x = tokens(2, 30)
    _, k, v = (part.view(2, 30, H, K).transpose(1, 2) for part in module.qkv_proj(x).split(D, -1))
    weight = (k * module.u_HK[:, None]).sum(-1, keepdim=True).exp()
    o = (weight * v).cumsum(2) / weight.cumsum(2)
    expected = module.o_proj(o.transpose(1, 2).reshape(2, 30, D))
    torch.testing.assert_close(module(x, empty(module, 2))[0], expected, rtol=1e-12, atol=1e-12)


def test_without_its_lenses_it_is_attention():
    module = build(reciprocity=False, discoverability=False)
    plain = Attention(D, 1e-6, AttentionConfig(H, rope_base=None, bias=True)).to(
        torch.get_default_device(), torch.float64
    )
    plain.load_state_dict(module.state_dict())
    x = tokens(2, 40)
    assert torch.equal(module(x, empty(module, 2))[0], plain(x, empty(plain, 2))[0])


# ---------------------------------------------------------------- the mixture


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize(("reciprocity", "discoverability"), list(itertools.product([True, False], repeat=2)))
def test_the_mixture_starts_at_80_15_5_of_the_lenses_there_are(reciprocity, discoverability, gates):
    module = Lens(D, 1e-6, LensConfig(H, reciprocity, discoverability, gates)).to(
        torch.get_default_device(), torch.float64
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
        module.init_weights(torch.Generator())
    expected = START * torch.tensor([True, reciprocity, discoverability])
    w_H3 = module.weights()
    torch.testing.assert_close(w_H3, (expected / expected.sum()).expand(H, 3), rtol=0, atol=2e-4)
    assert hasattr(module, "gates_HL") == (gates and (reciprocity or discoverability))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_switch
def test_the_mixture_sums_to_1_over_the_lenses_that_are_on(switches, dtype):
    module = build(**switches).to(dtype)
    w_H3 = module.weights()
    assert w_H3.dtype == torch.promote_types(dtype, torch.float32)
    assert (w_H3.sum(-1) - 1).abs().max() < 1e-6
    on = torch.tensor([True, switches["reciprocity"], switches["discoverability"]])
    assert (w_H3[:, on] > 0).all() and (w_H3[:, ~on] == 0).all()
    if switches["gates"] and on.sum() > 1:
        assert not torch.equal(w_H3[0], w_H3[1]), "per head"


def test_what_is_drawn_is_small_and_comes_from_the_generator_alone():
    modules = [Lens(1024, 1e-6, LensConfig(16)) for _ in range(3)]
    with torch.no_grad():
        for module, seed in zip(modules, (0, 0, 1), strict=True):
            module.init_weights(torch.Generator().manual_seed(seed))
    a, b, c = (module.u_HK for module in modules)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.std().item() == pytest.approx(0.02, rel=0.1)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("mode", ["plain", "packed", "padded"])
def test_nothing_before_a_token_hears_of_it(mode):
    """In training, through the transpose as well: exactly."""
    module, T = build(), 70
    mask = torch.zeros(2, T, dtype=torch.bool)
    mask[0, [20, 21, 50]] = True
    masks = {"plain": {}, "packed": {"reset_BT": mask}, "padded": {"pad_BT": mask}}[mode]
    x = tokens(2, T)
    before = module(x, empty(module, 2), **masks)[0]
    assert before.requires_grad
    for t in (0, 1, 20, 35, 63, 64, 69):
        changed = x.clone()
        changed[:, t] += 1
        after = module(changed, empty(module, 2), **masks)[0]
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[1, t:] - before[1, t:]).abs().amax(-1).min() > 1e-9, "each later token does"
        if mode == "packed":
            end = next((s for s in (20, 21, 50) if s > t), T)
            assert torch.equal(after[0, end:], before[0, end:]), "no other document does"


def steps(module: Lens, x_BTD: Tensor, cuts: list[int], capacity: int, reset_BT: Tensor) -> Tensor:
    state, outputs, start = empty(module, len(x_BTD), capacity), [], 0
    for stop in [*cuts, x_BTD.shape[1]]:
        part = slice(start, stop)
        y, state, _ = module(x_BTD[:, part], state, reset_BT=reset_BT[:, part])
        outputs.append(y)
        start = stop
    return torch.cat(outputs, 1)


@every_switch
def test_steps_and_splits_equal_a_prefill_of_each_document(switches):
    module, x = build(**switches), tokens(2, 30)
    reset = torch.zeros(2, 30, dtype=torch.bool)
    reset[0, 13] = True
    with torch.inference_mode():
        whole = module(x, empty(module, 2))[0]
        whole[0, 13:] = module(x[:1, 13:], empty(module, 1))[0][0]
        for cuts in ([], [1], [13], [5, 6, 14, 29], list(range(1, 30))):
            for capacity in (0, 40):
                found = steps(module, x, cuts, capacity, reset)
                torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the cache


@every_switch
def test_the_cache_is_half_as_large_again_only_with_reciprocity(switches):
    module = build(**switches)
    plain = Attention(D, 1e-6, AttentionConfig(H, rope_base=None, bias=True)).to(
        torch.get_default_device(), torch.float64
    )
    x = tokens(2, 9)
    for state, other in (
        (empty(module, 2, 20), empty(plain, 2, 20)),
        (module(x, empty(module, 2))[1], plain(x, empty(plain, 2))[1]),
    ):
        sizes = [LMState((s,)).nbytes - s.length_B.nbytes for s in (state, other)]
        assert sizes[1] == 2 * 2 * other.k_BHSK.shape[2] * D * 8 > 0
        assert 2 * sizes[0] == (3 if switches["reciprocity"] else 2) * sizes[1]


def test_the_cache_holds_keys_queries_and_values():
    module, x = build(), tokens(2, 9)
    state = module(x, empty(module, 2))[1]
    q, k, v = (part.view(2, 9, H, K).transpose(1, 2) for part in module.qkv_proj(x).split(D, -1))
    assert torch.equal(state.k_BHSK, torch.cat([k, q], -1)) and torch.equal(state.v_BHSV, v)


def test_a_new_document_gives_its_room_back():
    """A stream of short documents needs no more than the longest of them."""
    module, state = build(), empty(build(), 2)
    with torch.inference_mode():
        for t in range(100):
            reset = torch.full((2, 1), t % 8 == 0)
            state = module(tokens(2, 1, seed=t), state, reset_BT=reset)[1]
    assert state.used == state.length_B.max() == 4 and state.k_BHSK.shape[2] <= 64 < 100


class Largest(TorchDispatchMode):
    """Elements of the largest new tensor under it."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, leaf.numel())
        return out


def test_a_step_copies_no_cache():
    module = build()
    with torch.inference_mode():
        state = module(tokens(2, 300), empty(module, 2, 600))[1]
        known = state.k_BHSK, state.v_BHSV
        with Largest(*known, *module.parameters()) as seen:
            state = module(tokens(2, 1, seed=5), state, consume_state=True)[1]
    assert state.k_BHSK is known[0] and state.used == 301
    assert 0 < seen.elements <= 2 * H * 301, "scores, at most"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_divide_the_width_are_refused(heads):
    with refused(ConfigError, "heads", heads):
        Lens(D, 1e-6, LensConfig(heads))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"route": False, "route_scale": 2.0}, ["route_scale", 2.0]),
        ({"route": False, "anneal": 0.1}, ["anneal", 0.1]),
        ({"anneal_after": 100}, ["anneal_after", 100]),
    ],
)
def test_options_of_a_route_gate_that_is_not_there_are_refused(options, named):
    with refused(ConfigError, *named):
        presets.get("lens-tiny", **options)
