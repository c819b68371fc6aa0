"""The tables of docs/scale.md that say what ran on a GPU, from results/gpu: python benchmarks/on_gpu/page.py

It rewrites what stands between the two marks. A test compares the page with what this would write.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]

from on_gpu import frame  # noqa: E402

RESULTS, PAGE = ROOT / "results" / "gpu", ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- written by benchmarks/on_gpu/page.py -->", "<!-- until here -->"
NOTHING = "Nothing has run on a GPU."
Units = Mapping[str, Mapping[str, Any]]
"""The results of a stage's units, by name."""


def page() -> str:
    """The page with its tables as the results say."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    parts = [tables(folder) for folder in sorted(RESULTS.glob("*/"))] or [f"\n{NOTHING}\n\n"]
    return f"{before}{BEGIN}\n{''.join(parts)}{END}{rest.split(END)[1]}"


def tables(folder: Path) -> str:
    """What stands between the marks."""
    found = {name: frame.read(folder / f"{name}.json") for name in TABLES}
    found = {name: stage for name, stage in found.items() if stage}
    if not found:
        return f"\n{NOTHING}\n\n"
    parts = [_conditions(list(found.values()))]
    for name, stage in found.items():
        results = {unit: how["result"] for unit, how in stage["units"].items() if "result" in how}
        if results:
            parts.append(TABLES[name](results).rstrip())
            if left := len(stage["units"]) - len(results):
                parts[-1] += (
                    f"\n\nLeft of this stage, for want of time or memory: {left} of {len(stage['units'])} measurements."
                )
    return "\n" + "\n\n".join(parts) + "\n\n"


def _conditions(stages: Sequence[Mapping[str, Any]]) -> str:
    """One line: the device, the versions, the dates."""
    first = stages[0]["conditions"]
    dates = sorted({stage["conditions"]["date"][:10] for stage in stages})
    names = sorted({stage["conditions"]["device"] for stage in stages})
    versions = f"torch {first['torch']}, Triton {first['triton']}"
    if "cuda" in first:
        versions += f", CUDA {first['cuda']}, driver {first['driver']}"
    said = f"Measured on {' to '.join(dict.fromkeys((dates[0], dates[-1])))}: {versions}."
    return f"#### {' and '.join(names)}\n\n{said}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(seconds: Mapping[str, float]) -> str:
    """Milliseconds: the median, and the least and greatest."""
    return "{:.3g} ({:.3g}–{:.3g})".format(*(1e3 * seconds[key] for key in ("median", "low", "high")))


def _count(number: float) -> str:
    return f"{number:,.0f}"


# ---------------------------------------------------------------- the stages


def _selftest(units: Units) -> str:
    rows = [row for unit in units.values() if isinstance(unit.get("rows"), list) for row in unit["rows"]]
    worst: dict[str, list[float]] = {}
    for row in rows:
        gradients = row["gradients"] / row["gradients_bound"] if row["gradients"] is not None else 0.0
        worst.setdefault(row["backend"], []).append(max(row["forward"] / row["forward_bound"], gradients))
    held = sum(row["holds"] for row in rows)
    each = [[name, str(len(errors)), f"{max(errors):.2f}"] for name, errors in worst.items()]
    return (
        f"**Every operation against float64** (`selftest`): {held} of {len(rows)} comparisons are within their "
        "bounds.\n\n" + table(("backend", "comparisons", "largest error, in bounds"), each)
    )


def _suite(units: Units) -> str:
    rows = [
        [name, *(str(unit.get(key, 0)) for key in ("passed", "failed", "skipped")), f"{unit['seconds']:.0f}"]
        for name, unit in units.items()
    ]
    return "**The suite's tests on the device** (`pytest --device cuda`)\n\n" + table(
        ("tests", "passed", "failed", "skipped", "s"), rows
    )


def _kernels(units: Units) -> str:
    copy, products = units["ceilings"]["bytes/s"], units["ceilings"]["flop/s"]
    said = (
        f"**Recurrences beside fla-core's.** A copy moves {copy / 1e12:.2f} TB/s, a bf16 product does "
        f"{products['bf16 product'] / 1e12:.0f} TFLOP/s. Ours take float32; fla's take bfloat16. Milliseconds of "
        "forward + backward; in brackets the largest relative error of an output or a gradient; then fla's time by "
        "ours, above 1 where ours is faster.\n\n"
    )
    rows = []
    for name, unit in units.items():
        if "sides" not in unit or "shape" not in unit:
            continue
        for side, of in unit["sides"].items():
            if (
                "forward + backward" not in of
                or isinstance(of["forward + backward"], str)
                or side not in OURS
            ):
                continue
            ratios = {
                way: unit["fla_seconds_by_ours"][way].get(side) for way in of if way.startswith("forward")
            }
            fla = unit["sides"]["fla"].get("forward + backward")
            rows.append(
                [name, side, f"{_ms(of['forward + backward']['seconds'])} [{max(of['errors'].values()):.0e}]",
                 f"{_ms(fla['seconds'])} [{max(unit['sides']['fla']['errors'].values()):.0e}]" if fla else "–",
                 *(f"{r['median']:.2f}" if (r := ratios.get(way)) else "–" for way in WAYS)]
            )  # fmt: skip
    return said + table(("recurrence", "ours", "ms", "fla's ms", "forward", "forward + backward"), rows)


OURS = ("triton", "triton, tf32")
"""Sides that have a line of their own."""
WAYS = ("forward", "forward + backward")


def _training(units: Units) -> str:
    rows = [
        [name, _count(unit["params"]), f"{unit['rows']} × {unit['T']}", _count(unit["tokens_per_second"]),
         f"{unit['speed_of_transformer']['median']:.2f}" if "speed_of_transformer" in unit else "–",
         f"{unit['peak_bytes'] / 1e9:.1f}", "yes" if unit["triton"] else "no"]
        for name, unit in units.items() if "tokens_per_second" in unit
    ]  # fmt: skip
    head = (
        "model",
        "parameters",
        "batch",
        "tokens/s",
        "by the transformer's, in turns",
        "peak, GB",
        "Triton",
    )
    return "**Training**: autocast to bfloat16, fused AdamW\n\n" + table(head, rows)


def _decoding(units: Units) -> str:
    ways = ("graph 1", "graph 8", "graph 64", "graph 512", "modules 1", "modules 512")
    rows = []
    for name, unit in units.items():
        if steps := unit.get("steps"):
            speeds = [_count(steps[way]["tokens_per_second"]) if way in steps else "–" for way in ways]
            best = max(
                (step["share_of_bandwidth"] for way, step in steps.items() if way.endswith(" 1")), default=0.0
            )
            others = ", ".join(way.removesuffix(" 1") for way in steps if way not in ways)
            rows.append([name + (f" ({others})" if others else ""), *speeds, f"{best:.3f}"])
    sessions = [
        [name.removeprefix("sessions, "), f"{unit['state_bytes'] / 1e6:,.1f}",
         *(f"{unit[key]['median']:.3g}" for key in ("save_ms", "restore_ms", "fork_ms"))]
        for name, unit in units.items() if "restore_ms" in unit
    ]  # fmt: skip
    return (
        "**Decoding**, tokens/s of all rows together, by CUDA graphs and by modules; and the share of the copy's "
        "bandwidth of one row, the best way\n\n"
        + table(("model and tokens read before", *ways, "share of one row"), rows)
        + "\n\n**Sessions**, ms\n\n"
        + table(("model and tokens read", "state, MB", "save", "restore", "fork"), sessions)
    )


def _streaming(units: Units) -> str:
    rows = [
        [name, _ms(unit["seconds_of_a_token"]), f"{unit['tokens_per_second']:.2f}",
         f"{unit['tokens_per_second_of_the_bus']:.1f}", f"{(unit['peak_device_memory'] or 0) / 1e9:.1f}"]
        for name, unit in units.items() if "seconds_of_a_token" in unit
    ]  # fmt: skip
    packed = [
        [name, tokens, *(_ms(one["seconds"][way]) for way in ("triton", "triton, in a graph", "torch"))]
        for name, unit in units.items()
        for tokens, one in unit.items()
        if isinstance(one, dict) and "triton, in a graph" in one.get("seconds", {})
    ]
    said = []
    if "bus" in units:
        bus = units["bus"]["pinned"]["bytes_per_second"] / 1e9
        said += [
            f"**Streaming `perspective-1t`** from pinned host memory, of which the bus moves {bus:.1f} GB/s"
        ]
    if rows:
        said.append(table(("unit", "ms a token", "tokens/s", "the bus alone", "peak, GB"), rows))
    if packed:
        ways = ("Triton, ms", "in a graph, ms", "PyTorch, ms")
        said += ["**Packed matrices**, several together", table(("matrices", "read", *ways), packed)]
    return "\n\n".join(said)


def _long(units: Units) -> str:
    last: dict[str, Mapping[str, Any]] = {}
    for name, unit in units.items():
        for point in unit.get("curve", []):
            last[name.rpartition(" ")[0]] = point
    rows = [
        [design, _count(point["tokens"]), f"{point['bits_per_byte']:.3f}"] for design, point in last.items()
    ]
    return "**One long training**, 20 M parameters: held-out bits per byte so far\n\n" + table(
        ("design", "tokens", "bits per byte"), rows
    )


TABLES: Mapping[str, Callable[[Units], str]] = {
    "selftest": _selftest, "suite": _suite, "kernels": _kernels, "training": _training, "decoding": _decoding,
    "streaming": _streaming, "long": _long,
}  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
