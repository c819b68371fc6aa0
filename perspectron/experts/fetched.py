"""Layers whose packed experts are fetched one at a time: from memory, a cache over files, or another device
(docs/designs/perspective.md#streaming).

Shapes: N tokens, K experts of each, M = N·K places, n of them of one expert, D model width, F hidden width.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.experts.mixture import Mixed, MixtureConfig, added
from perspectron.ops import packed
from perspectron.ops.packing import Packed
from perspectron.util.config import require


@dataclass(frozen=True)
class Shard:
    """One expert: gate and up [F,D], down [D,F]; without a gate it is W_down relu(W_up x)²."""

    gate: Packed | None
    up: Packed
    down: Packed

    def __iter__(self) -> Iterator[Packed]:
        return iter([matrix for matrix in (self.gate, self.up, self.down) if matrix is not None])

    @cached_property
    def network(self) -> native.SwiGLU:
        """The expert in the form of the native library."""
        gate, up, down = ((matrix.codes, matrix.scales) for matrix in self)
        return native.SwiGLU(gate, up, down, self.up.format, *self.up.shape)

    def output(self, x_nD: Tensor) -> Tensor:
        """The expert's output [n,D]."""
        if self.gate is None:
            return packed.linear(F.relu(packed.linear(x_nD, self.up)).square(), self.down)
        return packed.swiglu(x_nD, self.gate, self.up, self.down)


class ExpertSource(Protocol):
    """Source of a model's experts. All of them are in memory, unless the source says otherwise."""

    def get(self, layer: int, expert: int) -> AbstractContextManager[Shard]:
        """The expert's weights, which stay unchanged until the context ends. ShardError: they cannot be read."""
        ...

    def ask(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to fetch experts that will be needed, in this order, as far as there is room."""
        return

    def hint(self, layer: int, expert: int) -> None:
        """Say that the expert may be needed soon."""
        return

    def holds(self, layer: int, expert: int) -> bool:
        """True if the weights are in memory, so that `get` reads nothing."""
        return True


class Held(ExpertSource):
    """An `ExpertSource` of one layer whose experts are all in memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards

    def get(self, layer: int, expert: int) -> AbstractContextManager[Shard]:
        """The expert, in a context."""
        return contextlib.nullcontext(self.shards[expert])


class Fetching:
    """Base of layers that fetch experts. source: where experts come from, under the number `layer`. following: the next
    such layers. Their routers are run on this layer's input, and the experts they choose are hinted to the source: the
    residual stream changes slowly, and a wrong guess costs a read. Neither is a part of a module's state."""

    layer: int
    source: ExpertSource
    following: "tuple[Fetching, ...]"

    def guess(self, x_ND: Tensor) -> Tensor:
        """The experts that this layer would choose for tokens, of any shape."""
        raise NotImplementedError

    def visit(
        self, experts: list[int], guesses: Callable[[], list[list[int]]]
    ) -> Iterator[tuple[list[int], Shard]]:
        """Yield the places of each expert, and its matrices, which stay valid until the next are asked for.

        experts: that of each place; −1: none. Experts in memory come first, while the others are read one after
        another; then those that `guesses` says the following layers may want, a list for each layer, are hinted.
        """
        places: dict[int, list[int]] = {}
        for place, expert in enumerate(experts):
            if expert >= 0:
                places.setdefault(expert, []).append(place)
        ids = list(places)
        if len(ids) > 1:
            ids.sort(key=lambda expert: (not self.source.holds(self.layer, expert), expert))
            self.source.ask(self.layer, ids)
        for place, (expert, after) in enumerate(itertools.zip_longest(ids, ids[1:])):
            with self.source.get(self.layer, expert) as shard:
                if after is not None:
                    self.source.ask(self.layer, ids[place + 1 :])
                    self.source.hint(self.layer, after)
                elif self.following:
                    for layer, wanted in zip(self.following, guesses(), strict=True):
                        for guess in dict.fromkeys(wanted):
                            self.source.hint(layer.layer, guess)
                yield places[expert], shard

    def wanted(self, expert: Tensor, x_ND: Tensor) -> tuple[list[int], Callable[[], list[list[int]]]]:
        """The experts of all places and, for `visit`, a function for the guesses. Waits for another device once."""
        if expert.device.type == "cpu" or not self.following:
            return expert.flatten().tolist(), lambda: [
                guess.flatten().tolist() for guess in self._guesses(x_ND)
            ]
        parts = [expert.flatten(), *(guess.flatten() for guess in self._guesses(x_ND))]
        ends = [0, *itertools.accumulate(map(len, parts))]
        numbers = torch.cat(parts).tolist()
        experts, *guesses = (numbers[start:end] for start, end in itertools.pairwise(ends))
        return experts, lambda: guesses

    def _guesses(self, x_ND: Tensor) -> list[Tensor]:
        return [layer.guess(x_ND) for layer in self.following]


class PackedMixture(Mixed, Fetching):
    """A mixture whose experts are packed, for inference only. format: that of their matrices."""

    def __init__(self, d_model: int, config: MixtureConfig, layer: int, format: str) -> None:
        super().__init__(d_model, config)
        self.layer, self.following, self.format = layer, (), format

    def guess(self, x_ND: Tensor) -> Tensor:
        """The experts [N,K] that this layer would choose."""
        return self.choose(self._logits(x_ND))[1]

    def routed(self, x_BTD: Tensor, pad_BT: Tensor | None = None) -> Tensor:
        """The sum of the chosen experts' outputs, by weight. Padding takes no expert, and its output is 0."""
        require(not self.training, "training", True, "False: packed experts do not learn, call eval()")
        x_ND, K = x_BTD.flatten(0, 1), self.config.chosen
        weight_NK, expert_NK = self.choose(self._logits(x_ND))
        if pad_BT is not None:
            expert_NK = expert_NK.masked_fill(pad_BT.flatten()[:, None], -1)
        y_MD = x_ND.new_zeros(len(x_ND) * K, x_ND.shape[1])
        alone = len(x_ND) == 1 and self.config.gated and packed.by_native(x_ND)
        for places, shard in self.visit(*self.wanted(expert_NK, x_ND)):
            if alone:
                shard.network(x_ND, y_MD[places[0] : places[0] + 1])
            else:
                place_n = torch.tensor(places, device=x_ND.device)
                y_MD.index_copy_(0, place_n, shard.output(x_ND.index_select(0, place_n // K)))
        return added(y_MD.unflatten(0, (-1, K)), weight_NK).view_as(x_BTD)

    def _logits(self, x_ND: Tensor) -> Tensor:
        """The router's logits [N,E] in float32. Those of a token depend on it alone, to the last bit."""
        x_ND, weight_ED = x_ND.float(), self.route_proj.weight.float()
        if x_ND.device.type == "cpu" and native.wanted():
            bias_E = weight_ED.new_zeros(len(weight_ED))
            return native.route(x_ND.contiguous(), weight_ED.contiguous(), bias_E, None, None)[0]
        # A product of several tokens, or of memory at another offset in a cache line, may be rounded differently.
        return torch.stack([torch.mv(weight_ED, x_D.clone()) for x_D in x_ND])
