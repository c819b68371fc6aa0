"""Configuration: frozen dataclasses, loaded strictly from and dumped to plain JSON values.

A field whose type is a `Kind` (a mixer or feed-forward config) is written as {"kind": name, ...}. The known kinds are
the subclasses, so that defining a mixer's config registers it.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from perspectron.util import registry
from perspectron.util.errors import ConfigError

T = TypeVar("T")
MOST_BLOCKS = 1024
MOST_SIZE = 1 << 24
"""Upper bound of every width, length or number in a model's config. Larger values are mistakes, and the product of two
would overflow 64 bits."""


def require(condition: bool, field: str, value: object, bound: str) -> None:
    """Raise ConfigError "field = value, must be bound" unless `condition`."""
    if not condition:
        raise ConfigError(f"{field} = {value!r}, must be {bound}")


def at_least(bound: float, config: object, *fields: str) -> None:
    """Raise ConfigError for the first of these fields of `config` that is below `bound`."""
    for field in fields:
        require(getattr(config, field) >= bound, field, getattr(config, field), f"≥ {bound}")


def positive(config: object, *fields: str) -> None:
    """Raise ConfigError for the first of these fields of `config` that is not above 0."""
    for field in fields:
        require(getattr(config, field) > 0, field, getattr(config, field), "> 0")


def divides(heads: int, d_model: int, *, even: bool = False) -> None:
    """Raise ConfigError unless the number of heads divides the model width; with `even`, into even widths."""
    bound = f"d_model / 2 = {d_model / 2:g}" if even else f"d_model = {d_model}"
    require(d_model % ((1 + even) * heads) == 0, "heads", heads, f"a divisor of {bound}")


def assignment(text: str) -> tuple[str, Any]:
    """("rank", 64) of "rank=64"; the value is read as TOML, and a bare word as a string."""
    key, equals, value = text.partition("=")
    require(equals == "=" and key != "", "set", text, "KEY=VALUE")
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
    """Base of configs that a field may hold one of several kinds of."""

    kind: ClassVar[str]
    table: ClassVar[str] = ""
    """Where designs register more kinds (`perspectron.util.registry`); "" where all are defined in the core."""

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
    """How a block adds its parts (`perspectron.model.block`). x is the block's input, h the input of the ffn's
    norm."""


@dataclass(frozen=True)
class SequentialConfig(ResidualConfig):
    """h = x + mixer(norm(x)); y = h + ffn(norm(h)) (docs/designs/perspective.md#stack)."""

    kind = "sequential"


@dataclass(frozen=True)
class ParallelConfig(ResidualConfig):
    """y = x + mixer(norm(x)) + ffn(norm(x)), each with a norm of its own."""

    kind = "parallel"


@dataclass(frozen=True)
class Law5Config(ResidualConfig):
    """h = norm(x + mixer(x)); y = h + ffn(norm(h)) (docs/designs/adr.md#residual)."""

    kind = "law5"


@dataclass(frozen=True)
class RouteGatedConfig(ResidualConfig):
    """h = x + a, a = mixer(norm(x)); m = ffn(norm(h)); y = x + scale · (g a + (1 − g) m), one learned g per block
    (docs/designs/lens.md#route-gate). scale: 2 gives GPT-2 at g = ½. anneal: after `anneal_after` updates, the bias
    under g's sigmoid falls by this much with each update."""

    kind = "route_gated"
    scale: float = 1.0
    anneal: float = 0.0
    anneal_after: int = 0

    def __post_init__(self) -> None:
        positive(self, "scale")
        at_least(0, self, "anneal", "anneal_after")


@dataclass(frozen=True)
class NoResidualConfig(ResidualConfig):
    """y = mixer(x), nothing added; the ffn must be missing (docs/designs/drm.md#flow)."""

    kind = "none"


class HeadConfig(Kind):
    """Config of the part that gives the logits."""

    table = "heads"


@dataclass(frozen=True)
class BlockConfig:
    """One layer: a mixer, then a feed-forward network; either may be missing."""

    mixer: MixerConfig | None
    ffn: FFNConfig | None
    residual: ResidualConfig = SequentialConfig()

    def __post_init__(self) -> None:
        match self.residual:
            case NoResidualConfig():
                require(self.mixer is not None, "mixer", None, "given with residual none")
                require(self.ffn is None, "ffn", self.ffn, "None with residual none")
            case Law5Config():
                require(self.mixer is not None, "mixer", None, "given with residual law5")
            case RouteGatedConfig():
                require(self.ffn is not None, "ffn", None, "given with residual route_gated")
            case _:
                require(
                    self.mixer is not None or self.ffn is not None, "ffn", None, "given where mixer is not"
                )


@dataclass(frozen=True)
class ModelConfig:
    """A language model: embedding, blocks, final norm, head.

    head: None uses the transposed embedding. embedding_std: standard deviation of the embedding at initialisation.
    embedding_norm: divide the embedding by its root mean square before the first block, so that it is comparable in
    size to what the mixers add. positions: length of a learned position table, which bounds the length of a document;
    0 for none. norm: "rms", or "layer" with biases. dropout: share of the numbers that are zeroed in training, in the
    embedding, in what mixers and networks add, and in the weights of attention. shift: mixers and networks read a
    learned mix of each token and the one before (docs/designs/baselines.md#two-parts-for-every-design). first_values:
    values of mixers lean on those of the first mixer with as many channels.
    """

    name: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockConfig, ...]
    head: HeadConfig | None = None
    embedding_std: float = 0.02
    embedding_norm: bool = False
    positions: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    dropout: float = 0.0
    shift: bool = False
    first_values: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "vocab_size", "d_model")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        require(len(self.blocks) >= 1, "blocks", len(self.blocks), "at least one block")
        at_least(0, self, "positions")
        positive(self, "embedding_std", "norm_eps")
        require(len(self.blocks) <= MOST_BLOCKS, "blocks", len(self.blocks), f"≤ {MOST_BLOCKS}")
        _require_sizes(self, "")
        mixers = sum(block.mixer is not None for block in self.blocks)
        require(self.positions > 0 or mixers > 0, "blocks with a mixer", mixers, "≥ 1 where positions = 0")
        for index, block in enumerate(self.blocks):
            width = None if block.mixer is None else block.mixer.d_token
            first = index == 0 and isinstance(block.residual, NoResidualConfig)
            require(width in (None, self.d_model) or first, f"blocks[{index}].mixer.d_token", width,
                    f"d_model = {self.d_model}, but in a first block with residual none")  # fmt: skip
        require(self.head is not None or self.d_token == self.d_model, "head", None,
                f"given, because tokens are {self.d_token} wide and the model {self.d_model}")  # fmt: skip

    @property
    def d_token(self) -> int:
        """Width of the embedding: the model width, unless the first mixer sets another."""
        first = self.blocks[0].mixer
        return (None if first is None else first.d_token) or self.d_model


def _require_sizes(config: Any, where: str) -> None:
    """ConfigError for a whole number that is above MOST_SIZE, anywhere in a config."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{where}{field.name}"
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            at = f"{name}[{i}]" if isinstance(value, tuple) else name
            if dataclasses.is_dataclass(item):
                _require_sizes(item, f"{at}.")
            elif isinstance(item, int):
                require(abs(item) <= MOST_SIZE, at, item, f"≤ {MOST_SIZE:,}")


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
    """(name, value, value) for every field in which two dumped configs differ, such as blocks[3].mixer.rank."""
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


def one_of(value: Any, allowed: Iterable[Any], where: str) -> Any:
    """Return `value` if it is among `allowed`; otherwise raise a ConfigError that lists them."""
    allowed = list(allowed)
    require(value in allowed, where, value, "one of " + ", ".join(map(str, allowed)))
    return value
