"""Search for the sizes of a design by successive halving: all candidates are trained on little text, the best on more,
and so on. The loss on dev decides; the held-out text is not read.

A candidate is a variant of the design, solved for the same parameters, with a learning rate and a warm-up. Trainings
are ordinary runs in DIR/rungs/TOKENS/VARIANT/RATE; finished ones are skipped, so that an interrupted search resumes.
"""

import itertools
import math
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from perspectron import presets
from perspectron.compare import run
from perspectron.compare.plan import PLAN, Models, Plan, Settings, models_of_designs, warm_up
from perspectron.compare.run import Cell, Rate
from perspectron.model.census import census
from perspectron.train.optim import OptimConfig
from perspectron.util.config import load, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_json, safe_join, write_json

RESULTS = "search.json"
SPACE = "space.json"
OF_TRAINING = {"lr": 4e-3, "warmup": 0.05}  # with defaults where a space leaves them out
Space = Mapping[str, list[Any]]
"""The candidate values of each size, and of lr and warmup."""


class Candidate(NamedTuple):
    """A variant of the design, by name, and how it is trained."""

    variant: str
    rate: Rate


def read_space(path: Path, design: str) -> Space:
    """The space in a TOML file: a list of values for each size of the design, and for lr and warmup. ConfigError for
    an unknown size, an empty list, and values that the design refuses."""
    try:
        space = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not TOML ({error})") from None
    require(len(space) > 0, str(path), "nothing", "one or more sizes, such as rank = [16, 32]")
    for key, values in space.items():
        bound = f"a list of one or more values, such as {key} = [1, 2]"
        require(isinstance(values, list) and len(values) > 0, f"{path}: {key}", values, bound)
        if key in OF_TRAINING:
            fits = [
                type(value) in (int, float) and 0 <= value <= 1 and (value or key != "lr") for value in values
            ]
            bound = "numbers from 0 to 1" if key != "lr" else "numbers above 0, up to 1"
            require(all(fits), f"{path}: {key}", values, bound)
        else:
            for value in values:
                name = _named(design, {key: value})
                presets.variant(name)
                load(OptimConfig, presets.training(name), name)
    return space


def candidates(design: str, space: Space, most: int, seed: int) -> list[Candidate]:
    """All combinations of the space, or `most` of them, drawn without replacement."""
    made = dict[Candidate, None]()  # a value that a list has twice is one
    for values in itertools.product(*space.values()):
        sizes = dict(zip(space, values, strict=True))
        rate = Rate(*(float(sizes.pop(key, default)) for key, default in OF_TRAINING.items()))
        made[Candidate(_named(design, sizes), rate)] = None
    return random.Random(seed).sample([*made], most) if len(made) > most else [*made]


def _named(design: str, sizes: Mapping[str, Any]) -> str:
    """The variant's name: "DESIGN[KEY=VALUE,…]"."""
    typed = {key: str(value).lower() if isinstance(value, bool) else value for key, value in sizes.items()}
    items = ",".join(f"{key}={value}" for key, value in typed.items())
    if not items:
        return design
    return f"{design.removesuffix(']')},{items}]" if design.endswith("]") else f"{design}[{items}]"


def settle(out: Path, space: Space, rungs: list[int], keep: int, seed: int) -> None:
    """Write down the settings of the search. ConfigError: the folder holds another search that has a plan."""
    asked = {"space": dict(space), "rungs": rungs, "keep": keep, "seed": seed}
    if (out / SPACE).is_file() and (out / PLAN).is_file():
        same = read_json(out / SPACE, ConfigError) == asked
        require(same, "out", str(out), f"a new folder, or one with the search of {out / SPACE}")
    write_json(out / SPACE, asked)


def models(settings: Settings, tell: Callable[[str, ConfigError], None] = lambda _, __: None) -> Models:
    """The variants that meet the budget. tell: called with each of the others, and why. ConfigError, that of the first,
    where none does."""
    made, why = Models(), dict[str, ConfigError]()
    for name in settings.arms:
        try:
            made |= models_of_designs(replace(settings, arms=(name,)))
        except ConfigError as error:
            why[name] = error
    if not made:
        raise next(iter(why.values()))
    for refused in why.items():
        tell(*refused)
    return made


def halve(
    out: Path,
    plan: Plan,
    everyone: list[Candidate],
    rungs: list[int],
    keep: int,
    train: Callable[[list[Cell]], None],
    report: Callable[[int, list[dict[str, Any]]], None],
) -> dict[str, Any]:
    """The results: every rung with its candidates, best first, and the one chosen. keep: one in so many goes on to the
    next rung. `train` trains cells, `report` is called with the tokens and the lines of each rung."""
    left = [one for one in everyone if one.variant in plan.arms]
    refused = sorted({one.variant for one in everyone} - plan.arms.keys())
    results: dict[str, Any] = {"params": plan.settings.params, "data": plan.settings.data, "refused": refused}
    results["rungs"] = []
    for tokens in rungs:
        steps = max(1, -(-tokens // plan.settings.batch_tokens))
        cells, same = dict[Candidate, Cell](), dict[tuple[str, float, int], Cell]()
        for one in left:  # warm-ups that are as long on so little text are the same training
            key = (one.variant, one.rate.lr, warm_up(one.rate.warmup, steps))
            cells[one] = same.setdefault(key, _cell(out, one, tokens, steps))
        train(list(same.values()))
        lines = [_line(plan, one, cell) for one, cell in cells.items()]
        ranked = sorted(zip(lines, left, strict=True), key=lambda pair: _loss(pair[0]))
        results["rungs"].append(
            {
                "tokens": steps * plan.settings.batch_tokens,
                "candidates": [line for line, _ in ranked],
                "trainings": len(same),
            }
        )
        left = [one for line, one in ranked if math.isfinite(_loss(line))][
            : max(1, math.ceil(len(ranked) / keep))
        ]
        report(tokens, [line for line, _ in ranked])
        if not left:
            raise ConfigError(
                f"{out}: none of {len(ranked)} candidates finished its training; lower lr in the space"
            )
    results["chosen"] = results["rungs"][-1]["candidates"][0]
    results["trained_tokens"] = sum(rung["tokens"] * rung["trainings"] for rung in results["rungs"])
    write_json(out / RESULTS, results)
    return results


def _cell(out: Path, one: Candidate, tokens: int, steps: int) -> Cell:
    place = f"rungs/{tokens}/{one.variant}/{one.rate.lr}-{one.rate.warmup}"
    return Cell(one.variant, 0, one.rate, steps, safe_join(out, place, ConfigError), 1)


def _line(plan: Plan, one: Candidate, cell: Cell) -> dict[str, Any]:
    """The result of a candidate. CheckpointError as `run.ended`."""
    state, counted = run.ended(cell), census(plan.arms[one.variant].model, [plan.settings.seq_len])
    (state_bytes,) = counted.state_bytes.values()
    return {
        "variant": one.variant,
        **one.rate._asdict(),
        "dev_bits_per_byte": state.bits,
        "why": state.why,
        "parameters": counted.active_parameters,
        "state_bytes": state_bytes,
        "train_flops_per_token": plan.arms[one.variant].train_flops_per_token,
        "tokens_per_second": run.history(cell, 0.0)["tokens_per_second"],
    }


def _loss(line: dict[str, Any]) -> float:
    bits = line["dev_bits_per_byte"]
    return math.inf if bits is None else float(bits)
