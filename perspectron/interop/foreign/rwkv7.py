"""RWKV-7 in fla's format: a norm of the embedding, then a time mix and a channel mix in each layer, which become two
blocks of ours. The author's own files are mapped to the same names (`pth`).

Shapes: D model width, H heads, K = D/H head width.
"""

import torch
from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig
from perspectron.model.mixer import config_of

HARMLESS = (
    "attn_mode", "clip_grad", "fuse_cross_entropy", "fuse_linear_cross_entropy", "max_position_embeddings",
    "use_l2warp",
)  # fmt: skip
MIXES = "rwkvag"
LOW = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim", "g": "gate_low_rank_dim"}
"""Config keys of the low ranks, by the letters of their outputs."""
SILENT = {"w": 64, "a": 64, "v": 16, "g": 128}
TIME = {f"{name}_low": f"{name}_lora.lora" for name in LOW} | {
    "norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias",
}  # fmt: skip
CHANNEL = {"mix_D": "x_k", "k_proj": "key", "v_proj": "value"}
"""Names of the parts of a time mix and of a channel mix by ours, where they differ."""
FUSED_EPS = 1e-6
"""Epsilon that fla's kernel for unit keys adds to the squared length; without the kernel, a tiny length is clamped."""
GROUP_EPS = "group_norm_eps"
"""Config key of the epsilon of the norm of heads, in sources that are not fla's."""


def config(source: Source) -> ModelConfig:
    D, layers = source.number("hidden_size"), source.number("num_hidden_layers", most=MOST_BLOCKS // 2)
    K = source.get("head_dim", None if "head_dim" in source.values else 64)
    source.get("num_heads")  # fla goes by `head_dim`; published files have the number of a wider model
    if K is None:
        K = D // max(1, source.number("num_heads"))
    if type(K) is not int or K < 1 or D % K:
        raise source.error(f"head_dim is {K!r}, must divide hidden_size = {D}")
    source.must("hidden_act", ("sqrelu",), "sqrelu")
    source.must("attn", ((), {}), ())
    source.must("norm_bias", (True,), True)
    source.must("value_dim", (D, [D] * layers), D)
    eps = source.positive("norm_eps", 1e-5)
    ranks = {f"{name}_rank": _rank(source, name, D, K) for name in LOW}
    unit = FUSED_EPS if decoder.flag(source, "fuse_norm", True) else 0.0
    group = source.positive(GROUP_EPS, K * eps)
    blocks = []
    for layer in range(layers):
        place = {"layer": layer, "layers": layers}
        time = config_of("rwkv7", head_dim=K, **ranks, group_eps=group, unit_eps=unit, **place)
        channel = config_of("rwkv7_channel", hidden=_hidden(source, D), **place)
        blocks += [BlockConfig(time, None), BlockConfig(channel, None)]
    return ModelConfig(
        "rwkv7", source.number("vocab_size"), D, tuple(blocks), decoder.head(source, False), norm="layer", norm_eps=eps,
        first_norm=decoder.flag(source, "norm_first", True),
    )  # fmt: skip


def _rank(source: Source, name: str, D: int, K: int) -> int:
    """A low rank; if the config has null, it follows from the widths."""
    key = LOW[name]
    if key in source.values and source.get(key) is None:
        size = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}[name] * D**0.5 * (1 if name == "g" else K / 64)
        return max(32, round(size / 32) * 32)
    return source.number(key, SILENT[name])


def _hidden(source: Source, D: int) -> int:
    ratio = source.positive("hidden_ratio", 4)
    return source.number("intermediate_size", 32 * -(-int(D * ratio) // 32))


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    D = config.d_model
    taken = decoder.outer(source, "model.embeddings.weight", config)
    source.drop_all(
        "model.layers.0.attn.v_lora."
    )  # a mix with the first layer's values, which that layer itself lacks
    norms = {"norm": "model.norm"} | ({"first_norm": "model.layers.0.pre_norm"} if config.first_norm else {})
    for i in range(0, len(config.blocks), 2):
        there = f"model.layers.{i // 2}"
        norms |= {
            f"blocks.{i}.mixer_norm": f"{there}.attn_norm",
            f"blocks.{i + 1}.mixer_norm": f"{there}.ffn_norm",
        }
        taken |= _time(source, f"{there}.attn", f"blocks.{i}.mixer", D, config.blocks[i].mixer)
        taken |= source.take_all(f"{there}.ffn", f"blocks.{i + 1}.mixer", CHANNEL)
    for here, name in norms.items():
        taken |= source.take_all(name, here)
    return taken


def _time(source: Source, there: str, here: str, D: int, mixer: object) -> dict[str, Tensor]:
    K: int = getattr(mixer, "head_dim", 0)
    if source.has(f"{there}.x_x"):
        mix_6D = source.take(f"{there}.x_x", 6, D)
    else:
        mix_6D = torch.stack([source.take(f"{there}.x_{name}", 1, 1, D).flatten() for name in MIXES])
    r_k = source.take(f"{there}.r_k", D // K, K).flatten()
    taken = {f"{here}.mix_6D": mix_6D, f"{here}.r_k": r_k}
    return taken | source.take_all(there, here, TIME, but=("mix_6D", "r_k"))
