"""`perspectron COMMAND`: parse, run, and turn a user's mistake into one line and exit code 2.

The module of a command is imported when it is asked for: torch takes ten times as long to import as all else here.
"""

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import perspectron
from perspectron.errors import ConfigError, PerspectronError

COMMANDS = {
    "quickstart": (
        "quickstart:Quickstart",
        "Train a small Perspective model and its transformer twin, compare them, generate, stop and go on.",
    ),
    "train": ("train:Train", "Train a model on your text, or go on with a run that was stopped."),
    "generate": (
        "generate:Generate",
        "Continue one prompt or several, and conversations from where they stopped.",
    ),
    "eval": (
        "evaluate:Eval",
        "Measure a run: held-out loss in bits per byte beside gzip and xz, or another suite.",
    ),
    "inspect": (
        "inspect:Inspect",
        "Parameters, FLOPs per token and state bytes of a preset or a run, counted from the built model.",
    ),
    "list": (
        "list:List",
        "The mixers, designs and presets there are, a line each, and the documents they come from.",
    ),
    "plan": (
        "plan:Plan",
        "What a model needs to run compressed, what of it streams from disk, and how fast it decodes.",
    ),
    "prune-attention": (
        "prune_attention:PruneAttention",
        "Drop attention and its cache where the route gate leans on it least.",
    ),
    "routes": (
        "routes:ShowRoutes",
        "Which experts a text takes, drawn on the torus: their load, and hops between tokens.",
    ),
    "quantize": (
        "quantize:Quantize",
        "Pack a trained model into few bits: a folder that `generate`, `eval` and `inspect` take like a run.",
    ),
    "synthesize": (
        "synthesize:Synthesize",
        "Write an artifact of random weights, to measure in full size what a model costs to run.",
    ),
    "tokenize": (
        "tokenize:Tokenize",
        "Train a tokenizer on a corpus and encode it, once for many runs; interrupted, it goes on.",
    ),
    "ablate": (
        "ablate:Ablate",
        "Train the design of a run again with parts removed, at the same parameters, text and learning rate, "
        "and report.",
    ),
    "compare": (
        "compare:Compare",
        "Train designs at equal parameters and tokens on your text, measure what each claims, and write a report.",
    ),
    "trace": (
        "trace:TraceRoutes",
        "Record the experts that a text takes, and count what caches of any size would read for it.",
    ),
    "lm-eval": (
        "harness:run",
        "Tasks of lm-evaluation-harness, with a run as the model: --model perspectron.",
    ),
}
"""For each command, where in `perspectron.cli` it stands and what it does. A class is parsed from the arguments, and
its instance called for the exit code; a function takes the arguments as they are."""


def console() -> int:
    """The program, as the shell calls it."""
    warnings.showwarning = _warn
    return main(prepare=_flush_denormals)


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], object] = lambda: None) -> int:
    """Run one command and return the exit code: 0, 2 for a user's error, 3 when numbers ran away, 128 + n when signal n
    stopped it. `prepare` is called when the command is imported and parsed, before it runs."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments == ["--version"]:
            print(perspectron.__version__)
            return 0
        if arguments in (["-h"], ["--help"]):
            _overview()
            return 0
        command = _parse(arguments)
        prepare()
        return command()
    except PerspectronError as error:
        print(f"perspectron: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = io.StringIO()  # whoever read our output has gone; nothing more to flush to
        return 141


def _flush_denormals() -> None:
    """Have numbers too small for full precision count as zero: products of many gates meet them, and a processor
    handles each a hundred times slower. Worker threads take this over when they start."""
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(True)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"perspectron: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _parse(arguments: list[str]) -> Callable[[], int]:
    """The command that the arguments ask for, ready to be called."""
    if not arguments or arguments[0] not in COMMANDS:
        asked = repr(arguments[0]) if arguments else "nothing"
        raise ConfigError(f"command = {asked}, must be one of {', '.join(COMMANDS)} (see perspectron --help)")
    name, *rest = arguments
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: Any = getattr(import_module(f"perspectron.cli.{module}"), attribute)
    if not isinstance(command, type):
        return functools.partial(command, rest)
    import tyro

    default: Any = None
    if name == "train":
        from perspectron.cli.train import defaults

        default = defaults(rest)
    options = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed: Callable[[], int] = tyro.cli(
                command,
                args=rest,
                prog=f"perspectron {name}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                **options,
            )
            return parsed
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(f"{_one_line(said.getvalue())} (see perspectron {name} --help)") from None


def _overview() -> None:
    print(f"usage: perspectron COMMAND [OPTIONS]\n\n{perspectron.__doc__}\n\ncommands:")
    for name, (_, about) in COMMANDS.items():
        print(f"  {name:<16} {about}")
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
