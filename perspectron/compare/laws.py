"""The laws that losses of a scaling study follow, and where the lines of two designs cross.

A law is log L = log
A − α log N − β log D, by least squares for each seed; where all points have one ratio D/N, α covers both and there is
no β. Intervals are Student's over the seeds, so that designs are compared on the same seeds. A loss that no model gets
below is not fitted: a few sizes cannot tell it from a smaller α, and `off` shows how straight the lines are.

N: active parameters, D: tokens, L: held-out bits per byte.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perspectron.util.stats import interval

if TYPE_CHECKING:
    from perspectron.compare.scaling import Study

FAR = 10.0  # crossings further from the trained sizes than by this factor are not reported
MOST_MOVED = 1000.0  # largest factor that is reported for how far a crossing moves


class Point(NamedTuple):
    """A size, and tokens for each of its parameters."""

    size: int
    ratio: float


class Law(NamedTuple):
    """A design's losses by point and seed, its parameters and tokens there, and (log A, α, β) of each seed that has all
    points; an exponent that the points cannot determine is 0."""

    losses: dict[Point, dict[int, float]]
    parameters: dict[Point, float]
    tokens: dict[Point, float]
    fits: dict[int, tuple[float, float, float]]

    def line(self, seed: int, ratio: float) -> tuple[float, float]:
        """(intercept, fall) of log L over log N at `ratio` tokens for a parameter."""
        at, alpha, beta = self.fits[seed]
        return at - beta * math.log(ratio), alpha + beta

    def mean(self) -> tuple[float, float, float]:
        """(log A, α, β), averaged over the seeds."""
        at, alpha, beta = (statistics.fmean(values) for values in zip(*self.fits.values(), strict=True))
        return at, alpha, beta

    def off(self) -> float:
        """The largest relative deviation of a mean loss from the mean law, both over the seeds that have all points."""
        at, alpha, beta = self.mean()
        shares = []
        for point, losses in self.losses.items():
            log = at - alpha * math.log(self.parameters[point]) - beta * math.log(self.tokens[point])
            shares.append(abs(statistics.fmean(losses[seed] for seed in self.fits) / math.exp(log) - 1))
        return max(shares)


def laws_of(cells: Sequence[dict[str, Any]], study: "Study", score: str) -> dict[str, Law]:
    """The law of each design that has a loss, by the seeds that finished all points."""
    found = dict[str, Law]()
    for name in study.designs:
        law = Law({}, {}, {}, {})
        for cell in cells:
            if cell["design"] == name and cell.get(score) is not None:
                at = Point(cell["size"], cell["per_parameter"])
                law.losses.setdefault(at, {})[cell["seed"]] = cell[score]
                law.parameters[at], law.tokens[at] = float(cell["parameters"]), float(cell["tokens"])
        for seed in range(study.seeds):
            if len(study.points) > 1 and all(seed in law.losses.get(at, {}) for at in study.points):
                law.fits[seed] = fitted(law, seed, study)
        if law.losses:
            found[name] = law
    return found


def fitted(law: Law, seed: int, study: "Study") -> tuple[float, float, float]:
    """(log A, α, β) of a seed, by least squares."""
    points = study.points
    N, D = (np.log([each[at] for at in points]) for each in (law.parameters, law.tokens))
    columns = {"A": np.ones(len(points))}
    if len(study.sizes) > 1:
        columns["alpha"] = -N
    if len(study.per_parameter) > 1:
        columns["beta"] = -D
    y = np.log([law.losses[at][seed] for at in points])
    solved = dict(zip(columns, np.linalg.lstsq(np.stack(list(columns.values()), 1), y)[0], strict=True))
    return float(solved["A"]), float(solved.get("alpha", 0.0)), float(solved.get("beta", 0.0))


def told(law: Law) -> dict[str, Any]:
    """A law with its intervals, as a dict; an exponent that the points cannot determine is None."""
    if not law.fits:
        return {"alpha": None, "beta": None}
    _, *exponents = zip(*law.fits.values(), strict=True)
    found: dict[str, Any] = {"A": math.exp(law.mean()[0]), "seeds": len(law.fits), "off": law.off()}
    for name, values in zip(("alpha", "beta"), exponents, strict=True):
        found[name] = (
            {"mean": statistics.fmean(values), "interval": interval(values)} if any(values) else None
        )
    return found


def crossings(laws: dict[str, Law], study: "Study") -> list[dict[str, Any]]:
    """Crossings of the lines of two designs at equal tokens for a parameter: the number of parameters, with its
    interval over the seeds that both have. Only those whose whole interval lies within FAR of the sizes, and whose
    lines cross in the same order in every seed; one seed gives no interval. off: relative deviation of losses from both
    lines; moved: the factor by which it moves the crossing; both None if there are no more points than coefficients."""
    spare = len(study.points) > 1 + (len(study.sizes) > 1) + (len(study.per_parameter) > 1)
    found, low, high = list[dict[str, Any]](), study.sizes[0] / FAR, study.sizes[-1] * FAR
    if len(study.sizes) == 1:
        return found
    for (a, one), (b, other) in itertools.combinations(laws.items(), 2):
        for ratio in study.per_parameter:
            lines = [(one.line(s, ratio), other.line(s, ratio)) for s in one.fits if s in other.fits]
            steeper = [mine[1] - theirs[1] for mine, theirs in lines]
            if not lines or not (min(steeper) > 0 or max(steeper) < 0):
                continue
            logs = [(mine[0] - theirs[0]) / x for (mine, theirs), x in zip(lines, steeper, strict=True)]
            ends = interval(logs) or (statistics.fmean(logs),) * 2
            if math.log(low) <= ends[0] and ends[1] <= math.log(high):
                first = a if steeper[0] > 0 else b  # beyond the crossing the steeper line is ahead
                span = [math.exp(end) for end in ends] if len(logs) > 1 else None
                off = one.off() + other.off() if spare else None
                found.append({
                    "designs": [a, b], "per_parameter": ratio, "parameters": math.exp(statistics.fmean(logs)),
                    "interval": span, "ahead_beyond": first, "off": off,
                    "moved": None if off is None else _moved(off / abs(statistics.fmean(steeper))),
                    "trained": study.sizes[0] <= math.exp(statistics.fmean(logs)) <= study.sizes[-1],
                })  # fmt: skip
    return found


def _moved(log: float) -> float:
    return math.exp(log) if log < math.log(MOST_MOVED) else MOST_MOVED


def losses_at(found: dict[str, Any], at: Point, score: str) -> dict[str, dict[int, float]]:
    """Losses at a point by design and seed, the lowest mean first; designs that lack seeds of others come last."""
    losses: dict[str, dict[int, float]] = {}
    for cell in found["cells"]:
        if (cell["size"], cell["per_parameter"]) == at and cell.get(score) is not None:
            losses.setdefault(cell["design"], {})[cell["seed"]] = cell[score]
    most = max(map(len, losses.values()), default=0)
    order = {name: (len(each) < most, statistics.fmean(each.values())) for name, each in losses.items()}
    return {name: losses[name] for name in sorted(losses, key=order.__getitem__)}
