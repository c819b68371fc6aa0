"""What a cache of experts would have read: a recorded way of tokens through experts, played to caches of every size.

Shapes: T time, L routed layers, N = T·L uses in order, token after token and layer after layer.
"""

import base64
import heapq
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perspectron.config import require
from perspectron.errors import ConfigError, DataError
from perspectron.files import read_json, write_json

FORMAT = "perspectron-trace-1"
MAX_EXPERTS = 65536  # ids are stored in two bytes
MAX_BYTES = 1 << 30  # of a file
COLD = -1  # distance of a first use


@dataclass(frozen=True)
class Trace:
    """layers: indices of the routed ones. experts: how many each has. chosen_TL: the expert of each token.
    guessed_TL: what each layer's router said of the token one routed layer earlier; the first column means nothing."""

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
        bound = f"from 1 to {MAX_EXPERTS}"
        require(all(1 <= E <= MAX_EXPERTS for E in self.experts), "experts", self.experts, bound)
        for name, ids_TL in (("chosen", self.chosen_TL), ("guessed", self.guessed_TL)):
            require(
                ids_TL.shape == (len(self.chosen_TL), L), f"{name}: shape", ids_TL.shape, "tokens × layers"
            )
            inside = bool(((ids_TL >= 0) & (ids_TL < self.experts)).all())
            require(inside, name, "an id", "of an expert that its layer has")
        require(len(self.chosen_TL) >= 1, "tokens", 0, "≥ 1")

    @property
    def tokens(self) -> int:
        return len(self.chosen_TL)

    @property
    def shards(self) -> int:
        return sum(self.experts)

    def guessed_right_L(self) -> np.ndarray:
        """Share of the tokens whose expert was guessed, for each layer after the first."""
        return (self.chosen_TL == self.guessed_TL)[:, 1:].mean(0)

    def keys_TL(self, ids_TL: np.ndarray) -> np.ndarray:
        """One number for each (layer, expert)."""
        return ids_TL.astype(np.int64) + np.cumsum((0, *self.experts[:-1]))


def save(path: Path, trace: Trace) -> None:
    """As JSON, ids in two bytes, compressed; appears whole or not at all."""
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
    """DataError for a file that is no trace, or a damaged one."""
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
    """How many distinct other keys came since a key's last use [N]; COLD at its first. A cache of c entries that drops
    the least recently used one has the key where the distance is less than c, for every c at once.

    Of the uses between, those are distinct that are not repeated there: distance = uses between − repeats between, and
    a repeat is one whose own last use lies between, too.
    """
    last_N = _last_use(keys_N)
    again = np.flatnonzero(last_N >= 0)
    distance_N = np.full(len(keys_N), COLD, np.int64)
    repeats = _greater_before(last_N[again])
    distance_N[again] = again - last_N[again] - 1 - repeats
    return distance_N


def _last_use(keys_N: np.ndarray) -> np.ndarray:
    """Where each key was used before [N]; −1: nowhere."""
    order = np.argsort(keys_N, kind="stable")
    same = keys_N[order[1:]] == keys_N[order[:-1]]
    last_N = np.full(len(keys_N), -1, np.int64)
    last_N[order[1:][same]] = order[:-1][same]
    return last_N


def _greater_before(values_N: np.ndarray) -> np.ndarray:
    """Of distinct numbers: how many earlier ones are greater [N].

    Bit by bit from the highest, the numbers fall into ever smaller bins in which those bits agree, in the order they
    came. In a bin, one with a 0 is passed by the earlier ones with a 1.
    """
    N = len(values_N)
    rank_N = np.empty(N, np.int64)
    rank_N[np.argsort(values_N)] = np.arange(N)
    count_N, at_N, here_N = np.zeros(N, np.int64), np.arange(N), np.arange(N)
    for bit in reversed(range(max(N - 1, 0).bit_length())):
        one_N = rank_N[at_N] >> bit & 1
        start_N = (
            rank_N[at_N] >> (bit + 1) << (bit + 1)
        )  # ranks have no gaps: a bin begins where its ranks do
        ones_N = np.cumsum(one_N) - one_N
        ones_N -= ones_N[start_N]
        count_N[at_N] += np.where(one_N == 0, ones_N, 0)
        place_N = np.where(one_N == 0, here_N - ones_N, start_N + (1 << bit) + ones_N)
        sorted_N = np.empty(N, np.int64)
        sorted_N[place_N] = at_N
        at_N = sorted_N
    return count_N


@dataclass(frozen=True)
class Reuse:
    """Distances of the uses, and of the guesses before them (none: they were not followed)."""

    uses_N: np.ndarray
    guesses_N: np.ndarray

    def missed(self, slots: int) -> int:
        """Uses whose expert was not there."""
        return _missing(self.uses_N, slots)

    def read(self, slots: int) -> int:
        """Shards read: for uses, and ahead for guesses."""
        return self.missed(slots) + _missing(self.guesses_N, slots)


def _missing(distance_N: np.ndarray, slots: int) -> int:
    return int(((distance_N == COLD) | (distance_N >= slots)).sum())


def reuse(trace: Trace, *, guess: bool = False) -> Reuse:
    """Of the trace from an empty cache. With `guess`, each layer's guess for the next is fetched, and counts as a use,
    after its own expert was used and before the next layer's."""
    keys_TL = trace.keys_TL(trace.chosen_TL)
    if not guess:
        return Reuse(stack_distances(keys_TL.ravel()), np.empty(0, np.int64))
    both_T2L = np.stack([trace.keys_TL(trace.guessed_TL), keys_TL], 2).reshape(trace.tokens, -1)[:, 1:]
    distance_TL = stack_distances(both_T2L.ravel()).reshape(both_T2L.shape)  # use, guess, use … use
    return Reuse(distance_TL[:, ::2].ravel(), distance_TL[:, 1::2].ravel())


def belady(keys_N: np.ndarray, slots: int) -> int:
    """Misses of the cache that drops what is used latest in the future, or never again: no cache that reads only what
    is asked for has fewer."""
    N = len(keys_N)
    next_N = np.full(N, N, np.int64)
    last_N = _last_use(keys_N)
    next_N[last_N[last_N >= 0]] = np.flatnonzero(last_N >= 0)
    held: dict[int, int] = {}  # key: its next use
    heap: list[tuple[int, int]] = []
    missed = 0
    for key, following in zip(keys_N.tolist(), next_N.tolist(), strict=True):
        if key not in held:
            missed += 1
            while len(held) >= slots:
                when, latest = heapq.heappop(heap)
                if held.get(latest) == -when:
                    del held[latest]
        held[key] = following
        heapq.heappush(heap, (-following, key))
    return missed
