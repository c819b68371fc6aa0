"""GGUF files of small models of transformers with random weights, written as llama.cpp's converter does."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.foreign_models import tokenizer

D, LAYERS, V, H, G, K = 32, 4, 300, 4, 2, 10
KINDS = gguf.GGMLQuantizationType
SMALL = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H,
    "num_key_value_heads": G, "head_dim": K, "intermediate_size": 64, "rms_norm_eps": 3e-5,
    "max_position_embeddings": 512, "bos_token_id": 299, "eos_token_id": 299, "pad_token_id": None,
}  # fmt: skip
GRANITE = {
    "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64, "mamba_d_conv": 3,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 2, "mamba_d_state": 5,
    "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 24}
MAMBA = {
    "mamba_d_conv": 3, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 5,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 30.0, "beta_slow": 2.0,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"] * 2
ARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "rope_parameters": ROPE, "tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}}),
    "qwen2": ("qwen2", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"rope_parameters": ROPE}),
    "smollm3": ("smollm3", {"head_dim": 8, "rope_parameters": ROPE, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": None, "rope_parameters": ROPE}),
    "gemma3": ("gemma3_text", {
        "sliding_window": 5, "query_pre_attn_scalar": K, "final_logit_softcapping": 20.0, "layer_types": TYPES,
        "rope_parameters": {
            "full_attention": ROPE | {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }),
    "olmo2": ("olmo2", {"head_dim": 8, "rope_parameters": ROPE}),
    "olmo2-windows": ("olmo3", {
        "head_dim": 8, "sliding_window": 5, "layer_types": TYPES, "rope_parameters": {
            "full_attention": YARN | {"attention_factor": 1.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "qwen35": ("qwen3_5_text", {
        **DELTA, "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.4},
    }),
    "qwen35-equal-heads": ("qwen3_5_text", {
        **DELTA, "linear_num_key_heads": 4, "rope_parameters": ROPE | {"partial_rotary_factor": 0.4},
    }),
    "granitehybrid": ("granitemoehybrid", {
        **GRANITE, "layer_types": ["mamba", "attention"] * 2, "head_dim": 8, "position_embedding_type": "nope",
    }),
    "granite": ("granitemoehybrid", {
        **GRANITE, "layer_types": ["attention"] * 4, "head_dim": 8, "position_embedding_type": "rope",
        "rope_parameters": ROPE,
    }),
    "olmoe": ("olmoe", {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.6}),
    "qwen3moe": ("qwen3_moe", {
        "rope_parameters": ROPE, "num_local_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "moe_intermediate_size": 24,
    }),
    "granitemoe": ("granitemoehybrid", {
        **GRANITE, **EXPERTS, "layer_types": ["attention"] * 4, "head_dim": 8, "position_embedding_type": "rope",
        "rope_parameters": ROPE,
    }),
    "granitehybrid-experts": ("granitemoehybrid", {
        **GRANITE, **EXPERTS, "layer_types": ["mamba", "attention"] * 2, "head_dim": 8,
        "position_embedding_type": "nope",
    }),
    "falcon-h1": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "rope_parameters": ROPE,
    }),
    "falcon-h1-unnormed": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": 64, "mamba_norm_before_gate": False, "rope_parameters": ROPE,
        "tie_word_embeddings": True,
    }),
    "nemotron_h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "time_step_min": 1e-9,
        "layer_norm_epsilon": 3e-5,
    }),
    "nemotron_h_moe": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3, "time_step_min": 1e-9,
        "layer_norm_epsilon": 3e-5, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "n_shared_experts": 1,
    }),
    "qwen3next": ("qwen3_next", {
        **DELTA, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.4},
    }),
    "kimi-linear": ("kimi_linear", {
        "num_key_value_heads": H, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "kv_lora_rank": 12,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8, "linear_num_heads": H, "linear_head_dim": 10,
        "linear_conv_kernel_dim": 3, "num_experts": 6, "num_experts_per_token": 3, "moe_intermediate_size": 24,
        "num_expert_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
    }),
    "lfm2": ("lfm2", {
        "head_dim": 8, "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 3e-5, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "rope_parameters": ROPE,
    }),
}  # fmt: skip
"""Kind and options of models, by a name that begins with the architecture in a GGUF (that of Mistral is llama)."""


def redrawn(kind: str, options: dict[str, Any]) -> Any:
    """A model of transformers of which every parameter and buffer is drawn anew."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3 * noise + 0.5)
            if name.endswith("A_log"):
                weight.abs_()
        for name, weight in model.named_buffers():
            if name.endswith("correction_bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
    return model


def rounded(x: Tensor, kind: Any) -> Tensor:
    """The tensor after it was quantised, where its rows allow it."""
    if not _fits(x, kind):
        return x
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind))


def _fits(x: Tensor, kind: Any) -> bool:
    return x.ndim in (2, 3) and x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


RENAMED = {"mistral": "llama", "llama3": "llama"}


def arch_of(name: str) -> str:
    """The architecture in a GGUF."""
    if name in ("falcon-h1", "kimi-linear"):
        return name
    return "falcon-h1" if name.startswith("falcon") else RENAMED.get(name, name.split("-")[0])


def folder_of(name: str, folder: Path, **more: Any) -> Path:
    """A model of ARCHES with a tokenizer, as transformers writes it. more: further options."""
    kind, options = ARCHES[name]
    redrawn(kind, options | more).save_pretrained(folder)
    if kind == "nemotron_h":  # as llama.cpp has it; transformers takes a logarithm before it draws
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"time_step_min": 0.0, "rms_norm_eps": None}))
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


class Writer:
    """A GGUF while it is written."""

    def __init__(self, path: Path, arch: str) -> None:
        self.file, self.arch = gguf.GGUFWriter(path, arch), arch

    def value(self, name: str, value: Any) -> None:
        """A value under the architecture's name; None is left out."""
        key, file = (
            name if name.startswith(("tokenizer.", "split.", "general.")) else f"{self.arch}.{name}",
            self.file,
        )
        file.kv_data[0].pop(key, None)  # the last one counts
        match value:
            case bool():
                file.add_bool(key, value)
            case int():
                file.add_uint32(key, value)
            case float():
                file.add_float32(key, value)
            case str():
                file.add_string(key, value)
            case list():
                file.add_array(key, value)

    def values(self, **values: Any) -> None:
        for name, value in values.items():
            self.value(name.replace("__", "."), value)

    def tensor(self, name: str, x: Tensor, kind: Any = KINDS.F32) -> None:
        x = x.detach().float().contiguous()
        kind = kind if _fits(x, kind) else KINDS.F32
        self.file.add_tensor(name, gguf.quants.quantize(x.numpy(), kind), raw_dtype=kind)

    def done(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write(path: Path, folder: Path, arch: str, kind: Any = KINDS.F32, **more: Any) -> None:
    """The model in a folder, with its tokenizer, as a GGUF of one of ARCHES. more: further values."""
    config = json.loads((folder / "config.json").read_text())
    writer = Writer(path, arch)
    _values(writer, config)
    _tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    writer.values(**more)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), LAYERS)
    tensors = load_file(folder / "model.safetensors")
    tensors = {_plain_name(arch, name): x for name, x in tensors.items()}
    for name, x in stacked(tensors, "blk.{}.ffn_{}_exps.weight").items():
        for there, part in _converted(arch, name, x, config):
            there = there.replace(".dt_bias", ".dt_proj.bias")
            found = names.get_name(there, try_suffixes=(".weight", ".bias"))
            writer.tensor(found or there, part, kind if x.ndim > 1 else KINDS.F32)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.tensor("rope_freqs.weight", _divisors(rope))
    writer.done()


def _plain_name(arch: str, name: str) -> str:
    """The name that a tensor of Kimi Linear would have in most families."""
    if arch != "kimi-linear":
        return name
    for there, here in (
        ("w1", "gate_proj"),
        ("w2", "down_proj"),
        ("w3", "up_proj"),
        ("block_sparse_moe", "mlp"),
    ):
        name = name.replace(f".{there}.", f".{here}.")
    return name.replace("correction_bias", "correction.bias")


def stacked(tensors: dict[str, Tensor], there: str) -> dict[str, Tensor]:
    """The experts of a layer in one tensor, under a name made of the layer and the matrix."""
    found, each = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, x in tensors.items():
        if (
            of := re.fullmatch(r"\w+\.layers\.(\d+)\.(?:mlp|mixer)\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        ) is not None:
            each.setdefault(there.format(of[1], of[3]), {})[int(of[2])] = x
        else:
            found[name] = x
    return found | {name: torch.stack([x[e] for e in sorted(x)]) for name, x in each.items()}


def _values(writer: Writer, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    types = config.get("layers_block_type") or config.get("layer_types") or []
    heads = config["num_key_value_heads"]
    writer.values(
        block_count=LAYERS, context_length=config.get("max_position_embeddings", 512), embedding_length=D,
        vocab_size=config["vocab_size"], attention__head_count=H,
        attention__head_count_kv=[heads if kind in ("attention", "full_attention") else 0 for kind in types]
        if writer.arch in ("granitehybrid", "lfm2", "nemotron_h", "nemotron_h_moe") else heads,
        feed_forward_length=[{"mlp": 64, "moe": 24}.get(kind, 0) for kind in types]
        if writer.arch.startswith("nemotron_h") else 64,
        attention__layer_norm_rms_epsilon=next(
            config[name] for name in ("layer_norm_epsilon", "norm_eps", "rms_norm_eps") if name in config
        ),
        attention__layer_norm_epsilon=config.get("layer_norm_epsilon"),
        attention__sliding_window=config.get("sliding_window"),
        final_logit_softcapping=config.get("final_logit_softcapping"), rope__freq_base=full.get("rope_theta"),
        rope__freq_base_swa=local.get("rope_theta"), attention__key_length=config.get("head_dim"),
        attention__value_length=config.get("head_dim"), shortconv__l_cache=config.get("conv_L_cache"),
    )  # fmt: skip
    if types and writer.arch in ("gemma3", "olmo2"):
        writer.value("attention.sliding_window_pattern", [kind == "sliding_attention" for kind in types])
    if full.get("rope_type") in ("linear", "yarn"):
        writer.values(
            rope__scaling__type=full["rope_type"], rope__scaling__factor=full["factor"],
            rope__scaling__original_context_length=full.get("original_max_position_embeddings"),
            rope__scaling__yarn_beta_fast=full.get("beta_fast"), rope__scaling__yarn_beta_slow=full.get("beta_slow"),
        )  # fmt: skip
        if writer.arch == "olmo2":
            writer.value("rope.scaling.attn_factor", full.get("attention_factor"))
    if writer.arch.startswith("granite"):
        writer.values(
            attention__scale=config["attention_multiplier"], embedding_scale=config["embedding_multiplier"],
            residual_scale=config["residual_multiplier"], logit_scale=config["logits_scaling"],
            rope__scaling__finetuned=config["position_embedding_type"] == "rope",
            expert_shared_feed_forward_length=config["shared_intermediate_size"],
        )  # fmt: skip
    if config.get("num_experts_per_tok") and writer.arch != "nemotron_h":
        writer.values(
            expert_count=config.get("num_local_experts") or config.get("num_experts"),
            expert_used_count=config["num_experts_per_tok"], attention__clamp_kqv=config.get("clip_qkv"),
            expert_feed_forward_length=config.get("moe_intermediate_size"),
        )  # fmt: skip
    if writer.arch == "nemotron_h_moe":
        writer.values(
            expert_count=config["n_routed_experts"], expert_shared_count=config["n_shared_experts"],
            expert_shared_feed_forward_length=config["moe_shared_expert_intermediate_size"],
            expert_weights_norm=config["norm_topk_prob"], expert_weights_scale=config["routed_scaling_factor"],
            expert_group_count=config["n_group"],
        )  # fmt: skip
    if writer.arch in ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"):
        writer.values(
            ssm__conv_kernel=3,
            ssm__state_size=5,
            ssm__group_count=2,
            ssm__inner_size=64,
            ssm__time_step_rank=4,
        )
    if writer.arch in ("qwen35", "qwen3next"):
        Hv, V = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.values(
            ssm__conv_kernel=3, ssm__state_size=config["linear_key_head_dim"], ssm__inner_size=Hv * V,
            ssm__group_count=config["linear_num_key_heads"], ssm__time_step_rank=Hv, full_attention_interval=4,
            rope__dimension_count=int(K * full["partial_rotary_factor"]),
            expert_shared_feed_forward_length=config.get("shared_expert_intermediate_size"),
        )  # fmt: skip
    if writer.arch == "kimi-linear":
        latent, shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.values(
            attention__head_count_kv=[int(kind == "full_attention") for kind in types], kda__head_dim=10,
            attention__key_length=latent + shared, attention__value_length=None, attention__kv_lora_rank=latent,
            attention__key_length_mla=config["qk_nope_head_dim"] + shared, rope__dimension_count=shared,
            attention__value_length_mla=config["v_head_dim"], ssm__conv_kernel=3, expert_gating_func=2,
            expert_count=config["num_experts"], expert_used_count=config["num_experts_per_token"],
            expert_feed_forward_length=24, expert_shared_count=config["num_shared_experts"],
            leading_dense_block_count=1, expert_weights_scale=config["routed_scaling_factor"],
        )  # fmt: skip
    if writer.arch == "qwen35":
        linear = [kind == "linear_attention" for kind in types]
        writer.values(attention__recurrent_layers=linear, rope__dimension_sections=[1, 1, 0, 0])


def _converted(arch: str, name: str, x: Tensor, config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """A tensor as the converter stores it, under names that gguf knows."""
    permutes = arch in (
        "llama",
        "smollm3",
        "granite",
        "granitemoe",
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
    )
    if permutes and (".q_proj." in name or ".k_proj." in name):
        heads = H if ".q_proj." in name else G
        x = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if (
        arch in ("gemma3", "qwen35", "qwen3next")
        and name.endswith("norm.weight")
        and "linear_attn.norm" not in name
    ):
        x = x + 1
    if name.endswith("kv_b_proj.weight"):
        wide = config["qk_nope_head_dim"]
        key, value = x.unflatten(0, (H, -1)).split([wide, len(x) // H - wide], 1)
        return [(name.replace("kv_b", "k_b"), key.mT), (name.replace("kv_b", "v_b"), value)]
    if arch == "falcon-h1":
        x = _multiplied(name, x, config)
    if arch == "qwen35" and "linear_attn." in name:
        x = _tiled(name, x, config)
    if name.endswith(".A_log"):
        x = -x.exp()
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        x = x[None] if arch == "kimi-linear" else x.squeeze(1)
    if ("mamba." in name or "mixer." in name) and name.endswith((".A_log", ".D")):
        x = x[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        x = x.reshape(2, -1)
    layer, experts = name.split(".")[2:3], config.get("num_local_experts") and arch.startswith("granite")
    if experts and name.endswith("input_linear.weight"):
        of = "shexp" if "shared_mlp" in name else "exps"
        return [(f"blk.{layer[0]}.ffn_{part}_{of}.weight", half)
                for part, half in zip(("gate", "up"), x.chunk(2, -2), strict=True)]  # fmt: skip
    if experts and name.endswith("output_linear.weight"):
        return [(f"blk.{layer[0]}.ffn_down_{'shexp' if 'shared_mlp' in name else 'exps'}.weight", x)]
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{layer[0]}.exp_probs_b.bias", x)]
    if name.endswith(("mlp.gate.weight", "router.layer.weight")):
        return [(f"blk.{layer[0]}.ffn_gate_inp.weight", x)]
    if name.endswith("shared_mlp.input_linear.weight"):
        layer = name.split(".")[2]
        return [(f"model.layers.{layer}.mlp.{part}_proj.weight", half)
                for part, half in zip(("gate", "up"), x.chunk(2), strict=True)]  # fmt: skip
    if name.endswith("in_proj_qkvz.weight"):
        Hk, Hv, wide = (config[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "key_head_dim"))
        high = Hv // Hk * config["linear_value_head_dim"]
        *qkv, z = (part.flatten(0, 1) for part in x.unflatten(0, (Hk, -1)).split([wide, wide, high, high], 1))
        return [(f"blk.{layer[0]}.attn_qkv.weight", torch.cat(qkv)), (f"blk.{layer[0]}.attn_gate.weight", z)]
    return [(name.replace("shared_mlp.output_linear", "mlp.down_proj"), x)]


def _multiplied(name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """By the factors of Falcon-H1's config."""
    I, N = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]  # noqa: E741
    read = config["attention_in_multiplier"]
    if "mamba.in_proj" in name:
        parts = zip(x.split([I, I, N, N, len(x) - 2 * I - 2 * N]), config["ssm_multipliers"], strict=True)
        return torch.cat([part * factor for part, factor in parts]) * config["ssm_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * read, "q_proj": read, "v_proj": read,
        ".o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return x * next((factor for part, factor in factors.items() if part in name), 1.0)


def _tiled(name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """Value heads of linear attention, one of each key head in turn."""
    Hk, Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tile(x: Tensor) -> Tensor:
        return x.reshape(Hk, Hv // Hk, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        keys = 2 * Hk * config["linear_key_head_dim"]
        return torch.cat([x[:keys], tile(x[keys:])])
    if "out_proj" in name:
        return tile(x.T).T
    return x if ".norm." in name else tile(x)


def _divisors(rope: dict[str, Any]) -> Tensor:
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, K, 2).float() / K)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    return 1 / (smooth.clamp(0, 1) + (1 - smooth.clamp(0, 1)) / factor)


def _tokenizer(writer: Writer, file: dict[str, Any]) -> None:
    """Byte-level BPE that splits as GPT-2 does, its added tokens for control."""
    vocab, added = file["model"]["vocab"], {token["content"]: token["id"] for token in file["added_tokens"]}
    ids = {id: token for token, id in (vocab | added).items()}
    merges = file["model"]["merges"]
    writer.values(**{
        "tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer__ggml__tokens": [ids[id] for id in range(len(ids))],
        "tokenizer__ggml__token_type": [3 if ids[id] in added else 1 for id in range(len(ids))],
        "tokenizer__ggml__eos_token_id": added["<|endoftext|>"],
        "tokenizer__ggml__bos_token_id": added["<|endoftext|>"],
    })  # fmt: skip
