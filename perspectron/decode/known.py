"""Texts that were read, to tell where a new one parts from them."""

from collections import OrderedDict

from perspectron.decode.places import Path

MOST_BYTES = 8 << 20
MOST_CELLS = 64
_WIDTH, _OVERHEAD = 8, 200


class Known:
    """The tokens that followed each cell of the texts read so far: at most MOST_CELLS continuations of a cell and, by
    default, MOST_BYTES in all; those met least recently go first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._used = most_bytes, 0  # bytes, about
        self._cells = OrderedDict[bytes, OrderedDict[bytes, None]]()

    def add(self, path: Path) -> int:
        """Add a text to those that were read: the number of tokens after which others part from it; 0 if none do. Texts
        that are its own beginning do not count."""
        shared, forks, parted = 0, False, False
        for number, cell in enumerate(path.cells):
            start = number * path.chunk
            part = b"".join(id.to_bytes(_WIDTH, "little") for id in path.ids[start : start + path.chunk])
            if not part:
                break
            known = self._cells.get(cell)
            if not parted:
                ways = [(_alike(part, other), len(other)) for other in known or ()]
                alike = max((alike for alike, _ in ways), default=0)
                forks = any(length > alike * _WIDTH for common, length in ways if common == alike)
                shared += alike
                parted = alike * _WIDTH < len(part)
            self._keep(cell, part)
        return shared if forks else 0

    def _keep(self, cell: bytes, part: bytes) -> None:
        known = self._cells.setdefault(cell, OrderedDict())
        self._cells.move_to_end(cell)
        for other in [other for other in known if part.startswith(other)]:
            self._drop(known, other)
        if not any(other.startswith(part) for other in known):
            known[part] = None
            self._used += len(part) + _OVERHEAD
        if len(known) > MOST_CELLS:
            self._drop(known, next(iter(known)))
        while self._used > self._most:
            oldest = next(iter(self._cells))
            for other in list(self._cells[oldest]):
                self._drop(self._cells[oldest], other)
            del self._cells[oldest]

    def _drop(self, known: OrderedDict[bytes, None], part: bytes) -> None:
        del known[part]
        self._used -= len(part) + _OVERHEAD


def _alike(some: bytes, others: bytes) -> int:
    """Number of ids at the start that are the same in both."""
    low, high = 0, min(len(some), len(others)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if some[: middle * _WIDTH] == others[: middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
