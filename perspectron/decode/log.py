"""Lists that grow and fork: what a text and its forks have in common is there once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Log(Sequence[T]):
    """A list that only grows, and whose copies share what it has: a thousand forks of a long text have it once."""

    def __init__(self, items: list[T]) -> None:
        self._shared: list[tuple[list[T], int]] = []
        """Lists shared with the logs that this was cut from, which may have grown since; and its items of each."""
        self._own = items

    def __len__(self) -> int:
        return len(self._own) + sum(count for _, count in self._shared)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Log | list) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __iter__(self) -> Iterator[T]:
        return iter(self[:])

    def extend(self, items: Iterable[T]) -> None:
        self._own.extend(items)

    @overload
    def __getitem__(self, where: int) -> T: ...
    @overload
    def __getitem__(self, where: slice) -> list[T]: ...
    def __getitem__(self, where: int | slice) -> T | list[T]:
        """An item, or the items of a slice as a list."""
        if not isinstance(where, slice):
            at = range(len(self))[where]
            return self[at : at + 1][0]
        start, stop, step = where.indices(len(self))
        if step != 1:
            return self[:][where]
        found, at = list[T](), 0
        for part, count in (*self._shared, (self._own, len(self._own))):
            found += part[max(0, start - at) : max(0, min(stop - at, count))]
            at += count
        return found

    def cut(self, count: int) -> "Log[T]":
        """A copy of the first `count` items."""
        copy, left = Log[T]([]), count
        for part, length in (*self._shared, (self._own, len(self._own))):
            if left > 0 and length > 0:
                copy._shared.append((part, min(length, left)))
            left -= length
        return copy
