"""Hybrid families of transformers as models of ours: the same function, whatever their config leaves out."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from perspectron.util.errors import CheckpointError
from tests.interop import families, tools
from tests.interop.families import HEADS, OUTER, Family
from tests.refusals import refused

SMALL = OUTER | HEADS
DELTA = SMALL | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "layer_types": None, "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 7, "mamba_chunk_size": 16,
    "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3,
}  # fmt: skip
GRANITE = SMALL | MAMBA | {
    "num_local_experts": 0, "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "logits_scaling": 1.7,
    "residual_multiplier": 0.6, "attention_multiplier": 0.2, "attention_bias": True,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
LFM2 = OUTER | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "block_ff_dim": 50, "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.3, "conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1, 3],
    "norm_eps": 1e-3,
}  # fmt: skip
MAMBA2 = {name: x for name, x in OUTER.items() if name != "max_position_embeddings"} | {
    "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 7, "chunk_size": 16, "use_bias": True,
    "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
CASES = [
    Family("qwen3_5_text", DELTA),
    Family("qwen3_5_text", DELTA | {"linear_conv_kernel_dim": 3, "attention_bias": True, "linear_num_key_heads": 4,
                                    "tie_word_embeddings": True}, name="qwen3_5-tied"),
    Family("granitemoehybrid", GRANITE | {"position_embedding_type": "rope"}),
    Family("granitemoehybrid", GRANITE | {"mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_n_groups": 1,
                                          "tie_word_embeddings": True}, name="granite-unturned"),
    Family("lfm2", LFM2),
    Family("lfm2", LFM2 | {"conv_bias": False, "conv_L_cache": 3, "tie_embedding": False}, name="lfm2-untied"),
    Family("bamba", SMALL | MAMBA | {"attn_layer_indices": [1, 2]}),
    Family("mamba2", MAMBA2),
]  # fmt: skip


case, loops = families.cases(CASES), families.loops_of_torch(modeling_qwen3_5)


class TestEach(families.Questions):
    """Of each hybrid."""

    def test_what_a_config_leaves_out_is_what_transformers_takes(self, case, tmp_path):
        families.configs_are_those_of_the_rest(case.family, tmp_path)


@torch.no_grad()
def test_the_text_of_a_model_of_images_is_read(tmp_path):
    """Its config is within another, which has the ties; its weights are beside those of images and of guesses."""
    for index in (0, 1):
        _, _, ours, folder = families.Case.of(CASES[index], tmp_path / str(index))
        values = json.loads((folder / "config.json").read_text())
        tensors = {
            name.replace("model.", "model.language_model."): x
            for name, x in load_file(folder / "model.safetensors").items()
        }
        tensors |= {name: torch.ones(2) for name in ("model.visual.x", "mtp.norm.weight")}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        outer = {"model_type": "qwen3_5", "tie_word_embeddings": values["tie_word_embeddings"]}
        whole = outer | {"text_config": values | {"tie_word_embeddings": True}, "vision_config": {"depth": 2}}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert torch.equal(families.read(tmp_path)(families.text()).logits, ours(families.text()).logits)


@pytest.mark.parametrize(
    ("index", "change", "named"),
    [
        (0, {"layer_types": ["linear_attention"] * 3 + ["conv"]}, ["layer_types", "conv"]),
        (0, {"linear_num_key_heads": 3}, ["linear_num_key_heads", 3]),
        (0, {"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "gelu_pytorch_tanh"]),
        (0, {"attn_output_gate": False}, ["attn_output_gate", False]),
        (2, {"num_local_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok", 5]),
        (2, {"mamba_n_heads": 7}, [7, 8, 56]),
        (2, {"time_step_limit": [0.5, 0.1]}, ["time_step_limit"]),
        (2, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (2, {"position_embedding_type": "alibi"}, ["position_embedding_type", "alibi"]),
        (4, {"conv_L_cache": 0}, ["conv_L_cache", 0]),
        (4, {"layer_types": ["mamba"] * 4}, ["layer_types", "linear_attention"]),
        (4, {"window": 3}, ["window", 3]),
        (6, {"mlp_bias": True}, ["mlp_bias", True]),
        (6, {"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act", "gelu_pytorch_tanh"]),
        (7, {"hidden_act": "relu"}, ["hidden_act", "relu"]),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(index, change, named, tmp_path):
    config = AutoConfig.for_model(CASES[index].kind, **CASES[index].values)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | change))
    with refused(CheckpointError, *named):
        families.read(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("limit", [[0.3, 0.9], [0.0, 0.4]])
def test_steps_of_mamba_are_bounded_where_the_config_says_so(limit, tmp_path):
    """In single steps, too, where transformers has no bounds."""
    family = replace(CASES[2], values=CASES[2].values | {"time_step_limit": limit})
    theirs = families.made(family)
    ours = families.read(families.save(theirs, tmp_path))
    ids = families.text()
    expected = theirs(ids).logits
    families.near(ours(ids).logits, expected)
    families.near(tools.in_steps(ours, ids), expected)
