"""The suite of views: its measures against known cases, and calibration of a text."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from perspectron import build, presets
from perspectron.designs.perspective.suites import detection
from perspectron.designs.perspective.suites import views as suite
from perspectron.designs.perspective.views import PerspectivesConfig
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused


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
    assert detection.auroc(wrong, wrong) == 1 and detection.auroc(-wrong, wrong) == 0
    assert detection.auroc(np.zeros(6), wrong) == 0.5 and math.isnan(detection.auroc(wrong, np.zeros(6)))
    perfect = detection.quality(wrong, wrong)
    assert perfect["aupr"] == 1
    assert perfect["risk_coverage"] == pytest.approx((1 / 5 + 2 / 6) / 6)
    draw = np.random.default_rng(0)
    wrong, score = draw.integers(0, 2, 400).astype(float), draw.random(400)
    found = detection.paired(score + wrong, score, wrong, np.arange(400) // 20, 0)
    assert 0 < found["low"] < found["difference"] < found["high"]
    same = detection.paired(score, score, wrong, np.arange(400) // 20, 0)
    assert same == {"difference": 0, "low": 0, "high": 0}


def test_a_probe_finds_the_direction_of_what_is_wrong_and_is_judged_by_what_it_did_not_see():
    draw = np.random.default_rng(0)
    wrong = draw.integers(0, 2, 4000).astype(float)
    hidden = torch.from_numpy(draw.standard_normal((4000, 6)))
    hidden[:, 2] -= 3 * torch.from_numpy(wrong)
    normal = detection.fitted_probe(hidden, wrong)
    assert normal[2] < -0.99 and float(normal.norm()) == pytest.approx(1)
    window, blind = np.arange(4000) // 40, {"entropy": draw.random(4000)}
    found = detection.of_probe(hidden, wrong, blind, window, 0)
    assert found["tokens"] == 2000 and found["detection"]["probe"]["auroc"] > 0.97
    assert found["against_entropy"]["low"] > 0.4 and found["adds"]["low"] > 0.2
    asked = found["asked"]
    assert asked["probe"]["share"] == pytest.approx(detection.SHARE, abs=0.03)
    assert asked["probe"]["wrong"] > 0.98 and asked["entropy"]["wrong"] < 0.6
    backwards = np.concatenate(
        [wrong[:2000], 1 - wrong[2000:]]
    )  # what was learned is false on the second half
    turned = detection.of_probe(hidden, backwards, blind, window, 0)
    assert turned["detection"]["probe"]["auroc"] < 0.03
    with refused(DataError, "probe", 4000):
        detection.fitted_probe(hidden, np.ones(4000))


def test_the_temperature_of_least_loss_is_found():
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


def calibrated(subject, tokens, *targets):
    config = PerspectivesConfig()
    return suite.fit(suite.collect(subject, config, tokens), config, *targets)


def test_calibration_meets_its_targets_or_says_why_not(routed):
    config, rates = calibrated(routed, 256, 0.25, 0.4)
    assert rates["triggered"] == pytest.approx(0.4, abs=0.02)
    assert rates["disagreed"] == pytest.approx(0.1, abs=0.02)
    assert 0 < config.threshold < 1 and config.temperature != 1
    assert config.probe == () and "auroc" not in rates
    config, rates = calibrated(routed, 2048, 0.25, 0, 0.3)
    assert len(config.probe) == 32 and rates["triggered"] == pytest.approx(0.3, abs=0.1)
    assert set(rates["auroc"]) == {"probe", "entropy"}
    with refused(ConfigError, "target_probe", 1):
        calibrated(routed, 64, 0.1, None, 1)
    with refused(DataError, 10_000_000):
        calibrated(routed, 10_000_000, 0.1)
    with refused(ConfigError, "target_flag", 2):
        calibrated(routed, 64, 2)


def test_a_model_without_experts_needs_the_surrogate(subject):
    dense = subject(
        build(presets.get("perspective-tiny-dense", vocab_size=300, d_model=32, hidden=32), seed=1)
    )
    with refused(ConfigError, "perspectives"):
        suite.measure(dense, suite.Options(tokens=64))
    with refused(ConfigError, "from_layer", 1, "surrogate"):
        suite.measure(dense, suite.Options(tokens=64, surrogate=True, from_layer=1))
    found = suite.measure(dense, replace(suite.Options(tokens=64), surrogate=True))
    assert found["surrogate"] and found["beats"] is None and "(surrogate)" in suite.lines(found)[0]
