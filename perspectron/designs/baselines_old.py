"""Baselines, each a function of its sizes, followed by the named sizes. docs/add-a-mixer.md adds one."""

from collections.abc import Iterable
from functools import partial

from perspectron.designs.delta.gdn import GDNConfig
from perspectron.designs.delta.gdn2 import GDN2Config
from perspectron.designs.delta.kda import KDAConfig
from perspectron.designs.gla.mixer import GLAConfig
from perspectron.designs.hgrn2.mixer import HGRN2Config
from perspectron.designs.mamba3.mixer import Mamba3Config
from perspectron.designs.mingru.mixer import MinGRUConfig
from perspectron.designs.perspective.pdr2 import PDR2Config
from perspectron.designs.presets_old import GPT2_NORM, numbered, perspective, stack
from perspectron.designs.rwkv7.channel import RWKV7ChannelConfig
from perspectron.designs.rwkv7.mixer import RWKV7Config
from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.config import BlockConfig, MixerConfig, ModelConfig, require
from perspectron.model.ffn import MLPConfig, SwiGLUConfig
from perspectron.presets.table import DESIGNS, PRESETS, Design, Preset, Shape, Sizes, as_it_is, design, preset

ATTENTION = "docs/designs/baselines.md#attention"
Recurrence = tuple[MixerConfig, int, str, str]


# ---------------------------------------------------------------- recurrences


def layered(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    hidden: int,
    mixer: MixerConfig,
    embedding_norm: bool = True,
) -> ModelConfig:
    """A recurrence and a SwiGLU in every layer."""
    require(layers >= 1, "layers", layers, "≥ 1")
    ffn = SwiGLUConfig(hidden)
    blocks = tuple(BlockConfig(numbered(mixer, layer, layers), ffn) for layer in range(layers))
    return ModelConfig(name, vocab_size, d_model, blocks, embedding_norm=embedding_norm)


RECURRENCES: dict[str, Recurrence] = {
    "gla": (
        GLAConfig(heads=4),
        440,
        "gated linear attention",
        "docs/designs/baselines.md#gated-linear-attention",
    ),
    "gdn": (GDNConfig(heads=4), 356, "Gated DeltaNet", "arXiv 2412.06464"),
    "kda": (KDAConfig(heads=4), 400, "Kimi Delta Attention", "arXiv 2510.26692"),
    "gdn2": (GDN2Config(heads=4), 316, "Gated DeltaNet-2", "arXiv 2605.22791"),
    "mamba3": (Mamba3Config(head_dim=32, state=64), 304, "Mamba-3: rotating keys", "arXiv 2603.15569"),
    "hgrn2": (HGRN2Config(heads=4), 448, "HGRN2: writes as much as it forgets", "arXiv 2404.07904"),
    "mingru": (MinGRUConfig(), 360, "minGRU: gated averages", "arXiv 2410.01201"),
}
"""The recurrences by name: the mixer, the network's width at the size of perspective-tiny-dense, a line about it, its
source."""

for kind, (mixer, hidden, about, source) in RECURRENCES.items():
    make = partial(layered, hidden=hidden, mixer=mixer)
    DESIGNS[kind] = Design(make, about, source, "hidden", 4, as_it_is)
    PRESETS[f"{kind}-tiny"] = Preset(make, f"{about}, sized like perspective-tiny-dense", kind)


# ---------------------------------------------------------------- others


@design("GPT-2: learned positions, GELU", ATTENTION)
def gpt2(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    hidden: int = 536,
    positions: int = 1024,
    embedding_norm: bool = True,
) -> ModelConfig:
    """Learned positions, LayerNorm, biases, GELU by tanh, tied head: weights of the published model fit."""
    mixer = AttentionConfig(heads, rope_base=None, bias=True)
    block, more = (
        BlockConfig(mixer, MLPConfig(hidden, "gelu_tanh")),
        {"embedding_norm": embedding_norm} | GPT2_NORM,
    )
    return stack(name, vocab_size, d_model, layers, block, positions=positions, **more)


@design("full attention, RoPE, RMSNorm, SwiGLU", ATTENTION)
def transformer(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    hidden: int = 448,
    embedding_norm: bool = True,
) -> ModelConfig:
    """A modern transformer: full attention with RoPE and a SwiGLU in every layer."""
    block = BlockConfig(AttentionConfig(heads), SwiGLUConfig(hidden))
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)


def _depths(shape: Shape) -> Iterable[Sizes]:
    """Two mixers where others have a mixer and a network, give or take two."""
    return [{"layers": n} for n in range(max(1, 2 * shape.layers - 2), 2 * shape.layers + 3)]


@design(
    "Mamba-2: a stack of state-space mixers",
    "docs/designs/baselines.md#mamba-2",
    knob="state",
    variants=_depths,
)
def ssd(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 8,
    mixer: SSDConfig = SSDConfig(head_dim=32, state=64),
    embedding_norm: bool = True,
) -> ModelConfig:
    """Mamba-2: a stack of mixers, without feed-forward networks."""
    block = BlockConfig(mixer, None)
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)


@design("RWKV-7: a time mix, then a channel mix", "arXiv 2503.14456")
def rwkv7(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    head_dim: int = 32,
    hidden: int = 512,
    embedding_norm: bool = True,
) -> ModelConfig:
    """RWKV-7; a layer is two blocks, because its network has a state too. hidden: of the channel mixes."""
    require(layers >= 1, "layers", layers, "≥ 1")
    blocks = []
    for layer in range(layers):
        blocks.append(BlockConfig(RWKV7Config(head_dim, layer, layers), None))
        blocks.append(BlockConfig(RWKV7ChannelConfig(hidden, layer, layers), None))
    return ModelConfig(name, vocab_size, d_model, tuple(blocks), embedding_norm=embedding_norm, **GPT2_NORM)


preset("transformer-tiny", "full attention, sized like perspective-tiny-dense", transformer)
preset(
    "transformer-20m", "full attention, sized like perspective-20m-dense", transformer,
    vocab_size=8192, d_model=384, layers=8, heads=6, hidden=1304,
)  # fmt: skip
preset(
    "transformer-125m", "full attention, sized like perspective-125m-dense", transformer,
    vocab_size=32768, d_model=768, layers=12, heads=12, hidden=2592,
)  # fmt: skip
preset("gpt2-tiny", "GPT-2, sized like perspective-tiny-dense", gpt2)
preset(
    "gpt2-20m", "GPT-2, sized like perspective-20m-dense", gpt2,
    vocab_size=8192, d_model=384, layers=8, heads=6, hidden=1888,
)  # fmt: skip
preset(
    "gpt2-125m", "GPT-2, sized like perspective-125m-dense", gpt2,
    vocab_size=32768, d_model=768, layers=12, heads=12, hidden=3840,
)  # fmt: skip
preset(
    "gpt2-124m", "GPT-2 as published: its weights fit", gpt2,
    vocab_size=50257, d_model=768, layers=12, heads=12, hidden=3072, embedding_norm=False,
)  # fmt: skip
preset(
    "gla-20m", "gated linear attention, sized like perspective-20m-dense", DESIGNS["gla"].make,
    vocab_size=8192, d_model=384, layers=8, hidden=1296, mixer=GLAConfig(6),
)  # fmt: skip
preset(
    "gla-125m", "gated linear attention, sized like perspective-125m-dense", DESIGNS["gla"].make,
    vocab_size=32768, d_model=768, layers=12, hidden=2584, mixer=GLAConfig(12),
)  # fmt: skip
preset("ssd-tiny", "Mamba-2, sized like perspective-tiny-dense", ssd)
preset(
    "ssd-20m", "Mamba-2, sized like perspective-20m-dense", ssd,
    vocab_size=8192, d_model=384, layers=17, mixer=SSDConfig(64, 128),
)  # fmt: skip
preset(
    "ssd-125m", "Mamba-2, sized like perspective-125m-dense", ssd,
    vocab_size=32768, d_model=768, layers=26, mixer=SSDConfig(64, 128),
)  # fmt: skip
preset("rwkv7-tiny", "RWKV-7, sized like perspective-tiny-dense", rwkv7)


# ---------------------------------------------------------------- in Perspective's frame

FRAMED: dict[str, MixerConfig] = {
    "pdr2": PDR2Config(rank=32),
    "ssd": SSDConfig(head_dim=32, state=64),
    "rwkv7": RWKV7Config(head_dim=32),
    **{kind: mixer for kind, (mixer, *_) in RECURRENCES.items()},
}
for kind, mixer in FRAMED.items():
    DESIGNS[f"perspective[{kind}]"] = DESIGNS["perspective"]._replace(
        make=partial(perspective, mixer=mixer), about=f"Perspective with {kind} in the place of PDR"
    )
