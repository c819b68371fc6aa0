"""Nemotron-H: one part in each layer, Mamba-2, attention without positions, a network of relu², or a mixture of such.

Shapes: D model width.
"""

from typing import Any

from torch import Tensor

from perspectron.experts.mixture import MixtureConfig
from perspectron.interop.foreign import decoder, mamba2, mixture
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import LAYER_TYPES, Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig
from perspectron.model.ffn import MLPConfig
from perspectron.util.config import FFNConfig

HARMLESS = (
    "chunk_size", "hidden_dropout", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_limit", "mamba_dt_max",
    "mamba_ssm_cache_dtype", "max_position_embeddings", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_logits_to_keep",
    "num_nextn_predict_layers", "num_query_groups", "partial_rotary_factor", "rescale_prenorm_residual",
    "residual_in_fp32", "rope_theta", "routed_scaling_factor", "time_step_floor", "time_step_limit", "time_step_max",
    "time_step_rank", "topk_group", "use_mamba_kernels",
    *mixture.HARMLESS,
)  # fmt: skip
"""transformers ignores the limit of step sizes. Options of experts are read only if a layer has them."""
NETWORK, EXPERTS = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": GLOBAL, "-": NETWORK, "E": EXPERTS}
OLDER = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
"""Current names of options by their names in older files, which take precedence."""
KEYS = mamba2.Keys(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "expand", "use_bias",
    "use_conv_bias",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    source = _renamed(source)
    kinds = _kinds(source)
    mixers = {LINEAR: _mamba(source), GLOBAL: _attention(source)}
    networks: dict[str, FFNConfig] = {NETWORK: _network(source)}
    if EXPERTS in kinds:
        networks[EXPERTS] = mixture.nemotron(source)
    blocks = tuple(BlockConfig(mixers.get(kind), networks.get(kind)) for kind in kinds)
    source.must("tie_word_embeddings", (False,), False)  # transformers reads it and ties nothing
    eps = source.real("layer_norm_epsilon", 1e-5)
    for name in ("rms_norm_eps", "norm_eps"):  # transformers does not read them
        source.must(name, (None, eps))
    return ModelConfig(
        "nemotron_h", source.number("vocab_size"), source.number("hidden_size"), blocks, decoder.head(source, False),
        norm_eps=eps,
    )  # fmt: skip


def _renamed(source: Source) -> Source:
    for older, name in OLDER.items():
        if source.get(older) is not None:
            source.values[name] = source.values[older]
    return source


def _kinds(source: Source) -> list[str]:
    """The kind of each layer, from a list or from a string of letters. Its length is the number of layers."""
    source.get("num_hidden_layers")
    pattern, listed = source.get("hybrid_override_pattern"), source.get("layers_block_type")
    listed = listed or source.get("layer_types")
    if listed is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - PATTERN.keys():
            raise source.error(
                f"hybrid_override_pattern is {str(pattern)[:80]!r}, must be of {' '.join(PATTERN)}"
            )
        listed = [PATTERN[letter] for letter in pattern]
    kinds = [LINEAR, EXPERTS, GLOBAL, NETWORK] if listed is None else listed
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MOST_BLOCKS:
        raise source.error(
            f"layers_block_type is {str(kinds)[:80]}, must be a list of 1 to {MOST_BLOCKS} names"
        )
    kinds = [LAYER_TYPES.get(str(kind), str(kind)) for kind in kinds]
    known = (LINEAR, GLOBAL, NETWORK, EXPERTS)
    if other := set(kinds) - set(known):
        raise source.error(
            f"layers_block_type has {min(other)!r}, must be {' or '.join(map(repr, known))} to be read"
        )
    return kinds


def _mamba(source: Source) -> Any:
    source.must("mamba_hidden_act", ("silu",), "silu")
    source.must("mamba_proj_bias", (False,), False)  # transformers ignores it: `use_bias` counts
    width, heads = source.number("mamba_head_dim", 64), source.number("mamba_num_heads", 128)
    least = source.real("time_step_min", 1e-3)
    return mamba2.mixer(
        source, KEYS, groups=8, state=128, width=64, inner=heads * width, dt_min=max(0.0, least), dt_max=None
    )


def _attention(source: Source) -> Any:
    source.must("attention_bias", (False,), False)  # transformers ignores it: no biases
    source.must("sliding_window", (None,))  # ignored as well
    width = source.number("head_dim", 128)
    source.must("attention_head_dim", (None, width))
    return decoder.attention(source, None, key_heads=8, width=128)


def _network(source: Source) -> MLPConfig:
    source.must("mlp_hidden_act", ("relu2",), "relu2")
    bias = decoder.flag(source, "mlp_bias", False)
    return MLPConfig(source.number("intermediate_size", 21_504), "relu2", bias)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    source.drop_all("mtp.")
    top = "backbone." if any(name.startswith("backbone.") for name in source.tensors) else "model."
    D = config.d_model
    taken = decoder.outer(source, f"{top}embeddings.weight", config)
    taken["norm.weight"] = source.take(f"{top}norm_f.weight", D)
    for i, block in enumerate(config.blocks):
        there, here = f"{top}layers.{i}", f"blocks.{i}"
        mixer: Any = block.mixer
        ours = "ffn" if mixer is None else "mixer"
        taken[f"{here}.{ours}_norm.weight"] = source.take(f"{there}.norm.weight", D)
        if isinstance(block.ffn, MixtureConfig):
            taken |= mixture.weights(
                source, f"{there}.mixer", f"{here}.ffn", D, block.ffn, shared="shared_experts"
            )
        elif mixer is None:
            taken |= source.take_all(f"{there}.mixer", f"{here}.ffn")
        elif mixer.kind == "attention":
            taken |= decoder.attention_weights(source, f"{there}.mixer", f"{here}.mixer", D, mixer)
        else:
            taken |= source.take_all(f"{there}.mixer", f"{here}.mixer", mamba2.NAMES)
    return taken
