"""A tape: operations on memory at fixed addresses, recorded once and run again and again without Python, except for
calls that are requested between two of them.

Instructions have up to five dimensions, over which each operand has strides of its own. Their results depend neither on
the number of threads nor on the instruction set. What each instruction does: `csrc/tape.inl`, and of packed matrices
`csrc/api_tape.inl`.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_int64
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.native import FORMATS, TILES, _library, check_matrix, threads

CODES = (
    "copy", "fill", "add", "add_scalar", "mul", "div", "remainder", "floor_divide", "power", "least", "greatest",
    "lerp", "add_product", "where", "equal", "different", "less", "at_most", "both", "either", "not", "exp", "log",
    "log1p", "sine", "cosine", "tanh", "sigmoid", "silu", "softplus", "log_sigmoid", "gelu", "gelu_tanh", "root",
    "inverse_root", "inverse", "magnitude", "sum", "norm", "any", "most", "fewest", "softmax", "rms_norm", "layer_norm",
    "gather", "scatter", "cholesky", "solve", "product", "attend", "packed",
    "scan", "same",
)  # fmt: skip
KINDS = {torch.float32: 0, torch.float64: 1, torch.int64: 2, torch.bool: 3, torch.uint8: 3, torch.bfloat16: 4}
FLOATS = ("softmax", "rms_norm", "layer_norm", "cholesky", "solve", "product", "attend", "packed", "scan")
"""Instructions whose result and first operand are float32."""
BRIEF = ("softmax", "rms_norm", "layer_norm", "product", "attend")
"""Instructions of FLOATS that may be bfloat16, too: they compute in float32 and round their result."""
BYTES = (4, 8, 8, 1, 2)
DIMENSIONS = 5
OPERANDS = 6
ALIGNED = 64
_OPERAND = np.dtype(
    [("base", np.int64), ("offset", np.int64), ("kind", np.int64), ("stride", np.int64, DIMENSIONS)]
)
INSTRUCTION = np.dtype(
    [
        ("code", np.int64),
        ("size", np.int64, DIMENSIONS),
        ("number", np.float64, 3),
        ("at", _OPERAND, OPERANDS),
    ]
)


class Unrecordable(Exception):
    """An operation that no instruction can do."""


class Stale(RuntimeError):
    """Memory is not what it was when the tape was made. Nothing was run."""


class Axes(NamedTuple):
    """Dimensions, and the strides of each operand over them."""

    size: list[int]
    strides: list[list[int]]

    @staticmethod
    def of(size: Sequence[int], *strides: Sequence[int]) -> "Axes":
        return Axes(list(size), [list(own) for own in strides])

    def merged(self) -> "Axes":
        """The same elements in fewer dimensions: none of size 1, neighbours merged where all operands step alike."""
        size, strides = list[int](), [list[int]() for _ in self.strides]
        for n, *steps in zip(self.size, *self.strides, strict=True):
            if n == 1:
                continue
            if size and all(own[-1] == step * n for own, step in zip(strides, steps, strict=True)):
                size[-1] *= n
                for own, step in zip(strides, steps, strict=True):
                    own[-1] = step
            else:
                size.append(n)
                for own, step in zip(strides, steps, strict=True):
                    own.append(step)
        return Axes(size, strides)

    def filled(self, count: int) -> "Axes":
        """The same with dimensions of size 1 in front, `count` in all. Unrecordable: there are more."""
        missing = count - len(self.size)
        if missing < 0:
            raise Unrecordable(f"{len(self.size)} dimensions")
        return Axes([1] * missing + self.size, [[0] * missing + own for own in self.strides])

    def join(self, other: "Axes") -> "Axes":
        return Axes(self.size + other.size, [a + b for a, b in zip(self.strides, other.strides, strict=True)])


class Tape:
    """Instructions in order. bases: tensors whose address may differ from run to run, by the number of their memory;
    all other memory has a fixed address, and is kept alive. rings: those bases that are [B,G,S,K] contiguous, whose S
    may differ, too (`stretch`)."""

    def __init__(self, bases: Sequence[Tensor], rings: Sequence[Tensor] = ()) -> None:
        self.rings = {1 + i: x.shape[2:] for i, x in enumerate(bases) if any(x is ring for ring in rings)}
        """Slots and widths of growing caches, by the numbers of their bases."""
        self.bases = {memory(x): (1 + i, x.data_ptr()) for i, x in enumerate(bases)}
        self.kept, self.used = list[Tensor](), set[int]()
        self.quantised: tuple[object, ...] = ()
        """The input of the last packed product, unless it has been written to since."""
        # Instructions that round: the number of each, what it reads, and its result, None where that is a base.
        self.rounded = list[tuple[int, Tensor, Tensor | None]]()
        self._made = list[np.ndarray]()
        self.calls = list[tuple[int, Callable[[], object]]]()
        self._read = set[int]()  # memory that calls read
        # The address of the first instruction, how many there are, and what is called after them.
        self._parts = list[tuple[int, int, Callable[[], object] | None]]()
        self.instructions: NDArray[np.void] = np.zeros(0, INSTRUCTION)
        self.checks = 0
        """Number of instructions at its start that check whether what constants were made of has changed."""

    def __len__(self) -> int:
        return len(self._made) or len(self.instructions)

    def write(self, code: str, axes: Axes, operands: Sequence[Tensor], numbers: Sequence[float] = ()) -> None:
        """Add an instruction; the axes have an operand's strides for each of the tensors."""
        axes = axes.filled(DIMENSIONS)
        made = np.zeros((), INSTRUCTION)
        made["code"], made["size"] = CODES.index(code), axes.size
        if any(isinstance(x, int) and float(x) != x for x in numbers):
            raise Unrecordable(f"{code} with a number that float64 does not hold")
        made["number"][: len(numbers)] = numbers
        for i, (tensor, strides) in enumerate(zip(operands, axes.strides, strict=True)):
            if tensor.dtype not in KINDS:
                raise Unrecordable(f"numbers in {tensor.dtype}; float32, bfloat16 and packed ones can be")
            if i == 0 and tensor.dtype is torch.uint8 and code not in ("gather", "scatter", "same"):
                raise Unrecordable(f"{code} into bytes")  # it would write 0 or 1
            base, start = self.bases.get(memory(tensor), (0, 0))
            made["at"][i] = (base, tensor.data_ptr() - start, KINDS[tensor.dtype], strides)
            brief = code in BRIEF and tensor.dtype is torch.bfloat16
            if code in FLOATS and i < 2 and tensor.dtype is not torch.float32 and not brief:
                raise Unrecordable(f"{code} of {tensor.dtype}")
            self.kept.append(tensor)
            self.used.add(memory(tensor))
        if self.quantised and self.quantised[0] in (memory(operands[0]), memory(operands[-1])):
            self.quantised = ()
        self._made.append(made)

    def call(self, function: Callable[[], object], read: Sequence[Tensor]) -> None:
        """Call a Python function between two instructions. read: tensors that it reads. Unrecordable: one is a base."""
        if any(memory(x) in self.bases for x in read):
            raise Unrecordable("a call that reads the state itself")
        self.calls.append((len(self._made), function))
        self.used |= {memory(x) for x in read}
        self._read |= {memory(x) for x in read}

    def give(self, x: Tensor, base: Tensor) -> bool:
        """Make the instructions so far use a base in the place of x; False if x is not the whole of its memory, or not
        the result of an instruction."""
        index, (start, size) = self.bases[memory(base)][0], (x.data_ptr(), x.untyped_storage().nbytes())
        whole = x.is_contiguous() and (x.shape, x.dtype, x.nbytes) == (base.shape, base.dtype, size)
        if (
            not whole
            or memory(x) in self.bases
            or not any(made["at"][0]["offset"] == start for made in self._made)
        ):
            return False
        for made in self._made:
            for at in made["at"]:
                if at["base"] == 0 and start <= at["offset"] < start + size:
                    at["base"], at["offset"] = index, at["offset"] - start
        own = memory(x)
        self.rounded = [(n, a, None if b is None or memory(b) == own else b) for n, a, b in self.rounded]
        return True

    def done(self, read: Sequence[Tensor] = (), most: int | None = None) -> None:
        """Finish the recording, so that it can be run. read: tensors that constants were made of; each run first
        compares their bytes with their present ones. most: how many bytes a run may compare; the largest tensors beyond
        that are left to `same`."""
        made, self._made = self._made, []
        spans = sorted({(x.data_ptr(), x.numel()): x for x in map(_bytes, read)}.values(), key=len)
        ends = accumulate(map(len, spans))
        count = sum(most is None or end <= most for end in ends)
        copies = torch.cat(spans).split([len(x) for x in spans]) if spans else ()
        for copy, span in zip(copies[:count], spans[:count], strict=True):
            self.write("same", Axes.of(span.shape, (1,), (1,)), (copy, span))
        self._rest = spans[count:], copies[count:]
        self.checks = count
        self._made += made
        self.rounded = [(at + self.checks, x, y) for at, x, y in self.rounded]
        self.kept = [x for x in self.kept if memory(x) in self.used and memory(x) not in self.bases]
        self.instructions, self._made = np.stack(self._made) if self._made else self.instructions, []
        calls = [*((end + self.checks, call) for end, call in self.calls), (len(self.instructions), None)]
        starts = [0, *(end for end, _ in calls[:-1])]
        first, apart = self.instructions.ctypes.data, INSTRUCTION.itemsize
        self._native = _library().pspx_tape
        self._parts = [
            (first + start * apart, end - start, call)
            for start, (end, call) in zip(starts, calls, strict=True)
        ]

    @staticmethod
    def of(
        instructions: NDArray[np.void],
        checks: int,
        rings: Mapping[int, Sequence[int]],
        kept: Sequence[Tensor],
    ) -> "Tape":
        """A tape of these instructions, the first `checks` of them checks. rings: by the numbers of their bases."""
        made = Tape(())
        made.instructions, made.checks = instructions, checks
        made.rings = {n: torch.Size(x) for n, x in rings.items()}
        made.kept, made._rest = list(kept), ([], ())
        made._native = _library().pspx_tape
        made._parts = [(instructions.ctypes.data, len(instructions), None)]
        return made

    def stretch(self, slots: int) -> None:
        """Change the number of slots of the rings. Unrecordable, of a tape that has not been run: an instruction takes
        all slots together."""
        at, numbers = self.instructions["at"], self.instructions["number"]
        moves = [CODES.index(name) for name in ("gather", "scatter")]
        for base, (S, K) in self.rings.items():
            if slots == S:
                continue
            for index, operand in np.argwhere(at["base"] == base):
                made, code = at[index, operand], self.instructions["code"][index]
                if code != CODES.index("attend") and (code not in moves or numbers[index, 0] != S):
                    raise Unrecordable(f"{CODES[code]} of all slots of a cache")
                numbers[index, 0 if code in moves else 1] = slots
                width = BYTES[made["kind"]]
                for field, row in (("stride", S * K), ("offset", S * K * width)):
                    heads, rest = np.divmod(made[field], row)
                    at[field][index, operand] = heads * (row // S * slots) + rest
            self.rings[base] = torch.Size((slots, K))

    def pack(self) -> None:
        """Give results that are not needed at the same time the same memory, so that it stays in the processor's
        caches. The tensors that were recorded must not be read any more: runs no longer write to them."""
        kept = {memory(x): x.untyped_storage() for x in self.kept if memory(x) not in self._read}
        spans = sorted((x.data_ptr(), x.nbytes()) for x in kept.values() if x.nbytes())
        starts = np.array([start for start, _ in spans], np.int64)
        at, code = self.instructions["at"], self.instructions["code"]
        own = np.searchsorted(starts, at["offset"], "right") - 1
        inside = at["offset"] - starts[own] < np.array([size for _, size in spans])[own]
        own = np.where((at["base"] == 0) & (own >= 0) & inside, own, -1)
        # A product without a bias names its result there.
        own[(code == CODES.index("product")) & (self.instructions["number"][:, 1] == 0), 3] = -1
        first, last = dict[int, int](), dict[int, int]()
        for time, operands in enumerate(own.tolist()):
            for span in operands:
                if span >= 0:
                    written = time >= self.checks and span == operands[0] and span not in operands[1:]
                    first.setdefault(span, time if written else -1)
                    last[span] = time
        moved, room = together(
            {span: (time, last[span], spans[span][1]) for span, time in first.items() if time >= 0}
        )
        arena = torch.empty(room + ALIGNED, dtype=torch.uint8)
        base = -(-arena.data_ptr() // ALIGNED) * ALIGNED
        shift = np.zeros(len(spans) + 1, np.int64)  # the last one is for what stays
        for span, place in moved.items():
            shift[span] = base + place - spans[span][0]
        own = np.where(np.isin(own, list(moved)), own, -1)
        at["offset"] += shift[own]
        gone = {spans[span][0] for span in moved}
        self.kept = [x for x in self.kept if x.untyped_storage().data_ptr() not in gone] + [arena]
        self.rounded = []

    def same(self) -> bool:
        """True if the tensors that runs do not compare (`done`) have not changed."""
        return all(map(torch.equal, *self._rest))

    def run(self, places: Array[c_int64]) -> None:
        """Run it, with the bases at the addresses of `places_of`. Stale: what constants were made of has changed.
        RuntimeError: an index, such as a token's, that is out of range."""
        # This runs for every token with cold caches: reading the weights has evicted everything else.
        for first, count, call in self._parts:
            if failed := self._native(first, count, places, threads()):
                self._fail(first, failed)
            if call is not None:
                call()

    def advance(self, places: Array[c_int64], start: int, end: int) -> None:
        """Run the instructions from `start` up to `end`, and the calls between them, but not one at `end`."""
        apart = INSTRUCTION.itemsize
        for address, count, call in self._parts:
            first = (address - self.instructions.ctypes.data) // apart
            here, there = max(start, first), min(end, first + count)
            if here < there and (
                failed := self._native(address + (here - first) * apart, there - here, places, threads())
            ):
                self._fail(address + (here - first) * apart, failed)
            if call is not None and start <= first + count < end:
                call()

    def _fail(self, first: int, failed: int) -> None:
        at = (first - self.instructions.ctypes.data) // INSTRUCTION.itemsize + failed - 1
        if at < self.checks:
            raise Stale("what a recording was made of has changed")
        raise RuntimeError(f"a recorded step met an index that is not there (instruction {at})")


def together(wanted: Mapping[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """(the place of each result, shared by results that are not needed at the same time; the bytes of all). wanted: the
    first and last use of each result, and its bytes."""
    placed, room, live = dict[int, int](), 0, list[tuple[int, int, int]]()  # (start, end, last use)
    for span, (first, last, size) in sorted(wanted.items(), key=lambda item: item[1][0]):
        live = sorted(x for x in live if x[2] >= first)
        size, place = -(-size // ALIGNED) * ALIGNED, 0
        for start, end, _ in live:
            if place + size <= start:
                break
            place = max(place, end)
        live.append((place, place + size, last))
        placed[span], room = place, max(room, place + size)
    return placed, room


def places_of(bases: Sequence[int]) -> Array[c_int64]:
    """An array of addresses for `Tape.run`; place 1 + i is that of the base i, and may be changed."""
    return (c_int64 * (1 + len(bases)))(0, *bases)


class Table(NamedTuple):
    """For the instruction `attend`. rows_LB3: for each layer with a growing cache and each row, how many tokens come
    before those in its slots, in how many pieces of memory, and the address of the list of these. lists: these lists,
    kept alive."""

    rows_LB3: NDArray[np.int64]
    lists: NDArray[np.int64]


def table_of(layers: Sequence[Sequence[Sequence[bytes]]], tokens: Sequence[Sequence[int]]) -> Table:
    """layers: for each layer and row, its pieces, each as `piece_of` writes it; tokens: their number in all pieces."""
    lists = np.frombuffer(b"".join(piece for rows in layers for pieces in rows for piece in pieces), np.int64)
    counts = np.array([[len(pieces) for pieces in rows] for rows in layers], np.int64)
    ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
    places = lists.ctypes.data + (ends - counts) * PIECE_BYTES
    return Table(np.stack([np.array(tokens, np.int64), counts, places], -1), lists)


PIECE_BYTES = 7 * 8


def piece_of(k_1HNK: Tensor, v_1HNV: Tensor) -> bytes:
    """The place of the keys and values of some tokens in memory, for a `Table`."""
    steps = [x.stride(d) for x in (k_1HNK, v_1HNV) for d in (1, 2)]
    return struct.pack("=7q", k_1HNK.data_ptr(), v_1HNV.data_ptr(), k_1HNK.shape[2], *steps)


def memory(x: Tensor) -> int:
    """A number of the memory that a tensor is a view of."""
    return int(x.untyped_storage()._cdata)


def _bytes(x: Tensor) -> Tensor:
    """The bytes from a tensor's first number to its last."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return whole[x.storage_offset() * x.itemsize :][: (last + 1) * x.itemsize if x.numel() else 0]


# ---------------------------------------------------------------- writing


def each(tape: Tape, code: str, out: Tensor, *given: Tensor, numbers: Sequence[float] = ()) -> None:
    """out = f(given), element by element; what is given is broadcast."""
    if out.numel() == 0:
        return
    operands = [out, *(x.expand(out.shape) for x in given)]
    order = sorted(range(out.ndim), key=lambda d: out.stride()[d], reverse=True)  # the nearest numbers last
    strides = [[x.stride(d) for d in order] for x in operands]
    tape.write(code, Axes.of([out.shape[d] for d in order], *strides).merged(), operands, numbers)


def reduced(tape: Tape, code: str, out: Tensor, x: Tensor, dims: Sequence[int], scale: float = 1) -> None:
    """out = x reduced over `dims`, by `code`; out has the shape of x without these, or with ones there."""
    dims = sorted(d % x.ndim for d in dims) if x.ndim else []
    if any(x.shape[d] == 0 for d in dims):
        raise Unrecordable(f"{code} over nothing")
    kept = [d for d in range(x.ndim) if d not in dims]
    out = out if out.ndim == x.ndim else out.view([1 if d in dims else x.shape[d] for d in range(x.ndim)])
    over = Axes.of([x.shape[d] for d in dims], [0] * len(dims), [x.stride(d) for d in dims]).merged()
    here = Axes.of([x.shape[d] for d in kept], *[[t.stride(d) for d in kept] for t in (out, x)]).merged()
    if len(over.size) > 1:
        raise Unrecordable(f"{code} over dimensions that do not lie together")
    tape.write(code, here.filled(DIMENSIONS - 1).join(over.filled(1)), (out, x), (scale,))


def by_rows(
    tape: Tape, code: str, out: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 0,
) -> None:  # fmt: skip
    """out = f(x, weight, bias) for each row along the last dimension."""
    x = contiguous(tape, x, last=True)
    if out.stride(-1) != 1:
        raise Unrecordable(f"{code} into rows that do not lie together")
    parts = [x if part is None else contiguous(tape, part) for part in (weight, bias)]
    lead = Axes.of(x.shape[:-1], *[t.stride()[:-1] for t in (out, x)], *[[0] * (x.ndim - 1)] * 2).merged()
    axes = lead.filled(DIMENSIONS - 1).join(Axes.of([x.shape[-1]], [1], [1], [1], [1]))
    tape.write(code, axes, (out, x, *parts), (eps, weight is not None, bias is not None))


def product(
    tape: Tape,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> None:
    """out [...,m,n] = alpha · a [...,m,k] b [...,k,n] + beta · bias."""
    if out.numel() == 0:
        return
    if a.shape[-1] == 0:
        raise Unrecordable("a product over nothing")
    beta = 0 if bias is None else beta
    lead = out.shape[:-2]
    a, b = a.expand(*lead, *a.shape[-2:]), b.expand(*lead, *b.shape[-2:])
    if torch.bfloat16 in (out.dtype, a.dtype, b.dtype) and (
        b.dtype is not torch.bfloat16 or b.stride(-2) != 1
    ):
        raise Unrecordable("a product of bfloat16 with columns that do not lie together")
    other = out if bias is None else bias.expand(out.shape)
    m, n, k = out.shape[-2], out.shape[-1], a.shape[-1]
    operands = (out, a, b, other)
    strides = [list(x.stride()[:-2]) for x in operands]
    batch = Axes.of(lead, *strides)
    own = Axes.of([m], [out.stride(-2)], [a.stride(-2)], [0], [other.stride(-2)])
    rows = batch.join(own).merged()
    if len(rows.size) <= 1 and not any(rows.strides[2]):  # one matrix for all rows
        batch, own = Axes.of([], *[[]] * 4), rows.filled(1)
    columns = Axes.of([n, k], [out.stride(-1), 0], [0, a.stride(-1)], [b.stride(-1), b.stride(-2)],
                      [other.stride(-1), 0])  # fmt: skip
    tape.write("product", batch.merged().filled(2).join(own).join(columns), operands, (alpha, beta))


def moved(tape: Tape, code: str, out: Tensor, x: Tensor, index: Tensor, dim: int) -> None:
    """gather: out = x at the index along a dimension; scatter: out there = x. The index has the shape of the places."""
    if out.numel() == 0:
        return
    base, other = (x, out) if code == "gather" else (out, x)
    strides = [list(other.stride()), list(index.stride()), list(base.stride())]
    most, apart = base.shape[dim], base.stride(dim)
    strides[2][dim] = 0
    ordered = (
        (strides[0], strides[2], strides[1]) if code == "gather" else (strides[2], strides[0], strides[1])
    )
    axes = Axes.of(index.shape, *ordered).merged()
    tape.write(code, axes, (out, x, index), (most, apart))


def contiguous(tape: Tape, x: Tensor, *, last: bool = False) -> Tensor:
    """x, or a contiguous copy. last: contiguous in the last dimension suffices."""
    if x.is_contiguous() or (last and x.stride(-1) == 1):
        return x
    copy = torch.empty(x.shape, dtype=x.dtype)
    each(tape, "copy", copy, x)
    return copy


def cholesky(tape: Tape, out: Tensor, x: Tensor) -> None:
    """The lower factors of [...,n,n]."""
    tape.write("cholesky", Axes.of(x.shape, out.stride(), x.stride()), (out, x))


def solve(tape: Tape, out: Tensor, triangle: Tensor, given: Tensor, *, upper: bool, ones: bool) -> None:
    """out = triangle⁻¹ given, both [...,m,n] and the triangles [...,m,m]."""
    triangle = triangle.expand(*given.shape[:-2], *triangle.shape[-2:])
    axes = Axes.of(given.shape, out.stride(), given.stride(), triangle.stride())
    tape.write("solve", axes, (out, given, triangle), (upper, ones))


def attend(
    tape: Tape,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length_B: Tensor,
    scale: float,
    cap: float | None,
    before_B3: Tensor | None = None,
) -> None:
    """out [B,H,1,V] = softmax(scale · q kᵀ) v over the slots of a ring [B,G,S,·] that `length` tokens have filled; with
    a cap, scores s become cap · tanh(s / cap). before: of each row, the tokens that lie in pieces of memory before the
    slots, as `table_of` has them."""
    if k.dtype is not v.dtype:
        raise Unrecordable(f"attention to keys of {k.dtype} and values of {v.dtype}")
    slots = k.stride(1) // k.stride(2)
    (B, H, _, K), G, V = q.shape, k.shape[1], v.shape[-1]
    for x in (out, q, k, v):
        if x.stride(-1) != 1:
            raise Unrecordable("attention to rows that do not lie together")
    heads = [(x.stride(0), x.stride(1) * (H // G), x.stride(1), 0, 0) for x in (out, q)]
    rings = [(x.stride(0), x.stride(1), x.stride(2), 0, 0) for x in (k, v)]
    more = () if before_B3 is None else (before_B3,)
    axes = Axes.of(
        (B, G, H // G, K, V), *heads, *rings, *[(x.stride(0), 0, 0, 0, 0) for x in (length_B, *more)]
    )
    tape.write("attend", axes, (out, q, k, v, length_B, *more), (scale, slots, cap or 0))


def packed(tape: Tape, out: Tensor, x: Tensor, codes: Tensor, scales: Tensor, format: str) -> None:
    """out [T,N] = x [T,K] Wᵀ of a packed matrix, as `native.linear`."""
    (T, K), N = x.shape, out.shape[1]
    check_matrix(codes, scales, format, N, K)
    operands = (out, contiguous(tape, x), codes, scales.view(torch.uint8))
    axes = Axes.of((1, 1, T, N, K), *[[0] * DIMENSIONS] * len(operands))
    tape.rounded.append((len(tape), operands[1], out))
    reads = (
        memory(operands[1]),
        operands[1].data_ptr(),
        T,
        K,
        format in TILES,
    )  # which quantise in their own way
    tape.write("packed", axes, operands, (FORMATS.index(format), reads == tape.quantised))
    tape.quantised = reads


def scan(tape: Tape, out: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> None:
    """One token of `native.pdr_scan`: out [B,1,D], and the state [B,D,R] in place."""
    if not state.is_contiguous():
        raise Unrecordable("a state of a scan whose numbers do not lie together")
    operands = (out, *(contiguous(tape, x) for x in (q, k, v, gamma)), state)
    axes = Axes.of((1, 1, *state.shape), *[[0] * DIMENSIONS] * len(operands))
    tape.write("scan", axes, operands)
