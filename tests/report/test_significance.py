"""Paired statistics against closed forms and numbers worked by hand."""

import math

import pytest

from perspectron.report.significance import deviation, paired


def test_three_seeds_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, error 1/√3, t = 2√3; p = 1 − t/√(2 + t²) = 1 − √(12/14).
    result = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert result.n == 3 and result.mean == 2
    assert result.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert result.high - result.mean == pytest.approx(4.30265 / math.sqrt(3), abs=1e-5)
    assert result.low < 0 < result.high and not result.sure
    assert result.p_flips == result.smallest == 0.25


def test_signs_alone_cannot_be_sure_with_few_seeds():
    differences = [1.0, 1.01, 0.99]
    result = paired(differences, [0.0] * 3)
    assert result.sure and result.p < 0.001
    assert result.p_flips == 0.25
    assert paired([1.0] * 5 + [1.1], [0.0] * 6).p_flips == 2 / 64


def test_flips_count_sums_as_far_out():
    # Sums of ±1±2±3 as far from zero as 1+2−3 = 0: all eight.
    assert paired([1.0, 2.0, -3.0], [0.0] * 3).p_flips == 1
    # As far as 4 (= −1+2+3): 6, 4, −4 and −6.
    assert paired([-1.0, 2.0, 3.0], [0.0] * 3).p_flips == 0.5


def test_swapping_sides_turns_the_sign_only():
    one, two = paired([1.0, 1.5, 1.1], [1.2, 1.9, 1.15]), paired([1.2, 1.9, 1.15], [1.0, 1.5, 1.1])
    assert one.mean == -two.mean and one.low == -two.high
    assert one.p == two.p and one.p_flips == two.p_flips


def test_one_seed_has_no_test():
    result = paired([1.0], [0.5])
    assert (result.n, result.mean, result.low, result.p, result.p_flips) == (1, 0.5, None, None, None)
    assert not result.sure
    assert paired([], []) is None


def test_equal_differences():
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0
    same = paired([2.0, 3.0], [2.0, 3.0])
    assert same.p == 1 and not same.sure


def test_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="not pairs"):
        paired([1.0], [])


def test_deviation_by_hand():
    assert deviation([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3))
