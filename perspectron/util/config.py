"""Configuration: frozen dataclasses, loaded strictly from and dumped to plain JSON values.

A field whose type is a `Kind` (a mixer or feed-forward config) is written as {"kind": name, ...}. The known kinds are
the subclasses, so that defining a mixer's config registers it.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from perspectron.util import registry
from perspectron.util.errors import ConfigError

T = TypeVar("T")
MANY = 12
"""Number of names up to which an error lists them all, even if it names the one that was probably meant."""


def require(condition: bool, field: str, value: object, bound: str) -> None:
    """Raise ConfigError "field = value, must be bound" unless `condition`."""
    if not condition:
        raise ConfigError(f"{field} = {value!r}, must be {bound}")


def require_whole(field: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    require(isinstance(value, Integral) and int(value) >= least, field, value, f"a whole number ≥ {least}")


def at_least(bound: float, config: object, *fields: str) -> None:
    """Raise ConfigError for the first of these fields of `config` that is below `bound`, and not None."""
    for field in fields:
        value = getattr(config, field)
        require(value is None or value >= bound, field, value, f"≥ {bound}")


def positive(config: object, *fields: str) -> None:
    """Raise ConfigError for the first of these fields of `config` that is not above 0, and not None."""
    for field in fields:
        value = getattr(config, field)
        require(value is None or value > 0, field, value, "> 0")


def divides(heads: int, d_model: int, *, even: bool = False) -> None:
    """Raise ConfigError unless the number of heads divides the model width; with `even`, into even widths."""
    bound = f"d_model / 2 = {d_model / 2:g}" if even else f"d_model = {d_model}"
    require(d_model % ((1 + even) * heads) == 0, "heads", heads, f"a divisor of {bound}")


def assignment(text: str, field: str) -> tuple[str, Any]:
    """("rank", 64) of "rank=64"; the value is read as TOML, and a bare word as a string. ConfigError, naming the field
    that has the text: it is no assignment."""
    key, equals, value = text.partition("=")
    require(equals == "=" and key != "", field, text, "KEY=VALUE")
    import tomllib  # takes a tenth of what `--help` does

    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def between_commas(text: str) -> list[str]:
    """The parts of a text between its commas, but for commas within brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


class Kind:
    """Base of configs for fields that hold one of several kinds."""

    kind: ClassVar[str]
    table: ClassVar[str] = ""
    """Table of `perspectron.util.registry` in which designs register more kinds; "" if all are defined in the core."""

    @classmethod
    def kinds(cls) -> list[str]:
        """The names of all kinds."""
        known = [sub.kind for sub in cls.__subclasses__()]
        return list(dict.fromkeys([*(registry.places(cls.table) if cls.table else ()), *known]))

    @classmethod
    def of(cls, kind: str) -> type[Self]:
        """The config of a kind, whose module is imported. KeyError for an unknown one."""
        for imported in (False, True):
            if imported and cls.table:
                registry.part(cls.table, kind)
            for sub in cls.__subclasses__():
                if sub.kind == kind:
                    return sub
        raise KeyError(kind)


class MixerConfig(Kind):
    """Config of a mixer over time. d_token: the width of its input, where that is a field and not the model width."""

    table = "mixers"
    d_token: int | None = None


class FFNConfig(Kind):
    """Config of a mixer over channels; the subclasses are in `perspectron.model.ffn`."""


class ResidualConfig(Kind):
    """Config of how a block adds its mixer and ffn to the residual stream (`perspectron.model.block`). x is the block's
    input, h the input of the ffn's norm."""


class HeadConfig(Kind):
    """Config of a model's head, which gives the logits."""

    table = "heads"


def dump(value: Any, *, defaults: bool = True) -> Any:
    """A config as plain JSON values. `load` restores it, also if fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: dump(getattr(value, field.name), defaults=defaults)
            for field in dataclasses.fields(value)
            if defaults or getattr(value, field.name) != field.default
        }
        return {"kind": value.kind, **fields} if isinstance(value, Kind) else fields
    if isinstance(value, list | tuple):
        return [dump(item, defaults=defaults) for item in value]
    return value


def unlike(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, before, now) of every field in which two dumped configs differ, such as blocks[3].mixer.rank."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        for name in before:
            yield from unlike(before[name], now[name], f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from unlike(*pair, f"{where}[{index}]")
    elif before != now:
        yield where, before, now


def load(cls: type[T], value: Any, where: str = "config") -> T:
    """Build a `cls` from plain JSON values.

    Raises ConfigError, naming the field, for an unknown or missing key, a wrong type or an unknown kind.
    """
    result: T = _load(cls, value, where)
    return result


def _load(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        hints = [arg for arg in args if arg is not type(None)]
        listed_one = isinstance(value, str | list | tuple)
        hint = next((one for one in hints if (typing.get_origin(one) is tuple) == listed_one), hints[0])
        return _load(hint, value, where)
    if origin is Literal:
        return one_of(value, args, where)
    if origin is tuple:
        if isinstance(value, str) and args[0] is str:
            value = value.split("+")
        require(isinstance(value, list | tuple), where, value, "a list")
        items: list[Any] = []
        for i, item in enumerate(value):  # a model's layers are alike: each kind is validated once
            like = i > 0 and repr(item) == repr(value[i - 1])
            items.append(items[-1] if like else _load(args[0], item, f"{where}[{i}]"))
        return tuple(items)
    if origin is dict:
        require(isinstance(value, dict), where, value, "an object")
        return {key: _load(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Kind):
        require(isinstance(value, dict), where, value, 'an object with a "kind"')
        kind = one_of(value.get("kind"), hint.kinds(), f"{where}.kind")
        rest = {key: item for key, item in value.items() if key != "kind"}
        return _load_fields(hint.of(kind), rest, where)
    if dataclasses.is_dataclass(hint):
        return _load_fields(hint, value, where)
    return _load_scalar(hint, value, where)


def _load_fields(cls: Any, value: Any, where: str) -> Any:
    require(isinstance(value, dict), where, value, "an object")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in value:
        one_of(key, fields, f"{where}: key")
    for name, field in fields.items():
        optional = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        require(name in value or optional, f"{where}.{name}", "nothing", "given")
    return cls(**{key: _load(hints[key], item, f"{where}.{key}") for key, item in value.items()})


def _load_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    require(type(value) is hint, where, value, f"of type {hint.__name__}")
    require(not isinstance(value, float) or math.isfinite(value), where, value, "finite")
    return value


def require_choices(config: Any, where: str = "") -> None:
    """ConfigError for a field of a config, or of a config in it, whose type is `Literal`, and that is none of its
    values. `load` refuses it itself; a config that is made in Python can have it."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{where}{field.name}"
        if typing.get_origin(field.type) is Literal:
            one_of(value, typing.get_args(field.type), name)
        several = isinstance(value, tuple)
        parts = [(f"{name}[{i}]", item) for i, item in enumerate(value)] if several else [(name, value)]
        for place, part in parts:
            if dataclasses.is_dataclass(part):
                require_choices(part, f"{place}.")


def one_of(value: Any, allowed: Iterable[Any], where: str) -> Any:
    """Return `value` if it is among `allowed`; otherwise raise a ConfigError that lists them, or, of many, names the
    one that was probably meant."""
    allowed = list(allowed)
    if value not in allowed:
        require(False, where, value, listed(value, allowed))
    return value


def listed(value: Any, allowed: Sequence[Any]) -> str:
    """Words for the allowed values, and for the nearest one; more than MANY are only counted if one is near."""
    near = meant(value, allowed)
    names = f"{len(allowed)} names" if near and len(allowed) > MANY else ", ".join(map(str, allowed))
    return f"one of {names}{near}"


def meant(value: Any, allowed: Iterable[Any]) -> str:
    """ "; did you mean …?" with the name that is nearest to what was typed; empty if none is near."""
    near = difflib.get_close_matches(str(value), list(map(str, allowed)), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def meant_beside(path: Path) -> str:
    """As `meant`, with the nearest name in the folder where a path would be; extensions do not count."""
    try:
        there = {one.stem: one for one in path.parent.iterdir() if one.name != path.name} if path.name else {}
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.stem, list(there), 1, 0.7)
    return f"; did you mean {there[near[0]]}?" if near else ""
