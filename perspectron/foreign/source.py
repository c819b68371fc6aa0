"""A folder of another program while it is read: what was not asked for is named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from perspectron.errors import CheckpointError


class Source:
    """Config values and tensors of a folder."""

    def __init__(self, folder: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.folder, self.values, self._tensors = folder, values, tensors

    def get(self, name: str, default: Any = None) -> Any:
        """A value of config.json; null is as good as missing."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number ≥ 1 of config.json. CheckpointError for anything else."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise self.error(f"{name} is {value!r}, must be a whole number ≥ 1")
        return value

    def must(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value of config.json. CheckpointError unless it is among those that a model of ours can have."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))} to be read")
        return value

    def error(self, message: str) -> CheckpointError:
        """What is wrong with config.json."""
        return CheckpointError(f"{self.folder / 'config.json'}: {message}")

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, which is then used up. CheckpointError, with its name: it is missing or of another
        shape."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: it has no weights {name}")
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: weights {name} have shape {list(tensor.shape)}, must have {list(shape)}"
            )
        return tensor.float() if tensor.is_floating_point() else tensor

    def has(self, name: str) -> bool:
        return name in self._tensors

    def drop(self, *names: str) -> None:
        """Use up tensors that say nothing that the config does not."""
        for name in names:
            self._tensors.pop(name, None)

    def all(self) -> dict[str, Tensor]:
        """All tensors that are left, used up."""
        left, self._tensors = self._tensors, {}
        return left

    def done(self) -> None:
        """CheckpointError if a tensor was not used."""
        if self._tensors:
            raise CheckpointError(
                f"{self.folder}: weights {', '.join(sorted(self._tensors)[:3])} have no place in a model of ours"
            )
