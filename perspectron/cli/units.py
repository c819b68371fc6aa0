"""Sizes and rates as a user types them: 24G, 512m, 1.5GiB, 3G/s."""

import math
import re

from perspectron.config import require

POWERS = "KMGT"
LARGEST = 2**62
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(i?))?B?", re.ASCII | re.IGNORECASE)
BOUND = "a size like 24G, 512M or 1.5GiB"


def size(text: str, field: str) -> int:
    """Bytes of "24G", "512M", "1.5GiB" or "4096": K, M, G and T are powers of 1000, KiB, MiB and so on of 1024;
    lower case is the same.

    ConfigError, naming the field, for anything else, and for less than one byte.
    """
    return _parse(text, text, field, BOUND)


def count(text: str, field: str) -> int:
    """How many "5M", "20M" or "1500000" are. ConfigError, naming the field, for anything else."""
    bound = "a number like 5M or 20M"
    require(not text.strip().upper().endswith(("B", "I")), field, text, bound)
    return _parse(text, text, field, bound)


def rate(text: str, field: str) -> int:
    """Bytes per second of "3G/s" or "800MiB/s"; ConfigError for anything else."""
    amount, slash, second = text.strip().partition("/")
    bound = "a rate like 3G/s or 800M/s"
    require(slash == "/" and second == "s", field, text, bound)
    return _parse(amount, text, field, bound)


def _parse(amount: str, text: str, field: str, bound: str) -> int:
    found = _SIZE.fullmatch(amount.strip())
    require(found is not None, field, text, bound)
    assert found is not None
    number, prefix, binary = found.groups()
    value = float(number) * (1024 if binary else 1000) ** (POWERS.index(prefix.upper()) + 1 if prefix else 0)
    require(math.isfinite(value) and 1 <= value <= LARGEST, field, text, f"{bound}, from 1 to 2⁶²")
    return round(value)
