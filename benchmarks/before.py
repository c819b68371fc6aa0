"""Training as it is here and as it was at an earlier commit, design by design, the two in turns.

`--tree` is a checkout of that commit (`git worktree add --detach TREE COMMIT`), whose native library is built where it
had one. Each version has a process of its own; an update is forward, loss, backward, clipping and fused AdamW on random
tokens, with memory kept where the version can. A design has the sizes that each version gives it at equal parameters.
Seconds are processor time on one thread. The share is of the fastest matrix product in that dtype: three times the
FLOPs of the model's matrix products and recurrence, as `perspectron compare` counts them, per second of an update.
"""

import argparse
import importlib.machinery
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = ("tests/native/test_training.py", "tests/ops/test_fused.py", "tests/ops/test_memory.py")
BARS = {"times": {"up to 2 M": 2.0, "above": 1.4}, "share": {"float32": 0.75, "bfloat16": 0.55}}
WARM = 2  # updates that are not measured
DESIGNS = ("perspective", "adr", "lens", "drm", "transformer", "gpt2", "gla", "ssd", "gdn", "kda", "rwkv7")


@dataclass(frozen=True)
class Setting:
    """An update of `design` at so many parameters: `tokens` in windows of T."""

    design: str
    params: int
    vocab_size: int
    T: int
    tokens: int
    dtype: str


def serve() -> None:
    """In a version's own process: read a setting, say how many parameters the model has, then make an update for each
    line that comes and say how many seconds of the processor it took."""
    import torch
    from torch import nn

    sys.meta_path.insert(0, importlib.machinery.PathFinder)  # an editable installation would come first
    from perspectron import presets

    try:
        from perspectron.model.model import build
        from perspectron.util import machine
    except ImportError:  # as commits before 2026-11-26 have them
        from perspectron import machine
        from perspectron.model import build

    if (found := Path(presets.__file__).parents[2]) != Path.cwd():
        raise SystemExit(f"this would measure {found}, not {Path.cwd()}")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    setting = Setting(**json.loads(sys.stdin.readline()))
    config = presets.solve(setting.design, setting.params, vocab_size=setting.vocab_size, seq_len=setting.T)
    model = build(config, 0).train()
    ids_BT = torch.randint(setting.vocab_size, (setting.tokens // setting.T, setting.T + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    print(sum(parameter.numel() for parameter in model.parameters()), flush=True)
    with getattr(machine, "memory_kept", nullcontext)():
        for number, _ in enumerate(sys.stdin):
            if number == WARM:
                getattr(machine, "in_large_pages", lambda: None)()
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.dtype == "bfloat16"):
                loss = model(ids_BT[:, :-1], targets=ids_BT[:, 1:]).objective()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(time.process_time() - start, flush=True)


class Version:
    """A version's process, for one setting."""

    def __init__(self, tree: Path, setting: Setting) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.parameters = int(self._ask(json.dumps(asdict(setting))))

    def update(self) -> float:
        return float(self._ask("update"))

    def end(self) -> None:
        self._process.communicate()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"the process in {self._process.args} ended with {self._process.wait()}: see above"
            )
        return answer


def measure(setting: Setting, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    import common

    from perspectron import presets
    from perspectron.model.census import census

    versions = {name: Version(tree, setting) for name, tree in trees.items()}
    seconds: dict[str, list[float]] = {name: [] for name in versions}
    for round in range(-WARM, rounds):
        for name, version in versions.items():
            taken = version.update()
            if round >= 0:
                seconds[name].append(taken)
    for version in versions.values():
        version.end()
    config = presets.solve(setting.design, setting.params, vocab_size=setting.vocab_size, seq_len=setting.T)
    (flops,) = census(config, [setting.T // 2]).flops_per_token.values()
    speeds = {
        name: common.Spread.of([setting.tokens / one for one in taken]) for name, taken in seconds.items()
    }
    return {
        "parameters": {name: version.parameters for name, version in versions.items()},
        "tokens_per_second": speeds,
        "times": common.ratios(seconds["before"], seconds["now"]),
        "flops_per_second": 3 * flops * speeds["now"].median,
    }


def main() -> int:
    import common
    import torch

    from perspectron import presets

    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--tree", type=Path, required=True, help="checkout of the earlier commit")
    parser.add_argument("--designs", nargs="*", default=DESIGNS)
    parser.add_argument("--params", type=int, nargs="+", default=[2_000_000, 20_000_000])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 4096], help="tokens of a window")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.designs, args.params, args.lengths, args.repeats = ["perspective", "ssd"], [80_000], [16], 1
    report = common.Report(
        args, TESTS, dtype=", ".join(args.dtypes), shapes="2,048 tokens, or a whole window"
    )
    trees = {"before": args.tree.resolve(), "now": common.ROOT}
    rows, results = [], []
    for dtype in args.dtypes:
        peak = common.matmul_peak(getattr(torch, dtype), quick=args.quick)
        report.say(f"matrix product, {dtype}: {peak / 1e9:.0f} GFLOP/s", "")
        for params in args.params:
            vocab = 300 if args.quick else presets.vocabulary(params)
            for T in args.lengths:
                for design in args.designs:
                    tokens = T if args.quick else max(2048 // T, 1) * T
                    found = measure(Setting(design, params, vocab, T, tokens, dtype), trees, args.repeats)
                    share = found["flops_per_second"] / peak
                    results.append(
                        {"design": design, "params": params, "T": T, "dtype": dtype, "share": share, **found}
                    )
                    speeds = found["tokens_per_second"]
                    rows.append((
                        design, f"{params / 1e6:g} M", str(T), dtype, speeds["before"].text(), speeds["now"].text(),
                        found["times"].text(), f"{share:.2f}",
                    ))  # fmt: skip
                    report.say("  ".join(rows[-1]))
    report.say("")
    report.table(("design", "", "T", "", "before, tokens/s", "now", "times", "of the product"), rows)
    for run in results:
        bars = {
            "times": BARS["times"]["up to 2 M" if run["params"] <= 2e6 else "above"],
            "share": BARS["share"][run["dtype"]],
        }
        reached = {"times": run["times"].median, "share": run["share"]}
        run["missed"] = [name for name, bar in bars.items() if reached[name] < bar]
        at = f"{run['design']}, {run['params'] / 1e6:g} M, T {run['T']}"
        report.say(*(f"{at}: {name} {reached[name]:.2f}, bar {bars[name]}" for name in run["missed"]))
    report.finish({"bars": BARS, "runs": results})
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        raise SystemExit(main())
