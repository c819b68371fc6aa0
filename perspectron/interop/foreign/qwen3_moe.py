"""Qwen3 with a mixture of experts in its layers, or in some of them."""

from perspectron.interop.foreign import decoder, mixture
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = (*mixture.HARMLESS, "max_window_layers")


def config(source: Source) -> ModelConfig:
    count, window = decoder.layers(source), decoder.window(source)
    if not decoder.flag(source, "use_sliding_window", False):
        window = None
    attention = decoder.attention(
        source, decoder.rope(source), key_heads=4, qk_norm="head", window=window,
        bias=decoder.flag(source, "attention_bias", False),
    )  # fmt: skip
    networks = decoder.networks(source, count, normed=False)
    return decoder.model(source, "qwen3_moe", [attention] * count, networks, longest=32_768)
