"""The state-space dual of Mamba-2: a matrix memory for each head that fades by one gate, read and written with
vectors that heads share, behind a short convolution (Dao & Gu 2024, arXiv 2405.21060;
docs/designs/baselines.md#mamba-2).

Shapes: B batch, T time, D model width, I inner width, H heads, P = I/H head width, G groups of heads, N state rows,
C = I + 2GN channels of the convolution, W its width, Z = W - 1 inputs it remembers, S = Z + T.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
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
)
from perspectron.model.state import register
from perspectron.model.transfer import Heads, before_softplus, passing
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import gla
from perspectron.ops.fused import GroupedRMSNorm, RMSNorm, batch_invariant
from perspectron.util.config import MixerConfig, at_least, one_of, require
from perspectron.util.terms import Term

DECAY = (1.0, 16.0)  # between which A is drawn, evenly


@dataclass(frozen=True)
class SSDConfig(MixerConfig):
    """The options of SSD.

    head_dim: P, must divide the inner width. state: N, rows of a head's memory. expand: the inner width in multiples of
    the model's. conv: W, tokens that the short convolution sees. heads: H, which makes the inner width H P, whatever
    `expand` is; None leaves that to `expand`. groups: G; the H / G heads of a group share b and c, and each group has a
    norm of its own. bias: of both projections; out_bias: of the second; None is as `bias`. conv_bias: of the
    convolution. dt_min, dt_max: bounds of Δ; None is no upper one. norm: after the gate or before it, or no norm."""

    kind = "ssd"
    head_dim: int
    state: int
    expand: int = 2
    conv: int = 4
    heads: int | None = None
    groups: int = 1
    bias: bool = False
    conv_bias: bool = True
    dt_min: float = 0.0
    dt_max: float | None = None
    norm: Literal["after", "before", "none"] = "after"
    out_bias: bool | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "head_dim", "state", "expand", "conv", "groups", "heads")
        at_least(0, self, "dt_min")
        bounded = self.dt_max is None or self.dt_max >= self.dt_min
        one_of(self.norm, ("after", "before", "none"), "norm")
        require(bounded, "dt_max", self.dt_max, f"≥ dt_min = {self.dt_min}")

    def inner(self, d_model: int) -> int:
        """I."""
        return self.expand * d_model if self.heads is None else self.heads * self.head_dim


@register
@dataclass(frozen=True)
class SSDState:
    """The state of SSD. memory: S [B,H,N,P]; window: the last W - 1 inputs of the convolution [B,Z,C], zeros before
    the document's first. Both float32 or float64."""

    memory_BHNP: Tensor
    window_BZC: Tensor


class SSD(Mixer):
    """z, x, b, c, δ = W_in u; x, b, c ← swish(conv(x, b, c)); Δ = softplus(δ + bias), a = exp(-Δ exp(A_log));
    S ← a S + b (Δ x)ᵀ; y = W_o norm((Sᵀ c + D x) ⊙ swish(z)), or W_o (norm(Sᵀ c + D x) ⊙ swish(z)). b and c are those
    of a head's group."""

    small = SSDConfig(head_dim=8, state=4)
    about = "Mamba-2's state-space dual: a matrix memory with one decay per head, behind a short convolution"
    source = "docs/designs/baselines.md#mamba-2"
    state_kind = SSDState
    framed = SSDConfig(head_dim=32, state=64)
    inputs = ("q", "k", "v", "g")
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: SSDConfig) -> None:
        super().__init__()
        inner, G = config.inner(d_model), config.groups
        bound = f"a divisor of expand · d_model = {inner}"
        require(inner % config.head_dim == 0, "head_dim", config.head_dim, bound)
        heads, channels = inner // config.head_dim, inner + 2 * G * config.state
        require(heads % G == 0, "groups", G, f"a divisor of the number of heads = {heads}")
        self.config = config
        self.value_channels = inner
        self.split = [inner, channels, heads]
        self.in_proj = nn.Linear(d_model, sum(self.split), bias=config.bias)
        self.conv1d = ShortConv(channels, config.conv, bias=config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        if config.norm != "none":
            self.norm = RMSNorm(inner, norm_eps) if G == 1 else GroupedRMSNorm(inner, G, norm_eps)
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.o_proj = nn.Linear(inner, d_model, bias=out_bias)

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread A and Δ over the heads, D = 1."""
        self.conv1d.draw(generator)
        self.A_log.uniform_(*DECAY, generator=generator).log_()
        softplus_of_steps(self.dt_bias, generator)
        self.D.fill_(1)

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> SSDConfig:
        return SSDConfig(value, key, heads=heads, groups=heads)

    def take(self, heads: Heads) -> None:
        """Take over attention's heads, with steps of 1, so that values are written unchanged."""
        inner = self.split[0]
        taken = torch.cat([part.flatten(0, 1) for part in (heads.v_HVD, heads.k_HKD, heads.q_HKD)])
        self.in_proj.weight[inner : inner + len(taken)] = taken
        self.o_proj.weight.copy_(heads.o_DHV.flatten(1))
        passing(self.conv1d)
        self.dt_bias.copy_(before_softplus(torch.ones_like(self.dt_bias)))
        self.A_log.copy_(heads.rates(1)[:, 0].log())

    def decays(self) -> int:
        return len(self.dt_bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        config, (*_, heads) = self.config, self.split
        return [(heads, config.state, config.head_dim), self.conv1d.window]

    @masked
    def forward(
        self,
        x: Inputs,
        state: SSDState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, SSDState, dict[str, Term]]:
        x_q, x_k, x_v, x_g = split_inputs(x, len(self.inputs))
        G, N = self.config.groups, self.config.state
        inner, _, heads = self.split
        sizes = [inner, inner, G * N, G * N, heads]
        made_BTP = projected(self.in_proj, (x_g, x_v, x_k, x_q, x_g), sizes)
        z_BTI, u_BTC, delta_BTH = made_BTP.split(self.split, -1)
        u_BTC, window_BZC = self.conv1d(u_BTC, state.window_BZC, reset_BT, pad_BT)
        full = torch.promote_types(delta_BTH.dtype, torch.float32)
        delta_BTH = softplus(tuned.decays(delta_BTH).to(full) + self.dt_bias)
        if self.config.dt_min > 0 or self.config.dt_max is not None:
            delta_BTH = delta_BTH.clamp(self.config.dt_min, self.config.dt_max)
        delta_BTH = filled(delta_BTH, pad_BT, 0)  # gate 1, nothing written
        gate_BTH = filled(torch.exp(-delta_BTH * torch.exp(self.A_log.to(full))), reset_BT, 0)
        v_BTI, k, q = u_BTC.split([u_BTC.shape[-1] - 2 * G * N, G * N, G * N], -1)
        v_BTI = v_BTI if value_residual is None else value_residual(v_BTI, x_v)
        v_BTHP = v_BTI.unflatten(-1, (-1, self.config.head_dim))
        q, k = (x.unflatten(-1, (G, N)).transpose(1, 2) for x in (q, k))
        o_BHTP, memory_BHNP = gla.scan(
            q,
            k,
            (v_BTHP * delta_BTH[..., None]).transpose(1, 2),
            gate_BTH[..., None].transpose(1, 2),
            state.memory_BHNP,
            scale=1.0,
            consume_state=consume_state,
            checked=False,
        )
        o_BHTP = tuned.read(o_BHTP, q)
        y_BTHP = torch.addcmul(o_BHTP.transpose(1, 2), v_BTHP, self.D[:, None])
        y_BTI, gate_BTI = y_BTHP.flatten(2), batch_invariant(F.silu, z_BTI)
        if self.config.norm == "before":
            y_BTI = self.norm(y_BTI.to(x_g.dtype)) * gate_BTI
        else:
            y_BTI = (y_BTI * gate_BTI).to(x_g.dtype)
            y_BTI = self.norm(y_BTI) if self.config.norm == "after" else y_BTI
        return self.o_proj(y_BTI), SSDState(memory_BHNP, window_BZC), {}
