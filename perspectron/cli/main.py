"""`perspectron COMMAND`: parse, run, and turn a user's mistake into one line and exit code 2.

The module of a command is imported when it is asked for: torch takes ten times as long to import as all else here.
"""

import ast
import contextlib
import functools
import io
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import perspectron
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, PerspectronError, escaped

COMMANDS = {
    "quickstart": "cli.quickstart:Quickstart",
    "demo": "designs.adr.demo:Demo",
    "train": "cli.train:Train",
    "generate": "cli.generate:Generate",
    "serve": "cli.serve:Serve",
    "chat": "cli.chat:Chat",
    "verify": "cli.verify:Verify",
    "selftest": "cli.selftest:Selftest",
    "eval": "cli.evaluate:Eval",
    "adapt": "designs.perspective.commands.adapt:Adapt",
    "perspectives": "designs.perspective.commands.views:PerspectivesOf",
    "safety": "designs.perspective.commands.safety:SafetyOf",
    "geometry": "designs.drm.geometry_command:GeometryOf",
    "gate": "designs.perspective.commands.gate:Gate",
    "inspect": "cli.inspect:Inspect",
    "list": "cli.list:List",
    "plan": "cli.plan:Plan",
    "prune-attention": "designs.lens.prune_command:PruneAttention",
    "routes": "designs.perspective.commands.routes:ShowRoutes",
    "quantize": "cli.quantize:Quantize",
    "export": "cli.export:Export",
    "import": "cli.import_:Import",
    "synthesize": "cli.synthesize:Synthesize",
    "tokenize": "cli.tokenize:Tokenize",
    "ablate": "cli.ablate:Ablate",
    "compare": "cli.compare:Compare",
    "search": "cli.search:Search",
    "trace": "designs.perspective.commands.trace:TraceRoutes",
    "lm-eval": "cli.harness:run",
    "completion": "cli.completion:Completion",
}
"""The commands, and where in `perspectron` each is defined. A class is parsed from the arguments, and its
instance called for the exit code; a function takes the arguments as they are."""

MOST = 10**9
"""The largest whole number that an option but a seed may be."""


def console() -> int:
    """The program, as the shell calls it."""
    warnings.showwarning = _warn
    _spin_briefly()
    _open_streams()
    return main(prepare=_flush_denormals)


class OutputError(PerspectronError):
    """Standard output cannot be written: it is closed, or its disk is full."""

    exit_code = 74  # of sysexits.h


class _Raw(io.FileIO):
    """Standard output or error, to which nothing is written any more once that failed; of standard error, where
    nobody is left to tell, in silence."""

    broken = False

    def write(self, data: Any) -> Any:
        data, done = memoryview(data).cast("B"), 0
        if self.broken:
            return len(data)
        try:
            while done < len(data) and (part := super().write(data[done:])) is not None:
                done += part  # on a full disk a part, and an error only after it
            return done or None
        except OSError as error:
            self.broken = True
            if self.fileno() == 2:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"standard output: not written ({error.strerror})") from None


def _open_streams() -> None:
    """Give standard streams that are closed a place of their own, before a file of ours takes it, and escape what the
    encoding of the others lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # of output it is one that cannot be written, so that this is told
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        was, raw = getattr(sys, name), _Raw(number, "wb", closefd=False)
        encoding, lines, at_once = (
            (was.encoding, was.line_buffering, was.write_through) if was else ("utf-8", True, False)
        )
        sized = raw if at_once else io.BufferedWriter(raw)  # PYTHONUNBUFFERED
        text = io.TextIOWrapper(
            sized, encoding, "backslashreplace", line_buffering=lines, write_through=at_once
        )
        setattr(sys, name, text)


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], object] = lambda: None) -> int:
    """Run one command and return the exit code: 0, 2 for a user's error, 3 when numbers ran away, 128 + n when signal n
    stopped it. `prepare` is called when the command is imported and parsed, before it runs."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments), prepare)
        finally:
            sys.stdout.flush()  # while it can still be told that this failed
    except PerspectronError as error:
        print(f"perspectron: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = io.StringIO()  # whoever read our output has gone; nothing more to flush to
        return 141


def _run(arguments: list[str], prepare: Callable[[], object]) -> int:
    """The exit code of what the arguments ask for."""
    if arguments == ["--version"]:
        print(perspectron.__version__)
        return 0
    if arguments in (["-h"], ["--help"]):
        _overview()
        return 0
    if not arguments:
        with contextlib.redirect_stdout(sys.stderr):
            _overview()
        return ConfigError.exit_code
    command = _parse(arguments, time.monotonic())
    prepare()
    return command()


def _spin_briefly() -> None:
    """Have OpenMP's threads wait for work asleep after a fraction of a millisecond, unless the environment says how.

    It reads this when torch is loaded. By default they spin for much longer, and on a core that another program wants
    they are not there when work comes: an update of a small model then took up to 15 times as long."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _flush_denormals() -> None:
    """Have numbers too small for full precision count as zero: products of many gates meet them, and a processor
    handles each a hundred times slower. Worker threads take this over when they start."""
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(True)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"perspectron: warning: {escaped(' '.join(str(message).split()))}", file=sys.stderr)


def _parse(arguments: list[str], began: float = 0.0) -> Callable[[], int]:
    """The command that the arguments ask for, ready to be called. began: when, by the monotonic clock, it was asked."""
    if arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ConfigError(f"command = {arguments[0]!r}, must be one of {known} (see perspectron --help)")
    name, *rest = arguments
    rest = _one_source(rest)
    command = command_of(name)
    if not isinstance(command, type):
        return functools.partial(command, rest)
    import tyro

    tyro._experimental_options["ansi_codes"] = "NO_COLOR" not in os.environ
    default: Any = None
    if name == "train":
        from perspectron.cli.train import defaults

        default = replace(defaults(rest), began=began)
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
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(f"{_one_line(said.getvalue())} (see perspectron {name} --help)") from None
    _require_bounded(parsed)
    return parsed


def _require_bounded(options: Any) -> None:
    """ConfigError for an option that is no finite number, but for a default, or a whole one above its bound."""
    for item in fields(options):
        value = getattr(options, item.name)
        if is_dataclass(value):
            _require_bounded(value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, float) and one != item.default:
                require(math.isfinite(one), item.name, one, "finite")
            elif isinstance(one, int):
                most = 2**63 - 1 if item.name == "seed" else MOST
                require(abs(one) <= most, item.name, one, f"≤ {most:,}")


def _one_source(arguments: list[str]) -> list[str]:
    """The arguments with every --data in one, where there are several: sources with weights."""
    sources, rest, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if word == "--data":
            sources.append(next(words, ""))
        elif word.startswith("--data="):
            sources.append(word.removeprefix("--data="))
        else:
            rest.append(word)
    if len(sources) < 2:
        return arguments
    from perspectron.data.mixture import joined

    return ["--data", joined(sources), *rest]


def command_of(name: str) -> Any:
    """The command of a name in COMMANDS, imported."""
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(import_module(f"perspectron.{module}"), attribute)


def _overview() -> None:
    print(f"usage: perspectron COMMAND [OPTIONS]\n\n{perspectron.__doc__}\n\ncommands:")
    for name in COMMANDS:
        print(f"  {name:<16} {about(name)}")
    print("\nExample: perspectron quickstart\nEach command explains itself: perspectron COMMAND --help")


def about(name: str) -> str:
    """The first line of a command's docstring, read from its source, since importing it takes torch."""
    module, _, attribute = COMMANDS[name].partition(":")
    source = (
        Path(perspectron.__file__)
        .parent.joinpath(*module.split("."))
        .with_suffix(".py")
        .read_text(encoding="utf-8")
    )
    tree = ast.parse(source).body
    (found,) = (n for n in tree if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == attribute)
    return str(ast.get_docstring(found)).partition("\n")[0]


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
