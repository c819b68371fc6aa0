"""Feed-forward networks, applied to each token separately. Each reads the normed hidden state and optionally the
context, which is the output of the block's mixer for that token. `reset_BT` and `pad_BT` are those of a mixer and only
affect what is reported here.

Shapes: B batch, T time, D model width, F hidden width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.mixture import Mixture
from perspectron.ops import fused
from perspectron.ops.fused import batch_invariant, gated
from perspectron.util.config import FFNConfig, require
from perspectron.util.terms import Term

Activation = Literal["gelu", "gelu_tanh"]


@dataclass(frozen=True)
class SwiGLUConfig(FFNConfig):
    """A SwiGLU of hidden width F = `hidden`. activation: of the gate. bias: of all three matrices."""

    kind = "swiglu"
    hidden: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")


@dataclass(frozen=True)
class MLPConfig(FFNConfig):
    """An MLP of hidden width F = `hidden`. activation: GELU, exact or by tanh as GPT-2 was trained, or relu². bias: of
    both matrices."""

    kind = "mlp"
    hidden: int
    activation: Literal["gelu", "gelu_tanh", "relu2"] = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")


@dataclass(frozen=True)
class ContextMLPConfig(FFNConfig):
    """A gated MLP of hidden width F = `hidden`. context: it also reads the mixer's output, projected to `context_rank`
    numbers (0: not projected). stop_gradient: no gradient flows through the context. activation: as in "mlp"."""

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


class Network(nn.Module):
    """A network that reports nothing and therefore ignores masks. `output` computes its output."""

    output: Callable[[Tensor, Any], Tensor]
    exact_cells = 1
    """As `Mixer.exact_cells`."""

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        return self.output(x_BTD, context_BTD), {}


class SwiGLU(Network):
    """W_down(SiLU(W_gate x) ⊙ W_up x) (docs/designs/perspective.md#experts), or with GELU by tanh in SiLU's place."""

    def __init__(self, d_model: int, config: SwiGLUConfig) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(d_model, config.hidden, bias=config.bias)
        self.up_proj = nn.Linear(d_model, config.hidden, bias=config.bias)
        self.down_proj = nn.Linear(config.hidden, d_model, bias=config.bias)

    def output(self, x_BTD: Tensor, context_BTD: Any) -> Tensor:
        gate, up = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        return self.down_proj(gated(gate, up) if self.config.activation == "silu" else fused.gelu(gate) * up)


def gelu(x: Tensor, activation: Activation) -> Tensor:
    """GELU, exact or by tanh."""
    return fused.gelu(x) if activation == "gelu_tanh" else batch_invariant(F.gelu, x)


class MLP(Network):
    """W_down GELU(W_up x), or W_down relu(W_up x)²."""

    def __init__(self, d_model: int, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.up_proj = nn.Linear(d_model, config.hidden, bias=config.bias)
        self.down_proj = nn.Linear(config.hidden, d_model, bias=config.bias)

    def output(self, x_BTD: Tensor, context_BTD: Any) -> Tensor:
        up, activation = self.up_proj(x_BTD), self.config.activation
        return self.down_proj(F.relu(up).square() if activation == "relu2" else gelu(up, activation))


class ContextMLP(Network):
    """W_down (GELU(W_up [x; c]) ⊙ σ(W_gate [x; c])), with biases; c is the context (docs/designs/lens.md#context)."""

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

    def output(self, x_BTD: Tensor, context_BTD: Tensor) -> Tensor:
        if self.config.context:
            context_BTD = context_BTD.detach() if self.config.stop_gradient else context_BTD
            narrow = self.config.context_rank > 0
            x_BTD = torch.cat([x_BTD, self.context_proj(context_BTD) if narrow else context_BTD], -1)
        gate = batch_invariant(torch.sigmoid, self.gate_proj(x_BTD))
        return self.down_proj(gelu(self.up_proj(x_BTD), self.config.activation) * gate)


FFNS = {
    "swiglu": SwiGLU, "mlp": MLP, "context_mlp": ContextMLP, "routed": RoutedSwiGLU, "mixture": Mixture,
}  # fmt: skip
"""The kinds that have weights of their own; a tied network is another block's."""
