"""Mistral: Llama with grouped keys and, unless it says otherwise, a window of 4,096 tokens."""

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig


def config(source: Source) -> ModelConfig:
    mixer = decoder.attention(source, decoder.rope(source), key_heads=8, window=decoder.window(source))
    mixers = (mixer,) * decoder.layers(source)
    return decoder.model(source, "transformer", mixers, decoder.network(source), longest=131_072)


weights = decoder.weights
