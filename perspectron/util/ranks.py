"""The processes (ranks) that train one model together, as the parts of the model see them.

Each rank reads some rows of a batch, or some columns of them: an equal number of consecutive tokens. Inside of
`together`, `total` adds up what the ranks counted, so that a mean is one over the whole batch, and `received` and
`handed` pass a mixer's state on to the rank that reads what follows. Outside of it a process is alone, and all of this
does nothing.

Shapes: B batch, T time.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.functional import pad

A = TypeVar("A")


@dataclass(frozen=True)
class Ranks:
    """The process group of all ranks and how many they are; which of how many shares of the rows, and of the columns,
    this one reads; and the global ranks that read the tokens before and after its own (None: nobody)."""

    group: Any
    size: int
    row: int
    rows: int
    column: int = 0
    columns: int = 1
    left: int | None = None
    right: int | None = None


_here: list[Ranks] = []  # the innermost last. No context variable: autograd's own threads read it too


@contextlib.contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Within it, these ranks compute one batch, and all of them do the same in the same order."""
    _here.append(ranks)
    try:
        yield
    finally:
        _here.pop()


def total(x: Tensor) -> Tensor:
    """The sum of x over all ranks.

    Differentiable where every rank computes the same loss from the sum alone, and gradients are averaged over ranks:
    the gradient is then the whole batch's, without asking the others again."""
    result: Tensor = _Total.apply(x, _here[-1]) if _here and not x.is_meta else x
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.size = ranks.size
        x = x.clone()
        torch.distributed.all_reduce(x, group=ranks.group)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.size, None


def shared(items: Iterable[A]) -> Iterator[tuple[A, bool]]:
    """This rank's part of `items`, and whether each counts: every rank gets as many, the last of them perhaps only to
    keep the others company."""
    if not _here:
        yield from ((item, True) for item in items)
        return
    row, rows = _here[-1].row, _here[-1].rows
    held: list[A] = []
    for item in items:
        held.append(item)
        if len(held) == rows:
            yield held[row], True
            held = []
    if held:
        yield held[min(row, len(held) - 1)], row < len(held)


def columns(x_BT: Tensor) -> Tensor:
    """This rank's columns of all."""
    if not split():
        return x_BT
    return x_BT.chunk(_here[-1].columns, 1)[_here[-1].column]


def split() -> bool:
    """True if several ranks read one row."""
    return bool(_here) and _here[-1].columns > 1


# ---------------------------------------------------------------- from rank to rank


def received(x: Tensor, state: A) -> tuple[Tensor, A]:
    """x, and the state that the rank to the left has handed on, in place of the one of nothing read. x: what the tokens
    that read the state are computed from; its gradient has the state's sent back."""
    if not split() or _here[-1].left is None or state is None:
        return x, state
    kept: list[Any] = []
    x, *floats = _Received.apply(x, _here[-1], kept)
    leaves = iter(floats)
    values = [next(leaves) if value is _FLOAT else value for value in kept]
    return x, pytree.tree_unflatten(values, pytree.tree_structure(state))


def handed(y: Tensor, state: object) -> Tensor:
    """y, after handing the state on to the rank on the right. y: what is computed further; its gradient waits for the
    state's."""
    if not split() or _here[-1].right is None or state is None:
        return y
    leaves = pytree.tree_leaves(state)
    floats = [leaf for leaf in leaves if _floating(leaf)]
    others = [_FLOAT if _floating(leaf) else leaf for leaf in leaves]
    result: Tensor = _Handed.apply(y, _here[-1], others, *floats)
    return result


def bordered(x_BT: Tensor, *masks_BT: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """x [B,T,…] and masks [B,T] with the column that stands before this rank's first, where there is one; masks are
    False there. For what compares neighbours."""
    if not split():
        return x_BT, list(masks_BT)
    x_BT = _Bordered.apply(x_BT, _here[-1])
    first = 0 if _here[-1].left is None else 1
    return x_BT, [None if mask is None else pad(mask, (first, 0)) for mask in masks_BT]


_FLOAT = object()  # stands for a tensor that has a gradient


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _send(tensors: Iterable[Tensor], ranks: Ranks, to: int) -> None:
    for tensor in tensors:
        torch.distributed.send(tensor.detach().contiguous(), to, group=ranks.group)


def _receive(like: Iterable[Tensor], ranks: Ranks, origin: int) -> list[Tensor]:
    made = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
    for tensor in made:
        torch.distributed.recv(tensor, origin, group=ranks.group)
    return made


class _Handed(torch.autograd.Function):
    """Sends a description of the leaves, then the tensors."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, others: list[Any], *floats: Tensor) -> Tensor:
        ctx.ranks, rest = ranks, iter(floats)
        leaves = [next(rest) if other is _FLOAT else other for other in others]
        told = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        assert ranks.right is not None
        torch.distributed.send_object_list([told], ranks.right, ranks.group, torch.device("cpu"))
        _send([leaf for leaf in leaves if isinstance(leaf, Tensor)], ranks, ranks.right)
        ctx.like = [torch.empty_like(leaf, device="meta") for leaf in floats]
        ctx.device = y.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        like = (torch.empty_like(leaf, device=ctx.device) for leaf in ctx.like)
        return dy, None, None, *_receive(like, ctx.ranks, ctx.ranks.right)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, kept: list[Any]) -> tuple[Tensor, ...]:
        told: list[Any] = [None]
        assert ranks.left is not None
        torch.distributed.recv_object_list(told, ranks.left, ranks.group, torch.device("cpu"))
        floats = []
        for leaf in told[0]:
            value = leaf
            if isinstance(leaf, tuple):
                shape, dtype = leaf
                (value,) = _receive([torch.empty(shape, dtype=dtype, device=x.device)], ranks, ranks.left)
            kept.append(_FLOAT if _floating(value) else value)
            floats += [value] if _floating(value) else []
        ctx.ranks = ranks
        return x.view_as(x), *floats

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _send(gradients, ctx.ranks, ctx.ranks.left)
        return dx, None, None


class _Bordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BT: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        last_B1, sent = x_BT[:, -1:].contiguous(), None
        if ranks.right is not None:
            sent = torch.distributed.isend(last_B1, ranks.right, group=ranks.group)
        before = [] if ranks.left is None else _receive([last_B1], ranks, ranks.left)
        if sent is not None:
            sent.wait()
        return torch.cat([*before, x_BT], 1)

    @staticmethod
    def backward(ctx: Any, dx_BT: Tensor) -> tuple[Tensor, None]:
        ranks, sent = ctx.ranks, None
        if ranks.left is not None:
            first_B1 = dx_BT[:, :1].contiguous()
            sent = torch.distributed.isend(first_B1, ranks.left, group=ranks.group)
            dx_BT = dx_BT[:, 1:]
        dx_BT = dx_BT.clone()
        if ranks.right is not None:
            dx_BT[:, -1:] += _receive([dx_BT[:, -1:]], ranks, ranks.right)[0]
        if sent is not None:
            sent.wait()
        return dx_BT, None
