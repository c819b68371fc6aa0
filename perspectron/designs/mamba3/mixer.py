"""Mamba-3, with one input and one output per head: a matrix memory with one decay per head, written by the trapezoid
rule from a token and the previous one, with rotating keys and queries (arXiv 2603.15569).

Shapes: B batch, T time, D model width, I inner width, H heads, P = I/H head width, N state rows, F = N/4 angles.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import (
    ValueFunction,
    projected,
    sigmoid,
    softplus,
    softplus_of_steps,
    split_inputs,
)
from perspectron.model.state import register
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import gla
from perspectron.ops.dispatch import gradients_off
from perspectron.ops.fused import RMSNorm, batch_invariant
from perspectron.util.config import MixerConfig, at_least, require
from perspectron.util.terms import Term

SLOWEST = 1e-4  # the least rate of decay


@dataclass(frozen=True)
class Mamba3Config(MixerConfig):
    """The options of Mamba-3.

    head_dim: P, must divide the inner width. state: N, rows of a head's memory, a multiple of 4, of which the first
    half rotates, in pairs of neighbours. expand: the inner width in multiples of the model's."""

    kind = "mamba3"
    head_dim: int
    state: int
    expand: int = 2

    def __post_init__(self) -> None:
        at_least(1, self, "head_dim", "state", "expand")
        require(self.state % 4 == 0, "state", self.state, "a multiple of 4")


@register
@dataclass(frozen=True)
class Mamba3State:
    """The state of Mamba-3. memory: S [B,H,N,P]; angle: Φ in [0, 2π) [B,H,F]; key and input: k [B,H,N] and v [B,H,P] of
    the document's last token, zeros before its first. All float32 or float64."""

    memory_BHNP: Tensor
    angle_BHF: Tensor
    key_BHN: Tensor
    input_BHP: Tensor


class Mamba3(Mixer):
    """z, v, b, c, δ, a, λ, θ = W_in x; Δ = softplus(δ + bias), α = exp(-Δ max(softplus(a), 10⁻⁴)); Φ ← Φ + π Δ tanh(θ);
    k = turn(norm(b) + b_bias, Φ), q = turn(norm(c) + c_bias, Φ); S ← α (S + (1 − σ(λ)) Δ k₋₁ v₋₁ᵀ) + σ(λ) Δ k vᵀ;
    y = W_o ((Sᵀ q + D v) ⊙ swish(z))."""

    small = Mamba3Config(head_dim=8, state=8)
    about = "Mamba-3: Mamba-2's memory with trapezoid-rule writes and rotating keys, without a convolution"
    source = "arXiv 2603.15569"
    state_kind = Mamba3State
    framed = Mamba3Config(head_dim=32, state=64)
    hidden = 304

    inputs = ("q", "k", "v", "g")
    no_decay = ("b_bias", "c_bias")

    def __init__(self, d_model: int, norm_eps: float, config: Mamba3Config) -> None:
        super().__init__()
        inner, N = config.expand * d_model, config.state
        bound = f"a divisor of expand · d_model = {inner}"
        require(inner % config.head_dim == 0, "head_dim", config.head_dim, bound)
        heads = inner // config.head_dim
        self.config = config
        self.value_channels = inner
        self.split = [inner, inner, N, N, heads, heads, heads, N // 4]
        self.in_proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.b_norm = RMSNorm(N, norm_eps)
        self.c_norm = RMSNorm(N, norm_eps)
        self.b_bias = nn.Parameter(torch.empty(heads, N))
        self.c_bias = nn.Parameter(torch.empty(heads, N))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.o_proj = nn.Linear(inner, d_model, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread Δ over the heads; D and the biases of keys and queries are 1."""
        softplus_of_steps(self.dt_bias, generator)
        for parameter in (self.b_bias, self.c_bias, self.D):
            parameter.fill_(1)

    def decays(self) -> int:
        return len(self.dt_bias)

    def state_shapes(self) -> list[tuple[int, ...]]:
        (H, N), P = self.b_bias.shape, self.config.head_dim
        return [(H, N, P), (H, N // 4), (H, N), (H, P)]

    @masked
    def forward(
        self,
        x: Inputs,
        state: Mamba3State,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, Mamba3State, dict[str, Term]]:
        x_q, x_k, x_v, x_g = split_inputs(x, len(self.inputs))
        read = (x_g, x_v, x_k, x_q, *[x_g] * len(self.split[4:]))
        made = projected(self.in_proj, read, self.split).to(x_g.dtype).split(self.split, -1)
        (z_BTI, v_BTI, b_BTN, c_BTN), steps = made[:4], made[4:]
        full = torch.promote_types(x_g.dtype, torch.float32)
        delta_BTH, rate_BTH, mix_BTH, theta_BTF = (step.to(full) for step in steps)
        delta_BTH = softplus(tuned.decays(delta_BTH) + self.dt_bias)
        delta_BTH = filled(delta_BTH, pad_BT, 0)  # gate 1, nothing written or turned
        gate_BTH = torch.exp(-delta_BTH * softplus(rate_BTH).clamp_min(SLOWEST))
        before_BTH = sigmoid(-mix_BTH) * delta_BTH  # with which the token before is written again
        gate_BTH, before_BTH = (filled(x, reset_BT, 0) for x in (gate_BTH, before_BTH))
        turn_BTHF = math.pi * delta_BTH[..., None] * torch.tanh(theta_BTF)[:, :, None]
        angle_BTHF = _angles(turn_BTHF, state.angle_BHF, reset_BT)
        k_BTHN = _turned(self.b_norm(b_BTN).to(full)[:, :, None] + self.b_bias, angle_BTHF)
        q_BTHN = _turned(self.c_norm(c_BTN).to(full)[:, :, None] + self.c_bias, angle_BTHF)
        v_BTI = v_BTI if value_residual is None else value_residual(v_BTI, x_v)
        v_BTHP = v_BTI.to(full).unflatten(-1, (-1, self.config.head_dim))
        # A token is written for itself and again, before it decays, for the next: both at once, into a memory that is
        # ahead of S by the second part. Outputs are read from it, less that part of the token that reads.
        late_BSH = _next(before_BTH, pad_BT)
        first_BHN, late_BTH = late_BSH[:, 0, :, None] * state.key_BHN, late_BSH[:, 1:]
        late_BTH = filled(late_BTH, pad_BT, 0)  # a value residual may give padding some value
        ahead_BHNP = torch.addcmul(state.memory_BHNP, first_BHN[..., None], state.input_BHP[:, :, None])
        write_BTH = sigmoid(mix_BTH) * delta_BTH + late_BTH
        inputs = (q_BTHN, k_BTHN, v_BTHP * write_BTH[..., None], gate_BTH[..., None])
        q, k, v, gate = (x.transpose(1, 2) for x in inputs)
        o_BHTP, memory_BHNP = gla.scan(
            q, k, v, gate, ahead_BHNP, scale=1.0, consume_state=gradients_off(), checked=False
        )
        o_BHTP = tuned.read(o_BHTP, q)
        skip_BTH = self.D - (q_BTHN * k_BTHN).sum(-1) * late_BTH
        y_BTHP = torch.addcmul(o_BHTP.transpose(1, 2), v_BTHP, skip_BTH[..., None])
        y_BTD = self.o_proj((y_BTHP.flatten(2) * batch_invariant(F.silu, z_BTI)).to(x_g.dtype))
        key_BHN = _last(k_BTHN, state.key_BHN, reset_BT, pad_BT)
        input_BHP = _last(v_BTHP, state.input_BHP, reset_BT, pad_BT)
        return y_BTD, Mamba3State(memory_BHNP, angle_BTHF[:, -1].clone(), key_BHN, input_BHP), {}


def _angles(turn_BTHF: Tensor, start_BHF: Tensor, reset_BT: Mask) -> Tensor:
    """Φ after each token, from 0 at the start of a document; summed in float64, because in float32 the sum over a long
    text would leave no digits for the angle."""
    steps = torch.cat([start_BHF[:, None], turn_BTHF], 1).double() % math.tau
    sum_BSHF = steps.cumsum(1)
    angle_BTHF = sum_BSHF[:, 1:]
    if reset_BT is not None:
        begun_BT = torch.where(reset_BT, torch.arange(reset_BT.shape[1], device=reset_BT.device), -1)
        begun_BT11 = begun_BT.cummax(1).values[:, :, None, None]
        before = sum_BSHF.gather(1, begun_BT11.clamp_min(0).expand_as(angle_BTHF))
        angle_BTHF = angle_BTHF - before.masked_fill(begun_BT11 < 0, 0)
    return (angle_BTHF % math.tau).to(start_BHF.dtype)


def _turned(x_BTHN: Tensor, angle_BTHF: Tensor) -> Tensor:
    """Each of the first F pairs of neighbouring channels, rotated by its angle; the rest unchanged."""
    turning, rest = x_BTHN.tensor_split([2 * angle_BTHF.shape[-1]], -1)
    (a, b), cos, sin = turning.unflatten(-1, (-1, 2)).unbind(-1), angle_BTHF.cos(), angle_BTHF.sin()
    return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2), rest], -1)


def _next(x_BTH: Tensor, pad_BT: Mask) -> Tensor:
    """x at the first token, and at the next token after each [B,T+1,H]; 0 where there is none."""
    x_BSH, T = F.pad(x_BTH, (0, 0, 0, 1)), x_BTH.shape[1]
    if pad_BT is None:
        return x_BSH
    at_BS = F.pad(torch.where(pad_BT, T, torch.arange(T, device=pad_BT.device)), (0, 1), value=T)
    at_BS = at_BS.flip(1).cummin(1).values.flip(1)
    return x_BSH.gather(1, at_BS[:, :, None].expand_as(x_BSH))


def _last(x_BTHK: Tensor, before_BHK: Tensor, reset_BT: Mask, pad_BT: Mask) -> Tensor:
    """x at the document's last token [B,H,K]: `before` where all is padding, 0 where another document begins after
    it."""
    if pad_BT is None:
        return x_BTHK[:, -1].clone()
    row_B, count_T = (torch.arange(size, device=pad_BT.device) for size in pad_BT.shape)
    last_B = torch.where(pad_BT, 0, count_T + 1).amax(1)
    last_BHK = torch.cat([before_BHK[:, None], x_BTHK], 1)[row_B, last_B]
    if reset_BT is None:
        return last_BHK
    return last_BHK.masked_fill((torch.where(reset_BT, count_T + 1, 0).amax(1) > last_B)[:, None, None], 0)
