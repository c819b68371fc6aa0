"""Qwen3: Qwen2 with norms of each head's queries and keys in the place of biases."""

from perspectron.interop.foreign import decoder, qwen2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig


def config(source: Source) -> ModelConfig:
    return qwen2.decoded(
        source, width=128, qk_norm="head", bias=decoder.flag(source, "attention_bias", False)
    )
