"""Keys that a config.json leaves out mean what they mean to transformers, and those of older files too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from perspectron.interop import foreign
from perspectron.model.config import ModelConfig
from perspectron.util.errors import CheckpointError
from tests.interop import families
from tests.interop.families import HEADS, OUTER, Family
from tests.interop.test_families import LLAMA3, SMALL, YARN
from tests.refusals import refused

EPS = {"rms_norm_eps": 1e-2}
CASES = [
    (Family("llama", SMALL | EPS | {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": LLAMA3}),
     {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act",
      "attention_bias", "mlp_bias", "rope_parameters.rope_theta",
      "rope_parameters.original_max_position_embeddings"}),
    (Family("llama", SMALL | {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False,
                              "mscale": 0.7, "mscale_all_dim": 0.9}}, name="llama-yarn"),
     { "rope_parameters.beta_fast", "rope_parameters.beta_slow", "rope_parameters.truncate",
      "rope_parameters.mscale", "rope_parameters.mscale_all_dim"}),
    (Family("mistral", SMALL | EPS | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}),
     {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "sliding_window"}),
    (Family("qwen2", SMALL | EPS | {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 4,
                                    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
     {"num_key_value_heads", "num_attention_heads", "rms_norm_eps", "rope_parameters", "sliding_window",
      "max_window_layers", "layer_types"}),
    (Family("qwen3", SMALL | EPS | {"num_key_value_heads": 4, "head_dim": 128}),
     {"head_dim", "rms_norm_eps", "rope_parameters", "attention_bias", "tie_word_embeddings"}),
    (Family("smollm3", SMALL | EPS | {"num_key_value_heads": 4, "no_rope_layers": [1, 1, 1, 0],
                                      "use_sliding_window": True, "sliding_window": 5}),
     {"num_key_value_heads", "rms_norm_eps", "rope_parameters", "no_rope_layers", "no_rope_layer_interval",
      "tie_word_embeddings", "use_sliding_window", "layer_types"}),
    (Family("gemma3_text", SMALL | EPS | {"num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 6,
                                          "sliding_window": 5, "query_pre_attn_scalar": 24}),
     {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "query_pre_attn_scalar", "layer_types",
      "sliding_window", "tie_word_embeddings", "hidden_activation", "rope_parameters.full_attention",
      "rope_parameters.sliding_attention", "_sliding_window_pattern"}),
    (Family("olmo2", SMALL | EPS | {"num_key_value_heads": 4}),
     {"num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias"}),
    (Family("olmo3", SMALL | EPS | {"num_key_value_heads": 4, "sliding_window": 5}),
     {"num_key_value_heads", "rms_norm_eps", "rope_parameters", "layer_types", "sliding_window",
      "rope_parameters.full_attention"}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys"), CASES, ids=[str(family) for family, _ in CASES])
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(family, keys, tmp_path):
    assert keys <= families.silence_means_what_it_means_there(family, tmp_path)


def config_of(folder: Path) -> ModelConfig:
    return foreign.empty(foreign.opened(folder)).config


def test_silent_windows_and_bounds_are_those_of_transformers(tmp_path):
    """A short text does not tell them apart."""
    for kind, window, longest in (
        ("llama", None, 2048), ("mistral", 4096, 131_072), ("qwen2", None, 32_768), ("gemma3_text", 4096, 131_072),
        ("olmo2", None, 2048), ("olmo3", 4096, 2048), ("smollm3", None, 32_768),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": kind, **SMALL, "max_position_embeddings": None})
        )
        config: Any = config_of(tmp_path)
        assert (config.blocks[0].mixer.window, config.longest) == (window, longest), kind
        silent = AutoConfig.for_model(kind)
        assert silent.max_position_embeddings == longest


def test_a_gemma_with_images_whose_vocabulary_is_silent_has_that_of_transformers(tmp_path):
    text = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert config_of(tmp_path).vocab_size == theirs.text_config.vocab_size == 262_208


FULL, LOCAL = ["full_attention"] * 4, ["sliding_attention"] * 4
EMPTY: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("qwen2", {}, {"use_mrope": False}, {"use_mrope": True}),
    *(("mistral", {}, {name: False}, {name: True}) for name in ("attention_bias", "mlp_bias")),
    ("mistral", {"sliding_window": None}, {"layer_types": FULL}, {"layer_types": LOCAL}),
    ("mistral", {"sliding_window": 5}, {"layer_types": LOCAL}, {"layer_types": FULL}),
    ("llama", {}, {"layer_types": FULL}, {"layer_types": LOCAL}),
    ("llama", {}, {"use_flash_attn": False}, {"use_flash_attn": True}),
    ("llama", {}, {"max_sequence_length": 64}, {"max_sequence_len": 64}),
    ("llama", {}, {"pruned_heads": {}, "torchscript": False, "top_k": 50}, {"top_k": 40}),
    ("llama", {}, {"is_encoder_decoder": False}, {"is_encoder_decoder": True}),
    *(
        ("llama", {"rope_parameters": YARN}, *({"rope_parameters": YARN | {name: x}} for x in (1.0, 0.8)))
        for name in ("attn_factor", "extrapolation_factor")
    ),
]
"""Kinds, values, others beside them that change nothing, as published files have them, and some that may."""


@pytest.mark.parametrize(("kind", "values", "more", "wrong"), EMPTY)
def test_keys_that_transformers_ignores_are_read_where_they_change_nothing(
    kind, values, more, wrong, tmp_path
):
    def read(**values: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SMALL, **values}))
        return config_of(tmp_path)

    assert read(**values | more) == read(**values)
    with refused(CheckpointError, *wrong):
        read(**values | wrong)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3", "mamba2", "qwen3_5", "falcon_h1"])
def test_a_file_with_all_keys_is_the_one_with_those_that_are_told(kind, tmp_path):
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    wanted = config_of(tmp_path)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    assert "is_encoder_decoder" in json.loads((tmp_path / "config.json").read_text())
    assert config_of(tmp_path) == wanted


NESTED = {
    kind: {"rope_type": "default", "rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")
}
OLD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    ("llama", {"rope_theta": 700.0, "rope_scaling": LLAMA3 | {"rope_theta": 300.0}}),
    ("qwen2", {"rope_theta": 700.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}),
    ("smollm3", {"rope_theta": 700.0}),
    ("gemma3_text", {"rope_theta": 700.0, "rope_local_base_freq": 300.0, "sliding_window_pattern": 2,
                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": ...}),
    ("olmo3", {"rope_theta": 700.0, "rope_scaling": YARN}),
    *(
        (kind, {"rope_theta": 700.0, "layer_types": [*NESTED] * 2, "rope_scaling": scaling, **more})
        for kind in ("gemma3_text", "olmo3")
        for scaling, more in (
            ({"type": "linear", "factor": 8.0}, {}),
            ({"type": "linear", "factor": 8.0}, {"rope_parameters": NESTED}),
            ({"rope_type": "default"}, {"rope_parameters": NESTED}),
            ({"type": "linear", "factor": 8.0},
             {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}),
            ({"rope_type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 16}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), OLD, ids=range(len(OLD)))
@torch.no_grad()
def test_older_spellings_of_positions_are_read(kind, values, tmp_path):
    sizes = SMALL | ({"sliding_window": 5} if kind in ("gemma3_text", "olmo3") else {})
    folder = families.save(families.made(Family(kind, sizes)), tmp_path)
    families.change(folder, **{"rope_parameters": ..., **values})
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    families.near(families.read(folder)(families.text()).logits, theirs(families.text()).logits)


@torch.no_grad()
def test_the_text_of_a_model_of_images_is_read(tmp_path):
    text: dict[str, Any] = SMALL | {"sliding_window": 5, "model_type": "gemma3_text"}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    values = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = AutoConfig.for_model("gemma3", **values)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    families.redraw(theirs, 0)
    folder = families.save(theirs, tmp_path)
    assert any("vision_tower" in name for name in load_file(folder / "model.safetensors"))
    families.near(families.read(folder)(families.text()).logits, theirs(families.text()).logits)


def test_the_guide_has_every_kind():
    page = Path(__file__).parents[2] / "docs" / "guides" / "bring-a-model.md"
    rows = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and "model_type" not in line
    ]
    assert sorted(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows))) == sorted(
        foreign.KINDS
    )


def test_a_key_that_nobody_knows_is_refused_by_name(tmp_path):
    folder = families.save(families.made(Family("qwen3", OUTER | HEADS)), tmp_path)
    for values, named in (
        ({"logit_scale": 0.5}, ["config.json", "logit_scale", 0.5]),
        ({"layer_types": ["linear_attention"] * 4}, ["layer_types", "linear_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", 4]),
        ({"layer_types": ["sliding_attention"] * 4}, ["layer_types", "sliding_attention"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", 0.5],
        ),
    ):
        families.change(folder, **values)
        with refused(CheckpointError, *named):
            families.read(folder)
        families.change(folder, **dict.fromkeys(values, ...))


HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 16}
LINEAR = {
    f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
}
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"n_layer": 4, "n_ctx": 64, "n_special": 0, "predict_special_tokens": True, "output_past": True,
              "_num_labels": 1}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    ("smollm3", {"max_window_layers": 28, "no_rope_layers": [1, 1, 1, 0], "sliding_window": None}),
    ("granitemoehybrid", HYBRID | {"normalization_function": "rmsnorm", "init_method": "mup", "num_local_experts": 0,
                                   "layer_types": ["mamba", "mamba", "mamba", "attention"]}),
    ("lfm2", {"theta": 1e6, "rope_theta": 1e6, "layer_types": ["conv", "conv", "conv", "full_attention"]}),
    ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1, "norm_before_gate": True}),
    ("qwen3_5", {"language_model_only": False, "text_config": SMALL | LINEAR | {"head_dim": 8}}),
]  # fmt: skip
"""Keys that files of published models have, and transformers does not read."""


@pytest.mark.parametrize(("kind", "values"), PUBLISHED, ids=[kind for kind, _ in PUBLISHED])
def test_keys_of_published_files_that_transformers_does_not_read_are_no_obstacle(kind, values, tmp_path):
    bare = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4}
    outer = {} if "text_config" in values else {"gpt2": {}, "mamba2": bare}.get(kind, SMALL)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **outer, **values}))
    assert len(config_of(tmp_path).blocks) == 4


def test_positions_of_pairs_side_by_side_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **SMALL, "rope_interleaved": True})
    )
    with refused(CheckpointError, "rope_interleaved"):
        config_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 1e308}}, "factor"),
        ("falcon_h1", {"mamba_norm_before_gate": None}, "mamba_norm_before_gate"),
        ("kimi_linear", {"num_key_value_heads": 4, "moe_renormalize": None}, "moe_renormalize"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("granitemoehybrid", HYBRID | {"num_local_experts": 0, "logits_scaling": 0}, "logits_scaling"),
    ],
)  # fmt: skip
def test_numbers_of_which_no_model_can_be_made_are_named(kind, values, word, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SMALL, **values}))
    with refused(CheckpointError, word):
        config_of(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "x\0.safetensors", "\ud800.safetensors", None])
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(CheckpointError, "index.json"):
        foreign.Source(tmp_path, {}).open_weights()
