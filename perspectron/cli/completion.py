"""`perspectron completion`."""

from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from perspectron.cli.main import ABOUT, GROUPS, about, command_of, within
from perspectron.util.registry import designs


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
        classes = {name: _class(name) for group in GROUPS.values() for name in group if " " not in name}
        for first in (*ABOUT, *designs()):
            if names := within(first):
                kinds: list[Any] = [
                    Annotated[_class(f"{first} {name}"), tyro.conf.subcommand(name)] for name in names
                ]
                padded = [*kinds, Annotated[None, tyro.conf.Suppress]]  # a Union needs two
                classes[first] = make_dataclass(first, [("command", Union[tuple(padded)])])  # noqa: UP007
        try:
            tyro.extras.subcommand_cli_from_dict(
                classes,
                prog="perspectron",
                args=["--tyro-print-completion", self.shell],
                config=(
                    tyro.conf.OmitArgPrefixes,
                    tyro.conf.OmitSubcommandPrefixes,
                    tyro.conf.FlagCreatePairsOff,
                ),
            )
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0


def _class(name: str) -> Any:
    """A command's class; for one that reads its arguments itself, a class without options."""
    command = command_of(name)
    if isinstance(command, type):
        return command
    other = make_dataclass("Other", [])
    other.__doc__ = about(name)
    return other
