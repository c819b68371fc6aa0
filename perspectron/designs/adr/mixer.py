"""Attention with differentiable recurrence (docs/designs/adr.md#the-five-laws).

Shapes: B batch, T time, D model width, H heads, K head width, G groups of weights, R heads of a group, F = 3K.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from perspectron.designs.adr import gru
from perspectron.model import cache
from perspectron.model.cache import Cache
from perspectron.model.masks import Inputs, Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, projected, split_inputs
from perspectron.model.state import register
from perspectron.ops import attention, rope
from perspectron.util.config import MixerConfig, divides, one_of, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class ADRConfig(MixerConfig):
    """The options of attention with differentiable recurrence.

    heads: H, must divide the model width. gamma: the share of a memory that each token keeps; 0 gives the plain GRU, h
    = ĥ. emit: attend to the memories h ("state", law 3) or to the GRU's output before decay ("raw"). share_heads: all
    heads share one GRU for keys and one for values; each head still has its own memories. cold_start: divide the
    memories that are attended to by 1 − γᵗ, their bound after t tokens. couple: add the value memories to the output
    (law 5). remember: which of keys and values have memories; attention reads the other directly. rope_base: of rotary
    positions, applied to queries and to the keys that attention reads; None for no rotation. learned: a decay for the
    layer, or one for each head, is learned; it starts at gamma."""

    kind = "adr"
    heads: int
    gamma: float
    emit: Literal["state", "raw"] = "state"
    share_heads: bool = False
    cold_start: bool = False
    couple: bool = True
    remember: Literal["both", "keys", "values"] = "both"
    rope_base: float | None = None
    learned: Literal["none", "layer", "head"] = "none"

    @property
    def remembered(self) -> slice:
        """The slice of (keys, values) that have memories."""
        return {"both": slice(0, 2), "keys": slice(0, 1), "values": slice(1, 2)}[self.remember]

    @property
    def streams(self) -> int:
        """The number of streams, keys and values, that have memories."""
        return 2 if self.remember == "both" else 1

    def __post_init__(self) -> None:
        require(self.heads >= 1, "heads", self.heads, "≥ 1")
        require(0 <= self.gamma < 1, "gamma", self.gamma, "in [0, 1)")
        one_of(self.learned, ("none", "layer", "head"), "learned")
        require(self.learned == "none" or self.gamma > 0, "gamma", self.gamma, "> 0 where decays are learned")
        one_of(self.emit, ("state", "raw"), "emit")
        one_of(self.remember, ("both", "keys", "values"), "remember")
        require(not (self.cold_start and self.emit == "raw"), "cold_start", True, "False with emit = 'raw'")
        require(not (self.cold_start and self.gamma == 0), "cold_start", True, "False with gamma = 0")
        require(not (self.couple and self.remember == "keys"), "couple", True, "False with remember = 'keys'")
        require(self.rope_base is None or self.rope_base > 1, "rope_base", self.rope_base, "> 1")


@register
@dataclass(frozen=True)
class ADRState:
    """The state of ADR.

    memory: of keys and values [B,2,H,K] ([B,1,H,K] for one of them), float32 or float64. cache: of what attention
    reads."""

    memory_B2HK: Tensor
    cache: Cache


class Remembered(NamedTuple):
    """The input of attention, and the memories behind it.

    plain: queries, keys and values, before any memory. memory: the memories after each token. seen: keys and values
    that attention reads. last: the memories after the last token."""

    plain_BT3HK: Tensor
    memory_BT2HK: Tensor
    seen_BT2HK: Tensor
    last_B2HK: Tensor


class ADR(Mixer):
    """ĥ = GRU(k_t, h), h ← γ h + (1 − γ) ĥ, likewise for values; y = W_o softmax(q h_Kᵀ / √K) h_V + h_V."""

    small = ADRConfig(heads=2, gamma=0.9)
    about = "attention to recurrent memories (decayed GRUs) of keys and values"
    source = "docs/designs/adr.md#the-five-laws"
    drops = True
    inputs = ("q", "k", "v")
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: ADRConfig) -> None:
        super().__init__()
        divides(config.heads, d_model, even=config.rope_base is not None)
        self.config = config
        self.value_channels = d_model
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.o_proj = nn.Linear(d_model, d_model)
        K, G = d_model // config.heads, config.streams * (1 if config.share_heads else config.heads)
        self.input_GKF, self.recurrent_GKF = (nn.Parameter(torch.empty(G, K, 3 * K)) for _ in range(2))
        self.input_bias, self.recurrent_bias = (nn.Parameter(torch.empty(G * 3 * K)) for _ in range(2))
        if config.learned != "none":
            self.decay = nn.Parameter(torch.empty(config.heads if config.learned == "head" else 1))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the GRUs as torch.nn.GRUCell does: uniform within ±1/√K. Learned decays start at gamma."""
        if self.config.learned != "none":
            self.decay.fill_(math.log(self.config.gamma / (1 - self.config.gamma)))
        bound = self.input_GKF.shape[1] ** -0.5
        for parameter in (self.input_GKF, self.recurrent_GKF, self.input_bias, self.recurrent_bias):
            parameter.uniform_(-bound, bound, generator=generator)

    def gamma(self) -> float | Tensor:
        """The share of the memories that a token keeps: a number, or learned, one for each head [H]."""
        if self.config.learned == "none":
            return self.config.gamma
        full = torch.promote_types(self.decay.dtype, torch.float32)
        most = 1 - torch.finfo(full).eps / 2  # at 1 a memory would stay empty
        return torch.sigmoid(self.decay.to(full)).clamp(max=most).expand(self.config.heads)

    def _of_groups(self, gamma: float | Tensor) -> float | Tensor:
        """`gamma`, one for each group and row [G,R]."""
        if not isinstance(gamma, Tensor):
            return gamma
        streams = self.config.streams
        return gamma.repeat(streams, 1) if self.config.share_heads else gamma.repeat(streams)[:, None]

    def cells(self) -> gru.Cells:
        """The weights of the groups: keys, then values; in each, head by head unless they share."""
        biases = (bias.view(len(self.input_GKF), -1) for bias in (self.input_bias, self.recurrent_bias))
        return gru.Cells(self.input_GKF, self.recurrent_GKF, *biases)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> ADRState:
        """Empty memories, at least float32, and a cache with room for `capacity` tokens."""
        H, K = self.config.heads, self.input_GKF.shape[1]
        full = torch.promote_types(dtype, torch.float32)
        memory_B2HK = torch.zeros(batch_size, self.config.streams, H, K, device=device, dtype=full)
        return ADRState(memory_B2HK, cache.empty(batch_size, H, K, K, device, dtype, capacity))

    @masked
    def forward(
        self,
        x: Inputs,
        state: ADRState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
    ) -> tuple[Tensor, ADRState, dict[str, Term]]:
        B, T, D = split_inputs(x, 3)[0].shape
        at = attention.places(state.cache.length_B, T, reset_BT, pad_BT)
        qkv, memory, seen, after_B2HK = self.remember(
            x,
            state,
            at,
            reset_BT=reset_BT,
            pad_BT=pad_BT,
            consume_state=consume_state,
            value_residual=value_residual,
        )
        q, (k, v) = qkv[:, :, 0].transpose(1, 2), seen.permute(2, 0, 3, 1, 4)
        if self.config.rope_base is not None:
            turn = rope.angles(at.position_BT, q.shape[3], self.config.rope_base)
            q, k = (rope.turned(x, turn) for x in (q, k))
        o, after = cache.attend(
            q,
            k,
            v,
            state.cache,
            at,
            consume_state=consume_state,
            drop=self.dropout if self.training else None,
        )
        y_BTD = self.o_proj(o.transpose(1, 2).reshape(B, T, D))
        if self.config.couple:
            y_BTD = y_BTD + memory[:, :, -1].reshape(B, T, D).to(y_BTD.dtype)
        return y_BTD, ADRState(after_B2HK, after), {}

    def remember(
        self,
        x: Inputs,
        state: ADRState,
        at: attention.Places,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        consume_state: bool = False,
        value_residual: ValueFunction | None = None,
    ) -> Remembered:
        """The input of attention for tokens that come after `state`, at these places."""
        config, of = self.config, self.config.remembered
        inputs = split_inputs(x, 3)
        qkv_BTC = projected(self.qkv_proj, inputs, [self.value_channels] * 3)
        if value_residual is not None:
            qk_BTC, v_BTD = qkv_BTC.split([2 * self.value_channels, self.value_channels], -1)
            qkv_BTC = torch.cat([qk_BTC, value_residual(v_BTD, inputs[2])], -1)
        qkv_BT3HK = qkv_BTC.view(*qkv_BTC.shape[:2], 3, config.heads, -1)
        kv = qkv_BT3HK[:, :, 1:]
        own, G = kv[:, :, of], len(self.input_GKF)
        B, T, kinds, H, K = own.shape
        gamma = self.gamma()
        memory, raws, last = gru.scan(
            own.reshape(B, T, G, -1, K),
            self.cells(),
            self._of_groups(gamma),
            state.memory_B2HK.view(B, G, -1, K),
            reset_BT=reset_BT,
            pad_BT=pad_BT,
            raw=config.emit == "raw",
            consume_state=consume_state,
        )
        seen = (memory if raws is None else raws).view(own.shape)
        if config.cold_start:
            t_BT = (at.position_BT + 1).to(seen.dtype)
            log_gamma: Tensor | float = gamma.log() if isinstance(gamma, Tensor) else math.log(gamma)
            seen = seen / -torch.expm1(t_BT[:, :, None] * log_gamma)[:, :, None, :, None]
        seen = seen.to(qkv_BT3HK.dtype)
        if config.remember != "both":
            seen = torch.cat([kv[:, :, : of.start], seen, kv[:, :, of.stop :]], 2)
        return Remembered(qkv_BT3HK, memory.view(own.shape), seen, last.view(B, kinds, H, K))
