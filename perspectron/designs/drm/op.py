"""The directional relational manifold: a state that moves along learned directions, by a learned metric.

At every token v = Σ a_i c_i V_i, a mix of N directions V(z) by gates a(z) and coefficients c(z, e), is bent by the
metric G(z) = diag(d) + UᵀU: v ← (1−s) v + s (G + λI)⁻¹ v, which leaves the span of the directions. Then z ← z + dt·v,
pulled into the ball of radius R and squashed into it. V, a, d, U are refreshed at each multiple of `interval`.

`scan` runs whole sequences and single steps. Source: docs/designs/drm.md#flow.

Shapes: B batch, T time, S state width, E token width, H hidden width, N directions, R metric rank, F the geometry of
a row in one line, V vocabulary, n angles.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.drm import loop as drm_loop
from perspectron.designs.drm.law import (
    Geometry,
    Law,
    Plan,
    State,
    Trace,
    Weights,
    lines,
    of_lines,
    plan,
    thin,
    width,
)
from perspectron.model.masks import filled
from perspectron.ops import dispatch
from perspectron.ops.attention import follows
from perspectron.ops.sequences import packed
from perspectron.util import ranks

BACKENDS = ("auto", "naive", "torch")


@packed("BTS", "B", "BT")
@dispatch.in_full_precision
def scan(
    e_BTE: Tensor,
    state: State,
    weights: Weights,
    law: Law,
    *,
    reset_BT: Tensor | None = None,
    pad_BT: Tensor | None = None,
    bptt: int = 0,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State, Trace | None]:
    """Run the flow over T tokens: the state after each [B,T,S], the state to go on from, and what every token met (None
    in inference mode).

    T ≥ 1. At a token of `reset_BT` a document starts from z0; one of `pad_BT` leaves the state as it is, whatever
    stands in e. bptt: gradients end, and the geometry is dropped, before each document's token whose number is a
    multiple of this; 0 is never. Computes and returns in float32 or, if any input is, in float64; autocast does not
    reach inside. Differentiable once, in reverse mode; everything else is an error.

    cu_seqlens: several sequences in one row (`perspectron.ops.sequences`); states then have a row for each.

    backend: "naive" is the plain loop, "torch" the fast one, "auto" that or, in training on a CPU, the native
    kernel, where it fits. Raises BackendError for an unknown one, ValueError for shapes that do not fit.

        >>> from perspectron.designs.drm import cases, op
        >>> from perspectron.designs.drm.law import State, Weights
        >>> e, z, *weights = next(cases.cases()).inputs
        >>> state = State(z, z.new_zeros(2, 0), torch.zeros(2, dtype=torch.int64))
        >>> states, after, trace = op.scan(e, state, Weights(*weights), cases.LAW)
        >>> tuple(states.shape), torch.equal(states[:, -1], after.z_BS)
        ((2, 30, 7), True)
    """
    dispatch.known(backend, BACKENDS)
    _check(e_BTE, state, weights, law)
    if backend == "auto":
        where = e_BTE.device.type
        dispatch.log_once(
            "drm.scan: auto runs the torch loop on %s, or in training on a CPU a native kernel", where
        )
    tensors = [x for x in (e_BTE, state.z_BS, state.geometry_BF, *weights) if x is not None]
    dtype = dispatch.widest(*tensors)
    if any(x.dtype != dtype for x in tensors):
        weights = Weights._make(None if x is None else x.to(dtype) for x in weights)
        state = State(state.z_BS.to(dtype), state.geometry_BF.to(dtype), state.length_B)
        e_BTE = e_BTE.to(dtype)
    drive_TBG = F.linear(filled(e_BTE, pad_BT, 0).transpose(0, 1), weights.token_w)
    drive_TBG = F.pad(drive_TBG, (len(weights.read_b) - drive_TBG.shape[-1], 0)) + weights.read_b
    when = plan(state.length_B, e_BTE.shape[1], law.geometry_interval, bptt, reset_BT, pad_BT)
    if backend == "naive":
        return naive(drive_TBG, state, weights, law, when)
    native = backend == "auto" and drm_loop.fits(drive_TBG, state, weights, law, when)
    return drm_loop.run(drive_TBG, state, weights, law, when, native=native)


def _check(e_BTE: Tensor, state: State, weights: Weights, law: Law) -> None:
    (B, T, E), S = e_BTE.shape, len(weights.z0_S)
    if T == 0:
        raise ValueError("e has no tokens, want [B,T,E] with T ≥ 1")
    wanted = {
        "token_w": (weights.token_w, (len(weights.read_w) // 3, E)),
        "state": (state.z_BS, (B, S)),
        "geometry": (state.geometry_BF, (B, width(S, law) if law.geometry_interval > 1 else 0)),
        "length": (state.length_B, (B,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, want {shape}")


def naive(
    drive_TBG: Tensor, state: State, w: Weights, law: Law, when: Plan
) -> tuple[Tensor, State, Trace | None]:
    """The plain loop, whose graph is autograd's; the oracle of the fast one. drive: what the trunks and the flow
    read besides z."""
    z_BS, geometry_BF = state.z_BS, state.geometry_BF
    states, shown = [], []
    for t, drive_BG in enumerate(drive_TBG):
        if (reset_B1 := when.resets[t]) is not None:
            z_BS = torch.where(reset_B1, w.z0_S, z_BS)
        if (stop_B1 := when.stops[t]) is not None:
            z_BS = torch.where(stop_B1, z_BS.detach(), z_BS)
        h_BG = F.gelu(drive_BG + F.linear(z_BS, w.read_w))
        if (due := when.due[t]) is not None:
            fresh_BF = lines(geometry(h_BG, w, law))
            geometry_BF = fresh_BF if due is True else torch.where(due, fresh_BF, geometry_BF)
        now = of_lines(geometry_BF, z_BS.shape[1], law)
        v_BS = velocity(h_BG, now, w, law)
        shown.append((z_BS, v_BS, *now[1:]))
        moved_BS = confine(z_BS + law.dt * v_BS, law)
        pad_B1 = when.pads[t]
        z_BS = moved_BS if pad_B1 is None else torch.where(pad_B1, z_BS, moved_BS)
        states.append(z_BS)
    after = State(z_BS, geometry_BF if law.geometry_interval > 1 else state.geometry_BF, when.length_B)
    if torch.is_inference_mode_enabled():
        return torch.stack(states, 1), after, None
    return torch.stack(states, 1), after, Trace(*(torch.stack(x, 1) for x in zip(*shown, strict=True)))


def geometry(h_BG: Tensor, w: Weights, law: Law) -> Geometry:
    """Directions, gates and metric from the first layer's outputs."""
    N, S, H = law.directions, len(w.z0_S), w.trunk_w.shape[-1]
    k_direction, k_metric = (
        F.gelu(F.linear(h_BH, weight, bias))
        for h_BH, weight, bias in zip(h_BG.split(H, 1)[:2], w.trunk_w, w.trunk_b.split(H), strict=True)
    )
    V, gate_BN = F.linear(k_direction, w.direction_w, w.direction_b).split([len(w.direction_b) - N, N], 1)
    raw_BS, U = F.linear(k_metric, w.metric_w, w.metric_b).tensor_split([S], 1)
    K = S if w.metric_basis is None else len(w.metric_basis)
    L = S if w.direction_basis is None else len(w.direction_basis)
    V_BNS, U_BRS = V.unflatten(1, (N, L)), U.unflatten(1, (law.rank, K))
    if w.direction_basis is not None:
        V_BNS = V_BNS @ w.direction_basis
    if w.metric_basis is not None:
        U_BRS = U_BRS @ w.metric_basis
    V_BNS = F.normalize(V_BNS, dim=-1) if law.direction_norm else V_BNS
    a_BN = thin(torch.sigmoid((gate_BN + law.gate_bias) / law.gate_temperature), law)
    return Geometry(V_BNS, a_BN, F.softplus(raw_BS) + law.metric_floor, U_BRS * max(law.rank, 1) ** -0.5)


def velocity(h_BG: Tensor, now: Geometry, w: Weights, law: Law) -> Tensor:
    """The velocity (1−s) v + s (G + λI)⁻¹ v of v = Σ a_i c_i V_i (c, where there are no directions), by a dense
    solve."""
    v_BS = c_BN = torch.tanh(F.linear(h_BG[:, 2 * w.trunk_w.shape[-1] :], w.flow_w, w.flow_b))
    if law.directions > 0:
        v_BS = ((now.a_BN * c_BN)[:, :, None] * now.V_BNS).sum(1)
    solved_BS = torch.linalg.solve(metric(now, law.damping), v_BS)
    return (1 - law.strength) * v_BS + law.strength * solved_BS


def metric(now: Geometry, damping: float = 0.0) -> Tensor:
    """The metric diag(d + λ) + UᵀU [B,S,S]."""
    return torch.diag_embed(now.d_BS + damping) + now.U_BRS.mT @ now.U_BRS


def coupling(now: Geometry) -> Tensor:
    """The coupling C_ij = V_i G V_jᵀ of each pair of directions under the metric [B,N,N]
    (docs/designs/drm.md#coupling-and-angles)."""
    return now.V_BNS @ metric(now) @ now.V_BNS.mT


def confine(z_BS: Tensor, law: Law) -> Tensor:
    """The state pulled into the ball of radius R, then R tanh(z/R); as it is without `clip`."""
    if not law.clip:
        return z_BS
    z_BS = z_BS * (law.radius / torch.linalg.vector_norm(z_BS, dim=-1, keepdim=True).clamp_min(law.radius))
    return law.radius * torch.tanh(z_BS / law.radius) if law.squash else z_BS


def logit_change(logits_BTV: Tensor, reset_BT: Tensor | None = None, pad_BT: Tensor | None = None) -> Tensor:
    """The mean squared difference of neighbouring tokens' logits, of the same document; 0 where there are none."""
    full = torch.promote_types(logits_BTV.dtype, torch.float32)
    change_BT = logits_BTV.to(full).diff(dim=1).square().mean(-1)
    pairs_BT = follows(reset_BT, pad_BT, change_BT)
    change = ranks.all_reduce_sum(torch.where(pairs_BT, change_BT, 0).sum())
    return change / ranks.all_reduce_sum(pairs_BT.sum()).clamp_min(1)


def on_torus(angle_n: Tensor) -> Tensor:
    """The points (cos θ, sin θ) of angles [..., n], [..., n, 2] (docs/designs/drm.md#coupling-and-angles)."""
    return torch.stack([angle_n.cos(), angle_n.sin()], -1)


def angles(point_n2: Tensor) -> Tensor:
    """The angles in (−π, π] of points [..., n, 2], which need not lie on the circle."""
    return torch.atan2(point_n2[..., 1], point_n2[..., 0])
