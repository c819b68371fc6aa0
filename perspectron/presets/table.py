"""The tables of designs and presets: how an entry is made, and how a config is made from it by name."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.model.model import OUTPUTS, shape_of
from perspectron.model.parts import ValueResidual
from perspectron.util import registry
from perspectron.util.config import assignment, between_commas, load, one_of, require

Sizes = Mapping[str, Any]
OF_EVERY_MODEL: Sizes = {"dropout": 0.0, "shift": False, "input_conv": False, "input_swish": False,
                        "first_values": False, "zero_outputs": False}  # fmt: skip
"""Fields of a model's config that are sizes of every design."""
RELU2 = "relu2"
"""A size of every design, too: true replaces each SwiGLU by a network with ReLU²; refused if there are other
networks."""
BEST_PARTS: dict[str, Sizes] = {"transformer": {"shift": ("k", "v", "network"), "first_values": True}}
"""The parts that "DESIGN+" adds, by design; docs/designs/baselines.md#the-best-parts says how they were chosen. A
design that is not listed gets `shift` as its mixer has it, and `first_values` if its values can lean."""
OF_TRAINING = ("optimizer", "groups", "weight_decay", "beta1", "beta2")
"""Options of the optimizer that can stand beside sizes in a design's brackets in training: rwkv7[groups=plain]."""
Make = Callable[..., ModelConfig]
"""Makes a config from the model's name and sizes, keywords that all have a default. A keyword whose default is a config
is a part of the model, each field of which is a size, too."""
P = ParamSpec("P")
M = TypeVar("M", bound=Make)


class Shape(NamedTuple):
    """Sizes that the designs of a comparison share. d_model: width of designs with layers."""

    vocab_size: int
    seq_len: int
    d_model: int
    layers: int


class Design(NamedTuple):
    """An entry of DESIGNS. `design` describes the fields."""

    make: Make
    about: str
    source: str
    knob: str
    variants: Callable[[Shape], Iterable[Sizes]]


class Preset(NamedTuple):
    """An entry of PRESETS. about: one line. design: the name of its design."""

    make: Make
    about: str
    design: str

    @property
    def source(self) -> str:
        return DESIGNS[self.design].source


class Size(NamedTuple):
    """A size. hint: its type. paths: the keyword, followed by the field if the keyword is a part; a field that several
    parts share has several paths, and is set in each."""

    default: Any
    hint: Any
    paths: tuple[tuple[str, ...], ...]


HEAD_WIDTH = 32  # width of heads in the designs of a comparison
DESIGNS: dict[str, Design] = {}
PRESETS: dict[str, Preset] = {}


def as_it_is(_: Shape) -> Iterable[Sizes]:
    """The only variant of a design whose sizes do not vary."""
    return [{}]


def design(
    about: str,
    source: str,
    *,
    knob: str = "hidden",
    variants: Callable[[Shape], Iterable[Sizes]] = as_it_is,
) -> Callable[[M], M]:
    """Decorator: enter a function as a design under its own name.

    about: one line. source: where it is described. knob: the size that is solved for when a comparison asks for so many
    parameters. variants: sizes to choose from before, in the order of growing models.
    """

    def enter(make: M) -> M:
        DESIGNS[make.__name__] = Design(make, about, source, knob, variants)
        return make

    return enter


def preset(
    name: str,
    about: str,
    make: Callable[Concatenate[str, P], ModelConfig],
    *args: P.args,
    **own: P.kwargs,
) -> None:
    """Enter a design, or one of which some sizes are given (a `partial`), with these sizes as a preset."""
    assert not args, "sizes have names"
    ours = (make, getattr(make, "func", make))
    design = next(key for made in ours for key, entry in DESIGNS.items() if entry.make is made)
    PRESETS[name] = Preset(partial(make, **own), about, design)


def names() -> list[str]:
    """List the names of the presets.

    >>> "perspective2-tiny" in perspectron.presets.names()
    True
    """
    return list(PRESETS)


def get(name: str, /, **overrides: Any) -> ModelConfig:
    """Give the config of a preset, or of a design at its default sizes, with some sizes replaced.

    ConfigError, naming the key, for an unknown name or key, a value of the wrong type or out of bounds.

        >>> perspectron.presets.get("transformer-tiny", layers=2).name
        'transformer-tiny'
    """
    return made(_make(name), name, overrides)


def sizes(name: str) -> dict[str, Any]:
    """List the sizes of a preset or a design that `get` can replace, with their defaults. ConfigError: it is none.

    >>> perspectron.presets.sizes("perspective2-tiny")["layers"]
    4
    """
    return {key: size.default for key, size in sizes_of(_make(name)).items()}


def variant(name: str) -> tuple[Design, dict[str, Any]]:
    """Take a name apart: (design, its sizes that are given) of "DESIGN" or "DESIGN[KEY=VALUE,…]", such as
    "gla[embedding_norm=false]" or "perspective[kda,rank=16]"; "DESIGN+" adds the two parts, as in "transformer+"
    or "perspective+[kda,heads=2]". ConfigError for what is neither.

        >>> perspectron.presets.variant("gla[embedding_norm=false]")[1]
        {'embedding_norm': False}
    """
    closed = name.count("[") == name.count("]") and name.endswith("]") == ("[" in name)
    require(closed, "design", name, "as in gla[rank=16,embedding_norm=false]")
    design, with_parts, given = _parts(name)
    table = DESIGNS[one_of(design, DESIGNS, "design")]
    known = sizes_of(table.make)
    given = {key: value for key, value in given.items() if not _of_training(key, value)}
    for key, value in given.items():
        require(key != table.knob, f"{name}: key", key, "left out: it is solved to match the parameters")
        load(known[one_of(key, known, f"{name}: key")].hint, value, f"{name}: {key}")
    return table, best_parts(design) | given if with_parts else given


def training(name: str) -> dict[str, Any]:
    """Give the options of the optimizer in the brackets of a design's name.

    >>> perspectron.presets.training("gla")
    {}
    """
    *_, given = _parts(name)
    return {key: value for key, value in given.items() if _of_training(key, value)}


def _of_training(key: str, value: Any) -> bool:
    """True for an option of the optimizer. A number of `groups` is a size: groups of a mixer's heads."""
    return key in OF_TRAINING and not (key == "groups" and isinstance(value, int))


@cache
def best_parts(design: str) -> dict[str, Any]:
    """The sizes by which "DESIGN+" differs from the design. ConfigError for one that has all there are by itself."""
    make = DESIGNS[one_of(design, DESIGNS, "design")].make
    bare = made(make, design, {})
    shifted = replace(bare, shift=True)
    best = BEST_PARTS.get(design) or {
        "shift": True, **({"first_values": True} if _leans(replace(shifted, first_values=True)) else {})
    }  # fmt: skip
    more = not bare.shift and _reads_before(shifted)
    require(more, "design", f"{design}+", f"{design}, which reads the token before by itself")
    return dict(best)


def _parts(name: str) -> tuple[str, bool, dict[str, Any]]:
    """A design's name, including words in brackets; True if its first word ends with +; and the sizes in brackets."""
    head, bracket, inside = name.partition("[")
    items = between_commas(inside.removesuffix("]")) if bracket else []
    words = [item for item in items if "=" not in item]
    design = head.removesuffix("+") + (f"[{','.join(words)}]" if words else "")
    pairs = [assignment(item, "design") for item in items if "=" in item]
    given = dict(pairs)
    require(len(given) == len(pairs), "design", name, "one in which each size is given once")
    return design, head.endswith("+"), given


def title(name: str) -> str:
    """Write a design's or a variant's name as people do: "Mamba-2" of ssd, "Perspective[KDA, rank=16]" of
    perspective[kda,rank=16], "Transformer[shift]" of transformer[shift=true], "Transformer+" of transformer+. Other
    names are returned as they are.

        >>> perspectron.presets.title("ssd")
        'Mamba-2'
    """
    head, bracket, inside = name.partition("[")
    items = [registry.title(item.removesuffix("=true")) for item in between_commas(inside.removesuffix("]"))]
    plus = "+" if head.endswith("+") else ""
    return registry.title(head.removesuffix("+")) + plus + (f"[{', '.join(items)}]" if bracket else "")


def design_of(config: ModelConfig) -> str:
    """Name the design of a model, by the model's name, which is that of a preset, of a design or of a variant of one.
    ConfigError when it is none of them.

        >>> perspectron.presets.design_of(perspectron.presets.get("transformer-tiny"))
        'transformer'
    """
    name, *_ = _parts(config.name)
    if name in PRESETS:
        name = PRESETS[name].design
        if name == "perspective" and any(getattr(block.ffn, "torus", None) for block in config.blocks):
            name = "perspective-experts"
    return str(one_of(name, DESIGNS, "model name"))


def variant_of(config: ModelConfig) -> str:
    """Name the variant of a design that a model is, by the model's name, as `sizes` has it; a preset's is its design.
    ConfigError as `design_of`.

        >>> perspectron.presets.variant_of(perspectron.presets.small("transformer+", vocab_size=280))
        'transformer+'
    """
    design = design_of(config)
    return design if _parts(config.name)[0] in PRESETS else config.name


def made(make: Make, name: str, overrides: Sizes) -> ModelConfig:
    """The config that `make` gives under this name, with some of its sizes replaced."""
    known, changes = sizes_of(make), dict[str, Any]()
    for key, value in overrides.items():
        size = known[one_of(key, known, f"{name}: key")]
        for *parts, last in size.paths:
            inside = changes
            for part in parts:
                inside = inside.setdefault(part, {})
            inside[last] = load(size.hint, value, key)
    defaults = {key: parameter.default for key, parameter in inspect.signature(make).parameters.items()}
    fields = {key: changes.pop(key) for key in OF_EVERY_MODEL if key in changes and key not in defaults}
    relu2 = RELU2 not in defaults and changes.pop(RELU2, False)
    config = make(name, **{key: _changed(defaults[key], value) for key, value in changes.items()})
    config = replace(config, **fields)
    if relu2:
        config = replace(config, blocks=tuple(_ungated(block, name) for block in config.blocks))
    if overrides.get("first_values"):
        require(_leans(config), "first_values", True, f"false in {name}: no mixer's values lean on another's")
    for reads in ("shift", "input_conv"):
        given = overrides.get(reads)
        require(given is None or given is False or bool(given), reads, given, "false, or one or more inputs")
        if given:
            require(
                _reads_before(config), reads, True, f"false in {name}, which reads the token before by itself"
            )
    if overrides.get("zero_outputs"):
        writes = any(part.endswith(OUTPUTS) for part, _ in shape_of(config).named_modules())
        require(writes, "zero_outputs", True, f"false in {name}: its layers add nothing to what they read")
    return config


def _ungated(block: BlockConfig, name: str) -> BlockConfig:
    """The block with ReLU² in its network. A network tied to another block's stays as it is."""
    ffn = block.ffn
    if isinstance(ffn, TiedConfig):
        return block
    require(isinstance(ffn, SwiGLUConfig), RELU2, True, f"false in {name}: not every layer has a SwiGLU")
    assert isinstance(ffn, SwiGLUConfig)
    return replace(block, ffn=MLPConfig(ffn.hidden, "relu2", ffn.bias))


def _leans(config: ModelConfig) -> bool:
    """True if some mixer's values lean on the first mixer's."""
    return any(isinstance(one, ValueResidual) and one.gate is not None for one in shape_of(config).modules())


def _reads_before(config: ModelConfig) -> bool:
    """True if a mixer or a network reads the token before by a part of its block."""
    names = (name for name, _ in shape_of(config).named_modules())
    return any(name.endswith(("mixer_shift", "ffn_shift")) for name in names)


@cache
def sizes_of(make: Make) -> dict[str, Size]:
    """The sizes of a design by key. A keyword takes precedence over a field of a part with the same name. Parts share
    fields of the same name and type; "PART.FIELD" is that of one part."""
    _, *parameters = inspect.signature(make).parameters.values()
    flat = [p for p in parameters if not is_dataclass(p.default)]
    found = {p.name: Size(p.default, p.annotation, ((p.name,),)) for p in flat}
    for part in parameters:
        if is_dataclass(part.default):
            for key, size in _fields(part.default, (part.name,)):
                known = found.setdefault(key, size)
                part_of = len(known.paths[0]) > 1
                if (
                    part_of and known.default is None and size.default is not None
                ):  # a part with a default takes precedence
                    found[key], found[".".join(known.paths[0])] = size, known
                elif known.hint == size.hint and len(known.paths[0]) > 1 and size is not known:
                    found[key] = known._replace(paths=(*known.paths, *size.paths))
                    for one in (known, size):
                        found.setdefault(".".join(one.paths[0]), one._replace(paths=one.paths[:1]))
    hints = get_type_hints(ModelConfig)
    for key, value in OF_EVERY_MODEL.items():
        found.setdefault(key, Size(value, hints[key], ((key,),)))
    found.setdefault(RELU2, Size(False, bool, ((RELU2,),)))
    return found


def _fields(part: Any, path: tuple[str, ...]) -> Iterable[tuple[str, Size]]:
    hints = get_type_hints(type(part))
    for field in fields(part):
        value, own = getattr(part, field.name), (*path, field.name)
        if is_dataclass(value):
            yield from _fields(value, own)
        else:
            yield field.name, Size(value, hints[field.name], (own,))


def _changed(old: Any, new: Any) -> Any:
    """The new value; for a part, the old one with all changes at once, so that its checks see them together."""
    if not is_dataclass(old) or isinstance(old, type):
        return new
    return replace(old, **{key: _changed(getattr(old, key), value) for key, value in new.items()})


def _make(name: str) -> Make:
    table = PRESETS if name in PRESETS else DESIGNS
    return table[one_of(name, [*PRESETS, *DESIGNS] if name not in table else table, "preset")].make
