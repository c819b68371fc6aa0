"""Gated linear attention: a matrix memory for each head, with its own decay for each key channel (Yang et al. 2023,
arXiv 2312.06635; docs/designs/baselines.md#gated-linear-attention).

Shapes: B batch, T time, D model width, H heads, K = D/2H key width, V = D/H value width.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, split_inputs
from perspectron.model.state import register
from perspectron.model.transfer import Heads, fill
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import gla
from perspectron.ops.fused import RMSNorm, batch_invariant
from perspectron.util.config import MixerConfig, at_least, divides, positive
from perspectron.util.terms import Term


@dataclass(frozen=True)
class GLAConfig(MixerConfig):
    """The options of gated linear attention.

    heads: H, must divide half the model width. gate_rank: of the map from the input to the gates. gate_temperature:
    the gate is this root of a sigmoid, so that memories are long at initialisation."""

    kind = "gla"
    heads: int
    gate_rank: int = 16
    gate_temperature: float = 16.0

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "gate_rank")
        positive(self, "gate_temperature")


@register
@dataclass(frozen=True)
class GLAState:
    """The state of GLA. memory: S [B,H,K,V], float32 or float64."""

    memory_BHKV: Tensor


class GLA(Mixer):
    """S ← diag(α) S + k vᵀ with α = σ(W₂ W₁ x + b)^(1/temperature); y = W_o (norm(Sᵀ q / √K) ⊙ swish(W_g x))."""

    small = GLAConfig(heads=2, gate_rank=4)
    about = "gated linear attention: a matrix memory with a decay for each key channel"
    source = "docs/designs/baselines.md#gated-linear-attention"
    state_kind = GLAState
    framed = GLAConfig(heads=4)
    hidden = 440

    inputs = ("q", "k", "v", "g")
    mix_exponents = (0.2, 0.7, 0.7, 0.2)  # of q, k, v and both gates
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: GLAConfig) -> None:
        super().__init__()
        divides(config.heads, d_model, even=True)
        self.config = config
        self.value_channels = d_model
        self.q_proj = nn.Linear(d_model, d_model // 2, bias=False)
        self.k_proj = nn.Linear(d_model, d_model // 2, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.g_proj = nn.Linear(d_model, d_model, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(d_model, config.gate_rank, bias=False), nn.Linear(config.gate_rank, d_model // 2)
        )
        self.norm = RMSNorm(d_model // config.heads, norm_eps)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> GLAConfig | None:
        fits = heads * value == d_model and value % 2 == 0 and value // 2 <= key
        return GLAConfig(heads) if fits else None

    def take(self, heads: Heads) -> None:
        """Keys and queries, half as wide as values, take over only the part of attention's that matters most."""
        K = self.q_proj.out_features // self.config.heads
        for linear, part_HKD in zip((self.q_proj, self.k_proj), heads.narrowed(K), strict=True):
            fill(linear, part_HKD)
        fill(self.v_proj, heads.v_HVD)
        self.o_proj.weight.copy_(heads.o_DHV.flatten(1))
        rates = self.config.gate_temperature * heads.rates(K).flatten()
        cast(nn.Linear, self.gk_proj[1]).bias.copy_(
            -rates - torch.log(-torch.expm1(-rates))
        )  # logit of e^-rate

    def decays(self) -> int:
        return self.q_proj.out_features

    def state_shapes(self) -> list[tuple[int, ...]]:
        H, D = self.config.heads, self.o_proj.in_features
        return [(H, D // (2 * H), D // H)]

    @masked
    def forward(
        self,
        x_BTD: Inputs,
        state: GLAState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, GLAState, dict[str, Term]]:
        x_q, x_k, x_v, x_g = split_inputs(x_BTD, len(self.mix_exponents))
        gate_BTK = tuned.decays(self.gk_proj(x_g))
        gate_BTK = gate_BTK.to(torch.promote_types(gate_BTK.dtype, torch.float32))
        # not a power of the sigmoid, whose gradient is not finite where the sigmoid rounds to 0
        by = self.config.gate_temperature
        gate_BTK = batch_invariant(lambda gate: torch.exp(F.logsigmoid(gate) / by), gate_BTK)
        gate_BTK = filled(gate_BTK, pad_BT, 1)  # k and v are 0 there: nothing is written
        gate_BTK = filled(gate_BTK, reset_BT, 0)
        v_BTD = self.v_proj(x_v) if value_residual is None else value_residual(self.v_proj(x_v), x_v)
        inputs = (self.q_proj(x_q), self.k_proj(x_k), v_BTD, gate_BTK)
        q, k, v, gate = (x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for x in inputs)
        o_BHTV, memory_BHKV = gla.scan(
            q, k, v, gate, state.memory_BHKV, consume_state=consume_state, checked=False
        )
        o_BHTV = tuned.read(o_BHTV, q, q.shape[-1] ** -0.5)
        o_BTD = self.norm(o_BHTV.transpose(1, 2).to(x_q.dtype)).flatten(2)
        y_BTD = self.o_proj(o_BTD * batch_invariant(F.silu, self.g_proj(x_g)))
        return y_BTD, GLAState(memory_BHKV), {}
