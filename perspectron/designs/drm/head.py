"""The emitter, DRM's head, whose hidden layer reads the state.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.drm import op as drm
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import HeadConfig, at_least
from perspectron.util.terms import Term


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


class Emitter(nn.Module):
    """W₂ GELU(W₁ x + b₁) + b₂ (docs/designs/drm.md#head)."""

    def __init__(self, d_model: int, vocab_size: int, config: EmitterConfig) -> None:
        super().__init__()
        self.config = config
        self.up_proj = nn.Linear(d_model, config.hidden)
        self.out_proj = nn.Linear(config.hidden, vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out_proj(batch_invariant(F.gelu, self.up_proj(x_BTD)))

    def terms(self, logits_BTV: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> dict[str, Term]:
        """The loss terms that depend on the logits themselves."""
        if self.config.stability == 0:
            return {}
        return {"stability": Term(drm.logit_change(logits_BTV, reset_BT, pad_BT), self.config.stability)}
