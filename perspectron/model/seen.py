"""Intermediate results that a model keeps on request: hidden states between blocks, and attention maps.

Shapes: B batch, T tokens of the chunk, P tokens before it, D model width, H query heads, G key heads, K key width.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import attention

A = TypeVar("A", bound=Callable[..., Any])
_maps: ContextVar[list[Tensor] | None] = ContextVar("maps", default=None)


@dataclass
class Seen:
    """Results kept during a pass; None unless asked for. states: the input of the first block, then the output of each
    [B,T,D]. maps: each block's attention map [B,H,T,P+T], or None where it has no attention."""

    states: list[Tensor] | None = None
    maps: list[Tensor | None] | None = None

    @contextmanager
    def block(self, x_BTD: Tensor) -> Iterator[None]:
        """Context of one block that reads x: keeps x and the block's map if they are asked for."""
        if self.states is not None:
            self.states.append(x_BTD)
        own: list[Tensor] = []
        token = _maps.set(None if self.maps is None else own)
        try:
            yield
        finally:
            _maps.reset(token)
        if self.maps is not None:
            self.maps.append(_joined(own) if own else None)

    def result(
        self, hidden_BTD: Tensor, skip: int = 0
    ) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor | None, ...] | None]:
        """Both as in `Output`, without the first `skip` tokens. hidden_BTD: the input of the head, without them too."""
        states = None if self.states is None else (*self.states[:-1], hidden_BTD)
        maps = None if self.maps is None else tuple(self.maps)
        if skip and states is not None:
            states = (*(x[:, skip:] for x in states[:-1]), hidden_BTD)
        if skip and maps is not None:
            maps = tuple(x if x is None else x[:, :, skip:] for x in maps)
        return states, maps


def _joined(maps: list[Tensor]) -> Tensor:
    """Maps of a block's mixers joined along the heads, padded on the left to the same number of tokens."""
    S = max(x.shape[3] for x in maps)
    return torch.cat([F.pad(x, (S - x.shape[3], 0)) for x in maps], 1)


def mapped(attend: A) -> A:
    """Decorator of a function (q, k, v, state, at, …) of attention to a state's keys: keeps its map if one is asked
    for. Calls within it keep none."""

    @functools.wraps(attend)
    def run(q: Tensor, k: Tensor, v: Tensor, state: Any, at: attention.Places, **options: Any) -> Any:
        maps = _maps.get()
        if maps is None:
            return attend(q, k, v, state, at, **options)
        scale, cap = options.get("scale"), options.get("cap")
        maps.append(attention_map(q, k, state, at, scale=scale, cap=cap, window=options.get("window")))
        token = _maps.set(None)
        try:
            return attend(q, k, v, state, at, **options)
        finally:
            _maps.reset(token)

    return run  # type: ignore[return-value]


def attention_map(
    q: Tensor,
    k: Tensor,
    state: Any,
    at: attention.Places,
    *,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The weights [B,H,T,P+T] with which queries [B,H,T,K] attend to the keys that a state holds and to those of the
    chunk [B,G,T,K]; 0 where a token is not seen, and all 0 for padding.

    The last T columns are the tokens of the chunk, those before it the last P of the state, the newest at the right; P
    is the longest row's, and less than the window.
    """
    past, window, before_B = state.keys(), state.window or window, state.length_B
    S = past.shape[2]
    P = min(S, int(before_B.max()), S if window is None else window - 1)
    position_BP = before_B[:, None] + torch.arange(-P, 0, device=q.device)
    slot_BP = position_BP.clamp_min(0) % max(S, 1)
    past = past.gather(2, slot_BP[:, None, :, None].expand(-1, past.shape[1], -1, past.shape[3]))
    keys = torch.cat([past.to(q.dtype), k.to(q.dtype)], 2).repeat_interleave(q.shape[1] // k.shape[1], 1)
    positions = torch.cat([position_BP, torch.where(at.valid_BT, at.position_BT, -1)], 1)
    segments = torch.cat([torch.zeros_like(position_BP), at.segment_BT], 1)
    seen = attention.visible(at, positions, segments, window)[:, None]
    scores = q @ keys.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = attention.capped(scores, cap).masked_fill(~seen, float("-inf"))
    padding = ~at.valid_BT[:, None, :, None]  # it sees nothing, or what a token would
    return scores.masked_fill(padding, 0).softmax(-1).masked_fill(padding, 0)
