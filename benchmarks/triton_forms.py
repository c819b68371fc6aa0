"""The forms in which `perspectron.ops.triton` launches its kernels: the tile, the warps and all that is fixed in each.

One memory stands for all whose code is the same. Token by token it is that of each power of two of the columns, and of
whether 16 divides them. By chunks no tile has more than 64 columns; what is inside blocks of 16 tokens does not know
them. The delta rules' tiles have all rows of a memory. Where a size is not given, 16 divides it, as it does in models:
the rows of a memory that decays (D), and the columns of packed matrices. Memories of one column are left out.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from perspectron.ops.packing import LAYOUTS
from perspectron.ops.triton.kernels import blocks, delta, delta_gradients, packed, rows, token

TOKENS = (16, 32, 64, 100, 128, 200, 256)
"""Columns of a memory whose tokens go one by one."""
CHUNKS = (16, 24, 32, 64, 100)
"""Columns of a memory whose tokens go by chunks; more are as many blocks of 64."""
DELTA = (16, 32, 64, 100, 128)
"""Rows of a delta rule's memory, and as many columns."""
SIDES = {
    "pdr": {"COLUMNS": True, "WIDE": True},
    "gla": {"COLUMNS": False, "WIDE": True},
    "ssd": {"COLUMNS": False, "WIDE": False},
}
RULES = {
    "gated delta": {"WIDE": False, "FIRST": False},
    "delta": {"WIDE": True, "FIRST": False},
    "rwkv7": {"WIDE": True, "FIRST": True},
}
UP, BOTH, LAST = ({"GRAD": grad, "READ": read} for grad, read in ((False, True), (True, True), (True, False)))
STATES = tuple(("states", {"BACK": back}) for back in (False, True))
BY_CHUNKS: dict[str, tuple[tuple[str, dict[str, bool]], ...]] = {
    "pdr": (("rows", UP), ("columns", BOTH)),
    "gla": (*STATES, ("columns", UP), ("rows", BOTH), ("columns", LAST)),
    "ssd": (*STATES, ("columns", UP), ("rows", BOTH), ("columns", LAST), ("gates", {})),
}
INSIDE = {
    "pdr": ((rows.prepare, {"READ": False}), (rows.inner, UP), (rows.inner, LAST)),
    "gla": ((rows.prepare, {"READ": True}), (rows.inner, BOTH)),
}


@dataclass(frozen=True)
class Form:
    """A kernel for a use, for R columns (delta rules: rows; packed: rows with common bytes; None: any), with what is
    fixed in it but for the precision of products."""

    name: str
    kernel: Any
    R: int | None
    tile: dict[str, int]
    fixed: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def forms(quick: bool) -> Iterator[Form]:
    """All of them, or those for 16 columns and int8."""

    def some(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes[:1] if quick else sizes

    for make, uses, sizes in ((_tokens, SIDES, TOKENS), (_chunks, SIDES, CHUNKS), (_delta, RULES, DELTA)):
        for use, R in itertools.product(uses, some(sizes)):
            yield from make(use, R)
    for use, kernels in INSIDE.items():
        for kernel, fixed in kernels:
            width = rows.WIDTH if kernel is rows.prepare else 32
            tile = {"rows": width, "columns": 1, "chunk": 16, "warps": 1}
            yield Form(_named(use, kernel, fixed), kernel, None, tile, fixed | {"W": width})
    yield from _packed(("int8",) if quick else tuple(LAYOUTS))


def _named(use: str, kernel: Any, fixed: dict[str, bool]) -> str:
    back = ", backwards" if fixed.get("GRAD") or fixed.get("BACK") else ""
    return f"{use}, {kernel.fn.__name__}{back}{', states kept' if fixed.get('KEEP') else ''}"


def _tokens(use: str, R: int) -> Iterator[Form]:
    tile = token.tile(R)
    sizes = {"C": tile.chunk, "BD": tile.rows, "RP": tile.columns}
    for kernel, more in (
        (token.forward, {"KEEP": False}),
        (token.forward, {"KEEP": True}),
        (token.backward, {}),
    ):
        yield Form(_named(use, kernel, more), kernel, R, tile._asdict(), SIDES[use] | more | sizes)


def _chunks(use: str, R: int) -> Iterator[Form]:
    for name, fixed in BY_CHUNKS[use]:
        tile = blocks.tile(name, R, fixed.get("GRAD", False) and fixed["READ"])
        kernel, wide = getattr(blocks, name), {} if name == "gates" else {"WIDE": SIDES[use]["WIDE"]}
        sizes = {"C": tile.chunk, "BD": tile.rows} | ({} if name == "gates" else {"BR": tile.columns})
        whole, options = fixed | wide | sizes, {"num_stages": 2}
        yield Form(_named(use, kernel, fixed), kernel, R, tile._asdict(), whole, options=options)


def _delta(use: str, K: int) -> Iterator[Form]:
    at = delta.tile(K)
    for kernel, more, columns, warps in (
        (delta.prepare, {}, at.some, at.warps // 2),
        (delta.forward, {"KEEP": False}, at.columns, at.warps),
        (delta.forward, {"KEEP": True}, at.columns, at.warps),
        (delta.backward, {}, at.columns, at.warps),
        (delta_gradients.pairs, {}, at.some, at.warps // 2),
        (delta_gradients.inputs, {}, at.some, at.warps),
        (delta_gradients.channels, {}, 32, 1),
    ):
        if kernel is delta_gradients.channels and not RULES[use]["WIDE"]:
            continue
        block = 32 if kernel is delta_gradients.channels else at.some
        fixed = RULES[use] | more | {"KP": at.rows, "BV": columns, "BK": block}
        tile = {"rows": at.rows, "columns": columns, "chunk": delta.C.value, "warps": warps}
        fixed = {n: value for n, value in fixed.items() if n in kernel.arg_names}
        yield Form(_named(use, kernel, more), kernel, K, tile, fixed)


def _packed(formats: tuple[str, ...]) -> Iterator[Form]:
    """Tiles here are blocks and columns; a chunk is tokens."""
    types, options = {"q_TS": "*i8", "codes_bS": "*u8", "codes2_bS": "*u8"}, {"enable_fp_fusion": False}
    for gated in (False, True):
        fixed: dict[str, Any] = {"GATED": gated, "BC": packed.WIDE}
        tile = {"rows": 1, "columns": packed.WIDE, "chunk": 1, "warps": 8}
        name = f"packed, quantise{', gated' if gated else ''}"
        yield Form(name, packed.quantise, None, tile, fixed, types, options)
    for format in formats:
        layout = LAYOUTS[format]
        scales = dict.fromkeys(("scales", "scales2"), "*fp16" if layout.zero is None else "*fp32")
        calls = itertools.product((1, 16, 512), (1, 1 << 20))
        tiles = {packed.tile(layout.rows, T, count, 2048) for T, count in calls}
        for one, two in itertools.product(sorted(tiles), (False, True)):
            kernel = packed.few if one.tokens == 1 else packed.many
            fixed = {"TWO": two, "R": layout.rows, "BT": one.tokens, "BB": one.blocks, "BC": one.columns}
            tile = {"rows": one.blocks, "columns": one.columns, "chunk": one.tokens, "warps": one.warps}
            name = f"packed {format}, {kernel.fn.__name__}{', two' if two else ''}"
            yield Form(name, kernel, layout.rows, tile, fixed, types | scales, options)
