"""A folder of another program while it is imported; config keys and tensors that were not read are reported."""

import contextlib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron.model.config import MOST_SIZE
from perspectron.util.errors import CheckpointError, ConfigError, DataError
from perspectron.util.files import read_json, read_object
from perspectron.util.tensors import unread_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
        "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "gradient_checkpointing", "id2label", "initializer_range", "label2id", "model_type", "num_labels",
        "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
        "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_cache",
    }
)  # fmt: skip
"""Keys of a config.json that do not affect what a model computes."""
SILENT = {
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "pruned_heads": {}, "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False,
    "remove_invalid_values": False,
}  # fmt: skip
"""Keys that every config of transformers has, with their defaults. Some files list all of them."""
LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Current names of kinds of layers, by those in older files."""


class Source:
    """Config values of a folder, and its tensors by name as functions that read them. Config keys that are read are
    noted, so that `done_config` can report the rest."""

    def __init__(
        self, folder: Path, values: dict[str, Any], file: str = "config.json", within: str = ""
    ) -> None:
        self.folder, self.values, self.file, self.within = folder, values, file, within
        self.tensors: dict[str, Callable[[], Tensor]] = {}
        self.itemsize = 4
        """Bytes of a weight in memory."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the tensors of the model that is read, by our names."""
        self.taken: dict[str, tuple[str, list[int]]] = {}
        """Dtype and shape of each tensor that was used."""
        self._asked, self._inner = set[str](), list[Source]()

    def get(self, name: str, default: Any = None) -> Any:
        """A value of config.json; null counts as missing."""
        self._asked.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None, most: int = MOST_SIZE, least: int = 1) -> int:
        """A whole number from `least` to `most` of config.json. CheckpointError for anything else."""
        value = self.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(f"{name} is {value!r}, must be a whole number from {least} to {most:,}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A finite number of config.json. CheckpointError for anything else."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"{name} is {value!r}, must be a finite number")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0 of config.json. CheckpointError for anything else."""
        value = self.real(name, default)
        if value <= 0:
            raise self.error(f"{name} is {value!r}, must be > 0")
        return value

    def items(self, name: str) -> list[Any]:
        """A list of config.json, empty where there is none. CheckpointError for anything else."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self.error(f"{name} is {value!r}, must be a list")
        return value

    def mapping(self, name: str) -> "Source":
        """The values of an object of config.json, empty if it is missing. CheckpointError for anything else."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} is {value!r}, must be an object")
        return self.inner(name, value)

    def inner(self, name: str, values: dict[str, Any]) -> "Source":
        """A source with these values in place of an object of config.json; `done_config` checks them, too."""
        inner = Source(self.folder, values, self.file, f"{self.within}{name}.")
        self._inner = [other for other in self._inner if other.within != inner.within] + [inner]
        return inner

    def layer_types(self, count: int, default: Sequence[str]) -> list[str]:
        """The kind of each of `count` layers, by current names. CheckpointError: not a list of as many names."""
        kinds = self.get("layer_types", list(default))
        if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(k, str) for k in kinds):
            raise self.error(f"layer_types is {str(kinds)[:80]}, must be a list of {count} names")
        return [LAYER_TYPES.get(kind, str(kind)) for kind in kinds]

    def done_config(self, harmless: Collection[str]) -> None:
        """Raise CheckpointError for a value that was not read, as it may change what the model computes. Null, SILENT
        and harmless names are excepted."""
        for name, value in self.values.items():
            if value not in (None, SILENT.get(name)) and name not in self._asked and name not in harmless:
                raise self.error(f"{name} is {repr(value)[:40]}, which no model of ours has a place for")
        for inner in self._inner:
            inner.done_config(harmless)

    def must(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value of config.json. CheckpointError unless it is among those that a model of ours can have."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))} to be read")
        return value

    def beside(self, name: str) -> "Source":
        """The values of another file of the folder, none if it is missing. CheckpointError: it is not an object."""
        return Source(self.folder, read_object(self.folder / name, CheckpointError), name)

    def error(self, message: str) -> CheckpointError:
        """An error that says what is wrong with the file."""
        return CheckpointError(f"{self.folder / self.file}: {self.within}{message}")

    def open_weights(self) -> None:
        """Find the tensors, in model.safetensors or in the files that its index names, unless they are known.
        CheckpointError: there is neither, or the index names something other than a .safetensors file of the folder."""
        if self.tensors:
            return
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
                plain = isinstance(name, str) and name.isprintable() and Path(name).name == name
                if not plain or not name.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{index}: {name!r}, must be the name of a .safetensors file beside it"
                    )
            names = set(places.values())
        sizes = set[int]()
        for name in sorted(names):
            found = unread_tensors(self.folder / name, CheckpointError, "the weights of a model")
            self.tensors |= {name: read for name, (_, read) in found.items()}
            sizes |= {
                place.dtype.itemsize
                for place, _ in found.values()
                if place.dtype.is_floating_point and len(place.shape) > 1
            }
        self.itemsize = 2 if sizes == {2} else 4

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor out of the source. CheckpointError, with its name: it is missing or of another shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: it has no weights {name}")
        tensor = self.tensors.pop(name)()
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: weights {name} have shape {list(tensor.shape)}, must have {list(shape)}"
            )
        self.taken.setdefault(name, (str(tensor.dtype).removeprefix("torch."), list(shape)))
        return tensor

    def take_all(
        self, there: str, here: str, names: Mapping[str, str] | None = None, but: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Take the tensors of our module `here`, each by its name within `there`. names: the file's names of the
        module's parts by ours, where they differ. but: our names of parts to leave out. CheckpointError: as `take`."""
        assert self.shapes, "shapes are set before weights are taken"
        taken = {}
        for ours, shape in self.shapes.items():
            if ours.startswith(f"{here}."):
                part, dot, rest = ours.removeprefix(f"{here}.").partition(".")
                if part not in but:
                    theirs = (names or {}).get(part, part)
                    taken[ours] = self.take(f"{there}.{theirs}{dot}{rest}", *shape)
        return taken

    def take_stack(self, whole: str, names: Sequence[str], *shape: int) -> Tensor:
        """Take tensors of one shape, stacked: each by its name, or `whole`, which only a GGUF has. CheckpointError: as
        `take`."""
        if not self.has(whole):
            return torch.stack([self.take(name, *shape) for name in names])
        stack = self.take(whole, len(names), *shape)
        self.note([whole], names, *shape)
        return stack

    def note(self, instead: Collection[str], names: Iterable[str], *shape: int) -> None:
        """Note that tensors of these names and this shape were used, as transformers has them, `instead` of others that
        were taken: those of a GGUF, or what was made on the way."""
        dtypes = [getattr(torch, self.taken.pop(name)[0]) for name in instead]
        dtype = str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")
        self.taken |= {name: (dtype, list(shape)) for name in names}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def drop(self, *names: str) -> None:
        """Discard tensors that add nothing to the config."""
        for name in names:
            self.tensors.pop(name, None)

    def drop_all(self, *prefixes: str) -> None:
        """Discard, by prefix, the tensors of parts that a text model does not have."""
        self.drop(*(name for name in self.tensors if name.startswith(prefixes)))

    def all(self) -> dict[str, Tensor]:
        """Take all tensors that are left."""
        left, self.tensors = self.tensors, {}
        return {name: read() for name, read in left.items()}

    def done(self) -> None:
        """Raise CheckpointError if a tensor was not taken."""
        if self.tensors:
            raise CheckpointError(
                f"{self.folder}: weights {', '.join(sorted(self.tensors)[:3])} have no place in a model of ours"
            )


@contextlib.contextmanager
def folder_of(texts: Mapping[str, str], path: Path, names: Mapping[str, str]) -> Iterator[Path]:
    """A temporary folder with these texts, by names of files, which exists within the context. In errors `path` stands
    for the folder, and the values of `names` for the files in it, by the beginnings of their names."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding="utf-8", newline="")
        try:
            yield Path(folder)
        except (CheckpointError, ConfigError, DataError) as error:
            told = str(error)
            for name, known in names.items():
                told = told.replace(f"{folder}{os.sep}{name}", known)
            raise type(error)(told.replace(folder, str(path))) from None
