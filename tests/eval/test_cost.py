"""The cost suite: ratios against the transformer, memory of training, and what it refuses."""

import json
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from perspectron import build
from perspectron.eval import cost, timing
from perspectron.eval.cost import QUICK, Options, compare_costs, lines, peaks
from perspectron.eval.subject import Subject
from perspectron.eval.timing import Setting
from perspectron.model.census import census
from perspectron.model.config import ModelConfig
from perspectron.opening import Folder, Opened
from perspectron.presets import DESIGNS, small
from perspectron.util.errors import ConfigError
from tests.refusals import refused

TINY = Options(contexts=(16, 128), rounds=2, visit=1, seconds=0, batch_size=2, seq_len=16, dtype="bfloat16")


def config_of(design: str, **sizes: int) -> ModelConfig:
    return small(design, **{"vocab_size": 64, "d_model": 32, "layers": 1, "seq_len": 16} | sizes)


def subject_of(config: ModelConfig) -> Subject:
    folder = Folder(Path("runs/mine"), config, dtype=torch.bfloat16)
    return Subject(Opened(folder, build(config), None), None, seq_len=16)


@pytest.fixture
def known_peaks(monkeypatch):
    monkeypatch.setattr(cost, "peaks", lambda configs, *_: dict.fromkeys(configs, 1000))


@pytest.mark.slow
def test_every_design_in_one_run(known_peaks):
    results = compare_costs({design: config_of(design) for design in DESIGNS}, TINY)
    assert json.loads(json.dumps(results)) == results
    for design, result in results.items():
        assert result["contexts"] == [16, 128] and not result["skipped"]
        assert all(result["decode_ms"][n] > 0 and result["touched_bytes"][n] > 0 for n in ("16", "128"))
        assert result["train_tokens_per_second"] > 0
        assert set(result["train_tokens_per_second_spread"]) == {"float32", "bfloat16"}
        assert result["to_transformer"]["decode_ms"]["128"]["count"] == 2
        assert result["to_transformer"]["train_peak_bytes"] == 1.0
        assert result["conditions"]["threads"] == torch.get_num_threads()
        assert bool(result["positions"]) == (design in ("adr", "lens", "gpt2"))
        assert result["flops_per_token"]["128"] >= result["flops_per_token"]["16"] > 0
        assert result["parameters"] == census(config_of(design), (16,)).parameters
    own = results["transformer"]["to_transformer"]
    assert own["decode_ms"]["16"]["median"] == own["train_tokens_per_second"]["median"] == 1.0
    assert results["lens"]["to_transformer"]["state_bytes"]["128"] > 1.4


def test_ratios_are_of_times_in_the_same_round(monkeypatch, known_peaks):
    """A machine that is three times as slow in one round changes no ratio."""
    steps = {"gla": [1.0, 3.0, 1.0], "transformer": [0.5, 1.5, 0.5]}
    monkeypatch.setattr(timing, "seconds_per_step", lambda *_: {n: {"bfloat16": s} for n, s in steps.items()})
    results = compare_costs({name: config_of(name) for name in steps}, TINY)
    speed = results["gla"]["to_transformer"]["train_tokens_per_second"]
    assert (speed["median"], speed["low"], speed["high"]) == (0.5, 0.5, 0.5)
    assert results["gla"]["train_tokens_per_second"] == 32.0


def test_without_memory_it_says_what_was_not_run(monkeypatch, known_peaks):
    for module in (cost, timing):
        monkeypatch.setattr(module, "room", lambda device: 0)
    result = compare_costs({"transformer": config_of("transformer")}, TINY)["transformer"]
    assert set(result["skipped"]) == {"16", "128", "training"}
    assert result["decode_ms"] == {"16": None, "128": None} and result["train_tokens_per_second"] is None
    assert result["to_transformer"]["decode_ms"]["16"] is None
    text = "\n".join(lines(result | {"no_transformer": ""}))
    assert "not run, training: " in text and "not run, 128: " in text


def test_a_run_beside_its_twin(known_peaks):
    config = replace(config_of("gla", vocab_size=256, d_model=96, layers=2), name="gla-mine")
    subject = subject_of(config)
    result = cost.measure(subject, replace(TINY, dtype=None, seq_len=None))
    assert abs(result["transformer"]["parameters"] / result["parameters"] - 1) <= 0.02
    assert result["conditions"]["dtype"] == "bfloat16" and result["conditions"]["seq_len"] == 16
    given = cost.measure(subject, replace(TINY, dtype="float32", seq_len=8))["conditions"]
    assert given["dtype"] == "float32" and given["seq_len"] == 8
    text = lines(result)
    assert any(line.split()[0] == "128" and "×" in line for line in text)
    assert f"{result['parameters']:,} parameters" in text[0]


def test_a_run_that_has_no_twin(known_peaks):
    result = cost.measure(subject_of(config_of("gla")), TINY)
    assert result["transformer"] is None and "params = " in result["no_transformer"]
    assert lines(result)[-1].startswith("no transformer to compare with: params = ")


@pytest.mark.slow
def test_training_takes_more_memory_than_weights_gradients_and_moments():
    config = small("transformer", vocab_size=4096, d_model=256, layers=2, seq_len=64)
    parameters = census(config, (1,)).parameters
    found = peaks({"fits": config, "short table": config_of("gpt2")}, Setting(1, 64), "float32")
    assert 16 * parameters < found["fits"] < 40 * parameters
    assert (
        found["short table"]
        == "ConfigError: position = 63, must be < positions = 16, the learned table of gpt2"
    )


def test_a_process_that_dies_is_told(monkeypatch):
    config = config_of("gla")
    resource_tracker.ensure_running()  # begun below, it would die, too, and others would miss it
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    assert peaks({"a": config}, Setting(1, 8), "float32")["a"].startswith("BrokenProcessPool: ")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contexts": ()}, ["contexts"]),
        ({"contexts": (1024, 3), "visit": 4}, ["contexts", 3]),
        ({"rounds": 0}, ["rounds", 0]),
        ({"visit": 0}, ["visit", 0]),
        ({"seconds": -1.0}, ["seconds"]),
        ({"dtype": "float16"}, ["dtype", "float16"]),
    ],
)
def test_an_option_out_of_bounds_is_refused_by_name(change, named):
    with refused(ConfigError, *named):
        replace(QUICK, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seq_len": 17}, ["seq_len", 17]),
        ({"seq_len": 0}, ["seq_len", 0]),
        ({"batch_size": 0}, ["batch_size", 0]),
        ({"device": "cuda:7"}, ["device", "cuda:7"]),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(change, named):
    with refused(ConfigError, *named):
        compare_costs({"gpt2": config_of("gpt2")}, replace(TINY, **change))


def test_no_designs_and_packed_models_are_refused():
    with refused(ConfigError, "designs"):
        compare_costs({}, TINY)
    subject = subject_of(config_of("gla"))
    packed = replace(subject.opened, folder=replace(subject.opened.folder, quant={}))
    with refused(ConfigError):
        cost.measure(replace(subject, opened=packed), TINY)
