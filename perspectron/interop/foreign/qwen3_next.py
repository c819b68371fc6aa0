"""Qwen3-Next: the mixers of Qwen3.5, with rows of queries, keys, values and gates grouped by key head, and a mixture of
experts in all or some of its layers.

Shapes: D model width, H heads of values, G heads of keys, r = H/G, K and V head widths.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.interop.foreign import decoder, mixture, qwen3_5
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = (
    "moe_intermediate_size", "mtp_num_hidden_layers", "norm_topk_prob", "num_experts_per_tok",
    "shared_expert_intermediate_size", *mixture.HARMLESS,
)  # fmt: skip
"""Options of experts are read only if there are experts."""


def config(source: Source) -> ModelConfig:
    mixers = qwen3_5.mixers(source, key_heads=2)
    source.must("use_sliding_window", (False,), False)  # transformers ignores it
    networks = decoder.networks(
        source, len(mixers), normed=True, experts=512, used=10, hidden=512, shared=512
    )
    return decoder.model(source, "qwen3_next", mixers, networks, longest=32_768)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    source.drop_all("mtp.")
    return decoder.weights(source, config, mixer=_linear, attention=qwen3_5.attention, one=True)


def _linear(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    """Weights as in Qwen3.5, once rows are regrouped by what they give, as most are already in a GGUF."""
    H, G, K, V = mixer.heads, mixer.key_heads, mixer.key_dim, mixer.value_dim
    r, name, rows = H // G, f"{there}.linear_attn.in_proj_", 2 * (G * K + H * V)
    if not source.has(f"{name}qkv.weight"):
        both = source.take(f"{name}qkvz.weight", rows, D).unflatten(0, (G, -1))
        *qkv, z = (x.flatten(0, 1) for x in both.split([K, K, r * V, r * V], 1))
        source.tensors |= {f"{name}qkv.weight": torch.cat(qkv).clone, f"{name}z.weight": z.clone}
    b, a = (
        x.flatten(0, 1) for x in source.take(f"{name}ba.weight", 2 * H, D).unflatten(0, (G, 2, r)).unbind(1)
    )
    source.tensors |= {f"{name}a.weight": a.clone, f"{name}b.weight": b.clone}
    taken = qwen3_5.linear(source, there, here, D, mixer)
    source.note([f"{name}qkv.weight", f"{name}z.weight"], [f"{name}qkvz.weight"], rows, D)
    source.note([f"{name}a.weight", f"{name}b.weight"], [f"{name}ba.weight"], 2 * H, D)
    return taken
