"""States that sessions can go back to, within one memory bound for all sessions of a process.

What counts is the memory that they hold (`decode.kept`): memory that several marks share counts once, memory that a
store keeps counts there, and of a session's caches only what the session itself does not hold any more counts here.
"""

import itertools
import threading
from weakref import WeakSet, WeakValueDictionary

from perspectron.decode.kept import LIVE, Account, Hold
from perspectron.model.state import LMState

MARKED = 256 << 20
"""Maximum bytes of the marks of all sessions of a process."""
_LOCK, _CLOCK = threading.RLock(), itertools.count(1)
_ACCOUNT = Account(2)


class _Mark:
    """A saved state, shared by all forks that passed it; None once released. fixed: never released while a session has
    it."""

    def __init__(self, state: LMState, *, fixed: bool) -> None:
        self.state: LMState | None = state
        self.fixed, self._hold = fixed, Hold(_ACCOUNT, state)

    def let_go(self) -> None:
        with _LOCK:
            self._hold.let_go()
            self.state = None


def held() -> int:
    """Bytes of all marks in the process."""
    return _ACCOUNT.bytes


def settle() -> None:
    """Release marks until all are within the bound: they may now be charged with memory that others released."""
    with _LOCK:
        for text in sorted(_texts, key=lambda text: text.used):
            if _let_go(text):
                return


class _Text:
    """A text and all its forks. used: when one of them was used last, on _CLOCK. marks: those of all, oldest first."""

    def __init__(self) -> None:
        self.used, self.marks = 0, WeakValueDictionary[int, _Mark]()


_texts = WeakSet[_Text]()


class Marks:
    """The marks of one session, by the number of calls before them. All but fixed ones may be released at any time.

    If there are more than MARKED bytes, those of the texts used least recently go first, oldest first. If no other text
    has any, every second mark of this session goes, so that one is always near, and then those of its forks.
    """

    def __init__(self, text: _Text | None = None) -> None:
        self._text = _Text() if text is None else text
        self._kept = dict[int, _Mark]()
        self._here: Hold | None = None
        """Hold on the latest state, from which the session goes on."""
        with _LOCK:
            _texts.add(self._text)

    def put(self, calls: int, state: LMState, *, fixed: bool = False) -> None:
        """Mark the state after `calls` calls, which nobody may change."""
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

    def at(self, calls: int) -> LMState | None:
        """The mark after so many calls; None where there is none."""
        with _LOCK:
            mark = self._kept.get(calls)
            return None if mark is None else mark.state

    def cut(self, calls: int) -> "Marks":
        """The marks after at most `calls` calls, for a fork."""
        own = Marks(self._text)
        with _LOCK:
            alive = self._alive()
            own._kept = {made: mark for made, mark in self._kept.items() if made <= calls and made in alive}
        return own

    def learn(self, other: "Marks") -> None:
        """Add the marks of a fork that has read the same text."""
        with _LOCK:
            alive = {made: mark for made, mark in self._kept.items() if mark.state is not None}
            self._kept = {**other._kept, **alive}

    def _alive(self) -> dict[int, LMState]:
        return {made: mark.state for made, mark in list(self._kept.items()) if mark.state is not None}

    def _shrink(self) -> None:
        """Release marks until all of them are within the bound, but never the last one of this session."""
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
    """Release a text's marks, oldest first, except `but`: True if all marks are then within the bound."""
    for mark in list(text.marks.values()):
        if held() <= MARKED:
            break
        if not mark.fixed and mark is not but:
            mark.let_go()
    return held() <= MARKED
