"""Speculative decoding: reads several tokens of a text in one run of a recorded step; the state keeps those accepted.

Shapes: N tokens of all rows, D model width, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perspectron.model.cache import Cache
from perspectron.native import tape
from perspectron.native.ahead import Program, Template
from perspectron.native.tape import Tape, places_of

MOST_PROGRAMS = 48
"""Kinds of programs kept for a recording, by the number of tokens that each row reads."""


class Ahead:
    """Pool of programs that run a recorded step of one row on several tokens."""

    def __init__(self, written: Tape, bases: Sequence[Tensor], ends: Sequence[int]) -> None:
        self._template = Template(written, bases, ends)
        self._free = dict[tuple[int, ...], list[Program]]()

    def take(self, lengths: Sequence[int]) -> Program:
        """Take a free program for rows of these lengths, or make one. Unrecordable: the step has no such program."""
        key = tuple(lengths)
        free = self._free.pop(key, [])
        program = free.pop() if free else self._template.program(key)
        self._free[key] = free
        while len(self._free) > MOST_PROGRAMS:
            del self._free[next(iter(self._free))]
        return program

    def give(self, program: Program) -> None:
        """Return a program to the pool, unless its kind was dropped meanwhile."""
        if program.lengths in self._free:
            self._free[program.lengths].append(program)


class Reading:
    """Tokens that some rows of a state have read ahead; the state is unchanged until `keep`. tokens: for each of
    `rows`, its next ones in order. leaves: tensors of the state. kept: called after the state of a row has changed."""

    def __init__(
        self,
        of: Ahead,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        leaves: Sequence[Tensor],
        caches: Sequence[Cache],
        like: tuple[Tensor, Tensor],
        kept: Callable[[], None],
    ) -> None:
        order = sorted(range(len(rows)), key=lambda n: -len(tokens[n]))  # for few kinds of programs
        rows, tokens = [rows[n] for n in order], [tokens[n] for n in order]
        start = time.perf_counter()
        program = of.take([len(own) for own in tokens])
        self.making = time.perf_counter() - start
        """Seconds spent on obtaining the program, which may have been made for this reading."""
        self._of, self._program, self._left = of, program, set(rows)
        self.lengths = {row: len(own) for row, own in zip(rows, tokens, strict=True)}
        """Number of tokens read ahead, by row."""
        self._at = {row: n for n, row in enumerate(rows)}
        self._leaves, self._caches, self._kept = leaves, caches, kept
        ids_N = torch.tensor([id for own in tokens for id in own])
        self.hidden_ND, self.logits_NV = (x.new_empty(len(ids_N), x.shape[1]) for x in like)
        self._parts = {row: [x.data_ptr() + row * x[:1].nbytes for x in leaves] for row in rows}
        tables = [_table(caches, row, len(own)) for row, own in zip(rows, tokens, strict=True)]
        starts = [x.data_ptr() for x in (ids_N, self.hidden_ND, self.logits_NV)]
        each = (
            [*self._parts[row], table.rows_LB3.ctypes.data] for row, table in zip(rows, tables, strict=True)
        )
        places = places_of([*starts, *(place for own in each for place in own)])
        program.stretch(caches[0].slots if caches else None)
        program.run(places)

    def after(self, row: int, number: int) -> tuple[Tensor, Tensor]:
        """The head's input [1,D] and the logits [1,V] after token `number` of a row, counted from 0."""
        at = self._program.starts[self._at[row]] + number
        return self.hidden_ND[at : at + 1], self.logits_NV[at : at + 1]

    def keep(self, row: int, tokens: int) -> None:
        """Move a row's state past the first `tokens` tokens that it read ahead; 0 changes nothing. A later call may
        keep fewer or more, as long as the row has not read on since."""
        if tokens == 0:
            return
        self._program.keep(self._at[row], tokens, self._parts[row])
        torch.autograd.graph.increment_version(self._leaves)
        if self._caches:
            length = int(self._caches[0].length_B[row])
            for cache in self._caches:
                used = length - (cache.before[row] if cache.shared else 0)
                object.__setattr__(cache, "used", max(cache.used, used))
        self._kept()

    def leave(self, row: int) -> None:
        """Release a row; releasing the last one returns the program to the pool."""
        self._left.discard(row)
        if not self._left:
            self._of.give(self._program)


def _table(caches: Sequence[Cache], row: int, tokens: int) -> tape.Table:
    """Table of the cache pieces of a row (`tape.Table`), repeated for each of its tokens."""
    pieces = [cache.shared[row] if cache.shared else () for cache in caches]
    return tape.table_of(
        [[[piece.place for piece in own]] * tokens for own in pieces],
        [[sum(piece.tokens for piece in own)] * tokens for own in pieces],
    )
