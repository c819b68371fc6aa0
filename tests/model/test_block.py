"""How a block adds up, what its route gate does over a run, blocks without a mixer, and terms beside the loss.

Shapes: B batch, T time, D model width, V vocabulary.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perspectron
from perspectron import presets
from perspectron.data import Shards, Tokenizer, encode, open_corpus
from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.block import Block, NoState
from perspectron.model.config import (
    BlockConfig,
    Law5Config,
    ModelConfig,
    NoResidualConfig,
    ParallelConfig,
    RouteGatedConfig,
    SequentialConfig,
)
from perspectron.model.ffn import ContextMLPConfig, FFNConfig, MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.model.model import LanguageModel, Output
from perspectron.model.state import LMState
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig, optimizer_of
from perspectron.util.config import ResidualConfig
from perspectron.util.errors import ConfigError
from perspectron.util.terms import Term
from tests.refusals import refused

V, D = 64, 16
SIZES = {"vocab_size": V, "d_model": D, "layers": 3, "heads": 2, "hidden": 24, "positions": 64}
MIXERS = [LensConfig(2), AttentionConfig(2)]
FFNS = [MLPConfig(24), SwiGLUConfig(24), ContextMLPConfig(24), ContextMLPConfig(24, context_rank=3)]
NETWORKS = pytest.mark.parametrize("ffn", [None, *FFNS], ids=str)


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    module.cpu()  # where its own initialisation draws
    for part in module.modules():
        if hasattr(part, "init_weights"):
            part.init_weights(draw)
    for parameter in module.parameters():
        parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1, generator=draw)
    module.to(torch.get_default_device())


def block(config: BlockConfig, norm: str = "layer") -> Block:
    made = Block(D, norm, 1e-5, config).double()
    randomise(made)
    return made


def lens(**overrides: Any) -> LanguageModel:
    model = perspectron.build(presets.get("lens-tiny", **SIZES, **overrides)).double()
    randomise(model)
    return model


def inputs(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def run(made: Block, x: Tensor) -> tuple[Tensor, dict[str, Term]]:
    state = made.init_state(len(x), x.device, x.dtype)
    y, _, aux = made(x, state, made.ffn if made.config.ffn else None, None, None)
    return y, aux


def mix(made: Block, x: Tensor) -> Tensor:
    return made.mixer(x, made.init_state(len(x), x.device, x.dtype))[0]


def fails(named: list[object], call, *args, **kwargs) -> None:
    with refused(ConfigError, *named):
        call(*args, **kwargs)


# ---------------------------------------------------------------- adding up


@pytest.mark.parametrize("norm", ["layer", "rms"])
@NETWORKS
def test_a_sequential_block_adds_mixer_and_network_in_turn(ffn, norm):
    made, x = block(BlockConfig(MIXERS[0], ffn), norm), inputs(2, 9)
    h = x + mix(made, made.mixer_norm(x))
    y = h if ffn is None else h + made.ffn(made.ffn_norm(h), mix(made, made.mixer_norm(x)))[0]
    assert torch.equal(run(made, x)[0], y)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@NETWORKS
def test_a_law5_block_normalises_the_sum(ffn, norm):
    """docs/designs/adr.md#residual: the norm stands behind the sum, and the mixer reads what is not normed."""
    made, x = block(BlockConfig(MIXERS[0], ffn, Law5Config()), norm), inputs(2, 9)
    h = made.mixer_norm(x + mix(made, x))
    y = h if ffn is None else h + made.ffn(made.ffn_norm(h), mix(made, x))[0]
    assert torch.equal(run(made, x)[0], y)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("ffn", FFNS, ids=str)
def test_a_route_gated_block_weighs_mixer_and_network(ffn, scale):
    """docs/designs/lens.md#route-gate, in the names used there."""
    made = block(BlockConfig(MIXERS[0], ffn, RouteGatedConfig(scale)))
    H = inputs(2, 9)
    with torch.no_grad():
        made.route.bias_1.fill_(-0.7)
    route_gate_raw, route_bias_add = made.route.raw_1, -0.7
    g = torch.sigmoid(route_gate_raw + route_bias_add)
    attn_out = mix(made, made.mixer_norm(H))
    H_attn = H + attn_out
    mlp_out = made.ffn(made.ffn_norm(H_attn), attn_out)[0]
    H_mlp = H_attn + mlp_out
    out = H + scale * (g * (H_attn - H) + (1 - g) * (H_mlp - H_attn))
    found, aux = run(made, H)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
    assert aux["route_gate"].value == g and aux["route_gate"].weight == 0
    assert not aux["route_gate"].value.requires_grad
    wanted = [route_gate_raw, *made.mixer.parameters(), *made.ffn.parameters()]
    pair = [torch.autograd.grad(y.square().sum(), wanted) for y in (found, out)]
    for a, b in zip(*pair, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_block_without_a_residual_is_its_mixer_alone():
    made, x = block(BlockConfig(MIXERS[1], None, NoResidualConfig())), inputs(2, 9)
    assert torch.equal(run(made, x)[0], mix(made, x))
    assert {name.split(".")[0] for name, _ in made.named_parameters()} == {"mixer"}, "no norm"


@pytest.mark.parametrize("ffn", FFNS[:2], ids=str)
def test_at_one_half_and_twice_the_sum_a_route_gate_is_no_change(ffn):
    gated = block(BlockConfig(MIXERS[0], ffn, RouteGatedConfig(2.0)))
    plain = block(BlockConfig(MIXERS[0], ffn))
    plain.load_state_dict({n: w for n, w in gated.state_dict().items() if not n.startswith("route.")})
    with torch.no_grad():
        gated.route.raw_1.zero_()
    x = inputs(2, 9)
    torch.testing.assert_close(run(gated, x)[0], run(plain, x)[0], rtol=1e-14, atol=1e-14)


def test_a_route_gate_starts_at_nine_tenths():
    model = perspectron.build(presets.get("lens-tiny", **SIZES))
    for made in model.blocks:
        assert made.route().item() == pytest.approx(0.9, abs=3e-4)
    assert model(ids(1, 4)).aux["route_gate"].mean().item() == pytest.approx(0.9, abs=1e-3)


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rank", "context"), [(0, True), (3, True), (0, False)])
def test_the_context_network_is_the_documents(activation, rank, context):
    """docs/designs/lens.md#context"""
    config = ContextMLPConfig(24, context=context, context_rank=rank, activation=activation)
    made = block(BlockConfig(MIXERS[0], config)).ffn
    x, attn_out = inputs(2, 5), inputs(2, 5, seed=2)
    ctx_summary = attn_out @ made.context_proj.weight.T if rank else attn_out
    mlp_input = torch.cat([x, ctx_summary], dim=-1) if context else x
    h = mlp_input @ made.up_proj.weight.T + made.up_proj.bias
    g = 1 / (1 + torch.exp(-(mlp_input @ made.gate_proj.weight.T + made.gate_proj.bias)))
    inner = {
        "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
        "gelu_tanh": lambda z: z * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    }[activation]
    expected = (inner(h) * g) @ made.down_proj.weight.T + made.down_proj.bias
    torch.testing.assert_close(made(x, attn_out)[0], expected, rtol=1e-12, atol=1e-12)
    width = D + (rank or D) if context else D
    assert made.up_proj.weight.shape == made.gate_proj.weight.shape == (24, width)
    assert hasattr(made, "context_proj") == (rank > 0)
    plain = block(BlockConfig(MIXERS[0], MLPConfig(24, activation))).ffn
    h = x @ plain.up_proj.weight.T + plain.up_proj.bias
    expected = inner(h) @ plain.down_proj.weight.T + plain.down_proj.bias
    torch.testing.assert_close(plain(x)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("stop", [True, False])
def test_a_stopped_gradient_does_not_teach_the_mixer_through_the_context(rank, stop):
    """A network that reads nothing but the context, in a block whose gate lets nothing else of the mixer pass."""
    config = ContextMLPConfig(24, context_rank=rank, stop_gradient=stop)
    made = block(BlockConfig(MIXERS[0], config, RouteGatedConfig()))
    with torch.no_grad():
        made.route.raw_1.fill_(-1e9)
        for projection in (made.ffn.up_proj, made.ffn.gate_proj):
            projection.weight[:, :D] = 0
    y, _ = run(made, inputs(2, 9))
    y.square().sum().backward()
    assert all((p.grad == 0).all() == stop for p in made.mixer.parameters())
    assert made.ffn.up_proj.weight.grad[:, D:].abs().max() > 0
    assert not rank or made.ffn.context_proj.weight.grad.abs().max() > 0, "the projection itself learns"


def test_a_context_no_wider_than_the_model():
    wide = presets.get("lens-tiny", **SIZES, context_rank=17)
    fails(["context_rank", 17, "d_model", 16], perspectron.build, wide)
    assert perspectron.build(presets.get("lens-tiny", **SIZES, context_rank=16))(ids(1, 3)).loss is None


# ---------------------------------------------------------------- time


ANY = [
    {}, {"stop_gradient": True}, {"context_rank": 3}, {"route": False}, {"context": False},
    {"reciprocity": False, "route_scale": 2.0}, {"output_gate": True, "disc_scale": True},
]  # fmt: skip


@pytest.mark.parametrize("switches", ANY, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_no_token_of_a_whole_model_hears_of_a_later_one(switches, packed):
    model, text = lens(**switches), ids(2, 60)
    reset = torch.zeros(2, 60, dtype=torch.bool) if packed else None
    if packed:
        reset[0, [20, 41]] = True
    before = model(text, reset_BT=reset).logits
    assert before.requires_grad
    for t in (0, 1, 20, 31, 40, 41, 59):
        changed = text.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        after = model(changed, reset_BT=reset).logits
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[1, t:] - before[1, t:]).abs().amax(-1).min() > 1e-9
        if packed:
            end = next((s for s in (20, 41) if s > t), 60)
            assert torch.equal(after[0, end:], before[0, end:])


def test_every_form_of_sum_in_one_model_reads_alike_in_pieces():
    """Prefill, steps and splits of a model of all residual forms, ties and a block without a mixer."""
    forms: list[tuple[Any, FFNConfig | None, ResidualConfig]] = [
        (MIXERS[0], FFNS[2], RouteGatedConfig()),
        (MIXERS[1], None, SequentialConfig()),
        (None, TiedConfig(0), SequentialConfig()),
        (MIXERS[1], TiedConfig(0), Law5Config()),
        (MIXERS[0], None, Law5Config()),
        (None, FFNS[3], RouteGatedConfig(2.0)),
        (MIXERS[1], None, NoResidualConfig()),
    ]
    config = ModelConfig("forms", V, D, tuple(BlockConfig(*form) for form in forms), norm="layer")
    model = perspectron.build(config).double()
    randomise(model)
    text = ids(2, 40)
    whole = model(text).logits
    changed = text.clone()
    changed[:, 25] = (changed[:, 25] + 1) % V
    assert torch.equal(model(changed).logits[:, :25], whole[:, :25])
    with torch.inference_mode():
        for cuts in ([1], [7, 8, 33], range(1, 40)):
            state, outputs, start = None, [], 0
            for stop in [*cuts, 40]:
                output = model(text[:, start:stop], state)
                outputs.append(output.logits)
                state, start = output.state, stop
            torch.testing.assert_close(torch.cat(outputs, 1), whole.detach(), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- no mixer


def bare(**fields: Any) -> LanguageModel:
    """Mixers in the second block alone, or in none."""
    middle = BlockConfig(fields.pop("mixer", MIXERS[0]), FFNS[2], RouteGatedConfig())
    blocks = (BlockConfig(None, FFNS[0]), middle, BlockConfig(None, FFNS[2], RouteGatedConfig(2.0)))
    model = perspectron.build(ModelConfig("bare", V, D, blocks, norm="layer", **fields)).double()
    randomise(model)
    return model


def test_without_a_mixer_the_network_is_all_there_is():
    model, x = bare(), inputs(2, 9)
    first, _, last = model.blocks
    expected = x + first.ffn(first.ffn_norm(x), torch.zeros_like(x))[0]
    assert torch.equal(run(first, x)[0], expected)
    g = last.route()
    expected = x + 2 * (1 - g) * last.ffn(last.ffn_norm(x), torch.zeros_like(x))[0]
    torch.testing.assert_close(run(last, x)[0], expected, rtol=1e-12, atol=1e-12)
    assert not any(name.startswith("mixer") for name, _ in [*first.named_modules(), *last.named_modules()])


@pytest.mark.parametrize("positions", [0, 64])
@pytest.mark.parametrize("mixer", [MIXERS[0], None], ids=["one mixer", "none"])
def test_without_a_mixer_nothing_is_kept_and_the_state_goes_on(positions, mixer, tmp_path):
    if positions == 0 and mixer is None:
        with refused(ConfigError, "mixer", 0):
            bare(positions=positions, mixer=mixer)
        return
    model, text = bare(positions=positions, mixer=mixer), ids(3, 30)
    with torch.inference_mode():
        whole = model(text).logits
        state = model(text[:, :11]).state
        assert state.layers[0] == state.layers[2] == NoState()
        kept = LMState((state.layers[1],)).nbytes
        assert state.nbytes == kept + (3 * 8 if positions else 0) and (kept > 0) == (mixer is not None)
        assert state.batch_size == 3
        perspectron.save_state(tmp_path / "state", state, model)
        loaded = perspectron.load_state(tmp_path / "state", model).to(model.device)
        for other in (state.fork(), state.select(torch.arange(3)), loaded):
            rest = model(text[:, 11:], other).logits
            torch.testing.assert_close(rest, whole[:, 11:], rtol=1e-9, atol=1e-9)
    with refused(ConfigError, 2, 3):
        model(text[:2], state)


@pytest.mark.cpu_only("a training run on the CPU")
def test_a_model_without_mixers_in_some_blocks_can_be_trained_compiled(runs, tmp_path):
    """torch.compile leaves mixers out, where there are any; building is enough to see."""
    blocks = (BlockConfig(None, FFNS[0]), BlockConfig(MIXERS[1], FFNS[0]))
    runs.start(tmp_path, ModelConfig("bare", 300, D, blocks), compile=True)


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize("head", [None, LinearHeadConfig()], ids=str)
def test_a_head_gives_the_logits_of_its_weights(head):
    config = ModelConfig("head", V, D, (BlockConfig(MIXERS[1], FFNS[0]),), head=head)
    model = perspectron.build(config).double()
    randomise(model)
    x, _, _ = model.hidden(ids(2, 9))
    expected = x @ (model.embedding if head is None else model.lm_head).weight.T
    output = model(ids(2, 9), targets=ids(2, 9, seed=1))
    torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)
    output.objective().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------- mistakes


ATTENTION, MLP = MIXERS[1], FFNS[0]
NARROW = BlockConfig(SimpleNamespace(d_token=8), None, NoResidualConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        (["ffn", None], (ATTENTION, None, RouteGatedConfig())),
        (["ffn", None], (None, None, RouteGatedConfig())),
        (["ffn", "none"], (ATTENTION, MLP, NoResidualConfig())),
        (["mixer", None], (None, None, NoResidualConfig())),
        (["mixer", None], (None, MLP, Law5Config())),
        (["ffn", None], (None, None, SequentialConfig())),
        (["mixer", None, "beside"], (None, MLP, SequentialConfig(), ATTENTION)),
        (["beside", "attention", "parallel"], (ATTENTION, MLP, ParallelConfig(), ATTENTION)),
    ],
)
def test_a_block_that_cannot_be_is_refused_by_its_field(named, fields):
    fails(named, BlockConfig, *fields)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        (["scale"], {"scale": 0.0}),
        (["anneal"], {"anneal": -0.1}),
        (["anneal_after", -1], {"anneal_after": -1}),
    ],
)
def test_a_route_gate_that_cannot_be_is_refused_by_its_field(named, fields):
    fails(named, RouteGatedConfig, **fields)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        (["positions", -1], {"positions": -1}),
        (["blocks", 0], {"blocks": ()}),
        (["mixer", 0, "positions"], {"blocks": (BlockConfig(None, MLP),)}),
        (["head", None], {"blocks": (NARROW,)}),
        (
            ["blocks[0].beside", "shift"],
            {"blocks": (BlockConfig(ATTENTION, MLP, beside=ATTENTION),), "shift": True},
        ),
        (["blocks[1].mixer.d_token", 8, "d_model", 16], {"blocks": (BlockConfig(ATTENTION, MLP), NARROW)}),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_its_field(named, fields):
    good = {"name": "x", "vocab_size": V, "d_model": D, "blocks": (BlockConfig(ATTENTION, MLP),)}
    ModelConfig(**good)
    fails(named, ModelConfig, **good | fields)


def test_positions_or_a_head_make_such_models_possible():
    assert ModelConfig("x", V, D, (BlockConfig(None, MLP),), positions=8).d_token == D
    assert ModelConfig("x", V, D, (NARROW,), head=LinearHeadConfig()).d_token == 8


@pytest.mark.parametrize("name", ["lens-tiny", "gpt2-124m"])
def test_heads_must_divide_the_width(name):
    config = presets.get(name, **SIZES | {"heads": 3})
    fails(["heads", 3, "d_model", 16], perspectron.build, config)


# ---------------------------------------------------------------- terms


def test_the_objective_is_the_loss_and_every_term_by_its_weight():
    one = torch.tensor(1.0)
    aux = {"a": Term(2 * one, 0.5), "b": Term(3 * one, -0.1), "shown": Term(1e30 * one)}
    output = Output(one, LMState(()), 7 * one, aux)
    assert output.objective().item() == pytest.approx(7 + 1 - 0.3)
    assert Output(one, LMState(()), 7 * one, {}).objective() == 7
    with refused(ValueError, "targets"):
        Output(one, LMState(()), None, aux).objective()


def reports(made: Block, value: Tensor, weight: float) -> None:
    """From now on `made` reports a "penalty" beside what it does."""
    inner = made.forward

    def forward(*args: Any) -> Any:
        y, state, aux = inner(*args)
        return y, state, aux | {"penalty": Term(value.square().sum(), weight)}

    made.forward = forward


@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5), (0.5, 0.0, 2.0)], ids=str)
def test_terms_of_one_name_are_summed_over_blocks_each_by_its_weight(weights):
    model = lens()
    for made, weight in zip(model.blocks, weights, strict=True):
        reports(made, made.route.raw_1, weight)
    output = model(ids(2, 9), targets=ids(2, 9, seed=1))
    squares = [made.route.raw_1.square().sum() for made in model.blocks]
    torch.testing.assert_close(output.aux["penalty"].value, sum(squares))
    expected = output.loss + sum(w * square for w, square in zip(weights, squares, strict=True))
    torch.testing.assert_close(output.objective(), expected)


# ---------------------------------------------------------------- a run


@dataclass
class Runs:
    tokenizer: Tokenizer
    shards: Shards

    def start(self, folder: Path, model: ModelConfig | None = None, **train: Any) -> Trainer:
        settings: dict[str, Any] = {
            "steps": 8, "batch_size": 2, "seq_len": 32, "dtype": "float32", "device": "cpu",
            "eval_every": 0, "eval_tokens": 64, "save_every": 3, "optim": OptimConfig(lr=1e-4, warmup=2, clip=0.0),
        }  # fmt: skip
        model = model or annealed()
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(folder / "tokenizer.json")
        return Trainer(folder, RunConfig(model, TrainConfig(**settings | train)), self.tokenizer, self.shards)


def annealed(**overrides: Any) -> ModelConfig:
    return presets.get(
        "lens-tiny", **SIZES | {"vocab_size": 300, "anneal": 0.25, "anneal_after": 3} | overrides
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    texts = tmp_path_factory.mktemp("texts")
    for i in range(16):
        (texts / f"{i:02d}.txt").write_text(
            f"Document {i} says: {'the quick brown fox, ' * (i % 5 + 1)}{i * 7919}.\n"
        )
    corpus = open_corpus(str(texts), heldout=0.2)
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
    return Runs(tokenizer, encode(corpus, tokenizer, tmp_path_factory.mktemp("data") / "shards"))


@pytest.mark.parametrize(("anneal", "after"), [(0.0, 0), (0.25, 0), (0.25, 3)])
def test_the_bias_follows_its_schedule(anneal, after):
    """As the document's loop leaves it: one fall for each update after the first `after`; nothing adds up twice."""
    model = perspectron.build(annealed(anneal=anneal, anneal_after=after))
    bias, expected = 0.0, []
    for step in range(8):
        if step > after:
            bias -= anneal
        expected.append(bias)
    for step in [*range(8), 7, 2, 0]:
        model.set_step(step)
        for made in model.blocks:
            assert made.route.bias_1.item() == pytest.approx(expected[step])
            assert made.route().item() == pytest.approx(1 / (1 + math.exp(-2.2 - expected[step])), rel=1e-5)


def test_the_bias_is_kept_with_the_weights():
    model, other = perspectron.build(annealed()), perspectron.build(annealed(), seed=1)
    model.set_step(7)
    weights = model.state_dict()
    assert [name for name in weights if name.endswith("bias_1")] == [
        f"blocks.{i}.route.bias_1" for i in range(3)
    ]
    other.load_state_dict(weights)
    assert [made.route.bias_1.item() for made in other.blocks] == [-1.0] * 3
    assert model.fingerprint() == other.fingerprint()
    other.set_step(6)
    assert model.fingerprint() != other.fingerprint()


@pytest.mark.cpu_only("a training run on the CPU")
def test_annealing_is_written_down_and_goes_on_where_it_stopped(runs, tmp_path):
    whole = runs.start(tmp_path / "whole")
    whole.fit()
    lines = [line for line in read_metrics(tmp_path / "whole") if "loss" in line]
    g = [line["aux"]["route_gate"] for line in lines]
    assert len(g) == 8 and all(value == pytest.approx(0.9, abs=1e-3) for value in g[:4])
    assert all(later < earlier - 0.01 for earlier, later in itertools.pairwise(g[3:]))
    assert g[-1] == pytest.approx(torch.tensor(2.2 - 1.0).sigmoid().item(), abs=1e-3)
    parts = runs.start(tmp_path / "parts")
    parts.fit(until=6)
    parts = runs.start(tmp_path / "parts")
    assert parts.progress.step == 6
    assert [made.route.bias_1.item() for made in parts.model.blocks] == [-0.5] * 3, "of the last update"
    parts.fit()
    a, b = (trainer.model.state_dict() for trainer in (whole, parts))
    assert all(torch.equal(a[name], b[name]) for name in a)
    again = [line["aux"] for line in read_metrics(tmp_path / "parts") if "loss" in line]
    assert again == [line["aux"] for line in lines]
    loaded, _ = perspectron.load(tmp_path / "whole")
    assert [made.route.bias_1.item() for made in loaded.blocks] == [-1.0] * 3


@pytest.mark.cpu_only("a training run on the CPU")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_terms_are_in_the_metrics_and_by_their_weight_in_the_gradient(runs, tmp_path, accumulate, recompute):
    found = []
    for name in ("plain", "penalty"):
        trainer = runs.start(tmp_path / name, accumulate=accumulate, recompute=recompute)
        if name == "penalty":
            reports(trainer.model.blocks[1], trainer.model.blocks[1].route.raw_1, 0.5)
        seen: dict[str, Tensor] = {}
        trainer.optimizer.step = lambda t=trainer, s=seen: s.update(
            {n: p.grad.clone() for n, p in t.model.named_parameters()}
        )
        found.append((trainer.step(), seen))
    (plain, before), (line, after) = found
    assert line["loss"] == plain["loss"], "what is drawn as the loss is the loss alone"
    assert plain["aux"] == {"route_gate": pytest.approx(0.9, abs=1e-3)}
    assert line["aux"] == plain["aux"] | {"penalty": pytest.approx(2.2**2)}
    for name in before:
        by_hand = 2.2 if name == "blocks.1.route.raw_1" else 0.0  # of ½ · 2.2²
        torch.testing.assert_close(after[name], before[name] + by_hand, rtol=1e-5, atol=1e-7)


@pytest.mark.cpu_only("a training run on the CPU")
def test_metrics_of_a_model_that_reports_nothing_have_no_terms(runs, tmp_path):
    runs.start(tmp_path, annealed(route=False, anneal=0.0, anneal_after=0), steps=2).fit()
    assert all("aux" not in line for line in read_metrics(tmp_path))


def test_gates_do_not_decay():
    """Decay would pull the mixture of lenses to equal shares and the route gate to one half."""
    model = perspectron.build(annealed())
    decayed = {id(p) for p in optimizer_of(model, OptimConfig()).param_groups[0]["params"]}
    names = {name.split(".", 2)[-1] for name, p in model.named_parameters() if id(p) in decayed}
    assert not names & {"mixer.gates_HL", "mixer.u_HK", "route.raw_1"}
    assert {"mixer.qkv_proj.weight", "mixer.o_proj.weight", "ffn.up_proj.weight"} <= names


@pytest.mark.parametrize(
    ("name", "vectors"),
    [("mamba3", {"b_bias", "c_bias", "dt_bias", "D"}), ("hgrn2", {"gamma_ND"}), ("rwkv7", {"mix_6D"})],
)
def test_biases_and_bounds_of_heads_do_not_decay(name, vectors):
    model = perspectron.build(presets.get(name))
    decayed = {id(p) for p in optimizer_of(model, OptimConfig()).param_groups[0]["params"]}
    found = {name.rsplit(".", 1)[-1] for name, p in model.named_parameters() if id(p) not in decayed}
    assert vectors <= found
    assert not vectors & {name.rsplit(".", 1)[-1] for name, p in model.named_parameters() if id(p) in decayed}


@pytest.mark.parametrize("period", [1, 2])
def test_parallel_parts_read_the_same(period):
    config = presets.get("perspective", vocab_size=V, d_model=D, layers=2, hidden=24, rank=4, heads=2, kv_heads=1,
                         window=8, period=period, residual="parallel")  # fmt: skip
    model = perspectron.build(config).double()
    x = torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = model.blocks[0]
    mixed, _, _ = block.mixer(block.mixer_norm(x), block.init_state(2, x.device, x.dtype))
    expected = x + mixed + block.ffn(block.ffn_norm(x), mixed)[0]
    found, _, _ = block(x, block.init_state(2, x.device, x.dtype), block.ffn, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
