"""Registers, spills and shared memory of Triton's kernels, compiled for GPUs that need not be there.

Every kernel, in each of its forms, for memories of 16 to 256 columns, with the tiles of
`perspectron.ops.triton.kernels`, is compiled for NVIDIA's sm_80 and sm_90 by the ptxas that Triton brings, and for
AMD's gfx942. Spills are bytes of a thread: for NVIDIA the largest of the stack, what is stored and what is loaded; for
AMD the private segment. Bars: at most 64 bytes, and no more shared memory than a block can have. The exit code is 1
where one is not met. Speed is not measured: that needs a GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from perspectron.ops.triton import blocks, kernels, rows

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
    """A kernel for a use, with what is fixed in it; `chunks` is its name among those by chunks."""

    name: str
    kernel: Any
    fixed: dict[str, bool]
    chunks: str = ""


SIDES = {
    "pdr": {"COLUMNS": True, "WIDE": True},
    "gla": {"COLUMNS": False, "WIDE": True},
    "ssd": {"COLUMNS": False, "WIDE": False},
}
FORMS = tuple(
    Form(f"{use}, {kernel.fn.__name__}{', states kept' if more.get('KEEP') else ''}", kernel, sides | more)
    for use, sides in SIDES.items()
    for kernel, more in (
        (kernels.forward, {"KEEP": False}),
        (kernels.forward, {"KEEP": True}),
        (kernels.backward, {}),
    )
)
UP, BOTH = {"GRAD": False, "READ": True}, {"GRAD": True, "READ": True}
LAST = {"GRAD": True, "READ": False}
FORMS += tuple(
    Form(f"{use}, {name}{', backwards' if fixed.get('GRAD') or fixed.get('BACK') else ''}",
         getattr(rows if name in ("prepare", "inner") else blocks, name), fixed, name)
    for use, wide, some in (
        ("pdr", True, [("prepare", {"READ": False}), ("rows", UP), ("inner", UP), ("inner", LAST), ("columns", BOTH)]),
        ("gla", True, [("prepare", {"READ": True}), ("columns", UP), ("rows", BOTH), ("inner", BOTH)]),
        ("gla", True, [("columns", LAST), ("states", {"BACK": False}), ("states", {"BACK": True})]),
        ("ssd", False, [("states", {"BACK": False}), ("states", {"BACK": True}), ("columns", UP), ("rows", BOTH)]),
        ("ssd", False, [("columns", LAST), ("gates", {})]),
    )
    for name, more in some
    for fixed in ({"WIDE": wide} | more if name in ("states", "rows", "columns") else more,)
)  # fmt: skip


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
    target, most = TARGETS[name]
    names, stages = form.kernel.arg_names, 2 if form.chunks else 3
    if not form.chunks:
        tile = kernels.tile(R)
        sizes = {"C": tile.chunk, "BD": tile.rows, "RP": tile.columns}
    elif form.chunks in ("prepare", "inner"):
        tile = blocks.Tile(16, {"prepare": rows.WIDTH, "inner": 32}[form.chunks], R, 1)
        sizes = {"W": tile.rows}
    else:
        tile = blocks.tile(form.chunks, R, form.fixed.get("GRAD", False) and form.fixed["READ"])
        sizes = {"C": tile.chunk, "BD": tile.rows, "BR": tile.columns}
    fixed = form.fixed | {n: size for n, size in sizes.items() if n in names}
    plain = ("T", "start", "chunks", "one", "count", "splits")
    types = {n: "constexpr" if n in fixed else "i32" if n in (*plain, "D", "R") else "*fp32" for n in names}
    even = [n for n in names if n not in (*fixed, *plain) and not (n == "R" and R % 16)]
    source = ASTSource(
        form.kernel,
        types,
        {(names.index(n),): value for n, value in fixed.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in even},
    )
    options = {"num_warps": tile.warps, "num_stages": stages}
    blocks.DOT = triton.language.constexpr("ieee" if target.backend == "hip" else "tf32x3")
    made = triton.compile(source, target=target, options=options)
    registers, spills = of_ptx(made.asm["ptx"]) if "ptx" in made.asm else of_amdgcn(made.asm["amdgcn"])
    shared = made.metadata.shared
    return Compiled(
        form.name, R, name, tile._asdict(), registers, spills, shared, spills <= SPILLS and shared <= most
    )


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
