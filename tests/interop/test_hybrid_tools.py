"""What the library does with a hybrid of another program: recorded steps, packed weights, gradients, LoRA, ONNX, and a
state of a known size."""

from dataclasses import replace
from pathlib import Path

import pytest

from perspectron.data import Tokenizer
from perspectron.interop import foreign, onnx
from perspectron.interop.foreign.source import Source
from perspectron.model.census import census
from perspectron.model.model import LanguageModel, build
from tests.interop import families, test_hybrids, test_kimi_linear, test_later_hybrids, tools

MIXTURES = test_later_hybrids.MIXTURES + test_kimi_linear.CASES[:1]
CASES = test_hybrids.CASES + test_later_hybrids.CASES + MIXTURES
FIRST = len(test_hybrids.CASES)
"""The place of the first of the later ones."""
every_case, every_dense_case = (
    pytest.mark.parametrize("index", range(count), ids=[str(family) for family in CASES[:count]])
    for count in (len(CASES), len(CASES) - len(MIXTURES))
)
KIND = {
    "qwen3.5-0.8b": "qwen3_5_text", "granite-4.0-h-350m": "granitemoehybrid", "lfm2-350m": "lfm2",
    "falcon-h1-0.5b": "falcon_h1",
}  # fmt: skip
GRANITE_ATTENTION = (10, 13, 17, 27)
PUBLISHED = {
    "qwen3.5-0.8b": {
        "vocab_size": 248_320, "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "granite-4.0-h-350m": {
        "vocab_size": 100_352, "hidden_size": 768, "num_hidden_layers": 32, "num_attention_heads": 12,
        "num_key_value_heads": 4, "shared_intermediate_size": 2048, "num_local_experts": 0, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "embedding_multiplier": 12, "logits_scaling": 3,
        "residual_multiplier": 0.246, "attention_multiplier": 0.015625, "tie_word_embeddings": True,
        "layer_types": ["attention" if i in GRANITE_ATTENTION else "mamba" for i in range(32)],
    },
    "lfm2-350m": {
        "vocab_size": 65_536, "hidden_size": 1024, "num_hidden_layers": 16, "block_ff_dim": 6656,
        "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "falcon-h1-0.5b": {
        "vocab_size": 32_784, "hidden_size": 1024, "num_hidden_layers": 36, "intermediate_size": 2048,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
        "mamba_d_head": 64, "mamba_d_state": 128,
    },
}  # fmt: skip
BYTES = {
    "qwen3.5-0.8b": (20e6, 12_288), "granite-4.0-h-350m": (23e6, 4096), "lfm2-350m": (82e3, 12_288),
    "falcon-h1-0.5b": (29e6, 18_432),
}  # fmt: skip
"""Bytes that stay as they are, and bytes for each token with a cache in 16 bits (families.md)."""


def model_of(index: int, **changes: object) -> LanguageModel:
    return tools.model_of(CASES[index], **changes)


@tools.recorded
@every_case
def test_its_steps_are_recorded(index, format):
    tools.steps_are_recorded(model_of(index), format)


@every_dense_case
def test_whole_texts_and_steps_have_the_same_gradients(index):
    tools.whole_texts_and_steps_have_the_same_gradients(model_of(index))


@every_dense_case
def test_an_adapter_learns_beside_its_layers(index):
    tools.an_adapter_learns(model_of(index))


@pytest.mark.slow
def test_their_steps_in_onnx_draw_the_same_tokens(tmp_path):
    """Of one model with a layer of each kind."""
    pytest.importorskip("onnxruntime")
    tokenizer = Tokenizer.train(["the quick brown fox jumps over the lazy dog. " * 9], 280)
    kinds = (
        (0, 0),
        (2, 0),
        (4, 0),
        (0, 2),
        (FIRST, 0),
        (FIRST + 2, 0),
        (FIRST + 2, 1),
        (FIRST + 4, 0),
        (FIRST + 4, 1),
    )
    whole = model_of(0, vocab_size=280).config
    blocks = tuple(model_of(case).config.blocks[layer] for case, layer in kinds)
    model = build(replace(whole, blocks=blocks)).eval()
    families.redraw(model, 3)
    assert onnx.export(model, tokenizer, tmp_path / "model.onnx", context=24).tokens == 23


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_state_at_the_published_size_is_as_large_as_specified(name):
    config = foreign.kind(KIND[name]).config(Source(Path(), PUBLISHED[name]))
    found = census(config, (1024, 32_768)).state_bytes
    fixed, token = BYTES[name]
    each = (found[32_768] - found[1024]) / (32_768 - 1024)
    assert each == 2 * token, "a census counts float32"
    assert abs(found[1024] - 1024 * each - fixed) < 0.1 * fixed + 1e4
