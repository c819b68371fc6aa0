"""Measurements that can be compared: contenders take turns, and what is told is a median with its spread.

A machine is now fast and now slow. Contenders that alternate meet the same moments, so that their ratios hold where
their times do not.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
MOST = 20


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, between which bounds they lie, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def middle(cls, values: Sequence[float]) -> Self:
        """Median and quartiles: where half of the measurements lie, whatever else the machine did meanwhile."""
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(median, low, high, len(values))


def take_turns(
    contenders: Mapping[Key, Callable[[], float]], rounds: int, warmup: int = 1, *, seconds: float = 0.0
) -> dict[Key, list[float]]:
    """Answers of each contender, which is called once a round, after `warmup` rounds that are not told. They take
    turns, in reverse order every other round. Quick ones go on for `seconds`, up to `MOST` times as many rounds."""
    names = list(contenders)
    answers: dict[Key, list[float]] = {name: [] for name in names}
    turn, end = 0, time.perf_counter() + seconds
    while turn < warmup + rounds or (turn < warmup + MOST * rounds and time.perf_counter() < end):
        for name in names if turn % 2 == 0 else reversed(names):
            answer = contenders[name]()
            if turn >= warmup:
                answers[name].append(answer)
        turn += 1
    return answers


def timed(
    call: Callable[[], object],
    device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
    clock: Callable[[], float] | None = None,
) -> Callable[[], float]:
    """Calls it and answers the seconds that it took, work that it left to the device included: of the wall, unless
    another clock is given."""

    def seconds() -> float:
        now = time.perf_counter if clock is None else clock
        synchronise(device)
        start = now()
        call()
        synchronise(device)
        return now() - start

    return seconds


def synchronise(device: torch.device) -> None:
    """Wait until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
