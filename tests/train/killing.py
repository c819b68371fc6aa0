"""Deaths at a chosen point of a program, however fast the machine is: after so many calls of functions."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def dies_in(owner: type, name: str, turn: int, calls: int) -> None:
    """Let this process be killed in the `turn`-th call of a method, after so many calls of functions inside, or at its
    end where there are fewer."""
    method: Callable[..., Any] = getattr(owner, name)
    turns, left = turn, calls

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            die()

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal turns
        turns -= 1
        if turns:
            return method(*args, **kwargs)
        sys.setprofile(count)
        method(*args, **kwargs)
        return die()

    setattr(owner, name, called)


def calls_in(work: Callable[[], object]) -> int:
    """Calls and returns of functions, while something is done."""
    found = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal found
        found += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found
