"""RUN/metrics.jsonl: a line of JSON for each update and each measurement."""

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perspectron.util.errors import CheckpointError, StorageError
from perspectron.util.files import append_to, parse_json, plain, read_text, write_text

Metrics = dict[str, Any]
METRICS = "metrics.jsonl"
HELDOUT = "heldout.json"
"""File with the best checkpoint's loss on all held-out text at the end of a training, beside compressors."""
MOST_METRICS = 1 << 30  # bytes
OF_UPDATE = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds")
PERPLEXITIES = ("heldout_perplexity", "dev_perplexity")


@contextlib.contextmanager
def noting(
    run: Path, report: Callable[[Metrics], None], caught: list[int]
) -> Iterator[Callable[[Metrics], None]]:
    """Yield a function that adds a line to the metrics and reports it. An OSError of `report` is ignored once a signal
    was `caught`: the reader of its output is gone."""
    with append_to(run / METRICS) as log:

        def note(line: Metrics) -> None:
            text = memoryview(json.dumps(plain(line), allow_nan=False).encode() + b"\n")
            try:
                while text:
                    text = text[log.write(text) or 0 :]
                if "loss" not in line:  # a measurement; no power cut leaves a later checkpoint without it
                    os.fsync(log.fileno())
            except OSError as error:
                raise StorageError(f"{run / METRICS}: not written ({error.strerror})") from error
            try:
                report(line)
            except OSError:
                if not caught:  # else the run is saved
                    raise

        yield note


def forget(run: Path, step: int) -> None:
    """Drop the lines of what came after update `step`."""
    path = run / METRICS
    if path.is_file():
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(run: Path) -> list[Metrics]:
    """The lines of metrics.jsonl; what a model reported is None where it was not finite. Damaged lines are left out,
    with a warning unless it is only the last, cut short by a crash."""
    try:
        text = read_text(run / METRICS, MOST_METRICS, errors="replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run / METRICS}: unreadable ({error})") from None
    kept, damaged = [], list[int]()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            kept.append(_metrics(parse_json(line)))
        except ValueError:
            damaged.append(number)
    if damaged[:-1] or (damaged and text.endswith("\n")):
        warnings.warn(
            f"{run / METRICS}: {len(damaged)} damaged lines left out, the first {damaged[0]}", stacklevel=2
        )
    return kept


def measured(line: Metrics) -> tuple[str, Any]:
    """("held-out" or "dev", bits per byte) as a line of metrics has them; the bits are None in a line of an update."""
    dev = line.get("dev_bits_per_byte")
    return ("held-out", line.get("heldout_bits_per_byte")) if dev is None else ("dev", dev)


def _metrics(line: Any) -> Metrics:
    """ValueError unless it is a line that a trainer wrote."""
    if not isinstance(line, dict):
        raise ValueError("not an object")
    of_update = {name: line.get(name) for name in OF_UPDATE}
    numbers = of_update if "loss" in line else {"step": line.get("step"), "bits_per_byte": measured(line)[1]}
    aux = line.get("aux", {})
    numbers |= {k: v for k, v in aux.items() if v is not None} if isinstance(aux, dict) else {"aux": None}
    perplexities = {name: line[name] for name in PERPLEXITIES if name in line}
    for name, value in (numbers | perplexities).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is not a number")
        if not abs(value) <= sys.float_info.max or (name in perplexities and value <= 0):
            raise ValueError(f"{name} is out of range")
    if type(line["step"]) is not int or line["step"] < 0:
        raise ValueError("step is not a count")
    return line


def bits_per_nat(metrics: list[Metrics]) -> float | None:
    """Bits per byte for one nat per token, by the last measurement on held-out or dev text; None without one."""
    for line in reversed(metrics):
        for name in PERPLEXITIES if "loss" not in line else ():
            nats = math.log(line.get(name, 1.0))
            if nats > 0:
                return float(measured(line)[1]) / nats
    return None
