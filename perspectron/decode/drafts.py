"""Drafts: tokens that a text may go on with, which a model reads ahead in one run; how many are worth it.

A draft changes no bit of a text. What is drawn is drawn from the logits that a step would have given, with the noise
that it would have had; a draft that is not what was drawn costs time, nothing else.
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
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from perspectron.decode.row import Row, Vocabulary

T = TypeVar("T")

LONGEST = 15
"""Tokens of a draft, unless another number is asked for."""
NGRAMS = 2, 4
"""Numbers of last tokens of a text that are looked for in it."""
LENGTHS = 15, 7, 3, 1
"""Tokens that drafts of several rows have, so that their runs have few shapes."""
FEW = 16
"""A draft model reads fewer tokens step by step."""
MEMORY = 0.15
"""Share of the latest token in what is known of how often drafts are right."""
FORGET = 0.005
"""Share of each step by which what was learnt grows old."""
SHORTEST = 4e-4
"""Seconds of a step from which on drafts are looked for, which takes some 10 µs a token."""
KEPT = 4
"""Texts that ended last, whose drafts go on where the text does."""
FIRST = 3
"""Steps of a batch before drafts are read."""
SPEND = 0.015
"""Share of the time of steps that drafts which turn out wrong may cost."""
CREDIT = 0.75, 30.0
"""Steps' time that they may cost at first, and that is kept of what right ones have saved, at most."""
SLOPE, LEAST = 0.2, 0.06
"""A token more costs this share of a step, until it was measured; and so much besides."""


@dataclass
class Counts:
    """drafted: tokens that were read ahead. accepted: those that were then drawn. runs: in which they were read."""

    drafted: int = 0
    accepted: int = 0
    runs: int = 0


class Pace:
    """How long drafts of the rows of a batch may be, by what steps and longer runs have taken and how often drafts were
    right. Times change no bit of a text."""

    def __init__(self) -> None:
        self._steps, self._step, self._more, self._credit = 0, 0.0, 0.0, 0.0
        self.copied = 0.0
        """Bytes that are copied of the state with each token of a draft, over those of the weights."""

    def stepped(self, seconds: float) -> None:
        """A step without drafts took so long."""
        self._steps += 1
        if self._steps <= FIRST:  # they may make a recording
            self._step = seconds if self._steps == 1 else min(self._step, seconds)
            self._more, self._credit = self._guess * self._step, CREDIT[0] * self._step
        self._step = _mostly(self._step, min(seconds, 2 * self._step))
        self._more += FORGET / 10 * (self._guess * self._step - self._more)
        self._earn(SPEND * self._step)

    def read(self, tokens: int, rows: int, seconds: float) -> None:
        """A run of so many tokens of so many rows took so long."""
        more = max(0.0, seconds - self._step) / max(1, tokens - rows)
        self._more = _mostly(self._more, min(more, 2 * self._step))
        self._credit -= min(more, 2 * self._step) * (tokens - rows)

    def saved(self, rows: int) -> None:
        """The token of one of so many rows was at hand."""
        self._earn(self._step / rows)

    @property
    def pays(self) -> bool:
        """False where a token more takes as long as a step, and where a step is so short that to look for drafts would
        be felt."""
        return self._steps < FIRST or (self._step >= SHORTEST and self._more < self._step)

    @property
    def _guess(self) -> float:
        """What a token more costs, in steps."""
        return SLOPE + 2 * self.copied

    def _earn(self, seconds: float) -> None:
        self._credit = min(CREDIT[1] * self._step, self._credit + seconds)

    def most(self, hopes: float, rows: int, longest: int) -> int:
        """Tokens to draft, `longest` at most, for one of so many rows, whose drafts are right so often."""
        if self._steps < FIRST:
            return 0
        more = self._more + LEAST * self._step
        worth, share, count = self._step / rows, hopes, 0
        while count < longest and share * worth > more:
            count, share = count + 1, share * hopes
        return max(0, min(count, int(self._credit / more)))


def _mostly(known: float, seconds: float) -> float:
    """What something takes, after it took so long: what else the machine does makes it longer, never shorter."""
    return known + (0.3 if seconds < known else 0.06) * (seconds - known)


class Drafter(ABC):
    """The source of drafts for many rows of one model. longest: tokens of one; None: LONGEST, or as many as a window
    of the model has. counts, pace: of all rows so far."""

    def __init__(self, longest: int | None = None) -> None:
        self.longest, self.counts, self.pace = longest, Counts(), Pace()

    def fits(self, model: LanguageModel) -> int:
        """Tokens of a draft for a model. ConfigError: more than a window of it has, or none."""
        windows = [
            (window, f"blocks[{at}]")
            for at, block in enumerate(model.config.blocks)
            for mixer in block.mixers
            if isinstance(window := getattr(mixer, "window", None), int)
        ]
        least, where = min(windows, default=(LONGEST, ""))
        if self.longest is None:
            return min(LONGEST, least)
        require(self.longest >= 1, "draft_tokens", self.longest, "≥ 1")
        require(
            not where or self.longest <= least,
            "draft_tokens",
            self.longest,
            f"≤ {least}, the window of {where}",
        )
        return self.longest

    @abstractmethod
    def begin(self, row: "Row") -> "Draft":
        """What drafts for a row, which is about to draw its first token."""

    def end(self, draft: "Draft") -> None:  # noqa: B027 (nothing, unless it keeps something)
        """A row of `begin` draws no more."""


class Draft(ABC):
    """Drafts for one row. hopes: how often a drafted token was right, of late. free: to propose takes no time, so that
    it is seen how right drafts would be also while none is read. waits: what such a one begins with."""

    hopes = 0.5
    free = False
    waits: int | None = None

    def __init__(self, row: "Row") -> None:
        self.row, self._drawn = row, len(row.ids)
        self._text = row.ids[:]

    @property
    def text(self) -> list[int]:
        """All tokens that are known of the row's text."""
        ids = self.row.ids
        if len(ids) > self._drawn:
            self._text += ids[self._drawn :]
            self._drawn = len(ids)
        return self._text

    @abstractmethod
    def propose(self, most: int) -> list[int]:
        """Tokens that may follow, `most` of them at most."""

    def learn(self, right: bool) -> None:
        """A drafted token was right, or it was not."""
        self.hopes += MEMORY * (right - self.hopes)

    def forget(self) -> None:
        """Nothing was drafted: what was learnt grows old."""
        self.hopes += FORGET * (type(self).hopes - self.hopes)


class _Kept(Generic[T]):
    """What has read the beginning of texts, of the KEPT that ended last: whatever is known of one goes on with it."""

    def __init__(self) -> None:
        self._kept = list[tuple[list[int], T]]()

    def put(self, ids: list[int], known: T) -> None:
        if len(ids) > 1:
            self._kept = [*self._kept[1 - KEPT :], (ids, known)]

    def take(self, ids: list[int]) -> T | None:
        """What knows most of the beginning of a text; from now on it is the caller's."""
        fits = [at for at, (own, _) in enumerate(self._kept) if ids[: len(own)] == own]
        return self._kept.pop(max(fits, key=lambda at: len(self._kept[at][0])))[1] if fits else None


class NGrams(Drafter):
    """Drafts of what followed the text's last tokens where they stood in it before, without a model."""

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(longest)
        self._kept = _Kept[_Places]()

    def begin(self, row: "Row") -> "Draft":
        return _NGrams(row, self._kept.take(row.ids[:]) or _Places())

    def end(self, draft: Draft) -> None:
        assert isinstance(draft, _NGrams)
        self._kept.put(draft.text[: draft.places.known], draft.places)


class _Places:
    """Where n-grams stood in the first `known` tokens of a text."""

    def __init__(self) -> None:
        self.known, self.last = 1, list[tuple[int, ...]]()
        # After each n-gram, shortest first, the place of the token that followed it last.
        self.after = [dict[tuple[int, ...], int]() for _ in NGRAMS]

    def learn(self, ids: list[int]) -> None:
        """More of the text."""
        end = len(ids)
        if self.last and end == self.known + 1:
            for after, key in zip(self.after, self.last, strict=True):
                after[key] = end - 1
        else:
            for at in range(self.known, end):
                for n, after in zip(NGRAMS, self.after, strict=True):
                    after[tuple(ids[at - n : at])] = at  # of what is shorter than n, nothing
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
                period = end - found  # a draft that comes to the end of the text goes on with itself
                return [ids[found + i % period] for i in range(most)]
        return []


class DraftModel(Drafter):
    """Drafts of another model with the same tokens, drawn as the text itself is, with the same noise: the more alike
    the two models are, the more often they draw the same. Its states are its own.

    ConfigError: a model of other tokens."""

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
    """A model that has read the first `read` tokens of a text. spare: a state to be written over."""

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
