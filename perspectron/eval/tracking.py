"""Synthetic tasks in which a state is followed through a text: what stands where, whether, and inside what. They are as
those of `eval.tasks`, which says what a task is.

Few tokens make few beginnings: a text of parity is one of 65,536 up to its 16th bit, and a training of some hundred
steps reads most of those. So all answers are taught, but only those of a text's second half are measured.

Suffixes: B batch, T time.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from perspectron.data.loader import IGNORE
from perspectron.eval.tasks import Ids, Task, empty
from perspectron.util.config import require


@dataclass(frozen=True)
class Permutations(Task):
    """The word problem of the symmetric group S_n: permutations one after the other; at each, the composition of all so
    far is asked, the first applied first. Not at the first, where nothing is composed yet.

        (01) (12) (01) …        n 3
             (021) (02)

    chance: 1/n!, as all permutations are equally likely before it; also for a model that sees all but the first.
    """

    name = "permutations"
    about = "composing permutations: where does everything stand by now?"
    follows = True
    theory = (
        "S5 is complete for NC1 (Barrington 1989): no transformer and no diagonal recurrence of fixed depth composes "
        "words of every length in fixed precision; S3 is solvable, but needs gates that can change sign or depth; a "
        "nonlinear recurrence does both with one state"
    )
    n: int = 3

    def __post_init__(self) -> None:
        require(2 <= self.n <= 5, "n", self.n, "in [2, 5]")
        require(self.length >= 2, "length", self.length, "≥ 2")

    def counts(self) -> tuple[int, int]:
        return math.factorial(self.n), math.factorial(self.n)

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        after = products(self.n)
        ids_BT = rng.integers(self.vocab_size, size=(batch_size, self.length))
        targets_BT = ids_BT.copy()
        for t in range(1, self.length):
            targets_BT[:, t] = after[targets_BT[:, t - 1], ids_BT[:, t]]
        targets_BT[:, 0] = IGNORE
        return ids_BT, targets_BT


@dataclass(frozen=True)
class Parity(Task):
    """Bits; at each but the first it is asked whether the number of ones so far is odd.

        1 0 1 1 0
          1 0 1 1

    chance: 1/2, also for a model that sees all but the first.
    """

    name = "parity"
    about = "are the ones so far odd?"
    follows = True
    theory = (
        "one bit of state, for a recurrence that can flip it: gates in (0, 1) cannot (Grazzi et al. 2024, arXiv "
        "2411.12537), nor does attention generalise past the lengths it saw (Hahn 2020, arXiv 1906.06755)"
    )

    def __post_init__(self) -> None:
        require(self.length >= 2, "length", self.length, "≥ 2")

    def counts(self) -> tuple[int, int]:
        return 2, 2

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        ids_BT = rng.integers(2, size=(batch_size, self.length))
        targets_BT = np.cumsum(ids_BT, 1) % 2
        targets_BT[:, 0] = IGNORE
        return ids_BT, targets_BT


@dataclass(frozen=True)
class Brackets(Task):
    """The beginning of a well-bracketed word of several kinds (Dyck); after a bracket is closed inside another, the
    kind of the one that is then to be closed next is asked, if that was opened at least `reach` tokens ago.

        ( [ ] ( [ ] [ ] ) )      reach 4
                      ) )

    chance: 1/kinds, also for a model that sees the last `reach` tokens: the bracket around them is not among those.
    """

    name = "brackets"
    about = "which bracket is to be closed next?"
    follows = True
    theory = (
        "a stack of depth · log2 kinds bits; attention of two layers does it up to a depth (Yao et al. 2021, arXiv "
        "2105.11115), and so does a recurrence whose state holds the stack"
    )
    kinds: int = 4
    depth: int = 8
    reach: int = 8

    def __post_init__(self) -> None:
        require(self.kinds >= 2, "kinds", self.kinds, "≥ 2")
        require(self.depth >= 2, "depth", self.depth, "≥ 2")
        require(self.length >= 4, "length", self.length, "≥ 4")
        require(2 <= self.reach < self.length, "reach", self.reach, f"in [2, length - 1 = {self.length - 1}]")

    def counts(self) -> tuple[int, int]:
        return 2 * self.kinds, self.kinds

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        """Kinds are drawn evenly; a coin decides to open or close, except at depth 0 and at the greatest."""
        ids_BT, targets_BT = empty(batch_size, self.length)
        rows_B, depth_B = np.arange(batch_size), np.zeros(batch_size, dtype=np.int64)
        stack = np.zeros((batch_size, self.depth + 1), dtype=np.int64)  # kinds open, from place 1 on
        since = np.zeros_like(stack)  # where they were opened
        for t in range(self.length):
            opens_B = (depth_B == 0) | ((depth_B < self.depth) & (rng.integers(2, size=batch_size) == 1))
            kind_B = rng.integers(self.kinds, size=batch_size)
            ids_BT[:, t] = np.where(opens_B, kind_B, self.kinds + stack[rows_B, depth_B])
            depth_B += np.where(opens_B, 1, -1)
            stack[rows_B[opens_B], depth_B[opens_B]] = kind_B[opens_B]
            since[rows_B[opens_B], depth_B[opens_B]] = t
            asked_B = ~opens_B & (depth_B > 0) & (t - since[rows_B, depth_B] >= self.reach)
            targets_BT[:, t] = np.where(asked_B, self.kinds + stack[rows_B, depth_B], IGNORE)
        return ids_BT, targets_BT


@cache
def products(n: int) -> Ids:
    """after[i, j]: the number of "permutation i, then j" in the order of `itertools.permutations(range(n))`."""
    every = list(permutations(range(n)))
    number = {moved: index for index, moved in enumerate(every)}
    return np.array([[number[tuple(then[place] for place in first)] for then in every] for first in every])
