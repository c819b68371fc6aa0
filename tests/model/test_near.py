"""Models whose mixers and networks read the token before (`shift`) and whose values lean on the first mixer's
(`first_values`): every design keeps the contract of states.

Shapes: B batch, T time, N parts of a block, D model width.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import perspectron
from perspectron import presets
from perspectron.designs.delta.gdn import GDN, GDNConfig
from perspectron.designs.lens.prune import prune
from perspectron.designs.mamba3.mixer import Mamba3
from perspectron.designs.ssd.mixer import SSD
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.model.block import Block, ShiftedState
from perspectron.model.census import census
from perspectron.model.config import ModelConfig
from perspectron.model.mixer import Mixer
from perspectron.model.model import LanguageModel
from perspectron.model.parts import InputConv, ShortConv, TokenShift, projected
from perspectron.model.state import load_state, save_state
from perspectron.presets.fit import small
from perspectron.util.errors import ConfigError
from tests.refusals import refused

V, T = 40, 23
MIXED = "mixed"
LEANING = {
    *("attention", "window_gqa", "pdr2", "gla", "gdn", "kda", "gdn2"),
    *("adr", "lens", "hgrn2", "ssd", "mamba3"),
}


def config(design: str) -> ModelConfig:
    """With both parts, or with the shift alone where no mixer has values that lean. "mixed": Mamba-3 leans on Mamba-2,
    whose convolution has values at padding that are not 0."""
    design, _, names = design.partition(":")
    if design == MIXED:
        below, above = config("ssd"), config("mamba3")
        return replace(above, blocks=(below.blocks[0], *above.blocks[1:]))
    made = small(design, vocab_size=V, d_model=32, layers=3, seq_len=2 * T)
    leaning = any(block.mixer is not None and block.mixer.kind in LEANING for block in made.blocks)
    read = tuple(names.lstrip("*~").split("+")) if names else True
    swish, conv = names.startswith("~"), names[:1] in ("*", "~")
    made = replace(made, first_values=leaning, shift=not conv and read)
    return replace(made, input_conv=read, input_swish=swish) if conv else made


def build(design: str | ModelConfig, seed: int = 0) -> LanguageModel:
    """In float64, with mixes and gates far from where they start."""
    model = (
        perspectron.build(config(design) if isinstance(design, str) else design, seed=seed).double().eval()
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shift" in name or "first_values" in name:
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter += 0.5 * noise
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


SINGLE = (
    *(
        "transformer:k",
        "transformer:k+v+network",
        "transformer:x",
        "gpt2:q+v",
        "lens2:k+v",
        "adr:k",
        "adr2:v+network",
    ),
    *(
        "perspective:q+g+network",
        "perspective2:k",
        "gla:v+g",
        "gdn:k+g",
        "kda:q",
        "gdn2:k+v",
        "hgrn2:k",
        "ssd:v+g",
    ),
    *("ssd:q+k", "mamba3:k+network", "mingru:x"),
    *("transformer:*k+v+network", "kda:~q+g", "perspective2:*network", "drm2:~x", "gla:*x+network"),
)
"""Designs of which these inputs read the token before, with * the three before by a convolution, with ~ its swish."""
every_design = pytest.mark.parametrize("design", [*presets.DESIGNS, MIXED, *SINGLE])


@every_design
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(design):
    model, ids = build(design), tokens(2, T)
    whole, state = model(ids), None
    logits = []
    for piece in ids.split([1, 7, 1, T - 9], 1):
        out = model(piece, state)
        state = out.state
        logits.append(out.logits)
    close(torch.cat(logits, 1), whole.logits)
    close(
        *(
            [x for x in pytree.tree_leaves(s.select([0, 1])) if isinstance(x, Tensor)]
            for s in (state, whole.state)
        )
    )


@every_design
@torch.no_grad()
def test_documents_and_padding_are_read_as_if_alone(design):
    """Row 0 has two documents, padding before, between and after; each is read alone, too."""
    model, ids = build(design), tokens(2, T)
    pad, reset = torch.zeros(2, T, dtype=torch.bool), torch.zeros(2, T, dtype=torch.bool)
    pad[0, [0, 1, 5, 12, 13, T - 1]] = True
    reset[0, 12] = reset[1, 4] = True  # one in padding
    for cut in (T, 5, 13):
        parts, state = [], None
        for at in (slice(0, cut), slice(cut, T)):
            if ids[:, at].numel():
                out = model(ids[:, at], state, reset_BT=reset[:, at], pad_BT=pad[:, at])
                parts.append(out.logits)
                state = out.state
        logits = torch.cat(parts, 1)
        for row, documents in enumerate(([range(12), range(12, T)], [range(4), range(4, T)])):
            for places in documents:
                read = [t for t in places if not pad[row, t]]
                alone = model(ids[row : row + 1, read])
                close(logits[row, read], alone.logits[0])
        close(*(model(ids[:1, :3], s.take(0)).logits for s in (state, alone_state(model, ids, pad))))


def alone_state(model: LanguageModel, ids: Tensor, pad: Tensor):
    """After the second document of row 0."""
    return model(ids[:1, [t for t in range(12, ids.shape[1]) if not pad[0, t]]]).state


@every_design
@torch.no_grad()
def test_what_is_not_finite_ends_at_a_reset(design):
    model, ids = build(design), tokens(1, T)
    state = model(ids).state

    def spoiled(leaf):
        return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf

    bad = replace(state, layers=pytree.tree_map_only(Tensor, spoiled, state.layers))
    reset = torch.zeros(1, T, dtype=torch.bool)
    reset[0, 5] = True
    out = model(ids, bad, reset_BT=reset)
    assert out.logits[0, :5].isnan().all()
    close(out.logits[:, 5:], model(ids[:, 5:]).logits)


@every_design
def test_every_part_learns_and_recomputing_changes_nothing(design):
    model, ids = build(design).train(), tokens(2, T)
    grads = []
    for recompute in (False, True):
        again = copy.deepcopy(model)
        again.recompute = recompute
        torch.manual_seed(0)
        again(ids[:, :-1], targets=ids[:, 1:]).objective().backward()
        grads.append({name: p.grad for name, p in again.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        if "shift" in name or "first_values" in name:
            assert grad is not None and (grad != 0).any(), name
        assert (grad is None) == (grads[1][name] is None)
        if grad is not None:
            close(grad, grads[1][name])


@every_design
@torch.no_grad()
def test_a_state_is_saved_and_loaded(design, tmp_path):
    model, ids = build(design), tokens(2, T)
    state = model(ids[:, :9]).state
    save_state(tmp_path / "state.safetensors", state, model)
    loaded = load_state(tmp_path / "state.safetensors", model)
    close(model(ids[:, 9:], loaded).logits, model(ids[:, 9:], state).logits)


@every_design
def test_what_reads_and_what_leans_is_there(design):
    """Every mixer and network has a shift of its own or by design; of the mixers with values all but the first of a
    width have a gate."""
    model, seen = build(design), set()
    shift = model.config.shift or model.config.input_conv
    names = set() if shift is True else set(shift)
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.config.mixer is not None:
            every = shift is True and block.config.mixer.kind not in ("rwkv7", "rwkv7_channel")
            reads = every or bool(names & {"x", *block.mixer.inputs})
            assert (block.mixer_shift is not None) == reads
        reads = shift is True or "network" in names
        assert (block.ffn_shift is not None) == (reads and block.config.ffn is not None)
        leans = block.config.mixer is not None and block.config.mixer.kind in LEANING
        assert (block.first_values is not None) == leans
        if leans:
            width = block.mixer.value_channels
            assert (block.first_values.gate is None) == (width not in seen)
            seen.add(width)
    plain = perspectron.build(
        replace(model.config, shift=False, input_conv=False, input_swish=False, first_values=False)
    )
    assert all("shift" not in name and "first_values" not in name for name, _ in plain.named_parameters())
    if design not in ("drm", "drm2"):
        assert census(model.config).parameters == sum(p.numel() for p in model.parameters())


def test_the_token_before_is_read_by_hand():
    """Two inputs of a block, by their definition; the state has what mixer and network read last."""
    model = build("perspective2")
    block, x = model.blocks[1], torch.randn(1, 4, 32, dtype=torch.float64)
    assert isinstance(block, Block) and isinstance(block.config.mixer, WindowGQAConfig)
    seen = []
    block.mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block.ffn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mixed = []
    block.mixer.register_forward_hook(lambda _, args, out: mixed.append(out[0]))
    state = block.init_state(1, x.device, x.dtype)
    shared = {f"values of {block.mixer.value_channels} channels": torch.zeros(1, 4, 32, dtype=torch.float64)}
    _, after, _ = block(x, state, block.ffn, None, None, False, shared)
    read = [block.mixer_norm(x), block.ffn_norm(x + mixed[0])]
    for part, given, shift in zip(read, seen, (block.mixer_shift, block.ffn_shift), strict=True):
        before = torch.cat([torch.zeros_like(part[:, :1]), part[:, :-1]], 1)
        inputs = [part + mix * (before - part) for mix in shift.mix_ND]
        close(torch.stack(inputs), torch.stack([given] if isinstance(given, torch.Tensor) else given))
    assert isinstance(after, ShiftedState)
    close(after.last_BND, torch.stack([part[:, -1] for part in read], 1))


def columns(mixer: Mixer) -> list[tuple[str, int]]:
    """Of its first layer, each part's input and how many columns it has."""
    if isinstance(mixer, SSD):
        inner, _, heads = mixer.split
        keys = mixer.config.groups * mixer.config.state
        return [("g", inner), ("v", inner), ("k", keys), ("q", keys), ("g", heads)]
    if isinstance(mixer, Mamba3):
        return list(zip(("g", "v", "k", "q", *"gggg"), mixer.split, strict=True))
    if isinstance(mixer, GDN):
        heads, K, V = mixer.shape
        return [("q", heads * K), ("k", heads * K), ("v", heads * V)]
    return [(name, 32) for name in "qkv"]


@torch.no_grad()
@pytest.mark.parametrize("design", ["transformer:k+network", "gdn:q+v", "ssd:k+g", "mamba3:v", "lens2:v"])
def test_single_inputs_read_it_by_hand(design):
    """The layer's own columns of what it gives for each input, which lies between a token and the one before."""
    block = build(design).blocks[1]
    mixer, x = block.mixer, torch.randn(1, 6, 32, dtype=torch.float64)
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    mixes = iter(block.mixer_shift.mix_ND)
    names = design.partition(":")[2].split("+")
    inputs = {name: x + next(mixes) * (before - x) if name in names else x for name in mixer.inputs}
    given, _ = block.mixer_shift(x, torch.zeros_like(x[:, :1]), None, None)
    close(torch.stack(given), torch.stack(list(inputs.values())))
    y, _, _ = mixer(given)
    linear = next(part for part in mixer.children() if isinstance(part, torch.nn.Linear))
    order, sizes = zip(*columns(mixer), strict=True)
    made = [linear(inputs[name]).split(list(sizes), -1)[i] for i, name in enumerate(order)]
    linear.register_forward_hook(lambda *_: torch.cat(made, -1))
    close(mixer(x)[0], y)
    assert not torch.allclose(mixer(x)[0], x)


@torch.no_grad()
def test_parts_of_a_layer_have_inputs_of_their_own():
    """With hooks, packed or bare, the columns are those of the whole layer."""
    draw = torch.Generator().manual_seed(0)
    linear, sizes = torch.nn.Linear(8, 12).double(), [2, 7, 3]
    inputs = [torch.randn(2, 5, 8, generator=draw, dtype=torch.float64) for _ in sizes]
    expected = torch.cat([linear(x).split(sizes, -1)[i] for i, x in enumerate(inputs)], -1)
    close(projected(linear, inputs, sizes), expected)
    assert torch.equal(projected(linear, [inputs[0]] * 3, sizes), linear(inputs[0]))
    seen = []
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    close(projected(linear, inputs, sizes), expected)
    assert len(seen) == 3


@pytest.mark.parametrize("shift", [("k", "z"), ("x", "k"), ("g",), ("network", "")])
def test_inputs_that_a_design_has_not_are_refused(shift):
    with refused(ConfigError, "shift"):
        perspectron.build(replace(config("transformer"), shift=shift))


def test_names_stand_in_a_variant():
    assert presets.get("transformer-tiny", shift="k+v+network").shift == ("k", "v", "network")
    made = presets.solve("gdn[shift=k+g]", 100_000, vocab_size=300, seq_len=64)
    assert made.shift == ("k", "g") and perspectron.build(made)
    assert presets.get("transformer-tiny", shift="k").shift == ("k",)
    assert presets.get("transformer-tiny", shift=True).shift is True
    with refused(ConfigError, "shift", 3):
        presets.get("transformer-tiny", shift=3)


@torch.no_grad()
@pytest.mark.parametrize("swish", [False, True])
def test_a_convolved_input_is_the_token_plus_a_short_convolution(swish):
    """`ShortConv` with the same weights, which reads padding and resets in a way of its own, gives the other term."""
    conv, x = (
        InputConv(8, [True, None, True], swish=swish).double(),
        torch.randn(2, T, 8, dtype=torch.float64),
    )
    conv.init_weights(torch.Generator().manual_seed(0))
    window = torch.randn(2, 3, 8, dtype=torch.float64)
    pad, reset = (torch.rand(2, T, generator=torch.Generator().manual_seed(s)) < 0.2 for s in (1, 2))
    for masks in ((None, None), (reset, None), (None, pad), (reset, pad)):
        given, after = conv(x, window, *masks)
        assert given[1] is x
        kept = torch.ones_like(pad) if masks[1] is None else ~pad
        for weight_WD, one in zip(conv.weight_NWD, (given[0], given[2]), strict=True):
            short = ShortConv(8, 4, bias=False, swish=swish).double()
            short.weight.copy_(weight_WD.flip(0).T[:, None])
            other, other_window = short(x, window.flip(1), *masks)
            close(one[kept], (x + other)[kept])
            close(after, other_window.flip(1))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_conv": ("z",)}, "input_conv"),
        ({"input_conv": ("x", "k")}, "input_conv"),
        ({"input_conv": ("k",), "shift": ("v",)}, "input_conv"),
        ({"input_swish": True}, "input_swish"),
    ],
)
def test_convolutions_that_cannot_be_are_refused(changes, field):
    with refused(ConfigError, field):
        perspectron.build(replace(replace(config("transformer"), shift=False), **changes))


def test_values_lean_by_hand():
    model = build("gla")
    block, x = model.blocks[1], torch.randn(1, 4, 32, dtype=torch.float64)
    own, first = torch.randn(2, 1, 4, 32, dtype=torch.float64)
    share = torch.sigmoid(block.first_values.gate(x))
    close(block.first_values(own, x, {"values of 32 channels": first}), (1 - share) * own + share * first)


def test_mixes_start_spread_over_the_channels_and_do_not_decay():
    """1 − (c/D)^bend: the first channel reads the token before, the last nearly none of it."""
    shift = TokenShift(8, (0.2, 1.0))
    with torch.no_grad():
        shift.init_weights(torch.Generator())
    assert shift.mix_ND[:, 0].tolist() == [1, 1]
    assert shift.mix_ND[1].tolist() == pytest.approx([1 - c / 8 for c in range(8)])
    assert (shift.mix_ND[0, 1:] < shift.mix_ND[1, 1:]).all()
    assert TokenShift.no_decay == ("mix_ND",)


def test_where_it_is_not_computed_it_is_refused():
    with refused(ConfigError, "first_values", True):
        presets.get("mingru", first_values=True)
    with refused(ConfigError, "mingru[first_values=true]"):
        presets.solve("mingru[first_values=true]", 200_000, vocab_size=512, seq_len=64)
    assert build(replace(config("mingru"), first_values=True))  # a run that was trained so can be read


def test_what_is_handed_on_is_no_dict():
    """FSDP and accelerate copy dicts on their way to a module: what a mixer writes into a copy is lost."""
    model, seen = build("perspective[gdn]"), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[6]))
    ids = tokens(1, 5)
    model(ids)
    assert len(set(map(id, seen))) == 1 and pytree.tree_leaves(seen[0]) == [seen[0]]
    assert not isinstance(seen[0], Mapping | list | tuple)


def test_what_removes_a_mixer_refuses_it():
    attention = replace(config("transformer"), shift=False)
    with refused(ConfigError, "first_values", True):
        prune(perspectron.build(attention), [0])


def test_mixers_of_unlike_widths_lean_apart():
    """GDN's values are wider than attention's: each leans on the first of its own width."""
    base = presets.get("perspective2", vocab_size=V, d_model=32, layers=4, period=2, hidden=32, window=8)
    blocks = tuple(
        replace(b, mixer=GDNConfig(heads=2)) if i % 2 == 0 else b for i, b in enumerate(base.blocks)
    )
    model = build(replace(base, blocks=blocks))
    widths = [block.mixer.value_channels for block in model.blocks]
    assert widths == [48, 32, 48, 32]
    assert [block.first_values.gate is None for block in model.blocks] == [True, True, False, False]
    assert model(tokens(1, 5)).logits.isfinite().all()
