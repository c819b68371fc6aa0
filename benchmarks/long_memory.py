"""What does a memory of so many bytes recall, of how many pairs, over how many tokens, and can it combine facts?

Small models of every design, equal in parameters, are trained from scratch on the profile "long" of the suite `recall`:
pairs of keys and values, then Depo, Brevo and Mano. Trained on 16 pairs in 64 tokens, a model is asked about 4 to 64
pairs, and about 8 pairs in texts of up to 8,192 tokens. With --real RUN a model that holds conversations is told facts
and asked about them later, as the suite `conversation` does. With --json results are written after each cell, and a
call that finds the file does only what it lacks.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch

from perspectron.eval import conversation
from perspectron.eval.profiles import LONG, MANY, PROFILES
from perspectron.eval.recall import SOLVED, Options, config_for, measure_setting
from perspectron.eval.subject import Subject
from perspectron.opening import open_model

TESTS = ("tests/eval/test_tasks.py::test_answers_are_those_of_a_plain_solver",)
DESIGNS: tuple[str, ...] = (
    "transformer",
    "gdn",
    "perspective2",
    "perspective",
    "rwkv7",
    "gla",
    "ssd",
    "kda",
    "mamba3",
)
DESIGNS += ("hgrn2", "mingru", "gdn2", "gpt2", "lens2", "adr2", "drm2")
"""The designs, those that tell most first. Others are a design in another frame or an earlier form of one."""
DISTANCES = (64, 256, 1024, 2048, 4096, 7168)


def recalled(cell: dict[str, Any]) -> dict[str, float]:
    """Pairs and bits that a state holds, at the load at which it holds most: of each load the share of right answers
    beyond 1/pairs, which who knows the values without their keys guesses. Means over seeds."""
    most = 0.0
    for pairs, each in loads(cell).items():
        share = sum(each) / len(each)
        most = max(most, pairs * (share - 1 / pairs) / (1 - 1 / pairs))
    return {"pairs": most, "bits": most * math.log2(cell["values"])}


def loads(cell: dict[str, Any]) -> dict[int, list[float]]:
    """Accuracies by the number of pairs of a text."""
    found = {cell["pairs"]: cell["accuracy"]}
    for other, each in cell["also"].items():
        sizes = dict(part.split() for part in other.split(", "))
        pairs = int(sizes.get("pairs", cell["pairs"]))
        if int(sizes.get("length", cell["length"])) == max(MANY.length, 4 * pairs) and None not in each:
            found[pairs] = each
    return dict(sorted(found.items()))


def far(cell: dict[str, Any]) -> dict[int, list[float] | None]:
    """Accuracies of 8 pairs by the length of a text, None where the model cannot read so far; asked in the second
    half."""
    found: dict[int, list[float] | None] = {}
    for other, each in cell["also"].items():
        sizes = dict(part.split() for part in other.split(", "))
        if sizes.get("pairs") == "8" and "length" in sizes:
            found[int(sizes["length"])] = None if None in each else each
    return found


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=1)
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), help="(default: %(default)s)")
    tasks = [setting.task.name for setting in LONG]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="(default: all)")
    parser.add_argument("--real", type=Path, metavar="RUN", help="a model that holds conversations")
    parser.add_argument("--conversations", type=int, default=4, help="with it (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    settings = {setting.task.name: setting for setting in LONG}
    options = Options("long", seeds=args.repeats, batch_tokens=1024)
    if args.quick:
        options = replace(options, batch_tokens=64, d_model=32, rates=(3e-3,))
        settings = {name: replace(s, steps=2, also=s.also[:5]) for name, s in settings.items()}
        args.designs = args.designs[:2]
    shapes = f"{options}; {'; '.join(f'{s.task} in {s.steps} steps' for s in settings.values())}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    cells, talks = report.before("cells"), report.before("conversations")

    def write() -> dict[str, Any]:
        held = {design: recalled(each[MANY.name]) for design, each in cells.items() if MANY.name in each}
        results = {"solved": SOLVED, "recalled": held, "cells": cells, "conversations": talks}
        report.keep(results)
        return results

    for task in args.tasks:
        for design in args.designs:
            if task not in cells.get(design, {}):
                config = config_for(design, settings[task].task, options.d_model, PROFILES["long"].layers)
                found = measure_setting(config, settings[task], options)
                cells.setdefault(design, {})[task] = report.stamped(found)
                write()
            report.say(line(design, task, cells[design][task]))
    if args.real is not None:
        opened = open_model(args.real)
        name = f"{args.real.resolve().name}, {'float32' if opened.folder.quant is None else 'few bits'}"
        asked = conversation.Options(DISTANCES, conversations=args.conversations)
        talks[name] = report.stamped(conversation.measure(Subject(opened, None, 128), asked))
        write()
        report.say(name, *conversation.lines(talks[name]))
    rows = [row(design, each[MANY.name]) for design, each in cells.items() if MANY.name in each]
    report.table(["design", "state", "parameters", "pairs held", "bits", "8 pairs at 512", "at 4,096"], rows)
    report.finish(write())


def line(design: str, task: str, cell: dict[str, Any]) -> str:
    each = " ".join(f"{value:.3f}" for value in cell["accuracy"])
    taken = f"in {cell['steps']} steps, {cell['seconds']:.0f} s of CPU"
    return f"{task} {design}: {each} (chance {cell['chance']:.3f}) {taken}"


def row(design: str, cell: dict[str, Any]) -> list[str]:
    held, away = recalled(cell), far(cell)
    reach = [away.get(length) for length in (512, 4096)]
    texts = ["–" if each is None else f"{sum(each) / len(each):.2f}" for each in reach]
    sizes = [f"{cell['state_bytes']:,}", f"{cell['parameters']:,}"]
    return [design, *sizes, f"{held['pairs']:.1f}", f"{held['bits']:.0f}", *texts]


if __name__ == "__main__":
    main()
