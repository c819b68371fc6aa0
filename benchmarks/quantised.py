"""What do few bits cost a trained model? Held-out bits per byte, float and packed, side by side.

One Perspective model of about 5 M active parameters with 16 experts in each PDR layer, which become ternary in
training. Then copies of it whose shared layers are rounded to the nearest, or by GPTQ on windows of the text it was
trained on; embedding and head are int8 in all of them. The last, by GPTQ at 2 bits, also as an artifact: experts
ternary with 8-bit activations, all in memory or by way of a cache of two for each layer. The bars: GPTQ is better than
the nearest at 2 bits, and what streams gives the bits of what is in memory.
"""

import asyncio
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.data import Shards, Tokenizer
from perspectron.data.loader import Loader
from perspectron.model.model import LanguageModel
from perspectron.quant.convert import Report, convert
from perspectron.stream.artifact import save_artifact
from perspectron.stream.engine import load_artifact
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import prepare

TESTS = ("tests/quant/test_formats.py", "tests/quant/test_gptq.py", "tests/quant/test_linear.py")
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "d_model": 256, "layers": 8, "hidden": 512, "rank": 32, "heads": 4, "kv_heads": 2,
    "window": 128, "torus": [4, 4], "ternary": True,
}  # fmt: skip
QUICK: dict[str, Any] = SIZES | {"vocab_size": 300, "d_model": 32, "layers": 4, "hidden": 32, "torus": [2, 2]}
ARMS: dict[str, tuple[str, bool]] = {
    "int8, nearest": ("int8", False),
    "4 bits, nearest": ("4bit", False),
    "4 bits, GPTQ": ("4bit", True),
    "2 bits, nearest": ("2bit", False),
    "2 bits, GPTQ": ("2bit", True),
}
LAST = list(ARMS)[-1]
SLOTS = 2  # of the cache, for each layer of experts


def train(
    run: Path, config: TrainConfig, sizes: dict[str, Any], report: common.Report
) -> tuple[LanguageModel, Tokenizer, Shards]:
    """Into the folder `run`, or on from what is there."""
    model = presets.get("perspective-166m", **sizes)
    tokenizer, shards, read = prepare(run, RunConfig(model, config))
    trainer = Trainer(run, RunConfig(model, config), tokenizer, shards)
    active = sum(p.numel() for p in trainer.model.parameters())
    active -= sum(m.idle_parameters() for m in trainer.model.modules() if hasattr(m, "idle_parameters"))
    report.say(read, f"{active / 1e6:.1f} M parameters of each token", "")
    if stopped := trainer.fit():
        raise SystemExit(128 + stopped)
    return trainer.model, tokenizer, shards


def calibration(shards: Shards, config: TrainConfig, count: int) -> torch.Tensor:
    """Windows of the training text in an order of their own."""
    loader = Loader(shards.split("train"), batch_size=count, seq_len=config.seq_len, seed=config.seed + 1)
    return loader.next_batch().ids_BT


def measure(model: LanguageModel, shards: Shards, tokenizer: Tokenizer, config: TrainConfig) -> float:
    limit = config.eval_tokens or None
    found = heldout(model, shards.split("heldout"), tokenizer, seq_len=config.seq_len, limit_tokens=limit)
    return found.bits_per_byte


def streamed(
    model: LanguageModel, tokenizer: Tokenizer, shards: Shards, config: TrainConfig
) -> dict[str, dict[str, Any]]:
    """A model in few bits as an artifact: with all experts in memory, and with a cache of few. RuntimeError for logits
    that are not the same bit by bit."""
    start, limit = config.seq_len + 1, config.seq_len + 33
    ids_BT = torch.from_numpy(shards.split("heldout").read(0, limit))[None]
    found, logits = dict[str, dict[str, Any]](), list[torch.Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        header = save_artifact(model, tokenizer, Path(folder) / "artifact")
        assert header.experts is not None
        slots = SLOTS * len(header.experts.layers)
        for name, cache in (
            ("artifact, all in memory", None),
            (f"artifact, {slots} slots", slots * header.experts.shard_bytes),
        ):
            own, _ = load_artifact(Path(folder) / "artifact", cache_bytes=cache)
            with torch.inference_mode():  # a prefill, then token by token
                whole = own(ids_BT[:, :start])
                parts, state = [whole.logits], whole.state
                for t in range(start, ids_BT.shape[1]):
                    step = own(ids_BT[:, t : t + 1], state, consume_state=True)
                    parts, state = [*parts, step.logits], step.state
            logits.append(torch.cat(parts, 1))
            found[name] = {"bits_per_byte": measure(own, shards, tokenizer, config)}
            assert own.cache is not None
            found[name]["counters"] = vars(own.cache.counters)
            own.cache.close()
    if not torch.equal(*logits):
        raise RuntimeError("logits of the streamed artifact are not those of the one in memory")
    return found


def summary(report: Report) -> dict[str, Any]:
    """Bytes by kind."""
    sizes = {"bytes": report.bytes, "expert_bytes": report.expert_bytes, "float_bytes": report.before}
    return sizes | {"kept": report.kept}


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=1)
    parser.add_argument("--steps", type=int, default=800, help="of training (%(default)s)")
    parser.add_argument("--data", default="stdlib", help="what to train on (%(default)s)")
    parser.add_argument("--run", type=Path, help="folder of the trained model, kept (default: none)")
    parser.add_argument("--windows", type=int, default=128, help="of text to calibrate on (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    sizes, data, steps, count = SIZES, args.data, args.steps, args.windows
    batch: dict[str, Any] = {"batch_size": 8, "seq_len": 128, "eval_tokens": 65536}
    if args.quick:
        sizes, data, steps, count = QUICK, str(Path(asyncio.__file__).parent), 60, 4
        batch = {"batch_size": 2, "seq_len": 16, "eval_tokens": 256}
    optim = OptimConfig(lr=2e-3, warmup=max(1, steps // 20))
    config = TrainConfig(
        data=data, steps=steps, heldout=0.2 if args.quick else 0.05, dtype="float32", device="cpu",
        eval_every=0, save_every=0, optim=optim, **batch,
    )  # fmt: skip
    shapes = f"perspective-166m with {sizes}, {batch}, {steps} steps, {data}; calibrated on {count} windows"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, shards = train(args.run or Path(folder), config, sizes, report)
        texts = calibration(shards, config, count)
        found: dict[str, Any] = {"float": {"bits_per_byte": measure(model, shards, tokenizer, config)}}
        for name, (quant, calibrated) in ARMS.items():
            own = copy.deepcopy(model)
            start = time.perf_counter()
            made = convert(own, quant, texts if calibrated else None)
            seconds = time.perf_counter() - start
            bits = measure(own, shards, tokenizer, config)
            found[name] = {"bits_per_byte": bits, "seconds": seconds} | summary(made)
            if name == LAST:
                found |= streamed(own, tokenizer, shards, config)
    best = found["float"]["bits_per_byte"]
    rows = [
        [
            name,
            f"{entry['bits_per_byte']:.4f}",
            f"{entry['bits_per_byte'] - best:+.4f}",
            f"{sum(entry['bytes'].values()) / 1e6:.2f}" if "bytes" in entry else "-",
        ]
        for name, entry in found.items()
    ]
    report.table(["shared layers", "bits per byte", "to float", "MB without experts"], rows)
    gain = found["2 bits, nearest"]["bits_per_byte"] - found["2 bits, GPTQ"]["bits_per_byte"]
    report.say(f"GPTQ to the nearest at 2 bits: {-gain:+.4f} bits per byte")
    report.say("the artifact's logits are bitwise equal, streamed and in memory")
    report.finish({"arms": found, "gptq_gain": gain})


if __name__ == "__main__":
    main()
