"""How much worse is a model whose experts are ternary than its float twin?

Twins have the same initial weights, tokens in the same order and steps; they differ in whether the experts become
ternary, and when: "ternary 0-0.5" begins with the first step and is ternary from the middle on. "0-0x0.5":
half the learning rate, for each kind may want its own. Held-out perplexity of the model as it is used, with ternary
values. The gate: within 10% of the float twin, at whichever of the rates asked for the float twins are best.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.data import Shards, Tokenizer
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.expert_stats import experts_of, loads, matrices, mean, means, use
from perspectron.train.loop import Trainer
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import prepare

TESTS = ("tests/experts/test_ternary.py",)
GATE = 1.10
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "d_model": 96,
    "hidden": 256,
    "rank": 16,
    "window": 64,
    "torus": [4, 2],
}
QUICK: dict[str, Any] = SIZES | {"vocab_size": 300, "d_model": 32, "hidden": 32, "rank": 4, "window": 8}


def arm(text: str) -> dict[str, Any]:
    """ "float", "0-0.5" or "0-0.5x2": ternary from and until which share of the steps; times which learning rate."""
    schedule, _, times = text.partition("x")
    if schedule == "float":
        return {"ternary": False, "lr": float(times or 1)}
    start, _, end = schedule.partition("-")
    return {"ternary": True, "from": float(start), "until": float(end), "lr": float(times or 1)}


def train(
    run: Path, name: str, sizes: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer, shards: Shards
) -> dict[str, Any]:
    """One run, in the folder `run`: its held-out perplexity, and how its experts are used."""
    asked = arm(name)
    lr = config["lr"] * asked["lr"]
    changes = {key: value for key, value in config.items() if key != "lr"}
    if asked["ternary"]:
        changes |= {"ternary_from": asked["from"], "ternary_until": asked["until"]}
    model = presets.get(
        "perspective-tiny", **sizes | {"vocab_size": tokenizer.vocab_size, "ternary": asked["ternary"]}
    )
    train = TrainConfig(**changes, optim=OptimConfig(lr=lr, warmup=config["steps"] // 20))
    trainer = Trainer(run, RunConfig(model, train), tokenizer, shards)
    start = time.perf_counter()
    for _ in range(train.steps):
        last = trainer.step()
    seconds = time.perf_counter() - start
    with loads(trainer.model) as found:
        measured = trainer.measure()
    layers = use(found)
    zeros = [matrix["zeros"] for matrix in means(matrices(trainer.model)).values()]
    return {
        "arm": name,
        "seed": train.seed,
        "perplexity": measured["heldout_perplexity"],
        "bits_per_byte": measured["heldout_bits_per_byte"],
        "last_training_loss": last["loss"],
        "gini": mean(layers, "gini"),
        "reach": mean(layers, "reach"),
        "zeros": statistics.mean(zeros) if zeros else None,
        "experts": sum(ffn.gate_EFD.numel() * 3 for ffn in experts_of(trainer.model).values()),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "seconds": seconds,
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument("--arms", nargs="+", default=["float", "0-0.5", "0-0"], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of each run (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--data", default="stdlib", help="what to train on (%(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=NUMBER", help="other sizes of the model")
    parser.add_argument("--batch-size", type=int, default=8, help="of 128 tokens (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    sizes, data, steps, seeds = SIZES, args.data, args.steps, args.repeats
    sizes = sizes | {key: int(value) for key, _, value in (text.partition("=") for text in args.set)}
    batch: dict[str, Any] = {"batch_size": args.batch_size, "seq_len": 128, "eval_tokens": 32768}
    if args.quick:
        sizes, data, steps, seeds = QUICK, str(common.ROOT / "perspectron"), 3, 2
        batch = {"batch_size": 2, "seq_len": 16, "eval_tokens": 256}
    shapes = f"perspective-tiny with {sizes}, {batch}, {steps} steps, {seeds} seeds (--repeats), {data}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    asked = ["float", *(name for name in args.arms if name != "float")]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = TrainConfig(data=data, heldout=0.2 if args.quick else 0.05)
        tokenizer, shards, read = prepare(
            Path(folder), RunConfig(presets.get("perspective-tiny", **sizes), corpus)
        )
        report.say(read, "")
        for seed in range(seeds):
            for name in asked if seed % 2 == 0 else reversed(asked):
                config = batch | {
                    "data": data,
                    "steps": steps,
                    "seed": seed,
                    "dtype": "float32",
                    "device": "cpu",
                    "lr": args.lr,
                }
                runs.append(train(Path(folder) / f"{name}-{seed}", name, sizes, config, tokenizer, shards))
                report.say("{arm}, seed {seed}: {perplexity:.3f} in {seconds:.0f} s".format(**runs[-1]))
    found = {
        name: [run for run in sorted(runs, key=lambda run: run["seed"]) if run["arm"] == name]
        for name in asked
    }
    perplexities = {name: [run["perplexity"] for run in group] for name, group in found.items()}
    best = min((name for name in asked if name.startswith("float")), key=lambda name: sum(perplexities[name]))
    floats = perplexities[best]
    rows = []
    summary = {}
    for name, group in found.items():
        ratios = [own / other for own, other in zip(perplexities[name], floats, strict=True)]
        ratio, perplexity = common.Spread.of(ratios), common.Spread.of(perplexities[name])
        zeros = [run["zeros"] for run in group if run["zeros"] is not None]
        summary[name] = {"perplexity": perplexity, "ratio": ratio, "mean_ratio": statistics.mean(ratios)}
        rows.append(
            [
                name,
                f"{perplexity.median:.3f} ({perplexity.low:.3f}–{perplexity.high:.3f})",
                f"{statistics.mean(ratios):.3f} ({ratio.low:.3f}–{ratio.high:.3f})",
                "-" if name.startswith("float") else "yes" if statistics.mean(ratios) <= GATE else "no",
                f"{statistics.mean(zeros):.3f}" if zeros else "-",
                f"{statistics.mean(run['gini'] for run in group):.3f}",
                f"{statistics.mean(run['reach'] for run in group):.2f}",
            ]
        )
    report.say("")
    report.table(
        ["experts", "perplexity", f"mean ratio to {best}", "within 10%", "zeros", "Gini", "reach"], rows
    )
    size = runs[0]
    report.say(
        f"{size['parameters']:,} parameters, {size['experts']:,} of them experts'. Least–greatest over seeds."
    )
    report.finish({"runs": runs, "float": best, "summary": summary})


if __name__ == "__main__":
    main()
