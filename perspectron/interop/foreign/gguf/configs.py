"""How the metadata of a GGUF become the config of each family in transformers."""

from perspectron.interop.foreign.gguf.fields import Fields, Values

_RANKS = {
    "decay_low_rank_dim": "decay", "a_low_rank_dim": "iclr", "v_low_rank_dim": "value_residual_mix",
    "gate_low_rank_dim": "gate",
}  # fmt: skip


def llama(fields: Fields, values: Values) -> Values:
    """Llama, or Mistral if there is a window."""
    biases = {"attention_bias": fields.has("attn_q.bias"), "mlp_bias": fields.has("ffn_up.bias")}
    window = fields.get("attention.sliding_window")
    return biases | ({"model_type": "mistral", "sliding_window": window} if window else {})


def plain(fields: Fields, values: Values) -> Values:
    return {}


def smollm3(fields: Fields, values: Values) -> Values:
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


def gemma3(fields: Fields, values: Values) -> Values:
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


def olmo2(fields: Fields, values: Values) -> Values:
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


def qwen35(fields: Fields, values: Values) -> Values:
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


def olmoe(fields: Fields, values: Values) -> Values:
    clip = fields.get("attention.clamp_kqv") or None
    fields.get("expert_feed_forward_length")
    return _experts(fields, normed=False) | {"num_experts": fields.number("expert_count"), "clip_qkv": clip}


def qwen3moe(fields: Fields, values: Values) -> Values:
    """Qwen3 with experts, in all layers, as in llama.cpp."""
    hidden = fields.number("expert_feed_forward_length")
    return _experts(fields, normed=True) | {
        "num_experts": fields.number("expert_count"), "moe_intermediate_size": hidden,
    }  # fmt: skip


def granite(fields: Fields, values: Values) -> Values:
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


def granite_hybrid(fields: Fields, values: Values) -> Values:
    attends = fields.flags("attention.head_count_kv", values["num_hidden_layers"], lambda i: True)
    return granite(fields, values) | mamba2(fields) | {
        "layer_types": ["attention" if flag else "mamba" for flag in attends],
        "mamba_expand": fields.number("ssm.inner_size") // values["hidden_size"],
    }  # fmt: skip


def mamba2(fields: Fields) -> Values:
    """The options of Mamba-2's mixers."""
    heads = fields.number("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads, "mamba_d_head": fields.number("ssm.inner_size") // heads,
        "mamba_d_state": fields.number("ssm.state_size"), "mamba_n_groups": fields.number("ssm.group_count"),
        "mamba_d_conv": fields.number("ssm.conv_kernel"), "mamba_conv_bias": fields.has("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has("ssm_in.bias"),
    }  # fmt: skip


def falcon_h1(fields: Fields, values: Values) -> Values:
    """Falcon-H1. All its factors are already in the weights. llama.cpp puts the norm, if any, after the gate."""
    mixer = mamba2(fields)
    return mixer | {
        "mamba_d_ssm": mixer["mamba_n_heads"] * mixer["mamba_d_head"], "projectors_bias": fields.has("ssm_out.bias"),
        "mamba_rms_norm": fields.has("ssm_norm.weight"), "mamba_norm_before_gate": False,
        "attention_bias": fields.has("attn_q.bias"), "mlp_bias": fields.has("ffn_up.bias"),
    }  # fmt: skip


def nemotron_h(fields: Fields, values: Values) -> Values:
    """Nemotron-H. llama.cpp has no lower bound of Δ, and one epsilon for all norms, though it also reads a second."""
    count, mixer = values["num_hidden_layers"], mamba2(fields)
    fields.get("attention.layer_norm_epsilon")
    attends = fields.flags("attention.head_count_kv", count, lambda i: True)
    widens = fields.flags("feed_forward_length", count, lambda i: True)
    tensors = fields.container.tensors
    kinds = [
        "full_attention" if attends[i] else "linear_attention" if not widens[i]
        else "moe" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "mlp" for i in range(count)
    ]  # fmt: skip
    experts = nemotron_experts(fields) if "moe" in kinds else {}
    return experts | {
        "layers_block_type": kinds, "layer_norm_epsilon": values["rms_norm_eps"], "rms_norm_eps": None,
        "rope_parameters": None, "mamba_num_heads": mixer["mamba_n_heads"], "mamba_head_dim": mixer["mamba_d_head"],
        "n_groups": mixer["mamba_n_groups"], "ssm_state_size": mixer["mamba_d_state"],
        "conv_kernel": mixer["mamba_d_conv"], "use_conv_bias": mixer["mamba_conv_bias"],
        "use_bias": mixer["mamba_proj_bias"],
        "mlp_bias": fields.has("ffn_up.bias"), "time_step_min": 0.0,
    }  # fmt: skip


def nemotron_experts(fields: Fields) -> Values:
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


def qwen3next(fields: Fields, values: Values) -> Values:
    """Qwen3-Next, with experts in all layers, as in llama.cpp."""
    count, every = values["num_hidden_layers"], fields.number("full_attention_interval", 4)
    fields.get("feed_forward_length")
    return _experts(fields, normed=True) | _linear(fields) | {
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)],
        "num_experts": fields.number("expert_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length"),
    }  # fmt: skip


def lfm2(fields: Fields, values: Values) -> Values:
    attends = fields.flags("attention.head_count_kv", values["num_hidden_layers"], lambda i: True)
    return {
        "layer_types": ["full_attention" if flag else "conv" for flag in attends],
        "block_auto_adjust_ff_dim": False, "norm_eps": values["rms_norm_eps"],
        "conv_L_cache": fields.number("shortconv.l_cache"), "conv_bias": fields.has("shortconv.conv.bias"),
    }  # fmt: skip


def kimi_linear(fields: Fields, values: Values) -> Values:
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


def rwkv7(fields: Fields, values: Values) -> Values:
    """RWKV-7. In llama.cpp the norm of heads has the author's epsilon, and keys are divided by a bounded length."""
    if (shifts := fields.get("token_shift_count", 2)) != 2:
        raise fields.error("token_shift_count", shifts, "2")
    ranks = {name: fields.number(f"attention.{there}_lora_rank") for name, there in _RANKS.items()}
    return ranks | {
        "head_dim": fields.number("wkv.head_size"), "intermediate_size": fields.number("feed_forward_length"),
        "norm_eps": fields.real("attention.layer_norm_epsilon", 1e-5), "group_norm_eps": 64e-5, "fuse_norm": False,
    }  # fmt: skip


def mamba1(fields: Fields, values: Values) -> Values:
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
