"""The designs, each a function of its sizes, followed by the named sizes."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any, Literal

from perspectron.designs.adr.mixer import ADRConfig
from perspectron.designs.drm.mixer import DRMConfig, Risk
from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.perspective.pdr2 import PDR2Config
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.experts.router import RoutedConfig
from perspectron.model.config import (
    BlockConfig,
    FFNConfig,
    Law5Config,
    MixerConfig,
    ModelConfig,
    NoResidualConfig,
    ParallelConfig,
    ResidualConfig,
    RouteGatedConfig,
    SequentialConfig,
    require,
)
from perspectron.model.ffn import ContextMLPConfig, MLPConfig, SwiGLUConfig, TiedConfig
from perspectron.model.heads import EmitterConfig, LinearHeadConfig
from perspectron.presets.table import DESIGNS, HEAD_WIDTH, Shape, Sizes, design, preset

TOPOLOGY = "docs/designs/perspective.md"
GPT2_NORM: dict[str, Any] = {"norm": "layer", "norm_eps": 1e-5}


def stack(
    name: str, vocab_size: int, d_model: int, layers: int, block: BlockConfig, **more: Any
) -> ModelConfig:
    """`layers` times the same block, RMSNorm, a tied head; `more`: other fields of the model."""
    require(layers >= 1, "layers", layers, "≥ 1")
    return ModelConfig(name, vocab_size, d_model, (block,) * layers, **more)


def numbered(mixer: Any, layer: int, layers: int) -> MixerConfig:
    """The config of a layer's mixer, where it must know which one of how many it is."""
    config: MixerConfig = replace(mixer, layer=layer, layers=layers) if hasattr(mixer, "layers") else mixer
    return config


# ---------------------------------------------------------------- Perspective


@design("three layers of Perspective Decay Recurrence, then one of windowed attention", TOPOLOGY)
def perspective(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    hidden: int = 472,
    mixer: MixerConfig = PDRConfig(rank=32),
    gqa: WindowGQAConfig = WindowGQAConfig(heads=4, kv_heads=2, window=128),
    ffn: Literal["dense", "routed", "seed"] = "dense",
    routed: RoutedConfig = RoutedConfig(hidden=472, torus=(4, 2)),
    period: int = 4,
    residual: Literal["sequential", "parallel"] = "sequential",
    embedding_norm: bool = True,
    shift: bool = False,
    first_values: bool = False,
) -> ModelConfig:
    """A recurrence, PDR, and in every fourth layer windowed GQA (docs/designs/perspective.md#stack).

    period: every so many layers, attention. ffn: "dense", a SwiGLU in every layer; "routed", experts on a torus in
    the recurrent layers, each as large; "seed", the recurrent layers use the network of the next GQA layer, which
    leaves what the routed model shares. hidden: of every network, of experts too. residual: whether a layer's network
    reads what its mixer added.
    """
    for field in fields(routed):
        value, unused = getattr(routed, field.name), f"left out where ffn is {ffn!r}"
        plain = field.default is MISSING or value == field.default
        require(ffn == "routed" or plain, field.name, value, unused)
    at = {"layers": layers, "period": period}
    for key, value in at.items():
        require(value >= 1, key, value, "≥ 1")
    dense, recurrent = SwiGLUConfig(hidden), layers - layers // period
    around = ParallelConfig() if residual == "parallel" else SequentialConfig()
    blocks = list[BlockConfig]()
    for layer in range(layers):
        if layer % period == period - 1:
            blocks.append(BlockConfig(gqa, dense, around))
            continue
        networks = {
            "dense": dense,
            "routed": replace(routed, hidden=hidden),
            "seed": TiedConfig(layer // period * period + period - 1),
        }
        blocks.append(BlockConfig(numbered(mixer, layer - layer // period, recurrent), networks[ffn], around))
    return ModelConfig(
        name,
        vocab_size,
        d_model,
        tuple(blocks),
        embedding_norm=embedding_norm,
        shift=shift,
        first_values=first_values,
    )


width_384 = partial(
    perspective, vocab_size=8192, d_model=384, layers=8, hidden=1408, mixer=PDRConfig(64),
    gqa=WindowGQAConfig(6, 2, 512), routed=RoutedConfig(1408, (4, 4)),
)  # fmt: skip
width_768 = partial(
    perspective, vocab_size=32768, d_model=768, layers=12, hidden=2816, mixer=PDRConfig(128),
    gqa=WindowGQAConfig(12, 3, 512), routed=RoutedConfig(2816, (4, 4, 2)),
)  # fmt: skip
width_4096 = partial(
    perspective, vocab_size=32768, d_model=4096, layers=80, hidden=11008, mixer=PDRConfig(256),
    gqa=WindowGQAConfig(32, 8, 512), routed=RoutedConfig(11008, (8, 4, 4)),
)  # fmt: skip
preset("perspective-tiny", "3 PDR layers with 8 experts each, 1 windowed GQA", perspective, ffn="routed")
preset(
    "perspective-166m", "6 PDR layers with 16 experts each, 2 windowed GQA, width 384; 20 M active",
    width_384, ffn="routed",
)  # fmt: skip
preset(
    "perspective-1.9b", "9 PDR layers with 32 experts each, 3 windowed GQA, width 768; 125 M active",
    width_768, ffn="routed",
)  # fmt: skip
preset("perspective-tiny-dense", "3 PDR layers, 1 windowed GQA", perspective)
preset("perspective-20m-dense", "6 PDR and 2 windowed GQA layers of width 384", width_384)
preset("perspective-125m-dense", "9 PDR and 3 windowed GQA layers of width 768", width_768)
preset("perspective-1t-dense", "the 6.83 B that all experts share", width_4096, ffn="seed")
preset("perspective-1t", "80 layers, 128 experts in each of 60; 14.9 B active", width_4096, ffn="routed")


# ---------------------------------------------------------------- ADR


def _gammas(layers: int, halflife: tuple[float, ...]) -> list[float]:
    """The decay of each layer's memories: their half-lives, in tokens, grow by equal factors from layer to layer."""
    require(len(halflife) == 2 and min(halflife) > 0, "halflife", list(halflife), "two numbers of tokens > 0")
    require(layers >= 1, "layers", layers, "≥ 1")
    first, last = halflife
    return [0.5 ** (1 / (first * (last / first) ** (layer / max(1, layers - 1)))) for layer in range(layers)]


@design("attention to recurrent memories of keys and values", "docs/designs/adr.md")
def adr(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    hidden: int = 336,
    positions: int = 1024,
    halflife: tuple[float, ...] | None = None,
    learned: Literal["none", "layer", "head"] = "none",
    emit: Literal["state", "raw"] = "state",
    share_heads: bool = False,
    cold_start: bool = False,
    norm: Literal["post", "pre"] = "post",
    tied: bool = True,
    embedding_norm: bool = True,
    dropout: float = 0.0,
) -> ModelConfig:
    """GPT-2 whose keys and values are memories (docs/designs/adr.md#memories).

    halflife: of a memory in the first layer and in the last, in tokens; between them it grows by equal factors
    (default: 4 and 128; 16 in every layer where they are learned). learned: half-lives are only where they start, of
    each layer or head. norm: "post", law 5 as written, or "pre", memories added to a residual that is normed where it
    is read.
    """
    residual = Law5Config() if norm == "post" else SequentialConfig()
    blocks = []
    for gamma in _gammas(layers, halflife or ((4.0, 128.0) if learned == "none" else (16.0, 16.0))):
        mixer = ADRConfig(heads, gamma, emit, share_heads, cold_start, learned=learned)
        blocks.append(BlockConfig(mixer, MLPConfig(hidden), residual))
    return ModelConfig(
        name, vocab_size, d_model, tuple(blocks), None if tied else LinearHeadConfig(),
        positions=positions, embedding_norm=embedding_norm, dropout=dropout, **GPT2_NORM,
    )  # fmt: skip


preset(
    "adr-demo", "4 layers of width 256, as in the document", adr,
    vocab_size=50257, d_model=256, hidden=1024, positions=64, halflife=(22.76, 22.76), tied=False, dropout=0.1,
)  # fmt: skip
preset("adr-tiny", "memories in attention, sized like perspective-tiny-dense", adr)
preset(
    "adr-20m", "memories in attention, sized like perspective-20m-dense", adr,
    vocab_size=8192, d_model=384, layers=8, heads=6, hidden=1496,
)  # fmt: skip
preset(
    "adr-124m", "memories in attention, sized like GPT-2 124M", adr,
    vocab_size=50257, d_model=768, layers=12, heads=12, hidden=2680,
)  # fmt: skip


# ---------------------------------------------------------------- Lens


@design("GPT-2 with lenses, a route gate and context", "docs/designs/lens.md")
def lens(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    positions: int = 1024,
    mixer: LensConfig = LensConfig(heads=4),
    mlp: ContextMLPConfig = ContextMLPConfig(hidden=216, activation="gelu_tanh"),
    route: bool = True,
    route_scale: float = 1.0,
    anneal: float = 0.0,
    anneal_after: int = 0,
    embedding_norm: bool = True,
) -> ModelConfig:
    """GPT-2 with lenses; each part can be switched off, and without all of them it is GPT-2.

    mixer: the lenses, and whether their mixture is learned. mlp: the network, which with `context` reads what
    attention gave. route: the gate between attention and network; `RouteGatedConfig` has its other sizes.
    """
    discover, unused = mixer.discoverability or not mixer.disc_scale, "left out where discoverability is off"
    require(discover, "disc_scale", mixer.disc_scale, unused)
    for key, value in {"anneal": anneal, "anneal_after": anneal_after}.items():
        require(route or not value, key, value, "left out where route is off")
    ffn: FFNConfig = mlp if mlp.context else MLPConfig(mlp.hidden, mlp.activation)
    residual: ResidualConfig = SequentialConfig()
    if route:
        residual = RouteGatedConfig(route_scale, anneal, anneal_after)
    block, more = BlockConfig(mixer, ffn, residual), {"embedding_norm": embedding_norm} | GPT2_NORM
    return stack(name, vocab_size, d_model, layers, block, positions=positions, **more)


preset("lens-tiny", "GPT-2 with lenses, width 128", lens)
preset(
    "lens-20m", "GPT-2 with lenses, width 384", lens, vocab_size=8192, d_model=384, layers=8,
    mixer=LensConfig(6), mlp=ContextMLPConfig(752, activation="gelu_tanh"),
)  # fmt: skip
preset(
    "lens-gpt2-124m", "GPT-2 124M with every lens: 209.4 M", lens, vocab_size=50257, d_model=768, layers=12,
    mixer=LensConfig(12), mlp=ContextMLPConfig(3072, activation="gelu_tanh"), embedding_norm=False,
)  # fmt: skip


# ---------------------------------------------------------------- DRM


def _widths(_: Shape) -> Iterable[Sizes]:
    """One block of any width, by itself about 30 S² weights."""
    for width in range(16, 1 << 14, 16):
        yield {"d_model": width, "d_token": width * 3 // 4, "hidden": width, "emitter": width, "rank": 8}


@design(
    "one vector that moves under a learned metric", "docs/designs/drm.md", knob="emitter", variants=_widths
)
def drm(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 256,
    mixer: DRMConfig = DRMConfig(directions=16, rank=8, hidden=256, d_token=192, dt=1.0),
    emitter: int = 256,
    stability: float = 0.0,
    risk: bool = False,
    embedding_norm: bool = False,
) -> ModelConfig:
    """One recurrent block with an emitter as its head; embeddings start at N(0, 1) (docs/designs/drm.md#head)."""
    mixer = replace(mixer, risk=Risk() if risk else None)
    block, head = BlockConfig(mixer, None, NoResidualConfig()), EmitterConfig(emitter, stability)
    return ModelConfig(
        name, vocab_size, d_model, (block,), head, embedding_std=1.0, embedding_norm=embedding_norm
    )


preset(
    "drm-104k", "the emitter on bytes: 64 coordinates, 8 directions", drm, vocab_size=257, d_model=64, emitter=64,
    mixer=DRMConfig(directions=8, rank=4, hidden=64, d_token=24, dt=1.0),
)  # fmt: skip
preset("drm-3m", "256 coordinates, 16 directions", drm)
preset(
    "drm-37m", "1024 coordinates, 32 directions on factorised bases", drm, vocab_size=8192, d_model=1024, emitter=1152,
    mixer=DRMConfig(32, 16, 1024, 768, direction_basis=256, metric_basis=256, dt=1.0),
)  # fmt: skip


# ---------------------------------------------------------------- ours, improved


def _ungrouped(shape: Shape) -> Iterable[Sizes]:
    """Keys and values for each head."""
    return [{"kv_heads": shape.d_model // HEAD_WIDTH}]


@design("attention to recurrent memories of keys", "docs/designs/adr.md#adr2")
def adr2(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    hidden: int = 392,
    halflife: tuple[float, ...] = (4.0, 128.0),
    emit: Literal["state", "raw"] = "state",
    share_heads: bool = False,
    rope_base: float | None = 10000.0,
    embedding_norm: bool = True,
) -> ModelConfig:
    """ADR without memories of values and law 5, with rotary positions, RMSNorm and a SwiGLU. halflife: as in `adr`."""
    blocks = []
    for gamma in _gammas(layers, halflife):
        mixer = ADRConfig(heads, gamma, emit, share_heads, couple=False, remember="keys", rope_base=rope_base)
        blocks.append(BlockConfig(mixer, SwiGLUConfig(hidden)))
    return ModelConfig(name, vocab_size, d_model, tuple(blocks), embedding_norm=embedding_norm)


@design("attention with lenses and an output gate", "docs/designs/lens.md#lens2")
def lens2(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    hidden: int = 400,
    mixer: LensConfig = LensConfig(heads=4, output_gate=True, rope_base=10000.0),
    embedding_norm: bool = True,
) -> ModelConfig:
    """Lens with an output gate in place of the route gate and context, with rotary positions, RMSNorm and a SwiGLU."""
    block = BlockConfig(mixer, SwiGLUConfig(hidden))
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)


DESIGNS["drm2"] = DESIGNS["drm"]._replace(
    make=partial(drm, mixer=DRMConfig(directions=0, rank=8, hidden=256, d_token=192, dt=4.0)),
    about="one vector that moves along its axes under a learned metric",
    source="docs/designs/drm.md#drm2",
)


DESIGNS["perspective2"] = DESIGNS["perspective"]._replace(
    make=partial(
        perspective,
        layers=4,
        hidden=408,
        mixer=PDR2Config(rank=32, groups=4, longest=100.0),
        period=2,
        gqa=WindowGQAConfig(heads=4, kv_heads=4, window=128),
        shift=True,
        first_values=True,
    ),
    about="improved PDR, windowed attention in every second layer, and both read the token before",
    source="docs/designs/perspective.md#perspective2",
    variants=_ungrouped,
)
preset(
    "perspective2-tiny",
    "the quickstart's model, sized like perspective-tiny-dense",
    DESIGNS["perspective2"].make,
)
DESIGNS["perspective-experts"] = DESIGNS["perspective"]._replace(
    make=partial(perspective, ffn="routed"),
    about="Perspective with 8 experts in each PDR layer, at equal active parameters",
)
