"""A program, made of the recorded step of one row, that reads several tokens of a text in one run, each with the bits
of a step of its own.

Instructions depend on each other within a token, and from one token to the next only through the state. Those that
depend on themselves over tokens, such as a recurrence, run token after token; others run once for all tokens, so that
weights are read once (loop distribution: Allen and Kennedy 1987). The state itself is not written: a copy is kept after
each token, and `Program.keep` takes one of them. Only growing caches are written, behind what counts as filled.

Shapes: N tokens of all rows in a run, R rows, L tokens of a row.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array, c_int64
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.native import FORMATS, TILES, _library, threads
from perspectron.native.tape import (
    ALIGNED,
    BYTES,
    CODES,
    DIMENSIONS,
    INSTRUCTION,
    KINDS,
    OPERANDS,
    Tape,
    Unrecordable,
    together,
)

GIVEN = 3
"""Number of bases that each token has for itself, the first ones of a step: its id, what the head reads, logits."""
BEFORE_BYTES = 3 * 8
"""Bytes of a row of `tape.Table`."""
INNER = {"sum": 2, "norm": 2, "any": 2, "most": 2, "fewest": 2, "cholesky": 2, "solve": 2, "product": 3}
"""Number of last dimensions that an instruction takes as a whole, 1 if it is not listed; it loops over the others."""
WHOLE = ("attend", "packed", "scan", "solve")
"""Instructions whose sizes and strides do not say which places they touch."""
COPY, PRODUCT, ATTEND, PACKED, SCAN, GATHER, SCATTER = (
    CODES.index(name) for name in ("copy", "product", "attend", "packed", "scan", "gather", "scatter")
)
# Kinds of operands: none, a constant, a result of the token, one of GIVEN, the row's state before the step, the state
# after the previous token, and the state after this one.
NONE, STAYS, OWN, EACH, ROW, BEFORE, AFTER = range(7)


class Touch(NamedTuple):
    """The bytes of a memory that an instruction reads or writes."""

    memory: tuple[str, int]
    first: int
    last: int
    writes: bool

    def meets(self, other: "Touch") -> bool:
        apart = self.last <= other.first or other.last <= self.first
        return (self.writes or other.writes) and not apart


class Template:
    """The source of programs for any number of rows and tokens. tape: that of a step of one row, before it is packed.
    bases: its bases in order: GIVEN, the parts of the state, the table of `tape.Table`. ends: the numbers of the
    instructions, checks not counted, that copy a part's new values to its place. Unrecordable: the step has no such
    program."""

    def __init__(self, tape: Tape, bases: Sequence[Tensor], ends: Iterable[int]) -> None:
        if tape.calls:
            raise Unrecordable("a call between instructions of several tokens")
        self._tape, self._rings = tape, dict(tape.rings)
        self._grown = set(self._rings)
        self._checks = tape.checks
        self._bytes = [0, *(x.nbytes for x in bases)]
        self._made = tape.instructions.copy()
        self._ends = set(ends)
        spans = sorted({(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tape.kept})
        self._spans = [(start, size) for start, size in spans if size]
        self._ready = False

    # ------------------------------------------------------------ once

    def prepare(self) -> None:
        """Find the order of the instructions, and the places of what they read and write."""
        if self._ready:
            return
        self._classify()
        self._stage()
        self._order()
        self._place()
        self._tokens()
        self._ready = True

    def _classify(self) -> None:
        """Find the kind of each operand, and its offset in the memory that it names."""
        made = self._made[self._checks :]
        starts = np.array([start for start, _ in self._spans], np.int64)
        sizes = np.array([size for _, size in self._spans], np.int64)
        base, offset = made["at"]["base"], made["at"]["offset"]
        span = np.searchsorted(starts, offset, "right") - 1
        inside = (base == 0) & (span >= 0) & (offset < (starts + sizes)[span])
        absent = (base == 0) & ~inside
        if (absent & (offset != 0)).any():
            raise Unrecordable("memory that is not known")
        span = np.where(inside, span, -1)
        code = made["code"]
        written = {*span[:, 0].tolist(), *span[code == SCAN, 5].tolist()} - {-1}
        kind = np.where(absent, NONE, np.where(np.isin(span, [*written]), OWN, STAYS))
        kind = np.where(base > 0, np.where(base <= GIVEN, EACH, ROW), kind)
        self._state_kinds(made, base, span, starts, sizes, kind)
        self._span, self._place_in = span, np.where(base > 0, offset, offset - starts[span])
        self._base, self._kind, self._size = base, kind, sizes
        self._instructions = made.copy()
        self._written = written

    def _state_kinds(self, made: Any, base: Any, span: Any, starts: Any, sizes: Any, kind: Any) -> None:
        """Find which parts of the state a step changes, and how: a part that is written once, as a copy of a whole
        result, is that result (`_same`); others are copied before the token changes them (`_copied`)."""
        first, last = GIVEN + 1, len(self._bytes) - 2  # the table is the last base
        self._same, self._copied, taken = dict[int, int](), list[int](), set[int]()
        self._dropped = set[int]()
        code = made["code"]
        for part in range(first, last + 1):
            if part in self._grown:
                continue
            writes = np.flatnonzero((base[:, 0] == part) | ((code == SCAN) & (base[:, 5] == part))).tolist()
            if not writes:
                continue
            if self._bytes[part] % 4:
                raise Unrecordable("a part of a state of an odd number of bytes")
            end, source = writes[-1], int(span[writes[-1], 1])
            at = made["at"][end]
            alike = (
                len(writes) == 1
                and end in self._ends
                and source >= 0
                and source not in taken
                and at["offset"][0] == 0
                and at["offset"][1] == starts[source]
                and sizes[source] == self._bytes[part]
                and (at["stride"][0] == at["stride"][1]).all()
                and at["kind"][0] == at["kind"][1]
                and bool((kind[:, 0][span[:, 0] == source] == OWN).any())
            )
            if alike:
                self._same[part] = source
                taken.add(source)
                self._dropped.add(end)
                kind[base == part] = BEFORE
                kind[span == source] = AFTER
            else:
                self._copied.append(part)
                kind[base == part] = AFTER

    def _stage(self) -> None:
        """Add copies of the parts of the state that are changed in place, and of the inputs and results of packed
        products that are not contiguous over all tokens."""
        eight = np.array(BYTES)[self._instructions["at"]["kind"]] == 8
        wide = {*self._span[eight].tolist()}
        self._width = {}
        for span in self._written:  # bytes from a token's result to the next one's
            unit = 8 if span in wide else 4
            self._width[span] = int(-(-self._size[span] // unit) * unit)
        parts = [*self._same, *self._copied]
        at, self._version, self._extra = 0, dict[int, int](), list[int]()
        for part in parts:
            self._version[part] = at
            at += -(-self._bytes[part] // 8) * 8
        self._versions = -(-at // ALIGNED) * ALIGNED
        self._of_same = {source: part for part, source in self._same.items()}
        rows = list[tuple[Any, list[int], list[int], list[int], list[int]]]()

        def row(t: int) -> tuple[Any, list[int], list[int], list[int], list[int]]:
            return (
                self._instructions[t].copy(),
                self._kind[t].tolist(),
                self._span[t].tolist(),
                self._base[t].tolist(),
                self._place_in[t].tolist(),
            )

        def copy(count: int) -> tuple[Any, list[int], list[int], list[int], list[int]]:
            made = np.zeros((), INSTRUCTION)
            made["code"], made["size"] = COPY, (1, 1, 1, 1, count)
            made["at"]["stride"][:2, DIMENSIONS - 1] = 1
            made["at"]["kind"][:2] = KINDS[torch.float32]
            empty = [NONE] * OPERANDS
            return made, empty, [-1] * OPERANDS, [0] * OPERANDS, [0] * OPERANDS

        for part in self._copied:
            made, kinds, spans, bases, places = copy(self._bytes[part] // 4)
            kinds[:2], bases[:2] = [AFTER, BEFORE], [part, part]
            rows.append((made, kinds, spans, bases, places))
        for t in range(len(self._instructions)):
            if t in self._dropped:
                continue
            own = row(t)
            if own[0]["code"] != PACKED:
                rows.append(own)
                continue
            T, N, K = (int(own[0]["size"][d]) for d in (2, 3, 4))
            after = None
            for operand, count in ((1, T * K), (0, T * N)):
                kinds, spans, bases, places = own[1:]
                if self._together(kinds[operand], spans[operand], bases[operand], places[operand], 4 * count):
                    continue
                span = len(self._size) + len(self._extra)
                self._extra.append(4 * count)
                self._width[span] = 4 * count
                made, *names = copy(count)
                ours, theirs = (0, 1) if operand == 1 else (1, 0)
                for mine, whose in zip(names, own[1:], strict=True):
                    mine[theirs] = whose[operand]
                for mine, value in zip(names, (OWN, span, 0, 0), strict=True):
                    mine[ours] = value
                for whose, value in zip(own[1:], (OWN, span, 0, 0), strict=True):
                    whose[operand] = value
                if operand == 1:
                    rows.append((made, *names))
                else:
                    after = (made, *names)
            rows.append(own)
            if after is not None:
                rows.append(after)
        self._instructions = np.stack([made for made, *_ in rows])
        self._kind, self._span, self._base, self._place_in = (
            np.array([own[at] for own in rows], np.int64) for at in range(1, 5)
        )
        self._size = np.concatenate([self._size, np.array(self._extra, np.int64)])

    def _together(self, kind: int, span: int, base: int, place: int, count: int) -> bool:
        """True if the values of an operand are contiguous over all tokens."""
        if place != 0:
            return False
        return (kind == OWN and self._width[span] == count) or (kind == EACH and self._bytes[base] == count)

    def _touches(self) -> list[list[Touch]]:
        """The memory that each instruction touches: a token's, the states before and after it, and growing caches."""
        made = self._instructions
        columns = (
            made["code"], made["size"], made["number"], made["at"]["stride"], made["at"]["kind"],
            self._kind, self._base, self._span, self._place_in,
        )  # fmt: skip
        return [self._touched(*own) for own in zip(*(column.tolist() for column in columns), strict=True)]

    def _touched(
        self,
        code: int,
        size: list[int],
        numbers: list[float],
        strides: list[list[int]],
        types: list[int],
        kinds: list[int],
        bases: list[int],
        spans: list[int],
        places: list[int],
    ) -> list[Touch]:
        found = list[Touch]()
        for operand, (kind, base) in enumerate(zip(kinds, bases, strict=True)):
            grown = kind == ROW and base in self._grown
            if kind in (NONE, STAYS) or (kind == ROW and not grown):
                continue
            if code == PRODUCT and operand == 3 and numbers[1] == 0:
                continue  # without a bias, its result stands there
            writes = operand == 0 or (code == SCAN and operand == 5)
            if kind == OWN:
                memory, whole = ("own", spans[operand]), int(self._size[spans[operand]])
            elif kind == EACH:
                memory, whole = ("each", base), self._bytes[base]
            elif kind == ROW:
                memory, whole = ("grown", base), 1 << 62
            else:
                part = base if base else self._of_same[spans[operand]]
                memory, whole = ("after" if kind == AFTER else "before", part), self._bytes[part]
            if grown or CODES[code] in WHOLE:
                found.append(Touch(memory, 0, whole, writes))
                continue
            width, place = BYTES[types[operand]], places[operand]
            steps = [(n - 1) * step * width for n, step in zip(size, strides[operand], strict=True)]
            if (code == GATHER and operand == 1) or (code == SCATTER and operand == 0):
                steps.append(int((numbers[0] - 1) * numbers[1]) * width)
            last = place + sum(step for step in steps if step > 0) + width
            found.append(Touch(memory, place + sum(step for step in steps if step < 0), last, writes))
        return found

    def _order(self) -> None:
        """Find the groups of instructions in the order in which they run. Each is one that takes all tokens, or some
        that run token after token."""
        by = defaultdict[tuple[str, int], list[tuple[int, Touch]]](list)
        for t, own in enumerate(self._touches()):
            for touch in own:
                by[touch.memory].append((t, touch))
        follows, itself = self._follows(by, len(self._instructions))
        self.groups = _sorted(follows, itself)

    def _follows(
        self, by: Mapping[tuple[str, int], list[tuple[int, Touch]]], count: int
    ) -> tuple[list[set[int]], set[int]]:
        """The instructions that have to come after each one, and those that depend on themselves over tokens. by: the
        instructions that touch each memory."""
        follows, itself, codes = [set[int]() for _ in range(count)], set[int](), self._instructions["code"]

        def over(t: int, after: int) -> None:
            """Note that `after` reads what `t` has made for the token before."""
            follows[t].add(after)
            if t == after:
                itself.add(t)

        for (kind, part), own in by.items():
            if kind == "before":
                for after, touch in own:
                    for t, made in by.get(("after", part), []):
                        if made.writes and made.meets(touch):
                            over(t, after)
                continue
            for n, (t, touch) in enumerate(own):
                for after, other in own[n + 1 :]:
                    if touch.meets(other) and after != t:
                        follows[t].add(after)
            for t, touch in own if kind == "grown" else []:
                for after, other in own:  # of the next token, whose slot is another
                    slots = codes[after] == SCATTER and codes[t] in (SCATTER, ATTEND)
                    if touch.meets(other) and not slots:
                        over(t, after)
        return follows, itself

    def _place(self) -> None:
        """Find places for results, shared by those that are not needed at the same time. Each token's result stands
        `_width` bytes after that of the token before."""
        first, last = dict[int, int](), dict[int, int]()
        for time, (group, _) in enumerate(self.groups):
            for t in group:
                for operand in range(OPERANDS):
                    if self._kind[t, operand] == OWN:
                        span = int(self._span[t, operand])
                        first.setdefault(span, time)
                        last[span] = time
        wanted = {span: (time, last[span], self._width[span]) for span, time in first.items()}
        self._arena, self._room = together(wanted)

    def _tokens(self) -> None:
        """Find the dimension along which each instruction takes all tokens; -1: one by one; DIMENSIONS: row by row."""
        self._along = np.full(len(self._instructions), -1)
        read: tuple[object, ...] = ()
        self._again = set[int]()
        for group, serial in self.groups:
            for t in group:
                made, code = self._instructions[t], int(self._instructions[t]["code"])
                before = (self._kind[t] == BEFORE).any()
                if serial or before or (self._kind[t] == ROW).any():
                    alone = serial or before or made["size"][0] != 1
                    self._along[t] = DIMENSIONS if code == ATTEND and not alone else -1
                elif code == PACKED:
                    self._along[t] = 2
                elif CODES[code] not in WHOLE:
                    free = range(DIMENSIONS - INNER.get(CODES[code], 1))
                    self._along[t] = next((d for d in free if made["size"][d] == 1), -1)
                    if code == PRODUCT and self._by_rows(t):
                        self._along[t] = 2
                own = self._kind[t, 1], self._span[t, 1], self._base[t, 1], *made["size"][[2, 4]].tolist()
                tiles = code == PACKED and self._along[t] == 2 and FORMATS[int(made["number"][0])] in TILES
                if tiles and read == own:
                    self._again.add(t)
                elif code == PACKED:
                    read = own if tiles else ()
                if read and self._kind[t, 0] == read[0] and self._span[t, 0] == read[1] and code != PACKED:
                    read = ()

    def _by_rows(self, t: int) -> bool:
        """True if a product has one row and a constant matrix, so that it can take a row for each token."""
        made = self._instructions[t]
        return tuple(made["size"][:3]) == (1, 1, 1) and self._kind[t, 2] == STAYS

    # ------------------------------------------------------------ for some rows and tokens

    def program(self, lengths: Sequence[int]) -> "Program":
        """A program for rows that read so many tokens each."""
        self.prepare()
        return Program(self, lengths)


class Program:
    """Reads so many tokens in each row at once. The bases of a run are the ids of all tokens, row by row, what the head
    reads [N,D], the logits [N,V], then for each row the parts of its state and its table, in which the row's entries
    stand once for each of its tokens."""

    def __init__(self, of: Template, lengths: Sequence[int]) -> None:
        R, N = len(lengths), sum(lengths)
        self.lengths, self.tokens = tuple(lengths), N
        self.starts = [sum(lengths[:r]) for r in range(R)]
        self._of = of
        row_N = np.repeat(np.arange(R), lengths)
        number_N = np.concatenate([np.arange(n) for n in lengths])
        parts = len(of._bytes) - 1 - GIVEN
        self._arena = torch.empty(N * of._room + ALIGNED, dtype=torch.uint8)
        self._versions = torch.empty(N * of._versions + ALIGNED, dtype=torch.uint8)
        arena, versions = (-(-x.data_ptr() // ALIGNED) * ALIGNED for x in (self._arena, self._versions))
        self._kept = versions
        index, slot = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for group, serial in of.groups:
            if serial:  # token after token, in all rows
                order = np.argsort(number_N, kind="stable")
                for n in range(max(lengths)):
                    own = order[number_N[order] == n]
                    for t in group:
                        index.append(np.full(len(own), t))
                        slot.append(own)
            elif of._along[group[0]] == DIMENSIONS:  # attention, row after row
                index.append(np.full(R, group[0]))
                slot.append(np.array(self.starts))
            elif of._along[group[0]] >= 0:
                index.append(np.array(group))
                slot.append(np.zeros(1, np.int64))
            else:
                index.append(np.full(N, group[0]))
                slot.append(np.arange(N))
        t_I, s_I = np.concatenate(index), np.concatenate(slot)
        made = of._instructions[t_I]
        kind, span, base, place = (x[t_I] for x in (of._kind, of._span, of._base, of._place_in))
        spans = len(of._size) + 1
        at_span, of_span, version = (np.zeros(spans, np.int64) for _ in range(3))
        for own, where in of._arena.items():
            at_span[own], of_span[own] = arena + N * where, of._width[own]
        for source, part in of._of_same.items():
            version[source] = of._version[part]
        part_version = np.zeros(len(of._bytes), np.int64)
        for part, where in of._version.items():
            part_version[part] = where
        sizes, s_I1 = np.array(of._bytes), s_I[:, None]
        row_I1, number_I1 = row_N[s_I][:, None], number_N[s_I][:, None]
        within = np.where(base > 0, part_version[base], version[span])
        old = (kind == BEFORE) & (number_I1 == 0)
        kind = np.where(old, ROW, kind)
        offset, new_base = made["at"]["offset"].copy(), base.copy()
        starts = np.select(
            [kind == OWN, kind == EACH, kind == BEFORE, kind == AFTER],
            [
                at_span[span] + s_I1 * of_span[span],
                s_I1 * sizes[base],
                versions + (s_I1 - 1) * of._versions + within,
                versions + s_I1 * of._versions + within,
            ],
            0,
        )
        offset = np.where((kind == NONE) | (kind == STAYS), offset, starts + place)
        table = base == GIVEN + parts  # which has a copy for each token of the row
        offset = np.where(
            table,
            place // BEFORE_BYTES * BEFORE_BYTES * np.array(lengths)[row_I1] + place % BEFORE_BYTES,
            offset,
        )
        new_base = np.where((kind == BEFORE) | (kind == AFTER) | (kind == OWN), 0, new_base)
        new_base = np.where(kind == ROW, base + row_I1 * parts, new_base)
        made["at"]["offset"], made["at"]["base"] = offset, new_base
        # One instruction of all tokens.
        steps = (
            np.select(
                [kind == OWN, kind == EACH, kind == AFTER],
                [of_span[span], sizes[base], np.full_like(span, of._versions)],
                0,
            )
            // np.array(BYTES)[made["at"]["kind"]]
        )
        along = of._along[t_I]
        for d in range(DIMENSIONS):
            own = np.flatnonzero(along == d)
            packed = made["code"][own] == PACKED
            made["size"][own, d] = np.where(packed, made["size"][own, d] * N, N)
            made["at"]["stride"][own, :, d] = np.where(packed[:, None], 0, steps[own])
        attends = np.flatnonzero(along == DIMENSIONS)
        made["size"][attends, 0] = np.array(lengths)[row_I1[attends, 0]]
        made["at"]["stride"][attends, :, 0] = steps[attends]
        again = np.isin(t_I, [*of._again])
        made["number"][:, 1] = np.where(made["code"] == PACKED, again, made["number"][:, 1])
        rings = {row * parts + part: shape for row in range(R) for part, shape in of._rings.items()}
        checks = of._made[: of._checks]
        self._tape = Tape.of(np.concatenate([checks, made]), of._checks, rings, [self._arena, self._versions])
        self._keeps = self._copies()

    def _copies(self) -> NDArray[Any]:
        """Instructions that copy the state after a token, at the first base, to its parts, the other bases."""
        of = self._of
        made = np.zeros(len(of._version), INSTRUCTION)
        for own, (part, where) in zip(made, of._version.items(), strict=True):
            own["code"], own["size"] = COPY, (1, 1, 1, 1, of._bytes[part] // 4)
            own["at"]["stride"][:2, DIMENSIONS - 1] = 1
            own["at"]["base"][:2] = part - GIVEN + 1, 1
            own["at"]["offset"][1] = where
        return made

    def stretch(self, slots: int | None) -> None:
        """Change the number of slots of growing caches; None: they stay as they are."""
        if slots is not None:
            self._tape.stretch(slots)

    def run(self, places: Array[c_int64]) -> None:
        """Read the tokens. Stale: what constants were made of has changed; nothing was written. RuntimeError: an id
        that does not exist."""
        self._tape.run(places)

    def keep(self, row: int, tokens: int, parts: Sequence[int]) -> None:
        """Set the state of a row to that after `tokens` of its tokens, at least one. parts: addresses of its parts."""
        start = self._kept + (self.starts[row] + tokens - 1) * self._of._versions
        places = (c_int64 * (2 + len(parts)))(0, start, *parts)
        if len(self._keeps):
            _library().pspx_tape(self._keeps.ctypes.data, len(self._keeps), places, threads())


def _sorted(follows: Sequence[set[int]], itself: set[int]) -> list[tuple[list[int], bool]]:
    """(group of instructions, whether it depends on itself) in an order in which they can run, as close to the recorded
    order as possible."""
    groups = _components(follows)
    at = {t: n for n, group in enumerate(groups) for t in group}
    nexts = [{at[after] for t in group for after in follows[t]} - {n} for n, group in enumerate(groups)]
    before, order = [0] * len(groups), list[tuple[list[int], bool]]()
    for after in (after for own in nexts for after in own):
        before[after] += 1
    ready = [(min(group), n) for n, group in enumerate(groups) if before[n] == 0]
    heapq.heapify(ready)
    while ready:
        _, n = heapq.heappop(ready)
        order.append((sorted(groups[n]), len(groups[n]) > 1 or groups[n][0] in itself))
        for after in nexts[n]:
            before[after] -= 1
            if before[after] == 0:
                heapq.heappush(ready, (min(groups[after]), after))
    return order


def _components(follows: Sequence[set[int]]) -> list[list[int]]:
    """The strongly connected components of a graph."""
    from scipy.sparse import csr_array  # takes a tenth of a second
    from scipy.sparse.csgraph import connected_components

    ends = np.cumsum([0, *map(len, follows)])
    after = np.fromiter(itertools.chain.from_iterable(follows), np.int32, ends[-1])
    graph = csr_array((np.ones(len(after), bool), after, ends), (len(follows),) * 2)
    count, of = connected_components(graph, connection="strong")
    found: list[list[int]] = [[] for _ in range(count)]
    for t, group in enumerate(of):
        found[group].append(t)
    return found
