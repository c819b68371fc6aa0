"""Texts under way on one model, row by row: they join and leave between any two steps.

Shapes: B batch, D model width, V vocabulary.
"""

import math
import time
from collections.abc import Collection, Sequence
from numbers import Integral

import torch
from torch import Tensor

from perspectron.data.specials import MOST_PREFIX
from perspectron.decode import reading
from perspectron.decode.batch import Batch, Read
from perspectron.decode.conversation import Conversation
from perspectron.decode.drafts import Drafter
from perspectron.decode.log import Log
from perspectron.decode.processors import Hook, Processor, Step, ask, hooks_of
from perspectron.decode.reading import CHUNK, check_ids, check_room, ids_of, lengths
from perspectron.decode.row import Piece, Row, TextStream, Vocabulary
from perspectron.decode.sampling import SamplingConfig, logprobs, non_finite, sample
from perspectron.decode.store import PrefixStore
from perspectron.model.model import LanguageModel
from perspectron.model.state import MOST_TOKENS, LMState
from perspectron.util.config import require, require_whole
from perspectron.util.errors import NonFiniteError, PerspectronError, StateError

AHEAD = 64
"""While a prompt is read, the store is searched this many calls ahead for states from other rows."""


class Rows:
    """Rows being generated on one model: `add` a row, call `step` to draw a token for each row, `remove` the row.

    Rows join and leave between any two steps. A prompt is read alone, `chunk` tokens in a step, so that a long one does
    not keep the others waiting and nobody else's text changes a bit of what is read; a row draws its first token in the
    step that reads the end of its prompt. together: rows are drawn from as one batch, filled up to a multiple of WIDTH;
    else each takes a step of its own. Either way a row has the bits that it has alone; those of the two ways differ by
    rounding, and the first is the faster where there are several rows (`decode.verify` measures both). store: prompts
    begin at the longest prefix that is stored there, and what they read is stored; that changes no bit either.
    hooks: of every row, before its own (`decode.processors`). drafts: tokens that rows may go on with are read ahead
    where that pays, which changes no bit; not while a row has a hook that looks at more than logits.

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
        hooks: Sequence[Hook | Processor] = (),
        drafts: Drafter | None = None,
    ) -> None:
        require_whole("chunk", chunk, 1)
        require(drafts is None or isinstance(drafts, Drafter), "drafts", drafts, "a Drafter, or None")
        V, known = tokenizer.vocab_size, model.config.vocab_size
        require(known >= V, "vocab_size of the tokenizer", V, f"≤ that of the model, {known}")
        if store is not None:
            require(isinstance(store, PrefixStore), "store", store, "a PrefixStore, or None")
            require(chunk == store.chunk, "chunk", chunk, f"that of the store, {store.chunk}")
            require(
                store.model.number == model.number, "store", "of another model", "of the model of the rows"
            )
        self.model, self.tokenizer, self.chunk, self.store = model, tokenizer, chunk, store
        self._rows: dict[int, Row] = {}
        self._reading: list[Row] = []
        self.drafts = drafts
        self._drawing = Batch(model, together, drafter=drafts)
        self._shared, self._hooks = hooks_of(hooks), dict[int, list[Hook]]()
        self._next = 0

    @property
    def active(self) -> list[int]:
        """Handles of the rows that have not finished."""
        return [handle for handle, row in self._rows.items() if row.finished is None]

    @property
    def read(self) -> tuple[int, int]:
        """(tokens read, tokens in all) of the prompts of rows that are still reading theirs."""
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
        hooks: Sequence[Hook | Processor] = (),
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        whole: bool = False,
        shares: bool = True,
        lead: int = 0,
        drawn: bool | None = None,
        past: Log[int] | None = None,
        fresh: bool = False,
    ) -> int:
        """Add a row and return its handle. The following steps read its prompt and draw from it.

        prompt: a text or its ids; it may be empty. Without `conversation` it begins a text: the tokenizer's prefix is
        read first, unless the ids begin with it or are the `whole` text. With a conversation, of one row, which is used
        up, the prompt is read after it. stream: of noise under the seed, the handle when None: two rows of equal seed
        and stream draw alike. logprobs: pieces carry log-probabilities, of the token drawn and of this many most likely
        ones. hooks: of this row. stop_ids: tokens that end the text as those of the tokenizer do ("end"); their bytes
        do not belong to it. min_tokens: tokens to draw before one that ends the text may be drawn; stop strings that
        they complete do not count. shares: the prompt begins with what the store has, and is stored; else it is read
        from its first token. drawn: the first unread token of the conversation was drawn; if it is the only token to
        read, it is read in a step, as drawn ones are. None: it was if any were. lead: tokens since the cell of `chunk`
        tokens began in which it lies. past: the tokens that the conversation has read, for hooks and drafts; None:
        those that it remembers. fresh: nothing was read before the conversation's unread tokens; its state is a trained
        one. ConfigError: ids outside the vocabulary, a number out of bounds, settings that do not go together, more
        tokens than a table of learned positions has left. StateError: a conversation of another model, or of several
        rows. Any error that a hook's `begin` raises.
        """
        V = self.tokenizer.vocab_size
        require(isinstance(sampling, SamplingConfig), "sampling", sampling, "a SamplingConfig")
        _check_request(V, max_tokens, min_tokens, stop, stop_ids, logprobs)
        handle, model = self._next, self.model
        stream = handle if stream is None else stream
        require(isinstance(stream, Integral) and 0 <= stream < 2**64, "stream", stream, "≥ 0 and < 2^64")
        special = self.tokenizer.specials
        ids = ids_of(prompt, self.tokenizer, "prompt")
        if conversation is None and not whole:
            ids = special.begun(ids)
        own = Conversation(LMState(()), [[]], [[]], [0]) if conversation is None else conversation
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
        length_B = None if state is None else state.document_length_B
        length = 0 if length_B is None else int(length_B[0])
        check_room(model.config.room, length, lengths(unread, special.reset), max_tokens, handle)
        known = [*own.recent[0], *(id for id in ids if id not in special.silent)]
        recent = known[-sampling.repetition_window :]
        if past is None:  # `recent` ends with the pending tokens that are not silent
            waits = sum(id not in special.silent for id in own.pending[0])
            past = Log(own.recent[0][: max(0, len(own.recent[0]) - waits)])
        text = past.cut(len(past))
        text.extend(unread)
        row = Row(
            handle, self.tokenizer, unread, fresh or state is None, text, recent, own.drawn[0], max_tokens, sampling,
            stream, TextStream(stop), logprobs, state, min_tokens, special.stops.union(stop_ids),
        )  # fmt: skip
        bare = own.drawn[0] == 0 and len(text) <= MOST_PREFIX
        row.begins = bare and not any(map(self.tokenizer.token_bytes, text))
        begun = [ask(hook, hook.begin, row) for hook in (*self._shared, *hooks_of(hooks))]
        self._rows[handle], self._hooks[handle] = row, begun
        shares = shares and all(hook.shares_prefixes for hook in begun)
        row.lead = lead
        row.from_drawn = bool(own.pending[0]) and (own.drawn[0] > 0 if drawn is None else drawn)
        if self.store is not None and conversation is None and shares:
            row.path = self.store.path(unread, reset=special.reset)
        if drawn and state is not None and len(unread) == 1 and unread != [special.reset] and not begun:
            self._drawing.join([row])
        else:
            self._reading.append(row)
        self._next += 1
        return handle

    @torch.inference_mode()
    def step(self, read: Sequence[int] | None = None) -> list[Piece]:
        """Read a chunk of each prompt that is not read yet, and draw one token for every row that is: their pieces, in
        the order of the handles. Where no row is active, no pieces. read: handles of the prompts that go on, each once,
        all of them when None; of two that begin alike, the one that is further on reads for both where they share a
        store. In which order prompts are read changes no bit of any.

        A row whose logits are not finite, or of which a hook raises, finishes with "error"; the others go on.
        StateError, before anything is done: a row that has read its prompt, or that is not there. After another
        exception the session cannot go on.
        """
        reading = self._reading
        if read is not None:
            asked = [self._own(handle) for handle in read]
            if over := [row.handle for row in asked if row not in self._reading]:
                raise StateError(f"row {over[0]} has read its prompt: step reads those of `unread`")
            reading = list(dict.fromkeys(map(self._ahead, asked)))
        hooks = [hook for row in self._drawing.rows for hook in self._hooks[row.handle]]
        ahead = all(hook.reads_ahead for hook in hooks)
        ends = self._drawing.advance(
            keep=any(hook.keeps_before or hook.judges for hook in hooks), ahead=ahead
        )
        more, pieces = self._read(reading)
        pieces += self._draw([*ends, *more])
        self._drawing.leave([row for row in self._drawing.rows if row.finished is not None])
        return sorted(pieces, key=lambda piece: piece.row)

    @torch.inference_mode()
    def conversation(self, row: int) -> Conversation:
        """A copy of what is needed to continue from here; the row stays. StateError for a row that does not exist."""
        own = self._own(row)
        if own in self._drawing.rows:
            return self._kept(own, self._drawing.state_at(self._drawing.rows.index(own)))
        return self._kept(own, self._state_of(own).fork())

    @torch.inference_mode()
    def remove(self, row: int) -> Conversation:
        """Remove a row, finished or not, and return what is needed to continue it. StateError for a row that does not
        exist."""
        own = self._own(row)
        if own in self._drawing.rows:
            self._drawing.leave([own])
        elif own in self._reading:
            self._reading.remove(own)
        try:
            return self._kept(own, self._state_of(own))
        finally:  # also where a hook raises
            del self._rows[row], self._hooks[row]

    def _kept(self, row: Row, state: LMState) -> Conversation:
        for hook in self._hooks[row.handle]:
            state = ask(hook, hook.end, state)
        return Conversation(state, [row.rest()], [list(row.recent)], [row.drawn])

    def _own(self, row: int) -> Row:
        if row not in self._rows:
            raise StateError(
                f"row {row} is not there: the session has {len(self._rows)} rows, {list(self._rows)}"
            )
        return self._rows[row]

    def _state_of(self, row: Row) -> LMState:
        """The state of a row that stands in no batch."""
        return self.model.init_state(1) if row.state is None else row.state

    def _judged(self, row: Row) -> bool:
        """True if a hook may stop the row."""
        return any(hook.judges for hook in self._hooks[row.handle])

    def _ahead(self, row: Row) -> Row:
        """The row that reads what this one needs next: itself, or one that is further on in the same tokens."""
        ahead = row
        for other in self._reading:
            if other.start > ahead.start and other.path is not None and row.path is not None:
                end = other.until(self.chunk)
                shared = end <= len(row.unread) and row.path.place(end) == other.path.place(end)
                if shared and row.path.key(end) == other.path.key(end):
                    ahead = other
        return ahead

    def _read(self, rows: list[Row]) -> tuple[list[Read], list[Piece]]:
        """Read a chunk of the prompts of these rows: (what was read of each row whose prompt is finished and which
        draws from now on, the last pieces of rows of which a hook failed)."""
        read, done, pieces = list[Read](), list[Row](), list[Piece]()
        for row in list(rows):
            last_1D = self._found(row)
            if row.start < len(row.unread):
                try:
                    last_1D = self._read_chunk(row)
                except PerspectronError as error:
                    pieces.append(row.fail(error))
                    self._reading.remove(row)
                    continue
            if row.start == len(row.unread):
                assert last_1D is not None
                read.append(Read(last_1D, 1))
                done.append(row)
        if done:
            self._reading = [row for row in self._reading if row not in done]
            self._drawing.join(done)
        return read, pieces

    def _found(self, row: Row) -> Tensor | None:
        """Continue a row from the longest stored prefix, when it begins and where another row has read further
        meanwhile: the head's input [1,D] after it, None if there is none."""
        store, path, begins = self.store, row.path, row.start == 0
        if store is None or path is None:
            return None
        most = len(row.unread) if begins else row.start + AHEAD * self.chunk
        if self._judged(row):  # which are to read the end themselves
            most = min(most, len(row.unread) - 1)
        found = store.find(path, most=most, least=row.start, meanwhile=not begins)
        if found is not None:
            row.state, row.seconds = found.state.to(self.model.device), found.seconds
            row.spared += found.tokens - row.start
            row.start = found.tokens
        if begins:
            row.stop = store.part(path, row.start)
        return None if found is None else found.last_1D.to(self.model.device)

    def _read_chunk(self, row: Row) -> Tensor:
        """Read the next chunk of a row's prompt: the head's input [1,D] after it."""
        part, begins = row.unread[row.start : row.until(self.chunk)], row.fresh and row.start == 0
        state, start = self.model.init_state(1) if row.state is None else row.state, time.perf_counter()
        for hook in self._hooks[row.handle]:
            ends = row.start + len(part) == len(row.unread)
            ask(hook, hook.prompt, part, state, begins=begins, last=ends)
        if row.start + len(part) == len(row.unread) and self._judged(row):
            row.last = row.start, state.fork()
        last_1D, row.state = reading.read(
            self.model,
            [part],
            state,
            fresh=[begins],
            reset=self.tokenizer.specials.reset,
            drawn=row.from_drawn and row.start == 0,
        )
        row.seconds += time.perf_counter() - start
        row.start += len(part)
        if self.store is not None and row.path is not None:
            self.store.put(row.path, row.start, row.state, last_1D, row.seconds)
        return last_1D

    def _draw(self, read: Sequence[Read]) -> list[Piece]:
        """One token for each row that is drawn from."""
        if not read:
            return []
        steps, logits = list[Step](), list[Tensor]()
        for one in read:
            first = len(steps)
            for at in range(one.rows):
                hooks = self._hooks[self._drawing.rows[first + at].handle]
                steps.append(Step(self._drawing, first + at, hooks, one.hidden_BD[at : at + 1]))
            logits.append(self._head(one, steps[first:]))
        # A model may have more ids than its tokenizer knows.
        logits_BV = torch.cat(logits).cpu()[:, : self.tokenizer.vocab_size]
        for at in non_finite(logits_BV):
            if (step := steps[at]).error is None:
                words = f"logits of row {step.row.handle} after {step.row.drawn} tokens: must be finite"
                step.error = NonFiniteError(words)
        ids = self._sampled(steps, logits_BV)
        return [self._piece(step, ids.get(at, 0), logits_BV[at]) for at, step in enumerate(steps)]

    def _head(self, read: Read, steps: list[Step]) -> Tensor:
        """Logits [n,V] of the rows that were read: those of the step, except for rows whose hooks change the head's
        input."""
        moved = dict[int, Tensor]()
        for at, step in enumerate(steps):
            x_1D = step.attempt(step.seen, step.hidden_1D) if step.hooks else None
            if x_1D is not None and x_1D is not step.hidden_1D:
                moved[at] = x_1D[0]
        logits_BV = self.model.head(read.hidden_BD) if read.logits_BV is None else read.logits_BV
        if moved:
            hidden_BD, logits_BV = read.hidden_BD.clone(), logits_BV.clone()
            for at, x_D in moved.items():
                hidden_BD[at] = x_D
            logits_BV[[*moved]] = self.model.head(hidden_BD)[[*moved]]
        return logits_BV[: read.rows]

    def _sampled(self, steps: list[Step], logits_BV: Tensor) -> dict[int, int]:
        """Draw a token for each row, by its place; rows that cannot be drawn from, or fail here, are left out."""
        kept_BV, ids = logits_BV, dict[int, int]()
        for at, step in enumerate(steps):
            if not step.hooks and step.row.early == 0:
                continue
            step.logits_1V = own_1V = logits_BV[at : at + 1]
            kept_1V = step.attempt(step.scores, own_1V)
            if kept_1V is None or kept_1V is own_1V:
                continue
            if kept_BV is logits_BV:
                kept_BV = logits_BV.to(torch.float64, copy=True)
            step.logits_1V = kept_BV[at : at + 1].copy_(kept_1V)
            if non_finite(step.logits_1V):
                largest = step.logits_1V.max().item()
                words = f"logits of row {step.row.handle} after its hooks: the largest is {largest}, must be finite"
                step.error = NonFiniteError(words)
            elif int((allowed_V := step.logits_1V[0] > -math.inf).sum()) == 1:  # no draw gives another
                ids[at] = int(allowed_V.int().argmax())
        free = [at for at, step in enumerate(steps) if step.error is None and at not in ids]
        if free:
            rows = [steps[at].row for at in free]
            drawn = sample(
                kept_BV if len(free) == len(steps) else kept_BV[free],
                [row.recent for row in rows],
                [row.drawn for row in rows],
                [row.sampling for row in rows],
                [row.stream for row in rows],
            )
            ids |= zip(free, drawn.tolist(), strict=True)
        return ids

    def _piece(self, step: Step, id: int, logits_V: Tensor) -> Piece:
        """The piece of a row after a step: with the token drawn, or how the row ends without one."""
        row, judged = step.row, step.attempt(step.judge, id)
        complete = None if judged is None or step.stops else step.attempt(step.take, judged)
        if step.stops:  # what was read last is pending, so that the text can go on
            row.start, step.state = (0, step.before) if row.last is None else row.last
        if judged is None or complete is None:
            return row.fail(step.error, step.verdicts)
        likely = () if row.logprobs is None else logprobs(logits_V, judged, row.logprobs)
        return row.take(judged, *likely, complete=complete, verdicts=step.verdicts)


def _check_request(
    V: int,
    max_tokens: int,
    min_tokens: int,
    stop: Sequence[str],
    stop_ids: Sequence[int],
    logprobs: int | None,
) -> None:
    """ConfigError for a number, a stop string or an id of `Rows.add` that is out of bounds."""
    require_whole("max_tokens", max_tokens, 1)
    strings = isinstance(stop, Collection) and not isinstance(stop, str)
    strings = strings and all(isinstance(one, str) and one for one in stop)
    require(strings, "stop", stop, "a list of strings of at least one character")
    if logprobs is not None:
        counts = isinstance(logprobs, Integral) and 0 <= logprobs <= V
        require(counts, "logprobs", logprobs, f"≥ 0 and ≤ {V}, the tokens there are")
    counts = isinstance(min_tokens, Integral) and 0 <= min_tokens <= max_tokens
    require(counts, "min_tokens", min_tokens, f"≥ 0, ≤ max_tokens = {max_tokens}")
    require(isinstance(stop_ids, Collection), "stop_ids", stop_ids, "a list of ids")
    for id in stop_ids:
        require(isinstance(id, Integral) and 0 <= id < V, "stop_ids", id, f"≥ 0 and < {V}")
