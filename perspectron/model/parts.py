"""Parts shared by mixers and blocks: a short convolution, a shift by one token, value residuals, unit keys, initial
values of decays and mixes, and dropout.

Shapes: B batch, T time, D width, C channels, W taps, Z = W − 1 tokens of a window, N inputs of a mixer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, filled
from perspectron.ops.conv import convolve
from perspectron.ops.fused import batch_invariant, mixed, shifted
from perspectron.util import ranks
from perspectron.util.streams import stream

STEP = (0.001, 0.1)  # what Mamba draws its steps Δ from, evenly in their logarithm
CONV_TAPS = 4
UNIT_EPS = 1e-6
LEAST_SQUARE = 1e-24
MIX_EXPONENTS = {"x": 0.7, "q": 0.2, "k": 0.7, "v": 0.7, "g": 0.2, "network": 0.7}
"""Exponents of the initial mixes of a token shift, by input: those of RWKV-7's first layer."""
ValueFunction = Callable[[Tensor, Tensor], Tensor]
"""A function of a mixer's values [B,T,C] and of their input [B,T,D] that mixes them with the first mixer's values
(`ValueResidual`)."""


class ShortConv(nn.Module):
    """A causal convolution of each channel over its last W tokens, then swish if it is on (`perspectron.ops.conv`).
    weight [C,1,W]; bias [C], if there is one. The mixer that has it calls `draw` in its `init_weights` and keeps its
    window as state."""

    def __init__(self, channels: int, taps: int, *, bias: bool = True, swish: bool = True) -> None:
        super().__init__()
        self.swish = swish
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def draw(self, generator: torch.Generator) -> None:
        """Start as torch starts a convolution, at U(−W^-½, W^-½)."""
        edge = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            parameter.uniform_(-edge, edge, generator=generator)

    @property
    def window(self) -> tuple[int, int]:
        """Shape of the window [Z,C] in a mixer's state, zeros before any token."""
        channels, _, taps = self.weight.shape
        return taps - 1, channels

    def forward(
        self, u_BTC: Tensor, window_BZC: Tensor, reset_BT: Mask, pad_BT: Mask
    ) -> tuple[Tensor, Tensor]:
        """The outputs [B,T,C], in the window's dtype, and the window after them."""
        bias_C = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        return convolve(u_BTC, window_BZC, self.weight, bias_C, reset_BT, pad_BT, swish=self.swish)


class Dropout(nn.Module):
    """Zeros for a share of the numbers, in training alone; the others grow to keep the mean. What it zeroes depends on
    torch's seed, on its name in the model, on which forward pass of which update it is and on which of several ranks
    draws, so that a run that goes on, and a block that is computed again, have the same zeros."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.name, self.step, self.passes = share, "", 0, 0

    def set_step(self, step: int) -> None:
        """Count the passes of the update that follows `step` others."""
        self.step, self.passes = step, 0

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()) or x.is_meta:
            return x
        generator = stream(torch.initial_seed(), "dropout", self.name, self.step, self.passes, *ranks.place())
        kept = torch.rand(x.shape, generator=generator) >= self.share
        return x * (kept.to(x.device) / (1 - self.share)).to(x.dtype)


class SameZeros(AbstractContextManager[None]):
    """Context for a block that is computed again in the backward pass: dropout draws the zeros of the forward pass in
    which this was made, even if others followed it."""

    def __init__(self, drops: Sequence[Dropout]) -> None:
        self.drops, self.passes = drops, [drop.passes for drop in drops]

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        for i, drop in enumerate(self.drops):
            drop.passes, self.passes[i] = self.passes[i], drop.passes


def _shifted(x_BTD: Tensor, last_BD: Tensor, reset_BT: Mask, pad_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The token before each one in its document [B,T,D], zeros before the first; and the last token [B,D]."""
    B, T, D = x_BTD.shape
    all_BSD = torch.cat([last_BD[:, None], x_BTD], 1)
    # for each place, the last token before it that is not padding; 0 is the one before x
    time_T = torch.arange(1, T + 1, device=x_BTD.device)
    from_BS = torch.cat([pad_BT.new_zeros(B, 1, dtype=torch.long), torch.where(pad_BT, 0, time_T)], 1)
    from_BS = from_BS.cummax(1).values
    all_BSD = all_BSD.gather(1, from_BS[:, :, None].expand(-1, -1, D))
    if reset_BT is not None:  # also where the document begins in padding
        begun_BT = torch.where(reset_BT, time_T, 0).cummax(1).values
        begun_BS = torch.cat([begun_BT, begun_BT[:, -1:]], 1)
        all_BSD = all_BSD.masked_fill((begun_BS > from_BS)[:, :, None], 0)
    return all_BSD[:, :-1], all_BSD[:, -1].clone()


def between(
    x_BTD: Tensor, last_BD: Tensor, mix_ND: Tensor, reset_BT: Mask, pad_BT: Mask
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The N inputs [B,T,D], each x where its mix is 0 and the token before in its document where it is 1, in x's dtype;
    and the last token [B,D], to start from next time. last_BD: the token before x, zeros before a document."""
    if x_BTD.shape[1] == 0:
        return (x_BTD,) * len(mix_ND), last_BD
    full_BTD = x_BTD.to(last_BD.dtype)
    if pad_BT is None:
        inputs, after_BD = shifted(full_BTD, last_BD, mix_ND, reset_BT), full_BTD[:, -1].clone()
    else:
        before_BTD, after_BD = _shifted(full_BTD, last_BD, reset_BT, pad_BT)
        inputs = mixed(full_BTD, before_BTD, mix_ND)
    return tuple(one_BTD.to(x_BTD.dtype) for one_BTD in inputs), after_BD


class TokenShift(nn.Module):
    """Inputs that lie between a token and the one before it in its document, each by a learned mix for each channel
    (Peng et al. 2023, arXiv 2305.13048). mix_exponents: of the initial mixes, one for each input; None where an input
    reads the token alone."""

    no_decay = ("mix_ND",)

    def __init__(self, d_model: int, mix_exponents: Sequence[float | None]) -> None:
        super().__init__()
        self.mixed, self.rows = [exponent is not None for exponent in mix_exponents], 1
        self.width = d_model
        self.mix_exponents = [exponent for exponent in mix_exponents if exponent is not None]
        self.mix_ND = nn.Parameter(torch.empty(len(self.mix_exponents), d_model))

    def init_weights(self, generator: torch.Generator) -> None:
        self.mix_ND.copy_(
            torch.stack([mixes(self.mix_ND.shape[1], exponent) for exponent in self.mix_exponents])
        )

    def forward(self, x_BTD: Tensor, last_B1D: Tensor, reset_BT: Mask, pad_BT: Mask) -> tuple[Inputs, Tensor]:
        """The inputs, as one tensor where there is only one, and the last token [B,1,D]."""
        some, last_BD = between(x_BTD, last_B1D[:, 0], self.mix_ND, reset_BT, pad_BT)
        rest = iter(some)
        inputs = tuple(next(rest) if mixed else x_BTD for mixed in self.mixed)
        return inputs if len(inputs) > 1 else inputs[0], last_BD[:, None]


class InputConv(nn.Module):
    """Inputs that are a token plus a causal convolution of each channel over it and the three before it in its
    document, or plus the swish of that (Allen-Zhu 2025, arXiv 2512.17351, calls it a Canon layer). mixed: for each
    input, None where it reads the token alone."""

    no_decay = ("weight_NWD",)

    def __init__(self, d_model: int, mixed: Sequence[object], *, swish: bool) -> None:
        super().__init__()
        self.mixed, self.swish = [one is not None for one in mixed], swish
        self.rows, self.width = CONV_TAPS - 1, d_model
        self.weight_NWD = nn.Parameter(torch.empty(sum(self.mixed), CONV_TAPS, d_model))

    def init_weights(self, generator: torch.Generator) -> None:
        """Start as torch starts a convolution, at U(−W^-½, W^-½)."""
        edge = CONV_TAPS**-0.5
        self.weight_NWD.uniform_(-edge, edge, generator=generator)

    def forward(
        self, x_BTD: Tensor, window_BZD: Tensor, reset_BT: Mask, pad_BT: Mask
    ) -> tuple[Inputs, Tensor]:
        """The inputs, as one tensor where there is only one, and the window after them [B,Z,D], newest first."""
        if x_BTD.shape[1] == 0:
            return (x_BTD if len(self.mixed) == 1 else (x_BTD,) * len(self.mixed)), window_BZD
        read, after = [x_BTD.to(window_BZD.dtype)], list[Tensor]()
        for last_BD in window_BZD.unbind(1):
            before_BTD, last_BD = _before(read[-1], last_BD, reset_BT, pad_BT)
            read.append(before_BTD)
            after.append(last_BD)
        inputs = list[Tensor]()
        weights = iter(self.weight_NWD.to(window_BZD.dtype))
        for convolved in self.mixed:
            if convolved:
                first, *rest = (W * x for W, x in zip(next(weights), read, strict=True))
                y_BTD = sum(rest, first)
                y_BTD = batch_invariant(F.silu, y_BTD) if self.swish else y_BTD
                inputs.append((read[0] + y_BTD).to(x_BTD.dtype))
            else:
                inputs.append(x_BTD)
        return tuple(inputs) if len(inputs) > 1 else inputs[0], torch.stack(after, 1)


def _before(x_BTD: Tensor, last_BD: Tensor, reset_BT: Mask, pad_BT: Mask) -> tuple[Tensor, Tensor]:
    """The token before each one in its document [B,T,D], zeros before the first; and the last token [B,D]."""
    if pad_BT is not None:
        return _shifted(x_BTD, last_BD, reset_BT, pad_BT)
    before_BTD = torch.cat([last_BD[:, None], x_BTD[:, :-1]], 1)
    return filled(before_BTD, reset_BT, 0), x_BTD[:, -1]


def projected(linear: nn.Module, inputs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The output of a linear layer in parts of these sizes, each computed from its own input."""
    if all(x is inputs[0] for x in inputs):
        whole: Tensor = linear(inputs[0])
        return whole
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        # a packed layer, or one with hooks, is called as a whole
        parts = [linear(x).split(list(sizes), -1)[i] for i, x in enumerate(inputs)]
    else:
        weights = linear.weight.split(list(sizes))
        biases = [None] * len(weights) if linear.bias is None else linear.bias.split(list(sizes))
        parts = [F.linear(x, W, b) for x, W, b in zip(inputs, weights, biases, strict=True)]
    return torch.cat(parts, -1)


def split_inputs(x: Inputs, inputs: int) -> tuple[Tensor, ...]:
    """A mixer's inputs as a tuple; a single one is used for all."""
    return (x,) * inputs if isinstance(x, Tensor) else x


def mixes(d_model: int, exponent: float) -> Tensor:
    """The initial mixes of RWKV-7: 1 − (c/D)^exponent of channel c."""
    return 1 - (torch.arange(d_model, dtype=torch.float64) / d_model) ** exponent


def low_rank(
    d_model: int,
    size: float,
    activation: nn.Module,
    channels: int | None = None,
    *,
    bias: bool = True,
    rank: int | None = None,
) -> nn.Sequential:
    """W₂ f(W₁ x) + b of a rank; by default the multiple of 32, at least 32, nearest to `size`. channels: of the output;
    D by default."""
    rank = rank or max(32, round(size / 32) * 32)
    return nn.Sequential(
        nn.Linear(d_model, rank, bias=False), activation, nn.Linear(rank, channels or d_model, bias=bias)
    )


def start_low_rank(low: nn.Sequential, generator: torch.Generator, bias_D: Tensor | None = None) -> None:
    """Initialise a low-rank layer such that it gives its bias alone."""
    inner, outer = cast(nn.Linear, low[0]), cast(nn.Linear, low[2])
    inner.weight.zero_()
    nn.init.orthogonal_(outer.weight, 0.1, generator)
    if bias_D is not None:
        outer.bias.copy_(bias_D)


class Shared:
    """Tensors, by name, that mixers pass to those above them for the same tokens. It is no dict because FSDP and
    accelerate copy dicts on the way to a module."""

    def __init__(self) -> None:
        self._kept = dict[str, Tensor]()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._kept[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    def get(self, name: str) -> Tensor | None:
        return self._kept.get(name)

    def copy(self) -> "Shared":
        """Another with the same tensors."""
        copied = Shared()
        copied._kept.update(self._kept)
        return copied


class ValueResidual(nn.Module):
    """A value residual: values between a mixer's own and those of the first mixer with as many channels, mixed by σ(W₂
    W₁ x + b) (Zhou et al. 2024, arXiv 2410.17897). That first one has no gate, and shares its values."""

    def __init__(self, d_model: int, channels: int, *, first: bool) -> None:
        super().__init__()
        self.key = f"values of {channels} channels"
        self.gate = None if first else value_residual_gate(d_model, channels)

    def init_weights(self, generator: torch.Generator) -> None:
        if self.gate is not None:
            start_value_residual_gate(self.gate, generator)

    def forward(self, values_BTC: Tensor, x_BTD: Tensor, shared: Shared) -> Tensor:
        """shared: tensors from the blocks below, for these tokens."""
        if self.gate is None:
            shared[self.key] = values_BTC
            return values_BTC
        return blend(shared[self.key], values_BTC, self.gate(x_BTD))


def blend(first_BTC: Tensor, values_BTC: Tensor, gate_BTC: Tensor) -> Tensor:
    """Values moved towards the first ones by the share σ(gate), in their own dtype."""
    share_BTC = batch_invariant(torch.sigmoid, gate_BTC).to(values_BTC.dtype)
    return torch.lerp(values_BTC, first_BTC.to(values_BTC.dtype), share_BTC)


def value_residual_gate(d_model: int, channels: int, rank: int | None = None) -> nn.Sequential:
    """The layer that gives a gate's logit for each channel."""
    return low_rank(d_model, 1.7 * d_model**0.5, nn.Identity(), channels, rank=rank)


def start_value_residual_gate(gate: nn.Sequential, generator: torch.Generator) -> None:
    """Start as RWKV-7 does, with gates from 0.72 in the first channel to 0.63 in the last."""
    C = cast(nn.Linear, gate[2]).out_features
    line = torch.arange(C, dtype=torch.float64) / max(1, C - 1)
    start_low_rank(gate, generator, 0.73 - 0.4 * (line - 0.5))


def unit(x: Tensor, eps: float = UNIT_EPS) -> Tensor:
    """x / √(|x|² + eps) along the last dimension, in float32 at least: length 1, and 0 stays 0. eps: 0 is
    x / max(|x|, 10⁻¹²)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    square = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(square.clamp_min(LEAST_SQUARE) if eps == 0 else square + eps)


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ), with the same bits in a batch of any size."""
    return batch_invariant(F.softplus, x, least=0)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ), with the same bits in a batch of any size."""
    return batch_invariant(torch.sigmoid, x, least=0)


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
