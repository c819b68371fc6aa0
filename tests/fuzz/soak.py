"""`python -m tests.fuzz.soak --minutes 60`: train, generate, save, load and quantise tiny models over and over in one
process, and say whether memory, open files or leftovers grow.

Memory is what is resident after each round once the C library has given back what is free: it keeps freed pieces, 10 MB
of them after forty curves drawn, which are no leak. The slope is a line through the second half of the rounds, over the
whole time, as a share of where memory stands.
"""

import argparse
import contextlib
import ctypes
import gc
import io
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from perspectron.cli.main import main as program
from perspectron.util.machine import return_memory

PRESETS = (
    "perspective-tiny",
    "lens-tiny",
    "adr-tiny",
    "drm-104k",
    "gla-tiny",
    "ssd-tiny",
    "transformer-tiny",
)
TRAIN = "--steps 3 --batch-size 2 --seq-len 32 --eval-every 0 --save-every 1 --eval-tokens 64 --dtype float32"


def say(*arguments: object) -> str:
    """Run a command of the program in this process. AssertionError unless it ends well."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program([str(argument) for argument in arguments])
    assert code == 0, (arguments, err.getvalue())
    return out.getvalue()


def turn(folder: Path, text: Path, preset: str) -> None:
    """One model, from nothing to few bits and away."""
    run, state = folder / "run", folder / "chat.state"
    say("train", "--preset", preset, "--data", text, "--out", run, *TRAIN.split(), "--set", "vocab_size=300")
    whole = say("generate", run, "the cat", "--max-tokens", 12, "--temperature", 0)
    first = say("generate", run, "the cat", "--max-tokens", 5, "--temperature", 0, "--save-state", state)
    rest = say("generate", run, "", "--max-tokens", 7, "--temperature", 0, "--load-state", state)
    assert whole.rstrip("\n") == first.rstrip("\n") + rest.rstrip("\n"), (whole, first, rest)
    say("quantize", run, "--out", folder / "packed", "--calibrate", "none")
    say("generate", folder / "packed", "the cat", "--max-tokens", 5)
    for name in ("run", "packed"):
        shutil.rmtree(folder / name)
    state.unlink()


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="(%(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return_memory()
    points, files, start = list[tuple[float, int]](), list[int](), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder, text = Path(place) / "work", Path(place) / "text"
        folder.mkdir()
        text.mkdir()
        for i in range(8):
            (text / f"{i}.txt").write_text(
                f"the cat sat on mat number {i}, and the dog sat on the log. " * 40
            )
        turns = 0
        while time.monotonic() - start < 60 * args.minutes or turns < 2 * len(PRESETS):
            turn(folder, text, PRESETS[turns % len(PRESETS)])
            turns += 1
            if turns % len(PRESETS) == 0:  # a round: every preset once
                points.append((time.monotonic() - start, resident()))
                files.append(len(os.listdir("/proc/self/fd")))
                print(
                    f"{points[-1][0]:7.0f} s  {points[-1][1] / 2**20:7.1f} MiB  {files[-1]} files", flush=True
                )
        leftovers = [str(path) for path in folder.rglob("*")]
    half = points[len(points) // 2 :] if len(points) > 3 else points
    slope, _ = np.polyfit(*np.array(half).T, 1)
    share = slope * points[-1][0] / np.mean([memory for _, memory in half])
    print(f"{turns} turns; memory slope {share:+.2%} over the whole time; open files {min(files)} to {max(files)}; "
          f"leftovers {leftovers}")  # fmt: skip
    return int(share >= 0.01 or len(set(files[1:])) > 1 or bool(leftovers))


if __name__ == "__main__":
    sys.exit(main())
