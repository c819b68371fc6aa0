"""Windowed grouped-query attention with a ring cache (docs/designs/perspective.md#windowed-attention).

Shapes: B batch, T time, D model width, H query heads, G key heads, K head width, W window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, split_inputs
from perspectron.model.state import Ragged, cat, register
from perspectron.ops import attention
from perspectron.util.config import MixerConfig, at_least, divides, require
from perspectron.util.errors import StateError
from perspectron.util.terms import Term


@dataclass(frozen=True)
class WindowGQAConfig(MixerConfig):
    """The options of windowed attention.

    heads: H query heads, which divide the model width into even head widths. kv_heads: G, divides H.
    window: W tokens a query sees, itself counted. rope_base: of the rotary frequencies."""

    kind = "window_gqa"
    heads: int
    kv_heads: int
    window: int
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "window")
        require(self.kv_heads >= 1 and self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads,
                f"a divisor of heads = {self.heads}")  # fmt: skip
        require(self.rope_base > 1, "rope_base", self.rope_base, "> 1")


@register
@dataclass(frozen=True)
class WindowGQAState(Ragged):
    """Rings of the last W keys and values [B,G,W,K] (W is 0 before the first token); length: tokens of the
    document read so far [B], int64."""

    k_BGWK: Tensor
    v_BGWK: Tensor
    length_B: Tensor

    def room(self) -> None:
        if self.k_BGWK.shape[2] != self.v_BGWK.shape[2] or (
            self.k_BGWK.shape[2] == 0 and self.length_B.any()
        ):
            raise StateError(
                f"a ring of {self.k_BGWK.shape[2]} keys and {self.v_BGWK.shape[2]} values after "
                f"{int(self.length_B.max())} tokens, must have the window's"
            )

    @classmethod
    def stack(cls, parts: Sequence["WindowGQAState"]) -> "WindowGQAState":
        """The rows of all; a state before its first token gets the room that the others have."""
        W = max(part.k_BGWK.shape[2] for part in parts)
        k, v = (
            cat([nn.functional.pad(ring, (0, 0, 0, 0 if ring.shape[2] else W)) for ring in rings])
            for rings in ([part.k_BGWK for part in parts], [part.v_BGWK for part in parts])
        )
        return WindowGQAState(k, v, cat([part.length_B for part in parts]))


class WindowGQA(Mixer):
    """softmax(q kᵀ / √K) v over the last W tokens."""

    small = WindowGQAConfig(heads=4, kv_heads=2, window=8)
    about = "attention to the last W tokens, query heads in groups, rotary positions"
    source = "docs/designs/perspective.md#windowed-attention"
    drops = True

    mix_exponents = (0.2, 0.7)  # of queries; of keys and values

    def __init__(self, d_model: int, norm_eps: float, config: WindowGQAConfig) -> None:
        super().__init__()
        divides(config.heads, d_model, even=True)
        self.config = config
        self.width = d_model // config.heads
        self.value_channels = config.kv_heads * self.width
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.kv_proj = nn.Linear(d_model, 2 * config.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> WindowGQAState:
        """The empty state; a `capacity` above 0 makes room for the window at once."""
        shape = (batch_size, self.config.kv_heads, self.config.window if capacity else 0, self.width)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        return WindowGQAState(k, v, torch.zeros(batch_size, dtype=torch.int64, device=device))

    @masked
    def forward(
        self,
        x_BTD: Inputs,
        state: WindowGQAState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
    ) -> tuple[Tensor, WindowGQAState, dict[str, Term]]:
        x_q, x_kv = split_inputs(x_BTD, len(self.mix_exponents))
        B, T, D = x_q.shape
        config, fresh = self.config, state.k_BGWK.shape[2] == 0
        k_BTC, v_BTC = self.kv_proj(x_kv).chunk(2, -1)
        if value_residual is not None:
            v_BTC = value_residual(v_BTC, x_kv)
        inputs = (self.q_proj(x_q), k_BTC, v_BTC)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in inputs)
        at = attention.places(state.length_B, T, reset_BT, pad_BT)
        turn = attention.angles(at.position_BT, self.width, config.rope_base)
        q, k = (attention.rope(x, turn) for x in (q, k))
        ring = (state.k_BGWK, state.v_BGWK)
        if fresh:
            room = (0, 0, 0, config.window)
            ring = (nn.functional.pad(ring[0], room), nn.functional.pad(ring[1], room))
        written = (
            attention.write(ring[0], k, state.length_B, at, consume_state=consume_state),
            attention.write(ring[1], v, state.length_B, at, consume_state=consume_state),
        )
        if fresh and not at.resets and not at.padded and config.window >= T:
            o = attention.attend(q, k, v, causal=True, drop=self.dropout if self.training else None)
        elif T == 1:
            o = attention.stepped(q, written, at)
        else:
            drop = self.dropout if self.training else None
            o = attention.windowed(q, k, v, ring, state.length_B, at, fresh=fresh, drop=drop)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, D)), WindowGQAState(*written, at.length_B), {}
