"""A sequence split over several ranks, each of which reads some of its columns: hooks on a model's mixers and token
shifts receive the state from the rank to the left and send the new one to the rank on the right.

A hook sends before the block's network is computed, where all ranks meet to count the load of experts.

Shapes: B batch, T time.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.ops.attention import places
from perspectron.util.ranks import Ranks, receive

A = TypeVar("A")
_FLOAT = object()  # stands for a tensor that has a gradient


def split_sequence(model: LanguageModel, ranks: Ranks) -> None:
    """Let a model read `ranks.column` of a sequence in every pass. Call this before FSDP wraps the model, so that
    weights are gathered before a hook waits."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        first, others = _parted(args[0])
        first, state = recv_state(ranks, first, args[1])
        return ((first, *others) if others else first, state, *args[2:])

    def after(module: nn.Module, args: object, output: tuple[Any, ...]) -> tuple[Any, ...]:
        first, others = _parted(output[0])
        first = send_state(ranks, first, output[1])
        return ((first, *others) if others else first, *output[1:])

    for block in model.blocks:
        assert isinstance(block, Block)
        for module in (*block.mixers, block.mixer_shift, block.ffn_shift):
            if module is not None:
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
    if model.config.positions > 0:
        _split_positions(model, ranks)


def _parted(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The first of a mixer's inputs, which carries the state's gradient, and the others."""
    return (x, ()) if isinstance(x, Tensor) else (x[0], x[1:])


def _split_positions(model: LanguageModel, ranks: Ranks) -> None:
    """Let a model's learned positions go on where those of the rank to the left end."""

    def before(
        module: LanguageModel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids_BT, state = args[0], (*args, None)[1]
        if state is None:
            state = model.init_state(len(ids_BT))
        _, length_B = recv_state(ranks, ids_BT, state.length_B)
        after = places(length_B, ids_BT.shape[1], options.get("reset_BT"), options.get("pad_BT"))
        send_state(ranks, ids_BT, after.length_B)
        return (ids_BT, replace(state, length_B=length_B), *args[2:]), options

    model.register_forward_pre_hook(before, with_kwargs=True)


def recv_state(ranks: Ranks, x: Tensor, state: A) -> tuple[Tensor, A]:
    """x, and the state that the rank to the left sent, in place of the empty one. x: an input of everything that reads
    the state; its backward pass sends the state's gradient back."""
    if ranks.left is None:
        return x, state
    kept: list[Any] = []
    x, *floats = _Receive.apply(x, ranks, kept)
    leaves = iter(floats)
    values = [next(leaves) if value is _FLOAT else value for value in kept]
    return x, pytree.tree_unflatten(values, pytree.tree_structure(state))


def send_state(ranks: Ranks, y: Tensor, state: object) -> Tensor:
    """Send the state to the rank on the right, and return y. y: an output that is used further; its backward pass waits
    for the state's gradient."""
    if ranks.right is None:
        return y
    leaves = pytree.tree_leaves(state)
    floats = [leaf for leaf in leaves if _floating(leaf)]
    others = [_FLOAT if _floating(leaf) else leaf for leaf in leaves]
    result: Tensor = _Send.apply(y, ranks, others, *floats)
    return result


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _send(tensors: Iterable[Tensor], ranks: Ranks, to: int) -> None:
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), to, group=ranks.group)


class _Send(torch.autograd.Function):
    """Sends a description of the leaves, then the tensors."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, others: list[Any], *floats: Tensor) -> Tensor:
        ctx.ranks, rest = ranks, iter(floats)
        leaves = [next(rest) if other is _FLOAT else other for other in others]
        described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        assert ranks.right is not None
        dist.send_object_list([described], ranks.right, ranks.group, torch.device("cpu"))
        _send([leaf for leaf in leaves if isinstance(leaf, Tensor)], ranks, ranks.right)
        ctx.like = [torch.empty_like(leaf, device="meta") for leaf in floats]
        ctx.device = y.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        like = (torch.empty_like(leaf, device=ctx.device) for leaf in ctx.like)
        return dy, None, None, *(receive(leaf, ctx.ranks, ctx.ranks.right) for leaf in like)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, kept: list[Any]) -> tuple[Tensor, ...]:
        described: list[Any] = [None]
        assert ranks.left is not None
        dist.recv_object_list(described, ranks.left, ranks.group, torch.device("cpu"))
        floats = []
        for leaf in described[0]:
            value = leaf
            if isinstance(leaf, tuple):
                shape, dtype = leaf
                value = receive(torch.empty(shape, dtype=dtype, device=x.device), ranks, ranks.left)
            kept.append(_FLOAT if _floating(value) else value)
            floats += [value] if _floating(value) else []
        ctx.ranks = ranks
        return x.view_as(x), *floats

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _send(gradients, ctx.ranks, ctx.ranks.left)
        return dx, None, None
