"""Perspective Decay Recurrence (docs/designs/perspective.md#the-recurrence).

Shapes: B batch, T time, D model width, R state rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from perspectron.designs.perspective import eligibility
from perspectron.model.masks import Inputs, Mask, filled, masked
from perspectron.model.mixer import Mixer
from perspectron.model.parts import split_inputs
from perspectron.model.state import register
from perspectron.model.tuned import UNTUNED, Tuned
from perspectron.ops import pdr
from perspectron.ops.attention import Places, places
from perspectron.ops.dispatch import captured, full_precision, gradients_off
from perspectron.ops.fused import RMSNorm, batch_invariant
from perspectron.util.config import MixerConfig, at_least, positive, require
from perspectron.util.terms import Term

GATE_BIAS = 2.944  # logit(0.95), docs/designs/perspective.md#gate
IDENTITY_NOISE = 0.01


@dataclass(frozen=True)
class PDRConfig(MixerConfig):
    """The options of PDR.

    rank: R, columns of the state. scale: of the readout; None is R^-½. out_norm: RMSNorm before W_o. renorm_every:
    shrink a state with a norm above √(D·R) at each multiple of this many tokens; 0 is never. gate_rank: of W_p; 0 is
    full. fixed_decay: leave out W_p, so that γ = σ(b_p) is the same for every token."""

    kind = "pdr"
    rank: int
    scale: float | None = None
    out_norm: bool = False
    renorm_every: int = 0
    gate_rank: int = 0
    fixed_decay: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "rank")
        at_least(0, self, "renorm_every", "gate_rank")
        positive(self, "scale")
        require(
            not self.fixed_decay or self.gate_rank == 0, "gate_rank", self.gate_rank, "0 with fixed_decay"
        )


@register
@dataclass(frozen=True)
class PDRState:
    """The state of PDR. memory: S [B,D,R], float32 or float64. length: tokens of the document read so far [B],
    int64."""

    memory_BDR: Tensor
    length_B: Tensor


@dataclass(frozen=True)
class Adapted:
    """Part of a state whose gates each row adapts: p = W_p x + B A x + b_p (docs/designs/perspective.md#adaptation).

    down: A [B,r,D], up: B [B,D,r]. trace: how the memory depends on B [B,r,D,R]; where none is kept, [B,0,D,R]. With
    traces, B gets a gradient through all earlier tokens, too, while the graph covers only the present ones."""

    down_BrD: Tensor
    up_BDr: Tensor
    trace_BrDR: Tensor

    @property
    def traced(self) -> bool:
        return self.trace_BrDR.shape[1] > 0

    def gates(self, p_BTD: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the gates with the adapter's part; and u = A x."""
        u_BTr = x_BTD @ self.down_BrD.mT.to(x_BTD.dtype)
        return p_BTD + u_BTr @ self.up_BDr.mT.to(u_BTr.dtype), u_BTr

    def learned(self, memory_BDR: Tensor) -> Tensor:
        """The memory before these tokens, whose gradient in B is that of the traces, if there are any."""
        if not (self.traced and torch.is_grad_enabled()):
            return memory_BDR
        zeros_BDr = (self.up_BDr - self.up_BDr.detach()).to(memory_BDR.dtype)
        with full_precision(memory_BDR):
            return memory_BDR + torch.einsum("brdn,bdr->bdn", self.trace_BrDR, zeros_BDr)


@register
@dataclass(frozen=True)
class AdaptedState(Adapted, PDRState):
    """The state of PDR under an adapter."""


class Constant(nn.Module):
    """The bias b at every token, independent of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.bias.expand(*x_BTD.shape[:-1], -1)


class PDR(Mixer):
    """p = W_p x + b_p, γ = σ(p); S ← diag(γ) S + (W_v x)(W_k x)ᵀ; y = W_o (scale · S W_q x)."""

    small = PDRConfig(rank=4)
    about = "Perspective Decay Recurrence: a matrix memory with a decay for each row"
    source = "docs/designs/perspective.md#the-recurrence"
    kept_at_reset = ("down_BrD", "up_BDr")  # an adapter's
    inputs = ("q", "k", "v", "g")
    exact_cells = 8

    def __init__(self, d_model: int, norm_eps: float, config: PDRConfig) -> None:
        super().__init__()
        self.config = config
        rank = config.gate_rank
        self.p_down = nn.Linear(d_model, rank, bias=False) if rank else nn.Identity()
        self.p_proj = Constant(d_model) if config.fixed_decay else nn.Linear(rank or d_model, d_model)
        self.q_proj = nn.Linear(d_model, config.rank, bias=False)
        self.k_proj = nn.Linear(d_model, config.rank, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.norm = RMSNorm(d_model, norm_eps) if config.out_norm else nn.Identity()

    def init_weights(self, generator: torch.Generator) -> None:
        """Set a full W_p = I + (0.01/√D) N(0,1) and σ(b_p) = 0.95; the rest is the model's default."""
        if isinstance(self.p_proj, nn.Linear) and self.config.gate_rank == 0:
            D = self.p_proj.in_features
            self.p_proj.weight.normal_(0, IDENTITY_NOISE * D**-0.5, generator=generator).diagonal().add_(1)
        self.p_proj.bias.fill_(GATE_BIAS)

    def require_onnx(self, name: str) -> None:
        every = self.config.renorm_every
        require(every == 0, f"{name}.renorm_every", every, "0 to be exported to ONNX")

    def decay_gate(self) -> nn.Module:
        return self.p_proj

    def decays(self) -> int:
        return self.v_proj.out_features

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> PDRState:
        """The empty state, at least float32; its size does not depend on `capacity`."""
        D, R = self.v_proj.out_features, self.config.rank
        memory = torch.zeros(batch_size, D, R, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return PDRState(memory, torch.zeros(batch_size, dtype=torch.int64, device=device))

    @masked
    def forward(
        self,
        x: Inputs,
        state: PDRState,
        reset_BT: Mask,
        pad_BT: Mask,
        consume_state: bool,
        tuned: Tuned = UNTUNED,
    ) -> tuple[Tensor, PDRState, dict[str, Term]]:
        x_q, x_k, x_v, x_p = split_inputs(x, len(self.inputs))
        read_BTD = self.p_down(x_p)
        p_BTD, v_BTD = self.p_proj(read_BTD), self.v_proj(x_v)
        if isinstance(state, Adapted):
            p_BTD, u_BTr = state.gates(p_BTD, read_BTD)
        p_BTD = tuned.decays(p_BTD)
        gamma_BTD = batch_invariant(torch.sigmoid, p_BTD.to(torch.promote_types(p_BTD.dtype, torch.float32)))
        gamma_BTD = filled(gamma_BTD, pad_BT, 1)  # v is 0 there: it has no bias
        gamma_BTD = filled(gamma_BTD, reset_BT, 0)
        at = places(state.length_B, x_q.shape[1], reset_BT, pad_BT)
        inputs = [self.q_proj(x_q), self.k_proj(x_k), v_BTD, gamma_BTD]
        memory_BDR, more = state.memory_BDR, dict[str, Tensor]()
        if isinstance(state, AdaptedState) and state.traced:  # before the memory is written into
            _, k, v, gamma = inputs
            more["trace_BrDR"] = eligibility.carried(k, v, gamma, u_BTr, memory_BDR, state.trace_BrDR)
            memory_BDR = state.learned(memory_BDR)
        o_BTD, memory_BDR = self._scan(inputs, memory_BDR, at, consume_state)
        scale = self.config.rank**-0.5 if self.config.scale is None else self.config.scale
        o_BTD = tuned.read(o_BTD, inputs[0], scale)
        y_BTD = self.o_proj(self.norm(o_BTD.to(x_q.dtype)))
        return y_BTD, replace(state, memory_BDR=memory_BDR, length_B=at.length_B, **more), {}

    def _scan(
        self, inputs: list[Tensor], memory: Tensor, at: Places, consume_state: bool
    ) -> tuple[Tensor, Tensor]:
        """The scan, cut where some row of the batch is due for renormalisation."""
        scan: Callable[..., tuple[Tensor, Tensor]] = partial(pdr.scan, scale=self.config.scale, checked=False)
        if self.config.renorm_every == 0:
            return scan(*inputs, memory, consume_state=consume_state)
        due_BT = at.valid_BT & ((at.position_BT + 1) % self.config.renorm_every == 0)
        if captured():  # one token: which rows are due is not looked up
            o, memory = scan(*inputs, memory, consume_state=consume_state)
            return o, torch.where(due_BT[:, :, None], pdr.renormalise(memory), memory)
        outputs, start, T = [inputs[2][:, :0].to(memory.dtype)], 0, due_BT.shape[1]
        due = [] if due_BT.is_meta else (due_BT.any(0).nonzero()[:, 0] + 1).tolist()
        for stop in [*due, T]:
            o, memory = scan(*(x[:, start:stop] for x in inputs), memory, consume_state=consume_state)
            consume_state = gradients_off()  # after the first piece the memory is our own
            if stop > start:
                memory = torch.where(due_BT[:, stop - 1, None, None], pdr.renormalise(memory), memory)
            outputs.append(o)
            start = stop
        return torch.cat(outputs, 1), memory
