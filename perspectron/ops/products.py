"""The products of queries with earlier keys of a chunk, where every key channel decays by a product of gates: what
`gla` and `delta` share.

A binary tree takes all tokens at once: for blocks of 1, 2, 4, …, the queries of each right half, times the products of
gates from its start, meet the keys of its left half, times the products of gates to its end. Only products of gates
are formed, never a quotient or a logarithm, so any gate in [0, 1] is exact, 0 and 1 included.

A token may have several queries and several keys: M rows of q and J rows of k stand together for each, the rows of a
token next to each other. Its last query reads after the token's gate, and its own keys too; the others read before
both.

Shapes: N batch, B and H batch and heads, G heads of queries and keys (H, or 1 shared by all), L tokens of one chunk,
M queries and J keys of a token, K key width, A gate width (K, or 1 for all channels), b block of the tree.
"""

import torch
from torch import Tensor

from perspectron.ops.tree import blocks, halves

Saved = list[tuple[Tensor, ...]]
"""The tensors that a backward pass needs, level by level."""


def within(
    q_BGMK: Tensor, k_BGJK: Tensor, gate_BHLA: Tensor, saved: Saved | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(A, Q, X, P) of one chunk, each [B,H,…]: A [ML,JL] is q · k times the gates between them, 0 where the query does
    not see the key; Q [ML,K] is q times the gates from the chunk's start; X [JL,K] is k times the gates to its end; P
    [1,A] the product of all.

    With one gate for the head, the tree runs on ones: it gives the products of gates, which then multiply q kᵀ, q, k.
    """
    heads, L = gate_BHLA.shape[:2], gate_BHLA.shape[2]
    if gate_BHLA.shape[-1] == q_BGMK.shape[-1]:
        q, k, gate = (x.flatten(0, 1) for x in (q_BGMK, k_BGJK, gate_BHLA))
        A, Q, X, P = _tree(_faded(q, gate), k.clone(), gate, saved)
        _own(A, L).copy_((_last(q, L)[:, :, None] * k.unflatten(1, (L, -1))).sum(-1))
        return A.unflatten(0, heads), Q.unflatten(0, heads), X.unflatten(0, heads), P.unflatten(0, heads)
    gate_NL1, q_ones, k_ones = _ones(q_BGMK, k_BGJK, gate_BHLA)
    between, prefix, suffix, P = _tree(_faded(q_ones, gate_NL1), k_ones, gate_NL1, saved)
    _own(between, L).fill_(1)
    between, prefix, suffix, P = (x.unflatten(0, heads) for x in (between, prefix, suffix, P))
    if saved is not None:
        saved.append((between, prefix, suffix))
    return (q_BGMK @ k_BGJK.mT) * between, q_BGMK * prefix, k_BGJK * suffix, P


def within_backward(
    q_BGMK: Tensor, k_BGJK: Tensor, gate_BHLA: Tensor, saved: Saved,
    dA: Tensor, dQ: Tensor, dX: Tensor, dP: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dq, dk, dgate) from those of the outputs of `within`; consumes `saved`, dA, dQ and dX."""
    heads, L = gate_BHLA.shape[:2], gate_BHLA.shape[2]
    if gate_BHLA.shape[-1] == q_BGMK.shape[-1]:
        q, k, gate, dA, dQ, dX, dP = (x.flatten(0, 1) for x in (q_BGMK, k_BGJK, gate_BHLA, dA, dQ, dX, dP))
        dP = _tree_backward(saved, L, dA, dQ, dX, dP)
        dgate = torch.addcmul(dP, _last(dQ, L), _last(q, L))
        own = _own(dA, L).unsqueeze(-1)
        _last(dQ, L).mul_(gate).add_((own * k.unflatten(1, (L, -1))).sum(2))
        dX.unflatten(1, (L, -1)).addcmul_(own, _last(q, L)[:, :, None])
        return dQ.unflatten(0, heads), dX.unflatten(0, heads), dgate.unflatten(0, heads)
    between, prefix, suffix = saved.pop()
    dbetween = dA * (q_BGMK @ k_BGJK.mT)
    dprefix, dsuffix = (dQ * q_BGMK).sum(-1, keepdim=True), (dX * k_BGJK).sum(-1, keepdim=True)
    dscores = dA.mul_(between).sum_to_size(*q_BGMK.shape[:2], *dA.shape[2:])
    dq = dQ.mul_(prefix).sum_to_size(q_BGMK.shape) + dscores @ k_BGJK
    dk = dX.mul_(suffix).sum_to_size(k_BGJK.shape) + dscores.mT @ q_BGMK
    dbetween, dprefix, dsuffix, dP = (x.flatten(0, 1) for x in (dbetween, dprefix, dsuffix, dP))
    dP = _tree_backward(saved, L, dbetween, dprefix, dsuffix, dP)
    return dq, dk, (dP + _last(dprefix, L)).unflatten(0, heads)


def within_tangent(
    q_BGMK: Tensor, k_BGJK: Tensor, gate_BHLA: Tensor, dq: Tensor, dk: Tensor, dgate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tangents of the outputs of `within`."""
    heads, L = gate_BHLA.shape[:2], gate_BHLA.shape[2]
    if gate_BHLA.shape[-1] == q_BGMK.shape[-1]:
        q, k, gate, dq, dk, dgate = (x.flatten(0, 1) for x in (q_BGMK, k_BGJK, gate_BHLA, dq, dk, dgate))
        dQ = _faded(dq, gate)
        _last(dQ, L).addcmul_(_last(q, L), dgate)
        dA, dQ, dX, dP = _tree_tangent((_faded(q, gate), k.clone(), gate), (dQ, dk.clone(), dgate))
        pairs = ((_last(dq, L), k), (_last(q, L), dk))
        _own(dA, L).copy_(sum((a[:, :, None] * b.unflatten(1, (L, -1))).sum(-1) for a, b in pairs))
        return dA.unflatten(0, heads), dQ.unflatten(0, heads), dX.unflatten(0, heads), dP.unflatten(0, heads)
    saved: Saved = []
    within(q_BGMK, k_BGJK, gate_BHLA, saved)
    between, prefix, suffix = saved.pop()
    gate_NL1, q_ones, k_ones = _ones(q_BGMK, k_BGJK, gate_BHLA)
    dgate_NL1, dQ = dgate.flatten(0, 1), torch.zeros_like(q_ones)
    _last(dQ, L).copy_(dgate_NL1)
    parts = _tree_tangent(
        (_faded(q_ones, gate_NL1), k_ones, gate_NL1), (dQ, torch.zeros_like(k_ones), dgate_NL1)
    )
    dbetween, dprefix, dsuffix, dP = (x.unflatten(0, heads) for x in parts)
    dA = (dq @ k_BGJK.mT + q_BGMK @ dk.mT) * between + (q_BGMK @ k_BGJK.mT) * dbetween
    return dA, dq * prefix + q_BGMK * dprefix, dk * suffix + k_BGJK * dsuffix, dP


# ---------------------------------------------------------------- rows of a token


def _last(q_NMK: Tensor, L: int) -> Tensor:
    """The last query of each token [N,L,K]; a view."""
    return q_NMK.unflatten(1, (L, -1))[:, :, -1]


def _own(A: Tensor, L: int) -> Tensor:
    """The entries of A between each token's last query and its own keys [N,L,J]; a view."""
    return A.unflatten(2, (L, -1)).unflatten(1, (L, -1))[:, :, -1].diagonal(dim1=1, dim2=2).mT


def _faded(q_NMK: Tensor, gate_NLK: Tensor) -> Tensor:
    """A copy of the queries, with the last of each token multiplied by its gate."""
    L = gate_NLK.shape[1]
    if q_NMK.shape[1] == L:
        return gate_NLK * q_NMK
    q = q_NMK.clone()
    _last(q, L).mul_(gate_NLK)
    return q


def _ones(q_BGMK: Tensor, k_BGJK: Tensor, gate_BHL1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gates [N,L,1], and ones in the place of all queries [N,ML,1] and keys [N,JL,1]."""
    gate = gate_BHL1.flatten(0, 1)
    q_ones, k_ones = (gate.new_ones(len(gate), x.shape[2], 1) for x in (q_BGMK, k_BGJK))
    return gate, q_ones, k_ones


# ---------------------------------------------------------------- the tree


def _tree(
    Q: Tensor, X: Tensor, P: Tensor, saved: Saved | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the tree on queries Q [N,ML,K], keys X [N,JL,K] and gates P [N,L,K]: A, 0 between a token and itself, and the
    three at the end of the chunk. Writes into Q and X; `saved` receives what `_tree_backward` needs."""
    (N, L, _), M, J = P.shape, Q.shape[1] // P.shape[1], X.shape[1] // P.shape[1]
    A, b = Q.new_zeros(N, M * L, J * L), 1
    while b < L:
        (_, Q_right), (X_left, _), (P_left, P_right) = halves(Q, M * b), halves(X, J * b), halves(P, 1)
        blocks(A, M * b, J * b).copy_((Q_right @ X_left.mT).view(N, -1, M * b, J * b))
        if saved is not None:
            saved.append((Q_right.clone(), X_left.clone(), P_left, P_right))
        Q_right.mul_(P_left)
        X_left.mul_(P_right)
        P = (P_left * P_right).view(N, L // (2 * b), -1)
        b *= 2
    return A, Q, X, P


def _tree_backward(saved: Saved, L: int, dA: Tensor, dQ: Tensor, dX: Tensor, dP: Tensor) -> Tensor:
    """The gradient of the gates of `_tree` [N,L,K] from those of its outputs; dQ and dX become those of its queries
    and keys. Consumes `saved`; reads of dA only what the tree wrote."""
    (N, _, K), M, J, b = dP.shape, dQ.shape[1] // L, dX.shape[1] // L, L
    while b > 1:
        b //= 2
        Q_right, X_left, P_left, P_right = saved.pop()
        (_, dQ_right), (dX_left, _) = halves(dQ, M * b), halves(dX, J * b)
        dP = dP.reshape(-1, 1, K)
        dP_left = (dQ_right * Q_right).sum(1, keepdim=True).addcmul_(dP, P_right)
        dP_right = (dX_left * X_left).sum(1, keepdim=True).addcmul_(dP, P_left)
        dP = torch.cat([dP_left, dP_right], 1)
        dA_block = blocks(dA, M * b, J * b).reshape(-1, M * b, J * b)
        dQ_right.mul_(P_left).add_(dA_block @ X_left)
        dX_left.mul_(P_right).add_(dA_block.mT @ Q_right)
    return dP.reshape(N, L, K)


def _tree_tangent(
    primals: tuple[Tensor, Tensor, Tensor], tangents: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tangents of the outputs of `_tree`. Writes into the queries and keys of both."""
    (Q, X, P), (dQ, dX, dP) = primals, tangents
    (N, L, _), M, J = P.shape, Q.shape[1] // P.shape[1], X.shape[1] // P.shape[1]
    dA, b = Q.new_zeros(N, M * L, J * L), 1
    while b < L:
        (_, Q_right), (X_left, _), (P_left, P_right) = halves(Q, M * b), halves(X, J * b), halves(P, 1)
        (_, dQ_right), (dX_left, _), (dP_left, dP_right) = halves(dQ, M * b), halves(dX, J * b), halves(dP, 1)
        dblock = dQ_right @ X_left.mT + Q_right @ dX_left.mT
        blocks(dA, M * b, J * b).copy_(dblock.view(N, -1, M * b, J * b))
        dQ_right.mul_(P_left).addcmul_(Q_right, dP_left)
        Q_right.mul_(P_left)
        dX_left.mul_(P_right).addcmul_(X_left, dP_right)
        X_left.mul_(P_right)
        dP = (dP_left * P_right + P_left * dP_right).view(N, L // (2 * b), -1)
        P = (P_left * P_right).view(N, L // (2 * b), -1)
        b *= 2
    return dA, dQ, dX, dP
