"""The suite of views: its measures against known cases, and calibration of a text."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from perspectron import build, presets
from perspectron.decode.perspectives import PerspectivesConfig
from perspectron.errors import ConfigError, DataError
from perspectron.eval import perspectives as suite


@pytest.fixture(scope="module")
def routed(subject):
    model = build(
        presets.get("perspective-tiny", vocab_size=300, d_model=32, hidden=32, rank=8, window=16), seed=1
    )
    with torch.no_grad():
        model.embedding.weight.mul_(12)
    return subject(model)


def test_detection_of_known_scores():
    wrong = np.array([0, 1, 0, 1, 0, 0.0])
    assert suite.auroc(wrong, wrong) == 1 and suite.auroc(-wrong, wrong) == 0
    assert suite.auroc(np.zeros(6), wrong) == 0.5 and math.isnan(suite.auroc(wrong, np.zeros(6)))
    perfect = suite.quality(wrong, wrong)
    assert perfect["aupr"] == 1
    assert perfect["risk_coverage"] == pytest.approx((1 / 5 + 2 / 6) / 6)
    draw = np.random.default_rng(0)
    wrong, score = draw.integers(0, 2, 400).astype(float), draw.random(400)
    found = suite.paired(score + wrong, score, wrong, np.arange(400) // 20, 0)
    assert 0 < found["low"] < found["difference"] < found["high"]
    same = suite.paired(score, score, wrong, np.arange(400) // 20, 0)
    assert same == {"difference": 0, "low": 0, "high": 0}


def test_the_temperature_of_least_loss_is_found():
    assert suite.golden(lambda x: (x - 0.3) ** 2, -2, 2) == pytest.approx(0.3, abs=2e-3)
    draw = torch.Generator().manual_seed(0)
    log = torch.randn(20_000, 5, generator=draw).log_softmax(1)
    target = torch.multinomial((log / 2).softmax(1), 1, generator=draw)[:, 0]
    assert suite.fitted(log, target) == pytest.approx(2.0, rel=0.1)


def test_the_suite_says_all_of_it(routed):
    found = suite.measure(routed, suite.Options(tokens=256))
    assert found["tokens"] == 256 and found["surrogate"] is False
    assert set(found["detection"]) > {"D", "I", "entropy", "D(0,1)", "D(2,3)", "D, Gumbel", "1 - max mixture"}
    assert len(found["bands"]) == 4 and len(found["ece"]) == 6
    assert found["rates"]["flagged"] <= found["rates"]["disagreed"] <= found["rates"]["triggered"]
    assert found["adds"]["low"] <= found["adds"]["high"] and found["beats"] is not None
    assert any("over Gumbel noise" in line for line in suite.lines(found))
    ends = suite.measure(routed, suite.Options(tokens=64, from_layer=4))
    assert ends["detection"]["D"]["auroc"] == 0.5 and ends["rates"]["flagged"] == 0


def test_calibration_meets_its_targets_or_says_why_not(routed):
    config, rates = suite.calibrate(
        routed, PerspectivesConfig(), tokens=256, target_flag=0.25, target_trigger=0.4
    )
    assert rates["triggered"] == pytest.approx(0.4, abs=0.02)
    assert rates["disagreed"] == pytest.approx(0.1, abs=0.02)
    assert 0 < config.threshold < 1 and config.temperature != 1
    with pytest.raises(DataError, match=r"tokens; ask for as many or fewer, not 10,000,000"):
        suite.calibrate(routed, PerspectivesConfig(), tokens=10_000_000, target_flag=0.1)
    with pytest.raises(ConfigError, match="target_flag = 2"):
        suite.calibrate(routed, PerspectivesConfig(), tokens=64, target_flag=2)


def test_a_model_without_experts_needs_the_surrogate(subject):
    dense = subject(
        build(presets.get("perspective-tiny-dense", vocab_size=300, d_model=32, hidden=32), seed=1)
    )
    with pytest.raises(ConfigError, match="must be of a model with routed experts"):
        suite.measure(dense, suite.Options(tokens=64))
    found = suite.measure(dense, replace(suite.Options(tokens=64), surrogate=True))
    assert found["surrogate"] and found["beats"] is None and "(surrogate)" in suite.lines(found)[0]
