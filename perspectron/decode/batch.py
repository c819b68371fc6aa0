"""Rows of text under way, the batch that draws from them, and the result of a step: the parts of `Rows`.

Shapes: B batch, D model width.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray
from torch import Tensor

from perspectron.decode.constrain import Matcher
from perspectron.decode.graphs import Graphs
from perspectron.decode.reading import END_OF_TEXT_ID
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.decode.text import TextStream
from perspectron.decode.watch import Read, Watched
from perspectron.designs.perspective.views import Verdict
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState

Finish = Literal["stop", "end", "length", "error", "unsafe"]
"""Reasons to end: a stop string or a text that a constraint has complete; the end-of-text token or a stop id;
`max_tokens`; nothing that can be drawn; an unsafe state."""

WIDTH = 8
"""Rows of a batch come in multiples of it: products of 1 to 7 rows, and ends of vectors, take other kernels, whose sums
have another order; with 8, 16, … a row's sums are always the same."""


@dataclass(frozen=True)
class Piece:
    """The result of one step for one row. id: the token drawn, None after an error. text: the text that has become
    certain, possibly empty: whole characters that cannot begin a stop string. finished: why the row ends here; None
    while it continues. logprob: of the token, in nats, by the model itself, before a constraint or any setting changed
    its logits. likely: the most likely tokens and their logprobs, as many as the row asked for, allowed or not.
    verdict: of the perspectives, if asked. unsafe: the token's state, or the mean of a window that ends there, was
    outside the safe set. error: why nothing could be drawn, if not for the model's logits."""

    row: int
    id: int | None
    text: str
    finished: Finish | None
    logprob: float | None = None
    likely: tuple[tuple[int, float], ...] = ()
    verdict: Verdict | None = None
    unsafe: bool = False
    error: str = ""


@dataclass(eq=False)
class Row:
    """One row, from `add` to `remove`."""

    handle: int
    unread: list[int]
    """Tokens to read before the next draw: the prompt, later the last token drawn."""
    fresh: bool
    """True while the row has read nothing and has no state to continue from."""
    recent: list[int]
    drawn: int
    left: int
    """Tokens it may still draw."""
    sampling: SamplingConfig
    stream: int
    text: TextStream
    logprobs: int | None
    state: LMState | None
    """State of this row while it is in no batch; None before the first chunk of a new row."""
    start: int = 0
    """Tokens of `unread` that are read."""
    finished: Finish | None = None
    keys: list[bytes] | None = None
    """Keys of the prefixes in which the prompt is read; None where they are not stored."""
    seconds: float = 0.0
    """Time that reading up to here took, or would have taken."""
    spared: int = 0
    """Tokens that the store had."""
    watched: Watched = field(default_factory=Watched)
    matcher: Matcher | None = None
    """The place in the grammar of the row's constraint."""
    early: int = 0
    """Tokens to draw before the text may end."""
    ends: frozenset[int] = frozenset((END_OF_TEXT_ID,))
    """Tokens that end the text and are none of it."""

    def allowed(self, vocab: int) -> NDArray[np.bool_] | None:
        """Tokens [V] that may be drawn now; None: all."""
        if self.matcher is None and self.early == 0:
            return None
        allowed = np.ones(vocab, np.bool_) if self.matcher is None else self.matcher.allowed()
        if self.early > 0 or len(self.ends) > 1:
            allowed[list(self.ends)] = self.early == 0 and allowed[END_OF_TEXT_ID]
        return allowed

    def rest(self) -> list[int]:
        """Tokens that are not read."""
        return self.unread[self.start :]

    def take(
        self, id: int, data: bytes, logprob: float | None = None, likely: tuple[tuple[int, float], ...] = ()
    ) -> Piece:
        """Count a drawn token in."""
        ends, counts = id in self.ends, self.early == 0
        if self.matcher is not None and not ends and not self.matcher.take(id):
            return replace(self.fail(), error=f"constraint: {self.matcher.error}")
        self.unread, self.start = [id], 0
        self.drawn += 1
        self.left -= 1
        self.early = max(0, self.early - 1)
        text = self.text.push(b"" if ends else data, stops=counts)
        if id != END_OF_TEXT_ID:  # the penalty does not count the end of a document: it is no repetition
            self.recent = [*self.recent, id][-self.sampling.repetition_window :]
        if ends:
            self.finished = "end"
        elif self.text.stopped or (self.matcher is not None and self.matcher.complete):
            self.finished = "stop"
        elif self.left == 0:
            self.finished = "length"
        if self.finished is not None:
            text += self.text.flush(stops=counts)
            self.finished = "stop" if self.text.stopped else self.finished
        return Piece(self.handle, id, text, self.finished, logprob, likely)

    def fail(self, finish: Finish = "error") -> Piece:
        """End without a token."""
        self.finished = finish
        return Piece(self.handle, None, self.text.flush(), finish)


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
            empty = [[END_OF_TEXT_ID]] * (-len(self.rows) % WIDTH)
            ids_B1 = torch.tensor([*(row.unread for row in self.rows), *empty], device=device)
            self.before = self.state.fork(self.before) if keep else None
            hidden_BD, logits_BV, self.state = stepped(model, self.steps, ids_B1, self.state)
            read = [Read(hidden_BD, len(self.rows), logits_BV)]
        else:
            for row in self.rows:
                assert row.state is not None
                ids_11 = torch.tensor([row.unread], device=device)
                row.watched.before = row.state.fork(row.watched.before) if keep else None
                hidden_1D, logits_1V, row.state = stepped(model, self.steps, ids_11, row.state)
                read.append(Read(hidden_1D, 1, logits_1V))
        for row in self.rows:
            row.start = 1
        return read

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
