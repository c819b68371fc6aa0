"""Mamba's selective scan: each channel has a memory of N numbers that fade by gates of their own, written and read with
vectors that all channels share, behind a short convolution (Gu & Dao 2023, arXiv 2312.00752;
docs/designs/baselines.md#mamba).

Shapes: B batch, T time, D model width, I inner width, N numbers of a channel's memory, R rank of the steps, W taps of
the convolution, Z = W − 1 inputs it remembers.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ShortConv, softplus, softplus_of_steps
from perspectron.model.state import register
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import gla
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, at_least, positive
from perspectron.util.terms import Term


@dataclass(frozen=True)
class MambaConfig(MixerConfig):
    """The options of Mamba.

    state: N. expand: the inner width in multiples of the model's. conv: W, tokens that the short convolution sees.
    rank: R; None is D/16, rounded up. bias: of the first and the last projection; conv_bias: of the convolution. norm:
    norms without weights of the steps' low rank, b and c, as in Falcon Mamba; norm_eps: their epsilon."""

    kind = "mamba"
    state: int = 16
    expand: int = 2
    conv: int = 4
    rank: int | None = None
    bias: bool = False
    conv_bias: bool = True
    norm: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        at_least(1, self, "state", "expand", "conv", "rank")
        positive(self, "norm_eps")

    def low(self, d_model: int) -> int:
        """R."""
        return self.rank or math.ceil(d_model / 16)


@register
@dataclass(frozen=True)
class MambaState:
    """The state of Mamba. memory: h [B,I,N]; window: the last W − 1 inputs of the convolution [B,Z,I], zeros before the
    document's first. Both float32 or float64."""

    memory_BIN: Tensor
    window_BZI: Tensor


class Mamba(Mixer):
    """x, z = W_in u; x ← swish(conv(x)); δ, b, c = W_x x; Δ = softplus(W_Δ δ + bias); h ← exp(−Δ exp(A_log)) h + Δ x b;
    y = W_o ((hᵀ c + D x) ⊙ swish(z)). Each of the I channels is a head of gated linear attention with one value, whose
    N key channels have gates of their own; all heads share b and c."""

    small = MambaConfig(state=4)
    about = "Mamba's selective scan: gates for each channel and state, behind a short convolution"
    source = "docs/designs/baselines.md#mamba"
    state_kind = MambaState

    recipe: ClassVar = {"A_log": (1.0, 0.0)}
    """As in state-spaces/mamba: exp(A_log) is a rate, and has no weight decay; D and Δ's bias, vectors, have none."""

    def __init__(self, d_model: int, norm_eps: float, config: MambaConfig) -> None:
        super().__init__()
        inner, rank = config.expand * d_model, config.low(d_model)
        self.config = config
        self.split = [rank, config.state, config.state]
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=config.bias)
        self.conv1d = ShortConv(inner, config.conv, bias=config.conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.split), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, config.state))
        self.D = nn.Parameter(torch.empty(inner))
        self.o_proj = nn.Linear(inner, d_model, bias=config.bias)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise as the authors do: A = −1 … −N in each channel, steps spread over the channels, D = 1."""
        edge = self.split[0] ** -0.5
        self.conv1d.draw(generator)
        self.dt_proj.weight.uniform_(-edge, edge, generator=generator)
        softplus_of_steps(self.dt_proj.bias, generator)
        self.A_log.copy_(torch.arange(1, self.config.state + 1, dtype=torch.float64).log())
        self.D.fill_(1)

    def decays(self) -> int:
        return len(self.A_log)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.A_log.shape), self.conv1d.window]

    @masked
    def forward(
        self,
        x_BTD: Tensor,
        state: MambaState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, MambaState, dict[str, Term]]:
        u_BTI, z_BTI = self.in_proj(x_BTD).chunk(2, -1)
        u_BTI, window_BZI = self.conv1d(u_BTI, state.window_BZI, reset_BT, pad_BT)
        full = u_BTI.dtype
        delta_BTR, b_BTN, c_BTN = (
            x.to(full) for x in self.x_proj(u_BTI.to(x_BTD.dtype)).split(self.split, -1)
        )
        if self.config.norm:
            delta_BTR, b_BTN, c_BTN = (
                F.rms_norm(x, x.shape[-1:], eps=self.config.norm_eps) for x in (delta_BTR, b_BTN, c_BTN)
            )
        delta_BTI = self.dt_proj(delta_BTR.to(x_BTD.dtype)).to(full)
        delta_BTI = filled(softplus(tuned.decays(delta_BTI)), pad_BT, 0)  # gate 1, nothing written
        rate_IN = torch.exp(self.A_log.to(full))
        gate_BTIN = filled(batch_invariant(torch.exp, -delta_BTI[..., None] * rate_IN), reset_BT, 0)
        o_BIT1, memory_BIN1 = gla.scan(
            c_BTN[:, None],
            b_BTN[:, None],
            (delta_BTI * u_BTI).mT[..., None],
            gate_BTIN.transpose(1, 2),
            state.memory_BIN[..., None],
            scale=1.0,
            consume_state=consume_state,
            checked=False,
        )
        o_BTI = tuned.read(o_BIT1[..., 0].mT, c_BTN)
        y_BTI = torch.addcmul(o_BTI, u_BTI, self.D) * batch_invariant(F.silu, z_BTI)
        return self.o_proj(y_BTI.to(x_BTD.dtype)), MambaState(memory_BIN1[..., 0], window_BZI), {}
