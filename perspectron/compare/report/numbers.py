"""Texts of numbers in a report: few digits, a true minus sign, a dash where there is no number."""

import math
from typing import Any

NONE = "–"
_POWERS = ("", "k", "M", "G", "T", "P", "E")


def known(value: Any) -> float | None:
    """The value as a float, None where it is missing, not a number or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def fixed(value: Any, digits: int = 3) -> str:
    number = known(value)
    return NONE if number is None else _minus(f"{number:.{digits}f}")


def signed(value: Any, digits: int = 3) -> str:
    number = known(value)
    if number is None:
        return NONE
    return fixed(0, digits) if round(number, digits) == 0 else _minus(f"{number:+.{digits}f}")


def short(value: Any, digits: int = 3) -> str:
    """A quantity of any size to a few significant digits: 2.02M, 31.4k, 0.125."""
    number = known(value)
    if number is None:
        return NONE
    return _minus(f"{number:.{digits}g}" if abs(number) < 1 else _scaled(number, digits))


def size(value: Any) -> str:
    """Bytes with a decimal prefix: 1.57 MB."""
    number = known(value)
    if number is None:
        return NONE
    if number < 1000:
        return f"{number:.0f} B"
    text = _scaled(number, 3)
    return f"{text[:-1]} {text[-1]}B"


def context(value: Any) -> str:
    """A length in tokens: 512, 4k (of 1024), in full where it is no multiple of that: 1 000."""
    number = known(value)
    if number is None:
        return NONE
    for power, letter in ((1024**2, "M"), (1024, "k")):
        if number >= power and number % power == 0:
            return f"{number / power:.0f}{letter}"
    return grouped(number) if number.is_integer() else short(number)


def percent(value: Any, digits: int = 1) -> str:
    number = known(value)
    return NONE if number is None else f"{100 * number:.{digits}f}%"


def rate(value: Any) -> str:
    """A learning rate: 0.003, 3e-4."""
    number = known(value)
    if number is None:
        return NONE
    if 0.001 <= number < 10:
        return f"{number:.4g}"
    return f"{number:.2e}".replace("e-0", "e-").replace(".00", "")


def probability(value: Any) -> str:
    """A p value with its relation: p 0.013, p < 0.001."""
    number = known(value)
    if number is None:
        return f"p {NONE}"
    return "p < 0.001" if number < 0.001 else f"p {number:.2g}" if number < 0.995 else "p 1"


def grouped(value: Any) -> str:
    """A whole number in full: 3 014 656, its groups set apart by thin no-break spaces."""
    number = known(value)
    return NONE if number is None else f"{number:,.0f}".replace(",", "\u202f").replace("-", "−")


def _scaled(number: float, digits: int) -> str:
    power = min(int(math.log(abs(number), 1000) + 1e-9), len(_POWERS) - 1)
    text = f"{number / 1000.0**power:.{digits}g}"
    if abs(float(text)) >= 1000 and power < len(_POWERS) - 1:
        power, text = power + 1, f"{number / 1000.0 ** (power + 1):.{digits}g}"
    return f"{float(text):g}{_POWERS[power]}"


def _minus(text: str) -> str:
    return text.replace("-", "−")
