"""Named models. A preset is a function of a few sizes, each of which can be overridden by name."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import torch

from perspectron.config import (
    BlockConfig,
    FFNConfig,
    ModelConfig,
    ResidualConfig,
    RouteGatedConfig,
    SequentialConfig,
    one_of,
    require,
)
from perspectron.experts import RoutedConfig
from perspectron.ffn import ContextMLPConfig, MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.mixers.attention import AttentionConfig
from perspectron.mixers.lens import LensConfig
from perspectron.mixers.pdr import PDRConfig
from perspectron.mixers.window_gqa import WindowGQAConfig
from perspectron.model import LanguageModel

LAYER_NORM_EPS = 1e-5  # GPT-2's

Sizes = dict[str, Any]

EXPERTS: Sizes = {field.name: field.default for field in fields(RoutedConfig) if field.default is not MISSING}
TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 4, "hidden": 472, "rank": 32, "heads": 4, "kv_heads": 2,
    "window": 128, "out_norm": False, "renorm_every": 0, "ffn": "dense", "torus": [4, 2],
} | EXPERTS  # fmt: skip
M20: Sizes = TINY | {
    "vocab_size": 8192, "d_model": 384, "layers": 8, "hidden": 1408, "rank": 64, "heads": 6, "window": 512,
    "torus": [4, 4],
}  # fmt: skip
M125: Sizes = M20 | {
    "vocab_size": 32768, "d_model": 768, "layers": 12, "hidden": 2816, "rank": 128, "heads": 12, "kv_heads": 3,
    "torus": [4, 4, 2],
}  # fmt: skip
T1: Sizes = M125 | {
    "d_model": 4096, "layers": 80, "hidden": 11008, "rank": 256, "heads": 32, "kv_heads": 8, "ffn": "routed",
    "torus": [8, 4, 4],
}  # fmt: skip

ROUTED: Sizes = {"ffn": "routed"}

GPT2_TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 4, "heads": 4, "hidden": 512, "positions": 1024,
}  # fmt: skip
GPT2_20M: Sizes = {
    "vocab_size": 8192, "d_model": 384, "layers": 8, "heads": 6, "hidden": 1888, "positions": 1024,
}  # fmt: skip
GPT2_125M: Sizes = GPT2_20M | {"vocab_size": 32768, "d_model": 768, "layers": 12, "heads": 12, "hidden": 3920}
GPT2_124M: Sizes = GPT2_125M | {"vocab_size": 50257, "hidden": 3072}

LENSES: Sizes = {
    "reciprocity": True, "discoverability": True, "gates": True, "route": True, "context": True,
    "context_rank": 0, "stop_gradient": False, "disc_scale": False, "output_gate": False,
    "route_scale": 1.0, "anneal": 0.0, "anneal_after": 0,
}  # fmt: skip


def perspective(name: str, sizes: Sizes) -> ModelConfig:
    """Blocks of four: three PDR layers, then windowed GQA (decisions.md §2).

    `ffn`: "dense", a SwiGLU in every layer; "routed", experts on a torus in the PDR layers, each as large; "seed",
    the PDR layers use the network of the next GQA layer, which leaves what the routed model shares.
    """
    one_of(sizes["ffn"], ("dense", "routed", "seed"), "ffn")
    require(sizes["layers"] >= 1, "layers", sizes["layers"], "≥ 1")
    dense = SwiGLUConfig(sizes["hidden"])
    routed = RoutedConfig(sizes["hidden"], tuple(sizes["torus"]), **{key: sizes[key] for key in EXPERTS})
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
        block = BlockConfig(AttentionConfig(sizes["heads"]), SwiGLUConfig(hidden))
        return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], (block,) * sizes["layers"])

    surplus = _parameters(perspective(name, sizes)) - _parameters(twin(sizes["hidden"]))
    step = 8 * 3 * sizes["d_model"] * sizes["layers"]
    return twin(max(8, sizes["hidden"] + 8 * round(surplus / step)))


def gpt2(name: str, sizes: Sizes) -> ModelConfig:
    """Learned positions, LayerNorm, biases, GELU by tanh, tied head: weights of the published model fit."""
    mixer = AttentionConfig(sizes["heads"], rope_base=None, bias=True)
    return _gpt2(name, sizes, BlockConfig(mixer, MLPConfig(sizes["hidden"], "gelu_tanh")))


def lens(name: str, sizes: Sizes) -> ModelConfig:
    """GPT-2 with lenses; each part can be switched off, and without all of them it is GPT-2.

    `reciprocity`, `discoverability`, `gates` (mixture learned or fixed), `route` (gate between attention and
    network), `context` (the network reads what attention gave).
    """
    mixer = LensConfig(
        sizes["heads"], sizes["reciprocity"], sizes["discoverability"], sizes["gates"], sizes["disc_scale"],
        sizes["output_gate"],
    )  # fmt: skip
    ffn: FFNConfig = MLPConfig(sizes["hidden"], "gelu_tanh")
    if sizes["context"]:
        ffn = ContextMLPConfig(
            sizes["hidden"], True, sizes["context_rank"], sizes["stop_gradient"], "gelu_tanh"
        )
    residual: ResidualConfig = SequentialConfig()
    if sizes["route"]:
        residual = RouteGatedConfig(sizes["route_scale"], sizes["anneal"], sizes["anneal_after"])
    return _gpt2(name, sizes, BlockConfig(mixer, ffn, residual))


def _gpt2(name: str, sizes: Sizes, block: BlockConfig) -> ModelConfig:
    require(sizes["layers"] >= 1, "layers", sizes["layers"], "≥ 1")
    return ModelConfig(
        name, sizes["vocab_size"], sizes["d_model"], (block,) * sizes["layers"],
        positions=sizes["positions"], norm="layer", norm_eps=LAYER_NORM_EPS,
    )  # fmt: skip


def parameters(name: str) -> int:
    """Of a preset, counted from the built model."""
    return _parameters(get(name))


def _parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())


class Preset(NamedTuple):
    """summary: one line. source: of the design."""

    design: Callable[[str, Sizes], ModelConfig]
    sizes: Sizes
    summary: str
    source: str


TOPOLOGY, LENS, BASELINE = "seeds/topology.md §2, seeds/pdr.md §2", "seeds/lens.md", "decisions.md §7"

PRESETS = {
    "perspective-tiny": Preset(
        perspective, TINY | ROUTED, "3 PDR layers with 8 experts each, 1 windowed GQA", TOPOLOGY
    ),
    "perspective-20m": Preset(
        perspective, M20 | ROUTED, "6 PDR layers with 16 experts each, 2 windowed GQA, width 384", TOPOLOGY
    ),
    "perspective-125m": Preset(
        perspective, M125 | ROUTED, "9 PDR layers with 32 experts each, 3 windowed GQA, width 768", TOPOLOGY
    ),
    "perspective-tiny-dense": Preset(
        perspective, TINY, "the quickstart's model: 3 PDR layers, 1 windowed GQA", TOPOLOGY
    ),
    "perspective-20m-dense": Preset(
        perspective, M20, "6 PDR and 2 windowed GQA layers of width 384", TOPOLOGY
    ),
    "perspective-125m-dense": Preset(
        perspective, M125, "9 PDR and 3 windowed GQA layers of width 768", TOPOLOGY
    ),
    "perspective-1t-dense": Preset(
        perspective, T1 | {"ffn": "seed"}, "the 6.83 B that all experts share", TOPOLOGY
    ),
    "perspective-1t": Preset(perspective, T1, "80 layers, 128 experts in each of 60, 1.05 T", TOPOLOGY),
    "lens-tiny": Preset(lens, GPT2_TINY | LENSES | {"hidden": 208}, "GPT-2 with lenses, width 128", LENS),
    "lens-20m": Preset(lens, GPT2_20M | LENSES | {"hidden": 752}, "GPT-2 with lenses, width 384", LENS),
    "lens-gpt2-124m": Preset(lens, GPT2_124M | LENSES, "GPT-2 124M with every lens: 209.4 M", LENS),
    "transformer-tiny": Preset(
        transformer, TINY, "full attention, as large as perspective-tiny-dense", BASELINE
    ),
    "transformer-20m": Preset(
        transformer, M20, "full attention, as large as perspective-20m-dense", BASELINE
    ),
    "transformer-125m": Preset(
        transformer, M125, "full attention, as large as perspective-125m-dense", BASELINE
    ),
    "gpt2-20m": Preset(gpt2, GPT2_20M, "GPT-2 as large as perspective-20m-dense", BASELINE),
    "gpt2-125m": Preset(gpt2, GPT2_125M, "GPT-2 as large as perspective-125m-dense", BASELINE),
    "gpt2-124m": Preset(gpt2, GPT2_124M, "GPT-2 as published: its weights fit", BASELINE),
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
        if type(default) is float and type(value) is int:
            overrides[key] = value = float(value)
        require(type(value) is type(default), key, value, f"of type {type(default).__name__}")
        if isinstance(value, list):
            require(all(type(item) is int for item in value), key, value, "a list of int")
    return preset.design(name, preset.sizes | overrides)
