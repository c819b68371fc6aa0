"""Kimi Linear: Kimi Delta Attention, latent attention without positions, experts by corrected sigmoids in groups."""

import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.interop import foreign
from perspectron.model.census import active_parameters
from perspectron.quant.convert import convert
from perspectron.stream.artifact import read_header, save_artifact
from perspectron.stream.engine import load_artifact
from perspectron.util.errors import CheckpointError, DataError
from tests.interop import families
from tests.interop.families import OUTER, Family
from tests.refusals import refused

VALUES = OUTER | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48,
    "moe_intermediate_size": 19, "kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 8,
    "num_expert_group": 2, "topk_group": 1, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 2,
    "linear_head_dim": 10, "linear_num_heads": 3, "linear_conv_kernel_dim": 3, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
OTHER = VALUES | {
    "mlp_layer_types": ["sparse", "dense"], "moe_renormalize": False, "num_experts": 3, "num_expert_group": 1,
    "layer_types": ["full_attention", "linear_attention"],
}  # fmt: skip
CASES = [Family("kimi_linear", VALUES), Family("kimi_linear", OTHER, name="kimi_linear-other")]
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig", "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "transformers_version": "4.56.1", "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip
"""Of moonshotai/Kimi-Linear-48B-A3B-Instruct."""
case = families.cases(CASES)


@pytest.fixture(autouse=True, scope="module")
def loops():
    """transformers takes kernels for a GPU where a package has them, also on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
            patch.setattr(modeling_kimi_linear, name, inspect.unwrap(getattr(modeling_kimi_linear, name)))
        yield


class TestEach(families.Questions):
    """Of each case."""

    def test_what_a_config_leaves_out_is_what_transformers_takes(self, case, tmp_path):
        families.configs_are_those_of_the_rest(case.family, tmp_path)

    @torch.no_grad()
    def test_shards_of_16_bits_give_the_same_numbers(self, case, tmp_path):
        folder = families.save(families.made(case.family).bfloat16(), tmp_path, shards=True)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **families.EAGER).eval()
        families.logits_are_the_same(theirs, families.read(folder))


@torch.no_grad()
def test_published_names_and_numbers_of_layers_are_read(tmp_path):
    """Layers by their numbers, and a network without experts under its own name, which transformers does not write."""
    folder = families.save(families.made(CASES[0]), tmp_path)
    expected = families.read(folder)(families.text()).logits
    table = {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 3, "head_dim": 10}
    silent = dict.fromkeys(("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"), ...)
    families.change(folder, linear_attn_config=table | {"short_conv_kernel_size": 3}, first_k_dense_replace=1,
                    linear_conv_kernel_dim=7, **silent)  # fmt: skip
    path = folder / "model.safetensors"
    tensors = {name.replace("0.block_sparse_moe", "0.mlp"): x for name, x in load_file(path).items()}
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(families.read(folder)(families.text()).logits, expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q_lora_rank": 7}, ["q_lora_rank", 7]),
        ({"mla_use_nope": False}, ["mla_use_nope", False]),
        ({"attention_bias": True}, ["attention_bias", True]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads", 2]),
        ({"hidden_act": "situ"}, ["hidden_act", "situ"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", 2]),
        ({"moe_router_activation_func": "softmax"}, ["moe_router_activation_func", "softmax"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers", 1]),
        ({"topk_group": 5}, ["top_groups", 5]),
        ({"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "dense"]),
        ({"first_k_dense_replace": 2}, ["mlp_layer_types"]),
        ({"linear_attn_config": {"full_attn_layers": [2]}}, ["kda_layers", 2]),
        ({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}}, ["kda_layers", 2]),
        ({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": ["x"]}}, ["kda_layers", "x"]),
        ({"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}, ["layer_types"]),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, ["linear_attn_config.gate_lower_bound"]),
        ({"qk_head_dim": 17}, ["qk_head_dim", 17]),
        ({"mla_use_output_gate": True}, ["mla_use_output_gate", True]),
        ({"routed_expert_hidden_size": 16}, ["routed_expert_hidden_size", 16]),
        ({"norm_topk_prob": False, "moe_renormalize": True}, ["norm_topk_prob", "moe_renormalize", True]),
        ({"n_group": 4, "num_expert_group": 2}, ["n_group", 4, "num_expert_group", 2]),
        (
            {"num_experts_per_tok": 3, "num_experts_per_token": 2},
            ["num_experts_per_tok", 3, "num_experts_per_token", 2],
        ),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(change, named, tmp_path):
    config = json.loads(AutoConfig.for_model("kimi_linear", **VALUES).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with refused(CheckpointError, *named):
        families.read(tmp_path)


def test_experts_in_4_bits_are_read_from_disk_with_the_bits_of_memory(tmp_path):
    family = Family("kimi_linear", VALUES | {"vocab_size": 300, "num_hidden_layers": 3, "layer_types": None})
    model = families.read(families.save(families.made(family), tmp_path / "hf"))
    convert(model, "4bit32")
    save_artifact(model, Tokenizer.train(["the cat sat on the mat. " * 40], 300), tmp_path / "out")
    header, told = read_header(tmp_path / "out"), []
    assert header.experts is not None
    for cache in (None, 2 * header.experts.shard_bytes):
        loaded, tokenizer = load_artifact(tmp_path / "out", cache_bytes=cache)
        with torch.inference_mode():
            logits = loaded(torch.arange(3, 40)[None]).logits
        drawn = generate(
            loaded, tokenizer, ["the cat"], max_tokens=12, sampling=SamplingConfig(temperature=0)
        ).ids
        told.append((drawn, logits))
        assert loaded.cache is not None and loaded.cache.resident == (cache is None)
    assert told[0][0] == told[1][0] and len(told[0][0][0]) > 0
    assert torch.equal(told[0][1], told[1][1])


def test_a_tokenizer_of_tiktoken_alone_is_refused_by_its_file(tmp_path):
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    with refused(DataError, "tiktoken.model"):
        Tokenizer.of_transformers(tmp_path)


def test_the_published_config_is_that_of_the_published_model(tmp_path, monkeypatch):
    """48 billion parameters, 3 of which a token uses; 576 numbers of a token and layer are kept."""
    monkeypatch.setattr("perspectron.model.model.memory", lambda: 1 << 40)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    made = foreign.empty(foreign.opened(tmp_path))
    each = [sum(x.numel() for x in made.parameters()), active_parameters(made.config)]
    assert 48e9 < each[0] < 50e9 and 2.5e9 < each[1] < 3.6e9
    shorter, longer = (made.init_state(1, capacity=tokens).nbytes for tokens in (1024, 2048))
    assert longer - shorter == 1024 * 7 * 576 * 4
