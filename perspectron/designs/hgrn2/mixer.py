"""HGRN2: a matrix memory for each head that writes as much as it forgets, with lower bounds on the forget gates that
grow with depth (Qin et al. 2024, arXiv 2404.07904).

Shapes: B batch, T time, D model width, N layers, H heads, K = D/H key and value width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import Shared, ValueFunction, split_inputs
from perspectron.model.state import register
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import gla
from perspectron.ops.fused import RMSNorm, batch_invariant
from perspectron.util.config import MixerConfig, at_least, divides, require
from perspectron.util.terms import Term

BOUNDS = "hgrn2.bounds"  # key in `shared` of the lower bounds of all layers' gates [N,D], set by layer 0


@dataclass(frozen=True)
class HGRN2Config(MixerConfig):
    """The options of HGRN2.

    heads: H, must divide the model width. layer: index of this one among the HGRN2 layers of the model. layers: N, how
    many there are; layer 0 owns the bounds of all."""

    kind = "hgrn2"
    heads: int
    layer: int = 0
    layers: int = 1

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "layers")
        require(0 <= self.layer < self.layers, "layer", self.layer, f"in [0, layers) = [0, {self.layers})")


@register
@dataclass(frozen=True)
class HGRN2State:
    """The state of HGRN2. memory: S [B,H,K,K], float32 or float64."""

    memory_BHKK: Tensor


class HGRN2(Mixer):
    """α = l + (1 − l) σ(W_f x); S ← diag(α) S + (1 − α)(W_i x)ᵀ; y = W_o norm(Sᵀ swish(W_q x) / √K).

    l [D] is the layer's bound: the sum over the layers below it of softmax(Γ), which is taken over all layers. It is 0
    in layer 0, and in a layer that is run by itself."""

    small = HGRN2Config(heads=2)
    about = "HGRN2: a matrix memory that writes as much as it forgets, with lower bounds by layer"
    source = "arXiv 2404.07904"
    state_kind = HGRN2State
    framed = HGRN2Config(heads=4)
    hidden = 448

    takes_shared = True
    inputs = ("q", "k", "v")  # keys are computed from the same projection as decays
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: HGRN2Config) -> None:
        super().__init__()
        divides(config.heads, d_model)
        self.config = config
        self.value_channels = d_model
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.f_proj = nn.Linear(d_model, d_model, bias=False)
        self.i_proj = nn.Linear(d_model, d_model, bias=False)
        self.norm = RMSNorm(d_model, norm_eps)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        if config.layer == 0 and config.layers > 1:
            self.gamma_ND = nn.Parameter(torch.empty(config.layers, d_model))
            self.no_decay = ("gamma_ND",)

    def init_weights(self, generator: torch.Generator) -> None:
        """Start with bounds that rise evenly, by 1/N per layer."""
        if hasattr(self, "gamma_ND"):
            self.gamma_ND.zero_()

    def decays(self) -> int:
        return self.f_proj.out_features

    def state_shapes(self) -> list[tuple[int, ...]]:
        H, D = self.config.heads, self.o_proj.in_features
        return [(H, D // H, D // H)]

    @masked
    def forward(
        self,
        x: Inputs,
        state: HGRN2State,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        shared: Shared | None = None,
        value_residual: ValueFunction | None = None,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, HGRN2State, dict[str, Term]]:
        x_q, x_k, x_v = split_inputs(x, len(self.inputs))
        f_BTD = tuned.decays(self.f_proj(x_k))
        f_BTD = f_BTD.to(torch.promote_types(f_BTD.dtype, torch.float32))
        k_BTD = batch_invariant(torch.sigmoid, -f_BTD)
        if shared is not None and self.config.layers > 1:
            if self.config.layer == 0:
                share_ND = self.gamma_ND.to(f_BTD.dtype).softmax(0)
                shared[BOUNDS] = share_ND.cumsum(0) - share_ND
            else:
                require(
                    shared.get(BOUNDS) is not None,
                    "layer",
                    self.config.layer,
                    "above layer 0 in the same model",
                )
                k_BTD = k_BTD * (1 - shared[BOUNDS][self.config.layer])
        k_BTD = filled(k_BTD, pad_BT, 0)
        gate_BTD = filled(1 - k_BTD, reset_BT, 0)
        v_BTD = self.i_proj(x_v) if value_residual is None else value_residual(self.i_proj(x_v), x_v)
        inputs = (batch_invariant(F.silu, self.q_proj(x_q)), k_BTD, v_BTD, gate_BTD)
        q, k, v, gate = (x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for x in inputs)
        o_BHTK, memory_BHKK = gla.scan(
            q, k, v, gate, state.memory_BHKK, consume_state=consume_state, checked=False
        )
        o_BHTK = tuned.read(o_BHTK, q, q.shape[-1] ** -0.5)
        o_BTD = o_BHTK.transpose(1, 2).flatten(2).to(x_q.dtype)
        return self.o_proj(self.norm(o_BTD)), HGRN2State(memory_BHKK), {}
