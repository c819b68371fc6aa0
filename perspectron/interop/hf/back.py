"""An imported model's weights, back under its family's names and in its shapes. The importer shows where each number
came from: it runs on tensors that hold their own indices, then on the restored ones, which must give the model's."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron.data import origin
from perspectron.interop.foreign import KINDS, Kind, kind
from perspectron.interop.foreign.source import Source
from perspectron.model.model import LanguageModel
from perspectron.util.errors import CheckpointError, PerspectronError
from perspectron.util.files import read_json
from perspectron.util.machine import memory

BYTES = 48  # of memory per weight while weights are put back


def put_back(model: LanguageModel, came: Path) -> dict[str, Tensor] | str:
    """The weights as in the family's own files, in their original dtypes unless those lose a bit; or why they cannot be
    put back. came: the run's folder of files from the import. CheckpointError: it is damaged."""
    if not (came / origin.WEIGHTS).is_file():
        return "it is not known which tensors it was imported from"
    values, known = (
        read_json(came / name, CheckpointError, infinite=True) for name in ("config.json", origin.WEIGHTS)
    )
    name = str(values.get("model_type")) if isinstance(values, dict) else ""
    try:
        places = {name: (tuple(shape), getattr(torch, dtype)) for name, (dtype, shape) in known.items()}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f"{came / origin.WEIGHTS}: must have the dtype and shape of each tensor"
        ) from None
    if name not in KINDS:
        return "it was imported from no known family"
    if sum(math.prod(shape) for shape, _ in places.values()) * BYTES > memory():
        return "there is too little memory to find out where each weight came from"
    own = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    importer = _Importer(
        kind(name), came, values, {name: tuple(weight.shape) for name, weight in own.items()}
    )
    try:
        if importer.config() != model.config:
            return "it has another config than the one that it was imported with"
        found = _solved(importer, own, {name: shape for name, (shape, _) in places.items()})
        found = {name: _narrowed(tensor, places[name][1]) for name, tensor in found.items()}
        again = importer(found)
        if other := found.keys() - importer.taken.keys():
            return f"an earlier version noted {min(other)}, which transformers does not have; import it again"
    except (PerspectronError, RuntimeError, KeyError) as error:
        return f"its weights cannot be put back ({error})"
    same = all(torch.equal(tensor.to(own[name].dtype), own[name]) for name, tensor in again.items())
    return found if same else "what its importer does to some weights cannot be undone"


def widened(weights: Mapping[str, Tensor], came: Path) -> bool:
    """True if a tensor of `put_back` has another dtype than it came in."""
    known = read_json(came / origin.WEIGHTS, CheckpointError)
    return any(tensor.dtype != getattr(torch, known[name][0]) for name, tensor in weights.items())


class _Importer:
    """A family's importer, run on a folder with given tensors in place of the folder's. shapes: of the model's tensors,
    by our names."""

    def __init__(
        self, kind: Kind, folder: Path, values: dict[str, Any], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        self._kind, self._folder, self._values, self._shapes = kind, folder, values, shapes
        self.taken: Mapping[str, Any] = {}
        """The tensors of the last run by transformers' names."""

    def config(self) -> Any:
        return self._kind.config(Source(self._folder, self._values))

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        source = Source(self._folder, self._values)
        source.shapes = self._shapes
        source.tensors = {name: tensor.clone for name, tensor in tensors.items()}
        weights, self.taken = self._kind.weights(source, self._kind.config(source)), source.taken
        return weights


def _solved(
    importer: _Importer, own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The family's tensors from which the importer makes the weights `own`, if it only moves numbers, and at most
    scales and shifts them. RuntimeError: it does something else."""
    order = sorted(
        shapes, key=lambda name: math.prod(shapes[name])
    )  # small tensors, which may be shifted, get small indices
    sizes = [math.prod(shapes[name]) for name in order]

    def split(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(sizes)
        return {name: part.view(shapes[name]) for name, part in zip(order, parts, strict=True)}

    total = sum(sizes)
    zeros, ones, placed = (
        importer(split(numbers))
        for numbers in (
            torch.zeros(total, dtype=torch.float64),
            torch.ones(total, dtype=torch.float64),
            torch.arange(total, dtype=torch.float64),
        )
    )
    flat = torch.full((total,), math.nan, dtype=torch.float64)
    for name, shift in zeros.items():
        shift = shift.double()
        scale = ones[name].double() - shift
        place = (placed[name].double() - shift) / scale
        moved = scale != 0
        if not torch.equal(place[moved], place[moved].round()):
            raise RuntimeError(f"{name} is no copy")
        flat[place[moved].long()] = ((own[name].double() - shift) / scale)[moved]
    if flat.isnan().any():
        raise RuntimeError("some numbers are nowhere in the model")
    return split(flat)


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in `dtype` if it holds them exactly, else in float32."""
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.double(), tensor) else tensor.to(torch.float32)
