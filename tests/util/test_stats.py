"""Intervals and tests against closed forms, printed tables and scipy's own paired test."""

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

from perspectron.util.stats import RESAMPLINGS, bootstrap, interval, middle, paired, student
from tests.refusals import refused


def test_three_seeds_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, error 1/√3, t = 2√3; p = 1 − t/√(2 + t²) = 1 − √(12/14).
    result = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (result.n, result.mean) == (3, 2)
    assert result.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert result.high - result.mean == pytest.approx(4.30265 / math.sqrt(3), abs=1e-5)
    assert result.low < 0 < result.high
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((result.low, result.high))


def test_a_paired_test_is_scipys():
    draw = np.random.default_rng(0)
    a, b = draw.normal(2, 1, 7).tolist(), draw.normal(1, 1, 7).tolist()
    result, expected = paired(a, b), scipy.stats.ttest_rel(a, b)
    assert result.p == pytest.approx(expected.pvalue)
    assert (result.low, result.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (9, 2.26216), (30, 2.04227)])
def test_half_widths_of_the_tables(freedom, quantile):
    assert student(5.0, 2.0, freedom) == pytest.approx((5 - 2 * quantile, 5 + 2 * quantile), abs=1e-3)


def test_swapping_sides_turns_the_sign_only():
    one, two = paired([1.0, 1.5, 1.1], [1.2, 1.9, 1.15]), paired([1.2, 1.9, 1.15], [1.0, 1.5, 1.1])
    assert (one.mean, one.low, one.p) == (-two.mean, -two.high, two.p)


def test_one_seed_has_no_test():
    result = paired([1.0], [0.5])
    assert (result.n, result.mean, result.low, result.p) == (1, 0.5, None, None)
    assert paired([], []) is None
    assert interval([1.0]) is None


def test_equal_differences_have_the_probabilities_0_and_1():
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0
    same = paired([2.0, 3.0], [2.0, 3.0])
    assert same.p == 1


def test_unequal_numbers_are_refused():
    with refused(ValueError):
        paired([1.0], [])


def test_the_bootstrap_of_a_mean_is_as_wide_as_its_error():
    values = np.random.default_rng(1).normal(10, 2, 200)
    means = bootstrap(lambda index: values[index].mean(-1), 200, seed=0)
    low, high = middle(means)
    assert means.shape == (RESAMPLINGS,)
    assert means.std() == pytest.approx(values.std() / math.sqrt(200), rel=0.1)
    assert high - low == pytest.approx(2 * 1.96 * means.std(), rel=0.1)
    again = bootstrap(lambda index: values[index].mean(-1), 200, seed=0)
    assert (again == means).all()


def test_scipy_is_imported_when_used():
    code = "import sys, perspectron.util.stats; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
