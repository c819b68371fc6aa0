"""Reads the folders that `perspectron export --hf` wrote, also after transformers has saved them again."""

from dataclasses import replace

from torch import Tensor

from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.util.config import load

PREFIX = "model."


def config(source: Source) -> ModelConfig:
    """The config within config.json."""
    whole = load(ModelConfig, source.get("architecture"), f"{source.folder / 'config.json'}: architecture")
    return replace(whole, vocab_size=source.number("vocab_size"))


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    """The same tensors under our names."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in source.all().items()}
