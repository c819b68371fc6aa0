"""Keeping to a time: how many updates a run can still make before it ends."""

import time
from collections import deque
from collections.abc import Callable

NEAR = 0.02  # share of the updates that are left: a smaller difference changes nothing
PAUSE = 0.01  # share of the whole time that passes between two changes
WINDOW = 0.1  # share of the whole time over which the speed is measured
LEAST = 8  # updates in that window


class Pace:
    """Finds the number of updates with which a run ends at `ends`, a time of `clock`, anew after every update.

    The speed of a shared machine varies, so it is measured over the last tenth of the time. For each measurement to
    come, with its checkpoint, as much time is set aside as the last one took, and `closing` seconds for what follows
    the last."""

    def __init__(
        self, ends: float, *, closing: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ends, self.closing, self.clock = ends, closing, clock
        self.begun = self.turned = self._last = clock()
        self._updates: deque[tuple[float, float]] = deque()  # when each ended, and the seconds it took
        self._pause = 0.0

    def paused(self) -> None:
        """Note that a measurement and what belongs to it ended now."""
        now = self.clock()
        self._pause, self._last = now - self._last, now

    def updated(self) -> None:
        """Note that an update ended now."""
        now = self.clock()
        self._updates.append((now, now - self._last))
        self._last = now
        reach = WINDOW * (self.ends - self.begun)
        while len(self._updates) > LEAST and self._updates[0][0] < now - reach:
            self._updates.popleft()

    def steps(self, step: int, steps: int, pauses: int) -> int:
        """The number of updates that the run should have; `steps` if that is near enough. step: updates that are done.
        pauses: measurements to come, the last one included."""
        now, whole = self.clock(), self.ends - self.begun
        left = self.ends - self.closing - now - pauses * self._pause
        seconds = sum(took for _, took in self._updates) / max(1, len(self._updates))
        fits = step + max(1, int(left / max(seconds, 1e-9)))
        late = left <= 0 and steps > step + 1
        if late or (abs(fits - steps) > NEAR * (steps - step) and now - self.turned >= PAUSE * whole):
            self.turned = now
            return fits
        return steps
