"""The console on which commands tell people something."""

from typing import Any

from rich.console import Console as RichConsole

from perspectron.cli.progress import silent
from perspectron.util.errors import escaped


class Console(RichConsole):
    """rich's console for texts that may come from a stranger's file: control characters are escaped. Markup, where it
    is on, is only ours."""

    def print(self, *parts: Any, **options: Any) -> None:
        super().print(*(escaped(x, "\n") if isinstance(x, str) else x for x in parts), **options)

    def on_broken_pipe(self) -> None:
        """BrokenPipeError, as other output raises it; rich would end the program with exit code 1."""
        raise BrokenPipeError


def progress() -> Console:
    """A console on standard error that leaves lines as they are, and prints nothing while that is silenced."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, quiet=silent())
