"""What a model remembers between calls: a pytree of tensors to fork, measure, save and load."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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


@register
@dataclass(frozen=True)
class LMState:
    """One state per block, in order. Under `torch.inference_mode()` a forward updates it in place: the
    state handed in is used up. Keep a `fork()` to go back to it."""

    layers: tuple["DataclassInstance", ...]
    length_B: Tensor | None = None
    """Tokens of the document so far [B], where the model has learned positions."""

    def fork(self) -> "LMState":
        """An independent copy."""
        return _map(lambda tensor: tensor.clone(), self)

    def select(self, rows_N: Tensor) -> "LMState":
        """The states of the given batch rows [N], in that order; a row may be taken more than once."""
        return _map(lambda tensor: tensor.index_select(0, rows_N.to(tensor.device)), self)

    def detach(self) -> "LMState":
        """The same values, cut from the autograd graph (truncated backpropagation through time)."""
        return _map(lambda tensor: tensor.detach(), self)

    def to(self, device: torch.device | str) -> "LMState":
        return _map(lambda tensor: tensor.to(device), self)

    @property
    def batch_size(self) -> int:
        """Rows; every tensor has the batch first."""
        return next(len(leaf) for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes, summed over the tensors."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor))


def _map(function: Any, state: LMState) -> LMState:
    result: LMState = pytree.tree_map_only(Tensor, function, state)
    return result


class Stateful(Protocol):
    """What saving and loading ask of a model."""

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
            f"{path}: state of model {header['model'][:12]}, this model is {model.fingerprint()[:12]}"
        )
    numbers = json.loads(header["numbers"])

    def leaf(where: pytree.KeyPath, _: object) -> Tensor | int:
        name = _name(where)
        if name not in tensors and name not in numbers:
            raise StateError(f"{path}: lacks {name}")
        return tensors[name] if name in tensors else numbers[name]

    loaded: LMState = pytree.tree_map_with_path(leaf, model.init_state(1))
    return loaded


def _name(where: pytree.KeyPath) -> str:
    """layers[0].k_BHSK"""
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
    """Hex digest of a model: a checksum of its weights (independent of device and order) and of its config but for what
    stands at its default, so that a new field changes no digest."""
    digest = hashlib.sha256(json.dumps(dump(config, defaults=False), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
