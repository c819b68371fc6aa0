"""How sure a difference between two designs is, from the seeds that both finished."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95  # of the interval


@dataclass(frozen=True)
class Paired:
    """The mean of n differences a − b, each of one seed.

    other: the mean of b. low, high: the interval that holds the true mean with probability LEVEL if the differences are
    normal; p: of the two-sided paired t test, under the same assumption. One seed has means and nothing else.
    """

    n: int
    mean: float
    other: float
    low: float | None
    high: float | None
    p: float | None

    @property
    def sure(self) -> bool:
        """Zero lies outside the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired | None:
    """The comparison of values of the same seeds in the same order, None where there are none.

    Differences that are all equal have no spread: the interval is their value, and p is 0, or 1 where they are zero.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are not pairs")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n = len(differences)
    if n == 0:
        return None
    mean, other = math.fsum(differences) / n, math.fsum(b) / n
    if n == 1:
        return Paired(1, mean, other, None, None, None)
    error = deviation(differences) / math.sqrt(n)
    half = student_quantile(LEVEL, n - 1) * error
    p = 1 - student(abs(mean) / error, n - 1) if error else float(mean == 0)
    return Paired(n, mean, other, mean - half, mean + half, p)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample (n − 1 in the denominator)."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def student(t: float, freedom: int) -> float:
    """P(|T| ≤ t) of Student's distribution, by its finite sum for whole degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def student_quantile(level: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = level, by bisection."""
    low, high = 0.0, 1.0
    while student(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < level else (low, middle)
    return (low + high) / 2
