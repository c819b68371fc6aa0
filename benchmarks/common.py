"""What every benchmark here does: refuse on red tests, state its conditions, take turns, report with spread.

Imported first, so that the code measured is that of this checkout, whose commit is printed.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.data.specials import OURS  # noqa: E402
from perspectron.eval import timing  # noqa: E402
from perspectron.eval.timing import take_turns, timed  # noqa: E402
from perspectron.train.estimate import autocast  # noqa: E402
from perspectron.train.optim import OptimConfig, optimizer_of  # noqa: E402
from perspectron.util import machine  # noqa: E402
from perspectron.util.machine import Peak  # noqa: E402, F401
from perspectron.util.machine import free_memory as available_bytes  # noqa: E402

MATMUL_SIZES = (384, 768, 1536, 3072)


# Measurements


class Spread(timing.Spread):
    """One that is also told by its least and greatest."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Median, least and greatest."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, scale: float = 1.0) -> str:
        if self.count == 1:
            return f"{self.median * scale:.4g} (once)"
        return f"{self.median * scale:.4g} ({self.low * scale:.4g}–{self.high * scale:.4g})"


def ratios(
    above: Sequence[float], below: Sequence[float], spread: Callable[[Sequence[float]], Spread] = Spread.of
) -> Spread:
    """above / below, pair by pair."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def interleave(
    contenders: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` per contender, taken in turns."""
    return take_turns({name: timed(call) for name, call in contenders.items()}, repeats, warmup)


class Letters:
    """A tokenizer of a model that was never trained: every id is a letter."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.specials = vocab_size, OURS

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (self.vocab_size - 1) for letter in text]

    def token_bytes(self, id: int) -> bytes:
        return bytes([97 + id % 26]) if id else b""


# Training


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def updating(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    ids_BT: Tensor,
    targets_BT: Tensor,
    dtype: str,
) -> Callable[[], None]:
    """A call that makes one update: forward, loss, backward, clipping and fused AdamW."""
    optimizer = optimizer_of(model, OptimConfig())

    def update() -> None:
        with autocast(ids_BT.device, dtype):
            loss = loss_of(ids_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


# Command line


def parser(description: str, *, threads: int, repeats: int) -> argparse.ArgumentParser:
    """The options that all benchmarks share; `threads` and `repeats` are this one's defaults."""
    made = argparse.ArgumentParser(description=description.split("\n\n")[0])
    made.add_argument("--threads", type=int, default=threads, help="threads of torch (%(default)s)")
    made.add_argument("--repeats", type=int, default=repeats, help="rounds measured (%(default)s)")
    made.add_argument(
        "--quick", action="store_true", help="tiny shapes: does it run? The numbers say nothing"
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="PATH",
        help="write results and conditions there; without PATH or with - to standard output",
    )
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


class Report:
    """Checks the tests, then prints: the conditions at once, lines as they come, the JSON at the end."""

    def __init__(self, args: argparse.Namespace, tests: Sequence[str], *, dtype: str, shapes: str) -> None:
        self.name, self.json = Path(sys.argv[0]).stem, args.json
        self.conditions = conditions(args) | {"dtype": dtype, "shapes": shapes}
        self.conditions["tests"] = "left out: quick" if args.quick else require_green(*tests)
        self.say(*(f"{key:>9}: {value}" for key, value in self.conditions.items()), "")

    def say(self, *lines: str) -> None:
        print(*lines, sep="\n", flush=True, file=sys.stderr if self.json == "-" else sys.stdout)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns, the first one left, the others right."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            self.say("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
        self.say("")

    def before(self, key: str) -> dict[str, Any]:
        """What results a file of the same conditions has under a key; what it has is `stamped` with its commit."""
        if self.json in (None, "-") or not Path(self.json).is_file():
            return {}
        whole = json.loads(Path(self.json).read_text(encoding="utf-8"))
        for name in ("shapes", "dtype", "threads"):
            if (its := whole["conditions"][name]) != self.conditions[name]:
                raise SystemExit(f"{self.json} has other settings: {name} {its}; name another file")
        return whole["results"].get(key, {})

    def stamped(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An entry with the commit that it is measured at, as the next run has another."""
        return entry | {"commit": self.conditions["commit"]}

    def keep(self, results: dict[str, Any]) -> None:
        """Of a run that goes on: what it has measured is in the file, should it be stopped."""
        if self.json != "-":
            self.finish(results)

    def finish(self, results: dict[str, Any], headline: dict[str, Any] | None = None) -> None:
        """The JSON; with a headline it is one line, with the headline's keys at its top."""
        whole = {"benchmark": self.name, "conditions": self.conditions, "results": results} | (headline or {})
        text = json.dumps(whole, indent=None if headline else 1, default=asdict) + "\n"
        if self.json == "-":
            sys.stdout.write(text)
        elif self.json:
            Path(self.json).write_text(text, encoding="utf-8")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Under which this run is made."""
    return {
        "device": "cpu",
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load": round(os.getloadavg()[0], 2),
        "memory": f"{available_bytes() / 1e9:.1f} GB free",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": machine.commit(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": args.quick,
    }


def require_green(*tests: str) -> str:
    """Run these tests; the line that sums them up, or SystemExit when any is red or none ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{done.stdout[-4000:]}{done.stderr[-2000:]}\nnot measured: {shlex.join(tests)} is red"
        )
    return f"green in {time.perf_counter() - start:.0f} s: {shlex.join(tests)}"


# Time


def matmul_peak(dtype: torch.dtype, *, quick: bool = False) -> float:
    """FLOP/s of the fastest square matrix product on the threads in use now: best size, best repeat."""
    best = 0.0
    for size in MATMUL_SIZES[:1] if quick else MATMUL_SIZES:
        a, b = (torch.randn(size, size).to(dtype) for _ in "ab")
        out = torch.mm(a, b)
        end, repeats = time.perf_counter() + (0.05 if quick else 1.0), 0
        while repeats < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
            repeats += 1
    return best


# Memory


def child(spec: dict[str, Any], needs_bytes: float = 0) -> dict[str, Any]:
    """What this same script prints in a fresh process under `--child`, so that memory is that of one contender;
    {"not_run": why} when `needs_bytes` are not free or the process died."""
    if needs_bytes > 0.9 * available_bytes():
        free = available_bytes() / 1e9
        return {"not_run": f"needs about {needs_bytes / 1e9:.1f} GB, {free:.1f} GB are free"}
    done = subprocess.run(
        [sys.executable, sys.argv[0], "--child", json.dumps(spec)], capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"not_run": f"exit code {done.returncode}: {last[0]}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def peak_text(measured: dict[str, Any]) -> str:
    """The `peak_bytes` of a child's answer, or why there is none."""
    if "not_run" in measured:
        return f"not run: {measured['not_run']}"
    size = measured["peak_bytes"]
    return (
        "not measured" if size is None else f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.1f} MB"
    )


Run = Callable[[Path, argparse.Namespace, "Report"], Any]


def of_artifact(args: argparse.Namespace, report: "Report", make: Run, measure: Run) -> None:
    """Report what is measured of the artifact in `--dir`, which is made if it is not there, or of a temporary one."""
    with tempfile.TemporaryDirectory() as place:
        folder = args.dir or Path(place) / "artifact"
        if not folder.exists():
            make(folder, args, report)
        report.finish(measure(folder, args, report))
