"""Eligibility traces of PDR: how its memory, and with it every output, depends on an adapter of its gates.

With p = W_p x + B u, γ = σ(p), the derivative E of the memory S in column k of B obeys E ← diag(γ) E + γ(1−γ) u_k S.
The memory is a sum of updates v_s k_sᵀ times the gates since, and the logarithm of a gate has the derivative
(1 − γ) u_k: so E = c S − F, where c is the running sum of (1 − γ) u_k and F the same recurrence with the values c v.
Traces are therefore r more scans, in chunks and by the same kernels (docs/designs/perspective.md#adaptation). Where the
values depend on the gates themselves, with d log v/dp = w, F has the values (c − w u) v.

Shapes: B batch, T time, D value width, R state rank, r rank of the adapter.
"""

import torch
from torch import Tensor

from perspectron.ops import pdr


def trace(
    q_BTR: Tensor,
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    u_BTr: Tensor,
    memory_BDR: Tensor,
    trace_BrDR: Tensor,
    *,
    scale: float | None = None,
    slope_BTD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Traces over T tokens from those at the start: (derivatives of every output in B [B,T,r,D], traces at the end).

    The first four as `pdr.scan` takes them, memory before the first token. An entry i of the output depends on row i of
    B alone. A gate of 0 ends a trace; padding, with γ = 1 and v = 0, leaves it. slope: w, of values that depend on the
    gates. Without derivatives of its own.
    """
    outputs = []
    with torch.no_grad():
        for start in range(0, v_BTD.shape[1], pdr.CHUNK):  # the sums begin anew: what cancels stays small
            q, k, v, gamma, u = (
                x[:, start : start + pdr.CHUNK] for x in (q_BTR, k_BTR, v_BTD, gamma_BTD, u_BTr)
            )
            v, gamma, u = v.to(memory_BDR.dtype), gamma.to(memory_BDR.dtype), u.to(memory_BDR.dtype)
            sums_BTrD = ((1 - gamma)[:, :, None] * u[..., None]).cumsum(1)
            r, (B, D, R) = u.shape[-1], memory_BDR.shape
            shares_BTrD = sums_BTrD
            if slope_BTD is not None:
                slope_BtD = slope_BTD[:, start : start + pdr.CHUNK].to(memory_BDR.dtype)
                shares_BTrD = sums_BTrD - slope_BtD[:, :, None] * u[..., None]
            # the memory itself beside its r sums: one scan of (1 + r) D rows
            values = torch.cat([v[:, :, None], shares_BTrD * v[:, :, None]], 2).flatten(2)
            start_BnR = torch.cat([memory_BDR[:, None], -trace_BrDR], 1).flatten(1, 2)
            o, end_BnR = pdr.scan(
                q, k, values, gamma.repeat(1, 1, 1 + r), start_BnR, scale=scale, checked=False
            )
            o_BTnD, end_BnDR = o.unflatten(2, (1 + r, D)), end_BnR.view(B, 1 + r, D, R)
            outputs.append(sums_BTrD * o_BTnD[:, :, :1] - o_BTnD[:, :, 1:])
            memory_BDR = end_BnDR[:, 0]
            trace_BrDR = sums_BTrD[:, -1, :, :, None] * end_BnDR[:, :1] - end_BnDR[:, 1:]
    return torch.cat(outputs, 1), trace_BrDR
