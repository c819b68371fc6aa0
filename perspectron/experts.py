"""One SwiGLU expert per token, found by a query on a torus (decisions.md §2, seeds/topology.md §2.1).

Shapes: B batch, T time, N = B·T tokens, D model width, F hidden width, E experts, A axes of the torus, U experts in
use, S hidden units sampled.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from perspectron.config import FFNConfig, one_of, require
from perspectron.ops import experts
from perspectron.quant.ternary import int8, ternary
from perspectron.routing import (
    balance,
    distance2,
    gini,
    lattice,
    likeness,
    neighbour_delta,
    nudged,
    smoothness,
)
from perspectron.terms import Term

SPREAD = (
    0.15  # of queries, in turns. Free to grow, it does, until routing is a hash of noise (docs/lab-notes.md)
)
OFFSET = 0.4  # of a cell: positions never leave their order, so neighbours stay neighbours
SAMPLED = 64  # a loss on weights reads this part of the hidden units at each update, all of them in turn
OWN = 2.0  # times their mean magnitude: what is smaller is no difference from the base
OWN_START = 0.1  # of a new expert's differences, in terms of the base


@dataclass(frozen=True)
class RoutedConfig(FFNConfig):
    """hidden: F of each expert. torus: experts per axis of the lattice they stand on. experts: how many, which must
    fill the lattice; 0 is as many as it has.

    gate: what the chosen expert's output is multiplied with. "none": nothing, and the router does not learn from
    the task; "straight_through": g / g, which is 1 and has the gradient of log g; "soft": g. g is the softmax of
    −d²/τ over the `nearest` experts, τ = temperature · (side of a cell)². router: "torus", or "switch", a plain
    linear layer with a logit for each expert, whose softmax is g.

    balance, smooth, delta, diversity: weights of the losses in `perspectron.routing`. bias_rate: how far an update
    moves the biases w of the power diagram (argmin d² − w), in terms of τ; 0: there are none. offsets: experts
    move from their cell's centre. base: the experts' weights are a shared part and few own differences.
    ternary: experts' matrices are −s, 0, s as far as the recipe has come. int8_activations: what they read, too.
    """

    kind = "routed"
    hidden: int
    torus: tuple[int, ...]
    experts: int = 0
    gate: Literal["none", "straight_through", "soft"] = "straight_through"
    nearest: int = 8
    temperature: float = 0.5
    router: Literal["torus", "switch"] = "torus"
    balance: float = 0.01
    bias_rate: float = 0.05
    smooth: float = 0.005
    delta: float = 0.001
    diversity: float = 0.0
    offsets: bool = True
    base: bool = False
    ternary: bool = False
    int8_activations: bool = False

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden", self.hidden, "≥ 1")
        require(len(self.torus) > 0 and min(self.torus) >= 1, "torus", self.torus, "one or more lengths ≥ 1")
        E = math.prod(self.torus)
        require(self.experts in (0, E), "experts", self.experts, f"the {E} that fill a torus of {self.torus}")
        one_of(self.gate, ("none", "straight_through", "soft"), "gate")
        one_of(self.router, ("torus", "switch"), "router")
        require(self.nearest >= 1, "nearest", self.nearest, "≥ 1")
        require(self.temperature > 0, "temperature", self.temperature, "> 0")
        for name in ("balance", "bias_rate", "smooth", "delta", "diversity"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "≥ 0")

    @property
    def tau(self) -> float:
        """τ of the softmax over −d²/τ; 1 for a switch."""
        if self.router == "switch":
            return 1.0
        axes = sum(n > 1 for n in self.torus)
        return self.temperature * math.prod(self.torus) ** (-2 / max(axes, 1))


class Choice(NamedTuple):
    """Of each token: its expert; the probability g of that one; its query on the torus, not wrapped [N,A] (a switch
    has none: A = 0); its power distances d² − w [N,E], the least of which is chosen (of a switch: −logit − w)."""

    expert_N: Tensor
    gate_N: Tensor
    query_NA: Tensor
    distance2_NE: Tensor


class RoutedSwiGLU(nn.Module):
    """Experts, their router and its biases. What it reports: losses by their weights, and of the load of this batch
    `gini` and `reached`, the share of experts that got a token."""

    bias_E: Tensor
    load_E: Tensor
    ternary_share_1: Tensor

    def __init__(self, d_model: int, config: RoutedConfig) -> None:
        super().__init__()
        self.config = config
        E, axes, hidden = math.prod(config.torus), len(config.torus), config.hidden
        self.route_proj = nn.Linear(d_model, E if config.router == "switch" else axes)
        if config.offsets and config.router == "torus":
            self.offset_EA = nn.Parameter(torch.empty(E, axes))
        self.gate_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.up_EFD = nn.Parameter(torch.empty(E, hidden, d_model))
        self.down_EDF = nn.Parameter(torch.empty(E, d_model, hidden))
        if config.base:
            self.base_gate_FD = nn.Parameter(torch.empty(hidden, d_model))
            self.base_up_FD = nn.Parameter(torch.empty(hidden, d_model))
            self.base_down_DF = nn.Parameter(torch.empty(d_model, hidden))
        if config.bias_rate > 0:
            self.register_buffer("bias_E", torch.empty(E))
            self.register_buffer("load_E", torch.empty(E, dtype=torch.int64))
        if config.ternary:
            self.register_buffer("ternary_share_1", torch.empty(1))
        self.turn = 0

    def init_weights(self, generator: torch.Generator) -> None:
        """Each expert as a dense SwiGLU; positions at the centres, queries about a random place."""
        own = OWN_START if self.config.base else 1.0
        for weight in (self.gate_EFD, self.up_EFD, self.down_EDF):
            weight.normal_(0, own * weight.shape[-1] ** -0.5, generator=generator)
        if self.config.base:
            for weight in (self.base_gate_FD, self.base_up_FD, self.base_down_DF):
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        if self.config.router == "torus":
            self.route_proj.bias.uniform_(0, 1, generator=generator)
        if hasattr(self, "offset_EA"):
            self.offset_EA.zero_()
        if self.config.bias_rate > 0:
            self.bias_E.zero_()
            self.load_E.zero_()
        if self.config.ternary:
            self.ternary_share_1.fill_(1)

    def idle_parameters(self) -> int:
        """Parameters that one token does not touch: all experts but one."""
        E = self.gate_EFD.shape[0]
        return (self.gate_EFD.numel() + self.up_EFD.numel() + self.down_EDF.numel()) // E * (E - 1)

    @torch.no_grad()
    def set_step(self, step: int) -> None:
        """Before the update that follows `step` others: biases move by the load that the last one saw."""
        self.turn = step
        if self.config.bias_rate > 0:
            if step > 0:
                rate = self.config.bias_rate * self.config.tau
                self.bias_E.copy_(nudged(self.bias_E, self.load_E, rate))
            self.load_E.zero_()

    # ------------------------------------------------------------ router

    def positions(self) -> Tensor:
        """Where the experts stand [E,A], each less than half a cell from the centre of its own; at least float32."""
        weight = self.route_proj.weight
        place_EA = lattice(self.config.torus).to(weight.device, wider(weight.dtype))
        if not self.config.offsets:
            return place_EA
        return place_EA + OFFSET * self.offset_EA.to(place_EA).tanh() / place_EA.new_tensor(self.config.torus)

    def route(self, x_ND: Tensor) -> Choice:
        """The expert of each token, in at least float32 also under autocast. Ties go to the lowest id.

        The query is z = W x + b; rows of W have one length, and learn a direction. (A switch's are as they are.)
        """
        device = x_ND.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.route(x_ND)
        query_NA, distance2_NE = self.distances(x_ND)
        expert_N = distance2_NE.argmin(1)
        logit_NE = distance2_NE / -self.config.tau
        E, k = logit_NE.shape[1], self.config.nearest
        near_NK = logit_NE if self.config.router == "switch" or k >= E else logit_NE.topk(k).values
        gate_N = (logit_NE.gather(1, expert_N[:, None])[:, 0] - near_NK.logsumexp(1)).exp()
        return Choice(expert_N, gate_N, query_NA, distance2_NE)

    def distances(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and power distances, as in `Choice`."""
        dtype = wider(x_ND.dtype)
        weight, bias = self.direction(dtype)
        out = F.linear(x_ND.to(dtype), weight, bias)
        if self.config.router == "switch":
            query_NA, distance2_NE = out[:, :0], -out
        else:
            query_NA, distance2_NE = out, distance2(out, self.positions().to(dtype))
        if self.config.bias_rate > 0:
            distance2_NE = distance2_NE - self.bias_E.to(dtype)
        return query_NA, distance2_NE

    def direction(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W [A,D] and b [A] as they are used."""
        weight, bias = self.route_proj.weight.to(dtype), self.route_proj.bias.to(dtype)
        if self.config.router == "torus":
            weight = SPREAD * F.normalize(weight, dim=1)
        return weight, bias

    # ------------------------------------------------------------ experts

    def weights(self, expert_U: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and down as they are used, of these experts or of all: with the base, and ternary as far as the
        recipe has come."""
        found = []
        for name in ("gate_EFD", "up_EFD", "down_EDF"):
            weight: Tensor = getattr(self, name)
            weight = weight if expert_U is None else weight[expert_U]
            if self.config.base:
                base: Tensor = getattr(self, f"base_{name.replace('E', '')}")
                weight = base + sparse(weight)
            if self.config.ternary:
                weight = ternary(weight, self.ternary_share_1)
            found.append(weight)
        gate, up, down = found
        return gate, up, down

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        x_ND = x_BTD.flatten(0, 1)
        learns = torch.is_grad_enabled()
        with torch.set_grad_enabled(learns and self.config.gate != "none"):
            choice = self.route(x_ND)
        y_ND, sample = self._experts(x_ND, choice.expert_N)
        if self.config.gate == "soft":
            y_ND = y_ND * choice.gate_N.to(y_ND.dtype)[:, None]
        elif self.config.gate == "straight_through":
            y_ND = _StraightThrough.apply(y_ND, choice.gate_N)
        y_BTD = y_ND.view_as(x_BTD)
        return y_BTD, self._terms(choice, sample, y_BTD, reset_BT, pad_BT) if learns else {}

    def _experts(self, x_ND: Tensor, expert_N: Tensor) -> tuple[Tensor, Tensor]:
        """Output [N,D]; and some hidden units' weights [E,3S,D], where a loss asks for them."""
        config, units, rounded = self.config, slice(0), None
        used_U = None
        if torch.is_grad_enabled():
            if config.delta > 0 or config.diversity > 0:
                parts = min(SAMPLED, config.hidden)
                part = self.turn % parts
                units = slice(part * config.hidden // parts, (part + 1) * config.hidden // parts)
        elif (config.base or config.ternary) and x_ND.is_meta:
            used_U = expert_N[: len(self.gate_EFD)]  # as many as tokens can reach
        elif config.base or config.ternary:
            used_U, expert_N = expert_N.unique(return_inverse=True)  # nothing is made of the others
        if config.int8_activations:
            x_ND, rounded = int8(x_ND), int8
        weights = self.weights(used_U)
        device = x_ND.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_ND, *cast = (tensor.to(dtype) for tensor in (x_ND, *weights))
            weights = (cast[0], cast[1], cast[2])
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
        """What is reported; padding counts nowhere. The load goes to the biases when the gradient comes back."""
        config, E = self.config, len(self.gate_EFD)
        counted_N = torch.ones_like(choice.expert_N, dtype=torch.bool)
        if pad_BT is not None:
            counted_N = ~pad_BT.flatten()
        load_E = experts.load(choice.expert_N.where(counted_N, E), E)
        if config.bias_rate > 0 and self.training and y_BTD.requires_grad:
            # Once for an update: activations may be computed twice, but a gradient comes back once.
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
    """y · g / stop_grad(g), which is y, without reading it: the gradients are dy and Σ dy · y / g. (The chosen is the
    likeliest, so g is never 0.)"""

    @staticmethod
    def forward(y_ND: Tensor, gate_N: Tensor) -> Tensor:
        return y_ND.view_as(y_ND)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND, gate_N = ctx.saved_tensors
        return dy_ND, torch.linalg.vecdot(dy_ND, y_ND).to(gate_N.dtype) / gate_N

    @staticmethod
    def jvp(ctx: Any, dy_ND: Tensor, dgate_N: Tensor) -> Tensor:
        y_ND, gate_N = ctx.saved_tensors
        return dy_ND + y_ND * (dgate_N / gate_N).to(y_ND.dtype)[:, None]


def wider(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


def sparse(own: Tensor) -> Tensor:
    """Differences from the base: of each matrix the entries over twice the mean magnitude, the others 0; all learn
    (straight through)."""
    size = own.detach().abs()
    kept = own.detach() * (size > OWN * size.mean((-2, -1), keepdim=True))
    return own + (kept - own.detach())
