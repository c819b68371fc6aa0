"""Lists that grow and fork: what a text and its forks have in common is there once."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Log(Generic[T]):
    """A list that only grows, and whose copies share what it has: a thousand forks of a long text have it once."""

    def __init__(self, items: list[T]) -> None:
        self._shared: list[list[T]] = []
        self._own = items

    def __len__(self) -> int:
        return len(self._own) + sum(map(len, self._shared))

    def extend(self, items: Sequence[T]) -> None:
        self._own.extend(items)

    def __getitem__(self, where: slice) -> list[T]:
        """The items from `start` on, up to `stop`."""
        start, stop, _ = where.indices(len(self))
        found, at = list[T](), 0
        for part in (*self._shared, self._own):
            found += part[max(0, start - at) : max(0, stop - at)]
            at += len(part)
        return found

    def cut(self, count: int) -> "Log[T]":
        """A copy of the first `count`."""
        if self._own:
            self._shared, self._own = [*self._shared, self._own], []
        copy, left = Log[T]([]), count
        for part in self._shared:
            if left >= len(part):
                copy._shared.append(part)
            else:
                copy._own = part[:left]
            left -= min(left, len(part))
            if left == 0:
                break
        return copy
