"""Native products of packed matrices with one token against the speed of reading, with many against the VNNI peak.

One token: cold weights, the working set several times the cache, in turns with a pure read of as many cold bytes of the
same buffers. The read loads every byte in the same stretches, in four streams at once, and does nothing else. Many
tokens: multiply-adds a second as a share of the best of a loop of int8 dot products on registers, in turns with it. One
thread is measured by its processor time, so that others on the machine count less; two by the clock on the wall. Where
llama-cpp-python is installed, ggml's ternary formats multiply the same shapes on one thread, in turns with ours.
Bars: base-3 at 0.90 of the read speed on one thread and 0.80 on two, 0.6 of the peak at 64 and 512 tokens; 4 times
ggml's TQ1_0 and twice its TQ2_0. Shares are the lower of the two shapes'.

Shapes: N rows × K columns, T tokens.
"""

import ctypes
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from perspectron import native

TESTS = ("tests/native",)
BARS = {
    **{"read_share_1t": 0.90, "read_share_2t": 0.80, "gemm_share_64": 0.6, "gemm_share_512": 0.6},
    **{"times_TQ1_0": 4.0, "times_TQ2_0": 2.0},
}
SHAPES, QUICK = ((11008, 4096), (4096, 11008)), ((320, 256), (256, 768))
WORKING_SET = 384e6
TOKENS = (64, 512)
PEAKS = {"avx512": "AVX-512 VNNI", "avx2": "AVX2 without VNNI", "scalar": "plain C++"}
GGML_TYPES = {"TQ1_0": 34, "TQ2_0": 35}  # of ggml.h


class Weights:
    """Matrices of one format and shape, `total` bytes or more; codes and scales of each in one buffer."""

    def __init__(self, format: str, N: int, K: int, total: float) -> None:
        self.format, self.N, self.K = format, N, K
        R, S, line = native.ROWS[format], native.padded(K), native.line_of(format, K)
        blocks = -(-N // R)
        sizes = dict.fromkeys(("ternary", "int8", *native.TILES), 4 * N)
        scales = sizes.get(format, 4 * R * blocks * -(-S // 128))
        draw = torch.Generator().manual_seed(0)
        self.buffers, self.pairs, self.turn = [], [], 0
        for _ in range(max(2, -(-int(total) // (blocks * line + scales)))):
            buffer = torch.randint(0, 243, (blocks * line + scales,), generator=draw, dtype=torch.uint8)
            codes, rest = buffer[: blocks * line].view(blocks, line), buffer[blocks * line :]
            if format in sizes:
                self.pairs.append((codes, rest.view(torch.float32).fill_(0.02)))
            else:
                self.pairs.append((codes, rest.view(torch.float16).fill_(0.02).view(blocks, -1, 2 * R)))
            self.buffers.append(buffer)

    def next(self) -> int:
        """Which matrix has not been touched for longest, or nearly."""
        self.turn += 1
        return self.turn * 7 % len(self.buffers) if len(self.buffers) % 7 else self.turn % len(self.buffers)

    def multiply(self, x_TK: Tensor) -> Tensor:
        return native.linear(x_TK, *self.pairs[self.next()], self.format, self.N)

    def read(self, threads: int) -> int:
        return native.read(self.buffers[self.next()], threads)


def turns(contenders: dict[str, Callable[[], object]], rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each call, as common.interleave, but by the processor time of one thread."""
    if threads > 1:
        return common.interleave(contenders, rounds)
    names, seconds = list(contenders), {name: list[float]() for name in contenders}
    for turn in range(rounds + 1):
        for name in names if turn % 2 == 0 else reversed(names):
            start = time.thread_time()
            contenders[name]()
            if turn > 0:
                seconds[name].append(time.thread_time() - start)
    return seconds


def gemv(weights: Weights, threads: int, repeats: int) -> dict[str, Any]:
    """One token: its share of the read speed, pair by pair."""
    torch.set_num_threads(threads)
    x = torch.randn(1, weights.K)
    rounds = repeats * len(weights.buffers)
    contenders = {"product": lambda: weights.multiply(x), "read": lambda: weights.read(threads)}
    seconds = turns(contenders, rounds, threads)
    nbytes = weights.buffers[0].nbytes
    return {
        "share": common.ratios(seconds["read"], seconds["product"]),
        "bytes_per_second": common.Spread.of([nbytes / s for s in seconds["product"]]),
        "read_bytes_per_second": common.Spread.of([nbytes / s for s in seconds["read"]]),
        "bits_per_weight": 8 * nbytes / (weights.N * weights.K),
    }


def gemm(weights: Weights, T: int, threads: int, repeats: int) -> dict[str, Any]:
    """T tokens: their share of the best peak."""
    torch.set_num_threads(threads)
    x, peaks = torch.randn(T, weights.K), []
    contenders = {
        "product": lambda: weights.multiply(x),
        "peak": lambda: peaks.extend(native.peak(threads) for _ in range(5)),
    }
    seconds = turns(contenders, repeats, threads)["product"]
    rates = [T * weights.N * weights.K / s for s in seconds]
    return {
        "share": common.Spread.of([rate / max(peaks) for rate in rates]),
        "multiply_adds_per_second": common.Spread.of(rates),
        "peak_per_second": common.Spread.of(peaks),
    }


class Ggml:
    """ggml's product of a matrix with one token, from the libraries that llama-cpp-python brings."""

    class Parameters(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    def __init__(self) -> None:
        package = find_spec("llama_cpp")
        if package is None or package.origin is None:
            raise OSError("llama-cpp-python is not installed")
        folder = Path(package.origin).parent / "lib"
        self.base, self.cpu = (
            ctypes.CDLL(str(next(iter(folder.glob(f"lib{name}.*")), folder / name)), ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu")
        )
        pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        for name, result, arguments in (
            ("ggml_init", pointer, (self.Parameters,)),
            ("ggml_new_tensor_2d", pointer, (pointer, number, long, long)),
            ("ggml_mul_mat", pointer, (pointer, pointer, pointer)),
            ("ggml_new_graph", pointer, (pointer,)),
            ("ggml_build_forward_expand", None, (pointer, pointer)),
            ("ggml_get_data", pointer, (pointer,)),
            ("ggml_free", None, (pointer,)),
            ("ggml_quantize_chunk", ctypes.c_size_t, (number, pointer, pointer, long, long, long, pointer)),
        ):
            getattr(self.base, name).argtypes, getattr(self.base, name).restype = arguments, result
        self.cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, number)
        self.cpu.ggml_cpu_init()

    def contender(self, kind: str, N: int, K: int, total: float) -> tuple[Callable[[], object], object]:
        """A function that multiplies the next of some cold matrices by one token, and what it stands on."""
        base = self.base
        count = max(2, -(-int(total) // (N * K // 4)))
        context = base.ggml_init(
            self.Parameters(int(count * (N * K * 0.3 + 16 * (N + K) + 1e6) + 32e6), None, False)
        )
        dense, graphs = torch.randint(-1, 2, (N, K)).float(), []
        for _ in range(count):
            matrix = base.ggml_new_tensor_2d(context, GGML_TYPES[kind], K, N)
            token = base.ggml_new_tensor_2d(context, 0, K, 1)
            base.ggml_quantize_chunk(
                GGML_TYPES[kind], dense.data_ptr(), base.ggml_get_data(matrix), 0, N, K, None
            )
            ctypes.memmove(base.ggml_get_data(token), torch.randn(K).data_ptr(), 4 * K)
            graphs.append(base.ggml_new_graph(context))
            base.ggml_build_forward_expand(graphs[-1], base.ggml_mul_mat(context, matrix, token))
        turn = iter(range(10**9))
        return lambda: self.cpu.ggml_graph_compute_with_ctx(context, graphs[next(turn) % count], 1), context


def against_ggml(shapes: tuple[tuple[int, int], ...], total: float, repeats: int) -> dict[str, Any]:
    """How many times as fast as ggml on one thread, by format and shape; or why that is not measured."""
    try:
        ggml = Ggml()
    except OSError as error:
        return {"not_run": str(error)}
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for N, K in shapes:
        ours, x = Weights("ternary", N, K, total), torch.randn(1, K)
        for kind in GGML_TYPES:
            theirs, context = ggml.contender(kind, N, K, total)
            contenders = {"ours": lambda w=ours, x=x: w.multiply(x), "theirs": theirs}
            seconds = turns(contenders, 10 * repeats, 1)
            found.setdefault(kind, {})[f"{N}x{K}"] = common.ratios(seconds["theirs"], seconds["ours"])
            ggml.base.ggml_free(context)
    return found


def headline(results: dict[str, Any]) -> dict[str, float | None]:
    """Base-3's figures, each the lower of the shapes' medians; None where it was not measured."""

    def lowest(what: str, threads: int) -> float | None:
        wanted = ("ternary", what, threads)
        shares = (
            run["share"].median
            for run in results["runs"]
            if (run["format"], run["what"], run["threads"]) == wanted
        )
        return min(shares, default=None)

    line = {f"read_share_{threads}t": lowest("1 token", threads) for threads in (1, 2)}
    line |= {f"gemm_share_{T}": lowest(f"{T} tokens", 1) for T in TOKENS}
    for kind in GGML_TYPES:
        line[f"times_{kind}"] = min(
            (spread.median for spread in results["ggml"].get(kind, {}).values()), default=None
        )
    return line


def show(report: common.Report, runs: list[dict[str, Any]]) -> None:
    rows = []
    for run in runs:
        if run["what"] == "1 token":
            speed, against, unit = run["bytes_per_second"], run["read_bytes_per_second"], "GB/s"
        else:
            speed, against, unit = run["multiply_adds_per_second"], run["peak_per_second"], "G/s"
        name = f"{run['format']} {run['N']} × {run['K']}"
        rates = [f"{spread.median / 1e9:.3g} {unit}" for spread in (speed, against)]
        rows.append([name, run["what"], str(run["threads"]), *rates, run["share"].text()])
    report.table(["", "", "threads", "product", "read or peak", "share of it"], rows)


def main() -> None:
    args = common.parser(__doc__ or "", threads=2, repeats=5).parse_args()
    if not native.available():
        raise SystemExit(f"not measured: native kernels are {native.reason()}")
    shapes, total, repeats = (QUICK, 1e6, 2) if args.quick else (SHAPES, WORKING_SET, args.repeats)
    tokens = (TOKENS[0],) if args.quick else TOKENS
    peak = f"the peak is of {PEAKS[native.isa()]} instructions"
    report = common.Report(
        args,
        TESTS,
        dtype=f"int8 activations, {native.isa()}; {peak}",
        shapes=", ".join(f"{n} × {k}" for n, k in shapes),
    )
    runs = []
    for format in native.FORMATS:
        for N, K in shapes:
            weights = Weights(format, N, K, total)
            for threads in sorted({1, args.threads}):
                which = {"format": format, "N": N, "K": K, "threads": threads}
                runs.append(which | {"what": "1 token"} | gemv(weights, threads, repeats))
                for T in tokens:
                    runs.append(which | {"what": f"{T} tokens"} | gemm(weights, T, threads, repeats))
        show(report, [run for run in runs if run["format"] == format])
    results = {"bars": BARS, "runs": runs, "ggml": against_ggml(shapes, total, repeats)}
    line = headline(results)
    results["missed"] = [name for name, bar in BARS.items() if line[name] is not None and line[name] < bar]
    if "not_run" in results["ggml"]:
        report.say(f"against ggml: not run, {results['ggml']['not_run']}")
    for name, value in line.items():
        held = "not measured" if value is None else "MISSED" if name in results["missed"] else "held"
        report.say(f"{name:>15}: {'-' if value is None else f'{value:.3f}'} (bar {BARS[name]:g}): {held}")
    report.finish(results, line)


if __name__ == "__main__":
    main()
