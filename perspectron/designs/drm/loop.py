"""The fast loop of `perspectron.designs.drm.op`.

Per token only what must wait for the token before: all that looks at z is one product, the two trunks run side by
side; products with embeddings run over all time at once. The metric is solved by Woodbury: with D = d + λ,
L Lᵀ = I + U D⁻¹ Uᵀ and Q = L⁻¹ U D⁻¹ it is (G + λI)⁻¹ = D⁻¹ − QᵀQ. Source: docs/designs/drm.md#flow.

Shapes: B batch, T time, J geometries (one for each refresh, after the one the state came with, where that is kept),
S state width, H hidden width, G = 3H, N directions, R metric rank, K basis (or S), F a geometry in one line, M outputs
of a trunk's heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.drm import kernel
from perspectron.designs.drm.adjoint import Adjoint, Column, Made, Solved, naturalised, stack
from perspectron.designs.drm.law import (
    Geometry,
    Law,
    Plan,
    State,
    Trace,
    Weights,
    before,
    lines,
    of_lines,
    thin,
)
from perspectron.ops import fused
from perspectron.ops.dispatch import once_differentiable, refuse

NORM = 1e-12  # a direction's least, as in F.normalize
FIELDS = (Weights._fields, Column._fields, Solved._fields, Made._fields)


def run(
    drive_TBG: Tensor, state: State, w: Weights, law: Law, when: Plan, *, native: bool = False
) -> tuple[Tensor, State, Trace | None]:
    """The fast loop; takes and gives what `designs.drm.op.naive` does. native: on the kernel, which must fit
    (`fits`)."""
    kept_BF = state.geometry_BF
    if torch.is_inference_mode_enabled():
        columns, solved, _ = _forward(drive_TBG, state.z_BS, kept_BF, w, law, when, keep=False)
        if law.geometry_interval > 1:
            kept_BF = lines(Geometry(*solved[-1][:4]))
        z_BTS = torch.stack([column.z_BS for column in columns], 1)
        return z_BTS, State(columns[-1].z_BS, kept_BF, when.length_B), None
    z_TBS, v_TBS, V_BNS, *shown = _Loop.apply(law, when, native, drive_TBG, state.z_BS, kept_BF, *w)
    if law.geometry_interval > 1:
        kept_BF = lines(Geometry(V_BNS, *(x_JB[-1] for x_JB in shown)))
        slot_T = torch.tensor(when.slot, device=z_TBS.device)
        shown = [x_JB[slot_T] for x_JB in shown]
    before_TBS = before(state.z_BS, z_TBS, w.z0_S, when)
    trace = Trace(*(x_TB.transpose(0, 1) for x_TB in (before_TBS, v_TBS, *shown)))
    return z_TBS.transpose(0, 1), State(z_TBS[-1].clone(), kept_BF, when.length_B), trace


def _forward(
    drive_TBG: Tensor, z_BS: Tensor, geometry_BF: Tensor, w: Weights, law: Law, when: Plan, *, keep: bool
) -> tuple[list[Column], list[Solved], list[Made]]:
    """All columns, all geometries and what they were made of; without `keep` only z and the last geometry."""
    columns, solved, made = list[Column](), list[Solved](), list[Made]()
    read_SG, eye_RR = w.read_w.mT, torch.eye(law.rank, dtype=z_BS.dtype, device=z_BS.device)
    flow = 2 * w.trunk_w.shape[-1]
    if law.geometry_interval > 1:
        solved.append(_solved(of_lines(geometry_BF, z_BS.shape[1], law), law, eye_RR))
    for t, drive_BG in enumerate(drive_TBG.unbind()):
        if (reset_B1 := when.resets[t]) is not None:
            z_BS = torch.where(reset_B1, w.z0_S, z_BS)
        p_BG = torch.addmm(drive_BG, z_BS, read_SG)
        h_BG = F.gelu(p_BG)
        if (due_B1 := when.due[t]) is not None:
            fresh, parts = _made(h_BG, w, law)
            if due_B1 is not True:
                fresh = _where(due_B1, fresh, Geometry(*solved[-1][:4]))
            if not keep:
                solved, made = [], []
            solved.append(_solved(fresh, law, eye_RR))
            made.append(parts)
        c_BN = F.linear(h_BG[:, flow:], w.flow_w, w.flow_b).tanh_()
        x_BS, v_BS = _velocity(c_BN, solved[-1], law)
        moved_BS = _confined(torch.add(z_BS, v_BS, alpha=law.dt), law)
        z_BS = moved_BS if (pad_B1 := when.pads[t]) is None else torch.where(pad_B1, z_BS, moved_BS)
        columns.append(Column(z_BS, p_BG, c_BN, x_BS, v_BS) if keep else Column(z_BS, *[z_BS] * 4))
    return columns, solved, made


def _made(h_BG: Tensor, w: Weights, law: Law) -> tuple[Geometry, Made]:
    """The geometry from the first layer's outputs, as `perspectron.designs.drm.op.geometry`."""
    B, N, R, S, H = len(h_BG), law.directions, law.rank, len(w.z0_S), w.trunk_w.shape[-1]
    h_2BH = h_BG[:, : 2 * H].view(B, 2, H).transpose(0, 1)
    q_2BH = torch.baddbmm(w.trunk_b.view(2, 1, H), h_2BH, w.trunk_w.mT)
    k_direction, k_metric = F.gelu(q_2BH).unbind()
    X_BM = F.linear(k_direction, w.direction_w, w.direction_b)
    Y_BM = F.linear(k_metric, w.metric_w, w.metric_b)
    V_line, gate_line = X_BM.split([X_BM.shape[1] - N, N], 1)
    V_part = V_BNS = V_line.view(B, N, S if w.direction_basis is None else len(w.direction_basis))
    U_part = U_BRS = Y_BM[:, S:].view(B, R, S if w.metric_basis is None else len(w.metric_basis))
    if w.direction_basis is not None:
        V_BNS = V_part @ w.direction_basis
    if w.metric_basis is not None:
        U_BRS = U_part @ w.metric_basis
    norm_BN1 = None
    if law.direction_norm:
        norm_BN1 = torch.linalg.vector_norm(V_BNS, dim=-1, keepdim=True).clamp_min_(NORM)
        V_BNS = V_BNS / norm_BN1
    gate_BN = torch.sigmoid((gate_line + law.gate_bias).div_(law.gate_temperature))
    d_BS = F.softplus(Y_BM[:, :S]).add_(law.metric_floor)
    made = Made(
        q_2BH,
        None if w.direction_basis is None else V_part,
        norm_BN1,
        gate_BN if law.gate_top_k else None,
        Y_BM[:, :S],
        None if w.metric_basis is None else U_part,
    )
    return Geometry(V_BNS, thin(gate_BN, law), d_BS, U_BRS * max(R, 1) ** -0.5), made


def _where(due_B1: Tensor, new: Geometry, old: Geometry) -> Geometry:
    """The new geometry in the rows where it is due, else the old one."""
    rows = [due_B1.view(-1, *[1] * (x.ndim - 1)) for x in new]
    return Geometry(*(torch.where(*each) for each in zip(rows, new, old, strict=True)))


def _solved(geometry: Geometry, law: Law, eye_RR: Tensor) -> Solved:
    if law.strength == 0:
        return Solved(*geometry, None, None)
    U_BRS, inverse_BS = geometry.U_BRS, (geometry.d_BS + law.damping).reciprocal_()
    if law.rank == 0:
        return Solved(*geometry, inverse_BS, U_BRS)
    W_BRS = U_BRS * inverse_BS[:, None]
    L_BRR, _ = torch.linalg.cholesky_ex(torch.baddbmm(eye_RR, W_BRS, U_BRS.mT))
    return Solved(*geometry, inverse_BS, torch.linalg.solve_triangular(L_BRR, W_BRS, upper=False))


def _velocity(c_BN: Tensor, now: Solved, law: Law) -> tuple[Tensor, Tensor]:
    """The pair ((G + λI)⁻¹ v, the velocity) of v = Σ a c V, or c where there are no directions."""
    v_BS = c_BN
    if law.directions > 0:
        v_BS = torch.bmm((now.a_BN * c_BN)[:, None], now.V_BNS)[:, 0]
    if now.inverse_BS is None or now.Q_BRS is None:
        return v_BS, v_BS
    x_BS = naturalised(v_BS, now.inverse_BS, now.Q_BRS)
    return x_BS, torch.lerp(v_BS, x_BS, law.strength)


def _confined(z_BS: Tensor, law: Law) -> Tensor:
    """The state as `perspectron.designs.drm.op.confine` leaves it."""
    if not law.clip:
        return z_BS
    z_BS = z_BS / torch.linalg.vector_norm(z_BS, dim=-1, keepdim=True).clamp_min_(law.radius)
    return (torch.tanh(z_BS) if law.squash else z_BS) * law.radius


def fits(drive_TBG: Tensor, state: State, w: Weights, law: Law, when: Plan) -> bool:
    """True if the native kernel can train with these: float32 on a CPU, a geometry for each token, which bends the
    velocity, without bases, top-k gates or `bptt`."""
    plain = w.direction_basis is w.metric_basis is None and law.geometry_interval == 1 and law.gate_top_k == 0
    tensors = (drive_TBG, state.z_BS, *(x for x in w if x is not None))
    return plain and law.strength > 0 and when.stop_TB1 is None and fused.fits(*tensors)


class _Loop(torch.autograd.Function):
    """The loop with gradients: states, velocities, the last directions, and the gates and metrics of every geometry."""

    @staticmethod
    def forward(
        ctx: Any,
        law: Law,
        when: Plan,
        native: bool,
        drive_TBG: Tensor,
        z_BS: Tensor,
        geometry_BF: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        w = Weights(*weights)
        ctx.law, ctx.when, ctx.native = law, when, native
        if native:
            made, lengths_TBN = kernel.forward(drive_TBG, z_BS, w, law, when)
            column, slot, (q_T2BH, raw_TBS) = Column(*made[:5]), Solved(*made[5:11]), made[11:]
            norm_TBN1 = None if lengths_TBN is None else lengths_TBN[..., None]
            parts = Made(q_T2BH, None, norm_TBN1, None, raw_TBS, None)
            ctx.save_for_backward(drive_TBG, z_BS, geometry_BF, *weights, *column, *slot, *parts)
            return column.z_BS, column.v_BS, slot.V_BNS[-1].clone(), slot.a_BN, slot.d_BS, slot.U_BRS
        columns, solved, each = _forward(drive_TBG, z_BS, geometry_BF, w, law, when, keep=True)
        column, slot, refreshes = stack(Column, columns), stack(Solved, solved), len(each)
        if refreshes == 0:  # shapes are wanted all the same
            each.append(_made(F.gelu(column.p_BG[0]), w, law)[1])
        parts = Made._make(None if x is None else x[:refreshes] for x in stack(Made, each))
        ctx.save_for_backward(drive_TBG, z_BS, geometry_BF, *weights, *column, *slot, *parts)
        return column.z_BS, column.v_BS, slot.V_BNS[-1].clone(), slot.a_BN, slot.d_BS, slot.U_BRS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.law, ctx.when, ctx.native
        return (
            None,
            None,
            None,
            *once_differentiable("drm.scan", _backward, *how, *gradients, *ctx.saved_tensors),
        )

    jvp = refuse("drm.scan has no forward-mode derivative; use backend='naive'")


def _backward(law: Law, when: Plan, native: bool, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of `_Loop`'s tensors, from those of its outputs and what it kept."""
    rest = list(tensors)
    (gradients, (_, z_BS, _), w, column, slot, parts) = (
        [rest.pop(0) for _ in range(count)] for count in (6, 3, *map(len, FIELDS))
    )
    adjoint = Adjoint(law, when, Weights(*w), z_BS, Column(*column), Solved(*slot), Made(*parts), *gradients)
    adjoint.run_on_kernel() if native else adjoint.run()
    return *adjoint.inputs(), *adjoint.weights()
