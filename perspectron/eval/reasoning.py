"""Synthetic tasks in which facts are combined in one go: Depo, Brevo and Mano of "Physics of Language Models: Part 4.1"
(Allen-Zhu 2025, arXiv 2512.17351). They are as those of `eval.tasks`, which says what a task is.

What differs from the paper: names are single ids, there is no mark at the beginning or end of a text, blanks stand
between facts and questions so that all texts are equally long, and sizes grow by lessons (`eval.recall`) where the
paper draws them anew for each text.

Suffixes: B batch, T time, N things, Q questions.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from perspectron.eval.tasks import Ids, Task, empty, some
from perspectron.util.config import require


@dataclass(frozen=True)
class Depo(Task):
    """The successor of each of several things on one ring, in any order; then questions: a number of hops in
    [fewest, hops] and a thing, at which the thing so many steps on is asked.

        b c a b d a c d . 2 b 1 d      things 4, hops 2, questions 2
                            d   a

    The paper writes each answer into the text; here it does not help the next question. chance: 1/(names - 1), for
    nothing follows itself.
    """

    name = "depo"
    about = "depth: what comes k steps later on a ring of things?"
    theory = (
        "attention doubles its hops with each layer (Sanford et al. 2024, arXiv 2402.09268); a recurrence has to bind "
        "every thing to its successor, and takes a hop a layer or none at all"
    )
    things: int
    hops: int
    questions: int = 8
    names: int = 16
    fewest: int = 1

    def __post_init__(self) -> None:
        require(self.things >= 2, "things", self.things, "≥ 2")
        require(1 <= self.hops < self.things, "hops", self.hops, f"in [1, things - 1 = {self.things - 1}]")
        require(1 <= self.fewest <= self.hops, "fewest", self.fewest, f"in [1, hops = {self.hops}]")
        require(self.questions >= 1, "questions", self.questions, "≥ 1")
        require(self.names >= self.things, "names", self.names, f"≥ things = {self.things}")
        require(self.length >= self.room, "length", self.length, f"≥ 2 · (things + questions) = {self.room}")

    @property
    def room(self) -> int:
        return 2 * (self.things + self.questions)

    def counts(self) -> tuple[int, int]:
        return 1 + self.names + self.hops, self.names - 1

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        N, Q = self.things, self.questions
        ring_BN = 1 + some(rng, batch_size, self.names, N)
        first_BN = some(rng, batch_size, N, N)  # places on the ring, in the order of the text
        start_BQ = rng.integers(N, size=(batch_size, Q))
        hops_BQ = rng.integers(self.fewest, self.hops + 1, size=(batch_size, Q))
        ids_BT, targets_BT = empty(batch_size, self.length)
        ids_BT[:, 0 : 2 * N : 2] = np.take_along_axis(ring_BN, first_BN, 1)
        ids_BT[:, 1 : 2 * N : 2] = np.take_along_axis(ring_BN, (first_BN + 1) % N, 1)
        asked = self.length - 2 * Q
        ids_BT[:, asked::2] = self.names + hops_BQ
        ids_BT[:, asked + 1 :: 2] = np.take_along_axis(ring_BN, start_BQ, 1)
        targets_BT[:, asked + 1 :: 2] = np.take_along_axis(ring_BN, (start_BQ + hops_BQ) % N, 1)
        return ids_BT, targets_BT


@dataclass(frozen=True)
class Brevo(Task):
    """Pairs of a thing and one that needs it, in any order; then a mark and a thing: all that it needs, directly or
    not, is asked, each after what it needs itself, the thing last.

        a c b c c d a d a e . > d a b c      things 5
                              a b c d

    Where several may come next, the one that stands first in the text does, so that one answer is right; in the paper
    every possible order counts. A thing needs at most `needs` things, and at most as many need it. chance:
    1/(names - 1), for nothing follows itself and names mean nothing.
    """

    name = "brevo"
    about = "breadth: all that a thing needs, each after what it needs itself"
    theory = (
        "before its first answer a model has to know all that the asked thing depends on: a search of the whole "
        "graph in as many steps as it has layers"
    )
    things: int
    needs: int = 4
    names: int = 16

    def __post_init__(self) -> None:
        require(self.things >= 2, "things", self.things, "≥ 2")
        require(self.needs >= 1, "needs", self.needs, "≥ 1")
        require(self.names >= self.things, "names", self.names, f"≥ things = {self.things}")
        least = f"≥ (2 · needs + 1) · (things - 1) + 2 = {self.room}"
        require(self.length >= self.room, "length", self.length, least)

    @property
    def room(self) -> int:
        return (2 * self.needs + 1) * (self.things - 1) + 2

    def counts(self) -> tuple[int, int]:
        return 2 + self.names, self.names - 1

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        ids_BT, targets_BT = empty(batch_size, self.length)
        name_BN = 1 + some(rng, batch_size, self.names, self.things)
        for ids_T, targets_T, name_N in zip(ids_BT, targets_BT, name_BN, strict=True):
            pairs, answers = self._text(rng)
            told, said = name_N[np.array(pairs).ravel()], name_N[answers]
            asked = self.length - len(said)
            ids_T[: len(told)] = told
            ids_T[asked - 1 : asked + 1] = 1 + self.names, said[-1]
            ids_T[asked + 1 :] = said[:-1]
            targets_T[asked:] = said
        return ids_BT, targets_BT

    def _text(self, rng: np.random.Generator) -> tuple[list[tuple[int, int]], list[int]]:
        """(needed, needing) of a graph in the order of the text, and what the last thing needs, in order; things by
        number. Each needs some of those before it but for the first few, which need nothing."""
        things, uses = self.things, [0] * self.things
        pairs = list[tuple[int, int]]()
        for thing in range(int(rng.integers(1, (things - 1) // 4 + 2)), things):
            free = [before for before in range(thing) if uses[before] < self.needs]
            chosen = rng.permutation(free)[: rng.integers(1, min(len(free), self.needs) + 1)].tolist()
            for before in chosen:
                uses[before] += 1
                pairs.append((before, thing))
        pairs = [pairs[i] for i in rng.permutation(len(pairs))]
        needed = {thing: {a for a, b in pairs if b == thing} for thing in range(things)}
        read = list(dict.fromkeys(thing for pair in pairs for thing in pair))
        wanted = {things - 1}
        for thing in range(things - 1, -1, -1):  # what a thing needs has a smaller number
            wanted |= needed[thing] if thing in wanted else set()
        answers = list[int]()
        while len(answers) < len(wanted):
            open_ = wanted.difference(answers)
            answers.append(next(thing for thing in read if thing in open_ and not needed[thing] & open_))
        return pairs, answers


@dataclass(frozen=True)
class Mano(Task):
    """A number of operations, in [fewest, operations], and an expression of so many in prefix notation, over the
    numbers below `modulus`; at a mark its value is asked.

        . 2 + * 3 4 6 =      operations 2, modulus 7
                      4

    The facts are the tables of +, - and *: they are the same in all texts, and a model keeps them in its weights.
    chance: the share of 0, the commonest value, as a product is 0 more often than any other value.
    """

    name = "mano"
    about = "arithmetic in one go, from tables that were learned"
    theory = (
        "the state holds only what is open; the tables, 3 · modulus² facts, are in the weights, and an expression "
        "needs as many steps one after the other as it is deep"
    )
    operations: int
    modulus: int = 23
    fewest: int = 1

    def __post_init__(self) -> None:
        require(self.modulus >= 2, "modulus", self.modulus, "≥ 2")
        require(self.operations >= 1, "operations", self.operations, "≥ 1")
        fits = 1 <= self.fewest <= self.operations
        require(fits, "fewest", self.fewest, f"in [1, operations = {self.operations}]")
        require(self.length >= self.room, "length", self.length, f"≥ 2 · operations + 3 = {self.room}")

    @property
    def room(self) -> int:
        return 2 * self.operations + 3

    def counts(self) -> tuple[int, int]:
        return 5 + self.modulus + self.operations, self.modulus

    @property
    def chance(self) -> float:
        return max(values(self.modulus, self.operations)[self.fewest :].mean(0).tolist())

    def arrays(self, rng: np.random.Generator, batch_size: int) -> tuple[Ids, Ids]:
        ids_BT, targets_BT = empty(batch_size, self.length)
        equals = self.modulus + 4
        counts = rng.integers(self.fewest, self.operations + 1, size=batch_size).tolist()
        for b, count in enumerate(counts):
            tokens, value = self._expression(rng, count)
            ids_BT[b, -len(tokens) - 2 :] = [equals + count, *tokens, equals]
            targets_BT[b, -1] = 1 + value
        return ids_BT, targets_BT

    def _expression(self, rng: np.random.Generator, operations: int) -> tuple[list[int], int]:
        """(ids, value) of an expression: a number, or an operation and two expressions, each split equally likely."""
        if operations == 0:
            number = int(rng.integers(self.modulus))
            return [1 + number], number
        operation, left = rng.integers([3, operations]).tolist()
        (one, a), (other, b) = (self._expression(rng, n) for n in (left, operations - 1 - left))
        value = (a + b, a - b, a * b)[operation] % self.modulus
        return [1 + self.modulus + operation, *one, *other], value


@cache
def values(modulus: int, operations: int) -> NDArray[np.float64]:
    """[n, v]: how likely an expression of n ≤ `operations` operations has value v, as Mano draws them."""
    a, b = np.indices((modulus, modulus))
    found = np.zeros((operations + 1, modulus))
    found[0] = 1 / modulus
    for n in range(1, operations + 1):
        for left in range(n):
            both = np.outer(found[left], found[n - 1 - left]) / (3 * n)
            for value in (a + b, a - b, a * b):
                np.add.at(found[n], value % modulus, both)
    return found
