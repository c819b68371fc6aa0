"""Routed experts whose packed matrices come, one expert at a time, from wherever they are kept: memory, a cache over
files, another device (decisions.md §2).

Shapes: B batch, T time, N = B·T tokens, D model width, A axes of the torus, E experts.
"""

import itertools

import torch
from torch import Tensor, nn

from perspectron.config import require
from perspectron.experts import RoutedConfig, RoutedSwiGLU
from perspectron.ops import packed
from perspectron.routing import distance2
from perspectron.stream.cache import ExpertSource
from perspectron.terms import Term

WEIGHTS = ("gate_EFD", "up_EFD", "down_EDF", "base_gate_FD", "base_up_FD", "base_down_DF")
TRAINING = ("load_E", "ternary_share_1")


class PackedExperts(RoutedSwiGLU):
    """As the layer it was made from, with ternary matrices and 8-bit activations; only for inference. What a token
    gets depends on nothing but the token.

    source: where the matrices come from, under the number `layer`. following: the next such layers. Their routers are
    run on what this layer reads, and what they would choose is hinted: the residual stream changes slowly, and a wrong
    guess costs a read. Neither is a part of the module's state.
    """

    source: ExpertSource
    following: "tuple[PackedExperts, ...]"

    def __init__(self, d_model: int, config: RoutedConfig, layer: int) -> None:
        super().__init__(d_model, config)
        self.layer = layer
        self.following = ()
        for name in WEIGHTS:
            if name in self._parameters:
                delattr(self, name)
        for name in TRAINING:
            if name in self._buffers:
                delattr(self, name)
        self._router: tuple[Tensor, Tensor, Tensor] | None = None

    def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
        self._router = None
        return super()._apply(fn, recurse)

    def idle_parameters(self) -> int:
        """None of them are parameters."""
        return 0

    @property
    def router(self) -> tuple[Tensor, Tensor, Tensor]:
        """W [A,D], b [A] and the experts' places [E,A] (a switch has none), as they are used."""
        if self._router is None:
            weight_AD, bias_A = self.direction(torch.float32)
            place_EA = self.positions().float() if self.config.router == "torus" else weight_AD[:0]
            self._router = (weight_AD.contiguous(), bias_A, place_EA.contiguous())
        return self._router

    def distances(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and power distances, as in `Choice`; token by token and from memory that begins a cache line, because
        a product of several, or of others, may be rounded otherwise."""
        weight_AD, bias_A, place_EA = self.router
        x_ND = x_ND.float()
        if len(x_ND) == 1:
            out_NA = torch.mv(weight_AD, x_ND[0].clone()).add_(bias_A)[None]
        else:
            out_NA = torch.stack([torch.mv(weight_AD, x_D.clone()) for x_D in x_ND]).add_(bias_A)
        if self.config.router == "switch":
            query_NA, distance2_NE = out_NA[:, :0], -out_NA
        else:
            query_NA, distance2_NE = out_NA, distance2(out_NA, place_EA)
        if self.config.bias_rate > 0:
            distance2_NE = distance2_NE - self.bias_E
        return query_NA, distance2_NE

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        """Padding takes no expert, and gives 0."""
        require(not self.training, "training", True, "False: packed experts do not learn, call eval()")
        x_ND = x_BTD.flatten(0, 1)
        gate_N = None
        if self.config.gate == "soft":
            choices = [self.route(x_D[None]) for x_D in x_ND]
            expert_N, gate_N = (torch.cat(part) for part in list(zip(*choices, strict=True))[:2])
        else:
            expert_N = self.distances(x_ND)[1].argmin(1)
        if pad_BT is not None:
            expert_N = expert_N.masked_fill(pad_BT.flatten(), -1)
        y_ND = self._one(x_ND, int(expert_N)) if len(x_ND) == 1 else self._many(x_ND, expert_N)
        if gate_N is not None:
            y_ND = y_ND * gate_N.to(y_ND.dtype)[:, None]
        return y_ND.view_as(x_BTD), {}

    def _one(self, x_1D: Tensor, expert: int) -> Tensor:
        if expert < 0:
            return torch.zeros_like(x_1D)
        with self.source.get(self.layer, expert) as shard:
            self._look_ahead(x_1D)
            return packed.swiglu(x_1D, shard.gate, shard.up, shard.down)

    def _many(self, x_ND: Tensor, expert_N: Tensor) -> Tensor:
        """Expert by expert, those that are at hand first; while one computes, the next is fetched."""
        y_ND = torch.zeros_like(x_ND)
        ids = [e for e in expert_N.unique().tolist() if e >= 0]
        ids.sort(key=lambda expert: not self.source.holds(self.layer, expert))
        for expert, after in itertools.zip_longest(ids, ids[1:]):
            row_n = (expert_N == expert).nonzero()[:, 0]
            with self.source.get(self.layer, expert) as shard:
                if after is not None:
                    self.source.hint(self.layer, after)
                else:
                    self._look_ahead(x_ND)
                y_nD = packed.swiglu(x_ND.index_select(0, row_n), shard.gate, shard.up, shard.down)
            y_ND.index_copy_(0, row_n, y_nD)
        return y_ND

    def _look_ahead(self, x_ND: Tensor) -> None:
        for layer in self.following:
            for expert in layer.distances(x_ND)[1].argmin(1).unique().tolist():
                self.source.hint(layer.layer, expert)
