"""Three estimates of the gradient of an adapter's weights B: by traces, by forward mode, by backpropagation.

Shapes: T time, V vocabulary, D model width, r rank of the adapter, B rows, K directions, m groups, n numbers of B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from perspectron.model.block import of_mixer, with_mixer
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.ops import fused
from perspectron.util.config import require
from perspectron.util.streams import stream

Weights = dict[int, Tensor]
"""B of each block, or its gradient."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens, with the target of the last. state: before them. fresh: nothing was read before, so a
    document that begins at the first of them resets nothing. reset: the id of the token at which the model forgets all
    before it."""

    ids: Sequence[int]
    state: LMState
    fresh: bool = False
    reset: int | None = None


def losses(model: LanguageModel, piece: Piece, state: LMState | None = None) -> tuple[Tensor, LMState]:
    """Nats of each token after the first [B,T], in every row of the state, and the state after all but the last."""
    state = piece.state if state is None else state
    ids_1S = torch.tensor([list(piece.ids)], device=model.device)
    ids_BS = ids_1S.expand(state.batch_size, -1)
    reset_BT = ids_BS[:, :-1] == (-1 if piece.reset is None else piece.reset)
    if piece.fresh:
        reset_BT = reset_BT.clone()
        reset_BT[:, 0] = False
    reset = reset_BT if reset_BT.any() else None
    hidden_BTD, state, _ = model.hidden(ids_BS[:, :-1], state, reset_BT=reset)
    logits_BTV = model.head(hidden_BTD)
    nats_N = fused.entropies(logits_BTV.flatten(0, 1), ids_BS[:, 1:].flatten())
    return nats_N.view(ids_BS.shape[0], -1), state


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces that follow each other as one."""
    first = pieces[0]
    return replace(first, ids=[*first.ids, *(id for piece in pieces[1:] for id in piece.ids[1:])])


def with_weights(state: LMState, up: Weights, *, rows: int = 1, traces: bool = True) -> LMState:
    """The state with these weights, [D,r], or [B,D,r] for one in each row. rows: number of copies of its only row.
    traces: False leaves out traces, and their memory."""
    state = state if rows == 1 else state.select([0] * rows)
    layers = list(state.layers)
    for i, weight in up.items():
        own = of_mixer(layers[i])
        trace = own.trace_BrDR if traces else own.trace_BrDR[:, :0].clone()
        up_BDr = weight if weight.ndim == 3 else weight.expand(rows, *weight.shape)
        layers[i] = with_mixer(layers[i], replace(own, up_BDr=up_BDr, trace_BrDR=trace))
    return replace(state, layers=tuple(layers))


def by_traces(model: LanguageModel, piece: Piece, up: Weights) -> tuple[Tensor, Weights, LMState]:
    """(nats [T], gradient of their sum, state after them): backpropagation through these tokens alone, and by the
    traces through all before them. What is left out is how one layer's past reaches another's."""
    leaves = {i: weight.detach().requires_grad_() for i, weight in up.items()}
    with torch.enable_grad():
        nats_BT, state = losses(model, piece, with_weights(piece.state, leaves))
        found = torch.autograd.grad(nats_BT.sum(), list(leaves.values()))
    return nats_BT[0].detach(), dict(zip(leaves, found, strict=True)), with_weights(state.detach(), up)


def by_backprop(model: LanguageModel, pieces: Sequence[Piece], up: Weights, count: int = 1) -> Weights:
    """The gradient of the summed nats of the last `count` pieces, through all of them."""
    leaves = {i: weight.detach().requires_grad_() for i, weight in up.items()}
    state, nats = with_weights(pieces[0].state, leaves, traces=False), list[Tensor]()
    with torch.enable_grad():
        for piece in pieces:
            nats_BT, state = losses(model, piece, state)
            nats.append(nats_BT.sum())
        found = torch.autograd.grad(torch.stack(nats[-count:]).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


class Subspace:
    """A random subspace of the weights: m orthonormal directions, each of n/m numbers of equal size, no number in two
    of them. Drawn from a seed."""

    def __init__(self, up: Weights, size: int, seed: int) -> None:
        n = sum(weight.numel() for weight in up.values())
        require(1 <= size <= n, "subspace", size, f"from 1 to {n}, the numbers of the adapter")
        generator = stream(seed, "subspace")
        self.shapes = {i: weight.shape for i, weight in up.items()}
        self.size = size
        self.group_n = torch.arange(n)[torch.randperm(n, generator=generator)] % size
        sign_n = 1.0 - 2.0 * torch.randint(2, (n,), generator=generator)
        self.sign_n = (
            sign_n.double() / torch.bincount(self.group_n, minlength=size).double()[self.group_n].sqrt()
        )
        self.order = torch.randperm(size, generator=generator)

    def directions(self, turn: int, count: int) -> Tensor:
        """The next `count` of the m directions [K], without replacement until all have had their turn."""
        return self.order[(turn * count + torch.arange(count)) % self.size]

    def spread(self, weight_Bm: Tensor) -> Weights:
        """P φ for each row φ [B,m]: numbers of every block [B,D,r]."""
        whole_Bn = weight_Bm.double()[:, self.group_n] * self.sign_n
        parts = whole_Bn.split([shape.numel() for shape in self.shapes.values()], 1)
        return {i: part.view(-1, *shape) for (i, shape), part in zip(self.shapes.items(), parts, strict=True)}


def by_jvp(model: LanguageModel, piece: Piece, up: Weights, space: Subspace, chosen_K: Tensor) -> Weights:
    """The estimate m/K Σ (∇ · P e_k) P e_k of the gradient in a subspace, over one piece, from K directions: one
    forward-mode pass whose rows are the directions. All m of them give the gradient's projection."""
    K, m = len(chosen_K), space.size
    unit_Km = torch.zeros(K, m, dtype=torch.float64).scatter_(1, chosen_K[:, None], 1)
    tangents = space.spread(unit_Km)
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        duals = {
            i: forward_ad.make_dual(weight.expand(K, *weight.shape).clone(), tangents[i].to(weight))
            for i, weight in up.items()
        }
        state = with_weights(piece.state, duals, rows=K, traces=False)
        nats_KT, _ = losses(model, piece, state)
        slope_K = forward_ad.unpack_dual(nats_KT.sum(1)).tangent
    slope_m = torch.zeros(m, dtype=torch.float64).index_add(0, chosen_K, slope_K.cpu().double() * (m / K))
    return {i: part[0].to(up[i]) for i, part in space.spread(slope_m[None]).items()}
