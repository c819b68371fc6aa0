"""Mamba-2, whose mixers are the only parts of its blocks. Bamba and Granite have its mixers, too.

Shapes: D model width, I inner width.
"""

import math
from typing import Any, NamedTuple

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.mixer import config_of

HARMLESS = (
    "chunk_size", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank",
)  # fmt: skip
NAMES = {"o_proj": "out_proj"}
"""Names of a mixer's parts by ours, where they differ."""


class Keys(NamedTuple):
    """Names of a mixer's options in a config."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    conv: str = "mamba_d_conv"
    expand: str = "mamba_expand"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"


KEYS = Keys(
    "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand", "use_bias", "use_conv_bias"
)


def config(source: Source) -> ModelConfig:
    source.must("hidden_act", ("silu",), "silu")
    eps = source.real("layer_norm_epsilon", 1e-5)
    blocks = (BlockConfig(mixer(source, KEYS, groups=8, state=128, width=64), None),) * decoder.layers(source)
    D, head = source.number("hidden_size"), decoder.head(source, False)
    return ModelConfig("ssd", source.number("vocab_size"), D, blocks, head, norm_eps=eps)


def weights(
    source: Source, config: ModelConfig, embedding: str = "backbone.embeddings.weight"
) -> dict[str, Tensor]:
    """Weights of a model of mixers alone. embedding: the file's name of the embedding's."""
    D = config.d_model
    taken = decoder.outer(source, embedding, config)
    taken["norm.weight"] = source.take("backbone.norm_f.weight", D)
    for i in range(len(config.blocks)):
        there, here = f"backbone.layers.{i}", f"blocks.{i}"
        taken[f"{here}.mixer_norm.weight"] = source.take(f"{there}.norm.weight", D)
        taken |= source.take_all(f"{there}.mixer", f"{here}.mixer", NAMES)
    return taken


def mixer(
    source: Source, keys: Keys, *, groups: int, state: int, width: int | None = None, inner: int | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    """The config of a mixer. groups, state, width: defaults; a head width of None follows from the number of heads.
    inner: I; None is expand · D. more: further options of the mixer."""
    D, heads = source.number("hidden_size"), source.number(keys.heads, 128)
    expand = source.number(keys.expand, 2)
    sized: dict[str, Any] = {"expand": expand} if inner is None else {"heads": heads}
    bound = "expand · width = " if inner is None else ""
    inner = expand * D if inner is None else inner
    follows = source.get(keys.head_dim, "auto" if width is None else width) == "auto"
    width = inner // heads if follows else source.number(keys.head_dim, width)
    if width * heads != inner:
        raise source.error(f"{heads} heads of {width} are {heads * width} wide, must be {bound}{inner}")
    least, most = _limit(source)
    return config_of(
        "ssd", head_dim=width, state=source.number(keys.state, state), conv=source.number(keys.conv, 4),
        groups=source.number(keys.groups, groups), bias=decoder.flag(source, keys.bias, False),
        conv_bias=decoder.flag(source, keys.conv_bias, True), **sized | {"dt_min": least, "dt_max": most} | more,
    )  # fmt: skip


def _limit(source: Source) -> tuple[float, float | None]:
    """Bounds of Δ from `time_step_limit`; None where there is no upper one."""
    if source.get("time_step_limit") is None:
        return 0.0, None
    written = source.items("time_step_limit")
    limit = [math.inf if x == {"__float__": "Infinity"} else x for x in written]
    if len(limit) != 2 or any(type(x) not in (int, float) for x in limit) or not max(0, limit[0]) <= limit[1]:
        raise source.error(f"time_step_limit is {written}, must be a number ≥ 0 and one that is no smaller")
    return max(0.0, float(limit[0])), None if limit[1] == math.inf else float(limit[1])
