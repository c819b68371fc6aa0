"""Qwen3.5's text model: Gated DeltaNet in most layers and gated attention in the others, then a SwiGLU. Norm weights,
except those of Gated DeltaNet, are stored minus 1.

In `qwen3_5`, the text's config is in `text_config`, and weights for images stand beside the text's.

Shapes: D model width, H heads of queries, K head width.
"""

from functools import partial
from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.mixer import config_of

LEFT = ("mtp.", "model.visual.", "visual.")
"""Prefixes of weights that are left out: a head that predicts several tokens, and images."""
HARMLESS = (
    "image_token_id", "language_model_only", "mamba_ssm_dtype", "mrope_interleaved", "mrope_section",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
)  # fmt: skip
NAMES = {
    "qkv_proj": "in_proj_qkv", "g_proj": "in_proj_z", "a_proj": "in_proj_a", "b_proj": "in_proj_b",
    "o_proj": "out_proj",
}  # fmt: skip
"""Names of the parts of Gated DeltaNet by ours, where they differ."""


def config(source: Source, ties: Source | None = None) -> ModelConfig:
    source.must("attn_output_gate", (True,), True)
    source.must("mlp_only_layers", ([],), [])
    found = mixers(source, key_heads=4)
    return decoder.model(source, "qwen3_5", found, decoder.network(source), longest=32_768, ties=ties)


config_within = partial(decoder.within, config)


def mixers(source: Source, *, key_heads: int) -> list[Any]:
    """The mixer of each layer. key_heads: default number of attention's key heads."""
    source.must("hidden_act", ("silu",), "silu")  # of the recurrence, too
    count, every = decoder.layers(source), source.number("full_attention_interval", 4)
    silent = [LINEAR if (i + 1) % every else GLOBAL for i in range(count)]
    kinds = decoder.kinds(source, silent, (LINEAR, GLOBAL))
    attention = decoder.attention(
        source, decoder.rope(source, share=0.25), heads=16, key_heads=key_heads, width=256, qk_norm="head",
        gate="sigmoid", bias=decoder.flag(source, "attention_bias", False),
    )  # fmt: skip
    heads, key_heads = source.number("linear_num_value_heads", 32), source.number("linear_num_key_heads", 16)
    if heads % key_heads:
        raise source.error(
            f"linear_num_key_heads is {key_heads}, must divide linear_num_value_heads = {heads}"
        )
    linear = config_of(
        "gdn", heads=heads, key_heads=key_heads, conv=source.number("linear_conv_kernel_dim", 4),
        key_dim=source.number("linear_key_head_dim", 128), value_dim=source.number("linear_value_head_dim", 128),
    )  # fmt: skip
    return [linear if kind == LINEAR else attention for kind in kinds]


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    source.drop_all(*LEFT)
    inner = "model.language_model."
    top = inner if source.has(f"{inner}norm.weight") else "model."
    return decoder.weights(source, config, mixer=linear, attention=attention, top=top, one=True)


def linear(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    """Weights of Gated DeltaNet."""
    return source.take_all(f"{there}.linear_attn", here, NAMES)


def attention(source: Source, there: str, here: str, D: int, mixer: Any, *, one: bool) -> dict[str, Tensor]:
    """Weights of gated attention. Queries and gates are in one matrix, head by head; gates are split off first."""
    H, K, name = mixer.heads, mixer.width(D), f"{there}.q_proj"
    gates = {}
    for part in ("weight", "bias") if mixer.bias else ("weight",):
        inner = (D,) if part == "weight" else ()
        both = source.take(f"{name}.{part}", 2 * H * K, *inner).unflatten(0, (H, 2, K))
        q, gate = (x.flatten(0, 1) for x in both.unbind(1))
        gates[f"{here}.gate_proj.{part}"] = gate
        source.tensors[f"{name}.{part}"] = q.clone
    return gates | decoder.attention_weights(source, there, here, D, mixer, one=one)
