"""Causal attention over a chunk and a cache, with windows, packed documents and padding.

A cache is a ring of S slots: the token at position p of its document stands in slot p mod S, so which slot
holds what follows from the number of tokens read, and nothing else is stored. Full attention is a ring that
is never let run full.

Shapes: B batch, T chunk, S cache slots, H query heads, G key heads, K head width, V value width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.native import training
from perspectron.ops.dispatch import forward_mode, gradients_off, owned, recorder, under_tracing
from perspectron.ops.fused import batch_invariant, fits, recorded
from perspectron.ops.sequences import packed

BLOCK = 128
"""Positions in a block, whose queries all read equally many keys: sums over another number have other last bits."""
SPAN = 512
"""Keys that the native kernel takes at once."""
LEAST_WINDOW = BLOCK // 2
"""Least window whose keys are aligned to blocks; for a smaller one, that would add too many keys."""
Drop = Callable[[Tensor], Tensor] | None
"""A function of the attention weights, such as dropout; None takes the fused kernels."""


class Places(NamedTuple):
    """The positions of the tokens of a chunk."""

    position_BT: Tensor  # in their document
    segment_BT: Tensor  # documents begun in this chunk up to here; 0 continues the one in the cache
    valid_BT: Tensor  # not padding
    length_B: Tensor  # tokens of the last document, after the chunk
    resets: bool = False  # documents may begin
    padded: bool = False  # there may be padding


def places(length_B: Tensor, T: int, reset_BT: Tensor | None, pad_BT: Tensor | None) -> Places:
    """Positions after `length_B` tokens, counted anew from each reset; padding does not count."""
    ones_BT = torch.ones(length_B.shape[0], T, dtype=torch.bool, device=length_B.device)
    valid_BT = ones_BT if pad_BT is None else ~pad_BT
    if reset_BT is None and pad_BT is None:
        position_BT = length_B[:, None]
        if T > 1:
            position_BT = position_BT + torch.arange(T, device=length_B.device)
        return Places(position_BT, torch.zeros_like(position_BT), valid_BT, length_B + T)
    resets, reset_BT = reset_BT is not None, ~ones_BT if reset_BT is None else reset_BT
    before_BT = valid_BT.long().cumsum(1) - valid_BT.long()
    start_BT = torch.where(reset_BT, before_BT, -length_B[:, None]).cummax(1).values
    position_BT = before_BT - start_BT
    length_B = position_BT[:, -1] + valid_BT[:, -1].long()
    return Places(position_BT, reset_BT.long().cumsum(1), valid_BT, length_B, resets, pad_BT is not None)


def without_tail(at: Places, q_BHTK: Tensor) -> Places | None:
    """Places without the padding at the end of a single row, for chunks that the native kernel takes; None otherwise,
    and where one token is left, which is read by steps."""
    alone = at.padded and q_BHTK.dtype is torch.float32 and _alone(q_BHTK) and native.wanted()
    T = tail_of(~at.valid_BT) if alone else None
    if T is None or T < 2:
        return None
    return at._replace(padded=False, **{name: getattr(at, name)[:, :T] for name in at._fields[:3]})


def tail_of(pad_BT: Tensor) -> int | None:
    """Number of tokens before the padding at the end of one row; None for several rows, or padding elsewhere."""
    T = pad_BT.shape[1] - int(pad_BT.sum())
    return None if len(pad_BT) != 1 or bool(pad_BT[0, :T].any()) else T


def follows(reset_BT: Tensor | None, pad_BT: Tensor | None, like_BT: Tensor) -> Tensor:
    """Mask [B,T−1], shaped and placed as `like`, of neighbouring tokens that are in one document."""
    pairs_BT = torch.ones_like(like_BT, dtype=torch.bool)
    if reset_BT is not None:
        pairs_BT &= ~reset_BT[:, 1:]
    if pad_BT is not None:
        pairs_BT &= ~(pad_BT[:, 1:] | pad_BT[:, :-1])
    return pairs_BT


def slots(length_B: Tensor, S: int) -> Tensor:
    """The position [B,S] that each slot of a ring holds after `length_B` tokens; negative where it is empty."""
    last_B1 = length_B[:, None] - 1
    return last_B1 - (last_B1 - torch.arange(S, device=length_B.device)) % max(S, 1)


def write(
    ring_BGSK: Tensor,
    chunk_BGTK: Tensor,
    before_B: Tensor,
    at: Places,
    *,
    consume_state: bool = False,
    wraps: bool = True,
) -> Tensor:
    """The ring after a chunk: each slot takes the last token of the last document that falls on it.

    A new tensor; with `consume_state` a token, or a chunk without resets and padding, is written into the ring handed
    in. wraps: a position may be beyond the number of slots.
    """
    B, G, T, K = chunk_BGTK.shape
    S = ring_BGSK.shape[2]
    chunk_BGTK = chunk_BGTK.to(ring_BGSK.dtype)
    if gradients_off() and (T == 1 or not (at.resets or at.padded or T > S)):
        # Padding after a full cache stands past its slots.
        slot_BT = at.position_BT % S if wraps or at.padded else at.position_BT
        slot_BGTK = slot_BT.view(B, 1, T, 1).expand(B, G, T, K)
        if at.padded:
            keep_B111 = ~at.valid_BT.view(B, 1, 1, 1)
            chunk_BGTK = torch.where(keep_B111, ring_BGSK.gather(2, slot_BGTK), chunk_BGTK)
        return owned(ring_BGSK, consume_state).scatter_(2, slot_BGTK, chunk_BGTK)
    continued_B = at.segment_BT[:, -1] == 0
    first_B = torch.where(continued_B, before_B, 0)
    last_BT = at.valid_BT & (at.segment_BT == at.segment_BT[:, -1:])
    rank_BT = torch.where(last_BT, at.position_BT - first_B[:, None], T)
    time_BT = torch.arange(T, device=rank_BT.device).expand(B, T)
    token_of_rank = time_BT.new_zeros(B, T + 1).scatter_(1, rank_BT, time_BT)
    rank_BS = slots(at.length_B, S) - first_B[:, None]
    token_BS = token_of_rank.gather(1, rank_BS.clamp(0, T))
    fresh_BGSK = chunk_BGTK.gather(2, token_BS[:, None, :, None].expand(B, G, S, K))
    return torch.where((rank_BS >= 0)[:, None, :, None], fresh_BGSK, ring_BGSK)


def visible(at: Places, key_position_BS: Tensor, key_segment_BS: Tensor, window: int | None) -> Tensor:
    """The keys [B,T,S] that each query may see: same document, not ahead, inside the window; negative positions
    are empty."""
    distance_BTS = at.position_BT[:, :, None] - key_position_BS[:, None, :]
    mask_BTS = (at.segment_BT[:, :, None] == key_segment_BS[:, None, :]) & (key_position_BS >= 0)[:, None, :]
    mask_BTS &= distance_BTS >= 0
    return mask_BTS if window is None else mask_BTS & (distance_BTS < window)


@packed("BHTV")
def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    mask_BTS: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    drop: Drop = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Attend to keys, softmax(scale · q kᵀ) v [B,H,T,V], on PyTorch's fused kernel, or on ours where it is causal and
    trains on a CPU; H / G query heads share a key head. causal: of as many queries as keys. `scale` is K^-½ when not
    given. cap: scores s become cap · tanh(s / cap), without a fused kernel. drop: gets the weights where gradients are
    on.

    cu_seqlens: several sequences in one row (`perspectron.ops.sequences`), with `causal` and no mask.

    Values may be narrower than keys: PyTorch's kernel wants them padded, so one query goes without it (padding would
    copy the cache for every token). So does one query on a CPU in float32 and float64, which must see a key: the kernel
    cuts the keys of one query among the threads, whose number would change its bits.

        >>> from perspectron.ops import attention
        >>> q, k, v = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 2, 5, 8)
        >>> tuple(attention.attend(q, k, v, causal=True).shape)
        (1, 4, 5, 8)
    """
    mask = None if mask_BTS is None else mask_BTS[:, None]
    k, v = k_BGSK.to(q_BHTK.dtype), v_BGSV.to(q_BHTK.dtype)
    (B, H, T, K), V = q_BHTK.shape, v.shape[-1]
    if causal and k.shape[2] != T:
        raise ValueError(f"causal = True of {T} queries and {k.shape[2]} keys, must be as many")
    scale = K**-0.5 if scale is None else scale
    if causal and mask is not None:
        mask, causal = mask & mask.new_ones(T, T).tril(), False
    drop = None if gradients_off() else drop
    if drop is not None or (T > 1 and (cap is not None or forward_mode())):
        return _explicit(q_BHTK * scale, k, v, mask, causal, cap, drop)
    if V > K and T > 1:  # no fused kernel takes wider values
        q_BHTK, k, K = F.pad(q_BHTK, (0, V - K)), F.pad(k, (0, V - K)), V
    plain = q_BHTK.device.type == "cpu" and q_BHTK.dtype in (torch.float32, torch.float64)
    if T == 1 and (V != K or plain or cap is not None):
        if B * k.shape[1] == 1:  # a product of several rows with one matrix is cut among the threads too
            k, v = k.expand(B, H, -1, -1), v.expand(B, H, -1, -1)
        shared = (q_BHTK * scale).view(B, k.shape[1], H // k.shape[1], K)  # heads of one key head
        scores = capped(shared @ k.mT, cap)
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).view(B, H, 1, V)
    if causal and cap is None and k.shape[2] == T and _ours(q_BHTK, k, v, scale):
        return _attended(q_BHTK, k, v, torch.zeros(B, T, dtype=torch.int32, device=k.device), scale)
    if k.shape[1] != H and mask is not None and _takes_no_groups(q_BHTK):
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    grouped = k.shape[1] != H
    v = F.pad(v, (0, K - V)) if V != K else v
    o = F.scaled_dot_product_attention(q_BHTK, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return o[..., :V]


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores s as cap · tanh(s / cap), with the same bits in a batch of any size."""
    return scores if cap is None else batch_invariant(torch.tanh, scores / cap, least=0) * cap


def _explicit(
    q_BHTK: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, cap: float | None, drop: Drop
) -> Tensor:
    """`attend` of scaled queries, with all scores in memory; heads of one key head are rows of one product."""
    (B, H, T, _), G = q_BHTK.shape, k.shape[1]
    scores = capped((q_BHTK.reshape(B, G, -1, q_BHTK.shape[3]) @ k.mT).view(B, H, T, -1), cap)
    if causal:
        scores = scores.masked_fill(scores.new_ones(T, k.shape[2], dtype=torch.bool).triu(1), float("-inf"))
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    weights = weights if drop is None else drop(weights)
    return (weights.view(B, G, -1, k.shape[2]) @ v).view(B, H, T, -1)


def _takes_no_groups(q_BHTK: Tensor) -> bool:
    """True on a GPU for a chunk of tokens: PyTorch's fused kernel for arbitrary masks takes no grouped heads there, and
    what it would use instead writes all scores in float32."""
    return q_BHTK.is_cuda and q_BHTK.shape[2] > 1


def _ours(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """True if the native kernel takes a chunk: when training, and without gradients in float32."""
    if not scale > 0:
        return False
    if gradients_off():
        plain = all(x.dtype is torch.float32 and x.device.type == "cpu" for x in (q, k, v))
        return plain and q.numel() > 0 and not under_tracing(q, k, v) and native.wanted()
    return fits(q, k, v, dtypes=(torch.float32, torch.bfloat16))


def _attended(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, first_BT: Tensor, scale: float) -> Tensor:
    """`attend` by the native kernel: token t sees the keys from first[t] to S − T + t. With gradients S is T."""
    q_BTHK = q_BHTK.transpose(1, 2).contiguous()
    if gradients_off():
        k, v = k_BGSK.contiguous(), v_BGSV.contiguous()
        return training.attention_after(q_BTHK, k, v, first_BT, scale).transpose(1, 2)
    k_BTGK, v_BTGV = (x.transpose(1, 2).contiguous() for x in (k_BGSK, v_BGSV))
    o_BTHV: Tensor = _Attended.apply(q_BTHK, k_BTGK, v_BTGV, first_BT, scale)
    return o_BTHV.transpose(1, 2)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor, scale: float) -> Tensor:
        o, lse = training.attention(q, k, v, first, scale)
        ctx.save_for_backward(q, k, v, first, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, first, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *recorded(lambda q, k, v: _plain(q, k, v, first, ctx.scale), (q, k, v), do), None, None
        return *training.attention_backward(q, k, v, first, ctx.scale, o, lse, do.contiguous()), None, None


def _plain(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, first_BT: Tensor, scale: float) -> Tensor:
    """The computation of `_Attended` by PyTorch, to be differentiated again."""
    (_, T, H, _), G = q_BTHK.shape, k_BTGK.shape[2]
    k, v = (x.repeat_interleave(H // G, 2) for x in (k_BTGK, v_BTGV))
    time_T = torch.arange(T, device=first_BT.device)
    hidden_BTS = (time_T > time_T[:, None]) | (time_T < first_BT[:, :, None])
    scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k).float() * scale
    weights = scores.masked_fill(hidden_BTS[:, None], float("-inf")).softmax(-1).to(v.dtype)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def _first(at: Places, window: int | None, before: int = 0) -> Tensor:
    """Index [B,T] of the first key that each token of a chunk sees, among `before` keys from before the chunk and those
    of the chunk."""
    time_T = torch.arange(before, before + at.position_BT.shape[1], device=at.position_BT.device)
    back_BT = torch.minimum(at.position_BT, time_T)
    back_BT = back_BT if window is None else back_BT.clamp_max(window - 1)
    return torch.where(at.valid_BT, time_T - back_BT, time_T).to(torch.int32).contiguous()


def stepped(
    q_BH1K: Tensor,
    ring: tuple[Tensor, Tensor],
    at: Places,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """One token attends to a ring that already holds it. On a CPU each row does so alone, over the slots that it has
    filled: the lengths of other rows change no bit of it. An export, in which there are no values, uses a mask."""
    if (tape := recorder()) is not None:
        attended: Tensor = tape.attended(q_BH1K, ring, at, scale, cap)
        return attended
    S = ring[0].shape[2]  # padding before any token sees slot 0: no empty softmax
    if q_BH1K.device.type != "cpu" or torch.compiler.is_exporting():
        mask_B1S = slots(at.length_B.clamp_min(1), S)[:, None] >= 0
        return attend(q_BH1K, *ring, mask_B1S, scale=scale, cap=cap)
    k, v = ring
    rows = [
        attend(q_BH1K[b : b + 1], k[b : b + 1, :, :filled], v[b : b + 1, :, :filled], scale=scale, cap=cap)
        for b, filled in enumerate(max(1, min(S, length)) for length in at.length_B.tolist())
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def cached(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    ring: tuple[Sequence[Tensor], Sequence[Tensor]],
    before_B: Tensor,
    at: Places,
    *,
    fresh: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    drop: Drop = None,
) -> Tensor:
    """A chunk attends to a cache [B,G,S,K] of everything before it, given in parts along S, and to itself. fresh: there
    was nothing before."""
    scale = q_BHTK.shape[3] ** -0.5 if scale is None else scale
    takes = (gradients_off() or (fresh and drop is None and not at.padded)) and cap is None
    if takes and _ours(q_BHTK, k_BGTK, v_BGTV, scale):
        return _after(q_BHTK, k_BGTK, v_BGTV, ring, before_B * (not fresh), at, None, scale)
    if _alone(q_BHTK):
        mask_BTS, (k, v) = _aligned((k_BGTK, v_BGTV), ring, before_B, at)
        return attend(q_BHTK, k, v, mask_BTS, scale=scale, cap=cap, drop=drop)
    old_BS = slots(before_B, sum(part.shape[2] for part in ring[0]))
    own_BT = torch.where(at.valid_BT, at.position_BT, -1)
    position_BS = torch.cat([old_BS, own_BT], 1)
    segment_BS = torch.cat([torch.zeros_like(old_BS), at.segment_BT], 1)
    mask_BTS = visible(at, position_BS, segment_BS, None)
    mask_BTS.diagonal(old_BS.shape[1], 1, 2).fill_(True)  # padding sees itself: no empty softmax
    k, v = (
        torch.cat([*(part.to(new.dtype) for part in old), new], 2)
        for old, new in zip(ring, (k_BGTK, v_BGTV), strict=True)
    )
    return attend(q_BHTK, k, v, mask_BTS, scale=scale, cap=cap, drop=drop)


def _after(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    ring: tuple[Sequence[Tensor], Sequence[Tensor]],
    before_B: Tensor,
    at: Places,
    window: int | None,
    scale: float,
) -> Tensor:
    """`cached`, or `windowed`, by the native kernel: rows of equal length without padding together, others one by one,
    so that the keys of each are at the same places as when it is alone."""
    counts = before_B.tolist()
    if not at.padded and len(set(counts)) == 1:
        kept = min(counts[0], sum(part.shape[2] for part in ring[0]))
        # The kernel cuts keys into spans: where a window has several, they begin at the same positions in any chunk.
        many = window is not None and window + BLOCK > SPAN
        front = (counts[0] - kept) % SPAN if many else 0
        k, v = (
            torch.cat(
                [
                    *([new.new_zeros(*new.shape[:2], front, new.shape[3])] if front else []),
                    *(part.to(new.dtype) for part in _oldest_first(old, counts[0])),
                    new,
                ],
                2,
            )
            for old, new in zip(ring, (k_BGTK, v_BGTV), strict=True)
        )
        return _attended(q_BHTK, k, v, _first(at, window, k.shape[2] - k_BGTK.shape[2]), scale)
    o = q_BHTK.new_zeros(*q_BHTK.shape[:3], v_BGTV.shape[3])
    for b in range(len(counts)):
        own = at.valid_BT[b].nonzero()[:, 0]
        if len(own) > 0:
            row = slice(b, b + 1)
            tokens = at._replace(
                padded=False, **{name: getattr(at, name)[row, own] for name in at._fields[:3]}
            )
            q, k, v = (x[row, :, own] for x in (q_BHTK, k_BGTK, v_BGTV))
            old = [part[row] for part in ring[0]], [part[row] for part in ring[1]]
            o[row, :, own] = _after(q, k, v, old, before_B[row], tokens, window, scale)
    return o


def _oldest_first(parts_BGSK: Sequence[Tensor], count: int) -> list[Tensor]:
    """Tokens in a ring, given in parts along S, oldest first, after `count` tokens; several parts hold all of them."""
    found, left = list[Tensor](), count
    for part in parts_BGSK:
        S = part.shape[2]
        found.append(part[:, :, :left] if left <= S or len(parts_BGSK) > 1 else part.roll(-(left % S), 2))
        left -= min(left, S)
    return found


def _aligned(
    chunk: tuple[Tensor, Tensor],
    ring: tuple[Sequence[Tensor], Sequence[Tensor]],
    before_B: Tensor,
    at: Places,
) -> tuple[Tensor, list[Tensor]]:
    """One row's mask, and its keys and values from cache and chunk, padded to a multiple of BLOCK: sums over equally
    many keys have the same bits wherever within a block a text was cut."""
    S = sum(part.shape[2] for part in ring[0])
    T = int(at.valid_BT.sum()) if at.padded else at.valid_BT.shape[1]
    own_T = at.valid_BT[0].nonzero()[:, 0] if at.padded else slice(None)
    spare = -(S + T) % BLOCK if S + T else 1  # padding alone sees an empty slot
    old_BS = slots(before_B, S)
    position_BS = F.pad(torch.cat([old_BS, at.position_BT[:, own_T]], 1), (0, spare), value=-1)
    segment_BS = F.pad(torch.cat([torch.zeros_like(old_BS), at.segment_BT[:, own_T]], 1), (0, spare))
    mask_BTS = visible(at, position_BS, segment_BS, None)
    if at.padded:
        mask_BTS[..., 0] |= ~at.valid_BT  # padding sees a key: no empty softmax
    filled = []
    for parts, new in zip(ring, chunk, strict=True):
        own, empty = new[:, :, own_T], new.new_zeros(*new.shape[:2], spare, new.shape[3])
        filled.append(torch.cat([*(part.to(new.dtype) for part in parts), own, empty], 2))
    return mask_BTS, filled


def _aligned_window(
    chunk: tuple[Tensor, Tensor], ring: tuple[Tensor, Tensor], before_B: Tensor, at: Places
) -> tuple[Tensor, list[Tensor]]:
    """`_aligned` for attention to the last W tokens: the keys that a block of BLOCK positions may see, by position."""
    W, before = ring[0].shape[2], int(before_B[0])
    own_T = at.valid_BT[0].nonzero()[:, 0] if at.padded else torch.arange(at.valid_BT.shape[1])
    stop = before + len(own_T)
    start = max(0, (before // BLOCK * BLOCK - W + 1) // BLOCK * BLOCK)
    old_S = torch.arange(start, before) % W  # positions too old for any query read whatever is in their slot
    spare = -stop % BLOCK if stop else 1
    distance_BTS = at.position_BT[:, :, None] - torch.arange(start, stop + spare)
    mask_BTS = (distance_BTS >= 0) & (distance_BTS < W)
    if at.padded:
        mask_BTS[..., 0] |= ~at.valid_BT
    filled = []
    for old, new in zip(ring, chunk, strict=True):
        own, empty = new[:, :, own_T], new.new_zeros(*new.shape[:2], spare, new.shape[3])
        filled.append(torch.cat([old[:, :, old_S].to(new.dtype), own, empty], 2))
    return mask_BTS, filled


def _alone(q_BHTK: Tensor) -> bool:
    """True for a single row that is read on a CPU, without gradients or tracing."""
    return len(q_BHTK) == 1 and q_BHTK.device.type == "cpu" and gradients_off() and not under_tracing(q_BHTK)


def _columns(x_BHTK: Tensor, order_BT: Tensor) -> Tensor:
    return x_BHTK.gather(2, order_BT[:, None, :, None].expand_as(x_BHTK))


def windowed(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    ring: tuple[Tensor, Tensor],
    before_B: Tensor,
    at: Places,
    *,
    fresh: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    drop: Drop = None,
) -> Tensor:
    """Each token of a chunk attends to the last W tokens, itself counted; `ring` [B,G,W,K] holds those before the
    chunk. fresh: there are none.

    Where the native kernel does not take it, the chunk is cut into blocks of c = min(W, T) queries, each of which sees
    the c keys of its own block and the W keys before it: work and memory are linear in T.
    """
    W, T, B = ring[0].shape[2], q_BHTK.shape[2], q_BHTK.shape[0]
    scale = q_BHTK.shape[3] ** -0.5 if scale is None else scale
    takes = (gradients_off() or (fresh and drop is None)) and cap is None
    native_kernel = takes and _ours(q_BHTK, k_BGTK, v_BGTK, scale)
    if not native_kernel and LEAST_WINDOW <= W and T <= BLOCK and not at.resets and _alone(q_BHTK):
        mask_BTS, (k, v) = _aligned_window((k_BGTK, v_BGTK), ring, before_B, at)
        return attend(q_BHTK, k, v, mask_BTS, scale=scale, cap=cap, drop=drop)
    if at.padded:  # tokens first, padding behind them: then W tokens back is W columns back
        order_BT = (~at.valid_BT).long().argsort(dim=1, stable=True)
        ordered = {name: getattr(at, name).gather(1, order_BT) for name in at._fields[:3]}
        tokens = at._replace(padded=False, **ordered)
        q, k, v = (_columns(x, order_BT) for x in (q_BHTK, k_BGTK, v_BGTK))
        o = windowed(q, k, v, ring, before_B, tokens, fresh=fresh, scale=scale, cap=cap, drop=drop)
        return _columns(o, order_BT.argsort(1))
    if native_kernel:
        return _after(q_BHTK, k_BGTK, v_BGTK, ([ring[0]], [ring[1]]), before_B * (not fresh), at, W, scale)
    c = min(W, T)
    n = -(-T // c)
    tail = n * c - T
    own_BT = torch.where(at.valid_BT, at.position_BT, -1)
    position_BS = F.pad(torch.cat([slots(before_B, W), own_BT], 1), (0, tail), value=-1)
    segment_BS = F.pad(at.segment_BT, (W, tail))
    queries = Places(
        F.pad(at.position_BT, (0, tail)).unflatten(1, (n, c)).flatten(0, 1),
        F.pad(at.segment_BT, (0, tail)).unflatten(1, (n, c)).flatten(0, 1),
        at.valid_BT,
        at.length_B,
    )
    position_NS, segment_NS = (x_BS.unfold(1, W + c, c).flatten(0, 1) for x_BS in (position_BS, segment_BS))
    mask_NTS = visible(queries, position_NS, segment_NS, W)
    mask_NTS.diagonal(W, 1, 2).fill_(True)  # padding sees itself: no empty softmax

    def blocks(old_BGWK: Tensor, new_BGTK: Tensor) -> Tensor:
        whole = F.pad(torch.cat([old_BGWK.to(new_BGTK.dtype), new_BGTK], 2), (0, 0, 0, tail))
        if n == 1:
            return whole
        cut = whole.unflatten(2, (n + 1, c)).transpose(1, 2)  # where there are several, c is W
        return torch.cat([cut[:, :-1], cut[:, 1:]], 3).flatten(0, 1)

    q_NHcK = F.pad(q_BHTK, (0, 0, 0, tail)).unflatten(2, (n, c)).transpose(1, 2).flatten(0, 1)
    keys, values = blocks(ring[0], k_BGTK), blocks(ring[1], v_BGTK)
    o_NHcK = attend(q_NHcK, keys, values, mask_NTS, scale=scale, cap=cap, drop=drop)
    return o_NHcK.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)[:, :, :T]
