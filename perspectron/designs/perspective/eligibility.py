"""Eligibility traces of PDR: how its memory depends on an adapter of its gates through all tokens before.

With p = W_p x + B u, γ = σ(p), the derivative E of the memory S in column k of B obeys E ← diag(γ) E + γ(1−γ) u_k S.
The memory is a sum of updates v_s k_sᵀ times the gates since, and the logarithm of a gate has the derivative
(1 − γ) u_k. So the update of token s adds c_s v_s k_sᵀ times the gates since to E, where c_s is the sum of (1 − γ) u_k
over the tokens since: one matrix product for each column of B. Where the values depend on the gates themselves, with
d log v/dp = w, c_s has the term w u_k of its own token, too (docs/designs/perspective.md#adaptation).

Shapes: B batch, T time, D value width, R state rank, r rank of the adapter.
"""

import torch
from torch import Tensor

from perspectron.ops import dispatch


@torch.no_grad()
@dispatch.in_full_precision
def carried(
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    u_BTr: Tensor,
    memory_BDR: Tensor,
    trace_BrDR: Tensor,
    *,
    slope_BTD: Tensor | None = None,
) -> Tensor:
    """The traces [B,r,D,R] after T tokens, from those before them.

    The first three as `pdr.scan` takes them, memory before the first token. A gate of 0 ends a trace; padding, with
    γ = 1 and v = 0, leaves it. slope: w, of values that depend on the gates. Without derivatives of its own.
    """
    k, v, gamma, u = (x.to(memory_BDR.dtype).flip(1) for x in (k_BTR, v_BTD, gamma_BTD, u_BTr))
    (B, T, D), r = v.shape, u.shape[-1]
    gates_BtD, sums_BtrD = (
        v.new_ones(B, T + 1, D),
        v.new_zeros(B, T + 1, r, D),
    )  # from the last token backwards
    torch.cumprod(gamma, 1, out=gates_BtD[:, 1:])
    torch.cumsum((1 - gamma)[:, :, None] * u[..., None], 1, out=sums_BtrD[:, 1:])
    shares_BTrD = sums_BtrD[:, :-1]
    if slope_BTD is not None:
        shares_BTrD = torch.addcmul(shares_BTrD, slope_BTD.to(v.dtype).flip(1)[:, :, None], u[..., None])
    values_BTC = (shares_BTrD * (gates_BtD[:, :-1] * v)[:, :, None]).flatten(2)
    past_BrDR = torch.addcmul(trace_BrDR, sums_BtrD[:, -1, :, :, None], memory_BDR[:, None])
    past_BrDR *= gates_BtD[:, -1, None, :, None]
    return torch.baddbmm(past_BrDR.flatten(1, 2), values_BTC.mT, k).view(trace_BrDR.shape)
