"""RWKV-7's time mix: a matrix memory with a decay for each row, which is read and corrected before it decays (Peng et
al. 2025, arXiv 2503.14456; starts as in BlinkDL/RWKV-LM). Its channel mix is `rwkv7_channel`.

Shapes: B batch, T time, D model width, H heads, K = D/H head width.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import (
    UNIT_EPS,
    Shared,
    between,
    blend,
    low_rank,
    mixes,
    start_low_rank,
    start_value_residual_gate,
    unit,
    value_residual_gate,
)
from perspectron.model.state import register
from perspectron.model.transfer import Heads, fill
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import delta
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least, positive, require
from perspectron.util.terms import Term

MIX_EXPONENTS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)  # of the mixes for r, w, k, v, a, g
NORM_EPS = 64e-5


@dataclass(frozen=True)
class RWKV7Config(MixerConfig):
    """The options of RWKV-7's time mix.

    head_dim: K, must divide the model width. layer: its index among the `layers` of this kind, on which its
    initialisation depends; the first hands its values on to the others. w_rank, a_rank, v_rank, g_rank: low ranks of
    decays, rates, values and gates; None follows from the width. group_eps: of the norm of each head. unit_eps: added
    to a key's squared length before it is divided by it; 0 only keeps the length above 10⁻¹²."""

    kind = "rwkv7"
    head_dim: int
    layer: int = 0
    layers: int = 1
    w_rank: int | None = None
    a_rank: int | None = None
    v_rank: int | None = None
    g_rank: int | None = None
    group_eps: float = NORM_EPS
    unit_eps: float = UNIT_EPS

    def __post_init__(self) -> None:
        at_least(2, self, "head_dim")
        at_least(1, self, "w_rank", "a_rank", "v_rank", "g_rank")
        positive(self, "group_eps")
        at_least(0, self, "unit_eps")
        require(0 <= self.layer < self.layers, "layer", self.layer, f"in [0, {self.layers})")


@register
@dataclass(frozen=True)
class RWKV7State:
    """memory: S [B,H,K,K]; last: the input of the last token [B,D], zeros before the document's first. Both float32 or
    float64."""

    memory_BHKK: Tensor
    last_BD: Tensor


class RWKV7(Mixer):
    """x_r, x_w, x_k, x_v, x_a, x_g lie between x and the token before; r, k, v are linear in theirs, and v nears the
    first layer's by σ(v₂ v₁ x_v + v₀). α = exp(−e^{−½} σ(w₂ tanh(w₁ x_w) + w₀)), η = σ(a₂ a₁ x_a + a₀), κ = k ⊙ k_k of
    length 1 in each head, k ← k ⊙ (1 + (η − 1) ⊙ k_a);  S ← diag(α) S − (κ ⊙ η) (Sᵀ κ)ᵀ + k vᵀ;
    y = W_o ((norm(Sᵀ r) + (Σ r ⊙ r_k ⊙ k) v) ⊙ g₂ σ(g₁ x_g))."""

    small = RWKV7Config(head_dim=8)
    about = "RWKV-7's time mix: a matrix memory that is read and corrected before it decays"
    source = "arXiv 2503.14456"
    state_kind = RWKV7State
    framed = RWKV7Config(head_dim=32)

    takes_shared = own_token_shift = True
    no_decay = ("mix_6D",)
    recipe: ClassVar = {"w_low.2.bias": (2.0, 0.0), "?_low.*": (1.0, 0.0)}
    """BlinkDL/RWKV-LM, RWKV-v7/train_temp: w₀ at twice the rate, and decay for nothing but the embedding, the head and
    the large projections. (Its demo has 0.001 of it, a beta2 of 0.99 and an eps of 1e-18.)"""
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: RWKV7Config) -> None:
        super().__init__()
        D, K = d_model, config.head_dim
        require(D % K == 0, "head_dim", K, f"a divisor of d_model = {D}")
        self.config = config
        self.mix_6D = nn.Parameter(torch.empty(6, D))
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.w_low = low_rank(D, 2.5 * D**0.5 * K / 64, nn.Tanh(), rank=config.w_rank)
        self.a_low = low_rank(D, 2.5 * D**0.5 * K / 64, nn.Identity(), rank=config.a_rank)
        self.g_low = low_rank(D, 5 * D**0.5, nn.Sigmoid(), bias=False, rank=config.g_rank)
        self.v_low = value_residual_gate(D, D, config.v_rank) if config.layer > 0 else None
        self.k_k, self.k_a, self.r_k = (nn.Parameter(torch.empty(D)) for _ in range(3))
        self.norm_weight, self.norm_bias = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.o_proj = nn.Linear(D, D, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread mixes, decays and rates over the channels, by layer; low ranks and outputs start at 0."""
        D, K, (layer, layers) = len(self.k_k), self.config.head_dim, (self.config.layer, self.config.layers)
        channel = torch.arange(D, dtype=torch.float64)
        line, zigzag = channel / (D - 1), 2 * (channel % K) / (K - 1) - 1
        zigzag = zigzag * zigzag.abs()
        self.mix_6D.copy_(
            torch.stack([mixes(D, exponent * (1 - layer / layers)) for exponent in MIX_EXPONENTS])
        )
        slope = 1 + (layer / max(1, layers - 1)) ** 0.3
        start_low_rank(self.w_low, generator, 6 * line**slope - 5.5 + 2.5 * zigzag)
        start_low_rank(self.a_low, generator, 0.4 * (line - 0.5) - 0.19 + 0.3 * zigzag)
        start_low_rank(self.g_low, generator)
        if self.v_low is not None:
            start_value_residual_gate(self.v_low, generator)
        for linear, gain in ((self.r_proj, 1.0), (self.k_proj, 0.1), (self.v_proj, 1.0)):
            nn.init.orthogonal_(linear.weight, gain, generator)
        self.k_k.copy_(0.71 - 0.1 * (line - 0.5))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        self.norm_weight.fill_(((layer + 1) / layers) ** 0.7)
        self.norm_bias.zero_()
        self.o_proj.weight.zero_()

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> RWKV7Config | None:
        """The first of one: values do not lean on those of another layer, which may keep its attention."""
        return RWKV7Config(key) if heads * key == d_model and key == value else None

    def take(self, heads: Heads) -> None:
        """Each token is read alone at first, as attention reads it."""
        self.mix_6D.zero_()
        fill(self.r_proj, heads.q_HKD)
        fill(self.k_proj, heads.k_HKD)
        fill(self.v_proj, heads.v_HVD)
        self.o_proj.weight.copy_(heads.o_DHV.flatten(1))
        share = (heads.rates(heads.shape[1]).flatten() / math.exp(-0.5)).clamp(1e-6, 0.999)
        cast(nn.Linear, self.w_low[2]).bias.copy_(torch.logit(share))

    def decays(self) -> int:
        return len(self.k_k)

    def state_shapes(self) -> list[tuple[int, ...]]:
        D, K = len(self.k_k), self.config.head_dim
        return [(D // K, K, K), (D,)]

    @masked
    def forward(
        self,
        x_BTD: Tensor,
        state: RWKV7State,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        shared: Shared | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, RWKV7State, dict[str, Term]]:
        """shared: "v_first", the first layer's values of these tokens [B,T,D]."""
        inputs, last_BD = between(x_BTD, state.last_BD, self.mix_6D, reset_BT, pad_BT)
        (x_r, x_w, x_k, x_v, x_a, x_g), full = inputs, last_BD.dtype
        v_BTD = self._with_first(self.v_proj(x_v), x_v, shared)
        eta_BTD = batch_invariant(torch.sigmoid, self.a_low(x_a).to(full))
        w_BTD = tuned.decays(self.w_low(x_w).to(full))
        alpha_BTD = batch_invariant(lambda w: torch.exp(-math.exp(-0.5) * torch.sigmoid(w)), w_BTD)
        k_BTD = self.k_proj(x_k).to(full)
        key_BTD = k_BTD * (1 + (eta_BTD - 1) * self.k_a)
        inputs = (self.r_proj(x_r), key_BTD, v_BTD, eta_BTD, alpha_BTD, k_BTD * self.k_k)
        r, k, v, eta, alpha, kappa = (x.unflatten(-1, (-1, self.config.head_dim)) for x in inputs)
        kappa = read = unit(kappa, self.config.unit_eps)
        k, kappa, read = (filled(x, pad_BT, 0) for x in (k, kappa, read))
        alpha = filled(alpha, pad_BT, 1)
        # the memory is read before it decays: at a reset there must be nothing to read
        alpha, read = (filled(x, reset_BT, 0) for x in (alpha, read))
        own_BTD = (
            (r * k * self.r_k.unflatten(0, (-1, self.config.head_dim))).sum(-1, keepdim=True) * v
        ).flatten(2)
        q, k, v, a, b, alpha = (x.transpose(1, 2) for x in (r, k, v, -read, kappa * eta, alpha))
        o_BHTK, memory_BHKK = delta.scan_rwkv7(
            q, k, v, a, b, alpha, state.memory_BHKK, consume_state=consume_state, checked=False
        )
        o_BHTK = tuned.read(o_BHTK, q)
        o_BTD = F.layer_norm(o_BHTK.transpose(1, 2), o_BHTK.shape[-1:], eps=self.config.group_eps).flatten(2)
        o_BTD = (o_BTD * self.norm_weight + self.norm_bias + own_BTD).to(x_BTD.dtype)
        return self.o_proj(o_BTD * self.g_low(x_g)), RWKV7State(memory_BHKK, last_BD), {}

    def _with_first(self, v_BTD: Tensor, x_BTD: Tensor, shared: Shared | None) -> Tensor:
        if self.v_low is None:
            if shared is not None:
                shared["v_first"] = v_BTD
            return v_BTD
        first_BTD = None if shared is None else shared.get("v_first")
        layer = self.config.layer
        require(first_BTD is not None, "layer", layer, "0 where no layer before it hands its values on")
        assert first_BTD is not None
        return blend(first_BTD, v_BTD, self.v_low(x_BTD))
