"""A small model of a design in transformers, and what it goes on with."""

from typing import Any, NamedTuple

import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM, fast_tokenizer
from perspectron.model.config import ModelConfig

N = 8
PROMPTS = ["the quick brown", "fox", "the lazy dog jumps over"]


class Subject(NamedTuple):
    """A model in inference, its tokenizer in transformers, and the greedy continuation of the first prompt."""

    model: Any
    tokenizer: Any
    own: Tokenizer
    greedy: list[int]

    def generate(self, prompts: Any = PROMPTS[0], **options: Any) -> Any:
        """Ids after the prompt, N of them, by rows; or what `generate` returns as a dict."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=not isinstance(prompts, str))
        options = {"do_sample": False, "max_new_tokens": N, "eos_token_id": None} | options
        out = self.model.generate(**inputs, **options)
        return out[:, inputs.input_ids.shape[1] :].tolist() if isinstance(out, torch.Tensor) else out


def subject(config: ModelConfig, tokenizer: Tokenizer) -> Subject:
    """Random weights, with logits that prefer some tokens to others, so that no tie is decided by a last bit."""
    torch.manual_seed(3)
    model = PerspectronForCausalLM(PerspectronConfig.of(config)).eval()
    with torch.no_grad():
        model.model.embedding.weight.mul_(8)
    made = Subject(model, fast_tokenizer(tokenizer), tokenizer, [])
    return made._replace(greedy=made.generate()[0])


def small(design: str) -> ModelConfig:
    """The design in two layers, 32 wide."""
    sizes = {"vocab_size": 300, "d_model": 32, "layers": 2, "hidden": 32, "rank": 4, "window": 8, "positions": 64,
             "heads": 2, "kv_heads": 1}  # fmt: skip
    return presets.get(
        design, **{key: size for key, size in sizes.items() if presets.sizes(design).get(key) is not None}
    )
