"""What a run does before it loads anything that takes seconds: say what it does, and end with what started it."""

import os
import signal
import threading
import time
from contextlib import suppress


def end_with(parent: int) -> None:
    """End this process, which leads its group, and what it has started, as soon as its parent has ended: before this
    was called, too."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def say(line: str) -> None:
    """Print a line; a run whose reader has gone goes on without."""
    with suppress(OSError):
        print(line, flush=True)
