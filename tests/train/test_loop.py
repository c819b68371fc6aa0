"""What a step does, what the loop writes, and how it stops at numbers that are none."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from perspectron.train import checkpoint, loop
from perspectron.train.heldout import Heldout
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import AdamW, OptimConfig, falls_at, learning_rate, optimizer_of
from perspectron.train.prepare import prepare
from perspectron.util.errors import ConfigError, DataError, NonFiniteError
from tests.refusals import refused

MODELS = ("perspective-tiny", "transformer-tiny")


def losses(trainer) -> list[float]:
    return [line["loss"] for line in read_metrics(trainer.run_dir) if "loss" in line]


# Learning


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_it_learns(runs, tmp_path, model):
    trainer = runs.trainer(
        tmp_path, model, steps=100, eval_every=50, eval_tokens=0, save_every=0,
        optim=OptimConfig(lr=1e-2, warmup=5),
    )  # fmt: skip
    start = trainer.measure()["heldout_bits_per_byte"]
    trainer.fit()
    course = losses(trainer)
    assert course[0] == pytest.approx(math.log(300), abs=0.3)
    assert sum(course[-5:]) / 5 < 0.4 * course[0]
    held = [m["heldout_bits_per_byte"] for m in read_metrics(tmp_path) if "heldout_bits_per_byte" in m]
    assert len(held) == 2
    assert trainer.best == min(held) < 0.5 * start
    assert trainer.progress.tokens == 100 * 4 * 32


def test_a_corpus_has_no_dev_split_before_it_is_tokenised(runs, tmp_path):
    (tmp_path / "text.txt").write_text("Some text to train on, and more of it. " * 40)
    config = runs.config(data=str(tmp_path / "text.txt"), measured_on="dev")
    with refused(ConfigError, "measured_on", "dev"):
        prepare(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    gone = str(tmp_path / "encoded")  # of a comparison that was moved
    with refused(DataError, gone):
        prepare(tmp_path / "run", runs.config(data=gone, measured_on="dev"))


def test_the_mean_gradient_of_accumulated_batches_is_that_of_one(runs, tmp_path):
    """In float64: 3 batches of 2 windows against one batch of 6."""
    gradients = []
    for name, batch_size, accumulate in (("many", 2, 3), ("one", 6, 1)):
        trainer = runs.trainer(tmp_path / name, batch_size=batch_size, accumulate=accumulate, clip=0.0)
        trainer.model.double()
        seen = {}
        trainer.optimizer.step = lambda t=trainer, s=seen: s.update(
            {n: p.grad.clone() for n, p in t.model.named_parameters()}
        )
        line = trainer.step()
        gradients.append((seen, line))
    (many, first), (one, second) = gradients
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-12)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-10)
    assert first["tokens"] == second["tokens"] == 6 * 32
    for name in one:
        assert one[name].dtype == torch.float64
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_recompute_changes_no_bit(runs, tmp_path, model):
    plain = runs.trainer(tmp_path / "plain", model, steps=3)
    plain.fit()
    again = runs.trainer(tmp_path / "again", model, steps=3, recompute=True)
    assert again.model.recompute and not plain.model.recompute
    again.fit()
    runs.assert_same(runs.outcome(again), runs.outcome(plain))


def test_one_step_is_a_plain_adamw_step(runs, tmp_path):
    """Against torch's unfused AdamW in a loop of its own, clipped."""
    trainer = runs.trainer(tmp_path, clip=0.1)
    model, config = copy.deepcopy(trainer.model), trainer.config.train.optim
    batch = trainer.loader.next_batch()
    trainer.loader.load_state_dict(trainer.loader.state_dict() | {"epoch": 0, "cursor": 0})
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=config.lr / 3, betas=(config.beta1, config.beta2), foreach=False)
    loss = model(batch.ids_BT, targets=batch.targets_BT, reset_BT=batch.reset_BT).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    plain.step()
    line = trainer.step()
    assert line["loss"] == loss.item()
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert line["lr"] == pytest.approx(config.lr / 3)
    assert norm > 0.1
    for (name, a), b in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clip_bounds_the_gradient_and_reports_it_unclipped(runs, tmp_path, clip):
    trainer = runs.trainer(tmp_path, clip=clip)
    norms = []
    trainer.optimizer.step = lambda: norms.append(
        nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item()
    )
    reported = trainer.step()["grad_norm"]
    assert reported > 0.1
    assert norms[0] == pytest.approx(0.01 if clip == 0.01 else reported, rel=1e-3)


# The optimizer


def test_a_training_does_not_load_the_compiler(tmp_path):
    """It takes a second, which is most of a short training."""
    text = tmp_path / "text.txt"
    text.write_text("Some text to train on, and more of it. " * 400)
    code = (
        "import sys; from perspectron.cli.main import main;"
        f"assert main(['train', '--data', {str(text)!r}, '--out', {str(tmp_path / 'run')!r}, '--preset', 'gla-tiny',"
        "'--steps', '2', '--seq-len', '32']) == 0; sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_its_methods_are_those_of_torch():
    """A step, its state, and a step after loading torch's."""
    torch.manual_seed(0)
    ours, plain = (nn.Linear(3, 2) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizers = [kind(m.parameters(), lr=0.1) for kind, m in ((AdamW, ours), (torch.optim.AdamW, plain))]
    for _ in range(2):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
        states = [optimizer.state_dict() for optimizer in optimizers]
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b) and a.is_leaf
        optimizers[0].load_state_dict(copy.deepcopy(states[1]))


@torch.no_grad()
def orthogonalised(update: torch.Tensor) -> torch.Tensor:
    """Newton and Schulz's iteration in float64, by the coefficients of Muon's author."""
    x = update.double() / update.double().norm()
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if len(update) > update.shape[1] else x


def test_one_step_of_muon_orthogonalises_the_matrices_of_blocks_and_leaves_the_rest_to_adamw(runs, tmp_path):
    trainer, plain = (
        runs.trainer(tmp_path / kind, optim=OptimConfig(lr=3e-3, warmup=3, clip=0.0, optimizer=kind))
        for kind in ("muon", "adamw")
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    gradients = {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        gradients.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()}), step()
    )  # fmt: skip
    lr = trainer.step()["lr"]
    plain.step()
    others, moved = dict(plain.model.named_parameters()), 0
    for name, parameter in trainer.model.named_parameters():
        if not (name.startswith("blocks.") and parameter.ndim == 2):
            assert torch.equal(parameter, others[name]), name
            continue
        moved += 1
        decayed = before[name].double() * (1 - lr * trainer.config.train.optim.weight_decay)
        # Its scale does not matter, nor does momentum in the first step.
        towards = orthogonalised(gradients[name])
        size = 0.2 * max(parameter.shape) ** 0.5 * lr
        error = (decayed - size * towards - parameter).norm() / (size * towards).norm()
        # The iteration runs in bfloat16; of the gradient itself it is above 0.5.
        assert error < 0.15, (name, error)
    assert moved >= 4


def test_only_matrices_decay(runs, tmp_path):
    trainer = runs.trainer(tmp_path)
    optimizer = optimizer_of(trainer.model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    names = {"matrix": 0, "vector": 0}
    for name, parameter in trainer.model.named_parameters():
        kind, factor = ("matrix", 0.95) if parameter.ndim == 2 else ("vector", 1.0)
        names[kind] += 1
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=1e-9)
        assert name.endswith(("norm.weight", "bias")) == (kind == "vector")
    assert min(names.values()) > 5
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(names.values())


def test_cosine_schedule_at_known_points():
    config = OptimConfig(lr=2.0, schedule="cosine", warmup=10, final=0.1)
    at = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 60: 2 * (0.1 + 0.9 / 2), 110: 0.2, 500: 0.2}
    for step, expected in at.items():
        assert learning_rate(step, 110, config) == pytest.approx(expected)
    quarter = 2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(35, 110, config) == pytest.approx(quarter)
    assert learning_rate(109, 110, config) == pytest.approx(0.2, rel=0.01)


def test_between_two_updates_a_constant_rate_falls_where_it_begins_to():
    config = OptimConfig(lr=1.0, schedule="constant", warmup=0, final=0.0, cooldown=0.25)
    for step in (7.5, 7.6, 7.9, 8.0):
        assert learning_rate(step, 10, config) == pytest.approx((10 - step) / 2.5)


def test_constant_schedule_with_cooldown_at_known_points():
    config = OptimConfig(lr=1.0, schedule="constant", warmup=5, final=0.0, cooldown=0.2)
    at = {0: 0.2, 4: 1.0, 5: 1.0, 79: 1.0, 80: 1.0, 90: 0.5, 95: 0.25, 99: 0.05, 100: 0.0}
    for step, expected in at.items():
        assert learning_rate(step, 100, config) == pytest.approx(expected)
    ends = replace(config, final=0.3)
    assert learning_rate(90, 100, ends) == pytest.approx(0.65)
    assert learning_rate(99, 100, replace(config, cooldown=0.0)) == 1.0
    assert learning_rate(0, 100, replace(config, warmup=0)) == 1.0
    for steps in (100, 200, 300, 400, 600):  # of a share that rounding makes larger
        short = replace(config, warmup=0, cooldown=0.07)
        assert learning_rate(falls_at(steps, short) - 1, steps, short) == 1.0


def test_the_schedule_is_what_the_steps_use(runs, tmp_path):
    trainer = runs.trainer(tmp_path, steps=6)
    seen = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (seen.extend(g["lr"] for g in trainer.optimizer.param_groups), step())
    trainer.fit()
    expected = [learning_rate(i, 6, trainer.config.train.optim) for i in range(6)]
    assert seen == [lr for lr in expected for _ in range(2)]
    assert [line["lr"] for line in read_metrics(tmp_path) if "lr" in line] == expected
    assert len(set(expected)) > 4


# Numbers that are none


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("place", "module"),
    [
        ("blocks.1.mixer.v_proj.weight", "blocks.1.mixer.v_proj"),
        ("blocks.3.ffn.down_proj.weight", "blocks.3.ffn.down_proj"),
        ("norm.weight", "norm"),
    ],
)
def test_a_loss_that_is_not_finite_stops_before_the_update(runs, tmp_path, place, module, bad):
    trainer = runs.trainer(tmp_path)
    trainer.fit(until=2)
    with torch.no_grad():
        trainer.model.get_parameter(place).view(-1)[0] = bad
    before, _, _ = runs.outcome(trainer)
    with refused(NonFiniteError, 3, module):
        trainer.fit()
    after, _, _ = runs.outcome(trainer)
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    assert all(not module._forward_hooks for module in trainer.model.modules())
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert runs.trainer(tmp_path).progress.step == 2


def test_a_gradient_that_is_not_finite_stops_before_the_update(runs, tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.fit(until=2)
    before, _, _ = runs.outcome(trainer)
    parameter = trainer.model.get_parameter("blocks.2.mixer.k_proj.weight")
    parameter.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
    with refused(NonFiniteError, 3, "blocks.2.mixer.k_proj.weight"):
        trainer.fit()
    after, _, _ = runs.outcome(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_held_out_loss_that_is_not_finite_is_neither_logged_nor_saved(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "heldout", lambda *_, **__: Heldout(math.nan, math.nan, 10, 10))
    trainer = runs.trainer(tmp_path)
    with refused(NonFiniteError, 4, "nan"):
        trainer.fit()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert runs.trainer(tmp_path).progress.step == 3


# Precision and device


def test_bfloat16_trains_close_to_float32(runs, tmp_path):
    results = {}
    for dtype in ("float32", "bfloat16"):
        trainer = runs.trainer(tmp_path / dtype, steps=30, dtype=dtype, eval_every=0, eval_tokens=0)
        trainer.fit()
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
        results[dtype] = (trainer.best, losses(trainer))
    assert results["bfloat16"][1] != results["float32"][1]
    assert results["bfloat16"][0] == pytest.approx(results["float32"][0], rel=0.02)
    assert results["bfloat16"][1][-1] < 0.9 * results["bfloat16"][1][0]


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_auto_is_settled_by_measuring_and_saved(runs, tmp_path, monkeypatch, faster):
    calls = []
    monkeypatch.setattr(loop, "faster", lambda *given: calls.append(given) or faster)
    trainer = runs.trainer(tmp_path / "auto", steps=3, dtype="auto")
    assert len(calls) == 1
    assert trainer.config.train.dtype == checkpoint.load_config(tmp_path / "auto").train.dtype == faster
    trainer.fit()
    told = runs.trainer(tmp_path / "told", steps=3, dtype=faster)
    told.fit()
    runs.assert_same(runs.outcome(trainer), runs.outcome(told))


@pytest.mark.parametrize("model", MODELS)
def test_measuring_the_precision_leaves_no_trace(runs, tmp_path, model):
    auto = runs.trainer(tmp_path / "auto", model, dtype="auto")
    dtype = json.loads((tmp_path / "auto" / "config.json").read_text())["train"]["dtype"]
    assert dtype in ("float32", "bfloat16")
    told = runs.trainer(tmp_path / "told", model, dtype=dtype)
    assert all(p.grad is None for p in auto.model.parameters())
    assert auto.loader.state_dict() == told.loader.state_dict()
    assert auto.model.fingerprint() == told.model.fingerprint()


@pytest.mark.parametrize("named", ["/nowhere", "/", ""])
def test_compile_without_a_compiler_is_refused_by_name(tmp_path, named):
    """In another process: torch remembers a compiler that it found."""
    text = tmp_path / "text.txt"
    text.write_text("Some text to train on, and more of it. " * 400)
    code = (
        f"import os, sys; os.environ['PATH'] = '/nowhere'; os.environ['CXX'] = {named!r};"
        "from perspectron.cli.main import main;"
        f"sys.exit(main(['train', '--data', {str(text)!r}, '--out', {str(tmp_path / 'run')!r}, '--preset', 'gla-tiny',"
        "'--steps', '2', '--seq-len', '32', '--compile']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "no C++ compiler" in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "abacus"])
def test_a_device_that_is_not_there_is_refused(runs, tmp_path, monkeypatch, name):
    real = torch.empty

    def empty(*shape, device=None, **more):  # the same with a torch that has CUDA and a machine that has one
        if device is not None and str(device).startswith("cuda"):
            raise AssertionError("Torch not compiled with CUDA enabled")
        return real(*shape, device=device, **more)

    monkeypatch.setattr(torch, "empty", empty)
    with refused(ConfigError, "device", name):
        runs.trainer(tmp_path, device=name)
    assert not (tmp_path / "config.json").exists()


# Metrics and curve


def test_the_metrics_parse_and_count(runs, tmp_path):
    trainer = runs.trainer(tmp_path, steps=8, eval_every=4)
    reported = []
    trainer.fit(report=reported.append)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == reported == read_metrics(tmp_path)
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 9))
    assert [line["tokens"] for line in trained] == [128 * i for i in range(1, 9)]
    assert [line["step"] for line in lines if "heldout_bits_per_byte" in line] == [4, 8]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    seconds = [line["seconds"] for line in trained]
    assert seconds == sorted(seconds) and seconds[0] > 0


def test_a_torn_last_line_is_left_out(runs, tmp_path):
    runs.trainer(tmp_path, steps=8).fit(until=4)
    metrics = tmp_path / "metrics.jsonl"
    whole, content = read_metrics(tmp_path), metrics.read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    for cut in range(2, last + 1, 7):
        metrics.write_bytes(content[:-cut])
        assert read_metrics(tmp_path) == whole[:-1]
    assert read_metrics(tmp_path / "nowhere") == []
