"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and a mixture of
experts in all but the first layers.

Shapes: D model width, H heads; of latent attention R latent width, and N, P and V the widths of a head's own part of a
key, of the part that heads share, and of a value.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.experts.mixture import MixtureConfig
from perspectron.interop.foreign import decoder, mixture
from perspectron.interop.foreign.decoder import GLOBAL, LINEAR
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.model.mixer import config_of
from perspectron.util.config import FFNConfig

HARMLESS = (
    "head_dim", "intermediate_size", "max_position_embeddings", "model_max_length", "moe_intermediate_size",
    "moe_renormalize", "moe_router_activation_func", "n_group", "n_shared_experts", "norm_topk_prob",
    "num_expert_group", "num_experts", "num_experts_per_tok", "num_experts_per_token", "num_local_experts",
    "num_shared_experts", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor", "topk_group",
    "topk_method", *mixture.HARMLESS,
)  # fmt: skip
"""There are no positions. Options of experts and of dense networks are read only if a layer has them."""
LATENT_EPS = 1e-6
"""Epsilon of the latent's norm, whatever the other norms have."""
DENSE, SPARSE = "dense", "sparse"
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


def config(source: Source) -> ModelConfig:
    table = source.mapping("linear_attn_config")
    kinds = _kinds(source, table)
    each = {LINEAR: _linear(source, table), GLOBAL: _latent(source)}
    networks = _networks(source, len(kinds))
    source.must("num_nextn_predict_layers", (0,), 0)
    return decoder.model(source, "kimi_linear", [each[kind] for kind in kinds], networks, eps=1e-5)


def _kinds(source: Source, table: Source) -> list[str]:
    """The kind of each layer, from lists of layer numbers, counted from 1, or from `layer_types`."""
    count = decoder.layers(source)
    full, linear = table.items("full_attn_layers"), table.items("kda_layers")
    if not (full or linear):
        silent = [GLOBAL if i and i % 4 == 0 else LINEAR for i in range(count)]
        return decoder.kinds(source, silent, (LINEAR, GLOBAL))
    numbers = [*full, *linear]
    if any(type(n) is not int for n in numbers) or sorted(numbers) != [*range(1, count + 1)]:
        raise table.error(
            f"full_attn_layers and kda_layers are {full} and {linear}, must have each of 1 to {count} once"
        )
    kinds = [GLOBAL if i + 1 in full else LINEAR for i in range(count)]
    source.must("layer_types", (None, kinds))
    return kinds


def _linear(source: Source, table: Source) -> Any:
    heads = table.number("num_heads", source.number("linear_num_heads", 32))
    width = table.number("head_dim", source.number("linear_head_dim", 128))
    taps = table.number("short_conv_kernel_size", source.number("linear_conv_kernel_dim", 4))
    return config_of("kda", heads=heads, head_dim=width, conv=taps, gate_bias=False)


def _latent(source: Source) -> Any:
    source.must("mla_use_nope", (True,), True)  # transformers has no positions, whatever it says
    source.must("attention_bias", (False,), False)
    source.must("q_lora_rank", (None,))
    heads = source.number("num_attention_heads", 32)
    silent = 32 if "num_key_value_heads" not in source.values else heads  # null is as many
    if (grouped := source.number("num_key_value_heads", silent)) != heads:
        raise source.error(f"num_key_value_heads is {grouped}, must be num_attention_heads = {heads}")
    own, shared = source.number("qk_nope_head_dim", 128), source.number("qk_rope_head_dim", 64)
    source.must("qk_head_dim", (None, own + shared))
    return config_of(
        "mla", heads=heads, rank=source.number("kv_lora_rank", 512), key_dim=own, shared_dim=shared,
        value_dim=source.number("v_head_dim", 128), norm_eps=source.positive("kv_norm_eps", LATENT_EPS),
    )  # fmt: skip


def _networks(source: Source, count: int) -> list[FFNConfig]:
    source.must("hidden_act", ("silu",), "silu")
    source.must("moe_layer_freq", (1,), 1)
    source.must("use_grouped_topk", (True,), True)
    first = source.number("first_k_dense_replace", 1, least=0)
    silent = [DENSE if i < first else SPARSE for i in range(count)]
    kinds = source.get("mlp_layer_types", silent)
    if source.get("first_k_dense_replace") is not None:
        source.must("mlp_layer_types", (None, silent))
    known = isinstance(kinds, list) and all(kind in (DENSE, SPARSE) for kind in kinds)
    if not known or len(kinds) != count:
        raise source.error(
            f"mlp_layer_types is {str(kinds)[:80]}, must be a list of {count} times {DENSE!r} or {SPARSE!r}"
        )
    each = dict[str, FFNConfig]()
    if DENSE in kinds:
        each[DENSE] = decoder.network(source)
    if SPARSE in kinds:
        each[SPARSE] = _mixture(source)
    return [each[kind] for kind in kinds]


def _mixture(source: Source) -> MixtureConfig:
    """A mixture with sigmoid scores, corrected for choosing experts, by groups, and with a shared network."""
    source.must("moe_router_activation_func", ("sigmoid",), "sigmoid")
    source.must("topk_method", ("noaux_tc",), "noaux_tc")
    E, F = (
        source.number(_named(source, "num_local_experts", "num_experts"), 256, least=1),
        "moe_intermediate_size",
    )
    width = source.number(F, 1024)
    return MixtureConfig(
        width, E, source.number(_named(source, "num_experts_per_tok", "num_experts_per_token"), 8, most=E), "sigmoid",
        decoder.flag(source, _named(source, "norm_topk_prob", "moe_renormalize"), True),
        source.positive("routed_scaling_factor", 2.446), True,
        source.number(_named(source, "n_group", "num_expert_group"), 1), source.number("topk_group", 1),
        shared=width * source.number(_named(source, "n_shared_experts", "num_shared_experts"), 1),
    )  # fmt: skip


def _named(source: Source, other: str, name: str) -> str:
    """Whichever of two names of an option the config has. CheckpointError: it has both, and they differ."""
    if (value := source.get(other)) is None:
        return name
    if (own := source.values.get(name, value)) != value:  # which transformers takes
        raise source.error(f"{other} is {value!r}, must be {name} = {own!r}, the same option")
    return other


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return decoder.weights(source, config, mixer=_mixer, network="block_sparse_moe", gated=_network)


def _network(source: Source, there: str, here: str, D: int, ffn: Any) -> dict[str, Tensor]:
    """Weights of a network; transformers 5.24 saves those without experts under the mixture's name, too."""
    if isinstance(ffn, MixtureConfig):
        return mixture.weights(source, there, here, D, ffn, shared="shared_experts", matrices=MATRICES)
    plain = there.replace("block_sparse_moe", "mlp")
    if any(name.startswith(f"{plain}.") for name in source.tensors):
        there = plain
    return source.take_all(there, here)


def _mixer(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    there = f"{there}.self_attn"
    return (_latent_weights if mixer.kind == "mla" else _linear_weights)(source, there, here, D, mixer)


def _latent_weights(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    """Weights of latent attention; in a GGUF the key and value matrices of heads are already separate."""
    H, R, N, P, V = mixer.heads, mixer.rank, mixer.key_dim, mixer.shared_dim, mixer.value_dim
    if source.has(f"{there}.k_b_proj.weight"):
        key_HRN = source.take(f"{there}.k_b_proj.weight", H, R, N)
        value_HVR = source.take(f"{there}.v_b_proj.weight", H, V, R)
        apart = [f"{there}.{x}_b_proj.weight" for x in "kv"]
        source.note(apart, [f"{there}.kv_b_proj.weight"], H * (N + V), R)
    else:
        both = source.take(f"{there}.kv_b_proj.weight", H * (N + V), R).unflatten(0, (H, N + V))
        key_HNR, value_HVR = both.split([N, V], 1)
        key_HRN = key_HNR.mT
    return {
        f"{here}.q_proj.weight": source.take(f"{there}.q_proj.weight", H * (N + P), D),
        f"{here}.kv_proj.weight": source.take(f"{there}.kv_a_proj_with_mqa.weight", R + P, D),
        f"{here}.kv_norm.weight": source.take(f"{there}.kv_a_layernorm.weight", R),
        f"{here}.key_HRN": key_HRN.contiguous(),
        f"{here}.value_HVR": value_HVR.contiguous(),
        f"{here}.o_proj.weight": source.take(f"{there}.o_proj.weight", D, H * V),
    }


def _linear_weights(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    joined = ("qkv_proj", "conv1d", "f_proj", "g_proj", "A_log")
    taken = source.take_all(there, here, {"norm": "o_norm"}, but=joined)
    for x in "fg":
        for i, part in enumerate("ab"):
            taken |= source.take_all(f"{there}.{x}_{part}_proj", f"{here}.{x}_proj.{i}")
    H, wide = mixer.heads, mixer.heads * mixer.head_dim
    for ours, theirs, shape in (("qkv_proj", "proj", (wide, D)), ("conv1d", "conv1d", (wide, 1, mixer.conv))):
        parts = [source.take(f"{there}.{x}_{theirs}.weight", *shape) for x in "qkv"]
        taken[f"{here}.{ours}.weight"] = torch.cat(parts)
    return taken | {f"{here}.A_log": source.take(f"{there}.A_log", 1, 1, H, 1).flatten()}
