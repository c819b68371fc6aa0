"""Bamba: a SwiGLU in every block, after attention where `attn_layer_indices` says so and Mamba-2 elsewhere."""

from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder, mamba2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

NAMES = {
    "expand": "mamba_expand", "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state",
    "conv": "mamba_d_conv", "groups": "mamba_n_groups", "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip
HARMLESS = (
    "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    D, there = source.number("hidden_size"), source.items("attn_layer_indices")
    source.must("mlp_bias", (False,), False)
    network, ssd = decoder.network(source), mamba2.ssd_config(source, D, NAMES, groups=1, width=None)
    bias = decoder.flag(source, "attention_bias", False)
    attention = decoder.attention(source, decoder.rope(source, share=0.5), key_heads=8, bias=bias)
    mixers = [attention if i in there else ssd for i in range(decoder.layers(source))]
    return decoder.model(source, "bamba", mixers, network, eps=1e-5, longest=262_144)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    norms = decoder.PRE | {"ffn_norm": "pre_ff_layernorm"}
    return decoder.weights(
        source, config, mixer=_mixer, norms=norms, network="feed_forward", last="final_layernorm"
    )


def _mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    if mixer.kind == "attention":
        return decoder.attention_weights(source, f"{there}.self_attn", here, D, mixer)
    return mamba2.ssd(source, f"{there}.mamba", here, D, mixer)
