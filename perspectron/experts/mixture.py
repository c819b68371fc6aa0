"""Mixtures of experts as in public models: each token goes to the k experts with the highest scores, whose outputs are
added by weight; a shared network may read every token.

Shapes: B batch, T time, N = B·T tokens, D model width, F hidden width, E experts, K chosen of them, G groups.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.experts.router import MOST_EXPERTS, RoutedConfig, wider
from perspectron.ops import experts
from perspectron.ops.dispatch import affine, full_precision, recorder
from perspectron.ops.fused import batch_invariant, gated
from perspectron.util.config import FFNConfig, at_least, one_of, positive, require
from perspectron.util.streams import normal_slices
from perspectron.util.terms import Term

TINY = 1e-20  # added to the sum of sigmoids that divides them
MATRICES = ("gate_EFD", "up_EFD", "down_EDF")
"""Names of the matrices of all experts in a layer; a mixture's without gates has no first one."""


@dataclass(frozen=True)
class MixtureConfig(FFNConfig):
    """hidden: F of each expert. experts: E. chosen: K.

    score: "softmax" over all experts, or "sigmoid" of each logit; experts are chosen by it, and it is their weight.
    normed: the weights of the chosen are divided by their sum. factor: multiplies the weights after that. corrected: a
    stored number for each expert is added to its score, for the choice only. groups, top_groups: experts are chosen
    from `top_groups` of the groups, those with the largest sums of their two best scores. activation: "silu" is a
    SwiGLU; "relu2" has no gate: W_down relu(W_up x)². shared: hidden width of a network of the same activation that
    every token goes through; 0 for none. shared_gate: its output is multiplied by σ of one logit.
    """

    kind = "mixture"
    hidden: int
    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = True
    factor: float = 1.0
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    activation: Literal["silu", "relu2"] = "silu"
    shared: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "hidden", "experts", "chosen", "groups", "top_groups")
        at_least(0, self, "shared")
        positive(self, "factor")
        one_of(self.score, ("softmax", "sigmoid"), "score")
        one_of(self.activation, ("silu", "relu2"), "activation")
        require(self.experts <= MOST_EXPERTS, "experts", self.experts, f"≤ {MOST_EXPERTS:,}")
        require(
            self.experts % self.groups == 0, "groups", self.groups, f"a divisor of {self.experts} experts"
        )
        bound = f"≤ groups = {self.groups}"
        require(self.top_groups <= self.groups, "top_groups", self.top_groups, bound)
        room = self.experts // self.groups * self.top_groups
        require(
            self.chosen <= room, "chosen", self.chosen, f"≤ {room}, the experts that there are to choose from"
        )
        sizes = self.groups == 1 or self.experts // self.groups >= 2
        require(sizes, "groups", self.groups, f"≤ {self.experts // 2}: of two experts or more each")
        bound = "left out without a shared network"
        require(self.shared > 0 or not self.shared_gate, "shared_gate", True, bound)

    @property
    def count(self) -> int:
        """E."""
        return self.experts

    @property
    def gated(self) -> bool:
        """True if an expert has a gate."""
        return self.activation == "silu"


ExpertsConfig = RoutedConfig | MixtureConfig
"""Configs of networks of experts. They have `hidden`, `count` (E), `chosen` (K, per token) and `gated`."""


class Mixed(nn.Module):
    """Router and shared network of a mixture; subclasses hold its experts."""

    bias_E: Tensor

    def __init__(self, d_model: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.route_proj = nn.Linear(d_model, config.experts, bias=False)
        if config.corrected:
            self.register_buffer("bias_E", torch.empty(config.experts))
        if config.shared:
            if config.gated:
                self.shared_gate_proj = nn.Linear(d_model, config.shared, bias=False)
            self.shared_up_proj = nn.Linear(d_model, config.shared, bias=False)
            self.shared_down_proj = nn.Linear(config.shared, d_model, bias=False)
        if config.shared_gate:
            self.share_proj = nn.Linear(d_model, 1, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set the correction of each expert to 0, so that none is preferred."""
        if self.config.corrected:
            self.bias_E.zero_()

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        """Outputs, and no terms. Padding may take no expert, and then its output is that of the shared network."""
        if (
            tape := recorder()
        ) is not None and pad_BT is None:  # which expert is called depends on values in x
            y_BTD: Tensor = tape.aside(self.routed, x_BTD)
        else:
            y_BTD = self.routed(x_BTD, pad_BT)
        return (y_BTD + self._shared(x_BTD) if self.config.shared else y_BTD), {}

    def routed(self, x_BTD: Tensor, pad_BT: Tensor | None = None) -> Tensor:
        """The sum of the chosen experts' outputs, by weight. A token's output depends on that token only."""
        raise NotImplementedError

    def _shared(self, x_BTD: Tensor) -> Tensor:
        up = self.shared_up_proj(x_BTD)
        hidden = gated(self.shared_gate_proj(x_BTD), up) if self.config.gated else F.relu(up).square()
        y_BTD: Tensor = self.shared_down_proj(hidden)
        if self.config.shared_gate:
            y_BTD = y_BTD * batch_invariant(torch.sigmoid, self.share_proj(x_BTD))
        return y_BTD

    def choose(self, logit_NE: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) [N,K] for these logits, experts in ascending order. Of equal scores the lower id wins."""
        config, K = self.config, self.config.chosen
        logit_NE = logit_NE.to(wider(logit_NE.dtype))
        score_NE = logit_NE
        if config.score == "sigmoid":
            score_NE = batch_invariant(torch.sigmoid, logit_NE, least=0)
        elif config.corrected or config.groups > 1:  # else the logits have the same order
            score_NE = logit_NE.softmax(1)
        by_NE = score_NE.detach()
        if config.corrected:
            by_NE = by_NE + self.bias_E.to(by_NE.dtype)
        if config.groups > 1:
            by_NGE = by_NE.unflatten(1, (config.groups, -1))
            best_NG = by_NGE.topk(2).values.sum(-1)
            left_NG = torch.ones_like(best_NG, dtype=torch.bool)
            top = best_NG.sort(dim=1, descending=True, stable=True).indices[:, : config.top_groups]
            by_NE = by_NGE.masked_fill(left_NG.scatter(1, top, False)[..., None], -math.inf).flatten(1)
        expert_NK = by_NE.sort(dim=1, descending=True, stable=True).indices[:, :K].sort(1).values
        if config.score == "sigmoid":
            weight_NK = score_NE.gather(1, expert_NK)
            if config.normed:
                weight_NK = weight_NK / (weight_NK.sum(1, keepdim=True) + TINY)
        elif config.normed:
            weight_NK = logit_NE.gather(1, expert_NK).softmax(1)
        else:
            weight_NK = logit_NE.softmax(1).gather(1, expert_NK)
        return (weight_NK if config.factor == 1 else weight_NK * config.factor), expert_NK


class Mixture(Mixed):
    """A mixture whose experts are parameters. 16-bit ones are widened when they are used."""

    def __init__(self, d_model: int, config: MixtureConfig) -> None:
        super().__init__(d_model, config)
        E, hidden = config.experts, config.hidden
        if config.gated:
            self.gate_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.up_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.down_EDF = nn.Parameter(torch.empty(E, d_model, hidden))

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise each expert as a dense network, from a random stream of its own."""
        for name, weight in self.matrices().items():
            normal_slices(weight, weight.shape[-1] ** -0.5, generator, name)
        super().init_weights(generator)

    def matrices(self) -> dict[str, nn.Parameter]:
        """The experts' matrices by name."""
        return {name: self.get_parameter(name) for name in (MATRICES if self.config.gated else MATRICES[1:])}

    def idle_parameters(self) -> int:
        """Number of parameters that one token does not touch."""
        E = self.config.experts
        return sum(x.numel() for x in self.matrices().values()) // E * (E - self.config.chosen)

    def routed(self, x_BTD: Tensor, pad_BT: Tensor | None = None) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        with full_precision(x_ND):
            dtype, (weight_ED, _) = wider(x_ND.dtype), affine(self.route_proj)
            logit_NE = experts.scores(x_ND.to(dtype), weight_ED.to(dtype))
            weight_NK, expert_NK = self.choose(logit_NE)
        weights = list[Tensor](self.matrices().values())
        device = x_ND.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_ND, *weights = (tensor.to(dtype) for tensor in (x_ND, *weights))
        y_NKD = experts.chosen(x_ND, expert_NK, *weights)
        return added(y_NKD, weight_NK).to(x_BTD.dtype).view_as(x_BTD)


def added(y_NKD: Tensor, weight_NK: Tensor) -> Tensor:
    """The weighted sum over K, in a fixed order, so that a token's bits depend on nothing else."""
    total, *more = (y_NKD * weight_NK.to(y_NKD.dtype)[..., None]).unbind(1)
    for y_ND in more:
        total = total + y_ND
    return total
