"""GPT-2 and a modern transformer, at named sizes."""

from typing import Literal

from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import MLPConfig, SwiGLUConfig
from perspectron.presets.frame import GPT2_NORM, stack
from perspectron.presets.table import design, preset

ATTENTION = "docs/designs/baselines.md#attention"


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
    qk_norm: Literal["none", "head", "all"] = "none",
    kv_heads: int | None = None,
    window: int | None = None,
) -> ModelConfig:
    """A modern transformer: full attention with RoPE and a SwiGLU in every layer. kv_heads: of keys and values; None is
    one for each head. window: tokens that attention sees instead of all. qk_norm, relu2 and zero_outputs together, with
    Muon, are how fast small trainings of transformers have it (KellerJordan/modded-nanogpt)."""
    attention = AttentionConfig(heads, qk_norm=qk_norm, kv_heads=kv_heads, window=window)
    block = BlockConfig(attention, SwiGLUConfig(hidden))
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)


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
