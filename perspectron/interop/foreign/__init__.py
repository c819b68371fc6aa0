"""Import of other programs' models as runs: a folder with a config.json, safetensors and a tokenizer.json, as
transformers writes it, a GGUF, or a .pth of RWKV's author.

`read` knows the kinds of model in KINDS. Each family is a module that translates its config and its weights into ours.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.data import origin
from perspectron.data.template import Template
from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.foreign import decoder, gguf, own, pth
from perspectron.interop.foreign.source import HARMLESS, Source
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, require_memory, shape_of
from perspectron.train.weights import fill
from perspectron.util import registry
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.files import read_json


class Kind(NamedTuple):
    """Importer of a family. config, weights: translate its config and weights to ours. harmless: config keys, beside
    those of all families, that do not affect what the model computes; None: unread keys are accepted."""

    config: Callable[[Source], ModelConfig]
    weights: Callable[[Source, ModelConfig], dict[str, Tensor]]
    harmless: tuple[str, ...] | None = ()


KINDS = {
    "perspectron": "own", "gpt2": "gpt2", "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3",
    "smollm3": "smollm3", "gemma3_text": "gemma3", "gemma3": "gemma3:config_within", "olmo2": "olmo2",
    "olmo3": "olmo2:config3", "olmoe": "olmoe", "qwen3_moe": "qwen3_moe", "mamba2": "mamba2",
    "granitemoehybrid": "granite", "lfm2": "lfm2", "qwen3_5_text": "qwen3_5", "qwen3_5": "qwen3_5:config_within",
    "mamba": "mamba", "falcon_mamba": "mamba:falcon", "recurrent_gemma": "recurrent_gemma", "rwkv7": "rwkv7",
    "bamba": "bamba", "falcon_h1": "falcon_h1", "olmo_hybrid": "olmo_hybrid", "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3_next", "kimi_linear": "kimi_linear",
}  # fmt: skip
"""The module of each kind of model that can be read, by the `model_type` of config.json, and its function of configs
where that is not `config`."""


def kind(name: str) -> Kind:
    """The importer of a kind of KINDS. A module without `weights` has those of `decoder`."""
    place, _, config = KINDS[name].partition(":")
    module = import_module(f"{__name__}.{place}")
    weights, harmless = getattr(module, "weights", decoder.weights), getattr(module, "HARMLESS", ())
    return Kind(getattr(module, config or "config"), weights, harmless)


class Imported(NamedTuple):
    """What a run takes from a folder. files: texts that it keeps unchanged, by name (`data.origin`)."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: Template | None
    files: dict[str, str]


def read(folder: Path, *, lens: bool = False) -> Imported:
    """Read the model, tokenizer and chat template of a transformers folder, a GGUF or a .pth. lens: add the parts of
    the lens design to a GPT-2, set so that they change nothing. 16-bit matrices stay in 16 bits (`model.half`).

    DataError for a tokenizer that the tokenizers library cannot read, ConfigError for an invalid template, and for a
    model that does not fit into memory. CheckpointError: no such folder, an unknown kind, an option that no model of
    ours has, or weights that are missing, left over or of another shape, with their names.
    """
    if folder.suffix == gguf.SUFFIX:
        with gguf.unpacked(folder) as source:
            return _read(source, lens)
    if folder.suffix == pth.SUFFIX:
        with pth.unpacked(folder) as source:
            return _read(source, lens)
    return _read(opened(folder), lens)


def _read(source: Source, lens: bool) -> Imported:
    made = empty(source, lens=lens)
    ours = source.get("model_type") == "perspectron"
    tokenizer = own.tokenizer(source) if ours else Tokenizer.of_transformers(source.folder)
    tokenizer = tokenizer.within(made.config.vocab_size, source.folder / "tokenizer.json")
    load(source, made)
    files = origin.files(source.folder)
    if source.taken:
        files[origin.WEIGHTS] = json.dumps(source.taken)
    return Imported(made, tokenizer, Template.of(source.folder), files)


def opened(folder: Path) -> Source:
    """A source with the values of the folder's `config.json`. CheckpointError: there is none, or it cannot be read."""
    if folder.is_file():
        kinds = f"a folder with config.json, a {gguf.SUFFIX} or a {pth.SUFFIX}"
        raise CheckpointError(f"{folder}: a file of another kind, must be {kinds}")
    values = read_json(folder / "config.json", CheckpointError, infinite=True)
    return Source(folder, values if isinstance(values, dict) else {})


def model(source: Source) -> LanguageModel:
    """The model of a source, with its weights; errors as `read`."""
    made = empty(source)
    load(source, made)
    return made


def empty(source: Source, *, lens: bool = False) -> LanguageModel:
    """The model of a source on the meta device: its config and nothing else is read; errors as `read`."""
    name = source.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        raise source.error(f"model_type is {name!r}, which cannot be read; {', '.join(KINDS)} can")
    if lens:
        require(name == "gpt2", "lens", True, f"left out: the model is {name!r}, only 'gpt2' can have lenses")
    found = kind(name)
    try:
        config = found.config(source)
        if found.harmless is not None:
            source.done_config(HARMLESS.union(found.harmless))
        made = shape_of(_upcycle().config_of_gpt2(config) if lens else config)
    except ConfigError as error:  # values that contradict each other
        raise source.error(str(error)) from None
    require_memory(made, 2)
    return made


def load(source: Source, made: LanguageModel) -> None:
    """Load a source's weights into a model. Tensors are read one by one, and a layer's are in memory twice for a
    moment. Errors as `read`."""
    found = kind(source.get("model_type"))
    source.open_weights()
    require_memory(made, source.itemsize)
    config = found.config(source)
    source.shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    weights = found.weights(source, config)
    source.done()
    if config != made.config:
        weights = _upcycle().weights_of_gpt2(weights, made.config)
    for name, tensor in weights.items():
        weights[name] = tensor.float() if tensor.dtype == torch.float64 else tensor
        if tensor.numel() and not all(end.isfinite() for end in weights[name].aminmax()):
            raise CheckpointError(
                f"{source.folder}: {name} has NaN or infinity, must be finite; get the file anew"
            )
    fill(made, weights, source.folder)


def _upcycle() -> Any:
    return registry.at(f"{registry.designs()['lens'].package}.upcycle")
