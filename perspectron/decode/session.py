"""One text and its memory: read, say, fork, go back to any token, keep in a file."""

import time
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron.decode import history
from perspectron.decode.conversation import OWN, Conversation, beside
from perspectron.decode.drafts import Drafter
from perspectron.decode.history import exhausted
from perspectron.decode.kept import Account, Hold
from perspectron.decode.log import Log
from perspectron.decode.marks import Marks
from perspectron.decode.places import Path as Prefixes
from perspectron.decode.reading import CHUNK, check_ids, ids_of, lengths, read_all, whole
from perspectron.decode.row import Vocabulary
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig, logprobs, non_finite
from perspectron.decode.saved import alike, checked
from perspectron.decode.store import PrefixStore
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, Stateful, read_state, save_state
from perspectron.model.tuned import kinds_of
from perspectron.ops.attention import BLOCK
from perspectron.util.config import require
from perspectron.util.errors import NonFiniteError, StateError

Likely = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and the most likely tokens in its place with theirs."""


class Session:
    """A text that a model reads and goes on with, and the memory of it.

    What it draws is a function of the calls alone: where a text was cut into pieces, whether the session was forked,
    saved and loaded, or brought back to an earlier token changes no bit. Up to `chunk` tokens wait until they are
    needed. store: texts begin at the longest prefix that is stored there. start: the state before any token, where it
    is a trained one (`model.tuned`), which stays as it is. drafts: as `Rows` has them. Not for several threads at once.

        >>> model, tokenizer = perspectron.load("runs/play")
        >>> session = perspectron.Session(model, tokenizer).read("KING")
        >>> text = session.say(8)
        >>> branch = session.at(2)  # as it was after two tokens
        >>> session.save("king.session")
        >>> again = perspectron.Session.load("king.session", model, tokenizer)
        >>> again.say(4) == session.say(4)
        True
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Vocabulary,
        *,
        chunk: int = CHUNK,
        store: PrefixStore | None = None,
        start: LMState | None = None,
        drafts: Drafter | None = None,
    ) -> None:
        self._rows = Rows(model, tokenizer, chunk=chunk, store=store, together=False, drafts=drafts)
        self._kin: Stateful = model if store is None else store.model
        prefix = [*tokenizer.specials.prefix]
        self._ids, self._drawn = Log(prefix), Log([False] * len(prefix))
        self._said = 0
        """How many of these were drawn."""
        self._calls = list[int]()
        """Tokens that each call has read."""
        self._read = 0
        """Tokens that all of them have read."""
        self._state: LMState | None = None
        """The state after these calls; None before the first."""
        self._start = start
        self._marks = Marks()
        """States after so many calls, from which `at` goes on."""
        self._runs = list[int]()
        """After each call, the token at which reading began anew: the cells of a text are counted from there."""
        self._path: Prefixes | None = None
        """Keys of the text's beginning, which is read as a prompt; made where they are needed."""
        self._foreign = False
        """The state comes from a file: what is read after it is not for the store, where others would begin with it."""
        self._seconds = 0.0
        self._remembered, self._drawn_before = list[int](), 0
        """Of a text whose beginning is not known: tokens before it that a penalty counts, and how many were drawn, of
        which its first token is the last."""
        self._before = len(prefix)
        """Tokens at the start that are none of the text's."""
        self._events = list[history.Event]()
        self.whole = True
        """The text is known from its beginning; else a state remembers what was before it."""
        self.extra: dict[str, Any] = {}  # of its file, as `save` has it

    @property
    def chunk(self) -> int:
        """Tokens that are read at once."""
        return self._rows.chunk

    @property
    def start(self) -> LMState | None:
        """The trained state before any token; None for the model's."""
        return self._start

    @property
    def tokens(self) -> list[int]:
        """The ids of the text, drawn ones and those of stop strings included."""
        return self._ids[self._before :]

    @property
    def drawn(self) -> int:
        """How many of these were drawn."""
        return self._said

    @property
    def before(self) -> int:
        """Tokens of the tokenizer's that stand before the text."""
        return self._before

    @property
    def left(self) -> int | None:
        """How many tokens more the document may have, and one that is drawn and not read; None for any number."""
        most = self._rows.model.config.room
        return most - self._lengths([])[-1] + 1 if most else None

    @property
    def text(self) -> str:
        """All that was read and said."""
        return self._rows.tokenizer.decode(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self._state is None else self._state.nbytes

    def hold(self, account: Account) -> Hold | None:
        """Count the memory of its state for an account, until the hold is let go."""
        return None if self._state is None else Hold(account, self._state)

    def read(self, text: str | Sequence[int]) -> "Session":
        """Go on with a text, or its ids; the session itself. ConfigError: ids outside the vocabulary, more than a
        table of learned positions has."""
        for _ in self.reading(text):
            pass
        return self

    @torch.inference_mode()
    def reading(self, text: str | Sequence[int]) -> Generator[int, None, None]:
        """Read as `read` does, with a pause before each call, that gives the tokens that are left. What is given up
        half way waits to be read."""
        self.append(text)
        yield from self._reading(self._cell(len(self._ids) - 1))

    @torch.inference_mode()
    def finishing(self) -> Generator[int, None, None]:
        """Read all that waits, as `reading` does."""
        yield from self._reading(len(self._ids))

    def _reading(self, end: int) -> Generator[int, None, None]:
        """Read up to a token."""
        stop = self._look_up(end)
        while self._read < end:
            yield len(self._ids) - self._read
            until = min(end, self._cell(self._read) + self.chunk)
            self._call((stop if stop is not None and self._read < stop < until else until) - self._read)

    @torch.inference_mode()
    def likely(self, ids: Sequence[int], count: int) -> Generator[int, None, list[Likely]]:
        """Log-probabilities of ids as they would be read next, each given all before it, and of the `count` most likely
        tokens in its place, with a pause before each call, that gives the tokens left. A first token that nothing
        stands before has none. The session stays as it is. Errors as `append`, and NonFiniteError."""
        own, first, found = self.fork(), len(self._ids), list[Likely]()
        own.append(ids)
        V = own._rows.tokenizer.vocab_size
        while own._read < len(own._ids):
            yield len(own._ids) - own._read
            start = own._read
            hidden_1TD = own._call(min(own._cell(start) + own.chunk, len(own._ids)) - start)
            logits_TV = own._rows.model.head(hidden_1TD)[0, :, :V].cpu()
            if non_finite(logits_TV):
                raise NonFiniteError(
                    f"logits after {start + 1 + non_finite(logits_TV)[0]} tokens: must be finite"
                )
            targets = own._ids[start + 1 : start + 1 + len(logits_TV)]
            for at, id in enumerate(targets, start + 1):
                if at >= first:
                    found.append(logprobs(logits_TV[at - start - 1], id, min(count, V)))
        return found

    def append(self, text: str | Sequence[int], *, whole: bool = False) -> None:
        """Go on with a text that waits until it is needed; errors as `read`. The tokenizer's prefix stands before a
        text once, also where ids begin with it; before `whole` ones, as of a chat template, unless they lack it."""
        tokenizer = self._rows.tokenizer
        ids = ids_of(text, tokenizer, "text")
        if self.whole and len(self._ids) == self._before:
            if not self._calls:
                prefix = [] if whole and tokenizer.specials.lacks(ids) else [*tokenizer.specials.prefix]
                self._ids, self._drawn, self._before = Log(prefix), Log([False] * len(prefix)), len(prefix)
            ids = tokenizer.specials.bare(ids)
        if ids:
            check_ids(ids, tokenizer.vocab_size, 0)
        self._check_positions(ids)
        self._ids.extend(ids)
        self._drawn.extend([False] * len(ids))
        if ids:
            self.note()

    def say(
        self,
        max_tokens: int = 200,
        *,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        **limits: Any,
    ) -> str:
        """Draw up to `max_tokens` tokens: the text, which ends before a stop string. on_text: called with each piece of
        it. limits: `hooks`, `min_tokens` and `stop_ids`, as `Rows.add` has them; what a hook does to the state is not
        repeated where `at` reads again. On an error or an interruption the session stays as it was before.

        ConfigError: a number out of bounds, more tokens than a table of learned positions has left. NonFiniteError: the
        model gave logits that are not finite, or none of those that hooks leave. PerspectronError: a hook failed.
        """
        return exhausted(self.saying(max_tokens, sampling=sampling, stop=stop, on_text=on_text, **limits))

    @torch.inference_mode()
    def saying(
        self, max_tokens: int, *, on_text: Callable[[str], None] | None = None, **settings: Any
    ) -> Generator[int, None, str]:
        """Draw as `say` does, with a pause before each step, that gives the tokens that may still come."""
        rows, pieces, ids, marks = self._rows, list[str](), list[int](), dict[int, LMState]()
        handle = self.enter(rows, max_tokens=max_tokens, stream=0, **settings)
        try:
            while rows.active:
                yield max_tokens - len(ids)
                for piece in rows.step():
                    if piece.error is not None:
                        raise piece.error
                    if piece.id is not None:
                        ids.append(piece.id)
                        if len(ids) % rows.chunk == 0:
                            marks[len(ids)] = rows.conversation(handle).state
                    pieces.append(piece.text)
                    if piece.text and on_text is not None:
                        on_text(piece.text)
        except BaseException:
            rows.remove(handle)
            raise
        self.leave(rows, handle, ids)
        for drawn, state in marks.items():
            self._marks.put(len(self._calls) - len(ids) + drawn, state)
        return "".join(pieces)

    def enter(self, rows: Rows, **settings: Any) -> int:
        """Let the text join others under way, with the settings of `Rows.add`: its row. Until it leaves the session is
        as it was. ConfigError as `Rows.add`."""
        read = self._read
        past, unread = self._ids.cut(read), self._ids[read:]
        if self._remembered:
            past = Log([*self._remembered, *past])
        sampling = settings.get("sampling", SamplingConfig())  # `add` refuses what is none
        recent = self._recent(getattr(sampling, "repetition_window", 0))
        if self._state is None:
            require(len(unread) > 0, "text", "", "read before: this tokenizer puts nothing before a text")
            if self._start is None:
                return rows.add(unread, whole=True, **settings)
            talk = Conversation(self._start.fork(), [unread], [recent], [0])
            return rows.add("", conversation=talk, past=past, fresh=True, **settings)
        # The row goes on in the memory of the state; the session sees it as it is now.
        state, self._state = self._state, self._state.fork()
        talk = Conversation(state, [unread], [recent], [self._drawn_before + self._said])
        settings |= {"past": past, "lead": read - self._cell(read), "drawn": self._was_drawn(read)}
        return rows.add("", conversation=talk, **settings)

    def leave(self, rows: Rows, row: int, ids: Sequence[int]) -> None:
        """Let a row go that has drawn `ids`, and go on from there."""
        talk, end = rows.remove(row), len(self._ids)
        self._ids.extend(ids)
        self._drawn.extend([True] * len(ids))
        self._said += len(ids)
        self.note()
        while self._read < end:
            self._count(min(self._cell(self._read) + rows.chunk, end) - self._read)
        for _ in range(len(ids) - len(talk.pending[0])):
            self._count(1)
        self._state = talk.state
        self._marks.put(len(self._calls), self._state.fork())
        if not talk.pending[0]:  # a hook stopped the text when its last token was read, which is read again
            vars(self).update(vars(self.at(len(self.tokens))))

    @torch.inference_mode()
    def predicting(self, ids: Sequence[int]) -> Generator[int, None, Tensor]:
        """Go on with ids: the logits [T,V] for each of them, before it, with pauses as `reading` has them. A first one
        that nothing stands before has none. Errors as `append`."""
        first, V, found = len(self._ids), self._rows.tokenizer.vocab_size, list[Tensor]()
        self.append(ids)
        while self._read < len(self._ids) - 1:
            yield len(self._ids) - self._read
            start = self._read
            hidden_1TD = self._call(min(self._cell(start) + self.chunk, len(self._ids) - 1) - start)
            kept_1TD = hidden_1TD[:, max(0, first - 1 - start) :]
            if kept_1TD.shape[1]:
                found.append(self._rows.model.head(kept_1TD)[0, :, :V].cpu())
        return torch.cat(found) if found else torch.zeros(0, V)

    @torch.inference_mode()
    def remembering(self) -> Generator[int, None, LMState]:
        """The state after all of the text, a copy, with pauses as `reading` has them."""
        own = self.fork()
        yield from own.finishing()
        return own._before_call()

    @property
    def digest(self) -> str:
        """Of the text, its ids and which of them were drawn (`history.digest`)."""
        return history.digest(self._ids[:], self._drawn[:])

    @property
    def model(self) -> LanguageModel:
        """Whose memory it is."""
        return self._rows.model

    @property
    def tokenizer(self) -> Vocabulary:
        """Whose ids the text has."""
        return self._rows.tokenizer

    def note(self, how: str = "text", parent: str = "") -> None:
        """Add an event of now to the log (`history.Event`)."""
        history.noted(self._events, len(self._ids) - self._before, how, parent)

    def begun(self) -> "Session":
        """A text of the same model that has not begun."""
        rows = self._rows
        return Session(rows.model, rows.tokenizer, chunk=rows.chunk, store=rows.store, drafts=rows.drafts)

    def rereading(self) -> Generator[int, None, "Session"]:
        """The same text read anew as a prompt, so that others may begin with it, with pauses as `reading` has them. A
        text on a trained memory, or whose beginning is not known, stays as it is."""
        yield 0
        if not self.whole or self._start is not None:
            return self
        own, lacks = self.begun(), self._before < len(self._rows.tokenizer.specials.prefix)
        own.append(self.tokens, whole=lacks)
        yield from own.reading([])
        return own

    def remembered(self, state: LMState, ids: Sequence[int]) -> "Session":
        """A text of the same model that begins with a state, which is used up, and these ids: what was before is
        remembered but not known."""
        own = self.begun()
        own._ids, own._drawn, own._before, own.whole = Log([*ids]), Log([False] * len(ids)), 0, False
        own._state, own._foreign = state, True
        own._marks.put(0, state.fork(), fixed=True)
        return own

    @property
    def log(self) -> tuple[history.Entry, ...]:
        """What was read and drawn, when, and from which texts it came."""
        drawn = [int(drawn) for drawn in self._drawn[:]]
        return tuple(history.entries(self._ids[:], drawn, self._before, self._events))

    def fork(self) -> "Session":
        """An independent session that has read and said the same."""
        return self._cut(len(self._ids), len(self._calls), self._state)

    def at(self, token: int) -> "Session":
        """The session as it was after so many tokens of the text, to go on from there: what is not at hand of the way
        is read again. ConfigError: more tokens than there are, or fewer than what a loaded one begins with."""
        return exhausted(self.back_to(token))

    @torch.inference_mode()
    def back_to(self, token: int) -> Generator[int, None, "Session"]:
        """The session that `at` gives, with a pause before each call that reads, that gives the tokens that are
        left."""
        there = isinstance(token, Integral) and 0 <= token <= len(self.tokens)
        require(there, "token", token, f"a whole number ≥ 0 and ≤ {len(self.tokens)}")
        T = token + self._before
        calls = sum(end < T for end in accumulate(self._calls))
        if calls == len(self._calls):
            return self._cut(T, calls, self._state)
        first = self._marks.first()
        least = f"≥ {sum(self._calls[:first]) + 1}: what a loaded text began with is remembered, not known"
        require(self.whole or calls >= first, "token", token, least)
        (known, marked), store = self._marks.nearest(calls), self._rows.store
        earlier = self._cut(T, known, marked)
        places = enumerate(accumulate(self._calls[:calls]))
        ends = {end: made + 1 for made, end in places if made >= known and not self._runs[made]}
        if store is not None and self.whole and ends and self._start is None:
            path = store.path(self._ids[: max(ends)], reset=self._rows.tokenizer.specials.reset)
            found = store.first(path, sorted(ends, reverse=True))
            if found is not None:
                earlier = self._cut(T, ends[found.tokens], found.state.to(self._rows.model.device))
                earlier._foreign = False
        while len(earlier._calls) < calls:
            yield T - earlier._read
            earlier._call(self._calls[len(earlier._calls)])
        self._marks.learn(earlier._marks)
        return earlier

    def shared(self, ids: Sequence[int], *, whole: bool = False) -> int:
        """How many tokens the text begins with that these ids, `whole` as `append` has it, begin with too; 0 where its
        beginning is not known."""
        specials = self._rows.tokenizer.specials
        lacks = whole and specials.lacks(ids)
        if not self.whole or lacks != (self._before < len(specials.prefix)):
            return 0
        return alike(self.tokens, ids if lacks else specials.bare(ids))

    def common(self, ids: Sequence[int], *, whole: bool = False) -> "Session":
        """The session as it was where its text and this one part; one that has not begun, where that would have to be
        read again or a token of it was drawn, and so was not read as a prompt is."""
        T = self.shared(ids, whole=whole) + self._before
        if not self.whole or self._read >= T or any(self._drawn[:T]) or self._start is not None:
            return self.begun()
        return self._cut(T, len(self._calls), self._state)

    def save(self, path: Path | str, *, extra: dict[str, Any] | None = None) -> None:
        """Write to one file, whole or not at all; `generate --load-state` takes it too. extra: any JSON to be kept with
        it. ConfigError: an entry has a name of `conversation.OWN`. StorageError when it cannot be written."""
        state = self._before_call()
        # Nothing else says what was before a text whose beginning is not known.
        window = SamplingConfig.repetition_window if self.whole else len(self._remembered) + len(self._ids)
        recent = [self._recent(window)]
        drawn = self._drawn_before + self._said
        talk = {"pending": [self._ids[self._read :]], "recent": recent, "drawn": [drawn]}
        extra = beside(extra) | {"log": self._events, "conversation": talk, "session": self.fields()}
        save_state(path, state, self._kin, extra=extra)

    def fields(self) -> dict[str, Any]:
        """Its text in a file, and the calls that read it: where they are the same, so is the state."""
        own: dict[str, Any] = {"ids": self._ids[:], "drawn": [int(drawn) for drawn in self._drawn[:]]}
        return own | {"calls": self._calls, "before": self._before if self.whole else -1}

    def opened(self, fresh: "Session") -> "Session | None":
        """A fork, as one that `fresh` has loaded; None where that is of another model or store."""
        same = self._rows.model is fresh._rows.model and self._rows.store is fresh._rows.store
        if not same or self.chunk != fresh.chunk:
            return None
        own = self.fork()
        own.note("from", own.digest)
        own.extra = dict(self.extra)
        return own

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: LanguageModel,
        tokenizer: Vocabulary,
        *,
        chunk: int = CHUNK,
        store: PrefixStore | None = None,
    ) -> "Session":
        """Read a saved session, or a conversation of one row, whose text then begins with its last token: what was
        before is remembered but not known. StateError: missing, damaged, of another model, or neither of the two."""
        return cls(model, tokenizer, chunk=chunk, store=store).loaded(path)

    def loaded(self, path: Path | str) -> "Session":
        """A saved session of the same model, as `load` reads it."""
        model, tokenizer = self._rows.model, self._rows.tokenizer
        state, extra = read_state(path, self._kin)
        talk = Conversation.of(path, state, extra, tokenizer.vocab_size)
        session = self.begun()
        own: Any = extra.get("session")
        if own is None:
            if talk.rows != 1:
                raise StateError(f"{path}: a conversation of {talk.rows} rows; take one of them")
            ids = talk.pending[0]
            own = {"ids": ids, "drawn": [0] * len(ids), "calls": [], "before": -1}
        fields = checked(own, talk, tokenizer)
        if fields is None:
            raise StateError(f"{path}: its tokens are not those of a session of this tokenizer")
        session._ids, session._drawn, session._said = Log(fields[0]), Log(fields[1]), sum(fields[1])
        calls, before = fields[2:]
        session.whole, session._before = before >= 0, max(0, before)
        if not session.whole:
            recent, known = talk.recent[0], len(session._recent(len(session._ids)))
            session._remembered = recent[: max(0, len(recent) - known)]
            session._drawn_before = talk.drawn[0] - session._said
        session.extra = {name: value for name, value in extra.items() if name not in OWN}
        session._events = history.checked(extra.get("log", []), len(session._ids) - session._before, path)
        session.note("from", session.digest)
        longest, most = max(calls, default=0), max(CHUNK, self.chunk)
        if longest > most:
            raise StateError(
                f"{path}: was read {longest} tokens at a time, must be ≤ {most}; load it with chunk={longest}"
            )
        if kinds_of(state):
            session._start = model.begun(state.to(model.device))
        for count in calls:
            session._count(count)
        if calls or not session.whole:
            session._state, session._foreign = state.to(model.device), True
            # Of a text whose beginning is not known there is no other way back to it.
            session._marks.put(len(calls), session._state.fork(), fixed=not session.whole)
        return session

    def _before_call(self) -> LMState:
        """The state that the next call reads after, which it may use up."""
        if self._state is not None:
            return self._state
        return self._rows.model.init_state(1) if self._start is None else self._start.fork()

    def _recent(self, window: int) -> list[int]:
        """The last tokens of the text, those that begin and end texts left out."""
        silent = self._rows.tokenizer.specials.silent
        found, end = list[int](), len(self._ids)
        while end > 0 and len(found) < window:
            start = max(0, end - window)
            found = [id for id in self._ids[start:end] if id not in silent] + found
            end = start
        return [*self._remembered, *found][-window:]

    def _check_positions(self, ids: list[int]) -> None:
        if positions := self._rows.model.config.room:
            length = max(self._lengths(ids))
            require(length <= positions, "tokens of one document", length, f"≤ positions = {positions}")

    def _lengths(self, ids: list[int]) -> list[int]:
        """Tokens of the document under way, with those that wait and these, and of each that begins in them."""
        first, *others = lengths([*self._ids[self._read :], *ids], self._rows.tokenizer.specials.reset)
        length_B = None if self._state is None else self._state.document_length_B
        return [first + (0 if length_B is None else int(length_B[0])), *others]

    def _cut(self, T: int, calls: int, state: LMState | None) -> "Session":
        """A session of the first T tokens, of which so many calls have made the state."""
        own = self.begun()
        own._ids, own._drawn = self._ids.cut(T), self._drawn.cut(T)
        own._said = self._said - sum(self._drawn[T:])
        own._before, own.whole = self._before, self.whole
        own._calls, own._runs = self._calls[:calls], self._runs[:calls]
        own._read = self._read - sum(self._calls[calls:])
        own._remembered, own._drawn_before = self._remembered, self._drawn_before
        own._events = history.cut(self._events, T - self._before)
        own._state = None if state is None else state.fork()
        own._foreign = self._foreign and state is not None
        own._start = self._start
        own._marks = self._marks.cut(calls)
        return own

    def _call(self, count: int) -> Tensor:
        """Read the next tokens: what the head reads after each [1,T,D]."""
        model, store, start = self._rows.model, self._rows.store, time.perf_counter()
        state = self._before_call()
        part = self._ids[self._read : self._read + count]
        reset = self._rows.tokenizer.specials.reset
        hidden_1TD, self._state = read_all(
            model, [part], state, fresh=[self._state is None], reset=reset, drawn=self._was_drawn(self._read)
        )
        self._seconds += time.perf_counter() - start
        self._count(count)
        if store is not None and not self._foreign and (path := self._beginning()) is not None:
            last_1D = hidden_1TD[:, -1].clone()
            store.put(path, self._read, self._state, last_1D, self._seconds)
        self._marks.put(len(self._calls), self._state.fork())
        return hidden_1TD

    def _look_up(self, end: int) -> int | None:
        """Take from the store what it has of the tokens up to `end`: a place at which reading is to stop besides, for a
        state to be kept."""
        store, read = self._rows.store, self._read
        path = self._beginning() if read < end else None
        if store is None or path is None:
            return None
        found = store.find(path, most=end, least=read)
        if found is not None:
            self._state, self._seconds = found.state.to(self._rows.model.device), found.seconds
            while self._read < found.tokens:
                self._count(min(self._cell(self._read) + self.chunk, found.tokens) - self._read)
            self._marks.put(len(self._calls), self._state.fork())
        return store.part(path, self._read)

    def _beginning(self) -> Prefixes | None:
        """The text as the store knows it; None where there is none, or what was read so far is not all of a prompt."""
        store = self._rows.store
        if store is None or not self.whole or self._start or (self._runs and self._runs[-1] > 0):
            return None
        if self._path is None or len(self._path.ids) != len(self._ids):
            self._path = store.path(self._ids[:], reset=self._rows.tokenizer.specials.reset)
        return self._path

    def _cell(self, token: int) -> int:
        """The first token of the cell in which one lies that is read as part of a prompt."""
        first = self._runs[-1] if self._runs else 0
        return first + (token - first) // self.chunk * self.chunk

    def _was_drawn(self, token: int) -> bool:
        return self._drawn[token : token + 1] == [True] or (token == 0 and self._drawn_before > 0)

    def _count(self, count: int) -> None:
        """Note that a call has read the next tokens. Cells are counted anew after a token that was drawn, and after a
        call that ends within one, unless that changes no bit."""
        start, first, model = self._read, self._runs[-1] if self._runs else 0, self._rows.model
        end = self._read = start + count
        drawn, cut = count == 1 and self._was_drawn(start), (end - first) % self.chunk > 0
        begun = (start - first) % self.chunk > 0 and self._rows.tokenizer.specials.reset in self._ids[
            start:end
        ]
        exact = whole(model) > 0 and BLOCK % self.chunk == 0
        self._calls.append(count)
        self._runs.append(end if drawn or begun or (cut and not exact) else first)
