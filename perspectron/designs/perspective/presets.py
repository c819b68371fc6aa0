"""Perspective, Perspective 2 and Perspective with experts, at named sizes."""

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Literal

from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.perspective.pdr2 import PDR2Config
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.experts.router import RoutedConfig
from perspectron.model.config import BlockConfig, ModelConfig, ParallelConfig, SequentialConfig, Shift
from perspectron.model.ffn import SwiGLUConfig, TiedConfig
from perspectron.model.mixer import numbered
from perspectron.presets.frame import FRAMES
from perspectron.presets.table import DESIGNS, HEAD_WIDTH, Shape, Sizes, design, preset
from perspectron.util.config import MixerConfig, require

TOPOLOGY = "docs/designs/perspective.md"
ROUTED = tuple(
    RoutedConfig(hidden, torus)
    for hidden, torus in ((472, (4, 2)), (1408, (4, 4)), (2816, (4, 4, 2)), (11008, (8, 4, 4)))
)
"""Experts of each width."""
OF_A_TORUS = ("nearest", "temperature", "smooth")
OF_A_GATE = ("nearest", "balance", "smooth")


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
    routed: RoutedConfig = ROUTED[0],
    period: int = 4,
    residual: Literal["sequential", "parallel"] = "sequential",
    embedding_norm: bool = True,
    shift: Shift = False,
    first_values: bool = False,
) -> ModelConfig:
    """A recurrence, PDR, and in every fourth layer windowed GQA (docs/designs/perspective.md#stack).

    period: every period-th layer is attention. ffn: "dense", a SwiGLU in every layer; "routed", experts on a torus in
    the recurrent layers, each as large; "seed", the recurrent layers use the network of the next GQA layer, which
    leaves what the routed model shares. hidden: of every network, of experts too. residual: whether a layer's network
    reads what its mixer added.
    """
    _require_effect(ffn, routed)
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


def _require_effect(ffn: str, routed: RoutedConfig) -> None:
    """ConfigError for a field of the experts that is changed where it has no effect. (In a config it may stand: a stage
    of the recipe leaves fields for a later one, ternary_rule, too.)"""
    usual = next((own for own in ROUTED if own.hidden == routed.hidden), routed)
    unused = [
        *((field.name, f"ffn is {ffn!r}") for field in fields(routed) if ffn != "routed"),
        *((name, "router is 'switch'") for name in OF_A_TORUS if routed.router == "switch"),
        *((name, "gate is 'none'") for name in OF_A_GATE if routed.gate == "none"),
    ]
    for name, where in unused:
        value = getattr(routed, name)
        plain = value == getattr(usual, name) or (ffn == "routed" and value == 0)
        require(plain, name, value, f"left out where {where}")


width_384 = partial(
    perspective, vocab_size=8192, d_model=384, layers=8, hidden=1408, mixer=PDRConfig(64),
    gqa=WindowGQAConfig(6, 2, 512), routed=ROUTED[1],
)  # fmt: skip
width_768 = partial(
    perspective, vocab_size=32768, d_model=768, layers=12, hidden=2816, mixer=PDRConfig(128),
    gqa=WindowGQAConfig(12, 3, 512), routed=ROUTED[2],
)  # fmt: skip
width_4096 = partial(
    perspective, vocab_size=32768, d_model=4096, layers=80, hidden=11008, mixer=PDRConfig(256),
    gqa=WindowGQAConfig(32, 8, 512), routed=ROUTED[3],
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


def _ungrouped(shape: Shape) -> Iterable[Sizes]:
    """As many heads of keys and values as of queries."""
    return [{"kv_heads": shape.d_model // HEAD_WIDTH}]


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

FRAMES["perspective"] = perspective
