"""Student's t intervals and paired tests by scipy, which is imported on first use, and the bootstrap."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Confidence level of every interval."""
RESAMPLINGS, AT_ONCE = 1000, 100

Floats = NDArray[np.float64]
Span = tuple[float, float]


class Paired(NamedTuple):
    """Mean of n differences a − b, one for each seed.

    low, high: Student's interval of the mean difference; p: two-sided paired t test. Both assume
    that the differences are normal, and are None for a single seed.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None


def student(mean: float, error: float, freedom: int) -> Span:
    """Interval of a mean with this standard error and number of degrees of freedom."""
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    return mean - half, mean + half


def interval(values: Sequence[float]) -> Span | None:
    """Student's interval of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return student(statistics.fmean(values), error, len(values) - 1)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired | None:
    """Compare values of the same seeds in the same order; None if there are none.

    If all differences are equal, the interval is that value, and p is 0, or 1 if they are zero.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are not pairs")
    if not a:
        return None
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n, mean = len(a), statistics.fmean(differences)
    if (span := interval(differences)) is None:
        return Paired(n, mean, None, None, None)
    error = statistics.stdev(differences) / math.sqrt(n)
    from scipy.stats import t

    p = 2 * float(t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return Paired(n, mean, *span, p)


def bootstrap(statistic: Callable[[NDArray[np.int64]], Floats], count: int, seed: int) -> Floats:
    """A statistic of RESAMPLINGS draws [R] of `count` things, with replacement.

    statistic: from the numbers of the things drawn, [..., count], to its values [...].
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    draws = (rng.integers(count, size=(AT_ONCE, count)) for _ in range(RESAMPLINGS // AT_ONCE))
    return np.concatenate([statistic(index) for index in draws])


def middle(values: Floats) -> Span:
    """The middle 95% of the resampled values."""
    low, high = np.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)
