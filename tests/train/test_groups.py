"""Weights with a rate and a decay of their own, as the authors of each design train it."""

import re
from dataclasses import replace

import pytest
import torch

from perspectron import presets
from perspectron.compare.plan import optimizer_in
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.mixer import mixers
from perspectron.model.model import LanguageModel, build
from perspectron.train import loop
from perspectron.train.moments import training_state
from perspectron.train.optim import AdamW, OptimConfig, learning_rate, optimizer_of
from perspectron.util.config import load
from perspectron.util.errors import ConfigError
from tests.refusals import refused

OWN = OptimConfig(lr=3e-3, warmup=3, groups="own")
SIZES = {"vocab_size": 64, "d_model": 32, "layers": 2, "hidden": 32, "head_dim": 16}


def model_of(kind: str) -> LanguageModel:
    """A small model of this mixer alone."""
    block = BlockConfig(mixers()[kind].small, None)
    return build(ModelConfig(kind, 64, 16, (block,)), 0)


def groups_of(model, optim):
    """(share of the rate, decay, with Muon) of each weight by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group.get("rate", 1.0), group["weight_decay"], "ns_steps" in group)
        for group in optimizer_of(model, optim).param_groups
        for p in group["params"]
    }


def test_rwkv7_decays_large_projections_alone_and_has_twice_the_rate_for_w0():
    model = build(presets.get("rwkv7", **SIZES), 0)
    found = groups_of(model, OWN)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name in found:
        own = name.rpartition(".mixer.")[2]
        if own == "w_low.2.bias":
            assert found[name] == (2.0, 0.0, False), name
        else:
            large = own in ("embedding.weight", *(f"{key}_proj.weight" for key in "rkvo"))
            assert found[name] == (1.0, 0.1 if large else 0.0, False), name
    low = [name for name in found if re.search(r"_low\.\d\.weight", name)]
    assert len(low) == 2 * 6 + 2 and sum(rate == 2 for rate, *_ in found.values()) == 2
    assert all(groups_of(model, replace(OWN, groups="plain"))[name][1] == 0.1 for name in low)
    assert groups_of(model, replace(OWN, groups="rwkv7")) == found


@pytest.mark.parametrize("kind", ["mamba", "ssd", "mamba3", "gdn", "kda", "gdn2"])
def test_rates_skips_and_biases_of_steps_have_no_decay(kind):
    found = groups_of(model_of(kind), OWN)
    ours = [
        name
        for name in found
        if name.rpartition(".")[2] in ("A_log", "D", "dt_bias") or "dt_proj.bias" in name
    ]
    assert ours
    for name in ours:
        assert found[name] == (1.0, 0.0, False), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_offsets_of_experts_are_vectors(optimizer):
    model = build(presets.small("perspective-experts", vocab_size=128, d_model=32, seq_len=32), 0)
    found = groups_of(model, replace(OWN, optimizer=optimizer))
    offsets = [name for name in found if name.endswith("offset_EA")]
    assert offsets and all(found[name] == (1.0, 0.0, False) for name in offsets)


@pytest.mark.parametrize("kind", sorted(mixers()))
def test_every_pattern_of_a_recipe_names_a_weight_and_other_mixers_have_the_plain_groups(kind):
    model = model_of(kind)
    (mixer,) = (block.mixer for block in model.blocks)
    names = [name for name, _ in mixer.named_parameters()]
    for pattern in mixer.recipe:
        assert any(
            re.fullmatch(pattern.replace(".", r"\.").replace("?", ".").replace("*", ".*"), n) for n in names
        )
    if not mixer.recipe:
        assert groups_of(model, OWN) == groups_of(model, replace(OWN, groups="plain"))


def test_muon_leaves_what_a_recipe_names_to_adamw():
    found = groups_of(build(presets.get("rwkv7", **SIZES), 0), replace(OWN, optimizer="muon"))
    assert found["blocks.0.mixer.r_proj.weight"] == (1.0, 0.1, True)
    assert found["blocks.0.mixer.w_low.2.weight"] == (1.0, 0.0, False)
    assert found["blocks.0.mixer.w_low.2.bias"] == (2.0, 0.0, False)


@pytest.mark.parametrize("name", ["transformer", "mamba3", ""])
def test_groups_of_another_design_are_refused(name):
    model = build(presets.get("transformer", vocab_size=64, d_model=32, layers=1, heads=2, hidden=32), 0)
    groups = {"transformer": "rwkv7"}.get(name, name)
    with refused(ConfigError, "groups"):
        optimizer_of(model, replace(OWN, groups=groups))


def test_steps_are_those_of_adamw_by_hand_with_these_groups(runs, tmp_path):
    model = presets.get("rwkv7", **SIZES | {"vocab_size": runs.tokenizer.vocab_size})
    trainer = runs.trainer(tmp_path / "run", model=model, optim=replace(OWN, clip=0.0))
    found = groups_of(trainer.model, trainer.config.train.optim)
    optim, steps = trainer.config.train.optim, trainer.config.train.steps
    by_hand = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    second = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    step, gradients = trainer.optimizer.step, {}
    trainer.optimizer.step = lambda: (
        gradients.update({name: p.grad.double() for name, p in trainer.model.named_parameters()}), step()
    )  # fmt: skip
    for update in range(4):
        trainer.step()
        for name, gradient in gradients.items():
            rate, decay, _ = found[name]
            lr = rate * learning_rate(update, steps, optim)
            first[name] = optim.beta1 * first[name] + (1 - optim.beta1) * gradient
            second[name] = optim.beta2 * second[name] + (1 - optim.beta2) * gradient**2
            m = first[name] / (1 - optim.beta1 ** (update + 1))
            v = second[name] / (1 - optim.beta2 ** (update + 1))
            by_hand[name] = by_hand[name] * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-8)
    for name, parameter in trainer.model.named_parameters():
        error = (parameter.double() - by_hand[name]).abs().max()
        assert error < 2e-6, (name, error)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_its_own_groups_resumes_bit_for_bit(optimizer, runs, tmp_path):
    model = presets.get("rwkv7", **SIZES | {"vocab_size": runs.tokenizer.vocab_size})
    optim = replace(OWN, optimizer=optimizer)
    whole = runs.trainer(tmp_path / "whole", model=model, optim=optim, steps=6, save_every=3)
    whole.fit()
    runs.trainer(tmp_path / "parts", model=model, optim=optim, steps=6, save_every=3).fit(until=3)
    again = runs.trainer(tmp_path / "parts", model=model, optim=optim, steps=6, save_every=3)
    assert again.progress.step == 3
    again.fit()
    ours, theirs = (training_state(t.model, t.optimizer) | t.model.state_dict() for t in (whole, again))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_of_before_has_the_plain_groups():
    assert load(OptimConfig, {"lr": 3e-3, "warmup": 3}).groups == "plain"


def test_arms_of_a_comparison_name_their_optimizer_and_have_their_own_groups_else():
    small = presets.get("transformer", vocab_size=64, d_model=32, layers=1, heads=2, hidden=32)
    assert optimizer_in("transformer", small) == OptimConfig(groups="own")
    name = "transformer[optimizer=muon,weight_decay=0.01,qk_norm=head]"
    assert optimizer_in(name, small) == OptimConfig(groups="own", optimizer="muon", weight_decay=0.01)
    _, sizes = presets.variant(name)
    assert sizes == {"qk_norm": "head"} and presets.training(name) == {
        "optimizer": "muon",
        "weight_decay": 0.01,
    }
    for key, value in (("groups", "rwkv7"), ("optimizer", "sgd"), ("beta2", "2")):
        with refused(ConfigError, key, value):
            optimizer_in(f"transformer[{key}={value}]", small)


def test_outputs_that_start_at_zero_add_nothing():
    options = {"qk_norm": "head", "relu2": True, "zero_outputs": True}
    model = build(
        presets.get("transformer", vocab_size=64, d_model=32, layers=2, heads=2, hidden=32, **options), 0
    )
    outputs = [
        p for name, p in model.named_parameters() if name.endswith(("o_proj.weight", "down_proj.weight"))
    ]
    assert len(outputs) == 4 and not any(p.any() for p in outputs)
    ids = torch.arange(24).reshape(2, 12)
    bare = replace(model.config, blocks=model.config.blocks[:1])
    other = build(bare, 0)
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_muon_is_refused_in_a_new_run_where_it_would_turn_nothing(runs, tmp_path, monkeypatch):
    part = {"steps": 4, "only": ("embedding.weight",), "optim": replace(OWN, optimizer="muon")}
    with refused(ConfigError, "optimizer", "muon"):
        runs.trainer(tmp_path / "new", **part)
    with monkeypatch.context() as before:  # it was taken
        before.setattr(loop, "require", lambda *_: None)
        runs.trainer(tmp_path / "old", **part).fit(until=2)
    assert runs.trainer(tmp_path / "old", **part).progress.step == 2


def test_an_update_that_fails_leaves_all_groups(monkeypatch):
    optimizer = optimizer_of(model_of("gdn"), replace(OWN, optimizer="muon"))
    before = list(optimizer.param_groups)

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(AdamW, "step", fails)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.param_groups == before and "ns_steps" in before[-1]
