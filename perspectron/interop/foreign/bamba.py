"""Bamba: a SwiGLU in every block, after attention where `attn_layer_indices` says so and Mamba-2 elsewhere."""

from typing import Any

from torch import Tensor

from perspectron.interop.foreign import llama, mamba2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import BlockConfig, ModelConfig

NAMES = {
    "expand": "mamba_expand", "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state",
    "conv": "mamba_d_conv", "groups": "mamba_n_groups", "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip
BAMBA = llama.Defaults(1e-5, key_heads=8, rope_share=0.5)


def config(source: Source) -> ModelConfig:
    D, there = source.number("hidden_size"), source.items("attn_layer_indices")
    network, ssd = llama.network_config(source), mamba2.ssd_config(source, D, NAMES, groups=1, width=None)
    attention = llama.attention_config(source, D, BAMBA)
    mixers = (attention if i in there else ssd for i in range(llama.layers(source)))
    return llama.model_config(source, "bamba", tuple(BlockConfig(m, network) for m in mixers), BAMBA.eps)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    def mixer(there: str, here: str, mixer: Any) -> dict[str, Tensor]:
        if mixer.kind == "attention":
            return llama.attention(source, f"{there}.self_attn", here, config.d_model, mixer, BAMBA)
        return mamba2.ssd(source, f"{there}.mamba", here, config.d_model, mixer)

    names = {"network": "feed_forward", "second": "pre_ff_layernorm", "last": "final_layernorm"}
    return llama.decoder_weights(source, config, mixer, **names)
