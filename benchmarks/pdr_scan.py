"""Forward and backward of the PDR scan against the step loop and the document's materialised scan.

Contenders, all on the same inputs and output gradients: "kernel", the native scan that trainings on a CPU take; "tree",
that of PyTorch's operations; "loop", autograd through the plain step loop; "materialised", the document's scan
(docs/designs/perspective.md#scan). Bars: tree ≥ 20 times the loop, ≤ 0.6 GB of peak memory; the faster of kernel and
tree ≥ 0.55 of the matrix product's peak at the first shape, ≥ 0.6 at the second. Shares count the tree's products, for
the kernel too, which computes less. As in trainings, memory that is freed stays with the process while they are timed.
Peak memory is the rise over the inputs in a process of its own, gradients included.

Shapes: B batch, T time, L tokens of one chunk, D value width, R state rank.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import common
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from perspectron.ops import pdr
from perspectron.util.machine import memory_kept

TESTS = ("tests/ops/test_pdr.py", "tests/native/test_scan.py")
BARS = {"ratio_to_loop": 20.0, "peak_bytes": 0.6e9}
SOURCE_CHUNK = 256  # the document's


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    D: int
    R: int

    def __str__(self) -> str:
        return f"d {self.D}, r {self.R}, T {self.T}, B {self.B}"


SHAPES = {Shape(B=2, T=2048, D=512, R=64): 0.55, Shape(B=1, T=512, D=4096, R=256): 0.6}
"""With the bar for the share of the matrix product's peak."""
QUICK = {Shape(B=2, T=256, D=64, R=32): 0.0}  # more than what is freed before it is measured
AGREE = Shape(B=2, T=512, D=24, R=8)

Pair = tuple[Tensor, Tensor]
Scan = Callable[..., Pair]


def materialised(
    q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """Every state [D,R] of a chunk by a log-depth scan with O(L·D·R) work, chunks in sequence."""
    scale, outputs = q_BTR.shape[-1] ** -0.5, []
    for q, k, v, gamma in zip(
        *(x.split(SOURCE_CHUNK, 1) for x in (q_BTR, k_BTR, v_BTD, gamma_BTD)), strict=True
    ):
        A_BLD1, B_BLDR = prefixes((gamma[..., None], v[..., None] * k[..., None, :]))
        S_BLDR = A_BLD1 * state_BDR[:, None] + B_BLDR
        outputs.append((S_BLDR @ (q * scale)[..., None]).squeeze(-1))
        state_BDR = S_BLDR[:, -1]
    return torch.cat(outputs, 1), state_BDR


def after(first: Pair, second: Pair) -> Pair:
    """(A₂, B₂) ⊕ (A₁, B₁) = (A₂ A₁, A₂ B₁ + B₂)."""
    return second[0] * first[0], second[0] * first[1] + second[1]


def prefixes(elements: Pair) -> Pair:
    """Elements 0 to t composed, for every t: pairs first, then their prefixes, then the ones between."""
    if elements[0].shape[1] == 1:
        return elements
    even, odd = ((elements[0][:, i::2], elements[1][:, i::2]) for i in (0, 1))
    pairs = prefixes(after(even, odd))
    between = after((pairs[0][:, :-1], pairs[1][:, :-1]), (even[0][:, 1:], even[1][:, 1:]))
    A, B = (
        torch.stack([torch.cat([start[:, :1], rest], 1), pair], 2).flatten(1, 2)
        for start, rest, pair in zip(even, between, pairs, strict=True)
    )
    return A, B


SCANS: dict[str, Scan] = {
    "kernel": lambda *x: pdr.scan(*x, backend="native"),
    "tree": lambda *x: pdr.scan(*x, backend="torch"),
    "loop": lambda *x: pdr.scan(*x, backend="naive"),
    "materialised": materialised,
}


def estimated_bytes(name: str, shape: Shape) -> float:
    """Memory to have free before `name` is run. Autograd holds the loop's states about three times; of the
    materialised scan its elements at all levels (2 T), the inner prefixes (T) and the states (T), and works on
    6 L."""
    states, state = shape.T, 4.0 * shape.B * shape.D * shape.R
    if name == "materialised":
        return state * (4 * states + 6 * min(SOURCE_CHUNK, shape.T)) + 0.3e9
    return state * 3.2 * states + 0.3e9 if name == "loop" else 1e9


def inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """(q, k, v, gates about 0.95, a state) and the gradients of the two outputs."""
    draw = torch.Generator().manual_seed(0)
    B, T, D, R = shape.B, shape.T, shape.D, shape.R
    sizes = [(B, T, R), (B, T, R), (B, T, D), (B, T, D), (B, D, R), (B, T, D), (B, D, R)]
    *tensors, do, dstate = (torch.randn(size, generator=draw).to(dtype) for size in sizes)
    tensors[3] = torch.sigmoid(tensors[3] + 2.944)
    return [x.requires_grad_() for x in tensors], [do, dstate]


def passes(scan: Scan, tensors: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward; the gradient of every input."""
    return torch.autograd.grad(scan(*tensors), tensors, gradients)


def matmul_flops(shape: Shape) -> int:
    """Of the tree's matrix products alone, forward and backward, the chunks rebuilt in backward counted.

    Per chunk of L: forward 2L²R for q kᵀ, L(L-1)D for the tree (level b: L/2b products b×b×D), 4LDR for the
    read and the write of the state. Backward 6L²R, 3L(L-1)D and 10LDR: the first two once more and twice for
    their gradients, the state read, and four products for dq, dk, dX and the state's gradient.
    """
    total = 0
    for start in range(0, shape.T, pdr.CHUNK):
        L = 1 << (min(pdr.CHUNK, shape.T - start) - 1).bit_length()
        total += 8 * L * L * shape.R + 4 * L * (L - 1) * shape.D + 14 * L * shape.D * shape.R
    return shape.B * total


def agreement() -> dict[str, float]:
    """Largest relative difference of outputs and gradients from the loop, in float64 on a small shape."""
    tensors, gradients = inputs(AGREE, torch.float64)
    exact = [*SCANS["loop"](*tensors), *passes(SCANS["loop"], tensors, gradients)]
    worst = {}
    for name in ("tree", "materialised"):
        found = [*SCANS[name](*tensors), *passes(SCANS[name], tensors, gradients)]
        worst[name] = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))
        if worst[name] > 1e-10:
            raise SystemExit(f"not measured: {name} differs from the loop by {worst[name]:.1e} at {AGREE}")
    # Of baddbmm torch knows only the form that is not in place.
    in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **__: 2 * prod(a) * b[-1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        passes(SCANS["tree"], tensors, gradients)
    if counter.get_total_flops() != matmul_flops(AGREE):
        raise SystemExit(f"formula: {matmul_flops(AGREE)} FLOPs, counted: {counter.get_total_flops()}")
    return worst


def alone(spec: dict[str, Any]) -> dict[str, Any]:
    """One contender in this process: its peak memory and seconds, once; then the tree's seconds beside it."""
    torch.set_num_threads(spec["threads"])
    shape, scan = Shape(**spec["shape"]), SCANS[spec["name"]]
    passes(scan, *inputs(Shape(B=1, T=256, D=16, R=8)))  # loads the libraries
    tensors, gradients = inputs(shape)
    start = time.perf_counter()
    with common.Peak() as peak:
        kept = passes(scan, tensors, gradients)
    seconds = time.perf_counter() - start
    del kept
    beside = common.interleave({"tree": lambda: passes(SCANS["tree"], tensors, gradients)}, 3)["tree"]
    return {"peak_bytes": peak.bytes, "seconds": seconds, "tree_seconds": beside}


def measure(shape: Shape, threads: int, repeats: int, *, quick: bool) -> dict[str, Any]:
    tensors, gradients = inputs(shape)
    peak = common.matmul_peak(torch.float32, quick=quick)
    contenders = {
        name: lambda s=SCANS[name]: passes(s, tensors, gradients) for name in ("kernel", "tree", "loop")
    }
    with memory_kept():
        seconds = common.interleave(contenders, repeats)
    peak = max(peak, common.matmul_peak(torch.float32, quick=quick))
    children = {
        name: common.child(
            {"name": name, "shape": asdict(shape), "threads": threads}, estimated_bytes(name, shape)
        )
        for name in (["materialised"] if quick else SCANS)
    }
    children |= {name: {"not_run": "quick"} for name in SCANS if name not in children}
    kernel, tree = (common.Spread.of(seconds[name]) for name in ("kernel", "tree"))
    flops = matmul_flops(shape)
    once = children["materialised"]
    against = None
    if "not_run" not in once:
        against = common.Spread.of([once["seconds"] / s for s in once["tree_seconds"]])
    return {
        "shape": asdict(shape),
        "kernel_seconds": kernel,
        "kernel_to_tree": common.ratios(seconds["tree"], seconds["kernel"]),
        "kernel_share_of_matmul_peak": flops / kernel.median / peak,
        "tree_seconds": tree,
        "loop_seconds": common.Spread.of(seconds["loop"]),
        "materialised_seconds": once.get("seconds"),
        "ratio_to_loop": common.ratios(seconds["loop"], seconds["tree"]),
        "ratio_to_materialised": against,
        "memory": children,
        "matmul_flops": flops,
        "gflops_per_second": flops / tree.median / 1e9,
        "matmul_peak_gflops_per_second": peak / 1e9,
        "share_of_matmul_peak": flops / tree.median / peak,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """The bars that a shape does not reach."""
    share = max(result["kernel_share_of_matmul_peak"], result["share_of_matmul_peak"])
    peak = result["memory"]["tree"].get("peak_bytes")
    met = {
        "share_of_matmul_peak": share >= result["share_bar"],
        "ratio_to_loop": result["ratio_to_loop"].median >= BARS["ratio_to_loop"],
        "peak_bytes": peak is None or peak <= BARS["peak_bytes"],
    }
    return [name for name, well in met.items() if not well]


def show(report: common.Report, shape: Shape, result: dict[str, Any]) -> None:
    once, against = result["materialised_seconds"], result["ratio_to_materialised"]
    kernel = result["kernel_to_tree"]
    rows = [
        ["kernel", result["kernel_seconds"].text(1e3), f"1/{kernel.text()}"],
        ["tree", result["tree_seconds"].text(1e3), "1"],
        ["loop", result["loop_seconds"].text(1e3), result["ratio_to_loop"].text()],
        ["materialised", f"{once * 1e3:.4g} (once)", against.text()] if once else ["materialised", "-", "-"],
    ]
    report.say(f"{shape}: forward and backward, medians (least–greatest)")
    memory = [common.peak_text(result["memory"][row[0]]) for row in rows]
    report.table(
        ["", "ms", "times the tree", "peak memory"],
        [[*row, peak] for row, peak in zip(rows, memory, strict=True)],
    )
    report.say(
        f"tree: {result['matmul_flops'] / 1e9:.2f} GFLOP in its matrix products, "
        f"{result['gflops_per_second']:.1f} GFLOP/s, {result['share_of_matmul_peak']:.0%} of the "
        f"{result['matmul_peak_gflops_per_second']:.0f} GFLOP/s of a matrix product",
        f"kernel: {result['kernel_share_of_matmul_peak']:.0%} of it by the same count",
        f"bars: {result['share_bar']:.0%} for the faster of the two, "
        f"{result['ratio_to_loop'].median:.1f} × the loop (≥ {BARS['ratio_to_loop']:g}), peak "
        f"{common.peak_text(result['memory']['tree'])} (≤ {BARS['peak_bytes'] / 1e9:g} GB)",
        f"missed: {', '.join(result['missed']) or 'none'}",
        "",
    )


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(alone(json.loads(args.child))))
        return
    torch.set_num_threads(args.threads)
    shapes, repeats = (QUICK, 2) if args.quick else (SHAPES, args.repeats)
    report = common.Report(args, TESTS, dtype="float32", shapes="; ".join(map(str, shapes)))
    worst = agreement()
    report.say(
        f"largest difference from the loop, float64, {AGREE}: tree {worst['tree']:.1e}, "
        f"materialised {worst['materialised']:.1e}; the FLOP formula equals torch's count",
        "",
    )
    results = []
    for shape, bar in shapes.items():
        results.append(measure(shape, args.threads, repeats, quick=args.quick) | {"share_bar": bar})
        results[-1]["missed"] = missed(results[-1])
        show(report, shape, results[-1])
    report.finish({"bars": BARS, "agreement": worst, "shapes": results})


if __name__ == "__main__":
    main()
