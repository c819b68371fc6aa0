"""Paired statistics against closed forms and numbers worked by hand."""

import math
import time

import pytest

from perspectron.report.significance import deviation, paired, student, student_quantile


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 4.3, 60.0])
def test_student_against_closed_forms(t):
    assert student(t, 1) == pytest.approx(2 / math.pi * math.atan(t), abs=1e-14)
    assert student(t, 2) == pytest.approx(t / math.sqrt(2 + t * t), abs=1e-14)
    s = t / math.sqrt(3)
    assert student(t, 3) == pytest.approx(2 / math.pi * (math.atan(s) + s / (1 + s * s)), abs=1e-14)
    u = t * t / (4 + t * t)
    assert student(t, 4) == pytest.approx(math.sqrt(u) * (1 + (1 - u) / 2), abs=1e-14)


@pytest.mark.parametrize("freedom", [5, 6, 9, 30])
def test_student_is_the_integral_of_its_density(freedom):
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    steps, t = 20_000, 2.3
    middles = ((i + 0.5) * t / steps for i in range(steps))
    area = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middles) * t / steps
    assert student(t, freedom) == pytest.approx(2 * scale * area, abs=1e-8)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)],
)
def test_quantiles_of_the_tables(freedom, quantile):
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=6e-5)


def test_three_seeds_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, error 1/√3, t = 2√3; p = 1 − t/√(2 + t²) = 1 − √(12/14).
    result = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert result.n == 3 and result.mean == 2
    assert result.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert result.high - result.mean == pytest.approx(4.30265 / math.sqrt(3), abs=1e-5)
    assert result.low < 0 < result.high and not result.sure


def test_the_other_mean_is_over_the_same_pairs():
    assert paired([2.0, 4.0, 6.0], [1.0, 2.0, 6.0]).other == 3
    assert paired([2.0], [8.0]).other == 8


def test_many_seeds_are_quick():
    start = time.process_time()
    paired([float(i) for i in range(2000)], [0.5 * i * i for i in range(2000)])
    assert time.process_time() - start < 1


def test_swapping_sides_turns_the_sign_only():
    one, two = paired([1.0, 1.5, 1.1], [1.2, 1.9, 1.15]), paired([1.2, 1.9, 1.15], [1.0, 1.5, 1.1])
    assert one.mean == -two.mean and one.low == -two.high
    assert one.p == two.p


def test_one_seed_has_no_test():
    result = paired([1.0], [0.5])
    assert (result.n, result.mean, result.low, result.p) == (1, 0.5, None, None)
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
