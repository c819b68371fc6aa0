"""Permutations of the windows of a text, each fixed by (seed, epoch) alone.

Any part of a permutation is computed on demand, without a table, so that a trillion tokens cost no memory and no time
at the start.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
ORDER = 2
"""Version of the permutations, the only one that is still read."""
ROUNDS = 8


def shuffle(n: int, seed: int, epoch: int) -> Callable[[Indices], Indices]:
    """A permutation of 0 … n − 1, as a function of any of these numbers [N]."""
    keys = np.frombuffer(hashlib.blake2b(f"{seed} {epoch}".encode()).digest(), "<u8")
    return lambda index: _feistel(index, n, keys)


def _feistel(index: Indices, n: int, keys: NDArray[np.uint64]) -> Indices:
    """Feistel network with addition in place of XOR, so that the halves may have any size: a · b ≥ n with a and b near
    √n. Each round adds to one half a number that depends on the other alone, which is undone by taking it away: it is
    a bijection of 0 … ab − 1. What leaves 0 … n − 1 is put in again until it is back, which keeps it one of n numbers,
    and happens to about one in √n at most."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    result = index.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        high, low = np.divmod(result[outside], np.uint64(b))
        for i in range(0, ROUNDS, 2):
            high = (high + _mixed(low ^ keys[i]) % np.uint64(a)) % np.uint64(a)
            low = (low + _mixed(high ^ keys[i + 1]) % np.uint64(b)) % np.uint64(b)
        result[outside] = high * np.uint64(b) + low
        outside[outside] = result[outside] >= n
    return result.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
