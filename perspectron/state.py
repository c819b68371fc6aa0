"""A model's memory between calls: a pytree of tensors to fork, cut into rows, put together, save and load."""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from safetensors import SafetensorError, safe_open
from torch import Tensor

from perspectron.config import ModelConfig, dump
from perspectron.errors import StateError
from perspectron.files import atomic, save_tensors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound=type[Any])
FORMAT = "perspectron-state-2"


def register(cls: T) -> T:
    """Class decorator: a frozen dataclass of tensors (and ints) becomes a pytree node."""
    pytree.register_dataclass(cls)
    return cls


class Ragged(ABC):
    """Base of a part of a state whose rows may differ in shape, such as a cache with room for more tokens or fewer.

    Every other part is selected and stacked tensor by tensor, along its first dimension.
    """

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
    """One state per block, in order. A forward leaves it as it is, unless it is told to use it up (`consume_state`):
    then keep a `fork()` to go back to it."""

    layers: tuple["DataclassInstance", ...]
    length_B: Tensor | None = None
    """Tokens of the document so far [B], where the model has learned positions."""
    model: int | None = None
    """Number, in this process, of the model it belongs to; None where it is unknown. It is not saved."""

    @staticmethod
    def stack(states: Sequence["LMState"]) -> "LMState":
        """The rows of all states in one batch, as a copy. Caches take the capacity of the largest.

        StateError: no states, or states of different models.
        """
        if not states:
            raise StateError("stack: there are no states; give at least one")
        models = {state.model for state in states} - {None}
        trees = [pytree.tree_flatten(state, is_leaf=_is_ragged) for state in states]
        if len(models) > 1 or any(spec != trees[0][1] for _, spec in trees):
            raise StateError("stack: the states are of different models; stack states of one model alone")
        leaves = [_stacked(column) for column in zip(*(leaves for leaves, _ in trees), strict=True)]
        stacked: LMState = pytree.tree_unflatten(leaves, trees[0][1])
        return dataclasses.replace(stacked, model=next(iter(models), None))

    def select(self, rows: Tensor | Sequence[int]) -> "LMState":
        """The states of these rows, in this order, as a copy; a row may be taken more than once. Caches keep no more
        room than the longest of them needs. StateError: a row that is not there."""
        rows_N = torch.as_tensor(rows)
        if rows_N.numel() and (rows_N.is_floating_point() or rows_N.dtype == torch.bool):
            raise StateError(
                f"select: rows are {rows_N.dtype}, must be whole numbers; for a mask give mask.nonzero()[:, 0]"
            )
        rows_N = rows_N.to(torch.int64)
        for row in rows_N.tolist():
            self._check(row)
        return self._map(lambda part: _selected(part, rows_N), is_leaf=_is_ragged)

    def take(self, row: int) -> "LMState":
        """The state of one row, as a copy. StateError: a row that is not there."""
        return self.select([row])

    def put(self, row: int, state: "LMState") -> "LMState":
        """A copy in which `state`, of one row, stands in the place of this row.

        StateError: a row that is not there, a state of several rows or of another model.
        """
        self._check(row)
        if state.batch_size != 1:
            raise StateError(f"put: the state has {state.batch_size} rows; take one of them")
        B = self.batch_size
        return LMState.stack([self, state]).select([B if other == row else other for other in range(B)])

    def fork(self) -> "LMState":
        """An independent copy."""
        return self._map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    def detach(self) -> "LMState":
        """The same values, cut from the autograd graph (truncated backpropagation through time)."""
        return self._map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def to(self, device: torch.device | str) -> "LMState":
        return self._map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    @property
    def batch_size(self) -> int:
        """Rows; every tensor has the batch first."""
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
    """Rows of all tensors, one after the other. StateError unless they agree in all but their number."""
    kinds = [f"{tuple(tensor.shape[1:])} {tensor.dtype} on {tensor.device}" for tensor in tensors]
    if other := set(kinds) - {kinds[0]}:
        raise StateError(
            f"stack: a row of {kinds[0]} beside one of {min(other)}; stack states of one model alone"
        )
    return torch.cat(list(tensors))


def _is_ragged(part: object) -> bool:
    return isinstance(part, Ragged)


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
        raise StateError(f"stack: {column[0]} beside {max(column)}; stack states of one model alone")
    return column[0]


class Stateful(Protocol):
    """The part of a model that saving and loading need."""

    config: ModelConfig

    def init_state(self, batch_size: int) -> LMState: ...
    def fingerprint(self) -> str: ...


def save_state(
    path: Path | str, state: LMState, model: Stateful, *, extra: dict[str, Any] | None = None
) -> None:
    """Write `state` as safetensors with the model's fingerprint; `extra` is any JSON the caller wants kept.

    Appears whole or not at all; StorageError when it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for where, value in pytree.tree_leaves_with_path(state):
        if isinstance(value, Tensor):
            tensors[_name(where)] = value.detach().cpu()
        else:
            numbers[_name(where)] = value
    header = {
        "format": FORMAT,
        "model": model.fingerprint(),
        "numbers": json.dumps(numbers),
        "extra": json.dumps(extra or {}),
    }
    header["digest"] = _digest(header, tensors)
    with atomic(Path(path)) as temporary:
        save_tensors(temporary, tensors, header)


def load_state(path: Path | str, model: Stateful) -> LMState:
    """Read a state saved by `save_state`, on the CPU.

    StateError when the file is missing or damaged, or was saved by another model (other config or weights).
    """
    header, tensors = _read(Path(path))
    if header["model"] != model.fingerprint():
        raise StateError(
            f"{path}: state of model {header['model'][:12]}, this model is {model.fingerprint()[:12]}; "
            "load it with the config and the weights that it was saved with"
        )
    numbers = json.loads(header["numbers"])

    def leaf(where: pytree.KeyPath, _: object) -> Tensor | int:
        name = _name(where)
        if name not in tensors and name not in numbers:
            raise StateError(f"{path}: lacks {name}")
        return tensors[name] if name in tensors else numbers[name]

    start = model.init_state(1)
    loaded: LMState = pytree.tree_map_with_path(leaf, start)
    return dataclasses.replace(loaded, model=start.model)


def _name(where: pytree.KeyPath) -> str:
    """Name of a leaf, such as layers[0].k_BHSK."""
    return pytree.keystr(where).removeprefix(".")


def load_extra(path: Path | str) -> dict[str, Any]:
    """The `extra` that was saved with a state."""
    extra: dict[str, Any] = json.loads(_read(Path(path))[0]["extra"])
    return extra


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StateError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: not a saved state ({error})") from None
    if header.get("format") != FORMAT:
        raise StateError(f"{path}: format {header.get('format')!r}, expected {FORMAT!r}")
    digest = header.pop("digest", None)
    if _digest(header, tensors) != digest:
        raise StateError(f"{path}: damaged, its contents do not match its digest")
    return header, tensors


def _digest(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(config: ModelConfig, weights: dict[str, Tensor]) -> str:
    """Hex digest of a model: a checksum of its weights (independent of device and order) and of its config, fields at
    their defaults left out, so that a new field changes no digest."""
    digest = hashlib.sha256(json.dumps(dump(config, defaults=False), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
