"""The history of a text: when its tokens were read and drawn, which files it continued, and digests of it."""

import hashlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from perspectron.model.appended import read_metadata
from perspectron.util.errors import StateError
from perspectron.util.files import parse_json
from perspectron.util.tensors import JSON_ROOM

T = TypeVar("T")
Event = tuple[int, int, str, str]
"""(tokens of the text after the event, seconds since 1970, kind, digest of the text it came from). The kind is "text"
for tokens that were read or drawn, which have no such digest, and one of PARENTS for the others."""
PARENTS = ("from", "rebased", "merged")
"""Kinds of origins: a loaded file, a text that was replayed on another prefix or model, each of the two of a merge."""
MOST_SECONDS = 1 << 40
MOST_EVENTS = 1 << 16
"""Maximum number of a text's events. Beyond it, tokens of the same 2, 4, 8 … seconds become one event; the earliest
events go only if that does not suffice, because there are more origins."""


def noted(events: list[Event], tokens: int, how: str = "text", parent: str = "") -> None:
    """Add an event at the present time. Tokens of the same second become one event."""
    events[-1:] = _joined([*events[-1:], (tokens, int(time.time()), how, parent)], 1)
    seconds, most = 1, MOST_EVENTS if len(events) <= MOST_EVENTS else MOST_EVENTS // 2
    while len(events) > most and seconds < MOST_SECONDS:
        seconds *= 2
        events[:] = _joined(events, seconds)
    if len(events) > MOST_EVENTS:
        del events[: -MOST_EVENTS // 2]


def _joined(events: Sequence[Event], seconds: int) -> list[Event]:
    """Events in which those of tokens that follow one another in the same so many seconds are one, the last."""
    found = list[Event]()
    for event in events:
        if found and event[2] == "text" == found[-1][2] and event[1] // seconds == found[-1][1] // seconds:
            found.pop()
        found.append(event)
    return found


def cut(events: Sequence[Event], tokens: int) -> list[Event]:
    """Events of the first `tokens` tokens of a text. Later tokens are left out, but all origins stay."""
    kept, at = list[Event](), 0
    for end, when, how, parent in events:
        if how != "text" or at < tokens:
            kept.append((min(end, tokens), when, how, parent))
        at = end
    return kept


def checked(events: Any, tokens: int, path: Path | str) -> list[Event]:
    """Check the events of a file. StateError: they do not belong to a text of `tokens` tokens."""
    found, least = list[Event](), 0
    for event in events if isinstance(events, list) and len(events) <= MOST_EVENTS else [None]:
        if not isinstance(event, list) or [type(field) for field in event] != [int, int, str, str]:
            raise StateError(f"{path}: log is not one of a text")
        end, when, how, parent = event
        if not (least <= end <= tokens and 0 <= when < MOST_SECONDS and how in ("text", *PARENTS)):
            raise StateError(f"{path}: log is not one of a text of {tokens} tokens")
        found.append((end, when, how, parent[:64]))
        least = end
    return found


def digest(ids: Sequence[int], drawn: Sequence[int]) -> str:
    """SHA-256 of a text, its ids and which of them were drawn: with the model, that is what a state depends on."""
    return hashlib.sha256((2 * np.asarray(ids, "<i8") + np.asarray(drawn, "<i8")).tobytes()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """An entry in a text's log: tokens from `start` to `stop` that were "read" or "drawn", or one of PARENTS at token
    `stop`. when: seconds since 1970, None if the file does not say. digest: digest of the text up to `stop`. parent:
    digest of the text it came from."""

    start: int
    stop: int
    what: str
    when: int | None
    digest: str
    parent: str = ""


@dataclass(frozen=True)
class History:
    """The history in a session's file. model, digest: digests of model and text. tokens, drawn: number of tokens, and
    of drawn ones. whole: True if the text is known from its beginning. ids: the text's."""

    model: str
    digest: str
    tokens: int
    drawn: int
    whole: bool
    entries: tuple[Entry, ...]
    ids: tuple[int, ...]


def entries(ids: Sequence[int], drawn: Sequence[int], before: int, events: Sequence[Event]) -> list[Entry]:
    """The entries of a text's log in order. before: number of ids at the start that do not belong to the text."""
    hashed, at, found = hashlib.sha256(), 0, list[Entry]()
    flags = np.asarray(drawn, "<i8")[before:]
    marked = 2 * np.asarray(ids, "<i8") + np.asarray(drawn, "<i8")
    hashed.update(marked[:before].tobytes())

    def steps(end: int, when: int | None) -> None:
        nonlocal at
        while at < end:
            others = np.flatnonzero(flags[at:end] != flags[at])
            stop = at + int(others[0]) if len(others) else end
            hashed.update(marked[before + at : before + stop].tobytes())
            found.append(Entry(at, stop, "drawn" if flags[at] else "read", when, hashed.hexdigest()))
            at = stop

    for end, when, how, parent in events:
        steps(end, when)
        if how != "text":
            found.append(Entry(end, end, how, when, hashed.hexdigest(), parent))
    steps(len(flags), None)
    return found


def history(path: Path | str) -> History:
    """Read the history in a session's file without its tensors. StateError: damaged, or not one row with a text."""
    path = Path(path)
    header = read_metadata(path)
    try:
        extra: Any = parse_json(header.get("extra", ""), room=JSON_ROOM)
        own = extra.get("session")
        if own is None:
            [pending] = extra["conversation"]["pending"]
            own = {"ids": pending, "drawn": [0] * len(pending), "before": -1}
        ids, drawn, before = own["ids"], [*map(int, own["drawn"])], own["before"]
        good = len(drawn) == len(ids) and set(drawn) <= {0, 1} and type(before) is int
        if not (
            good and -1 <= before <= len(ids) and all(type(id) is int and 0 <= id < 1 << 40 for id in ids)
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StateError(f"{path}: not a conversation of one row, which alone has a log") from None
    begun = max(0, before)
    events = checked(extra.get("log", []), len(ids) - begun, path)
    steps = tuple(entries(ids, drawn, begun, events))
    text = tuple(ids[begun:])
    whole = before >= 0
    return History(header.get("model", ""), digest(ids, drawn), len(text), sum(drawn), whole, steps, text)


def exhausted(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end: its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
