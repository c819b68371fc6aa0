"""The common part of mixers by a gated delta rule: everything except the gates (`perspectron.ops.delta`, decay first).

Shapes: B batch, T time, D model width, H heads, G heads of queries and keys, K key width, V value width, A gates of a
head (K or 1), E erasing gates (K or 1), W writing gates (V or 1), C = 2GK + HV channels of the convolution, Z inputs
that it remembers.
"""

import abc
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import (
    ShortConv,
    ValueFunction,
    projected,
    softplus,
    softplus_of_steps,
    split_inputs,
    unit,
)
from perspectron.model.state import register
from perspectron.model.transfer import Heads, before_softplus, fill, passing
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import delta
from perspectron.ops.fused import RMSNorm
from perspectron.util.terms import Term

SLOWEST = 1e-3  # the least decay rate that a head starts with


@register
@dataclass(frozen=True)
class DeltaState:
    """memory: S [B,H,K,V]; window: the last inputs of the convolution [B,Z,C], zeros before the document's first. Both
    float32 or float64."""

    memory_BHKV: Tensor
    window_BZC: Tensor


class Delta(Mixer):
    """q, k, v = swish(conv(W x)), q and k of length 1; α = exp(−e^{A_log} softplus(f + b));
    S ← diag(α) S;  S ← S + k (w ⊙ v − Sᵀ (β ⊙ k))ᵀ;  y = W_o (norm(Sᵀ q / √K) ⊙ g), with f, β, w, g by `gates`.

    rates: bounds between which e^{A_log} starts, evenly. A: 1, or K for a decay of each channel. key_heads: G, each of
    which H / G heads in a row share; None is H."""

    state_kind = DeltaState

    inputs = ("q", "k", "v", "g")
    exact_cells = 8

    def __init__(
        self,
        d_model: int,
        norm_eps: float,
        heads: int,
        K: int,
        V: int,
        A: int,
        conv: int,
        rates: tuple[float, float],
        key_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.rates, self.key_heads = (heads, K, V), rates, key_heads or heads
        self.value_channels = heads * V
        channels = 2 * self.key_heads * K + heads * V
        self.qkv_proj = nn.Linear(d_model, channels, bias=False)
        self.conv1d = ShortConv(channels, conv, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * A))
        self.norm = RMSNorm(V, norm_eps)
        self.o_proj = nn.Linear(heads * V, d_model, bias=False)

    @abc.abstractmethod
    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """f, of which decays are made [B,T,H,A], β [B,T,H,E], w [B,T,H,W] and the gate of the output [B,T,HV]."""

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread the rates over the heads, and the steps as Mamba-2 does. KDA's paper starts its own at softplus(0): a
        memory of 0.003 of a token's, with which it learns no recall (docs/lab-notes.md)."""
        self.conv1d.draw(generator)
        self.A_log.uniform_(*self.rates, generator=generator).clamp_min_(SLOWEST).log_()
        softplus_of_steps(self.dt_bias, generator)

    def take(self, heads: Heads) -> None:
        fill(self.qkv_proj, heads.q_HKD, heads.k_HKD, heads.v_HVD)
        self.o_proj.weight.copy_(heads.o_DHV.flatten(1))
        passing(self.conv1d)
        self.A_log.zero_()
        self.dt_bias.copy_(before_softplus(heads.rates(len(self.dt_bias) // len(self.A_log)).flatten()))

    def decays(self) -> int:
        return len(self.dt_bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape, self.conv1d.window]

    @masked
    def forward(
        self,
        x: Inputs,
        state: DeltaState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, DeltaState, dict[str, Term]]:
        x_q, x_k, x_v, x_g = split_inputs(x, len(self.inputs))
        (H, K, V), G = self.shape, self.key_heads
        sizes = [G * K, G * K, H * V]
        u_BTC = projected(self.qkv_proj, (x_q, x_k, x_v), sizes)
        u_BTC, window_BZC = self.conv1d(u_BTC, state.window_BZC, reset_BT, pad_BT)
        q, k, v = u_BTC.split(sizes, -1)
        v = v if value_residual is None else value_residual(v, x_v)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in ((q, G), (k, G), (v, H)))
        f, beta, write, gate_BTV = self.gates(x_g)
        full = torch.promote_types(f.dtype, torch.float32)
        step = softplus(tuned.decays(f).to(full) + self.dt_bias.unflatten(0, (H, -1)))
        step, beta, write = (filled(x, pad_BT, 0) for x in (step, beta, write))
        alpha = filled(torch.exp(-step * torch.exp(self.A_log.to(full))[:, None]), reset_BT, 0)
        q, k = (x if G == H else x.repeat_interleave(H // G, 2) for x in (unit(q), unit(k)))
        q, k, e, v, alpha = (x.transpose(1, 2) for x in (q, k, beta * k, write * v, alpha))
        o_BHTV, memory_BHKV = delta.scan(
            q, k, e, v, alpha, state.memory_BHKV, scale=K**-0.5, consume_state=consume_state, checked=False
        )
        o_BHTV = tuned.read(o_BHTV, q, K**-0.5)
        o_BTV = self.norm(o_BHTV.transpose(1, 2).to(x_g.dtype)).flatten(2)
        return self.o_proj(o_BTV * gate_BTV), DeltaState(memory_BHKV, window_BZC), {}
