"""The way a trained DRM moves over a text: action, geometry and dynamics of its state (docs/designs/drm.md#geometry).

The text is read as one document: a document's end would send the state back to where it began.

Shapes: T tokens, S state width, N directions, R metric rank, P pairs, L points of a path, K points compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Geometry, Law, State, Weights
from perspectron.designs.drm.mixer import DRM
from perspectron.model.model import LanguageModel
from perspectron.util.config import at_least, require
from perspectron.util.errors import DataError
from perspectron.util.stats import Floats, bootstrap, middle
from perspectron.util.streams import stream

CHUNK = 2048
SETTLED = 256  # tokens left out at the start
SEGMENT = 1000  # tokens over which turns are counted
RECURRENT = 0.05  # share of pairs of points that count as near
DIAGONAL = 4  # points of a diagonal that count as one
THEILER = 16  # tokens: pairs of points that are nearer in time say nothing
PLANES = 3
RING = 0.2  # least radius (1% quantile over the mean) of a path that goes around its middle
NOISE = 0.01


@dataclass(frozen=True)
class Options:
    """Amount of text and samples to measure. tokens: read from the text. sampled: tokens at which the geometry is
    measured. pairs: paths of the low-action test. span: tokens of such a path. rounds: steps of gradient descent that
    relax it. points: compared for recurrence. steps: tokens of the Lyapunov exponent. seed: of random draws."""

    tokens: int = 100_000
    sampled: int = 256
    pairs: int = 200
    span: int = 16
    rounds: int = 200
    points: int = 2000
    steps: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(2, self, "sampled", "pairs", "span", "rounds", "points", "steps")
        at_least(self.least, self, "tokens")

    @property
    def least(self) -> int:
        """Tokens of the shortest text that has room for all measurements."""
        return SETTLED + max(2 * SEGMENT, self.points, self.pairs + self.span)


class Walk(NamedTuple):
    """z before each token, and after the last [T+1,S]; velocities [T,S]; gates [T,N]."""

    z_TS: Tensor
    v_TS: Tensor
    a_TN: Tensor


def mixer_of(model: LanguageModel) -> DRM:
    """The DRM layer. ConfigError for a model without one, or whose geometry is not computed anew at every token."""
    found = [module for module in model.modules() if isinstance(module, DRM)]
    require(len(found) == 1, "design", model.config.name, "drm or drm2, which have a geometry")
    interval = found[0].config.geometry_interval
    require(interval == 1, "geometry_interval", interval, "1")
    for part in ("shift", "input_conv"):
        value = getattr(model.config, part)
        require(not value, part, value, "False: a path is followed from token to token")
    return found[0]


def measure(model: LanguageModel, ids: list[int], options: Options = Options()) -> dict[str, Any]:
    """All measurements, as plain JSON values. DataError for a text that is too short."""
    mixer = mixer_of(model)
    if len(ids) < options.least:
        raise DataError(f"{len(ids):,} tokens of text, need at least {options.least:,}")
    ids, draw = ids[: options.tokens], stream(options.seed, "geometry")
    with torch.no_grad():
        shuffled = [ids[i] for i in torch.randperm(len(ids), generator=draw).tolist()]
        here, mixed = (walk(model, mixer, each) for each in (ids, shuffled))
        chosen = SETTLED + torch.randperm(len(ids) - SETTLED, generator=draw)[: options.sampled].sort().values
        result = {
            "model": model.config.name,
            "tokens": len(ids),
            "state": here.z_TS.shape[1],
            "directions": mixer.config.directions,
            "radius": mixer.config.radius,
            "local": local(mixer, here, chosen),
            "coupling": coupled(mixer, here, chosen),
            "bounds": bounds(mixer, here),
            "recurrence": {
                name: recurrence(each.z_TS[SETTLED : SETTLED + options.points])
                for name, each in (("text", here), ("shuffled", mixed))
            },
            "torus": torus(here.z_TS[SETTLED:], mixed.z_TS[SETTLED:]),
            "lyapunov": exponents(model, mixer, ids[: options.steps], draw),
        }
    starts = SETTLED + torch.randperm(len(ids) - SETTLED - options.span, generator=draw)[: options.pairs]
    result["paths"] = low_action(mixer, here.z_TS, starts, options)
    return result


# ---------------------------------------------------------------- the walk


def _inputs(model: LanguageModel, ids: list[int]) -> Tensor:
    """Input of the layer at each token [1,T,E]."""
    ids_BT = torch.tensor([ids], device=model.device)
    return model.placed(model.embedding(ids_BT), None)[0]


def walk(model: LanguageModel, mixer: DRM, ids: list[int]) -> Walk:
    """The state over a text that is read as one document."""
    began = mixer.init_state(1, model.device, torch.float32)
    state, parts = State(began.z_BD, began.geometry_BF, began.length_B), []
    for at in range(0, len(ids), CHUNK):
        _, state, trace = drm.scan(_inputs(model, ids[at : at + CHUNK]), state, mixer.weights(), mixer.law())
        assert trace is not None
        parts.append(Walk(trace.before_BTS[0], trace.v_BTS[0], trace.a_BTN[0]))
    z, v, a = (torch.cat(each) for each in zip(*parts, strict=True))
    return Walk(torch.cat([z, state.z_BS]), v, a)


def field(mixer: DRM, z_TS: Tensor) -> Geometry:
    """Directions, gates and metric at points."""
    return drm.geometry(F.gelu(mixer.read(z_TS)), mixer.weights(), mixer.law())


def _metric(mixer: DRM, z_TS: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal [T,S] and factor [T,R,S] of the metric at points, computed without the directions."""
    H, w, law = mixer.config.hidden, mixer.weights(), mixer.law()
    bare = law._replace(directions=0)
    none = w._replace(
        direction_w=w.flow_w.new_empty(0, H), direction_b=w.flow_w.new_empty(0), direction_basis=None
    )
    now = drm.geometry(F.gelu(mixer.read(z_TS)), none, bare)
    return now.d_BS, now.U_BRS


def energy(mixer: DRM, path_PLS: Tensor) -> Tensor:
    """The discrete energy of paths [P]: Σ Δzᵀ G Δz, with the metric between two points."""
    middle_XS = ((path_PLS[:, 1:] + path_PLS[:, :-1]) / 2).flatten(0, 1)
    d_XS, U_XRS = _metric(mixer, middle_XS)
    step_XS = path_PLS.diff(dim=1).flatten(0, 1)
    each_X = (d_XS * step_XS.square()).sum(-1) + (U_XRS @ step_XS[:, :, None]).square().sum((-1, -2))
    return each_X.view(len(path_PLS), -1).sum(-1)


# ---------------------------------------------------------------- geometry


def local(mixer: DRM, here: Walk, chosen: Tensor) -> dict[str, Any]:
    """Numbers of the motion at tokens of the text, and their mean and middle 90%."""
    z_TS, v_TS, a_TN = here.z_TS[chosen].double(), here.v_TS[chosen].double(), here.a_TN[chosen].double()
    now = Geometry(*(x.double() for x in field(mixer, here.z_TS[chosen])))
    G_TSS = drm.metric(now)
    eigen_TS = torch.linalg.eigvalsh(G_TSS)
    bound_T = (now.d_BS.amax(-1) + now.U_BRS.square().sum((-1, -2))) / now.d_BS.amin(-1)
    found = {
        "action": torch.einsum("ts,tsr,tr->t", v_TS, G_TSS, v_TS),
        "speed": v_TS.norm(dim=-1),
        "condition": eigen_TS[:, -1] / eigen_TS[:, 0],
        "condition_bound": bound_T,
        "radius": z_TS.norm(dim=-1) / mixer.config.radius,
    }
    if mixer.config.directions:
        found["active"] = a_TN.sum(-1)
        p = a_TN.clamp(1e-12, 1 - 1e-12)
        found["gate_entropy"] = -(p * p.log2() + (1 - p) * (1 - p).log2()).mean(-1)
        inside = torch.linalg.lstsq(now.V_BNS.mT, v_TS[..., None], driver="gelsd").solution
        rest_TS = v_TS - (now.V_BNS.mT @ inside)[..., 0]
        found["outside"] = rest_TS.square().sum(-1) / v_TS.square().sum(-1)
    return {name: _spread(value) for name, value in found.items()}


def _spread(value_T: Tensor) -> dict[str, float]:
    low, high = torch.quantile(value_T, torch.tensor([0.05, 0.95], dtype=value_T.dtype)).tolist()
    return {"mean": value_T.mean().item(), "low": low, "high": high}


def coupled(mixer: DRM, here: Walk, chosen: Tensor) -> dict[str, Any] | None:
    """Mean |C_ij| of directions scaled to a diagonal of 1, and the mean eigenvalues of V Vᵀ, the largest first."""
    if mixer.config.directions == 0:
        return None
    now = field(mixer, here.z_TS[chosen])
    C_TNN = drm.coupling(now).double()
    size_TN = C_TNN.diagonal(dim1=1, dim2=2).sqrt()
    C_NN = (C_TNN / (size_TN[:, :, None] * size_TN[:, None, :])).abs().mean(0)
    eigen_N = torch.linalg.eigvalsh((now.V_BNS @ now.V_BNS.mT).double()).mean(0).flip(0)
    off = C_NN[~torch.eye(len(C_NN), dtype=torch.bool)]
    return {"mean": C_NN.tolist(), "off_diagonal": off.mean().item(), "eigenvalues": eigen_N.tolist()}


def bounds(mixer: DRM, here: Walk) -> dict[str, float]:
    """The distance from the origin over the radius of the ball: the largest, and what 99.9% stay below."""
    share_T = here.z_TS.norm(dim=-1) / mixer.config.radius
    return {"max": share_T.max().item(), "most": share_T.double().quantile(0.999).item()}


def low_action(mixer: DRM, z_TS: Tensor, starts_P: Tensor, options: Options) -> dict[str, Any]:
    """The energy of the model's own paths, of straight lines between their ends, and of these relaxed by gradient
    descent with fixed ends: medians of the ratios over paths, with bootstrap intervals."""
    own_PLS = torch.stack([z_TS[starts_P + i] for i in range(options.span + 1)], 1)
    share_L = torch.linspace(0, 1, options.span + 1)[None, :, None]
    straight_PLS = own_PLS[:, :1] + share_L * (own_PLS[:, -1:] - own_PLS[:, :1])
    free = straight_PLS[:, 1:-1].clone().requires_grad_()
    ends = straight_PLS[:, :1], straight_PLS[:, -1:]
    optimizer = torch.optim.Adam([free], lr=0.02 * straight_PLS.diff(dim=1).norm(dim=-1).mean().item())
    with torch.enable_grad():
        for _ in range(options.rounds):
            optimizer.zero_grad()
            energy(mixer, torch.cat([ends[0], free, ends[1]], 1)).sum().backward(inputs=[free])
            optimizer.step()
    with torch.no_grad():
        relaxed_PLS = torch.cat([ends[0], free, ends[1]], 1)
        model, straight, relaxed = (
            energy(mixer, path).double().numpy() for path in (own_PLS, straight_PLS, relaxed_PLS)
        )
    relaxed = np.minimum(relaxed, straight)
    ratios = {
        "model_over_straight": model / straight,
        "model_over_relaxed": model / relaxed,
        "relaxed_over_straight": relaxed / straight,
    }
    return {"pairs": len(model), "span": options.span} | {
        name: _median(values, options.seed) for name, values in ratios.items()
    }


def _median(values: Floats, seed: int) -> dict[str, float]:
    low, high = middle(bootstrap(lambda at: np.median(values[at], axis=-1), len(values), seed))
    return {"median": float(np.median(values)), "low": low, "high": high}


# ---------------------------------------------------------------- dynamics


def recurrence(z_KS: Tensor) -> dict[str, float]:
    """The share of pairs of points that are near, by a radius that makes it 5%, and of those the share that stands on
    diagonals of four or more: points that go the same way for a while."""
    distance_KK = torch.cdist(z_KS, z_KS)
    far = range(THEILER, len(z_KS))
    apart = torch.cat([distance_KK.diagonal(i) for i in far])
    radius = apart.kthvalue(max(1, int(RECURRENT * len(apart)))).values.item()
    near, along = 0, 0
    for i in far:
        hits = (distance_KK.diagonal(i) <= radius).numpy()
        edges = np.flatnonzero(np.diff(np.concatenate([[0], hits.astype(np.int8), [0]])))
        lengths = edges[1::2] - edges[::2]
        near += int(lengths.sum())
        along += int(lengths[lengths >= DIAGONAL].sum())
    return {"radius": radius, "rate": near / len(apart), "determinism": along / max(1, near)}


def torus(z_TS: Tensor, shuffled_TS: Tensor) -> dict[str, Any]:
    """Turns around the planes of leading principal components, for the text and for its tokens shuffled. A plane is a
    sign of a circle where the path keeps away from its middle and turns more one way than shuffled tokens do."""
    mean_S = z_TS.mean(0)
    axes_SK = components(z_TS - mean_S, min(2 * PLANES, z_TS.shape[1]))
    found = []
    for plane in range(axes_SK.shape[1] // 2):
        pair = axes_SK[:, 2 * plane : 2 * plane + 2]
        text, mixed = (turns((x - mean_S) @ pair) for x in (z_TS, shuffled_TS))
        apart = text["low"] > mixed["high"] or text["high"] < mixed["low"]
        off_zero = text["low"] > 0 or text["high"] < 0
        found.append({"text": text, "shuffled": mixed, "sign": text["ring"] >= RING and apart and off_zero})
    return {
        "planes": found,
        "verdict": "consistent with" if sum(p["sign"] for p in found) >= 2 else "no sign",
    }


def components(z_TS: Tensor, count: int) -> Tensor:
    """The leading principal components [S, count] of points around 0, from their covariance in float64. The greatest
    entry of each is positive."""
    covariance_SS = torch.zeros(z_TS.shape[1], z_TS.shape[1], dtype=torch.float64)
    for part in z_TS.split(CHUNK):
        covariance_SS += part.double().mT @ part.double()
    axes_SK = torch.linalg.eigh(covariance_SS).eigenvectors.flip(1)[:, :count]
    sign_1K = axes_SK.gather(0, axes_SK.abs().argmax(0, keepdim=True)).sign()
    return (axes_SK * sign_1K).to(z_TS.dtype)


def turns(point_T2: Tensor) -> dict[str, Any]:
    """Net turns for each 1,000 tokens with their interval over stretches of the text, the distribution of the angle
    between neighbouring tokens, and how far from the middle the path stays."""
    increment_T = drm.angles(drm.on_torus(drm.angles(point_T2).diff()))
    count = len(increment_T) // SEGMENT
    net = increment_T[: count * SEGMENT].view(count, SEGMENT).sum(1).double().numpy() / (2 * math.pi)
    low, high = middle(bootstrap(lambda at: net[at].mean(-1), count, 0))
    radius_T = point_T2.norm(dim=-1)
    histogram = torch.histc(increment_T, bins=24, min=-math.pi, max=math.pi) / len(increment_T)
    return {
        "turns": float(net.mean()), "low": low, "high": high, "histogram": histogram.tolist(),
        "ring": float(np.quantile(radius_T.numpy(), 0.01)) / radius_T.mean().item(),
    }  # fmt: skip


def exponents(model: LanguageModel, mixer: DRM, ids: list[int], draw: torch.Generator) -> dict[str, float]:
    """The largest Lyapunov exponent, in nats a token, under this text: of the model, and with weights that are 1% off.
    Below 0, two states that read the same text come together."""
    weights = Weights._make(None if w is None else w.double() for w in mixer.weights())
    noisy = Weights._make(
        None if w is None else w + NOISE * w.std() * torch.randn(w.shape, generator=draw, dtype=w.dtype)
        for w in weights
    )
    inputs_TE = _inputs(model, ids)[0].double()
    law = mixer.law()
    return {
        "tokens": len(ids),
        "exponent": exponent(inputs_TE, weights, law, draw),
        "noisy": exponent(inputs_TE, noisy, law, draw),
    }


def exponent(inputs_TE: Tensor, w: Weights, law: Law, draw: torch.Generator) -> float:
    """The mean growth of a tangent that is carried along, after the first tokens."""
    z_S, tangent_S = w.z0_S, F.normalize(torch.randn(len(w.z0_S), generator=draw, dtype=w.z0_S.dtype), dim=0)
    drive_TG = F.linear(inputs_TE, w.token_w)
    drive_TG = F.pad(drive_TG, (len(w.read_b) - drive_TG.shape[-1], 0)) + w.read_b
    left, grown = min(SETTLED, len(inputs_TE) // 2), 0.0
    for t, drive_G in enumerate(drive_TG):
        z_S, tangent_S, *_ = torch.func.jvp(_step(drive_G, w, law), (z_S,), (tangent_S,))
        size = tangent_S.norm()
        tangent_S = tangent_S / size
        grown += math.log(size.item()) if t >= left else 0.0
    return grown / (len(inputs_TE) - left)


def _step(drive_G: Tensor, w: Weights, law: Law) -> Callable[[Tensor], Tensor]:
    """The state's update by one token, as a function of the state."""

    def step(z_S: Tensor) -> Tensor:
        h_BG = F.gelu(drive_G + F.linear(z_S, w.read_w))[None]
        v_BS = drm.velocity(h_BG, drm.geometry(h_BG, w, law), w, law)
        return drm.confine(z_S[None] + law.dt * v_BS, law)[0]

    return step
