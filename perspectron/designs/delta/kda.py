"""Kimi Delta Attention: a matrix memory with delta-rule writes and a decay for each key channel, behind a short
convolution (Kimi Team 2025, arXiv 2510.26692).

Shapes: B batch, T time, D model width, H heads, K = V = D/H key and value width.
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

    heads: H, must divide the model width. conv: tokens that the short convolution sees. negative: β up to 2 instead of
    1, so that a token can negate what its key holds (arXiv 2411.12537)."""

    kind = "kda"
    heads: int
    conv: int = 4
    negative: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "conv")


class KDA(Delta):
    """`Delta` with f = W₂ W₁ x for each channel, β = w = σ(W_b x), one of a head, and g = σ(W₄ W₃ x + b), where W₁ and
    W₃ give as many numbers as a head is wide."""

    small = KDAConfig(heads=2)
    about = "Kimi Delta Attention: the same with a decay for each key channel"
    source = "arXiv 2510.26692"
    framed = KDAConfig(heads=4)
    hidden = 400

    def __init__(self, d_model: int, norm_eps: float, config: KDAConfig) -> None:
        divides(config.heads, d_model)
        K = d_model // config.heads
        super().__init__(d_model, norm_eps, config.heads, K, K, K, config.conv, (1.0, 16.0))
        self.config = config
        self.f_proj = nn.Sequential(nn.Linear(d_model, K, bias=False), nn.Linear(K, d_model, bias=False))
        self.b_proj = nn.Linear(d_model, config.heads, bias=False)
        self.g_proj = nn.Sequential(nn.Linear(d_model, K, bias=False), nn.Linear(K, d_model))

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta = (1 + self.config.negative) * sigmoid(self.b_proj(x_BTD))[..., None]
        f = self.f_proj(x_BTD).unflatten(-1, (self.config.heads, -1))
        return f, beta, beta, batch_invariant(torch.sigmoid, self.g_proj(x_BTD))
