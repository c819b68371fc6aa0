"""Configuration: frozen dataclasses, loaded strictly from and dumped to plain JSON values.

A field whose type is a `Kind` (a mixer or a feed-forward config) is written as {"kind": name, ...}; the
known kinds are the classes that derive from it, so a new mixer registers itself by being defined.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from perspectron.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, field: str, value: object, bound: str) -> None:
    """Raise ConfigError "field = value, must be bound" unless `condition`."""
    if not condition:
        raise ConfigError(f"{field} = {value!r}, must be {bound}")


class Kind:
    """Base of configs of which a field may hold one of several kinds."""

    kind: ClassVar[str]

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        return {sub.kind: sub for sub in cls.__subclasses__()}


class MixerConfig(Kind):
    """What mixes over time; one subclass in each file of `perspectron.mixers`."""


class FFNConfig(Kind):
    """What mixes over channels; the subclasses stand in `perspectron.ffn`."""


@dataclass(frozen=True)
class BlockConfig:
    """One layer: a mixer, then a feed-forward network."""

    mixer: MixerConfig
    ffn: FFNConfig


@dataclass(frozen=True)
class ModelConfig:
    """A language model: embedding, blocks, final norm, head tied to the embedding."""

    name: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockConfig, ...]
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require(self.vocab_size >= 1, "vocab_size", self.vocab_size, "≥ 1")
        require(self.d_model >= 1, "d_model", self.d_model, "≥ 1")
        require(len(self.blocks) >= 1, "blocks", len(self.blocks), "at least one block")
        require(self.norm_eps > 0, "norm_eps", self.norm_eps, "> 0")


def dump(value: Any) -> Any:
    """A config as plain JSON values; `load` gives it back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": value.kind, **fields} if isinstance(value, Kind) else fields
    if isinstance(value, list | tuple):
        return [dump(item) for item in value]
    return value


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
        (hint,) = (arg for arg in args if arg is not type(None))
        return _load(hint, value, where)
    if origin is Literal:
        return one_of(value, args, where)
    if origin is tuple:
        require(isinstance(value, list | tuple), where, value, "a list")
        return tuple(_load(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        require(isinstance(value, dict), where, value, "an object")
        return {key: _load(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Kind):
        require(isinstance(value, dict), where, value, 'an object with a "kind"')
        kind = one_of(value.get("kind"), hint.kinds(), f"{where}.kind")
        rest = {key: item for key, item in value.items() if key != "kind"}
        return _load_fields(hint.kinds()[kind], rest, where)
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


def one_of(value: Any, allowed: Iterable[Any], where: str) -> Any:
    """`value` if it is among `allowed`, else a ConfigError that lists them."""
    allowed = list(allowed)
    require(value in allowed, where, value, "one of " + ", ".join(map(str, allowed)))
    return value
