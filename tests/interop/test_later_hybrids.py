"""Hybrid families whose blocks differ from those of the first ones: two mixers side by side, norms that change their
place from layer to layer, one part in a layer, and projections of heads in turn."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from perspectron.interop import foreign
from perspectron.util.errors import CheckpointError
from tests.interop import families, tools
from tests.interop.families import HEADS, OUTER, Family
from tests.refusals import refused

SMALL = OUTER | HEADS
ROPE = {"rope_type": "default", "rope_theta": 500.0}
FALCON = SMALL | {
    "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_ssm": 48, "mamba_n_groups": 2, "mamba_d_state": 7,
    "mamba_d_conv": 3, "mamba_chunk_size": 16, "mamba_proj_bias": True, "mamba_conv_bias": False,
    "attention_bias": True, "mlp_bias": True, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    "rms_norm_eps": 1e-2, "time_step_limit": [0.0, 1000.0], "rope_parameters": ROPE, "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7, "mlp_multipliers": [0.25, 2.0], "key_multiplier": 0.5, "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.25, "ssm_in_multiplier": 0.25, "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 8.0],
}  # fmt: skip
"""Factors that are folded into weights are powers of two, so that nothing is rounded."""
OTHERS = {
    "mlp_multipliers": [0.6, 1.3], "key_multiplier": 0.8, "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.5],
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-2,
}  # fmt: skip
OLMO = {name: x for name, x in SMALL.items() if name != "head_dim"} | LINEAR | {
    "layer_types": ["linear_attention", "full_attention"] * 2, "rope_parameters": ROPE,
}  # fmt: skip
UNTURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
KINDS = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
NEMOTRON = {name: x for name, x in SMALL.items() if "max_" not in name and name != "num_hidden_layers"} | {
    "layers_block_type": KINDS, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 7,
    "conv_kernel": 3, "chunk_size": 16, "use_bias": True, "use_conv_bias": False, "mlp_bias": True,
    "layer_norm_epsilon": 1e-3, "time_step_min": 1e-9,
}  # fmt: skip
"""Steps of transformers have no least Δ."""
MIXED = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "mlp_bias": False,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 19, "n_group": 4, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 13, "routed_scaling_factor": 2.5, "use_bias": False,
}  # fmt: skip
NEXT = SMALL | LINEAR | {
    "num_experts": 0, "attention_bias": True, "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.4},
}  # fmt: skip
EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 19, "shared_expert_intermediate_size": 13,
    "mlp_only_layers": [1],
}  # fmt: skip
CASES = [
    Family("falcon_h1", FALCON),
    Family("falcon_h1", FALCON | {"mamba_rms_norm": False, "mamba_conv_bias": True, "projectors_bias": True,
                                  "tie_word_embeddings": True}, name="falcon_h1-tied"),
    Family("olmo_hybrid", OLMO),
    Family("olmo_hybrid", OLMO | UNTURNED | {"linear_allow_neg_eigval": False, "attention_bias": True,
                                             "tie_word_embeddings": True}, name="olmo_hybrid-tied"),
    Family("nemotron_h", NEMOTRON),
    Family("qwen3_next", NEXT | {"tie_word_embeddings": True}, name="qwen3_next-dense"),
]  # fmt: skip
MIXTURES = [
    Family("nemotron_h", NEMOTRON | MIXED, name="nemotron_h-experts"),
    Family("qwen3_next", NEXT | EXPERTS),
]
case = families.cases(CASES + MIXTURES)
loops = families.loops_of_torch(modeling_olmo_hybrid, modeling_qwen3_next)


class TestEach(families.Questions):
    """Of each family."""

    def test_what_a_config_leaves_out_is_what_transformers_takes(self, case, tmp_path):
        families.configs_are_those_of_the_rest(case.family, tmp_path)

    @torch.no_grad()
    def test_shards_of_16_bits_give_the_same_numbers(self, case, tmp_path):
        folder = families.save(families.made(case.family).bfloat16(), tmp_path, shards=True)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **families.EAGER).eval()
        ours = families.read(folder)
        families.logits_are_the_same(theirs, ours)
        matrices = {name: p for name, p in ours.named_parameters() if name.endswith("_proj.weight")}
        assert all(p.dtype is torch.bfloat16 for p in matrices.values())


def test_factors_that_a_config_leaves_out_are_one(tmp_path):
    """They are in the weights, so that logits alone show it."""
    family = Family("falcon_h1", FALCON | {"projectors_bias": True, "num_hidden_layers": 2})
    known = families.silence_means_what_it_means_there(family, tmp_path)
    assert set(OTHERS) | {"embedding_multiplier", "lm_head_multiplier", "rope_parameters"} <= known


@torch.no_grad()
def test_factors_that_are_no_powers_of_two_widen_what_they_are_in(tmp_path):
    family = Family("falcon_h1", FALCON | OTHERS | {"projectors_bias": True, "mamba_norm_before_gate": True})
    folder = families.save(families.made(family).bfloat16(), tmp_path, shards=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **families.EAGER).eval()
    ours = families.read(folder)
    families.logits_are_the_same(theirs, ours)
    first = ours.blocks[0]
    assert first.ffn.down_proj.weight.dtype is first.mixer.in_proj.weight.dtype is torch.float32
    assert first.ffn.up_proj.weight.dtype is ours.embedding.weight.dtype is torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("values", [{"rope_theta": None}, UNTURNED], ids=["outside", "inside"])
def test_positions_of_olmo_are_left_out_where_their_base_is_null(values, tmp_path):
    family = replace(CASES[2], values=CASES[2].values | {"rope_parameters": None})
    folder = families.save(families.made(family), tmp_path)
    ids, turned = families.text(), families.read(folder)(families.text()).logits
    families.change(folder, **{"rope_parameters": ..., **values})
    theirs = AutoModelForCausalLM.from_pretrained(folder, **families.EAGER).eval()
    found = families.read(folder)(ids).logits
    families.near(found, theirs(ids).logits)
    assert not torch.allclose(found, turned, atol=1e-2)


@torch.no_grad()
def test_names_and_cuts_of_all_files_of_olmo_are_read(tmp_path):
    """Convolutions by what they are for, as published, in thirds, as transformers saves them, or in one; norms by the
    names of files or of modules."""
    folder = families.save(families.made(CASES[2]), tmp_path)
    path, ids = folder / "model.safetensors", families.text()
    saved, expected = load_file(path), families.read(folder)(ids).logits
    whole, names = {}, ("attention_layer_norm", "feedforward_layer_norm")
    for name, x in saved.items():
        if "_conv1d" not in name:
            whole[name.replace(names[0], "input_layernorm").replace(names[1], "post_attention_layernorm")] = x
    published = {name: x for name, x in saved.items() if "_conv1d" not in name}
    for there in sorted({name.rsplit(".", 2)[0] for name in saved if "_conv1d" in name}):
        all_C1W = torch.cat([saved[f"{there}.{x}_conv1d.weight"] for x in "qkv"])
        assert len(all_C1W) == 64 and len(saved[f"{there}.q_conv1d.weight"]) != 12
        whole[f"{there}.conv1d.weight"] = all_C1W
        for x, part in zip("qkv", all_C1W.split([12, 12, 40]), strict=True):
            published[f"{there}.{x}_conv1d.weight"] = part.contiguous()
    for tensors in (whole, published):
        save_file(tensors, path, {"format": "pt"})
        assert torch.equal(families.read(folder)(ids).logits, expected)


@torch.no_grad()
def test_steps_of_nemotron_have_their_least_in_whole_texts_and_alone(tmp_path):
    """transformers has it in whole texts."""
    family = replace(CASES[4], values=CASES[4].values | {"time_step_min": 0.5})
    theirs = families.made(family)
    ours = families.read(families.save(theirs, tmp_path))
    ids = families.text()
    expected = theirs(ids).logits
    families.near(ours(ids).logits, expected)
    families.near(tools.in_steps(ours, ids), expected)


@torch.no_grad()
def test_a_letter_for_each_layer_means_what_a_list_does(tmp_path):
    folder = families.save(families.made(CASES[4]), tmp_path)
    expected = families.read(folder)(families.text()).logits
    older = {
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_dt_min": 1e-9,
        "mamba_conv_bias": False,
        "n_groups": 1,
    }
    pattern = {"layers_block_type": ..., "hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5}
    families.change(folder, **pattern, **older)
    assert torch.equal(families.read(folder)(families.text()).logits, expected)


@pytest.mark.parametrize(
    ("index", "change", "named"),
    [
        (0, {"mlp_multipliers": [1.0]}, ["mlp_multipliers"]),
        (0, {"ssm_multipliers": [1.0] * 4 + ["x"]}, ["ssm_multipliers"]),
        (0, {"key_multiplier": "x"}, ["key_multiplier", "x"]),
        (0, {"lm_head_multiplier": 0}, ["lm_head_multiplier", 0]),
        (0, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (0, {"mamba_d_ssm": 40}, [4, 12]),
        (0, {"mamba_use_mlp": False}, ["mamba_use_mlp", False]),
        (2, {"linear_num_key_heads": 3}, ["linear_num_key_heads", 3]),
        (2, {"layer_types": ["conv"] * 4}, ["layer_types", "conv"]),
        (2, {"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "gelu_pytorch_tanh"]),
        (2, {"linear_use_gate": False}, ["linear_use_gate", False]),
        (5, {"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "gelu_pytorch_tanh"]),
        (4, {"mlp_hidden_act": "gelu"}, ["mlp_hidden_act", "gelu"]),
        (4, {"tie_word_embeddings": True}, ["tie_word_embeddings", True]),
        (4, {"attention_bias": True}, ["attention_bias", True]),
        (4, {"rms_norm_eps": 1e-5}, ["rms_norm_eps", 1e-5]),
        (4, {"attention_head_dim": 7}, ["attention_head_dim", 7]),
        (4, {"sliding_window": 5}, ["sliding_window", 5]),
        (4, {"layers_block_type": ["mlp", "conv"]}, ["layers_block_type", "conv"]),
        (4, {"layers_block_type": None, "hybrid_override_pattern": "M?"}, ["hybrid_override_pattern", "M?"]),
        (5, {"linear_num_key_heads": 3}, ["linear_num_key_heads", 3]),
        (5, {"num_experts": -1}, ["num_experts", -1]),
        (5, {"use_sliding_window": True}, ["use_sliding_window", True]),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(index, change, named, tmp_path):
    config = AutoConfig.for_model(CASES[index].kind, **CASES[index].values)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | change))
    with refused(CheckpointError, *named):
        families.read(tmp_path)


PUBLISHED = [
    (0, {"attn_layer_indices": None, "mamba_use_mlp": True, "mlp_expansion_factor": 8, "expansion_factor": 1.5,
         "num_logits_to_keep": 1, "add_bos_token": False, "sliding_window": None, "rope_scaling": None,
         "rope_theta": 1e11}),
    (2, {"linear_a_log_min": 0, "linear_a_log_max": 16, "linear_dt_min": 1e-3, "linear_dt_max": 0.1,
         "linear_dt_init_floor": 1e-4}),
    (4, {"rms_norm_eps": 1e-3, "rope_theta": 1e4, "partial_rotary_factor": 1.0, "attention_head_dim": 10,
         "num_query_groups": 2, "rescale_prenorm_residual": True, "residual_in_fp32": False,
         "use_mamba_kernels": True, "hidden_dropout": 0.0, "time_step_floor": 1e-4, "time_step_max": 0.1,
         "time_step_limit": [0.0, float("inf")], "num_logits_to_keep": 1, "n_group": 1, "topk_group": 1,
         "time_step_rank": 256,
         "mamba_proj_bias": False, "sliding_window": None, "mamba_hidden_act": "silu", "hybrid_override_pattern": "M"}),
    (5, {"decoder_sparse_step": 1, "full_attention_interval": 4, "mlp_only_layers": [], "norm_topk_prob": True,
         "router_aux_loss_coef": 1e-3, "output_router_logits": False, "num_experts_per_tok": 10,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
         "use_sliding_window": False}),
]  # fmt: skip
"""Keys of published files that change nothing."""


@pytest.mark.parametrize(("index", "values"), PUBLISHED)
def test_keys_of_published_files_that_say_nothing_are_no_obstacle(index, values, tmp_path):
    family = CASES[index]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.kind, **values, **family.values}))
    assert foreign.empty(foreign.opened(tmp_path)).config == families.config_of(family, family.values)
