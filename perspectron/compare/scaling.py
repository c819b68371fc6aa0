"""A scaling study: the same designs compared at several sizes, each with as many tokens for a parameter, and the lines
that their losses follow.

DIR/SIZE is the comparison at a size, DIR/text the text in one vocabulary for all. A line is log L = log A − α log N, by
least squares for each seed; intervals are Student's over the seeds, so that designs are compared on the same seeds.

N: active parameters, L: held-out bits per byte.
"""

import itertools
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from perspectron import presets
from perspectron.compare.plan import ASKED, DATA, REFERENCE, Settings, asked, models_of_designs
from perspectron.compare.report import figures
from perspectron.compare.report.page import Section, rendered
from perspectron.compare.report.summary import STREAMING, WINDOWS
from perspectron.compare.report.tables import estimate
from perspectron.data import Shards, Tokenizer, encode, made_in, open_corpus, open_shards
from perspectron.presets.rates import FALL, PASSES, rate
from perspectron.util import plot
from perspectron.util.config import at_least, dump, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_json, safe_join, write_json, write_text
from perspectron.util.numbers import fixed, grouped, percent, short
from perspectron.util.page import Cell, Table
from perspectron.util.stats import LEVEL, interval

VERSION = 1
STUDY, TEXT, RESULTS, PAGE = "scale.json", "text", "scale-results.json", "scale.html"
WARMUP = 0.2
FAR = 10.0  # crossings further from the sizes that were trained than by this factor are not told
SCORES = {WINDOWS: "in windows", STREAMING: "memory carried"}


@dataclass(frozen=True)
class Study:
    """What a study compares. designs: as in `compare`. sizes: active parameters. per_parameter: tokens for each.
    rates: peak learning rates that are tried with the whole training at the smallest size, on the dev split; none takes
    that of the design (`presets.rates.rate`). From size to size they go by N^FALL. vocab_size: of all sizes; 0 is that
    of the smallest."""

    designs: tuple[str, ...]
    sizes: tuple[int, ...]
    per_parameter: float = 20.0
    seeds: int = 3
    data: str = "stdlib"
    heldout: float = 0.05
    dev: float = 0.05
    vocab_size: int = 0
    seq_len: int = 256
    batch_size: int = 8
    rates: tuple[float, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    device: str = "auto"

    def __post_init__(self) -> None:
        require(len(self.sizes) >= 1, "sizes", self.sizes, "one or more")
        require(list(self.sizes) == sorted(set(self.sizes)), "sizes", self.sizes, "growing")
        require(self.per_parameter > 0, "per_parameter", self.per_parameter, "> 0")
        at_least(1, self, "seeds")
        require(not self.rates or min(self.rates) > 0, "rates", self.rates, "> 0")

    def tokens(self, size: int) -> int:
        """Those that a model of a size is trained on."""
        return max(self.seq_len * self.batch_size, round(self.per_parameter * size))

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary of all sizes."""
        return self.vocab_size or presets.vocabulary(self.sizes[0])

    def settings(self, size: int) -> Settings:
        """Those of the comparison at a size."""
        tried = self.rates if size == self.sizes[0] else ()
        return Settings(
            self.designs, size, self.tokens(size), self.seeds, self.data, self.heldout, self.dev,
            vocab_size=self.vocabulary, seq_len=self.seq_len, batch_size=self.batch_size, rates=tried or (1e-3,),
            warmups=(WARMUP,), rate_share=1.0, dtype=self.dtype, device=self.device, suites=(),
        )  # fmt: skip


class Line(NamedTuple):
    """A design's losses at the sizes, and the line of each seed that has them all. A, alpha: by seed."""

    losses: dict[int, dict[int, float]]
    parameters: dict[int, float]
    A: dict[int, float]
    alpha: dict[int, float]


def folder_of(out: Path, size: int) -> Path:
    """That of the comparison at a size."""
    return safe_join(out, short(size), ConfigError)


def text_of(out: Path, study: Study) -> tuple[Tokenizer, Shards]:
    """The text in the vocabulary of all sizes, encoded once. ConfigError where a training would read it more than
    PASSES times."""
    folder = out / TEXT
    if not (folder / "manifest.json").is_file():
        corpus = open_corpus(study.data, study.heldout, dev=study.dev)
        encode(corpus, made_in(folder, "bpe", corpus, study.vocabulary), folder)
    tokenizer, shards = Tokenizer.load(folder / "tokenizer.json"), open_shards(folder)
    there, most = shards.split("train").tokens, study.tokens(study.sizes[-1])
    few = f"the text has {there:,} tokens to train on, of which more than {PASSES:g} passes teach little"
    bound = f"≤ {PASSES * there / study.sizes[-1]:.3g}: {few}"
    require(most <= PASSES * there, "per_parameter", study.per_parameter, bound)
    return tokenizer, shards


def text_at(out: Path, study: Study, size: int) -> None:
    """Give the comparison at a size a copy of the text, as if it had encoded it, so that the folder can be moved."""
    folder, settings = folder_of(out, size) / DATA, study.settings(size)
    if not (folder / ASKED).is_file():
        shutil.copytree(out / TEXT, folder, dirs_exist_ok=True)
        write_json(folder / ASKED, asked(settings))


def checked(study: Study) -> None:
    """ConfigError for designs that are unknown or cannot be as small."""
    for size in study.sizes:
        models_of_designs(study.settings(size))


def transferred(out: Path, study: Study, size: int) -> dict[str, float]:
    """The rate of each design at a size: the best at the smallest, or the design's own, by N^FALL. Empty where they are
    to be tried."""
    first = study.sizes[0]
    if not study.rates:
        return {name: rate(name.partition("[")[0].rstrip("+"), size) for name in study.designs}
    if size == first and len(study.rates) > 1:
        return {}
    chosen = dict.fromkeys(study.designs, (study.rates[0], WARMUP))
    if len(study.rates) > 1:
        chosen = read_json(folder_of(out, first) / "rates.json", ConfigError)["chosen"]
    return {name: float(f"{chosen[name][0] * (size / first) ** FALL:.3g}") for name in study.designs}


def collected(out: Path, study: Study) -> dict[str, Any]:
    """What has been measured so far: a line for each cell that finished."""
    cells = list[dict[str, Any]]()
    for size in study.sizes:
        path = folder_of(out, size) / "results.json"
        if not path.is_file():
            continue
        found = read_json(path, ConfigError)
        for name, entry in found["designs"].items():
            for cell in entry["cells"]:
                if cell.get(WINDOWS) is not None:
                    cells.append({
                        "design": name, "size": size, "parameters": entry["active_parameters"], "seed": cell["seed"],
                        "tokens": cell["tokens"], "rate": entry["lr"], "seconds": cell["seconds"],
                        "state_bytes": (entry.get("streaming") or {}).get("state_bytes"),
                    } | {score: cell.get(score) for score in SCORES})  # fmt: skip
    lines = {score: lines_of(cells, study, score) for score in SCORES}
    return {
        "version": VERSION, "study": dump(study), "cells": cells,
        "lines": {score: {name: told(line) for name, line in each.items()} for score, each in lines.items()},
        "crossings": {score: crossings(each, study.sizes) for score, each in lines.items()},
    }  # fmt: skip


def lines_of(cells: Sequence[dict[str, Any]], study: Study, score: str) -> dict[str, Line]:
    """The line of each design that has a loss, by the seeds that finished all sizes."""
    found = dict[str, Line]()
    for name in study.designs:
        own = [cell for cell in cells if cell["design"] == name and cell[score] is not None]
        losses: dict[int, dict[int, float]] = {}
        for cell in own:
            losses.setdefault(cell["size"], {})[cell["seed"]] = cell[score]
        parameters = {cell["size"]: float(cell["parameters"]) for cell in own}
        whole = [s for s in range(study.seeds) if all(s in losses.get(size, {}) for size in study.sizes)]
        A, alpha = dict[int, float](), dict[int, float]()
        if len(study.sizes) > 1:
            for seed in whole:
                x = np.log([parameters[size] for size in study.sizes])
                slope, at = np.polyfit(x, np.log([losses[size][seed] for size in study.sizes]), 1)
                A[seed], alpha[seed] = float(math.exp(at)), float(-slope)
        if own:
            found[name] = Line(losses, parameters, A, alpha)
    return found


def told(line: Line) -> dict[str, Any]:
    """A line with its intervals. off: the largest share by which a mean lies off it."""
    if not line.alpha:
        return {"alpha": None}
    alpha, at = statistics.fmean(line.alpha.values()), statistics.fmean(map(math.log, line.A.values()))
    off = max(
        abs(statistics.fmean(each.values()) / math.exp(at - alpha * math.log(line.parameters[size])) - 1)
        for size, each in line.losses.items()
    )
    span = interval(list(line.alpha.values()))
    return {"alpha": alpha, "A": math.exp(at), "interval": span, "seeds": len(line.alpha), "off": off}


def crossings(lines: dict[str, Line], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Where the lines of two designs cross, within FAR of the sizes: the parameters, with their interval over the seeds
    that both have. far: they cross, but elsewhere or in no seed alike."""
    found = list[dict[str, Any]]()
    for (a, one), (b, other) in itertools.combinations(lines.items(), 2):
        seeds = [seed for seed in one.alpha if seed in other.alpha]
        steeper = [one.alpha[seed] - other.alpha[seed] for seed in seeds]
        if not seeds or not (all(x > 0 for x in steeper) or all(x < 0 for x in steeper)):
            continue
        logs = [(math.log(one.A[s]) - math.log(other.A[s])) / x for s, x in zip(seeds, steeper, strict=True)]
        at, span = statistics.fmean(logs), interval(logs)
        if math.log(sizes[0] / FAR) <= at <= math.log(sizes[-1] * FAR):
            first = a if statistics.fmean(steeper) > 0 else b  # the steeper is ahead of it beyond
            ends = None if span is None else [math.exp(min(max(end, -700), 700)) for end in span]
            found.append(
                {"designs": [a, b], "parameters": math.exp(at), "interval": ends, "ahead_beyond": first}
            )
    return found


def means_at(found: dict[str, Any], size: int, score: str) -> dict[str, list[float]]:
    """Losses at a size by design, those of the seeds that finished."""
    losses: dict[str, list[float]] = {}
    for cell in found["cells"]:
        if cell["size"] == size and cell[score] is not None:
            losses.setdefault(cell["design"], []).append(cell[score])
    return losses


def sentence(found: dict[str, Any], score: str = WINDOWS) -> str:
    """What follows: who is ahead at each end, and whether that is going to change."""
    study, ahead = found["study"], list[str]()
    for size in (study["sizes"][0], study["sizes"][-1]):
        means = {name: statistics.fmean(each) for name, each in means_at(found, size, score).items()}
        if means:
            best = min(means, key=means.__getitem__)
            text = (
                f"{presets.title(best)} has the lowest loss at {short(size)} parameters, {fixed(means[best])}"
            )
            ahead.append(text)
    if not ahead:
        return "Nothing has finished yet."
    parts = [f"Scored {SCORES[score]}: {'; '.join(dict.fromkeys(ahead))}."]
    for cross in found["crossings"][score]:
        behind = next(name for name in cross["designs"] if name != cross["ahead_beyond"])
        where, span = f"{short(cross['parameters'])} parameters", cross["interval"]
        where += f" ({short(span[0])} to {short(span[1])})" if span else ""
        one, other = presets.title(cross["ahead_beyond"]), presets.title(behind)
        parts.append(f"The line of {one} passes below that of {other} at {where}.")
    return " ".join(parts)


def html(found: dict[str, Any]) -> str:
    """The page of a study."""
    study = found["study"]
    spent = sum(cell["seconds"] or 0.0 for cell in found["cells"])
    facts = [
        ("tokens for a parameter", f"{study['per_parameter']:g}"), ("text", study["data"]),
        ("seeds", str(study["seeds"])), ("trainings that finished", grouped(len(found["cells"]))),
        ("hours they took", f"{spent / 3600:.1f}"),
    ]  # fmt: skip
    note = "All sizes have one vocabulary; rates go from size to size by the cube root of the parameters."
    sections = [part for score in SCORES for part in _section(found, score)]
    sections.append(Section("conditions", "Conditions", note, facts=facts))
    heading = f"{len(study['designs'])} designs at {len(study['sizes'])} sizes"
    return rendered(heading, sentence(found), sections)


def _section(found: dict[str, Any], score: str) -> list[Section]:
    """Figure and tables of a score; none where nothing has it."""
    study, how = found["study"], SCORES[score]
    style = figures.styles(list(study["designs"]), REFERENCE)
    at = {size: means_at(found, size, score) for size in study["sizes"]}
    parameters = {(cell["design"], cell["size"]): float(cell["parameters"]) for cell in found["cells"]}
    curves, losses, slopes = list[plot.Line](), list[list[Cell]](), list[list[Cell]]()
    for name, line in found["lines"][score].items():
        title = presets.title(name)
        there = {size: each[name] for size, each in at.items() if name in each}
        points = [(parameters[name, size], statistics.fmean(each)) for size, each in there.items()]
        spans = [interval(each) or (each[0], each[0]) for each in there.values()]
        curves.append(plot.Line(title, points, style[name], spans))
        losses.append([Cell(title), *(estimate(there.get(size, [])) for size in at)])
        if line["alpha"] is not None:
            span = line["interval"]
            note = f"{fixed(span[0], 4)} to {fixed(span[1], 4)}" if span else ""
            slope = Cell(fixed(line["alpha"], 4), note)
            slopes.append([Cell(title), slope, Cell(short(line["A"])), Cell(percent(line["off"], 2))])
    if not curves:
        return []
    axes = ("active parameters", "bits per byte")
    chart = plot.Chart(f"held-out loss, {how}", *axes, curves, log_x=True, log_y=True, x_text=short)
    caption = f"Bits per byte {how}, by active parameters, with {LEVEL:.0%} intervals over seeds."
    tables = [Table(caption, ["", *map(short, study["sizes"])], losses)]
    if slopes:
        caption = "Lines log L = log A − α log N; off: the most by which a mean lies off its line."
        tables.append(Table(caption, ["", "α", "A", "off"], slopes))
    slug = score.partition("_")[0]
    drawn = [plot.draw([chart], slug=slug)]
    return [Section(slug, f"Loss, {how}", sentence(found, score), drawn, tables)]


def write(out: Path, study: Study) -> dict[str, Any]:
    """Write the results so far, and their page."""
    found = collected(out, study)
    write_json(out / RESULTS, found)
    write_text(out / PAGE, html(found))
    return found
