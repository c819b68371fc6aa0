"""`perspectron COMMAND`: parse, run, and turn a user's mistake into one line and exit code 2.

The module of a command is imported when it is asked for: torch takes ten times as long to import as all else here.
"""

import contextlib
import errno
import functools
import io
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import perspectron
from perspectron.util.errors import ConfigError, PerspectronError, escaped
from perspectron.util.registry import Table, at, designs
from perspectron.util.version import __version__

GROUPS: dict[str, dict[str, str]] = {
    "Start": {
        "quickstart": "quickstart:Quickstart",
        "list": "list:List",
        "selftest": "selftest:Selftest",
        "completion": "completion:Completion",
    },
    "Use a model": {
        "generate": "generate:Generate",
        "chat": "chat:Chat",
        "serve": "serve:Serve",
    },
    "Work with a memory": {
        "state read": "state:Read",
        "state log": "state:Log",
        "state diff": "state:Diff",
        "state bisect": "state:Bisect",
        "state rebase": "state:Rebase",
        "state merge": "state:Merge",
    },
    "Train and compare": {
        "train": "train:Train",
        "compare": "compare:Compare",
        "scale": "scale:Scale",
        "search": "search:Search",
        "ablate": "ablate:Ablate",
    },
    "Look inside": {
        "eval": "evaluate:Eval",
        "lm-eval": "harness:run",
        "inspect": "inspect:Inspect",
        "verify": "verify:Verify",
        "plan": "plan:Plan",
    },
    "Files": {
        "tokenize": "tokenize:Tokenize",
        "quantize": "quantize:Quantize",
        "export": "export:Export",
        "import": "import_:Import",
        "convert": "convert:Convert",
        "synthesize": "synthesize:Synthesize",
    },
}
"""The commands by what they are for, and where in `perspectron.cli` each is defined. A class is parsed from the
arguments, and its instance called for the exit code; a function takes the arguments as they are."""
CORE = {name: f"perspectron.cli.{place}" for group in GROUPS.values() for name, place in group.items()}
ABOUT = {"state": "Files of memories: their past, what parts two of them, on another beginning, two as one."}
"""What the commands of a group do, by the name that they share."""

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
    """Standard output or error; once a write has failed, nothing more is written. Failures of standard error are
    silent, since nobody is left to tell."""

    broken = False

    def write(self, data: Any) -> Any:
        data, done = memoryview(data).cast("B"), 0
        if self.broken:
            return len(data)
        try:
            while done < len(data) and (part := super().write(data[done:])) is not None:
                done += part  # a full disk takes a part, and raises an error only then
            return done or None
        except OSError as error:
            self.broken = True
            if self.fileno() == 2:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"standard output: not written ({error.strerror})") from None


def _open_streams() -> None:
    """Open the null device for standard streams that are closed, before a file of ours takes their place, and escape
    what the encoding of the others lacks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # stdout is opened for reading, so that writing to it fails and is reported
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
    """Run one command and return the exit code: 0, 2 for a user's error, 3 if numbers are no longer finite, 128 + n if
    signal n stopped it. `prepare` is called after the command is imported and parsed, before it runs."""
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
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES):
            raise
        told = ConfigError(f"{error.filename}: {error.strerror}")
        print(f"perspectron: error: {told}", file=sys.stderr)
        return told.exit_code


def _run(arguments: list[str], prepare: Callable[[], object]) -> int:
    """The exit code of what the arguments ask for."""
    if arguments == ["--version"]:
        print(__version__)
        return 0
    group = arguments[0] if arguments and within(arguments[0]) else ""
    rest = arguments[1:] if group else arguments
    if rest in ([], ["-h"], ["--help"]):
        with contextlib.nullcontext() if rest else contextlib.redirect_stdout(sys.stderr):
            _overview(group)
        return 0 if rest else ConfigError.exit_code
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
    name, *rest = arguments
    if within(name):
        name, rest = f"{name} {rest[0]}", rest[1:]
    known = CORE if name in CORE else commands()
    if name not in known:
        if moved := [full for full in known if full.endswith(f" {name}")]:
            raise ConfigError(f"command = {name!r}, is now: perspectron {moved[0]}")
        names = list(within(arguments[0]) or known)
        from perspectron.util.config import listed

        nearest = listed(name.split()[-1], names)
        raise ConfigError(f"command = {name!r}, must be {nearest} (see perspectron --help)")
    rest = _one_source(rest)
    command = at(known[name])
    if not isinstance(command, type):
        return functools.partial(command, rest)
    from perspectron.cli import parser

    defaults = getattr(sys.modules[command.__module__], "defaults", None)
    default: Any = None if defaults is None else defaults(rest)
    if hasattr(default, "began"):
        default = replace(default, began=began)
    parsed: Callable[[], int] = parser.parse(command, name, rest, default)
    _require_bounded(parsed)
    return parsed


def _require_bounded(options: Any) -> None:
    """ConfigError for an option that is not finite, unless that is its default, or an integer above its bound."""
    from perspectron.util.config import require

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
    """The arguments with several --data joined into one, as sources with weights; a single one stays."""
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


def within(name: str) -> Table:
    """The commands of a group or a design, by the rest of their names; none if `name` is neither."""
    if name in ABOUT:
        return {full.split()[1]: place for full, place in CORE.items() if full.startswith(f"{name} ")}
    design = None if name in CORE else designs().get(name)
    return {} if design is None else design.commands


def commands() -> dict[str, str]:
    """Every command and its place "module:attribute": those of GROUPS, then the designs', as "DESIGN NAME"."""
    return CORE | {
        f"{name} {command}": f"{design.package}.{place}"
        for name, design in designs().items()
        for command, place in design.commands.items()
    }


def command_of(name: str) -> Any:
    """The command of a name, imported."""
    return at(commands()[name])


def _overview(group: str = "") -> None:
    """All commands, or those of a group or of a design, each with a line."""
    from perspectron.cli import usage

    start = f"perspectron {group}".rstrip()
    if group:
        what = ABOUT[group] if group in ABOUT else sys.modules[designs()[group].package].__doc__
        print(f"usage: {start} COMMAND [OPTIONS]\n\n{what}")
        groups = {"Commands": [f"{group} {name}" for name in within(group)]}
    else:
        print(f"usage: perspectron COMMAND [OPTIONS]\n\n{perspectron.__doc__}")
        groups = {title: list(group) for title, group in GROUPS.items()}
        groups["Of one design"] = [name for name in commands() if name not in CORE]
    for title, names in groups.items():
        print("\n".join(usage.rows(title, [(name, about(name)) for name in names])))
    example = "" if group else "Example: perspectron quickstart\n"
    print(f"\n{example}Each command explains itself: {start} COMMAND --help")


def about(name: str) -> str:
    """The first paragraph of a command's docstring, read from its source, since importing it takes torch."""
    module, _, attribute = commands()[name].partition(":")
    spec = find_spec(module)
    source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    found = re.search(
        rf'^(?:class|def) {attribute}\b.*?"""(.+?)(?:"""|\n\n)', source, re.DOTALL | re.MULTILINE
    )
    return "" if found is None else " ".join(found[1].split())
