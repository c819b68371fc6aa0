"""Heads, which give the logits: rows of the embedding, a matrix, or the emitter of DRM.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.drm import op as drm
from perspectron.model.config import HeadConfig, at_least
from perspectron.ops.fused import evenly
from perspectron.util.terms import Term


class TokenEmbedding(nn.Embedding):
    """Rows to look up and, as a tied head, to multiply with."""

    def reset_parameters(self) -> None:
        """Draw the rows; not on the meta device, where torch would load its compiler for it and draw none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of [..., D]: the product with every row."""
        return F.linear(hidden, self.weight)


def tied(embedding: nn.Module, hidden: Tensor, V: int) -> Tensor:
    """[..., V] of [..., D]: the product with every row of an embedding, also of one that an adapter wraps."""
    # The class is asked: a wrapper may hand on the method of what it wraps, whose rows are others.
    own = getattr(type(embedding), "logits", None)
    if own is not None:
        return cast(Tensor, own(embedding, hidden))
    return F.linear(hidden, embedding(torch.arange(V, device=hidden.device)))


@dataclass(frozen=True)
class LinearHeadConfig(HeadConfig):
    """A separate output matrix."""

    kind = "linear"


@dataclass(frozen=True)
class EmitterConfig(HeadConfig):
    """The options of an emitter.

    hidden: width between the two layers. stability: weight in the loss of the change of logits from token to
    token."""

    kind = "emitter"
    hidden: int
    stability: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, self, "hidden")
        at_least(0, self, "stability")


class LinearHead(nn.Linear):
    """W x."""

    def __init__(self, d_model: int, vocab_size: int, config: LinearHeadConfig) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the head as the embedding is drawn, so that all tokens are about as likely."""
        self.weight.normal_(0, 0.02, generator=generator)


class Emitter(nn.Module):
    """W₂ GELU(W₁ x + b₁) + b₂ (docs/designs/drm.md#head)."""

    def __init__(self, d_model: int, vocab_size: int, config: EmitterConfig) -> None:
        super().__init__()
        self.config = config
        self.up_proj = nn.Linear(d_model, config.hidden)
        self.out_proj = nn.Linear(config.hidden, vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out_proj(evenly(F.gelu, self.up_proj(x_BTD)))

    def terms(self, logits_BTV: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> dict[str, Term]:
        """Terms of the loss in the logits themselves."""
        if self.config.stability == 0:
            return {}
        return {"stability": Term(drm.logit_change(logits_BTV, reset_BT, pad_BT), self.config.stability)}


HEADS = {"linear": LinearHead, "emitter": Emitter}
"""Heads with weights of their own, by kind."""
