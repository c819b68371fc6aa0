"""The routed layer: one SwiGLU expert per token, chosen by the router (docs/designs/perspective.md#experts).

Shapes: B batch, T time, N = B·T tokens, D model width, F hidden width, E experts, K weights sampled of an expert, S
hidden units sampled, U experts in use.
"""

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from perspectron.experts.mixture import MATRICES
from perspectron.experts.router import Choice, Routed, RoutedConfig, Views, wider
from perspectron.experts.ternary import int8, ternary
from perspectron.experts.torus import balance, gini, likeness, neighbour_delta, nudged, smoothness
from perspectron.ops import experts
from perspectron.ops.dispatch import once_differentiable, recorder
from perspectron.util import ranks
from perspectron.util.streams import normal_slices
from perspectron.util.terms import Term

if TYPE_CHECKING:
    from perspectron.experts.spread import Spread

SAMPLED = 64  # a loss on weights reads one of so many parts of the hidden units at each update, in turn
OWN = 2.0  # times their mean magnitude; differences from the base below that count as 0
OWN_START = 0.1  # scale of a new expert's differences, relative to the base
EXPERTS = (
    *MATRICES,
    *("base_gate_FD", "base_up_FD", "base_down_DF"),
    *("load_E", "ternary_share_1"),
)
"""Names of tensors that a `RoutedSwiGLU` has beside those of its router."""


class RoutedSwiGLU(Routed):
    """A router and its experts. It reports its losses and, of the batch's load, `gini` and `reached`, the share of
    experts that got a token."""

    load_E: Tensor
    ternary_share_1: Tensor

    def __init__(self, d_model: int, config: RoutedConfig) -> None:
        super().__init__(d_model, config)
        E, hidden = math.prod(config.torus), config.hidden
        self.gate_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.up_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.down_EDF = nn.Parameter(torch.empty(E, d_model, hidden))
        if config.base:
            self.base_gate_FD = nn.Parameter(torch.empty(hidden, d_model))
            self.base_up_FD = nn.Parameter(torch.empty(hidden, d_model))
            self.base_down_DF = nn.Parameter(torch.empty(d_model, hidden))
        if config.bias_rate > 0:
            self.register_buffer("load_E", torch.empty(E, dtype=torch.int64))
        if config.ternary:
            self.register_buffer("ternary_share_1", torch.empty(1))
        self.turn = 0
        self.spread: Spread | None = None
        """The ranks that hold the experts; None: all of them are here."""

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise each expert as a dense SwiGLU, from a random stream of its own; then the router."""
        own = OWN_START if self.config.base else 1.0
        for name in MATRICES:
            weight = self.get_parameter(name)
            normal_slices(weight, own * weight.shape[-1] ** -0.5, generator, name)
        if self.config.base:
            for weight in (self.base_gate_FD, self.base_up_FD, self.base_down_DF):
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        super().init_weights(generator)
        if self.config.bias_rate > 0:
            self.load_E.zero_()
        if self.config.ternary:
            self.ternary_share_1.fill_(1)

    def idle_parameters(self) -> int:
        """Number of parameters that one token does not touch: those of all experts but one."""
        E = self.gate_EFD.shape[0]
        return (self.gate_EFD.numel() + self.up_EFD.numel() + self.down_EDF.numel()) // E * (E - 1)

    @property
    def frozen(self) -> bool:
        """True if no matrix of the experts learns."""
        own = self.named_parameters(recurse=False)
        return not any(p.requires_grad for name, p in own if name != "offset_EA")

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Move the biases by the load of the last update, if the router learns; called before the update that follows
        `step` others."""
        self.turn = step
        if self.config.bias_rate > 0:
            offsets = [self.offset_EA] if hasattr(self, "offset_EA") else []
            if step > 0 and any(p.requires_grad for p in (*self.route_proj.parameters(), *offsets)):
                rate = self.config.bias_rate * self.config.tau
                self.bias_E.copy_(nudged(self.bias_E, self.load_E, rate))
            self.load_E.zero_()

    # ------------------------------------------------------------ experts

    def weights(self, expert_U: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, up and down matrices as they are used, of these experts or of all: with the base added, and ternary
        by the current share."""
        used = []
        for name in MATRICES:
            weight: Tensor = getattr(self, name)
            weight = weight if self.spread is None else cast(Any, weight).to_local()
            weight = weight if expert_U is None else weight[expert_U]
            if self.config.base:
                base: Tensor = getattr(self, f"base_{name.replace('E', '')}")
                weight = base + sparse(weight)
            if self.config.ternary:
                config = self.config
                weight = ternary(weight, self.ternary_share_1, config.ternary_rule, config.ternary_schedule)
            used.append(weight)
        gate, up, down = used
        return gate, up, down

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        views: Views | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        """Outputs, and loss terms if gradients are on. views: from which rows choose experts; None: as in training."""
        if (tape := recorder()) is not None and views is None and reset_BT is None and pad_BT is None:
            return self.aside(tape, x_BTD, context_BTD), {}
        x_ND = x_BTD.flatten(0, 1)
        learns = torch.is_grad_enabled()
        with torch.set_grad_enabled(learns and self.config.gate != "none"):
            choice = self.router.route(self.read(x_BTD, context_BTD).flatten(0, 1), views)
        y_ND, sample = self._experts(x_ND, choice.expert_N)
        if self.config.gate == "soft":
            y_ND = y_ND * choice.gate_N.to(y_ND.dtype)[:, None]
        elif self.config.gate == "straight_through":
            y_ND = _StraightThrough.apply(y_ND, choice.gate_N)
        y_BTD = y_ND.view_as(x_BTD)
        return y_BTD, self._terms(choice, sample, y_BTD, reset_BT, pad_BT) if learns else {}

    def _experts(self, x_ND: Tensor, expert_N: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [N,D] and, if a loss asks for them, the weights of some hidden units [E,3S,D]."""
        config, units, rounded = self.config, slice(0), None
        used_U = None
        if torch.is_grad_enabled():
            if config.delta > 0 or config.diversity > 0:
                parts = min(SAMPLED, config.hidden)
                part = self.turn % parts
                units = slice(part * config.hidden // parts, (part + 1) * config.hidden // parts)
        elif self.spread is not None:
            pass  # other ranks choose which of this rank's experts they need
        elif (config.base or config.ternary) and x_ND.is_meta:
            used_U = expert_N[: len(self.gate_EFD)]  # as many as the tokens can reach at most
        elif config.base or config.ternary:
            used_U, expert_N = expert_N.unique(return_inverse=True)  # the others' weights are not needed
        if config.int8_activations:
            x_ND, rounded = int8(x_ND), int8
        weights = self.weights(used_U)
        device = x_ND.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_ND, *cast = (tensor.to(dtype) for tensor in (x_ND, *weights))
            weights = (cast[0], cast[1], cast[2])
        if self.spread is not None:
            return self.spread.swiglu(x_ND, expert_N, weights, units=units, rounded=rounded)
        return experts.swiglu(x_ND, expert_N, *weights, units=units, rounded=rounded)

    # ------------------------------------------------------------ training

    def _terms(
        self,
        choice: Choice,
        sample: Tensor,
        y_BTD: Tensor,
        reset_BT: Tensor | None,
        pad_BT: Tensor | None,
    ) -> dict[str, Term]:
        """The terms that are reported, to which padding does not count. The load is added for the biases in the
        backward pass."""
        config, E = self.config, len(self.gate_EFD)
        counted_N = torch.ones_like(choice.expert_N, dtype=torch.bool)
        if pad_BT is not None:
            counted_N = ~pad_BT.flatten()
        load_E = ranks.all_reduce_sum(experts.load(choice.expert_N.where(counted_N, E), E))
        if config.bias_rate > 0 and self.training and y_BTD.requires_grad:
            # Counted once per update: activations may be recomputed, but a gradient comes back once.
            y_BTD.register_hook(lambda _: self._count(load_E))
        terms = {"gini": Term(gini(load_E)), "reached": Term((load_E > 0).float().mean())}
        if config.gate != "none":
            probability_NE = (choice.distance2_NE / -config.tau).softmax(1)
            terms["balance"] = Term(balance(probability_NE, load_E, counted_N), config.balance)
            if config.router == "torus":
                query_BTA = choice.query_NA.unflatten(0, y_BTD.shape[:2])
                terms["smooth"] = Term(smoothness(query_BTA, reset_BT, pad_BT), config.smooth)
        if sample.numel() > 0:
            sample_EK = sample.flatten(1).to(wider(sample.dtype))
            terms["delta"] = Term(neighbour_delta(sample_EK, config.torus), config.delta)
            if config.diversity > 0:
                terms["diversity"] = Term(likeness(sample_EK, config.torus), config.diversity)
        return terms

    def _count(self, load_E: Tensor) -> None:
        self.load_E += load_E


class _StraightThrough(torch.autograd.Function):
    """y · g / stop_grad(g), which equals y, without computing it: the gradients are dy and Σ dy · y / g. (The expert
    chosen is the likeliest, so g is never 0.)"""

    @staticmethod
    def forward(y_ND: Tensor, gate_N: Tensor) -> Tensor:
        # `jvp` gives no view; here forward mode is switched off, so that `forward_mode()` is False
        return y_ND.view_as(y_ND) if forward_ad._current_level < 0 else y_ND.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> Any:
        def gradients(dy_ND: Tensor, y_ND: Tensor, gate_N: Tensor) -> tuple[Tensor, Tensor]:
            return dy_ND, torch.linalg.vecdot(dy_ND, y_ND).to(gate_N.dtype) / gate_N

        return once_differentiable("the straight-through gate", gradients, dy_ND, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, dy_ND: Tensor, dgate_N: Tensor) -> Tensor:
        y_ND, gate_N = ctx.saved_tensors
        return dy_ND + y_ND * (dgate_N / gate_N).to(y_ND.dtype)[:, None]


def sparse(own: Tensor) -> Tensor:
    """An expert's differences from the base: in each matrix, entries above twice the mean magnitude, the others 0. All
    entries learn (straight through)."""
    size = own.detach().abs()
    kept = own.detach() * (size > OWN * size.mean((-2, -1), keepdim=True))
    return own + (kept - own.detach())
