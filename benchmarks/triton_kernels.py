"""Registers, spills and shared memory of Triton's kernels, compiled for GPUs that need not be there.

Every kernel, in each of its forms, for memories of 16 to 256 columns, with the tiles of
`perspectron.ops.triton.kernels`, and those of packed matrices, for few tokens and many, is compiled for NVIDIA's sm_80
and sm_90 by the ptxas that Triton brings, and for AMD's gfx942. Spills are bytes of a thread: for NVIDIA the largest of
the stack, what is stored and what is loaded; for AMD the private segment. Bars: at most 64 bytes, and no more shared
memory than a block can have. The exit code is 1 where one is not met. Speed is not measured: that needs a GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from perspectron.ops.packing import LAYOUTS
from perspectron.ops.triton import kernels, packed_kernels

TESTS = ("tests/triton",)
COLUMNS = (16, 32, 64, 100, 128, 200, 256)
SPILLS = 64
"""Bytes of a thread."""
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
"""Each GPU, and the bytes of shared memory that one of its blocks can have."""


@dataclass(frozen=True)
class Form:
    """A kernel for a use, with what is fixed in it."""

    name: str
    kernel: Any
    fixed: dict[str, bool]


FORMS = tuple(
    Form(f"{use}, {kernel.fn.__name__}{', states kept' if more.get('KEEP') else ''}", kernel, sides | more)
    for use, sides in {
        "pdr": {"COLUMNS": True, "WIDE": True},
        "gla": {"COLUMNS": False, "WIDE": True},
        "ssd": {"COLUMNS": False, "WIDE": False},
    }.items()
    for kernel, more in (
        (kernels.forward, {"KEEP": False}),
        (kernels.forward, {"KEEP": True}),
        (kernels.backward, {}),
    )
)


@dataclass(frozen=True)
class Compiled:
    """The resources of one compiled kernel."""

    form: str
    R: int
    target: str
    tile: dict[str, int]
    registers: int
    spills: int
    shared: int
    holds: bool


def compiled(form: Form, R: int, name: str) -> Compiled:
    """The kernel for R columns, with pointers and sizes that 16 divides as far as they do."""
    tile, names = kernels.tile(R), form.kernel.arg_names
    fixed = form.fixed | {"C": tile.chunk, "BD": tile.rows, "RP": tile.columns}
    integers = ("T", "D", "R")
    types = {n: "constexpr" if n in fixed else "i32" if n in integers else "*fp32" for n in names}
    even = [n for n in names if n not in (*fixed, "T") and not (n == "R" and R % 16)]
    return _compiled(form, R, name, tile._asdict(), types, fixed, even, {})


def _compiled(
    form: Form,
    R: int,
    name: str,
    tile: dict[str, int],
    types: dict[str, str],
    fixed: dict[str, Any],
    even: list[str],
    options: dict[str, Any],
) -> Compiled:
    target, most = TARGETS[name]
    names = form.kernel.arg_names
    source = ASTSource(
        form.kernel,
        types,
        {(names.index(n),): value for n, value in fixed.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in even},
    )
    made = triton.compile(source, target=target, options={"num_warps": tile["warps"]} | options)
    registers, spills = of_ptx(made.asm["ptx"]) if "ptx" in made.asm else of_amdgcn(made.asm["amdgcn"])
    shared = made.metadata.shared
    return Compiled(form.name, R, name, tile, registers, spills, shared, spills <= SPILLS and shared <= most)


def packed(name: str, formats: tuple[str, ...] = tuple(LAYOUTS)) -> Iterator[Compiled]:
    """The kernels of packed matrices, of which R rows have common bytes; in the columns of the table the blocks and
    columns of a tile and, as its chunk, tokens."""
    pointers = {"q_TS": "*i8", "codes_bS": "*u8", "codes2_bS": "*u8"}
    for gated in (False, True):
        fixed: dict[str, Any] = {"GATED": gated, "BC": packed_kernels.WIDE}
        tile = {"rows": 1, "columns": packed_kernels.WIDE, "chunk": 1, "warps": 8}
        form = Form(f"packed, quantise{', gated' if gated else ''}", packed_kernels.quantise, {})
        yield _packed(form, 1, name, tile, fixed, pointers)
    for format in formats:
        layout = LAYOUTS[format]
        scales = dict.fromkeys(("scales", "scales2"), "*fp16" if layout.zero is None else "*fp32")
        tiles = {
            packed_kernels.tile(layout.rows, T, blocks, 2048)
            for T, blocks in itertools.product((1, 16, 512), (1, 1 << 20))
        }
        for one, two in itertools.product(sorted(tiles), (False, True)):
            kernel = packed_kernels.few if one.tokens == 1 else packed_kernels.many
            fixed = {"TWO": two, "R": layout.rows, "BT": one.tokens, "BB": one.blocks, "BC": one.columns}
            tile = {"rows": one.blocks, "columns": one.columns, "chunk": one.tokens, "warps": one.warps}
            form = Form(f"packed {format}{', two' if two else ''}, {kernel.fn.__name__}", kernel, {})
            yield _packed(form, layout.rows, name, tile, fixed, pointers | scales)


def _packed(
    form: Form, R: int, name: str, tile: dict[str, int], fixed: dict[str, Any], pointers: dict[str, str]
) -> Compiled:
    names = [n for n in form.kernel.arg_names if n not in fixed]
    integers = ("T", "blocks", "N", "K", "S", "G")
    types = {n: pointers.get(n, "i32" if n in integers else "*fp32") for n in names}
    even = [n for n in names if n not in integers or n in ("K", "S")]
    types |= dict.fromkeys(fixed, "constexpr")
    return _compiled(form, R, name, tile, types, fixed, even, {"enable_fp_fusion": False})


def of_ptx(ptx: str) -> tuple[int, int]:
    """Registers and bytes of spills, as ptxas reports them."""
    (name,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = get_ptxas(int(re.sub(r"\D", "", name))).path
        command = [ptxas, "-v", f"--gpu-name={name}", source, "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), max(map(int, stack))


def of_amdgcn(text: str) -> tuple[int, int]:
    """Vector registers and bytes of the private segment, from the metadata of the code object."""
    (registers,) = re.findall(r"^\s+\.vgpr_count:\s+(\d+)", text, re.MULTILINE)
    (private,) = re.findall(r"^\s+\.private_segment_fixed_size:\s+(\d+)", text, re.MULTILINE)
    return int(registers), int(private)


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    columns = COLUMNS[:1] if args.quick else COLUMNS
    shapes = f"states of {', '.join(map(str, columns))} columns"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    report.say(f"   triton: {triton.__version__}", "")
    found = [compiled(form, R, target) for form in FORMS for R in columns for target in TARGETS]
    formats = ("int8",) if args.quick else tuple(LAYOUTS)
    found += [one for target in TARGETS for one in packed(target, formats)]
    rows = [
        [one.form, str(one.R), one.target, f"{one.tile['rows']} x {one.tile['columns']}", str(one.tile["chunk"]),
         str(one.tile["warps"]), str(one.registers), str(one.spills), str(one.shared), "yes" if one.holds else "NO"]
        for one in found
    ]  # fmt: skip
    header = ("kernel", "R", "target", "tile", "chunk", "warps", "registers", "spills B", "shared B", "holds")
    report.table(header, rows)
    missed = [f"{one.form}, R {one.R}, {one.target}" for one in found if not one.holds]
    worst = {"spills": max(one.spills for one in found), "shared": max(one.shared for one in found)}
    bars = {"spills": SPILLS, "shared": {name: most for name, (_, most) in TARGETS.items()}}
    results = {"kernels": [asdict(one) for one in found], "worst": worst, "bars": bars, "missed": missed}
    report.finish({"triton": triton.__version__} | results)
    if missed:
        raise SystemExit(f"over the bounds: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
