"""LFM2: a gated short convolution or attention, then a SwiGLU, in every block.

Shapes: D model width, F width of a network.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import config_of

CONV = "conv"
NORMS = {"mixer_norm": "operator_norm", "ffn_norm": "ffn_norm"}
HARMLESS = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc",
)  # fmt: skip
"""Keys of published files that transformers does not read."""


def config(source: Source) -> ModelConfig:
    kinds = _kinds(source)
    attention = decoder.attention(source, decoder.rope(source, theta=1e6), key_heads=8, qk_norm="head")
    conv = config_of(
        "gated_conv", conv=source.number("conv_L_cache", 3), bias=decoder.flag(source, "conv_bias", False)
    )
    mixers = [attention if kind == GLOBAL else conv for kind in kinds]
    ties = source.get("tie_embedding", source.get("tie_word_embeddings"))
    model = decoder.model(
        source, "lfm2", mixers, SwiGLUConfig(_hidden(source)), tied=True, longest=128_000,
        ties=Source(source.folder, {} if ties is None else {"tie_word_embeddings": ties}, source.file),
    )  # fmt: skip
    return replace(model, norm_eps=source.real("norm_eps", 1e-5))


def _kinds(source: Source) -> list[str]:
    """The kind of each layer: attention in all where the config is silent."""
    count = decoder.layers(source)
    there = source.items("full_attn_idxs") if source.get("full_attn_idxs") is not None else range(count)
    return decoder.kinds(source, [GLOBAL if i in there else CONV for i in range(count)], (GLOBAL, CONV))


def _hidden(source: Source) -> int:
    """F: the config's width, adjusted unless `block_auto_adjust_ff_dim` is false."""
    hidden = source.number("block_ff_dim", source.number("intermediate_size", 12288))
    multiple = source.number("block_multiple_of", 256)
    source.get("block_ffn_dim_multiplier")  # no effect if F is not adjusted
    if not decoder.flag(source, "block_auto_adjust_ff_dim", True):
        return hidden
    hidden = int(2 * hidden / 3)
    if source.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return hidden
    hidden = int(source.real("block_ffn_dim_multiplier", 1.0) * hidden)
    return multiple * -(-hidden // multiple)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    attention = partial(decoder.attention_weights, out="out_proj", norms=("q_layernorm", "k_layernorm"))
    return decoder.weights(
        source, config, mixer=_mixer, attention=attention, norms=NORMS, network="feed_forward", gated=_network,
        last="embedding_norm",
    )  # fmt: skip


def _mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    return source.take_all(f"{there}.conv", here, {"conv1d": "conv", "o_proj": "out_proj"})


def _network(source: Source, there: str, here: str, D: int, ffn: SwiGLUConfig) -> dict[str, Tensor]:
    return source.take_all(there, here, {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
