"""Kimi Delta Attention: a matrix memory with delta-rule writes and a decay for each key channel, behind a short
convolution (Kimi Team 2025, arXiv 2510.26692).

Shapes: B batch, T time, D model width, H heads, K = V key and value width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.designs.delta.common import Delta
from perspectron.model.parts import sigmoid
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least, divides


@dataclass(frozen=True)
class KDAConfig(MixerConfig):
    """The options of Kimi Delta Attention.

    heads: H. conv: tokens that the short convolution sees. negative: β up to 2 instead of 1, so that a token can negate
    what its key holds (arXiv 2411.12537). head_dim: K and V; None is D/H, which H must divide. gate_bias: of the
    output's gate; Kimi Linear has none."""

    kind = "kda"
    heads: int
    conv: int = 4
    negative: bool = False
    head_dim: int | None = None
    gate_bias: bool = True

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "conv", *(["head_dim"] if self.head_dim is not None else []))


class KDA(Delta):
    """`Delta` with f = W₂ W₁ x for each channel, β = w = σ(W_b x), one of a head, and g = σ(W₄ W₃ x + b), where W₁ and
    W₃ give as many numbers as a head is wide."""

    small = KDAConfig(heads=2)
    about = "Kimi Delta Attention: the same with a decay for each key channel"
    source = "arXiv 2510.26692"
    framed = KDAConfig(heads=4)
    hidden = 400

    def __init__(self, d_model: int, norm_eps: float, config: KDAConfig) -> None:
        if config.head_dim is None:
            divides(config.heads, d_model)
        K = config.head_dim or d_model // config.heads
        super().__init__(d_model, norm_eps, config.heads, K, K, K, config.conv, (1.0, 16.0))
        self.config = config
        wide = config.heads * K
        self.f_proj = nn.Sequential(nn.Linear(d_model, K, bias=False), nn.Linear(K, wide, bias=False))
        self.b_proj = nn.Linear(d_model, config.heads, bias=False)
        self.g_proj = nn.Sequential(
            nn.Linear(d_model, K, bias=False), nn.Linear(K, wide, bias=config.gate_bias)
        )

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> KDAConfig | None:
        return KDAConfig(heads, head_dim=key) if key == value else None

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta = (1 + self.config.negative) * sigmoid(self.b_proj(x_BTD))[..., None]
        f = self.f_proj(x_BTD).unflatten(-1, (self.config.heads, -1))
        return f, beta, beta, batch_invariant(torch.sigmoid, self.g_proj(x_BTD))
