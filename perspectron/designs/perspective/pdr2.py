"""Improved Perspective Decay Recurrence: `pdr` with groups of rows that have their own queries and keys, initial
half-lives from one token to a thousand, and inputs scaled by the decay; a norm and a gate on the output are an option
(docs/designs/perspective.md#perspective2).

Shapes: B batch, T time, D model width, G groups, R state rank.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.perspective import eligibility
from perspectron.designs.perspective.pdr import GATE_BIAS, IDENTITY_NOISE, Adapted
from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, logits_of_halflives, split_inputs
from perspectron.model.state import register
from perspectron.model.transfer import Heads, fill
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import pdr
from perspectron.ops.fused import RMSNorm, batch_invariant, decayed
from perspectron.util.config import MixerConfig, at_least, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class PDR2Config(MixerConfig):
    """The options of PDR2.

    rank: R, columns of the state. groups: G, groups of state rows with their own queries and keys; must divide the
    model width. gated: multiply the output by swish(W_z x) and norm it. longest: initial half-life of the slowest rows
    in tokens (the fastest have 1); 0 starts all rows at γ = 0.95, as PDR does. unit_input: scale values by √(1 − γ²),
    so that slow rows do not grow larger than fast ones."""

    kind = "pdr2"
    rank: int
    groups: int = 1
    gated: bool = False
    longest: float = 1000.0
    unit_input: bool = True

    def __post_init__(self) -> None:
        at_least(1, self, "rank", "groups")
        require(self.longest == 0 or self.longest >= 1, "longest", self.longest, "≥ 1, or 0")


@register
@dataclass(frozen=True)
class PDR2State:
    """The state of PDR2. memory: S [B,D,R], float32 or float64."""

    memory_BDR: Tensor


@register
@dataclass(frozen=True)
class AdaptedPDR2State(Adapted, PDR2State):
    """The state of PDR2 under an adapter."""


class PDR2(Mixer):
    """γ = σ(W_p x + b_p); S ← diag(γ) S + (√(1 − γ²) ⊙ W_v x)(W_k x)ᵀ; y = W_o S W_q x / √R, in each group of rows;
    gated, y = W_o norm(S W_q x / √R ⊙ swish(W_z x))."""

    small = PDR2Config(rank=3, groups=2)
    about = "improved PDR: groups of rows, spread half-lives, inputs scaled by the decay"
    source = "docs/designs/perspective.md#perspective2"
    state_kind = PDR2State
    framed = PDR2Config(rank=32)
    kept_at_reset = ("down_BrD", "up_BDr")  # an adapter's

    inputs = ("q", "k", "v", "g")
    mix_exponents = (0.2, 0.7, 0.7, 0.2)  # of q and z, k, v, γ: those of RWKV-7's first layer
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: PDR2Config) -> None:
        super().__init__()
        bound = f"a divisor of d_model = {d_model}"
        require(d_model % config.groups == 0, "groups", config.groups, bound)
        self.config = config
        self.value_channels = d_model
        widths = (config.groups * config.rank, config.groups * config.rank, d_model)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, n, bias=False) for n in widths)
        self.p_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        if config.gated:
            self.z_proj = nn.Linear(d_model, d_model, bias=False)
            self.norm = RMSNorm(d_model, norm_eps)

    def init_weights(self, generator: torch.Generator) -> None:
        """W_p = I + (0.01/√D) N(0,1), as PDR; half-lives log-uniform from 1 to `longest` tokens."""
        D = self.p_proj.in_features
        self.p_proj.weight.normal_(0, IDENTITY_NOISE * D**-0.5, generator=generator).diagonal().add_(1)
        if self.config.longest:
            logits_of_halflives(self.p_proj.bias, 1, self.config.longest, generator)
        else:
            self.p_proj.bias.fill_(GATE_BIAS)

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> PDR2Config | None:
        """A group for each head, whose rows are its values."""
        return PDR2Config(key, heads, gated=True) if heads * value == d_model else None

    def take(self, heads: Heads) -> None:
        """Take over attention's heads. At first decays hardly depend on the token."""
        fill(self.q_proj, heads.q_HKD)
        fill(self.k_proj, heads.k_HKD)
        fill(self.v_proj, heads.v_HVD)
        self.o_proj.weight.copy_(heads.o_DHV.flatten(1))
        self.p_proj.weight.mul_(0.1)
        rates = heads.rates(heads.shape[2]).flatten()
        self.p_proj.bias.copy_(-rates - torch.log(-torch.expm1(-rates)))  # logit of e^-rate

    def decay_gate(self) -> nn.Module:
        return self.p_proj

    def decays(self) -> int:
        return self.value_channels

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.value_channels, self.config.rank)]

    @masked
    def forward(
        self,
        x_BTD: Inputs,
        state: PDR2State,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, PDR2State, dict[str, Term]]:
        x_q, x_k, x_v, x_p = split_inputs(x_BTD, len(self.mix_exponents))
        q, k, v_BTD = self.q_proj(x_q), self.k_proj(x_k), self.v_proj(x_v)
        v_BTD = v_BTD if value_residual is None else value_residual(v_BTD, x_v)
        p_BTD = self.p_proj(x_p)
        if isinstance(state, Adapted):
            p_BTD, u_BTr = state.gates(p_BTD, x_p)
        p_BTD = tuned.decays(p_BTD)
        if self.config.unit_input:
            gamma_BTD, v_BTD = decayed(p_BTD, v_BTD)
        else:
            gamma_BTD = batch_invariant(
                torch.sigmoid, p_BTD.to(torch.promote_types(p_BTD.dtype, torch.float32))
            )
        own_BTD = gamma_BTD
        v_BTD = filled(v_BTD, pad_BT, 0)
        gamma_BTD = filled(filled(gamma_BTD, pad_BT, 1), reset_BT, 0)
        q, k, v, gamma = (self._groups(x) for x in (q, k, v_BTD, gamma_BTD))
        memory_BDR, more = state.memory_BDR, dict[str, Tensor]()
        if isinstance(state, AdaptedPDR2State) and state.traced:  # before the memory is written into
            u = u_BTr.repeat_interleave(self.config.groups, 0)
            trace = state.trace_BrDR.unflatten(2, (self.config.groups, -1)).transpose(1, 2).flatten(0, 1)
            slope = None
            if self.config.unit_input:  # of log √(1 − γ²) in p
                slope = self._groups(-own_BTD.square() / (1 + own_BTD))
            before = memory_BDR.reshape(len(v), -1, self.config.rank)
            trace = eligibility.carried(k, v, gamma, u, before, trace, slope_BTD=slope)
            more["trace_BrDR"] = trace.unflatten(0, (len(x_q), -1)).transpose(1, 2).flatten(2, 3)
            memory_BDR = state.learned(memory_BDR)
        memory = memory_BDR.reshape(len(v), -1, self.config.rank)
        o, memory = pdr.scan(q, k, v, gamma, memory, consume_state=consume_state, checked=False)
        o = tuned.read(o, q, self.config.rank**-0.5)
        o_BTD = o.unflatten(0, (len(x_q), -1)).transpose(1, 2).flatten(2)
        if self.config.gated:
            o_BTD = self.norm((o_BTD * batch_invariant(F.silu, self.z_proj(x_q))).to(x_q.dtype))
        memory_BDR = memory.reshape(len(x_q), -1, self.config.rank)
        return self.o_proj(o_BTD.to(x_q.dtype)), replace(state, memory_BDR=memory_BDR, **more), {}

    def _groups(self, x_BTC: Tensor) -> Tensor:
        """The groups [B·G,T,C/G] of [B,T,C]."""
        if self.config.groups == 1:
            return x_BTC
        return x_BTC.unflatten(-1, (self.config.groups, -1)).transpose(1, 2).flatten(0, 1)
