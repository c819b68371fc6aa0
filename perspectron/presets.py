"""Named models. A preset is a function of a few sizes, each of which can be overridden by name."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Any, NamedTuple

import torch

from perspectron.config import (
    BlockConfig,
    FFNConfig,
    Law5Config,
    ModelConfig,
    NoResidualConfig,
    ResidualConfig,
    RouteGatedConfig,
    SequentialConfig,
    one_of,
    require,
)
from perspectron.experts import RoutedConfig
from perspectron.ffn import ContextMLPConfig, MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.heads import EmitterConfig, LinearHeadConfig
from perspectron.mixers.adr import ADRConfig
from perspectron.mixers.attention import AttentionConfig
from perspectron.mixers.drm import DRMConfig, Risk
from perspectron.mixers.drm_terms import Losses
from perspectron.mixers.gla import GLAConfig
from perspectron.mixers.lens import LensConfig
from perspectron.mixers.pdr import PDRConfig
from perspectron.mixers.ssd import SSDConfig
from perspectron.mixers.window_gqa import WindowGQAConfig
from perspectron.model import LanguageModel

LAYER_NORM_EPS = 1e-5  # GPT-2's

Sizes = dict[str, Any]

EXPERTS: Sizes = {field.name: field.default for field in fields(RoutedConfig) if field.default is not MISSING}
TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 4, "hidden": 472, "rank": 32, "heads": 4, "kv_heads": 2,
    "window": 128, "out_norm": False, "renorm_every": 0, "gate_rank": 0, "fixed_decay": False,
    "ffn": "dense", "torus": [4, 2],
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
GPT2_125M: Sizes = GPT2_20M | {"vocab_size": 32768, "d_model": 768, "layers": 12, "heads": 12, "hidden": 3840}
GPT2_124M: Sizes = GPT2_125M | {"vocab_size": 50257, "hidden": 3072}

ADR_TINY: Sizes = GPT2_TINY | {
    "hidden": 336, "halflife": [4.0, 128.0], "emit": "state", "share_heads": False, "cold_start": False,
    "norm": "post", "solver": "sequential", "tied": True,
}  # fmt: skip
ADR_20M: Sizes = ADR_TINY | GPT2_20M | {"hidden": 1496}
ADR_124M: Sizes = ADR_TINY | GPT2_124M | {"hidden": 2680}
ADR_DEMO: Sizes = ADR_TINY | {"vocab_size": 50257, "d_model": 256, "hidden": 1024, "tied": False}

GLA_TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 4, "heads": 4, "gate_rank": 16, "hidden": 440,
}  # fmt: skip
GLA_20M: Sizes = GLA_TINY | {"vocab_size": 8192, "d_model": 384, "layers": 8, "heads": 6, "hidden": 1296}
GLA_125M: Sizes = GLA_20M | {"vocab_size": 32768, "d_model": 768, "layers": 12, "heads": 12, "hidden": 2584}

SSD_TINY: Sizes = {
    "vocab_size": 2048, "d_model": 128, "layers": 8, "head_dim": 32, "state": 64, "expand": 2,
}  # fmt: skip
SSD_20M: Sizes = SSD_TINY | {"vocab_size": 8192, "d_model": 384, "layers": 17, "head_dim": 64, "state": 128}
SSD_125M: Sizes = SSD_20M | {"vocab_size": 32768, "d_model": 768, "layers": 26, "state": 128}

DRM_104K: Sizes = {
    "vocab_size": 257, "d_model": 64, "d_token": 24, "hidden": 64, "emitter": 64, "directions": 8, "rank": 4,
    "direction_basis": 0, "metric_basis": 0, "direction_norm": True, "dt": 1.0, "radius": 8.0,
    "gate_bias": -1.0, "gate_temperature": 1.5, "gate_top_k": 0, "gate_renorm": False, "strength": 0.5,
    "strength_warmup": 500, "damping": 0.3, "geometry_interval": 1, "bptt": 0, "risk": False, "stability": 0.0,
    **asdict(Losses()),
}  # fmt: skip
DRM_FIELDS = sorted({field.name for field in fields(DRMConfig)} & DRM_104K.keys() - {"risk"})
DRM_3M: Sizes = DRM_104K | {
    "vocab_size": 2048, "d_model": 256, "d_token": 192, "hidden": 256, "emitter": 256, "directions": 16, "rank": 8,
}  # fmt: skip
DRM_37M: Sizes = DRM_104K | {
    "vocab_size": 8192, "d_model": 1024, "d_token": 768, "hidden": 1024, "emitter": 1152, "directions": 32,
    "rank": 16, "direction_basis": 256, "metric_basis": 256,
}  # fmt: skip

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
    for key, value in EXPERTS.items():
        unused = f"left out where ffn is {sizes['ffn']!r}"
        require(sizes["ffn"] == "routed" or sizes[key] == value, key, sizes[key], unused)
    require(sizes["layers"] >= 1, "layers", sizes["layers"], "≥ 1")
    dense = SwiGLUConfig(sizes["hidden"])
    routed = RoutedConfig(sizes["hidden"], tuple(sizes["torus"]), **{key: sizes[key] for key in EXPERTS})
    options = {key: sizes[key] for key in ("out_norm", "renorm_every", "gate_rank", "fixed_decay")}
    pdr = PDRConfig(sizes["rank"], **options)
    gqa = WindowGQAConfig(sizes["heads"], sizes["kv_heads"], sizes["window"])
    blocks = []
    for layer in range(sizes["layers"]):
        ffn = {"dense": dense, "routed": routed, "seed": TiedConfig(layer // 4 * 4 + 3)}[sizes["ffn"]]
        blocks.append(BlockConfig(gqa, dense) if layer % 4 == 3 else BlockConfig(pdr, ffn))
    return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], tuple(blocks))


def transformer(name: str, sizes: Sizes) -> ModelConfig:
    """The twin of a Perspective model: same width, depth and vocabulary, full attention with RoPE in every
    layer, and a SwiGLU widened or narrowed (in steps of 8) so that the parameters match."""
    surplus = _parameters(perspective(name, sizes)) - _parameters(decoder(name, sizes))
    step = 8 * 3 * sizes["d_model"] * sizes["layers"]
    return decoder(name, sizes | {"hidden": max(8, sizes["hidden"] + 8 * round(surplus / step))})


def decoder(name: str, sizes: Sizes) -> ModelConfig:
    """A modern transformer: full attention with RoPE and a SwiGLU of width `hidden` in every layer."""
    block = BlockConfig(AttentionConfig(sizes["heads"]), SwiGLUConfig(sizes["hidden"]))
    return _stack(name, sizes, block)


def gpt2(name: str, sizes: Sizes) -> ModelConfig:
    """Learned positions, LayerNorm, biases, GELU by tanh, tied head: weights of the published model fit."""
    mixer = AttentionConfig(sizes["heads"], rope_base=None, bias=True)
    return _gpt2(name, sizes, BlockConfig(mixer, MLPConfig(sizes["hidden"], "gelu_tanh")))


def lens(name: str, sizes: Sizes) -> ModelConfig:
    """GPT-2 with lenses; each part can be switched off, and without all of them it is GPT-2.

    `reciprocity`, `discoverability`, `gates` (mixture learned or fixed), `route` (gate between attention and
    network), `context` (the network reads what attention gave).
    """
    for switch, names in {
        "context": ("context_rank", "stop_gradient"), "route": ("anneal", "anneal_after"),
        "discoverability": ("disc_scale",),
    }.items():  # fmt: skip
        for unused in names:
            require(
                sizes[switch] or not sizes[unused], unused, sizes[unused], f"left out where {switch} is off"
            )
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


def adr(name: str, sizes: Sizes) -> ModelConfig:
    """GPT-2 whose keys and values are memories; the half-life of a memory grows from the first layer to the last by
    equal factors, `halflife` tokens from and to (decisions.md §4).

    `norm`: "post", law 5 as written, or "pre", memories added to a residual that is normed where it is read.
    """
    one_of(sizes["norm"], ("post", "pre"), "norm")
    layers, halflife = sizes["layers"], sizes["halflife"]
    require(len(halflife) == 2 and min(halflife) > 0, "halflife", halflife, "two numbers of tokens > 0")
    first, last = halflife
    require(layers >= 1, "layers", layers, "≥ 1")
    residual = Law5Config() if sizes["norm"] == "post" else SequentialConfig()
    blocks = []
    for layer in range(layers):
        tokens = first * (last / first) ** (layer / max(1, layers - 1))
        mixer = ADRConfig(
            sizes["heads"], 0.5 ** (1 / tokens), sizes["emit"], sizes["share_heads"], sizes["cold_start"],
            solver=sizes["solver"],
        )  # fmt: skip
        blocks.append(BlockConfig(mixer, MLPConfig(sizes["hidden"]), residual))
    return ModelConfig(
        name, sizes["vocab_size"], sizes["d_model"], tuple(blocks), None if sizes["tied"] else LinearHeadConfig(),
        positions=sizes["positions"], norm="layer", norm_eps=LAYER_NORM_EPS,
    )  # fmt: skip


def drm(name: str, sizes: Sizes) -> ModelConfig:
    """One block that is all recurrence, with an emitter as its head; embeddings start at N(0, 1) (decisions.md §6)."""
    mixer = DRMConfig(
        risk=Risk() if sizes["risk"] else None,
        losses=Losses(**{field.name: sizes[field.name] for field in fields(Losses)}),
        **{name: sizes[name] for name in DRM_FIELDS},
    )
    block, head = (
        BlockConfig(mixer, None, NoResidualConfig()),
        EmitterConfig(sizes["emitter"], sizes["stability"]),
    )
    return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], (block,), head, embedding_std=1.0)


def gla(name: str, sizes: Sizes) -> ModelConfig:
    """Gated linear attention with SwiGLU, as published."""
    block = BlockConfig(GLAConfig(sizes["heads"], sizes["gate_rank"]), SwiGLUConfig(sizes["hidden"]))
    return _stack(name, sizes, block)


def ssd(name: str, sizes: Sizes) -> ModelConfig:
    """Mamba-2: a stack of mixers, without feed-forward networks."""
    return _stack(
        name, sizes, BlockConfig(SSDConfig(sizes["head_dim"], sizes["state"], sizes["expand"]), None)
    )


def _stack(name: str, sizes: Sizes, block: BlockConfig) -> ModelConfig:
    require(sizes["layers"] >= 1, "layers", sizes["layers"], "≥ 1")
    return ModelConfig(name, sizes["vocab_size"], sizes["d_model"], (block,) * sizes["layers"])


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


TOPOLOGY, BASELINE = "seeds/topology.md §2, seeds/pdr.md §2", "decisions.md §7"
ADR, LENS, DRM = "seeds/adr.md", "seeds/lens.md", "seeds/drm.md"

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
    "adr-demo": Preset(adr, ADR_DEMO, "4 layers of width 256, as in the document", ADR),
    "adr-tiny": Preset(adr, ADR_TINY, "memories in attention, as large as perspective-tiny-dense", ADR),
    "adr-20m": Preset(adr, ADR_20M, "memories in attention, as large as perspective-20m-dense", ADR),
    "adr-124m": Preset(adr, ADR_124M, "memories in attention, as large as GPT-2 124M", ADR),
    "lens-tiny": Preset(lens, GPT2_TINY | LENSES | {"hidden": 216}, "GPT-2 with lenses, width 128", LENS),
    "lens-20m": Preset(lens, GPT2_20M | LENSES | {"hidden": 752}, "GPT-2 with lenses, width 384", LENS),
    "lens-gpt2-124m": Preset(lens, GPT2_124M | LENSES, "GPT-2 124M with every lens: 209.4 M", LENS),
    "drm-104k": Preset(drm, DRM_104K, "the emitter on bytes: 64 coordinates, 8 directions", DRM),
    "drm-3m": Preset(drm, DRM_3M, "256 coordinates, 16 directions", DRM),
    "drm-37m": Preset(drm, DRM_37M, "1024 coordinates, 32 directions on factorised bases", DRM),
    "transformer-tiny": Preset(
        transformer, TINY, "full attention, as large as perspective-tiny-dense", BASELINE
    ),
    "transformer-20m": Preset(
        transformer, M20, "full attention, as large as perspective-20m-dense", BASELINE
    ),
    "transformer-125m": Preset(
        transformer, M125, "full attention, as large as perspective-125m-dense", BASELINE
    ),
    "gpt2-tiny": Preset(
        gpt2, GPT2_TINY | {"hidden": 536}, "GPT-2 as large as perspective-tiny-dense", BASELINE
    ),
    "gpt2-20m": Preset(gpt2, GPT2_20M, "GPT-2 as large as perspective-20m-dense", BASELINE),
    "gpt2-125m": Preset(gpt2, GPT2_125M, "GPT-2 as large as perspective-125m-dense", BASELINE),
    "gpt2-124m": Preset(gpt2, GPT2_124M, "GPT-2 as published: its weights fit", BASELINE),
    "gla-tiny": Preset(gla, GLA_TINY, "gated linear attention, as large as perspective-tiny-dense", BASELINE),
    "gla-20m": Preset(gla, GLA_20M, "gated linear attention, as large as perspective-20m-dense", BASELINE),
    "gla-125m": Preset(gla, GLA_125M, "gated linear attention, as large as perspective-125m-dense", BASELINE),
    "ssd-tiny": Preset(ssd, SSD_TINY, "Mamba-2, as large as perspective-tiny-dense", BASELINE),
    "ssd-20m": Preset(ssd, SSD_20M, "Mamba-2, as large as perspective-20m-dense", BASELINE),
    "ssd-125m": Preset(ssd, SSD_125M, "Mamba-2, as large as perspective-125m-dense", BASELINE),
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
            kind = type(default[0])
            require(all(type(item) is kind for item in value), key, value, f"a list of {kind.__name__}")
    return preset.design(name, preset.sizes | overrides)
