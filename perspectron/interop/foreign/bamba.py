"""Bamba: a SwiGLU in every block, after attention where `attn_layer_indices` says so and Mamba-2 elsewhere."""

from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder, mamba2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")


def config(source: Source) -> ModelConfig:
    source.must("hidden_act", ("silu",), "silu")  # of the recurrence, too
    source.must("mlp_bias", (False,), False)  # transformers ignores the key: no biases
    ssd = mamba2.mixer(source, mamba2.Keys(), groups=1, state=256)
    bias = decoder.flag(source, "attention_bias", False)
    attention = decoder.attention(source, decoder.rope(source, share=0.5), key_heads=8, bias=bias)
    there = source.items("attn_layer_indices")
    mixers = [attention if i in there else ssd for i in range(decoder.layers(source))]
    return decoder.model(source, "bamba", mixers, decoder.network(source), eps=1e-5, longest=262_144)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    norms = decoder.PRE | {"ffn_norm": "pre_ff_layernorm"}
    return decoder.weights(
        source, config, mixer=mixer, norms=norms, network="feed_forward", last="final_layernorm"
    )


def mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    """The weights of Mamba-2's mixer."""
    return source.take_all(f"{there}.mamba", here, mamba2.NAMES)
