"""Decoding an artifact with the native step (`perspectron.stream.step`) and module by module, one row and a batch.

Random weights, all experts in memory, greedy. Everything takes turns in one process. Seconds are processor time on one
thread, so that what else runs on the machine counts little; ratios are round by round. Bars: the step at least 1.3
times as fast as the modules for one row, or it is not worth its code; a batch at least as fast per token as its rows
one after another.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.reading import prefill
from perspectron.eval.timing import take_turns
from perspectron.model.model import LanguageModel
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.synthetic import synthesize

TESTS = ("tests/stream/test_step.py",)
BARS = {"one": 1.3, "batch": 1.0}
SIZES: dict[
    str, tuple[str, dict[str, Any], int, int]
] = {  # preset, its sizes, distinct experts, tokens a round
    "perspective-166m": ("perspective-166m", {}, 16, 64),
    "perspective-1.9b, 8 experts": ("perspective-1.9b", {"torus": (2, 2, 2)}, 8, 24),
    "full width, 8 layers": ("perspective-1t", {"layers": 8, "torus": (2, 2, 2)}, 4, 8),
}
QUICK = {"perspective-tiny": ("perspective-tiny", {}, 2, 4)}


@torch.inference_mode()
def speed(model: StreamedModel, modules: bool, rows: int, tokens: int) -> float:
    """Tokens a second of processor time, of all rows together; by the modules or by the step."""
    hidden: Callable[..., Any] = model.hidden
    if modules:

        def hidden(*inputs: Any, **options: Any) -> Any:
            return LanguageModel.hidden(model, *inputs, **options)

    _, state = prefill(model, [[1 + (row + t) % 200 for t in range(9 + row % 3)] for row in range(rows)])
    ids_B1: Tensor = torch.arange(rows)[:, None]
    start = time.process_time()
    for _ in range(tokens):
        x_B1D, state, _ = hidden(ids_B1, state, consume_state=True)
        ids_B1 = model.head(x_B1D)[:, 0].argmax(-1, keepdim=True)
    return rows * tokens / (time.process_time() - start)


def measure(folder: Path, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    model, _ = load_artifact(folder)
    ways = {
        "step": (False, 1),
        "modules": (True, 1),
        "step, batch": (False, rows),
        "modules, batch": (True, rows),
    }
    speeds = take_turns(
        {
            name: lambda modules=modules, B=B: speed(
                model, modules, B, max(2, tokens // (1 if B == 1 else 4))
            )
            for name, (modules, B) in ways.items()
        },
        repeats,
    )
    pairs = {
        "one": ("step", "modules"),
        "batch": ("step, batch", "step"),
        "batch ways": ("step, batch", "modules, batch"),
    }
    return {
        "tokens_per_second": {name: common.Spread.middle(values) for name, values in speeds.items()},
        "ratios": {
            name: common.ratios(speeds[a], speeds[b], common.Spread.middle) for name, (a, b) in pairs.items()
        },
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=9)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch (%(default)s)")
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    native.set_threads(args.threads)
    report = common.Report(args, TESTS, dtype="2-bit, ternary, int8", shapes=f"1 and {args.rows} rows")
    results, table = {}, []
    for label, (name, sizes, experts, tokens) in (QUICK if args.quick else SIZES).items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "artifact"
            tokenizer = Tokenizer.train(["def read_lines(path):\n"], 260)
            synthesize(
                presets.get(name, **sizes), folder, lambda tokenizer=tokenizer: tokenizer, experts=experts
            )
            results[label] = found = measure(folder, args.rows, tokens, args.repeats)
        spreads = [*found["tokens_per_second"].values(), *found["ratios"].values()]
        table.append([label, *(spread.text() for spread in spreads)])
    report.table(["model", "step", "modules", "step, batch", "modules, batch", "step / modules",
                  "batch / one", "batch: step / modules"], table)  # fmt: skip
    met = {
        label: {bar: found["ratios"][bar].median >= least for bar, least in BARS.items()}
        for label, found in results.items()
    }
    report.finish({"models": results, "bars": BARS, "met": met})


if __name__ == "__main__":
    main()
