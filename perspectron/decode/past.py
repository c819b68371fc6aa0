"""The past of a text: the first token after which an answer holds, and the text replayed on another beginning or model.

Each function has a twin that is a generator, which pauses before each call of the model and yields the number of tokens
left, as `Session.reading` does: the server's engine runs those between the steps of other texts.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import NamedTuple

from perspectron.data.tokenizer import Tokenizer
from perspectron.decode.apart import ids_of
from perspectron.decode.history import exhausted
from perspectron.decode.row import Vocabulary, within
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.util.config import require, require_whole
from perspectron.util.errors import ConfigError, StateError

ANSWER = 16  # tokens of an answer, where nobody says how many
AROUND = 12
"""Tokens of a text that are shown before and after a found one."""
PROBABILITY = re.compile(r"p\((.+)\)\s*>\s*(\S+)", re.DOTALL)

Answer = Generator[int, None, tuple[bool, str]]
"""A generator whose result is whether a condition holds, and the answer."""


class Until(NamedTuple):
    """A condition on the answer to a question. named: the condition as the user wrote it. asked: asks after a session,
    which is used up, for an answer of at most this many tokens."""

    named: str
    asked: Callable[[Session, int], Answer]


def _said(found: Callable[[str], object], session: Session, tokens: int) -> Answer:
    """Draw the most likely answer; the condition holds if `found` finds something in it."""
    said = yield from session.saying(tokens, sampling=SamplingConfig(temperature=0.0))
    return bool(found(said)), said


def _likely(text: str, above: float, session: Session, _: int) -> Answer:
    """The condition holds if the probability that a text comes next is greater than `above`."""
    found = yield from session.likely(session.tokenizer.encode(text), 1)
    p = math.exp(sum(logprob for logprob, _ in found))
    return p > above, f"p = {p:.6g}"


def until_of(text: str, *, expressions: bool = True) -> Until:
    """Parse a condition: `/EXPRESSION/` is found in the answer, `p(TEXT) > 0.5`, or else the text is in the answer.
    ConfigError: an invalid regular expression, or any if not `expressions`; a probability out of bounds; an empty
    text."""
    require(text != "", "until", text, "a text, /an expression/ or p(TEXT) > 0.5")
    if match := PROBABILITY.fullmatch(text.strip()):
        above = math.nan
        with contextlib.suppress(ValueError):
            above = float(match[2])
        require(0 <= above < 1, "until", text, "a probability ≥ 0 and < 1")
        return Until(text, partial(_likely, match[1], above))
    if len(text) > 2 and text[0] == text[-1] == "/":
        require(expressions, "until", text, "a text or p(TEXT) > 0.5: this server runs no expressions")
        try:
            return Until(text, partial(_said, re.compile(text[1:-1], re.DOTALL).search))
        except re.error as error:
            raise ConfigError(
                f"until = {text!r}, must be a regular expression between / and / ({error})"
            ) from None
    return Until(text, partial(_said, lambda said: text in said))


@dataclass(frozen=True)
class Found:
    """The first token of a text after which a condition holds. token: its number, from 1. id: of the vocabulary.
    spelled: the token as text. around: the text about it. before, after: the answers without it and with it. readings:
    number of answers asked for."""

    token: int
    id: int
    spelled: str
    around: str
    before: str
    after: str
    readings: int


def bisect(
    session: Session, ask: str | Sequence[int], until: Until | str, *, max_tokens: int | None = None
) -> Found:
    """Find by bisection the first token of a text after which a question's answer meets a condition: for N tokens about
    log₂ N + 3 answers are asked for, each of the session as it was after a token. The session stays as it is. If the
    condition changes more than once, one of the changes from no to yes is found. max_tokens: of an answer; None: 16, or
    fewer where the model's positions end.

    ConfigError: the condition holds from the start or not at the end, no question, no tokens. Errors as `Session.read`.
    """
    return exhausted(bisecting(session, ask, until, max_tokens=max_tokens))


def bisecting(
    session: Session, ask: str | Sequence[int], until: Until | str, *, max_tokens: int | None = None
) -> Generator[int, None, Found]:
    """`bisect` as a generator, which pauses as `Session.reading` does."""
    require(isinstance(until, str | Until), "until", until, "a text, or what `until_of` makes of one")
    until = until_of(until) if isinstance(until, str) else until
    tokens, readings, question = session.tokens, 0, ids_of(session, ask, "ask")
    require(len(question) > 0, "ask", ask, "a question")
    if max_tokens is None:
        most = ANSWER if session.left is None else min(ANSWER, session.left - len(question))
        max_tokens = max(1, most)
    require_whole("max_tokens", max_tokens, 1)
    low, high = 0 if session.whole else 1, len(tokens)
    require(high > low, "tokens of the text", high, f"> {low}: there is no past to look into")

    def answered(token: int) -> Answer:
        nonlocal readings
        readings += 1
        then = yield from session.back_to(token)
        then.append(question)
        return (yield from until.asked(then, max_tokens))

    holds, after = yield from answered(high)
    begun, before = yield from answered(low)
    if begun or not holds:
        why = "always holds" if begun and holds else "held at the start alone" if begun else "never holds"
        ends = f"after {low} tokens the answer is {before[:80]!r}, after {high:,} {after[:80]!r}"
        raise ConfigError(f"until = {until.named!r}, {why}: {ends}")
    while high - low > 1:
        middle = (low + high) // 2
        holds, said = yield from answered(middle)
        if holds:
            high, after = middle, said
        else:
            low, before = middle, said
    spelled = text_of(session.tokenizer, tokens, high - 1, high)
    around = text_of(session.tokenizer, tokens, max(0, high - AROUND), high + AROUND)
    return Found(high, tokens[high - 1], spelled, around, before, after, readings)


def text_of(tokenizer: Vocabulary, tokens: Sequence[int], start: int, end: int) -> str:
    """The part of a text that these of its tokens spell."""
    return within(tokenizer, tokens[start:end]) if start else tokenizer.decode(tokens[start:end])


@dataclass(frozen=True)
class Rebased:
    """A replayed text. session: the result. tokens: how many were replayed. prefix: how many come before them. encoded:
    number of ids after encoding them anew for another vocabulary; None if the ids are the same."""

    session: Session
    tokens: int
    prefix: int
    encoded: int | None


def rebase(session: Session, onto: Session, *, after: int = 0) -> Rebased:
    """Replay a text after another one, of the same model or not: `onto`, then the tokens after the first `after`, read
    as a prompt. If the vocabularies differ, the text is encoded anew. Both sessions stay as they are.

    StateError: the beginning of the text is not known, or it has a special token that the other vocabulary lacks, or
    one that begins or ends texts, and that has none. ConfigError: no tokens are left, or the other model has no room
    for them."""
    return exhausted(rebasing(session, onto, ids_for(session, onto.tokenizer, after=after)))


def rebasing(session: Session, onto: Session, replayed: "Replayed") -> Generator[int, None, Rebased]:
    """`rebase` as a generator, which pauses as `Session.reading` does. replayed: from `ids_for`."""
    result, prefix = onto.fork(), len(onto.tokens)
    yield from result.reading(replayed.ids)
    result.note("rebased", session.digest)
    return Rebased(result, replayed.tokens, prefix, len(replayed.ids) if replayed.encoded else None)


@dataclass(frozen=True)
class Replayed:
    """A text in the ids of another vocabulary. tokens: number of its own. encoded: True if it was encoded anew."""

    ids: list[int]
    tokens: int
    encoded: bool


def ids_for(session: Session, tokenizer: Vocabulary, *, after: int = 0) -> Replayed:
    """The ids that `rebase` replays, those after the first `after` tokens. Errors as `rebase`."""
    if not session.whole:
        raise StateError("the beginning of this text is remembered but not known: it cannot be replayed")
    there = isinstance(after, Integral) and 0 <= after <= len(session.tokens)
    require(there, "after", after, f"a whole number ≥ 0 and ≤ {len(session.tokens)}")
    ids = session.tokens[after:]
    require(len(ids) > 0, "tokens of the text", 0, "≥ 1: there is nothing to replay")
    if _alike(session.tokenizer, tokenizer):
        return Replayed(ids, len(ids), False)
    return Replayed(_encoded(session.tokenizer, tokenizer, session.tokens, after), len(ids), True)


def _alike(one: Vocabulary, other: Vocabulary) -> bool:
    """True if ids mean the same in both vocabularies, whichever of them end texts."""
    mark = getattr(one, "fingerprint", None)
    if one is other or (mark is not None and mark == getattr(other, "fingerprint", None)):
        return True
    if not (isinstance(one, Tokenizer) and isinstance(other, Tokenizer)):
        return False
    return bool(json.loads(one.to_str()) == json.loads(other.to_str()))


def _encoded(one: Vocabulary, other: Vocabulary, ids: Sequence[int], after: int) -> list[int]:
    """Encode the ids after the first `after` anew in another vocabulary. A special token becomes the one of the same
    spelling there; without one, what begins or ends a text becomes what does there. StateError: there is neither."""
    silent, specials = one.specials.silent, other.specials
    (mine, theirs) = (each.special if isinstance(each, Tokenizer) else {} for each in (one, other))
    spellings = {id: spelling for spelling, id in mine.items()}
    begin = {*one.specials.prefix, one.specials.reset}
    found, start = list[int](), after
    for at, id in enumerate([*ids[after:], None], after):
        if id is not None and id not in spellings and (id not in silent or one.token_bytes(id)):
            continue
        if start < at:
            begins = start == 0 or ids[start - 1] in begin
            found += other.encode(one.decode(ids[start:at])) if begins else _within(one, other, ids[start:at])
        start = at + 1
        if id is None:
            return found
        ends = [end for end in (specials.reset, specials.end) if end is not None] or [*specials.start]
        if spellings.get(id) in theirs:
            found.append(theirs[spellings[id]])
        elif id not in silent:
            raise StateError(f"token {id} is {spellings[id]!r}, which the other vocabulary lacks")
        elif not ends:
            raise StateError(f"token {id} begins or ends a text, for which the other vocabulary has none")
        else:
            found.append(ends[0])
    return found


def _within(one: Vocabulary, other: Vocabulary, ids: Sequence[int]) -> list[int]:
    """Encode ids that stand within a text anew: a space before them counts once, also where `other` puts one before
    whatever it encodes."""
    text = within(one, ids)
    found = other.encode(text)
    spaces = [len(each) - len(each.lstrip(" ")) for each in (text, within(other, found))]
    return other.encode(text[1:]) if 0 < spaces[0] < spaces[1] else found
