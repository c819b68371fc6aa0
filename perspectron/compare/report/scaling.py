"""The page of a scaling study: charts and tables of the losses, and the laws that they follow."""

import statistics
from pathlib import Path
from typing import Any

from perspectron import presets
from perspectron.compare.laws import MOST_MOVED, Point, losses_at
from perspectron.compare.plan import REFERENCE
from perspectron.compare.report import figures
from perspectron.compare.report.page import Section, rendered, winner
from perspectron.compare.report.summary import WINDOWS, Row
from perspectron.compare.report.tables import estimate
from perspectron.compare.scaling import PAGE, RESULTS, SCORES, Study, collected
from perspectron.presets.rates import FALL
from perspectron.util import plot
from perspectron.util.files import write_json, write_text
from perspectron.util.numbers import NONE, fixed, grouped, percent, short
from perspectron.util.page import Cell, Table
from perspectron.util.stats import LEVEL, interval


def html(found: dict[str, Any]) -> str:
    """The page of a study."""
    study = found["study"]
    spent = sum(cell["seconds"] or 0.0 for cell in found["cells"])
    facts = [
        ("tokens for a parameter", ", ".join(f"{ratio:g}" for ratio in study["per_parameter"])),
        ("text", study["data"]), ("seeds", str(study["seeds"])),
        ("trainings that finished", grouped(len(found["cells"]))), ("hours they took", f"{spent / 3600:.1f}"),
    ]  # fmt: skip
    rates = f"each design has the rate known for it, which falls by N^{FALL} and has a ceiling"
    if len(study["rates"]) == 1:
        rates = (
            f"the rate is {study['rates'][0]:g} at the smallest size, as it was given, from there by N^{FALL}"
        )
    elif study["rates"]:
        rates = (
            f"rates are the best at the smallest size, of those tried or between them, from there by N^{FALL}"
        )
    sections = [part for score in SCORES for part in _section(found, score)]
    sections.append(
        Section("conditions", "Conditions", f"All sizes have one vocabulary; {rates}.", facts=facts)
    )
    heading = f"{len(study['designs'])} designs at {len(study['sizes'])} sizes"
    return rendered(heading, sentence(found), sections)


def charts(found: dict[str, Any], score: str) -> list[plot.Chart]:
    """Loss by active parameters, a chart for each number of tokens for a parameter; none without a loss."""
    study = found["study"]
    style = figures.styles(list(study["designs"]), REFERENCE)
    known = {(cell["design"], cell["size"]): float(cell["parameters"]) for cell in found["cells"]}
    drawn = list[plot.Chart]()
    for ratio in study["per_parameter"]:
        curves = []
        for name, there in _by_size(found, ratio, score).items():
            if not there:
                continue
            points = [(known[name, size], statistics.fmean(each)) for size, each in there.items()]
            spans = [interval(each) or (each[0], each[0]) for each in there.values()]
            curves.append(plot.Line(presets.title(name), points, style[name], spans))
        if curves:
            axes = (_titled(ratio, score), "active parameters", "bits per byte")
            drawn.append(plot.Chart(*axes, curves, log_x=True, log_y=True, x_text=short))
    return drawn


def _titled(ratio: float, score: str) -> str:
    return f"{SCORES[score]}, {ratio:g} tokens for a parameter"


def _by_size(found: dict[str, Any], ratio: float, score: str) -> dict[str, dict[int, list[float]]]:
    """Losses of each design, by size where it has some, for so many tokens for a parameter."""
    study = found["study"]
    at = {size: losses_at(found, Point(size, ratio), score) for size in study["sizes"]}
    return {
        name: {size: list(each[name].values()) for size, each in at.items() if name in each}
        for name in study["designs"]
    }


def _seeds(losses: list[float], seeds: int) -> Cell:
    """Mean and interval of losses, or how many seeds there are if some are missing."""
    cell = estimate(losses)
    return cell if len(losses) in (0, seeds) else Cell(cell.text, f"{len(losses)} of {seeds} seeds")


def _section(found: dict[str, Any], score: str) -> list[Section]:
    """Figure and tables of a score; none where nothing has it."""
    study, tables = found["study"], list[Table]()
    for ratio in study["per_parameter"]:
        rows = [
            [
                Cell(presets.title(name)),
                *(_seeds(there.get(size, []), study["seeds"]) for size in study["sizes"]),
            ]
            for name, there in _by_size(found, ratio, score).items()
        ]
        if any(cell.text != NONE for _, *cells in rows for cell in cells):
            of = f"Bits per byte {_titled(ratio, score)}"
            caption = f"{of}, by active parameters, with {LEVEL:.0%} intervals over seeds."
            tables.append(Table(caption, ["design", *map(short, study["sizes"])], rows))
    if not tables:
        return []
    laws = [(name, law) for name, law in found["laws"][score].items() if "A" in law]
    if laws:
        caption = "Laws log L = log A − α log N − β log D; off: the most by which a mean lies off its law."
        rows = [
            [Cell(presets.title(name)), *(_exponent(law[x]) for x in ("alpha", "beta")), Cell(short(law["A"])),
             Cell(percent(law["off"], 2)), Cell(str(law["seeds"]))]
            for name, law in laws
        ]  # fmt: skip
        tables.append(Table(caption, ["design", "α", "β", "A", "off", "seeds"], rows))
    if crossings := crossing_rows(found, score):
        caption = (
            "Where two lines cross, if all seeds say so; moved by: the factor by which the losses off the two lines "
            "move it, beside the interval."
        )
        rows = [[Cell(first, f"of {other}"), *map(Cell, rest)] for first, other, *rest in crossings]
        tables.append(Table(caption, [CROSSING[0], *CROSSING[2:]], rows))
    slug = score.partition("_")[0]
    drawn = [plot.draw([chart], slug=f"{slug}{i}-") for i, chart in enumerate(charts(found, score))]
    return [Section(slug, f"Loss, {SCORES[score]}", sentence(found, score), drawn, tables)]


def _exponent(found: dict[str, Any] | None) -> Cell:
    if found is None:
        return Cell("–")
    span = found["interval"]
    return Cell(fixed(found["mean"], 4), f"{fixed(span[0], 4)} to {fixed(span[1], 4)}" if span else "")


def write(out: Path, study: Study) -> dict[str, Any]:
    """Write the results so far, and their page."""
    found = collected(out, study)
    write_json(out / RESULTS, found)
    write_text(out / PAGE, html(found))
    return found


def sentence(found: dict[str, Any], score: str = WINDOWS) -> str:
    """The conclusion in words: which design is ahead at each end, and from which others it is told apart."""
    study, ahead = found["study"], list[str]()
    ends = [Point(study["sizes"][i], study["per_parameter"][i]) for i in (0, -1)]
    for at in dict.fromkeys(ends):
        if (rows := _rows(found, at, score))[0].losses:
            where = f"{short(at.size)} parameters and {at.ratio:g} tokens for each"
            ahead.append(f"{SCORES[score].capitalize()}, at {where}: {winner(rows, 'design')}")
    return " ".join(ahead) or "Nothing has finished yet."


CROSSING = ("ahead beyond it", "of", "tokens for each", "parameters", "trained there", "moved by")
"""Heads of `crossing_rows`."""


def crossing_rows(found: dict[str, Any], score: str = WINDOWS) -> list[list[str]]:
    """Table rows of where lines cross. The last column is the factor by which deviations from both lines move it."""
    rows = []
    for cross in found["crossings"][score]:
        behind = next(name for name in cross["designs"] if name != cross["ahead_beyond"])
        span = cross["interval"]
        rows.append([
            presets.title(cross["ahead_beyond"]), presets.title(behind), f"{cross['per_parameter']:g}",
            short(cross["parameters"]) + (f" ({short(span[0])} to {short(span[1])})" if span else " (one seed)"),
            "yes" if cross["trained"] else "no",
            _factor(cross["moved"]),
        ])  # fmt: skip
    return rows


def _factor(moved: float | None) -> str:
    if moved is None:
        return "too few points"
    return f"{moved:.1f}" if moved < MOST_MOVED else f"{MOST_MOVED:,.0f} or more"


def _rows(found: dict[str, Any], at: Point, score: str) -> list[Row]:
    """The designs at a point, the best first. A seed of the best that another lacks is a fault of that one: it was not
    trained yet, or has no such score."""
    losses, trained = losses_at(found, at, score), losses_at(found, at, WINDOWS)
    best, rows = next(iter(losses.values()), {}), list[Row]()
    for name in dict.fromkeys((*losses, *found["study"]["designs"])):
        own, known = losses.get(name, {}), trained.get(name, {})
        faults = {s: ("without a loss" if s in known else "missing", "") for s in best if s not in own}
        rows.append(Row(name, {}, own, faults))
    return sorted(rows, key=Row.order)
