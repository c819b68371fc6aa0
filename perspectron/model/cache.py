"""The growing cache of full attention, shared by every mixer that attends to all earlier tokens.

Caches share memory until they are written. A fork sees the slots that are filled and has no free ones, so that only the
cache that it was made from goes on writing there, behind what the fork sees. A cache that goes on from a fork keeps
these slots as a piece, which is never changed again, and gets slots of its own for its tokens.

Shapes: B batch, T time, N tokens of a piece, H heads of keys and values, S cache slots, K query and key width, V value
width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.model.ring import Ring
from perspectron.model.ring import attend as attend_ring
from perspectron.model.seen import mapped
from perspectron.model.state import LMState, Ragged, cat, register
from perspectron.native.tape import piece_of
from perspectron.ops import attention
from perspectron.ops.dispatch import forward_mode, gradients_off, recorder, under_tracing
from perspectron.util.errors import StateError

LEAST_SLOTS = 64
"""Least number of slots by which a cache grows."""
LEAST_OWN = 32
"""Least number of slots of a cache that follow pieces."""
LEAST_PIECE = 64
"""Least number of tokens in a piece; fewer are copied."""
LEAST_CUT, LEAST_JOINED = 512, 2048
"""Least number of tokens of a text for a part of it to become a piece, and for it to keep pieces in a batch: with
fewer, reading from several places costs more than a copy saves."""


@register
@dataclass(frozen=True)
class Piece:
    """Keys [1,H,N,K] and values [1,H,N,V] of consecutive tokens of one row; never written again."""

    k_1HNK: Tensor
    v_1HNV: Tensor

    @property
    def tokens(self) -> int:
        return self.k_1HNK.shape[2]

    @cached_property
    def place(self) -> bytes:
        """Its addresses and strides in memory, packed for a recorded step."""
        return piece_of(self.k_1HNK, self.v_1HNV if self.v_1HNV.shape[3] else self.k_1HNK)

    @cached_property
    def storages(self) -> tuple[tuple[int, int], ...]:
        """Id and bytes of each storage that it is a view of."""
        return tuple(storage_of(x) for x in (self.k_1HNK, self.v_1HNV))


def storage_of(x: Tensor) -> tuple[int, int]:
    """Id and bytes of the storage that a tensor is a view of."""
    storage = x.untyped_storage()
    return int(storage._cdata), storage.nbytes()


@register
@dataclass(frozen=True)
class Cache(Ragged):
    """Keys [B,H,S,K] and values [B,H,S,V], S at least the tokens read; length: tokens of the document so far
    [B]; used: no row fills more slots than this. Steps count it up without asking the device; a document that
    starts, padding in a chunk and `select` bring it down to the longest row.

    shared: empty, or for each row the pieces with its first tokens; the slots then hold the tokens after them.

    Where V is 0, the values are the first numbers of the keys."""

    k_BHSK: Tensor
    v_BHSV: Tensor
    length_B: Tensor
    used: int
    shared: tuple[tuple[Piece, ...], ...] = ()
    grown = ("k_BHSK", "v_BHSV")
    window = None

    def keys(self) -> Tensor:
        """Keys [B,H,S,K] of all tokens, at their positions."""
        return self.whole().ring()[0]

    @property
    def slots(self) -> int:
        """Number of slots, used and free; tokens in pieces need none."""
        return self.k_BHSK.shape[2]

    @property
    def before(self) -> list[int]:
        """Tokens of each row that are in pieces; empty if no row has pieces."""
        return [sum(piece.tokens for piece in row) for row in self.shared]

    @property
    def blank(self) -> bool:
        """True before the first token."""
        return self.used == 0 and not any(self.shared)

    def with_slots(self, S: int) -> "Cache":
        """The cache with S slots, at least as many as are used; the others are empty."""
        k, v = (_with_slots(ring, S) for ring in self.ring())
        return replace(self, k_BHSK=k, v_BHSV=v)

    def with_room(self, T: int) -> "Cache":
        """The cache with slots in memory of its own, free for T more tokens. Memory that other caches see stays as it
        is."""
        used = self.used + T
        if not (self._may_close(LEAST_CUT) and is_lent(self.k_BHSK)):
            if not self.shared:
                return self.with_slots(room_for(used))
            return self.with_slots(room_for(used, LEAST_OWN if used <= LEAST_OWN else LEAST_SLOTS))
        closed = self.closed()
        total = closed.before[0]
        T += used - T - (total - sum(self.before))  # slots that `used` counts for padding
        room = -(-T // LEAST_OWN) * LEAST_OWN
        if self.shared and _lender(self.k_BHSK) == id(self.k_BHSK):
            # Not a fork but the cache itself, growing: few large pieces, with at most an eighth of all slots free.
            room = max(room, min(2 * self.slots, room_for(total + T) - total))
        return closed.with_slots(room)

    def closed(self) -> "Cache":
        """The cache of one row with all its tokens in pieces, without slots."""
        own = int(self.length_B[0]) - sum(self.before)
        pieces = self.shared[0] if self.shared else ()
        if own > 0:
            pieces = (*pieces, Piece(*(_lent(x, own) for x in (self.k_BHSK, self.v_BHSV))))
        k, v = (x.new_empty(1, x.shape[1], 0, x.shape[3]) for x in (self.k_BHSK, self.v_BHSV))
        return Cache(k, v, self.length_B, 0, (pieces,))

    def whole(self, free: int = 0) -> "Cache":
        """A copy without pieces, with at least so many free slots; the cache itself if it has no pieces."""
        if not self.shared:
            return self
        used = max(0, *self.length_B.tolist())
        return Cache(*self._copied(0, used, room_for(used + free) if free else used), self.length_B, used)

    def _copied(self, start: int, stop: int, slots: int) -> tuple[Tensor, Tensor]:
        """Keys [B,H,slots,K] and values from `start` to before `stop`, where rows have pieces; then zeros."""
        k, v = (x.new_zeros(x.shape[0], x.shape[1], slots, x.shape[3]) for x in (self.k_BHSK, self.v_BHSV))
        for b, (row, length) in enumerate(zip(self.shared, self.length_B.tolist(), strict=True)):
            both = _parts(row, self.k_BHSK[b : b + 1], self.v_BHSV[b : b + 1])
            for into, parts in zip((k, v), both, strict=True):
                at = 0
                for part in parts:
                    first, last = max(start, at), min(stop, length, at + part.shape[2])
                    if first < last:
                        into[b : b + 1, :, first - start : last - start] = part[:, :, first - at : last - at]
                    at += part.shape[2]
        return k, v

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys [B,H,stop − start,K] and values of these tokens, which must be filled; views if one piece has them."""
        if len(self.shared) > 1:
            return self._copied(start, stop, stop - start)
        found = list[Tensor]()
        for parts in _parts(self.shared[0] if self.shared else (), self.k_BHSK, self.v_BHSV):
            at, some = 0, list[Tensor]()
            for part in parts:
                first, last = max(start, at), min(stop, at + part.shape[2])
                if first < last:
                    some.append(part[:, :, first - at : last - at])
                at += part.shape[2]
            some = some or [parts[-1][:, :, :0]]
            found.append(some[0] if len(some) == 1 else torch.cat(some, 2))
        return found[0], found[1]

    def ring(self) -> tuple[Tensor, Tensor]:
        """The slots that may be filled."""
        return self.k_BHSK[:, :, : self.used], self.v_BHSV[:, :, : self.used]

    def parts(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Keys and values of all tokens that may be there, each as a list of tensors cut along the tokens."""
        if len(self.shared) > 1:
            return self.whole().parts()
        k, v = self.ring()
        return _parts(self.shared[0], k, v) if self.shared else ([k], [v])

    def spanned(self) -> int:
        return max(self.length_B.tolist()) if self.shared else self.used

    def emptied(self) -> "Cache":
        k, v = (x[:, :, :0] for x in (self.k_BHSK, self.v_BHSV))
        return Cache(k, v, self.length_B, self.spanned())

    def filled(self) -> "Cache":
        if self.shared:
            return self.whole()
        k, v = self.ring()
        return replace(self, k_BHSK=k, v_BHSV=v)

    def fork(self, into: "Cache | None" = None) -> "Cache":
        """An independent cache. It shares the used slots and has no others; if it holds little or gradients may be
        wanted, it is a copy, in the memory of `into` if that fits."""
        if self._may_lend() and (self.shared or self.used >= LEAST_PIECE):
            k, v = (_lent(x, self.used) for x in (self.k_BHSK, self.v_BHSV))
            return replace(self, k_BHSK=k, v_BHSV=v, length_B=self.length_B.clone())
        if self.shared or into is None or not _fits(self, into):
            return replace(self.with_slots(self.slots), length_B=self.length_B.clone())
        for old, ring in zip((into.k_BHSK, into.v_BHSV), self.ring(), strict=True):
            old[:, :, : self.used].copy_(ring)
            old[:, :, self.used :].zero_()
        return replace(
            self, k_BHSK=into.k_BHSK, v_BHSV=into.v_BHSV, length_B=into.length_B.copy_(self.length_B)
        )

    def to(self, device: torch.device) -> "Cache":
        if self.k_BHSK.device == device:
            return self
        k, v, length_B = (x.to(device) for x in (self.k_BHSK, self.v_BHSV, self.length_B))
        moved = tuple(
            tuple(Piece(piece.k_1HNK.to(device), piece.v_1HNV.to(device)) for piece in row)
            for row in self.shared
        )
        return Cache(k, v, length_B, self.used, moved)

    def _may_lend(self) -> bool:
        parts = (self.k_BHSK, self.v_BHSV)
        plain = all(x.device.type == "cpu" and not x.requires_grad for x in parts)
        return plain and not forward_mode() and not under_tracing(*parts)

    def _may_close(self, least: int) -> bool:
        """True if the used slots may become a piece: of one row, with enough of them and `least` tokens in all."""
        if len(self.length_B) != 1 or self.used < LEAST_PIECE or sum(self.before) + self.used < least:
            return False
        return self._may_lend()

    def room(self) -> None:
        K, V, longest = self.k_BHSK.shape[2], self.v_BHSV.shape[2], int(self.length_B.max())
        if not (longest - max(self.before, default=0) <= self.used <= K == V):
            raise StateError(
                f"a cache with {K} keys and {V} values, {self.used} of them used, after {longest} tokens; "
                "must have as many keys as values, and no fewer than are used"
            )

    def select(self, rows_N: Tensor) -> "Cache":
        """These rows, in as many slots as the longest of them fills."""
        rows_N = rows_N.to(self.length_B.device)
        length_B = self.length_B[rows_N]
        shared = tuple(self.shared[row] for row in rows_N.tolist()) if self.shared else ()
        if not any(shared):
            shared = ()
        used = self.used if length_B.is_meta else max(_own(length_B, shared), default=0)
        k, v = (ring[:, :, :used].index_select(0, rows_N) for ring in (self.k_BHSK, self.v_BHSV))
        return Cache(k, v, length_B, used, shared)

    @classmethod
    def stack(cls, parts: Sequence["Cache"]) -> "Cache":
        """The rows of all caches, with as many slots as the largest. Memory of caches with one long row is shared."""
        if len(parts) > 1:
            parts = [part._joined() for part in parts]
        S = max(part.k_BHSK.shape[2] for part in parts)
        k = cat([_with_slots(part.k_BHSK, S) for part in parts])
        v = cat([_with_slots(part.v_BHSV, S) for part in parts])
        shared = tuple(row for part in parts for row in part.shared or ((),) * len(part.length_B))
        shared = shared if any(shared) else ()
        length_B = cat([part.length_B for part in parts])
        return Cache(k, v, length_B, max(part.used for part in parts), shared)

    def _joined(self) -> "Cache":
        """The cache as it joins a batch: a long row in pieces, at most its last tokens in slots; a short one whole."""
        if self._may_close(LEAST_JOINED) and int(self.length_B[0]) - sum(self.before) >= LEAST_PIECE:
            return self.closed()
        short = len(self.length_B) == 1 and sum(self.before) + self.used < LEAST_JOINED
        return self.whole() if short else self


def room_for(tokens: int, least: int = LEAST_SLOTS) -> int:
    """Slots of a cache for so many tokens: at most an eighth or `least` more, so that growing copies little."""
    step = max(least, (1 << tokens.bit_length()) // 16)
    return -(-tokens // step) * step


def is_lent(x: Tensor) -> bool:
    """True if others may see the memory that a tensor is a view of: its filled part must not change."""
    return _lender(x) is not None


def _lender(x: Tensor) -> int | None:
    """The id of the tensor that first lent this memory; None if none did."""
    lender: int | None = getattr(x.untyped_storage(), "lender", None)
    return lender


def _lent(x_BHSK: Tensor, used: int) -> Tensor:
    """A view of the first slots that others may keep. Writing behind them does not change it, for autograd either."""
    if not is_lent(x_BHSK):
        x_BHSK.untyped_storage().lender = id(x_BHSK)  # type: ignore[attr-defined]
    return x_BHSK.data[:, :, :used]


def _own(length_B: Tensor, shared: tuple[tuple[Piece, ...], ...]) -> list[int]:
    """Tokens of each row that are in no piece."""
    lengths = length_B.tolist()
    if not shared:
        return lengths
    return [n - sum(piece.tokens for piece in row) for n, row in zip(lengths, shared, strict=True)]


def _parts(row: Sequence[Piece], k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Lists of keys and of values: those of the pieces, then k and v."""
    return [*(piece.k_1HNK for piece in row), k], [*(piece.v_1HNV for piece in row), v]


def _with_slots(ring_BHSK: Tensor, S: int) -> Tensor:
    """The ring with S slots; those at its end are empty."""
    if torch.is_grad_enabled() and ring_BHSK.requires_grad:
        return F.pad(ring_BHSK, (0, 0, 0, S - ring_BHSK.shape[2]))
    B, H, used, K = ring_BHSK.shape
    grown = ring_BHSK.new_empty(B, H, S, K)
    grown[:, :, :used] = ring_BHSK
    grown[:, :, used:] = 0  # as all slots may be read, and what is not finite would show
    return grown


def _fits(cache: Cache, into: Cache) -> bool:
    """True if the tensors of `into` can hold the cache, and nobody else sees them."""
    pairs = ((cache.k_BHSK, into.k_BHSK), (cache.v_BHSV, into.v_BHSV), (cache.length_B, into.length_B))
    alike = all((x.dtype, x.device, len(x)) == (y.dtype, y.device, len(y)) for x, y in pairs)
    wide = all(x.shape[1::2] == y.shape[1::2] for x, y in pairs[:2])
    free = not into.shared and alike and wide and into.slots >= cache.used and into.k_BHSK.is_contiguous()
    return free and not is_lent(into.k_BHSK)


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


def is_cache(part: object) -> bool:
    return isinstance(part, Cache)


def with_caches(state: LMState, change: Callable[[Cache], Any]) -> LMState:
    """The state with `change` applied to each cache."""
    return state._map(lambda part: change(part) if isinstance(part, Cache) else part, is_leaf=is_cache)


def ringed(state: LMState, window: int) -> LMState:
    """An empty state in which each cache is a ring of the last `window` tokens: the model attends to those alone, and
    its state stops growing."""

    def ring_of(part: Cache) -> Ring:
        k, v = (x.new_zeros(*x.shape[:2], window, x.shape[3]) for x in (part.k_BHSK, part.v_BHSV))
        return Ring(k, v, part.length_B)

    return with_caches(state, ring_of)


Keys = TypeVar("Keys", Cache, Ring)


@mapped
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Keys,
    at: attention.Places,
    *,
    scale: float | None = None,
    cap: float | None = None,
    consume_state: bool = False,
    drop: attention.Drop = None,
) -> tuple[Tensor, Keys]:
    """softmax(scale · q kᵀ) v over the cache and the chunk (outputs [B,H,T,V], the cache after it); k and v may have
    fewer heads than q. With a cache of keys alone, the values are their first numbers. A ring in place of a cache
    (`ringed`) holds the last tokens, and only those are attended to.

    `at`: `attention.places` of the chunk after `cache.length_B`. cap: of scores, as `attention.attend`. The cache
    grows when it is full. consume_state: tokens are written into the cache handed in.
    """
    if isinstance(cache, Ring):
        over = partial(attend_ring, window=cache.k_BGWK.shape[2], scale=scale, cap=cap, drop=drop)
        if cache.v_BGWK.shape[3]:
            return over(q, k, v, cache, at, consume_state=consume_state)
        o, after = over(q, k, k, replace(cache, v_BGWK=cache.k_BGWK), at)
        return o[..., : v.shape[3]], replace(after, v_BGWK=cache.v_BGWK)
    if cache.shared and (at.resets or (q.shape[2] == 1 and recorder() is None)):
        # One token attends to one piece of memory, with the bits of before; a document that starts needs the slots.
        cache, consume_state = cache.whole(1), True
    if cap is None and drop is None and (tokens := attention.without_tail(at, q)) is not None:
        T, spare = tokens.position_BT.shape[1], q.shape[2] - tokens.position_BT.shape[1]
        q, k, v = (x[:, :, :T] for x in (q, k, v))
        o, cache = attend(q, k, v, cache, tokens, scale=scale, consume_state=consume_state)
        return F.pad(o, (0, 0, 0, spare)), cache
    nothing = cache.blank
    fresh = nothing and not at.resets and not at.padded
    # One token with padding is not worth asking the device for; a chunk is.
    counted = at.resets or (at.padded and q.shape[2] > 1)
    after = _remember(k, v, cache, at, fresh, counted, consume_state)
    if fresh:
        return attention.attend(q, k, v, causal=True, scale=scale, cap=cap, drop=drop), after
    if q.shape[2] == 1 and (drop is None or gradients_off()):
        keys, values = after.ring()
        return attention.stepped(q, (keys, _of(keys, values, v)), at, scale=scale, cap=cap), after
    keys_parts, value_parts = cache.parts()
    before = keys_parts, [_of(keys, values, v) for keys, values in zip(keys_parts, value_parts, strict=True)]
    before_B = cache.length_B
    o = attention.cached(q, k, v, before, before_B, at, fresh=nothing, scale=scale, cap=cap, drop=drop)
    return o, after


def _of(k: Tensor, v: Tensor, like: Tensor) -> Tensor:
    """The values of a cache, as wide as `like`: its own, or the first numbers of its keys."""
    return v if v.shape[3] else k[..., : like.shape[3]]


def _remember(
    k: Tensor, v: Tensor, cache: Cache, at: attention.Places, fresh: bool, counted: bool, consume_state: bool
) -> Cache:
    S, T, v = cache.slots, k.shape[2], v[..., : cache.v_BHSV.shape[3]]
    length_B, inner = _inner(cache, at)
    used = max(1, int(inner.length_B.max())) if counted else cache.used + T
    if fresh and used >= S:
        k, v = (_alone(new.to(cache.k_BHSK.dtype)) for new in (k, v))
        return Cache(k, v, at.length_B, used)
    grows = used > S
    if grows:
        # One token, as above, wants no pieces.
        cache = cache.with_slots(room_for(used)) if T == 1 else cache.with_room(max(1, used - cache.used))
        length_B, inner = _inner(cache, at)
        used = max(1, int(inner.length_B.max())) if counted else cache.used + T
    # A program for one size of the cache, as ONNX has it, goes on in its first slots when it is full; a recording is
    # for all sizes.
    wraps = used >= S and recorder() is None
    # A document that starts is written from the first slot on.
    consume_state = grows or (consume_state and not (at.resets and is_lent(cache.k_BHSK)))
    k, v = (
        attention.write(old, new, length_B, inner, consume_state=consume_state, wraps=wraps)
        for old, new in zip((cache.k_BHSK, cache.v_BHSV), (k, v), strict=True)
    )
    return Cache(k, v, at.length_B, used, cache.shared)


def _inner(cache: Cache, at: attention.Places) -> tuple[Tensor, attention.Places]:
    """Tokens in the slots [B] of a cache, and the places of a chunk counted from the first token in the slots."""
    if (tape := recorder()) is not None:  # a token, which is written at its place
        before_B = tape.before(cache.k_BHSK)
        return cache.length_B, at._replace(
            position_BT=at.position_BT - before_B[:, None]
        ) if before_B is not None else at
    if not cache.shared:
        return cache.length_B, at
    before_B = torch.tensor(cache.before, device=cache.length_B.device)
    position_BT, length_B = at.position_BT - before_B[:, None], at.length_B - before_B
    return cache.length_B - before_B, at._replace(position_BT=position_BT, length_B=length_B)


def _alone(x: Tensor) -> Tensor:
    """x made contiguous and no view of something larger (such as of q, k and v in one)."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)  # which has no storage
    alone = not wrapped and x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
    return x if alone else x.clone(memory_format=torch.contiguous_format)
