"""Synthetic memory tasks. A task is a small language with questions, so that answers are right or wrong and the
accuracy of guessing is known. `eval.tracking` has the state-tracking tasks, `eval.reasoning` those that combine facts.

A task draws (ids [B,T], targets [B,T]) from a generator and from nothing else. A target stands at the token it is asked
at, IGNORE where nothing is asked. `chance` is the greatest expected accuracy of a guess from the place and the token
there, without memory; tests count it.

In the drawn examples ids are letters, "." is a blank, and the line below has the answers.

Suffixes: B batch, T time, P pairs, N things to be found, K kinds.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.data.loader import IGNORE
from perspectron.util.config import one_of, require

Ids = NDArray[np.int64]

BLANK = 0
LEAST = {"distance": 2, "pairs": 2, "letters": 1, "facts": 2, "reach": 2}
LEAST |= {"things": 3, "hops": 1, "questions": 1, "operations": 1, "fewest": 1}
"""Sizes that get smaller in an easier task, and their least values."""
POWER = 0.01  # exponent of zoology's law of gaps: the density of a gap g is as g^(POWER - 1)


@dataclass(frozen=True)
class Task(ABC):
    """A task. Its sizes are fields, checked when it is made. length: T. theory: what is known of which models solve it.
    follows: answers are measured in the second half alone, as texts have so few different beginnings that training has
    seen most of them, with their answers."""

    name: ClassVar[str]
    about: ClassVar[str]
    theory: ClassVar[str]
    follows: ClassVar[bool] = False
    length: int

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """(number of ids, number of answers among them that are equally likely without memory)."""

    @property
    def vocab_size(self) -> int:
        return self.counts()[0]

    @property
    def chance(self) -> float:
        """Accuracy of the best guess without memory."""
        return 1 / self.counts()[1]

    @property
    def first(self) -> int:
        """The place from which on answers are measured."""
        return self.length // 2 if self.follows else 0

    @abstractmethod
    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        """`draw` as arrays."""

    def draw(self, rng: np.random.Generator, batch_size: int) -> tuple[Tensor, Tensor]:
        """(ids_BT, targets_BT), both int64: a function of the generator's state alone."""
        ids_BT, targets_BT = self.arrays(rng, batch_size)
        return torch.from_numpy(ids_BT), torch.from_numpy(targets_BT)

    def exam(self, rng: np.random.Generator, batch_size: int) -> tuple[Tensor, Tensor]:
        """`draw` to measure with: nothing is asked before `first`."""
        ids_BT, targets_BT = self.draw(rng, batch_size)
        targets_BT[:, : self.first] = IGNORE
        return ids_BT, targets_BT

    def longer(self, times: int) -> Self:
        """The same task over so many times the length. Its other sizes stay: pairs, letters, facts."""
        return replace(self, length=times * self.length)

    @property
    def room(self) -> int:
        """Tokens that a text of these sizes needs at least."""
        return 1

    def shorter(self, times: int) -> Self:
        """An easier task in the same ids: length and what there is to remember are divided by `times`. Two pairs or
        facts are left: with one, its value is the answer whatever the key, which would have to be unlearned."""
        there = {name: size for name in LEAST if (size := getattr(self, name, None))}
        sizes = {name: max(min(LEAST[name], size), size // times) for name, size in there.items()}
        small = replace(self, **sizes)
        return replace(small, length=max(small.room, self.length // times))

    def sizes(self) -> dict[str, Any]:
        """The fields, for a result."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class MQAR(Task):
    """Multi-query associative recall (zoology, Arora et al. 2023, arXiv 2312.04927): pairs of a key and a value, then
    each key again, somewhere; its value is asked. Keys and values are from two vocabularies, no key and no value twice
    in a text; a key stands again at a gap after the pairs that is drawn from a power law ("power", mostly short) or
    evenly.

        c K a L b M . b . . a . c .      pairs 3
                      M     L   K

    chance: 1/values. With the values known but not their keys, it is 1/pairs.
    """

    name = "mqar"
    about = "multi-query associative recall: the value of each of many keys, asked later"
    theory = (
        "attention keeps every pair and needs two layers; a linear memory of R columns holds about R keys before they "
        "blur each other; a fixed state of n numbers must tell apart values^pairs texts, whatever it learned"
    )
    pairs: int
    keys: int = 64
    values: int = 64
    gaps: Literal["power", "uniform"] = "power"

    def __post_init__(self) -> None:
        one_of(self.gaps, ("power", "uniform"), "gaps")
        require(self.pairs >= 1, "pairs", self.pairs, "≥ 1")
        require(self.keys >= self.pairs, "keys", self.keys, f"≥ pairs = {self.pairs}")
        require(self.values >= self.pairs, "values", self.values, f"≥ pairs = {self.pairs}")
        require(self.length >= self.room, "length", self.length, f"≥ 3 · pairs = {self.room}")

    @property
    def room(self) -> int:
        return 3 * self.pairs

    def counts(self) -> tuple[int, int]:
        return 1 + self.keys + self.values, self.values

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        P, room = self.pairs, self.length - 2 * self.pairs
        key_BP = 1 + some(rng, batch_size, self.keys, P)
        value_BP = 1 + self.keys + some(rng, batch_size, self.values, P)
        gap = np.arange(1, room + 1, dtype=np.float64)
        at_BP = 2 * P + some(rng, batch_size, room, P, gap ** (POWER - 1) if self.gaps == "power" else None)
        ids_BT, targets_BT = empty(batch_size, self.length)
        ids_BT[:, 0 : 2 * P : 2], ids_BT[:, 1 : 2 * P : 2] = key_BP, value_BP
        np.put_along_axis(ids_BT, at_BP, key_BP, 1)
        np.put_along_axis(targets_BT, at_BP, value_BP, 1)
        return ids_BT, targets_BT


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Letters strewn among blanks, then as many marks: at each the next letter is asked, in the order read (Gu & Dao
    2023, arXiv 2312.00752, §3.1).

        . b . . a . a . > > >      letters 3
                        b a a

    chance: 1/kinds.
    """

    name = "selective copying"
    about = "letters strewn among blanks, asked in their order"
    theory = (
        "a memory must write by content and skip blanks, which no fixed convolution can; it needs letters · log2 kinds "
        "bits of state, and attention has to count the letters before each"
    )
    letters: int
    kinds: int = 16

    def __post_init__(self) -> None:
        require(self.letters >= 1, "letters", self.letters, "≥ 1")
        require(self.kinds >= 2, "kinds", self.kinds, "≥ 2")
        require(self.length >= self.room, "length", self.length, f"≥ 2 · letters = {self.room}")

    @property
    def room(self) -> int:
        return 2 * self.letters

    def counts(self) -> tuple[int, int]:
        return 2 + self.kinds, self.kinds

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        N, room = self.letters, self.length - self.letters
        letter_BN = 2 + rng.integers(self.kinds, size=(batch_size, N))
        ids_BT, targets_BT = empty(batch_size, self.length)
        np.put_along_axis(ids_BT, np.sort(some(rng, batch_size, room, N), 1), letter_BN, 1)
        ids_BT[:, room:], targets_BT[:, room:] = 1, letter_BN
        return ids_BT, targets_BT


@dataclass(frozen=True)
class Needle(Task):
    """A few facts, each a key and its value, in a long text of other words; at the end one of the keys again. No key
    and no value is there twice but that. `distance`: from the fact asked for to the question; None: anywhere.

        o n d M a K o p b L m o o a      facts 3, distance 9
                                  K

    chance: 1/values. With the values known but not their keys, it is 1/facts; with one fact the key need not be read at
    all.
    """

    name = "needle"
    about = "a few facts in a long text, one of them asked at its end"
    theory = (
        "attention finds it at any distance; a recurrence keeps it if its gates can stay open: a memory that fades by "
        "g a token keeps g^distance of it, and a window of W in L layers sees nothing past L · (W - 1) tokens"
    )
    distance: int | None = None
    facts: int = 4
    keys: int = 16
    values: int = 16
    words: int = 32

    def __post_init__(self) -> None:
        require(self.facts >= 1, "facts", self.facts, "≥ 1")
        require(self.length >= self.room, "length", self.length, f"≥ 3 · facts = {self.room}")
        for name in ("keys", "values"):
            require(getattr(self, name) >= self.facts, name, getattr(self, name), f"≥ facts = {self.facts}")
        require(self.words >= 1, "words", self.words, "≥ 1")
        fits = self.distance is None or 2 <= self.distance < self.length
        require(fits, "distance", self.distance, f"in [2, length - 1 = {self.length - 1}]")

    @property
    def room(self) -> int:
        return 3 * self.facts

    def counts(self) -> tuple[int, int]:
        return self.keys + self.values + self.words, self.values

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        F, last = self.facts, self.length - 1
        ids_BT = self.keys + self.values + rng.integers(self.words, size=(batch_size, self.length))
        targets_BT = np.full_like(ids_BT, IGNORE)
        asked_B = rng.integers(self.length - 2, size=batch_size)
        if self.distance is not None:
            asked_B[:] = last - self.distance
        # so that no two facts meet, all are at even distances from the one asked for, the first in at_BF
        times = rng.exponential(size=(batch_size, last // 2))
        times[np.arange(batch_size), asked_B // 2] = -1.0
        times[asked_B % 2 == 1, (last - 1) // 2 :] = np.inf
        at_BF = 2 * np.argsort(times, 1, kind="stable")[:, :F] + (asked_B % 2)[:, None]
        key_BF = some(rng, batch_size, self.keys, F)
        value_BF = self.keys + some(rng, batch_size, self.values, F)
        np.put_along_axis(ids_BT, at_BF, key_BF, 1)
        np.put_along_axis(ids_BT, at_BF + 1, value_BF, 1)
        ids_BT[:, -1], targets_BT[:, -1] = key_BF[:, 0], value_BF[:, 0]
        return ids_BT, targets_BT


def empty(batch_size: int, length: int) -> tuple[Ids, Ids]:
    """(ids, targets): blanks, with nothing asked."""
    shape = (batch_size, length)
    return np.full(shape, BLANK, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)


def some(
    rng: np.random.Generator, batch_size: int, of: int, count: int, weight: NDArray[np.float64] | None = None
) -> Ids:
    """`count` different numbers below `of` in each row, in random order, drawn evenly or each next one by weight among
    those left (the least of exponential times at those rates)."""
    times = rng.exponential(size=(batch_size, of))
    if weight is not None:
        times /= weight
    chosen = np.argsort(times, 1, kind="stable")[:, :count]
    return chosen if weight is None else rng.permuted(chosen, axis=1)
