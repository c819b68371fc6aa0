"""The DRM emitter's mixer: a state that moves over a learned manifold, one step per token (docs/designs/drm.md#flow).
It is alone in its block, without a residual connection, and the head reads the state.

Shapes: B batch, T time, D model width = state width, E token width, H hidden width, N directions, R metric rank, K
basis, F geometry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Law, State, Weights, refreshes, width
from perspectron.designs.drm.terms import OF_METRIC, Losses, Tokens, terms
from perspectron.model.mixer import Mixer
from perspectron.model.state import register
from perspectron.ops.attention import places
from perspectron.ops.dispatch import affine, full_precision
from perspectron.util.config import MixerConfig, at_least, positive, require
from perspectron.util.terms import Term

START = 0.02  # standard deviation of the first state
RISK_START = (0.1, 1.5)  # α, β


@dataclass(frozen=True)
class Risk:
    """The risk of a state, ρ = min(Σ |α_i| q_i^|β_i|, mass_max) of two learned q(z) in (0, 1), with |α| and |β|
    inside their bounds; it adds to the energy of moving. cached: ρ is that of the state at the last refresh of the
    geometry, until the next one (`geometry_interval`); else each token's own."""

    alpha_max: float = 10.0
    exponent_min: float = 0.25
    exponent_max: float = 4.0
    mass_max: float = 10.0
    cached: bool = False

    def __post_init__(self) -> None:
        positive(self, "alpha_max", "exponent_min", "mass_max")
        require(self.exponent_max >= self.exponent_min, "exponent_max", self.exponent_max,
                f"≥ exponent_min = {self.exponent_min}")  # fmt: skip


@dataclass(frozen=True)
class DRMConfig(MixerConfig):
    """The options of the directional relational manifold.

    directions: N; with 0 all coordinate axes are used, v = tanh(MLP[z; e]) before the metric is applied. rank: R of
    the metric; 0 is diagonal. hidden: H. d_token: E; None is the model width."""

    kind = "drm"
    directions: int
    rank: int
    hidden: int
    d_token: int | None = None
    direction_basis: int = 0
    """Directions are mixtures of this many learned vectors; 0: each has its own head."""
    metric_basis: int = 0
    """Likewise the columns of U."""
    direction_norm: bool = True
    """Directions are unit vectors."""
    dt: float = 0.08
    radius: float = 8.0
    """R, of the ball that the state cannot leave."""
    clip: bool = True
    """Pull the state into the ball; otherwise it is unbounded."""
    squash: bool = True
    """R tanh(z/R) after the pull into the ball."""
    gate_bias: float = -1.0
    gate_temperature: float = 1.5
    gate_top_k: int = 0
    """Number of gates that stay open; 0: all."""
    gate_renorm: bool = False
    """Scale the open gates to the sum of all gates."""
    metric_floor: float = 1e-4
    """Least d."""
    strength: float = 0.5
    """Maximum share of the velocity that the metric transforms."""
    strength_warmup: int = 500
    """Updates over which this share rises from 0."""
    damping: float = 0.3
    """λ in (G + λI)⁻¹."""
    geometry_interval: int = 1
    """Recompute directions, gates and metric at each multiple of this many tokens."""
    bptt: int = 0
    """Training only: cut gradients and recompute the geometry at each multiple of this many tokens; 0: never."""
    risk: Risk | None = None
    losses: Losses = field(default_factory=Losses)

    def __post_init__(self) -> None:
        at_least(1, self, "hidden", "geometry_interval", "d_token")
        at_least(0, self, "directions", "rank", "direction_basis", "metric_basis", "gate_top_k", "bptt")
        at_least(0, self, "strength_warmup", "damping")
        positive(self, "dt", "radius", "gate_temperature", "metric_floor")
        require(self.gate_top_k <= self.directions, "gate_top_k", self.gate_top_k,
                f"≤ directions = {self.directions}")  # fmt: skip
        require(
            not self.gate_renorm or self.gate_top_k > 0, "gate_renorm", True, "false where gate_top_k = 0"
        )
        require(self.direction_basis == 0 or self.directions > 0, "direction_basis", self.direction_basis,
                "0 where directions = 0")  # fmt: skip
        require(
            self.metric_basis == 0 or self.rank > 0, "metric_basis", self.metric_basis, "0 where rank = 0"
        )
        require(self.clip or not self.squash, "squash", True, "false where clip = false")
        require(0 <= self.strength <= 1, "strength", self.strength, "in [0, 1]")


@register
@dataclass(frozen=True)
class DRMState:
    """The state of DRM: z [B,D], and the geometry in force (width 0 where every token refreshes it), float32 or
    float64; length: tokens of the document read so far [B], int64; refreshed: z when the geometry was refreshed
    [B,D], where risk is cached."""

    z_BD: Tensor
    geometry_BF: Tensor
    length_B: Tensor
    refreshed_BD: Tensor | None = None


class DRM(Mixer):
    """z moves with each token's embedding [B,T,E]; the output is z after each token [B,T,D]."""

    small = DRMConfig(4, 2, 12, direction_basis=5, metric_basis=3, dt=0.3, radius=3.0, geometry_interval=3)
    about = "a single vector that moves along learned directions under a learned metric"
    source = "docs/designs/drm.md#flow"

    strength: Tensor

    learned_start = True
    splits_time = False
    calls_linears = False
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: DRMConfig) -> None:
        super().__init__()
        self.config = config
        self.backend = "auto"
        D, N, R, H = d_model, config.directions, config.rank, config.hidden
        self.z0 = nn.Parameter(torch.empty(D))
        self.read = nn.Linear(D, 3 * H)
        self.token = nn.Linear(config.d_token or D, H, bias=False)
        self.trunk_w, self.trunk_b = nn.Parameter(torch.empty(2, H, H)), nn.Parameter(torch.empty(2 * H))
        self.direction = nn.Linear(H, N * (config.direction_basis or D) + N) if N else None
        self.metric = nn.Linear(H, D + R * (config.metric_basis or D))
        self.flow = nn.Linear(H, N or D)
        self.direction_basis = self.metric_basis = None
        if config.direction_basis:
            self.direction_basis = nn.Parameter(torch.empty(config.direction_basis, D))
        if config.metric_basis:
            self.metric_basis = nn.Parameter(torch.empty(config.metric_basis, D))
        if config.risk is not None:
            self.risk_in, self.risk_out = nn.Linear(D, H), nn.Linear(H, 2)
            self.risk_alpha, self.risk_beta = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))
        self.register_buffer("strength", torch.full([1], config.strength, dtype=torch.float64))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the weights as published: linear layers and their biases uniform in ±1/√fan_in, z0 near 0, bases of
        about unit rows."""
        D, E, H = len(self.z0), self.token.in_features, self.config.hidden
        layers = [module for module in self.children() if isinstance(module, nn.Linear)]
        fans = [(layer.weight, layer.in_features) for layer in layers]
        fans += [(layer.bias, layer.in_features) for layer in layers if layer.bias is not None]
        fans += [(self.trunk_w, H), (self.trunk_b, H), (self.token.weight, D + E)]
        fans += [(part[2 * H :], D + E) for part in (self.read.weight, self.read.bias)]
        for part, fan in fans:
            part.uniform_(-(fan**-0.5), fan**-0.5, generator=generator)
        self.z0.normal_(0, START, generator=generator)
        for basis in (self.direction_basis, self.metric_basis):
            if basis is not None:
                basis.normal_(0, D**-0.5, generator=generator)
        if self.config.risk is not None:
            self.risk_alpha.fill_(RISK_START[0])
            self.risk_beta.fill_(RISK_START[1])
        self.strength.fill_(self.config.strength)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DRM":
        """Move or cast the weights; the metric's share stays in float64, as files have it."""
        strength = self.strength
        super()._apply(fn, recurse)
        if self.strength.dtype is not strength.dtype:
            self.strength = strength.to(self.strength.device)
        return self

    def set_step(self, step: int) -> None:
        """Set the metric's share of the velocity, which warms up over the first updates; an untrained model uses the
        maximum, and a metric that is frozen keeps its own, with adapters too."""
        warmup = self.config.strength_warmup
        own = (p for name, p in self.named_parameters() if name.startswith("metric") and ".lora_" not in name)
        if any(p.requires_grad for p in own):
            self.strength.fill_(self.config.strength * (min(step / warmup, 1.0) if warmup else 1.0))

    def require_onnx(self, name: str) -> None:
        require(False, name, self.config.kind, "another mixer to be exported to ONNX")

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> DRMState:
        """z0 in every row, with its graph, at least float32; its size does not depend on `capacity`. The first token
        replaces the geometry, whatever it is.
        """
        dtype = torch.promote_types(dtype, torch.float32)
        lines = width(len(self.z0), self.law()) if self.config.geometry_interval > 1 else 0
        z_BD = self.z0.to(device, dtype).expand(batch_size, -1).clone(memory_format=torch.contiguous_format)
        length_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        geometry_BF = torch.ones(batch_size, lines, dtype=dtype, device=device)
        return DRMState(z_BD, geometry_BF, length_B, z_BD.clone() if self._caches else None)

    def forward(
        self,
        x_BTE: Tensor,
        state: DRMState | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        consume_state: bool = False,
    ) -> tuple[Tensor, DRMState, dict[str, Term]]:
        """The states after each token; `state` is the empty one by default. Terms are left out in inference mode. The
        state handed in is never written into."""
        state = self.init_state(len(x_BTE), x_BTE.device, x_BTE.dtype) if state is None else state
        if 0 in x_BTE.shape[:2]:
            return x_BTE[..., :1].expand(-1, -1, len(self.z0)), state, {}
        bptt = self.config.bptt if self.training and torch.is_grad_enabled() else 0
        before = State(state.z_BD, state.geometry_BF, state.length_B)
        z_BTD, after, trace = drm.scan(
            x_BTE,
            before,
            self.weights(),
            self.law(),
            reset_BT=reset_BT,
            pad_BT=pad_BT,
            bptt=bptt,
            backend=self.backend,
        )
        latest_BTD = None
        if state.refreshed_BD is not None:
            met_BTD = self._met(state.z_BD, z_BTD, reset_BT) if trace is None else trace.before_BTS
            at = places(state.length_B, x_BTE.shape[1], reset_BT, pad_BT)
            due_BT = refreshes(at, self.config.geometry_interval, bptt)
            latest_BTD = _latest(state.refreshed_BD, met_BTD, due_BT)
        device, dtype, aux = x_BTE.device.type, x_BTE.dtype, dict[str, Term]()
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if trace is not None:
            with full_precision(x_BTE):
                tokens = Tokens(z_BTD, reset_BT, pad_BT)
                risk_BT = self.risk_of(trace.before_BTS if latest_BTD is None else latest_BTD)
                aux = terms(z_BTD, trace, risk_BT, self.config.losses, tokens)
        refreshed_BD = None if latest_BTD is None else latest_BTD[:, -1].clone()
        return z_BTD.to(dtype), DRMState(*after, refreshed_BD), aux

    @property
    def _caches(self) -> bool:
        """True if the risk is kept from one refresh of the geometry to the next."""
        return self.config.risk is not None and self.config.risk.cached and self.config.geometry_interval > 1

    def _met(self, z_BD: Tensor, z_BTD: Tensor, reset_BT: Tensor | None) -> Tensor:
        """The state before each token, put together here because inference keeps no trace."""
        met_BTD = torch.cat([z_BD[:, None], z_BTD[:, :-1]], 1)
        return (
            met_BTD
            if reset_BT is None
            else torch.where(reset_BT[:, :, None], self.z0.to(met_BTD.dtype), met_BTD)
        )

    def idle_parameters(self) -> int:
        """Count the parameters that nothing depends on: the trunk of directions where there are none; trunk and heads
        of the metric where it neither bends the velocity nor has a part in the loss."""
        config, (_, H, _) = self.config, self.trunk_w.shape
        trunk = H * (self.read.in_features + 1) + H * (H + 1)
        idle = 0 if config.directions else trunk
        if config.strength == 0 and not any(getattr(config.losses, name) for name in OF_METRIC):
            basis = 0 if self.metric_basis is None else self.metric_basis.numel()
            idle += trunk + self.metric.weight.numel() + self.metric.bias.numel() + basis
        return idle

    def weights(self) -> Weights:
        """The weights as the op takes them."""
        flow, (read_w, read_b), (token_w, token_b) = map(affine, (self.flow, self.read, self.token))
        if token_b is not None:  # an adapter's; both are added up
            read_b = read_b + F.pad(token_b, (2 * len(token_b), 0))
        heads = flow[0].new_empty(0, self.config.hidden), flow[0].new_empty(0)
        direction_w, direction_b = heads if self.direction is None else affine(self.direction)
        return Weights(
            self.z0,
            read_w,
            read_b,
            token_w,
            self.trunk_w,
            self.trunk_b,
            direction_w,
            direction_b,
            *affine(self.metric),
            *flow,
            self.direction_basis,
            self.metric_basis,
        )

    def law(self) -> Law:
        """The config's numbers, with the naturalisation as far as it has warmed up (in full on the meta device)."""
        numbers = {name: getattr(self.config, name) for name in Law._fields}
        if not self.strength.is_meta:
            numbers["strength"] = float(self.strength)
        return Law(**numbers)

    def risk_of(self, z_BTD: Tensor) -> Tensor | None:
        """The risk ρ [B,T] of each state; None where there is no risk. q^β = exp(β ln σ), so that no q underflows."""
        if (bounds := self.config.risk) is None:
            return None
        w = [p.to(z_BTD.dtype) for layer in (self.risk_in, self.risk_out) for p in affine(layer)]
        log_q_BT2 = F.logsigmoid(F.linear(F.gelu(F.linear(z_BTD, w[0], w[1])), w[2], w[3]))
        alpha_2 = self.risk_alpha.to(z_BTD.dtype).abs().clamp(max=bounds.alpha_max)
        beta_2 = self.risk_beta.to(z_BTD.dtype).abs().clamp(bounds.exponent_min, bounds.exponent_max)
        return (alpha_2 * (beta_2 * log_q_BT2).exp()).sum(-1).clamp(max=bounds.mass_max)


def _latest(first_BD: Tensor, met_BTD: Tensor, due_BT: Tensor) -> Tensor:
    """The state [B,T,D] met at the latest token that was due, each token itself counted; before any, `first`."""
    time_T = torch.arange(1, due_BT.shape[1] + 1, device=due_BT.device)
    at_BT1 = torch.where(due_BT, time_T, 0).cummax(1).values[:, :, None]
    return torch.cat([first_BD[:, None], met_BTD], 1).gather(1, at_BT1.expand_as(met_BTD))
