"""OLMo 2 and 3: a norm after each part, and norms across all heads of queries and of keys. OLMo 3 has sliding windows
in three of four layers, which may have their own rotary positions."""

from functools import partial
from typing import Any

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LOCAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig, SequentialConfig


def config(source: Source) -> ModelConfig:
    return _model(source, [_mixer(source, decoder.rope(source))] * decoder.layers(source))


def config3(source: Source) -> ModelConfig:
    count = decoder.layers(source)
    kinds = source.layer_types(count, [LOCAL if (i + 1) % 4 else GLOBAL for i in range(count)])
    windows = decoder.sliding(source, kinds, source.number("sliding_window", 4096))
    ropes = decoder.ropes(source, {GLOBAL: source.real("rope_theta", 5e5), LOCAL: 5e5})
    return _model(source, [_mixer(source, ropes[k], window=w) for k, w in zip(kinds, windows, strict=True)])


def _mixer(source: Source, positions: decoder.Rope, **options: Any) -> Any:
    bias = decoder.flag(source, "attention_bias", False)
    return decoder.attention(source, positions, bias=bias, qk_norm="all", **options)


def _model(source: Source, mixers: list[Any]) -> ModelConfig:
    network, residual = decoder.network(source), SequentialConfig("post")
    return decoder.model(source, "transformer", mixers, network, eps=1e-5, longest=2048, residual=residual)


weights = partial(decoder.weights, norms=decoder.POST)
