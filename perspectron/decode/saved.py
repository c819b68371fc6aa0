"""The fields that a session saves of its text, and how far two texts agree."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from perspectron.decode.conversation import Conversation
from perspectron.decode.row import Vocabulary


def alike(some: Sequence[int], others: Sequence[int]) -> int:
    """Number of ids at the start that are the same in both."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def checked(
    own: Any, talk: Conversation, tokenizer: Vocabulary
) -> tuple[list[int], list[bool], list[int], int] | None:
    """The fields ids, drawn, calls and before of a saved session, the last −1 if the beginning of its text is not
    known; None if their types or lengths do not fit together."""
    if not isinstance(own, dict) or set(own) != {"ids", "drawn", "calls", "before"} or talk.rows != 1:
        return None
    ids, drawn, calls, before = (own[name] for name in ("ids", "drawn", "calls", "before"))
    if not all(
        isinstance(field, list) and all(type(x) is int for x in field) for field in (ids, drawn, calls)
    ):
        return None
    vocab, prefix = tokenizer.vocab_size, tokenizer.specials.prefix
    if not all(0 <= id < vocab for id in ids) or len(drawn) != len(ids) or set(drawn) - {0, 1}:
        return None
    waiting, more = talk.pending[0], talk.drawn[0] - sum(drawn)
    if more < 0 or (more > 0 and before != -1) or min(calls, default=1) < 1 or ids[sum(calls) :] != waiting:
        return None
    whole = before == len(prefix) or (before == 0 and tokenizer.specials.reset is None)
    if type(before) is not int or not (whole or before in (-1, 0)):  # 0: in files of older versions
        return None
    begins = tuple(ids[:before]) == prefix[:before] if whole else bool(waiting)
    if not begins or not (waiting or (whole and not ids)):
        return None
    return ids, [drawn == 1 for drawn in drawn], calls, before if whole else -1
