"""Does training in bfloat16 change the held-out loss by more than the seed does?

A small Perspective model is trained for the same steps on the same batches in float32 and in bfloat16
autocast, from each of several seeds. A seed decides initial weights and order of the data; a pair shares it.
Held-out bits per byte are measured twice: in the dtype of the training, as the trainer reports them, and in
float32, which leaves only what training did.
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
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.prepare import prepare

TESTS = (
    "tests/ops/test_pdr.py",
    "tests/designs/test_mixers.py::test_under_autocast_the_state_is_not_rounded",
)
DTYPES = ("float32", "bfloat16")
SIZES: dict[str, Any] = {"vocab_size": 1024, "d_model": 96, "hidden": 256, "rank": 16, "window": 64}
QUICK: dict[str, Any] = SIZES | {"vocab_size": 300, "d_model": 32, "hidden": 32, "rank": 4, "window": 8}


def train(
    run: Path, sizes: dict[str, Any], config: TrainConfig, tokenizer: Tokenizer, shards: Shards
) -> dict[str, Any]:
    """One run, in the folder `run`: its held-out losses and how long it took."""
    model = presets.get("perspective-tiny-dense", **sizes | {"vocab_size": tokenizer.vocab_size})
    trainer = Trainer(run, RunConfig(model, config), tokenizer, shards)
    start = time.perf_counter()
    for _ in range(config.steps):
        last = trainer.step()
    seconds = time.perf_counter() - start
    limits = {"seq_len": config.seq_len, "batch_size": config.batch_size}
    exact = heldout(
        trainer.model, trainer.heldout_split, tokenizer, limit_tokens=config.eval_tokens or None, **limits
    )
    return {
        "dtype": config.dtype,
        "seed": config.seed,
        "bits_per_byte": trainer.measure()["heldout_bits_per_byte"],
        "bits_per_byte_in_float32": exact.bits_per_byte,
        "last_training_loss": last["loss"],
        "seconds": seconds,
    }


def summary(runs: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Per dtype the losses' spread over seeds; bfloat16 - float32 of each seed; the seeds' own deviation."""
    losses = {d: [run[key] for run in runs if run["dtype"] == d] for d in DTYPES}
    differences = [b - a for a, b in zip(*losses.values(), strict=True)]
    deviation = statistics.stdev(losses["float32"]) if len(differences) > 1 else None
    return {
        "mean": {d: statistics.mean(values) for d, values in losses.items()},
        "spread": {d: common.Spread.of(values) for d, values in losses.items()},
        "differences": differences,
        "mean_difference": statistics.mean(differences),
        "seed_deviation": deviation,
        "mean_difference_in_seed_deviations": statistics.mean(differences) / deviation if deviation else None,
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=torch.get_num_threads(), repeats=3)
    parser.add_argument("--steps", type=int, default=300, help="of each run (%(default)s)")
    parser.add_argument("--data", default="stdlib", help="what to train on (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, data, steps, seeds = SIZES, args.data, args.steps, args.repeats
    batch: dict[str, Any] = {"batch_size": 8, "seq_len": 128, "eval_tokens": 32768}
    if args.quick:
        sizes, data, steps, seeds = QUICK, str(common.ROOT / "perspectron"), 2, 2
        batch = {"batch_size": 2, "seq_len": 16, "eval_tokens": 256}
    shapes = f"perspective-tiny-dense with {sizes}, {batch}, {steps} steps, {seeds} seeds (--repeats), {data}"
    report = common.Report(args, TESTS, dtype=" and ".join(DTYPES), shapes=shapes)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainConfig(data=data, heldout=0.2 if args.quick else 0.05)
        tokenizer, shards, read = prepare(
            Path(folder), RunConfig(presets.get("perspective-tiny-dense", **sizes), asked)
        )
        report.say(read, "")
        for seed in range(seeds):
            for dtype in DTYPES if seed % 2 == 0 else reversed(DTYPES):
                config = TrainConfig(data=data, steps=steps, seed=seed, dtype=dtype, device="cpu", **batch)
                runs.append(train(Path(folder) / f"{dtype}-{seed}", sizes, config, tokenizer, shards))
                report.say("{dtype}, seed {seed}: {bits_per_byte:.4f} in {seconds:.0f} s".format(**runs[-1]))
    results: dict[str, Any] = {"runs": runs}
    rows = []
    for key in ("bits_per_byte", "bits_per_byte_in_float32"):
        found = results[key] = summary(runs, key)
        deviation, relative = found["seed_deviation"], found["mean_difference_in_seed_deviations"]
        rows.append(
            [
                key.replace("_", " "),
                *(f"{found['mean'][d]:.4f} ({s.low:.4f}–{s.high:.4f})" for d, s in found["spread"].items()),
                f"{found['mean_difference']:+.4f}",
                "-" if deviation is None else f"{deviation:.4f}",
                "-" if relative is None else f"{relative:+.2f}",
            ]
        )
    report.say("")
    report.table(["held out", *DTYPES, "difference", "seeds' deviation", "ratio"], rows)
    report.say("A ratio within ±1: the precision matters less than the seed. Least–greatest over seeds.")
    report.finish(results)


if __name__ == "__main__":
    main()
