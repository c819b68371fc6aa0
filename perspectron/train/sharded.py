"""The tensors of a checkpoint that several ranks wrote: one safetensors file a rank, by torch.distributed.checkpoint.
A file holds parts of tensors, and in its header where they belong; any number of ranks, and one process alone, can
read them.

Headers are checked as those of other files of tensors are (util/tensors.py) before torch reads them. It maps the files,
and reads a part at a time: besides the tensors that are filled, this takes the files' pages, which the system may drop,
and the largest part.
"""

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from perspectron.util.errors import CheckpointError
from perspectron.util.files import opened, parse_json
from perspectron.util.machine import memory
from perspectron.util.tensors import JSON_ROOM, read_places


def shard_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write(state: dict[str, Any], folder: Path, group: Any) -> None:
    """Write this rank's part of the tensors into a folder that all ranks see; all of them call it."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(state, storage_writer=writer, process_group=group)


def _reader(folder: Path) -> HuggingFaceStorageReader:
    """Torch's reader of a folder, after its headers are checked. CheckpointError or ValueError: one is wrong, or there
    are gaps between the parts of a tensor."""
    parts, rooms = Counter[str](), dict[str, tuple[int, ...]]()
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path, CheckpointError) as file:
            _, metadata, places = read_places(file)
        starts = parse_json(metadata.get(CUSTOM_METADATA_KEY, "{}"), room=JSON_ROOM)
        for name, place in places.items():
            start = starts[name][SAVED_OFFSETS_KEY] if starts else [0] * len(place.shape)
            if len(start) != len(place.shape) or not all(type(at) is int and at >= 0 for at in start):
                raise ValueError(f"{path.name}: {name[:80]!r} starts at {str(start)[:80]}")
            ends = tuple(at + size for at, size in zip(start, place.shape, strict=True))
            room = rooms.setdefault(name, ends)
            rooms[name] = tuple(map(max, room, ends)) if len(room) == len(ends) else room
            parts[name] += math.prod(place.shape)
    for name, room in rooms.items():
        if math.prod(room) > parts[name]:
            raise ValueError(f"{name[:80]!r}: {parts[name]} numbers of {list(room)}")
    return HuggingFaceStorageReader(str(folder))


def shapes(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, on the meta device. CheckpointError for files that do not belong together."""
    try:
        metadata = _reader(folder).read_metadata()
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
    try:
        reader = _reader(folder)
        with warnings.catch_warnings(action="ignore"):  # that one process reads alone
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
