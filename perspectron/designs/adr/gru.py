"""The decayed GRU: ĥ_t = GRU(x_t, h_{t-1}), h_t = γ h_{t-1} + (1 − γ) ĥ_t (docs/designs/adr.md#the-five-laws).

With gates r, z and candidate n as in torch.nn.GRUCell and c = 1 − z, this is h_t = h_{t-1} + (1 − γ) c (n − h_{t-1}).
`scan` runs whole sequences (`gru_loop`) and single steps, for many groups of weights at once. A reset empties the
memory before a token; at padding c = 0, which is the identity. Source: docs/designs/adr.md#memories.

Shapes: B batch, T time, G groups of weights, R rows of each batch row that share a group's weights, D width, F = 3D
(r, z, n in this order).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from perspectron.designs.adr import gru_loop
from perspectron.model.masks import filled
from perspectron.ops import dispatch
from perspectron.ops.fused import fits
from perspectron.ops.sequences import packed

BACKENDS = ("auto", "naive", "torch")


class Cells(NamedTuple):
    """Input and recurrent weights [G,D,F] and biases [G,F]: in each group a torch.nn.GRUCell's, transposed."""

    wi: Tensor
    wh: Tensor
    bi: Tensor
    bh: Tensor


Memories = tuple[Tensor, Tensor | None, Tensor]


@packed("BTGRD", "BTGRD", "BGRD")
@dispatch.in_full_precision
def scan(
    x_BTGRD: Tensor,
    cells: Cells,
    gamma: float | Tensor,
    state_BGRD: Tensor,
    *,
    reset_BT: Tensor | None = None,
    pad_BT: Tensor | None = None,
    raw: bool = False,
    backend: str = "auto",
    consume_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Memories:
    """Run the cells over T tokens: all h_t, all ĥ_t if `raw` (else None) [B,T,G,R,D], and the last h [B,G,R,D].

    Any T, also 0 and 1; γ in [0, 1), one for all, or one for each row [G,R]. At a token of `reset_BT` nothing before it
    is remembered; a token of `pad_BT` leaves h as it is, whatever stands in x, and its ĥ is h. Computes and returns in
    float32 or, if any input is, in float64; autocast does not reach inside. Differentiable once, in reverse mode;
    anything else is an error, but for the reference.

    `backend`: "naive" is the plain loop, "torch" the fast one. "auto" is "torch", with each token on the native
    kernel in training on a CPU in float32, or, for one token where gradients are off, a step.

    `consume_state`: the caller gives `state_BGRD` up, and the step writes into it instead of into a copy; the numbers
    are the same. Only where gradients are off.
    `cu_seqlens`: several sequences in one row (`perspectron.ops.sequences`); states then have a row for each.
    Raises BackendError for an unknown backend, ValueError for shapes that do not fit and for a state to be consumed
    while gradients are on.

        >>> from perspectron.designs.adr import gru
        >>> cells = gru.Cells(torch.rand(1, 4, 12), torch.rand(1, 4, 12), torch.rand(1, 12), torch.rand(1, 12))
        >>> memories, _, last = gru.scan(torch.rand(1, 5, 1, 2, 4), cells, 0.9, torch.zeros(1, 1, 2, 4))
        >>> tuple(memories.shape), torch.equal(memories[:, -1], last)
        ((1, 5, 1, 2, 4), True)
    """
    dispatch.known(backend, BACKENDS)
    dispatch.check_consumed(consume_state)
    _check(x_BTGRD, cells, state_BGRD)
    dtype = dispatch.widest(x_BTGRD, *cells, state_BGRD)
    x, state, cells = x_BTGRD.to(dtype), state_BGRD.to(dtype), Cells(*(w.to(dtype) for w in cells))
    x = filled(x, pad_BT, 0)
    if isinstance(gamma, Tensor):
        gamma = gamma.to(dtype)[..., None]
    if backend == "auto":
        where = x.device.type
        dispatch.log_once(
            "gru.scan: auto runs the torch loop on %s, or in training on a CPU a native kernel", where
        )
    if x.shape[1] == 0:
        return x, x if raw else None, dispatch.owned(state, consume_state)
    if backend == "naive":
        return naive(x, cells, gamma, state, reset_BT, pad_BT, raw)
    if backend != "torch" and x.shape[1] == 1 and dispatch.gradients_off():
        return _step_(x, cells, gamma, dispatch.owned(state, consume_state), reset_BT, pad_BT, raw)
    reset, pad = (gru_loop.by_row(mask_BT, x.shape[3]) for mask_BT in (reset_BT, pad_BT))
    rate = 1 - gamma
    if isinstance(rate, Tensor):
        rate = rate.repeat(1, len(x), 1)
    native = backend == "auto" and fits(x, *cells, state)
    return gru_loop.run(x, *cells, state, gru_loop.Plan(rate, raw, native, reset, pad))


def naive(
    x: Tensor,
    cells: Cells,
    gamma: float | Tensor,
    h: Tensor,
    reset: Tensor | None,
    pad: Tensor | None,
    raw: bool,
) -> Memories:
    """The plain loop; the oracle of every other path."""
    wi, wh, bi, bh = cells
    memories, raws = [], []
    for t in range(x.shape[1]):
        if reset is not None:
            h = h.masked_fill(reset[:, t, None, None, None], 0)
        ir, iz, i_n = (x[:, t] @ wi + bi[:, None]).chunk(3, -1)
        hr, hz, hn = (h @ wh + bh[:, None]).chunk(3, -1)
        r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        new = (1 - z) * torch.tanh(i_n + r * hn) + z * h
        after = gamma * h + (1 - gamma) * new
        if pad is not None:
            new, after = (torch.where(pad[:, t, None, None, None], h, value) for value in (new, after))
        h = after
        memories.append(h)
        raws.append(new)
    return torch.stack(memories, 1), torch.stack(raws, 1) if raw else None, h


def _step_(
    x_B1GRD: Tensor,
    cells: Cells,
    gamma: float | Tensor,
    h_BGRD: Tensor,
    reset_B1: Tensor | None,
    pad_B1: Tensor | None,
    raw: bool,
) -> Memories:
    """One token; writes into the state."""
    wi, wh, bi, bh = cells
    B, G, R, D = h_BGRD.shape
    if reset_B1 is not None:
        h_BGRD.masked_fill_(reset_B1[:, :, None, None], 0)
    x, h = (tensor.transpose(0, 1).reshape(G, B * R, D) for tensor in (x_B1GRD[:, 0], h_BGRD))
    i_rz, i_n = torch.baddbmm(bi[:, None], x, wi).split((2 * D, D), -1)
    h_rz, h_n = torch.baddbmm(bh[:, None], h, wh).split((2 * D, D), -1)
    r, z = (i_rz + h_rz).sigmoid_().chunk(2, -1)
    n = torch.addcmul(i_n, r, h_n).tanh_()
    new_BGRD = torch.lerp(n, h, z).view(G, B, R, D).transpose(0, 1)
    if pad_B1 is not None:
        new_BGRD = torch.where(pad_B1[:, :, None, None], h_BGRD, new_BGRD)
    h_BGRD.lerp_(new_BGRD, 1 - gamma)
    return h_BGRD.clone()[:, None], new_BGRD[:, None] if raw else None, h_BGRD


def _check(x_BTGRD: Tensor, cells: Cells, state_BGRD: Tensor) -> None:
    B, _, G, R, D = x_BTGRD.shape
    if state_BGRD.shape != (B, G, R, D):
        raise ValueError(f"state has shape {tuple(state_BGRD.shape)}, want {(B, G, R, D)}")
    for name, tensor in cells._asdict().items():
        want = (G, D, 3 * D) if name.startswith("w") else (G, 3 * D)
        if tensor.shape != want:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, want {want}")
