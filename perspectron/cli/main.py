"""`perspectron COMMAND`: parse, run, and turn a user's mistake into one line and exit code 2."""

import contextlib
import functools
import io
import itertools
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import tyro

import perspectron
from perspectron.cli import harness
from perspectron.cli.ablate import Ablate
from perspectron.cli.claims import Claims
from perspectron.cli.compare import Compare
from perspectron.cli.evaluate import Eval
from perspectron.cli.generate import Generate
from perspectron.cli.inspect import Inspect
from perspectron.cli.list import List
from perspectron.cli.plan import Plan
from perspectron.cli.prune_attention import PruneAttention
from perspectron.cli.quantize import Quantize
from perspectron.cli.quickstart import Quickstart
from perspectron.cli.routes import ShowRoutes
from perspectron.cli.synthesize import Synthesize
from perspectron.cli.tokenize import Tokenize
from perspectron.cli.trace import TraceRoutes
from perspectron.cli.train import Train, from_toml
from perspectron.compare.run import DIVERGED
from perspectron.errors import ConfigError, NonFiniteError, PerspectronError


class Command(Protocol):
    """Options parsed; calling it does the work and gives the exit code."""

    def __call__(self) -> int: ...


COMMANDS: dict[str, Any] = {
    "quickstart": Quickstart,
    "train": Train,
    "generate": Generate,
    "eval": Eval,
    "inspect": Inspect,
    "list": List,
    "plan": Plan,
    "prune-attention": PruneAttention,
    "routes": ShowRoutes,
    "quantize": Quantize,
    "synthesize": Synthesize,
    "tokenize": Tokenize,
    "ablate": Ablate,
    "compare": Compare,
    "trace": TraceRoutes,
    "claims": Claims,
}


def console() -> int:
    """The program. Numbers too small for full precision count as zero: products of many gates meet them, and
    a processor handles each a hundred times slower. Worker threads take this over when they start."""
    torch.set_flush_denormal(True)
    warnings.showwarning = _warn
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a user's error, 3 when numbers ran away, 128 + n when signal n
    stopped it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(perspectron.__version__)
        return 0
    try:
        return _parse(arguments)()
    except PerspectronError as error:
        print(f"perspectron: error: {' '.join(str(error).split())}", file=sys.stderr)
        return DIVERGED if isinstance(error, NonFiniteError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = io.StringIO()  # whoever read our output has gone; nothing more to flush to
        return 141


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"perspectron: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _parse(arguments: list[str]) -> Command:
    known = (*COMMANDS, harness.COMMAND)
    if not arguments or arguments[0] not in (*known, "-h", "--help"):
        given = repr(arguments[0]) if arguments else "nothing"
        raise ConfigError(f"command = {given}, must be one of {', '.join(known)} (see perspectron --help)")
    if arguments[0] == harness.COMMAND:
        return functools.partial(harness.run, arguments[1:])
    config = [value for flag, value in itertools.pairwise(arguments) if flag == "--config"]
    config += [flag.removeprefix("--config=") for flag in arguments if flag.startswith("--config=")]
    default: Any = from_toml(config[-1]) if arguments[0] == "train" and config else None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if arguments[0] in COMMANDS:
                options: dict[str, Any] = {} if default is None else {"default": default}
                command: Command = tyro.cli(
                    COMMANDS[arguments[0]],
                    args=arguments[1:],
                    prog=f"perspectron {arguments[0]}",
                    config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                    **options,
                )
                return command
            _overview()
            raise SystemExit(0)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(f"{_one_line(said.getvalue())} (see perspectron {arguments[0]} --help)") from None


def _overview() -> None:
    print(f"usage: perspectron COMMAND [OPTIONS]\n\n{perspectron.__doc__}\n\ncommands:")
    for name, command in COMMANDS.items():
        print(f"  {name:<16} {str(command.__doc__).splitlines()[0]}")
    print(f"  {harness.COMMAND:<16} {harness.ABOUT}")
    print("\nExample: perspectron quickstart\nEach command explains itself: perspectron COMMAND --help")


def _one_line(box: str) -> str:
    """The message inside the parser's box, up to its rule."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│ ")
        if set(text) == {"─"}:
            break
        if text[:1] not in ("╭", "╰"):
            words.append(text)
    return " ".join(" ".join(words).split())
