"""Feed-forward networks: what a block does to each token by itself. Each reads the normed hidden state and, if
it wants it, the context: what the block's mixer gave for that token.

Shapes: B batch, T time, D model width, F hidden width, E experts, N tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.config import FFNConfig, require
from perspectron.routing import distance2, lattice
from perspectron.terms import Term

Activation = Literal["gelu", "gelu_tanh"]


@dataclass(frozen=True)
class SwiGLUConfig(FFNConfig):
    """hidden: F."""

    kind = "swiglu"
    hidden: int

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")


@dataclass(frozen=True)
class MLPConfig(FFNConfig):
    """hidden: F. activation: GELU, exact or by tanh as GPT-2 was trained."""

    kind = "mlp"
    hidden: int
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")


@dataclass(frozen=True)
class ContextMLPConfig(FFNConfig):
    """hidden: F. context: read what the mixer gave, through `context_rank` numbers (0: all of it);
    stop_gradient: without teaching the mixer through it. activation: as in "mlp"."""

    kind = "context_mlp"
    hidden: int
    context: bool = True
    context_rank: int = 0
    stop_gradient: bool = False
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")
        require(self.context_rank >= 0, "context_rank", self.context_rank, "≥ 0")
        for name in ("context_rank", "stop_gradient"):
            unused = self.context or not getattr(self, name)
            require(unused, name, getattr(self, name), "left out where context is off")


@dataclass(frozen=True)
class TiedConfig(FFNConfig):
    """The network of another block, `block`, with this block's own norm before it."""

    kind = "tied"
    block: int


@dataclass(frozen=True)
class RoutedConfig(FFNConfig):
    """hidden: F of each expert. torus: experts per axis of the lattice they stand on."""

    kind = "routed"
    hidden: int
    torus: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")
        require(len(self.torus) > 0 and min(self.torus) >= 1, "torus", self.torus, "one or more lengths ≥ 1")


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) ⊙ W_up x) (seeds/topology.md §2.1)."""

    def __init__(self, d_model: int, config: SwiGLUConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, config.hidden, bias=False)
        self.up_proj = nn.Linear(d_model, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, d_model, bias=False)

    def forward(self, x_BTD: Tensor, context_BTD: Tensor | None = None) -> tuple[Tensor, dict[str, Term]]:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)), {}


def gelu(x: Tensor, activation: Activation) -> Tensor:
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """W_down GELU(W_up x), with biases."""

    def __init__(self, d_model: int, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.up_proj = nn.Linear(d_model, config.hidden)
        self.down_proj = nn.Linear(config.hidden, d_model)

    def forward(self, x_BTD: Tensor, context_BTD: Tensor | None = None) -> tuple[Tensor, dict[str, Term]]:
        return self.down_proj(gelu(self.up_proj(x_BTD), self.config.activation)), {}


class ContextMLP(nn.Module):
    """W_down (GELU(W_up [x; c]) ⊙ σ(W_gate [x; c])), with biases; c is the context (seeds/lens.md, enhancement 5)."""

    def __init__(self, d_model: int, config: ContextMLPConfig) -> None:
        super().__init__()
        require(config.context_rank <= d_model, "context_rank", config.context_rank, f"≤ d_model = {d_model}")
        self.config = config
        width = d_model
        if config.context:
            width += config.context_rank or d_model
        if config.context and config.context_rank > 0:
            self.context_proj = nn.Linear(d_model, config.context_rank, bias=False)
        self.up_proj = nn.Linear(width, config.hidden)
        self.gate_proj = nn.Linear(width, config.hidden)
        self.down_proj = nn.Linear(config.hidden, d_model)

    def forward(self, x_BTD: Tensor, context_BTD: Tensor) -> tuple[Tensor, dict[str, Term]]:
        if self.config.context:
            context_BTD = context_BTD.detach() if self.config.stop_gradient else context_BTD
            narrow = self.config.context_rank > 0
            x_BTD = torch.cat([x_BTD, self.context_proj(context_BTD) if narrow else context_BTD], -1)
        gate = torch.sigmoid(self.gate_proj(x_BTD))
        return self.down_proj(gelu(self.up_proj(x_BTD), self.config.activation) * gate), {}


class RoutedSwiGLU(nn.Module):
    """One SwiGLU expert per token: the nearest to z = W_route x + b (mod 1) on the torus.

    The choice is the document's (an argmin, no gate), so no gradient reaches the router.
    """

    def __init__(self, d_model: int, config: RoutedConfig) -> None:
        super().__init__()
        self.config = config
        E = math.prod(config.torus)
        self.route_proj = nn.Linear(d_model, len(config.torus))
        self.gate_EFD = nn.Parameter(torch.empty(E, config.hidden, d_model))
        self.up_EFD = nn.Parameter(torch.empty(E, config.hidden, d_model))
        self.down_EDF = nn.Parameter(torch.empty(E, d_model, config.hidden))

    def init_weights(self, generator: torch.Generator) -> None:
        """Each expert as a dense SwiGLU; queries spread over the torus."""
        for weight in (self.gate_EFD, self.up_EFD, self.down_EDF):
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        self.route_proj.bias.uniform_(0, 1, generator=generator)

    def idle_parameters(self) -> int:
        """Parameters that one token does not touch: all experts but one."""
        E = self.gate_EFD.shape[0]
        return (self.gate_EFD.numel() + self.up_EFD.numel() + self.down_EDF.numel()) // E * (E - 1)

    def forward(self, x_BTD: Tensor, context_BTD: Tensor | None = None) -> tuple[Tensor, dict[str, Term]]:
        x_ND = x_BTD.flatten(0, 1)
        centre_EA = lattice(self.config.torus).to(x_ND)
        expert_N = distance2(self.route_proj(x_ND), centre_EA).argmin(1)
        order_N = expert_N.argsort(stable=True)
        E = centre_EA.shape[0]
        # Which expert it is changes no shape, so on the meta device the first takes all tokens.
        counts = (
            [len(x_ND)] + [0] * (E - 1) if x_ND.is_meta else torch.bincount(expert_N, minlength=E).tolist()
        )
        parts = x_ND[order_N].split(counts)
        y_ND = torch.cat([self._expert(e, part) for e, part in enumerate(parts) if len(part)])
        return y_ND[order_N.argsort()].view_as(x_BTD), {}

    def _expert(self, e: int, x_ND: Tensor) -> Tensor:
        gate, up, down = self.gate_EFD[e], self.up_EFD[e], self.down_EDF[e]
        return F.linear(F.silu(F.linear(x_ND, gate)) * F.linear(x_ND, up), down)


FFNS = {"swiglu": SwiGLU, "mlp": MLP, "context_mlp": ContextMLP, "routed": RoutedSwiGLU}
"""The kinds that have weights of their own; a tied network is another block's."""
