"""The library in one instruction set after another, and with scratch memory that is filled before each use."""

from collections.abc import Iterator
from contextlib import contextmanager

from perspectron import native
from perspectron.native.library import load


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Use this instruction set, in all threads; ValueError where the machine has none such."""
    before = native.isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)


@contextmanager
def poisoned() -> Iterator[None]:
    library = load().library
    library.pspx_poison(1)
    try:
        yield
    finally:
        library.pspx_poison(0)
