"""The growing cache of full attention, shared by every mixer that attends to all earlier tokens.

Shapes: B batch, T time, H heads of keys and values, S cache slots, K query and key width, V value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.model.state import Ragged, cat, register
from perspectron.ops import attention
from perspectron.ops.dispatch import recorder
from perspectron.util.errors import StateError

LEAST_SLOTS = 64
"""A cache grows by as many slots, at least."""


@register
@dataclass(frozen=True)
class Cache(Ragged):
    """Keys [B,H,S,K] and values [B,H,S,V], S at least the tokens read; length: tokens of the document so far
    [B]; used: no row fills more slots than this. Steps count it up without asking the device; a document that
    starts, padding in a chunk and `select` bring it down to the longest row."""

    k_BHSK: Tensor
    v_BHSV: Tensor
    length_B: Tensor
    used: int
    grown = ("k_BHSK", "v_BHSV")

    @property
    def slots(self) -> int:
        """Tokens that there is room for."""
        return self.k_BHSK.shape[2]

    def with_slots(self, S: int) -> "Cache":
        """The cache with room for S tokens, at least as many as are used; the other slots are empty."""
        k, v = (_with_slots(ring, S) for ring in self.ring())
        return replace(self, k_BHSK=k, v_BHSV=v)

    def ring(self) -> tuple[Tensor, Tensor]:
        """The slots that may be filled."""
        return self.k_BHSK[:, :, : self.used], self.v_BHSV[:, :, : self.used]

    def spanned(self) -> int:
        return self.used

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys [B,H,stop − start,K] and values of these slots, all of them used."""
        return self.k_BHSK[:, :, start:stop], self.v_BHSV[:, :, start:stop]

    def filled(self) -> "Cache":
        k, v = self.ring()
        return replace(self, k_BHSK=k, v_BHSV=v)

    def fork(self, into: "Cache | None" = None) -> "Cache":
        """A copy with as many slots, of which the used ones are read; or in the memory of `into`, with as many as that
        has, where it fits."""
        if into is None or not _fits(self, into):
            return replace(self.with_slots(self.slots), length_B=self.length_B.clone())
        for old, ring in zip((into.k_BHSK, into.v_BHSV), self.ring(), strict=True):
            old[:, :, : self.used].copy_(ring)
            old[:, :, self.used :].zero_()
        return replace(
            self, k_BHSK=into.k_BHSK, v_BHSV=into.v_BHSV, length_B=into.length_B.copy_(self.length_B)
        )

    def room(self) -> None:
        K, V, longest = self.k_BHSK.shape[2], self.v_BHSV.shape[2], int(self.length_B.max())
        if not (longest <= self.used <= K == V):
            raise StateError(
                f"a cache with {K} keys and {V} values, {self.used} of them used, after {longest} tokens; "
                "must have as many keys as values, and no fewer than are used"
            )

    def select(self, rows_N: Tensor) -> "Cache":
        """These rows, in as many slots as the longest of them fills."""
        rows_N = rows_N.to(self.length_B.device)
        length_B = self.length_B[rows_N]
        used = self.used if length_B.is_meta else max(length_B.tolist(), default=0)
        k, v = (ring[:, :, :used].index_select(0, rows_N) for ring in (self.k_BHSK, self.v_BHSV))
        return Cache(k, v, length_B, used)

    @classmethod
    def stack(cls, parts: Sequence["Cache"]) -> "Cache":
        """The rows of all, with the capacity of the largest."""
        S = max(part.k_BHSK.shape[2] for part in parts)
        k = cat([_with_slots(part.k_BHSK, S) for part in parts])
        v = cat([_with_slots(part.v_BHSV, S) for part in parts])
        return Cache(k, v, cat([part.length_B for part in parts]), max(part.used for part in parts))


def room_for(tokens: int) -> int:
    """Slots of a cache that is to hold so many tokens: an eighth more at most, so that growing copies little."""
    step = max(LEAST_SLOTS, (1 << tokens.bit_length()) // 16)
    return -(-tokens // step) * step


def _with_slots(ring_BHSK: Tensor, S: int) -> Tensor:
    """The ring with S slots; those at its end are empty."""
    if torch.is_grad_enabled() and ring_BHSK.requires_grad:
        return F.pad(ring_BHSK, (0, 0, 0, S - ring_BHSK.shape[2]))
    B, H, used, K = ring_BHSK.shape
    grown = ring_BHSK.new_empty(B, H, S, K)
    grown[:, :, :used] = ring_BHSK
    grown[:, :, used:] = 0  # where all slots are read, what is not finite would be seen
    return grown


def _fits(cache: Cache, into: Cache) -> bool:
    """True if the tensors of `into` can hold the cache."""
    pairs = ((cache.k_BHSK, into.k_BHSK), (cache.v_BHSV, into.v_BHSV), (cache.length_B, into.length_B))
    alike = all((x.dtype, x.device, len(x)) == (y.dtype, y.device, len(y)) for x, y in pairs)
    wide = all(x.shape[1::2] == y.shape[1::2] for x, y in pairs[:2])
    return alike and wide and into.slots >= cache.used and into.k_BHSK.is_contiguous()


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
    scale: float | None = None,
    cap: float | None = None,
    consume_state: bool = False,
    drop: attention.Drop = None,
) -> tuple[Tensor, Cache]:
    """softmax(scale · q kᵀ) v over the cache and the chunk (outputs [B,H,T,V], the cache after it); k and v may have
    fewer heads than q.

    `at`: `attention.places` of the chunk after `cache.length_B`. cap: of scores, as `attention.attend`. The cache
    grows when it is full. consume_state: tokens are written into the cache handed in.
    """
    nothing = cache.used == 0
    fresh = nothing and not at.resets and not at.padded
    # One token with padding is not worth asking the device for; a chunk is.
    counted = at.resets or (at.padded and q.shape[2] > 1)
    after = _remember(k, v, cache, at, fresh, counted, consume_state)
    if fresh:
        return attention.attend(q, k, v, causal=True, scale=scale, cap=cap, drop=drop), after
    if q.shape[2] == 1:
        return attention.stepped(q, after.ring(), at, scale=scale, cap=cap), after
    before, before_B = cache.ring(), cache.length_B
    o = attention.cached(q, k, v, before, before_B, at, fresh=nothing, scale=scale, cap=cap, drop=drop)
    return o, after


def _remember(
    k: Tensor, v: Tensor, cache: Cache, at: attention.Places, fresh: bool, counted: bool, consume_state: bool
) -> Cache:
    S = cache.k_BHSK.shape[2]
    used = max(1, int(at.length_B.max())) if counted else cache.used + k.shape[2]
    if fresh and used >= S:
        k, v = (_own(new.to(cache.k_BHSK.dtype)) for new in (k, v))
        return Cache(k, v, at.length_B, used)
    grows = used > S
    ring = cache.with_slots(room_for(used)) if grows else cache
    # A program for one size of the cache, as ONNX has it, goes on in its first slots when it is full; a recording is
    # for all sizes.
    wraps = used >= S and recorder() is None
    k, v = (
        attention.write(old, new, cache.length_B, at, consume_state=consume_state or grows, wraps=wraps)
        for old, new in zip((ring.k_BHSK, ring.v_BHSV), (k, v), strict=True)
    )
    return Cache(k, v, at.length_B, used)


def _own(x: Tensor) -> Tensor:
    """Contiguous, and no view of something larger (of q, k and v in one)."""
    own = x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
    return x if own else x.clone(memory_format=torch.contiguous_format)
