"""`perspectron completion`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from perspectron.cli.main import COMMANDS, about, command_of


@dataclass(frozen=True)
class Completion:
    """Print a script for tab completion of commands and options.

    Example: perspectron completion bash > perspectron.bash

    Then, in ~/.bashrc: source perspectron.bash

    For zsh, in a folder of $fpath: perspectron completion zsh > _perspectron
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "tcsh"]]
    """The shell to complete in."""

    def __call__(self) -> int:
        found = {name: command_of(name) for name in COMMANDS}
        classes: dict[str, Callable[..., Any]] = {
            name: made if isinstance(made, type) else _other(name) for name, made in found.items()
        }
        try:
            tyro.extras.subcommand_cli_from_dict(
                classes,
                prog="perspectron",
                args=["--tyro-print-completion", self.shell],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0


def _other(name: str) -> type:
    """A command that reads its arguments itself."""

    @dataclass(frozen=True)
    class Other:
        pass

    Other.__doc__ = about(name)
    return Other
