"""The tensors of the directional relational manifold, and the schedule of what happens to which row.

Shapes: B batch, T time, S state width, E token width, H hidden width, N directions, R metric rank, K basis, F the
geometry of a row in one line.
"""

import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from perspectron.ops.attention import Places, places


class Weights(NamedTuple):
    """The weights of the law.

    z0: the state before any token. read: the maps of z, to the trunks of directions and metric and to the flow,
    in one matrix; token: the flow's map of the token; trunk: the second layers of both trunks. direction: N·S rows
    (N·K, coefficients of a basis), then one for each gate; metric: S rows for the diagonal, then R·S (R·K) for U."""

    z0_S: Tensor
    read_w: Tensor  # [3H, S]
    read_b: Tensor  # [3H]
    token_w: Tensor  # [H, E]
    trunk_w: Tensor  # [2, H, H]
    trunk_b: Tensor  # [2H]
    direction_w: Tensor  # [N·S + N, H] or [N·K + N, H]
    direction_b: Tensor
    metric_w: Tensor  # [S + R·S, H] or [S + R·K, H]
    metric_b: Tensor
    flow_w: Tensor  # [N, H], where N = 0 [S, H]
    flow_b: Tensor  # [N] or [S]
    direction_basis: Tensor | None = None  # [K, S]
    metric_basis: Tensor | None = None  # [K, S]


class Law(NamedTuple):
    """The numbers of the law, as `DRMConfig` names them. Without directions the flow has a number for each axis, which
    is the velocity. Gates are σ((· + gate_bias) / gate_temperature), of which the `gate_top_k` largest stay (0: all),
    scaled up to the old sum with `gate_renorm`; `direction_norm` makes directions unit vectors; `metric_floor` is the
    least d; `strength` is s and `damping` λ of the naturalisation; without `squash` the state is only pulled into the
    ball, and without `clip` nothing holds it."""

    directions: int
    rank: int
    dt: float
    radius: float
    squash: bool
    strength: float
    damping: float
    metric_floor: float
    gate_bias: float
    gate_temperature: float
    gate_top_k: int
    gate_renorm: bool
    direction_norm: bool
    geometry_interval: int
    clip: bool = True


class State(NamedTuple):
    """The state: z; the geometry in force (width 0 where every token refreshes it); the tokens of the document so
    far."""

    z_BS: Tensor
    geometry_BF: Tensor
    length_B: Tensor


class Geometry(NamedTuple):
    """Directions, gates, and the metric diag(d) + UᵀU."""

    V_BNS: Tensor
    a_BN: Tensor
    d_BS: Tensor
    U_BRS: Tensor


class Trace(NamedTuple):
    """A record of each token: the state it met, its velocity, and the gates and metric in force."""

    before_BTS: Tensor
    v_BTS: Tensor
    a_BTN: Tensor
    d_BTS: Tensor
    U_BTRS: Tensor


def width(S: int, law: Law) -> int:
    """The width F of a geometry in one line."""
    return law.directions * (S + 1) + S * (1 + law.rank)


def lines(geometry: Geometry) -> Tensor:
    """A geometry in one line [B,F] for each row: V, a, d, U."""
    return torch.cat([x.flatten(1) for x in geometry], 1)


def of_lines(lines_BF: Tensor, S: int, law: Law) -> Geometry:
    """The geometry of `lines`, in views."""
    N, R = law.directions, law.rank
    V, a, d, U = lines_BF.split([N * S, N, S, R * S], 1)
    return Geometry(V.unflatten(1, (N, S)), a, d, U.unflatten(1, (R, S)))


def thin(a_BN: Tensor, law: Law) -> Tensor:
    """The gates, with all but the `gate_top_k` largest set to 0 (0: all stay open)."""
    if law.gate_top_k == 0:
        return a_BN
    kept_BN = torch.zeros_like(a_BN).scatter(-1, a_BN.topk(law.gate_top_k).indices, 1)
    few_BN = a_BN * kept_BN
    return few_BN * (a_BN.sum(-1, keepdim=True) / few_BN.sum(-1, keepdim=True)) if law.gate_renorm else few_BN


class Plan(NamedTuple):
    """The rows to which something happens at each token: a document begins (reset), there is no token (pad), the
    gradient ends before the token (stop). Lists are of columns, None where it happens to no row. due: the geometry is
    refreshed (True: in all rows). slot: which geometry is in force, counted from the one the state came with, if that
    is kept."""

    reset_TB1: Tensor | None
    pad_TB1: Tensor | None
    stop_TB1: Tensor | None
    resets: list[Tensor | None]
    pads: list[Tensor | None]
    stops: list[Tensor | None]
    due: list[Tensor | Literal[True] | None]
    slot: list[int]
    length_B: Tensor


def plan(
    length_B: Tensor, T: int, interval: int, bptt: int, reset_BT: Tensor | None, pad_BT: Tensor | None
) -> Plan:
    """The plan for T tokens after `length_B` of their documents. bptt: gradients end and geometry is dropped at each
    multiple of this many tokens; 0 is never. On the meta device, which has no values, the geometry is always
    refreshed."""
    due: list[Tensor | Literal[True] | None] = [True] * T
    if reset_BT is None and pad_BT is None and interval == 1 and bptt == 0:
        none: list[Tensor | None] = [None] * T
        return Plan(None, None, None, none, none, none, due, list(range(T)), length_B + T)
    at, stop_BT = places(length_B, T, reset_BT, pad_BT), None
    if bptt > 0:
        stop_BT = at.valid_BT & (at.position_BT > 0) & (at.position_BT % bptt == 0)
    if interval > 1 and not length_B.is_meta:
        due_BT = refreshes(at, interval, bptt)
        whole_T = due_BT.all(0).tolist()
        due = [True if whole_T[t] else rows for t, rows in enumerate(_columns(_by_time(due_BT), T))]
    slot = list(itertools.accumulate((x is not None for x in due), initial=0 if interval > 1 else -1))[1:]
    reset_TB1, pad_TB1, stop_TB1 = _by_time(reset_BT), _by_time(pad_BT), _by_time(stop_BT)
    resets, pads, stops = (_columns(mask, T) for mask in (reset_TB1, pad_TB1, stop_TB1))
    return Plan(reset_TB1, pad_TB1, stop_TB1, resets, pads, stops, due, slot, at.length_B)


def refreshes(at: Places, interval: int, bptt: int) -> Tensor:
    """The tokens [B,T] at which the geometry is refreshed."""
    due_BT = at.position_BT % interval == 0
    if bptt > 0:
        due_BT |= at.position_BT % bptt == 0
    return due_BT & at.valid_BT


def _by_time(mask_BT: Tensor | None) -> Tensor | None:
    return None if mask_BT is None else mask_BT.mT[:, :, None]


def _columns(mask_TB1: Tensor | None, T: int) -> list[Tensor | None]:
    if mask_TB1 is None:
        return [None] * T
    some_T = [True] * T if mask_TB1.is_meta else mask_TB1.any(1)[:, 0].tolist()
    return [rows if some else None for rows, some in zip(mask_TB1.unbind(), some_T, strict=True)]


def before(z_BS: Tensor, states_TBS: Tensor, z0_S: Tensor, when: Plan) -> Tensor:
    """The state that each token met [T,B,S], from the first one and those after each token."""
    met_TBS = torch.cat([z_BS[None], states_TBS[:-1]])
    if when.reset_TB1 is not None:
        met_TBS = torch.where(when.reset_TB1, z0_S, met_TBS)
    if when.stop_TB1 is not None:
        met_TBS = torch.where(when.stop_TB1, met_TBS.detach(), met_TBS)
    return met_TBS
