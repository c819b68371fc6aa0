"""A short convolution between two gates, the mixer of most layers of LFM2 (Liquid AI 2025;
docs/designs/baselines.md#gated-short-convolution).

Shapes: B batch, T time, D model width, W taps, Z = W − 1 tokens that it remembers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.model.masks import Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ShortConv
from perspectron.model.state import register
from perspectron.util.config import MixerConfig, at_least
from perspectron.util.terms import Term


@dataclass(frozen=True)
class GatedConvConfig(MixerConfig):
    """The options of a gated short convolution.

    conv: W, tokens that it sees. bias: of the projections and of the convolution."""

    kind = "gated_conv"
    conv: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "conv")


@register
@dataclass(frozen=True)
class GatedConvState:
    """window: the last inputs of the convolution [B,Z,D], zeros before the document's first; float32 or float64."""

    window_BZD: Tensor


class GatedConv(Mixer):
    """b, c, x = W_in u; y = W_o (c ⊙ conv(b ⊙ x)), with nothing between the convolution and its gate."""

    small = GatedConvConfig()
    about = "LFM2's short convolution between two gates, which remembers two tokens"
    source = "docs/designs/baselines.md#gated-short-convolution"
    state_kind = GatedConvState
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: GatedConvConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=config.bias)
        self.conv1d = ShortConv(d_model, config.conv, bias=config.bias, swish=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=config.bias)

    def init_weights(self, generator: torch.Generator) -> None:
        self.conv1d.draw(generator)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [self.conv1d.window]

    @masked
    def forward(
        self, x_BTD: Tensor, state: GatedConvState, reset_BT: Mask, pad_BT: Mask, consume_state: bool
    ) -> tuple[Tensor, GatedConvState, dict[str, Term]]:
        b, c, u = self.in_proj(x_BTD).chunk(3, -1)
        u_BTD, window_BZD = self.conv1d(b * u, state.window_BZD, reset_BT, pad_BT)
        return self.o_proj((c * u_BTD).to(x_BTD.dtype)), GatedConvState(window_BZD), {}
