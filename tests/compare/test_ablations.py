"""Every ablation of every design: what is gone, what stays, and that its size is the whole design's."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.compare.ablations import ablate, ablations_of, rematch, removed
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.designs.perspective.ablations import GATE_RANK
from perspectron.designs.perspective.pdr import PDR
from perspectron.designs.transformer.window_gqa import WindowGQA
from perspectron.model.census import active_parameters
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.presets import small
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import OptimConfig
from perspectron.util import registry
from perspectron.util.errors import ConfigError
from tests.refusals import refused

V, T = 64, 24
ABLATIONS = dict(registry.parts("ablations"))
CASES = [(design, name) for design, ablations in ABLATIONS.items() for name in ablations]

every_ablation = pytest.mark.parametrize(("design", "name"), CASES)


@functools.cache
def whole(design: str) -> ModelConfig:
    wide = 96 if design == "perspective2" else 64  # its queries and keys weigh less there
    return small(design, vocab_size=V, d_model=wide, layers=4, seq_len=2 * T)


@functools.cache
def left(design: str, name: str) -> ModelConfig:
    return ablate(whole(design), name)


def ids(seed: int = 1) -> Tensor:
    return torch.randint(V, (2, T + 1), generator=torch.Generator().manual_seed(seed))


def parameters(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in LanguageModel(config).named_parameters()}


def parts(config: ModelConfig) -> set[str]:
    """Names of the parameters of a first layer."""
    return {name.removeprefix("blocks.0.") for name in parameters(config) if name.startswith("blocks.0.")}


@every_ablation
def test_as_many_active_parameters_as_the_whole(design, name):
    config, params = left(design, name), active_parameters(whole(design))
    assert abs(active_parameters(config) - params) <= 0.02 * params
    assert config.name == f"{design}-{name}"
    assert (config.d_model, len(config.blocks)) == (whole(design).d_model, len(whole(design).blocks))


@every_ablation
def test_it_trains_and_sees_nothing_later(design, name):
    model, read = perspectron.build(left(design, name), seed=0), ids()
    model.set_step(1000)
    output = model(read[:, :-1], targets=read[:, 1:])
    output.objective().backward()
    assert output.objective().isfinite()
    idle = ["gate.2.weight"]  # behind a matrix that starts at 0
    idle += ["mixer.metric.weight", "mixer.metric.bias"] if name == "no_metric" else []
    for where, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), where
        assert where.endswith(tuple(idle)) or parameter.grad.abs().max() > 0, where
    changed = read[:, :-1].clone()
    changed[:, T // 2] = (changed[:, T // 2] + 1) % V
    with torch.no_grad():
        before, after = model(read[:, :-1]).logits, model(changed).logits
    torch.testing.assert_close(after[:, : T // 2], before[:, : T // 2], rtol=0, atol=1e-5)
    assert (after[:, T // 2 :] - before[:, T // 2 :]).abs().amax(-1).min() > 0


@pytest.mark.parametrize("name", ABLATIONS["drm"])
def test_what_has_no_gradient_is_counted_as_idle(name):
    model, read = perspectron.build(left("drm", name), seed=0).double(), ids()
    model(read[:, :-1], targets=read[:, 1:]).objective().backward()
    zero = sum(int((parameter.grad == 0).sum()) for parameter in model.blocks.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert zero == total - active_parameters(left("drm", name))


# ---------------------------------------------------------------- what is gone


def test_ablations_of_perspective_change_their_part_alone():
    rank = parameters(left("perspective", "low_rank_gate"))
    assert rank["blocks.0.mixer.p_proj.weight"] == (64, GATE_RANK)
    assert rank["blocks.0.mixer.p_down.weight"] == (GATE_RANK, 64)
    assert parts(whole("perspective")) - parts(left("perspective", "fixed_decay")) == {"mixer.p_proj.weight"}
    mixers = {name: perspectron.build(left("perspective", name)).blocks for name in ("no_gqa", "no_pdr")}
    assert {type(block.mixer) for block in mixers["no_gqa"]} == {PDR}
    assert {type(block.mixer) for block in mixers["no_pdr"]} == {WindowGQA}


def test_a_fixed_decay_starts_at_the_whole_designs():
    model = perspectron.build(left("perspective", "fixed_decay"))
    gamma = model.blocks[0].mixer.p_proj(torch.randn(2, T, 64)).sigmoid()
    torch.testing.assert_close(gamma, torch.full_like(gamma, 0.95), rtol=0, atol=1e-4)


def test_lens_without_its_parts_is_gpt2():
    plain = left("lens", "plain")
    model = perspectron.build(plain, seed=0)
    hidden = plain.blocks[0].ffn.hidden
    sizes = {"vocab_size": V, "d_model": 64, "heads": 2, "hidden": hidden, "positions": 2 * T}
    twin = perspectron.build(presets.get("gpt2-tiny", **sizes), seed=1)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids()).logits, twin(ids()).logits, rtol=0, atol=1e-5)


def test_each_step_of_lens_adds_one_part():
    steps = ["plain", "reciprocity", "discoverability", "gates", "route", "gated_mlp"]
    added = [parts(left("lens", b)) - parts(left("lens", a)) for a, b in itertools.pairwise(steps)]
    network = {"ffn.gate_proj.weight", "ffn.gate_proj.bias"}
    assert added == [set(), {"mixer.u_HK"}, {"mixer.gates_HL"}, {"route.raw_1"}, network]
    mixers = [left("lens", step).blocks[0].mixer for step in steps]
    assert [mixer.reciprocity for mixer in mixers] == [False] + 5 * [True]
    detached, full = left("lens", "detached").blocks[0].ffn, whole("lens").blocks[0].ffn
    assert detached.stop_gradient and not full.stop_gradient and detached.hidden == full.hidden
    control = parts(left("lens", "output_gate")) - parts(left("lens", "plain"))
    assert control == {"mixer.gate_proj.weight", "mixer.gate_proj.bias"}


def test_lens_without_context_has_the_steps_before_it():
    config = presets.get("lens-tiny", vocab_size=V, context=False)
    made = removed(config)
    assert {"gated_mlp", "detached", "route"}.isdisjoint(made)  # "route" is the whole of it
    assert {"plain", "reciprocity", "discoverability", "gates", "output_gate"} <= made.keys()
    assert made["plain"].blocks[0].ffn.kind == "mlp"
    with refused(ConfigError, "context"):
        ablate(config, "detached")


def test_drm():
    terms = {}
    for name in ("no_directions", "no_metric", "no_auxiliary"):
        output = perspectron.build(left("drm", name))(ids()[:, :-1], targets=ids()[:, 1:])
        terms[name] = {term for term, value in output.aux.items() if value.weight != 0}
        if name == "no_auxiliary":
            assert output.objective() == output.loss
    gates = {"dim_sparsity", "dim_entropy", "dim_variance", "active_fraction"}
    assert terms["no_auxiliary"] == set() and terms["no_metric"] == gates
    assert terms["no_directions"] & gates == set() and "action" in terms["no_directions"]
    gone = parts(whole("drm")) - parts(left("drm", "no_directions"))
    assert gone == {"mixer.direction.weight", "mixer.direction.bias"}


def test_adr():
    """Keys alone and values alone have half of the GRUs; nothing of law 5 is left where it is removed."""
    cells = {name: parameters(left("adr", name))["blocks.0.mixer.input_GKF"][0] for name in ABLATIONS["adr"]}
    assert cells == {"no_decay": 4, "no_law5": 4, "uncoupled": 4, "keys_only": 2, "values_only": 2}
    block = left("adr", "no_law5").blocks[0]
    assert block.residual.kind == "sequential" and not block.mixer.couple
    assert left("adr", "uncoupled").blocks[0].residual.kind == "law5"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "name", "named"),
    [
        (whole("adr"), "no_gate", ["adr", "no_gate", "no_decay", "no_law5"]),
        (small("gpt2", vocab_size=V), "plain", ["gpt2", "plain"]),
        (small("perspective", vocab_size=V), "no_gqa", ["ablation", "no_gqa"]),
        (small("perspective", vocab_size=V), "no_pdr", ["model", "perspective"]),
    ],
)  # fmt: skip
def test_what_cannot_be_removed_is_named(config, name, named):
    with refused(ConfigError, *named):
        ablate(config, name)


def test_a_size_out_of_reach_is_named():
    with refused(ConfigError, 1000):
        rematch(whole("adr"), 1000)
    with refused(ConfigError, "model", "ssd"):
        rematch(small("ssd", vocab_size=V), 10**5)


# Any run


@pytest.mark.parametrize(
    "design", ["perspective2", "perspective-experts", "transformer", "gla", "ssd", "perspective[kda]"]
)
def test_a_model_of_any_design_has_ablations_that_can_be_made(design):
    config = whole(design)
    known = ablations_of(config)
    assert "no_embedding_norm" in known and not known["no_embedding_norm"].change(config).embedding_norm
    for name in known.keys() & {"no_embedding_norm", "no_rope", "half_depth"}:
        made = ablate(config, name)
        assert made != config and abs(active_parameters(made) / active_parameters(config) - 1) <= 0.02


def test_half_as_deep_a_model_starts_as_one_of_its_depth():
    """HGRN2's lower bounds and RWKV-7's starts depend on the number of layers."""
    half = ablations_of(presets.small("hgrn2", vocab_size=V, layers=4))["half_depth"]
    made = half.change(presets.small("hgrn2", vocab_size=V, layers=4))
    assert [(block.mixer.layer, block.mixer.layers) for block in made.blocks] == [(0, 2), (1, 2)]
    whole_ = presets.small("perspective[rwkv7]", vocab_size=V, layers=8)
    mixers = [
        b.mixer for b in ablations_of(whole_)["half_depth"].change(whole_).blocks if b.mixer.kind == "rwkv7"
    ]
    assert [(mixer.layer, mixer.layers) for mixer in mixers] == [(i, len(mixers)) for i in range(len(mixers))]


def test_all_parts_are_those_that_this_model_has(tmp_path, monkeypatch, capsys):
    """Of a cell of a comparison, whose text is encoded with a share of its own held out."""
    tokenizer = Tokenizer.train(["a bird sang in the old tree"], 270)
    (tmp_path / "text.txt").write_text("a bird sang in the old tree\n" * 99)
    encode(open_corpus(str(tmp_path / "text.txt"), 0.2, dev=0.1), tokenizer, tmp_path / "data")
    tokenizer.save(tmp_path / "data" / "tokenizer.json")
    model = presets.get("perspective2-tiny", gated=True, vocab_size=tokenizer.vocab_size)
    muon = OptimConfig(optimizer="muon", weight_decay=0.0, groups="plain")
    train = TrainConfig(data=str(tmp_path / "data"), heldout=0.2, measured_on="dev", seq_len=8, optim=muon)
    checkpoint.save_config(tmp_path / "run", RunConfig(model, train))
    assert main(["ablate", str(tmp_path / "run")]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "gated" not in listed and "no_gqa" in listed
    made, optims = [], []

    def finish(_, what, *rest):
        made.extend(what.arms)
        optims.extend(arm.optim for arm in what.arms.values())
        return 0

    monkeypatch.setattr("perspectron.cli.ablate.finish", finish)
    assert main(["ablate", str(tmp_path / "run"), "--tokens", "1k", "--out", str(tmp_path / "out")]) == 0
    assert made == ["perspective2", *listed] and "from nothing" not in capsys.readouterr().err
    assert {(one.optimizer, one.weight_decay, one.groups) for one in optims} == {("muon", 0.0, "plain")}
    checkpoint.save_config(tmp_path / "run", RunConfig(model, replace(train, init=str(tmp_path / "other"))))
    assert main(["ablate", str(tmp_path / "run"), "--tokens", "1k", "--out", str(tmp_path / "again")]) == 0
    assert "trained from nothing" in capsys.readouterr().err
    checkpoint.save_config(tmp_path / "run", RunConfig(model, train))
    assert main(["ablate", str(tmp_path / "run"), "--over", "gated", "--out", str(tmp_path / "out")]) == 2


def test_general_ablations_are_those_that_change_the_model():
    assert set(ablations_of(whole("transformer"))) == {
        "parallel",
        "no_embedding_norm",
        "no_rope",
        "half_depth",
    }
    assert set(ablations_of(whole("ssd"))) == {"no_embedding_norm"}
    with refused(ConfigError, "ablation", "ssd", "no_rope"):
        ablate(whole("ssd"), "no_rope")
