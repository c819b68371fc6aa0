"""The batch of rows that draw tokens, and its decoding steps.

Shapes: B batch, D model width, V vocabulary.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.decode.ahead import Reading
from perspectron.decode.drafts import LENGTHS, Draft, Drafter
from perspectron.decode.graphs import Graphs
from perspectron.decode.row import Row
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.model.cache import Cache, with_caches
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.errors import StateError

log = logging.getLogger("perspectron")
WIDTH = 8
"""Batches are padded to a multiple of this many rows: products of 1 to 7 rows, and ends of vectors, take other kernels,
which add in another order; with 8, 16, … rows the sums of a row are always the same."""


class Read(NamedTuple):
    """The result of reading a token: the head's input [B,D] of `rows` rows, perhaps followed by padding rows, and the
    logits [B,V] if the step computed them."""

    hidden_BD: Tensor
    rows: int
    logits_BV: Tensor | None = None


@dataclass(eq=False)
class Ahead:
    """Tokens that a row has read ahead. at: its index in the state. taken: how many of them are in the text by now."""

    reading: Reading
    at: int
    tokens: list[int]
    taken: int = 0

    def next(self, id: int) -> bool:
        """True if `id` is the next token that was read ahead."""
        return self.taken < len(self.tokens) and self.tokens[self.taken] == id


@dataclass
class Batch:
    """Rows that draw tokens. together: their states form one `LMState`, in their order, padded with empty rows to a
    multiple of WIDTH; else each row keeps its own. drafter: source of drafts, which are read ahead."""

    model: LanguageModel
    together: bool
    rows: list[Row] = field(default_factory=list)
    state: LMState | None = None
    before: LMState | None = None
    """The state before the last token, where it is kept."""
    kept: tuple[Row, ...] = ()
    """The rows of which a state before the last token is kept."""
    steps: Steps | Graphs | None = None
    """Recordings or graphs of the model's step, where there are any."""
    drafter: Drafter | None = None
    _ahead: dict[Row, Ahead] = field(default_factory=dict)
    _drafts: dict[Row, Draft] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._longest = 0 if self.drafter is None else self.drafter.fits(self.model)

    def join(self, rows: list[Row]) -> None:
        """Add rows with their states."""
        self.steps = steps_of(self.model)
        if self.together:
            self.settle(self.rows, drop=True)
        if self.drafter is not None and not isinstance(self.steps, Steps):
            log.warning("%s reads no drafts: its steps are not recorded here", self.model.config.name)
            self.drafter = None
        if self.drafter is not None:
            self._weigh(self.drafter, rows)
            self._drafts |= {row: self.drafter.begin(row) for row in rows}
        if self.together and rows:
            states = [] if self.state is None else [self.state.select(range(len(self.rows)))]
            for row in rows:
                assert row.state is not None
                states.append(row.state)
                row.state = None
            self.state = self._filled(states, len(self.rows) + len(rows))
        self.rows += rows

    def _weigh(self, drafter: Drafter, rows: list[Row]) -> None:
        """Set `Pace.copied`: the bytes of a state that are copied with each token of a draft, which are all but growing
        caches, over those of the weights."""
        state = next((row.state for row in rows if row.state is not None), None)
        if state is None or drafter.pace.copied:
            return
        weights = sum(x.nbytes for x in (*self.model.parameters(), *self.model.buffers()))
        drafter.pace.copied = with_caches(state, Cache.emptied).nbytes / max(1, weights)

    def leave(self, rows: list[Row]) -> None:
        """Remove rows; each takes its state with it."""
        if not rows:
            return
        self.settle(self.rows if self.together else rows, drop=True)
        for row in rows:
            draft = self._drafts.pop(row, None)
            if draft is not None and self.drafter is not None:
                self.drafter.end(draft)
        left, self.rows = self.rows, [row for row in self.rows if row not in rows]
        if self.state is None:
            return
        for row in rows:
            row.state = self.state.take(left.index(row))
        stay = [left.index(row) for row in self.rows]
        self.state = self._filled([self.state.select(stay)], len(stay)) if stay else None

    def advance(self, *, keep: bool, ahead: bool = False) -> list[Read]:
        """Read the last token of each row, together or one by one. keep: also keep the states before it. ahead: drafts
        may be read along with it; tokens that were rightly drafted before are not read again."""
        may = ahead and not keep and self.drafter is not None and isinstance(self.steps, Steps)
        if not may:
            self.settle(self.rows, drop=True)
        self.kept = tuple(self.rows) if keep else ()
        groups = [self.rows] if self.state is not None else [[row] for row in self.rows]
        read = list[Read]()
        for rows in groups if self.rows else []:
            found = self._drafted(rows) if may else None
            if found is None:
                self.settle(rows, drop=True)
                start = time.perf_counter()
                found = self._stepped(rows, keep=keep)
                if self.drafter is not None:
                    self.drafter.pace.stepped(time.perf_counter() - start)
            read += found
        for row in self.rows:
            row.start = 1
        return read

    def _stepped(self, rows: Sequence[Row], *, keep: bool) -> list[Read]:
        """Read the last token of rows, the whole batch or a single row, in an ordinary step."""
        model, device, read = self.model, self.model.device, list[Read]()
        if self.state is not None:
            empty = [[0]] * (-len(self.rows) % WIDTH)  # any token
            ids_B1 = torch.tensor([*(row.unread for row in self.rows), *empty], device=device)
            self.before = self.state.fork(self.before) if keep else None
            hidden_BD, logits_BV, self.state = stepped(model, self.steps, ids_B1, self.state)
            read = [Read(hidden_BD, len(self.rows), logits_BV)]
        else:
            for row in rows:
                assert row.state is not None
                ids_11 = torch.tensor([row.unread], device=device)
                row.before = row.state.fork(row.before) if keep else None
                hidden_1D, logits_1V, row.state = stepped(model, self.steps, ids_11, row.state)
                read.append(Read(hidden_1D, 1, logits_1V))
        return read

    def _drafted(self, rows: Sequence[Row]) -> list[Read] | None:
        """Read the last token of rows, the whole batch or a single row, with their drafts; what was read ahead is not
        read again. None if an ordinary step is needed: drafts do not pay, there are none, or they cannot be read."""
        drafter = self.drafter
        if drafter is None or not (drafter.pace.pays or self._ahead):
            return None
        start, hand = time.perf_counter(), list[bool]()
        for row in rows:
            ahead, draft, (id,) = self._ahead.get(row), self._drafts[row], row.unread
            hand.append(ahead is not None and ahead.next(id))
            known = ahead is not None and ahead.taken < len(ahead.tokens)
            if known or draft.waits is not None:
                draft.learn(hand[-1] if known else draft.waits == id)
            draft.waits = None
        wants = [at for at, there in enumerate(hand) if not there]
        drafts = [self._draft(rows[at], len(wants)) for at in wants]
        if len(wants) > 1:
            drafts = [draft[: next((n for n in LENGTHS if n <= len(draft)), 0)] for draft in drafts]
        state = self.state if self.state is not None else rows[0].state
        assert isinstance(self.steps, Steps)
        assert state is not None
        some = any(hand)
        if not (some or any(drafts)) or (some and wants and not self.steps.holds(state)):
            return None
        if wants:
            self.settle([rows[at] for at in wants], drop=True)
            tokens = [[*rows[at].unread, *draft] for at, draft in zip(wants, drafts, strict=True)]
            done = self.steps.ahead(wants, tokens, state)
            if done is None:
                if self.steps.refuses:
                    log.warning("%s reads no drafts: %s", self.model.config.name, self.steps.refuses)
                    self.drafter = None
                return None
            reading, state = done
            if self.state is not None:
                self.state = state
            else:
                rows[0].state = state
            for at, own in zip(wants, tokens, strict=True):
                self._ahead[rows[at]] = Ahead(reading, at, own[: reading.lengths[at]])
            more = sum(reading.lengths.values()) - len(wants)
            drafter.counts.runs += more > 0
            drafter.counts.drafted += more
            seconds = time.perf_counter() - start - reading.making
            drafter.pace.read(more + len(wants), len(wants), seconds)
        read = list[Read]()
        for row in rows:
            ahead = self._ahead[row]
            hidden_1D, logits_1V = ahead.reading.after(ahead.at, ahead.taken)
            read.append(Read(hidden_1D, 1, logits_1V))
            if ahead.taken > 0:
                drafter.counts.accepted += 1
                drafter.pace.saved(len(rows))
            ahead.taken += 1
        return read

    def _draft(self, row: Row, rows: int) -> list[int]:
        """The draft for a row. rows: how many rows want one at the same time."""
        draft = self._drafts[row]
        assert self.drafter is not None
        most = min(self.drafter.pace.most(draft.hopes, rows, self._longest), row.left - 1)
        if most > 0:
            return draft.propose(most)
        if draft.free:
            draft.waits = next(iter(draft.propose(1)), None)
        else:
            draft.forget()
        return []

    def settle(self, rows: Sequence[Row], *, drop: bool = False) -> None:
        """Move the states of rows past those of the tokens read ahead that were then drawn. drop: discard the rest of
        these tokens."""
        for row in rows:
            ahead = self._ahead.get(row)
            if ahead is None:
                continue
            ahead.reading.keep(ahead.at, ahead.taken)
            if drop:
                ahead.reading.leave(ahead.at)
                del self._ahead[row]

    def state_at(self, at: int) -> LMState:
        """A copy of a row's state."""
        self.settle([self.rows[at]])
        own = self.rows[at].state
        if own is not None:
            return own.fork()
        assert self.state is not None
        return self.state.take(at)

    def before_at(self, at: int) -> LMState:
        """A copy of a row's state before its last token. StateError where that is not kept."""
        if self.rows[at] not in self.kept:
            raise StateError(
                "before: none is kept before the first token after a prompt, nor without a hook that has keeps_before"
            )
        own = self.rows[at].before
        if own is not None:
            return own.fork()
        assert self.before is not None
        return self.before.take(at)

    def put(self, at: int, state: LMState) -> None:
        """Replace a row's state."""
        self.settle(self.rows, drop=True)
        if self.state is None:
            self.rows[at].state = state
        else:
            self.state = self.state.put(at, state)

    def position(self, at: int) -> int:
        """The position of a row's last token in its document; 0 if the state does not count tokens."""
        self.settle([self.rows[at]])
        state, row = (self.rows[at].state, 0) if self.state is None else (self.state, at)
        length_B = None if state is None else state.document_length_B
        return 0 if length_B is None else int(length_B[row]) - 1

    def _filled(self, states: list[LMState], count: int) -> LMState:
        """Stack states of `count` rows, padded with empty rows to a multiple of WIDTH. Padding begins anew each time,
        so that it never reaches the end of a table of positions before a text does."""
        if missing := -count % WIDTH:
            empty, like = self.model.init_state(missing), states[0].layers
            layers = [_empty(*pair, missing) for pair in zip(empty.layers, like, strict=True)]
            states = [*states, replace(empty, layers=tuple(layers))]
        return states[0] if len(states) == 1 else LMState.stack(states)


def _empty(layer: Any, like: Any, rows: int) -> Any:
    """A layer's empty state for `rows` rows; zeros where texts have another kind, such as one with adapters."""
    if type(layer) is type(like):
        return layer
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), like)
