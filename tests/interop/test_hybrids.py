"""Hybrid families of transformers as models of ours: the same function, whatever their config leaves out."""

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.interop.families import HEADS, OUTER, Family
from transformers.models.qwen3_5 import modeling_qwen3_5

from perspectron.model.model import LanguageModel
from tests.interop import families

SMALL = OUTER | HEADS
DELTA = SMALL | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "layer_types": None,
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


@cache
def case(family: int, root: Path) -> tuple[Any, LanguageModel, Path]:
    theirs = families.made(CASES[family])
    folder = families.save(theirs, root / str(family))
    return theirs, families.read(folder), folder


@pytest.fixture(autouse=True, scope="module")
def loops_of_torch() -> Iterator[None]:
    """transformers takes kernels for a GPU where a package has them, also on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            patch.setattr(modeling_qwen3_5, name, inspect.unwrap(getattr(modeling_qwen3_5, name)))
        yield


@pytest.fixture(params=range(len(CASES)), ids=[str(family) for family in CASES], scope="module")
def index(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def test_its_logits_are_those_of_transformers(index, root):
    theirs, ours, _ = case(index, root)
    families.logits_are_the_same(theirs, ours)


def test_its_logits_in_float64_are_those_of_transformers(index, root):
    theirs, _, folder = case(index, root)
    families.logits_are_the_same_in_double(CASES[index], theirs, families.read(folder))


def test_its_greedy_tokens_are_those_of_transformers(index, root):
    if CASES[index].kind == "bamba":
        pytest.skip("steps of transformers' own are not its whole forward")
    theirs, ours, _ = case(index, root)
    families.greedy_tokens_are_the_same(theirs, ours)


def test_it_has_the_bits_of_one_reading(index, root, tmp_path):
    families.bits_are_those_of_one_reading(case(index, root)[1], tmp_path)


def test_every_tensor_is_asked_for(index, root):
    families.weights_are_all_asked_for(case(index, root)[2])
