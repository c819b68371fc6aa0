"""Loggers get what metrics.jsonl has, with all losses in bits per byte, and none of them can end a training."""

import json
import sqlite3
import warnings

import pytest
from rich.console import Console

from perspectron.cli.fit import _fit
from perspectron.cli.main import main
from perspectron.data import encode, open_corpus
from perspectron.data.template import Template
from perspectron.train import loggers
from perspectron.train.loop import Trainer
from perspectron.train.metrics import bits_per_nat, read_metrics
from tests.refusals import names
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own


@pytest.fixture
def trained(runs, tmp_path, monkeypatch):
    """A short run with a logger, and what it logs of its metrics."""

    def train(kind, steps=4):
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        trainer = runs.trainer(tmp_path / "run", steps=steps, eval_every=2)
        assert _fit(trainer, True, Console(quiet=True), log=kind) is None
        split = trainer.shards.split("train")
        bits = split.tokens / split.text_bytes / 0.6931471805599453
        lines = [(line["step"], loggers.values(line, bits)) for line in read_metrics(trainer.run_dir)]
        assert lines[0][1]["train/bits_per_byte"] == pytest.approx(
            read_metrics(trainer.run_dir)[0]["loss"] * bits
        )
        assert "heldout/bits_per_byte" in lines[2][1]
        return trainer, lines

    return train


def test_tensorboard_has_every_line_once_after_a_resume(trained):
    """From a step before that of the last process, which had gone on without a checkpoint."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, lines = trained("tensorboard")
    folder, text = trainer.run_dir, trainer.shards.split("train")
    with loggers.logger("tensorboard", folder, trainer.config, text, 2) as log:
        for line in read_metrics(folder):
            if line["step"] > 2:
                log(line)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("train/bits_per_byte", "heldout/bits_per_byte"):
        expected = [(step, values[name]) for step, values in lines if name in values]
        got = [(event.step, event.value) for event in events.Scalars(name)]
        assert got == [(step, pytest.approx(value)) for step, value in expected]


def test_trackio_keeps_it_on_this_machine(trained, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
    trackio = pytest.importorskip("trackio")
    _, lines = trained("trackio")
    (database,) = trackio.utils.TRACKIO_DIR.glob("perspectron*.db")
    with sqlite3.connect(database) as kept:
        rows = kept.execute("select step, metrics from metrics").fetchall()
    assert sorted(step for step, _ in rows) == sorted(step for step, _ in lines)
    assert sum(b"heldout/bits_per_byte" in bytes(text) for _, text in rows) == 2


def test_wandb_works_offline(trained):
    pytest.importorskip("wandb")
    trainer, _ = trained("wandb")
    (file,) = trainer.run_dir.glob("wandb/offline-run-*/*.wandb")
    until(lambda: b"bits_per_byte" in file.read_bytes(), 0.1)  # a process of wandb's own writes it
    assert b"bits_per_byte" in file.read_bytes()


def test_a_logger_that_fails_ends_with_a_warning_and_not_the_training(trained, monkeypatch):
    closed = []

    def broken(*_):
        return lambda values, step: [][step], lambda: closed.append(True)

    monkeypatch.setitem(loggers.OPEN, "wandb", broken)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer, _ = trained("wandb")
    assert trainer.progress.step == 4 and closed == [True]
    assert [names(str(w.message), "metrics.jsonl") for w in said if "wandb" in str(w.message)] == [True]


def test_the_loss_of_completions_is_in_bits_of_their_own_bytes(runs, tmp_path, monkeypatch):
    """As they were measured: the text of the prompts is not learned."""
    pairs = [{"prompt": f"What is {i} and {i}? " * 3, "completion": f"It is {2 * i}."} for i in range(80)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    corpus = open_corpus(str(tmp_path / "pairs.jsonl"), 0.2, template=Template.named("plain"))
    shards = encode(corpus, runs.tokenizer, tmp_path / "data")
    run, logged = tmp_path / "run", dict[int, dict[str, float]]()
    fake = (lambda values, step: logged.setdefault(step, {}).update(values), lambda: None)
    monkeypatch.setitem(loggers.OPEN, "wandb", lambda *_: fake)

    def fit(until):
        trainer = Trainer(run, runs.config(steps=6, eval_every=2), runs.tokenizer, shards)
        with loggers.logger(
            "wandb", run, trainer.config, shards.split("train"), trainer.progress.step
        ) as log:
            trainer.fit(until, report=log)

    run.mkdir()
    runs.tokenizer.save(run / "tokenizer.json")
    fit(3)
    fit(6)
    lines = read_metrics(run)
    bits = bits_per_nat(lines)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    name = "train/bits_per_byte"
    assert name not in logged[1] and name not in logged[2]
    assert {step: logged[step][name] for step in (3, 4, 5, 6)} == {
        step: pytest.approx(bits * losses[step]) for step in (3, 4, 5, 6)
    }


def test_an_unknown_logger_is_refused_with_those_that_there_are(capsys):
    assert main(["train", "--data", "x.txt", "--log", "mlflow"]) == 2
    assert names(capsys.readouterr().err, "tensorboard")
