"""What happened to a text: when its tokens were read and drawn, from which files it went on, and digests of it."""

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
"""Tokens of the text after it, seconds since 1970, what it was, and the digest of the text it came from: "text" for
tokens that were read or drawn, which came from nowhere; one of PARENTS for the others."""
PARENTS = ("from", "rebased", "merged")
"""A file that was loaded; a text that was replayed on another prefix or model; the two of a merge."""
MOST_EVENTS = 1 << 16


def noted(
    events: list[Event], tokens: int, how: str = "text", parent: str = "", when: int | None = None
) -> None:
    """Add an event of now. Tokens of one second are one event."""
    when = int(time.time()) if when is None else when
    if events and how == "text" == events[-1][2] and events[-1][1] == when:
        events.pop()
    events.append((tokens, when, how, parent))
    if len(events) > MOST_EVENTS:
        del events[: -MOST_EVENTS // 2]


def cut(events: Sequence[Event], tokens: int) -> list[Event]:
    """Those of the first tokens of a text. What began behind them is left out, but for where it came from."""
    kept, at = list[Event](), 0
    for end, when, how, parent in events:
        if how != "text" or at < tokens:
            kept.append((min(end, tokens), when, how, parent))
        at = end
    return kept


def checked(events: Any, tokens: int, path: Path | str) -> list[Event]:
    """The events of a file. StateError: they are none of a text of so many tokens."""
    found, least = list[Event](), 0
    for event in events if isinstance(events, list) and len(events) <= MOST_EVENTS else [None]:
        if not isinstance(event, list) or [type(field) for field in event] != [int, int, str, str]:
            raise StateError(f"{path}: log is not one of a text")
        end, when, how, parent = event
        if not (least <= end <= tokens and 0 <= when < 1 << 40 and how in ("text", *PARENTS)):
            raise StateError(f"{path}: log is not one of a text of {tokens} tokens")
        found.append((end, when, how, parent[:64]))
        least = end
    return found


def digest(ids: Sequence[int], drawn: Sequence[int]) -> str:
    """SHA-256 of a text, its ids and which of them were drawn: with the model, that is what a state depends on."""
    return _taken(ids, drawn).hexdigest()


def _taken(ids: Sequence[int], drawn: Sequence[int]) -> Any:
    return hashlib.sha256((2 * np.asarray(ids, "<i8") + np.asarray(drawn, "<i8")).tobytes())


@dataclass(frozen=True)
class Entry:
    """A step of a text: tokens from `start` to `stop`, which were "read" or "drawn"; or where it came from, at the
    token `stop`. when: seconds since 1970, None where the file does not say. digest: of the text up to `stop`. parent:
    of the text it came from."""

    start: int
    stop: int
    what: str
    when: int | None
    digest: str
    parent: str = ""


@dataclass(frozen=True)
class History:
    """What a file of a session says of itself. model: its digest. whole: the text is known from its beginning. ids: of
    the text."""

    model: str
    digest: str
    tokens: int
    drawn: int
    whole: bool
    entries: tuple[Entry, ...]
    ids: tuple[int, ...]


def entries(ids: Sequence[int], drawn: Sequence[int], before: int, events: Sequence[Event]) -> list[Entry]:
    """The steps of a text in order. before: ids at its start that are none of the text's."""
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
    """The history in a file of a session, whose tensors are not read. StateError: it is damaged, or has no text."""
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
    """The result of what pauses, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
