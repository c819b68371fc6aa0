"""Calibration of predictors whose calibration is known, and of a model against plain loops."""

import itertools
import math
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from perspectron.eval import calibration
from perspectron.eval.calibration import Options, Predictions, judged, measure, predictions, summary
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused


def drawn(accuracy, low: float = 0.2, windows: int = 120, per_window: int = 64, seed: int = 0) -> Predictions:
    """Confidence evenly in [low, 1], right with the probability `accuracy(confidence)`."""
    draw = np.random.Generator(np.random.PCG64(seed))
    N = windows * per_window
    confidence_N = draw.uniform(low, 1, N)
    correct_N = (draw.random(N) < accuracy(confidence_N)).astype(float)
    return Predictions(confidence_N, correct_N, np.zeros(N), np.arange(N) // per_window)


def test_a_calibrated_predictor_shows_no_more_than_chance():
    found = summary(drawn(lambda c: c))
    assert found["ece"] == pytest.approx(found["ece_calibrated"], abs=0.005)
    assert found["ece_low"] <= found["ece"] <= found["ece_high"] < 0.03
    assert found["accuracy"] == pytest.approx(0.6, abs=0.02)
    for b in found["bins"]:
        assert b["accuracy"] == pytest.approx(b["confidence"], abs=0.07)


@pytest.mark.parametrize(
    ("accuracy", "low", "ece"),
    [
        (lambda c: c - 0.1, 0.2, 0.1),
        (lambda c: c**2, 0.0, 1 / 6),  # ∫ c − c² over [0, 1]
        (lambda c: np.sqrt(c), 0.0, 1 / 6),  # ∫ √c − c
        (lambda c: 0 * c, 0.2, 0.6),
    ],
    ids=["overconfident by 0.1", "square", "root", "never right"],
)
def test_the_ece_of_a_known_miscalibration(accuracy, low, ece):
    found = [summary(drawn(accuracy, low, seed=seed), seed=seed) for seed in range(24)]
    assert np.mean([f["ece"] for f in found]) == pytest.approx(ece, abs=0.003)
    inside = sum(f["ece_low"] <= ece <= f["ece_high"] for f in found)
    assert inside >= 18  # where 23 are expected
    assert all(f["ece"] > 4 * f["ece_calibrated"] for f in found)


def test_the_interval_is_over_windows_not_tokens():
    """All 16 tokens of a window alike: as uncertain as one token each."""
    wide = drawn(lambda c: c - 0.2, low=0.3, per_window=1)
    N = np.arange(16 * 120) // 16
    alike = Predictions(wide.confidence_N[N], wide.correct_N[N], wide.brier_N[N], N)
    width = [f["ece_high"] - f["ece_low"] for f in (summary(alike), summary(wide))]
    assert width[0] == pytest.approx(width[1], rel=0.2)
    apart = summary(alike._replace(window_N=np.arange(16 * 120)))
    assert apart["ece_high"] - apart["ece_low"] < width[0] / 2


def test_windows_of_prompts_alone_are_not_among_those_resampled():
    """Nothing of them is measured: they change no number, and where too few are left there is no interval."""
    every = drawn(lambda c: c, windows=6, per_window=8)
    assert summary(every._replace(window_N=every.window_N * 50)) == summary(every)
    assert summary(every._replace(window_N=np.full(48, 7)))["ece_low"] is None


def test_tokens_of_which_none_is_learned_are_no_measurement(subject):
    it = subject("transformer")
    prompts = copy(it.text)
    prompts.learned = np.full(it.text.documents, it.text.tokens)
    with refused(DataError, it.text.name):
        measure(replace(it, split=prompts))


@pytest.mark.parametrize(("windows", "known"), [(1, False), (3, False), (4, True)])
def test_few_windows_have_no_interval(windows, known):
    found = summary(drawn(lambda c: c, windows=windows))
    assert found["ece"] > 0
    if known:
        assert 0 <= found["ece_low"] < found["ece_high"]
    else:
        assert (found["ece_low"], found["ece_high"]) == (None, None)
    assert ("no interval" in calibration.lines(found)[0]) is not known


def test_bins_hold_equally_many_and_all_of_them():
    found = summary(drawn(lambda c: c, windows=7, per_window=31), bins=15)
    counts = [b["count"] for b in found["bins"]]
    assert sum(counts) == found["tokens"] == 217
    assert max(counts) - min(counts) <= 1
    confidences = [b["confidence"] for b in found["bins"]]
    assert confidences == sorted(confidences)
    gaps = [b["count"] * abs(b["confidence"] - b["accuracy"]) for b in found["bins"]]
    assert found["ece"] == pytest.approx(sum(gaps) / 217)
    assert len(summary(drawn(lambda c: c, windows=1, per_window=4))["bins"]) == 4


def test_brier_is_the_sum_over_the_vocabulary():
    logits_NV = torch.randn(50, 17, generator=torch.Generator().manual_seed(0)).double() * 3
    target_N = torch.arange(50) % 17
    confidence, correct, brier = judged(logits_NV, target_N)
    for i, (row, target) in enumerate(zip(logits_NV.softmax(1).tolist(), target_N.tolist(), strict=True)):
        assert brier[i] == pytest.approx(sum((p - (k == target)) ** 2 for k, p in enumerate(row)))
        assert confidence[i] == pytest.approx(max(row))
        assert correct[i] == (row.index(max(row)) == target)
    sure = torch.full((2, 5), -1e4)
    sure[:, 3] = 0
    assert judged(sure, torch.tensor([3, 2]))[2].tolist() == [0, 2]
    assert judged(torch.zeros(1, 4), torch.tensor([1]))[2].tolist() == [0.75]


def test_a_models_predictions_are_those_of_plain_forwards(subject):
    subject = subject("perspective", model_dtype=torch.float64, seq_len=48)
    found, N = predictions(subject, None), subject.split.tokens - 1
    ids = subject.split.read(0, N + 1).tolist()
    assert (0 in ids[1:]) and len(found.confidence_N) == N
    assert found.window_N.tolist() == [i // 48 for i in range(N)]
    expected = []
    for start in range(0, N, 48):
        window = ids[start : min(start + 48, N)]
        borders = [0, *(i for i, id in enumerate(window) if id == 0 and i), len(window)]
        for low, high in itertools.pairwise(borders):
            with torch.no_grad():
                expected.append(subject.model(torch.tensor([window[low:high]])).logits[0].softmax(1))
    p_NV = torch.cat(expected)
    confidence, guess = p_NV.max(1)
    torch.testing.assert_close(torch.from_numpy(found.confidence_N), confidence, rtol=0, atol=1e-9)
    assert found.correct_N.tolist() == (guess == torch.tensor(ids[1:])).double().tolist()
    one_hot = torch.nn.functional.one_hot(torch.tensor(ids[1:]), 300)
    assert found.brier_N.mean() == pytest.approx((p_NV - one_hot).square().sum(1).mean().item())


def test_a_measurement_is_the_same_again(subject):
    subject = subject()
    found = measure(subject, Options(tokens=700))
    assert measure(subject, Options(tokens=700)) == found
    assert found["tokens"] == 700 // subject.seq_len * subject.seq_len < subject.split.tokens
    assert measure(subject, Options(tokens=0))["tokens"] == subject.split.tokens - 1
    assert len(calibration.lines(found)) == 3 + 15
    assert all(math.isfinite(found[name]) for name in ("ece", "ece_low", "ece_high", "brier"))


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"bins": 0}])
def test_options_out_of_bounds_are_named(wrong):
    with refused(ConfigError, *wrong):
        Options(**wrong)
