"""Llama: attention and a SwiGLU in every block."""

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = ("is_llama_config", "max_sequence_length")
"""Keys of published files that transformers does not read."""


def config(source: Source) -> ModelConfig:
    for name in ("rope_interleaved", "use_flash_attn"):
        source.must(name, (False,), False)
    count = decoder.layers(source)
    decoder.kinds(source, [GLOBAL] * count, (GLOBAL,))
    mixer = decoder.attention(
        source, decoder.rope(source), bias=decoder.flag(source, "attention_bias", False)
    )
    network = decoder.network(source, bias=decoder.flag(source, "mlp_bias", False))
    return decoder.model(source, "transformer", (mixer,) * count, network, longest=2048)
