"""The ring of keys and values of attention to a window, shared by every mixer that attends to the last W tokens.

Shapes: B batch, T time, G key heads, K head width, W window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.model.seen import mapped
from perspectron.model.state import Ragged, cat, register
from perspectron.ops import attention
from perspectron.ops.dispatch import gradients_off
from perspectron.util.errors import StateError


@register
@dataclass(frozen=True)
class Ring(Ragged):
    """The last W keys and values [B,G,W,K] (W is 0 before the first token); length: tokens of the document read so far
    [B], int64."""

    k_BGWK: Tensor
    v_BGWK: Tensor
    length_B: Tensor

    @property
    def window(self) -> int:
        """W; 0 before the first token."""
        return self.k_BGWK.shape[2]

    def keys(self) -> Tensor:
        """Keys [B,G,W,K], each at its position modulo W."""
        return self.k_BGWK

    def room(self) -> None:
        keys, values = self.k_BGWK.shape[2], self.v_BGWK.shape[2]
        if keys != values or (keys == 0 and self.length_B.any()):
            raise StateError(
                f"a ring of {keys} keys and {values} values after {int(self.length_B.max())} tokens, must have the "
                "window's"
            )

    @classmethod
    def stack(cls, parts: Sequence["Ring"]) -> "Ring":
        """The rows of all; a state before its first token gets the room that the others have."""
        W = max(part.k_BGWK.shape[2] for part in parts)
        k, v = (
            cat([F.pad(ring, (0, 0, 0, 0 if ring.shape[2] else W)) for ring in rings])
            for rings in ([part.k_BGWK for part in parts], [part.v_BGWK for part in parts])
        )
        return Ring(k, v, cat([part.length_B for part in parts]))


def empty(
    batch_size: int,
    heads: int,
    width: int,
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    capacity: int,
) -> Ring:
    """The empty ring; a `capacity` above 0 makes room for the window at once."""
    shape = (batch_size, heads, window if capacity else 0, width)
    k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
    return Ring(k, v, torch.zeros(batch_size, dtype=torch.int64, device=device))


@mapped
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Ring,
    at: attention.Places,
    *,
    window: int,
    scale: float | None = None,
    cap: float | None = None,
    consume_state: bool = False,
    drop: attention.Drop = None,
) -> tuple[Tensor, Ring]:
    """Attention over the last `window` tokens, itself counted (outputs [B,H,T,V], the ring after the chunk); the rest
    as `cache.attend`."""
    if cap is None and drop is None and (tokens := attention.without_tail(at, q)) is not None:
        T, spare = tokens.position_BT.shape[1], q.shape[2] - tokens.position_BT.shape[1]
        q, k, v = (x[:, :, :T] for x in (q, k, v))
        o, state = attend(q, k, v, state, tokens, window=window, scale=scale, consume_state=consume_state)
        return F.pad(o, (0, 0, 0, spare)), state
    T, fresh = q.shape[2], state.k_BGWK.shape[2] == 0
    ring = (state.k_BGWK, state.v_BGWK)
    if fresh:
        ring = (F.pad(ring[0], (0, 0, 0, window)), F.pad(ring[1], (0, 0, 0, window)))
    consume_state = consume_state and T == 1  # a chunk attends to what it overwrites
    written = (
        attention.write(ring[0], k, state.length_B, at, consume_state=consume_state),
        attention.write(ring[1], v, state.length_B, at, consume_state=consume_state),
    )
    after = Ring(*written, at.length_B)
    if fresh and not at.resets and not at.padded and window >= T:
        return attention.attend(q, k, v, causal=True, scale=scale, cap=cap, drop=drop), after
    if T == 1 and (drop is None or gradients_off()):
        return attention.stepped(q, written, at, scale=scale, cap=cap), after
    before_B = state.length_B
    o = attention.windowed(q, k, v, ring, before_B, at, fresh=fresh, scale=scale, cap=cap, drop=drop)
    return o, after
