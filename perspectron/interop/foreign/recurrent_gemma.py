"""RecurrentGemma: RG-LRU or sliding-window attention, then a network gated by GELU, in every block. Norm weights are
stored minus 1.

Shapes: D model width, H blocks of the gates and heads, K width of a block.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import config_of

HARMLESS = ("final_w_init_variance_scale", "max_position_embeddings", "w_init_variance_scale")
RECURRENT, ATTENTION = "recurrent", "attention"
PATTERN = [RECURRENT, RECURRENT, ATTENTION]
PLACE = "temporal_block"
NORMS = {"mixer_norm": "temporal_pre_norm", "ffn_norm": "channel_pre_norm"}
NAMES = {
    "x_proj": "linear_x", "y_proj": "linear_y", "o_proj": "linear_out", "conv1d": "conv_1d",
    "decay_I": "rg_lru.recurrent_param",
}  # fmt: skip
"""Names of the parts of RG-LRU by ours."""


def config(source: Source) -> ModelConfig:
    D, H = source.number("hidden_size"), source.number("num_attention_heads", 10)
    if D % H:
        raise source.error(f"num_attention_heads is {H}, must divide hidden_size = {D}")
    source.must("head_dim", (D // H,), D // H)
    attention = decoder.attention(
        source, decoder.rope(source, share=0.5), heads=H, window=source.number("attention_window_size", 2048),
        bias=decoder.flag(source, "attention_bias", False), out_bias=True,
    )  # fmt: skip
    inner = source.number("lru_width", D)
    if inner % H:
        raise source.error(f"num_attention_heads is {H}, must divide lru_width = {inner}")
    recurrent = config_of(
        "rglru", heads=H, inner=None if inner == D else inner, conv=source.number("conv1d_width", 4)
    )
    mixers = [recurrent if kind == RECURRENT else attention for kind in _kinds(source)]
    source.must("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    source.must("embeddings_scale_by_sqrt_dim", (True,), True)  # in published files
    hidden = source.number("intermediate_size", least=2) // 2
    return decoder.model(
        source, "recurrent_gemma", mixers, SwiGLUConfig(hidden, "gelu_tanh", True), tied=True,
        embedding_factor=torch.tensor(D**0.5).bfloat16().item(), logits_cap=source.positive("logits_soft_cap", 30.0),
    )  # fmt: skip


def _kinds(source: Source) -> list[str]:
    """The kind of each layer, by a pattern that repeats."""
    older = source.items("_block_types")  # as published files have it; transformers does not read it
    count, pattern = decoder.layers(source), source.items("block_types") or older or PATTERN
    known = all(kind in (RECURRENT, ATTENTION) for kind in pattern)
    if not known or (source.get("block_types") is not None and len(pattern) * 100 < count):
        raise source.error(
            f"block_types is {str(pattern)[:60]}, must be a list of {RECURRENT!r} or {ATTENTION!r}"
        )
    return [str(pattern[i % len(pattern)]) for i in range(count)]


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return decoder.weights(
        source, config, mixer=_mixer, place=PLACE, norms=NORMS, network="mlp_block", last="final_norm", one=True
    )  # fmt: skip


def _mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    there = f"{there}.{PLACE}"
    H, K = mixer.heads, mixer.width(D) // mixer.heads
    taken = source.take_all(there, here, NAMES, but=("gates",))
    gates = [f"{there}.rg_lru.{name}_gate" for name in ("input", "recurrent")]
    weight = torch.cat([source.take(f"{gate}_weight", H, K, K) for gate in gates], -1)  # [in, out]
    bias = torch.cat([source.take(f"{gate}_bias", H, K) for gate in gates], -1)
    for h in range(H):
        taken[f"{here}.gates.{h}.weight"] = weight[h].T.contiguous()
        taken[f"{here}.gates.{h}.bias"] = bias[h].clone()
    return taken
