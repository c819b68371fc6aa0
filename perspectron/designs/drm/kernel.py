"""The recurrence of the directional relational manifold on a CPU, forward and backward, for `designs.drm.loop`.

Everything is float32; results depend neither on the number of threads nor on the instruction set. Weights are as
`perspectron.designs.drm.law.Weights` has them, without bases; every token has its own geometry, without top-k gates.
Source: docs/designs/drm.md#flow.

Shapes: B batch, T time, S state width, H hidden width, G = 3H, N directions, R metric rank, M = N·S + N and
Y = S + R·S the outputs of the trunks' heads, C coefficients: N, or S where there are no directions.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perspectron.native import _check, function, threads
from perspectron.native.panels import addresses, panels

TYPES = (*[ctypes.c_void_p] * 3, ctypes.c_int)


class Sizes(NamedTuple):
    T: int
    B: int
    S: int
    H: int
    N: int
    R: int

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape that these letters name."""
        _, _, S, H, N, R = self
        size = self._asdict() | {"2": 2, "G": 3 * H, "M": N * S + N, "Y": S + R * S, "C": N or S}
        return tuple(size[letter] for letter in letters)


class Matrices(NamedTuple):
    """The matrices of products, laid out as in `nn.Linear`: the map that reads z, both trunks, and the heads."""

    read_GS: Tensor
    trunk_2HH: Tensor
    direction_MH: Tensor
    metric_YH: Tensor
    flow_CH: Tensor


class Made(NamedTuple):
    """The values of every token that `forward` leaves: the state after it, what the first GELUs read, the flow's
    coefficients, the velocity solved for, the velocity; directions, gates and metric, 1/D and Q; the trunks before
    their last GELU, the metric's diagonal before its softplus, and the directions' lengths, if they are unit vectors.
    """

    z_TBS: Tensor
    p_TBG: Tensor
    c_TBC: Tensor
    x_TBS: Tensor
    v_TBS: Tensor
    V_TBNS: Tensor
    a_TBN: Tensor
    d_TBS: Tensor
    U_TBRS: Tensor
    inverse_TBS: Tensor
    Q_TBRS: Tensor
    q_T2BH: Tensor
    raw_TBS: Tensor
    norm_TBN: Tensor | None


class Read(NamedTuple):
    """Those of `Made` that `backward` reads itself."""

    c_TBC: Tensor
    x_TBS: Tensor
    V_TBNS: Tensor
    U_TBRS: Tensor
    inverse_TBS: Tensor
    Q_TBRS: Tensor
    norm_TBN: Tensor | None


class Slopes(NamedTuple):
    """The slopes of p, q, c, gates and raw; gates times coefficients; the squashing's slopes; and the states before
    they were pulled into the ball, with their lengths. None where nothing squashes, or pulls."""

    p_TBG: Tensor
    q_T2BH: Tensor
    c_TBC: Tensor
    mix_TBN: Tensor
    gate_TBN: Tensor
    raw_TBS: Tensor
    squash_TBS: Tensor | None
    moved_TBS: Tensor | None
    norm_TB: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the heads' outputs, which first hold the parts from elsewhere, and memory for those of c, q and
    p."""

    dX_TBM: Tensor
    dY_TBY: Tensor
    dc_TBC: Tensor
    dq_T2BH: Tensor
    dp_TBG: Tensor


def _masks(sizes: Sizes, *masks: Tensor | None) -> list[Tensor | None]:
    """Bytes [T,B] of masks [T,B,1]."""
    made = [None if mask is None else mask[..., 0].to(torch.uint8).contiguous() for mask in masks]
    for mask in made:
        if mask is not None:
            _check(mask, torch.uint8, (sizes.T, sizes.B))
    return made


def _check_named(sizes: Sizes, tensors: NamedTuple) -> None:
    """ValueError unless each tensor has the shape that its name ends with."""
    for name, tensor in tensors._asdict().items():
        if tensor is not None:
            _check(tensor, torch.float32, sizes.shape(name.rsplit("_", 1)[1]))


def forward(
    drive_TBG: Tensor,
    first_BS: Tensor,
    start_S: Tensor,
    matrices: Matrices,
    biases: Sequence[Tensor],
    law: Sequence[float],
    reset_TB1: Tensor | None,
    pad_TB1: Tensor | None,
    *,
    directions: int,
    rank: int,
    unit: bool,
) -> Made:
    """Run all tokens. biases: of trunks [2H], directions [M], metric [Y], flow [C]. law: dt, radius, strength, damping,
    least d, bias and temperature of the gates; then 1 or 0: clip, squash. unit: directions are unit vectors."""
    T, B, _ = drive_TBG.shape
    sizes = Sizes(T, B, len(start_S), matrices.trunk_2HH.shape[-1], directions, rank)
    _check_named(sizes, matrices)
    given, of_biases = (drive_TBG, first_BS, start_S), [(2 * sizes.H,), *map(sizes.shape, "MYC")]
    shapes = [*map(sizes.shape, ("TBG", "BS", "S")), *of_biases]
    for tensor, shape in zip((*given, *biases), shapes, strict=True):
        _check(tensor, torch.float32, shape)
    made = Made(*(drive_TBG.new_empty(sizes.shape(name.rsplit("_", 1)[1])) for name in Made._fields))
    made = made if unit else made._replace(norm_TBN=None)
    weights, masks = [panels(w.mT) for w in matrices], _masks(sizes, reset_TB1, pad_TB1)
    tensors = addresses([*given, *weights, *biases, *masks, *made])
    function("pspx_drm", *TYPES)(
        tensors, (ctypes.c_int64 * 6)(*sizes), (ctypes.c_double * 9)(*law), threads()
    )
    return made


def backward(
    read: Read,
    matrices: Matrices,
    law: Sequence[float],
    slopes: Slopes,
    dz_TBS: Tensor,
    dv_TBS: Tensor,
    into: Gradients,
    reset_TB1: Tensor | None,
    pad_TB1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write the adjoints into `into`; return the gradients of z0 and the first state. law: dt, radius, strength."""
    (T, B, N, S), R = read.V_TBNS.shape, read.U_TBRS.shape[2]
    sizes = Sizes(T, B, S, matrices.trunk_2HH.shape[-1], N, R)
    for named in (read, matrices, slopes, into):
        _check_named(sizes, named)
    for tensor in (dz_TBS, dv_TBS):
        _check(tensor, torch.float32, (T, B, S))
    dstart_BS, dfirst_BS = (dz_TBS.new_zeros(B, S) for _ in range(2))
    weights, masks = [panels(w) for w in matrices], _masks(sizes, reset_TB1, pad_TB1)
    tensors = addresses([dz_TBS, dv_TBS, *slopes, *read, *weights, *masks, *into, dstart_BS, dfirst_BS])
    function("pspx_drm_backward", *TYPES)(
        tensors, (ctypes.c_int64 * 6)(*sizes), (ctypes.c_double * 3)(*law), threads()
    )
    return dstart_BS.sum(0), dfirst_BS
