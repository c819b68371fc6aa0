"""Files of RWKV-7's author, tensors by name as torch saves them, with the World vocabulary beside them, presented as a
folder in fla's format.

A file may hold nothing but tensors.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from perspectron.data import world
from perspectron.interop.foreign.source import Source, folder_of
from perspectron.model.config import MOST_BLOCKS
from perspectron.util.errors import CheckpointError, DataError
from perspectron.util.files import read_text

SUFFIX = ".pth"
GROUP_EPS = 64e-5
_LAYER = re.compile(r"blocks\.(\d{1,6})\.(.+)")
_BOTH = ("weight", "bias")
_OUTER = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight"} | {
    f"ln_out.{part}": f"model.norm.{part}" for part in _BOTH
}
_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
_NAMES = {
    **{f"{name}.{part}": f"{there}.{part}" for name, there in _NORMS.items() for part in _BOTH},
    **{f"att.{name}.weight": f"attn.{name[0]}_proj.weight" for name in ("receptance", "key", "value", "output")},
    **{f"att.{name}": f"attn.{name}" for name in ("k_k", "k_a", "r_k", *(f"x_{x}" for x in "rwkvag"))},
    **{f"att.{x}0": f"attn.{x}_lora.lora.2.bias" for x in "wav"},
    **{f"att.{x}1": f"attn.{x}_lora.lora.0.weight" for x in "wavg"},
    **{f"att.{x}2": f"attn.{x}_lora.lora.2.weight" for x in "wavg"},
    **{name: name for name in ("ffn.x_k", "ffn.key.weight", "ffn.value.weight")},
}  # fmt: skip
"""fla's names of tensors by the author's, outside of layers (_OUTER) and within a layer (_NAMES)."""
_FLAT = ("att.k_k", "att.k_a", "att.w0", "att.a0", "att.v0", "ffn.x_k")
_TURNED = tuple(f"att.{x}{i}" for x in "wavg" for i in "12")
"""Tensors of a layer that are vectors at fla, and those that are stored [in, out] in place of [out, in]."""


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Source]:
    """A .pth as a temporary folder in fla's format, which exists within the context.

    CheckpointError, naming the file and what is wrong: it holds anything but tensors, or is not of this family.
    DataError: there is no vocabulary beside it, or one of its lines is wrong.
    """
    # Names and shapes only. Values are read once the model is known to fit into memory.
    shapes = {name: tuple(x.shape) for name, x in _tensors(path, "meta").items()}
    vocabulary = path.with_name(world.FILE)
    try:
        text = read_text(vocabulary)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{vocabulary}: the vocabulary of {path.name} must be beside it ({why})") from None
    config = _config(path, shapes)
    texts = {"config.json": json.dumps(config), world.FILE: text}
    with folder_of(texts, path, {world.FILE: str(vocabulary), "config.json": str(path)}) as folder:
        yield _Unpacked(folder, config, path)


class _Unpacked(Source):
    """A source with config values that follow from shapes, and the file's tensors under fla's names."""

    def __init__(self, folder: Path, values: dict[str, Any], path: Path) -> None:
        super().__init__(folder, values)
        self.path = path
        count = min(values["num_hidden_layers"], MOST_BLOCKS)  # more are refused
        layers = (f"blocks.{i}.{name}" for i in range(count) for name in _NAMES)
        self.names = {_place(name)[0]: name for name in (*_OUTER, *layers)}
        """The author's names of tensors, by fla's."""

    def open_weights(self) -> None:
        held = _tensors(self.path, "cpu")
        sizes = {tensor.dtype.itemsize for tensor in held.values() if tensor.ndim > 1}
        for name, tensor in held.items():
            there, change = _place(name)
            self.tensors[there] = partial(change, tensor)
        self.itemsize = 2 if sizes == {2} else 4

    def take(self, name: str, *shape: int) -> Tensor:
        try:
            return super().take(name, *shape)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(name, self.names.get(name, name))) from None


def _tensors(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors of the file by name; on "meta" their values are not read. CheckpointError: it holds anything else."""
    try:
        found = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except UnpicklingError as error:
        other = re.search(r"(?:GLOBAL|global|function|class) `?([\w.]+)`?", str(error))
        what = f"{other[1]}, must hold tensors only" if other else "what torch does not read as tensors"
        raise CheckpointError(f"{path}: it holds {what}") from None
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        why = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path}: not a file of tensors ({why})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: it holds a {type(found).__name__}, must be tensors by name")
    for name, value in found.items():
        whole = isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()
        if not isinstance(name, str) or not whole:
            what = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{path}: {name!r} is a {what}, must be a tensor of floating point")
    return {name: value.detach() for name, value in found.items()}


def _config(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config that fla would have for tensors of these shapes. CheckpointError: one of them is missing."""

    def size(name: str, axis: int) -> int:
        shape = shapes.get(name)
        if shape is None:
            raise CheckpointError(f"{path}: it has no weights {name}, so it is no RWKV-7")
        if len(shape) != 2:
            raise CheckpointError(f"{path}: weights {name} have shape {list(shape)}, must have 2 axes")
        return shape[axis]

    layers = 1 + max((int(m[1]) for name in shapes if (m := _LAYER.fullmatch(name))), default=0)
    ranks = {
        key: size(f"blocks.{min(layer, layers - 1)}.att.{name}1", 1)
        for name, key, layer in (
            ("w", "decay_low_rank_dim", 0), ("a", "a_low_rank_dim", 0), ("g", "gate_low_rank_dim", 0),
            ("v", "v_low_rank_dim", 1),
        )
        if name != "v" or layers > 1
    }  # fmt: skip
    return {
        "model_type": "rwkv7", "vocab_size": size("emb.weight", 0), "hidden_size": size("emb.weight", 1),
        "num_hidden_layers": layers, "head_dim": size("blocks.0.att.r_k", 1), **ranks,
        "intermediate_size": size("blocks.0.ffn.key.weight", 0), "norm_eps": 1e-5, "group_norm_eps": GROUP_EPS,
        "fuse_norm": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip


def _place(name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The name of a tensor in fla's format, and the function that converts it; an unknown one keeps its name."""
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] not in _NAMES:
        return _OUTER.get(name, name), torch.Tensor.contiguous
    there = f"model.layers.{layer[1]}.{_NAMES[layer[2]]}"
    if layer[2] in _TURNED:
        return there, lambda x: x.T.contiguous() if x.ndim == 2 else x
    return there, torch.flatten if layer[2] in _FLAT else torch.Tensor.contiguous
