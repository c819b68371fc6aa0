"""Parts that several kinds of model share, by our names.

Shapes: D model width, H query heads, G heads of keys and values, K head width, I inner width, N state rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.heads import LinearHeadConfig


class Defaults(NamedTuple):
    """Values that a kind of model takes where its config.json is silent. eps: of the norms. key_heads: heads of keys
    and values; None is as many as of queries. rope_share: of a head's channels that turn; None if no config of that
    kind can say it. sliding_window: what attention sees; None is everything."""

    eps: float
    key_heads: int | None = None
    rope_share: float | None = None
    sliding_window: int | None = None


def head_of(source: Source, tied: bool) -> LinearHeadConfig | None:
    """A head of its own, or none where the embedding is it."""
    return None if source.must("tie_word_embeddings", (True, False), tied) else LinearHeadConfig()


def embeddings(source: Source, name: str, config: ModelConfig) -> dict[str, Tensor]:
    return {"embedding.weight": source.take(name, config.vocab_size, config.d_model)}


def head(source: Source, config: ModelConfig, V: int) -> dict[str, Tensor]:
    """The head's matrix; one that is written beside the embedding though tied to it is passed over."""
    if config.head is None:
        source.drop("lm_head.weight")
        return {}
    return {"lm_head.weight": source.take("lm_head.weight", V, config.d_model)}


def attention_config(source: Source, D: int, defaults: Defaults) -> AttentionConfig:
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
    share = defaults.rope_share
    if share is None:
        for where in (rope, source):
            where.must("partial_rotary_factor", (1.0,), 1.0)
    else:
        share = rope.real("partial_rotary_factor", share)
    bias = source.must("attention_bias", (True, False), False)
    return AttentionConfig(heads, base, bool(bias), 1.0 if share is None else share)


def attention(
    source: Source, there: str, here: str, D: int, mixer: AttentionConfig, defaults: Defaults
) -> dict[str, Tensor]:
    """Queries, keys and values in one matrix. Keys and values that several query heads share are repeated for each,
    which is the same function with a larger cache."""
    H = mixer.heads
    missing = "num_key_value_heads" not in source.values  # null is as many as query heads
    G, K = source.number("num_key_value_heads", (missing and defaults.key_heads) or H), D // H
    found = {}
    for part in ("weight", "bias") if mixer.bias else ("weight",):
        inner = (D,) if part == "weight" else ()
        q = source.take(f"{there}.q_proj.{part}", D, *inner)
        k, v = (source.take(f"{there}.{name}_proj.{part}", G * K, *inner) for name in "kv")
        k, v = (x.unflatten(0, (G, K)).repeat_interleave(H // G, 0).flatten(0, 1) for x in (k, v))
        found[f"{here}.qkv_proj.{part}"] = torch.cat([q, k, v])
        found[f"{here}.o_proj.{part}"] = source.take(f"{there}.o_proj.{part}", D, *inner)
    return found


def swiglu(source: Source, there: str, here: str, D: int, hidden: int) -> dict[str, Tensor]:
    shapes = {"gate_proj": (hidden, D), "up_proj": (hidden, D), "down_proj": (D, hidden)}
    return {f"{here}.{n}.weight": source.take(f"{there}.{n}.weight", *shape) for n, shape in shapes.items()}


def ssd_config(source: Source, D: int, names: dict[str, str], groups: int, width: int | None) -> SSDConfig:
    """Mamba-2's mixer with one group. names: theirs of our options, of groups and of the biases. groups and width of a
    head are what a config without them means; None for a width that follows from the others."""
    for name, value, silent in (("groups", 1, groups), ("bias", False, False), ("conv_bias", True, True)):
        source.must(names[name], (value,), silent)
    if source.get("time_step_limit") is not None:
        limit = source.items("time_step_limit")
        if limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
            raise source.error(f"time_step_limit is {limit}, must be [0, inf] to be read")
    expand, heads = source.number(names["expand"], 2), source.number(names["heads"])
    follows = source.get(names["head_dim"], "auto" if width is None else width) == "auto"
    width = expand * D // heads if follows else source.number(names["head_dim"], width)
    if width * heads != expand * D:
        raise source.error(
            f"{heads} heads of {width} are {heads * width} wide, must be expand · width = {expand * D}"
        )
    return SSDConfig(width, source.number(names["state"]), expand, source.number(names["conv"], 4))


def ssd(source: Source, there: str, here: str, D: int, mixer: SSDConfig) -> dict[str, Tensor]:
    inner, N = mixer.expand * D, mixer.state
    H, C = inner // mixer.head_dim, inner + 2 * N
    shapes = {
        "in_proj.weight": (inner + C + H, D), "conv1d.weight": (C, 1, mixer.conv), "conv1d.bias": (C,),
        "dt_bias": (H,), "A_log": (H,), "D": (H,), "norm.weight": (inner,), "out_proj.weight": (D, inner),
    }  # fmt: skip
    return {
        f"{here}.{name.replace('out_proj', 'o_proj')}": source.take(f"{there}.{name}", *shape)
        for name, shape in shapes.items()
    }
