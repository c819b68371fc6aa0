"""Counts of how often this machine uses each expert of an artifact: usage.json beside its files, and what to read
first."""

import contextlib
import platform
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from perspectron.util.errors import DataError, PerspectronError
from perspectron.util.files import read_json, write_json

FILE = "usage.json"
FORMAT = "perspectron-usage-1"
MEMORY = 0.001
FIRST = 100  # requests for each layer that are counted


class Usage:
    """A moving average, for each layer's experts, of whether a request is for it, f ← 0.999 f + 0.001 · [asked]. Any
    number of threads may count.

    experts: how many each layer has. Averages begin at 0 if the file is missing, damaged or of other layers, and for a
    machine that is not in it with the mean of those that are. asked, served: of the first hundred requests for each
    layer, how many there were and how many found their expert at hand.
    """

    def __init__(self, path: Path, experts: Mapping[int, int]) -> None:
        self.path, self._machine = path, platform.node() or "here"
        self._share = {layer: np.zeros(count) for layer, count in experts.items()}
        self._turns, self._lock = dict.fromkeys(experts, 0), threading.Lock()
        self.asked = self.served = 0
        known = self._read(path)
        each = [known[self._machine]] if self._machine in known else list(known.values())
        for layer, share_E in self._share.items():
            found = [kept.get(str(layer)) for kept in each if isinstance(kept, dict)]
            if shares := [np.array(share) for share in found if _are_shares(share, len(share_E))]:
                self._share[layer] = np.mean(shares, 0)

    def count(self, layer: int, expert: int, *, ready: bool) -> None:
        """Count a request for an expert. ready: it was at hand."""
        with self._lock:
            share_E = self._share[layer]
            share_E *= 1 - MEMORY
            share_E[expert] += MEMORY
            self._turns[layer] += 1
            if self._turns[layer] <= FIRST:
                self.asked, self.served = self.asked + 1, self.served + ready

    def most(self) -> list[tuple[int, int]]:
        """(layer, expert) of all that were asked for, the most used first."""
        pairs = [
            (-float(share), layer, int(expert))
            for layer, share_E in self._share.items()
            for expert, share in enumerate(share_E)
            if share > 0
        ]
        return [(layer, expert) for _, layer, expert in sorted(pairs)]

    def save(self) -> None:
        """Write the averages to the file, beside those of other machines; if it cannot be written, do nothing."""
        if any(self._turns.values()):
            mine = {str(layer): share_E.tolist() for layer, share_E in self._share.items()}
            with contextlib.suppress(PerspectronError):
                write_json(
                    self.path, {"format": FORMAT, "machines": self._read(self.path) | {self._machine: mine}}
                )

    @staticmethod
    def _read(path: Path) -> dict[str, object]:
        try:
            found = read_json(path, DataError)
        except DataError:
            return {}
        machines = (
            found.get("machines") if isinstance(found, dict) and found.get("format") == FORMAT else None
        )
        return machines if isinstance(machines, dict) else {}


def _are_shares(found: object, count: int) -> bool:
    return (
        isinstance(found, list)
        and len(found) == count
        and all(isinstance(share, int | float) and 0 <= share <= 1 for share in found)
    )
