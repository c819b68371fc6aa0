"""Designs, which are folders of `perspectron.designs`: each registers what it brings, and the core asks for it by name.

The core imports no design. Looking for names imports the folders' `__init__`, which say no more than
`register(Design(...))`; asking for one name imports the module that it stands for, and no other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from perspectron.util.errors import ConfigError

Table = Mapping[str, Any]
"""Objects that a design registers, by name: each the place "module:attribute" in the design's package, or the object
itself, as in a notebook."""


@dataclass(frozen=True)
class Design:
    """A design and what it registers.

    package: its name, `__name__` in its `__init__`. mixers, heads: classes by kind. presets: a module that enters
    designs and presets (`perspectron.presets.table`). ablations: a table of `perspectron.compare.ablations.Ablation` by
    design. suites: modules of `perspectron eval --suite NAME`. commands: of `perspectron DESIGN NAME`. hooks: of
    decoding. recipes: modules of `perspectron train --recipe NAME`, with its `plan` and `staged`. cases: of
    `perspectron selftest`. titles: names as people write them, of designs and mixers whose keys differ.
    """

    package: str
    mixers: Table = field(default_factory=dict)
    heads: Table = field(default_factory=dict)
    presets: str = ""
    ablations: Table = field(default_factory=dict)
    suites: Table = field(default_factory=dict)
    commands: Table = field(default_factory=dict)
    hooks: Table = field(default_factory=dict)
    recipes: Table = field(default_factory=dict)
    cases: Table = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]


TABLES = [item.name for item in fields(Design) if item.default_factory is dict]
SHARED = ("mixers", "heads", "suites", "hooks", "recipes")
"""Tables in which a name stands once among all designs."""
_designs: dict[str, Design] = {}


def register(design: Design) -> None:
    """Enter a design. ConfigError for a name, of the design or of what it brings, that another one has."""
    other = _designs.get(design.name)
    if other is not None and other.package != design.package:
        raise ConfigError(f"design {design.name!r} is registered twice: {other.package}, {design.package}")
    for table in SHARED:
        for name in getattr(design, table):
            for known in _designs.values():
                if known is not other and name in getattr(known, table):
                    what = f"{table.removesuffix('s')} {name!r}"
                    raise ConfigError(f"{what} is registered twice: {known.package}, {design.package}")
    _designs[design.name] = design


@cache
def _find() -> None:
    """Import the package of every folder of designs."""
    package = import_module("perspectron.designs")
    for module in iter_modules(package.__path__):
        if module.ispkg:
            import_module(f"{package.__name__}.{module.name}")


def designs() -> dict[str, Design]:
    """All designs by name, in alphabetical order."""
    _find()
    return dict(sorted(_designs.items()))


def places(table: str) -> dict[str, Any]:
    """Every name in a table of all designs, with its full place "package.module:attribute", or the object itself."""
    return {
        name: f"{design.package}.{place}" if isinstance(place, str) else place
        for design in designs().values()
        for name, place in getattr(design, table).items()
    }


def at(place: Any) -> Any:
    """The object at "module:attribute", or the module "module", imported; what is no string is returned as it is."""
    if not isinstance(place, str):
        return place
    module, _, attribute = place.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def part(table: str, name: str) -> Any:
    """The object that a design registers under a name in a table, imported. KeyError for an unknown name."""
    return at(places(table)[name])


def parts(table: str) -> Iterator[tuple[str, Any]]:
    """Every name in a table, with the object that it stands for, imported."""
    for name, place in places(table).items():
        yield name, at(place)


def title(name: str) -> str:
    """A design's or a mixer's name as people write it."""
    for design in designs().values():
        if name in design.titles:
            return design.titles[name]
    return name
