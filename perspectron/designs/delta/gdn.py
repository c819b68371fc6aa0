"""Gated DeltaNet: a matrix memory with delta-rule writes and one decay per head, behind a short convolution (Yang,
Kautz & Hatamizadeh 2024, arXiv 2412.06464).

Shapes: B batch, T time, D model width, H heads, G heads of queries and keys, K key width, V value width.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.delta.common import Delta
from perspectron.model.parts import sigmoid
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least, positive, require


@dataclass(frozen=True)
class GDNConfig(MixerConfig):
    """The options of Gated DeltaNet.

    heads: H. conv: tokens that the short convolution sees. negative: β up to 2 instead of 1, so that a token can negate
    what its key holds (arXiv 2411.12537). key_heads: G, each of which H / G heads in a row share; None is H.
    key_dim: K; None is 3D/4H, and H must then divide ¾ of the model width. value_dim: V; None is 2K. norm_eps: of the
    output's norm; None is the model's."""

    kind = "gdn"
    heads: int
    conv: int = 4
    negative: bool = False
    key_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "conv", "key_heads", "key_dim", "value_dim")
        positive(self, "norm_eps")
        groups = self.key_heads or self.heads
        require(self.heads % groups == 0, "key_heads", groups, f"a divisor of heads = {self.heads}")


class GDN(Delta):
    """`Delta` with f = W_a x and β = w = σ(W_b x), one of a head, and g = swish(W_g x)."""

    small = GDNConfig(heads=2)
    about = "Gated DeltaNet: a matrix memory with delta-rule writes and one decay per head"
    source = "arXiv 2412.06464"
    framed = GDNConfig(heads=4)
    hidden = 356

    def __init__(self, d_model: int, norm_eps: float, config: GDNConfig) -> None:
        H, K = config.heads, config.key_dim
        if K is None:
            bound = f"a divisor of 3/4 d_model = {3 * d_model / 4:g}"
            require(3 * d_model % (4 * H) == 0, "heads", H, bound)
            K = 3 * d_model // (4 * H)
        V = config.value_dim or 2 * K
        super().__init__(
            d_model, config.norm_eps or norm_eps, H, K, V, 1, config.conv, (0.0, 16.0), config.key_heads
        )
        self.config = config
        self.a_proj = nn.Linear(d_model, H, bias=False)
        self.b_proj = nn.Linear(d_model, H, bias=False)
        self.g_proj = nn.Linear(d_model, H * V, bias=False)

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> GDNConfig:
        return GDNConfig(heads, key_dim=key, value_dim=value)

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta = (1 + self.config.negative) * sigmoid(self.b_proj(x_BTD))[..., None]
        return self.a_proj(x_BTD)[..., None], beta, beta, batch_invariant(F.silu, self.g_proj(x_BTD))
