"""The batch of rows that are drawn from, and its steps.

Shapes: B batch, D model width, V vocabulary.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.decode.graphs import Graphs
from perspectron.decode.row import Row
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState

WIDTH = 8
"""Rows of a batch come in multiples of it: products of 1 to 7 rows, and ends of vectors, take other kernels, whose sums
have another order; with 8, 16, … a row's sums are always the same."""


class Read(NamedTuple):
    """The head's input after the last token of so many rows, and perhaps of rows of no text after them [B,D]; and its
    output, where that is at hand."""

    hidden_BD: Tensor
    rows: int
    logits_BV: Tensor | None = None


@dataclass
class Batch:
    """Rows that are drawn from. together: their states stand in one `LMState`, in their order, and after them rows of
    no text up to a multiple of WIDTH; else each has one."""

    model: LanguageModel
    together: bool
    rows: list[Row] = field(default_factory=list)
    state: LMState | None = None
    before: LMState | None = None
    """The state before the last token, where it is kept."""
    steps: Steps | Graphs | None = None
    """Recordings or graphs of the model's step, where there are any."""

    def join(self, rows: list[Row]) -> None:
        """Let rows in, with their states."""
        self.steps = steps_of(self.model)
        if self.together and rows:
            states = [] if self.state is None else [self.state.select(range(len(self.rows)))]
            for row in rows:
                assert row.state is not None
                states.append(row.state)
                row.state = None
            self.state = self._filled(states, len(self.rows) + len(rows))
        self.rows += rows

    def leave(self, rows: list[Row]) -> None:
        """Let rows out, each with its state."""
        left, self.rows = self.rows, [row for row in self.rows if row not in rows]
        if self.state is None or not rows:
            return
        for row in rows:
            row.state = self.state.take(left.index(row))
        stay = [left.index(row) for row in self.rows]
        self.state = self._filled([self.state.select(stay)], len(stay)) if stay else None

    def advance(self, *, keep: bool) -> list[Read]:
        """Read the last token of each row, together or one by one. keep: the states before it, too."""
        model, device, read = self.model, self.model.device, list[Read]()
        if self.state is not None:
            empty = [[0]] * (-len(self.rows) % WIDTH)  # any token
            ids_B1 = torch.tensor([*(row.unread for row in self.rows), *empty], device=device)
            self.before = self.state.fork(self.before) if keep else None
            hidden_BD, logits_BV, self.state = stepped(model, self.steps, ids_B1, self.state)
            read = [Read(hidden_BD, len(self.rows), logits_BV)]
        else:
            for row in self.rows:
                assert row.state is not None
                ids_11 = torch.tensor([row.unread], device=device)
                row.before = row.state.fork(row.before) if keep else None
                hidden_1D, logits_1V, row.state = stepped(model, self.steps, ids_11, row.state)
                read.append(Read(hidden_1D, 1, logits_1V))
        for row in self.rows:
            row.start = 1
        return read

    def state_at(self, at: int) -> LMState:
        """A copy of a row's state."""
        own = self.rows[at].state
        if own is not None:
            return own.fork()
        assert self.state is not None
        return self.state.take(at)

    def before_at(self, at: int) -> LMState:
        """A copy of a row's state before its last token, where that is kept."""
        own = self.rows[at].before
        if own is not None:
            return own.fork()
        assert self.before is not None
        return self.before.take(at)

    def put(self, at: int, state: LMState) -> None:
        """Let a row go on from another state."""
        if self.state is None:
            self.rows[at].state = state
        else:
            self.state = self.state.put(at, state)

    def position(self, at: int) -> int:
        """The position of a row's last token in its document; 0 where the state does not count."""
        state, row = (self.rows[at].state, 0) if self.state is None else (self.state, at)
        length_B = None if state is None else state.document_length_B
        return 0 if length_B is None else int(length_B[row]) - 1

    def _filled(self, states: list[LMState], count: int) -> LMState:
        """One state of so many rows and those of no text. These begin anew each time, so that none comes to the end of
        a table of positions before a text does."""
        if missing := -count % WIDTH:
            empty, like = self.model.init_state(missing), states[0].layers
            layers = [_empty(*pair, missing) for pair in zip(empty.layers, like, strict=True)]
            states = [*states, replace(empty, layers=tuple(layers))]
        return states[0] if len(states) == 1 else LMState.stack(states)


def _empty(layer: Any, like: Any, rows: int) -> Any:
    """A layer's empty state of so many rows; zeros where texts have another kind, such as one with adapters."""
    if type(layer) is type(like):
        return layer
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), like)
