"""How few bits per byte this library reaches on a text in so many minutes, counted from the start of the process: an
entry for the record of small models trained on a CPU (docs/records.md).

python benchmarks/speedrun.py --minutes 10 --json results/records/stdlib-10.json

What follows `--` goes to `perspectron train`. Measured afterwards, outside of the time: the whole held-out text, read
in order with the state kept to the end of each document, and what is left of the loss when the model is packed in 8
bits. `python docs/records.py` writes docs/records.md from all entries.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from perspectron.cli.main import main as main_of
from perspectron.model.census import census
from perspectron.opening import describe
from perspectron.train.metrics import read_metrics

TESTS = ("tests/train/test_loop.py",)
TINY = ["--preset", "gla-tiny", "--batch-size", "2", "--seq-len", "32", "--steps", "30"]


def trained(run: Path, data: str, seed: int, options: list[str]) -> float:
    """Train a model; seconds from the start of the process to its end."""
    asked = ["--data", data, "--seed", str(seed), "--out", str(run), *options]
    command = [sys.executable, "-m", "perspectron", "train", *asked]
    began = time.perf_counter()
    if code := subprocess.run(command, cwd=common.ROOT, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(code)
    return time.perf_counter() - began


def answer(*words: str) -> Any:
    """What a command answers as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if code := main_of([*words, "--json"]):
            raise SystemExit(code)
    return json.loads(out.getvalue())


def measured(run: Path) -> dict[str, Any]:
    """The losses of a run, of its packed model, and of the compressors for the same bytes."""
    found = answer("eval", str(run))
    pack = ["--out", f"{run}-packed", "--linear", "int8", "--calibrate", "none"]
    small = answer("quantize", str(run), *pack)
    updates = [line for line in read_metrics(run) if "loss" in line]
    at = {line["step"]: line["seconds"] for line in updates}
    bits = "heldout_bits_per_byte"
    return {
        "bits_per_byte": found["streaming"]["bits_per_byte"],
        "text_bytes": found["text_bytes"],
        "compressors": found["compressors"],
        "packed_bytes": small["bytes_written"],
        "packed_loss": small["bits_per_byte_after"] - small["bits_per_byte_before"],
        "parameters": census(describe(run).model).parameters,
        "updates": updates[-1]["step"],
        "tokens": updates[-1]["tokens"],
        "curve": [(round(at[line["step"]], 1), line[bits]) for line in read_metrics(run) if bits in line],
    }


def main() -> None:
    parser = common.parser(__doc__, threads=2, repeats=3)
    parser.add_argument("--data", default="stdlib", help='text: as `perspectron train` takes it ("stdlib")')
    parser.add_argument("--minutes", type=float, default=10, help="until the process has ended (%(default)s)")
    parser.add_argument("--about", default="", help="what is new in this entry, for the page")
    parser.add_argument("options", nargs="*", help="options of `perspectron train`, after --")
    args = parser.parse_args()
    minutes = 0 if args.quick else args.minutes  # a quick run counts updates, which any machine makes
    options = [*(TINY if args.quick else ["--minutes", f"{minutes:g}"]), *args.options]
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    report = common.Report(args, TESTS, dtype="auto", shapes=f"{args.data}, {minutes:g} minutes")
    seeds = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.repeats):
            run = Path(scratch) / f"{seed}"
            seconds = trained(run, args.data, seed, options)
            seeds.append({"seed": seed, "seconds": seconds} | measured(run))
            bits, others = seeds[-1]["bits_per_byte"], seeds[-1]["compressors"]
            report.say(f"seed {seed}: {bits:.4f} bits per byte after {seconds:.0f} s; {others}")
    said = {"data": args.data, "minutes": minutes, "options": args.options, "about": args.about}
    report.finish(said | {"seeds": seeds})


if __name__ == "__main__":
    main()
