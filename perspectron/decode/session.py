"""One text and its memory: read, say, fork, go back to any token, keep in a file."""

import time
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any, cast

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
from perspectron.decode.processors import Hook, Processor
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
from perspectron.util.config import require, require_whole
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
        if start is not None:
            require(isinstance(start, LMState), "start", start, "a trained state, an LMState")
            require(start.batch_size == 1, "start", f"a state of {start.batch_size} rows", "one of one row")
            require(start.model in (None, model.number), "start", "a state of another model", "of this one")
            require(bool(kinds_of(start)), "start", "a state without trained parts", "a trained one")
        self._rows = Rows(model, tokenizer, chunk=chunk, store=store, together=False, drafts=drafts)
        self._kin: Stateful = model if store is None else store.model
        prefix = [*tokenizer.specials.prefix]
        self._ids, self._drawn = Log(prefix), Log([False] * len(prefix))
        self._said = 0
        """Number of tokens that were drawn."""
        self._calls = list[int]()
        """Number of tokens read by each call."""
        self._read = 0
        """Number of tokens read by all calls."""
        self._state: LMState | None = None
        """The state after these calls; None before the first."""
        self._start = start
        self._marks = Marks()
        """Saved states by number of calls, from which `at` goes on."""
        self._runs = list[int]()
        """For each call, the token from which on the cells of the text are counted after it."""
        self._path: Prefixes | None = None
        """Keys in the store of a text that is read as a prompt; made when needed."""
        self._foreign = False
        """True if the state comes from a file: states after it are not stored, as other texts would begin with them."""
        self._seconds = 0.0
        """The time that reading took; of a session that went back, its share by tokens."""
        self._remembered, self._drawn_before = list[int](), 0
        """If the beginning of the text is not known: tokens before it that a penalty counts, and how many were drawn,
        the last of which is the text's first token."""
        self._entered = 0
        """Number of ids at the last `enter`."""
        self._before = len(prefix)
        """Number of ids at the start that do not belong to the text."""
        self._events = list[history.Event]()
        self.whole = True
        """True if the text is known from its beginning; else only the state remembers what came before."""
        self.extra: dict[str, Any] = {}  # the user's entries in its file, as in `save`

    @property
    def chunk(self) -> int:
        """Maximum number of tokens read in a call."""
        return self._rows.chunk

    @property
    def start(self) -> LMState | None:
        """The trained state that the text begins with; None for the model's own."""
        return self._start

    @property
    def tokens(self) -> list[int]:
        """The ids of the text, drawn ones and those of stop strings included."""
        return self._ids[self._before :]

    @property
    def drawn(self) -> int:
        """Number of tokens of the text that were drawn."""
        return self._said

    @property
    def before(self) -> int:
        """Number of the tokenizer's prefix tokens before the text."""
        return self._before

    @property
    def done(self) -> int:
        """Number of tokens that were read, of those before the text and of the text; the others wait."""
        return self._read

    @property
    def left(self) -> int | None:
        """How many more tokens the document may have, with a last one that is drawn but not read; None: no limit."""
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
        """Charge the memory of the state to an account until the hold is released; None before the first call."""
        return None if self._state is None else Hold(account, self._state)

    def read(self, text: str | Sequence[int]) -> "Session":
        """Read a text, or its ids: the session itself. ConfigError: ids outside the vocabulary, more than a table of
        learned positions has."""
        for _ in self.reading(text):
            pass
        return self

    @torch.inference_mode()
    def reading(self, text: str | Sequence[int]) -> Generator[int, None, None]:
        """`read` as a generator, which pauses before each call of the model and yields the number of tokens left. If it
        is given up half way, the rest waits to be read."""
        self.append(text)
        yield from self._reading(self._cell(len(self._ids) - 1))

    def _reading(self, end: int) -> Generator[int, None, None]:
        """Read the ids before `end`, pausing as `reading` does."""
        stop = self._look_up(end)
        while self._read < end:
            yield len(self._ids) - self._read
            self._call(self._next(end if stop is None or stop <= self._read else min(stop, end)))

    @torch.inference_mode()
    def likely(
        self, ids: Sequence[int], count: int, *, shares: bool = True
    ) -> Generator[int, None, list[Likely]]:
        """Log-probabilities of ids if they came next, each given all tokens before it, and of the `count` most likely
        tokens in its place; pauses as `reading` does. A first token with nothing before it has none. The session stays
        as it is. shares: what is read is stored. Errors as `append`. NonFiniteError: the logits are not finite."""
        require_whole("count", count, 0)
        own, first, found = self.fork(), len(self._ids), list[Likely]()
        own._foreign |= not shares  # as for a state from a file, nothing is stored
        own.append(ids)
        V = own._rows.tokenizer.vocab_size
        while own._read < len(own._ids):
            yield len(own._ids) - own._read
            start = own._read
            hidden_1TD = own._call(own._next(len(own._ids)))
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
        """Add a text that is read when it is needed; errors as `read`. The tokenizer's prefix comes before a text once,
        even if the ids begin with it; before `whole` ids, such as a chat template's, it is left out if they lack it."""
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
        hooks: Sequence[Hook | Processor] = (),
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> str:
        """Draw up to `max_tokens` tokens: the text, which ends before a stop string. sampling: temperature, seed and
        what else `SamplingConfig` has. on_text: called with each piece of the text. hooks, min_tokens, stop_ids: as
        `Rows.add` has them; what a hook does to the state is not repeated where `at` reads again. On an error or an
        interruption the session stays as it was before.

        ConfigError: a number out of bounds, more tokens than a table of learned positions has left. NonFiniteError: the
        model gave logits that are not finite, or none of those that hooks leave. StateError: the session read or said
        something else meanwhile. PerspectronError: a hook failed.
        """
        steps = self.saying(
            max_tokens, sampling=sampling, stop=stop, on_text=on_text,
            hooks=hooks, min_tokens=min_tokens, stop_ids=stop_ids,
        )  # fmt: skip
        return exhausted(steps)

    @torch.inference_mode()
    def saying(
        self,
        max_tokens: int,
        *,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        hooks: Sequence[Hook | Processor] = (),
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Generator[int, None, str]:
        """`say` as a generator, which pauses before each step and yields the number of tokens that may still come."""
        rows, pieces, ids, marks = self._rows, list[str](), list[int](), dict[int, LMState]()
        if rows.active:
            raise StateError("the session is saying something already; finish that first, or use a fork")
        handle = self.enter(
            rows, max_tokens=max_tokens, stream=0, sampling=sampling, stop=stop,
            hooks=hooks, min_tokens=min_tokens, stop_ids=stop_ids,
        )  # fmt: skip
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
        """Add the text to `rows`, with the settings of `Rows.add`: the handle of its row. The session stays as it was
        until `leave`. ConfigError as `Rows.add`."""
        read, self._entered = self._read, len(self._ids)
        past, unread = self._ids.cut(read), self._ids[read:]
        if self._remembered:
            past = Log([*self._remembered, *past])
        sampling = settings.get("sampling", SamplingConfig())  # `add` refuses anything else
        recent = self._recent(getattr(sampling, "repetition_window", 0))
        if self._state is None:
            require(len(unread) > 0, "text", "", "read before: this tokenizer puts nothing before a text")
            if self._start is None:
                return rows.add(unread, whole=True, **settings)
            talk = Conversation(self._start.fork(), [unread], [recent], [0])
            return rows.add("", conversation=talk, past=past, fresh=True, **settings)
        # The row writes into the memory of the state; the session keeps a fork of it as it is now.
        state, self._state = self._state, self._state.fork()
        talk = Conversation(state, [unread], [recent], [self._drawn_before + self._said])
        settings |= {"past": past, "lead": read - self._cell(read), "drawn": self._was_drawn(read)}
        return rows.add("", conversation=talk, **settings)

    def leave(self, rows: Rows, row: int, ids: Sequence[int]) -> None:
        """Remove the text's row, which has drawn `ids`, and continue the session from it. StateError: the session has
        read or said more since."""
        talk, end = rows.remove(row), len(self._ids)
        if end != self._entered:
            raise StateError(
                f"the session has {end} tokens, {self._entered} when it began to say this; use a fork meanwhile"
            )
        if not ids:  # a hook stopped the text before its first token
            return
        self._ids.extend(ids)
        self._drawn.extend([True] * len(ids))
        self._said += len(ids)
        self.note()
        while self._read < end:
            self._count(min(self._cell(self._read) + rows.chunk, end) - self._read)
        for _ in range(len(ids) - 1):
            self._count(1)
        self._state = talk.state
        self._marks.put(len(self._calls), self._state.fork())

    @torch.inference_mode()
    def predicting(self, ids: Sequence[int]) -> Generator[int, None, Tensor]:
        """Read ids: the logits [T,V] that predict each of them; pauses as `reading` does. A first one with nothing
        before it has none. Errors as `append`."""
        first, V, found = len(self._ids), self._rows.tokenizer.vocab_size, list[Tensor]()
        self.append(ids)
        while self._read < len(self._ids) - 1:
            yield len(self._ids) - self._read
            start = self._read
            hidden_1TD = self._call(self._next(len(self._ids) - 1))
            kept_1TD = hidden_1TD[:, max(0, first - 1 - start) :]
            if kept_1TD.shape[1]:
                found.append(self._rows.model.head(kept_1TD)[0, :, :V].cpu())
        return torch.cat(found) if found else torch.zeros(0, V)

    @torch.inference_mode()
    def expecting(self) -> Generator[int, None, Tensor]:
        """The logits [T,V] after the last token, T = 1, or 0 if none waits; pauses as `reading` does. The session stays
        as it is."""
        own, V, hidden_1TD = self.fork(), self._rows.tokenizer.vocab_size, None
        while own._read < len(own._ids):
            yield len(own._ids) - own._read
            hidden_1TD = own._call(own._next(len(own._ids)))
        if hidden_1TD is None:
            return torch.zeros(0, V)
        return self._rows.model.head(hidden_1TD[0, -1:])[:, :V].cpu()

    @torch.inference_mode()
    def remembering(self) -> Generator[int, None, LMState]:
        """A copy of the state after the whole text, which the store then has, too; pauses as `reading` does."""
        own = self.fork()
        yield from own._reading(len(own._ids))
        return own._before_call()

    @property
    def digest(self) -> str:
        """Digest of the text's ids and of which of them were drawn (`history.digest`)."""
        return history.digest(self._ids[:], self._drawn[:])

    @property
    def model(self) -> LanguageModel:
        """The model that reads the text."""
        return self._rows.model

    @property
    def tokenizer(self) -> Vocabulary:
        """The tokenizer of the text's ids."""
        return self._rows.tokenizer

    def note(self, how: str = "text", parent: str = "") -> None:
        """Add an event at the present time to the log (`history.Event`)."""
        history.noted(self._events, len(self._ids) - self._before, how, parent)

    def begun(self) -> "Session":
        """A new session without a text, of the same model, tokenizer and store."""
        rows = self._rows
        return Session(rows.model, rows.tokenizer, chunk=rows.chunk, store=rows.store, drafts=rows.drafts)

    def rereading(self) -> Generator[int, None, "Session"]:
        """A session that has read the same text anew as a prompt, so that others may begin with it; pauses as `reading`
        does. If the text begins with a trained memory, or its beginning is not known, the session itself."""
        yield 0
        if not self.whole or self._start is not None:
            return self
        own, lacks = self.begun(), self._before < len(self._rows.tokenizer.specials.prefix)
        own.append(self.tokens, whole=lacks)
        yield from own.reading([])
        return own

    def remembered(self, state: LMState, ids: Sequence[int]) -> "Session":
        """A session of the same model that begins with a state, which is used up, and these ids: what came before them
        is remembered but not known."""
        own = self.begun()
        own._ids, own._drawn, own._before, own.whole = Log([*ids]), Log([False] * len(ids)), 0, False
        own._state, own._foreign = state, True
        own._marks.put(0, state.fork(), fixed=True)
        return own

    @property
    def log(self) -> tuple[history.Entry, ...]:
        """The log of the text: what was read and drawn, when, and which texts it came from."""
        drawn = [int(drawn) for drawn in self._drawn[:]]
        return tuple(history.entries(self._ids[:], drawn, self._before, self._events))

    def fork(self) -> "Session":
        """An independent session that has read and said the same."""
        return self._cut(len(self._ids), len(self._calls), self._state)

    def at(self, token: int) -> "Session":
        """The session as it was after `token` tokens of the text, to continue from there; calls since the nearest saved
        state are read again. ConfigError: more tokens than there are, or fewer than a loaded one begins with."""
        return exhausted(self.back_to(token))

    @torch.inference_mode()
    def back_to(self, token: int) -> Generator[int, None, "Session"]:
        """`at` as a generator, which pauses before each call of the model and yields the number of tokens left."""
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
                earlier._foreign, earlier._seconds = False, found.seconds
        while len(earlier._calls) < calls:
            yield T - earlier._read
            earlier._call(self._calls[len(earlier._calls)])
        self._marks.learn(earlier._marks)
        return earlier

    def shared(self, ids: Sequence[int], *, whole: bool = False) -> int:
        """Number of tokens at the start of the text with which these ids begin, too; 0 if its beginning is not known.
        whole: as in `append`."""
        specials = self._rows.tokenizer.specials
        lacks = whole and specials.lacks(ids)
        if not self.whole or lacks != (self._before < len(specials.prefix)):
            return 0
        return alike(self.tokens, ids if lacks else specials.bare(ids))

    def common(self, ids: Sequence[int], *, whole: bool = False) -> "Session":
        """The session as it was where its text and these ids part; a new one if that part would have to be read again,
        begins with a trained memory, or has a drawn token, which was not read as in a prompt."""
        T = self.shared(ids, whole=whole) + self._before
        if not self.whole or self._read >= T or any(self._drawn[:T]) or self._start is not None:
            return self.begun()
        return self._cut(T, len(self._calls), self._state)

    def save(self, path: Path | str, *, extra: dict[str, Any] | None = None) -> None:
        """Write to one file, whole or not at all; `generate --load-state` takes it too. extra: any JSON to be kept with
        it. ConfigError: an entry has a name of `conversation.OWN`. StorageError when it cannot be written."""
        state = self._before_call()
        recent = [self._recent(len(self._remembered) + len(self._ids))]  # for any window that may follow
        drawn = self._drawn_before + self._said
        talk = {"pending": [self._ids[self._read :]], "recent": recent, "drawn": [drawn]}
        extra = beside(extra) | {"log": self._events, "conversation": talk, "session": self.fields()}
        save_state(path, state, self._kin, extra=extra)

    def fields(self) -> dict[str, Any]:
        """The text's fields for a file, with the calls that read it: equal texts and calls give equal states."""
        own: dict[str, Any] = {"ids": self._ids[:], "drawn": [int(drawn) for drawn in self._drawn[:]]}
        return own | {"calls": self._calls, "before": self._before if self.whole else -1}

    def opened(self, fresh: "Session") -> "Session | None":
        """A fork, as if `fresh` had loaded it from a file; None if `fresh` has another model, store or chunk."""
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
        """Number of tokens in each document: of the current one, with those that wait, then of those that follow."""
        first, *others = lengths([*self._ids[self._read :], *ids], self._rows.tokenizer.specials.reset)
        length_B = None if self._state is None else self._state.document_length_B
        return [first + (0 if length_B is None else int(length_B[0])), *others]

    def _cut(self, T: int, calls: int, state: LMState | None) -> "Session":
        """A session of the first T ids, prefix included, whose state was made by the first `calls` calls."""
        own = self.begun()
        own._ids, own._drawn = self._ids.cut(T), self._drawn.cut(T)
        own._said = self._said - sum(self._drawn[T:])
        own._before, own.whole = self._before, self.whole
        own._calls, own._runs = self._calls[:calls], self._runs[:calls]
        own._read = self._read - sum(self._calls[calls:])
        own._seconds = self._seconds * own._read / max(1, self._read)
        own._remembered, own._drawn_before = self._remembered, self._drawn_before
        own._events = history.cut(self._events, T - self._before)
        own._state = None if state is None else state.fork()
        own._foreign = self._foreign and state is not None
        own._start = self._start
        own._marks = self._marks.cut(calls)
        return own

    def _call(self, count: int) -> Tensor:
        """Read the next `count` tokens: the head's input after each [1,T,D]."""
        model, store, start = self._rows.model, self._rows.store, time.perf_counter()
        state, spare = self._before_call(), self._marks.at(len(self._calls))
        if spare is None:
            spare = None if self._state is None else state
            state = state if spare is None else state.fork()
        part = self._ids[self._read : self._read + count]
        reset = self._rows.tokenizer.specials.reset
        begins, drawn = self._state is None, self._was_drawn(self._read)
        try:
            hidden_1TD, self._state = read_all(model, [part], state, fresh=[begins], reset=reset, drawn=drawn)
        except BaseException:  # it may have written into the state
            self._state = None if begins else cast(LMState, spare).fork()
            raise
        self._seconds += time.perf_counter() - start
        self._count(count)
        if store is not None and not self._foreign and (path := self._beginning()) is not None:
            last_1D = hidden_1TD[:, -1].clone()
            store.put(path, self._read, self._state, last_1D, self._seconds)
        self._marks.put(len(self._calls), self._state.fork())
        return hidden_1TD

    def _look_up(self, end: int) -> int | None:
        """Continue from the longest prefix that the store has of the tokens before `end`: an extra place at which
        reading is to stop so that a state can be stored, if any."""
        store, read = self._rows.store, self._read
        path = self._beginning() if read < end else None
        if store is None or path is None:
            return None
        found = store.find(path, most=end, least=read)
        if found is not None:
            self._state, self._seconds = found.state.to(self._rows.model.device), found.seconds
            while self._read < found.tokens:
                self._count(self._next(found.tokens))
            self._marks.put(len(self._calls), self._state.fork())
        return store.part(path, self._read)

    def _beginning(self) -> Prefixes | None:
        """The text's keys in the store; None without a store, or if not all of it so far was read as a prompt."""
        store = self._rows.store
        if store is None or not self.whole or self._start or (self._runs and self._runs[-1] > 0):
            return None
        if self._path is None or len(self._path.ids) != len(self._ids):
            self._path = store.path(self._ids[:], reset=self._rows.tokenizer.specials.reset)
        return self._path

    def _cell(self, token: int) -> int:
        """The first token of the cell in which `token` lies, counted as for a prompt."""
        first = self._runs[-1] if self._runs else 0
        return first + (token - first) // self.chunk * self.chunk

    def _next(self, end: int) -> int:
        """Number of tokens that the next call reads, of those before `end`."""
        return min(self._cell(self._read) + self.chunk, end) - self._read

    def _was_drawn(self, token: int) -> bool:
        return self._drawn[token : token + 1] == [True] or (token == 0 and self._drawn_before > 0)

    def _count(self, count: int) -> None:
        """Note that a call has read the next `count` tokens. Cells are counted anew after a drawn token, and after a
        call that ends within a cell, unless that changes no bit."""
        start, first, model = self._read, self._runs[-1] if self._runs else 0, self._rows.model
        end = self._read = start + count
        drawn, cut = count == 1 and self._was_drawn(start), (end - first) % self.chunk > 0
        begun = (start - first) % self.chunk > 0 and self._rows.tokenizer.specials.reset in self._ids[
            start:end
        ]
        exact = whole(model) > 0 and BLOCK % self.chunk == 0
        self._calls.append(count)
        self._runs.append(end if drawn or begun or (cut and not exact) else first)
