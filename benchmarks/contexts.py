"""Decoding time and state of each reference design, at the size of its run, after 1,024 and 262,144 tokens, or
those that --contexts says.

One step of one row in float32, head included, sampling not; weights are random. Caches are filled with random keys and
values, since reading that far is quadratic for full attention. All designs take turns, at one context after the other.
Seconds are processor time on one thread. README.md's table shows the result, and its picture that of three designs at
more contexts:

    python benchmarks/contexts.py --json results/contexts.json
    python benchmarks/contexts.py --designs transformer ssd perspective2 \
        --contexts 1024 4096 16384 65536 262144 --json results/lengths.json
    python docs/front.py
"""

import json
import time
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.eval.timing import Stepper, cache_bytes, decode_model, noise, shapes, take_turns
from perspectron.model.model import LanguageModel

TESTS = ("tests/eval/test_contexts.py",)
REFERENCE = common.ROOT / "results" / "reference" / "results.json"
CONTEXTS = (1024, 262144)


@torch.inference_mode()
def measure(models: dict[str, LanguageModel], context: int, rounds: int, visit: int) -> dict[str, Any]:
    """Every model at one context, in turns."""
    states = {name: shapes(model, context) for name, model in models.items()}
    pool = noise(max(map(cache_bytes, states.values())), torch.device("cpu"))
    turns = {
        name: Stepper(model, context, visit, pool, time.process_time).turn for name, model in models.items()
    }
    taken = take_turns(turns, rounds)
    return {
        name: {"decode_seconds": common.Spread.of(seconds), "state_bytes": states[name].nbytes}
        for name, seconds in taken.items()
    }


def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=7)
    parser.add_argument(
        "--designs", nargs="*", help="designs to measure (default: those of the reference runs)"
    )
    parser.add_argument(
        "--contexts", nargs="*", type=int, default=CONTEXTS, help="tokens read before, ascending"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    plan = reference["plan"]
    designs = args.designs or (["perspective2", "transformer"] if args.quick else list(reference["designs"]))
    params, contexts, visit = (80_000, (64, 256), 2) if args.quick else (plan["params"], args.contexts, 16)
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{params:,} parameters, batch 1")
    sizes = {"vocab_size": 300 if args.quick else plan["vocab_size"], "seq_len": plan["seq_len"]}
    configs = {name: presets.solve(name, params, **sizes) for name in designs}
    models = {
        name: decode_model(config, contexts[-1], torch.device("cpu")) for name, config in configs.items()
    }
    results: dict[str, Any] = {name: {} for name in designs}
    for context in contexts:
        for name, one in measure(models, context, args.repeats, visit).items():
            results[name][str(context)] = one
            report.say(f"{name} at {context:,}: {one['decode_seconds'].text(1e3)} ms")
    report.finish(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
