"""OLMo Hybrid: Gated DeltaNet in most layers, with norms before each part, and attention in the others, with norms
after each part and across all heads of queries and keys. Files store the convolutions of q, k and v separately.

Shapes: D model width, H heads of values, G heads of keys, K and V head widths.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import Source
from perspectron.model.config import BlockConfig, ModelConfig, SequentialConfig
from perspectron.model.mixer import config_of

HARMLESS = (
    "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
)  # fmt: skip
EPS = 1e-5
"""Epsilon of the norm of Gated DeltaNet's output, whatever the other norms have."""
RENAMED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Names of norms in files, by those in memory. Files may have the latter, too."""


def config(source: Source) -> ModelConfig:
    count = decoder.layers(source)
    silent = [LINEAR if (i + 1) % 4 else GLOBAL for i in range(count)]
    kinds = decoder.kinds(source, silent if count >= 4 else [*silent[1:], GLOBAL], (LINEAR, GLOBAL))
    bias = decoder.flag(source, "attention_bias", False)
    attention = decoder.attention(source, _rope(source), heads=30, qk_norm="all", bias=bias)
    mixers = [_linear(source) if kind == LINEAR else attention for kind in kinds]
    around = [SequentialConfig("pre" if kind == LINEAR else "post") for kind in kinds]
    network = decoder.network(source)
    source.must("hidden_act", ("silu",), "silu")  # of the convolution, too
    return decoder.model(source, "olmo_hybrid", mixers, network, residual=around, longest=65_536)


def _rope(source: Source) -> decoder.Rope | None:
    """Rotary positions; None if the base is null, which is not the same as missing."""
    table = (
        source.mapping("rope_scaling") if source.get("rope_scaling") else source.mapping("rope_parameters")
    )
    where = table if "rope_theta" in table.values else source
    if "rope_theta" in where.values and where.get("rope_theta") is None:
        table.must("rope_type", ("default",), "default")
        return None
    return decoder.rope(source)


def _linear(source: Source) -> Any:
    heads = source.number("num_attention_heads", 30)
    H, G = source.number("linear_num_value_heads", heads), source.number("linear_num_key_heads", heads)
    if H % G:
        raise source.error(f"linear_num_key_heads is {G}, must divide linear_num_value_heads = {H}")
    K = source.number("linear_key_head_dim", max(1, 3 * source.number("hidden_size") // (4 * G)))
    return config_of(
        "gdn", heads=H, key_heads=G, key_dim=K, value_dim=source.number("linear_value_head_dim", 2 * K),
        conv=source.number("linear_conv_kernel_dim", 4), norm_eps=EPS,
        negative=decoder.flag(source, "linear_allow_neg_eigval", True),
    )  # fmt: skip


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return decoder.weights(source, config, mixer=_mixer, norms=_norms)


def _norms(source: Source, there: str, block: BlockConfig) -> dict[str, str]:
    """The file's names of a layer's norms, by ours."""
    assert isinstance(block.residual, SequentialConfig)
    names = decoder.PRE if block.residual.norm == "pre" else decoder.POST
    return {
        ours: theirs if source.has(f"{there}.{theirs}.weight") else RENAMED.get(theirs, theirs)
        for ours, theirs in names.items()
    }


def _mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    there = f"{there}.linear_attn"
    H, G, K, V = mixer.heads, mixer.key_heads, mixer.key_dim, mixer.value_dim
    rows = (("q", G * K), ("k", G * K), ("v", H * V))
    return source.take_all(there, here, {"norm": "o_norm"}, but=("qkv_proj", "conv1d")) | {
        f"{here}.qkv_proj.weight": torch.cat(
            [source.take(f"{there}.{x}_proj.weight", n, D) for x, n in rows]
        ),
        f"{here}.conv1d.weight": _convolution(source, there, dict(rows), mixer.conv),
    }


def _convolution(source: Source, there: str, rows: dict[str, int], taps: int) -> Tensor:
    """The convolutions of q, k and v, joined. transformers 5.24 saves them cut into thirds, whatever their sizes."""
    whole = sum(rows.values())
    if source.has(f"{there}.conv1d.weight"):
        return source.take(f"{there}.conv1d.weight", whole, 1, taps)
    first, third = source.tensors.get(f"{there}.q_conv1d.weight"), -(-whole // 3)
    if first is not None and len(first()) == third:
        rows = {"q": third, "k": third, "v": whole - 2 * third}
    return torch.cat([source.take(f"{there}.{x}_conv1d.weight", n, 1, taps) for x, n in rows.items()])
