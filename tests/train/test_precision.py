"""The precision of a training, chosen by measurement."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.data.loader import Batch
from perspectron.model.model import LanguageModel
from perspectron.train import estimate as precision
from perspectron.train.checkpoint import INDEX, save_config
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import OptimConfig, freeze
from perspectron.util.errors import ConfigError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("load", "half", "chosen"),  # tenths of a second for each pair
    [
        ([1, 1, 1, 1, 1, 1], 0.9, "bfloat16"),
        (
            [9, 1, 1, 3, 3, 1],
            0.9,
            "bfloat16",
        ),  # busy for a while: the slowest of one is above the fastest of the other
        ([9, 1, 2, 1, 2, 1], 0.99, "float32"),
        ([1, 1, 1, 1, 1, 1], 1.2, "float32"),
    ],
)
def test_pairs_of_passes_decide(monkeypatch, load, half, chosen):
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    taken = []

    def timed(_, __, ___, dtype: str) -> float:
        taken.append(dtype)
        return 0.1 * load[(len(taken) - 1) // 2] * (half if dtype == "bfloat16" else 1.0)

    monkeypatch.setattr(precision, "training_pass", timed)
    monkeypatch.setattr(precision, "products", lambda device, dtype: 1.0)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert precision.faster(model, Batch(ids, ids, None, 4), torch.device("cpu")) == chosen
    assert taken == ["float32", "bfloat16"] * 6


@pytest.mark.parametrize(("seconds", "pairs"), [(30.0, 1), (4.0, 3)])
def test_large_models_have_fewer_pairs(monkeypatch, seconds, pairs):
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    taken = []

    def timed(_, __, ___, dtype: str) -> float:
        taken.append(dtype)
        return seconds * (0.9 if dtype == "bfloat16" else 1.0)

    monkeypatch.setattr(precision, "training_pass", timed)
    monkeypatch.setattr(precision, "products", lambda device, dtype: 1.0)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert precision.faster(model, Batch(ids, ids, None, 4), torch.device("cpu")) == "bfloat16"
    assert len(taken) == 2 * pairs


def test_no_pass_is_made_where_products_tell(monkeypatch):
    """A pass in bfloat16 can take minutes there."""
    monkeypatch.setattr(precision, "training_pass", None)
    monkeypatch.setattr(precision, "products", lambda device, dtype: 1.0 if dtype == torch.float32 else 2.1)
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert precision.faster(model, Batch(ids, ids, None, 4), torch.device("cpu")) == "float32"


def test_products_are_timed():
    assert 0 < precision.products(torch.device("cpu"), torch.float32) < 60


@pytest.mark.parametrize(("asked", "read"), [(0, 12_800), (6_400, 6_400), (65_536, 12_800)])
def test_the_time_of_a_training_has_that_of_all_it_measures(asked, read):
    """Of a split of 12,800 tokens, six times, with updates of 640 tokens."""
    train = TrainConfig(steps=50, batch_size=4, seq_len=160, eval_every=10, eval_tokens=asked)
    config = RunConfig(presets.get("transformer-tiny"), train)
    whole = precision.Estimate(3.0, 0).whole(config, 12_800)
    assert whole == pytest.approx(3.0 * 50 + 6 * read / 640)
    assert precision.Estimate(3.0, 0).whole(config, 12_800, 45) == pytest.approx(3.0 * 5 + read / 640)


@pytest.mark.parametrize(
    ("part", "each"),
    [({}, 16), ({"only": ("norm.*",)}, 4), ({"lora": "rank=1,targets=o_proj", "init": "x"}, 4)],
    ids=["all", "only", "lora"],
)
def test_memory_is_asked_for_what_learns_and_what_is_frozen(monkeypatch, part, each):
    config = presets.get("transformer-tiny", vocab_size=300, d_model=64, layers=2)
    run = RunConfig(config, TrainConfig(batch_size=1, seq_len=1, **part))
    size = precision.parameters(config)
    for share, fits in ((1.3, True), (0.9, False)):
        monkeypatch.setattr(precision, "room", lambda _, share=share: share * each * size)
        with nullcontext() if fits else refused(ConfigError, config.name):
            precision.require_room(run, torch.device("cpu"))


def test_muon_keeps_one_moment_for_its_matrices(monkeypatch):
    config = presets.get("transformer-tiny", vocab_size=300, d_model=64, layers=2)
    run = RunConfig(config, TrainConfig(batch_size=1, seq_len=1, optim=OptimConfig(optimizer="muon")))
    with torch.device("meta"):
        turned = sum(p.numel() for p in LanguageModel(config).blocks.parameters() if p.ndim == 2)
    needs = 16 * precision.parameters(config) - 4 * turned + 12 * 300
    for there, fits in ((needs + 1, True), (needs - 1, False)):
        monkeypatch.setattr(precision, "room", lambda _, there=there: there)
        with nullcontext() if fits else refused(ConfigError, config.name):
            precision.require_room(run, torch.device("cpu"))


@pytest.mark.parametrize("of_step", [False, True], ids=["run", "checkpoint"])
def test_memory_is_asked_for_a_teacher_too(of_step, monkeypatch, tmp_path):
    config = presets.get("transformer-tiny", vocab_size=300, d_model=64, layers=2)
    its = presets.get("transformer-tiny", vocab_size=300, d_model=64, layers=6)
    step = tmp_path / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / INDEX).write_text("{}")
    save_config(tmp_path, RunConfig(its, TrainConfig()))
    run = RunConfig(config, TrainConfig(batch_size=1, seq_len=1, teacher=str(step if of_step else tmp_path)))
    needs = 16 * precision.parameters(config) + 4 * precision.parameters(its)
    for share, fits in ((1.1, True), (0.9, False)):
        monkeypatch.setattr(precision, "room", lambda _, share=share: share * needs)
        with nullcontext() if fits else refused(ConfigError, tmp_path):
            precision.require_room(run, torch.device("cpu"))


def test_the_moments_of_what_learns_alone_are_counted(monkeypatch):
    monkeypatch.setattr(precision, "Peak", lambda: nullcontext(SimpleNamespace(bytes=0)))
    monkeypatch.setattr(precision, "resident", lambda: 0)
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    config = RunConfig(model.config, TrainConfig(dtype="float32"))
    freeze(model, ("norm.weight",))
    found = precision.estimate(model, lambda: None, config)
    assert found.bytes == 8 * 16
