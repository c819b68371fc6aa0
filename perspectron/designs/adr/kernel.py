"""The tokens of `perspectron.designs.adr.gru_loop` on a CPU, forward and backward, in place.

Everything is float32; results depend neither on the number of threads nor on the instruction set.
Source: docs/designs/adr.md#memories.

Shapes: L tokens, G groups of weights, N memories that share a group's, D width, p panels.
"""

from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from perspectron.native import _check, _check_all, call
from perspectron.native.panels import PANEL

TYPES = (*[c_void_p] * 2, c_double, c_void_p, *[c_int64] * 4, *[c_void_p] * 3, c_int)
TYPES_BACK = (*[c_void_p] * 2, c_double, *[c_void_p] * 5, *[c_int64] * 4, *[c_void_p] * 2, c_int)


def _rates(rate: float | Tensor, G: int, N: int) -> tuple[Tensor | None, float]:
    """(rates of each memory, or None; the rate of all)."""
    if not isinstance(rate, Tensor):
        return None, rate
    _check(rates := rate.expand(G, N, 1).contiguous(), torch.float32, (G, N, 1))
    return rates, 0.0


def _check_reset(reset_L1N1: Tensor | None, L: int, N: int) -> None:
    if reset_L1N1 is not None:
        _check(reset_L1N1, torch.bool, (L, 1, N, 1))


def forward(
    gates_LGNF: Tensor,
    n_LGND: Tensor,
    h_LGND: Tensor,
    wh_GpDP: Tensor,
    rate: float | Tensor,
    reset_L1N1: Tensor | None,
) -> None:
    """Fill the memories [L + 1,G,N,D] from h[0] on, as `gru_loop._walk` does. wh: in panels of [G,D,3D]; rate: a number
    or [G,N,1]."""
    L, G, N, D = n_LGND.shape
    _check_all((gates_LGNF, (L, G, N, 3 * D)), (n_LGND, (L, G, N, D)), (h_LGND, (L + 1, G, N, D)))
    _check_all((wh_GpDP, (G, -(-3 * D // PANEL), D, PANEL)))
    _check_reset(reset_L1N1, L, N)
    given = wh_GpDP, *_rates(rate, G, N), reset_L1N1
    call("gru", *given, L, G, N, D, gates_LGNF, n_LGND, h_LGND, types=TYPES)


def backward(
    dgates_GLN4D: Tensor,
    dh_LGND: Tensor,
    draw_LGND: Tensor | None,
    gates_LGNF: Tensor,
    n_LGND: Tensor,
    h_LGND: Tensor,
    wh_GpFP: Tensor,
    rate: float | Tensor,
    reset_L1N1: Tensor | None,
) -> None:
    """Complete the gradients of the memories [L + 1,G,N,D], and fill those of the gates, as `gru_loop._walk_back`
    does, from what `forward` left. draw: the gradient of ĥ over the rate; wh: in panels of [G,3D,D]."""
    L, G, N, D = n_LGND.shape
    draw = None if draw_LGND is None else draw_LGND.contiguous()
    _check_all((dgates_GLN4D, (G, L, N, 4, D)), (dh_LGND, (L + 1, G, N, D)), (h_LGND, (L + 1, G, N, D)))
    _check_all((gates_LGNF, (L, G, N, 3 * D)), (n_LGND, (L, G, N, D)), (draw, (L, G, N, D)))
    _check_all((wh_GpFP, (G, -(-D // PANEL), 3 * D, PANEL)))
    _check_reset(reset_L1N1, L, N)
    given = wh_GpFP, *_rates(rate, G, N), gates_LGNF, n_LGND, h_LGND, draw, reset_L1N1
    call("gru_backward", *given, L, G, N, D, dgates_GLN4D, dh_LGND, types=TYPES_BACK)
