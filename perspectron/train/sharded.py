"""The tensors of a checkpoint that several ranks wrote: one safetensors file a rank, by torch.distributed.checkpoint.
A file holds parts of tensors, and in its header where they belong; any number of ranks, and one process alone, can
read them.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from perspectron.errors import CheckpointError
from perspectron.machine import memory


def shard_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write(state: dict[str, Any], folder: Path, group: Any) -> None:
    """Write this rank's part of the tensors into a folder that all ranks see; all of them call it."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(state, storage_writer=writer, process_group=group)


def shapes(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, on the meta device. CheckpointError for files that do not belong together."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        return {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
    except Exception as error:
        raise CheckpointError(f"{folder}: not a checkpoint's tensors ({error})") from None


def fill(state: dict[str, Any], folder: Path, group: Any = None) -> None:
    """Read these tensors, or this rank's parts of them, in place. CheckpointError where one is missing or of another
    shape."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings(action="ignore"):  # that it reads alone
            load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except Exception as error:
        raise CheckpointError(f"{folder}: not this model's tensors ({error})") from None


def whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, put together. CheckpointError as above, and for more than half the memory."""
    like = shapes(folder)
    size, most = sum(tensor.nbytes for tensor in like.values()), memory() // 2
    if size > most:
        raise CheckpointError(
            f"{folder}: {size:,} bytes, must be ≤ {most:,}, half the memory of this machine"
        )
    made = {name: torch.empty_like(tensor, device="cpu") for name, tensor in like.items()}
    fill(made, folder)
    return made
