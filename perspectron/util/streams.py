"""Random numbers without a place to keep: named streams for initialisation, and noise by (key, count).

A process that builds only a part of a model, a block or some experts, draws the same numbers as for the whole model.
"""

import hashlib
import json
import operator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = 624  # 32-bit words of a Mersenne Twister's state
START = 24  # bytes before them in what `torch.Generator.get_state` gives; each takes eight


def stream(seed: int, *name: str | int) -> torch.Generator:
    """Generator on the CPU whose numbers depend on (seed, name) alone.

    Torch keeps 32 bits of a seed, too few to tell the thousands of parts of many models apart, so the whole state of
    the generator comes from a hash. Its `initial_seed` comes from the same hash, to derive further streams from.
    Numpy's whole numbers count as Python's.
    """
    digest = hashlib.shake_256(json.dumps([seed, *name], default=operator.index).encode()).digest(
        8 + 4 * WORDS
    )
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    state = generator.get_state()
    words = np.frombuffer(digest, "<u4", offset=8).astype(np.int64)
    state[START : START + 8 * WORDS] = torch.from_numpy(words).view(torch.uint8)
    return generator.set_state(state)


def normal_slices(weight: Tensor, std: float, generator: torch.Generator, name: str, first: int = 0) -> None:
    """Fill weight[0], weight[1], … with N(0, std²), each from a stream of its own.

    Slice i depends on the generator's `initial_seed`, on `name` and on first + i, so that a process which holds some
    experts of many can draw its own.
    """
    for index, part in enumerate(weight):
        part.normal_(0, std, generator=stream(generator.initial_seed(), name, first + index))


Ids = NDArray[np.int64]


def philox(key: int, count: int, size: int, at: Ids | None = None) -> NDArray[np.float64]:
    """`size` uniform numbers strictly between 0 and 1, or those of them `at` some places: Philox is a function of (key,
    counter), so there is no stream to keep the place in, and its raw output is the same in every version of numpy. key:
    of 128 bits."""
    raw = np.random.Philox(key=key, counter=[0, count, 0, 0]).random_raw(size)
    return (((raw if at is None else raw[at]) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(key: int, count: int, size: int, at: Ids | None = None) -> NDArray[np.float64]:
    """Standard Gumbel noise, by `philox`."""
    noise: NDArray[np.float64] = -np.log(-np.log(philox(key, count, size, at)))
    return noise
