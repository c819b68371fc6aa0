"""What turns the last hidden state into logits, where it is not the embedding itself.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.config import HeadConfig, require
from perspectron.ops import drm
from perspectron.terms import Term


@dataclass(frozen=True)
class LinearHeadConfig(HeadConfig):
    """A matrix of its own."""

    kind = "linear"


@dataclass(frozen=True)
class EmitterConfig(HeadConfig):
    """hidden: width between the two layers. stability: part in the loss of how much logits change from token to
    token."""

    kind = "emitter"
    hidden: int
    stability: float = 0.0

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")
        require(self.stability >= 0, "stability", self.stability, "≥ 0")


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
        self.config = config
        self.up_proj = nn.Linear(d_model, config.hidden)
        self.out_proj = nn.Linear(config.hidden, vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out_proj(F.gelu(self.up_proj(x_BTD)))

    def terms(self, logits_BTV: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> dict[str, Term]:
        """What is asked of the logits themselves."""
        if self.config.stability == 0:
            return {}
        return {"stability": Term(drm.logit_change(logits_BTV, reset_BT, pad_BT), self.config.stability)}


HEADS = {"linear": LinearHead, "emitter": Emitter}
"""The kinds that have weights of their own."""
