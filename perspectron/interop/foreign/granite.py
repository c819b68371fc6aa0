"""Granite 4 (`granitemoehybrid`): in every block Mamba-2 or attention, then a SwiGLU, with or without experts; factors
scale the embedding, what blocks add, attention scores and logits.

Shapes: D model width, F width of a network, E experts.
"""

from typing import Any

from torch import Tensor

from perspectron.experts.mixture import MATRICES, MixtureConfig
from perspectron.interop.foreign import bamba, decoder, mamba2, mixture
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig, SequentialConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.util.config import FFNConfig

HARMLESS = (
    "init_method", "intermediate_size", "mamba_chunk_size", "num_experts_per_tok", *mixture.HARMLESS,
)  # fmt: skip


def config(source: Source) -> ModelConfig:
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
        _config(source),
        residual=SequentialConfig(factor=source.real("residual_multiplier", 1.0)), longest=2048,
        embedding_factor=source.real("embedding_multiplier", 1.0),
        logits_factor=1 / source.positive("logits_scaling", 1.0),
    )  # fmt: skip


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return decoder.weights(source, config, mixer=bamba.mixer, network="shared_mlp", gated=_network)


def _config(source: Source) -> FFNConfig:
    """The config of a SwiGLU or, with experts, of a mixture that has it as its shared network."""
    E = mixture.count(source, "num_local_experts", silent=8)
    shared = source.number("shared_intermediate_size", 1024, least=int(E == 0))
    if not E:
        return SwiGLUConfig(shared)
    F, K = source.number("intermediate_size"), mixture.chosen(source, E, 2)
    return MixtureConfig(F, E, K, shared=shared)


def _network(source: Source, there: str, here: str, D: int, ffn: Any) -> dict[str, Tensor]:
    """Weights of a network. Files join gate and up matrices in one tensor, and have all experts in one."""
    if isinstance(ffn, SwiGLUConfig):
        gate, up, down = _matrices(source, there, D, ffn.hidden)
        return {
            f"{here}.gate_proj.weight": gate,
            f"{here}.up_proj.weight": up,
            f"{here}.down_proj.weight": down,
        }
    E, experts = ffn.experts, there.replace("shared_mlp", "block_sparse_moe")
    taken = {f"{here}.route_proj.weight": source.take(f"{experts}.router.layer.weight", E, D)}
    shared = "gate", "up", "down"
    for name, matrix in zip(MATRICES, _matrices(source, experts, D, ffn.hidden, E), strict=True):
        taken[f"{here}.{name}"] = matrix
    if ffn.shared:
        for name, matrix in zip(shared, _matrices(source, there, D, ffn.shared), strict=True):
            taken[f"{here}.shared_{name}_proj.weight"] = matrix
    return taken


def _matrices(source: Source, there: str, D: int, F: int, *E: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = source.take(f"{there}.input_linear.weight", *E, 2 * F, D).split(F, -2)
    return gate.contiguous(), up.contiguous(), source.take(f"{there}.output_linear.weight", *E, D, F)
