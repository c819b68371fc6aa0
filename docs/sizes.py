"""What sizes and tokens are worth, from the committed studies: python docs/sizes.py

It rewrites the tables of docs/designs/baselines.md, "Sizes and tokens", and draws docs/images/scaling.svg from
results/scaling. A test compares them with what it would write.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.compare.laws import Point, laws_of, losses_at, told  # noqa: E402
from perspectron.compare.report.scaling import charts  # noqa: E402
from perspectron.compare.report.summary import STREAMING, WINDOWS  # noqa: E402
from perspectron.compare.scaling import Study  # noqa: E402
from perspectron.util import plot  # noqa: E402
from perspectron.util.config import dump, load  # noqa: E402
from perspectron.util.numbers import fixed, percent, short, signed  # noqa: E402
from perspectron.util.stats import interval, paired  # noqa: E402

STUDIES = ROOT / "results" / "scaling"
PAGE, PICTURE = ROOT / "docs" / "designs" / "baselines.md", ROOT / "docs" / "images" / "scaling.svg"
PLAIN, BOTH = "transformer", "transformer[shift=k+v+network,first_values=true]"
MUON = BOTH.replace("[", "[optimizer=muon,qk_norm=head,relu2=true,zero_outputs=true,")
NAMES = {
    PLAIN: "transformer", BOTH: "… both parts", MUON: "… all parts, Muon", "perspective2": "Perspective 2",
    "kda": "KDA", "ssd": "Mamba-2", "rwkv7": "RWKV-7",
}  # fmt: skip
PAIRS = {
    "… both parts, less neither": (BOTH, PLAIN),
    "… all parts and Muon, less both parts": (MUON, BOTH),
    "Perspective 2, less the transformer with both parts": ("perspective2", BOTH),
    "… less the one with all parts and Muon": ("perspective2", MUON),
    "KDA, less the transformer": ("kda", PLAIN),
    "RWKV-7, less Perspective 2": ("rwkv7", "perspective2"),
}
SCORES = {WINDOWS: "windows", STREAMING: "memory carried"}


class Found(NamedTuple):
    """All cells, a study that has all of them, and its points with the fewest tokens for a parameter first."""

    cells: list[dict[str, Any]]
    study: Study
    points: list[Point]

    def losses(self, name: str, at: Point, score: str) -> dict[int, float]:
        """By seed."""
        return losses_at({"cells": self.cells}, at, score).get(name, {})

    def whole(self, name: str, *ratios: float) -> tuple[int, ...]:
        """The sizes of which a design has all seeds, with each of these numbers of tokens for a parameter."""
        seeds = self.study.seeds
        return tuple(
            size for size in self.study.sizes
            if all(len(self.losses(name, Point(size, ratio), WINDOWS)) == seeds for ratio in ratios)
        )  # fmt: skip


def read() -> Found:
    """The cells of all files; a training that several have is the same in each."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(STUDIES.glob("*.json"))]
    cells = dict[tuple[Any, ...], dict[str, Any]]()
    for cell in (cell for found in files for cell in found["cells"]):
        key = tuple(cell[name] for name in ("design", "size", "per_parameter", "seed"))
        if cells.setdefault(key, cell) != cell:
            raise SystemExit(f"{key}: two files differ")
    points = sorted({(cell["per_parameter"], cell["size"]) for cell in cells.values()})
    ratios, sizes = (tuple(sorted({point[i] for point in points})) for i in (0, 1))
    study: Study = load(Study, files[0]["study"], "study")
    study = replace(study, designs=tuple(NAMES), sizes=sizes, per_parameter=ratios)
    return Found(list(cells.values()), study, [Point(size, ratio) for ratio, size in points])


def losses_table(found: Found, score: str) -> str:
    """Mean losses with intervals, or the number of seeds where some are missing."""
    rows = []
    for name, called in NAMES.items():
        cells = []
        for at in found.points:
            values = list(found.losses(name, at, score).values())
            span = interval(values) if len(values) == found.study.seeds else None
            seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
            shown = f"{fixed(span[0])}–{fixed(span[1])}" if span else seeds
            cells.append(f"{fixed(fmean(values))} ({shown})" if values else "")
        rows.append([called, *cells])
    return _table([f"{SCORES[score]}, bits per byte (95%)", *map(_called, found.points)], rows)


def differences_table(found: Found, score: str) -> str:
    """Differences of two designs over paired seeds; empty where there are fewer than the study has."""
    rows = []
    for called, (name, other) in PAIRS.items():
        cells = []
        for at in found.points:
            mine, theirs = (found.losses(each, at, score) for each in (name, other))
            seeds = sorted(mine.keys() & theirs.keys())
            pair = paired([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])
            known = len(seeds) == found.study.seeds and pair is not None
            cells.append(_signed(pair.mean, (pair.low, pair.high)) if known else "")
        rows.append([called, *cells])
    return _table([f"{SCORES[score]}, difference (95%)", *map(_called, found.points)], rows)


def laws_table(found: Found, score: str) -> str:
    """Exponents with one number of tokens for a parameter, and of both, over the sizes that have all seeds."""
    rows, few, many = [], *found.study.per_parameter
    for name, called in NAMES.items():
        cells = []
        for ratios in ((few,), (many,), (few, many)):
            sizes = found.whole(name, *ratios)
            study = replace(found.study, designs=(name,), sizes=sizes or (1,), per_parameter=ratios)
            points = [(cell["size"], cell["per_parameter"]) for cell in found.cells]
            within = [cell for cell, at in zip(found.cells, points, strict=True) if at in study.points]
            law = told(laws_of(within, study, score)[name]) if len(sizes) > 1 else {}
            off = percent(law["off"], 1) if len(sizes) * len(ratios) > 1 + len(ratios) else ""
            cells += [_exponent(law.get("alpha")), *([_exponent(law.get("beta"))] * (len(ratios) > 1)), off]
        rows.append([called, *cells])
    return _table(
        [SCORES[score], f"α, D = {few:g} N", "off", f"α, D = {many:g} N", "off", "α", "β", "off"], rows
    )


def picture(found: Found) -> str:
    """Losses by active parameters, a chart for each score and number of tokens for a parameter."""
    told = {"study": dump(found.study), "cells": found.cells}
    return plot.draw([chart for score in SCORES for chart in charts(told, score)])


def _called(at: Point) -> str:
    return f"{short(at.size)}, {at.ratio:g}"


def _signed(mean: float, span: tuple[float, float]) -> str:
    return f"{signed(mean)} ({signed(span[0])} to {signed(span[1])})"


def _exponent(known: dict[str, Any] | None) -> str:
    if known is None:
        return ""
    low, high = known["interval"]
    return f"{fixed(known['mean'])} ({fixed(low)} to {fixed(high)})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rewritten(text: str, table: str) -> str:
    """A page with the table replaced that has the same first cell."""
    lines = text.splitlines(keepends=True)
    first = table.split(" | ")[0] + " |"
    at = next((i for i, line in enumerate(lines) if line.startswith(first)), None)
    if at is None:
        raise SystemExit(f"no table begins with {first}")
    end = next((i for i in range(at, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join([*lines[:at], table, *lines[end:]])


def pages(found: Found) -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    text = PAGE.read_text(encoding="utf-8")
    for table in (losses_table, differences_table, laws_table):
        for score in SCORES:
            text = rewritten(text, table(found, score))
    return {PAGE: text, PICTURE: picture(found)}


if __name__ == "__main__":
    for path, text in pages(read()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
