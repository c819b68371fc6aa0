"""A folder of another program while it is read: what was not asked for is named."""

import math
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from perspectron.model.config import MOST_SIZE
from perspectron.util.errors import CheckpointError
from perspectron.util.files import read_json
from perspectron.util.machine import memory
from perspectron.util.tensors import load_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Source:
    """Config values and, once `open_weights` was called, tensors of a folder."""

    def __init__(self, folder: Path, values: dict[str, Any], file: str = "config.json") -> None:
        self.folder, self.values, self.file = folder, values, file
        self._tensors: MutableMapping[str, Tensor] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """A value of config.json; null is as good as missing."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A whole number from 1 to `most` of config.json. CheckpointError for anything else."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(f"{name} is {value!r}, must be a whole number from 1 to {most:,}")
        return value

    def real(self, name: str, default: float) -> float:
        """A finite number of config.json. CheckpointError for anything else."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"{name} is {value!r}, must be a finite number")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list of config.json, empty where there is none. CheckpointError for anything else."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self.error(f"{name} is {value!r}, must be a list")
        return value

    def mapping(self, name: str) -> "Source":
        """The values of an object of config.json, none where it is missing. CheckpointError for anything else."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is {value!r}, must be an object")
        return Source(self.folder, value, self.file)

    def must(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value of config.json. CheckpointError unless it is among those that a model of ours can have."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))} to be read")
        return value

    def beside(self, name: str) -> "Source":
        """The values of another file of the folder, none where it is missing. CheckpointError: it is no object."""
        if not (self.folder / name).exists():
            return Source(self.folder, {}, name)
        values = read_json(self.folder / name, CheckpointError, infinite=True)
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.folder / name}: must be an object")
        return Source(self.folder, values, name)

    def error(self, message: str) -> CheckpointError:
        """An error that says what is wrong with the file."""
        return CheckpointError(f"{self.folder / self.file}: {message}")

    def open_weights(self) -> None:
        """Read the tensors: of model.safetensors, or of the files that its index names. CheckpointError: none of them,
        a name that is no file's in the folder, or more bytes than half the memory."""
        names = {WEIGHTS}
        if not (self.folder / WEIGHTS).exists():
            index = self.folder / INDEX
            if not index.exists():
                raise CheckpointError(f"{self.folder}: no weights in it, must have {WEIGHTS} or {INDEX}")
            values = read_json(index, CheckpointError)
            places = values.get("weight_map") if isinstance(values, dict) else None
            if not isinstance(places, dict) or not places:
                raise CheckpointError(f"{index}: weight_map is {places!r}, must name a file for each tensor")
            for name in places.values():
                if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{index}: {name!r}, must be the name of a .safetensors file beside it"
                    )
            names = set(places.values())
        files = [self.folder / name for name in sorted(names)]
        size, most = sum(file.stat().st_size for file in files if file.is_file()), memory() // 2
        if size > most:
            raise CheckpointError(
                f"{self.folder}: {size:,} bytes of weights, must be ≤ {most:,}, half the memory of this machine"
            )
        for file in files:
            self._tensors.update(load_tensors(file, CheckpointError, "the weights of a model")[1])

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor, which is then used up. CheckpointError, with its name: it is missing or of another shape."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: it has no weights {name}")
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: weights {name} have shape {list(tensor.shape)}, must have {list(shape)}"
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self._tensors

    def drop(self, *names: str) -> None:
        """Use up tensors that say nothing that the config does not."""
        for name in names:
            self._tensors.pop(name, None)

    def all(self) -> MutableMapping[str, Tensor]:
        """All tensors that are left, used up."""
        left, self._tensors = self._tensors, {}
        return left

    def done(self) -> None:
        """CheckpointError if a tensor was not used."""
        if self._tensors:
            raise CheckpointError(
                f"{self.folder}: weights {', '.join(sorted(self._tensors)[:3])} have no place in a model of ours"
            )
