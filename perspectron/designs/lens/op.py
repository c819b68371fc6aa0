"""The three lenses as one attention call (docs/designs/lens.md#three-lenses).

With Q' = [w₀ q + w₂ √K u ; w₁ k] and K' = [k ; q], Q' K'ᵀ / √K is w₀ S + w₁ Sᵀ + w₂ d. The document takes the mean
off d; under softmax that changes nothing, and a mean over all keys would see the future, so it is left out.

Shapes: B batch, T time, H heads, K head width.
"""

import torch
from torch import Tensor


def features(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    u_HK: Tensor | None,
    w_H3: Tensor,
    *,
    reciprocity: bool = True,
    disc_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Give queries and keys [B,H,T,2K] (K wide without reciprocity) whose products / √K are the mixed logits.

    w: weights of the standard, the reciprocal and the discoverability lens. disc_scale: d = k·u / √K.

        >>> from perspectron.designs.lens import op
        >>> q, k, weights = torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 4), torch.rand(2, 3)
        >>> [tuple(x.shape) for x in op.features(q, k, torch.rand(2, 4), weights)]
        [(1, 2, 5, 8), (1, 2, 5, 8)]
    """
    standard, reciprocal, sought = w_H3.to(q_BHTK.dtype).T[:, None, :, None, None]
    query = standard * q_BHTK
    if u_HK is not None:
        query = query + sought * u_HK[None, :, None].to(query.dtype) * (
            1 if disc_scale else u_HK.shape[1] ** 0.5
        )
    if not reciprocity:
        return query, k_BHTK
    return torch.cat([query, reciprocal * k_BHTK], -1), torch.cat([k_BHTK, q_BHTK], -1)


def naive(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, u_HK: Tensor, w_H3: Tensor, *, disc_scale: bool = False
) -> Tensor:
    """The document's formula, causal, with every score written out; the oracle."""
    T, K = q_BHTK.shape[-2:]
    standard, reciprocal, sought = w_H3.T[:, None, :, None, None]
    scores = q_BHTK @ k_BHTK.mT * K**-0.5
    d_BH1T = torch.einsum("bhtk,hk->bht", k_BHTK, u_HK)[:, :, None] * (K**-0.5 if disc_scale else 1)
    mixed = standard * scores + reciprocal * scores.mT + sought * d_BH1T
    future = torch.ones(T, T, dtype=torch.bool, device=mixed.device).triu(1)
    return mixed.masked_fill(future, float("-inf")).softmax(-1) @ v_BHTK
