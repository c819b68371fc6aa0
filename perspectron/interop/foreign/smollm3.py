"""SmolLM3: Llama with every fourth layer without positions, and a window there if asked for."""

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LOCAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

THETA = 2_000_000.0
HARMLESS = ("max_window_layers",)
"""Keys of published files that transformers does not read."""


def config(source: Source) -> ModelConfig:
    count, every = decoder.layers(source), source.number("no_rope_layer_interval", 4)
    turns = source.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    if len(turns) < count or any(turn not in (0, 1) for turn in turns):
        raise source.error(f"no_rope_layers is {str(turns)[:80]}, must be {count} of 0 and 1")
    slides, window = decoder.flag(source, "use_sliding_window", False), source.get("sliding_window")
    window = None if window is None else source.number("sliding_window")
    kinds = [LOCAL if slides and window is not None and not turn else GLOBAL for turn in turns[:count]]
    windows = decoder.sliding(source, source.layer_types(count, kinds), window)
    positions, bias = decoder.rope(source, theta=THETA), decoder.flag(source, "attention_bias", False)
    mixers = [
        decoder.attention(
            source, positions if turn else None, heads=16, key_heads=4, bias=bias, window=window
        )
        for turn, window in zip(turns[:count], windows, strict=True)
    ]
    network = decoder.network(source, bias=decoder.flag(source, "mlp_bias", False))
    return decoder.model(source, "transformer", mixers, network, tied=True, longest=32_768)
