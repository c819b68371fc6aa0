"""Granite 4 without experts (`granitemoehybrid`): Mamba-2 or attention, then a SwiGLU, in every block, with factors of
the embedding, of what blocks add, of scores and of logits.

Shapes: D model width, F width of a network.
"""

from torch import Tensor

from perspectron.interop.foreign import bamba, decoder, mamba2
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig, SequentialConfig
from perspectron.model.ffn import SwiGLUConfig

HARMLESS = (
    "init_method", "intermediate_size", "mamba_chunk_size", "num_experts_per_tok", "output_router_logits",
    "router_aux_loss_coef",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    source.must("num_local_experts", (0,), 8)
    source.must("normalization_function", ("rmsnorm",), "rmsnorm")
    kinds = decoder.kinds(source, [LINEAR] * decoder.layers(source), (LINEAR, GLOBAL))
    positions = decoder.rope(source)
    turned = source.must("position_embedding_type", (None, "rope", "nope")) == "rope"
    attention = decoder.attention(
        source, positions if turned else None, bias=decoder.flag(source, "attention_bias", False),
        scale=source.real("attention_multiplier", 1.0),
    )  # fmt: skip
    ssd = mamba2.mixer(source, mamba2.Keys(), groups=1, state=256)
    source.must("hidden_act", ("silu",), "silu")
    return decoder.model(
        source, "granite", [ssd if kind == LINEAR else attention for kind in kinds],
        SwiGLUConfig(source.number("shared_intermediate_size", 1024)),
        residual=SequentialConfig(factor=source.real("residual_multiplier", 1.0)), longest=2048,
        embedding_factor=source.real("embedding_multiplier", 1.0),
        logits_factor=1 / source.positive("logits_scaling", 1.0),
    )  # fmt: skip


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return decoder.weights(source, config, mixer=bamba.mixer, network="shared_mlp", gated=_network)


def _network(source: Source, there: str, here: str, D: int, ffn: SwiGLUConfig) -> dict[str, Tensor]:
    """Gate and what it gates in one matrix."""
    F = ffn.hidden
    gate, up = source.take(f"{there}.input_linear.weight", 2 * F, D).split(F)
    return {
        f"{here}.gate_proj.weight": gate.contiguous(),
        f"{here}.up_proj.weight": up.contiguous(),
        f"{here}.down_proj.weight": source.take(f"{there}.output_linear.weight", D, F),
    }
