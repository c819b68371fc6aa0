"""The recurrence of the directional relational manifold on a CPU, forward and backward, for `designs.drm.loop`.

Everything is float32; results depend neither on the number of threads nor on the instruction set. Weights are as
`perspectron.designs.drm.law.Weights` has them, without bases; every token has its own geometry, without top-k gates.
Source: docs/designs/drm.md#flow.

Shapes: B batch, T time, S state width, H hidden width, G = 3H, D = 2H, N directions, R metric rank, M = N·S + N and
Y = S + R·S the outputs of the trunks' heads, C coefficients: N, or S where there are no directions.
"""

from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perspectron.designs.drm.law import Law, Plan, Weights
from perspectron.native import _check, call
from perspectron.native.panels import addresses, panels

# Shapes of tensors in the kernels' order.
GIVEN, MATRICES, BIASES = "TBG BS S", "GS 2HH MH YH CH", "D M Y C"
MADE, LENGTHS = "TBS TBG TBC TBS TBS TBNS TBN TBS TBRS TBS TBRS T2BH TBS", "TBN"
SLOPES, READ = "TBG T2BH TBC TBN TBN TBS TBS TBS TB", "TBC TBS TBNS TBRS TBS TBRS TBN"
INTO = "TBM TBY TBC T2BH TBG"


class _Sizes:
    """The sizes of a call, in the kernels' order, and the shapes that letters name."""

    def __init__(self, T: int, B: int, w: Weights, law: Law) -> None:
        S, H, N, R = len(w.z0_S), w.trunk_w.shape[-1], law.directions, law.rank
        self.all = T, B, S, H, N, R
        self._of = {
            "T": T, "B": B, "S": S, "H": H, "N": N, "R": R,
            "2": 2, "D": 2 * H, "G": 3 * H, "M": N * S + N, "Y": S + R * S, "C": N or S,
        }  # fmt: skip

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self._of[letter] for letter in letters)

    def check(self, shapes: str, tensors: Sequence[Tensor | None]) -> None:
        """ValueError unless each tensor that is there has its shape."""
        for letters, tensor in zip(shapes.split(), tensors, strict=True):
            if tensor is not None:
                _check(tensor, torch.float32, self.shape(letters))

    def masks(self, when: Plan) -> list[Tensor | None]:
        """Bytes [T,B] of resets and padding."""
        masks = [
            None if x is None else x[..., 0].to(torch.uint8).contiguous()
            for x in (when.reset_TB1, when.pad_TB1)
        ]
        for mask in masks:
            if mask is not None:
                _check(mask, torch.uint8, self.shape("TB"))
        return masks

    def call(self, name: str, tensors: Sequence[Tensor | None], law: Sequence[float]) -> None:
        sizes, numbers = (c_int64 * 6)(*self.all), (c_double * len(law))(*law)
        call(name, addresses(tensors), sizes, numbers, types=(*[c_void_p] * 3, c_int))


def _matrices(w: Weights, sizes: _Sizes) -> list[Tensor]:
    """The matrices of products, as in `nn.Linear`: the map that reads z, both trunks, and the heads."""
    matrices = [x.contiguous() for x in (w.read_w, w.trunk_w, w.direction_w, w.metric_w, w.flow_w)]
    sizes.check(MATRICES, matrices)
    return matrices


def forward(
    drive_TBG: Tensor, first_BS: Tensor, w: Weights, law: Law, when: Plan
) -> tuple[list[Tensor], Tensor | None]:
    """Run all tokens. Of each: the state after it, what the first GELUs read, the flow's coefficients, the velocity
    solved for, the velocity; directions, gates and metric (d, U), 1/D and Q; the trunks before their last GELU, and the
    metric's diagonal before its softplus. Then the directions' lengths [T,B,N], if they are unit vectors."""
    T, B, _ = drive_TBG.shape
    sizes = _Sizes(T, B, w, law)
    given = [x.contiguous() for x in (drive_TBG, first_BS, w.z0_S)]
    biases = [x.contiguous() for x in (w.trunk_b, w.direction_b, w.metric_b, w.flow_b)]
    sizes.check(GIVEN, given)
    sizes.check(BIASES, biases)
    made = [drive_TBG.new_empty(sizes.shape(letters)) for letters in MADE.split()]
    lengths_TBN = drive_TBG.new_empty(sizes.shape(LENGTHS)) if law.direction_norm else None
    weights = [panels(x.mT) for x in _matrices(w, sizes)]
    numbers = (
        law.dt,
        law.radius,
        law.strength,
        law.damping,
        law.metric_floor,
        law.gate_bias,
        law.gate_temperature,
    )
    tensors = [*given, *weights, *biases, *sizes.masks(when), *made, lengths_TBN]
    sizes.call("drm", tensors, (*numbers, law.clip, law.squash))
    return made, lengths_TBN


def backward(
    read: Sequence[Tensor | None],
    slopes: Sequence[Tensor | None],
    into: Sequence[Tensor],
    dz_TBS: Tensor,
    dv_TBS: Tensor,
    w: Weights,
    law: Law,
    when: Plan,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of both heads, c, q and p into `into`, the first two of which hold the parts from elsewhere;
    return those of z0 and the first state.

    read, of what `forward` made: c, the velocity solved for, V, U, 1/D, Q and the lengths. slopes: of p, q, c, gates
    times coefficients, of gates and raw; of the squashing, None where nothing squashes; the states before they were
    pulled into the ball and their lengths, None where nothing pulls."""
    T, B, _ = dz_TBS.shape
    sizes = _Sizes(T, B, w, law)
    gradients = [dz_TBS.contiguous(), dv_TBS.contiguous()]
    slopes = [None if x is None else x.contiguous() for x in slopes]
    for shapes, own in (("TBS TBS", gradients), (SLOPES, slopes), (READ, read), (INTO, into)):
        sizes.check(shapes, own)
    weights = [panels(x) for x in _matrices(w, sizes)]
    dstart_BS, dfirst_BS = (dz_TBS.new_zeros(sizes.shape("BS")) for _ in range(2))
    tensors = [*gradients, *slopes, *read, *weights, *sizes.masks(when), *into, dstart_BS, dfirst_BS]
    sizes.call("drm_backward", tensors, (law.dt, law.radius, law.strength))
    return dstart_BS.sum(0), dfirst_BS
