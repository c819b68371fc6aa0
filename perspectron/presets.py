"""Named models. A preset is a function of a few sizes, each of which can be overridden by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from perspectron.config import BlockConfig, MixerConfig, ModelConfig, one_of, require
from perspectron.ffn import RoutedConfig, SwiGLUConfig, TiedConfig
from perspectron.mixers.attention import AttentionConfig
from perspectron.mixers.pdr import PDRConfig
from perspectron.mixers.window_gqa import WindowGQAConfig
from perspectron.model import LanguageModel

Sizes = dict[str, Any]

TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 4, "hidden": 472, "rank": 32, "heads": 4, "kv_heads": 2,
    "window": 128, "out_norm": False, "renorm_every": 0, "ffn": "dense", "torus": [8, 4, 4],
}  # fmt: skip
M20: Sizes = TINY | {
    "vocab_size": 8192, "d_model": 384, "layers": 8, "hidden": 1408, "rank": 64, "heads": 6, "window": 512,
}  # fmt: skip
M125: Sizes = M20 | {
    "vocab_size": 32768, "d_model": 768, "layers": 12, "hidden": 2816, "rank": 128, "heads": 12, "kv_heads": 3,
}  # fmt: skip
T1: Sizes = M125 | {
    "d_model": 4096, "layers": 80, "hidden": 11008, "rank": 256, "heads": 32, "kv_heads": 8, "ffn": "routed",
}  # fmt: skip


def perspective(name: str, sizes: Sizes) -> ModelConfig:
    """Blocks of four: three PDR layers, then windowed GQA (decisions.md §2).

    `ffn`: "dense", a SwiGLU in every layer; "routed", ternary-to-be experts on a torus in the PDR layers;
    "seed", the PDR layers use the network of the next GQA layer, which leaves what the routed model shares.
    """
    one_of(sizes["ffn"], ("dense", "routed", "seed"), "ffn")
    require(sizes["layers"] >= 1, "layers", sizes["layers"], "≥ 1")
    dense = SwiGLUConfig(sizes["hidden"])
    routed = RoutedConfig(sizes["hidden"], tuple(sizes["torus"]))
    pdr = PDRConfig(sizes["rank"], out_norm=sizes["out_norm"], renorm_every=sizes["renorm_every"])
    gqa = WindowGQAConfig(sizes["heads"], sizes["kv_heads"], sizes["window"])
    blocks = []
    for layer in range(sizes["layers"]):
        ffn = {"dense": dense, "routed": routed, "seed": TiedConfig(layer // 4 * 4 + 3)}[sizes["ffn"]]
        blocks.append(BlockConfig(gqa, dense) if layer % 4 == 3 else BlockConfig(pdr, ffn))
    return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], tuple(blocks))


def transformer(name: str, sizes: Sizes) -> ModelConfig:
    """The twin of a Perspective model: same width, depth and vocabulary, full attention with RoPE in every
    layer, and a SwiGLU widened or narrowed (in steps of 8) so that the parameters match."""

    def twin(hidden: int) -> ModelConfig:
        mixer: MixerConfig = AttentionConfig(sizes["heads"])
        block = BlockConfig(mixer, SwiGLUConfig(hidden))
        return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], (block,) * sizes["layers"])

    surplus = _parameters(perspective(name, sizes)) - _parameters(twin(sizes["hidden"]))
    step = 8 * 3 * sizes["d_model"] * sizes["layers"]
    return twin(max(8, sizes["hidden"] + 8 * round(surplus / step)))


def _parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())


class Preset(NamedTuple):
    design: Callable[[str, Sizes], ModelConfig]
    sizes: Sizes
    summary: str


PRESETS = {
    "perspective-tiny": Preset(perspective, TINY, "the quickstart's model, seeds/topology.md in small"),
    "perspective-20m": Preset(perspective, M20, "6 PDR and 2 windowed GQA layers of width 384"),
    "perspective-125m": Preset(perspective, M125, "9 PDR and 3 windowed GQA layers of width 768"),
    "perspective-1t-dense": Preset(perspective, T1 | {"ffn": "seed"}, "the 6.83 B that all experts share"),
    "perspective-1t": Preset(perspective, T1, "seeds/topology.md: 80 layers, 128 experts, 1.05 T"),
    "transformer-tiny": Preset(transformer, TINY, "full attention, as large as perspective-tiny"),
    "transformer-20m": Preset(transformer, M20, "full attention, as large as perspective-20m"),
    "transformer-125m": Preset(transformer, M125, "full attention, as large as perspective-125m"),
}


def names() -> list[str]:
    """The presets there are."""
    return list(PRESETS)


def get(name: str, **overrides: Any) -> ModelConfig:
    """The config of a preset, with some of its sizes replaced.

    ConfigError, naming the key, for an unknown preset or key, a value of the wrong type or out of bounds.
    """
    preset = PRESETS[one_of(name, PRESETS, "preset")]
    for key, value in overrides.items():
        default = preset.sizes[one_of(key, preset.sizes, f"{name}: key")]
        require(type(value) is type(default), key, value, f"of type {type(default).__name__}")
        if isinstance(value, list):
            require(all(type(item) is int for item in value), key, value, "a list of int")
    return preset.design(name, preset.sizes | overrides)
