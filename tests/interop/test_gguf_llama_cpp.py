"""GGUF files of every family in llama.cpp: the logits are those of the model that is imported from them."""

import contextlib

import pytest
import torch
import transformers

pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")
llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")

from perspectron.interop import foreign  # noqa: E402
from tests.gguf_models import ARCHES, V, arch_of, folder_of, write  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
EQUAL = {"linear_value_head_dim": 6, "rms_norm_eps": 1e-6}
"""What llama.cpp takes for granted of linear attention: values as wide as keys, and one epsilon for all norms."""
APART = ("olmo2-windows",)
"""It multiplies a factor of yarn's attention into the one that it has anyway, where the model has it instead."""
COARSE = {"gemma3": 2e-3, "qwen35": 1e-4, "qwen3next": 1e-4, "kimi-linear": 1e-4, "nemotron_h_moe": 4e-6}
"""It takes GELU from a table in float16, bounds a vector's length where transformers adds to it, and squares what an
expert made before the next matrix."""


def logits_of_llama_cpp(path, ids: list[int]) -> torch.Tensor:
    """(T, V) logits, a token a step, with a cache in float32."""
    options = {
        "n_ctx": 128,
        "n_threads": 1,
        "verbose": False,
        "logits_all": True,
        "n_batch": 1,
        "n_ubatch": 1,
    }
    full = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(str(path), type_k=full, type_v=full, flash_attn=False, **options)
    with contextlib.closing(model):
        model.eval(ids)
        return torch.from_numpy(model.scores[: len(ids)].copy())


@pytest.mark.parametrize("name", [name for name in ARCHES if name not in APART])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_logits_are_those_of_llama_cpp(name, tmp_path):
    more = EQUAL if name.startswith("qwen3") and "linear_value_head_dim" in ARCHES[name][1] else {}
    if name == "olmoe":  # it has neither groups of heads there nor a bound
        more = {"num_key_value_heads": 4, "clip_qkv": None}
    write(tmp_path / "model.gguf", folder_of(name, tmp_path / "hf", **more), arch_of(name))
    model = foreign.read(tmp_path / "model.gguf").model
    ids = torch.randint(V - 1, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].float()
    theirs = logits_of_llama_cpp(tmp_path / "model.gguf", ids)
    most = COARSE.get(arch_of(name), 2e-6) * max(1.0, float(ours.abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=most)
