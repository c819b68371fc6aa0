"""The growing cache of full attention, shared by every mixer that attends to all earlier tokens.

Shapes: B batch, T time, H heads, S cache slots, K query and key width, V value width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import attention
from perspectron.state import register


@register
@dataclass(frozen=True)
class Cache:
    """Keys [B,H,S,K] and values [B,H,S,V], S at least the tokens read; length: tokens of the document so far
    [B]; used: no row has filled more slots than this."""

    k_BHSK: Tensor
    v_BHSV: Tensor
    length_B: Tensor
    used: int

    def ring(self) -> tuple[Tensor, Tensor]:
        return self.k_BHSK[:, :, : self.used], self.v_BHSV[:, :, : self.used]


def empty(
    batch_size: int,
    heads: int,
    k_width: int,
    v_width: int,
    device: torch.device,
    dtype: torch.dtype,
    capacity: int,
) -> Cache:
    """The empty cache, with room for `capacity` tokens; on the meta device it counts as full but for one, so
    that the cost of a step can be measured there."""
    k, v = (
        torch.zeros(batch_size, heads, capacity, width, device=device, dtype=dtype)
        for width in (k_width, v_width)
    )
    length = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return Cache(k, v, length, max(0, capacity - 1) if device.type == "meta" else 0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    at: attention.Places,
    *,
    reset_BT: Tensor | None,
    pad_BT: Tensor | None,
    scale: float | None = None,
) -> tuple[Tensor, Cache]:
    """softmax(scale · q kᵀ) v over the cache and the chunk (outputs [B,H,T,V], the cache after it).

    `at`: `attention.places(cache.length_B, T, reset_BT, pad_BT)`. The cache doubles when it is full.
    """
    fresh = cache.used == 0 and reset_BT is None and pad_BT is None
    after = _remember(k, v, cache, at, fresh, reset_BT is not None)
    if fresh:
        return attention.attend(q, k, v, causal=True, scale=scale), after
    if q.shape[2] == 1:
        return attention.stepped(q, after.ring(), at, scale=scale), after
    return attention.cached(q, k, v, cache.ring(), cache.length_B, at, scale=scale), after


def _remember(k: Tensor, v: Tensor, cache: Cache, at: attention.Places, fresh: bool, reset: bool) -> Cache:
    S = cache.k_BHSK.shape[2]
    used = max(1, int(at.length_B.max())) if reset else cache.used + k.shape[2]
    if fresh and used >= S:
        k, v = (_own(new.to(cache.k_BHSK.dtype)) for new in (k, v))
        return Cache(k, v, at.length_B, used)
    ring = (cache.k_BHSK, cache.v_BHSV)
    if used > S:
        grow = (0, 0, 0, max(used, 2 * S) - S)
        ring = (F.pad(ring[0], grow), F.pad(ring[1], grow))
    k, v = (attention.write(old, new, cache.length_B, at) for old, new in zip(ring, (k, v), strict=True))
    return Cache(k, v, at.length_B, used)


def _own(x: Tensor) -> Tensor:
    """Contiguous, and no view of something larger (of q, k and v in one)."""
    return (
        x.contiguous()
        if x.numel() * x.element_size() == x.untyped_storage().nbytes()
        else x.clone(memory_format=torch.contiguous_format)
    )
