"""The language model: one answer for any way of reading, initialisation, census, routed experts.

Shapes: B batch, T time, D model width.
"""

import copy
import dataclasses
import functools
import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import perspectron
from perspectron import presets
from perspectron.designs.gla.mixer import GLAConfig
from perspectron.designs.perspective.pdr import PDR, PDRConfig
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import RoutedConfig
from perspectron.model.block import NoState
from perspectron.model.config import BlockConfig, ModelConfig, SequentialConfig
from perspectron.model.ffn import MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.model.mixer import Mixer, mixers
from perspectron.model.model import LanguageModel, build, init
from perspectron.ops import pdr
from perspectron.util import registry
from perspectron.util.config import FFNConfig, MixerConfig
from perspectron.util.errors import ConfigError, StateError
from tests.refusals import refused

V, D = 64, 32
GQA = WindowGQAConfig(heads=4, kv_heads=2, window=32)


def config(*mixers, ffn: FFNConfig | None = SwiGLUConfig(48)) -> ModelConfig:
    return ModelConfig("test", V, D, tuple(BlockConfig(mixer, ffn) for mixer in mixers))


@torch.no_grad()
def widened(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Logits of a few units, and gates exactly 0, exactly 1 and all between."""
    draw = torch.Generator().manual_seed(seed)
    model.embedding.weight.normal_(0, 0.25, generator=draw)
    for module in model.modules():
        if isinstance(module, PDR):
            bias = torch.cat(
                [torch.full((4,), -2000.0), torch.full((4,), 2000.0), torch.linspace(-9, 9, D - 8)]
            )
            module.p_proj.bias.copy_(bias[torch.randperm(D, generator=draw)])
    return model


def ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def read(model: LanguageModel, ids_BT: Tensor, pieces, state=None, reset_BT=None, pad_BT=None) -> Tensor:
    outputs = []
    start = 0
    for stop in [*pieces, ids_BT.shape[1]]:
        reset, pad = (None if mask is None else mask[:, start:stop] for mask in (reset_BT, pad_BT))
        output = model(ids_BT[:, start:stop], state, reset_BT=reset, pad_BT=pad)
        state, start = output.state, stop
        outputs.append(output.logits)
    return torch.cat(outputs, 1)


# ---------------------------------------------------------------- one answer for any way of reading


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_prefill_any_split_and_steps_agree_over_1000_tokens(dtype, tolerance):
    model = widened(perspectron.build(config(PDRConfig(8), GQA, PDRConfig(8)))).to(dtype)
    gates = []
    for module in model.modules():
        if isinstance(module, PDR):
            module.p_proj.register_forward_hook(
                lambda module, args, p: gates.append(torch.sigmoid(p.detach()))
            )
    text = ids(1, 1000)
    whole = model(text).logits.detach()
    for gate in gates:
        assert gate.min() == 0 and gate.max() == 1 and (gate == 0).sum() < gate.numel() / 4
        assert ((gate > 0.4) & (gate < 0.6)).any()
    assert len(gates) == 2 and whole.std() > 1
    with torch.inference_mode():
        for pieces in (
            [1],
            [500],
            [31, 32, 33, 64, 128, 129, 513, 999],
            range(100, 1000, 100),
            range(1, 1000),
        ):
            assert (read(model, text, pieces) - whole).abs().max() < tolerance
    with torch.no_grad():
        assert (read(model, text, [1, 2, 3, 700, 701]) - whole).abs().max() < tolerance


def test_packed_and_padded_documents_equal_each_alone():
    model = widened(perspectron.build(config(PDRConfig(8), GQA))).double()
    documents = [ids(1, T, seed=T) for T in (70, 1, 40, 90)]
    row = torch.cat([documents[0], ids(1, 13), *documents[1:]], 1)
    reset, pad = (torch.zeros_like(row, dtype=torch.bool) for _ in range(2))
    pad[:, 70:83] = True
    reset[:, [0, 83, 84, 124]] = True
    alone = torch.cat([model(document).logits for document in documents], 1)
    for pieces in ([], [75, 83, 84, 130]):
        logits = read(model, row, pieces, reset_BT=reset, pad_BT=pad)
        torch.testing.assert_close(logits[~pad], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_input_that_is_none_without_tokens_or_with_masks_of_another_shape_is_named_in_every_design(design):
    model = build(presets.small(design, vocab_size=V, seq_len=32))
    for shape in ((0, 3), (1, 0), (0, 0), (2, 0), (5,)):
        bad = torch.zeros(shape, dtype=torch.int64)
        for state in (None, model.init_state(shape[0])):
            with refused(ConfigError, "ids"):
                model(bad, state)
        with refused(ConfigError, "inputs_embeds"):
            model(inputs_embeds=torch.zeros(*shape, model.config.d_token))
    with refused(ConfigError, "ids", "list"):
        model([[1, 2]])
    with refused(ConfigError, "ids", torch.float32):
        model(torch.ones(1, 2))
    for shape, name in itertools.product(((1, 5), (3, 5), (2, 4), (2, 6), (5,)), ("reset_BT", "pad_BT")):
        with refused(ConfigError, name):
            model(ids(2, 5), **{name: torch.zeros(shape, dtype=torch.bool)})
    for dtype, name in itertools.product((torch.int64, torch.uint8, torch.float32), ("reset_BT", "pad_BT")):
        with refused(ConfigError, name, dtype):
            model(ids(2, 5), **{name: torch.zeros(2, 5, dtype=dtype)})


def test_embeddings_in_the_place_of_ids_give_the_same_bits():
    learned = dataclasses.replace(config(PDRConfig(8), GQA), positions=64)
    for model in (perspectron.build(everything()), perspectron.build(learned)):
        text, reset, pad = (
            ids(2, 40),
            torch.zeros(2, 40, dtype=torch.bool),
            torch.zeros(2, 40, dtype=torch.bool),
        )
        reset[0, 13], pad[1, 30:] = True, True
        masks = {"reset_BT": reset, "pad_BT": pad}
        by_ids = model(text, targets=text, **masks)
        embeds = model.embedding(text)
        by_embeds = model(inputs_embeds=embeds, targets=text, **masks)
        assert torch.equal(by_embeds.logits, by_ids.logits) and torch.equal(by_embeds.loss, by_ids.loss)
        assert torch.equal(model.hidden(inputs_embeds=embeds, **masks)[0], model.hidden(text, **masks)[0])
        after = [model(text[:, :5], out.state).logits for out in (by_ids, by_embeds)]
        assert torch.equal(*after)
        [gradient] = torch.autograd.grad(by_embeds.loss, embeds)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, ["ids", "inputs_embeds"]),
        ({"ids": ids(1, 3), "inputs_embeds": torch.zeros(1, 3, D)}, ["ids", "inputs_embeds"]),
        ({"inputs_embeds": torch.zeros(1, 3, D + 1)}, ["inputs_embeds", 33, 32]),
        ({"inputs_embeds": torch.zeros(1, 0, D)}, ["inputs_embeds", 0]),
        ({"inputs_embeds": torch.zeros(3, D)}, ["inputs_embeds", 3]),
    ],
)
def test_mistaken_inputs_are_named(arguments, named):
    with refused(ConfigError, *named):
        perspectron.build(config(PDRConfig(8)))(**arguments)


@pytest.mark.cpu_only("a GPU cannot tell before it has computed")
@pytest.mark.parametrize("beyond", [-1, V, 1 << 40])
def test_an_id_outside_the_vocabulary_is_named_with_its_size(beyond):
    model = perspectron.build(config(PDRConfig(8)))
    with refused(ConfigError, "ids", beyond, "vocab_size", V):
        model(torch.tensor([[3, beyond]]))
    compiled = torch.compile(model._embedded, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids(1, 3)), model.embedding(ids(1, 3)))


# ---------------------------------------------------------------- loss and gradients


def test_loss_is_the_mean_over_targets_that_count():
    model = widened(perspectron.build(config(PDRConfig(8)))).double()
    text, targets = ids(2, 30), ids(2, 30, seed=1)
    targets[0, 5:] = -100
    output = model(text, targets=targets)
    counted = [(b, t) for b in range(2) for t in range(30) if targets[b, t] != -100]
    expected = sum(-output.logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in counted) / len(counted)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-12)
    assert model(text).loss is None


def test_without_any_target_the_loss_is_0():
    model = perspectron.build(config(PDRConfig(8), GQA))
    loss = model(ids(2, 9), targets=torch.full((2, 9), -100)).loss
    assert loss == 0
    loss.backward()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_recomputing_gives_the_same_gradients():
    model = widened(perspectron.build(config(PDRConfig(8), GQA, ffn=RoutedConfig(16, (2, 2)))))
    calls = []
    model.blocks[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients(recompute: bool) -> list[Tensor]:
        model.recompute = recompute
        with torch.no_grad():
            state = model(ids(2, 40, seed=2)).state
        loss = model(ids(2, 70), state, targets=ids(2, 70, seed=1)).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = gradients(False)
    assert len(calls) == 2
    for a, b in zip(plain, gradients(True), strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)
    assert len(calls) == 5, "the forward pass ran again"


def test_a_tied_network_is_the_other_blocks_own():
    config = everything()
    model = perspectron.build(config).double()
    ids = torch.arange(12).remainder(V).view(2, 6)
    model(ids, targets=ids).loss.backward()
    assert not hasattr(model.blocks[0], "ffn")
    untied = ModelConfig(
        "untied", V, 16, (BlockConfig(config.blocks[0].mixer, SwiGLUConfig(24)), *config.blocks[1:])
    )
    other = perspectron.build(untied).double()
    other.load_state_dict(model.state_dict() | {
        name.replace("blocks.1.ffn.", "blocks.0.ffn."): weight
        for name, weight in model.state_dict().items() if name.startswith("blocks.1.ffn.")
    }, strict=False)  # fmt: skip
    if isinstance(config.blocks[3].ffn, TiedConfig):
        other.blocks[3].load_state_dict(model.blocks[3].state_dict())
    assert torch.equal(other(ids).logits, model(ids).logits)
    with refused(ConfigError, "blocks[0].ffn.block", 0):
        perspectron.build(
            ModelConfig("self", V, 16, (BlockConfig(PDRConfig(4), TiedConfig(0)), config.blocks[1]))
        )
    with refused(ConfigError, "blocks[1].ffn.block", 0):
        bare, tied = (BlockConfig(PDRConfig(4), ffn) for ffn in (None, TiedConfig(0)))
        perspectron.build(ModelConfig("none", V, 16, (bare, tied)))


# ---------------------------------------------------------------- initialisation


def everything() -> ModelConfig:
    """Every mixer, in width 16, with each kind of feed-forward network."""
    ffns = (TiedConfig(1), SwiGLUConfig(24), RoutedConfig(8, (2, 2)))
    configs = [*(entry.small for entry in mixers().values()), PDRConfig(4, out_norm=True)]
    return ModelConfig(
        "all", V, 16, tuple(BlockConfig(mixer, ffns[i % 3]) for i, mixer in enumerate(configs))
    )


def test_a_seed_gives_the_same_model_and_another_seed_another():
    weights = [perspectron.build(everything(), seed).state_dict() for seed in (3, 3, 4)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    drawn = [name for name in weights[0] if not torch.equal(weights[0][name], weights[2][name])]
    starts_fixed = ["gates_HL", "offset_EA", "A_log"]  # how lenses mix, where experts stand, decays of Mamba
    starts_fixed += ["b_bias", "c_bias"]  # what is added to Mamba-3's keys and queries
    starts_fixed += ["mix_ND", "mix_6D", *(f"{name}_low.0.weight" for name in "wag")]  # mixes and low ranks
    for i, mixer in enumerate(mixers()):  # and its outputs
        last = {"rwkv7": "o_proj", "rwkv7_channel": "v_proj"}.get(mixer)
        starts_fixed += [f"blocks.{i}.mixer.{last}.weight"] if last else []
    matrices = [
        n for n, weight in weights[0].items() if weight.ndim > 1 and not n.endswith(tuple(starts_fixed))
    ]
    assert set(matrices) <= set(drawn)
    assert all(weight.isfinite().all() for weight in weights[0].values())
    prints = [perspectron.build(everything(), seed).fingerprint() for seed in (3, 3, 4)]
    assert prints[0] == prints[1] != prints[2]


@dataclasses.dataclass(frozen=True)
class ToyConfig(MixerConfig):
    kind = "toy, for a test"
    fills: tuple[str, ...] = ()


class Toy(Mixer):
    """A mixer as a newcomer writes it: parameters and buffers of its own, and an init_weights that may forget some."""

    def __init__(self, d_model: int, norm_eps: float, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.scale_D = nn.Parameter(torch.ones(d_model))
        self.half_D = nn.Parameter(torch.ones(d_model))
        for name, buffer in {"table_D": torch.arange(d_model), "on_D": torch.ones(d_model).bool()}.items():
            self.register_buffer(name, buffer)

    def init_state(self, batch_size, device, dtype, capacity=0):
        return NoState()

    def forward(self, x_BTD, state, *, reset_BT=None, pad_BT=None, consume_state=False):
        return self.o_proj(x_BTD * self.scale_D * self.half_D * self.table_D * self.on_D), state, {}

    def init_weights(self, generator):
        for name in self.config.fills:
            getattr(self, name).fill_(1)
        if "half_D" not in self.config.fills:
            self.half_D[1:].fill_(1)


@pytest.mark.parametrize("missing", [None, "scale_D", "half_D", "table_D", "on_D"])
def test_a_parameter_that_no_initialisation_touches_is_named(monkeypatch, missing):
    monkeypatch.setitem(registry._designs, "toy", registry.Design("toy", mixers={ToyConfig.kind: Toy}))
    fills = tuple(name for name in ("scale_D", "half_D", "table_D", "on_D") if name != missing)
    toy = config(GQA, ToyConfig(fills))
    if missing is None:
        model = perspectron.build(toy)
        assert model(ids(1, 9), targets=ids(1, 9, seed=1)).loss.isfinite()
        return
    with refused(ConfigError, f"blocks.1.mixer.{missing}", "Toy"):
        perspectron.build(toy)


def test_a_part_of_a_model_is_that_part_of_the_whole():
    """A process that makes one block, or only the embedding, has the whole model's numbers there, bit for bit."""
    whole = perspectron.build(everything(), 5)
    for name in ("blocks.2", "blocks.5", "blocks.1.ffn", "embedding", "blocks.3.mixer"):
        with torch.device("meta"):
            model = LanguageModel(everything())
        part = model.get_submodule(name)
        part.to_empty(device="cpu")
        init(model, 5)
        expected = whole.get_submodule(name).state_dict()
        assert expected and all(
            torch.equal(own, expected[key].cpu()) for key, own in part.state_dict().items()
        )
        assert all(w.is_meta for key, w in model.state_dict().items() if not key.startswith(name + "."))


def test_a_block_does_not_depend_on_the_others():
    blocks = everything().blocks
    tail = dataclasses.replace(everything(), blocks=(BlockConfig(GLAConfig(2), None), *blocks[1:]))
    a, b = (perspectron.build(config, 5) for config in (everything(), tail))
    for block, other in zip(a.blocks[1:], b.blocks[1:], strict=True):
        for mine, theirs in zip(block.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_no_two_parameters_share_their_numbers():
    """Of drawn tensors, and of each expert: the first numbers, whatever their spread, are those of no other."""
    model = perspectron.build("perspective-tiny", 0)
    starts = []
    for name, weight in model.state_dict().items():
        for part in weight if name.endswith(("EFD", "EDF")) else [weight]:
            start = part.flatten()[:32].double()
            if start.unique().numel() > 16:
                starts.append((start / start.norm()).round(decimals=4).tolist())
    assert len(starts) > 90 and len({tuple(start) for start in starts}) == len(starts)


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = perspectron.build(everything(), 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert perspectron.build(everything(), 5).fingerprint() == first.fingerprint()


def test_building_on_the_meta_device_takes_no_memory():
    with torch.device("meta"):
        model = perspectron.build("perspective-1t")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_model_from_the_meta_device_is_whole_once_its_weights_are_loaded():
    real = perspectron.build(everything(), 1)
    with torch.device("meta"):
        model = perspectron.build(everything())
    model.to_empty(device=torch.get_default_device()).load_state_dict(real.state_dict())
    text = ids(2, 40)
    a, b = real(text, targets=text), model(text, targets=text)
    assert a.logits.isfinite().all() and torch.equal(a.logits, b.logits) and torch.equal(a.loss, b.loss)
    assert model.fingerprint() == real.fingerprint()


def test_initial_weights_are_as_documented():
    model = perspectron.build(presets.get("perspective-tiny-dense", renorm_every=7), 0)
    block = model.blocks[0]
    assert block.mixer.p_proj.bias.sigmoid().sub(0.95).abs().max() < 1e-4
    noise = block.mixer.p_proj.weight - torch.eye(128)
    spread = {
        "embedding": (model.embedding.weight, 0.02),
        "identity": (noise, 0.01 * 128**-0.5),
        "q_proj": (block.mixer.q_proj.weight, 128**-0.5),
        "o_proj": (block.mixer.o_proj.weight, 128**-0.5 * 8**-0.5),
        "down_proj": (block.ffn.down_proj.weight, 472**-0.5 * 8**-0.5),
    }
    for name, (weight, expected) in spread.items():
        assert weight.std().item() == pytest.approx(expected, rel=0.03), name
    loss = model(torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))[:, :-1],
                 targets=torch.randint(2048, (2, 63), generator=torch.Generator().manual_seed(1))).loss  # fmt: skip
    assert abs(loss.item() - torch.tensor(2048.0).log().item()) < 0.1


def test_a_bfloat16_model_keeps_its_memory_in_float32():
    model = perspectron.build(config(PDRConfig(8), GQA)).bfloat16()
    with torch.inference_mode():
        output = model(ids(2, 20))
        output = model(ids(2, 1), output.state)
    assert output.logits.dtype == torch.bfloat16
    assert output.state.layers[0].memory_BDR.dtype == torch.float32
    assert output.state.layers[1].k_BGWK.dtype == torch.bfloat16


def test_gates_near_1_are_not_rounded_to_1_in_bfloat16():
    module = PDR(D, 1e-6, PDRConfig(4)).to(torch.get_default_device())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
        module.p_proj.weight.zero_()
        module.p_proj.bias.fill_(7)
    x = torch.zeros(1, 500, D, dtype=torch.bfloat16)
    x[:, 0] = 1
    _, state, _ = module.bfloat16()(x, module.init_state(1, x.device, x.dtype))
    first = module.v_proj(x[0, 0]).float()[:, None] * module.k_proj(x[0, 0]).float()
    torch.testing.assert_close(
        state.memory_BDR[0], first * torch.tensor(7.0).sigmoid() ** 499, rtol=1e-3, atol=0
    )


# ---------------------------------------------------------------- census


@functools.cache
def on_meta(name: str) -> LanguageModel:
    with torch.device("meta"):
        return perspectron.build(name)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_census_of_the_trillion_parameter_model():
    """docs/designs/perspective.md#size"""
    model = on_meta("perspective-1t")
    mixers = [block.mixer for block in model.blocks]
    fast = [mixer for mixer in mixers if isinstance(mixer, PDR)]
    assert [i for i, mixer in enumerate(mixers) if not isinstance(mixer, PDR)] == list(range(3, 80, 4))
    assert {sum(p.numel() for p in mixer.parameters() if p.ndim == 2) for mixer in fast} == {52_428_800}
    routed = [module for module in model.modules() if isinstance(module, RoutedSwiGLU)]
    experts = sum(m.gate_EFD.numel() + m.up_EFD.numel() + m.down_EDF.numel() for m in routed)
    total, idle = size(model), sum(module.idle_parameters() for module in routed)
    assert len(fast) == len(routed) == 60
    assert round(experts / 1e9, 2) == 1038.85
    assert round(total / 1e9, 2) == 1045.67
    assert round((total - experts) / 1e9, 4) == 6.8258
    assert round((total - idle) / 1e9, 3) == 14.942
    assert round(model.embedding.weight.numel() / 1e6, 1) == 134.2


def test_what_all_experts_share_is_a_model_of_its_own():
    """All but the experts and their router."""
    whole, shared = on_meta("perspective-1t"), on_meta("perspective-1t-dense")
    shapes, own = ({name: p.shape for name, p in model.named_parameters()} for model in (whole, shared))
    assert own.items() <= shapes.items()
    rest = {name.split(".", 2)[2] for name in shapes.keys() - own.keys()}
    assert rest == {"ffn.route_proj.weight", "ffn.route_proj.bias", "ffn.offset_EA",
                    "ffn.gate_EFD", "ffn.up_EFD", "ffn.down_EDF"}  # fmt: skip


@pytest.mark.parametrize("scale", ["tiny", "20m", "125m"])
def test_twins_are_equal_in_width_depth_and_within_2_percent_in_size(scale):
    a, b = on_meta(f"perspective-{scale}-dense"), on_meta(f"transformer-{scale}")
    assert abs(size(b) / size(a) - 1) < 0.02
    for key in ("d_model", "vocab_size"):
        assert getattr(a.config, key) == getattr(b.config, key)
    assert len(a.config.blocks) == len(b.config.blocks)
    assert {block.mixer.kind for block in b.config.blocks} == {"attention"}


@pytest.mark.parametrize("name", ["perspective-tiny", "transformer-tiny"])
def test_heads_must_divide_the_width(name):
    with torch.device("meta"), refused(ConfigError, "heads", 10):
        LanguageModel(presets.get(name, heads=10))


# ---------------------------------------------------------------- routed experts


@pytest.mark.parametrize("pieces", [[1], [13, 14, 90], range(1, 120)], ids=["1", "some", "steps"])
def test_prefill_equals_steps_with_experts(pieces):
    model = widened(perspectron.build(config(PDRConfig(8), GQA, ffn=RoutedConfig(16, (3, 2))))).double()
    whole = model(ids(2, 120)).logits.detach()
    with torch.inference_mode():
        torch.testing.assert_close(read(model, ids(2, 120), pieces), whole, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- options of PDR


def mixer(seed: int = 0, size: float = 3.0, **options) -> PDR:
    module = PDR(D, 1e-6, PDRConfig(4, **options)).to(torch.get_default_device(), torch.float64)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=draw)
        module.v_proj.weight.mul_(size)
        module.p_proj.bias.add_(4)
    return module


def start(module: PDR, B: int):
    return module.init_state(B, torch.get_default_device(), torch.float64)


def renormed_loop(module: PDR, x_TD: Tensor, every: int) -> tuple[Tensor, Tensor, int]:
    """One document by the plain recurrence: its outputs, its last state, how often it was shrunk."""
    S, shrunk, outputs = torch.zeros(D, 4, dtype=torch.float64), 0, []
    for t, x in enumerate(x_TD):
        gamma = torch.sigmoid(module.p_proj(x))
        S = gamma[:, None] * S + module.v_proj(x)[:, None] * module.k_proj(x)[None]
        outputs.append(module.o_proj(4**-0.5 * S @ module.q_proj(x)))
        if (t + 1) % every == 0 and S.norm() > (D * 4) ** 0.5:
            S, shrunk = S * (D * 4) ** 0.5 / S.norm(), shrunk + 1
    return torch.stack(outputs), S, shrunk


@pytest.mark.parametrize(
    "pieces", [[], [6], [7, 8, 14, 50], range(1, 60)], ids=["whole", "6", "some", "steps"]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_renormalisation_is_the_same_for_any_split_padding_and_packing(pieces, mode):
    module, x = (
        mixer(renorm_every=7),
        torch.randn(4, 60, D, generator=torch.Generator().manual_seed(1)).double(),
    )
    reset, pad = torch.zeros(4, 60, dtype=torch.bool), torch.zeros(4, 60, dtype=torch.bool)
    pad[1, :20] = pad[2, 6:9] = pad[2, 30:] = True  # a token is due at column 9, not at the padding before it
    reset[2, 12] = reset[3, [0, 9, 10, 59]] = True
    masks = (reset, pad)
    with mode():
        outputs, state, begin = [], start(module, 4), 0
        for stop in [*pieces, 60]:
            reset_BT, pad_BT = (mask[:, begin:stop] for mask in masks)
            y, state, _ = module(x[:, begin:stop], state, reset_BT=reset_BT, pad_BT=pad_BT)
            outputs.append(y)
            begin = stop
    y = torch.cat(outputs, 1)
    for row in range(4):
        edges = [0, *reset[row].nonzero()[:, 0].tolist(), 60]
        for a, b in itertools.pairwise(edges):
            keep = torch.arange(a, b)[~pad[row, a:b]]
            if len(keep):
                expected, last, shrunk = renormed_loop(module, x[row, keep], 7)
                assert shrunk == len(keep) // 7, "the test's state must be a large one"
                torch.testing.assert_close(y[row, keep], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state.memory_BDR[row], last, rtol=1e-9, atol=1e-9)


def test_renormalisation_leaves_a_small_state_alone():
    x = torch.randn(2, 60, D, generator=torch.Generator().manual_seed(1)).double()
    small, off = mixer(size=0.01, renorm_every=7), mixer(size=0.01)
    (a, state, _), (b, expected, _) = (module(x, start(module, 2)) for module in (small, off))
    assert 0 < expected.memory_BDR.norm(dim=(1, 2)).max() < (D * 4) ** 0.5
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(state.memory_BDR, expected.memory_BDR, rtol=1e-13, atol=1e-15)
    zero, empty = torch.zeros_like(x), start(small, 2)
    y, state, _ = small(zero, empty)
    assert (y == 0).all() and (state.memory_BDR == 0).all()


def test_renormalised_gradients_are_those_of_the_loop():
    module = mixer(renorm_every=7)
    x = torch.randn(1, 30, D, generator=torch.Generator().manual_seed(1)).double()
    fast = torch.autograd.grad(module(x, start(module, 1))[0].square().sum(), list(module.parameters()))
    slow = torch.autograd.grad(renormed_loop(module, x[0], 7)[0].square().sum(), list(module.parameters()))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_readout_can_be_normed():
    plain, normed = mixer(), mixer(out_norm=True)
    normed.load_state_dict(plain.state_dict() | {"norm.weight": torch.linspace(0.5, 2, D).double()})
    x = torch.randn(2, 30, D, generator=torch.Generator().manual_seed(1)).double()
    q, k, v = plain.q_proj(x), plain.k_proj(x), plain.v_proj(x)
    o, _ = pdr.scan(q, k, v, torch.sigmoid(plain.p_proj(x)), backend="naive")
    expected = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * torch.linspace(0.5, 2, D).double()
    y, _, _ = normed(x, start(normed, 2))
    torch.testing.assert_close(y, plain.o_proj(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(x, start(plain, 2))[0], plain.o_proj(o), rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        step_state = start(normed, 2)
        for t in range(30):
            step, step_state, _ = normed(x[:, t : t + 1], step_state)
            torch.testing.assert_close(step[:, 0], y[:, t].detach(), rtol=1e-9, atol=1e-9)


def test_the_readout_scale_can_be_set():
    x = torch.randn(2, 30, D, generator=torch.Generator().manual_seed(1)).double()
    one, three = (mixer(scale=scale) for scale in (1.0, 3.0))
    torch.testing.assert_close(3 * one(x, start(one, 2))[0], three(x, start(three, 2))[0])
    assert dataclasses.replace(one.config, scale=None) == mixer().config
    torch.testing.assert_close(one(x, start(one, 2))[0], 2 * mixer()(x, start(one, 2))[0])


def test_a_module_that_is_partly_there_is_refused():
    with torch.device("meta"):
        model = LanguageModel(everything())
    model.to_empty(device="cpu").get_submodule("blocks.2.mixer").register_parameter(
        "extra", nn.Parameter(torch.empty(1, device="meta"))
    )
    with refused(ConfigError, "blocks.2.mixer"):
        init(model, 0)


def test_a_state_of_another_model_is_refused():
    one, other = (perspectron.build("perspective-tiny-dense", seed) for seed in (0, 1))
    ids = torch.tensor([[1, 2]])
    state = one(ids).state
    for stranger in (other, copy.deepcopy(one)):
        with refused(StateError):
            stranger(ids, state)
    assert one(ids, state).state.model == one.number


def test_a_model_larger_than_the_memory_is_refused_before_it_is_allocated(monkeypatch):
    config = presets.get("perspective-tiny")
    build(config)
    monkeypatch.setattr(perspectron.model.model, "memory", lambda: 1000)
    with refused(ConfigError, "perspective-tiny"):
        build(config)
    monkeypatch.undo()
    with refused(ConfigError, "perspective-1t"):
        build(presets.get("perspective-1t"))


def test_building_a_model_loads_no_compiler():
    """torch's own takes a second of every command; a model on the meta device would load it."""
    program = (
        "import sys, perspectron; from perspectron import presets\n"
        "perspectron.build(presets.get('gpt2-tiny', layers=1))\n"
        "print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.strip() == "[]"


@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (6,)])
def test_targets_of_another_shape_are_refused(shape) -> None:
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    ids = torch.randint(0, 40, (2, 3))
    assert model(ids.int(), targets=ids.int()).loss == model(ids, targets=ids).loss
    with refused(ConfigError, "targets", *shape):
        model(ids, targets=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("field", "value", "change"),
    [
        ("norm", "batch", lambda c: dataclasses.replace(c, norm="batch")),
        ("blocks[0].ffn.activation", "relu", lambda c: _first(c, ffn=SwiGLUConfig(24, "relu"))),
        ("blocks[0].ffn.activation", "silu", lambda c: _first(c, ffn=MLPConfig(24, "silu"))),
        ("blocks[0].residual.norm", "Pre", lambda c: _first(c, residual=SequentialConfig("Pre"))),
    ],
)
def test_a_value_that_its_field_does_not_list_is_refused(field, value, change) -> None:
    config = presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16)
    with refused(ConfigError, field, value):
        perspectron.build(change(config))


def _first(config, **parts):
    return dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], **parts),))
