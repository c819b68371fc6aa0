"""The library in one instruction set after another, and with scratch memory that is filled before each use."""

from collections.abc import Iterator
from contextlib import contextmanager

from perspectron import native
from perspectron.native.library import load


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Use this instruction set, in all threads; ValueError where the machine has none such."""
    library, before = load().library, native.isa()
    if not library.pspx_set_isa(name.encode()):
        raise ValueError(f"isa = {name!r}, this machine has at most {before!r}")
    try:
        yield
    finally:
        library.pspx_set_isa(before.encode())


@contextmanager
def poisoned() -> Iterator[None]:
    library = load().library
    library.pspx_poison(1)
    try:
        yield
    finally:
        library.pspx_poison(0)
