"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and a window in its upper layers if asked for."""

from typing import Any

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LOCAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig


def config(source: Source) -> ModelConfig:
    return decoded(source, bias=True, out_bias=False)


def decoded(source: Source, width: int | None = None, **options: Any) -> ModelConfig:
    """The config of a Qwen with full or sliding attention in each layer. width, options: as `decoder.attention`."""
    count = decoder.layers(source)
    source.must("use_mrope", (False,), False)  # in files of Qwen2.5
    first, window = source.number("max_window_layers", 28, least=0), decoder.window(source)
    if not decoder.flag(source, "use_sliding_window", False):
        window = None
    kinds = [LOCAL if window is not None and i >= first else GLOBAL for i in range(count)]
    windows, turned = decoder.sliding(source, source.layer_types(count, kinds), window), decoder.rope(source)
    mixers = [
        decoder.attention(source, turned, key_heads=32, width=width, window=own, **options) for own in windows
    ]
    return decoder.model(source, "transformer", mixers, decoder.network(source), longest=32_768)
