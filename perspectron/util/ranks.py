"""The processes (ranks) that train one model together, as the parts of the model see them.

Each rank reads some rows of a batch, or some columns of them: an equal number of consecutive tokens. Inside of
`together`, `all_reduce_sum` adds up what the ranks counted, so that a mean is one over the whole batch. Outside of it a
process is alone, and all of this does nothing.

Shapes: B batch, T time.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
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
    """A context in which these ranks compute one batch together: all of them do the same in the same order."""
    _here.append(ranks)
    try:
        yield
    finally:
        _here.pop()


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of x over all ranks.

    Differentiable where every rank computes the same loss from the sum alone, and gradients are averaged over ranks:
    the gradient is then the whole batch's, without asking the others again."""
    result: Tensor = _AllReduceSum.apply(x, _here[-1]) if _here and not x.is_meta else x
    return result


class _AllReduceSum(torch.autograd.Function):
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
    """This rank's part of `items`, and whether each counts: every rank gets equally many, so that they stay in step,
    but the last one may be a repeated item that does not count."""
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


def place() -> tuple[int, ...]:
    """The row and the column of this rank, to tell its random numbers from those of others; () for a process alone."""
    if not _here or _here[-1].size == 1:
        return ()
    return _here[-1].row, _here[-1].column


def columns(x_BT: Tensor) -> Tensor:
    """This rank's share of the columns of x."""
    if not split():
        return x_BT
    return x_BT.chunk(_here[-1].columns, 1)[_here[-1].column]


def split() -> bool:
    """True if several ranks read one row."""
    return bool(_here) and _here[-1].columns > 1


def bordered(x_BT: Tensor, *masks_BT: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """x [B,T,…] and masks [B,T] with the column that stands before this rank's first, where there is one; masks are
    False there. For what compares neighbours."""
    if not split():
        return x_BT, list(masks_BT)
    x_BT = _Bordered.apply(x_BT, _here[-1])
    first = 0 if _here[-1].left is None else 1
    return x_BT, [None if mask is None else pad(mask, (first, 0)) for mask in masks_BT]


def receive(like: Tensor, ranks: Ranks, origin: int) -> Tensor:
    """Receive a tensor of the shape and type of `like` from the rank `origin`."""
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    torch.distributed.recv(made, origin, group=ranks.group)
    return made


class _Bordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BT: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        last_B1, sent = x_BT[:, -1:].contiguous(), None
        if ranks.right is not None:
            sent = torch.distributed.isend(last_B1, ranks.right, group=ranks.group)
        before = [] if ranks.left is None else [receive(last_B1, ranks, ranks.left)]
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
            dx_BT[:, -1:] += receive(dx_BT[:, -1:], ranks, ranks.right)
        if sent is not None:
            sent.wait()
        return dx_BT, None
