"""States that sessions can go back to, those of all sessions of a process within one bound.

What counts is the memory that they hold (`decode.kept`): what several marks see counts once, what a store keeps too
counts there, and of a session's caches only what the session itself does not hold any more.
"""

import itertools
import threading
from weakref import WeakSet, WeakValueDictionary

from perspectron.decode.kept import LIVE, Account, Hold
from perspectron.model.state import LMState

MARKED = 256 << 20
"""Bytes of the marks of all sessions of a process."""
_LOCK, _CLOCK = threading.RLock(), itertools.count(1)
_ACCOUNT = Account(2)


class _Mark:
    """A state, shared by all forks that stood there; None once it was let go. fixed: it stays while a session is
    there."""

    def __init__(self, state: LMState, *, fixed: bool) -> None:
        self.state: LMState | None = state
        self.fixed, self._hold = fixed, Hold(_ACCOUNT, state)

    def let_go(self) -> None:
        with _LOCK:
            self._hold.let_go()
            self.state = None


def held() -> int:
    """Bytes of all marks that there are."""
    return _ACCOUNT.bytes


def settle() -> None:
    """Let marks go until all of them are within the bound: memory that others held too may be theirs alone now."""
    with _LOCK:
        for text in sorted(_texts, key=lambda text: text.used):
            if _let_go(text):
                return


class _Text:
    """A text and all its forks. used: when one of them last was. marks: of all of them, the oldest first."""

    def __init__(self) -> None:
        self.used, self.marks = 0, WeakValueDictionary[int, _Mark]()


_texts = WeakSet[_Text]()


class Marks:
    """The marks of one session, by the calls after which they stand. All but fixed ones may be let go at any time.

    Where there are more than MARKED bytes of them, those of the text used least recently go first, the oldest first.
    Where no other text has any, every second one of this session goes, so that none is far, and then those of its
    forks.
    """

    def __init__(self, text: _Text | None = None) -> None:
        self._text = _Text() if text is None else text
        self._kept = dict[int, _Mark]()
        self._here: Hold | None = None
        """Of the latest state, which the session goes on from."""
        with _LOCK:
            _texts.add(self._text)

    def put(self, calls: int, state: LMState, *, fixed: bool = False) -> None:
        """Keep a state, which nobody else changes."""
        with _LOCK:
            now = self._text.used = next(_CLOCK)
            self._here = Hold(LIVE, state)
            self._text.marks[now] = self._kept[calls] = _Mark(state, fixed=fixed)
            if held() > MARKED:
                self._shrink()

    def first(self) -> int:
        """Calls before the earliest mark; 0 where there is none."""
        return min(self._alive(), default=0)

    def nearest(self, calls: int) -> tuple[int, LMState | None]:
        """The latest mark after at most so many calls: (its calls, its state); (0, None) where there is none."""
        with _LOCK:
            self._text.used, alive = next(_CLOCK), self._alive()
        known = max((made for made in alive if made <= calls), default=0)
        return known, alive.get(known)

    def cut(self, calls: int) -> "Marks":
        """Those after at most so many calls, for a fork."""
        own = Marks(self._text)
        with _LOCK:
            alive = self._alive()
            own._kept = {made: mark for made, mark in self._kept.items() if made <= calls and made in alive}
        return own

    def learn(self, other: "Marks") -> None:
        """See those of a fork that came by here too."""
        with _LOCK:
            self._kept = {**other._kept, **self._kept}

    def _alive(self) -> dict[int, LMState]:
        return {made: mark.state for made, mark in list(self._kept.items()) if mark.state is not None}

    def _shrink(self) -> None:
        """Let marks go until all of them are within the bound, but not the last of this session."""
        for text in sorted(_texts, key=lambda text: text.used):
            if text is not self._text and _let_go(text):
                return
        while held() > MARKED:
            self._kept = {made: mark for made, mark in self._kept.items() if mark.state is not None}
            few = [made for made in sorted(self._kept) if not self._kept[made].fixed][-2::-2]
            for made in few:
                self._kept.pop(made).let_go()
            if not few:
                _let_go(self._text, self._kept[max(self._kept)])
                return


def _let_go(text: _Text, but: _Mark | None = None) -> bool:
    """Let the oldest marks of a text go: True as soon as that is enough."""
    for mark in list(text.marks.values()):
        if held() <= MARKED:
            break
        if not mark.fixed and mark is not but:
            mark.let_go()
    return held() <= MARKED
