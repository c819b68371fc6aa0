"""Heads, which give the logits: rows of the embedding, a matrix, or what a design registers.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.util import registry
from perspectron.util.config import HeadConfig


class TokenEmbedding(nn.Embedding):
    """An embedding table, which as a tied head also gives the logits."""

    def reset_parameters(self) -> None:
        """Draw the rows; not on the meta device, where torch would load its compiler for it and draw none."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]: the products with every row."""
        return F.linear(hidden, self.weight)


def tied(embedding: nn.Module, hidden: Tensor, V: int) -> Tensor:
    """Logits [..., V] of hidden states [..., D] by the rows of an embedding, also of one inside an adapter."""
    # Ask the class: a wrapper may pass on the method of what it wraps, which has other rows.
    own = getattr(type(embedding), "logits", None)
    if own is not None:
        return cast(Tensor, own(embedding, hidden))
    return F.linear(hidden, embedding(torch.arange(V, device=hidden.device)))


@dataclass(frozen=True)
class LinearHeadConfig(HeadConfig):
    """A separate output matrix."""

    kind = "linear"


class LinearHead(nn.Linear):
    """W x."""

    def __init__(self, d_model: int, vocab_size: int, config: LinearHeadConfig) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the head as the embedding is drawn, so that all tokens are about as likely."""
        self.weight.normal_(0, 0.02, generator=generator)


def build(d_model: int, vocab_size: int, config: HeadConfig) -> nn.Module:
    """The head of a config, which has weights of its own."""
    if isinstance(config, LinearHeadConfig):
        return LinearHead(d_model, vocab_size, config)
    made: nn.Module = registry.part("heads", config.kind)(d_model, vocab_size, config)
    return made
