"""Import of other programs' models as runs: a folder with a config.json, safetensors and a tokenizer.json, as
transformers writes it, a GGUF, or a .pth of RWKV's author.

`read` knows the kinds of model in KINDS. Each family is a module that translates its config and its weights into ours.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.data import origin
from perspectron.data.template import Template
from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.foreign import (
    bamba,
    decoder,
    falcon_h1,
    gemma3,
    gguf,
    gpt2,
    granite,
    kimi_linear,
    lfm2,
    llama,
    mamba,
    mamba2,
    mistral,
    nemotron_h,
    olmo2,
    olmo_hybrid,
    olmoe,
    own,
    pth,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    recurrent_gemma,
    rwkv7,
    smollm3,
)
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


KINDS: dict[str, Kind] = {
    "perspectron": Kind(own.config, own.weights, None),
    "gpt2": Kind(gpt2.config, gpt2.weights, gpt2.HARMLESS),
    "llama": Kind(llama.config, decoder.weights, llama.HARMLESS),
    "mistral": Kind(mistral.config, decoder.weights),
    "qwen2": Kind(qwen2.config, decoder.weights),
    "qwen3": Kind(qwen3.config, decoder.weights),
    "smollm3": Kind(smollm3.config, decoder.weights, smollm3.HARMLESS),
    "gemma3_text": Kind(gemma3.config, gemma3.weights, gemma3.HARMLESS),
    "gemma3": Kind(gemma3.config_within, gemma3.weights, gemma3.HARMLESS),
    "olmo2": Kind(olmo2.config, olmo2.weights),
    "olmo3": Kind(olmo2.config3, olmo2.weights),
    "olmoe": Kind(olmoe.config, decoder.weights, olmoe.HARMLESS),
    "qwen3_moe": Kind(qwen3_moe.config, decoder.weights, qwen3_moe.HARMLESS),
    "mamba2": Kind(mamba2.config, mamba2.weights, mamba2.HARMLESS),
    "granitemoehybrid": Kind(granite.config, granite.weights, granite.HARMLESS),
    "lfm2": Kind(lfm2.config, lfm2.weights, lfm2.HARMLESS),
    "qwen3_5_text": Kind(qwen3_5.config, qwen3_5.weights, qwen3_5.HARMLESS),
    "qwen3_5": Kind(qwen3_5.config_within, qwen3_5.weights, qwen3_5.HARMLESS),
    "mamba": Kind(mamba.config, mamba.weights, mamba.HARMLESS),
    "falcon_mamba": Kind(mamba.falcon, mamba.weights, mamba.HARMLESS),
    "recurrent_gemma": Kind(recurrent_gemma.config, recurrent_gemma.weights, recurrent_gemma.HARMLESS),
    "rwkv7": Kind(rwkv7.config, rwkv7.weights, rwkv7.HARMLESS),
    "bamba": Kind(bamba.config, bamba.weights, bamba.HARMLESS),
    "falcon_h1": Kind(falcon_h1.config, falcon_h1.weights, falcon_h1.HARMLESS),
    "olmo_hybrid": Kind(olmo_hybrid.config, olmo_hybrid.weights, olmo_hybrid.HARMLESS),
    "nemotron_h": Kind(nemotron_h.config, nemotron_h.weights, nemotron_h.HARMLESS),
    "qwen3_next": Kind(qwen3_next.config, qwen3_next.weights, qwen3_next.HARMLESS),
    "kimi_linear": Kind(kimi_linear.config, kimi_linear.weights, kimi_linear.HARMLESS),
}
"""The kinds of models that can be read, by the `model_type` of config.json."""


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


def model(source: Source, *, lens: bool = False) -> LanguageModel:
    """The model of a source, with its weights; errors as `read`."""
    made = empty(source, lens=lens)
    load(source, made)
    return made


def empty(source: Source, *, lens: bool = False) -> LanguageModel:
    """The model of a source on the meta device: its config and nothing else is read; errors as `read`."""
    name = source.get("model_type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise source.error(f"model_type is {name!r}, which cannot be read; {', '.join(KINDS)} can")
    if lens:
        require(name == "gpt2", "lens", True, f"left out: the model is {name!r}, only 'gpt2' can have lenses")
    try:
        config = kind.config(source)
        if kind.harmless is not None:
            source.done_config(HARMLESS.union(kind.harmless))
        made = shape_of(_upcycle().config_of_gpt2(config) if lens else config)
    except ConfigError as error:  # values that contradict each other
        raise source.error(str(error)) from None
    require_memory(made, 2)
    return made


def load(source: Source, made: LanguageModel) -> None:
    """Load a source's weights into a model. Tensors are read one by one, and a layer's are in memory twice for a
    moment. Errors as `read`."""
    kind = KINDS[source.get("model_type")]
    source.open_weights()
    require_memory(made, source.itemsize)
    config = kind.config(source)
    weights = kind.weights(source, config)
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
