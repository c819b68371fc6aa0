"""Axes of charts: where a value lies between two pixels, and the round numbers that mark it."""

import math
from collections.abc import Sequence

STEPS = (1.0, 2.0, 5.0, 10.0)
FINE = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


class Linear:
    """From pixel `start` to `end`, with two to eight round ticks around the values; the ends lie on ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        span = max(high - low, 1e-3, 1e-6 * abs(high))
        power = 10.0 ** math.floor(math.log10(span / 6))
        self.tick = next(step * power for step in STEPS if span / (step * power) <= 6)
        self.low = math.floor(low / self.tick) * self.tick
        self.high = max(self.low + self.tick, math.ceil(high / self.tick - 1e-9) * self.tick)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [self.low + i * self.tick for i in range(round((self.high - self.low) / self.tick) + 1)]

    def label(self, value: float) -> str:
        digits = max(0, -math.floor(math.log10(self.tick)))
        return f"{value:.{digits}f}"


class Log:
    """As Linear, of positive values; the ends are the values. Ticks at powers of `base`, and where fewer than three fit
    at round parts of powers of ten."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, base: int = 10) -> None:
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.low, self.high = self.low / 2, self.high * 2
        self.start, self.end, self.base = start, end, base

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 8) -> list[float]:
        inside = self._powers(self.base)
        for parts in (STEPS[:3], FINE):
            if len(inside) < 3:
                inside = self._inside([part * power for power in self._powers(10, 1) for part in parts])
        return inside[:: max(1, -(-len(inside) // most))]

    def _inside(self, ticks: list[float]) -> list[float]:
        return [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]

    def _powers(self, base: int, around: int = 0) -> list[float]:
        first = math.ceil(math.log(self.low, base) - 1e-9) - around
        last = math.floor(math.log(self.high, base) + 1e-9) + around
        return [float(base) ** power for power in range(first, last + 1)]
