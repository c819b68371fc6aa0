"""Full causal attention, the transformer's own mixer: with rotary positions and no biases, or as in GPT-2
(docs/designs/baselines.md#attention).

Shapes: B batch, T time, D model width, H heads, K head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.model import cache
from perspectron.model.cache import Cache
from perspectron.model.masks import Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction
from perspectron.ops import attention
from perspectron.util.config import MixerConfig, divides, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """The options of full attention.

    heads: H, must divide the model width (into even head widths where there are rotary positions).
    rope_base: of the rotary frequencies; None is no rotation. bias: of the projections. rope_share: share of a head's
    channels that are turned, its first ones."""

    kind = "attention"
    heads: int
    rope_base: float | None = 10000.0
    bias: bool = False
    rope_share: float = 1.0

    def __post_init__(self) -> None:
        require(self.heads >= 1, "heads", self.heads, "≥ 1")
        require(self.rope_base is None or self.rope_base > 1, "rope_base", self.rope_base, "> 1")
        require(0 < self.rope_share <= 1, "rope_share", self.rope_share, "in (0, 1]")


class Attention(Mixer):
    """softmax(q kᵀ / √K) v over all earlier tokens."""

    small = AttentionConfig(heads=2)
    about = "full attention, with rotary positions or as in GPT-2"
    source = "docs/designs/baselines.md#attention"
    drops = True

    def __init__(self, d_model: int, norm_eps: float, config: AttentionConfig) -> None:
        super().__init__()
        divides(config.heads, d_model, even=config.rope_base is not None)
        self.config = config
        self.value_channels = d_model
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=config.bias)
        self.o_proj = nn.Linear(d_model, d_model, bias=config.bias)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> Cache:
        """The empty cache, with room for `capacity` tokens."""
        H = self.config.heads
        width = self.o_proj.in_features // H
        return cache.empty(batch_size, H, width, width, device, dtype, capacity)

    @masked
    def forward(
        self,
        x_BTD: Tensor,
        state: Cache,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
    ) -> tuple[Tensor, Cache, dict[str, Term]]:
        B, T, D = x_BTD.shape
        parts = self.qkv_proj(x_BTD).view(B, T, 3, D).unbind(2)
        if value_residual is not None:
            parts = (*parts[:2], value_residual(parts[2], x_BTD))
        q, k, v = (part.view(B, T, self.config.heads, -1).transpose(1, 2) for part in parts)
        at = attention.places(state.length_B, T, reset_BT, pad_BT)
        if self.config.rope_base is not None:
            width = 2 * int(q.shape[3] * self.config.rope_share / 2)
            turn = attention.angles(at.position_BT, width, self.config.rope_base)
            q, k = (self._turned(x, width, turn) for x in (q, k))
        o, state = cache.attend(
            q, k, v, state, at, consume_state=consume_state, drop=self.dropout if self.training else None
        )
        return self.o_proj(o.transpose(1, 2).reshape(B, T, D)), state, {}

    def _turned(self, x_BHTK: Tensor, width: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        """The first `width` channels of each head turned by their position."""
        if width == x_BHTK.shape[3]:
            return attention.rope(x_BHTK, turn)
        first, rest = x_BHTK.split([width, x_BHTK.shape[3] - width], -1)
        return torch.cat([attention.rope(first, turn), rest], -1)
