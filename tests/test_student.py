"""Student's distribution against closed forms, its density and printed tables."""

import math

import pytest

from perspectron.student import student, student_quantile


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
