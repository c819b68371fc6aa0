"""Several sequences packed one after another in one row, as `cu_seqlens` [N+1] says: sequence i is the tokens from
cu_seqlens[i] up to cu_seqlens[i + 1]; the first is 0, the last T.

A model keeps them in one row; `resets` says where documents begin. An operation that takes `cu_seqlens` has B = 1 and
treats each sequence as if it were alone, with its own row of the first and of the last state. Sequences of similar
length are rows of one batch, with padding that leaves the state as it is, so the work is at most twice that of the
tokens.

Shapes: B batch, T time, N sequences, n of them in one batch, L tokens of the longest of those.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

Op = TypeVar("Op", bound=Callable[..., Any])
GATES = ("gamma", "gate", "alpha")
"""Names of inputs that are 1 where there is no token; all others are 0 there."""


class Group(NamedTuple):
    """Sequences of one batch: their indices [n], the places of their tokens [n,L], and where there is none."""

    sequence_n: Tensor
    token_nL: Tensor
    pad_nL: Tensor


def resets(cu_seqlens: Tensor) -> Tensor:
    """True at the first token of each sequence [1,T]: `reset_BT` of a model, a mixer or an operation that has it.

    >>> import torch
    >>> from perspectron.ops import sequences
    >>> sequences.resets(torch.tensor([0, 2, 5])).int().tolist()
    [[1, 0, 1, 0, 0]]
    """
    T = checked(cu_seqlens)
    reset_BT = torch.zeros(1, T, dtype=torch.bool, device=cu_seqlens.device)
    reset_BT[0, cu_seqlens[:-1].long()] = True
    return reset_BT


def checked(cu_seqlens: Tensor, T: int | None = None) -> int:
    """The number of tokens. ValueError unless `cu_seqlens` is whole numbers that rise from 0 to T."""
    whole = cu_seqlens.ndim == 1 and len(cu_seqlens) > 1 and not cu_seqlens.is_floating_point()
    if not whole or int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 1).any()):
        raise ValueError(f"cu_seqlens = {cu_seqlens.tolist()}, must be whole numbers that rise from 0")
    if T is not None and int(cu_seqlens[-1]) != T:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, must end at the number of tokens, {T}")
    return int(cu_seqlens[-1])


def groups(cu_seqlens: Tensor) -> Iterator[Group]:
    """The sequences, in batches whose shortest is longer than half of the longest."""
    start_N, length_N = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    size_N = torch.tensor(
        [int(length - 1).bit_length() for length in length_N.tolist()], device=length_N.device
    )
    for size in size_N.unique().tolist():
        sequence_n = (size_N == size).nonzero()[:, 0]
        time_L = torch.arange(int(length_N[sequence_n].max()), device=length_N.device)
        pad_nL = time_L >= length_N[sequence_n, None]
        yield Group(sequence_n, (start_N[sequence_n, None] + time_L).masked_fill(pad_nL, 0), pad_nL)


def packed(*outputs: str) -> Callable[[Op], Op]:
    """Decorator that lets an operation take `cu_seqlens`; its parameters must be named after their shapes, such as
    q_BTR. outputs: shapes of what it returns: with T, it has a row for each token, without, for each sequence."""

    def decorated(op: Op) -> Op:
        signature = inspect.signature(op)

        @wraps(op)
        def run(*args: Any, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
            if cu_seqlens is None:
                return op(*args, **options)
            given = signature.bind(*args, **options)
            given.apply_defaults()

            def call(own: dict[str, Any]) -> Any:
                bound = inspect.BoundArguments(signature, OrderedDict(own))
                return op(*bound.args, **bound.kwargs)

            return _run(call, given.arguments, cu_seqlens, outputs)

        return run  # type: ignore[return-value]

    return decorated


def _run(
    call: Callable[[dict[str, Any]], Any], given: dict[str, Any], cu_seqlens: Tensor, outputs: tuple[str, ...]
) -> Any:
    del given["cu_seqlens"]
    shapes = {name: _shape(name) for name, value in given.items() if value is not None}
    T = next(
        x.shape[_time(shapes[name])]
        for name, x in given.items()
        if name in shapes and _time(shapes[name]) >= 0
    )
    checked(cu_seqlens, T)
    N, found, order, tokens = len(cu_seqlens) - 1, list[Any](), list[Tensor](), list[Tensor]()
    for name, value in given.items():
        _check(name, value, shapes.get(name, ""), N)
    for group in groups(cu_seqlens.to(next(x.device for x in given.values() if isinstance(x, Tensor)))):
        own = {name: _rows(name, value, shapes.get(name, ""), group) for name, value in given.items()}
        if "pad_BT" in given and given["pad_BT"] is None and bool(group.pad_nL.any()):
            own["pad_BT"] = group.pad_nL
        order.append(group.sequence_n)
        tokens.append(group.token_nL[~group.pad_nL])
        made = call(own) if len(outputs) > 1 else (call(own),)
        found.append(
            [
                pytree.tree_map_only(Tensor, partial(_own, shape=shape, group=group), part)
                for shape, part in zip(outputs, made, strict=True)
            ]
        )
    place_N, place_T = (torch.cat(x).argsort() for x in (order, tokens))
    joined = tuple(
        pytree.tree_map(partial(_put, shape=shape, place=place_T if "T" in shape else place_N), *parts)
        for shape, parts in zip(outputs, zip(*found, strict=True), strict=True)
    )
    return joined if len(outputs) > 1 else joined[0]


def _shape(name: str) -> str:
    """The letters of a parameter's shape, such as BTR of q_BTR; none for other parameters. A state, perhaps of many
    tensors, has a row for each sequence."""
    letters = name.rpartition("_")[2]
    return letters if letters.isupper() and "B" in letters else "B" if name == "state" else ""


def _time(shape: str) -> int:
    """The index of the time dimension, T, or S for keys; −1 without one."""
    return max(shape.find("T"), shape.find("S") if "T" not in shape and "B" in shape else -1)


def _check(name: str, value: Any, shape: str, N: int) -> None:
    if {"T", "S"} <= set(shape) and value is not None:
        raise ValueError(f"{name} is given, must be left out beside cu_seqlens")
    if name == "causal" and not value:
        raise ValueError("causal = False, must be True beside cu_seqlens")
    rows = 1 if _time(shape) >= 0 else N
    for leaf in pytree.tree_leaves(value) if shape else ():
        if isinstance(leaf, Tensor) and leaf.shape[shape.index("B")] != rows:
            raise ValueError(f"{name} has shape {tuple(leaf.shape)}, must have {rows} rows beside cu_seqlens")


def _rows(name: str, value: Any, shape: str, group: Group) -> Any:
    """An input for one batch of sequences."""
    if shape == "" or value is None:
        return value
    if _time(shape) < 0:
        return pytree.tree_map_only(Tensor, lambda x: x.index_select(0, group.sequence_n), value)
    at = (shape.index("B"), _time(shape))
    x_nL = value.movedim(at, (0, 1))[0][group.token_nL]
    fill = name == "pad_BT" or name.partition("_")[0] in GATES
    pad = group.pad_nL.view(*group.pad_nL.shape, *[1] * (x_nL.ndim - 2))
    return x_nL.masked_fill(pad, fill).movedim((0, 1), at)


def _own(x: Tensor, shape: str, group: Group) -> Tensor:
    """An output without padding: tokens [·,…] of all sequences of a batch, or its rows."""
    return x.movedim((shape.index("B"), shape.index("T")), (0, 1))[~group.pad_nL] if "T" in shape else x


def _put(*parts: Any, shape: str, place: Tensor) -> Any:
    """The tokens or rows of all batches, in their original order."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    x = torch.cat(parts).index_select(0, place)
    return x[None].movedim((0, 1), (shape.index("B"), shape.index("T"))) if "T" in shape else x
