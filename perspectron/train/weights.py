"""Loading weights of a file into a model: all with the shapes and types that the model has, or none."""

from pathlib import Path

import torch
from torch import Tensor

from perspectron.model import half
from perspectron.model.model import LanguageModel, require_memory
from perspectron.util.errors import CheckpointError


def fill(model: LanguageModel, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors, removing them from the dict. CheckpointError names the first that does not fit. If the model is
    on the meta device, matrices of 16 bits stay so."""
    if model.device.type == "meta":
        half.keep(model, tensors)
    own = model.state_dict()
    same_tensors(own, tensors, path)
    if model.device.type == "meta":
        require_memory(model)
        taken = set[int]()
        model.load_state_dict({name: _alone(tensors.pop(name), taken) for name in own}, assign=True)
        return
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors.pop(name))  # freed one by one, so that all are never held twice


def _alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """The tensor, contiguous and with memory of its own; copied if it is not. taken: addresses of others."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if not whole or tensor.data_ptr() in taken:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    taken.add(tensor.data_ptr())
    return tensor.detach()


def same_tensors(own: dict[str, Tensor], tensors: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError, naming the first tensor that is missing or has another shape or type; floats of 16 bits
    count as float32."""
    for name in own | tensors:
        here, there = (_kind(side[name]) if name in side else "missing" for side in (own, tensors))
        if here != there:
            raise CheckpointError(f"{path}: weights of another model ({name} is {there} there, {here} here)")


def _kind(tensor: Tensor) -> str:
    dtype = torch.float32 if tensor.dtype in half.DTYPES else tensor.dtype
    return f"{list(tensor.shape)} {str(dtype).removeprefix('torch.')}"
