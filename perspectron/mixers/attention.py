"""Full causal attention with rotary positions, the transformer's own mixer (decisions.md §7).

Shapes: B batch, T time, D model width, H heads, K head width, S cache slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.config import MixerConfig, require
from perspectron.ops import attention
from perspectron.state import register


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """heads: H, must divide the model width into even head widths. rope_base: of the rotary frequencies."""

    kind = "attention"
    heads: int
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        require(self.heads >= 1, "heads", self.heads, "≥ 1")
        require(self.rope_base > 1, "rope_base", self.rope_base, "> 1")


@register
@dataclass(frozen=True)
class AttentionState:
    """Keys and values [B,H,S,K], S at least the tokens read; length: tokens of the document so far [B];
    used: no row has filled more slots than this."""

    k_BHSK: Tensor
    v_BHSK: Tensor
    length_B: Tensor
    used: int

    def ring(self) -> tuple[Tensor, Tensor]:
        return self.k_BHSK[:, :, : self.used], self.v_BHSK[:, :, : self.used]


class Attention(nn.Module):
    """softmax(q kᵀ / √K) v over all earlier tokens; the cache doubles when it is full."""

    def __init__(self, d_model: int, norm_eps: float, config: AttentionConfig) -> None:
        super().__init__()
        require(
            d_model % (2 * config.heads) == 0,
            "heads",
            config.heads,
            f"a divisor of d_model / 2 = {d_model / 2:g}",
        )
        self.config = config
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> AttentionState:
        """The empty cache, with room for `capacity` tokens; on the meta device it counts as full but for one,
        so that the cost of a step can be measured there."""
        D, H = self.o_proj.in_features, self.config.heads
        k, v = (torch.zeros(batch_size, H, capacity, D // H, device=device, dtype=dtype) for _ in "kv")
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return AttentionState(k, v, length, max(0, capacity - 1) if device.type == "meta" else 0)

    def forward(
        self,
        x_BTD: Tensor,
        state: AttentionState,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState, dict[str, Tensor]]:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv_proj(x_BTD).view(B, T, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        at = attention.places(state.length_B, T, reset_BT, pad_BT)
        q, k = (attention.rope(x, at.position_BT, self.config.rope_base) for x in (q, k))
        fresh = state.used == 0 and reset_BT is None and pad_BT is None
        after = self._remember(k, v, state, at, fresh, reset_BT is not None)
        if fresh:
            o = attention.attend(q, k, v, causal=True)
        elif T == 1:
            o = attention.stepped(q, after.ring(), at)
        else:
            o = attention.cached(q, k, v, state.ring(), state.length_B, at)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, D)), after, {}

    def _remember(
        self, k: Tensor, v: Tensor, state: AttentionState, at: attention.Places, fresh: bool, reset: bool
    ) -> AttentionState:
        S = state.k_BHSK.shape[2]
        used = max(1, int(at.length_B.max())) if reset else state.used + k.shape[2]
        if fresh and used >= S:
            k, v = (new.to(state.k_BHSK.dtype).contiguous() for new in (k, v))  # v is a view of q, k and v
            return AttentionState(k, v, at.length_B, used)
        ring = (state.k_BHSK, state.v_BHSK)
        if used > S:
            grow = (0, 0, 0, max(used, 2 * S) - S)
            ring = (nn.functional.pad(ring[0], grow), nn.functional.pad(ring[1], grow))
        k, v = (attention.write(old, new, state.length_B, at) for old, new in zip(ring, (k, v), strict=True))
        return AttentionState(k, v, at.length_B, used)
