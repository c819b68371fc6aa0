"""The families of models that a GGUF can hold: how each one's config becomes that of transformers, the names of its
tensors there, and how changes by llama.cpp's converter are undone.

Shapes: D model width, H query heads, G heads of keys and values, K head width; of linear attention Hk key heads, Hv
value heads, K and V their widths.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.interop.foreign.gguf.container import Container
from perspectron.model.config import MOST_BLOCKS, MOST_SIZE
from perspectron.util.errors import CheckpointError

Fix = Callable[[Tensor], Tensor]
Values = dict[str, Any]

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip

_RANKS = {
    "decay_low_rank_dim": "decay", "a_low_rank_dim": "iclr", "v_low_rank_dim": "value_residual_mix",
    "gate_low_rank_dim": "gate",
}  # fmt: skip
_RWKV7 = {
    "attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm",
    "time_mix_lerp_fused.weight": "attn.x_x", "time_mix_receptance": "attn.r_proj", "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj", "time_mix_output": "attn.o_proj", "channel_mix_lerp_k.weight": "ffn.x_k",
    "channel_mix_key": "ffn.key", "channel_mix_value": "ffn.value",
    **{f"time_mix_{name}.weight": f"attn.{name}" for name in ("k_k", "k_a", "r_k")},
    **{f"time_mix_{name}0.weight": f"attn.{name}_lora.lora.2.bias" for name in "wav"},
    **{f"time_mix_{name}1": f"attn.{name}_lora.lora.0" for name in "wavg"},
    **{f"time_mix_{name}2": f"attn.{name}_lora.lora.2" for name in "wavg"},
}  # fmt: skip


class Fields:
    """Metadata of a container's architecture. Fields that are read are noted, so that `done` can report the rest."""

    def __init__(self, container: Container, arch: str) -> None:
        self.container, self.arch = container, arch
        self._read = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.container.metadata.get(f"{self.arch}.{name}", default)

    def number(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A whole number from 1 to `most`; a list with one for each layer must have one value, apart from zeros."""
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value) - {0}) == 1:
            value = max(value)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(name, value, f"a whole number from 1 to {most:,}, the same in all layers")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, value, "a finite number")
        return float(value)

    def flags(self, name: str, count: int, default: Callable[[int], bool]) -> list[bool]:
        """A flag for each layer: true where the field's list is not 0; without a list, `default` of the index."""
        value = self.get(name)
        if value is None:
            return [default(i) for i in range(count)]
        if not isinstance(value, list) or len(value) < count:
            raise self.error(name, value, f"{count} values")
        return [bool(each) for each in value[:count]]

    def has(self, tensor: str) -> bool:
        """True if a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in self.container.tensors)

    def error(self, name: str, value: Any, must: str) -> CheckpointError:
        return self.container.error(f"{self.arch}.{name} is {value!r}, must be {must} to be read")

    def done(self) -> None:
        """Raise CheckpointError, with its name, for a field that was not read and is not 0 or empty: it may matter."""
        for key, value in self.container.metadata.items():
            arch, _, name = key.partition(".")
            if arch == self.arch and name not in self._read and value:
                raise self.error(name, value, "0 or missing")


class Family(NamedTuple):
    """A family. config: adds to the values that all families have. names: transformers' names of a layer's tensors by
    those in a GGUF; several of one name are joined by rows. fixes: undo the converter's changes, by names in a GGUF."""

    kind: str
    config: Callable[[Fields, Values], Values]
    names: dict[str, str]
    fixes: Callable[[Values], dict[str, Fix]] = lambda values: {}
    outer: dict[str, str] = _OUTER
    experts: bool = False
    """True if its models may have experts."""
    layers: str = "model.layers"
    """Prefix of the layers' tensors in transformers."""
    attends: bool = True
    """False for a family without standard attention, whose common values are `unattended`, not `shared`."""


# ---------------------------------------------------------------- configs


def shared(fields: Fields, *, experts: bool = False) -> Values:
    """The values that all families with attention have. experts: the family may have experts."""
    layers = fields.number("block_count", most=MOST_BLOCKS)
    if fields.get("nextn_predict_layers"):
        layers -= fields.number("nextn_predict_layers")
    D, H = fields.number("embedding_length"), fields.number("attention.head_count")
    K = fields.number("attention.key_length", D // H)
    if fields.get("attention.value_length", K) != K:
        raise fields.error("attention.value_length", fields.get("attention.value_length"), f"{K}, as of keys")
    if not fields.get("attention.causal", True):
        raise fields.error("attention.causal", False, "true")
    fields.get("vocab_size"), fields.get("rope.scaling.finetuned")
    rope = {"rope_theta": fields.real("rope.freq_base", 1e4), **_rope_scaling(fields)}
    if (turned := fields.number("rope.dimension_count", K)) != K:
        rope["partial_rotary_factor"] = turned / K
    if not experts and (count := fields.get("expert_count", 0)):
        raise fields.error("expert_count", count, "0")
    fields.get("expert_used_count")
    return {
        "hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": H, "head_dim": K,
        "num_key_value_heads": fields.number("attention.head_count_kv", H),
        "intermediate_size": fields.number("feed_forward_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": fields.number("context_length", 2048),
        "vocab_size": fields.container.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in fields.container.tensors,
        "rope_parameters": rope,
    }  # fmt: skip


def unattended(fields: Fields) -> Values:
    """The values that all families have, attention's left out."""
    for name in ("attention.head_count", "context_length", "vocab_size"):
        fields.get(name)
    return {
        "hidden_size": fields.number("embedding_length"),
        "num_hidden_layers": fields.number("block_count", most=MOST_BLOCKS),
        "vocab_size": fields.container.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in fields.container.tensors,
    }  # fmt: skip


def _rope_scaling(fields: Fields) -> Values:
    """The scaling of rotary positions."""
    kind, factor = fields.get("rope.scaling.type", "linear"), fields.real("rope.scaling.factor", 0.0)
    factor = factor or fields.real("rope.scale_linear", 0.0)
    factor = 1.0 if kind == "none" else factor  # llama.cpp then ignores the factor
    scale = fields.real("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and scale != 1:
        raise fields.error("rope.scaling.attn_factor", scale, "1 without yarn")
    if "rope_freqs.weight" in fields.container.tensors:
        if factor not in (0, 1):
            raise fields.error("rope.scaling.factor", factor, "missing beside rope_freqs.weight")
        return _llama3(fields)
    if kind == "yarn":
        values = {"rope_type": "yarn", "factor": factor}
        if scale != 1:  # OLMo 3's own, as the converter writes it; llama.cpp writes 1 for any model
            values["attention_factor"] = scale
        for name, there in (
            ("original_context_length", "original_max_position_embeddings"), ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"),
        ):  # fmt: skip
            if (value := fields.get(f"rope.scaling.{name}")) is not None:
                values[there] = value
        if (share := fields.get("rope.scaling.yarn_ext_factor", 1.0)) != 1:
            raise fields.error("rope.scaling.yarn_ext_factor", share, "1")
        return values
    if kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")
    fields.get("rope.scaling.original_context_length")
    return {"rope_type": "default"} if factor in (0, 1) else {"rope_type": "linear", "factor": factor}


def _llama3(fields: Fields) -> Values:
    """Llama 3's rotary scaling, found from the divisors of the frequencies in rope_freqs.weight, which rise from 1 to
    the factor between two wavelengths of ratio 4. CheckpointError: they are others."""
    divisors = fields.container.tensors["rope_freqs.weight"].load().double()
    factor, theta = float(divisors.max()), fields.real("rope.freq_base", 1e4)
    if factor == 1 == float(divisors.min()):
        return {"rope_type": "default"}
    waves = 2 * math.pi * theta ** (torch.arange(len(divisors)).double() / len(divisors))
    for original in (2**n for n in range(4, 24)):
        share = ((original / waves - 1) / 3).clamp(0, 1)
        if torch.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise fields.container.error("rope_freqs.weight is not the scaling of Llama 3, the one that can be read")


def _llama(fields: Fields, values: Values) -> Values:
    """Llama, or Mistral if there is a window."""
    biases = {"attention_bias": fields.has("attn_q.bias"), "mlp_bias": fields.has("ffn_up.bias")}
    window = fields.get("attention.sliding_window")
    return biases | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _plain(fields: Fields, values: Values) -> Values:
    return {}


def _smollm3(fields: Fields, values: Values) -> Values:
    """SmolLM3: every fourth layer has no positions, in llama.cpp as in the models."""
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(values["num_hidden_layers"])]}


def _windows(fields: Fields, values: Values, every: int) -> list[str]:
    """The type of each layer of a model with a window. every: default period of full attention; 0 is none."""
    name, count = "attention.sliding_window_pattern", values["num_hidden_layers"]
    pattern = fields.get(name)
    every = pattern if type(pattern) is int else every
    flags = [(i + 1) % every != 0 for i in range(count)] if every else [True] * count
    flags = fields.flags(name, count, lambda i: True) if isinstance(pattern, list) else flags
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _gemma3(fields: Fields, values: Values) -> Values:
    """Gemma 3. The scale of scores follows from D/H in the largest model (62 layers), else from K, as in llama.cpp."""
    D, H, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    window = fields.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": fields.real("rope.freq_base_swa", 1e4)}
    types = _windows(fields, values, 6) if window else ["full_attention"] * layers
    return {
        "query_pre_attn_scalar": D // H if layers == 62 else values["head_dim"],
        "sliding_window": window or None, "layer_types": types,
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": fields.get("final_logit_softcapping") or None,
    }  # fmt: skip


def _olmo2(fields: Fields, values: Values) -> Values:
    """OLMo 2, or OLMo 3 if there is a window; positions of its sliding layers are not scaled."""
    window = fields.get("attention.sliding_window")
    if not window:
        return {}
    rope = values["rope_parameters"]
    base = fields.real("rope.freq_base_swa", rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": base}
    return {
        "model_type": "olmo3", "sliding_window": window, "layer_types": _windows(fields, values, 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }  # fmt: skip


def _linear(fields: Fields) -> Values:
    """The sizes of the gated delta rule: heads, their widths and taps."""
    Hv = fields.number("ssm.time_step_rank")
    return {
        "linear_num_key_heads": fields.number("ssm.group_count"), "linear_num_value_heads": Hv,
        "linear_key_head_dim": fields.number("ssm.state_size"),
        "linear_value_head_dim": fields.number("ssm.inner_size") // Hv,
        "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
    }  # fmt: skip


def _qwen35(fields: Fields, values: Values) -> Values:
    fields.get("rope.dimension_sections")  # in text, all sections have one position
    every = fields.number("full_attention_interval", 4)
    count = values["num_hidden_layers"]
    linear = fields.flags("attention.recurrent_layers", count, lambda i: (i + 1) % every != 0)
    return _linear(fields) | {
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in linear]
    }


def _experts(fields: Fields, *, normed: bool) -> Values:
    """The options of experts. normed: whether llama.cpp divides the weights of a token's experts by their sum."""
    fields.get("expert_count")
    for name, only in (
        ("expert_gating_func", 1), ("expert_weights_scale", 1.0), ("expert_group_count", 1),
        ("expert_group_used_count", 1), ("expert_shared_count", 1), ("leading_dense_block_count", 0),
    ):  # fmt: skip
        if (value := fields.get(name) or only) != only:
            raise fields.error(name, value, f"{only}")
    if fields.get("expert_weights_norm", normed) != normed:
        raise fields.error("expert_weights_norm", not normed, f"{normed}")
    return {"num_experts_per_tok": fields.number("expert_used_count"), "norm_topk_prob": normed}


def _olmoe(fields: Fields, values: Values) -> Values:
    clip = fields.get("attention.clamp_kqv") or None
    fields.get("expert_feed_forward_length")
    return _experts(fields, normed=False) | {"num_experts": fields.number("expert_count"), "clip_qkv": clip}


def _qwen3moe(fields: Fields, values: Values) -> Values:
    """Qwen3 with experts, in all layers, as in llama.cpp."""
    hidden = fields.number("expert_feed_forward_length")
    return _experts(fields, normed=True) | {
        "num_experts": fields.number("expert_count"), "moe_intermediate_size": hidden,
    }  # fmt: skip


def _granite(fields: Fields, values: Values) -> Values:
    """Granite 4; missing scales default to llama.cpp's."""
    positions, experts = fields.get("rope.scaling.finetuned", True), fields.get("expert_count") or 0
    shared = fields.get("expert_shared_feed_forward_length") or (
        0 if experts else values["intermediate_size"]
    )
    if experts:
        fields.get("expert_feed_forward_length")
        per_token = _experts(fields, normed=True)["num_experts_per_tok"]
    return {
        "mamba_n_heads": 1, "mamba_d_head": values["hidden_size"], "mamba_expand": 1,
        "num_local_experts": experts, "num_experts_per_tok": per_token if experts else 0,
        "position_embedding_type": "rope" if positions else "nope",
        "layer_types": ["attention"] * values["num_hidden_layers"],
        "shared_intermediate_size": shared,
        "attention_bias": fields.has("attn_q.bias"),
        "attention_multiplier": fields.real("attention.scale", 0.0) or values["head_dim"] ** -0.5,
        "embedding_multiplier": fields.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.real("logit_scale", 0.0) or 1.0,
    }  # fmt: skip


def _granite_hybrid(fields: Fields, values: Values) -> Values:
    attends = fields.flags("attention.head_count_kv", values["num_hidden_layers"], lambda i: True)
    return _granite(fields, values) | _mamba2(fields) | {
        "layer_types": ["attention" if flag else "mamba" for flag in attends],
        "mamba_expand": fields.number("ssm.inner_size") // values["hidden_size"],
    }  # fmt: skip


def _mamba2(fields: Fields) -> Values:
    """The options of Mamba-2's mixers."""
    heads = fields.number("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads, "mamba_d_head": fields.number("ssm.inner_size") // heads,
        "mamba_d_state": fields.number("ssm.state_size"), "mamba_n_groups": fields.number("ssm.group_count"),
        "mamba_d_conv": fields.number("ssm.conv_kernel"), "mamba_conv_bias": fields.has("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has("ssm_in.bias"),
    }  # fmt: skip


def _falcon_h1(fields: Fields, values: Values) -> Values:
    """Falcon-H1. All its factors are already in the weights. llama.cpp puts the norm, if any, after the gate."""
    mixer = _mamba2(fields)
    return mixer | {
        "mamba_d_ssm": mixer["mamba_n_heads"] * mixer["mamba_d_head"], "projectors_bias": fields.has("ssm_out.bias"),
        "mamba_rms_norm": fields.has("ssm_norm.weight"), "mamba_norm_before_gate": False,
        "attention_bias": fields.has("attn_q.bias"), "mlp_bias": fields.has("ffn_up.bias"),
    }  # fmt: skip


def _nemotron_h(fields: Fields, values: Values) -> Values:
    """Nemotron-H. llama.cpp has no lower bound of Δ, and one epsilon for all norms, though it also reads a second."""
    count, mixer = values["num_hidden_layers"], _mamba2(fields)
    fields.get("attention.layer_norm_epsilon")
    attends = fields.flags("attention.head_count_kv", count, lambda i: True)
    widens = fields.flags("feed_forward_length", count, lambda i: True)
    tensors = fields.container.tensors
    kinds = [
        "full_attention" if attends[i] else "linear_attention" if not widens[i]
        else "moe" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "mlp" for i in range(count)
    ]  # fmt: skip
    experts = _nemotron_experts(fields) if "moe" in kinds else {}
    return experts | {
        "layers_block_type": kinds, "layer_norm_epsilon": values["rms_norm_eps"], "rms_norm_eps": None,
        "rope_parameters": None, "mamba_num_heads": mixer["mamba_n_heads"], "mamba_head_dim": mixer["mamba_d_head"],
        "n_groups": mixer["mamba_n_groups"], "ssm_state_size": mixer["mamba_d_state"],
        "conv_kernel": mixer["mamba_d_conv"], "use_conv_bias": mixer["mamba_conv_bias"],
        "use_bias": mixer["mamba_proj_bias"],
        "mlp_bias": fields.has("ffn_up.bias"), "time_step_min": 0.0,
    }  # fmt: skip


def _nemotron_experts(fields: Fields) -> Values:
    """Nemotron-H's experts: in llama.cpp their scores are sigmoids, and there is one group."""
    for name, known in (
        ("expert_gating_func", (0, 2)),
        ("expert_group_count", (0, 1)),
        ("expert_group_used_count", (0, 1)),
    ):
        if (value := fields.get(name, 0)) not in known:
            raise fields.error(name, value, f"{known[1]}")
    return {
        "n_routed_experts": fields.number("expert_count"), "num_experts_per_tok": fields.number("expert_used_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
        "n_shared_experts": fields.number("expert_shared_count", 1), "n_group": 1, "topk_group": 1,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "routed_scaling_factor": fields.real("expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip


def _qwen3next(fields: Fields, values: Values) -> Values:
    """Qwen3-Next, with experts in all layers, as in llama.cpp."""
    count, every = values["num_hidden_layers"], fields.number("full_attention_interval", 4)
    fields.get("feed_forward_length")
    return _experts(fields, normed=True) | _linear(fields) | {
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)],
        "num_experts": fields.number("expert_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _lfm2(fields: Fields, values: Values) -> Values:
    attends = fields.flags("attention.head_count_kv", values["num_hidden_layers"], lambda i: True)
    return {
        "layer_types": ["full_attention" if flag else "conv" for flag in attends],
        "block_auto_adjust_ff_dim": False, "norm_eps": values["rms_norm_eps"],
        "conv_L_cache": fields.number("shortconv.l_cache"), "conv_bias": fields.has("shortconv.conv.bias"),
    }  # fmt: skip


def _kimi_linear(fields: Fields, values: Values) -> Values:
    """Kimi Linear. llama.cpp has one epsilon for all norms, and the same number of heads in all layers."""
    count, heads = values["num_hidden_layers"], fields.number("attention.head_count")
    attends = fields.flags("attention.head_count_kv", count, lambda i: True)
    for name in ("attention.key_length", "attention.value_length", "rope.freq_base"):
        fields.get(name)  # widths of the cached latent, and a rotary base, though there are no positions
    if (gating := fields.get("expert_gating_func", 2)) != 2:
        raise fields.error("expert_gating_func", gating, "2")
    if not fields.get("expert_weights_norm", True):
        raise fields.error("expert_weights_norm", False, "true")
    eps, shared = fields.real("attention.layer_norm_rms_epsilon", 1e-5), fields.number("rope.dimension_count")
    return {
        "layer_types": ["full_attention" if flag else "linear_attention" for flag in attends],
        "num_attention_heads": heads, "num_key_value_heads": heads, "linear_num_heads": heads,
        "linear_head_dim": fields.number("kda.head_dim"), "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
        "kv_lora_rank": fields.number("attention.kv_lora_rank"), "qk_rope_head_dim": shared,
        "q_lora_rank": fields.get("attention.q_lora_rank") or None,
        "qk_nope_head_dim": fields.number("attention.key_length_mla") - shared,
        "v_head_dim": fields.number("attention.value_length_mla"), "rms_norm_eps": eps, "kv_norm_eps": eps,
        "intermediate_size": fields.number("feed_forward_length"),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "num_experts": fields.number("expert_count"), "num_experts_per_token": fields.number("expert_used_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "num_shared_experts": fields.number("expert_shared_count"),
        "routed_scaling_factor": fields.real("expert_weights_scale", 0.0) or 1.0,
        "num_expert_group": fields.get("expert_group_count") or 1,
        "topk_group": fields.get("expert_group_used_count") or 1,
        "model_max_length": fields.number("context_length", 1 << 20),
    }  # fmt: skip


def _rwkv7(fields: Fields, values: Values) -> Values:
    """RWKV-7. In llama.cpp the norm of heads has the author's epsilon, and keys are divided by a bounded length."""
    if (shifts := fields.get("token_shift_count", 2)) != 2:
        raise fields.error("token_shift_count", shifts, "2")
    ranks = {name: fields.number(f"attention.{there}_lora_rank") for name, there in _RANKS.items()}
    return ranks | {
        "head_dim": fields.number("wkv.head_size"), "intermediate_size": fields.number("feed_forward_length"),
        "norm_eps": fields.real("attention.layer_norm_epsilon", 1e-5), "group_norm_eps": 64e-5, "fuse_norm": False,
    }  # fmt: skip


def _mamba1(fields: Fields, values: Values) -> Values:
    """Mamba, or Falcon Mamba if the mixer has norms, whose epsilon in llama.cpp is that of the other norms."""
    D, inner = values["hidden_size"], fields.number("ssm.inner_size")
    if inner % D:
        raise fields.error("ssm.inner_size", inner, f"a multiple of {D}")
    fields.get("feed_forward_length"), fields.get("ssm.group_count")
    eps = fields.real("attention.layer_norm_rms_epsilon", 1e-5)
    falcon = bool(fields.get("ssm.dt_b_c_rms", False))
    kind = {"model_type": "falcon_mamba", "mixer_rms_eps": eps} if falcon else {}
    return kind | {
        "state_size": fields.number("ssm.state_size"), "conv_kernel": fields.number("ssm.conv_kernel"),
        "time_step_rank": fields.number("ssm.time_step_rank"), "expand": inner // D, "layer_norm_epsilon": eps,
        "use_conv_bias": fields.has("ssm_conv1d.bias"), "use_bias": fields.has("ssm_in.bias"),
    }  # fmt: skip


# ---------------------------------------------------------------- tensors


def _permuted(values: Values) -> dict[str, Fix]:
    """Undo the order of query and key rows, in which the two channels of a rotary pair are adjacent."""

    def apart(heads: int, x: Tensor) -> Tensor:
        return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    return {name: partial(apart, count) for name, count in heads.items()}


def _less_one(names: tuple[str, ...]) -> dict[str, Fix]:
    """Undo the addition of 1 to weights of norms."""
    return dict.fromkeys(names, lambda x: x.float() - 1)


def _mamba(values: Values) -> dict[str, Fix]:
    return {
        "ssm_conv1d.weight": lambda x: x[:, None], "ssm_d": torch.flatten, "ssm_norm": torch.flatten,
        "ssm_a": lambda x: _logarithm(x.flatten()),
    }  # fmt: skip


def _mamba_permuted(values: Values) -> dict[str, Fix]:
    return _permuted(values) | _mamba(values)


def _logarithm(x: Tensor) -> Tensor:
    """A_log from the stored −e^A_log."""
    return (-x.double()).log().float()


def _delta(values: Values) -> dict[str, Fix]:
    """Undo the changes of norms, and of the order of value heads: those of one key head become adjacent again."""
    Hk, Hv = values["linear_num_key_heads"], values["linear_num_value_heads"]
    K, V = values["linear_key_head_dim"], values["linear_value_head_dim"]

    def grouped(x: Tensor, width: int) -> Tensor:
        """Reorder the first axis, Hv heads of this width."""
        return x.reshape(Hv // Hk, Hk, width, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def values_last(x: Tensor) -> Tensor:
        keys = 2 * Hk * K
        return torch.cat([x[:keys], grouped(x[keys:], V)])

    return _less_one(_NORMS_OF_QWEN) | {
        "attn_qkv": values_last, "ssm_conv1d": lambda x: values_last(x)[:, None],
        "attn_gate": lambda x: grouped(x, V), "ssm_out": lambda x: grouped(x.T, V).T,
        "ssm_alpha": lambda x: grouped(x, 1), "ssm_beta": lambda x: grouped(x, 1),
        "ssm_dt.bias": lambda x: grouped(x, 1), "ssm_a": lambda x: _logarithm(grouped(x, 1)),
    }  # fmt: skip


def _next(values: Values) -> dict[str, Fix]:
    """Undo the changes of Qwen3-Next, in which value heads kept their order."""
    return _less_one(_NORMS_OF_QWEN) | {
        "ssm_conv1d": lambda x: x[:, None], "ssm_a": _logarithm, "ffn_gate_inp_shexp": lambda x: x.reshape(1, -1),
    }  # fmt: skip


def _kimi_linear_fixes(values: Values) -> dict[str, Fix]:
    taps = {f"ssm_conv1d_{x}": lambda x: x.reshape(-1, 1, x.shape[-1]) for x in "qkv"}
    return taps | {"ssm_a": lambda x: _logarithm(x).reshape(1, 1, -1, 1)}


def _rwkv7_fixes(values: Values) -> dict[str, Fix]:
    D, K = values["hidden_size"], values["head_dim"]
    return {
        "time_mix_lerp_fused.weight": lambda x: x.reshape(6, D),
        "time_mix_r_k.weight": lambda x: x.reshape(-1, K),
    }


_NORMS_OF_QWEN = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_GEMMA_NORMS = (
    "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm",
)  # fmt: skip
_GRANITE_NAMES = _NORMS | _ATTENTION | {
    "ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear", "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear", "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear", "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
"""Tensors of mixtures, all experts in one tensor, which `foreign.mixture` reads, too."""
_PARTS = {name: f"mixer.{there.split('.')[1]}" for name, there in (_ATTENTION | _MAMBA | _MLP).items()}
"""Tensors of layers with a single part."""
_NEMOTRON_EXPERTS = {
    "ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj", "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
}  # fmt: skip
_NEXT_NAMES = _NORMS | _ATTENTION | _POST | _DELTA | _EXPERTS | {
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_KIMI_NAMES = _NORMS | _ATTENTION | _MLP | {
    **{f"ssm_conv1d_{x}": f"self_attn.{x}_conv1d" for x in "qkv"},
    **{f"ssm_{x}_{part}": f"self_attn.{x}_{part}_proj" for x in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"attn_{x}_b": f"self_attn.{x}_b_proj" for x in ("k", "v", "kv")},
    **{name: there.replace("mlp", "block_sparse_moe") for name, there in _EXPERTS.items()},
    **{f"ffn_{x}_shexp": f"block_sparse_moe.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
FAMILIES = {
    "llama": Family("llama", _llama, _NORMS | _ATTENTION | _MLP, _permuted),
    "qwen2": Family("qwen2", _plain, _NORMS | _ATTENTION | _MLP),
    "qwen3": Family("qwen3", _plain, _NORMS | _ATTENTION | _MLP),
    "smollm3": Family("smollm3", _smollm3, _NORMS | _ATTENTION | _MLP, _permuted),
    "gemma3": Family(
        "gemma3_text", _gemma3,
        _ATTENTION | _MLP | _NORMS | _POST | {"ffn_norm": "pre_feedforward_layernorm"},
        lambda values: _less_one(_GEMMA_NORMS),
    ),
    "olmo2": Family("olmo2", _olmo2, _ATTENTION | _MLP | _POST),
    "qwen35": Family("qwen3_5_text", _qwen35, _NORMS | _ATTENTION | _MLP | _POST | _DELTA, _delta),
    "olmoe": Family("olmoe", _olmoe, _NORMS | _ATTENTION | _EXPERTS, experts=True),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, _NORMS | _ATTENTION | _EXPERTS, experts=True),
    "granite": Family("granitemoehybrid", _granite, _GRANITE_NAMES, _permuted),
    "granitemoe": Family("granitemoehybrid", _granite, _GRANITE_NAMES, _permuted, experts=True),
    "granitehybrid": Family(
        "granitemoehybrid", _granite_hybrid, _GRANITE_NAMES | _MAMBA, _mamba_permuted, experts=True
    ),
    "falcon-h1": Family(
        "falcon_h1", _falcon_h1,
        _ATTENTION | _MAMBA
        | {name: there.replace("mlp", "feed_forward") for name, there in _MLP.items()}
        | {"attn_norm": "input_layernorm", **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")},
        _mamba, _OUTER | {"output_norm": "model.final_layernorm"},
    ),
    "nemotron_h": Family(
        "nemotron_h", _nemotron_h, _PARTS | {"attn_norm": "norm"}, _mamba_permuted,
        _BACKBONE,
        layers="backbone.layers",
    ),
    "nemotron_h_moe": Family(
        "nemotron_h", _nemotron_h, _PARTS | _NEMOTRON_EXPERTS | {"attn_norm": "norm"}, _mamba_permuted,
        _BACKBONE,
        experts=True, layers="backbone.layers",
    ),
    "qwen3next": Family("qwen3_next", _qwen3next, _NEXT_NAMES, _next, experts=True),
    "kimi-linear": Family("kimi_linear", _kimi_linear, _KIMI_NAMES, _kimi_linear_fixes, attends=False),
    "mamba": Family(
        "mamba", _mamba1,
        {
            "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_out": "mixer.out_proj",
        },
        lambda values: {"ssm_conv1d.weight": lambda x: x[:, None], "ssm_a": _logarithm},
        _BACKBONE,
        attends=False, layers="backbone.layers",
    ),
    "rwkv7": Family(
        "rwkv7", _rwkv7, _RWKV7, _rwkv7_fixes,
        {
            "token_embd": "model.embeddings", "token_embd_norm": "model.layers.0.pre_norm", "output_norm": "model.norm",
            "output": "lm_head",
        },
        attends=False,
    ),
    "lfm2": Family(
        "lfm2", _lfm2,
        {
            "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        lambda values: {"shortconv.conv.weight": lambda x: x[:, None]},
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    ),
}  # fmt: skip
"""Families by the name of the architecture in a GGUF. Mistral is named llama."""
