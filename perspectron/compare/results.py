"""The results of a comparison as one JSON object, read by its report and by the ledger."""

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from perspectron.compare import measure, run
from perspectron.compare.plan import CURVE_TOKENS, REFERENCE, Arm, Plan, prepare
from perspectron.compare.report.page import VERSION, html
from perspectron.compare.run import Cell
from perspectron.data import NAMED, Shards
from perspectron.eval.perplexity import mean_context
from perspectron.model.census import census, state_bytes
from perspectron.train.optim import OptimConfig
from perspectron.util import machine
from perspectron.util.config import dump, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import plain, read_json, write_json, write_text

CONDITIONS = "conditions.json"
RESULTS, PAGE = "results.json", "results.html"


def note_conditions(out: Path, plan: Plan, jobs: int) -> None:
    """Write down the conditions under which a comparison started; later runs only add their commit."""
    path, now = out / CONDITIONS, machine.commit()
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
            "machine": machine.processor(),
            "threads": plan.settings.threads,
            "jobs": jobs,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "dtype": plan.settings.dtype,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def collect(
    out: Path, plan: Plan, rates: dict[str, run.Rate], tried: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Results so far; cells that are not trained are "missing"."""
    _, shards = prepare(out, plan.settings)
    cells = run.cells(out, plan, rates)
    costs = read_json(out / "cost.json", ConfigError) if (out / "cost.json").is_file() else {}
    train, heldout = shards.split("train"), shards.split("heldout")
    curve = shards.split("dev") if plan.settings.dev else heldout
    settings: dict[str, Any] = dump(plan.settings)
    shown = ("params", "tokens", "match", "data", "seq_len", "batch_size", "rates", "warmups", "rate_share")
    first = next(iter(plan.arms.values())).model
    state = state_bytes(first, plan.settings.seq_len) if plan.settings.match == "state" else None
    packed = [path for cell in cells if (path := measure.path_of(cell, measure.COMPRESSORS)).is_file()]
    return {
        "version": VERSION,
        "kind": plan.kind,
        "conditions": read_json(out / CONDITIONS, ConfigError),
        "plan": {name: settings[name] for name in shown}
        | {
            "data": text_of(plan.settings.data, shards),
            "vocab_size": first.vocab_size,
            "seeds": list(range(plan.settings.seeds)),
            "reference": plan.reference,
            "train_tokens": train.tokens,
            "heldout_tokens": heldout.tokens,
            "curve_tokens": min(CURVE_TOKENS, curve.tokens),
            "curve_on": curve.name,
            "state": plan.settings.state or state,
            "text_digest": shards.corpus_fingerprint.partition(":")[2][:12],
            "ids_digest": shards.digest,
            "heldout_bytes": heldout.text_bytes,
            "context": {
                "windows": mean_context(heldout, plan.settings.seq_len),
                "streaming": mean_context(heldout),
            },
        },
        "compressors": read_json(packed[0], ConfigError) if packed else {},
        "designs": {
            name: _arm(out, arm, [c for c in cells if c.arm == name], tried[name], costs.get(name))
            for name, arm in plan.arms.items()
        },
    }


def text_of(data: str, shards: Shards) -> str:
    """Name of the text: as the user gave it, or the name in NAMED if a folder has the ids of such a text."""
    kind = shards.corpus_fingerprint.partition(":")[0]
    return kind if kind in NAMED else data


def write(out: Path, results: dict[str, Any]) -> None:
    """Write results.json and its page."""
    write_json(out / RESULTS, plain(results))
    write_page(out / RESULTS)


def write_page(path: Path) -> Path:
    """Write the page of a results.json beside it, and return its path. ConfigError: the file has no results of a
    comparison, or damaged ones."""
    from jinja2 import TemplateError

    results = read_json(path, ConfigError)
    try:
        page = html(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: not the results of a comparison, or damaged ({cause})") from error
    write_text(beside := path.with_suffix(".html"), page)
    return beside


EQUAL = (
    "params",
    "tokens",
    "match",
    "seq_len",
    "batch_size",
    "vocab_size",
    "seeds",
    "rate_share",
    "text_digest",
    "train_tokens",
    "curve_on",
)


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The results of several comparisons as one: all their designs under the conditions of each, and how many `parts`
    there were, whose times were measured apart. ConfigError where they differ in text, budget or seeds, or share a
    design."""
    parts = [read_json(path, ConfigError) for path in paths]
    designs, owner = dict[str, Any](), dict[str, Path]()
    for path, part in zip(paths, parts, strict=True):
        for kind in ("plan", "designs", "conditions"):
            require(
                isinstance(part, dict) and isinstance(part.get(kind), dict), f"{path}: {kind}", None, "there"
            )
        for name in ("version", "kind"):
            value, wanted = part.get(name), parts[0].get(name)
            require(value == wanted, f"{path}: {name}", value, f"{wanted}, as in {paths[0]}")
        for name in EQUAL:
            if name == "text_digest" and "ids_digest" in part["plan"].keys() & parts[0]["plan"].keys():
                name = "ids_digest"  # the other depends on the times of files
            value, wanted = part["plan"].get(name), parts[0]["plan"].get(name)
            require(value == wanted, f"{path}: {name}", value, f"{wanted}, as in {paths[0]}")
        if part["plan"].get("match") != "tokens":
            value, wanted = _budget(part), _budget(parts[0])
            bound = (
                f"{wanted}, as in {paths[0]}" if wanted else "known: only that of tokens, FLOPs or state is"
            )
            require(wanted is not None and value == wanted, f"{path}: budget", value, bound)
        for name, design in part["designs"].items():
            require(
                name not in owner, f"{path}: design", name, f"in one of them; it is in {owner.get(name)} too"
            )
            owner[name], designs[name] = path, design
    require(bool(designs), "report", "no designs", "results with designs")
    conditions = {
        key: "; ".join(dict.fromkeys(str(part["conditions"].get(key, "")) for part in parts))
        for key in parts[0]["conditions"]
    }
    everyone = dict(parts[0]["plan"])
    for name in ("rates", "warmups"):
        everyone[name] = sorted({value for part in parts for value in part["plan"].get(name, ())})
    everyone["reference"] = REFERENCE if REFERENCE in designs else next(iter(designs))
    compressors: dict[str, float] = next(
        (part["compressors"] for part in parts if part.get("compressors")), {}
    )
    return {
        **parts[0],
        "compressors": compressors,
        "conditions": conditions,
        "plan": everyone,
        "designs": designs,
        "parts": sum(part.get("parts", 1) for part in parts),
    }


def _budget(part: dict[str, Any]) -> float | None:
    """What all designs of a comparison have but for its tokens: bytes of state, or FLOPs of the reference. None of
    times, which are those of a machine in its hour, and where the results do not have it."""
    plan = part["plan"]
    if plan["match"] == "state":
        return plan.get("state")
    reference = part["designs"].get(plan.get("reference"), {}) if plan["match"] == "flops" else {}
    flops = reference.get("train_flops_per_token")
    return flops and flops * plan["tokens"]


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
        "optimizer": dump(arm.optim or OptimConfig()),
        "parameters": counted.parameters,
        "active_parameters": counted.active_parameters,
        "train_flops_per_token": arm.train_flops_per_token,
        "state_bytes": {str(context): size for context, size in counted.state_bytes.items()},
        "streaming": _streaming(cells),
        "rates": tried,
        **cells[0].rate._asdict(),
        "cells": [_cell(cell, arm) for cell in cells],
        "suites": suites,
    }


def _streaming(cells: list[Cell]) -> dict[str, Any] | None:
    """Bytes of the state with memory carried, or why the design has no such score; None before it was measured."""
    found = (measure.suites_of(cell).get("perplexity", {}) for cell in cells)
    one = next((loss for loss in found if "streaming" in loss), None)
    return one and {"state_bytes": (one["streaming"] or {}).get("state_bytes"), "why": one["why"]}


def _cell(cell: Cell, arm: Arm) -> dict[str, Any]:
    state, suites = run.trained(cell), measure.suites_of(cell)
    perplexity = suites.pop("perplexity", None)
    if state.status == "finished" and perplexity is None:
        state = run.Trained("missing", "trained, but its loss was not measured", None)
    return {
        "seed": cell.seed,
        "status": state.status,
        "why": state.why,
        **run.history(cell, arm.train_flops_per_token),
        "heldout_bits_per_byte": perplexity["bits_per_byte"] if perplexity else None,
        "streaming_bits_per_byte": ((perplexity or {}).get("streaming") or {}).get("bits_per_byte"),
        "suites": suites,
    }
