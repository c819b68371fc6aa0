"""RWKV-7's channel mix, the network that stands beside its time mix. It reads the token before, too, and so has a state
and stands in a block of its own (Peng et al. 2025, arXiv 2503.14456; starts as in BlinkDL/RWKV-LM).

Shapes: B batch, T time, D model width, F hidden width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import between, mixes
from perspectron.model.state import register
from perspectron.util.config import MixerConfig, at_least, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class RWKV7ChannelConfig(MixerConfig):
    """The options of RWKV-7's channel mix.

    hidden: F. layer: its index among the `layers` of this kind, on which its initialisation depends."""

    kind = "rwkv7_channel"
    hidden: int
    layer: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        at_least(1, self, "hidden")
        require(0 <= self.layer < self.layers, "layer", self.layer, f"in [0, {self.layers})")


@register
@dataclass(frozen=True)
class RWKV7ChannelState:
    """last: the input of the last token [B,D], zeros before the document's first; float32 or float64."""

    last_BD: Tensor


class RWKV7Channel(Mixer):
    """x_k lies between x and the token before; y = W_v relu(W_k x_k)²."""

    small = RWKV7ChannelConfig(hidden=24)
    about = "RWKV-7's channel mix: a network that also reads the previous token"
    source = "arXiv 2503.14456"
    state_kind = RWKV7ChannelState

    own_token_shift = True
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: RWKV7ChannelConfig) -> None:
        super().__init__()
        self.config = config
        self.mix_D = nn.Parameter(torch.empty(d_model))
        self.k_proj = nn.Linear(d_model, config.hidden, bias=False)
        self.v_proj = nn.Linear(config.hidden, d_model, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread the mix over the channels, depending on the layer; outputs start at 0."""
        D = len(self.mix_D)
        self.mix_D.copy_(mixes(D, (1 - self.config.layer / self.config.layers) ** 4))
        self.k_proj.weight.uniform_(-0.5 * D**-0.5, 0.5 * D**-0.5, generator=generator)
        self.v_proj.weight.zero_()

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(len(self.mix_D),)]

    @masked
    def forward(
        self, x_BTD: Tensor, state: RWKV7ChannelState, reset_BT: Mask, pad_BT: Mask, consume_state: bool
    ) -> tuple[Tensor, RWKV7ChannelState, dict[str, Term]]:
        (x_BTD,), last_BD = between(x_BTD, state.last_BD, self.mix_D[None], reset_BT, pad_BT)
        h_BTF = F.relu(self.k_proj(x_BTD)).square()
        return self.v_proj(h_BTF), RWKV7ChannelState(last_BD), {}
