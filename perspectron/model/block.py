"""One layer of a model: a mixer over time, a feed-forward network over channels, and the residual connections.

Shapes: B batch, T time, D model width, N earlier tokens that mixer and network read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from perspectron.experts.router import Routed, Views
from perspectron.model.config import (
    BlockConfig,
    Law5Config,
    NoResidualConfig,
    ParallelConfig,
    RouteGatedConfig,
    SequentialConfig,
    Shift,
)
from perspectron.model.ffn import FFNS, TiedConfig
from perspectron.model.mixer import Mixer, build
from perspectron.model.parts import MIX_EXPONENTS, Dropout, InputConv, Shared, TokenShift, ValueResidual
from perspectron.model.state import register
from perspectron.model.tuned import Tuned, around
from perspectron.ops.dispatch import check_consumed
from perspectron.ops.fused import RMSNorm
from perspectron.util.terms import Term, merged

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "layer": nn.LayerNorm}
ROUTE_START = 2.2  # sigmoid: 0.9
ROWS = 8  # tokens of a call are padded to a multiple of this for products with matrices that are not packed


@register
@dataclass(frozen=True)
class NoState:
    """Empty state of a block without a mixer."""


@register
@dataclass(frozen=True)
class ShiftedState:
    """State of a block that reads the token before. mixer: state of its mixer. last: what mixer and network read of the
    last token, or of the last few, newest first [B,N,D]; zeros before the document's first; float32 or float64."""

    mixer: Any
    last_BND: Tensor


@register
@dataclass(frozen=True)
class BesideState:
    """State of a block with two mixers side by side. mixer, beside: the state of each."""

    mixer: Any
    beside: Any


def of_mixer(state: Any) -> Any:
    """The mixer's own part of a block's state."""
    return of_mixer(state.mixer) if isinstance(state, ShiftedState | BesideState | Tuned) else state


def with_mixer(state: Any, own: Any) -> Any:
    """A block's state with `own` as the mixer's own part."""
    if isinstance(state, ShiftedState | BesideState | Tuned):
        return replace(state, mixer=with_mixer(state.mixer, own))
    return own


def states_of(state: Any) -> tuple[Any, ...]:
    """The state of each mixer in a block's state, in the order of `BlockConfig.mixers`."""
    return (state.mixer, state.beside) if isinstance(state, BesideState) else (state,)


class RouteGate(nn.Module):
    """A gate g = σ(raw + bias), one number; the bias follows a schedule (docs/designs/lens.md#route-gate)."""

    bias_1: Tensor

    def __init__(self, config: RouteGatedConfig) -> None:
        super().__init__()
        self.config = config
        self.raw_1 = nn.Parameter(torch.empty(1))
        self.register_buffer("bias_1", torch.empty(1))

    def init_weights(self, generator: torch.Generator) -> None:
        """Start at g = 0.9."""
        self.raw_1.fill_(ROUTE_START)
        self.bias_1.zero_()

    def set_step(self, step: int) -> None:
        """Set the bias for the update that follows `step` others, unless the gate is frozen."""
        if self.raw_1.requires_grad:
            self.bias_1.fill_(-self.config.anneal * max(0, step - self.config.anneal_after))

    def forward(self) -> Tensor:
        return torch.sigmoid(self.raw_1 + self.bias_1)


class Block(nn.Module):
    """One layer: h adds the mixer's output to the input, y adds the network's. `config.residual` says how.

    shift: both also read the token before, or only these of their inputs do. input_conv, input_swish: instead, the
    three before (`InputConv`). `first_values`, which the model sets: the value residual of the mixer."""

    def __init__(
        self,
        d_model: int,
        norm: str,
        norm_eps: float,
        config: BlockConfig,
        dropout: float = 0.0,
        *,
        shift: Shift = False,
        input_conv: Shift = False,
        input_swish: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.first_values: ValueResidual | None = None
        self.mixer_shift: TokenShift | InputConv | None = None
        self.ffn_shift: TokenShift | InputConv | None = None
        read = shift if input_conv is False else input_conv
        made = TokenShift if input_conv is False else partial(InputConv, swish=input_swish)
        bare = isinstance(config.residual, NoResidualConfig)
        self.around = config.residual if isinstance(config.residual, SequentialConfig) else SequentialConfig()
        if self.around.norm == "sandwich":
            for part in ("mixer", "ffn"):
                if getattr(config, part) is not None:
                    self.add_module(f"{part}_post_norm", NORMS[norm](d_model, norm_eps))
        if config.mixer is not None:
            self.mixer_norm = nn.Identity() if bare else NORMS[norm](d_model, norm_eps)
            self.mixer = build(d_model, norm_eps, config.mixer)
            if config.beside is not None:
                self.beside = build(d_model, norm_eps, config.beside)
            if exponents := self._exponents(read):
                self.mixer_shift = made(config.mixer.d_token or d_model, exponents)
        if config.ffn is not None:
            self.ffn_norm = NORMS[norm](d_model, norm_eps)
            if read is True or (read is not False and "network" in read):
                self.ffn_shift = made(d_model, [MIX_EXPONENTS["network"]])
            if not isinstance(config.ffn, TiedConfig):
                self.ffn = FFNS[config.ffn.kind](d_model, config.ffn)
        if isinstance(config.residual, RouteGatedConfig):
            self.route = RouteGate(config.residual)
        self.mixer_dropout, self.ffn_dropout = (Dropout(dropout) if dropout else None for _ in range(2))
        for mixer in self.mixers:
            if dropout and mixer.drops:
                mixer.dropout = Dropout(dropout)

    def _exponents(self, shift: Shift) -> Sequence[float | None]:
        """Exponents of the initial mixes of the mixer's inputs; none where it reads no token before."""
        if shift is False or self.mixer.own_token_shift:
            return ()
        if shift is True:
            return self.mixer.mix_exponents
        if "x" in shift:
            return (MIX_EXPONENTS["x"],)
        found = [MIX_EXPONENTS[name] if name in shift else None for name in self.mixer.inputs]
        return found if any(found) else ()

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's mixers, in order: none, one or two."""
        names = ("mixer", "beside")
        return tuple(
            cast(Mixer, getattr(self, name)) for name in names if getattr(self.config, name) is not None
        )

    @property
    def inputs(self) -> set[str]:
        """Names of the inputs that can read the token before."""
        found = {name for mixer in self.mixers if not mixer.own_token_shift for name in ("x", *mixer.inputs)}
        return found | ({"network"} if self.config.ffn is not None else set())

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The layer's own feed-forward network, if it has one; a tied one is another block's."""
        return (self.ffn,) if hasattr(self, "ffn") else ()

    @property
    def exact_cells(self) -> int:
        """A common multiple of the `exact_cells` of its mixers, its network and its matrices (`ROWS` unless all are
        packed); 0 if a mixer or the network promises nothing of the kind."""
        promised = [int(getattr(part, "exact_cells", 0)) for part in (*self.mixers, *self.networks)]
        matrices = ROWS if any(x.ndim > 1 for x in self.parameters()) else 1
        return math.lcm(matrices, *promised)

    def init_state(
        self,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int = 0,
        tuned: Sequence[str] = (),
    ) -> "DataclassInstance":
        """The state before any token. tuned: kinds of trained parts that matrix memories get, as zeros."""
        state: DataclassInstance = NoState()
        if self.config.mixer is not None:
            state, *others = (
                around(own, N, tuned) if tuned and (N := mixer.decays()) else own
                for mixer in self.mixers
                for own in [mixer.init_state(batch_size, device, dtype, capacity)]
            )
            state = BesideState(state, *others) if others else state
        shifts = [part for part in (self.mixer_shift, self.ffn_shift) if part is not None]
        if not shifts:
            return state
        N, D, dtype = (
            sum(part.rows for part in shifts),
            shifts[0].width,
            torch.promote_types(dtype, torch.float32),
        )
        return ShiftedState(state, torch.zeros(batch_size, N, D, device=device, dtype=dtype))

    def handed(self, shared: Shared | None, mixer: Mixer) -> dict[str, Any]:
        """A mixer's arguments besides tokens and state, which come from the blocks below."""
        handed: dict[str, Any] = {"shared": shared} if mixer.takes_shared else {}
        if self.first_values is not None:
            handed["value_residual"] = partial(
                self.first_values, shared=Shared() if shared is None else shared
            )
        return handed

    def forward(
        self,
        x_BTD: Tensor,
        state: object,
        ffn: nn.Module | None,
        reset_BT: Tensor | None,
        pad_BT: Tensor | None,
        consume_state: bool = False,
        shared: Shared | None = None,
        views: Views | None = None,
    ) -> tuple[Tensor, object, dict[str, Term]]:
        """shared: what mixers pass to those above them, for these tokens only. views: from which a routed network
        chooses experts."""
        check_consumed(consume_state)
        residual = self.config.residual
        law5, first = isinstance(residual, Law5Config), self.around.norm != "post"
        own, before_BND = (state.mixer, state.last_BND) if isinstance(state, ShiftedState) else (state, None)
        lasts: list[Tensor] = []
        if self.config.mixer is None:
            mixed_BTD, aux = torch.zeros_like(x_BTD), dict[str, Term]()
        else:
            masks = (reset_BT, pad_BT)
            mixed_BTD, own, lasts, aux = self.mixed(x_BTD, state, *masks, consume_state, shared)
            if self.mixer_dropout is not None:
                mixed_BTD = self.mixer_dropout(mixed_BTD)
            mixed_BTD = self._added(mixed_BTD, "mixer")
        bare = isinstance(residual, NoResidualConfig)
        h_BTD = mixed_BTD.to(x_BTD.dtype) if bare else x_BTD + mixed_BTD
        if law5:
            h_BTD = self.mixer_norm(h_BTD)
        if ffn is not None:
            read_BTD = x_BTD if isinstance(residual, ParallelConfig) else h_BTD
            read_BTD = self.ffn_norm(read_BTD) if first else read_BTD
            if self.ffn_shift is not None:
                assert before_BND is not None
                rows = self.ffn_shift.rows
                read_BTD, last_BND = self.ffn_shift(read_BTD, before_BND[:, -rows:], reset_BT, pad_BT)
                lasts.append(last_BND)
        state = ShiftedState(own, torch.cat(lasts, 1)) if lasts else own
        if ffn is None:
            return h_BTD, state, aux
        seen = {} if views is None or not isinstance(ffn, Routed) else {"views": views}
        y_BTD, more = ffn(read_BTD, mixed_BTD, reset_BT=reset_BT, pad_BT=pad_BT, **seen)
        if self.ffn_dropout is not None:
            y_BTD = self.ffn_dropout(y_BTD)
        y_BTD = self._added(y_BTD, "ffn")
        out_BTD, gate = self._joined(x_BTD, h_BTD, mixed_BTD, y_BTD)
        return out_BTD, state, aux | more | gate

    def mixed(
        self,
        x_BTD: Tensor,
        state: Any,
        reset_BT: Tensor | None,
        pad_BT: Tensor | None,
        consume_state: bool = False,
        shared: Shared | None = None,
    ) -> tuple[Tensor, Any, list[Tensor], dict[str, Term]]:
        """The mixers' output for the block's input, their state, the last tokens that the mixers' shift keeps, and
        their loss terms."""
        bare = self.around.norm == "post" or isinstance(self.config.residual, Law5Config)
        own, before_BND = (state.mixer, state.last_BND) if isinstance(state, ShiftedState) else (state, None)
        lasts: list[Tensor] = []
        read_BTD = x_BTD if bare else self.mixer_norm(x_BTD)
        if self.mixer_shift is not None:
            assert before_BND is not None
            rows = self.mixer_shift.rows
            read_BTD, last_BND = self.mixer_shift(read_BTD, before_BND[:, :rows], reset_BT, pad_BT)
            lasts.append(last_BND)
        masks = {"reset_BT": reset_BT, "pad_BT": pad_BT, "consume_state": consume_state}
        (first, *others), (its, *states) = self.mixers, states_of(own)
        mixed_BTD, after, aux = first(read_BTD, its, **masks, **self.handed(shared, first))
        for mixer, each in zip(others, states, strict=True):
            other_BTD, other, more = mixer(read_BTD, each, **masks, **self.handed(shared, mixer))
            mixed_BTD, after, aux = mixed_BTD + other_BTD, BesideState(after, other), merged(aux, more)
        return mixed_BTD, after, lasts, aux

    def _added(self, y_BTD: Tensor, part: Literal["mixer", "ffn"]) -> Tensor:
        """The output of the mixer or the network as the block adds it: normed and multiplied if the config says so."""
        if self.around.norm != "pre":
            name = f"{part}_norm" if self.around.norm == "post" else f"{part}_post_norm"
            y_BTD = self.get_submodule(name)(y_BTD)
        return y_BTD if self.around.factor == 1 else y_BTD * self.around.factor

    def _joined(
        self, x_BTD: Tensor, h_BTD: Tensor, mixed_BTD: Tensor, y_BTD: Tensor
    ) -> tuple[Tensor, dict[str, Term]]:
        """The block's output from its input x, h and the outputs of mixer and network; and the terms to report."""
        if not isinstance(self.config.residual, RouteGatedConfig):
            return h_BTD + y_BTD, {}
        g = self.route().to(x_BTD.dtype)
        out_BTD = x_BTD + self.config.residual.scale * (g * mixed_BTD + (1 - g) * y_BTD)
        return out_BTD, {"route_gate": Term(g.detach()[0])}
