"""Measurements of trained cells, each in its own process: `python -m perspectron.compare.measure`.

Results are JSON files, DIR/cells/ARM/SEED/suites/NAME.json, DIR/recall/ARM.json and DIR/cost.json; one that exists is
not measured again.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perspectron.compare.plan import Plan, Settings, read
from perspectron.compare.pool import Job
from perspectron.compare.run import Cell
from perspectron.eval import cost
from perspectron.eval.perplexity import compressors, end_of, text_of
from perspectron.eval.subject import Subject
from perspectron.eval.suites import OF_TEXT, SUITES
from perspectron.opening import open_model
from perspectron.train import checkpoint
from perspectron.util.errors import ConfigError
from perspectron.util.files import plain, read_json, safe_join, write_json
from perspectron.util.machine import pick_device

MODULE = "perspectron.compare.measure"
OF_CELLS = ("perplexity", *OF_TEXT)
COMPRESSORS = "compressors"
"""Measured for the first cell only, beside its suites, as all cells have the same text."""


def jobs(out: Path, settings: Settings, finished: list[Cell]) -> list[Job]:
    """Jobs for what is still to be measured of these cells; recall is measured on the first cell of each arm."""
    missing_jobs = []
    wanted = [name for name in OF_CELLS if name in ("perplexity", *settings.suites)]
    for cell in finished:
        asked = [*wanted, COMPRESSORS] if cell is finished[0] else wanted
        missing = [name for name in asked if not _has(cell, name)]
        if missing:
            missing_jobs.append(
                Job(f"{cell.arm} {cell.seed}", cell.folder, (MODULE, str(cell.folder), *missing))
            )
    firsts = {cell.arm: cell for cell in reversed(finished) if "recall" in settings.suites}
    for name, first in reversed(firsts.items()):
        path = safe_join(out, f"recall/{name}.json", ConfigError)
        if not path.is_file():
            arguments = (MODULE, "recall", settings.recall, str(first.folder), str(path))
            missing_jobs.append(Job(f"{name} recall", out / "recall" / name, arguments))
    return missing_jobs


def _has(cell: Cell, name: str) -> bool:
    """True if a suite of a cell was measured: for the loss, also with memory carried, which older versions left out."""
    path = path_of(cell, name)
    return path.is_file() and (name != "perplexity" or "streaming" in read_json(path, ConfigError))


def cost_jobs(out: Path) -> list[Job]:
    """Job that measures the costs of all arms in turns; nothing else may run beside it."""
    done = (out / "cost.json").is_file()
    return [] if done else [Job("cost", out / "cost", (MODULE, "cost", str(out)))]


def path_of(cell: Cell, name: str) -> Path:
    return safe_join(cell.folder, f"suites/{name}.json", ConfigError)


def suites_of(cell: Cell) -> dict[str, Any]:
    """Results of the suites of a cell, by name."""
    paths = {name: path_of(cell, name) for name in OF_CELLS}
    return {name: read_json(path, ConfigError) for name, path in paths.items() if path.is_file()}


def main(arguments: Sequence[str]) -> int:
    """Measure and write: CELL NAME…, or recall PROFILE CELL FILE, or cost DIR."""
    match list(arguments):
        case ["cost", out]:
            write_json(Path(out) / "cost.json", plain(costs(read(Path(out)))))
        case ["recall", profile, cell, path]:
            suite = SUITES["recall"].code
            write_json(Path(path), plain(suite.measure(opened(Path(cell)), suite.Options(profile))))
        case [cell, *names]:
            subject = opened(Path(cell))
            for name in names:
                alone = name == COMPRESSORS
                found = packed(subject, Path(cell)) if alone else SUITES[name].code.measure(subject)
                write_json(Path(cell) / "suites" / f"{name}.json", plain(found))
    return 0


def packed(subject: Subject, cell: Path) -> dict[str, float]:
    """Bits per byte of compressors for the held-out text, alone and after the training text."""
    text = text_of(subject.text, subject.tokenizer, subject.text.tokens)
    return compressors(text, end_of(subject.opened.shards(cell).split("train"), subject.tokenizer))


def costs(plan: Plan) -> dict[str, Any]:
    """Costs of every arm, in one run in which they take turns."""
    s = plan.settings
    assert s.dtype != "auto"
    device = str(pick_device(s.device))
    options = replace(cost.QUICK, batch_size=s.batch_size, seq_len=s.seq_len, dtype=s.dtype, device=device)
    optims = {name: arm.optim for name, arm in plan.arms.items()}
    return cost.compare_costs({name: arm.model for name, arm in plan.arms.items()}, options, optims)


def opened(cell: Path) -> Subject:
    """Model of a cell at its last step, not at its lowest held-out loss, so that all have read as many tokens."""
    train = checkpoint.load_config(cell).train
    found = open_model(checkpoint.path_of(cell, train.steps))
    found.model.to(pick_device(train.device))
    return Subject(found, found.shards(cell).split("heldout"), train.seq_len)


if __name__ == "__main__":
    torch.set_flush_denormal(True)  # of the whole process, so not when another one calls `main`
    sys.exit(main(sys.argv[1:]))
