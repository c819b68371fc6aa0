"""Charts of a comparison: losses against what was spent, time and state of a token against the context."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from perspectron.compare.report.summary import Row
from perspectron.presets import DESIGNS
from perspectron.util.numbers import context, short, size
from perspectron.util.plot import Chart, Dot, Dots, Line, draw, draw_dots
from perspectron.util.stats import interval

REFERENCE = "transformer"
START = 0.2  # share of a training from which its losses are drawn: before it, all of them fall steeply
Styles = dict[str, int]


def styles(names: Sequence[str], reference: str) -> Styles:
    """The style of each arm. A design's is always the same, whatever it is compared with: 0 is the transformer's. Arms
    that are no designs take theirs in turn, with 0 for the reference."""
    known = {name: 1 + place for place, name in enumerate(DESIGNS)} | {REFERENCE: 0}
    free = itertools.count(1 + len(known))
    return {name: known[name] if name in known else 0 if name == reference else next(free) for name in names}


def _figures(slug: str, charts: Sequence[Chart]) -> list[str]:
    """Charts of the lines that have points, each as <svg>; a chart without such lines has none."""
    charts = [replace(chart, lines=[line for line in chart.lines if line.points]) for chart in charts]
    drawn = [chart for chart in charts if chart.lines]
    return [draw([chart], slug=f"{slug}{i}-") for i, chart in enumerate(drawn)]


def ranking(rows: Sequence[Row], style: Styles, compressors: dict[str, Any], how: str) -> list[str]:
    """Mean loss of each design with its interval and its seeds, and the compressors across. how: the way of scoring."""
    dots = [
        Dot(
            row.title,
            row.mean,
            interval(list(row.losses.values())),
            list(row.losses.values()),
            style[row.name],
        )
        for row in rows
        if row.mean is not None
    ]
    title = f"Held-out bits per byte, {how}; lower is better"
    return [draw_dots(Dots(title, "bits per byte", dots, compressors), slug=f"{how}-")] if dots else []


def losses(rows: Sequence[Row], style: Styles, apart: bool = False) -> list[str]:
    """Loss against tokens, FLOPs and, unless the rows are of several comparisons (`apart`), seconds. Seconds are tokens
    by the speeds that the cost suite measured in turns, where it did: the clock of a cell also counts what ran beside
    it, and pauses."""
    in_turns = all(row.cost.get("train_tokens_per_second") for row in rows if row.finished)

    def seconds(row: Row, line: dict[str, Any]) -> float | None:
        return line["tokens"] / row.speed if in_turns and row.speed else line["seconds"]

    clock = "seconds of training" + (", from speeds of the cost suite" if in_turns else "")
    axes: tuple[tuple[str, str, Callable[[Row, dict[str, Any]], float | None]], ...] = (
        ("Loss against tokens", "tokens trained on", lambda _, line: line["tokens"]),
        ("Loss against FLOPs", "training FLOPs", lambda _, line: line["flops"]),
        ("Loss against seconds", clock, seconds),
    )
    charts = []
    for title, x, of in axes[:2] if apart else axes:
        lines = [_curve(row, style[row.name], of) for row in rows if row.finished]
        charts.append(Chart(title, f"{x} (log)", "bits per byte", lines, log_x=True, x_text=short))
    return _figures("loss", charts)


def _curve(row: Row, style: int, of: Callable[[Row, dict[str, Any]], float | None]) -> Line:
    """Mean over the finished seeds at the steps that they share; band from the lowest to the highest."""
    threads = []
    for cell in row.finished:
        points = {line["step"]: (of(row, line), line["bits_per_byte"]) for line in cell["curve"]}
        late = {step: at for step, at in points.items() if step >= START * max(points) and at[0]}
        threads.append({step: (x, y) for step, (x, y) in late.items() if x is not None and y is not None})
    keys = sorted(set.intersection(*map(set, threads))) if threads else []
    columns = [[thread[key] for thread in threads] for key in keys]
    means = [(statistics.fmean(x for x, _ in c), statistics.fmean(y for _, y in c)) for c in columns]
    spans = [(min(y for _, y in c), max(y for _, y in c)) for c in columns] if len(threads) > 1 else []
    return Line(row.title, means, style, spans)


def cost(rows: Sequence[Row], style: Styles) -> list[str]:
    """Time and state of a token against the context."""
    kinds: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("decode_ms", "Decoding a token", "milliseconds per token (log)", short),
        ("state_bytes", "State or cache", "bytes of a sequence (log)", size),
    )
    charts = list[Chart]()
    for key, title, y, text in kinds:
        lines = []
        for row in rows:
            values = {at: value for at, value in measured(row.cost.get(key)).items() if value > 0}
            ranges = row.cost.get(f"{key}_spread") or {}
            spans = [ranges.get(str(at)) for at in values]
            bands = [(span["low"], span["high"]) for span in spans if span] if all(spans) else []
            lines.append(Line(row.title, list(values.items()), style[row.name], bands))
        ticks = sorted({x for line in lines for x, _ in line.points})
        x = "context, tokens (log)"
        charts.append(Chart(title, x, y, lines, True, True, ticks=ticks, x_text=context, y_text=text))
    return _figures("cost", charts)


def measured(values: dict[str, Any] | None) -> dict[int, float]:
    """Values of a {"1024": x} by context, in ascending order of it, without those that are None."""
    return dict(sorted((int(at), value) for at, value in (values or {}).items() if value is not None))
