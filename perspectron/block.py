"""One layer of a model: a mixer over time, a feed-forward network over channels, and the residual connections.

Shapes: B batch, T time, D model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from perspectron import ranks
from perspectron.config import (
    BlockConfig,
    Law5Config,
    NoResidualConfig,
    RouteGatedConfig,
)
from perspectron.experts.router import Routed, Views
from perspectron.ffn import FFNS, TiedConfig
from perspectron.mixers import MIXERS
from perspectron.ops.dispatch import check_consumed
from perspectron.ops.fused import RMSNorm
from perspectron.state import register
from perspectron.terms import Term

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "layer": nn.LayerNorm}
ROUTE_START = 2.2  # sigmoid: 0.9


@register
@dataclass(frozen=True)
class NoState:
    """Empty state of a block without a mixer."""


class RouteGate(nn.Module):
    """A gate g = σ(raw + bias), one number; the bias follows a schedule (docs/designs/lens.md#route-gate)."""

    bias_1: Tensor

    def __init__(self, config: RouteGatedConfig) -> None:
        super().__init__()
        self.config = config
        self.raw_1 = nn.Parameter(torch.empty(1))
        self.register_buffer("bias_1", torch.empty(1))

    def init_weights(self, generator: torch.Generator) -> None:
        """Start at g = 0.9."""
        self.raw_1.fill_(ROUTE_START)
        self.bias_1.zero_()

    def set_step(self, step: int) -> None:
        """Set the bias for the update that follows `step` others."""
        self.bias_1.fill_(-self.config.anneal * max(0, step - self.config.anneal_after))

    def forward(self) -> Tensor:
        return torch.sigmoid(self.raw_1 + self.bias_1)


class Block(nn.Module):
    """One layer: h adds the mixer's output to the input, y adds the network's. `config.residual` says how."""

    def __init__(self, d_model: int, norm: str, norm_eps: float, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        bare = isinstance(config.residual, NoResidualConfig)
        if config.mixer is not None:
            self.mixer_norm = nn.Identity() if bare else NORMS[norm](d_model, norm_eps)
            self.mixer = MIXERS[config.mixer.kind].module(d_model, norm_eps, config.mixer)
        if config.ffn is not None:
            self.ffn_norm = NORMS[norm](d_model, norm_eps)
            if not isinstance(config.ffn, TiedConfig):
                self.ffn = FFNS[config.ffn.kind](d_model, config.ffn)
        if isinstance(config.residual, RouteGatedConfig):
            self.route = RouteGate(config.residual)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> "DataclassInstance":
        """The state of the mixer before any token."""
        if self.config.mixer is None:
            return NoState()
        state: DataclassInstance = self.mixer.init_state(batch_size, device, dtype, capacity)
        return state

    def forward(
        self,
        x_BTD: Tensor,
        state: object,
        ffn: nn.Module | None,
        reset_BT: Tensor | None,
        pad_BT: Tensor | None,
        consume_state: bool = False,
        shared: dict[str, Tensor] | None = None,
        views: Views | None = None,
    ) -> tuple[Tensor, object, dict[str, Term]]:
        """shared: what mixers that set `shares` pass to those above them, for these tokens only. views: from which a
        routed network chooses experts."""
        check_consumed(consume_state)
        residual = self.config.residual
        if self.config.mixer is None:
            mixed_BTD, aux = torch.zeros_like(x_BTD), dict[str, Term]()
        else:
            read_BTD = x_BTD if isinstance(residual, Law5Config) else self.mixer_norm(x_BTD)
            handed = {"shared": shared} if getattr(self.mixer, "shares", False) else {}
            read_BTD, state = ranks.received(read_BTD, state)
            mixed_BTD, state, aux = self.mixer(
                read_BTD, state, reset_BT=reset_BT, pad_BT=pad_BT, consume_state=consume_state, **handed
            )
            mixed_BTD = ranks.handed(mixed_BTD, state)  # before all ranks meet, to count the load of experts
        if isinstance(residual, NoResidualConfig):
            return mixed_BTD.to(x_BTD.dtype), state, aux
        h_BTD = x_BTD + mixed_BTD
        if isinstance(residual, Law5Config):
            h_BTD = self.mixer_norm(h_BTD)
        if ffn is None:
            return h_BTD, state, aux
        seen = {} if views is None or not isinstance(ffn, Routed) else {"views": views}
        y_BTD, more = ffn(self.ffn_norm(h_BTD), mixed_BTD, reset_BT=reset_BT, pad_BT=pad_BT, **seen)
        if isinstance(residual, RouteGatedConfig):
            g = self.route().to(x_BTD.dtype)
            y_BTD = x_BTD + residual.scale * (g * mixed_BTD + (1 - g) * y_BTD)
            return y_BTD, state, aux | more | {"route_gate": Term(g.detach()[0])}
        return h_BTD + y_BTD, state, aux | more
