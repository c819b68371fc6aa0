"""Rotary positions for any share of a head's channels, with scalings for longer contexts.

Shapes: B batch, T time, H heads, K head width, R rotated channels, F = ⌈R/2⌉ frequencies.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from perspectron.native import training
from perspectron.ops.dispatch import under_tracing
from perspectron.ops.fused import fits
from perspectron.util.config import one_of, require

MOST = 1_000_000
"""The greatest `factor` of a scaling."""
Turn = tuple[Tensor, Tensor]
"""Cosine and sine of angles [B,T,F]."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for a longer context; fields as in a `config.json` of transformers.

    kind: "linear" divides all by `factor`; "llama3" those of wavelengths above original/low_freq_factor, and
    gradually fewer down to original/high_freq_factor; "yarn" those that turn less than `beta_slow` times in the
    original positions, gradually up to `beta_fast`, and multiplies cosine and sine by `attention_factor` (None: by
    0.1 ln(factor) + 1, or the ratio of that for the two mscales). truncate: yarn's ramp begins and ends at whole
    channels."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        one_of(self.kind, ("linear", "llama3", "yarn"), "kind")
        require(0 < self.factor <= MOST, "factor", self.factor, f"> 0 and ≤ {MOST:,}")
        original = self.original_max_position_embeddings
        if self.kind != "linear":
            require(original >= 1, "original_max_position_embeddings", original, "≥ 1")
        if self.kind == "llama3":
            require(self.low_freq_factor > 0, "low_freq_factor", self.low_freq_factor, "> 0")
            require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", self.high_freq_factor,
                    f"> low_freq_factor = {self.low_freq_factor}")  # fmt: skip
        if self.kind == "yarn":
            require(self.beta_slow > 0, "beta_slow", self.beta_slow, "> 0")
            require(self.beta_fast > 0, "beta_fast", self.beta_fast, "> 0")

    def scaled(self, frequency_F: Tensor, base: float) -> Tensor:
        """The scaled frequencies [F] of 2F channels."""
        if self.kind == "linear":
            return frequency_F / self.factor
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            turns_F = self.original_max_position_embeddings * frequency_F / (2 * math.pi)
            share_F = ((turns_F - low) / (high - low)).clamp(0, 1)
        else:
            share_F = 1 - self._ramp(frequency_F, base)
        return (1 - share_F) * frequency_F / self.factor + share_F * frequency_F

    def _ramp(self, frequency_F: Tensor, base: float) -> Tensor:
        """The fraction of each frequency [F] that yarn scales."""
        R = 2 * len(frequency_F)

        def channel(turns: float) -> float:
            return (
                R
                * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
                / (2 * math.log(base))
            )

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, R - 1)
        high += 0.001 if low == high else 0.0
        place_F = torch.arange(len(frequency_F), dtype=torch.float64, device=frequency_F.device)
        return ((place_F - low) / (high - low)).clamp(0, 1)

    @property
    def amplitude(self) -> float:
        """The factor by which cosine and sine are multiplied."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        scales = (self.mscale, self.mscale_all_dim) if self.mscale and self.mscale_all_dim else (1.0, 0.0)
        over, under = (
            0.1 * scale * math.log(self.factor) + 1 if scale and self.factor > 1 else 1.0 for scale in scales
        )
        return over / under


def angles(position_BT: Tensor, width: int, base: float, scaling: RopeScaling | None = None) -> Turn:
    """Cosine and sine of the rotary angles of R = `width` channels, in float64: a far position costs no precision. If
    the width is odd, one channel more is rotated, as in transformers."""
    place = position_BT.device
    made = _frequencies.__wrapped__ if under_tracing(position_BT) else _frequencies
    angle_BTF = position_BT[:, :, None] * made(width, base, scaling, place)
    turn = angle_BTF.cos(), angle_BTF.sin()
    if scaling is None or scaling.amplitude == 1:
        return turn
    return turn[0] * scaling.amplitude, turn[1] * scaling.amplitude


@cache
def _frequencies(width: int, base: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """The frequencies [F], cached; not in inference mode, whose tensors could not be used outside of it."""
    with torch.inference_mode(False):
        exponent_F = -torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
        frequency_F = base**exponent_F
        return frequency_F if scaling is None else scaling.scaled(frequency_F, base)


def turned(x_BHTK: Tensor, turn: Turn) -> Tensor:
    """The first 2F channels of each head rotated by `turn`, in pairs i and i + F; products at least in float32."""
    R = 2 * turn[0].shape[-1]
    if x_BHTK.shape[3] > R:
        first, rest = x_BHTK.split([R, x_BHTK.shape[3] - R], -1)
        return torch.cat([turned(first, turn), rest], -1)
    dtype = torch.promote_types(x_BHTK.dtype, torch.float32)
    cos, sin = (angle_BTF.to(dtype) for angle_BTF in turn)
    x_BTHK = x_BHTK.transpose(1, 2)
    B, T, H, K = x_BTHK.shape
    if x_BTHK.stride()[2:] == (K, 1) and fits(x_BTHK, dtypes=(torch.float32, torch.bfloat16)):
        y: Tensor = _Turned.apply(x_BTHK.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1))
        return y.view(B, T, H, K).transpose(1, 2)
    cos, sin = cos[:, None], sin[:, None]
    a, b = x_BHTK.to(dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x_BHTK.dtype)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return training.turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Turned.apply(dy.contiguous(), cos, -sin), None, None
