"""Parses a command's arguments, by tyro; its errors say what was probably meant."""

import contextlib
import dataclasses
import io
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from perspectron.cli import usage
from perspectron.util.config import listed, meant
from perspectron.util.errors import ConfigError

HELP = ("-h", "--help")
NUMBERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def parse(command: type, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Parse arguments into a command of a class. default: an instance with the values of options left out.

    ConfigError, in one line: arguments that the command lacks. SystemExit, after printing it: help was asked for.
    """
    if any(word in HELP for word in arguments):
        print(usage.page(command, name, whole=arguments[-1] == "all", default=default))
        raise SystemExit(0)
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
        raise ConfigError(
            f"{_said(_one_line(printed.getvalue()), command)} (see perspectron {name} --help)"
        ) from None


def _said(error: str, command: type) -> str:
    """An error of the parser, in the words of a command's help."""
    known = list(usage.options(command))
    if error.startswith("Missing from"):
        missing = [option for option in known if option.required and option.text[:24] in error]
        told = (f"{o.name} is missing ({o.text.removesuffix(' (required)').strip('.')})" for o in missing)
        return "; ".join(told) or error
    if bad := re.match(r"Error parsing (?:--)?([\w-]+): = (.*)", error):
        return f"{_field(bad[1])} = {bad[2]}"
    if bad := re.match(
        r"[Ii]nvalid choice '(.*)' for argument '(?:--)?([\w-]+)'. Expected one of \((.*)\)", error
    ):
        choices = listed(bad[1], [one for one in re.findall(r"'([^']*)'", bad[3]) if one])
        return f"{_field(bad[2])} = {bad[1]!r}, must be {choices}"
    if bad := re.match(r"Missing value for argument '(--[\w-]+)'", error):
        return f"{bad[1]} needs a value: " + next(option.text for option in known if option.name == bad[1])
    flags = ["--help", *(option.name for option in known if not option.positional)]
    typed = next((word for word in re.findall(r"--[a-z][\w-]*", error) if word not in flags), "")
    return error + (meant(typed, flags) if error.startswith("Unrecognized") else "")


def _field(flag: str) -> str:
    return flag.replace("-", "_").lower()


def _registry() -> ConstructorRegistry:
    """tyro's rules, except for options that may be left out, as nobody types None, and for errors about numbers."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in NUMBERS:
            return None
        kind, what = NUMBERS[info.type]

        def read(words: list[str]) -> Any:
            try:
                return kind(words[0])
            except ValueError:
                raise ValueError(f"= {words[0]!r}, must be {what}") from None

        return PrimitiveConstructorSpec(
            1, what, read, lambda value: isinstance(value, (int, info.type)), lambda value: [str(value)]
        )

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
    """The message inside the parser's box, up to its rule; in ASCII the box is a title over another rule."""
    lines = [text for line in box.splitlines() if (text := line.strip("│ ")) and text[0] not in "╭╰"]
    rules = [number for number, text in enumerate(lines) if set(text) <= {"─", "-"}]
    begin = 0 if "╭" in box else rules.pop(0) + 1
    return " ".join(" ".join(lines[begin : rules[0]]).split())
