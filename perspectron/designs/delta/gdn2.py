"""Gated DeltaNet-2: Kimi Delta Attention with separate gates for erasing each key channel and writing each value
channel, instead of one gate per head (Hatamizadeh, Choi & Kautz 2026, arXiv 2605.22791).

Shapes: B batch, T time, D model width, H heads, K = V = D/H key and value width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.delta.common import Delta
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least, divides


@dataclass(frozen=True)
class GDN2Config(MixerConfig):
    """The options of Gated DeltaNet-2.

    heads: H, must divide the model width. conv: tokens that the short convolution sees. negative: erasing up to 2
    instead of 1, so that a token can negate what its key holds (arXiv 2411.12537)."""

    kind = "gdn2"
    heads: int
    conv: int = 4
    negative: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "conv")


class GDN2(Delta):
    """`Delta` with f = W₂ W₁ x, β = σ(W_e x) and w = σ(W_w x) for each channel, and g = swish(W₄ W₃ x + b), where W₁
    and W₃ give as many numbers as a head is wide."""

    small = GDN2Config(heads=2)
    about = "Gated DeltaNet-2: the same with separate gates for erasing and writing"
    source = "arXiv 2605.22791"
    framed = GDN2Config(heads=4)
    hidden = 316

    def __init__(self, d_model: int, norm_eps: float, config: GDN2Config) -> None:
        divides(config.heads, d_model)
        K = d_model // config.heads
        super().__init__(d_model, norm_eps, config.heads, K, K, K, config.conv, (1.0, 16.0))
        self.config = config
        self.f_proj = nn.Sequential(nn.Linear(d_model, K, bias=False), nn.Linear(K, d_model, bias=False))
        self.e_proj = nn.Linear(d_model, d_model, bias=False)
        self.w_proj = nn.Linear(d_model, d_model, bias=False)
        self.g_proj = nn.Sequential(nn.Linear(d_model, K, bias=False), nn.Linear(K, d_model))

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = (self.f_proj(x_BTD), self.e_proj(x_BTD), self.w_proj(x_BTD))
        f, erase, write = (x.unflatten(-1, (self.config.heads, -1)) for x in inputs)
        beta = (1 + self.config.negative) * batch_invariant(torch.sigmoid, erase)
        return f, beta, batch_invariant(torch.sigmoid, write), batch_invariant(F.silu, self.g_proj(x_BTD))
