"""A mixture of experts of public size (OLMoE-1B-7B: 16 layers of 64 experts, 8 of them for a token, width 2048, 6.9 B
parameters) at 4 bits, from memory and from disk within a budget of 512 MB.

Bars: from disk the tokens and all logits of memory, bit for bit; at least 0.75 of the speed at which reading the bytes
that were needed, with as many readers as are fastest there, would be all there is to do; peak memory within the budget
+ 64 MiB. Reads take turns with tokens, so that both see the same machine. "cache": 512 MB hold experts, beside what
every token reads; "whole": 512 MB hold both. (The state, and those by which a recording of the step is checked, come on
top.) Weights are random, and so is which experts a token has: no text asks for
fewer of them, so that a real model misses less.

The artifact takes about 4.4 GB of disk.
"""

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import common
import torch
from full_size import Disk, _from_disk, budget, method, right_guesses, warm_up

from perspectron import native
from perspectron.data import Tokenizer
from perspectron.decode.reading import prefill
from perspectron.decode.steps import stepped, steps_of
from perspectron.experts.mixture import MixtureConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.model.mixer import config_of
from perspectron.stream.artifact import SHARED, read_header
from perspectron.stream.engine import load_artifact
from perspectron.stream.synthetic import synthesize

TESTS = ("tests/stream/test_mixtures.py::test_it_streams_with_the_bits_of_memory_in_any_budget",)
BUDGET = 512_000_000
BARS = {"disk_share": 0.75, "over_budget": 64 << 20}
PROMPT = 8  # tokens
FORMAT = "4bit32"


def config(*, quick: bool) -> ModelConfig:
    """OLMoE-1B-7B, or a small one."""
    V, D, layers, heads = (400, 64, 4, 4) if quick else (50_304, 2048, 16, 16)
    experts = MixtureConfig(96, 12, 3, normed=False) if quick else MixtureConfig(1024, 64, 8, normed=False)
    block = BlockConfig(config_of("attention", heads=heads, qk_norm="all"), experts)
    return ModelConfig("olmoe", V, D, (block,) * layers, LinearHeadConfig(), norm_eps=1e-5, longest=4096)


def make(folder: Path, args: argparse.Namespace, report: common.Report) -> None:
    """Write an artifact of random weights, all experts of their own."""
    shape = config(quick=args.quick)
    ffn = shape.blocks[0].ffn
    assert isinstance(ffn, MixtureConfig)
    report.say(f"writing {folder}")
    tokenizer = Tokenizer.train(["the cat sat on the mat. " * 40], 300)
    synthesize(shape, folder, lambda: tokenizer, experts=ffn.experts, linear=FORMAT)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Decode in this process, and count its memory."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    native.set_threads(spec["threads"])
    folder = Path(spec["folder"])
    warm_up()
    disk = None if spec["cache"] is None else Disk(folder, spec["sample"])  # its memory is not the model's
    seconds, speeds, ids, told = list[float](), list[float](), list[int](), hashlib.sha256()
    with common.Peak() as peak, torch.inference_mode():
        model, _ = load_artifact(folder, cache_bytes=spec["cache"], method=method(folder))
        assert model.cache is not None
        prompt = torch.randint(
            3, model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1)
        )
        logits_BV, state = prefill(model, [prompt.tolist()])
        steps, before = steps_of(model), model.cache.counters
        for token in range(spec["warmup"] + spec["tokens"]):
            if token == spec["warmup"]:
                before = model.cache.counters
            if disk is not None:
                speeds.append(disk.read())
            ids.append(int(logits_BV[0].argmax()))
            told.update(logits_BV.numpy().tobytes())
            start = time.perf_counter()
            _, logits_BV, state = stepped(model, steps, torch.tensor([ids[-1:]]), state)
            seconds.append(time.perf_counter() - start)
        after = model.cache.counters
    counters = {name: value - vars(before)[name] for name, value in vars(after).items()}
    return {
        "seconds": seconds[spec["warmup"] :],
        "speeds": speeds[spec["warmup"] :],
        "ids": ids,
        "digest": told.hexdigest(),
        "recorded": steps is not None,
        "read": counters["bytes_read"] / spec["tokens"],
        "needed": (counters["bytes_read"] - counters["bytes_wasted"]) / spec["tokens"],
        "readers": None if disk is None else {"tried": disk.tried, "chosen": disk.readers},
        "peak_bytes": peak.bytes,
        "anonymous": anonymous(),
        # A recording is made and checked with states of its own: three of them, two with twice as many slots.
        "budget": budget(model, state.nbytes) | {"recording": 5 * state.nbytes},
        "line": model.line(),
        "counters": counters,
    }


def anonymous() -> int | None:
    """Bytes of this process's memory that no file backs, as the kernel counts them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def told(
    report: common.Report, name: str, found: dict[str, Any], memory: dict[str, Any] | None
) -> dict[str, Any]:
    """Print a run; its results. memory: that from memory."""
    milliseconds = common.Spread.of([1e3 * second for second in found["seconds"]])
    allowed = sum(found["budget"].values())
    peak = found["peak_bytes"]
    results: dict[str, Any] = {
        "milliseconds": milliseconds,
        "tokens_per_second": 1e3 / milliseconds.median,
        "bytes": {part: found[part] for part in ("read", "needed")},
        "budget": found["budget"],
        "peak_bytes": peak,
        "anonymous_bytes": found["anonymous"],
        "over_budget": None if peak is None else peak - allowed,
        "counters": found["counters"],
    }
    report.say(
        found["line"],
        f"{name}: {milliseconds.text()} ms a token, {results['tokens_per_second']:.2f} tokens/s",
        f"  memory: {common.peak_text(found)} over that of the imports; budget "
        + " + ".join(f"{part} {size:,}" for part, size in found["budget"].items())
        + f" = {allowed:,}; anonymous memory of the whole process {found['anonymous']:,}",
    )
    if found["speeds"]:
        bound = [found["needed"] / speed for speed in found["speeds"]]
        speed = common.Spread.of([speed / 1e9 for speed in found["speeds"]])
        share = statistics.median(bound) / statistics.median(found["seconds"])
        asked = found["counters"]["hits"] + found["counters"]["misses"]
        report.say(
            f"  bytes: {found['needed']:,.0f} a token at {speed.text()} GB/s read meanwhile: share {share:.2f} "
            f"(bar {BARS['disk_share']}); {1 / statistics.median(bound):.2f} tokens/s is what the disk gives",
            *_from_disk(found),
        )
        results |= {
            "read_gigabytes_per_second": speed,
            "share": share,
            "right_guesses": right_guesses(found),
            "at_hand": found["counters"]["hits"] / max(1, asked),
            "readers": found["readers"],
        }
    if memory is not None:
        same = (found["ids"], found["digest"]) == (memory["ids"], memory["digest"])
        report.say(f"  {len(found['ids'])} tokens and their logits are those of memory: {same}")
        results["same"] = same
    report.say("")
    return results


def missed_bars(results: dict[str, Any]) -> list[str]:
    """Measures that are below their bars, and those not taken."""
    missed = []
    for name in ("memory", "cache", "whole"):
        found = results.get(name)
        if found is None:
            missed.append(f"{name}: not run")
            continue
        if name != "memory" and not found.get("same"):
            missed.append(f"{name}_tokens")
        if name != "memory" and found["share"] < BARS["disk_share"]:
            missed.append(f"{name}_share")
        if found["over_budget"] is None or found["over_budget"] > BARS["over_budget"]:
            missed.append(f"{name}_over_budget")
    return missed


def measure(folder: Path, args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    header = read_header(folder)
    assert header.experts is not None
    size = header.experts.shard_bytes
    stored = sum(path.stat().st_size for path in (folder / "experts").iterdir())
    shared = (folder / SHARED).stat().st_size
    whole = max(BUDGET - shared, 0) if not args.quick else 5 * size
    spec = {"folder": str(folder), "threads": args.threads, "warmup": 2, "sample": 16 * size}
    results: dict[str, Any] = {"about": header.about, "bytes_of_experts": stored, "bytes_of_the_rest": shared}
    report.say(header.about, f"experts {stored:,} bytes, the rest {shared:,}", "")
    memory = None
    for name, cache in (("memory", None), ("cache", 9 * size if args.quick else BUDGET), ("whole", whole)):
        one = spec | {"cache": cache, "tokens": args.repeats}
        room = 1.2 * (shared + (stored if cache is None else cache)) + 5e8
        found = run(one) if args.quick else common.child(one, room)
        if "not_run" in found:
            report.say(f"{name}: not run: {found['not_run']}")
            continue
        results[name] = told(report, name, found, memory)
        memory = memory or found
    missed = missed_bars(results)
    report.say(f"missed: {', '.join(missed) or 'nothing'}")
    return results | {"bars": BARS, "missed": missed}


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=24)
    parser.add_argument(
        "--dir", type=Path, help="artifact to use, made there if it is not (default: a temporary one)"
    )
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(json.loads(args.child))))
        return
    if args.quick:
        args.repeats = 3
    shape = config(quick=args.quick)
    report = common.Report(
        args, TESTS, dtype=f"{FORMAT}, float32 state", shapes=f"{shape.name}, batch 1, greedy"
    )
    common.of_artifact(args, report, make, measure)


if __name__ == "__main__":
    main()
