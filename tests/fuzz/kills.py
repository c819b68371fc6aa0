"""`python -m tests.fuzz.kills --kills 60`: kill the program with SIGKILL at any moment, go on, and compare the result
with that of a program that nobody killed, bit for bit.

In turn: while a text is encoded; while checkpoints are written and pruned at every step; a routed model in bfloat16 on
two threads; a recipe between and in its stages; a comparison with its cells.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from perspectron.compare.plan import PLAN

TINY = "vocab_size=300 d_model=32 layers=2 hidden=32 rank=8 heads=2 kv_heads=1 window=16"
BATCH = "--batch-size 2 --seq-len 32 --eval-tokens 64"
ENCODE = "tokenize {text} --out {out} --vocab-size 280"
HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Scenario:
    """begin, go_on: commands; result: of what is in OUT at the end, everything that was promised to be the same."""

    name: str
    begin: str
    go_on: str
    result: Callable[[Path], str]
    threads: int = 1


def weights(out: Path) -> str:
    """The last checkpoint's tensors, the optimizer's and the random state, and all losses."""
    last = max(out.rglob("step-*"), key=lambda path: path.name)
    taken = hashlib.sha256()
    for path in sorted(last.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            taken.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            taken.update(tensor.contiguous().flatten().view(-1).to("cpu").numpy().tobytes())
    for metrics in sorted(out.rglob("metrics.jsonl")):
        for line in map(json.loads, metrics.read_text().splitlines()):
            kept = {key: value for key, value in line.items() if "second" not in key}
            taken.update(json.dumps(kept, sort_keys=True).encode())
    return taken.hexdigest()


def shards(out: Path) -> str:
    """Every file of an encoded text."""
    taken = hashlib.sha256()
    for path in sorted(out.glob("*")):
        taken.update(path.name.encode() + path.read_bytes())
    return taken.hexdigest()


def losses(out: Path) -> str:
    """The losses of every cell of a comparison, and its ranking."""
    results = json.loads((out / "results.json").read_text())
    return json.dumps(
        {
            name: [(cell["losses_sha256"], cell["heldout_bits_per_byte"]) for cell in design["cells"]]
            for name, design in results["designs"].items()
        }
    )


SCENARIOS = (
    Scenario(
        "encode",
        "tokenize {text} --out {out} --vocab-size 280",
        "tokenize {text} --out {out} --vocab-size 280",
        shards,
    ),
    Scenario(
        "prune",
        f"train --preset perspective-tiny-dense --data {{text}} --out {{out}} --steps 60 {BATCH} --eval-every 7 "
        f"--save-every 1 --keep 1 --dtype float32 --set {TINY}",
        "train --resume {out}",
        weights,
    ),
    Scenario(
        "routed bf16",
        f"train --preset perspective-tiny --data {{text}} --out {{out}} --steps 40 {BATCH} --eval-every 9 "
        f"--save-every 4 --dtype bfloat16 --set {TINY} ffn=routed torus=[2,2]",
        "train --resume {out}",
        weights,
        threads=2,
    ),
    Scenario(
        "recipe",
        f"train --preset perspective-tiny --data {{text}} --out {{out}} --steps 40 {BATCH} --eval-every 0 "
        f"--save-every 3 --dtype float32 --recipe staged --set {TINY} ffn=routed torus=[2,2]",
        "train --resume {out}",
        weights,
    ),
    Scenario(
        "compare",
        "compare --designs transformer,ssd --params 120k --tokens 2560 --seeds 1 --seq-len 32 --batch-size 4 "
        "--rates 0.004 --warmups 0.1 --dtype float32 --suites calibration --vocab-size 300 --data {text} --out {out}",
        "compare --resume {out}",
        losses,
    ),
)


def start(command: str, threads: int, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
    with log.open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "perspectron", *command.split()], stdout=said, stderr=said, env=environment,
            start_new_session=True,
        )  # fmt: skip


def finished(command: str, threads: int, log: Path) -> float:
    begun = time.monotonic()
    code = start(command, threads, log).wait()
    if code:
        raise SystemExit(f"{command}: exit code {code}\n{log.read_text()[-2000:]}")
    return time.monotonic() - begun


def begun(scenario: Scenario, out: Path) -> bool:
    """Whether there is a run to go on with."""
    return scenario.begin == scenario.go_on or any((out / name).is_file() for name in ("config.json", PLAN))


def go(scenario: Scenario, kills: int, text: Path, place: Path, draw: random.Random) -> tuple[bool, int]:
    """(whether every result is that of the program that nobody killed, how many were brought to their end). Each kill
    hits it at work; where it came to its end before, it begins anew."""
    whole, out, log = place / "whole", place / "killed", place / "log.txt"
    seconds = finished(scenario.begin.format(text=text, out=whole), scenario.threads, log)
    expected, same, ends, hits = scenario.result(whole), True, 0, 0
    while hits < kills or out.exists():
        command = scenario.go_on if begun(scenario, out) else scenario.begin
        if command is scenario.begin and out.exists() and command != scenario.go_on:
            shutil.rmtree(out)
        process = start(command.format(text=text, out=out), scenario.threads, log)
        try:  # importing torch takes a second or two: most kills fall into the work after it
            code = process.wait(draw.uniform(0.3, 1.0) * seconds if hits < kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            hits += 1
            continue
        if code:
            raise SystemExit(f"{command}: exit code {code}\n{log.read_text()[-2000:]}")
        leftovers = list(out.rglob(".*.tmp"))
        if leftovers:
            print(f"  left over: {leftovers}")
        same, ends = same and scenario.result(out) == expected and not leftovers, ends + 1
        shutil.rmtree(out)
    return same, ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of their moments (%(default)s)")
    args = parser.parse_args()
    draw, bad = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text"
        text.mkdir()
        sentence = "the cat sat on the mat and the dog lay by the log while a bird sang in the old tree"
        words = sentence.split()
        for i in range(64):
            (text / f"{i:02d}.txt").write_text(" ".join(draw.choices(words, k=4000)))
        for i, scenario in enumerate(SCENARIOS):
            share = args.kills // len(SCENARIOS) + (i < args.kills % len(SCENARIOS))
            folder = Path(place) / scenario.name.replace(" ", "-")
            folder.mkdir()
            same, ends = go(scenario, share, text, folder, draw)
            bad += not same
            told = "the same bits" if same else "ANOTHER RESULT"
            print(f"{scenario.name}: {share} kills at work, {ends} times to the end; {told}", flush=True)
    print(f"{args.kills} kills")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
