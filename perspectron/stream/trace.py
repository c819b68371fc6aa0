"""Traces of the experts that a text uses, and what caches of every size would have read.

Shapes: T time, L routed layers, N = T·L uses in order, token after token and layer after layer.
"""

import base64
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perspectron.experts.router import MOST_EXPERTS
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, DataError
from perspectron.util.files import read_json, write_json

FORMAT = "perspectron-trace-1"  # ids in two bytes, which is enough for MOST_EXPERTS
MAX_BYTES = 1 << 30  # of a file
COLD = -1  # distance of a first use


@dataclass(frozen=True)
class Trace:
    """layers: indices of the routed ones. experts: how many each has. chosen_TL: the expert of each token.
    guessed_TL: the guess of each layer's router one routed layer earlier; the first column means nothing."""

    model: str
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    chosen_TL: np.ndarray
    guessed_TL: np.ndarray

    def __post_init__(self) -> None:
        L = len(self.layers)
        require(
            L > 0 and len(self.experts) == L, "experts", self.experts, f"one number for each of {L} layers"
        )
        bound = f"from 1 to {MOST_EXPERTS}"
        require(all(1 <= E <= MOST_EXPERTS for E in self.experts), "experts", self.experts, bound)
        for name, ids_TL in (("chosen", self.chosen_TL), ("guessed", self.guessed_TL)):
            require(
                ids_TL.shape == (len(self.chosen_TL), L), f"{name}: shape", ids_TL.shape, "tokens × layers"
            )
            inside = bool(((ids_TL >= 0) & (ids_TL < self.experts)).all())
            require(inside, name, "an id", "of an expert that its layer has")
        require(len(self.chosen_TL) >= 1, "tokens", 0, "≥ 1")

    @property
    def keys_N(self) -> np.ndarray:
        """One number for each use's (layer, expert), in order."""
        return (self.chosen_TL.astype(np.int64) + np.cumsum((0, *self.experts[:-1]))).ravel()

    @property
    def tokens(self) -> int:
        return len(self.chosen_TL)

    @property
    def shards(self) -> int:
        return sum(self.experts)

    def guessed_right_L(self) -> np.ndarray:
        """Share of the tokens whose expert was guessed right, for each layer after the first."""
        return (self.chosen_TL == self.guessed_TL)[:, 1:].mean(0)


def save(path: Path, trace: Trace) -> None:
    """Write a trace as JSON, ids in two bytes, compressed; the file appears whole or not at all."""
    fields = {
        "format": FORMAT,
        "model": trace.model,
        "layers": trace.layers,
        "experts": trace.experts,
        "tokens": trace.tokens,
        "chosen": _written(trace.chosen_TL),
        "guessed": _written(trace.guessed_TL),
    }
    write_json(path, fields)


def load(path: Path) -> Trace:
    """The trace in a file. DataError: it holds none, or a damaged one."""
    fields = read_json(path, DataError, MAX_BYTES)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise DataError(f"{path}: not a trace (format {FORMAT})")
    try:
        layers, experts = (tuple(map(int, fields[name])) for name in ("layers", "experts"))
        shape = (int(fields["tokens"]), len(layers))
        chosen_TL, guessed_TL = (_read(fields[name], shape) for name in ("chosen", "guessed"))
        return Trace(str(fields["model"]), layers, experts, chosen_TL, guessed_TL)
    except (ConfigError, KeyError, OverflowError, TypeError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: damaged trace ({type(error).__name__}: {error})") from None


def _written(ids_TL: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(ids_TL.astype("<u2").tobytes(), 9)).decode()


def _read(text: Any, shape: tuple[int, int]) -> np.ndarray:
    expected = 2 * shape[0] * shape[1]
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), max(expected, 0) + 1)
    return np.frombuffer(data, "<u2").reshape(shape)


# ---------------------------------------------------------------- least recently used


def stack_distances(keys_N: np.ndarray) -> np.ndarray:
    """The number of distinct other keys since a key's last use [N]; COLD at its first. A cache of c entries that drops
    the least recently used one has the key where the distance is less than c, for every c at once."""
    distance_N = np.full(len(keys_N), COLD, np.int64)
    last = dict[int, int]()  # time of each key's last use
    times = list[int]()  # the same, rising: a key's distance is how many stand after its own
    for now, key in enumerate(keys_N.tolist()):
        if key in last:
            at = bisect_left(times, last[key])
            distance_N[now] = len(times) - at - 1
            del times[at]
        times.append(now)
        last[key] = now
    return distance_N


def missed(distance_N: np.ndarray, slots: int) -> int:
    """Number of uses whose key was not in a cache of `slots` entries."""
    return int(((distance_N == COLD) | (distance_N >= slots)).sum())
