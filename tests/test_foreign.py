"""Models of transformers as runs: the same logits, tokens that have changed places, and what cannot be read named."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import perspectron
from perspectron import foreign
from perspectron.cli.main import main
from perspectron.data.adopt import adopt
from perspectron.errors import CheckpointError, DataError

V, TEXT = 300, "The quick brown fox's 1,234 jumps, isn't it?\n\n    indented   = 5; " + "naïve 汉字 " * 3
SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 299, "eos_token_id": 299}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=299, eos_token_id=299)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, **HEADS, attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SMALL, **HEADS, sliding_window=None, tie_word_embeddings=True)
    ),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**SMALL, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8, pad_token_id=0)
    ),
    "bamba": lambda: BambaForCausalLM(
        BambaConfig(**SMALL, **HEADS, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=8, mamba_chunk_size=8,
                    pad_token_id=0)
    ),
}  # fmt: skip
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def bpe() -> ByteLevelBPETokenizer:
    """As GPT-2's, its separator last."""
    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator([TEXT * 20], vocab_size=299, min_frequency=2, show_progress=False)
    inner.add_special_tokens(["<|endoftext|>"])
    return inner


def saved(folder: Path, kind: str, bpe: ByteLevelBPETokenizer):
    torch.manual_seed(5)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_its_logits_are_those_of_transformers(kind, bpe, tmp_path):
    theirs = saved(tmp_path / "hf", kind, bpe)
    ours, tokenizer = foreign.read(tmp_path / "hf")
    at = bpe.token_to_id("<|endoftext|>")
    ids = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))
    ids = ids.masked_fill((ids == 0) | (ids == at), 7)
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids).logits
        expected[..., [0, at]] = expected[..., [at, 0]]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1, float(expected.abs().max())))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    swapped = [{0: at, at: 0}.get(id, id) for id in bpe.encode(TEXT).ids]
    assert tokenizer.encode(TEXT) == swapped


def test_gpt2_with_lenses_at_rest_is_the_same_function_and_can_be_trained(bpe, tmp_path, capsys):
    saved(tmp_path / "hf", "gpt2", bpe)
    for name, flags in (("plain", []), ("lens", ["--lens"])):
        assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / name), *flags]) == 0
    (plain, _), (lens, _) = perspectron.load(tmp_path / "plain"), perspectron.load(tmp_path / "lens")
    ids = torch.randint(1, V - 1, (2, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(lens(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    lens(ids, targets=ids).loss.backward()
    gate = lens.blocks[0].route.raw_1.grad
    assert math.isfinite(gate) and gate != 0


def test_what_cannot_be_read_is_named(bpe, tmp_path):
    saved(tmp_path, "llama", bpe)
    whole = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"model_type": "mamba"}, "model_type is 'mamba', which cannot be read; perspectron, gpt2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu'"),
        ({"head_dim": 16}, "head_dim is 16, must be 8"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type is 'yarn'"),
        (
            {"intermediate_size": 64},
            r"layers.0.mlp.gate_proj.weight have shape \[48, 32\], must have \[64, 32\]",
        ),
        ({"num_hidden_layers": 1}, "model.layers.1.* have no place"),
        ({"num_hidden_layers": 3}, "no weights model.layers.2.input_layernorm.weight"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(CheckpointError, match=words):
            foreign.read(tmp_path)


def test_tokenizers_that_are_not_byte_level_are_refused(bpe, tmp_path):
    bpe.save(str(tmp_path / "whole.json"))
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert adopt(tmp_path / "whole.json").separator == bpe.token_to_id("<|endoftext|>")
    for change, words in (
        ({"normalizer": {"type": "NFC"}}, "normalizer is 'NFC'"),
        ({"model": whole["model"] | {"byte_fallback": True}}, "byte_fallback is True"),
        ({"model": {"type": "Unigram", "vocab": []}}, "it has no model.vocab"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer is"),
        ({"added_tokens": []}, "no token between documents"),
    ):
        (tmp_path / "changed.json").write_text(json.dumps(whole | change))
        with pytest.raises(DataError, match=words):
            adopt(tmp_path / "changed.json")


def test_a_run_that_was_imported_knows_no_text(bpe, tmp_path, monkeypatch, capsys):
    """And does not take what lies about for one."""
    saved(tmp_path / "hf", "llama", bpe)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("the fox " * 50)
    assert main(["import", "hf", "--out", "run"]) == 0
    for line in ("eval run", "quantize run --out q", "train --init run --steps 2 --out tuned"):
        assert main(line.split()) == 2, line
        said = capsys.readouterr().err
        assert "--data" in said or "the run's text is not available" in said
    assert main(["eval", "run", "--data", "letter.txt", "--tokens", "64"]) == 0
