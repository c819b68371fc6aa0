"""Llama and Mistral: attention and a SwiGLU in every block. Parts of it are other decoders' too.

Shapes: D model width, H query heads, G heads of keys and values, K head width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.model.mixer import config_of


class Defaults(NamedTuple):
    """Values that a kind of model takes where its config.json is silent, as the classes of transformers have them. eps:
    of the norms. key_heads: heads of keys and values; None is as many as of queries. rope_share: of a head's channels
    that turn; None if no config of that kind can say it. sliding_window: what attention sees; None is everything."""

    eps: float
    key_heads: int | None = None
    rope_share: float | None = None
    sliding_window: int | None = None


LLAMA = Defaults(1e-6)
MISTRAL = Defaults(1e-6, key_heads=8, sliding_window=4096)


def config(source: Source, defaults: Defaults = LLAMA) -> ModelConfig:
    D = source.number("hidden_size")
    block = BlockConfig(attention_config(source, D, defaults), network_config(source))
    return model_config(source, "transformer", (block,) * layers(source), defaults.eps)


def weights(source: Source, config: ModelConfig, defaults: Defaults = LLAMA) -> dict[str, Tensor]:
    def mixer(there: str, here: str, mixer: Any) -> dict[str, Tensor]:
        return attention(source, f"{there}.self_attn", here, config.d_model, mixer, defaults)

    names = {"network": "mlp", "second": "post_attention_layernorm", "last": "norm"}
    return decoder_weights(source, config, mixer, **names)


# ---------------------------------------------------------------- parts


def layers(source: Source) -> int:
    return source.number("num_hidden_layers", most=MOST_BLOCKS)


def network_config(source: Source) -> SwiGLUConfig:
    source.must("hidden_act", ("silu",), "silu")
    source.must("mlp_bias", (False,), False)
    return SwiGLUConfig(source.number("intermediate_size"))


def model_config(source: Source, name: str, blocks: tuple[BlockConfig, ...], eps: float) -> ModelConfig:
    D, eps = source.number("hidden_size"), source.real("rms_norm_eps", eps)
    return ModelConfig(name, source.number("vocab_size"), D, blocks, head_config(source, False), norm_eps=eps)


def head_config(source: Source, tied: bool) -> LinearHeadConfig | None:
    """A head of its own, or none where the embedding is it."""
    return None if source.must("tie_word_embeddings", (True, False), tied) else LinearHeadConfig()


def outer_weights(source: Source, embedding: str, config: ModelConfig) -> dict[str, Tensor]:
    """The embedding's rows, and the head's where it has its own; those that are written beside an embedding though tied
    to it are passed over."""
    V, D = config.vocab_size, config.d_model
    taken = {"embedding.weight": source.take(embedding, V, D)}
    if config.head is None:
        source.drop("lm_head.weight")
        return taken
    return taken | {"lm_head.weight": source.take("lm_head.weight", V, D)}


def decoder_weights(
    source: Source,
    config: ModelConfig,
    mixer: Callable[[str, str, Any], dict[str, Tensor]],
    *,
    network: str,
    second: str,
    last: str,
) -> dict[str, Tensor]:
    """The weights of a decoder whose layers have a norm, a mixer, a norm and a network, by their names. mixer: takes
    those of one, from a layer's name there, its name here and its config."""
    D = config.d_model
    taken = outer_weights(source, "model.embed_tokens.weight", config)
    taken["norm.weight"] = source.take(f"model.{last}.weight", D)
    for i, block in enumerate(config.blocks):
        there, here = f"model.layers.{i}", f"blocks.{i}"
        taken[f"{here}.mixer_norm.weight"] = source.take(f"{there}.input_layernorm.weight", D)
        taken[f"{here}.ffn_norm.weight"] = source.take(f"{there}.{second}.weight", D)
        assert isinstance(block.ffn, SwiGLUConfig)
        F = block.ffn.hidden
        for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
            taken[f"{here}.ffn.{name}.weight"] = source.take(f"{there}.{network}.{name}.weight", *shape)
        taken |= mixer(there, f"{here}.mixer", block.mixer)
    return taken


def attention_config(source: Source, D: int, defaults: Defaults) -> Any:
    """Full attention with rotary positions. A head must be D/H wide."""
    heads = source.number("num_attention_heads")
    source.must("head_dim", (D // heads,), D // heads)
    if defaults.sliding_window is not None and "sliding_window" not in source.values:
        raise source.error(
            f"sliding_window is missing, which means {defaults.sliding_window}; must be null to be read"
        )
    source.must("sliding_window", (None,))
    rope = source.mapping("rope_scaling" if source.get("rope_scaling") else "rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise source.error(f"rope type is {kind!r}, must be 'default' to be read")
    base = rope.real("rope_theta", source.real("rope_theta", 10000.0))
    share = 1.0
    if defaults.rope_share is None:
        for where in (rope, source):
            where.must("partial_rotary_factor", (1.0,), 1.0)
    else:
        share = rope.real("partial_rotary_factor", defaults.rope_share)
    bias = bool(source.must("attention_bias", (True, False), False))
    return config_of("attention", heads=heads, rope_base=base, bias=bias, rope_share=share)


def attention(
    source: Source, there: str, here: str, D: int, mixer: Any, defaults: Defaults
) -> dict[str, Tensor]:
    """Queries, keys and values in one matrix. Keys and values that several query heads share are repeated for each,
    which is the same function with a larger cache."""
    H = mixer.heads
    missing = "num_key_value_heads" not in source.values  # null is as many as query heads
    G, K = source.number("num_key_value_heads", (missing and defaults.key_heads) or H), D // H
    source.drop(f"{there}.rotary_emb.inv_freq")
    taken = {}
    for part in ("weight", "bias") if mixer.bias else ("weight",):
        inner = (D,) if part == "weight" else ()
        q = source.take(f"{there}.q_proj.{part}", D, *inner)
        k, v = (source.take(f"{there}.{name}_proj.{part}", G * K, *inner) for name in "kv")
        k, v = (x.unflatten(0, (G, K)).repeat_interleave(H // G, 0).flatten(0, 1) for x in (k, v))
        taken[f"{here}.qkv_proj.{part}"] = torch.cat([q, k, v])
        taken[f"{here}.o_proj.{part}"] = source.take(f"{there}.o_proj.{part}", D, *inner)
    return taken
