"""The trainings of a comparison: learning rates first, then every arm with every seed.

DIR/rates/ARM/RATE and DIR/cells/ARM/SEED are ordinary runs, which `train --resume` continues and `eval` reads.
Finished trainings are skipped, so that an interrupted comparison resumes.
"""

import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from perspectron.compare import pool
from perspectron.compare.plan import Plan, data_of, train_config, warm_up
from perspectron.compare.pool import Ended, Job
from perspectron.data import Tokenizer
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig
from perspectron.train.metrics import METRICS, measured, read_metrics
from perspectron.util.errors import CheckpointError, ConfigError, NonFiniteError, PerspectronError
from perspectron.util.files import open_file, read_json, remove, safe_join, write_json

FAILED = "failed.json"
RATES = "rates.json"
MEASURED = 8
TAIL = 1 << 15  # bytes of metrics that hold a whole line
FACTOR = 2.0  # to the next learning rate outside the grid
OUTSIDE = 4  # rates tried beyond an end of the grid, at most


class Rate(NamedTuple):
    """A peak learning rate and its warm-up as a share of the updates."""

    lr: float
    warmup: float


class Cell(NamedTuple):
    """One training: an arm with a seed and a learning rate, for `steps` updates. measured: number of measurements of
    the loss."""

    arm: str
    seed: int
    rate: Rate
    steps: int
    folder: Path
    measured: int


class Trained(NamedTuple):
    """State of a training. status: "finished", "diverged" or "missing"; why: the reason of the latter two. bits: last
    bits per byte, on dev or held out."""

    status: str
    why: str
    bits: float | None


def cells(out: Path, plan: Plan, rates: dict[str, Rate]) -> list[Cell]:
    """Cells of every arm with the first seed, then with the next."""
    return [
        Cell(name, seed, rates[name], arm.steps, _folder(out, f"cells/{name}/{seed}"), MEASURED)
        for seed in range(plan.settings.seeds)
        for name, arm in plan.arms.items()
    ]


def _folder(out: Path, name: str) -> Path:
    """A folder in that of the comparison. ConfigError: the name leads out of it, also by a link."""
    return safe_join(out, name, ConfigError)


def trials(out: Path, plan: Plan, rates: dict[str, list[Rate]]) -> list[Cell]:
    """Short trainings with the first seed, one for each rate of an arm."""
    return [
        Cell(
            name,
            0,
            rate,
            _trial_steps(plan, name),
            _folder(out, f"rates/{name}/{rate.lr}-{rate.warmup}"),
            1,
        )
        for name, values in rates.items()
        for rate in values
    ]


def _trial_steps(plan: Plan, name: str) -> int:
    return max(1, round(plan.settings.rate_share * plan.arms[name].steps))


def alike(plan: Plan) -> bool:
    """True if different warm-up shares give equally long warm-ups in the trials of some arm."""
    warmups = set(plan.settings.warmups)
    lengths = [{warm_up(share, _trial_steps(plan, name)) for share in warmups} for name in plan.arms]
    return any(len(those) < len(warmups) for those in lengths)


def _apart(plan: Plan, name: str, rates: list[Rate]) -> list[Rate]:
    """The rates of an arm whose trials differ: of warm-ups with equally many updates there, the smallest share."""
    steps = _trial_steps(plan, name)
    found = {(rate.lr, warm_up(rate.warmup, steps)): rate for rate in sorted(rates, reverse=True)}
    return sorted(found.values())


def trained(cell: Cell) -> Trained:
    """State of a cell, read from its folder."""
    if (cell.folder / FAILED).is_file():
        failed = read_json(cell.folder / FAILED, CheckpointError)
        return Trained("diverged", failed["why"], None)
    last = next((line for line in reversed(read_metrics(cell.folder)) if "loss" not in line), {"step": -1})
    if last["step"] == cell.steps and checkpoint.path_of(cell.folder, cell.steps).is_dir():
        return Trained("finished", "", measured(last)[1])
    said = pool.last_line(cell.folder)
    why = f"trained for {reached(cell)} of {cell.steps} steps"
    if last["step"] < cell.steps and checkpoint.path_of(cell.folder, cell.steps).is_dir():
        why = f"its loss at the last step is not in {cell.folder / METRICS}: delete {cell.folder} and resume"
    return Trained("missing", f"{why}: {said}" if "error" in said.lower() else why, None)


def ended(cell: Cell) -> Trained:
    """State of a cell of which something is chosen. CheckpointError for a training that did not end."""
    state = trained(cell)
    if state.status == "missing":
        raise CheckpointError(f"{cell.folder}: {state.why}; fix that, then resume with the same command")
    return state


def reached(cell: Cell) -> int:
    """Last step in the metrics of a cell."""
    path, step = cell.folder / METRICS, 0
    if path.is_file():
        with open_file(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            steps = re.findall(rb'^\{"step": (\d+),.*\}$', file.read(), re.MULTILINE)
        step = int(steps[-1]) if steps else 0
    return step


def train(
    out: Path,
    plan: Plan,
    wanted: list[Cell],
    jobs: int,
    *,
    ended: Callable[[Cell, Ended], None] = lambda cell, end: None,
    look: Callable[[list[Cell]], None] = lambda running: None,
) -> None:
    """Train the cells that are neither finished nor diverged. pool.StoppedBy when a signal ended it. CheckpointError
    for a cell that began with another rate, be it finished."""
    data = str(data_of(out, plan.settings).resolve())
    for cell in wanted:
        try:
            config = checkpoint.load_config(cell.folder)
        except PerspectronError:
            continue  # it has not begun, or its training will tell of the damage
        optim, asked = config.train.optim, (cell.rate.lr, warm_up(cell.rate.warmup, cell.steps))
        if (began := (optim.lr, optim.warmup)) != asked:
            what = f"(lr, warmup) is {began}, must be {asked}, as of all its seeds"
            raise CheckpointError(f"{cell.folder}: {what}; delete that folder and resume")
        if config.train.data != data:  # the comparison was moved, and its text with it
            train = dataclasses.replace(config.train, data=data)
            checkpoint.save_config(cell.folder, dataclasses.replace(config, train=train))
    by_name = {str(cell.folder): cell for cell in wanted if trained(cell).status == "missing"}
    tokenizer = Tokenizer.load(data_of(out, plan.settings) / "tokenizer.json")

    def end(result: Ended) -> None:
        cell = by_name[result.job.name]
        if result.code == NonFiniteError.exit_code:
            write_json(cell.folder / FAILED, {"why": result.said.removeprefix("perspectron: error: ")})
        ended(cell, result)

    queue = []
    for name, cell in by_name.items():
        if not checkpoint.path_of(cell.folder, cell.steps).is_dir():
            remove(cell.folder / "suites")  # of a training that is gone
        if not (cell.folder / "config.json").is_file():
            given = (cell.steps, cell.seed, *cell.rate, cell.measured)
            settings = train_config(out, plan.settings, *given, plan.arms[cell.arm].optim)
            tokenizer.save(cell.folder / "tokenizer.json")
            checkpoint.save_config(cell.folder, RunConfig(plan.arms[cell.arm].model, settings))
        arguments = ("perspectron", "train", "--resume", str(cell.folder))
        queue.append(Job(name, cell.folder, arguments))
    pool.work(
        queue, jobs, plan.settings.threads, ended=end, look=lambda now: look([by_name[j.name] for j in now])
    )


def best(tried: list[dict[str, Any]]) -> Rate:
    """Rate with the lowest loss; the lowest rate where no trial has finished."""
    losses = {Rate(line["lr"], line["warmup"]): line["bits_per_byte"] for line in tried}
    return min(losses, key=lambda rate: (math.inf if losses[rate] is None else losses[rate], rate))


def choose_rates(
    out: Path,
    plan: Plan,
    run: Callable[[list[Cell]], None],
    choose: Callable[[list[dict[str, Any]]], Rate] = best,
) -> tuple[dict[str, Rate], dict[str, list[dict[str, Any]]]]:
    """(rate of each arm, by `choose`, all rates tried with their bits per byte on dev).

    `run` trains the trials. While the best rate is at an end of the grid, the next one outside is tried too, up to
    OUTSIDE of them.
    """
    grid = sorted(Rate(lr, warmup) for lr in plan.settings.rates for warmup in plan.settings.warmups)
    if (out / RATES).is_file():  # what cells were trained with, whatever has become of the trials
        saved = read_json(out / RATES, CheckpointError)
        return {name: Rate(*rate) for name, rate in saved["chosen"].items()}, saved["tried"]
    if len(grid) == 1:
        return dict.fromkeys(plan.arms, grid[0]), {name: [] for name in plan.arms}
    wanted = {name: _apart(plan, name, grid) for name in plan.arms}
    most = {name: len(values) + OUTSIDE for name, values in wanted.items()}
    while True:
        run(trials(out, plan, wanted))
        tried = {name: _tried(out, plan, name, values) for name, values in wanted.items()}
        chosen = {name: best(results) for name, results in tried.items()}
        more = {name: _beyond(values, chosen[name]) for name, values in wanted.items()}
        more = {name: rates for name, rates in more.items() if len(wanted[name]) < most[name]}
        if not any(more.values()):
            break
        wanted |= {name: sorted([*wanted[name], *rates]) for name, rates in more.items()}
    chosen = {name: choose(results) for name, results in tried.items()}
    write_json(out / RATES, {"chosen": chosen, "tried": tried})
    return chosen, tried


def keep_rates(out: Path, rates: dict[str, Rate]) -> None:
    """Set the rates that arms of a comparison are trained with, without trials; rates that it has already stay."""
    if not (out / RATES).is_file():
        write_json(out / RATES, {"chosen": rates, "tried": {name: [] for name in rates}})


def _tried(out: Path, plan: Plan, name: str, values: list[Rate]) -> list[dict[str, Any]]:
    """The result of each rate of an arm. CheckpointError as `ended`."""
    results = []
    for cell in trials(out, plan, {name: values}):
        state = ended(cell)
        results.append(cell.rate._asdict() | {"bits_per_byte": state.bits, "why": state.why})
    return results


def at_an_end(tried: list[dict[str, Any]], best: Rate) -> bool:
    """True if the best of the rates that were tried is the lowest or the highest of them, so that one outside may be
    better."""
    return bool(tried) and bool(_beyond([Rate(line["lr"], line["warmup"]) for line in tried], best))


def _beyond(values: list[Rate], best: Rate) -> list[Rate]:
    """The next rate outside, if the best one is the lowest or the highest with its warm-up; else none."""
    rates = [rate.lr for rate in values if rate.warmup == best.warmup]
    if len(rates) == 1:
        return []
    if best.lr == min(rates):
        return [best._replace(lr=best.lr / FACTOR)]
    return [best._replace(lr=best.lr * FACTOR)] if best.lr == max(rates) else []


def history(cell: Cell, flops_per_token: float) -> dict[str, Any]:
    """Summary of a training from its metrics: steps, tokens, seconds without measuring and saving; tokens per second of
    the median update, which no pause slows; bits per byte over steps, tokens, seconds and FLOPs; SHA-256 of all losses
    to the last bit, so that equal digests mean equal trainings; and what the model reported beside its last loss."""
    curve, updates = list[dict[str, Any]](), list[dict[str, Any]]()
    for line in read_metrics(cell.folder):
        if "loss" in line:
            updates.append(line)
        elif updates:
            tokens, seconds = updates[-1]["tokens"], updates[-1]["seconds"]
            spent = {"tokens": tokens, "seconds": round(seconds, 2), "flops": tokens * flops_per_token}
            curve.append({"step": line["step"], **spent, "bits_per_byte": measured(line)[1]})
    losses = [line["loss"] for line in updates]
    text = json.dumps([loss.hex() if math.isfinite(loss) else str(loss) for loss in losses])
    last: dict[str, Any] = updates[-1] if updates else {"step": 0, "tokens": 0}
    speeds = [line["tokens_per_second"] for line in updates]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": round(last["seconds"], 2) if updates else None,
        "tokens_per_second": statistics.median(speeds) if updates else None,
        "curve": curve,
        "losses_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "terms": dict(last.get("aux", {})),
    }
