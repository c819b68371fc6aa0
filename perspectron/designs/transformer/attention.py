"""Causal attention as transformers have it: to all earlier tokens or a window of them, with heads in groups
(docs/designs/baselines.md#attention).

Shapes: B batch, T time, D model width, H query heads, G heads of keys and values, K head width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from perspectron.model import cache, ring
from perspectron.model.cache import Cache
from perspectron.model.masks import Inputs, Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, projected, split_inputs
from perspectron.model.ring import Ring
from perspectron.model.transfer import Heads
from perspectron.ops import attention, rope
from perspectron.ops.fused import RMSNorm, batch_invariant
from perspectron.ops.rope import RopeScaling
from perspectron.util.config import MixerConfig, at_least, divides, one_of, positive, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """The options of attention.

    heads: H. kv_heads: G, divides H; None is H. head_dim: K; None is D/H, which H must divide (into even widths where
    all of a head is rotated). window: tokens a query sees, itself counted; None is all. rope_base: of the rotary
    frequencies; None is no rotation. rope_share: share of a head's channels that are rotated, its first ones.
    rope_scaling: of the frequencies. bias: of queries, keys, values and the gate. out_bias: of the output; None is as
    `bias`. qk_norm: RMS norm of queries and keys with weights, before the rotation: of each head's K channels ("head")
    or of all heads' together ("all"). scale: of the scores; None is K^-½. cap: scores s become cap · tanh(s / cap).
    gate: "sigmoid" multiplies the heads' output by a gate for each channel, from the same input. clip: bound ± to which
    queries, keys and values are clipped, before the rotation; None is no clipping. cache: keys and values in the
    model's dtype, or rounded to bfloat16 once computed, so that all ways to read a text see the same ones."""

    kind = "attention"
    heads: int
    rope_base: float | None = 10000.0
    bias: bool = False
    rope_share: float = 1.0
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    rope_scaling: RopeScaling | None = None
    out_bias: bool | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    scale: float | None = None
    cap: float | None = None
    gate: Literal["none", "sigmoid"] = "none"
    cache: Literal["full", "bfloat16"] = "full"
    clip: float | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "kv_heads", "head_dim", "window")
        positive(self, "scale", "cap", "clip")
        require(self.rope_base is None or self.rope_base > 1, "rope_base", self.rope_base, "> 1")
        require(0 < self.rope_share <= 1, "rope_share", self.rope_share, "in (0, 1]")
        require(
            self.heads % self.groups == 0, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}"
        )
        one_of(self.qk_norm, ("none", "head", "all"), "qk_norm")
        one_of(self.gate, ("none", "sigmoid"), "gate")
        one_of(self.cache, ("full", "bfloat16"), "cache")
        turned = self.rope_base is not None
        require(
            turned or self.rope_scaling is None, "rope_scaling", self.rope_scaling, "null without rope_base"
        )

    @property
    def groups(self) -> int:
        """G."""
        return self.kv_heads or self.heads

    def width(self, d_model: int) -> int:
        """K. ConfigError where the heads do not fit the model width, or cannot be rotated."""
        even = self.rope_base is not None and self.rope_share == 1
        if self.head_dim is None:
            divides(self.heads, d_model, even=even)
        else:
            require(not even or self.head_dim % 2 == 0, "head_dim", self.head_dim, "even to be turned")
        return self.head_dim or d_model // self.heads


class Attention(Mixer):
    """softmax(q kᵀ · scale) v over earlier tokens."""

    small: ClassVar[MixerConfig] = AttentionConfig(heads=2)
    about = "attention to all earlier tokens or a window, with the options of transformers"
    source = "docs/designs/baselines.md#attention"
    inputs = ("q", "k", "v")
    drops = True

    def __init__(self, d_model: int, norm_eps: float, config: AttentionConfig) -> None:
        super().__init__()
        H, G, K = config.heads, config.groups, config.width(d_model)
        self.config, self.options, self.width = config, config, K
        cut = config.cache != "bfloat16" and (
            config.window is None or config.window >= attention.LEAST_WINDOW
        )
        self.exact_cells = 1 if cut else 0  # in a call, keys are not rounded to the cache's precision
        self.value_channels = G * K
        self._project(d_model)
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.o_proj = nn.Linear(H * K, d_model, bias=out_bias)
        if config.qk_norm != "none":
            q_width, k_width = (K, K) if config.qk_norm == "head" else (H * K, G * K)
            self.q_norm, self.k_norm = RMSNorm(q_width, norm_eps), RMSNorm(k_width, norm_eps)
        if config.gate == "sigmoid":
            self.gate_proj = nn.Linear(d_model, H * K, bias=config.bias)

    def _project(self, d_model: int) -> None:
        H, G = self.options.heads, self.options.groups
        self.qkv_proj = nn.Linear(d_model, (H + 2 * G) * self.width, bias=self.options.bias)

    def require_onnx(self, name: str) -> None:
        """ConfigError with keys and values in bfloat16, which NumPy does not have."""
        bound = "'full' to be exported to ONNX: import the model without --cache"
        require(self.options.cache == "full", f"{name}.cache", self.options.cache, bound)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> Cache | Ring:
        """The empty cache, with room for `capacity` tokens, or the empty ring of a window."""
        G, K, window = self.options.groups, self.width, self.options.window
        dtype = torch.bfloat16 if self.options.cache == "bfloat16" else dtype
        if window is None:
            return cache.empty(batch_size, G, K, K, device, dtype, capacity)
        return ring.empty(batch_size, G, K, window, device, dtype, capacity)

    @masked
    def forward(
        self,
        x_BTD: Inputs,
        state: Any,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
    ) -> tuple[Tensor, Cache | Ring, dict[str, Term]]:
        config = self.options
        at, (q, k, v), x_q = self._turned(x_BTD, state.length_B, reset_BT, pad_BT, value_residual)
        if config.cache == "bfloat16":
            k, v = k.bfloat16(), v.bfloat16()
        drop = self.dropout if self.training else None
        over = cache.attend if config.window is None else partial(ring.attend, window=config.window)
        o, after = over(
            q, k, v, state, at, scale=config.scale, cap=config.cap, consume_state=consume_state, drop=drop
        )
        o_BTC = o.transpose(1, 2).flatten(2)
        if config.gate == "sigmoid":
            o_BTC = o_BTC * batch_invariant(torch.sigmoid, self.gate_proj(x_q))
        return self.o_proj(o_BTC), after, {}

    def _turned(
        self,
        x_BTD: Inputs,
        length_B: Tensor,
        reset_BT: Mask,
        pad_BT: Mask,
        value_residual: ValueFunction | None = None,
    ) -> tuple[attention.Places, tuple[Tensor, Tensor, Tensor], Tensor]:
        """Places of the tokens, queries, keys and values of each head as scores use them, and the input of queries."""
        config = self.options
        (q_BTC, k_BTC, v_BTC), (x_q, x_kv) = self._inputs(x_BTD)
        if value_residual is not None:
            v_BTC = value_residual(v_BTC, x_kv)
        if config.qk_norm == "all":
            q_BTC, k_BTC = _normed(self.q_norm, q_BTC), _normed(self.k_norm, k_BTC)
        q, k, v = (part.unflatten(-1, (-1, self.width)) for part in (q_BTC, k_BTC, v_BTC))
        if config.qk_norm == "head":
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        if config.clip is not None:
            q, k, v = (part.clamp(-config.clip, config.clip) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        at = attention.places(length_B, q.shape[2], reset_BT, pad_BT)
        if config.rope_base is not None:
            turned = int(self.width * config.rope_share)
            turn = rope.angles(at.position_BT, turned, config.rope_base, config.rope_scaling)
            q, k = (rope.turned(x, turn) for x in (q, k))
        return at, (q, k, v), x_q

    def heads(self, x_BTD: Inputs) -> Heads:
        """The heads. Attention to the inputs' first token counts for no distance: it is attention to nothing."""
        H, G, K, config = self.options.heads, self.options.groups, self.width, self.options
        q, k, v = (part.detach().float().unflatten(0, (-1, K)) for part in self._matrices())
        if config.qk_norm != "none":
            q, k = (
                x * norm.weight.detach().float().view(-1, K, 1)
                for x, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        k, v = (part.repeat_interleave(H // G, 0) for part in (k, v))
        scale = K**-0.5 if config.scale is None else config.scale
        o_DHV = self.o_proj.weight.detach().float().unflatten(1, (H, K))
        return Heads(q * scale * K**0.5, k, v, o_DHV, self._reach(x_BTD, scale))

    @torch.no_grad()
    def _reach(self, x_BTD: Inputs, scale: float) -> Tensor:
        """The mean share of attention by distance [H,T]."""
        first, config = split_inputs(x_BTD, 3)[0], self.options
        B, T = first.shape[:2]
        length_B = torch.zeros(B, dtype=torch.int64, device=first.device)
        _, (q, k, _), _ = self._turned(x_BTD, length_B, None, None)
        k = k.repeat_interleave(config.heads // config.groups, 1)
        time_T = torch.arange(T, device=first.device)
        apart_TT = time_T[:, None] - time_T
        seen_TT = (apart_TT >= 0) & (apart_TT < (config.window or T))
        share_BHTT = scale * q.float() @ k.float().mT
        if config.cap is not None:
            share_BHTT = config.cap * torch.tanh(share_BHTT / config.cap)
        share_BHTT = share_BHTT.masked_fill(~seen_TT, -torch.inf).softmax(-1)
        share_HN = share_BHTT.sum(0)[:, 1:, 1:].flatten(1)
        mass_HT = share_HN.new_zeros(config.heads, T)
        mass_HT.index_add_(1, apart_TT[1:, 1:].clamp_min(0).flatten(), share_HN)
        return mass_HT / mass_HT.sum(1, keepdim=True)

    def _matrices(self) -> tuple[Tensor, ...]:
        """The matrices of queries, keys and values, each [·,D]."""
        H, G, K = self.options.heads, self.options.groups, self.width
        return self.qkv_proj.weight.split([H * K, G * K, G * K])

    def _inputs(self, x: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Queries, keys and values of all heads, and the inputs of queries, and of keys and values."""
        H, G, K = self.options.heads, self.options.groups, self.width
        x_q, x_k, x_v = split_inputs(x, 3)
        sizes = [H * K, G * K, G * K]
        q, k, v = projected(self.qkv_proj, (x_q, x_k, x_v), sizes).split(sizes, -1)
        return (q, k, v), (x_q, x_v)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """The norm in the dtype of its weight, which is wider under autocast; the result in x's."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)
