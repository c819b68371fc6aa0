"""Routed layers with packed experts that are fetched one at a time from memory, a cache over files, or another device
(docs/designs/perspective.md#streaming).

Shapes: B batch, T time, N = B·T tokens, n of them of one expert, D model width.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from perspectron.experts.router import Distances, FixedRouter, Routed, RoutedConfig, Views
from perspectron.ops import packed
from perspectron.ops.dispatch import recorder
from perspectron.stream.cache import ExpertSource
from perspectron.stream.expert_file import Shard
from perspectron.util.config import require
from perspectron.util.terms import Term


class PackedExperts(Routed):
    """The routed layer of an artifact: ternary matrices, 8-bit activations, inference alone. What a token gets depends
    on nothing but the token.

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
        for rows, shard in self.visit(*self._wanted(expert_N, read_ND)):
            if by_native:
                shard.network(x_ND, y_ND, rows)
            else:
                row_n = torch.tensor(rows, device=x_ND.device)
                y_ND.index_copy_(0, row_n, packed.swiglu(x_ND.index_select(0, row_n), *shard))
        if gate_N is not None:
            y_ND = y_ND * gate_N.to(y_ND.dtype)[:, None]
        return y_ND.view_as(x_BTD), {}

    def _seen(self, read_ND: Tensor, views: Views | None) -> tuple[Tensor, Tensor | None]:
        """The experts of tokens by their views, and of a soft router the gates, each token for itself."""
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

    def visit(
        self, experts: list[int], guesses: Callable[[], list[list[int]]]
    ) -> Iterator[tuple[list[int], Shard]]:
        """The tokens of each expert and its matrices, which are there until the next are asked for.

        experts: of each token; −1: none. Experts that are at hand come first; while one computes, the next is fetched,
        and during the last what `guesses` says the tokens may want in each of the following layers.
        """
        tokens: dict[int, list[int]] = {}
        for token, expert in enumerate(experts):
            if expert >= 0:
                tokens.setdefault(expert, []).append(token)
        ids = list(tokens)
        if len(ids) > 1:
            ids.sort(key=lambda expert: (not self.source.holds(self.layer, expert), expert))
        for expert, after in itertools.zip_longest(ids, ids[1:]):
            with self.source.get(self.layer, expert) as shard:
                if after is not None:
                    self.source.hint(self.layer, after)
                elif self.following:
                    for layer, wanted in zip(self.following, guesses(), strict=True):
                        for guess in dict.fromkeys(wanted):
                            self.source.hint(layer.layer, guess)
                yield tokens[expert], shard

    def _wanted(self, expert_N: Tensor, x_ND: Tensor) -> tuple[list[int], Callable[[], list[list[int]]]]:
        """The experts and, for `visit`, the guesses; another device is waited for once."""
        if expert_N.device.type == "cpu" or not self.following:
            return expert_N.tolist(), lambda: [guess_N.tolist() for guess_N in self._guesses(x_ND)]
        experts, *guesses = torch.stack([expert_N, *self._guesses(x_ND)]).tolist()
        return experts, lambda: guesses

    def _guesses(self, x_ND: Tensor) -> list[Tensor]:
        return [layer.router.nearest(x_ND) for layer in self.following]
