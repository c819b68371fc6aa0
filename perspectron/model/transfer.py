"""What a recurrence takes over from attention in its place: the matrices by head, and how far each head looks.

Shapes: D model width, H query heads, K key width, V value width, T distances, N channels of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SLOWEST, FASTEST = 1e6, 1.0  # half-lives in tokens


@dataclass(frozen=True)
class Heads:
    """The matrices of attention, with keys and values repeated for each head of a group, and the mean share of
    attention by distance in tokens, 0 first, summed over the batches it was measured on."""

    q_HKD: Tensor
    k_HKD: Tensor
    v_HVD: Tensor
    o_DHV: Tensor
    mass_HT: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, K, V)."""
        return (*self.q_HKD.shape[:2], self.v_HVD.shape[1])

    def halflives(self, channels: int) -> Tensor:
        """Half-lives [H,N] in tokens: quantiles of the distances, so that the share of channels that forget within a
        distance is the share of attention up to it."""
        mass_HT = self.mass_HT.double()
        reached_HT = mass_HT.cumsum(1) / mass_HT.sum(1, keepdim=True)
        at_HN = ((torch.arange(channels, dtype=torch.float64) + 0.5) / channels).expand(len(mass_HT), -1)
        last_HN = torch.searchsorted(reached_HT, at_HN.contiguous()).clamp_max(mass_HT.shape[1] - 1)
        over_HN = (reached_HT.gather(1, last_HN) - at_HN) * mass_HT.sum(1, keepdim=True)
        within_HN = over_HN / mass_HT.gather(1, last_HN).clamp_min(1e-12)
        return (last_HN + 1 - within_HN).clamp(FASTEST, SLOWEST)

    def rates(self, channels: int) -> Tensor:
        """−log of the decays [H,N] with these half-lives."""
        return math.log(2) / self.halflives(channels)

    def narrowed(self, width: int) -> tuple[Tensor, Tensor]:
        """Matrices of queries and keys of this width, at most K, whose products are nearest to those of these."""
        if width == self.q_HKD.shape[1]:
            return self.q_HKD, self.k_HKD
        (q_HDK, q_HKK), (k_HDK, k_HKK) = (torch.linalg.qr(x.mT.double()) for x in (self.q_HKD, self.k_HKD))
        left, values_HK, right = torch.linalg.svd(q_HKK @ k_HKK.mT)
        root_H1K = values_HK.sqrt()[:, None]
        sides = (q_HDK @ left * root_H1K, k_HDK @ right.mT * root_H1K)
        q_HKD, k_HKD = (side[:, :, :width].mT.to(self.q_HKD.dtype) for side in sides)
        return q_HKD, k_HKD


def fill(linear: nn.Linear, *parts_HKD: Tensor) -> None:
    """Set a layer's weight to these matrices, head after head and one below the other."""
    linear.weight.copy_(torch.cat([part.flatten(0, 1) for part in parts_HKD]))


def passing(conv: nn.Module) -> None:
    """Make a short convolution the identity plus a tenth of what it was."""
    for parameter in conv.parameters():
        parameter.mul_(0.1)
    weight = conv.weight
    assert isinstance(weight, Tensor)
    weight[:, 0, -1] += 1


def before_softplus(steps: Tensor) -> Tensor:
    """The inverse of softplus."""
    return steps + torch.log(-torch.expm1(-steps))
