"""Routed layers with packed experts that are fetched one at a time (docs/designs/perspective.md#streaming).

Shapes: B batch, T time, N = B·T tokens, n of them of one expert, D model width.
"""

import torch
from torch import Tensor, nn

from perspectron.experts.fetched import Fetching
from perspectron.experts.router import Distances, FixedRouter, Routed, RoutedConfig, Views
from perspectron.ops import packed
from perspectron.ops.dispatch import recorder
from perspectron.util.config import require
from perspectron.util.terms import Term


class PackedExperts(Routed, Fetching):
    """The routed layer of an artifact: ternary matrices, 8-bit activations, inference alone. What a token gets depends
    on nothing but the token."""

    def __init__(self, d_model: int, config: RoutedConfig, layer: int) -> None:
        super().__init__(d_model, config)
        self.layer, self.following = layer, ()
        self._fixed: FixedRouter | None = None

    def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
        self._fixed = None
        return super()._apply(fn, recurse)

    @property
    def router(self) -> FixedRouter:
        """The router, whose weights no longer change."""
        if self._fixed is None:
            self._fixed = self._router(FixedRouter)
        return self._fixed

    def guess(self, x_ND: Tensor) -> Tensor:
        """The experts [N] that tokens may choose here, by what an earlier layer reads."""
        return self.router.nearest(x_ND)

    def forward(
        self,
        x_BTD: Tensor,
        context_BTD: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        views: Views | None = None,
    ) -> tuple[Tensor, dict[str, Term]]:
        """Padding takes no expert, and gives 0. views: from which the rows choose their experts."""
        require(not self.training, "training", True, "False: packed experts do not learn, call eval()")
        if (tape := recorder()) is not None and views is None and reset_BT is None and pad_BT is None:
            return self.aside(tape, x_BTD, context_BTD), {}
        x_ND = x_BTD.flatten(0, 1)
        gate_N = None
        read_ND = self.read(x_BTD, context_BTD).flatten(0, 1)
        if views is None and self.config.gate != "soft":
            expert_N = self.router.nearest(read_ND)
        else:
            expert_N, gate_N = self._seen(read_ND, views)
        if pad_BT is not None:
            expert_N = expert_N.masked_fill(pad_BT.flatten(), -1)
        y_ND = torch.zeros_like(x_ND)
        by_native = packed.by_native(x_ND)
        for rows, shard in self.visit(*self.wanted(expert_N, read_ND)):
            if by_native:
                shard.network(x_ND, y_ND, rows)
            else:
                row_n = torch.tensor(rows, device=x_ND.device)
                y_ND.index_copy_(0, row_n, shard.output(x_ND.index_select(0, row_n)))
        if gate_N is not None:
            y_ND = y_ND * gate_N.to(y_ND.dtype)[:, None]
        return y_ND.view_as(x_BTD), {}

    def _seen(self, read_ND: Tensor, views: Views | None) -> tuple[Tensor, Tensor | None]:
        """(each token's expert by its view, the gates of a soft router or None); tokens are routed one by one."""
        distances = self.router.distances(read_ND)
        expert_N = base_N = self.router.select(distances)
        if views is not None:
            expert_N = self.router.seen(distances, base_N, views)
        if self.config.gate != "soft":
            return expert_N, None
        of_N = expert_N if views is not None and views.gate == "own" else base_N
        alone = (
            (Distances(q_A[None], d_E[None]), e[None]) for q_A, d_E, e in zip(*distances, of_N, strict=True)
        )
        return expert_N, torch.cat([self.router.gates(*one) for one in alone])
