"""What turns the last hidden state into logits, where it is not the embedding itself.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.config import HeadConfig, require


@dataclass(frozen=True)
class LinearHeadConfig(HeadConfig):
    """A matrix of its own."""

    kind = "linear"


@dataclass(frozen=True)
class EmitterConfig(HeadConfig):
    """hidden: width between the two layers."""

    kind = "emitter"
    hidden: int

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")


class LinearHead(nn.Linear):
    """W x."""

    def __init__(self, d_model: int, vocab_size: int, config: LinearHeadConfig) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """As the embedding: all tokens about as likely."""
        self.weight.normal_(0, 0.02, generator=generator)


class Emitter(nn.Module):
    """W₂ GELU(W₁ x + b₁) + b₂ (seeds/drm.md, Language Emitter)."""

    def __init__(self, d_model: int, vocab_size: int, config: EmitterConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, config.hidden)
        self.out_proj = nn.Linear(config.hidden, vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out_proj(F.gelu(self.up_proj(x_BTD)))


HEADS = {"linear": LinearHead, "emitter": Emitter}
"""The kinds that have weights of their own."""
