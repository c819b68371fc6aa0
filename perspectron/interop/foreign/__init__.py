"""Models of other programs as runs: a folder with a config.json, safetensors and a tokenizer.json, as transformers
writes it, or a GGUF.

`read` knows the kinds of model in KINDS; each family is a file with our config of its config, and our weights of its
weights.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perspectron.data import origin
from perspectron.data.template import Template
from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.foreign import bamba, gguf, gpt2, llama, mamba2, own
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, require_memory
from perspectron.train.checkpoint import fill
from perspectron.util import registry
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError, DataError
from perspectron.util.files import read_json

Config = Callable[[Source], ModelConfig]
Weights = Callable[[Source, ModelConfig], dict[str, Tensor]]
KINDS: dict[str, tuple[Config, Weights]] = {
    "perspectron": (own.config, own.weights),
    "gpt2": (gpt2.config, gpt2.weights),
    "llama": (llama.config, llama.weights),
    "mistral": (
        partial(llama.config, defaults=llama.MISTRAL),
        partial(llama.weights, defaults=llama.MISTRAL),
    ),
    "mamba2": (mamba2.config, mamba2.weights),
    "bamba": (bamba.config, bamba.weights),
}
"""The kinds of models that can be read, by the `model_type` of config.json."""


class Imported(NamedTuple):
    """The parts of a folder that a run has. files: texts that it keeps as they came (`data.origin`)."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: Template | None
    files: dict[str, str]


def read(folder: Path, *, lens: bool = False) -> Imported:
    """The model, tokenizer and chat template in a folder of transformers, or in a GGUF. lens: of a GPT-2, with the
    parts of the lens design beside its own, at rest. Weights of fewer bits get the dtype that the model has.

    DataError for a tokenizer that the tokenizers library cannot read, ConfigError for a template that is none.
    CheckpointError: no such folder, a kind that is not known, an option that no model of ours has, or weights that are
    missing, left over or of another shape, with their names.
    """
    if folder.suffix == gguf.SUFFIX:
        with gguf.unpacked(folder) as source:
            return _read(source, lens)
    values = read_json(folder / "config.json", CheckpointError, infinite=True)
    return _read(Source(folder, values if isinstance(values, dict) else {}), lens)


def _read(source: Source, lens: bool) -> Imported:
    folder, name = source.folder, source.get("model_type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type is {name!r}, which cannot be read; {', '.join(KINDS)} can"
        )
    if lens:
        require(name == "gpt2", "lens", True, f"left out: the model is {name!r}, only 'gpt2' can have lenses")
    config_from, weights_from = kind
    config = config_from(source)
    upcycle = registry.at(f"{registry.designs()['lens'].package}.upcycle") if lens else None
    with torch.device("meta"):
        model = LanguageModel(config if upcycle is None else upcycle.config_of_gpt2(config))
    require_memory(model)
    tokenizer = own.tokenizer(source) if kind[0] is own.config else Tokenizer.of_transformers(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}"
        )
    source.open_weights()
    weights = weights_from(source, config)
    source.done()
    if upcycle is not None:
        weights = upcycle.weights_of_gpt2(weights, model.config)
    empty = model.state_dict()
    for name, tensor in weights.items():
        if name in empty and tensor.is_floating_point() and empty[name].is_floating_point():
            weights[name] = tensor.to(empty[name].dtype)
    fill(model, weights, folder)
    return Imported(model, tokenizer, Template.of(folder), origin.files(folder))
