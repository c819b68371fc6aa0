"""A model's memory between calls: a pytree of tensors that can be forked, sliced by row, stacked, saved and loaded."""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.model import appended, narrow, tuned
from perspectron.model.appended import Contents, Grown
from perspectron.model.config import ModelConfig
from perspectron.util.config import dump
from perspectron.util.errors import ConfigError, StateError
from perspectron.util.files import atomic, parse_json
from perspectron.util.tensors import JSON_ROOM, Place

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound=type[Any])
FORMAT = "perspectron-state-3"
FORMATS = (FORMAT, "perspectron-state-2")
"""Formats that are read. A file of the second is one part, with one digest of all its tensors."""
TUNED = "tuned"
"""Field of a header: the kinds of trained parts that the state has (`model.tuned`), where it has any."""
MOST_TOKENS = 1 << 62
"""Upper bound of a document's tokens: counts stay below it, so that adding to them cannot overflow."""


def register(cls: T) -> T:
    """Class decorator: a frozen dataclass of tensors (and ints) becomes a pytree node."""
    pytree.register_dataclass(cls)
    return cls


class Ragged(ABC):
    """Base of a part of a state whose rows may differ in shape, such as caches of different capacity.

    Every other part is selected and stacked tensor by tensor, along its first dimension. A dimension that may differ is
    0 in an empty state without room.
    """

    grown: ClassVar[tuple[str, ...]] = ()
    """Names of its tensors with a slot per token, along the third dimension; a file stores each slot only once."""

    def spanned(self) -> int:
        """Number of used slots in each of the tensors in `grown`."""
        return 0

    def span(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """These slots of each of the tensors in `grown`, in their order."""
        return ()

    def emptied(self) -> Self:
        """The same part without slots in the tensors of `grown`; counts stay."""
        return self

    @abstractmethod
    def room(self) -> None:
        """Raise StateError unless its count fits its capacity."""

    def filled(self) -> Self:
        """The part without its free slots, as a view."""
        return self

    def fork(self, into: Self | None = None) -> Self:
        """An independent copy. into: another part, not to be used again: its memory is reused where the shape fits."""
        copy: Self = pytree.tree_map(_copied, self, self if into is None else into)
        return copy

    def to(self, device: torch.device) -> Self:
        """The same part on a device."""
        moved: Self = pytree.tree_map_only(Tensor, lambda x: x.to(device), self)
        return moved

    def select(self, rows_N: Tensor) -> Self:
        """These rows, as a copy."""
        rows: Self = pytree.tree_map_only(Tensor, lambda x: x.index_select(0, rows_N.to(x.device)), self)
        return rows

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, as a copy."""


@dataclass(frozen=True)
class LMState:
    """One state per block, in order. A forward pass leaves it unchanged unless `consume_state` is set; then keep a
    `fork()` to return to it.

        >>> model = perspectron.build("perspective2-tiny")
        >>> state = model(torch.tensor([[5, 6, 7]])).state
        >>> two = state.select([0, 0])  # two rows with the same memory
        >>> two.batch_size, state.fork().nbytes == state.nbytes
        (2, True)
    """

    layers: tuple["DataclassInstance", ...]
    length_B: Tensor | None = None
    """Tokens of the document so far [B], if the model has learned positions."""
    model: int | None = None
    """Number of the model it belongs to, in this process; None if unknown. Not saved."""

    @staticmethod
    def stack(states: Sequence["LMState"]) -> "LMState":
        """Copy the rows of all states into one batch. Caches get the largest capacity among them.

        StateError: no states, or states of different models.
        """
        if not states:
            raise StateError("stack: there are no states; give at least one")
        models = {state.model for state in states} - {None}
        if any(map(tuned.parts, states)):
            layers = zip(
                *map(tuned.alike, zip(*(state.layers for state in states), strict=True)), strict=True
            )
            states = [dataclasses.replace(s, layers=own) for s, own in zip(states, layers, strict=True)]
        trees = [pytree.tree_flatten(state, is_leaf=_is_ragged) for state in states]
        if len(models) > 1 or any(spec != trees[0][1] for _, spec in trees):
            raise StateError(
                "stack: the states are of different models; only states of one model can be stacked"
            )
        leaves = [_stacked(column) for column in zip(*(leaves for leaves, _ in trees), strict=True)]
        stacked: LMState = pytree.tree_unflatten(leaves, trees[0][1])
        return dataclasses.replace(stacked, model=next(iter(models), None))

    def select(self, rows: Tensor | Sequence[int]) -> "LMState":
        """Copy these rows in this order; a row may occur more than once. Caches keep only the capacity that the
        longest row needs. StateError for a row that does not exist."""
        chosen = self.picked(rows)
        if tuned.parts(chosen):  # drop those that only other rows of the batch have
            chosen = dataclasses.replace(chosen, layers=tuned.bared(chosen.layers))
        return chosen

    def picked(self, rows: Sequence[int] | Tensor) -> "LMState":
        """`select` that keeps the kinds of trained parts which only other rows have; they are zeros in these rows."""
        rows_N = torch.as_tensor(rows)
        if rows_N.numel() and (rows_N.is_floating_point() or rows_N.dtype == torch.bool):
            raise StateError(
                f"select: rows are {rows_N.dtype}, must be whole numbers; for a mask give mask.nonzero()[:, 0]"
            )
        if rows_N.ndim != 1:
            raise StateError(f"select: rows have shape {tuple(rows_N.shape)}, must be a list, as [0]")
        rows_N = rows_N.to(torch.int64)
        for row in rows_N.tolist():
            self._check(row)
        return self._map(lambda part: _selected(part, rows_N), is_leaf=_is_ragged)

    def take(self, row: int) -> "LMState":
        """Copy one row. StateError for a row that does not exist."""
        return self.select([row])

    def put(self, row: int, state: "LMState") -> "LMState":
        """A copy in which this row is replaced by `state`, which has one row.

        StateError for a row that does not exist, a state of several rows or of another model.
        """
        self._check(row)
        if state.batch_size != 1:
            raise StateError(f"put: the state has {state.batch_size} rows; take one of them")
        B = self.batch_size
        return LMState.stack([self, state]).select([B if other == row else other for other in range(B)])

    def fork(self, into: "LMState | None" = None) -> "LMState":
        """An independent state: a copy, except that caches share what both have read (`model.cache`) and trained parts,
        never written into, are shared (`model.tuned`). into: another state of the model, not to be used again: its
        memory is reused where it has the same parts and shapes fit."""
        copied: LMState = _forked(self, self if into is None else into)
        return dataclasses.replace(copied, model=self.model)

    def filled(self) -> "LMState":
        """The same state without the free slots of caches, as a view."""
        return self._map(lambda part: part.filled() if isinstance(part, Ragged) else part, is_leaf=_is_ragged)

    @property
    def document_length_B(self) -> Tensor | None:
        """Tokens of the document so far [B]; None where no part of the state counts them."""
        parts = pytree.tree_leaves_with_path(self, is_leaf=_is_ragged)  # a cache has hundreds of pieces
        counts = (
            getattr(part, "length_B", None) if isinstance(part, Ragged) else part
            for where, part in parts
            if isinstance(part, Ragged) or _name(where).endswith("length_B")
        )
        return next((count for count in counts if count is not None), None)

    def detach(self) -> "LMState":
        """The same values, detached from the autograd graph (for truncated backpropagation through time). Outside of
        inference mode those that were made in it are copied, so that gradients can flow after them."""

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return (
                leaf.clone()
                if leaf.is_inference() and not torch.is_inference_mode_enabled()
                else leaf.detach()
            )

        return self._map(own)

    def to(self, device: torch.device | str) -> "LMState":
        device = torch.device(device)
        return self._map(
            lambda part: part.to(device) if isinstance(part, (Tensor, Ragged)) else part, is_leaf=_is_ragged
        )

    @property
    def batch_size(self) -> int:
        """Number of rows; the batch is the first dimension of every tensor."""
        return next(len(leaf) for leaf in pytree.tree_iter(self) if isinstance(leaf, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes, summed over the tensors."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor))

    def _check(self, row: int) -> None:
        if not 0 <= row < self.batch_size:
            raise StateError(
                f"row {row} is not there: the state has {self.batch_size} rows, take one of 0 … {self.batch_size - 1}"
            )

    def _map(self, function: Any, is_leaf: Any = None) -> "LMState":
        result: LMState = pytree.tree_map(function, self, is_leaf=is_leaf)
        return dataclasses.replace(result, model=self.model)


pytree.register_dataclass(LMState, field_names=["layers", "length_B"], drop_field_names=["model"])


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of all tensors, one after the other. StateError unless their rows agree in shape, dtype and device."""
    kinds = [f"{tuple(tensor.shape[1:])} {tensor.dtype} on {tensor.device}" for tensor in tensors]
    if other := set(kinds) - {kinds[0]}:
        raise StateError(
            f"stack: a row of {kinds[0]} beside one of {min(other)}; only states of one model can be stacked"
        )
    return torch.cat(list(tensors))


def _is_ragged(part: object) -> bool:
    return isinstance(part, Ragged)


def _forks(part: object) -> bool:
    return isinstance(part, Ragged | tuned.Tuned)


def _forked(state: Any, into: Any) -> Any:
    """A copy of a state or of a part of it, in the memory of `into` where that has the same parts."""
    leaves, spec = pytree.tree_flatten(state, is_leaf=_forks)
    others = leaves
    if into is not state:
        found, other = pytree.tree_flatten(into, is_leaf=_forks)
        others = found if other == spec else leaves
    return pytree.tree_unflatten(map(_leaf_forked, leaves, others), spec)


def _leaf_forked(leaf: Any, into: Any) -> Any:
    into = into if type(into) is type(leaf) else leaf
    if isinstance(leaf, tuned.Tuned):  # what was trained is never written into
        return dataclasses.replace(leaf, mixer=_forked(leaf.mixer, into.mixer))
    if isinstance(leaf, Ragged):
        return leaf.fork(None if into is leaf else into)
    return _copied(leaf, into)


def _copied(leaf: Any, into: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fits = (into.shape, into.dtype, into.device) == (leaf.shape, leaf.dtype, leaf.device)
    if into is not leaf and fits and into.is_contiguous():
        return into.copy_(leaf)
    return leaf.clone(memory_format=torch.contiguous_format)


def _emptied(part: Any) -> Any:
    return part.emptied() if isinstance(part, Ragged) else part


def _selected(part: Any, rows_N: Tensor) -> Any:
    if isinstance(part, Ragged):
        return part.select(rows_N)
    return part.index_select(0, rows_N.to(part.device)) if isinstance(part, Tensor) else part


def _stacked(column: Sequence[Any]) -> Any:
    if isinstance(column[0], Ragged):
        return type(column[0]).stack(column)
    if isinstance(column[0], Tensor):
        return cat(column)
    if any(number != column[0] for number in column):
        raise StateError(f"stack: {column[0]} beside {max(column)}; only states of one model can be stacked")
    return column[0]


class Stateful(Protocol):
    """The part of a model that saving and loading need."""

    config: ModelConfig
    number: int

    def init_state(
        self, batch_size: int, *, capacity: int = 0, device: str | None = None, tuned: Sequence[str] = ()
    ) -> LMState: ...
    def fingerprint(self) -> str: ...


def save_state(
    path: Path | str,
    state: LMState,
    model: Stateful,
    *,
    extra: dict[str, Any] | None = None,
    dtype: narrow.Dtype = "full",
) -> None:
    """Write `state` as safetensors with the model's fingerprint. `extra` is any JSON object to store with it. dtype: of
    its numbers; with fewer bits the loaded state is only an approximation. Where the file holds an earlier state of the
    same text, what is new is appended to it (`perspectron.model.appended`).

    The file is written whole or not at all. StorageError if it cannot be written. StateError for what would be refused
    when it is read: numbers that the dtype cannot hold, a state of another model, a header of over MAX_JSON bytes.

        >>> model = perspectron.build("perspective2-tiny")
        >>> state = model(torch.tensor([[5, 6, 7]])).state
        >>> perspectron.save_state("saved.state", state, model, extra={"tokens": 3})
        >>> perspectron.load_state("saved.state", model).batch_size
        1
    """
    if not isinstance(state, LMState) or state.model not in (None, model.number):
        raise StateError(f"{path}: no state of this model; save it with the model that made it")
    contents = packed(path, state, model, extra, dtype)
    if not appended.append(Path(path), contents):
        with atomic(Path(path)) as temporary:
            appended.write(temporary, contents, Path(path))


def packed(
    path: Path | str,
    state: LMState,
    model: Stateful,
    extra: dict[str, Any] | None = None,
    dtype: narrow.Dtype = "full",
) -> Contents:
    """The contents of a state's file. StateError, which names it: `extra` is no JSON object, there is no such dtype, or
    a number does not fit it."""
    parts = pytree.tree_leaves_with_path(state, is_leaf=_is_ragged)
    grown = {_name(where): part for where, part in parts if isinstance(part, Ragged) and part.grown}
    slots = {part.spanned() for part in grown.values()}
    apart = dtype == "full" and len(slots) == 1
    whole = state._map(_emptied, is_leaf=_is_ragged) if apart else state.filled()
    leaves = {_name(where): value for where, value in pytree.tree_leaves_with_path(whole)}
    tensors = {name: leaf.detach().cpu() for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    numbers = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    header = {"format": FORMAT, "model": model.fingerprint(), "numbers": json.dumps(numbers)}
    if kinds := tuned.kinds_of(state):
        header[TUNED] = ",".join(kinds)
    try:
        header["extra"] = json.dumps({} if extra is None else extra)
        if not isinstance(parse_json(header["extra"], room=JSON_ROOM), dict):
            raise ValueError("it must be an object")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: extra cannot be stored as JSON ({error})") from None
    if dtype != "full":
        narrow.tensors(path, tensors, header, dtype)
    if not apart:
        return Contents(header, tensors)
    spans = tuple(
        Grown(tuple(f"{name}.{own}" for own in part.grown), part.span) for name, part in grown.items()
    )
    named = {name for span in spans for name in span.names}
    return Contents(header, {n: x for n, x in tensors.items() if n not in named}, spans, slots.pop())


def load_state(path: Path | str, model: Stateful) -> LMState:
    """Read a state that `save_state` wrote, onto the CPU. StateError: it is missing, damaged or another model's.

    >>> model = perspectron.build("perspective2-tiny")
    >>> perspectron.save_state("read.state", model.init_state(2), model)
    >>> perspectron.load_state("read.state", model).batch_size
    2
    >>> perspectron.load_state("read.state", perspectron.build("perspective2-tiny", seed=1))
    Traceback (most recent call last):
    perspectron.util.errors.StateError: ...
    """
    return read_state(path, model)[0]


def read_state(
    path: Path | str, model: Stateful, before: Sequence[Path] = ()
) -> tuple[LMState, dict[str, Any]]:
    """Read a state saved by `save_state`, on the CPU, and the `extra` that was saved with it. before: as
    `appended.read`.

    StateError if the file is missing or damaged, was saved by another model (config or weights differ), or does not
    match this model's states: every tensor must have the shape and type that `init_state` gives, and every count must
    be possible.
    """
    path = Path(path)
    start, wanted = LMState(()), dict[str, tuple[Any, Any, Any]]()

    def check(header: dict[str, str], places: dict[str, Place]) -> None:
        """Refuse what cannot be a state of the model before it takes memory."""
        nonlocal start, wanted
        _check_format(path, header)
        start, wanted = _wanted(path, header, model)
        for name, place in places.items():
            if name in wanted and narrow.STORED not in header:
                _check_leaf(f"{path}: {name}", place, *wanted[name])

    header, tensors = appended.read(path, before, check)
    numbers = _json(path, header, "numbers")
    if narrow.STORED in header:
        narrow.widened(
            path, tensors, header, {name: getattr(leaf, "dtype", None) for name, (leaf, *_) in wanted.items()}
        )
    if other := set(wanted) ^ (set(tensors) | set(numbers)):
        name = min(other)
        raise StateError(
            f"{path}: {'lacks' if name in wanted else 'has'} {name[:80]}, must have the fields of the model's states"
        )
    rows = {len(tensor) for tensor in tensors.values() if tensor.ndim} or {0}
    if len(rows) > 1 or min(rows) < 1:
        raise StateError(
            f"{path}: tensors of {', '.join(map(str, sorted(rows)))} rows, must be of as many, 1 or more"
        )

    def leaf(where: pytree.KeyPath, _: object) -> Tensor | int:
        name = _name(where)
        value = tensors[name] if name in tensors else numbers[name]
        _check_leaf(f"{path}: {name}", value, *wanted[name])
        return value

    loaded: LMState = pytree.tree_map_with_path(leaf, start)
    for part in tuned.parts(loaded):
        for kind in tuned.KINDS:
            if not getattr(part, kind).isfinite().all():
                raise StateError(f"{path}: {kind} of a trained memory holds numbers that are not finite")
    try:
        _check_counts(loaded, model.config.positions)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    return dataclasses.replace(loaded, model=start.model), _json(path, header, "extra")


def _wanted(
    path: Path, header: dict[str, str], model: Stateful
) -> tuple[LMState, dict[str, tuple[Any, Any, Any]]]:
    """(an empty state of the model with the trained parts that the header names, by name its leaves and those of states
    with room for 2 and for 3 tokens), on the meta device. StateError: another model's, or no such parts."""
    if header["model"] != model.fingerprint():
        raise StateError(
            f"{path}: state of model {header['model'][:12]}, this model is {model.fingerprint()[:12]}; "
            "load it with the config and the weights that it was saved with"
        )
    kinds = tuple(header[TUNED].split(",")) if TUNED in header else ()
    if set(kinds) - set(tuned.KINDS) or len(set(kinds)) < len(kinds):
        raise StateError(f"{path}: {TUNED} is {header[TUNED][:40]!r}, must be of {', '.join(tuned.KINDS)}")
    try:
        start = model.init_state(1, device="meta", tuned=kinds)
    except ConfigError as error:
        raise StateError(f"{path}: {error}") from None
    rooms = (
        pytree.tree_leaves(model.init_state(1, capacity=room, device="meta", tuned=kinds)) for room in (2, 3)
    )
    known = zip(pytree.tree_leaves_with_path(start), *rooms, strict=True)
    return start, {_name(where): (leaf, *others) for (where, leaf), *others in known}


def _check_leaf(name: str, value: Any, empty: Any, roomy: Any, roomier: Any) -> None:
    """StateError unless a leaf fits those of the model's states: an empty one, and ones with room for 2 and for 3
    tokens. A dimension in which the last two differ may have any size; another must have a size of theirs."""
    if not isinstance(empty, Tensor):
        if type(value) is not int or not 0 <= value < MOST_TOKENS:
            raise StateError(f"{name} = {str(value)[:40]}, must be a whole number from 0 to 2⁶²")
        return
    same = isinstance(value, Tensor | Place) and len(value.shape) == empty.ndim
    if not same or value.dtype != empty.dtype:
        raise StateError(f"{name} is {_kind(value)}, must be {_kind(empty)}")
    for size, *sizes in zip(*(x.shape[1:] for x in (value, empty, roomy, roomier)), strict=True):
        if size not in sizes and sizes[1] == sizes[2]:
            raise StateError(f"{name} is {_kind(value)}, must be {_kind(roomy)} in all but its rows")


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor | Place) else repr(value)[:40]


def _check_counts(state: LMState, positions: int) -> None:
    """StateError unless every count of tokens is possible, the same in all layers, and fits its room."""
    leaves = [(_name(where), leaf) for where, leaf in pytree.tree_leaves_with_path(state)]
    lengths = [(name, leaf) for name, leaf in leaves if name.endswith("length_B")]
    most = positions if state.length_B is not None else MOST_TOKENS - 1
    for name, length_B in lengths:
        least, greatest = (int(x) for x in length_B.aminmax())
        if least < 0 or greatest > most:
            raise StateError(f"{name} holds {least if least < 0 else greatest}, must be from 0 to {most}")
        if not torch.equal(length_B, lengths[0][1]):
            raise StateError(
                f"{name} is another than {lengths[0][0]}, must be the same: tokens of the document"
            )
    for part in pytree.tree_leaves(state, is_leaf=_is_ragged):
        if isinstance(part, Ragged):
            part.room()


def _name(where: pytree.KeyPath) -> str:
    """Name of a leaf, such as layers[0].k_BHSK."""
    return pytree.keystr(where).removeprefix(".")


def load_extra(path: Path | str) -> dict[str, Any]:
    """Read the JSON object that was saved as `extra` with a state; StateError: the file is missing or damaged.

    >>> model = perspectron.build("perspective2-tiny")
    >>> perspectron.save_state("extra.state", model.init_state(1), model, extra={"speaker": "KING"})
    >>> perspectron.load_extra("extra.state")
    {'speaker': 'KING'}
    """
    header, _ = appended.read(Path(path), check=lambda header, _: _check_format(path, header))
    return _json(Path(path), header, "extra")


def _json(path: Path, header: dict[str, str], field: str) -> dict[str, Any]:
    """The JSON object in a field of the header. StateError: it is missing, or is no object."""
    try:
        value = parse_json(header.get(field, ""), room=JSON_ROOM)
    except ValueError as error:
        raise StateError(f"{path}: {field} is unreadable JSON ({error})") from None
    if not isinstance(value, dict):
        raise StateError(f"{path}: {field} is {str(value)[:40]}, must be an object")
    return value


def _check_format(path: Path | str, header: dict[str, str]) -> None:
    if header.get("format") not in FORMATS or "model" not in header:
        raise StateError(f"{path}: format {str(header.get('format'))[:40]!r}, must be {FORMAT!r}")


def fingerprint(config: ModelConfig, weights: dict[str, Tensor]) -> str:
    """Hex digest of a model: a checksum of its weights (independent of device and order) and of its config, fields at
    their defaults left out, so that a new field changes no digest. Matrices of 16 bits count as in float32, scales of
    packed ones as they are."""
    digest = hashlib.sha256(json.dumps(dump(config, defaults=False), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        weight = weights[name].detach().cpu()
        wide = name.endswith("weight") and weight.dtype in (torch.bfloat16, torch.float16)
        weight = weight.float() if wide else weight
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
