"""Decoding an artifact as it is here and as it was at an earlier commit, one row and batches, the two in turns.

`--tree` is a checkout of that commit (`git worktree add --detach TREE COMMIT`), whose native library is built where it
had one; without it the recording and the modules take turns. Random weights, greedy. Each side has a process of its
own. From memory, seconds are processor time on one thread, so that what else runs on the machine counts little; from
disk, with a cache of so many experts, they are of the clock on the wall. Bar: nothing slower than 0.97 of before.
"""

import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = ("tests/stream/test_recorded.py",)
BAR = 0.97
WARM = 1  # turns that are not measured
SIZES: dict[
    str, tuple[str, dict[str, Any], int, int]
] = {  # preset, sizes, distinct experts, tokens of a turn
    "perspective-166m": ("perspective-166m", {}, 16, 32),
    "perspective-1.9b, 8 experts": ("perspective-1.9b", {"torus": (2, 2, 2)}, 8, 8),
    "full width, 8 layers": ("perspective-1t", {"layers": 8, "torus": (2, 2, 2)}, 4, 4),
}
QUICK = {"perspective-tiny": ("perspective-tiny", {}, 2, 4)}
ROWS = (1, 8, 16)


def serve() -> None:
    """In a side's own process: read what to decode, then take a turn for each line that comes, and say how many seconds
    it took."""
    sys.meta_path.insert(0, importlib.machinery.PathFinder)  # an editable installation would come first
    import torch

    from perspectron import native
    from perspectron.decode.reading import prefill
    from perspectron.decode.steps import stepped, steps_of
    from perspectron.stream.engine import load_artifact

    if (found := Path(native.__file__).parents[2]) != Path.cwd():
        raise SystemExit(f"this would measure {found}, not {Path.cwd()}")
    spec = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    native.set_threads(1)
    model, _ = load_artifact(Path(spec["folder"]), cache_bytes=spec["cache"])
    rows, clock = spec["rows"], time.process_time if spec["cache"] is None else time.perf_counter
    with torch.inference_mode():
        start = prefill(model, [[1 + (row + t) % 200 for t in range(9 + row % 3)] for row in range(rows)])[1]
        steps = None if spec["modules"] else steps_of(model)
        print("ready", flush=True)
        for _ in sys.stdin:
            state, ids_B1 = start.fork(), torch.arange(rows)[:, None]
            _, _, state = stepped(model, steps, ids_B1, state)
            before = clock()
            for _ in range(spec["tokens"]):
                _, logits_BV, state = stepped(model, steps, ids_B1, state)
                ids_B1 = logits_BV.argmax(-1, keepdim=True)
            print((clock() - before) / spec["tokens"], flush=True)


class Side:
    """The process of one side."""

    def __init__(self, tree: Path, spec: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.ask(json.dumps(spec))

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a side ended with {self._process.wait()}: see above")
        return answer

    def end(self) -> None:
        self._process.communicate()


def in_turns(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of a token, of each side and round; every other round the last begins."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(-WARM, rounds):
        for name in list(sides)[:: 1 if round % 2 else -1]:
            taken = float(sides[name].ask("turn"))
            if round >= 0:
                seconds[name].append(taken)
    for side in sides.values():
        side.end()
    return seconds


def main() -> int:
    import common

    from perspectron import presets
    from perspectron.data import Tokenizer
    from perspectron.stream.expert_file import ExpertLayout
    from perspectron.stream.synthetic import synthesize

    parser = common.parser(__doc__ or "", threads=1, repeats=9)
    parser.add_argument(
        "--tree", type=Path, help="checkout of the earlier commit (default: the modules, here)"
    )
    parser.add_argument("--models", nargs="*", help="some of those measured")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--slots", type=int, help="from disk, with so many experts in memory")
    args = parser.parse_args()
    report = common.Report(args, TESTS, dtype="2-bit, ternary, int8", shapes=f"rows {args.rows}")
    results, table = {}, []
    sizes = QUICK if args.quick else {name: SIZES[name] for name in args.models or SIZES}
    for label, (preset, changes, experts, tokens) in sizes.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder, config = Path(temporary) / "artifact", presets.get(preset, **changes)
            synthesize(config, folder, lambda: Tokenizer.train(["def f():\n"], 260), experts=experts)
            hidden = next(block.ffn.hidden for block in config.blocks if hasattr(block.ffn, "torus"))
            cache = None if args.slots is None else args.slots * ExpertLayout(config.d_model, hidden).bytes
            for rows in args.rows:
                spec = {"folder": str(folder), "rows": rows, "cache": cache, "modules": False,
                        "tokens": tokens if rows == 1 else max(2, tokens // 4)}  # fmt: skip
                other = {"modules": True} if args.tree is None else {}
                seconds = in_turns(
                    {
                        "before": Side((args.tree or common.ROOT).resolve(), spec | other),
                        "now": Side(common.ROOT, spec),
                    },
                    args.repeats,
                )
                ratio = common.ratios(seconds["before"], seconds["now"], common.Spread.middle)
                spreads = {
                    name: common.Spread.middle([1e3 * s for s in taken]) for name, taken in seconds.items()
                }
                results[f"{label}, {rows}"] = spreads | {"ratio": ratio}
                table.append([label, str(rows), *(spread.text() for spread in (*spreads.values(), ratio))])
                report.say(" ".join(table[-1]))
    report.table(["model", "rows", "before, ms", "now, ms", "before / now"], table)
    missed = [name for name, found in results.items() if found["ratio"].median < BAR]
    report.say(f"below {BAR}: {', '.join(missed) or 'nothing'}")
    report.finish({"models": results, "bar": BAR, "missed": missed})
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        raise SystemExit(main())
