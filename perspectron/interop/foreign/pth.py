"""Files of RWKV-7's author, tensors by name as torch saves them, with the World vocabulary beside them, presented as a
folder in fla's format.

A file may hold nothing but tensors.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from perspectron.data import world
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS
from perspectron.util.errors import CheckpointError, ConfigError, DataError
from perspectron.util.files import read_text

SUFFIX = ".pth"
GROUP_EPS = 64e-5
_LAYER = re.compile(r"blocks\.(\d{1,6})\.(.+)")
_OUTER = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight", "ln_out": "model.norm"}
_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
_MATRICES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_ONE = ("k_k", "k_a", "r_k", *(f"x_{name}" for name in "rwkvag"))
_LOW = re.compile(r"att\.([wavg])([012])")
_FIRST = (
    "emb.weight",
    "head.weight",
    *(f"{n}.{part}" for n in ("ln_out", "blocks.0.ln0") for part in ("weight", "bias")),
)
_NAMES = (
    *(f"{name}.{part}" for name in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")),
    *(f"att.{name}" for name in _ONE), *(f"att.{name}.weight" for name in _MATRICES),
    *(f"att.{name}{i}" for name in "wav" for i in "012"), "att.g1", "att.g2",
    "ffn.x_k", "ffn.key.weight", "ffn.value.weight",
)  # fmt: skip
"""Names of tensors outside of layers (_FIRST) and within a layer (_NAMES)."""


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
    with tempfile.TemporaryDirectory() as folder:
        config = _config(path, shapes)
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (Path(folder) / world.FILE).write_text(text, encoding="utf-8", newline="")
        try:
            yield _Unpacked(Path(folder), config, path)
        except (CheckpointError, ConfigError, DataError) as error:
            told = str(error).replace(f"{folder}{os.sep}{world.FILE}", str(vocabulary))
            told = told.replace(f"{folder}{os.sep}config.json", str(path)).replace(folder, str(path))
            raise type(error)(told) from None


class _Unpacked(Source):
    """A source with config values that follow from shapes, and the file's tensors under fla's names."""

    def __init__(self, folder: Path, values: dict[str, Any], path: Path) -> None:
        super().__init__(folder, values)
        self.path = path
        count = min(values["num_hidden_layers"], MOST_BLOCKS)  # more are refused
        layers = [f"blocks.{i}.{name}" for i in range(count) for name in _NAMES]
        self.names = {_place(name)[0]: name for name in (*_FIRST, *layers)}
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
    stem, _, part = name.rpartition(".")
    if name in _OUTER:
        return _OUTER[name], _same
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{part}", _same
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, _same
    rest, there = layer[2], f"model.layers.{layer[1]}"
    stem, _, part = rest.rpartition(".")
    if stem in _NORMS:
        return f"{there}.{_NORMS[stem]}.{part}", _same
    if low := _LOW.fullmatch(rest):
        if low[2] == "0":
            return f"{there}.attn.{low[1]}_lora.lora.2.bias", torch.flatten
        return f"{there}.attn.{low[1]}_lora.lora.{0 if low[2] == '1' else 2}.weight", _turned
    if rest.removeprefix("att.") in _ONE:
        flat = torch.flatten if rest in ("att.k_k", "att.k_a") else _same
        return f"{there}.attn.{rest.removeprefix('att.')}", flat
    if rest == "ffn.x_k":
        return f"{there}.{rest}", torch.flatten
    for ours, theirs in _MATRICES.items():
        if rest == f"att.{ours}.weight":
            return f"{there}.attn.{theirs}.weight", _same
    return (f"{there}.{rest}" if rest in ("ffn.key.weight", "ffn.value.weight") else name), _same


def _same(x: Tensor) -> Tensor:
    return x


def _turned(x: Tensor) -> Tensor:
    """Transpose a matrix from [in, out] to [out, in]."""
    return x.T.contiguous() if x.ndim == 2 else x
