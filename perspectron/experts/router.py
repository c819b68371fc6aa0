"""The router: which expert a token goes to (docs/designs/perspective.md#router).

A token's query is a point z = W x + b on a torus, and it goes to the expert at the least power distance d² − w; with a
switch, to the expert with the largest logit. `select` can also choose from another viewpoint, and `Views` says from
which viewpoint each row of a batch sees the experts.

Shapes: B batch, T time, N tokens, D model width, E experts, A axes of the torus.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron import native
from perspectron.experts.ternary import Rule, Schedule
from perspectron.experts.torus import distance2, lattice
from perspectron.ops import experts
from perspectron.ops.dispatch import affine, full_precision, under_tracing
from perspectron.util.config import FFNConfig, at_least, one_of, positive, require
from perspectron.util.errors import ConfigError
from perspectron.util.streams import gumbel

SPREAD = (
    0.15  # of queries, in turns. If free to, it grows until routing is a hash of noise (docs/lab-notes.md)
)
OFFSET = 0.4  # of a cell: positions keep their order, so neighbours stay neighbours

View = Literal["nearest", "second", "antipode", "random", "perturbed"]
VIEWS: tuple[View, ...] = get_args(View)
DRAWN: tuple[View, ...] = ("random", "perturbed")
"""Views that depend on a seed."""
MOST_EXPERTS = 65536  # in a layer
SEEDS = 2**128  # Philox takes a key of so many bits


@dataclass(frozen=True)
class RoutedConfig(FFNConfig):
    """hidden: F of each expert. torus: experts along each axis of the lattice. experts: their number, which must fill
    the lattice; 0: as many as it has.

    gate: factor of the chosen expert's output. "none": nothing, and the router does not learn from the task;
    "straight_through": g / g, which is 1 and has the gradient of log g; "soft": g. g is the softmax of −d²/τ over the
    `nearest` experts, τ = temperature · (side of a cell)². router: "torus", or "switch", a plain linear layer with a
    logit for each expert, whose softmax is g.

    balance, smooth, delta, diversity: weights of the losses in `perspectron.experts.torus`. bias_rate: how far an
    update moves the biases w of the power diagram (argmin d² − w), in terms of τ; 0: there are none. offsets: experts
    can move from their cell's centre. base: experts' weights are a shared part plus a few differences of their own.
    ternary: experts' matrices become −s, 0, s, as the recipe proceeds. int8_activations: round their inputs, too.
    ternary_rule, ternary_schedule: as in `perspectron.experts.ternary`. reads: the router's input, the normed "stream",
    like the experts', or the output of the layer's "mixer".
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
    ternary_rule: Rule = "absmean"
    ternary_schedule: Schedule = "linear"
    reads: Literal["stream", "mixer"] = "stream"

    def __post_init__(self) -> None:
        at_least(1, self, "hidden", "nearest")
        require(len(self.torus) > 0 and min(self.torus) >= 1, "torus", self.torus, "one or more lengths ≥ 1")
        E = math.prod(self.torus)
        require(E <= MOST_EXPERTS, "torus", self.torus, f"of ≤ {MOST_EXPERTS:,} experts")
        require(self.experts in (0, E), "experts", self.experts, f"the {E} that fill a torus of {self.torus}")
        one_of(self.gate, ("none", "straight_through", "soft"), "gate")
        one_of(self.router, ("torus", "switch"), "router")
        positive(self, "temperature")
        at_least(0, self, "balance", "bias_rate", "smooth", "delta", "diversity")

    @property
    def count(self) -> int:
        """E."""
        return math.prod(self.torus)

    @property
    def chosen(self) -> int:
        """Experts per token: 1."""
        return 1

    @property
    def gated(self) -> bool:
        """True: experts are SwiGLUs."""
        return True

    @property
    def tau(self) -> float:
        """τ of the softmax over −d²/τ; 1 for a switch."""
        if self.router == "switch":
            return 1.0
        axes = sum(n > 1 for n in self.torus)
        return self.temperature * math.prod(self.torus) ** (-2 / max(axes, 1))


class Distances(NamedTuple):
    """Queries on the torus, not wrapped [N,A] (a switch has none: A = 0), and power distances d² − w [N,E] (for a
    switch −logit − w), of which the least is chosen."""

    query_NA: Tensor
    distance2_NE: Tensor


class Choice(NamedTuple):
    """The expert of each token, the probability g of it, and the `Distances` by which it was chosen."""

    expert_N: Tensor
    gate_N: Tensor
    query_NA: Tensor
    distance2_NE: Tensor


@dataclass(frozen=True)
class Views:
    """The views from which the rows of a batch see the experts, in layers from `from_layer` on.

    view_B, seed_B: of each row; seeds, below 2^64, matter only to `DRAWN`. position_BT: of each token in its document.
    gate: with a "soft" router, the gate of the expert that the token would have had ("base"), because a distant
    expert's is about 0; or the chosen expert's "own".
    """

    view_B: tuple[View, ...]
    seed_B: tuple[int, ...]
    position_BT: Tensor
    from_layer: int = 0
    gate: Literal["base", "own"] = "base"
    layer: int = 0

    def at(self, layer: int) -> "Views | None":
        """The views in a layer; None below `from_layer`."""
        return None if layer < self.from_layer else replace(self, layer=layer)


@dataclass(frozen=True)
class Router:
    """A router over its layer's parameters; made anew where they may have changed.

    weight_AD, bias_A: W and b as stored (for a switch: a row for each expert). offset_EA: offsets of experts from the
    centres of their cells, before tanh. handicap_E: w. None: there are none.
    """

    config: RoutedConfig
    weight_AD: Tensor
    bias_A: Tensor
    offset_EA: Tensor | None
    handicap_E: Tensor | None

    def positions(self) -> Tensor:
        """The positions of the experts [E,A], each less than half a cell from the centre of its cell; at least
        float32."""
        made = _cells.__wrapped__ if under_tracing(self.weight_AD.detach()) else _cells
        place_EA, n_A = made(self.config.torus, self.weight_AD.device, wider(self.weight_AD.dtype))
        if self.offset_EA is None:
            return place_EA
        return place_EA + OFFSET * self.offset_EA.to(place_EA).tanh() / n_A

    def direction(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W and b as they are used. For a torus the rows of W get one length, so they learn only a direction."""
        weight_AD, bias_A = self.weight_AD.to(dtype), self.bias_A.to(dtype)
        if self.config.router == "torus":
            weight_AD = SPREAD * F.normalize(weight_AD, dim=1)
        return weight_AD, bias_A

    def distances(self, x_ND: Tensor) -> Distances:
        """Queries and power distances of tokens, in at least float32."""
        dtype = wider(x_ND.dtype)
        out_NA = experts.scores(x_ND.to(dtype), *self.direction(dtype))
        if self.config.router == "switch":
            return Distances(out_NA[:, :0], self._powered(-out_NA))
        return self._around(out_NA, self.positions().to(dtype))

    def route(self, x_ND: Tensor, views: Views | None = None) -> Choice:
        """The expert of each token, in at least float32 also under autocast. Ties go to the lowest id."""
        with full_precision(x_ND):
            distances = self.distances(x_ND)
            base_N = self.select(distances)
            expert_N = base_N if views is None else self.seen(distances, base_N, views)
            gate_N = self.gates(distances, expert_N if views is not None and views.gate == "own" else base_N)
        return Choice(expert_N, gate_N, *distances)

    def gates(self, distances: Distances, expert_N: Tensor) -> Tensor:
        """The probability g [N] of these experts."""
        logit_NE = distances.distance2_NE / -self.config.tau
        E, k = logit_NE.shape[1], self.config.nearest
        near_NK = logit_NE if self.config.router == "switch" or k >= E else logit_NE.topk(k).values
        return (logit_NE.gather(1, expert_N[:, None])[:, 0] - near_NK.logsumexp(1)).exp()

    def seen(self, distances: Distances, base_N: Tensor, views: Views) -> Tensor:
        """The expert of each token [N], N = B·T, by the view of its row. base_N: the experts by "nearest"."""
        (B, T), expert_N = views.position_BT.shape, base_N.clone()
        position_BT, device = views.position_BT.cpu(), base_N.device
        groups: dict[tuple[View, int], list[int]] = {}
        for row in range(B):
            view = views.view_B[row]
            groups.setdefault((view, views.seed_B[row] if view in DRAWN else 0), []).append(row)
        for (view, seed), rows in groups.items():
            if view == "nearest":
                continue
            at_n = (torch.tensor(rows)[:, None] * T + torch.arange(T)).flatten().to(device)
            few = Distances(*(part.index_select(0, at_n) for part in distances))
            positions = position_BT[rows].flatten().tolist() if view in DRAWN else None
            expert_N[at_n] = self.select(few, view, seed=seed | views.layer << 64, position_N=positions)
        return expert_N

    def select(
        self,
        distances: Distances,
        view: View = "nearest",
        *,
        seed: int | None = None,
        position_N: Sequence[int] | None = None,
    ) -> Tensor:
        """The expert of each token [N], seen from one of `VIEWS`; ties go to the lowest id.

        "nearest": what the model was trained with. "second": the next nearest. "antipode": the nearest to the query
        half a turn away on every axis of more than one cell; of a switch, the least likely. "random": any;
        "perturbed": one drawn by the router's softmax over all, by Gumbel noise. What is drawn is a function of (seed,
        position) alone, so that it does not depend on the batch; position_N: of each token, by default its row.
        ConfigError: another view, no seed for one that draws, "second" of one expert.
        """
        one_of(view, VIEWS, "view")
        distance2_NE = distances.distance2_NE
        E = distance2_NE.shape[1]
        if view == "second":
            require(E >= 2, "view", view, "'nearest' here: there is one expert, and so no second")
            distance2_NE = distance2_NE.scatter(1, distance2_NE.argmin(1, keepdim=True), math.inf)
        elif view == "antipode":
            if self.config.router == "switch":
                return distance2_NE.argmax(1)
            away_A = distances.query_NA.new_tensor([0.5 * (n > 1) for n in self.config.torus])
            place_EA = self.positions().to(distance2_NE.dtype)
            distance2_NE = self._around(distances.query_NA + away_A, place_EA).distance2_NE
        elif view in DRAWN:
            if seed is None or not 0 <= seed < SEEDS:
                raise ConfigError(f"seed = {seed}, must be in 0 … 2^128 − 1 for view = {view!r}")
            counts = range(len(distance2_NE)) if position_N is None else position_N
            if len(counts) != len(distance2_NE):
                raise ConfigError(
                    f"position_N has {len(counts)} numbers, must have one for each of {len(distance2_NE)} tokens"
                )
            if view == "random":
                return torch.tensor([_drawn(seed, count, E) for count in counts], device=distance2_NE.device)
            noise_NE = torch.from_numpy(np.stack([gumbel(seed, count, E) for count in counts]))
            distance2_NE = distance2_NE - self.config.tau * noise_NE.to(distance2_NE)
        return distance2_NE.argmin(1)

    def _around(self, query_NA: Tensor, place_EA: Tensor) -> Distances:
        return Distances(query_NA, self._powered(distance2(query_NA, place_EA)))

    def _powered(self, distance2_NE: Tensor) -> Tensor:
        if self.handicap_E is None:
            return distance2_NE
        return distance2_NE - self.handicap_E.to(distance2_NE.dtype)


R = TypeVar("R", bound=Router)


class FixedRouter(Router):
    """A router that does not learn. A token's distances depend on that token alone, to the last bit: they are computed
    by the kernel for decoding token by token or, where it cannot run, by torch, one token at a time."""

    @cached_property
    def used(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """W, b, the experts' positions [E,A] (None: a switch) and w as they are used, float32 and contiguous."""
        weight_AD, bias_A = self.direction(torch.float32)
        place_EA = None if self.config.router == "switch" else self.positions().float().contiguous()
        handicap_E = None if self.handicap_E is None else self.handicap_E.float()
        return weight_AD.contiguous(), bias_A, place_EA, handicap_E

    def distances(self, x_ND: Tensor) -> Distances:
        """Queries and power distances of tokens, in float32."""
        weight_AD, bias_A, place_EA, _ = self.used
        x_ND = x_ND.float()
        if x_ND.device.type == "cpu" and native.wanted():
            query_NA, distance2_NE, _ = native.route(x_ND.contiguous(), *self.used)
            return Distances(query_NA[:, :0] if place_EA is None else query_NA, distance2_NE)
        # A product of several tokens, or of memory at another offset in a cache line, may be rounded differently.
        out_NA = torch.stack([torch.mv(weight_AD, x_D.clone()) for x_D in x_ND]).add_(bias_A)
        if place_EA is None:
            return Distances(out_NA[:, :0], self._powered(-out_NA))
        return self._around(out_NA, place_EA)

    def nearest(self, x_ND: Tensor) -> Tensor:
        """The expert of each token [N], as `select` chooses it by default."""
        if x_ND.device.type == "cpu" and native.wanted():
            return native.route(x_ND.float().contiguous(), *self.used)[2]
        return self.select(self.distances(x_ND))


class Routed(nn.Module):
    """A layer with a router, whose parameters it holds under their names in checkpoints."""

    recipe: ClassVar[Mapping[str, tuple[float, float]]] = {"offset_EA": (1.0, 0.0)}
    """Places, one a row, have no decay: as `perspectron.model.mixer.Mixer.recipe`."""
    bias_E: Tensor

    def __init__(self, d_model: int, config: RoutedConfig) -> None:
        super().__init__()
        self.config = config
        E, axes = math.prod(config.torus), len(config.torus)
        self.route_proj = nn.Linear(d_model, E if config.router == "switch" else axes)
        if config.offsets and config.router == "torus":
            self.offset_EA = nn.Parameter(torch.empty(E, axes))
        if config.bias_rate > 0:
            self.register_buffer("bias_E", torch.empty(E))

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise positions at the centres, queries around a random place, and no preference for an expert."""
        if self.config.router == "torus":
            self.route_proj.bias.uniform_(0, 1, generator=generator)
        for start in (getattr(self, "offset_EA", None), getattr(self, "bias_E", None)):
            if start is not None:
                start.zero_()

    def read(self, x_BTD: Tensor, context_BTD: Tensor | None) -> Tensor:
        """The router's input, from the normed stream and the mixer's output."""
        if self.config.reads == "stream":
            return x_BTD
        require(context_BTD is not None, "reads", "mixer", "stream in a layer without a mixer")
        assert context_BTD is not None
        return context_BTD

    def aside(self, tape: Any, x_BTD: Tensor, context_BTD: Tensor | None) -> Tensor:
        """The output under a recorder (`ops.dispatch.recorder`), which calls the layer anew in each run, since the
        expert that computes depends on values."""
        more = [] if self.config.reads == "stream" or context_BTD is None else [context_BTD]
        out_BTD: Tensor = tape.aside(lambda *read: self(*read)[0], x_BTD, *more)
        return out_BTD

    @property
    def router(self) -> Router:
        """The router with the current parameters."""
        return self._router(Router)

    def _router(self, kind: type[R]) -> R:
        offset_EA, handicap_E = getattr(self, "offset_EA", None), getattr(self, "bias_E", None)
        return kind(self.config, *affine(self.route_proj), offset_EA, handicap_E)


def wider(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _cells(torus: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Centres of a torus's cells [E,A], and their number along each axis [A], cached on the device: to copy them to a
    GPU would make the host wait at every step. No tensors of inference mode, which could not be used outside of it."""
    with torch.inference_mode(False):
        return lattice(torus).to(device, dtype), torch.tensor(torus).to(device, dtype)


def _drawn(seed: int, count: int, E: int) -> int:
    """⌊E u⌋, with u the first random number at `count`."""
    raw = int(np.random.Philox(key=seed, counter=[0, count, 0, 0]).random_raw(1)[0])
    return raw * E >> 64
