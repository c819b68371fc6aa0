"""A claim as a range of numbers, the evidence for it, and the verdict that follows.

A claim holds when everything measured lies in the range it states. A plain whole number is exact. A rounded one holds
within half a unit of its last digit or 1%, whichever is more; one with "~" within 5%.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, inf, isfinite, log10
from typing import Any

from claims.results import Missing, Results

ROUNDED, ABOUT = 0.01, 0.05
POWERS = {
    "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "%": 1e-2, "ms": 1e-3, "KB": 1e3, "MB": 1e6,
}  # fmt: skip
_NUMBER = r"\d(?:[\d ,]*\d)?(?:\.\d+)?"
_STATED = re.compile(
    rf"(?P<sign>[~<>≤≥]?) ?(?P<low>{_NUMBER})(?:–(?P<high>{_NUMBER}))?"
    r"(?: ?(?P<power>KB|MB|ms|[KMBT%])(?![A-Za-z]))?(?P<unit>.*)"
)

HOLDS, CONDITION, FAILS = "holds", "holds with a condition", "fails"
UNTESTABLE, MISSING, AS_BUILT = "untestable here", "not measured yet", "as built"
UNCOMMITTED = "measured with uncommitted changes"
VERDICTS = (HOLDS, CONDITION, FAILS, UNTESTABLE, MISSING, AS_BUILT)


@dataclass(frozen=True)
class Range:
    """The range that a claim allows. text: as it is shown. factor, unit: in which a measurement is shown beside it."""

    text: str
    low: float
    high: float
    factor: float = 1.0
    unit: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def show(self, value: float) -> str:
        """The value in the claim's own unit, to five significant digits."""
        return digits(value / self.factor) + self.unit


def stated(text: str) -> Range:
    """The range that a number of a document means: "33.6 M FLOPs", "~110 M", "< 0.01 %", "12–14 tokens/s"."""
    parts = _STATED.fullmatch(text)
    assert parts is not None, text
    power = parts["power"] or ""
    factor = POWERS.get(power, 1.0)
    low, rounding = _number(parts["low"])
    high, _ = _number(parts["high"] or parts["low"])
    exact = rounding == 1 and not power and not parts["sign"]
    slack = 0.0 if exact else max(rounding / 2, ROUNDED * high)
    slack = ABOUT * high if parts["sign"] == "~" else slack
    least, most = (low - slack) * factor, (high + slack) * factor
    if parts["sign"] in ("<", "≤"):
        least, most = -inf, high * factor
    elif parts["sign"] in (">", "≥"):
        least, most = low * factor, inf
    shown = f" {power}" if power else ""
    return Range(text, least, most, factor, shown + (parts["unit"] or ""))


def at_most(text: str) -> Range:
    """A number of a document that less is as good as."""
    return replace(stated(text), low=-inf)


def worded(text: str, low: float, high: float = inf, unit: str = "") -> Range:
    """A claim in words, and the range that it comes to."""
    return Range(text, low, high, 1.0, unit)


def digits(value: float, count: int = 5) -> str:
    """The number with so many significant digits, thousands apart, without trailing zeros."""
    if value == 0 or not isfinite(value):
        return str(value).removesuffix(".0")
    places = max(0, count - 1 - floor(log10(abs(value))))
    if places > 9:
        return f"{value:.2e}"
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _number(text: str) -> tuple[float, float]:
    """(value, unit of the last digit)."""
    plain = re.sub(r"[ ,]", "", text)
    return float(plain), 10.0 ** -len(plain.partition(".")[2])


@dataclass(frozen=True)
class Evidence:
    """values: every one must lie in the claimed range; none: nothing here can be compared with it. shown: them in words
    (empty: in the claim's unit). proviso: under which that was measured. excuse: why a miss proves nothing. unsure: why
    nothing is shown when only some lie inside; without it that is a miss. each: so many values, those of a seed, lie
    inside together or do not."""

    values: tuple[float, ...] = ()
    shown: str = ""
    proviso: str = ""
    excuse: str = ""
    unsure: str = ""
    each: int = 1


Measure = Callable[[Results], Evidence | float]


def of(function: Callable[..., Evidence | float | tuple[float, ...]], *arguments: Any) -> Measure:
    """A measure that needs no results: what the function gives."""

    def measure(_: Results) -> Evidence | float:
        values = function(*arguments)
        return Evidence(values) if isinstance(values, tuple) else values

    return measure


def untestable(why: str, shown: str = "not built") -> Measure:
    return lambda _: Evidence((), shown, excuse=why)


@dataclass(frozen=True)
class Claim:
    """id: starts with the document's. where: its section. text: the claim in a line. claimed: a number as the document
    writes it, or a range. condition: (words, measure) under which it may hold where it does not as written. command:
    what measures it, where that is a benchmark or a comparison whose results are kept. built: the library took it over
    from the document, or no build of it could come out otherwise."""

    id: str
    where: str
    text: str
    claimed: str | Range
    measure: Measure
    condition: tuple[str, Measure] | None = None
    command: str = ""
    built: bool = False

    @property
    def range(self) -> Range:
        return stated(self.claimed) if isinstance(self.claimed, str) else self.claimed


@dataclass(frozen=True)
class Row:
    """A line of the ledger; every field is shown."""

    id: str
    where: str
    claim: str
    claimed: str
    measured: str
    verdict: str
    why: str
    command: str

    @property
    def judged(self) -> str:
        return f"{self.verdict}: {self.why}" if self.why else self.verdict


def judge(claim: Claim, results: Results) -> Row:
    """Measure a claim and compare. A measurement by uncommitted code cannot be repeated, and the verdict says so."""
    results.asked.clear()
    row = _judged(claim, results)
    if row.verdict not in (HOLDS, CONDITION, FAILS) or not any(map(results.uncommitted, results.asked)):
        return row
    verdict = CONDITION if row.verdict == HOLDS else row.verdict
    return replace(row, verdict=verdict, why=", ".join(filter(None, (row.why, UNCOMMITTED))))


def _judged(claim: Claim, results: Results) -> Row:
    own = f"python -m claims --id {claim.id}"
    row = Row(claim.id, claim.where, claim.text, claim.range.text, "", "", "", claim.command or own)
    try:
        evidence = _evidence(claim.measure, claim.range, results)
        row = replace(row, measured=evidence.shown)
        if claim.built:
            return replace(row, verdict=AS_BUILT, why="" if _inside(claim.range, evidence) else "otherwise")
        if claim.condition is None or _inside(claim.range, evidence):
            return replace(row, **_verdict(claim.range, evidence))
        words, measure = claim.condition
        other = _evidence(measure, claim.range, results)
    except Missing as missing:
        return replace(row, measured="–", verdict=MISSING, why=f"run {missing}")
    measured = f"{evidence.shown}; {other.shown} {words}"
    if _inside(claim.range, other):
        why = ", ".join(filter(None, (words, other.proviso)))
        return replace(row, measured=measured, verdict=CONDITION, why=why)
    return replace(row, measured=measured, verdict=FAILS, why=evidence.proviso)


def _evidence(measure: Measure, claimed: Range, results: Results) -> Evidence:
    evidence = measure(results)
    if not isinstance(evidence, Evidence):
        evidence = Evidence((float(evidence),))
    return (
        evidence if evidence.shown else replace(evidence, shown=", ".join(map(claimed.show, evidence.values)))
    )


def _inside(claimed: Range, evidence: Evidence) -> bool:
    return bool(evidence.values) and all(value in claimed for value in evidence.values)


def _verdict(claimed: Range, evidence: Evidence) -> dict[str, str]:
    if _inside(claimed, evidence):
        return {"verdict": CONDITION, "why": evidence.proviso} if evidence.proviso else {"verdict": HOLDS}
    inside = [value in claimed for value in evidence.values]
    groups = [all(inside[i : i + evidence.each]) for i in range(0, len(inside), evidence.each)]
    if any(groups) and evidence.unsure:
        return {"verdict": UNTESTABLE, "why": evidence.unsure}
    if evidence.excuse:
        return {"verdict": UNTESTABLE, "why": evidence.excuse}
    return {"verdict": FAILS, "why": evidence.proviso}
