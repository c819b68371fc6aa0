"""Leases: the right to write to a name of a store, for a while.

Whoever wants one puts an object that names its owner and the time at which it ends, and lists those of the name: if
there is another that has not ended, it deletes its own. So there are never two, whether the store has locks or not, as
long as lists show what was put and clocks differ by less than SKEW. Two who come at once may both step back; each tries
again after a random pause. A lease is renewed until it is let go; that of a server that was killed ends by itself.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from perspectron.util.errors import PerspectronError, StorageError
from perspectron.util.objects import Objects

SECONDS = 10.0
AT_ONCE = 16  # renewals at the same time
SKEW = 2.0  # seconds by which the clocks of machines may differ


class Busy(PerspectronError):
    """Somebody else writes to this name."""


class Lease:
    """A lease of a name, with which the names of its objects in the store begin."""

    def __init__(self, objects: Objects, name: str, seconds: float) -> None:
        self._objects, self.name, self._seconds = objects, name, seconds
        self._owner, self._ends = os.urandom(8).hex(), 0.0
        self._lock = threading.Lock()
        self._gone = False

    @property
    def ends(self) -> float:
        """The time at which it ends, in seconds since 1970; 0 before it is first taken."""
        return self._ends

    @property
    def over(self) -> bool:
        """True after it was let go, or has ended."""
        return self._gone or 0 < self._ends < time.time()

    def taken(self) -> bool:
        """Try to take it: True if it is ours now."""
        if self._others():  # who only waits disturbs nobody
            return False
        try:
            self.renew()
            if self._others():
                self.let_go()
                return False
        except BaseException:
            with contextlib.suppress(StorageError):
                self.let_go()
            raise
        return True

    def renew(self) -> None:
        """Extend it: put an object with a later end, then delete the one before."""
        with self._lock:
            if self.over:  # it may be somebody else's by now
                return
            before, ends = self._ends, time.time() + self._seconds
            self._objects.put(self._at(ends), b"", durable=False)
            if self.over:  # while it was put
                self._gone = True
                self._objects.delete(self._at(ends))
                return
            self._ends = ends
            if before:
                self._objects.delete(self._at(before))

    def check(self) -> None:
        """Make sure that it has not ended: until then nobody else has one. Busy: it has, as when the server was stopped
        for a while, and may be somebody else's now."""
        if self.over:
            raise Busy(f"{self.name.rpartition('/')[2]}: another server may have written to it meanwhile")

    def let_go(self) -> None:
        """Give it up, by deleting its object; twice is fine."""
        with self._lock:
            self._gone = True
            if self._ends:
                self._objects.delete(self._at(self._ends))

    def _others(self) -> bool:
        """True if somebody else has one that has not ended; those that have ended are deleted."""
        now, found = time.time(), False
        folder, _, name = self.name.rpartition("/")
        for other in self._objects.listed(folder):
            whose, _, rest = other.partition("~")
            owner, _, ends = rest.partition("~")
            if whose != name or owner == self._owner or not ends.isdecimal():
                continue
            if int(ends) / 1e3 + SKEW > now:
                found = True
            else:
                self._objects.delete(f"{folder}/{other}")
        return found

    def _at(self, ends: float) -> str:
        return f"{self.name}~{self._owner}~{int(ends * 1e3)}"


class Leases:
    """The leases of a process, which are renewed until they are let go. seconds: how long one lasts."""

    def __init__(self, objects: Objects, seconds: float = SECONDS) -> None:
        self._objects, self.seconds = objects, seconds
        self._held, self._changed = set[Lease](), threading.Condition()
        self._thread: threading.Thread | None = None

    def tried(self, name: str) -> Lease | None:
        """Try to take a lease of a name; None while somebody else has one. StorageError as `Objects`."""
        lease = Lease(self._objects, f"leases/{name}", self.seconds)
        if not lease.taken():
            return None
        with self._changed:
            self._held.add(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._renewing, name="leases", daemon=True)
                self._thread.start()
        return lease

    def pauses(self, name: str) -> Iterator[float]:
        """Seconds to wait between tries, until a lease that is not renewed has ended. Busy: it is renewed."""
        until, pause = time.monotonic() + 1.5 * self.seconds + 2 * SKEW, 0.01
        while time.monotonic() < until:
            yield pause * random.uniform(0.5, 1.0)
            pause = min(2 * pause, 0.25)
        raise Busy(f"{name.rpartition('/')[2]}: another request writes to it; ask again when that is done")

    def let_go(self, lease: Lease) -> None:
        """Let a lease go. Where the store cannot be reached it ends by itself."""
        with self._changed:
            self._held.discard(lease)
        with contextlib.suppress(StorageError):
            lease.let_go()

    def _renewed(self, lease: Lease) -> None:
        if time.time() < lease.ends - self.seconds / 2:  # over half of it is left
            return
        with contextlib.suppress(StorageError):
            lease.renew()

    def _renewing(self) -> None:
        pool = ThreadPoolExecutor(AT_ONCE, "leases")  # a request that hangs holds up no other
        while True:
            time.sleep(self.seconds / 4)
            with self._changed:
                self._held = {lease for lease in self._held if not lease.over}
                held = sorted(self._held, key=lambda lease: lease.ends)
            try:
                wait([pool.submit(self._renewed, lease) for lease in held], timeout=self.seconds / 4)
            except RuntimeError:  # the program ends
                return
