"""Small models of transformers with random weights, of each kind that can be imported."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

V, TEXT = 300, "The quick brown fox's 1,234 jumps, isn't it?\n\n    indented   = 5; " + "naïve 汉字 " * 3
SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 299, "eos_token_id": 299}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=SMALL["num_hidden_layers"], n_head=4,
                   bos_token_id=299, eos_token_id=299)
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
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SMALL, **HEADS, mamba_n_heads=8, mamba_d_ssm=64, mamba_d_state=8, mamba_chunk_size=8)
    ),
}  # fmt: skip


def tokenizer() -> ByteLevelBPETokenizer:
    """As GPT-2's, its separator last."""
    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator([TEXT * 20], vocab_size=299, min_frequency=2, show_progress=False)
    inner.add_special_tokens(["<|endoftext|>"])
    return inner


def saved(folder: Path, kind: str, bpe: ByteLevelBPETokenizer, sd: float | None = None) -> Any:
    """A model of a kind with its tokenizer in a folder, as transformers writes it. sd: of its matrices; None keeps the
    size of what they read."""
    torch.manual_seed(5)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, sd or weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    return model
