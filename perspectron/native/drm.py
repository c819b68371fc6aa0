"""The recurrence of the directional relational manifold on a CPU, forward and backward, for `perspectron.ops.drm_loop`.

Everything is float32; results depend neither on the number of threads nor on the instruction set. Weights are as
`perspectron.ops.drm_law.Weights` has them, without bases; every token has a geometry of its own, whose gates are all
open.

Shapes: B batch, T time, S state width, H hidden width, G = 3H, N directions, R metric rank, M = N·S + N and
Y = S + R·S the outputs of the trunks' heads, C coefficients: N, or S where there are no directions.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perspectron.native import _check, _library, threads
from perspectron.native.panels import panels


class Sizes(NamedTuple):
    T: int
    B: int
    S: int
    H: int
    N: int
    R: int


class Matrices(NamedTuple):
    """The weights of products, as `nn.Linear` has them: what looks at z, both trunks, and the heads."""

    read_GS: Tensor
    trunk_2HH: Tensor
    direction_MH: Tensor
    metric_YH: Tensor
    flow_CH: Tensor

    def panels(self, *, back: bool) -> list[Tensor]:
        """The matrices in panels, of y = x Wᵀ, or `back`, of x W."""
        matrices = [self.read_GS, self.trunk_2HH, self.direction_MH, self.metric_YH, self.flow_CH]
        return [panels(w if back else w.mT) for w in matrices]


class Made(NamedTuple):
    """The values of every token that the backward pass reads: the state after it, what the first GELUs read, the
    flow's coefficients, the velocity solved for, the velocity; directions, gates and metric, 1/D and Q; the trunks
    before their last GELU, the directions' lengths, and the metric's diagonal before its softplus."""

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
    norm_TBN: Tensor
    raw_TBS: Tensor


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


def _numbers(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def _masks(sizes: Sizes, masks: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Bytes [T,B] of masks [T,B,1]."""
    for mask in masks:
        if mask is not None and mask.shape != (sizes.T, sizes.B, 1):
            raise ValueError(f"a mask has shape {tuple(mask.shape)}, must have {(sizes.T, sizes.B, 1)}")
    return [None if mask is None else mask.to(torch.uint8).contiguous() for mask in masks]


def _check_all(shapes: Sequence[tuple[Tensor, tuple[int, ...]]]) -> None:
    for tensor, shape in shapes:
        _check(tensor, torch.float32, shape)


def _shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shapes of `Made`'s tensors."""
    letters = dict(zip("TBSHNR", sizes, strict=True)) | {"2": 2, "G": 3 * sizes.H, "C": sizes.N or sizes.S}
    return {name: tuple(letters[letter] for letter in name.rsplit("_", 1)[1]) for name in Made._fields}


def forward(
    drive_TBG: Tensor,
    first_BS: Tensor,
    start_S: Tensor,
    matrices: Matrices,
    biases: Sequence[Tensor],
    law: Sequence[float],
    reset_TB1: Tensor | None,
    pad_TB1: Tensor | None,
) -> Made:
    """All tokens. biases: of trunks [2H], directions [M], metric [Y], flow [C]. law: dt, radius, strength, damping,
    least d, bias and temperature of the gates; then 1 or 0: clip, squash, unit directions."""
    (T, B, G), (M, H), S = drive_TBG.shape, matrices.direction_MH.shape, len(start_S)
    N, R = M // (S + 1), len(matrices.metric_YH) // S - 1
    sizes = Sizes(T, B, S, H, N, R)
    wanted = [(G, S), (2, H, H), (M, H), (S + R * S, H), (N or S, H)]
    if G != 3 * H:
        raise ValueError(f"drive has width {G}, must be 3H = {3 * H}")
    _check_all([(drive_TBG, (T, B, G)), (first_BS, (B, S)), (start_S, (S,))])
    _check_all([(w, shape) for w, shape in zip(matrices, wanted, strict=True)])
    _check_all([(b, (n,)) for b, n in zip(biases, (2 * H, M, S + R * S, N or S), strict=True)])
    made = Made(*(drive_TBG.new_empty(shape) for shape in _shapes_of(sizes).values()))
    given = [drive_TBG, first_BS, start_S, *matrices.panels(back=False), *biases]
    pointers = _pointers([*given, *(masks := _masks(sizes, (reset_TB1, pad_TB1))), *made])
    _library().pspx_drm(pointers, (ctypes.c_int64 * 6)(*sizes), _numbers(law), threads())
    del given, masks  # until here their memory is read
    return made


def backward(
    made: Made,
    matrices: Matrices,
    law: Sequence[float],
    slopes: Sequence[Tensor | None],
    dz_TBS: Tensor,
    dv_TBS: Tensor,
    into: Sequence[Tensor],
    reset_TB1: Tensor | None,
    pad_TB1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The adjoint of all tokens: the gradients of z0 and of the first state. law: dt, radius, strength. slopes: of p, q
    and c, the gates times coefficients, of gates and raw, of the squashing, then the states before they were pulled
    into the ball and their lengths [T,B]; None where there is none of the last three. into: the gradients of the heads'
    outputs [T,B,M] and [T,B,Y], which come with what else they have, and room for those of c, q and p."""
    (T, B, S), N, R = made.z_TBS.shape, made.V_TBNS.shape[2], made.U_TBRS.shape[2]
    sizes = Sizes(T, B, S, made.q_T2BH.shape[-1], N, R)
    shapes = _shapes_of(sizes)
    _check_all([(x, shapes[name]) for name, x in made._asdict().items()])
    like = ("p_TBG", "q_T2BH", "c_TBC", "a_TBN", "a_TBN", "raw_TBS", "z_TBS", "z_TBS")
    wanted: list[tuple[int, ...]] = [*(shapes[name] for name in like), (T, B)]
    _check_all([(x, shape) for x, shape in zip(slopes, wanted, strict=True) if x is not None])
    _check_all([(dz_TBS, (T, B, S)), (dv_TBS, (T, B, S))])
    wanted = [(T, B, N * S + N), (T, B, S + R * S), *(shapes[name] for name in ("c_TBC", "q_T2BH", "p_TBG"))]
    _check_all(list(zip(into, wanted, strict=True)))
    dstart_BS, dfirst_BS = (dz_TBS.new_zeros(B, S) for _ in range(2))
    read = [made.c_TBC, made.x_TBS, made.V_TBNS, made.U_TBRS, made.inverse_TBS, made.Q_TBRS]
    given = [dz_TBS, dv_TBS, *slopes, *read, made.norm_TBN if law[3] else None, *matrices.panels(back=True)]
    pointers = _pointers(
        [*given, *(masks := _masks(sizes, (reset_TB1, pad_TB1))), *into, dstart_BS, dfirst_BS]
    )
    _library().pspx_drm_backward(pointers, (ctypes.c_int64 * 6)(*sizes), _numbers(law), threads())
    del given, masks
    return dstart_BS.sum(0), dfirst_BS
