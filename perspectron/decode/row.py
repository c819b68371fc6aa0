"""One row: its prompt, what was drawn, and its text as it becomes certain."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from perspectron.data.specials import Specials
from perspectron.decode.log import Log
from perspectron.decode.places import Path
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.state import LMState
from perspectron.util.errors import PerspectronError

Finish = Literal["stop", "end", "length", "error", "unsafe"]
"""Reasons why a row ends, in turn: a stop string, or a hook says the text is complete; a token that ends texts, or a
stop id; `max_tokens`; nothing can be drawn, or a hook failed; a hook stops it, as a safe set does."""


class Vocabulary(Protocol):
    """The part of a tokenizer that generating needs."""

    vocab_size: int
    specials: Specials

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


def within(vocabulary: Vocabulary, ids: Iterable[int]) -> str:
    """Text of ids that stand within a text, with the space before a first word that `decode` leaves out."""
    return b"".join(map(vocabulary.token_bytes, ids)).decode("utf-8", "replace")


def first_bytes(vocabulary: Vocabulary, id: int) -> bytes:
    """The bytes of a text's first token, without those that `decode` leaves out there."""
    lead = len(within(vocabulary, [id])) - len(vocabulary.decode([id]))  # spaces
    return vocabulary.token_bytes(id)[max(0, lead) :]


class Verdict(Protocol):
    """A hook's verdict on a token that was drawn and is not taken yet, a named tuple. token: to be taken in its place;
    None: it stays. flagged: it is marked. stop: the row ends here, without it."""

    @property
    def token(self) -> int | None: ...
    @property
    def flagged(self) -> bool: ...
    @property
    def stop(self) -> bool: ...
    def _asdict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Piece:
    """The result of one step for one row. id: the token drawn, None after an error. text: the text that has become
    certain, possibly empty: whole characters that cannot begin a stop string. finished: why the row ends here; None
    while it continues. logprob: of the token, in nats, by the model itself, before a hook or any setting changed
    its logits. likely: the most likely tokens and their logprobs, as many as the row asked for, allowed or not.
    verdicts: of hooks on the token, by their names. error: why nothing could be drawn."""

    row: int
    id: int | None
    text: str
    finished: Finish | None
    logprob: float | None = None
    likely: tuple[tuple[int, float], ...] = ()
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    error: PerspectronError | None = None


class TextStream:
    """One row's text. What `push` and `flush` return, joined, is the text of the bytes pushed (what is not
    UTF-8 becomes U+FFFD) up to the first stop string; `stopped` once there was one.

    Of several stop strings the one that is complete first counts, so how the text is cut into tokens does
    not matter.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open, self._past = "", 0

    def push(self, data: bytes, *, stops: bool = True) -> str:
        """Add bytes: the text that is now certain, perhaps empty. stops: False if a stop string that ends in these
        bytes is ordinary text."""
        return self._read(data, stops, final=False)

    def flush(self, *, stops: bool = True) -> str:
        """End the text: the rest of it. Half a character becomes U+FFFD, which may complete a stop string."""
        return "" if self.stopped else self._read(b"", stops, final=True)

    def _read(self, data: bytes, stops: bool, *, final: bool) -> str:
        self._open += self._decoder.decode(data, final=final)
        if not stops:
            self._past = len(self._open)
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends)[1])
        return self._release(len(self._open) - (0 if final else self._possible_stop()))

    def _find(self, stop: str) -> int:
        """Place of the first `stop` that ends after `_past`, up to which stop strings do not count; −1 without one."""
        return self._open.find(stop, max(0, self._past - len(stop) + 1))

    def _release(self, length: int) -> str:
        text, self._open, self._past = self._open[:length], self._open[length:], max(0, self._past - length)
        return text

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the text kept back that is the beginning of a stop string."""
        longest = min(len(self._open), max(map(len, self._stop), default=1) - 1)
        ends = (self._open[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)


@dataclass(eq=False)
class Row:
    """One row, from `add` to `remove`."""

    handle: int
    vocabulary: Vocabulary
    unread: list[int]
    """Tokens to read before the next draw: the prompt, later the last token drawn."""
    fresh: bool
    """True while the row has read nothing and has no state to continue from."""
    ids: Log[int]
    """All tokens that are known of the text: those a conversation remembers, the prompt, and those drawn."""
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
    early: int = 0
    """Number of tokens to draw before the text may end."""
    ends: frozenset[int] = frozenset()
    """Ids that end the text and do not belong to it."""
    before: LMState | None = None
    """State before the last token, where a hook needs it and the row stands in no batch."""
    start: int = 0
    """Number of tokens of `unread` that have been read."""
    last: tuple[int, LMState] | None = None
    """Until the first draw, where a hook may stop the row: `start` and the state before the last call that read."""
    finished: Finish | None = None
    path: Path | None = None
    """Keys of the prompt's prefixes in the store; None if they are not stored."""
    stop: int | None = None
    """A token of `unread` at which a call ends in addition, so that a state can be stored there."""
    lead: int = 0
    """Number of tokens of the first cell that were read before `unread`."""
    from_drawn: bool = False
    """True if the first token of `unread` was drawn."""
    seconds: float = 0.0
    """Seconds that reading up to here took, or would have taken without the store."""
    begins: bool = False
    """True until the text, its prompt included, has a token with bytes."""
    spared: int = 0
    """Number of tokens that the store had, which were not read."""

    def until(self, chunk: int) -> int:
        """The token of `unread` before which the next call ends, at the latest the end of a cell of `chunk` tokens."""
        end = (self.start + self.lead) // chunk * chunk + chunk - self.lead
        return min(end, len(self.unread), *([self.stop] if self.stop and self.stop > self.start else []))

    def rest(self) -> list[int]:
        """Tokens that have not been read yet."""
        return self.unread[self.start :]

    def take(
        self,
        id: int,
        logprob: float | None = None,
        likely: tuple[tuple[int, float], ...] = (),
        *,
        complete: bool,
        verdicts: dict[str, Verdict],
    ) -> Piece:
        """Add a drawn token to the text: its piece. complete: a hook says that the text ends with it."""
        ends, counts = id in self.ends, self.early == 0
        self.unread, self.start, self.last = [id], 0, None
        self.ids.extend([id])
        self.drawn += 1
        self.left -= 1
        self.early = max(0, self.early - 1)
        data = b"" if ends else self.vocabulary.token_bytes(id)
        if self.begins and data:
            data, self.begins = first_bytes(self.vocabulary, id), False
        text = self.text.push(data, stops=counts)
        if id not in self.vocabulary.specials.silent:  # the end of a text is no repetition
            self.recent = [*self.recent, id][-self.sampling.repetition_window :]
        if ends:
            self.finished = "end"
        elif self.text.stopped or complete:
            self.finished = "stop"
        elif self.left == 0:
            self.finished = "length"
        if self.finished is not None:
            text += self.text.flush(stops=counts)
            self.finished = "stop" if self.text.stopped else self.finished
        return Piece(self.handle, id, text, self.finished, logprob, likely, verdicts)

    def fail(
        self, error: PerspectronError | None = None, verdicts: dict[str, Verdict] | None = None
    ) -> Piece:
        """End without a token: with an error, or because a verdict stops the row."""
        self.finished = "unsafe" if error is None else "error"
        return Piece(
            self.handle, None, self.text.flush(), self.finished, verdicts=verdicts or {}, error=error
        )
