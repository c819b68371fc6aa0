"""The charts of a comparison: losses against what was spent, and what each suite measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from perspectron.axes import Linear, Log
from perspectron.report.charts import Axis, Chart, Places, Point, Series, draw, element, span
from perspectron.report.document import Cell, Figure, Table
from perspectron.report.numbers import context, fixed, known, percent, seeds, short, size
from perspectron.report.summary import LOSS, Row

BITS = "held-out bits per byte"
START = 0.2  # of a training, from where its losses are drawn: before, all of them fall steeply
SIZES = (
    "length",
    "pairs",
    "keys",
    "values",
    "gaps",
    "letters",
    "kinds",
    "facts",
    "reach",
    "distance",
    "words",
    "n",
    "depth",
)  # of tasks, where a setting does not hold them apart from what was found
CHANCE = 9  # its style
Styles = dict[str, int]


def styles(names: Sequence[str], reference: str) -> Styles:
    """Number 0 for the reference, the others in turn."""
    others = [name for name in names if name != reference]
    return {reference: 0} | {name: 1 + i % 8 for i, name in enumerate(others)}


def losses(rows: Sequence[Row], style: Styles) -> list[Figure]:
    """Loss against tokens, FLOPs and seconds, over one range of losses. Seconds are tokens by the speeds that the cost
    suite measured in turns, where it did: cells' own clocks also count what ran beside them, and pauses."""
    turns = all(row.cost for row in rows if any(cell.get("curve") for cell in row.cells))
    clock = "seconds of training, by speeds measured in turns" if turns else "seconds of training"
    kinds: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("tokens", "tokens trained on", "Loss against tokens", short),
        ("flops", "training FLOPs", "Loss against FLOPs", _power),
        ("seconds", clock, "Loss against seconds", short),
    )
    rows = [_timed(row) for row in rows] if turns else rows
    return [figure for kind in kinds if (figure := _loss(rows, style, *kind)) is not None]


def _timed(row: Row) -> Row:
    """Its curves with seconds by its speed."""

    def timed(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "seconds": line["tokens"] / row.speed if row.speed else None}

    cells = [{**cell, "curve": [timed(line) for line in cell.get("curve", [])]} for cell in row.cells]
    return replace(row, entry={**row.entry, "cells": cells})


def _loss(
    rows: Sequence[Row], style: Styles, field: str, title: str, head: str, label: Callable[[float], str]
) -> Figure | None:
    series = [_curves(row, style[row.name], field) for row in rows]
    series = [one for one in series if one.mean or one.threads]
    lines = [line for one in series for line in (one.mean, *one.threads) if line]
    if not lines:
        return None
    (left, right), (bottom, top) = span([one.name for one in series])
    summary = (
        f"{BITS.capitalize()} against {title}, a line for each of {', '.join(one.name for one in series)}."
    )
    x = Axis(Log([x for line in lines for x, _ in line], left, right), f"{title} (log)", label)
    y = Linear([y for line in lines for _, y in line], bottom, top)
    chart = Chart(f"loss-{field}", head, summary, series, x, Axis(y, BITS, y.label))
    return Figure(head, draw(chart))


def _curves(row: Row, style: int, field: str) -> Series:
    """A thread for each cell with a curve, and the mean over the finished ones at the steps that they share."""
    last = max((line["step"] for cell in row.cells for line in cell.get("curve", [])), default=0)
    threads, broken = list[list[Point]](), list[Point]()
    for cell in row.cells:
        curve = [
            (line["step"], pair)
            for line in cell.get("curve", [])
            if (pair := _point(line, field)) is not None
        ]
        if late := [pair for step, pair in curve if step >= START * last]:
            threads.append(late)
        if curve and cell["status"] == "diverged":
            broken.append(curve[-1][1])
    finished = [{line["step"]: line for line in cell.get("curve", [])} for cell in row.finished]
    shared = sorted(set.intersection(*map(set, finished))) if finished else []
    pairs = ([_point(lines[step], field) for lines in finished] for step in shared if step >= START * last)
    mean = [_mean([pair for pair in points if pair is not None]) for points in pairs if None not in points]
    return Series(row.name, style, mean, threads if len(threads) > 1 or broken else (), broken)


def _point(line: dict[str, Any], field: str) -> Point | None:
    x, y = known(line.get(field)), known(line.get(LOSS))
    return None if x is None or y is None or x <= 0 else (x, y)


def _mean(points: Sequence[Point]) -> Point:
    count = len(points)
    return math.fsum(x for x, _ in points) / count, math.fsum(y for _, y in points) / count


def position(rows: Sequence[Row], style: Styles, seq_len: int) -> Figure | None:
    """Bits per byte by the token's place, at the geometric middle of each bin."""
    series, tables = list[Series](), list[tuple[str, dict[str, float]]]()
    for row in rows:
        suites = row.suite("position")
        threads = [[point for line in suite["bins"] if (point := _bin(line)) is not None] for suite in suites]
        mean = _shared(threads)
        if mean:
            series.append(Series(row.name, style[row.name], mean, threads if len(threads) > 1 else ()))
            tables.append((row.name, _by_bin(suites)))
    if not series:
        return None
    (left, right), (bottom, top) = span([one.name for one in series])
    points = [point for one in series for line in (one.mean, *one.threads) for point in line]
    x = Axis(Log([x for x, _ in points], left, right, base=4), "place in the context, tokens (log)", context)
    y = Linear([y for _, y in points], bottom, top)
    uprights = [(float(seq_len), "trained to here")] if points and max(x for x, _ in points) > seq_len else []
    title = "Bits per byte by place"
    summary = f"Bits per byte by place in the context, for {', '.join(one.name for one in series)}."
    chart = Chart("position", title, summary, series, x, Axis(y, "bits per byte", y.label), (), uprights)
    columns = list(dict.fromkeys(column for _, line in tables for column in line))
    body = [[Cell(name), *(Cell(fixed(line.get(column))) for column in columns)] for name, line in tables]
    table = Table("Bits per byte by place in the context, mean over seeds", ["design", *columns], body)
    return Figure(title, draw(chart), table=table)


def _bin(line: dict[str, Any]) -> Point | None:
    bits = known(line.get("bits_per_byte"))
    return None if bits is None else (math.sqrt(max(1, line["from"]) * max(1, line["to"])), bits)


def _by_bin(suites: Sequence[dict[str, Any]]) -> dict[str, float]:
    bins = dict[str, list[float]]()
    for line in (line for suite in suites for line in suite["bins"]):
        if (bits := known(line.get("bits_per_byte"))) is not None:
            bins.setdefault(f"to {context(line['to'])}", []).append(bits)
    return {name: math.fsum(values) / len(values) for name, values in bins.items()}


def _shared(threads: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over the threads where all of them have a point."""
    lines = [dict(thread) for thread in threads]
    shared = sorted(set.intersection(*map(set, lines))) if lines else []
    return [(x, math.fsum(line[x] for line in lines) / len(lines)) for x in shared]


def recall(rows: Sequence[Row], style: Styles) -> list[Figure]:
    """A chart for each task, over its settings in their order."""
    names = list(dict.fromkeys(task for row in rows for task in _tasks(row)))
    return [_task(name, [row for row in rows if name in _tasks(row)], style) for name in names]


def _tasks(row: Row) -> dict[str, Any]:
    return dict(row.recall.get("tasks", {}))


def _task(name: str, rows: Sequence[Row], style: Styles) -> Figure:
    title = name.replace("_", " ")
    tasks = {row.name: _tasks(row)[name] for row in rows}
    first = next(iter(tasks.values()))
    settings = list(dict.fromkeys(key for task in tasks.values() for key in map(_setting, task["settings"])))
    varied, places = _varied(settings)
    found = {name: {_setting(line): line for line in task["settings"]} for name, task in tasks.items()}
    series = []
    for row in rows:
        lines = {settings.index(at): line["accuracy"] for at, line in found[row.name].items()}
        most = max((len(values) for values in lines.values()), default=0)
        threads = [
            [(float(at), values[seed]) for at, values in sorted(lines.items()) if _has(values, seed)]
            for seed in range(most)
        ]
        series.append(Series(row.name, style[row.name], _shared(threads), threads if most > 1 else ()))
    (left, right), (bottom, top) = span([*(one.name for one in series), "chance"])
    x = Axis(Places(len(settings), left, right), varied, lambda at: places[int(at)])
    y = Axis(Linear([0.0, 1.0], bottom, top), "accuracy", lambda value: percent(value, 0))
    summary = f"Accuracy at {title} by {varied}, for {', '.join(tasks)}."
    chance = known(first.get("chance"))
    blind = [known(line.get("chance", chance)) for line in first["settings"]]
    even = len(set(blind)) == 1
    levels = [(value, "chance") for value in blind[:1] if even and value is not None]
    guesses = [(float(at), value) for at, value in enumerate(blind) if value is not None and not even]
    drawn = [*series, Series("chance", CHANCE, guesses)] if guesses else series
    chart = Chart(f"recall-{_slug(name)}", title, summary, drawn, x, y, levels)
    body = [
        [Cell(name), *(_accuracy(lines.get(setting)) for setting in settings)]
        for name, lines in found.items()
    ]
    body.append([Cell("chance", kind="quiet"), *(Cell(percent(value)) for value in blind)])
    count = seeds(len(line["accuracy"]) for lines in found.values() for line in lines.values())
    table = Table(f"Accuracy over {count}, by {varied}", ["design", *places], body)
    return Figure(title, draw(chart), str(first.get("theory") or ""), table)


def _accuracy(line: dict[str, Any] | None) -> Cell:
    """Of a setting, and beneath it past the length that was trained on."""
    if line is None:
        return Cell(percent(None))
    past = averaged(line.get("beyond") or [])
    return Cell(
        percent(averaged(line["accuracy"])), "" if past is None else f"past its length {percent(past)}"
    )


def averaged(values: Sequence[Any]) -> float | None:
    """The mean over seeds; none where a seed has none, for that would flatter."""
    numbers = [number for value in values if (number := known(value)) is not None]
    return math.fsum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def _has(values: Sequence[Any], seed: int) -> bool:
    return seed < len(values) and known(values[seed]) is not None


Setting = tuple[tuple[str, Any], ...]


def _setting(line: dict[str, Any]) -> Setting:
    """The sizes of the task, as they can be compared."""
    sizes = line.get("sizes") or {key: line[key] for key in line if key in SIZES}
    return tuple(sizes.items())


def _varied(settings: Sequence[Setting]) -> tuple[str, list[str]]:
    """The name of the axis, and each setting by what differs between them."""
    keys = list(dict.fromkeys(key for setting in settings for key, _ in setting))
    varied = [key for key in keys if len({str(dict(setting).get(key)) for setting in settings}) > 1] or keys[
        :1
    ]
    names = ["/".join(_value(dict(setting).get(key)) for key in varied) for setting in settings]
    return " / ".join(key.replace("_", " ") for key in varied) or "setting", names


def _value(value: Any) -> str:
    return context(value) if known(value) is not None else str(value if value is not None else "–")


def cost(rows: Sequence[Row], style: Styles) -> list[Figure]:
    kinds: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("decode_ms", "Decoding a token", "milliseconds per token", short),
        ("state_bytes", "State or cache", "bytes of a sequence", size),
    )
    return [figure for kind in kinds if (figure := _cost(rows, style, *kind)) is not None]


def _cost(
    rows: Sequence[Row], style: Styles, field: str, title: str, unit: str, label: Callable[[float], str]
) -> Figure | None:
    series, tables = list[Series](), list[tuple[str, dict[int, float]]]()
    for row in rows:
        values = measured(row.cost.get(field, {}))
        if values:
            tables.append((row.name, values))
            series.append(
                Series(row.name, style[row.name], [(float(at), value) for at, value in values.items()])
            )
    if not series:
        return None
    (left, right), (bottom, top) = span([one.name for one in series])
    points = [point for one in series for point in one.mean]
    positive = [y for _, y in points if y > 0] or [1.0]
    x = Axis(Log([x for x, _ in points], left, right, base=4), "context, tokens (log)", context)
    y = Axis(Log([min(positive) / 1.2, max(positive) * 1.2], bottom, top), f"{unit} (log)", label)
    summary = f"{unit.capitalize()} against context, for {', '.join(one.name for one in series)}."
    kept = [Series(one.name, one.style, [point for point in one.mean if point[1] > 0]) for one in series]
    contexts = sorted({at for _, values in tables for at in values})
    body = [
        [Cell(name), *(Cell(label(values.get(at, math.nan))) for at in contexts)] for name, values in tables
    ]
    table = Table(f"{title}: {unit} by context", ["design", *map(context, contexts)], body)
    return Figure(title, draw(Chart(f"cost-{field}", title, summary, kept, x, y)), table=table)


def measured(values: dict[str, Any]) -> dict[int, float]:
    """The values of a {"1024": x} by their context, in its order, less those that are none."""
    found = {int(at): value for at, given in values.items() if (value := known(given)) is not None}
    return dict(sorted(found.items()))


def reliability(rows: Sequence[Row], style: Styles) -> list[Figure]:
    """For each design, accuracy against confidence over its seeds' bins together; a bubble's area is its share."""
    return [
        _reliable(row, style[row.name], bins) for row in rows if (bins := _pooled(row.suite("calibration")))
    ]


def _pooled(suites: Sequence[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """(confidence, accuracy, count) of each bin, the seeds weighed by their counts."""
    bins = dict[int, list[tuple[float, float, float]]]()
    for suite in suites:
        for index, line in enumerate(suite["bins"]):
            values = (known(line.get("confidence")), known(line.get("accuracy")), known(line.get("count")))
            if values[0] is not None and values[1] is not None and values[2]:
                bins.setdefault(index, []).append((values[0], values[1], values[2]))
    pooled = []
    for _, lines in sorted(bins.items()):
        count = math.fsum(n for _, _, n in lines)
        confidence, accuracy = (math.fsum(line[i] * line[2] for line in lines) / count for i in (0, 1))
        pooled.append((confidence, accuracy, count))
    return pooled


def _reliable(row: Row, style: int, bins: Sequence[tuple[float, float, float]]) -> Figure:
    left, right, bottom, top, side = 42, 214, 196, 24, 232
    x, y = Linear([0.0, 1.0], left, right), Linear([0.0, 1.0], bottom, top)
    parts = [f'<path class="rule" d="M{left} {top}V{bottom}H{right}"/>']
    parts.append(f'<path class="level" d="M{left} {bottom}L{right} {top}"/>')
    for tick in (0.0, 0.5, 1.0):
        text = percent(tick, 0)
        anchor = "end" if tick == 1 else "middle"
        parts.append(
            f'<text class="tick" x="{x.at(tick):.0f}" y="{bottom + 15}" text-anchor="{anchor}">{text}</text>'
        )
        parts.append(
            f'<text class="tick" x="{left - 5}" y="{y.at(tick) + 4:.0f}" text-anchor="end">{text}</text>'
        )
    places = [(x.at(confidence), y.at(accuracy)) for confidence, accuracy, _ in bins]
    line = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    parts.append(f'<g class="s{style}"><path class="mean" d="M{line}"/></g>')
    most = max(count for _, _, count in bins)
    for (across, up), (_, _, count) in zip(places, bins, strict=True):
        radius = max(1.6, 6.5 * math.sqrt(count / most))
        parts.append(f'<circle class="bubble s{style}" cx="{across:.1f}" cy="{up:.1f}" r="{radius:.1f}"/>')
    middle = (left + right) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{bottom + 31}" text-anchor="middle">confidence</text>')
    parts.append('<text class="axis" x="0" y="12">accuracy</text>')
    title = f"Reliability of {row.name}"
    summary = f"Accuracy against confidence in {len(bins)} bins; on the diagonal they agree."
    svg = element(f"reliability-{_slug(row.name)}", title, summary, 220, side, "".join(parts))
    return Figure(row.name, svg)


def _slug(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)


def _power(value: float) -> str:
    """1e13 as 10¹³, 1.5e13 as 1.5·10¹³."""
    mantissa, _, power = f"{value:.1e}".replace(".0e", "e").partition("e")
    raised = "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(int(power)))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"
