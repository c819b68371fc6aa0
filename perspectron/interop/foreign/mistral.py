"""Mistral: Llama with grouped keys and, unless it says otherwise, a window of 4,096 tokens."""

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LOCAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig


def config(source: Source) -> ModelConfig:
    for name in ("attention_bias", "mlp_bias"):
        source.must(name, (False,), False)
    count, window = decoder.layers(source), decoder.window(source)
    kind = GLOBAL if window is None else LOCAL  # of all layers, whatever they are called
    decoder.kinds(source, [kind] * count, (kind,))
    mixer = decoder.attention(source, decoder.rope(source), key_heads=8, window=window)
    return decoder.model(source, "transformer", (mixer,) * count, decoder.network(source), longest=131_072)
