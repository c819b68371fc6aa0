"""Hooks on modules that last for a block of code."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end of the block, also after an error."""
    kept = list(hooks)
    try:
        yield
    finally:
        for hook in kept:
            hook.remove()
