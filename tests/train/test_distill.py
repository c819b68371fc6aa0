"""Learning from another run's model, starting from one, and training a part."""

import copy
import shutil

import pytest
import torch
from torch.autograd import gradcheck

from perspectron.data import Tokenizer
from perspectron.experts.ternary import SHARE
from perspectron.train import checkpoint, lora
from perspectron.train.checkpoint import load_run
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.distill import divergence
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import prepare
from perspectron.util.errors import CheckpointError, ConfigError
from tests.refusals import refused
from tests.train.conftest import small


@pytest.fixture(scope="module")
def teacher(runs, tmp_path_factory):
    run = tmp_path_factory.mktemp("teacher") / "run"
    optim = OptimConfig(lr=1e-2, warmup=5)
    runs.trainer(run, "transformer-tiny", steps=15, eval_every=0, save_every=0, optim=optim).fit()
    return run


def logits(seed, n=4, v=7):
    return torch.randn(n, v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_divergence_is_the_plain_sum(temperature):
    student, its = logits(0), logits(1)
    total = 0.0
    for q, p in zip((student / temperature).softmax(-1), (its / temperature).softmax(-1), strict=True):
        total += sum(pi * (pi / qi).log() for pi, qi in zip(p, q, strict=True))
    expected = temperature**2 * total / len(student)
    torch.testing.assert_close(divergence(student, its, temperature), expected, rtol=1e-12, atol=0)
    assert divergence(student, student, temperature).item() == pytest.approx(0, abs=1e-15)
    assert divergence(student[:0], its[:0], temperature).item() == 0
    assert gradcheck(lambda x: divergence(x, its, temperature), (student.clone().requires_grad_(),))


def test_the_time_of_an_update_has_the_pass_of_the_teacher(runs, tmp_path, teacher):
    trainer, read = runs.trainer(tmp_path, teacher=str(teacher)), []
    trainer.teacher.model.register_forward_hook(lambda *_: read.append("teacher"))
    trainer.forward = lambda *ids, **options: (read.append("forward"), trainer.model(*ids, **options))[1]
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    assert trainer.estimate().seconds > 0
    assert read == ["forward", "teacher"] * 2
    assert all(
        p.grad is None and torch.equal(p, before[name]) for name, p in trainer.model.named_parameters()
    )


def test_a_high_temperature_compares_logits():
    """Its limit is ½ the variance of the difference, which T² keeps in sight (Hinton et al., 2015)."""
    student, its = logits(0), logits(1)
    limit = ((its - student).var(-1, correction=0) / 2).mean()
    assert divergence(student, its, 1e4).item() == pytest.approx(limit.item(), rel=1e-3)


def test_the_step_adds_it_to_the_loss(runs, tmp_path, teacher):
    trainer = runs.trainer(
        tmp_path, teacher=str(teacher), teacher_weight=0.7, teacher_temperature=2.0, clip=0.0
    )
    trainer.model.double()
    trainer.teacher.model.double()
    student, batch = copy.deepcopy(trainer.model), copy.deepcopy(trainer.loader).next_batch()
    plain = student(batch.ids_BT, targets=batch.targets_BT, reset_BT=batch.reset_BT)
    its = trainer.teacher.model(batch.ids_BT, reset_BT=batch.reset_BT)
    counted = batch.targets_BT != -100
    beside = divergence(plain.logits[counted], its.logits[counted], 2.0)
    (plain.objective() + 0.7 * beside).backward()
    seen = {}
    trainer.optimizer.step = lambda: seen.update({n: p.grad for n, p in trainer.model.named_parameters()})
    line = trainer.step()
    assert line["aux"]["distill"] == pytest.approx(beside.item(), rel=1e-12) != 0
    assert line["loss"] == pytest.approx(plain.loss.item(), rel=1e-12)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None and not p.requires_grad for p in trainer.teacher.model.parameters())


@pytest.mark.parametrize(("its", "own"), [(320, 300), (300, 320), (320, 320)])
def test_ids_that_no_token_has_are_left_out(runs, tmp_path, its, own):
    """The vocabulary of an imported model is often filled up."""
    sizes = {"d_model": 32, "layers": 1, "heads": 2, "hidden": 32}
    models = [small("transformer-tiny", **sizes, vocab_size=size) for size in (its, own)]
    runs.trainer(tmp_path / "its", models[0], steps=1, seed=1).fit()
    trainer = runs.trainer(tmp_path / "own", models[1], teacher=str(tmp_path / "its"))
    trainer.model.double()
    trainer.teacher.model.double()
    student, batch = copy.deepcopy(trainer.model), copy.deepcopy(trainer.loader).next_batch()
    logits = [m(batch.ids_BT, reset_BT=batch.reset_BT).logits for m in (student, trainer.teacher.model)]
    counted, known = batch.targets_BT != -100, runs.tokenizer.vocab_size
    wanted = divergence(*(one[counted][:, :known] for one in logits), 1.0)
    assert trainer.step()["aux"]["distill"] == pytest.approx(wanted.item(), rel=1e-12)


def test_it_brings_the_student_nearer_to_the_teacher(runs, tmp_path, teacher):
    ends = {}
    for weight in (0.0, 8.0):
        run = tmp_path / str(weight)
        optim = OptimConfig(lr=1e-2, warmup=5)
        trainer = runs.trainer(run, steps=40, teacher=str(teacher), teacher_weight=weight, optim=optim)
        trainer.fit()
        ends[weight] = [m["aux"]["distill"] for m in read_metrics(run) if "aux" in m][-5:]
    assert max(ends[8.0]) < 0.5 * min(ends[0.0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_half_and_half_equals_whole(runs, tmp_path, teacher, accumulate):
    variant = {"teacher": str(teacher), "accumulate": accumulate, "steps": 8}
    whole = runs.trainer(tmp_path / "whole", **variant)
    before = copy.deepcopy(whole.teacher.model.state_dict())
    whole.fit()
    runs.trainer(tmp_path / "halves", **variant).fit(until=5)
    again = runs.trainer(tmp_path / "halves", **variant)
    assert again.progress.step == 5
    again.fit()
    runs.assert_same(runs.outcome(again), runs.outcome(whole))
    after = whole.teacher.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# Starting from another run


def test_init_gives_the_weights_of_the_best_checkpoint(runs, tmp_path, teacher):
    trainer = runs.trainer(tmp_path / "run", "transformer-tiny", init=str(teacher), steps=6)
    assert trainer.progress.step == 0 and not trainer.optimizer.state
    expected = load_run(teacher)[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())
    trainer.fit()
    whole = runs.outcome(trainer)
    halves = tmp_path / "halves"
    source = shutil.copytree(teacher, tmp_path / "source")
    runs.trainer(halves, "transformer-tiny", init=str(source), steps=6).fit(until=3)
    shutil.rmtree(source)  # no longer needed
    again = runs.trainer(halves, "transformer-tiny", init=str(source), steps=6)
    again.fit()
    runs.assert_same(runs.outcome(again), whole)


FROZEN = {
    "experts": ("perspective-tiny", {"torus": [3, 2], "ternary": True, "bias_rate": 0.1}),
    "gate": ("lens-tiny", {"anneal": 0.25}),
    "metric": ("drm-3m", {"directions": 4, "d_token": 8, "emitter": 16}),
}


@pytest.mark.parametrize("part", [{"lora": "rank=1"}, {"only": ("embedding.weight",)}], ids=["lora", "only"])
@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_follows_no_schedule_anew(runs, tmp_path, name, part):
    """Experts stay ternary, biases of a router and of a gate where they are, and so does a metric's strength."""
    if "lora" in part:
        pytest.importorskip("peft")
    preset, sizes = FROZEN[name]
    model, source = small(preset, **sizes), tmp_path / "source"
    runs.trainer(source, model, steps=4, eval_every=0).fit()
    before = dict(load_run(source)[0].named_buffers())
    trainer = runs.trainer(tmp_path / "run", model, steps=6, init=str(source), **part)
    for until in (3, 6):
        trainer.fit(until=until)
        found = {lora.plain(key): value for key, value in trainer.model.named_buffers()}
        kept = [key for key in before if not key.endswith("load_E")]
        assert kept and all(torch.equal(found[key], before[key]) for key in kept)


def test_a_metric_is_frozen_whatever_else_of_its_mixer_learns(runs, tmp_path):
    model = small("drm-3m", directions=4, d_token=8, emitter=16)
    runs.trainer(tmp_path / "source", model, steps=2, eval_every=0).fit()
    asked = {"steps": 2, "init": str(tmp_path / "source"), "only": ("*.z0",)}
    trainer = runs.trainer(tmp_path / "run", model, **asked)
    (before,) = (value.clone() for name, value in trainer.model.named_buffers() if name.endswith("strength"))
    trainer.fit(until=1)
    (after,) = (value for name, value in trainer.model.named_buffers() if name.endswith("strength"))
    assert torch.equal(before, after)


def test_float_experts_that_are_frozen_become_ternary_by_the_schedule(runs, tmp_path):
    source, sizes = tmp_path / "source", {"torus": [3, 2]}
    runs.trainer(source, small(**sizes), steps=1).fit()
    made = small(**sizes, ternary=True)
    trainer = runs.trainer(tmp_path / "run", made, steps=4, init=str(source), only=("embedding.weight",))
    shares = [value for key, value in trainer.model.named_buffers() if key.endswith(SHARE)]
    for step, share in ((1, 0.5), (2, 1.0)):
        trainer.fit(until=step)
        assert shares and all(value == share for value in shares)


def test_init_from_another_model_or_tokenizer_is_refused(runs, tmp_path, teacher):
    with refused(CheckpointError, teacher):
        runs.trainer(tmp_path / "a", init=str(teacher))
    other = Tokenizer.train(["quite another text, "] * 9, 280)
    copied = shutil.copytree(teacher, tmp_path / "copied")
    other.save(copied / "tokenizer.json")
    with refused(CheckpointError):
        runs.trainer(tmp_path / "b", "transformer-tiny", init=str(copied))
    with pytest.raises(CheckpointError):
        runs.trainer(tmp_path / "c", init=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError):
        runs.trainer(tmp_path / "d", teacher=str(tmp_path / "nowhere"))


def test_a_run_with_a_teacher_has_its_tokenizer(runs, tmp_path, teacher):
    (tmp_path / "text.txt").write_text("Another text than the teacher's, with other words. " * 40)
    config = runs.config(data=str(tmp_path / "text.txt"), teacher=str(teacher))
    tokenizer, shards, _ = prepare(tmp_path / "run", config)
    assert tokenizer.fingerprint == runs.tokenizer.fingerprint == shards.tokenizer_fingerprint
    assert checkpoint.read(checkpoint.paths(teacher)[-1]).tokenizer == tokenizer.fingerprint


# Training a part


def test_a_teacher_of_fewer_positions_is_refused_before_anything_is_left(runs, tmp_path):
    few = small("gpt2-tiny", positions=16)
    runs.trainer(tmp_path / "few", few, seq_len=16, steps=1).fit()
    with refused(ConfigError, "seq_len", 32, 16, tmp_path / "few"):
        runs.trainer(tmp_path / "run", teacher=str(tmp_path / "few"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_teacher_that_has_changed_is_told(runs, tmp_path):
    runs.trainer(tmp_path / "teacher", steps=1).fit()
    config = runs.config(steps=4, teacher=str(tmp_path / "teacher"))
    runs.start(tmp_path / "run", config).fit(until=2)
    runs.start(tmp_path / "run", config)
    shutil.rmtree(tmp_path / "teacher")
    runs.trainer(tmp_path / "teacher", steps=2).fit()
    kept = checkpoint.load_config(tmp_path / "run")
    with refused(ConfigError, "teacher", "--allow-changed", kept.taught[:12]):
        runs.start(tmp_path / "run", kept)
    assert checkpoint.load_config(tmp_path / "run").taught == kept.taught
    runs.start(tmp_path / "run", kept, allow_changed=True).fit()
    assert checkpoint.load_config(tmp_path / "run").taught != kept.taught


def test_only_what_is_named_is_trained(runs, tmp_path):
    variant = {"only": ("*.mixer_norm.*", "embedding.weight"), "steps": 8}
    whole = runs.trainer(tmp_path / "whole", **variant)
    before = copy.deepcopy(whole.model.state_dict())
    whole.fit()
    changed = {n for n, value in whole.model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {n for n in before if ".mixer_norm." in n} | {"embedding.weight"}
    runs.trainer(tmp_path / "halves", **variant).fit(until=4)
    again = runs.trainer(tmp_path / "halves", **variant)
    again.fit()
    runs.assert_same(runs.outcome(again), runs.outcome(whole))


def test_a_pattern_that_names_nothing_is_refused(runs, tmp_path):
    with refused(ConfigError, "only", "*.router.*"):
        runs.trainer(tmp_path, only=("norm.weight", "*.router.*"))


@pytest.mark.parametrize(
    "wrong", [{"ternary_from": -0.1}, {"ternary_from": 0.6}, {"ternary_until": 1.1},
              {"teacher_weight": -1.0}, {"teacher_temperature": 0.0}]
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused_by_name(wrong):
    with refused(ConfigError) as caught:
        TrainConfig(**wrong)
    assert next(iter(wrong)).partition("_")[0] in str(caught.value)


def test_configs_of_before_still_load(runs):
    from perspectron.util.config import dump, load

    config = runs.config()
    plain = dump(config)
    del plain["recipe"]
    for name in ("init", "only", "teacher", "teacher_weight", "ternary_from"):
        del plain["train"][name]
    assert load(RunConfig, plain) == config


def test_a_convex_share_takes_from_the_text_what_it_gives_the_teacher(runs, tmp_path, teacher):
    trainer = runs.trainer(tmp_path, teacher=str(teacher), teacher_mix=0.3, clip=0.0)
    trainer.model.double()
    trainer.teacher.model.double()
    student, batch = copy.deepcopy(trainer.model), copy.deepcopy(trainer.loader).next_batch()
    output = student(batch.ids_BT, targets=batch.targets_BT, reset_BT=batch.reset_BT)
    term = trainer.teacher.term(output.logits, batch.ids_BT, batch.targets_BT, batch.reset_BT)
    (0.7 * output.loss + 0.3 * term.mean()).backward()
    trainer.optimizer.step = lambda: None
    trainer.optimizer.zero_grad = lambda **_: None
    trainer.step()
    for (name, found), expected in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_share_without_a_teacher_or_above_1_is_refused():
    with refused(ConfigError, "teacher_mix", 0.5):
        TrainConfig(teacher_mix=0.5)
    with refused(ConfigError, "teacher_mix", 1.5):
        TrainConfig(teacher="run", teacher_mix=1.5)
