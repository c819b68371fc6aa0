"""The families of models that a GGUF can hold, with the names of their tensors there and in transformers."""

from collections.abc import Callable
from typing import NamedTuple

from perspectron.interop.foreign.gguf import configs, fixes
from perspectron.interop.foreign.gguf.fields import Fields, Values
from perspectron.interop.foreign.gguf.fixes import Fix

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
    "llama": Family("llama", configs.llama, _NORMS | _ATTENTION | _MLP, fixes.permuted),
    "qwen2": Family("qwen2", configs.plain, _NORMS | _ATTENTION | _MLP),
    "qwen3": Family("qwen3", configs.plain, _NORMS | _ATTENTION | _MLP),
    "smollm3": Family("smollm3", configs.smollm3, _NORMS | _ATTENTION | _MLP, fixes.permuted),
    "gemma3": Family(
        "gemma3_text", configs.gemma3,
        _ATTENTION | _MLP | _NORMS | _POST | {"ffn_norm": "pre_feedforward_layernorm"},
        lambda values: fixes.less_one(_GEMMA_NORMS),
    ),
    "olmo2": Family("olmo2", configs.olmo2, _ATTENTION | _MLP | _POST),
    "qwen35": Family("qwen3_5_text", configs.qwen35, _NORMS | _ATTENTION | _MLP | _POST | _DELTA, fixes.qwen35),
    "olmoe": Family("olmoe", configs.olmoe, _NORMS | _ATTENTION | _EXPERTS, experts=True),
    "qwen3moe": Family("qwen3_moe", configs.qwen3moe, _NORMS | _ATTENTION | _EXPERTS, experts=True),
    "granite": Family("granitemoehybrid", configs.granite, _GRANITE_NAMES, fixes.permuted),
    "granitemoe": Family("granitemoehybrid", configs.granite, _GRANITE_NAMES, fixes.permuted, experts=True),
    "granitehybrid": Family(
        "granitemoehybrid", configs.granite_hybrid, _GRANITE_NAMES | _MAMBA, fixes.mamba_permuted, experts=True
    ),
    "falcon-h1": Family(
        "falcon_h1", configs.falcon_h1,
        _ATTENTION | _MAMBA
        | {name: there.replace("mlp", "feed_forward") for name, there in _MLP.items()}
        | {"attn_norm": "input_layernorm", **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")},
        fixes.mamba, _OUTER | {"output_norm": "model.final_layernorm"},
    ),
    "nemotron_h": Family(
        "nemotron_h", configs.nemotron_h, _PARTS | {"attn_norm": "norm"}, fixes.mamba_permuted,
        _BACKBONE,
        layers="backbone.layers",
    ),
    "nemotron_h_moe": Family(
        "nemotron_h", configs.nemotron_h, _PARTS | _NEMOTRON_EXPERTS | {"attn_norm": "norm"}, fixes.mamba_permuted,
        _BACKBONE,
        experts=True, layers="backbone.layers",
    ),
    "qwen3next": Family("qwen3_next", configs.qwen3next, _NEXT_NAMES, fixes.qwen3next, experts=True),
    "kimi-linear": Family("kimi_linear", configs.kimi_linear, _KIMI_NAMES, fixes.kimi_linear, attends=False),
    "mamba": Family(
        "mamba", configs.mamba1,
        {
            "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_out": "mixer.out_proj",
        },
        lambda values: {"ssm_conv1d.weight": lambda x: x[:, None], "ssm_a": fixes.logarithm},
        _BACKBONE,
        attends=False, layers="backbone.layers",
    ),
    "rwkv7": Family(
        "rwkv7", configs.rwkv7, _RWKV7, fixes.rwkv7,
        {
            "token_embd": "model.embeddings", "token_embd_norm": "model.layers.0.pre_norm", "output_norm": "model.norm",
            "output": "lm_head",
        },
        attends=False,
    ),
    "lfm2": Family(
        "lfm2", configs.lfm2,
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
