"""The fast paths of `perspectron.designs.adr.gru` over whole sequences, and their gradients.

What need not wait for the token before is done for a chunk of tokens at once: the products with inputs, the slopes of
the gates, the gradients of weights and inputs. What is left per token is, forward, one product and five elementwise
operations in place, backward one product and two. Autograd records nothing per token.

Shapes: B batch, T time, L tokens of a chunk, G groups of weights, R rows of each batch row that share a group's
weights, N = B·R, D width, F = 3D (r, z, n in this order), M = L·N rows of a product.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.designs.adr import kernel
from perspectron.native.panels import panels
from perspectron.ops.dispatch import gradients_off, once_differentiable, refuse

CHUNK = 64  # products over fewer tokens pack their weights too often; more only take memory


class Plan(NamedTuple):
    """The way to run the loop.

    rate: 1 − γ, a number or one for each row [G,N,1]. raw: give ĥ too. native: each token on the
    native kernel, which must fit. reset [T,1,N,1]: True where the memory is emptied first. pad [T,1,N,1]: True
    where there is no token."""

    rate: float | Tensor
    raw: bool
    native: bool
    reset: Tensor | None
    pad: Tensor | None

    def chunks(self, T: int) -> list[tuple[slice, "Plan"]]:
        slices = [slice(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]
        masks = ([None if mask is None else mask[at] for mask in (self.reset, self.pad)] for at in slices)
        return [
            (at, self._replace(reset=reset, pad=pad)) for at, (reset, pad) in zip(slices, masks, strict=True)
        ]


def by_row(mask_BT: Tensor | None, R: int) -> Tensor | None:
    """A mask by time and row [T,1,N,1]."""
    return None if mask_BT is None else mask_BT.mT.repeat_interleave(R, 1)[:, None, :, None]


def run(
    x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, state: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor]:
    """All memories: (h [B,T,G,R,D]; ĥ if wanted; last h [B,G,R,D]) for x [B,T,G,R,D], T ≥ 1, and weights as in
    `gru.Cells`."""
    if gradients_off():
        memories, raws, last, *_ = _forward(x, wi, wh, bi, bh, state, plan, train=False)
    else:
        learned = plan.rate if isinstance(plan.rate, Tensor) else None
        if learned is not None:
            plan = plan._replace(rate=learned.detach())
        memories, raws, last, *_ = _Scan.apply(x, wi, wh, bi, bh, state, learned, plan)
    return memories, raws, last


# ---------------------------------------------------------------- layouts


# Time comes first inside: all that one token needs lies together, and the loop works on it in place.


def _by_time(x_BLGRD: Tensor) -> Tensor:
    """The layout [L,G,N,D] of [B,L,G,R,D]."""
    return x_BLGRD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _by_batch(x_LGND: Tensor, B: int) -> Tensor:
    """The layout [B,L,G,R,D], a view."""
    return x_LGND.unflatten(2, (B, -1)).permute(2, 0, 1, 3, 4)


def _state(h_GND: Tensor, B: int) -> Tensor:
    """The layout [B,G,R,D] of one token's memories, a copy."""
    return _by_batch(h_GND[None], B)[:, 0].clone(memory_format=torch.contiguous_format)


def _rows(x_LGND: Tensor) -> Tensor:
    """The layout [G,M,D], where one product for each group takes them all."""
    return x_LGND.transpose(0, 1).flatten(1, 2)


def _tokens(x_GMD: Tensor, L: int) -> Tensor:
    """The layout [L,G,N,D] of rows, a view."""
    return x_GMD.unflatten(1, (L, -1)).transpose(0, 1)


def _complement(w_F: Tensor) -> Tensor:
    """The weights with the update gate's sign turned, so that its sigmoid is c = 1 − z.

    The law h + (1 − γ) c (n − h) reads c alone: turning the weights once spares a subtraction at every token.
    """
    r, z, n = w_F.chunk(3, -1)
    return torch.cat([r, -z, n], -1)


# ---------------------------------------------------------------- forward


def _forward(
    x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, state: Tensor, plan: Plan, *, train: bool
) -> tuple[Any, ...]:
    """All that `run` gives, and for the backward pass: gates [T,G,N,F] = (r, c, W_hn h + b_hn), n [T,G,N,D], and h
    before the first token and after each [T+1,G,N,D]. Only if `train`, gates and n hold more than one chunk."""
    B, T, G, R, D = x.shape
    wi, wh, bi, bh = (_complement(w) for w in (wi, wh, bi, bh))
    wh_packed = panels(wh) if plan.native else None
    chunks = plan.chunks(T)
    # Without a backward pass every chunk writes its gates over those of the one before. h[t] is what token t finds and
    # h[t + 1] what it leaves, so that both are slices of one tensor.
    room = T if train else chunks[0][0].stop
    gates, n, h = (
        x.new_empty(size, G, B * R, width) for size, width in ((room, 3 * D), (room, D), (T + 1, D))
    )
    h[0] = _by_time(state[:, None])[0]
    raws = torch.empty_like(h[1:]) if plan.raw else None
    for at, part in chunks:
        L = at.stop - at.start
        here = at if train else slice(0, L)
        gates_c, n_c, h_c = gates[here], n[here], h[at.start : at.stop + 1]
        gi = _tokens(torch.bmm(_rows(_by_time(x[:, at])), wi), L)
        # r and z take both biases at once. n cannot: r scales its recurrent part, which keeps its bias and its place.
        torch.add(gi[..., : 2 * D], (bi + bh)[:, None, : 2 * D], out=gates_c[..., : 2 * D])
        gates_c[..., 2 * D :] = bh[:, None, 2 * D :]
        torch.add(gi[..., 2 * D :], bi[:, None, 2 * D :], out=n_c)
        if part.pad is not None:  # σ(−∞): c is 0 and h stays, whatever stands in x
            gates_c[..., D : 2 * D].masked_fill_(part.pad, float("-inf"))
        if wh_packed is not None:
            kernel.forward(gates_c, n_c, h_c, wh_packed, part.rate, part.reset)
        else:
            _walk(gates_c, n_c, h_c, wh, part)
        if raws is not None:
            torch.lerp(_met(h_c, part), n_c, gates_c[..., D : 2 * D], out=raws[at])
    return _by_batch(h[1:], B), None if raws is None else _by_batch(raws, B), _state(h[-1], B), gates, n, h


def _met(h: Tensor, plan: Plan) -> Tensor:
    """The memory that each token finds [L,G,N,D], from h [L+1,G,N,D]: empty after a reset."""
    return h[:-1] if plan.reset is None else h[:-1].masked_fill(plan.reset, 0)


def _walk(gates: Tensor, n: Tensor, h: Tensor, wh: Tensor, plan: Plan) -> None:
    """Fill the memories token by token, in place. Before, gates and n hold inputs and biases, and h[0] is set."""
    D = n.shape[-1]
    # Cut into tokens beforehand: in the loop an index costs as much as a small product.
    parts = [gates, gates[..., : 2 * D], *gates.split(D, -1), n]
    difference, opened, empty = torch.empty_like(n[0]), torch.empty_like(n[0]), n.new_zeros(())
    hs = h.unbind(0)
    for t, (all_, rc, r, c, hn, n_t) in enumerate(zip(*(part.unbind(0) for part in parts), strict=True)):
        before = hs[t] if plan.reset is None else torch.where(plan.reset[t], empty, hs[t], out=opened)
        all_.baddbmm_(before, wh)  # one product for the three gates, added to what the inputs gave
        rc.sigmoid_()
        n_t.addcmul_(r, hn).tanh_()
        # h + (1 − γ) c (n − h), of which c and n are kept for the backward pass
        torch.sub(n_t, before, out=difference)
        if isinstance(plan.rate, Tensor):
            torch.addcmul(before, c, difference.mul_(plan.rate), out=hs[t + 1])
        else:
            torch.addcmul(before, c, difference, value=plan.rate, out=hs[t + 1])


# ---------------------------------------------------------------- backward


class _Scan(torch.autograd.Function):
    """The scan with gradients. Keeps the gates, candidates and memories of all tokens."""

    @staticmethod
    def forward(
        x: Tensor,
        wi: Tensor,
        wh: Tensor,
        bi: Tensor,
        bh: Tensor,
        state: Tensor,
        rate: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor | None, ...]:
        return _forward(x, wi, wh, bi, bh, state, plan, train=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, wi, wh, *_, ctx.plan = inputs
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, wi, wh, *output[3:])

    @staticmethod
    def backward(ctx: Any, *doutputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once_differentiable("gru.scan", _backward, *ctx.saved_tensors, *doutputs[:3], ctx.plan), None

    jvp = refuse("gru.scan has no forward-mode derivative; use backend='naive'")


def _backward(
    x: Tensor, wi: Tensor, wh: Tensor, gates: Tensor, n: Tensor, h: Tensor,
    dmemories: Tensor | None, draws: Tensor | None, dlast: Tensor | None, plan: Plan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, the weights, the biases, the first state and a learned rate: chunks from the last to the first.

    Those of the gates lie in the order (W_hn h + b_hn, r, z, n): the recurrent product has a part in the first
    three, that of the input in the last three."""
    B, T, G, R, D = x.shape
    # In this order both products read and write three neighbouring parts of one tensor: nothing is cut out or copied.
    wi_T, wh_T = wi.mT.contiguous(), wh.roll(D, -1).mT.contiguous()
    wh_packed = panels(wh_T) if plan.native else None
    dx, dwi, dwh, dbias = (
        torch.empty_like(x),
        torch.zeros_like(wi),
        torch.zeros_like(wh),
        x.new_zeros(G, 4 * D),
    )
    drate = torch.zeros_like(plan.rate) if isinstance(plan.rate, Tensor) else None
    # The gradient of h that the chunk after hands to the one before.
    carry = torch.zeros_like(h[0]) if dlast is None else _by_time(dlast[:, None])[0]
    for at, part in reversed(plan.chunks(T)):
        L = at.stop - at.start
        h_c = h[at.start : at.stop + 1]
        met = _met(h_c, part)
        # dh[t] is of what token t finds, dh[t + 1] of what it leaves, as in h.
        dh, draw = h.new_zeros(L + 1, G, B * R, D), None
        if dmemories is not None:
            dh[1:] = _by_time(dmemories[:, at])
        if draws is not None:
            draw = _by_time(draws[:, at])
            past = torch.addcmul(draw, draw, gates[at][..., D : 2 * D], value=-1)  # the gates: ĥ = z h + …
            dh[:-1] += past if part.reset is None else past.masked_fill_(part.reset, 0)
            # The slopes are those of h, and hold a factor 1 − γ that ĥ does not have.
            draw = draw / plan.rate
        dh[L] += carry
        dgates = h.new_empty(G, L, B * R, 4, D)
        if wh_packed is not None:
            kernel.backward(dgates, dh, draw, gates[at], n[at], h_c, wh_packed, plan.rate, part.reset)
        else:
            slopes, through = _slopes(gates[at], n[at], met, plan.rate)
            _walk_back(dgates, dh, draw, slopes, through, wh_T, part)
        rows, carry = dgates.view(G, -1, 4 * D), dh[0]
        # Gradients of weights and inputs wait for no token: one product for the chunk each.
        dwh.baddbmm_(_rows(met).mT, rows[..., : 3 * D])
        dwi.baddbmm_(_rows(_by_time(x[:, at])).mT, rows[..., D:])
        dbias += rows.sum(1)
        dx[:, at] = _by_batch(_tokens(torch.bmm(rows[..., D:], wi_T), L), B)
        if drate is not None:  # h moves by (1 − γ) c (n − met)
            drate += (dh[1:] * gates[at][..., D : 2 * D] * (n[at] - met)).sum((0, -1)).unsqueeze(-1)
    dbi, dbh = dbias[:, D:].clone(), dbias[:, : 3 * D].roll(-D, -1)
    return dx, dwi, dwh.roll(-D, -1), dbi, dbh, _state(carry, B), drate


def _slopes(gates: Tensor, n: Tensor, met: Tensor, rate: float | Tensor) -> tuple[Tensor, Tensor]:
    """The factors that turn the gradient of h_t into that of the gates [L,G,N,4,D], and, past the gates, of the
    memory that it met.

    None of it depends on a gradient, so it is made for all tokens of a chunk at once and the loop only multiplies.
    """
    r, c, hn = gates.chunk(3, -1)
    slopes = n.new_empty(*n.shape[:-1], 4, n.shape[-1])
    of_hn, of_r, of_z, of_n = slopes.unbind(-2)
    step = c * rate  # ∂h/∂n
    # Slopes of tanh and sigmoid from their values, which are kept, in place of their arguments, which are not.
    torch.ops.aten.tanh_backward.grad_input(step, n, grad_input=of_n)
    torch.mul(of_n, r, out=of_hn)
    torch.mul(of_n, hn, out=of_r)
    torch.ops.aten.sigmoid_backward.grad_input(of_r, r, grad_input=of_r)
    # ∂h/∂c is n − met, and c is the sigmoid of the argument with its sign turned: that of z gets met − n.
    torch.sub(met, n, out=of_z).mul_(rate)
    torch.ops.aten.sigmoid_backward.grad_input(of_z, c, grad_input=of_z)
    return slopes, step.neg_().add_(1)


def _walk_back(
    dgates: Tensor, dh: Tensor, draw: Tensor | None, slopes: Tensor, through: Tensor, wh_T: Tensor, plan: Plan
) -> None:
    """Walk back token by token. Before, dh holds the outputs' gradients; after, dgates [G,L,N,4,D] and dh are
    complete."""
    # Cut into tokens beforehand, as in `_walk`. A seed takes part in all four gates: it is spread over their dimension.
    recurrent = dgates[..., :3, :].flatten(-2).unbind(1)
    dhs, spread, each = dh.unbind(0), dh.unsqueeze(-2).unbind(0), dgates.unbind(1)
    slopes_, throughs = slopes.unbind(0), through.unbind(0)
    into = torch.empty_like(dh[0])
    for t in reversed(range(len(throughs))):
        seed = spread[t + 1] if draw is None else (dhs[t + 1] + draw[t]).unsqueeze(-2)
        torch.mul(seed, slopes_[t], out=each[t])
        if plan.reset is None:  # straight through, and by way of the gates
            dhs[t].addcmul_(dhs[t + 1], throughs[t]).baddbmm_(recurrent[t], wh_T)
        else:  # both end at a reset
            torch.mul(dhs[t + 1], throughs[t], out=into).baddbmm_(recurrent[t], wh_T)
            dhs[t].add_(into.masked_fill_(plan.reset[t], 0))
