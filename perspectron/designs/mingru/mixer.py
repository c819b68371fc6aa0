"""minGRU: each channel moves towards a candidate by a gate, both computed from the input alone, behind a short
convolution (Feng et al. 2024, arXiv 2410.01201).

Shapes: B batch, T time, D model width, I inner width, W taps of the convolution, Z = W − 1 inputs it remembers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.model.masks import Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ShortConv
from perspectron.model.state import register
from perspectron.ops import pdr
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least
from perspectron.util.terms import Term


@dataclass(frozen=True)
class MinGRUConfig(MixerConfig):
    """The options of minGRU.

    expand: the inner width in multiples of the model's. conv: W, tokens that the short convolution sees."""

    kind = "mingru"
    expand: int = 2
    conv: int = 4

    def __post_init__(self) -> None:
        at_least(1, self, "expand", "conv")


@register
@dataclass(frozen=True)
class MinGRUState:
    """The state of minGRU. hidden: h [B,I]; window: the last W − 1 inputs of the convolution [B,Z,D], zeros before the
    document's first. Both float32 or float64."""

    hidden_BI: Tensor
    window_BZD: Tensor


class MinGRU(Mixer):
    """u = swish(conv(x)); z = σ(W_z u + b), c = g(W_h u + b'), g(a) = a + ½ for a ≥ 0, else σ(a);
    h ← (1 − z) h + z c; y = W_o h. It is PDR's recurrence at a rank of 1."""

    small = MinGRUConfig()
    about = "minGRU: a gated average in each channel, with gates from the input alone"
    source = "arXiv 2410.01201"
    state_kind = MinGRUState
    framed = MinGRUConfig()
    hidden = 360
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: MinGRUConfig) -> None:
        super().__init__()
        inner = config.expand * d_model
        self.config = config
        self.conv1d = ShortConv(d_model, config.conv)
        self.z_proj = nn.Linear(d_model, inner)
        self.h_proj = nn.Linear(d_model, inner)
        self.o_proj = nn.Linear(inner, d_model, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """The convolution as torch starts one; the rest is the model's default, gates of about ½."""
        self.conv1d.draw(generator)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.o_proj.in_features,), self.conv1d.window]

    @masked
    def forward(
        self, x_BTD: Tensor, state: MinGRUState, reset_BT: Mask, pad_BT: Mask, consume_state: bool
    ) -> tuple[Tensor, MinGRUState, dict[str, Term]]:
        u_BTD, window_BZD = self.conv1d(x_BTD, state.window_BZD, reset_BT, pad_BT)
        u_BTD = u_BTD.to(x_BTD.dtype)
        full = torch.promote_types(x_BTD.dtype, torch.float32)
        z_BTI, c_BTI = self.z_proj(u_BTD).to(full), self.h_proj(u_BTD).to(full)
        c_BTI = torch.where(c_BTI >= 0, c_BTI + 0.5, batch_invariant(torch.sigmoid, c_BTI))
        v_BTI = filled(batch_invariant(torch.sigmoid, z_BTI) * c_BTI, pad_BT, 0)
        gate_BTI = filled(filled(batch_invariant(torch.sigmoid, -z_BTI), pad_BT, 1), reset_BT, 0)
        one_BT1 = torch.ones_like(v_BTI[..., :1])
        h_BTI, hidden_BI1 = pdr.scan(
            one_BT1, one_BT1, v_BTI, gate_BTI, state.hidden_BI[..., None],
            scale=1.0, consume_state=consume_state, checked=False,
        )  # fmt: skip
        return self.o_proj(h_BTI.to(x_BTD.dtype)), MinGRUState(hidden_BI1[..., 0], window_BZD), {}
