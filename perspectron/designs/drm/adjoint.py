"""The backward pass of `perspectron.designs.drm.loop`: the loop carries the adjoint of z alone, and every gradient of a
weight is one product over all time, after it.

A token's operations are small, and there are thousands of tokens: time goes into the number of calls. So all that does
not depend on a gradient is made for all tokens before the loop (`_prepare`), all that no token waits for comes after it
(`inputs`, `weights`), and the loop adds into tensors that are views of what those products read.

Shapes: as in `perspectron.designs.drm.loop`; P rows of a product over many tokens.
"""

from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.drm import kernel
from perspectron.designs.drm.law import Geometry, Law, Plan, Weights, before, lines, thin


class Column(NamedTuple):
    """The values that the forward loop keeps of one token: the state after it, what the first GELUs read, the flow's
    coefficients, the velocity solved for and the velocity. Stacked, each tensor has the time first."""

    z_BS: Tensor
    p_BG: Tensor
    c_BN: Tensor
    x_BS: Tensor
    v_BS: Tensor


class Solved(NamedTuple):
    """A geometry, with 1/D and Q if it is solved for."""

    V_BNS: Tensor
    a_BN: Tensor
    d_BS: Tensor
    U_BRS: Tensor
    inverse_BS: Tensor | None
    Q_BRS: Tensor | None


class Made(NamedTuple):
    """Values from computing a geometry that the backward pass needs: the trunks before their last GELU, and what came
    before basis, norm, top-k, softplus and basis, where there is such a step."""

    q_2BH: Tensor
    V_part_BNK: Tensor | None
    norm_BN1: Tensor | None
    gate_BN: Tensor | None
    raw_BS: Tensor
    U_part_BRK: Tensor | None


Record = TypeVar("Record", Column, Solved, Made)


def stack(kind: type[Record], records: list[Record]) -> Record:
    """One record of stacked tensors."""
    columns: Any = zip(*records, strict=True)
    fields: list[Any] = [None if x[0] is None else torch.stack(x) for x in columns]
    return kind(*fields)


def naturalised(v_BS: Tensor, inverse_BS: Tensor, Q_BRS: Tensor) -> Tensor:
    """The product (G + λI)⁻¹ v by Woodbury."""
    x_BS = v_BS * inverse_BS
    if Q_BRS.shape[1] == 0:
        return x_BS
    return torch.baddbmm(x_BS[:, None], torch.bmm(v_BS[:, None], Q_BRS.mT), Q_BRS, alpha=-1)[:, 0]


class Adjoint:
    """The backward pass. Gradients of V, a, d, U collect over the columns that used them (dX and dY hold them side by
    side, as the heads gave them); a refresh then sends them through its trunks."""

    def __init__(
        self,
        law: Law,
        when: Plan,
        w: Weights,
        z_BS: Tensor,
        columns: Column,
        solved: Solved,
        made: Made,
        *gradients: Tensor,
    ) -> None:
        self.law, self.when, self.w = law, when, w
        self.squashed = law.clip and law.squash
        self.columns, self.solved, self.made = columns, solved, made
        self.dz_TBS, self.dv_TBS, dV_BNS, da_JBN, dd_JBS, dU_JBRS = gradients
        (J, B, N, S), R = solved.V_BNS.shape, law.rank
        self.kept = J - len(made.raw_BS)  # 1 where the state came with a geometry
        # Gradients of the heads' outputs. Where there is no basis in between, those of V, a, d and U are views of them:
        # what the columns add is then already where the products with the heads' weights read it.
        self.dX_JBM, self.dY_JBM = (z_BS.new_zeros(J, B, len(b)) for b in (w.direction_b, w.metric_b))
        dV_JBL, da_lines_JBN = self.dX_JBM.split([len(w.direction_b) - N, N], -1)
        self.d = Geometry(
            z_BS.new_zeros(J, B, N, S) if w.direction_basis is not None else dV_JBL.view(J, B, N, S),
            da_lines_JBN,
            self.dY_JBM[..., :S],
            z_BS.new_zeros(J, B, R, S)
            if w.metric_basis is not None
            else self.dY_JBM[..., S:].view(J, B, R, S),
        )
        # What comes from outside: of the last V, which the state takes along, and of every a, d, U, which terms see.
        self.d.V_BNS[-1].copy_(dV_BNS)
        for mine, outer in zip(self.d[1:], (da_JBN, dd_JBS, dU_JBRS), strict=True):
            mine.copy_(outer)
        self.met_TBS = before(z_BS, columns.z_BS, w.z0_S, when)
        self.dp_TBG = torch.zeros_like(columns.p_BG)
        self.dc_TBN = torch.empty_like(columns.c_BN)
        self.dq_J2BH = torch.empty_like(made.q_2BH)
        self.dz_BS, self.dz0_S = torch.zeros_like(z_BS), torch.zeros_like(w.z0_S)
        self._prepare()

    def _prepare(self) -> None:
        """Compute the slopes for all tokens, and note where states left the ball."""
        columns, law = self.columns, self.law
        a_TBN = self.solved.a_BN if law.geometry_interval == 1 else self.solved.a_BN[self.when.slot]
        # Slopes of tanh from its values: its arguments need not be kept.
        self.c_slope_TBN = 1 - columns.c_BN.square()
        if law.directions > 0:  # v = Σ a c V: of V it is a c, and of c it is a (V·dv)
            self.mix_TBN1 = (a_TBN * columns.c_BN)[..., None]
            self.c_slope_TBN = a_TBN * self.c_slope_TBN
        self.p_slope_TBG = _gelu_slope(columns.p_BG)
        self.q_slope_J2BH = _gelu_slope(self.made.q_2BH)
        gate_JBN = self.solved.a_BN[self.kept :] if self.made.gate_BN is None else self.made.gate_BN
        # Top-k passes gradients where it let gates through: the choice is made again in place of being kept.
        self.open_JBN = thin(gate_JBN, law) != 0
        self.gate_slope_JBN = gate_JBN * (1 - gate_JBN) / law.gate_temperature
        self.raw_slope_JBS = torch.sigmoid(self.made.raw_BS)
        self.squash_TBS = 1 - (columns.z_BS / law.radius).square()
        # Where a state was pulled back, the pull bends its gradient; asked once for all tokens, as nearly none are.
        self.moved_TBS = torch.add(self.met_TBS, columns.v_BS, alpha=law.dt)
        self.norm_TB1 = torch.linalg.vector_norm(self.moved_TBS, dim=-1, keepdim=True)
        outside_TB1 = (self.norm_TB1 > law.radius) & law.clip
        self.outside = outside_TB1.flatten(1).any(1).tolist()

    def run(self) -> None:
        """Walk from the last column to the first."""
        when, w, d, dz_BS = self.when, self.w, self.d, self.dz_BS
        c_TBN, V_JBNS = self.columns.c_BN, self.solved.V_BNS
        dflow_TBH = self.dp_TBG[..., 2 * w.trunk_w.shape[-1] :]
        for t in reversed(range(len(c_TBN))):
            # dz is the gradient of the state after token t; at the end of the turn, of the state before it.
            j, frozen_BS = when.slot[t], None
            dz_BS = dz_BS + self.dz_TBS[t]
            if (
                pad_B1 := when.pads[t]
            ) is not None:  # goes around the token, and nothing of it through the token
                frozen_BS = torch.where(pad_B1, dz_BS, 0)
                dz_BS = dz_BS - frozen_BS
            dz_BS = self._through_bounds(t, dz_BS)
            dv_BS = torch.add(self.dv_TBS[t], dz_BS, alpha=self.law.dt)
            dv_BS = self._through_solver(t, j, dv_BS)
            dmix_BN = dv_BS
            if self.law.directions > 0:
                dmix_BN = torch.bmm(V_JBNS[j], dv_BS[:, :, None])[:, :, 0]
                d.V_BNS[j].addcmul_(self.mix_TBN1[t], dv_BS[:, None])
                d.a_BN[j].addcmul_(dmix_BN, c_TBN[t])
            # Into the places where `weights` reads them: no list of tokens is stacked afterwards.
            dc_BN = torch.mul(dmix_BN, self.c_slope_TBN[t], out=self.dc_TBN[t])
            torch.mm(dc_BN, w.flow_w, out=dflow_TBH[t])
            if (due_B1 := when.due[t]) is not None:
                self._through_refresh(t, j, due_B1)
            # Trunks and flow have written side by side into dp: one product takes all that looked at z.
            dz_BS = torch.addmm(dz_BS, self.dp_TBG[t].mul_(self.p_slope_TBG[t]), w.read_w)
            dz_BS = dz_BS if frozen_BS is None else dz_BS + frozen_BS
            if (reset_B1 := when.resets[t]) is not None:  # the state before was z0, and the past gets nothing
                self.dz0_S += torch.where(reset_B1, dz_BS, 0).sum(0)
                dz_BS = dz_BS.masked_fill(reset_B1, 0)
            if (stop_B1 := when.stops[t]) is not None:
                dz_BS = dz_BS.masked_fill(stop_B1, 0)
        self.dz_BS = dz_BS

    def run_on_kernel(self) -> None:
        """`run` on the native kernel, where `drm_loop.fits`."""
        law, columns, solved, norm_BN1 = self.law, self.columns, self.solved, self.made.norm_BN1
        assert solved.inverse_BS is not None and solved.Q_BRS is not None  # noqa: PT018
        read = [
            columns.c_BN,
            columns.x_BS,
            solved.V_BNS,
            solved.U_BRS,
            solved.inverse_BS,
            solved.Q_BRS,
            None if norm_BN1 is None else norm_BN1[..., 0],
        ]
        slopes = [
            self.p_slope_TBG,
            self.q_slope_J2BH,
            self.c_slope_TBN,
            self.mix_TBN1[..., 0] if law.directions > 0 else solved.a_BN,
            self.gate_slope_JBN,
            self.raw_slope_JBS,
            self.squash_TBS if self.squashed else None,
            self.moved_TBS if law.clip else None,
            self.norm_TB1[..., 0] if law.clip else None,
        ]
        into = [self.dX_JBM, self.dY_JBM, self.dc_TBN, self.dq_J2BH, self.dp_TBG]
        gradients = (self.dz_TBS, self.dv_TBS)
        self.dz0_S, self.dz_BS = kernel.backward(read, slopes, into, *gradients, self.w, law, self.when)

    def _through_bounds(self, t: int, dz_BS: Tensor) -> Tensor:
        """The gradient of the state before it was squashed and pulled into the ball, from that after token t.

        R z / |z| has no slope along z, and R / |z| across it.
        """
        if self.squashed:
            dz_BS = dz_BS * self.squash_TBS[t]
        if not self.outside[t]:
            return dz_BS
        norm_B1 = self.norm_TB1[t]
        along_BS = self.moved_TBS[t] / norm_B1
        across_BS = dz_BS - along_BS * (along_BS * dz_BS).sum(1, keepdim=True)
        return torch.where(norm_B1 > self.law.radius, across_BS * (self.law.radius / norm_B1), dz_BS)

    def _through_solver(self, t: int, j: int, dv_BS: Tensor) -> Tensor:
        """The gradient of v from that of the velocity. G is symmetric: the gradient is naturalised as the velocity x
        was, to y, and G's is −s y xᵀ."""
        solved, s = self.solved, self.law.strength
        if solved.inverse_BS is None or solved.Q_BRS is None:
            return dv_BS
        y_BS, x_BS = naturalised(dv_BS, solved.inverse_BS[j], solved.Q_BRS[j]), self.columns.x_BS[t]
        self.d.d_BS[j].addcmul_(y_BS, x_BS, value=-s)
        if self.law.rank > 0:
            # Of UᵀU, −s (y xᵀ + x yᵀ): two thin products with U in place of an S·S matrix for each row.
            xy_B2S = torch.stack([x_BS, y_BS], 1)
            yx_B2R = torch.bmm(xy_B2S, solved.U_BRS[j].mT).flip(1)
            self.d.U_BRS[j].baddbmm_(yx_B2R.mT, xy_B2S, alpha=-s)
        return torch.lerp(dv_BS, y_BS, s)

    def _through_refresh(self, t: int, j: int, due_B1: Tensor | Literal[True]) -> None:
        """Send the gradients of a geometry through its trunks; rows that were not due hand theirs to the geometry
        before."""
        law, w, i, N = self.law, self.w, j - self.kept, self.law.directions
        if due_B1 is not True:
            for x in self.d:
                rows = due_B1.view(-1, *[1] * (x.ndim - 2))
                x[j - 1] += x[j].masked_fill(rows, 0)
                x[j].masked_fill_(~rows, 0)
        # In place from here on: every column that used this geometry lies behind us, and its gradients are complete.
        dV_BNS, da_BN, dd_BS, dU_BRS = (x[j] for x in self.d)
        if self.made.norm_BN1 is not None:
            V_BNS = self.solved.V_BNS[j]  # unit vectors: what lies along one has no effect on it
            along_BN1 = (dV_BNS * V_BNS).sum(-1, keepdim=True)
            dV_BNS.addcmul_(along_BN1, V_BNS, value=-1).div_(self.made.norm_BN1[i])
        if self.made.gate_BN is not None:
            da_BN.copy_(_through_thin(da_BN, self.made.gate_BN[i], self.open_JBN[i], law))
        da_BN.mul_(self.gate_slope_JBN[i])
        dd_BS.mul_(self.raw_slope_JBS[i])
        dU_BRS.mul_(max(law.rank, 1) ** -0.5)
        if w.direction_basis is not None:  # then d is not a view of dX, and the basis lies in between
            self.dX_JBM[j][:, :-N] = (dV_BNS @ w.direction_basis.mT).flatten(1)
        if w.metric_basis is not None:
            self.dY_JBM[j][:, dd_BS.shape[1] :] = (dU_BRS @ w.metric_basis.mT).flatten(1)
        dq_2BH = self.dq_J2BH[i]
        torch.mm(self.dX_JBM[j], w.direction_w, out=dq_2BH[0])
        torch.mm(self.dY_JBM[j], w.metric_w, out=dq_2BH[1])
        dq_2BH.mul_(self.q_slope_J2BH[i])
        _, B, H = dq_2BH.shape
        self.dp_TBG[t][:, : 2 * H].view(B, 2, H).copy_(torch.bmm(dq_2BH, w.trunk_w).transpose(0, 1))

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Gradients of the drive, of the first state and of the geometry it came with."""
        geometry_BF = lines(Geometry(*(x[0] for x in self.d))) if self.kept else None
        return self.dp_TBG, self.dz_BS, geometry_BF

    def weights(self) -> tuple[Tensor | None, ...]:
        """Gradients of the weights, in order; None for those that only the drive reads, left to autograd."""
        kept, H = self.kept, self.w.trunk_w.shape[-1]
        h_TBG = F.gelu(self.columns.p_BG)
        # Columns without a refresh had no part in the trunks' weights: only the others are multiplied.
        refreshed = [t for t, due_B1 in enumerate(self.when.due) if due_B1 is not None]
        h_2PH = h_TBG[refreshed, :, : 2 * H].unflatten(-1, (2, H)).permute(2, 0, 1, 3).flatten(1, 2)
        dq_2PH = self.dq_J2BH.transpose(0, 1).flatten(1, 2)
        k_2PH = F.gelu(self.made.q_2BH).transpose(0, 1).flatten(1, 2)
        dX_PM, dY_PM, dc_PN = (x.flatten(0, 1) for x in (self.dX_JBM[kept:], self.dY_JBM[kept:], self.dc_TBN))
        return (
            self.dz0_S,
            self.dp_TBG.flatten(0, 1).mT @ self.met_TBS.flatten(0, 1),
            None,
            None,
            torch.bmm(dq_2PH.mT, h_2PH),
            dq_2PH.sum(1).flatten(),
            dX_PM.mT @ k_2PH[0],
            dX_PM.sum(0),
            dY_PM.mT @ k_2PH[1],
            dY_PM.sum(0),
            dc_PN.mT @ h_TBG[..., 2 * H :].flatten(0, 1),
            dc_PN.sum(0),
            _of_basis(self.made.V_part_BNK, self.d.V_BNS[kept:]),
            _of_basis(self.made.U_part_BRK, self.d.U_BRS[kept:]),
        )


def _gelu_slope(x: Tensor) -> Tensor:
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x)
    return slope


def _through_thin(da_BN: Tensor, gate_BN: Tensor, open_BN: Tensor, law: Law) -> Tensor:
    """The gradient of all gates from that of those left open: a = r m g, r = Σg / Σ(m g) with `renorm`, else 1."""
    if not law.gate_renorm:
        return da_BN * open_BN
    few_BN = gate_BN * open_BN
    sum_B1 = few_BN.sum(1, keepdim=True)
    ratio_B1 = gate_BN.sum(1, keepdim=True) / sum_B1
    dratio_B1 = (da_BN * few_BN).sum(1, keepdim=True) / sum_B1
    return dratio_B1 + open_BN * ratio_B1 * (da_BN - dratio_B1)


def _of_basis(part_JBNK: Tensor | None, d_JBNS: Tensor) -> Tensor | None:
    return None if part_JBNK is None else part_JBNK.flatten(0, 2).mT @ d_JBNS.flatten(0, 2)
