"""ADR and ADR 2, at named sizes."""

from typing import Literal

from perspectron.designs.adr.mixer import ADRConfig
from perspectron.model.config import BlockConfig, Law5Config, ModelConfig, SequentialConfig
from perspectron.model.ffn import MLPConfig, SwiGLUConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.presets.frame import GPT2_NORM
from perspectron.presets.table import design, preset
from perspectron.util.config import require


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
    (default: 4 and 128; 16 in every layer where they are learned). learned: layers or heads learn half-lives, which
    start from these. norm: "post", law 5 as written, or "pre", memories added to a residual that is normed where it is
    read.
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
