"""Drafts for speculative decoding: guesses of a text's next tokens, read ahead in one run, and how many are worth it.

A draft changes no bit of a text: each token is drawn from the logits that an ordinary step would have given, with the
noise that it would have had. A draft that differs from what is drawn costs time, nothing else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from perspectron.decode.reading import CHUNK, read
from perspectron.decode.sampling import sample
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.config import require, require_whole
from perspectron.util.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from perspectron.decode.row import Row, Vocabulary

T = TypeVar("T")

LONGEST = 15
"""Maximum number of tokens of a draft, unless another is asked for."""
NGRAMS = 2, 4
"""Lengths of the n-grams at the end of a text that are looked for earlier in it."""
LENGTHS = 15, 7, 3, 1
"""Lengths to which drafts of several rows are cut, so that their runs have few shapes."""
FEW = 16
"""A draft model reads fewer tokens than this step by step."""
MEMORY = 0.15
"""Weight of the latest token in the moving average of how often drafts are right."""
FORGET = 0.005
"""Share of the way back to its initial value that a learnt average moves in a step."""
SHORTEST = 4e-4
"""Minimum seconds of a step for drafts to be looked for, which takes some 10 µs a token."""
KEPT = 4
"""Number of recently ended texts whose draft state is kept for a text that continues one."""
FIRST = 3
"""Steps that are timed before drafts are read."""
SPEND = 0.015
"""Share of the time of steps that wrong drafts may cost."""
CREDIT = 0.75, 30.0
"""Time that wrong drafts may cost, in steps: at first, and the most that right ones can earn."""
SLOPE, LEAST = 0.2, 0.06
"""Cost of a further token as a share of a step, until it is measured; and a fixed share added to it."""


@dataclass
class Counts:
    """drafted: tokens that were read ahead. accepted: those that were then drawn. runs: runs that read drafts."""

    drafted: int = 0
    accepted: int = 0
    runs: int = 0


class Pace:
    """Decides how long drafts of a batch's rows may be, from the times of steps and longer runs and from how often
    drafts were right. Times change no bit of a text."""

    def __init__(self) -> None:
        self._steps, self._step, self._more, self._credit = 0, 0.0, 0.0, 0.0
        self.copied = 0.0
        """Bytes of the state that each token of a draft copies, over those of the weights."""

    def stepped(self, seconds: float) -> None:
        """Record the time of a step without drafts."""
        self._steps += 1
        if self._steps <= FIRST:  # the first ones may make a recording
            self._step = seconds if self._steps == 1 else min(self._step, seconds)
            self._more, self._credit = self._guess * self._step, CREDIT[0] * self._step
        self._step = _mostly(self._step, min(seconds, 2 * self._step))
        self._more += FORGET / 10 * (self._guess * self._step - self._more)
        self._earn(SPEND * self._step)

    def read(self, tokens: int, rows: int, seconds: float) -> None:
        """Record the time of a run that read `tokens` tokens in `rows` rows."""
        more = max(0.0, seconds - self._step) / max(1, tokens - rows)
        self._more = _mostly(self._more, min(more, 2 * self._step))
        self._credit -= min(more, 2 * self._step) * (tokens - rows)

    def saved(self, rows: int) -> None:
        """Record that the next token of one of `rows` rows had been read ahead."""
        self._earn(self._step / rows)

    @property
    def pays(self) -> bool:
        """True until steps are timed; then False if a further token takes as long as a step, or if steps are so short
        that looking for drafts would be felt."""
        return self._steps < FIRST or (self._step >= SHORTEST and self._more < self._step)

    @property
    def _guess(self) -> float:
        """Cost of a further token as a share of a step, before it is measured."""
        return SLOPE + 2 * self.copied

    def _earn(self, seconds: float) -> None:
        self._credit = min(CREDIT[1] * self._step, self._credit + seconds)

    def most(self, hopes: float, rows: int, longest: int) -> int:
        """Number of tokens to draft, up to `longest`, for one of `rows` rows. hopes: how often its drafts are right."""
        if self._steps < FIRST:
            return 0
        more = self._more + LEAST * self._step
        worth, share, count = self._step / rows, hopes, 0
        while count < longest and share * worth > more:
            count, share = count + 1, share * hopes
        return max(0, min(count, int(self._credit / more)))


def _mostly(known: float, seconds: float) -> float:
    """Update an estimated duration; it falls faster than it rises, as other load only makes times longer."""
    return known + (0.3 if seconds < known else 0.06) * (seconds - known)


class Drafter(ABC):
    """Source of drafts for many rows of one model. longest: maximum tokens of a draft; None: LONGEST, or the model's
    smallest window if that is less. counts, pace: over all rows so far."""

    def __init__(self, longest: int | None = None) -> None:
        self.longest, self.counts, self.pace = longest, Counts(), Pace()

    def fits(self, model: LanguageModel) -> int:
        """Maximum tokens of a draft for a model. ConfigError: `longest` is below 1, or above a window of the model."""
        windows = [
            (window, f"blocks[{at}]")
            for at, block in enumerate(model.config.blocks)
            for mixer in block.mixers
            if isinstance(window := getattr(mixer, "window", None), int)
        ]
        least, where = min(windows, default=(LONGEST, ""))
        if self.longest is None:
            return min(LONGEST, least)
        require_whole("draft_tokens", self.longest, 1)
        require(
            not where or self.longest <= least,
            "draft_tokens",
            self.longest,
            f"≤ {least}, the window of {where}",
        )
        return self.longest

    @abstractmethod
    def begin(self, row: "Row") -> "Draft":
        """Begin the drafts of a row that is about to draw its first token."""

    def end(self, draft: "Draft") -> None:  # noqa: B027 (nothing, unless it keeps something)
        """End the drafts of a row, which draws no more tokens."""


class Draft(ABC):
    """Drafts for one row. hopes: moving average of how often a drafted token was right. free: proposing takes no time,
    so that drafts are judged even while none is read. waits: first token of such a draft that is not read."""

    hopes = 0.5
    free = False
    waits: int | None = None

    def __init__(self, row: "Row") -> None:
        self.row, self._drawn = row, len(row.ids)
        self._text = row.ids[:]

    @property
    def text(self) -> list[int]:
        """All known tokens of the row's text."""
        ids = self.row.ids
        if len(ids) > self._drawn:
            self._text += ids[self._drawn :]
            self._drawn = len(ids)
        return self._text

    @abstractmethod
    def propose(self, most: int) -> list[int]:
        """Guess up to `most` of the next tokens."""

    def learn(self, right: bool) -> None:
        """Update `hopes` by whether a drafted token was right."""
        self.hopes += MEMORY * (right - self.hopes)

    def forget(self) -> None:
        """Move `hopes` a little towards its initial value, as nothing was drafted."""
        self.hopes += FORGET * (type(self).hopes - self.hopes)


class _Kept(Generic[T]):
    """What drafts learnt from the KEPT texts that ended last, for a text that continues one of them."""

    def __init__(self) -> None:
        self._kept = list[tuple[list[int], T]]()

    def put(self, ids: list[int], known: T) -> None:
        if len(ids) > 1:
            self._kept = [*self._kept[1 - KEPT :], (ids, known)]

    def take(self, ids: list[int]) -> T | None:
        """Take out what was learnt from the longest kept text that `ids` begin with; None if there is none."""
        fits = [at for at, (own, _) in enumerate(self._kept) if ids[: len(own)] == own]
        return self._kept.pop(max(fits, key=lambda at: len(self._kept[at][0])))[1] if fits else None


class NGrams(Drafter):
    """Drafts by prompt lookup, without a model: the tokens that followed the text's last n-gram earlier in it."""

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(longest)
        self._kept = _Kept[_Places]()

    def begin(self, row: "Row") -> "Draft":
        return _NGrams(row, self._kept.take(row.ids[:]) or _Places())

    def end(self, draft: Draft) -> None:
        assert isinstance(draft, _NGrams)
        self._kept.put(draft.text[: draft.places.known], draft.places)


class _Places:
    """Where n-grams occur in the first `known` tokens of a text."""

    def __init__(self) -> None:
        self.known, self.last = 1, list[tuple[int, ...]]()
        # For each length, shortest first: by n-gram, the place of the token that last followed it.
        self.after = [dict[tuple[int, ...], int]() for _ in NGRAMS]

    def learn(self, ids: list[int]) -> None:
        """Add the n-grams that are new in the text."""
        end = len(ids)
        if self.last and end == self.known + 1:
            for after, key in zip(self.after, self.last, strict=True):
                after[key] = end - 1
        else:
            for at in range(self.known, end):
                for n, after in zip(NGRAMS, self.after, strict=True):
                    after[tuple(ids[at - n : at])] = at  # a key never met if fewer than n tokens come before
        self.known, self.last = end, [tuple(ids[-n:]) for n in NGRAMS]


class _NGrams(Draft):
    free = True

    def __init__(self, row: "Row", places: _Places) -> None:
        super().__init__(row)
        self.places = places

    def propose(self, most: int) -> list[int]:
        ids, places = self.text, self.places
        end = len(ids)
        places.learn(ids)
        for after, key in zip(reversed(places.after), reversed(places.last), strict=True):
            found = after.get(key)
            if found is not None:
                period = end - found  # a draft that reaches the end of the text repeats itself
                return [ids[found + i % period] for i in range(most)]
        return []


class DraftModel(Drafter):
    """Drafts by another model with the same vocabulary, drawn as the text itself is, with the same noise: the more
    alike the two models are, the more often they draw the same token. It keeps states of its own.

    ConfigError: the model has another vocabulary."""

    def __init__(
        self, model: LanguageModel, tokenizer: "Vocabulary", of: "Vocabulary", longest: int | None = None
    ) -> None:
        theirs, ours = (getattr(x, "fingerprint", x) for x in (tokenizer, of))
        if theirs != ours:
            raise ConfigError(
                f"draft: a model of another vocabulary, {tokenizer.vocab_size} tokens, "
                f"must be the one of the text, {of.vocab_size} tokens"
            )
        V, known = of.vocab_size, model.config.vocab_size
        require(known >= V, "vocab_size of the draft model", known, f"≥ that of the tokenizer, {V}")
        super().__init__(longest)
        self.model, self._kept = model, _Kept[_Reader]()

    def begin(self, row: "Row") -> Draft:
        return _Model(row, self._kept.take(row.ids[:]) or _Reader(self.model))

    def end(self, draft: Draft) -> None:
        assert isinstance(draft, _Model)
        self._kept.put(draft.text[: draft.reader.read], draft.reader)


class _Reader:
    """A model that has read the first `read` tokens of a text. spare: a state whose memory may be overwritten."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.state, self.read = model, model.init_state(1), 0
        self.spare: LMState | None = None

    def go_on(self, ids: list[int], reset: int | None) -> None:
        """Read the rest of a text."""
        while (left := len(ids) - self.read) > 0:
            part = ids[self.read : self.read + (1 if left < FEW else min(left, CHUNK))]
            fresh, few = [self.read == 0], left < FEW
            _, self.state = read(self.model, [part], self.state, fresh=fresh, reset=reset, drawn=few)
            self.read += len(part)


class _Model(Draft):
    def __init__(self, row: "Row", reader: _Reader) -> None:
        super().__init__(row)
        self.reader = reader
        self._longest = reader.model.config.room or 1 << 62

    def propose(self, most: int) -> list[int]:
        reader, row, ids = self.reader, self.row, self.text
        most = min(most, self._longest - len(ids))
        if most <= 0:
            return []
        model, steps = reader.model, steps_of(reader.model)
        reader.go_on(ids[:-1], row.vocabulary.specials.reset)
        state, found = reader.state.fork(reader.spare), list[int]()
        id, recent = ids[-1], row.recent
        for count in range(most):
            _, logits_1V, state = stepped(model, steps, torch.tensor([[id]], device=model.device), state)
            logits_1V = logits_1V[:, : row.vocabulary.vocab_size].cpu()
            try:
                id = int(sample(logits_1V, [recent], row.drawn + count, row.sampling, [row.stream]))
            except NonFiniteError:
                break
            found.append(id)
            recent = [*recent, id]
        reader.spare = state
        return found
