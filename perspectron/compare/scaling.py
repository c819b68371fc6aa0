"""A scaling study: the same designs compared at several sizes and numbers of tokens for a parameter.

DIR/SIZE-RATIO is the comparison at one of the points, DIR/data the text in one vocabulary for all.

A study also goes on from its results alone: trainings that are there, and have no folder, are not repeated.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perspectron import presets
from perspectron.compare.laws import Point, crossings, laws_of, told
from perspectron.compare.plan import ASKED, DATA, PLAN, Settings, asked, check_designs, clear, prepare
from perspectron.compare.report.summary import STREAMING, WINDOWS
from perspectron.data import is_encoded
from perspectron.presets.rates import FALL, PASSES, rate
from perspectron.util.config import at_least, dump, load, require
from perspectron.util.errors import ConfigError, StorageError
from perspectron.util.files import read_json, remove, safe_join, write_json
from perspectron.util.numbers import short

VERSION = 3
RESULTS, PAGE, KEPT = "scale-results.json", "scale.html", "kept.json"
WARMUP = 0.2
SCORES = {WINDOWS: "in windows", STREAMING: "memory carried"}
OF_CELL = ("design", "size", "per_parameter", "seed", "parameters", "tokens")


@dataclass(frozen=True)
class Study:
    """Settings of a study. designs: as in `compare`. sizes: active parameters. per_parameter: tokens for each of them,
    at each size. rates: peak learning rates that are tried with the whole training at the smallest size, on the dev
    split, for each of per_parameter; none takes that of the design (`presets.rates.rate`). From size to size they go by
    N^FALL. vocab_size: of all sizes; 0 takes one that suits the smallest."""

    designs: tuple[str, ...]
    sizes: tuple[int, ...]
    per_parameter: tuple[float, ...] = (20.0,)
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
        for name in ("sizes", "per_parameter"):
            values = getattr(self, name)
            require(len(values) >= 1, name, values, "one or more")
            require(list(values) == sorted(set(values)), name, values, "growing")
        finite = self.per_parameter[0] > 0 and math.isfinite(self.per_parameter[-1])
        require(finite, "per_parameter", self.per_parameter, "> 0 and finite")
        names = {short(size) for size in self.sizes}
        require(len(names) == len(self.sizes), "sizes", self.sizes, "apart in their first three digits")
        names = {f"{ratio:g}" for ratio in self.per_parameter}
        require(
            len(names) == len(self.per_parameter), "per_parameter", self.per_parameter, "apart in six digits"
        )
        at_least(1, self, "seeds")
        require(not self.rates or min(self.rates) > 0, "rates", self.rates, "> 0")

    @property
    def points(self) -> list["Point"]:
        """All points, size by size, each with the fewest tokens first."""
        return [Point(size, ratio) for size in self.sizes for ratio in self.per_parameter]

    def tokens(self, at: "Point") -> int:
        """Number of tokens that a model is trained on at a point."""
        return max(self.seq_len * self.batch_size, round(at.ratio * at.size))

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary of all sizes."""
        return self.vocab_size or presets.vocabulary(self.sizes[0])

    def settings(self, at: "Point") -> Settings:
        """Settings of the comparison at a point."""
        tried = self.rates if at.size == self.sizes[0] else ()
        return Settings(
            self.designs, at.size, self.tokens(at), self.seeds, self.data, self.heldout, self.dev,
            vocab_size=self.vocabulary, seq_len=self.seq_len, batch_size=self.batch_size, rates=tried or (1e-3,),
            warmups=(WARMUP,), rate_share=1.0, dtype=self.dtype, device=self.device, suites=(),
        )  # fmt: skip


def folder_of(out: Path, at: Point) -> Path:
    """Folder of the comparison at a point."""
    return safe_join(out, f"{short(at.size)}-{at.ratio:g}", ConfigError)


def planned(out: Path, study: Study) -> bool:
    """True if the comparison at one of the points has a plan."""
    return any((folder_of(out, at) / PLAN).is_file() for at in study.points)


def unlike(known: Study, study: Study) -> list[str]:
    """Names of the settings by which a study is another one, and does not only grow, from the same smallest size."""
    before, now = dump(known), dump(study)
    grown = {"sizes": known.sizes[0] == study.sizes[0], "per_parameter": True}
    for name, same in grown.items():
        if same and ({*before[name]} <= {*now[name]} or {*now[name]} <= {*before[name]}):
            now[name] = before[name]
    return [name for name, value in before.items() if now[name] != value]


def results_in(out: Path, study: Study | None = None) -> dict[str, Any]:
    """The results in a folder, from which a study can go on; empty if there are none, or only those of an older version
    or of another study. The text may be elsewhere: `ids` tell it. ConfigError: they are damaged."""
    found = read_json(out / RESULTS, ConfigError) if (out / RESULTS).is_file() else {}
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return {}
    known: Study = load(Study, found.get("study"), str(out / RESULTS))
    cells, rates = found.get("cells", []), found.get("rates", {})
    whole = isinstance(cells, list) and all(
        isinstance(cell, dict) and {*OF_CELL} <= {*cell} for cell in cells
    )
    if not whole or not isinstance(rates, dict):
        raise ConfigError(f"{out / RESULTS}: damaged; delete it, or restore it")
    return found if study is None or not {*unlike(known, study)} - {"data"} else {}


def lines_in(out: Path, study: Study) -> dict[Point, list[dict[str, Any]]]:
    """The lines of the results by point, of the study's designs and seeds."""
    found = dict[Point, list[dict[str, Any]]]()
    for cell in results_in(out, study).get("cells", []):
        if cell["design"] in study.designs and cell["seed"] in range(study.seeds):
            found.setdefault(Point(cell["size"], cell["per_parameter"]), []).append(cell)
    return found


def kept(out: Path, study: Study) -> dict[Point, set[tuple[str, int]]]:
    """(design, seed) of trainings, by point, that are in the results alone: those that were there before the point's
    folder, which names them in KEPT."""
    found = dict[Point, set[tuple[str, int]]]()
    for at, lines in lines_in(out, study).items():
        folder, pairs = folder_of(out, at), {(line["design"], line["seed"]) for line in lines}
        if folder.exists():
            known = read_json(folder / KEPT, ConfigError) if (folder / KEPT).is_file() else []
            pairs &= {(name, seed) for name, seed in known}
        found[at] = pairs
    return found


def keep(out: Path, at: Point, pairs: set[tuple[str, int]]) -> None:
    """Note in the folder of a point, which is new, what is not trained there."""
    folder = folder_of(out, at)
    if pairs and not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        with _writing(folder):
            part.mkdir(parents=True, exist_ok=True)
            write_json(part / KEPT, sorted(pairs))
            part.rename(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except shutil.Error as error:  # of several files, each with its target and why
        raise StorageError(f"{folder}: not written ({error.args[0][0][2]})") from None
    except OSError as error:
        raise StorageError(f"{folder}: not written ({error.strerror or error})") from None


def encode_text(out: Path, study: Study) -> None:
    """Encode the text in the vocabulary of all sizes, once. ConfigError where a training would read it more than PASSES
    times, or where it is not the text of results that are there."""
    first, ids = study.settings(study.points[0]), results_in(out, study).get("ids")
    if not planned(out, study):
        clear(out, first)
    _, shards = prepare(out, first)
    if ids and shards.digest != ids:
        if not planned(out, study):
            remove(out / DATA)
        require(False, "data", study.data, f"the text of {out / RESULTS}, or give a new folder as --out")
    there, most = shards.split("train").tokens, study.tokens(study.points[-1])
    few = f"the text has {there:,} tokens to train on, of which more than {PASSES:g} passes teach little"
    bound = f"≤ {PASSES * there / study.sizes[-1]:.3g}: {few}"
    require(most <= PASSES * there, "per_parameter", study.per_parameter[-1], bound)


def text_at(out: Path, study: Study, at: Point) -> None:
    """Give the comparison at a point a copy of the text, as if it had encoded it; ASKED comes last. Text that
    `tokenize` encoded stays where it is."""
    folder, settings = folder_of(out, at) / DATA, study.settings(at)
    if not is_encoded(study.data) and not (folder / ASKED).is_file():
        others = shutil.ignore_patterns(ASKED, ".lock")
        with _writing(folder):
            shutil.copytree(out / DATA, folder, ignore=others, dirs_exist_ok=True)
        write_json(folder / ASKED, asked(settings))


def checked(study: Study) -> None:
    """ConfigError for designs that are unknown, cannot be as small, ask for a recipe that is not theirs, or are
    variants while no rates are given: rates are known only for designs; or for fewer tokens than an update takes."""
    least, update = study.per_parameter[0], study.seq_len * study.batch_size
    bound = f"≥ {math.ceil(1e6 * update / study.sizes[0]) / 1e6:g}: an update takes {update:,} tokens"
    require(round(least * study.sizes[0]) >= update, "per_parameter", least, bound)
    for name in study.designs if not study.rates else ():
        bound = f"given, such as 4e-3 8e-3 1.6e-2: none is known for {name}"
        require(name in presets.DESIGNS, "rates", "none", bound)
    for size in study.sizes:
        check_designs(study.settings(Point(size, study.per_parameter[0])))


def transferred(out: Path, study: Study, at: Point) -> dict[str, float]:
    """The rate of each design at a point: the `lowest` at the smallest size with as many tokens for a parameter, or the
    design's own, by N^FALL. Empty where they are still to be tried."""
    first = study.sizes[0]
    if not study.rates:
        return {name: rate(name, at.size) for name in study.designs}
    given = dict.fromkeys(study.designs, study.rates[0])
    best = best_rates(out, study, at.ratio) if len(study.rates) > 1 else given
    if at.size == first:
        return best
    return {name: float(f"{best[name] * (at.size / first) ** FALL:.3g}") for name in study.designs}


def best_rates(out: Path, study: Study, ratio: float) -> dict[str, float]:
    """The rate of each design from which those of larger sizes follow: the `lowest` of those tried at the smallest
    size. Empty if none have been."""
    path = folder_of(out, Point(study.sizes[0], ratio)) / "rates.json"
    tried = read_json(path, ConfigError)["tried"] if path.is_file() else {}
    found: dict[str, float] = results_in(out, study).get("rates", {}).get(f"{ratio:g}", {})
    return found | {name: lowest(tried[name]) for name in study.designs if tried.get(name)}


def lowest(tried: Sequence[dict[str, Any]]) -> float:
    """The rate where a parabola over log rates through the best of those tried and the next on each side is lowest; the
    best itself where it is the first or the last that gave a loss; the lowest rate where none did."""
    losses = sorted(
        (line["lr"], line["bits_per_byte"]) for line in tried if line["bits_per_byte"] is not None
    )
    if not losses:
        return float(min(line["lr"] for line in tried))
    at = min(range(len(losses)), key=lambda i: losses[i][1])
    if at in (0, len(losses) - 1):
        return float(losses[at][0])
    rates, bits = zip(*losses[at - 1 : at + 2], strict=True)
    square, slope, _ = np.polyfit(np.log(rates) - math.log(rates[1]), bits, 2)
    return float(rates[1] * math.exp(-slope / (2 * square)))


def collected(out: Path, study: Study) -> dict[str, Any]:
    """The results so far: a line for each cell that finished, the laws and the crossings; what a study on another
    machine needs to go on, the digest of the text's ids and the best rates."""
    before, cells, ids = lines_in(out, study), list[dict[str, Any]](), results_in(out, study).get("ids")
    not_trained = kept(out, study)
    for at in study.points:
        if (folder_of(out, at) / PLAN).is_file():
            ids = read_json(folder_of(out, at) / PLAN, ConfigError).get("ids") or ids
        path = folder_of(out, at) / "results.json"
        if not path.is_file():
            cells += before.get(at, [])
            continue
        alone = not_trained.get(at, set())
        cells += [cell for cell in before.get(at, []) if (cell["design"], cell["seed"]) in alone]
        found = read_json(path, ConfigError)
        for name, entry in found["designs"].items():
            for cell in entry["cells"]:
                if cell["status"] == "finished" and cell.get(WINDOWS) is not None:
                    cells.append({
                        "design": name, "size": at.size, "per_parameter": at.ratio, "seed": cell["seed"],
                        "parameters": entry["active_parameters"], "tokens": cell["tokens"], "rate": entry["lr"],
                        "seconds": cell["seconds"], "state_bytes": (entry.get("streaming") or {}).get("state_bytes"),
                    } | {score: cell.get(score) for score in SCORES})  # fmt: skip
    laws = {score: laws_of(cells, study, score) for score in SCORES}
    return {
        "version": VERSION, "study": dump(study), "ids": ids,
        "rates": {f"{ratio:g}": best_rates(out, study, ratio) for ratio in study.per_parameter}, "cells": cells,
        "laws": {score: {name: told(law) for name, law in each.items()} for score, each in laws.items()},
        "crossings": {score: crossings(each, study) for score, each in laws.items()},
    }  # fmt: skip
