"""Watches what a recording assumes of a model, besides the numbers that its tape compares itself."""

import operator
from itertools import chain
from typing import Any

from torch import Tensor, nn

_LAID = operator.attrgetter("shape", "dtype")


class Witness:
    """A snapshot of the classes of a model's modules with what these define, of the modules' attributes (lists and
    dicts included), and of the addresses of parameters and buffers. patched: a module has a `forward` of its own."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        attributes = [vars(module) for module in modules]
        self._hooks, self.patched = list[Any](), any("forward" in own for own in attributes)
        if self.patched:  # it may be a method of the model, which must not be kept alive
            return
        self._parts, self._types = modules[1:], [*map(type, modules)]
        self._hooks = [own[name] for own in attributes for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._owners = [own[name] for own in attributes for name in ("_parameters", "_buffers")]
        known = dict.fromkeys(chain.from_iterable(kind.__mro__[:-1] for kind in self._types))
        tables = dict[int, Any]()
        for own in attributes:
            _gather([x for name, x in own.items() if not name.endswith(("_hooks", "_kwargs"))], tables)
        self._live = [*attributes, *tables.values(), *map(vars, known)]
        self._then = [x.copy() for x in self._live]
        self._slots = [*chain.from_iterable(map(dict.values, self._owners))]
        self._tensors = [x for x in self._slots if x is not None]
        self._places = self._laid()

    def holds(self, model: nn.Module) -> bool:
        """True if nothing of this has changed in the model."""
        if self.patched or self._types != [type(model), *map(type, self._parts)]:
            return False
        try:  # identical objects compare equal; comparing two tensors has no truth value
            same = all(map(operator.eq, self._live, self._then))
        except (RuntimeError, ValueError):
            return False
        slots = chain.from_iterable(map(dict.values, self._owners))
        return same and all(map(operator.is_, slots, self._slots)) and self._places == self._laid()

    @property
    def hooked(self) -> bool:
        """True if a module has forward hooks."""
        return any(self._hooks)

    @property
    def stands(self) -> bool:
        """True if parameters and buffers are at the same addresses as before; nothing else is checked."""
        x = self._tensors
        return [*map(Tensor.data_ptr, x)] == self._places[: len(x)]

    def _laid(self) -> list[Any]:
        x = self._tensors
        return [*map(Tensor.data_ptr, x), *map(Tensor.stride, x), *map(_LAID, x)]


def _gather(values: Any, tables: dict[int, Any]) -> None:
    """Add to `tables`, by id, the lists, sets and dicts among values and inside them."""
    for value in values:
        if isinstance(value, dict | list | set | tuple | frozenset) and id(value) not in tables:
            if not isinstance(value, tuple | frozenset):
                tables[id(value)] = value
            _gather(value.values() if isinstance(value, dict) else value, tables)
