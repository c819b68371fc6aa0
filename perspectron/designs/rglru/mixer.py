"""The real-gated linear recurrent unit: each channel decays by a gate, and its input is scaled so that the channel
keeps its size, behind a short convolution and beside a gated branch (De et al. 2024, arXiv 2402.19427; RecurrentGemma;
docs/designs/baselines.md#rg-lru).

Shapes: B batch, T time, D model width, I inner width, H blocks of the gates, K = I/H width of a block, W taps of the
convolution, Z = W − 1 inputs it remembers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ShortConv, sigmoid, softplus
from perspectron.model.state import register
from perspectron.ops import pdr
from perspectron.ops.fused import batch_invariant, gelu
from perspectron.util.config import MixerConfig, at_least, require
from perspectron.util.terms import Term

DECAY = 8.0
RADIUS = (0.9, 0.999)  # between which decays start
LEAST = 1e-30


@dataclass(frozen=True)
class RGLRUConfig(MixerConfig):
    """The options of RG-LRU.

    heads: H, must divide the inner width. inner: I; None is the model's. conv: W, tokens that the short convolution
    sees."""

    kind = "rglru"
    heads: int
    inner: int | None = None
    conv: int = 4

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "conv", "inner")

    def width(self, d_model: int) -> int:
        """I."""
        return self.inner or d_model


@register
@dataclass(frozen=True)
class RGLRUState:
    """The state of RG-LRU. hidden: h [B,I]; window: the last W − 1 inputs of the convolution [B,Z,I], zeros before the
    document's first; begun: 1 where the document has a token, else 0 [B,1]. All float32 or float64."""

    hidden_BI: Tensor
    window_BZI: Tensor
    begun_B1: Tensor


class RGLRU(Mixer):
    """x = conv(W_x u); i, r = σ(gates of x's block); a = exp(−8 r softplus(decay)); h ← a h + √(1 − a²) i x;
    y = W_o (h ⊙ gelu(W_y u)). A document's first token is taken in whole: it has 1 in the place of √(1 − a²)."""

    small = RGLRUConfig(heads=2)
    about = "RG-LRU: a gated average in each channel that keeps its size, behind a short convolution"
    source = "docs/designs/baselines.md#rg-lru"
    state_kind = RGLRUState

    def __init__(self, d_model: int, norm_eps: float, config: RGLRUConfig) -> None:
        super().__init__()
        inner, H = config.width(d_model), config.heads
        require(inner % H == 0, "heads", H, f"a divisor of the inner width = {inner}")
        self.config = config
        self.x_proj = nn.Linear(d_model, inner)
        self.y_proj = nn.Linear(d_model, inner)
        self.conv1d = ShortConv(inner, config.conv, swish=False)
        self.gates = nn.ModuleList(nn.Linear(inner // H, 2 * inner // H) for _ in range(H))
        self.decay_I = nn.Parameter(torch.empty(inner))
        self.o_proj = nn.Linear(inner, d_model)

    def init_weights(self, generator: torch.Generator) -> None:
        """Spread the decays of open gates between two radii, as the authors do."""
        self.conv1d.draw(generator)
        low, high = (radius**2 for radius in RADIUS)
        square = self.decay_I.uniform_(low, high, generator=generator).double()
        self.decay_I.copy_(torch.log(torch.expm1(-0.5 * square.log())))

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(len(self.decay_I),), self.conv1d.window, (1,)]

    @masked
    def forward(
        self, x_BTD: Tensor, state: RGLRUState, reset_BT: Mask, pad_BT: Mask, consume_state: bool
    ) -> tuple[Tensor, RGLRUState, dict[str, Term]]:
        y_BTI = gelu(self.y_proj(x_BTD))
        u_BTI, window_BZI = self.conv1d(self.x_proj(x_BTD), state.window_BZI, reset_BT, pad_BT)
        full, blocks = u_BTI.dtype, u_BTI.to(x_BTD.dtype).chunk(self.config.heads, -1)
        gates = [gate(block).chunk(2, -1) for gate, block in zip(self.gates, blocks, strict=True)]
        i_BTI, r_BTI = (sigmoid(torch.cat(parts, -1).to(full)) for parts in zip(*gates, strict=True))
        log_BTI = -DECAY * r_BTI * softplus(self.decay_I.to(full))
        a_BTI = batch_invariant(torch.exp, log_BTI)
        # 1 − a² = 2t / (1 + t) of t = tanh(−log a), which does not cancel where a is close to 1
        t_BTI = batch_invariant(torch.tanh, -log_BTI)
        size_BTI = torch.sqrt((2 * t_BTI / (1 + t_BTI)).clamp_min(LEAST))
        first_BT, begun_B1 = _first(state.begun_B1, x_BTD.shape[1], reset_BT, pad_BT)
        size_BTI = first_BT[:, :, None] + (1 - first_BT[:, :, None]) * size_BTI
        v_BTI = filled(i_BTI * u_BTI * size_BTI, pad_BT, 0)
        a_BTI = filled(filled(a_BTI, pad_BT, 1), reset_BT, 0)
        one_BT1 = torch.ones_like(v_BTI[..., :1])
        h_BTI, hidden_BI1 = pdr.scan(
            one_BT1, one_BT1, v_BTI, a_BTI, state.hidden_BI[..., None],
            scale=1.0, consume_state=consume_state, checked=False,
        )  # fmt: skip
        out_BTD = self.o_proj((h_BTI * y_BTI).to(x_BTD.dtype))
        return out_BTD, RGLRUState(hidden_BI1[..., 0], window_BZI, begun_B1), {}


def _first(begun_B1: Tensor, T: int, reset_BT: Mask, pad_BT: Mask) -> tuple[Tensor, Tensor]:
    """1 at a document's first token and 0 elsewhere [B,T], and whether the last document has a token [B,1]."""
    if reset_BT is None and pad_BT is None:
        first_B1 = 1 - begun_B1
        first_BT = first_B1 if T == 1 else F.pad(first_B1, (0, T - 1))
        return first_BT, torch.ones_like(begun_B1)
    shape = (len(begun_B1), T)
    there_BT = filled(torch.ones(shape, dtype=torch.int64, device=begun_B1.device), pad_BT, 0)
    before_BT = there_BT.cumsum(1) - there_BT
    # tokens before the document's first, less one if it began before these
    start_BT = -begun_B1.long().expand(shape)
    if reset_BT is not None:
        start_BT = torch.where(reset_BT, before_BT, start_BT).cummax(1).values
    first_BT = (there_BT > 0) & (before_BT == start_BT)
    last_B1 = (before_BT + there_BT - start_BT)[:, -1:]
    return first_BT.to(begun_B1.dtype), (last_B1 > 0).to(begun_B1.dtype)
