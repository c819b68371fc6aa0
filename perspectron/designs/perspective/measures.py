"""Measures of how far distributions over tokens lie apart, and the token that most of them favour.

Shapes: N tokens, P perspectives with the base first, V vocabulary. Everything is float64.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor


def probabilities(logits: Tensor) -> Tensor:
    """Softmax in float64."""
    return logits.double().softmax(-1)


def entropy(p: Tensor) -> Tensor:
    """H in nats over the last dimension; 0·log 0 is 0."""
    return -torch.xlogy(p, p).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon divergence in bits over the last dimension: 0 of equal distributions, 1 of disjoint ones."""
    m = (p + q) / 2
    halves = (torch.where(x > 0, x * (x / m).log2(), 0).sum(-1) for x in (p, q))
    return sum(halves, torch.zeros(())) / 2


def compared(p_NPV: Tensor) -> tuple[Tensor, Tensor]:
    """Disagreement [N], the mean divergence of all pairs, and information [N], H(mean) − mean H: both in bits."""
    pairs = list(combinations(range(p_NPV.shape[1]), 2))
    apart_N = torch.stack([divergence(p_NPV[:, i], p_NPV[:, j]) for i, j in pairs]).mean(0)
    more_N = (entropy(p_NPV.mean(1)) - entropy(p_NPV).mean(1)) / math.log(2)
    return apart_N, more_N.clamp_min(0)


def majority(votes: Sequence[int]) -> int | None:
    """The token with the most votes, if two or more; of equals the base's, and then that of the earliest perspectives.
    None without one."""
    counts = Counter(votes)

    def rank(token: int) -> tuple[int, bool, int]:
        return counts[token], token == votes[0], -sum(i for i, vote in enumerate(votes) if vote == token)

    best = max(counts, key=rank)
    return best if counts[best] >= 2 else None


def confidence(p_V: Tensor, token: int, temperature: float) -> float:
    """Probability of a token under p^(1/T), normalised."""
    return float((p_V.log() / temperature).softmax(0)[token])
