"""Parts shared by recurrent mixers: a short convolution, a shift by one token, unit keys, and initial values of decays
and mixes.

Shapes: B batch, T time, D width, C channels, W taps, Z = W − 1 tokens of a window.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.mixers.masks import Mask
from perspectron.ops.conv import convolve
from perspectron.ops.dispatch import gradients_off

STEP = (0.001, 0.1)  # what Mamba draws its steps Δ from, evenly in their logarithm
UNIT_EPS = 1e-6
VECTORS = 32  # numbers that torch computes at once


class ShortConv(nn.Module):
    """A causal convolution of each channel over its last W tokens, then swish (`perspectron.ops.conv`). weight [C,1,W];
    bias [C], if there is one. The mixer that has it calls `draw` in its `init_weights` and keeps its window as
    state."""

    def __init__(self, channels: int, taps: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def draw(self, generator: torch.Generator) -> None:
        """Start as torch starts a convolution, at U(−W^-½, W^-½)."""
        edge = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            parameter.uniform_(-edge, edge, generator=generator)

    def window(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The window before any token [B,Z,C]: zeros, at least float32."""
        channels, _, taps = self.weight.shape
        dtype = torch.promote_types(dtype, torch.float32)
        return torch.zeros(batch_size, taps - 1, channels, device=device, dtype=dtype)

    def forward(
        self, u_BTC: Tensor, window_BZC: Tensor, reset_BT: Mask, pad_BT: Mask
    ) -> tuple[Tensor, Tensor]:
        """The outputs [B,T,C], in the window's dtype, and the window after them."""
        bias_C = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        return convolve(u_BTC, window_BZC, self.weight, bias_C, reset_BT, pad_BT)


def shift(x_BTD: Tensor, last_BD: Tensor, reset_BT: Mask, pad_BT: Mask) -> tuple[Tensor, Tensor]:
    """The token before each one in its document [B,T,D], zeros before the first; and the last token [B,D], to start
    from next time. last_BD: the token before x, in the dtype of the outputs."""
    B, T, D = x_BTD.shape
    if T == 0:
        return x_BTD.to(last_BD.dtype), last_BD
    all_BSD = torch.cat([last_BD[:, None], x_BTD.to(last_BD.dtype)], 1)
    if pad_BT is None:
        before_BTD, after_BD = all_BSD[:, :-1], all_BSD[:, -1].clone()
        if reset_BT is not None:
            before_BTD = before_BTD.masked_fill(reset_BT[:, :, None], 0)
        return before_BTD, after_BD
    # of each place, the last token before it that is none of padding; 0 is the one before x
    time_T = torch.arange(1, T + 1, device=x_BTD.device)
    from_BS = torch.cat([pad_BT.new_zeros(B, 1, dtype=torch.long), torch.where(pad_BT, 0, time_T)], 1)
    from_BS = from_BS.cummax(1).values
    all_BSD = all_BSD.gather(1, from_BS[:, :, None].expand(-1, -1, D))
    if reset_BT is not None:  # also where the document begins in padding
        begun_BT = torch.where(reset_BT, time_T, 0).cummax(1).values
        begun_BS = torch.cat([begun_BT, begun_BT[:, -1:]], 1)
        all_BSD = all_BSD.masked_fill((begun_BS > from_BS)[:, :, None], 0)
    return all_BSD[:, :-1], all_BSD[:, -1].clone()


def between(x_BTD: Tensor, before_BTD: Tensor, mix_D: Tensor) -> Tensor:
    """x where the mix is 0, the token before where it is 1; in x's dtype."""
    x_full = x_BTD.to(before_BTD.dtype)
    return (x_full + (before_BTD - x_full) * mix_D).to(x_BTD.dtype)


def mixes(d_model: int, bend: float) -> Tensor:
    """The initial mixes of RWKV-7: 1 − (c/D)^bend of channel c."""
    return 1 - (torch.arange(d_model, dtype=torch.float64) / d_model) ** bend


def unit(x: Tensor) -> Tensor:
    """x / √(|x|² + 10⁻⁶) along the last dimension, in float32 at least: length 1, and 0 stays 0."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), with the same bits in a batch of any size."""
    return _whole(F.softplus, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ), with the same bits in a batch of any size."""
    return _whole(torch.sigmoid, x)


def _whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each number. Where nothing differentiates it takes whole vectors: torch computes what is left over
    in another way, with other last bits, and how many rows a batch has would then change them."""
    if not gradients_off() or x.is_meta:
        return function(x)
    return function(F.pad(x.flatten(), (0, -x.numel() % VECTORS)))[: x.numel()].view(x.shape)


def softplus_of_steps(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """The bias, filled such that softplus gives steps Δ, log-uniform in STEP (Mamba's start)."""
    step = parameter.uniform_(math.log(STEP[0]), math.log(STEP[1]), generator=generator).exp()
    return parameter.copy_(step + torch.log(-torch.expm1(-step)))


def logits_of_halflives(
    parameter: Tensor, shortest: float, longest: float, generator: torch.Generator
) -> Tensor:
    """The bias, filled such that its sigmoid, a decay, has half-lives log-uniform between these, in tokens."""
    halflife = parameter.uniform_(math.log(shortest), math.log(longest), generator=generator).exp()
    rate = math.log(2) / halflife.double()
    return parameter.copy_(-rate - torch.log(-torch.expm1(-rate)))  # logit of e^-rate, without 1 − e^-rate
