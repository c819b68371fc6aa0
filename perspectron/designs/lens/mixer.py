"""Lens-gated attention (docs/designs/lens.md#three-lenses).

Shapes: B batch, T time, D model width, H heads, K head width, L lenses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perspectron.designs.lens import op as lens
from perspectron.model import cache
from perspectron.model.cache import Cache
from perspectron.model.masks import Inputs, Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import ValueFunction, projected, split_inputs
from perspectron.ops import attention, rope
from perspectron.ops.fused import batch_invariant
from perspectron.util.config import MixerConfig, divides, require
from perspectron.util.terms import Term

GATES = (2.773, 1.099, 0.0)  # softmax: 0.80 standard, 0.15 reciprocal, 0.05 discoverability
QUERY_NOISE = 0.02


@dataclass(frozen=True)
class LensConfig(MixerConfig):
    """The options of lens-gated attention.

    heads: H, must divide the model width. reciprocity, discoverability: the lenses besides the standard one. gates:
    learn the mixture of each head; otherwise it stays at its initial value. disc_scale: scale discoverability by K^-½
    like the other two. output_gate: a sigmoid gate on the output of attention, which is also the control. rope_base: of
    rotary positions, applied to queries and keys of every lens, and to the learned query as if it were at the reading
    token; None for no rotation."""

    kind = "lens"
    heads: int
    reciprocity: bool = True
    discoverability: bool = True
    gates: bool = True
    disc_scale: bool = False
    output_gate: bool = False
    rope_base: float | None = None

    def __post_init__(self) -> None:
        require(self.heads >= 1, "heads", self.heads, "≥ 1")
        require(self.rope_base is None or self.rope_base > 1, "rope_base", self.rope_base, "> 1")

    @property
    def enabled(self) -> tuple[bool, bool, bool]:
        return True, self.reciprocity, self.discoverability


class Lens(Mixer):
    """softmax(w₀ q_i·k_j/√K + w₁ q_j·k_i/√K + w₂ k_j·u) v over all earlier tokens j; w sums to 1."""

    small = LensConfig(heads=2)
    about = (
        "attention with three scores: query to key, key to query, and a bias for keys that want to be found"
    )
    source = "docs/designs/lens.md#three-lenses"
    inputs = ("q", "k", "v")
    drops = True

    def __init__(self, d_model: int, norm_eps: float, config: LensConfig) -> None:
        super().__init__()
        divides(config.heads, d_model, even=config.rope_base is not None)
        self.config = config
        self.value_channels = d_model
        mixes = config.gates and sum(config.enabled) > 1
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.o_proj = nn.Linear(d_model, d_model)
        self.no_decay = [name for name, on in (("u_HK", config.discoverability), ("gates_HL", mixes)) if on]
        if config.discoverability:
            self.u_HK = nn.Parameter(torch.empty(config.heads, d_model // config.heads))
        if mixes:
            self.gates_HL = nn.Parameter(torch.empty(config.heads, sum(config.enabled)))
        if config.output_gate:
            self.gate_proj = nn.Linear(d_model, d_model)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set u small and the gates to 0.80 : 0.15 : 0.05 of the lenses there are."""
        if self.config.discoverability:
            self.u_HK.normal_(0, QUERY_NOISE, generator=generator)
        if hasattr(self, "gates_HL"):
            self.gates_HL.copy_(self._start(self.gates_HL))

    def _start(self, like: Tensor) -> Tensor:
        values = [gate for gate, on in zip(GATES, self.config.enabled, strict=True) if on]
        return torch.stack([like.new_full((), gate) for gate in values]).expand(self.config.heads, -1)

    def weights(self) -> Tensor:
        """The mixture of the lenses [H,3], at least in float32; 0 for a lens that is off."""
        gates_HL = self.gates_HL if hasattr(self, "gates_HL") else self._start(self.qkv_proj.bias)
        mix_HL = gates_HL.to(torch.promote_types(gates_HL.dtype, torch.float32)).softmax(-1)
        columns = iter(mix_HL.unbind(1))
        zero_H = torch.zeros_like(mix_HL[:, 0])
        return torch.stack([next(columns) if on else zero_H for on in self.config.enabled], 1)

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> Cache:
        """The empty cache: keys, queries where they are needed later (reciprocity), and values."""
        H = self.config.heads
        width = self.o_proj.in_features // H
        keys = 2 * width if self.config.reciprocity else width
        return cache.empty(batch_size, H, keys, width, device, dtype, capacity)

    @masked
    def forward(
        self,
        x: Inputs,
        state: Cache,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        value_residual: ValueFunction | None = None,
    ) -> tuple[Tensor, Cache, dict[str, Term]]:
        inputs = split_inputs(x, 3)
        B, T, D = inputs[0].shape
        parts = projected(self.qkv_proj, inputs, [D] * 3).view(B, T, 3, D).unbind(2)
        if value_residual is not None:
            parts = (*parts[:2], value_residual(parts[2], inputs[2]))
        q, k, v = (part.view(B, T, self.config.heads, -1).transpose(1, 2) for part in parts)
        scale = q.shape[-1] ** -0.5
        u_HK = self.u_HK if self.config.discoverability else None
        q, k = lens.features(
            q, k, u_HK, self.weights(), reciprocity=self.config.reciprocity, disc_scale=self.config.disc_scale
        )
        at = attention.places(state.length_B, T, reset_BT, pad_BT)
        if self.config.rope_base is not None:
            turn = rope.angles(at.position_BT, v.shape[3], self.config.rope_base)
            q, k = (self._turned(x, turn) for x in (q, k))
        o, state = cache.attend(
            q,
            k,
            v,
            state,
            at,
            scale=scale,
            consume_state=consume_state,
            drop=self.dropout if self.training else None,
        )
        o_BTD = o.transpose(1, 2).reshape(B, T, D)
        if self.config.output_gate:
            o_BTD = o_BTD * batch_invariant(torch.sigmoid, self.gate_proj(inputs[0]))
        return self.o_proj(o_BTD), state, {}

    def _turned(self, x_BHTF: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Features, cut into parts as wide as a head, rotated by position."""
        K = self.o_proj.in_features // self.config.heads
        return torch.cat([rope.turned(part, turn) for part in x_BHTF.split(K, -1)], -1)
