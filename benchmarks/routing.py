"""Does the torus keep its experts busy, and does it cost loss against a flat switch? What do ternary experts cost?

The same Perspective model is trained on the same batches with two routers over the same experts, from each of
several seeds: the torus (docs/designs/perspective.md#router) and a top-1 Switch router (a linear layer, its softmax
as the gate, the same auxiliary loss; no lattice, so no biases, smoothness or neighbour loss); with the torus and the
switch's gate; and with the torus over experts that are ternary from the first step on. Reported of each: held-out bits
per byte; Gini of the load and the share of experts reached in each batch over the last tenth of the steps; and on
held-out text how often consecutive tokens take the same expert or a neighbour's, beside what chance would give. The
gate of ternary experts: a held-out perplexity within 10% of the float twin's.

Every cell is a run folder in --out: a finished one is skipped, an interrupted one goes on.
"""

import json
import math
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.data import Split, Tokenizer, encode, open_corpus
from perspectron.data.loader import IGNORE, windows
from perspectron.designs.perspective.suites.routes import joined, measure, summary, trace
from perspectron.model.census import census
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.estimate import autocast
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import prepare
from perspectron.util.errors import DataError
from perspectron.util.files import read_json, write_json

TESTS = ("tests/designs/perspective/suites/test_routes.py",)
BARS = {"gini": 0.15, "reached": 1.0, "ternary": 1.10}
LAST = 0.1
ARMS: dict[str, dict[str, Any]] = {
    "torus": {"router": "torus"},
    "switch": {"router": "switch", "gate": "soft", "bias_rate": 0.0, "smooth": 0.0, "delta": 0.0},
    "torus_soft": {"router": "torus", "gate": "soft"},
    "ternary": {"router": "torus", "ternary": True},
}
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "d_model": 256, "hidden": 1024, "rank": 32, "window": 128, "torus": [4, 4],
}  # fmt: skip
QUICK: dict[str, Any] = {
    "vocab_size": 300, "d_model": 32, "hidden": 32, "rank": 4, "heads": 2, "kv_heads": 1, "window": 8,
    "torus": [4, 2],
}  # fmt: skip


def model_of(router: str, sizes: dict[str, Any]) -> ModelConfig:
    return presets.get("perspective-tiny", **sizes | ARMS[router])


def prepared(corpus: Path, data: str, vocab_size: int, heldout: float) -> None:
    """The text as ids, encoded once for all cells."""
    kept = corpus / "tokenizer.json"
    opened = open_corpus(data, heldout)
    if kept.is_file():
        tokenizer = Tokenizer.load(kept)
    else:
        tokenizer = Tokenizer.train((document.text for document in opened.documents("train")), vocab_size)
        tokenizer.save(kept)
    encode(opened, tokenizer, corpus)


def cell(spec: dict[str, Any]) -> dict[str, Any]:
    """Train one cell and measure it."""
    torch.set_num_threads(spec["threads"])
    torch.set_flush_denormal(True)
    run = Path(spec["run"])
    settings = TrainConfig(**spec["train"] | {"optim": OptimConfig(**spec["train"]["optim"])})
    config = RunConfig(model_of(spec["router"], spec["sizes"]), settings)
    if (run / "config.json").is_file() and checkpoint.load_config(run) != config:
        raise SystemExit(f"{run}: made with other settings, must be another --out")
    tokenizer, shards, _ = prepare(run, config)
    trainer = Trainer(run, config, tokenizer, shards)
    if trainer.fit() is not None:
        raise SystemExit("stopped")
    lines = [line for line in read_metrics(run) if "aux" in line]
    tail = [line["aux"] for line in lines if line["step"] > (1 - LAST) * settings.steps]
    reached = [aux["reached"] for aux in tail]
    with autocast(trainer.device, settings.dtype):
        held = routes_of(trainer.model, trainer.heldout_split, settings)
    measured = trainer.measure()
    result = {
        "router": spec["router"],
        "seed": settings.seed,
        "bits_per_byte": measured["heldout_bits_per_byte"],
        "perplexity": measured["heldout_perplexity"],
        "gini": statistics.mean(aux["gini"] for aux in tail),
        "greatest_gini": max(aux["gini"] for aux in tail),
        "reached": statistics.mean(reached),
        "least_reached": min(reached),
        "steps_that_reached_all": sum(share == 1 for share in reached) / len(reached),
        "heldout": held,
        "tokens": trainer.progress.tokens,
        "seconds": trainer.progress.seconds,
    }
    write_json(run / "result.json", result | {"spec": spec})
    return result


def routes_of(model: LanguageModel, split: Split, settings: TrainConfig) -> dict[str, Any]:
    """Load and hops on held-out text, read as the held-out loss reads it."""
    parts, resets, counted = [], [], []
    for batch in windows(
        split,
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        limit_tokens=settings.eval_tokens or None,
    ):
        parts.append(trace(model, batch.ids_BT, batch.reset_BT))
        none = torch.zeros_like(batch.ids_BT, dtype=torch.bool)
        resets.append(none if batch.reset_BT is None else batch.reset_BT)
        counted.append(batch.targets_BT != IGNORE)
    found = [
        measure(layer, reset_BT=torch.cat(resets), counted_BT=torch.cat(counted))
        for layer in joined(parts, axis=0)
    ]
    return asdict(summary(found)) | {"layers": [asdict(layer) for layer in found]}


def summaries(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per arm the spread over seeds of each quantity; and the losses against each other, seed by seed."""
    sides: dict[str, Any] = {}
    for router in ARMS:
        own = [result for result in results if result["router"] == router]
        series = {
            key: [result[key] for result in own]
            for key in ("bits_per_byte", "perplexity", "gini", "greatest_gini", "reached")
        }
        series["heldout_gini"] = [result["heldout"]["gini"] for result in own]
        for kind in ("rates", "chance"):
            for hop in ("same", "one_hop", "two_hop", "distant"):
                series[f"{kind}_{hop}"] = [result["heldout"][kind][hop] for result in own]
        sides[router] = {
            key: {"mean": statistics.mean(values), "spread": common.Spread.of(values)}
            for key, values in series.items()
        }
        sides[router]["least_reached"] = min(result["least_reached"] for result in own)
        sides[router]["steps_that_reached_all"] = min(result["steps_that_reached_all"] for result in own)
        sides[router]["bars"] = {
            "gini": {"bar": BARS["gini"], "met": max(series["gini"]) < BARS["gini"]},
            "reached": {"bar": BARS["reached"], "met": sides[router]["least_reached"] >= BARS["reached"]},
        }

    def paired(key: str, one: str, other: str) -> list[tuple[float, float]]:
        first, second = ([x[key] for x in results if x["router"] == arm] for arm in (one, other))
        return list(zip(first, second, strict=True))

    return {
        "routers": sides,
        "torus_minus_switch": [a - b for a, b in paired("bits_per_byte", "torus", "switch")],
        "ternary_to_float": [a / b for a, b in paired("perplexity", "ternary", "torus")],
    }


def show(report: common.Report, found: dict[str, Any]) -> None:
    def text(side: dict[str, Any], key: str, scale: float = 1.0, digits: int = 3) -> str:
        spread = side[key]["spread"]
        low, high = (f"{value * scale:.{digits}f}" for value in (spread.low, spread.high))
        return f"{side[key]['mean'] * scale:.{digits}f} ({low}–{high})"

    sides = list(found["routers"].values())
    rows = [
        ["held-out bits per byte", *(text(side, "bits_per_byte", digits=4) for side in sides)],
        ["held-out perplexity per token", *(text(side, "perplexity", digits=2) for side in sides)],
        ["Gini, last tenth of the steps", *(text(side, "gini") for side in sides)],
        ["experts reached, %, same steps", *(text(side, "reached", 100, 2) for side in sides)],
        ["  the least in a step, %", *(f"{100 * side['least_reached']:.1f}" for side in sides)],
        ["Gini on held-out text", *(text(side, "heldout_gini") for side in sides)],
    ]
    for hop in ("same", "one_hop", "two_hop", "distant"):
        rows.append(
            [
                f"{hop.replace('one_', '1-').replace('two_', '2-')}, %",
                *(text(s, f"rates_{hop}", 100, 1) for s in sides),
            ]
        )
        rows.append(["  by chance, %", *(text(s, f"chance_{hop}", 100, 1) for s in sides)])
    report.say("")
    report.table(["mean (least–greatest over seeds)", *found["routers"]], rows)
    differences = ", ".join(f"{value:+.4f}" for value in found["torus_minus_switch"])
    report.say(f"torus − switch, bits per byte, seed by seed: {differences}")
    ratios = found["ternary_to_float"]
    report.say(
        "perplexity of ternary experts / of float ones, seed by seed:"
        f" {', '.join(f'{ratio:.3f}' for ratio in ratios)}; mean {statistics.mean(ratios):.3f},"
        f" {'within' if max(ratios) <= BARS['ternary'] else 'NOT all within'} {BARS['ternary']}"
    )
    for router, side in found["routers"].items():
        bars = side["bars"]
        report.say(
            f"{router}: every seed's Gini < {BARS['gini']}: {'yes' if bars['gini']['met'] else 'NO'};"
            f" every expert in every step: {'yes' if bars['reached']['met'] else 'NO'}"
            f" (in {side['steps_that_reached_all']:.0%} of the steps of the worst seed)"
        )


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument(
        "--out", type=Path, help="folder of the runs (runs/routing; a scratch one if --quick)"
    )
    parser.add_argument("--tokens", type=int, default=2**21, help="to train on, of each cell (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (%(default)s)")
    parser.add_argument("--data", default="stdlib", help="what to train on (%(default)s)")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(cell(json.loads(args.child))))
        return
    sizes, data, steps, seeds = SIZES, args.data, math.ceil(args.tokens / (16 * 256)), args.repeats
    batch: dict[str, Any] = {"batch_size": 16, "seq_len": 256, "eval_tokens": 2**17, "save_every": 128}
    if args.quick:
        sizes, data, steps, seeds = QUICK, str(common.ROOT / "perspectron"), 10, 1
        batch = {"batch_size": 4, "seq_len": 32, "eval_tokens": 512, "save_every": 0}
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch if args.quick else "runs/routing")
        counted = census(model_of("torus", sizes))
        shapes = (
            f"perspective-tiny with {sizes}: {counted.active_parameters / 1e6:.2f} M parameters active of"
            f" {counted.parameters / 1e6:.1f} M; {batch}, {steps} steps, {seeds} seeds (--repeats), {data}"
        )
        report = common.Report(args, TESTS, dtype=args.dtype, shapes=shapes)
        prepared(out / "corpus", data, sizes["vocab_size"], 0.2 if args.quick else 0.05)
        settings: dict[str, Any] = batch | {
            "data": str(out / "corpus"), "steps": steps, "dtype": args.dtype, "device": "cpu", "eval_every": 0,
            "optim": {"lr": args.lr, "warmup": min(50, steps // 4)},
        }  # fmt: skip
        results = run_all(
            cells(out, sizes, settings, seeds, args.threads), args.jobs, report, apart=not args.quick
        )
        found = summaries(results)
        show(report, found)
        report.finish({"cells": results} | found)


def cells(
    out: Path, sizes: dict[str, Any], settings: dict[str, Any], seeds: int, threads: int
) -> list[dict[str, Any]]:
    """What each cell is told. Seeds outermost, so that an early end leaves whole pairs."""
    return [
        {
            "run": str(out / f"{router}-{seed}"),
            "router": router,
            "sizes": sizes,
            "train": settings | {"seed": seed},
            "threads": threads,
        }
        for seed in range(seeds)
        for router in ARMS
    ]


def run_all(
    specs: list[dict[str, Any]], jobs: int, report: common.Report, *, apart: bool
) -> list[dict[str, Any]]:
    """The results of all cells, `jobs` at a time. apart: each in its own process. A finished one is only read."""

    def one(spec: dict[str, Any]) -> dict[str, Any]:
        done = Path(spec["run"]) / "result.json"
        kept: dict[str, Any] = read_json(done, DataError) if done.is_file() else {}
        # Threads decide how fast it went, not what came of it.
        same = kept.pop("spec", {}) | {"threads": None} == spec | {"threads": None}
        result = kept if kept and same else common.child(spec) if apart else cell(spec)
        if "not_run" not in result:
            line = (
                "{router}, seed {seed}: {bits_per_byte:.4f} bits per byte, Gini {gini:.3f}, {seconds:.0f} s"
            )
            report.say(line.format(**result))
        return result

    with ThreadPoolExecutor(jobs) as pool:
        results = list((pool.map if apart else map)(one, specs))
    if broken := [
        f"{spec['run']}: {r['not_run']}" for spec, r in zip(specs, results, strict=True) if "not_run" in r
    ]:
        raise SystemExit("\n".join(broken))
    return results


if __name__ == "__main__":
    main()
