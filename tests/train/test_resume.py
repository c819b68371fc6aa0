"""A run that was stopped anywhere, in any way, ends with the bits of one that never stopped."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perspectron
from perspectron import presets
from perspectron.train import checkpoint, resume
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig
from perspectron.train.resume import extend, how_to_go_on
from perspectron.util.config import dump
from perspectron.util.errors import CheckpointError, ConfigError
from tests.refusals import refused
from tests.waiting import PATIENCE

EXPERTS = presets.get(
    "perspective-tiny", vocab_size=300, d_model=32, hidden=32, rank=8, heads=2, kv_heads=1, window=16, torus=[3, 2],
    ternary=True, int8_activations=True, base=True, diversity=0.1,
)  # fmt: skip
DROPPED = presets.get(
    "perspective-tiny-dense",
    vocab_size=300,
    d_model=32,
    hidden=32,
    rank=8,
    heads=2,
    kv_heads=1,
    window=16,
    dropout=0.2,
)
VARIANTS = [
    {},
    {"model": "perspective-tiny"},
    {"model": EXPERTS, "recompute": True, "accumulate": 2},
    {"model": "transformer-tiny"},
    {"model": DROPPED, "recompute": True, "accumulate": 2},
    {"accumulate": 2, "recompute": True, "clip": 0.05},
    {"clip": 0.0, "batch_size": 3, "eval_every": 0, "save_every": 0},
    {"dtype": "bfloat16"},
    {"optim": OptimConfig(lr=3e-3, warmup=3, optimizer="muon")},
]


def record(trainer):
    """Every batch that the trainer will read."""
    batches, read = [], trainer.loader.next_batch

    def next_batch():
        batches.append(read())
        return batches[-1]

    trainer.loader.next_batch = next_batch
    return batches


def drive(run: Path, runs, config, kills: int) -> dict:
    """Train in other processes (see driver.py); its summary."""
    run.mkdir(exist_ok=True)
    runs.tokenizer.save(run / "tokenizer.json")
    (run.parent / "config-of-run.json").write_text(json.dumps(dump(config)))
    root = Path(perspectron.__file__).parents[1]
    driver = Path(__file__).with_name("driver.py")
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, driver, run, runs.data, run.parent / "config-of-run.json", str(kills)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same_on_disk(a: Path, b: Path, config):
    """Checkpoints kept, every tensor in the newest, progress, metrics and config."""
    kept = [[path.name for path in checkpoint.paths(run)] for run in (a, b)]
    assert kept[0] == kept[1]
    newest = [checkpoint.path_of(run, config.train.steps) for run in (a, b)]
    for name in (checkpoint.MODEL, checkpoint.TRAINING):
        first, second = (load_file(path / name) for path in newest)
        assert first.keys() == second.keys() and len(first) >= 30
        assert [key for key in first if not torch.equal(first[key], second[key])] == []
    progress = [vars(checkpoint.read(path).progress) | {"seconds": None} for path in newest]
    assert progress[0] == progress[1]
    timings = ("seconds", "tokens_per_second")
    metrics = [[{k: v for k, v in m.items() if k not in timings} for m in read_metrics(r)] for r in (a, b)]
    assert metrics[0] == metrics[1]
    assert checkpoint.load_config(a) == checkpoint.load_config(b)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant)[:60])
def test_half_and_half_equals_whole(runs, tmp_path, variant):
    whole = runs.trainer(tmp_path / "whole", **variant)
    expected = record(whole)
    assert whole.fit() is None
    assert whole.progress.loader["epoch"] >= 1  # the order crosses an epoch's end
    drawn_after = torch.rand(3)

    torch.manual_seed(5)  # another process may have drawn anything
    first = runs.trainer(tmp_path / "halves", **variant)
    batches = record(first)
    first.fit(until=7)
    torch.manual_seed(6)
    second = runs.trainer(tmp_path / "halves", **variant)
    assert second.progress.step == 7
    more = record(second)
    second.fit()
    batches += more

    runs.assert_same(runs.outcome(second), runs.outcome(whole))
    assert len(batches) == len(expected) == 14 * variant.get("accumulate", 1)
    for a, b in zip(batches, expected, strict=True):
        assert torch.equal(a.ids_BT, b.ids_BT) and torch.equal(a.targets_BT, b.targets_BT)
    assert torch.equal(torch.rand(3), drawn_after)


def test_the_random_state_is_restored(runs, tmp_path):
    runs.trainer(tmp_path).fit(until=3, report=lambda line: torch.rand(5))
    expected = torch.get_rng_state()
    torch.manual_seed(12)
    runs.trainer(tmp_path)
    assert torch.equal(torch.get_rng_state(), expected)


def test_every_step_a_new_trainer(runs, tmp_path):
    whole = runs.trainer(tmp_path / "whole", steps=6)
    whole.fit()
    for step in range(1, 7):
        last = runs.trainer(tmp_path / "steps", steps=6)
        last.fit(until=step)
    runs.assert_same(runs.outcome(last), runs.outcome(whole))


def test_what_came_after_the_checkpoint_is_forgotten(runs, tmp_path):
    """Steps done and logged but not saved are done and logged again, once."""
    whole = runs.trainer(tmp_path / "whole")
    whole.fit()
    crashed = runs.trainer(tmp_path / "crashed")

    def crash(line):
        if line["step"] == 11:  # saved at 9 (and at a best held-out of 4 or 8)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crashed.fit(report=crash)
    metrics = tmp_path / "crashed" / "metrics.jsonl"
    assert read_metrics(tmp_path / "crashed")[-1]["step"] == 11
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 12, "tok')
    again = runs.trainer(tmp_path / "crashed")
    assert again.progress.step == 9
    assert read_metrics(tmp_path / "crashed")[-1]["step"] == 9
    again.fit()
    runs.assert_same(runs.outcome(again), runs.outcome(whole))


@pytest.fixture
def heard() -> Iterator[None]:
    """An interrupt that is not ignored, as it is in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(runs, tmp_path, number, heard):
    whole = runs.trainer(tmp_path / "whole")
    whole.fit()
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stopped = runs.trainer(tmp_path / "stopped")

    def stop(line):
        if line["step"] == 5:
            os.kill(os.getpid(), number)

    assert stopped.fit(report=stop) == number
    assert stopped.progress.step == 5
    assert checkpoint.path_of(tmp_path / "stopped", 5).is_dir()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = runs.trainer(tmp_path / "stopped")
    assert again.progress.step == 5
    assert again.fit() is None
    runs.assert_same(runs.outcome(again), runs.outcome(whole))


def test_a_second_interrupt_acts_at_once(runs, tmp_path):
    trainer = runs.trainer(tmp_path)

    def stop(line):
        if line["step"] == 4 and "loss" in line:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(report=stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert runs.trainer(tmp_path).progress.step == 3


@pytest.mark.nightly
def test_a_run_killed_twenty_times_ends_as_one_that_was_not(runs, tmp_path):
    config = runs.config(steps=72, save_every=2, eval_every=6, seq_len=16, keep=2)
    whole = runs.start(tmp_path / "whole", config)
    whole.fit()
    summary = drive(tmp_path / "run", runs, config, kills=20)
    assert summary["status"] == 0
    assert len(summary["checkpoints"]) == 20
    assert summary["inside"] >= 3, "too few kills fell into a save"
    assert_same_on_disk(tmp_path / "run", tmp_path / "whole", config)
    assert list((tmp_path / "run").rglob("*.tmp")) == []
    assert math.isfinite(whole.best)


# More steps


CONSTANT = OptimConfig(lr=3e-3, warmup=3, schedule="constant", cooldown=0.3)
TERNARY = EXPERTS, {"ternary_from": 0.2, "ternary_until": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shares"), [("perspective-tiny-dense", {}), TERNARY], ids=["dense", "ternary"]
)
@pytest.mark.parametrize("until", [5, 10], ids=["on its way", "finished"])
def test_a_run_given_more_steps_is_one_that_had_them(runs, tmp_path, model, shares, until):
    """The rate had fallen from step 8 on; the longer run never did so there."""
    short, long = tmp_path / "short", tmp_path / "long"
    runs.trainer(short, model, steps=10, optim=CONSTANT, **shares, keep=1, save_every=1).fit(until=until)
    config, ended = extend(short, 20)
    grown = runs.start(short, config, ended=ended)
    assert checkpoint.load_config(short).train.steps == 20
    assert grown.progress.step == min(until, 8)
    ended = [path.name for path in checkpoint.folder(short).glob("ended-*")]
    assert ended == (["ended-step-00000010"] if until == 10 else [])
    grown.fit()
    halves = {name: share / 2 for name, share in shares.items()}
    whole = runs.trainer(long, model, steps=20, optim=CONSTANT, **halves, keep=1, save_every=1)
    whole.fit()
    ours, theirs = (trainer.model.state_dict() for trainer in (grown, whole))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    rates = [[line["lr"] for line in read_metrics(run) if "lr" in line] for run in (short, long)]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 20


def test_more_steps_change_nothing_before_an_older_checkpoint_is_read(runs, tmp_path, flip):
    runs.trainer(tmp_path, steps=10, optim=CONSTANT, keep=9, save_every=4, eval_every=0).fit()
    paths = checkpoint.paths(tmp_path)
    assert [path.name[-2:] for path in paths] == ["04", "08", "10"]

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    config, ended = extend(tmp_path, 20)
    assert (config.train.steps, ended, files()) == (20, [paths[2]], before)
    for path in paths[:2]:
        flip(path / "model.safetensors", -1, 0)
    before = files()
    with refused(CheckpointError, "step-00000008/model.safetensors"):
        runs.start(tmp_path, config, ended=ended)
    assert files() == before
    flip(paths[0] / "model.safetensors", -1, 0)  # whole again
    assert runs.start(tmp_path, config, ended=ended).progress.step == 4
    names = {path.name for path in checkpoint.folder(tmp_path).iterdir()}
    assert names == {"step-00000004", "damaged-step-00000008", "ended-step-00000010"}


@pytest.mark.parametrize("allow_changed", [False, True])
@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_named_before_its_moments_are_missed(
    runs, tmp_path, before, after, allow_changed
):
    optims = [OptimConfig(lr=3e-3, warmup=3, optimizer=name) for name in (before, after)]
    runs.trainer(tmp_path, steps=2, optim=optims[0]).fit(until=1)
    with refused(ConfigError, "config.json", "optim.optimizer", before, after):
        runs.start(tmp_path, runs.config(steps=2, optim=optims[1]), allow_changed=allow_changed)


def test_experts_become_ternary_at_the_same_updates_with_more_steps(runs, tmp_path):
    """7/10 of 10 steps are 7, but 7/30 of 30 are a little less."""
    shares = {"ternary_from": 0.3, "ternary_until": 0.7}
    short = runs.trainer(tmp_path, steps=10, optim=CONSTANT, **shares)
    short.fit(until=1)
    for steps in (30, 70):
        config, _ = extend(tmp_path, steps)
        assert config.train.ternary_between == short.config.train.ternary_between == (3.0, 7.0)


def test_the_checkpoint_before_the_fall_is_kept_without_being_due(runs, tmp_path):
    trainer = runs.trainer(tmp_path, steps=10, optim=CONSTANT, keep=1, save_every=0, eval_every=0)
    trainer.fit()
    assert [path.name for path in checkpoint.paths(tmp_path)] == ["step-00000008", "step-00000010"]


def test_a_run_that_cannot_have_more_steps_says_what_to_do(runs, tmp_path):
    cosine, constant = tmp_path / "cosine", tmp_path / "constant"
    runs.trainer(cosine, steps=2).fit()
    with refused(ConfigError, 2, "--init"):
        extend(cosine, 20)
    runs.trainer(constant, steps=10, optim=CONSTANT, keep=1).fit()
    for steps in (9, 10):
        with refused(ConfigError, "steps", steps, 10):
            extend(constant, steps)
    for path in checkpoint.paths(constant)[:-1]:
        resume.set_aside(path, "lost")
    with refused(CheckpointError, 8):
        extend(constant, 20)
    new = f"start a new run from its weights: perspectron train --init {constant} --out NEW"
    assert how_to_go_on(constant, checkpoint.load_config(constant)) == new
    assert checkpoint.load_config(constant).train.steps == 10


# Seams


class Sharded(Trainer):
    """Parameters replaced between building and resuming, as those of a rank are by FSDP2."""

    def wrap(self):
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(parameter.detach() * 0 + parameter.detach())
        super().wrap()


def test_parameters_may_be_replaced_before_a_run_is_resumed(runs, tmp_path):
    whole = runs.trainer(tmp_path / "whole")
    whole.fit()
    runs.tokenizer.save(tmp_path / "parts" / "tokenizer.json")
    for until in (7, 14):
        config = runs.config()
        parts = Sharded(tmp_path / "parts", config, runs.tokenizer, runs.shards)
        assert parts.progress.step == until - 7
        parts.fit(until=until)
    runs.assert_same(runs.outcome(parts), runs.outcome(whole))
