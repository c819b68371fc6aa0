"""Registers, spills and shared memory of Triton's kernels, compiled for GPUs that need not be there.

Every kernel, in each of its forms (`triton_forms.py`), is compiled for NVIDIA's sm_80 and sm_90 by the ptxas that
Triton brings, and for AMD's gfx942; with products of float32 and, on sm_90, of TensorFloat-32, too. Spills are bytes of
a thread: for NVIDIA the largest of the stack, what is stored and what is loaded; for AMD the private segment. Bars: at
most 64 bytes, and no more shared memory than a block can have. Some forms are known to spill more (`KNOWN`), which
makes them slower, not wrong; they have bars of their own. The exit code is 1 where a bar is not met. Speed is not
measured: that needs a GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported

import multiprocessing
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
from triton_forms import CHUNKS, DELTA, TOKENS, Form, forms

TESTS = ("tests/triton",)
SPILLS = 64
"""Bytes of a thread."""
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10, ("tf32x3",)),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10, ("tf32x3", "tf32")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10, ("ieee",)),
}
"""Each GPU, the bytes of shared memory that one of its blocks can have, and the precisions of its products."""
INTEGERS = (*"TDRKVNSGh", "blocks", "start", "chunks", "one", "count", "splits")
FLOATS = ("scale", "sign")
UNEVEN = ("count", "splits", *FLOATS)
"""Numbers that 16 need not divide, though Triton would make a form of its own where it does."""
EDGES = {("gla, rows, backwards", 16), ("ssd, states, backwards", 32)}
"""Forms, and their columns, that hold the bar with one release of Triton and not with another."""
KNOWN = {"sm_80": 2048, "not by 16": 640, "edge": 160}
"""Bytes of spills that are known, by their reason. sm_80: its matrix units read all operands from registers, which
products of float32 fill twice. not by 16: columns that 16 does not divide, whose loads are of single numbers."""


def uneven(form: Form) -> bool:
    """True if 16 does not divide the memory's size."""
    return form.R is not None and form.R % 16 > 0 and "R" not in form.fixed


def known(form: Form, target: str, precision: str | None) -> str | None:
    """The reason why this spills more than others, if there is one."""
    if target == "sm_80" and precision is not None:
        return "sm_80"
    if uneven(form):
        return "not by 16"
    return "edge" if (form.name, form.R) in EDGES else None


@dataclass(frozen=True)
class Compiled:
    """The resources of one compiled kernel."""

    form: str
    R: int | None
    target: str
    precision: str | None
    tile: dict[str, int]
    registers: int
    spills: int
    shared: int
    known: str | None
    holds: bool


def compiled(form: Form, name: str, precision: str | None) -> Compiled:
    """The kernel with pointers and sizes that 16 divides as far as they do."""
    target, most, _ = TARGETS[name]
    names, fixed = form.kernel.arg_names, form.fixed | ({} if precision is None else {"DOT": precision})
    kinds = dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(FLOATS, "fp32") | form.types
    kinds |= dict.fromkeys(fixed, "constexpr")
    odd = {p.name for p in form.kernel.params if p.do_not_specialize} | {*fixed, *UNEVEN}
    if uneven(form):
        odd |= {"R", "K", "V"}
    source = ASTSource(
        form.kernel,
        {n: kinds.get(n, "*fp32") for n in names},
        {(names.index(n),): value for n, value in fixed.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in odd},
    )
    options = {"num_warps": form.tile["warps"]} | form.options
    made = triton.compile(source, target=target, options=options)
    registers, spills = of_ptx(made.asm["ptx"]) if "ptx" in made.asm else of_amdgcn(made.asm["amdgcn"])
    shared = made.metadata.shared
    why = known(form, name, precision) if spills > SPILLS else None
    holds = spills <= (SPILLS if why is None else KNOWN[why]) and shared <= most
    return Compiled(form.name, form.R, name, precision, form.tile, registers, spills, shared, why, holds)


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


JOBS: list[tuple[Form, str, str | None]] = []
"""What is compiled, in the order of the table."""


def job(number: int) -> Compiled:
    """One of them, in a process of its own."""
    return compiled(*JOBS[number])


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    sizes = [", ".join(map(str, some[:1] if args.quick else some)) for some in (TOKENS, CHUNKS, DELTA)]
    shapes = "states of {} columns, by chunks {}; of delta rules {} rows and columns".format(*sizes)
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    report.say(f"   triton: {triton.__version__}", "")
    for number, form in enumerate(forms(args.quick)):
        several = "DOT" in form.kernel.arg_names
        ways = [(t, p) for t, (*_, all_) in TARGETS.items() for p in (all_ if several else (None,))]
        ways = [ways[number % len(ways)]] if args.quick else ways  # quick: each form for one, in turn
        JOBS.extend((form, target, precision) for target, precision in ways)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = pool.map(job, range(len(JOBS)), 1)
    rows = [
        [one.form, str(one.R or ""), one.target, one.precision or "", f"{one.tile['rows']} x {one.tile['columns']}",
         str(one.tile["chunk"]), str(one.tile["warps"]), str(one.registers), str(one.spills), str(one.shared),
         (one.known or "yes") if one.holds else "NO"]
        for one in found
    ]  # fmt: skip
    header = (
        "kernel",
        "R",
        "target",
        "products",
        "tile",
        "chunk",
        "warps",
        "registers",
        "spills B",
        "shared B",
        "holds",
    )
    report.table(header, rows)
    missed = [f"{one.form}, R {one.R}, {one.target}, {one.precision}" for one in found if not one.holds]
    spills = {why or "": [one.spills for one in found if one.known == why] for why in (None, *KNOWN)}
    worst: dict[str, Any] = {"spills": max(spills.pop("")), "shared": max(one.shared for one in found)}
    worst["known"] = {
        why: {"forms": len(some), "spills": max(some, default=0)} for why, some in spills.items()
    }
    shared = {name: most for name, (_, most, _) in TARGETS.items()}
    bars = {"spills": SPILLS, "known": KNOWN, "shared": shared}
    results = {"kernels": [asdict(one) for one in found], "worst": worst, "bars": bars, "missed": missed}
    report.say(f"worst: {worst}")
    report.finish({"triton": triton.__version__} | results)
    if missed:
        raise SystemExit(f"over the bounds: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
