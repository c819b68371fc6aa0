"""Texts under way on one model, row by row: they join and leave between any two steps.

Shapes: B batch, D model width, V vocabulary.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perspectron.decode import reading
from perspectron.decode.batch import Batch, Piece, Row
from perspectron.decode.constrain import Constraint
from perspectron.decode.conversation import Conversation
from perspectron.decode.reading import CHUNK, END_OF_TEXT_ID, check_ids, check_room
from perspectron.decode.sampling import SamplingConfig, logprobs, non_finite, sample
from perspectron.decode.store import PrefixStore
from perspectron.decode.text import TextStream
from perspectron.decode.watch import Mark, Read, Watch
from perspectron.designs.perspective.safety import Safety
from perspectron.designs.perspective.views import PerspectivesConfig
from perspectron.model.model import LanguageModel
from perspectron.model.state import MOST_TOKENS, LMState
from perspectron.util.config import require
from perspectron.util.errors import StateError


class Vocabulary(Protocol):
    """The part of a tokenizer that generating needs."""

    vocab_size: int
    stops: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, id: int) -> bytes: ...


class Rows:
    """Rows being generated on one model: `add` a row, call `step` to draw a token for each row, `remove` the row.

    Rows join and leave between any two steps. A prompt is read alone, `chunk` tokens in a step, so that a long one does
    not keep the others waiting and nobody else's text changes a bit of what is read; a row draws its first token in the
    step that reads the end of its prompt. together: rows are drawn from as one batch, filled up to a multiple of WIDTH;
    else each takes a step of its own. Either way a row has the bits that it has alone; those of the two ways differ by
    rounding, and the first is the faster where there are several rows (`decode.verify` measures both). store: prompts
    begin at the longest prefix that is stored there, and what they read is stored; that changes no bit either.
    perspectives, safety: of unsure tokens several views are asked, states are held in a safe set, and pieces tell.

    A row's text depends on its own prompt, settings, seed and stream. Its handle is a number that is never used again.
    Not for several threads at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Vocabulary,
        *,
        chunk: int = CHUNK,
        together: bool = True,
        store: PrefixStore | None = None,
        perspectives: PerspectivesConfig | None = None,
        safety: Safety | None = None,
    ) -> None:
        require(chunk >= 1, "chunk", chunk, "≥ 1")
        V, known = tokenizer.vocab_size, model.config.vocab_size
        require(known >= V, "vocab_size of the tokenizer", V, f"≤ that of the model, {known}")
        if store is not None:
            require(chunk == store.chunk, "chunk", chunk, f"that of the store, {store.chunk}")
        self.model, self.tokenizer, self.chunk, self.store = model, tokenizer, chunk, store
        self._rows: dict[int, Row] = {}
        self._reading: list[Row] = []
        self._drawing = Batch(model, together)
        self._watch = None if perspectives is None and safety is None else Watch(model, perspectives, safety)
        if perspectives is not None:
            require(
                store is None, "store", "one", "left out with perspectives, which read prompts themselves"
            )
        self._next = 0

    @property
    def active(self) -> list[int]:
        """Handles of the rows that have not finished."""
        return [handle for handle, row in self._rows.items() if row.finished is None]

    @property
    def read(self) -> tuple[int, int]:
        """Tokens of prompts that are read, and all of them, of the rows that are still reading theirs."""
        return sum(row.start for row in self._reading), sum(len(row.unread) for row in self._reading)

    @property
    def unread(self) -> dict[int, int]:
        """Tokens of its prompt that each row has still to read, by handle; those that have read theirs are left out."""
        return {row.handle: len(row.unread) - row.start for row in self._reading}

    def spared(self, row: int) -> int:
        """Tokens of a row's prompt that the store had, and that were not read. StateError: a row that is not there."""
        return self._own(row).spared

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        stop: Sequence[str] = (),
        conversation: Conversation | None = None,
        stream: int | None = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> int:
        """Add a row and return its handle. The following steps read its prompt and draw from it.

        prompt: a text or its ids; it may be empty. Without `conversation` the end-of-text token is read first, as
        before every document. With one, of one row, which is used up, the prompt follows what stands there. stream: of
        noise under the seed, the handle when None: two rows of equal seed and stream draw alike.
        logprobs: pieces carry those of the tokens drawn, and of so many of the most likely ones.
        constraint: what is drawn fits its grammar, and ends ("stop") where that is complete; not with perspectives.
        stop_ids: tokens that end the text as the tokenizer's `stops` do ("end"); their bytes are none of it. A
        constraint allows them where it allows the end. min_tokens: before so many are drawn none of these is, and no
        stop string counts that they complete.
        ConfigError: ids outside the vocabulary, a number out of bounds, settings that do not go together, more tokens
        than a table of learned positions has left. StateError: a conversation of another model, or of several rows.
        """
        V = self.tokenizer.vocab_size
        require(isinstance(max_tokens, Integral) and max_tokens >= 1, "max_tokens", max_tokens, "≥ 1")
        require(not isinstance(prompt, bytes), "prompt", prompt, "a text or its ids")
        require(not isinstance(stop, str), "stop", stop, "a list of strings")
        require(all(stop), "stop", list(stop), "strings of at least one character")
        if logprobs is not None:
            require(0 <= logprobs <= V, "logprobs", logprobs, f"≥ 0 and ≤ {V}, the tokens there are")
        self._check_limits(max_tokens, constraint, min_tokens, stop_ids)
        handle, model = self._next, self.model
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
        if not all(0 <= id < V for id in own.recent[0]) or not 0 <= own.drawn[0] < MOST_TOKENS:
            raise StateError(
                f"add: the conversation remembers what is none of the {V} tokens of this tokenizer, or no count"
            )
        state = None if conversation is None else own.state.to(model.device)  # a loaded one is on the CPU
        unread = [*own.pending[0], *ids]
        length = 0 if state is None or state.length_B is None else int(state.length_B[0])
        check_room(model.config.positions, length, unread, max_tokens, handle)
        recent = [*own.recent[0], *(id for id in ids if id != END_OF_TEXT_ID)][-sampling.repetition_window :]
        self._rows[handle] = row = Row(
            handle, unread, state is None, recent, own.drawn[0], max_tokens, sampling, stream, TextStream(stop),
            logprobs, state, matcher=None if constraint is None else constraint.begin(), early=min_tokens,
            ends=self.tokenizer.stops.union(stop_ids),
        )  # fmt: skip
        if self.store is not None and conversation is None:
            row.keys = self.store.chain(unread)
        self._reading.append(row)
        self._next += 1
        return handle

    @torch.inference_mode()
    def step(self, read: Sequence[int] | None = None) -> list[Piece]:
        """Read a chunk of each prompt that is not read yet, and draw one token for every row that is: their pieces, in
        the order of the handles. Where no row is active, no pieces. read: handles of the prompts that go on, each once,
        all of them when None; of two that begin alike, the one that is further on reads for both where they share a
        store. In which order prompts are read changes no bit of any.

        A row whose logits are not finite finishes with "error"; the others go on. StateError, before anything is done:
        a row that has read its prompt, or that is not there. After another exception the session cannot go on.
        """
        watch = self._watch
        reading = self._reading
        if read is not None:
            asked = [self._own(handle) for handle in read]
            if over := [row.handle for row in asked if row not in self._reading]:
                raise StateError(f"row {over[0]} has read its prompt: step reads those of `unread`")
            reading = list(dict.fromkeys(map(self._ahead, asked)))
        ends = [*self._drawing.advance(keep=watch is not None and watch.keeps), *self._read(reading)]
        logits = [self._logits(one) for one in ends] if watch is None else watch.heads(ends)
        # A model may have more ids than its tokenizer knows.
        pieces = self._draw(torch.cat(logits).cpu()[:, : self.tokenizer.vocab_size]) if logits else []
        self._drawing.leave([row for row in self._drawing.rows if row.finished is not None])
        return sorted(pieces, key=lambda piece: piece.row)

    @torch.inference_mode()
    def conversation(self, row: int) -> Conversation:
        """A copy of what is needed to continue from here; the row stays. StateError for a row that does not exist."""
        own = self._own(row)
        if own.state is None and own in self._drawing.rows:
            assert self._drawing.state is not None
            return _conversation(own, self._drawing.state.take(self._drawing.rows.index(own)))
        return _conversation(own, self._state_of(own).fork())

    @torch.inference_mode()
    def remove(self, row: int) -> Conversation:
        """Remove a row, finished or not, and return what is needed to continue it. StateError for a row that does not
        exist."""
        own = self._own(row)
        if own in self._drawing.rows:
            self._drawing.leave([own])
        elif own in self._reading:
            self._reading.remove(own)
        del self._rows[row]
        return _conversation(own, self._state_of(own))

    def _check_limits(
        self, max_tokens: int, constraint: Constraint | None, min_tokens: int, stop_ids: Sequence[int]
    ) -> None:
        V, views = self.tokenizer.vocab_size, self._watch is not None and self._watch.perspectives is not None
        whole = isinstance(min_tokens, Integral) and 0 <= min_tokens <= max_tokens
        require(whole, "min_tokens", min_tokens, f"≥ 0, ≤ max_tokens = {max_tokens}")
        for id in stop_ids:
            require(isinstance(id, Integral) and 0 <= id < V, "stop_ids", id, f"≥ 0 and < {V}")
        require(not (views and min_tokens), "min_tokens", min_tokens, "0 with perspectives")
        if constraint is not None:
            same = constraint.tokenizer is self.tokenizer
            require(same, "constraint", "of another tokenizer", "of the one that the rows have")
            require(not views, "constraint", "given", "left out with perspectives, which choose tokens")
            require(min_tokens == 0, "min_tokens", min_tokens, "0 with a constraint, which ends texts itself")

    def _logits(self, read: Read) -> Tensor:
        logits_BV = self.model.head(read.hidden_BD) if read.logits_BV is None else read.logits_BV
        return logits_BV[: read.rows]

    def _own(self, row: int) -> Row:
        if row not in self._rows:
            raise StateError(
                f"row {row} is not there: the session has {len(self._rows)} rows, {list(self._rows)}"
            )
        return self._rows[row]

    def _state_of(self, row: Row) -> LMState:
        """The state of a row that stands in no batch."""
        return self.model.init_state(1) if row.state is None else row.state

    def _ahead(self, row: Row) -> Row:
        """The row that reads what this one needs next: itself, or one that is further on in the same tokens."""
        ahead, keys = row, row.keys or []
        for other in self._reading:
            call = other.start // self.chunk
            if other.start > ahead.start and other.keys and other.keys[call] in keys[call : call + 1]:
                ahead = other
        return ahead

    def _read(self, rows: list[Row]) -> list[Read]:
        """Read a chunk of the prompts of these rows: of each row that came to its end, which is drawn from now."""
        read, done = list[Read](), list[Row]()
        for row in rows:
            last_1D = self._found(row)
            if row.start < len(row.unread):
                last_1D = self._read_chunk(row)
            if row.start == len(row.unread):
                assert last_1D is not None
                read.append(Read(last_1D, 1))
                done.append(row)
        if done:
            self._reading = [row for row in self._reading if row not in done]
            self._drawing.join(done)
        return read

    def _found(self, row: Row) -> Tensor | None:
        """Go on from the longest prefix stored: at the beginning, and where another row has read on meanwhile. What
        the head reads after it, if there is one."""
        if self.store is None or row.keys is None:
            return None
        calls = known = row.start // self.chunk
        while row.start > 0 and known < len(row.keys) and row.keys[known] in self.store:
            known += 1
        if row.start > 0 and known == calls:
            return None
        found = self.store.find(row.keys[:known] if row.start > 0 else row.keys)
        if found is None:
            return None
        row.state, row.seconds = found.state.to(self.model.device), found.seconds
        start, row.start = row.start, min(found.calls * self.chunk, len(row.unread))
        row.spared += row.start - start
        return found.last_1D.to(self.model.device)

    def _read_chunk(self, row: Row) -> Tensor:
        """Read the next chunk of a row's prompt: what the head reads after it [1,D]."""
        part, begins = row.unread[row.start : row.start + self.chunk], row.fresh and row.start == 0
        state, start = self.model.init_state(1) if row.state is None else row.state, time.perf_counter()
        if self._watch is not None:
            self._watch.follow(
                row.watched, part, state, begins, last=row.start + len(part) == len(row.unread)
            )
        last_1D, row.state = reading.read(self.model, [part], state, fresh=[begins])
        row.seconds += time.perf_counter() - start
        row.start += len(part)
        if self.store is not None and row.keys is not None:
            self.store.put(row.keys, -(-row.start // self.chunk), row.state, last_1D, row.seconds)
        return last_1D

    def _sampled(self, logits_BV: Tensor, bad: dict[int, str]) -> dict[int, int]:
        """The token drawn for each row, by its place. Rows that cannot be drawn from are bad, or become so."""
        rows, kept_BV, ids = self._drawing.rows, logits_BV, dict[int, int]()
        if any(row.matcher is not None or row.early > 0 for row in rows):
            kept_BV = logits_BV.to(torch.float64, copy=True)
            for at, (row, kept_V) in enumerate(zip(rows, kept_BV.numpy(), strict=True)):
                if at in bad or (allowed_V := row.allowed(len(kept_V))) is None:
                    continue
                kept_V[~allowed_V] = -math.inf
                if row.matcher is not None and row.matcher.error:
                    bad[at] = f"constraint: {row.matcher.error}"
                elif kept_V.max() == -math.inf:  # the model or a safe set leaves none of them
                    bad[at] = f"logits of row {row.handle}: none is finite of the tokens that are allowed"
                elif np.count_nonzero(allowed_V) == 1:  # no draw gives another
                    ids[at] = int(allowed_V.argmax())
        free = [at for at in range(len(rows)) if at not in bad and at not in ids]
        if free:
            drawn = [rows[at] for at in free]
            found = sample(
                kept_BV if len(free) == len(rows) else kept_BV[free],
                [row.recent for row in drawn],
                [row.drawn for row in drawn],
                [row.sampling for row in drawn],
                [row.stream for row in drawn],
            )
            ids |= zip(free, found.tolist(), strict=True)
        return dict(sorted(ids.items()))

    def _draw(self, logits_BV: Tensor) -> list[Piece]:
        """One token for each row that is drawn from."""
        rows, bad = self._drawing.rows, dict.fromkeys(non_finite(logits_BV), "")
        ids = self._sampled(logits_BV, bad)
        pieces = [replace(rows[at].fail(), error=why) for at, why in bad.items()]
        marks = [Mark()] * len(ids)
        if self._watch is not None:
            marks = self._watch.marks(self._drawing, [*ids], [*ids.values()], logits_BV)
        for (at, id), mark in zip(ids.items(), marks, strict=True):
            row = rows[at]
            if mark.failed:
                pieces.append(replace(row.fail(), error=mark.failed))
                continue
            if mark.stops:
                pieces.append(replace(row.fail("unsafe"), unsafe=True))
                continue
            id = id if mark.verdict is None else mark.verdict.token
            said = () if row.logprobs is None else logprobs(logits_BV[at], id, row.logprobs)
            piece = row.take(id, self.tokenizer.token_bytes(id), *said)
            pieces.append(replace(piece, verdict=mark.verdict, unsafe=mark.unsafe))
        return pieces


def _conversation(row: Row, state: LMState) -> Conversation:
    return Conversation(state, [row.rest()], [list(row.recent)], [row.drawn])
