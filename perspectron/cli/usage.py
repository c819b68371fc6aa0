"""The help of a command: what people use first, and with `--help all` everything, in groups."""

import ast
import dataclasses
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

WIDEST, LEFT = 100, 22
"""Maximum columns of a page, and columns of the names on its left."""
VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
"""Placeholders for values in the usage, by type."""
EXAMPLE = re.compile(r"(?:^|(?<=: ))perspectron [a-z].*")
"""A command line in a docstring, up to the end of its line."""
DEFAULT = re.compile(r"\(default: [^)]*\)$")


class Option(NamedTuple):
    """An argument or option of a command. name: its flag, or its placeholder in the usage. value: placeholder of its
    value. text: its help. group: the class of options that it belongs to; the command itself for its own."""

    name: str
    value: str
    text: str
    group: type
    required: bool
    positional: bool

    @property
    def label(self) -> str:
        return f"{self.name} {self.value}".strip()


def options(command: type, default: Any = None) -> Iterator[Option]:
    """The options of a class and of the classes of its fields, in their order. default: an instance with the values of
    options left out."""
    hints, texts = get_type_hints(command, include_extras=True), _texts(command)
    for item in dataclasses.fields(command):
        kind, marks = _parted(hints[item.name])
        now = getattr(default, item.name, item.default)
        if dataclasses.is_dataclass(kind):
            yield from options(kind, None if now is dataclasses.MISSING else now)  # type: ignore[arg-type]
        elif "Suppress" not in map(repr, marks):
            positional = "Positional" in map(repr, marks)
            said = next((mark.help for mark in marks if getattr(mark, "help", "")), texts.get(item.name, ""))
            kind = get_args(kind)[0] if "UseAppendAction" in map(repr, marks) else kind
            value, needed = _value(kind), now is dataclasses.MISSING
            if positional:
                name, value = item.name.upper() + " …" * value.endswith("…"), ""
            else:
                name = "--" + item.name.replace("_", "-")
            if now not in (None, "", ()) and not needed and now is not False and "default" not in said:
                said = f"{said} (default: {_typed(now)})"
            said += " (required)" * (needed and not positional)
            said = said.strip()
            yield Option(name, value, said[:1].upper() + said[1:], command, needed, positional)


def _parted(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None, and its annotations."""
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return hint, marks


def _value(kind: Any) -> str:
    """Placeholder for a value of a type; empty for a flag."""
    if get_origin(kind) is Literal:
        return "|".join(str(one) for one in get_args(kind) if one != "")
    if get_origin(kind) is tuple:
        return f"{_value(get_args(kind)[0]).removesuffix(' …')} …"
    return VALUES.get(kind, "")


def _typed(value: Any) -> str:
    """A default as one would type it."""
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)


def _texts(command: type) -> dict[str, str]:
    """Help of a class's fields: the text below each, or "NAME: …" in the docstring of the class."""
    found = dict[str, str]()
    for paragraph in (command.__doc__ or "").split("\n\n"):
        parts = _apart(command, paragraph)
        found |= zip(parts[1::2], parts[2::2], strict=True)
    body = list[ast.stmt]()
    for base in reversed(command.__mro__[:-1]):
        module = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = module.body[0].body  # type: ignore[attr-defined]
        for item, after in itertools.pairwise(body):
            match item, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def page(command: type, name: str, *, whole: bool, default: Any = None) -> str:
    """The help of a command; of one with FIRST only those options, unless `whole`."""
    known = list(options(command, default))
    arguments = [option for option in known if option.positional]
    rest = [option for option in known if not option.positional]
    first = getattr(command, "FIRST", ())
    needed = [option.label for option in rest if option.required]
    usage = " ".join([f"usage: perspectron {name}", *_usage(arguments), *needed, "[OPTIONS]"])
    parts = [usage, *_about(command.__doc__ or "", whole or not first), *rows("Arguments", arguments)]
    if not first:
        groups = {"Options": [option for option in rest if option.group is command]}
    else:
        groups = {"Most used": [option for flag in first for option in rest if option.name == flag]}
        groups["More"] = [o for o in rest if o.group is command and o.name not in first] * whole
    for option in rest:
        if option.group is not command and option.name not in first and (whole or not first):
            groups.setdefault(_title(option.group), []).append(option)
    for title, group in groups.items():
        parts += rows(title, group, brief=not whole and bool(first))
    if first and not whole:
        parts += ["", f"All options: perspectron {name} --help all"]
    return "\n".join(parts)


def _usage(arguments: Sequence[Option]) -> Iterator[str]:
    for option in arguments:
        yield option.name if option.required else f"[{option.name}]"


def _title(group: type) -> str:
    """Title of a class of options: its docstring up to the help of its fields."""
    return _apart(group, (group.__doc__ or "").split("\n\n")[0])[0] or group.__name__


def _apart(command: type, paragraph: str) -> list[str]:
    """A paragraph of a docstring up to the help of its fields, then each one's name and help. A name and a colon within
    a sentence are of the sentence."""
    names = "|".join(item.name for item in dataclasses.fields(command))
    return re.split(rf"(?:^|(?<=\.) )({names}): ", " ".join(paragraph.split()))


def _about(doc: str, whole: bool) -> Iterator[str]:
    """Description of a command and its examples, each on a line of its own so that it can be copied; with `whole` all
    of its docstring."""
    about, *others = doc.strip().split("\n\n")
    brief = [part for part in others if EXAMPLE.search(part) and len(" ".join(part.split())) < 130][:3]
    for paragraph in [about, *(others if whole else brief)]:
        yield ""
        words: list[str] = []
        for line in map(str.strip, paragraph.splitlines()):
            if (found := EXAMPLE.search(line)) is None:
                words.append(line)
                continue
            before = " ".join([*words, line[: found.start()]]).strip()
            words.clear()
            if before and len(before) + len(found[0]) < 120:
                yield f"{before} {found[0].strip()}"
            else:
                yield from (*textwrap.wrap(before, width()), f"  {found[0].strip()}")
        yield from textwrap.wrap(" ".join(words), width())


def width() -> int:
    """Columns of the terminal, up to WIDEST."""
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


def rows(title: str, entries: Iterable[Option | tuple[str, str]], *, brief: bool = False) -> list[str]:
    """Lines of a group: its title, then each name with what it is beside it, or below where there is no room. brief:
    only the first sentence. None for a group without entries."""
    pairs = [(entry.label, entry.text) if isinstance(entry, Option) else entry for entry in entries]
    if not pairs:
        return []
    title = textwrap.fill(" ".join(title.split()), width())
    lines = ["", f"\033[1m{title}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else title]
    left = min(LEFT, max(len(label) for label, _ in pairs) + 2) if width() > 3 * LEFT else 4
    for label, text in pairs:
        if brief:
            sentence, default = (
                re.split(r"(?<=[a-z\])])\. ", text, maxsplit=1)[0].strip(" .*"),
                DEFAULT.search(text),
            )
            text = (
                f"{sentence}." if default is None or default[0] in sentence else f"{sentence}. {default[0]}"
            )
        beside = textwrap.wrap(text, width() - left - 2) or [""]
        if len(label) < left:
            lines.append(f"  {label:<{left}}{beside.pop(0)}".rstrip())
        else:
            lines.append(f"  {label}")
        lines += [" " * (left + 2) + line for line in beside]
    return lines
