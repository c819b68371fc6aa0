"""Text from tokens as they arrive: whole characters that cannot begin a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """One row's text. What `push` and `flush` return, joined, is the text of the bytes pushed (what is not
    UTF-8 becomes U+FFFD) up to the first stop string; `stopped` once there was one.

    Of several stop strings the one that is complete first counts, so how the text is cut into tokens does
    not matter.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open, self._past = "", 0

    def push(self, data: bytes, *, stops: bool = True) -> str:
        """Read some bytes; the text that is now certain, perhaps none. stops: False where a stop string that ends in
        them is text as any other."""
        return self._read(data, stops, final=False)

    def flush(self, *, stops: bool = True) -> str:
        """The rest; half a character becomes U+FFFD, which may complete a stop string. Nothing after it."""
        return "" if self.stopped else self._read(b"", stops, final=True)

    def _read(self, data: bytes, stops: bool, *, final: bool) -> str:
        self._open += self._decoder.decode(data, final=final)
        if not stops:
            self._past = len(self._open)
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self._release(min(ends)[1])
        return self._release(len(self._open) - (0 if final else self._possible_stop()))

    def _find(self, stop: str) -> int:
        """The place of the first of these that ends after what is past; −1 without one."""
        return self._open.find(stop, max(0, self._past - len(stop) + 1))

    def _release(self, length: int) -> str:
        text, self._open, self._past = self._open[:length], self._open[length:], max(0, self._past - length)
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the text kept back that begins a stop string."""
        longest = min(len(self._open), max(map(len, self._stop), default=1) - 1)
        ends = (self._open[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)
