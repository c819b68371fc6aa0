"""Generation step by step, with rows that join and leave at any time.

Shapes: B batch, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from perspectron.config import require
from perspectron.decode import reading
from perspectron.decode.conversation import Conversation
from perspectron.decode.reading import END_OF_TEXT_ID, check_ids, check_room
from perspectron.decode.sampling import SamplingConfig, non_finite, sample
from perspectron.decode.text import TextStream
from perspectron.errors import StateError
from perspectron.model import LanguageModel
from perspectron.state import LMState

Finish = Literal["stop", "end", "length", "error"]
"""At a stop string, at the end-of-text token, at `max_tokens`, or because the logits were not finite."""


class Vocabulary(Protocol):
    """The part of a tokenizer that generating needs."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, id: int) -> bytes: ...


@dataclass(frozen=True)
class Piece:
    """The result of one step for one row. id: the token drawn, None after an error. text: the text that has become
    certain, possibly empty: whole characters that cannot begin a stop string. finished: why the row ends here; None
    while it continues."""

    row: int
    id: int | None
    text: str
    finished: Finish | None


@dataclass(eq=False)
class _Row:
    """One row, from `add` to `remove`."""

    handle: int
    unread: list[int]
    """Tokens to read before the next draw: the prompt, later the last token drawn."""
    fresh: bool
    """It has read nothing yet, and goes on from nothing."""
    recent: list[int]
    drawn: int
    left: int
    """Tokens it may still draw."""
    sampling: SamplingConfig
    stream: int
    text: TextStream
    state: LMState | None
    """Of this row alone, while it stands in no batch: before its first chunk (None where it begins) and at its end."""
    start: int = 0
    """Tokens of `unread` that are read."""
    finished: Finish | None = None

    def rest(self) -> list[int]:
        """Tokens that are not read."""
        return self.unread[self.start :]

    def take(self, id: int, data: bytes) -> Piece:
        """Count a drawn token in."""
        self.unread, self.start = [id], 0
        self.drawn += 1
        self.left -= 1
        text = self.text.push(data)
        if id == END_OF_TEXT_ID:  # the penalty does not count the end of a document: it is no repetition
            self.finished = "end"
        else:
            self.recent = [*self.recent, id][-self.sampling.repetition_window :]
            if self.text.stopped:
                self.finished = "stop"
            elif self.left == 0:
                self.finished = "length"
        if self.finished is not None:
            text += self.text.flush()
        return Piece(self.handle, id, text, self.finished)

    def fail(self) -> Piece:
        """End without a token."""
        self.finished = "error"
        return Piece(self.handle, None, self.text.flush(), "error")


@dataclass
class _Batch:
    """Rows whose states stand in one `LMState`, in their order."""

    rows: list[_Row] = field(default_factory=list)
    state: LMState | None = None

    def join(self, rows: list[_Row], states: list[LMState]) -> None:
        """Let rows in; `states` together have as many rows."""
        self.rows = [*self.rows, *rows]
        states = states if self.state is None else [self.state, *states]
        self.state = states[0] if len(states) == 1 else LMState.stack(states)

    def leave(self, rows: list[_Row]) -> LMState:
        """Let rows out: their state, in the batch's order. Where none stays, it is the batch's own, and no copy."""
        assert self.state is not None
        whole = self.state
        goes = [at for at, row in enumerate(self.rows) if row in rows]
        stays = [at for at, row in enumerate(self.rows) if row not in rows]
        self.rows = [self.rows[at] for at in stays]
        self.state = whole.select(stays) if stays else None
        return whole.select(goes) if stays else whole


class Session:
    """Rows being generated on one model: `add` a row, call `step` to draw a token for each row, `remove` the row.

    Rows join and leave between any two steps. A row's text depends on its own prompt, settings, seed and stream: the
    other rows change its logits by rounding alone. Prompts are read `chunk` tokens in a step, so that a long one does
    not keep the others waiting; a row draws its first token in the step that reads the end of its prompt.
    A row's handle is a number that is never used again. Not for several threads at once.
    """

    def __init__(self, model: LanguageModel, tokenizer: Vocabulary, *, chunk: int = 512) -> None:
        require(chunk >= 1, "chunk", chunk, "≥ 1")
        V, known = tokenizer.vocab_size, model.config.vocab_size
        require(known >= V, "vocab_size of the tokenizer", V, f"≤ that of the model, {known}")
        self.model, self.tokenizer, self.chunk = model, tokenizer, chunk
        self._rows: dict[int, _Row] = {}
        self._joining: list[_Row] = []
        self._reading, self._drawing = _Batch(), _Batch()
        self._next = 0

    @property
    def active(self) -> list[int]:
        """Handles of the rows that have not finished."""
        return [handle for handle, row in self._rows.items() if row.finished is None]

    @property
    def read(self) -> tuple[int, int]:
        """Tokens of prompts that are read, and all of them, of the rows that are still reading theirs."""
        rows = [*self._joining, *self._reading.rows]
        return sum(row.start for row in rows), sum(len(row.unread) for row in rows)

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        stop: Sequence[str] = (),
        conversation: Conversation | None = None,
        stream: int | None = None,
    ) -> int:
        """Add a row and return its handle. The following steps read its prompt and draw from it.

        prompt: a text or its ids; it may be empty. Without `conversation` the end-of-text token is read first, as
        before every document. With one, of one row, which is used up, the prompt follows what stands there. stream: of
        noise under the seed, the handle when None: two rows of equal seed and stream draw alike.
        ConfigError: ids outside the vocabulary, a number out of bounds, more tokens than a table
        of learned positions has left. StateError: a conversation of another model, or of several rows.
        """
        require(max_tokens >= 1, "max_tokens", max_tokens, "≥ 1")
        require(not isinstance(stop, str), "stop", stop, "a list of strings")
        require(all(stop), "stop", list(stop), "strings of at least one character")
        handle, model, V = self._next, self.model, self.tokenizer.vocab_size
        stream = handle if stream is None else stream
        require(0 <= stream < 2**64, "stream", stream, "≥ 0 and < 2^64")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        own = (
            Conversation(LMState(()), [[END_OF_TEXT_ID]], [[]], [0]) if conversation is None else conversation
        )
        if own.rows != 1:
            raise StateError(f"add: the conversation has {own.rows} rows; take one of them")
        if own.state.model not in (None, model.number):
            raise StateError("add: the conversation belongs to another model; use the model that began it")
        check_ids([*own.pending[0], *ids], V, handle)
        state = None if conversation is None else own.state.to(model.device)  # a loaded one is on the CPU
        unread = [*own.pending[0], *ids]
        length = 0 if state is None or state.length_B is None else int(state.length_B[0])
        check_room(model.config.positions, length, unread, max_tokens, handle)
        recent = [*own.recent[0], *(id for id in ids if id != END_OF_TEXT_ID)][-sampling.repetition_window :]
        self._rows[handle] = row = _Row(
            handle, unread, state is None, recent, own.drawn[0], max_tokens, sampling, stream, TextStream(stop), state
        )  # fmt: skip
        self._joining.append(row)
        self._next += 1
        return handle

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """Read a chunk of each prompt that is not read yet, and draw one token for every row that is: their pieces, in
        the order of the handles. Where no row is active, no pieces.

        A row whose logits are not finite finishes with "error"; the others go on. After an exception the session
        cannot go on.
        """
        logits = [*self._advance(), *self._read()]
        pieces = self._draw(torch.cat(logits).cpu()) if logits else []
        over = [row for row in self._drawing.rows if row.finished is not None]
        if over:
            state = self._drawing.leave(over)
            for at, row in enumerate(over):
                row.state = state if len(over) == 1 else state.take(at)
        return sorted(pieces, key=lambda piece: piece.row)

    @torch.inference_mode()
    def conversation(self, row: int) -> Conversation:
        """A copy of what is needed to continue from here; the row stays. StateError for a row that does not exist."""
        own = self._own(row)
        batch = self._batch_of(own)
        if batch is not None and batch.state is not None:
            return _conversation(own, batch.state.take(batch.rows.index(own)))
        return _conversation(own, self._state_of(own).fork())

    @torch.inference_mode()
    def remove(self, row: int) -> Conversation:
        """Remove a row, finished or not, and return what is needed to continue it. StateError for a row that does not
        exist."""
        own = self._own(row)
        if (batch := self._batch_of(own)) is not None:
            own.state = batch.leave([own])
        elif own in self._joining:
            self._joining.remove(own)
        del self._rows[row]
        return _conversation(own, self._state_of(own))

    def _own(self, row: int) -> _Row:
        if row not in self._rows:
            raise StateError(
                f"row {row} is not there: the session has {len(self._rows)} rows, {list(self._rows)}"
            )
        return self._rows[row]

    def _batch_of(self, row: _Row) -> _Batch | None:
        return next((batch for batch in (self._reading, self._drawing) if row in batch.rows), None)

    def _state_of(self, row: _Row) -> LMState:
        """The state of a row that stands in no batch."""
        return self.model.init_state(1) if row.state is None else row.state

    def _advance(self) -> list[Tensor]:
        """Read the last token of each row that is drawn from: their logits [B,V]; none where there is no row."""
        batch = self._drawing
        if not batch.rows:
            return []
        last_B1 = torch.tensor([row.unread for row in batch.rows], device=self.model.device)
        hidden_B1D, batch.state, _ = self.model.hidden(last_B1, batch.state, consume_state=True)
        for row in batch.rows:
            row.start = 1
        return [self.model.head(hidden_B1D)[:, 0, : self.tokenizer.vocab_size]]

    def _read(self) -> list[Tensor]:
        """Read a chunk of each prompt; rows that come to its end are drawn from now on: their logits [B,V]."""
        batch, joining = self._reading, self._joining
        if joining:
            self._joining = []
            begin = [row for row in joining if row.state is None]
            goes_on = [row for row in joining if row.state is not None]
            states = [self.model.init_state(len(begin))] if begin else []
            batch.join(
                [*begin, *goes_on], [*states, *(row.state for row in goes_on if row.state is not None)]
            )
            for row in goes_on:
                row.state = None
        if batch.state is None:
            return []
        parts = [row.unread[row.start : row.start + self.chunk] for row in batch.rows]
        fresh = [row.fresh and row.start == 0 for row in batch.rows]
        last_BD, batch.state = reading.read(self.model, parts, batch.state, fresh=fresh)
        for row in batch.rows:
            row.start = min(row.start + self.chunk, len(row.unread))
        done = [row for row in batch.rows if row.start == len(row.unread)]
        if not done:
            return []
        at = [batch.rows.index(row) for row in done]
        self._drawing.join(done, [batch.leave(done)])
        # A model may have more ids than its tokenizer knows.
        return [self.model.head(last_BD[at])[:, : self.tokenizer.vocab_size]]

    def _draw(self, logits_BV: Tensor) -> list[Piece]:
        """One token for each row that is drawn from."""
        rows, bad = self._drawing.rows, non_finite(logits_BV)
        pieces = [rows[at].fail() for at in bad]
        good = [at for at in range(len(rows)) if at not in bad]
        drawn = [rows[at] for at in good]
        ids = sample(
            logits_BV[good] if bad else logits_BV,
            [row.recent for row in drawn],
            [row.drawn for row in drawn],
            [row.sampling for row in drawn],
            [row.stream for row in drawn],
        )
        tokens = zip(drawn, ids.tolist(), strict=True)
        return pieces + [row.take(id, self.tokenizer.token_bytes(id)) for row, id in tokens]


def _conversation(row: _Row, state: LMState) -> Conversation:
    return Conversation(state, [row.rest()], [list(row.recent)], [row.drawn])
