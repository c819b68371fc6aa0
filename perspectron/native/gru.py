"""The tokens of `perspectron.ops.gru_loop` on a CPU, forward and backward, in place.

Everything is float32; results depend neither on the number of threads nor on the instruction set.

Shapes: L tokens, G groups of weights, N memories that share a group's, D width.
"""

import torch
from torch import Tensor

from perspectron.native import _check, _library, threads
from perspectron.native.panels import panels


def _keep(keep_L1N1: Tensor | None, L: int, N: int) -> Tensor | None:
    if keep_L1N1 is not None:
        _check(keep_L1N1, torch.float32, (L, 1, N, 1))
    return keep_L1N1


def forward(
    gates_LGNF: Tensor,
    n_LGND: Tensor,
    h_LGND: Tensor,
    wh_GDF: Tensor,
    rate: float | Tensor,
    keep_L1N1: Tensor | None,
) -> None:
    """Fill the memories [L + 1,G,N,D] from h[0] on, as `gru_loop._walk` does; rate: a number or [G,N,1]."""
    L, G, N, D = n_LGND.shape
    shapes = [(gates_LGNF, (L, G, N, 3 * D)), (n_LGND, (L, G, N, D)), (h_LGND, (L + 1, G, N, D))]
    each = isinstance(rate, Tensor)
    rates = rate.contiguous() if isinstance(rate, Tensor) else None
    for tensor, shape in (*shapes, *([] if rates is None else [(rates, (G, N, 1))])):
        _check(tensor, torch.float32, shape)
    _check(wh := panels(wh_GDF), torch.float32, (G, -(-3 * D // 32), D, 32))
    keep = _keep(keep_L1N1, L, N)
    _library().pspx_gru(
        wh.data_ptr(),
        None if keep is None else keep.data_ptr(),
        None if rates is None else rates.data_ptr(),
        0.0 if each else rate,
        *(L, G, N, D),
        *(x.data_ptr() for x in (gates_LGNF, n_LGND, h_LGND)),
        threads(),
    )


def backward(
    dgates_GLN4D: Tensor,
    dh_LGND: Tensor,
    draw_LGND: Tensor | None,
    slopes_LGN4D: Tensor,
    through_LGND: Tensor,
    wh_GFD: Tensor,
    keep_L1N1: Tensor | None,
) -> None:
    """Complete the gradients of the memories [L + 1,G,N,D], and fill those of the gates, as `gru_loop._walk_back`
    does."""
    L, G, N, D = through_LGND.shape
    draw = None if draw_LGND is None else draw_LGND.contiguous()
    shapes = [
        (dgates_GLN4D, (G, L, N, 4, D)),
        (dh_LGND, (L + 1, G, N, D)),
        (slopes_LGN4D, (L, G, N, 4, D)),
        (through_LGND, (L, G, N, D)),
        *([] if draw is None else [(draw, (L, G, N, D))]),
    ]
    for tensor, shape in shapes:
        _check(tensor, torch.float32, shape)
    _check(wh := panels(wh_GFD), torch.float32, (G, -(-D // 32), 3 * D, 32))
    keep = _keep(keep_L1N1, L, N)
    _library().pspx_gru_backward(
        wh.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (keep, slopes_LGN4D, through_LGND, draw)),
        *(L, G, N, D),
        *(x.data_ptr() for x in (dgates_GLN4D, dh_LGND)),
        threads(),
    )
