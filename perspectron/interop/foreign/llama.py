"""Llama: attention and a SwiGLU in every block."""

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = ("is_llama_config",)
"""Of SmolLM2's files."""


def config(source: Source) -> ModelConfig:
    source.must("rope_interleaved", (False,), False)
    mixer = decoder.attention(
        source, decoder.rope(source), bias=decoder.flag(source, "attention_bias", False)
    )
    network = decoder.network(source, bias=decoder.flag(source, "mlp_bias", False))
    return decoder.model(source, "transformer", (mixer,) * decoder.layers(source), network, longest=2048)


weights = decoder.weights
