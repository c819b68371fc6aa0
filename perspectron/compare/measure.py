"""Measurements of trained cells, each in a process of its own: `python -m perspectron.compare.measure`.

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
from perspectron.data.loader import windows
from perspectron.errors import ConfigError
from perspectron.eval import cost_suite
from perspectron.eval.gates import gates
from perspectron.eval.subject import Subject
from perspectron.eval.suites import OF_TEXT, SUITES, plain
from perspectron.files import read_json, safe_join, write_json
from perspectron.machine import pick_device
from perspectron.opening import open_model
from perspectron.train import checkpoint

MODULE = "perspectron.compare.measure"
OF_CELLS = ("perplexity", *OF_TEXT, "gates")
WINDOWS = 8  # of text, in which gates are measured


def jobs(out: Path, settings: Settings, finished: list[Cell]) -> list[Job]:
    """Jobs for what is still to be measured of these cells; recall of an arm's first cell stands for the arm."""
    missing_jobs = []
    wanted = [name for name in OF_CELLS if name in ("perplexity", "gates", *settings.suites)]
    for cell in finished:
        missing = [name for name in wanted if not path_of(cell, name).is_file()]
        if missing:
            missing_jobs.append(
                Job(f"{cell.arm} {cell.seed}", cell.folder, (MODULE, str(cell.folder), *missing))
            )
    for name in dict.fromkeys(cell.arm for cell in finished) if "recall" in settings.suites else ():
        path = safe_join(out, f"recall/{name}.json", ConfigError)
        if not path.is_file():
            first = next(cell for cell in finished if cell.arm == name)
            arguments = (MODULE, "recall", settings.recall, str(first.folder), str(path))
            missing_jobs.append(Job(f"{name} recall", out / "recall" / name, arguments))
    return missing_jobs


def cost_jobs(out: Path) -> list[Job]:
    """Job that measures the costs of all arms in turns; nothing else may run beside it."""
    done = (out / "cost.json").is_file()
    return [] if done else [Job("cost", out / "cost", (MODULE, "cost", str(out)))]


def path_of(cell: Cell, name: str) -> Path:
    return cell.folder / "suites" / f"{name}.json"


def suites_of(cell: Cell) -> dict[str, Any]:
    """Results of the suites of a cell, by name."""
    paths = {name: path_of(cell, name) for name in OF_CELLS}
    return {name: read_json(path, ConfigError) for name, path in paths.items() if path.is_file()}


def main(arguments: Sequence[str]) -> int:
    """Measure and write: CELL NAME…, or recall PROFILE CELL FILE, or cost DIR."""
    torch.set_flush_denormal(True)
    match list(arguments):
        case ["cost", out]:
            write_json(Path(out) / "cost.json", plain(costs(read(Path(out)))))
        case ["recall", profile, cell, path]:
            suite = SUITES["recall"].code
            write_json(Path(path), plain(suite.measure(_open(Path(cell)), suite.Options(profile))))
        case [cell, *names]:
            subject = _open(Path(cell))
            for name in names:
                result = _gates(subject) if name == "gates" else SUITES[name].code.measure(subject)
                write_json(Path(cell) / "suites" / f"{name}.json", plain(result))
    return 0


def costs(plan: Plan) -> dict[str, Any]:
    """Costs of every arm, in one run in which they take turns."""
    s = plan.settings
    assert s.dtype != "auto"
    device = str(pick_device(s.device))
    options = replace(
        cost_suite.QUICK, batch_size=s.batch_size, seq_len=s.seq_len, dtype=s.dtype, device=device
    )
    return cost_suite.compare_costs({name: arm.model for name, arm in plan.arms.items()}, options)


def _open(cell: Path) -> Subject:
    """Model of a cell at its last step, not at its lowest held-out loss, so that all have read as many tokens."""
    train = checkpoint.load_config(cell).train
    opened = open_model(checkpoint.path_of(cell, train.steps))
    opened.model.to(pick_device(train.device))
    return Subject(opened, opened.shards(cell).split("heldout"), train.seq_len)


def _gates(subject: Subject) -> dict[str, Any]:
    """Gates in windows from all over the held-out text."""
    tokens = WINDOWS * subject.seq_len + 1
    batch = next(
        windows(subject.text, seq_len=subject.seq_len, batch_size=WINDOWS, limit_tokens=tokens, spread=True)
    )
    return gates(subject.model, batch.ids_BT.to(subject.model.device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
