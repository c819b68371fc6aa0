"""Scratch memory of the kernels starts poisoned, and an instruction set that is missing skips its test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from perspectron import native
from tests.native.isa import forced_isa, poisoned


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    with ExitStack() as stack:
        if native.available():
            stack.enter_context(poisoned())
        yield


@pytest.fixture
def use_isa() -> Iterator[Callable[[str], None]]:
    """use_isa(name): until the test ends."""
    with ExitStack() as stack:

        def use(name: str) -> None:
            try:
                stack.enter_context(forced_isa(name))
            except ValueError as error:
                pytest.skip(str(error))

        yield use
