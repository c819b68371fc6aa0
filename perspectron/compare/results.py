"""All that a comparison found, as one JSON object that reports and the ledger of claims read."""

import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import perspectron
from perspectron import report
from perspectron.census import census
from perspectron.compare import measure, run
from perspectron.compare.plan import CURVE_TOKENS, Arm, Plan, prepare
from perspectron.compare.run import Cell
from perspectron.config import dump
from perspectron.data import Shards
from perspectron.errors import ConfigError
from perspectron.eval.suites import plain
from perspectron.files import atomic, read_json, write_json

VERSION = 1
CONDITIONS = "conditions.json"
RESULTS, PAGE, TEXT = "results.json", "report.html", "report.md"


def note_conditions(out: Path, plan: Plan, jobs: int) -> None:
    """Keep under which conditions a comparison was begun; the first time counts, but every commit that went on with it
    is named."""
    path, now = out / CONDITIONS, commit()
    if path.is_file():
        kept = read_json(path, ConfigError)
        if now not in kept["commit"].split(", "):
            write_json(path, kept | {"commit": f"{kept['commit']}, {now}"})
        return
    write_json(
        path,
        {
            "command": shlex.join(["perspectron", *sys.argv[1:]]),
            "commit": now,
            "machine": machine(),
            "threads": plan.settings.threads,
            "jobs": jobs,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": plan.settings.dtype,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def machine() -> str:
    """The processor and how many this process may use, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """Of the checkout that runs, else the version."""
    here = Path(perspectron.__file__).resolve().parents[1]
    command = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        top, *head = done.stdout.split()
        if head and Path(top) == here:
            return head[0]
    return f"version {perspectron.__version__}"


def collect(
    out: Path, plan: Plan, rates: dict[str, float], tried: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """What there is by now; cells that are not trained are "missing"."""
    _, shards = prepare(out, plan.settings)
    cells = run.cells(out, plan, rates)
    costs = read_json(out / "cost.json", ConfigError) if (out / "cost.json").is_file() else {}
    train, held = shards.split("train"), shards.split("heldout")
    settings: dict[str, Any] = dump(plan.settings)
    told = ("params", "tokens", "match", "data", "seq_len", "batch_size", "rates", "rate_share")
    measured = [measure.suites_of(cell) for cell in cells]
    compressors: dict[str, float] = next(
        (m["perplexity"]["compressors"] for m in measured if "perplexity" in m), {}
    )
    return {
        "version": VERSION,
        "kind": plan.kind,
        "conditions": read_json(out / CONDITIONS, ConfigError),
        "plan": {name: settings[name] for name in told}
        | {
            "data": text_of(plan.settings.data, shards),
            "vocab_size": next(iter(plan.arms.values())).model.vocab_size,
            "seeds": list(range(plan.settings.seeds)),
            "reference": plan.reference,
            "train_tokens": train.tokens,
            "heldout_tokens": held.tokens,
            "curve_tokens": min(CURVE_TOKENS, held.tokens),
            "heldout_bytes": held.text_bytes,
        },
        "compressors": compressors,
        "designs": {
            name: _arm(out, arm, [c for c in cells if c.arm == name], tried[name], costs.get(name))
            for name, arm in plan.arms.items()
        },
    }


def text_of(data: str, shards: Shards) -> str:
    """What was asked for; "stdlib" also where that is a folder with its ids, which an ablation takes from its run."""
    return "stdlib" if shards.corpus_fingerprint.startswith("stdlib:") else data


def write(out: Path, found: dict[str, Any]) -> None:
    """results.json, and the report of it as a page and as Markdown."""
    found = plain(found)
    write_json(out / RESULTS, found)
    for name, text in ((PAGE, report.html(found)), (TEXT, report.markdown(found))):
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _arm(
    out: Path, arm: Arm, cells: list[Cell], tried: list[dict[str, Any]], cost: dict[str, Any] | None
) -> dict[str, Any]:
    counted = census(arm.model)
    recall = out / "recall" / f"{cells[0].arm}.json"
    suites = {} if cost is None else {"cost": cost}
    if recall.is_file():
        suites["recall"] = read_json(recall, ConfigError)
    return {
        "about": arm.about,
        "source": arm.source,
        "parameters": counted.parameters,
        "active_parameters": counted.active_parameters,
        "train_flops_per_token": arm.train_flops_per_token,
        "state_bytes": {str(context): size for context, size in counted.state_bytes.items()},
        "rates": tried,
        "lr": cells[0].rate,
        "cells": [_cell(cell, arm) for cell in cells],
        "suites": suites,
    }


def _cell(cell: Cell, arm: Arm) -> dict[str, Any]:
    state, points = run.trained(cell), run.curve(cell, arm.train_flops_per_token)
    suites = measure.suites_of(cell)
    perplexity, gates = suites.pop("perplexity", None), suites.pop("gates", {})
    if state.status == "finished" and perplexity is None:
        state = run.Trained("missing", "trained, but its loss was not measured", None)
    return {
        "seed": cell.seed,
        "status": state.status,
        "why": state.why,
        **run.spent(cell),
        "heldout_bits_per_byte": perplexity["bits_per_byte"] if perplexity else None,
        "curve": points,
        "losses_sha256": run.digest(cell),
        "terms": run.terms(cell),
        "gates": gates,
        "suites": suites,
    }
