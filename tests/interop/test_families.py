"""Plain families of transformers as models of ours: the same function, whatever their config leaves out."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from perspectron.util.errors import CheckpointError
from tests.interop import families
from tests.interop.families import HEADS, OUTER, Family
from tests.refusals import refused

SMALL = OUTER | HEADS
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
SLIDES = ["sliding_attention", "full_attention"] * 2
GEMMA = SMALL | {"sliding_window": 5, "query_pre_attn_scalar": 24, "layer_types": SLIDES}
CASES = [
    Family("llama", SMALL | {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    Family("llama", SMALL | {"rope_parameters": LINEAR, "tie_word_embeddings": True}, name="llama-linear", seed=2),
    Family("llama", SMALL | {"rope_parameters": YARN, "head_dim": 8}, name="llama-yarn"),
    Family("mistral", SMALL | {"sliding_window": 5, "rope_parameters": {"rope_theta": 500.0}}, seed=2),
    Family("qwen2", SMALL | { "use_sliding_window": True, "sliding_window": 5,
                                     "max_window_layers": 2}),
    Family("qwen3", SMALL | {"layer_types": SLIDES, "sliding_window": 5, "use_sliding_window": True,
                             "tie_word_embeddings": True}),
    Family("smollm3", SMALL | {"attention_bias": True, "tie_word_embeddings": False}),
    Family("gemma3_text", GEMMA | {"final_logit_softcapping": 3.0, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    Family("gemma3_text", GEMMA | {"tie_word_embeddings": False}, name="gemma3-untied"),
    Family("olmo2", SMALL, seed=3),
    Family("olmo3", SMALL | {"sliding_window": 5, "layer_types": SLIDES, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
]  # fmt: skip


case = families.cases(CASES)


class TestEach(families.Questions):
    """Of each family."""


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_head_beside_an_embedding_that_it_is_tied_to_is_the_same_or_refused(kind, tmp_path):
    """transformers then has both, whatever the config says."""
    families.save(families.made(next(family for family in CASES if family.kind == kind)), tmp_path)
    wanted, path = families.read(tmp_path).fingerprint(), tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    for head, named in (
        (embedding.clone(), None),
        (other, ["config.json", "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"]),
        (torch.zeros(3, 4), ["lm_head.weight", 3, 4, 67, 32]),
    ):
        save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
        if named is None:
            assert families.read(tmp_path).fingerprint() == wanted
        else:
            with refused(CheckpointError, *named):
                families.read(tmp_path)
    save_file(tensors | {"lm_head.weight": other}, path, {"format": "pt"})
    families.change(tmp_path, tie_word_embeddings=False)
    assert families.read(tmp_path).fingerprint() != wanted
