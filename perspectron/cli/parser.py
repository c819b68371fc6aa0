"""Parses a command's arguments, by tyro: its help names no defaults that say nothing, and its errors what was probably
meant."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import re
import textwrap
import types
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from perspectron.util.errors import ConfigError

WIDTH = 100
"""Columns of a command's first options."""


def parse(command: type, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """The command of a class, as the arguments have it. default: one whose values options left out have.

    ConfigError: arguments that it does not have, in a line. SystemExit, after printing it: help was asked for.
    """
    first = getattr(command, "FIRST", ())
    if first and list(arguments) in (["-h"], ["--help"]):
        print(_first(command, name, first))
        raise SystemExit(0)
    if first and list(arguments) == ["--help", "all"]:
        arguments = ["--help"]
    tyro._experimental_options["ansi_codes"] = "NO_COLOR" not in os.environ
    _quiet(command)
    options = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                command,
                args=arguments,
                prog=f"perspectron {name}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                registry=_registry(),
                **options,
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        said = _one_line(printed.getvalue())
        flags = {"--help", *(flag for flag, _ in _options(command))}
        typed = next((word for word in re.findall(r"--[a-z][\w-]*", said) if word not in flags), "")
        hint = meant(typed, flags) if said.startswith("Unrecognized") else ""
        raise ConfigError(f"{said}{hint} (see perspectron {name} --help)") from None


def meant(word: str, names: Iterable[str]) -> str:
    """ ", did you mean …?" of the name that is nearest to what was typed; empty where none is near."""
    near = difflib.get_close_matches(word, list(names), 1, 0.7)
    return f", did you mean {near[0]}?" if near else ""


def _options(command: type) -> Iterable[tuple[str, str]]:
    """The options of a class and of the classes of its fields: the flag of each, and what it is."""
    hints, texts = get_type_hints(command), _texts(command)
    for item in dataclasses.fields(command):
        if is_dataclass(inside := hints[item.name]):
            yield from _options(inside)  # type: ignore[arg-type]
        else:
            yield "--" + item.name.replace("_", "-"), texts.get(item.name, "")


def _texts(command: type) -> dict[str, str]:
    """The docstrings of a class's fields."""
    found, body = dict[str, str](), list[ast.stmt]()
    for base in reversed(command.__mro__[:-1]):
        module = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = module.body[0].body  # type: ignore[attr-defined]
        for item, after in itertools.pairwise(body):
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else None
            )
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(text, str)
            ):
                found[item.target.id] = " ".join(text.split())
    return found


def _first(command: type, name: str, flags: Sequence[str]) -> str:
    """Help of the options that people use first, on a screen."""
    about, *others = textwrap.dedent("    " + (command.__doc__ or "")).strip().split("\n\n")
    examples = [" ".join(part.split()) for part in others if ": perspectron " in part and len(part) < 130][:3]
    texts, lines = (
        dict(_options(command)),
        [f"usage: perspectron {name} [OPTIONS]", "", " ".join(about.split()), ""],
    )
    lines += ["\n\n".join(examples), ""]
    for flag in flags:
        sentence = re.split(r"(?<=[a-z\])])\. ", texts[flag], maxsplit=1)[0].strip(" .*") + "."
        lines += textwrap.wrap(f"{flag:<11} {sentence}", WIDTH, subsequent_indent=" " * 12)
    return "\n".join([*lines, "", f"All options: perspectron {name} --help all"])


def _quiet(command: type) -> None:
    """Have the help of a class say no default that is nothing."""
    hints = get_type_hints(command, include_extras=True)
    for item in dataclasses.fields(command):
        if is_dataclass(inside := get_type_hints(command)[item.name]):
            _quiet(inside)  # type: ignore[arg-type]
        elif item.default is None or item.default in ("", ()):
            command.__annotations__[item.name] = Annotated[
                hints[item.name], tyro.conf.arg(help_behavior_hint="")
            ]


def _registry() -> ConstructorRegistry:
    """Rules of tyro, but for an option that may be left out: nobody types None."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
        if (
            get_origin(info.type) not in (Union, types.UnionType)
            or len(kinds) != 1
            or len(get_args(info.type)) != 2
        ):
            return None
        spec = registry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
        if not isinstance(spec, PrimitiveConstructorSpec):
            return None
        is_one, text = spec.is_instance, spec.str_from_instance
        return dataclasses.replace(
            spec,
            is_instance=lambda value: value is None or is_one(value),
            str_from_instance=lambda value: ["None"] if value is None else text(value),
        )

    return registry


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
