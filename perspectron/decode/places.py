"""The places of a text at which its states may be kept, and their keys."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence


def link(key: bytes, ids: Sequence[int]) -> bytes:
    """The key after these tokens, which follow those of `key`."""
    return hashlib.sha256(key + b"".join(id.to_bytes(8, "little") for id in ids)).digest()


class Path:
    """A text that is read from where `key` stands, in cells of `chunk` tokens. cells: the key before each, and after
    the last whole one. anywhere: it gives the same bits wherever it is cut, but only before the first cell in which a
    document begins (`reset`). exact: number of tokens before which it may be cut anywhere."""

    def __init__(
        self, key: bytes, ids: Sequence[int], chunk: int, *, anywhere: bool = False, reset: int | None = None
    ) -> None:
        self.ids, self.chunk, self.cells = ids, chunk, [key]
        for start in range(0, len(ids) - chunk + 1, chunk):
            self.cells.append(link(self.cells[-1], ids[start : start + chunk]))
        first = next((at for at, id in enumerate(ids) if id == reset and at > 0), None) if anywhere else 0
        self.exact = len(ids) if first is None else first // chunk * chunk

    def place(self, at: int) -> tuple[bytes, int]:
        """The key of the cell in which a place lies, and how many tokens of it stand before the place."""
        return self.cells[at // self.chunk], at % self.chunk

    def key(self, at: int) -> bytes:
        """The key after `at` tokens."""
        cell, length = self.place(at)
        return cell if length == 0 else link(cell, self.ids[at - length : at])

    def places(self, most: int, least: int, *lengths: Mapping[bytes, Iterable[int]]) -> Iterator[int]:
        """Places from which the text may continue, longest first: after more than `least` and at most `most` tokens, at
        the offsets within cells that the tables `lengths` list by the cells' keys."""
        most = min(most, len(self.ids))
        for number in range(most // self.chunk, least // self.chunk - 1, -1):
            cell = self.cells[number]
            known = {length for table in lengths for length in table.get(cell, ())}
            for length in sorted(known, reverse=True):
                at = number * self.chunk + length
                if least < at <= most and self.serves(at):
                    yield at

    def serves(self, at: int) -> bool:
        """True if this text may continue from a state kept after `at` tokens: it is cut there anyway, or may be."""
        return at % self.chunk == 0 or at <= self.exact or at == len(self.ids)
