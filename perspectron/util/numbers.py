"""Texts of numbers for people: few digits, a true minus sign, a dash where there is no number."""

import functools
import math
from collections.abc import Callable

NONE = "–"
_POWERS = ("", "k", "M", "G", "T", "P", "E")


def _of_known(text: Callable[..., str]) -> Callable[..., str]:
    """Wrap a function that writes a number: with a true minus sign, and a dash for None."""

    @functools.wraps(text)
    def shown(value: float | None, *digits: int) -> str:
        return NONE if value is None else text(float(value), *digits).replace("-", "−")

    return shown


@_of_known
def fixed(number: float, digits: int = 3) -> str:
    return f"{number:.{digits}f}"


@_of_known
def signed(number: float, digits: int = 3) -> str:
    """With its sign, also where it rounds to zero: −0.000 is below zero, 0.000 is zero."""
    return f"{number:+.{digits}f}" if number else f"{0:.{digits}f}"


@_of_known
def short(number: float, digits: int = 3) -> str:
    """A quantity of any size to a few significant digits: 2.02M, 31.4k, 0.125."""
    return f"{number:.{digits}g}" if abs(number) < 1 else _scaled(number, digits)


@_of_known
def size(number: float) -> str:
    """Bytes with a decimal prefix: 1.57 MB."""
    if number < 1000:
        return f"{number:.0f} B"
    text = _scaled(number, 3)
    return f"{text[:-1]} {text[-1]}B"


@_of_known
def context(number: float) -> str:
    """A length in tokens: 512, 4k (of 1024), in full where it is no multiple of that: 1 000."""
    for power, letter in ((1024**2, "M"), (1024, "k")):
        if number >= power and number % power == 0:
            return f"{number / power:.0f}{letter}"
    return grouped(number) if number.is_integer() else short(number)


@_of_known
def percent(number: float, digits: int = 1) -> str:
    return f"{100 * number:.{digits}f}%"


@_of_known
def rate(number: float) -> str:
    """A learning rate: 0.003, 3e−4."""
    if 0.001 <= number < 10:
        return f"{number:.4g}"
    return f"{number:.2e}".replace("e-0", "e-").replace(".00", "")


def probability(p: float) -> str:
    """A p value with its relation: p 0.013, p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}" if p < 0.995 else "p 1"


@_of_known
def grouped(number: float) -> str:
    """A whole number in full: 3 014 656, its groups set apart by thin no-break spaces."""
    return f"{number:,.0f}".replace(",", "\u202f")


def duration(seconds: float) -> str:
    """Seconds as a person says them: "45 s", "9 min 30 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def printable(text: str) -> str:
    """The text without control characters, which an untrained model may write."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _scaled(number: float, digits: int) -> str:
    power = min(int(math.log(abs(number), 1000) + 1e-9), len(_POWERS) - 1)
    text = f"{number / 1000.0**power:.{digits}g}"
    if abs(float(text)) >= 1000 and power < len(_POWERS) - 1:
        power, text = power + 1, f"{number / 1000.0 ** (power + 1):.{digits}g}"
    return f"{float(text):g}{_POWERS[power]}"
