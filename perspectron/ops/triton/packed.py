"""Products of packed matrices on a GPU: `perspectron.ops.packed` by the kernels of
`perspectron.ops.triton.kernels.packed`, whose docstring says how. Two launches a matrix, four a SwiGLU.

Shapes: T tokens, N rows, K columns, S columns stored, G groups of 128.
"""

import torch
from torch import Tensor

from perspectron.ops import tiles
from perspectron.ops.packing import GROUP, LAYOUTS, Packed
from perspectron.ops.triton import scan
from perspectron.util.errors import BackendError

Tokens = tuple[Tensor, Tensor, Tensor]
"""Tokens rounded to 8 bits: whole numbers [T,S], their steps [T], and the sums of their groups [T,G]."""


def wanted(backend: str, x_TK: Tensor, *matrices: Packed) -> bool:
    """True if the kernels are to run, by the rules of `scan.chosen`; there are none for tiles. BackendError as there,
    or for matrices on another device."""
    tiled = next((matrix.format for matrix in matrices if matrix.format in tiles.FORMATS), None)
    why = None if tiled is None else f"has no kernels for {tiled}"
    if not scan.chosen(backend, "packed matrices", x_TK.device, lambda: why or scan.obstacle(1, x_TK)):
        return False
    if any(part.device != x_TK.device for matrix in matrices for part in matrix[:2]):
        raise BackendError(f"backend = {backend!r}: the matrix must be on {x_TK.device}, as its input")
    return True


def linear(x_TK: Tensor, packed: Packed) -> Tensor:
    """The product [T,N] of float32."""
    return _product(_rounded(x_TK, packed.codes.shape[1]), packed)[0]


def swiglu(x_TD: Tensor, gate: Packed, up: Packed, down: Packed) -> Tensor:
    """The network [T,D] of float32; gate and up in one launch."""
    both_2TF = _product(_rounded(x_TD, gate.codes.shape[1]), gate, up)
    return _product(_rounded(both_2TF[0], down.codes.shape[1], both_2TF[1]), down)[0]


def _rounded(x_TK: Tensor, S: int, up_TK: Tensor | None = None) -> Tokens:
    """The tokens rounded to 8 bits; with `up`, those of SiLU(x) ⊙ up."""
    from perspectron.ops.triton.kernels import packed as kernels

    x_TK, (T, K), G = x_TK.contiguous(), x_TK.shape, -(-S // GROUP)
    made = x_TK.new_empty(T, S, dtype=torch.int8), x_TK.new_empty(T), x_TK.new_empty(T, G)
    if T:
        with scan._on(x_TK):
            kernels.quantise[(T,)](
                x_TK, x_TK if up_TK is None else up_TK, *made, K, S, G, up_TK is not None, kernels.WIDE,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
    return made


def _product(tokens: Tokens, *matrices: Packed) -> Tensor:
    """The products [m,T,N] with m matrices, one or two, of one shape."""
    from perspectron.ops.triton.kernels import packed as kernels

    q_TS, first = tokens[0], matrices[0]
    (T, S), N, (blocks, _), R = q_TS.shape, first.shape[0], first.codes.shape, LAYOUTS[first.format].rows
    y = tokens[1].new_empty(len(matrices), T, N)
    if T:
        tile = kernels.tile(R, T, blocks, S)
        kernel = kernels.few if tile.tokens == 1 else kernels.many
        pairs = [part.contiguous() for matrix in (first, matrices[-1]) for part in matrix[:2]]
        with scan._on(q_TS):
            kernel[(-(-blocks // tile.blocks), -(-T // tile.tokens), len(matrices))](
                *tokens, *pairs, y, T, blocks, N, S, -(-S // GROUP),
                len(matrices) == 2, R, *tile[:3], num_warps=tile.warps, enable_fp_fusion=False,
            )  # fmt: skip
    return y
