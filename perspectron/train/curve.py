"""Charts of a run: its losses, and the quantities that its model reports."""

import math
from pathlib import Path
from typing import Any

from perspectron.util.files import write_text
from perspectron.util.plot import Chart, Line, Point
from perspectron.util.plot import draw as picture

MOST = 1000  # points of a line
TERMS = {
    "route_gate": "mean gate on attention",
    "gini": "inequality of the experts' load",
    "reached": "share of experts that were used",
    "balance": "load × probability, 1 is even",
    "smooth": "hops between tokens' queries",
    "delta": "distance of neighbouring experts",
    "diversity": "likeness of neighbouring experts",
    "distill": "KL from the teacher, nats",
    "stability": "change of logits between tokens",
    "action": "energy of the path",
    "metric_reg": "size of the metric's factors",
    "metric_diversity": "spread of the metric over time",
    "condition": "excess of the condition number",
    "condition_number": "of the metric",
    "metric_u_norm": "norm of the metric's factors",
    "metric_u_target": "their distance from the target",
    "metric_u_floor": "their lack under the floor",
    "recurrence": "change of the state's norm",
    "blindspot": "risk where the model is unsure",
    "dim_sparsity": "share of directions in use",
    "dim_entropy": "entropy of the directions' gates",
    "dim_variance": "lack of spread of the gates",
    "active_fraction": "excess of directions in use",
}
"""Titles of the charts' axes, by the names of the quantities that models report."""


def draw(metrics: list[dict[str, Any]], path: Path) -> None:
    """Write training loss (thin as it came, thick smoothed) and the loss on text that is not trained on, over the same
    axes in bits per byte: where the second rises while the first falls, the run overfits. Nothing is written for fewer
    than two steps."""
    losses = _points(metrics, "loss")
    if len(losses) < 2:
        return
    charts, bits_of = list[Chart](), _bits_per_nat(metrics)
    others = [
        Line(text, points, number)
        for number, (text, split) in enumerate((("held-out", "heldout"), ("dev", "dev")), 2)
        if (points := _points(metrics, f"{split}_bits_per_byte"))
    ]
    if bits_of is None:
        charts.append(_chart("training loss", "nats per token", losses))
        charts += [Chart(line.name, "step", "bits per byte", [line]) for line in others]
    else:
        said = ", ".join(f"{line.name} {line.points[-1][1]:.3f}" for line in others)
        chart = _chart(f"loss: {said}", "bits per byte", [(step, loss * bits_of) for step, loss in losses])
        charts.append(Chart(chart.title, chart.x, chart.y, [*chart.lines, *others]))
    write_text(path, picture(charts))


def _bits_per_nat(metrics: list[dict[str, Any]]) -> float | None:
    """Bits per byte for a nat per token, as the text that is not trained on has them; None if it was not measured."""
    for line in reversed(metrics):
        for split in ("heldout", "dev"):
            nats = math.log(line.get(f"{split}_perplexity") or 1.0)
            if nats > 0:
                return float(line[f"{split}_bits_per_byte"]) / nats
    return None


def draw_terms(metrics: list[dict[str, Any]], path: Path) -> None:
    """Write a chart for each quantity that the model reported ("aux" in the metrics); nothing where there is none."""
    lines = [{"step": line["step"], **line["aux"]} for line in metrics if "aux" in line]
    if len(lines) > 1:
        terms = {name: _points(lines, name) for name in lines[-1] if name != "step"}
        charts = [
            _chart(f"{name.replace('_', ' ')} {at[-1][1]:.3g}", TERMS.get(name, ""), at)
            for name, at in terms.items()
        ]
        write_text(path, picture(charts))


def _points(lines: list[dict[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if name in line]


def _chart(title: str, unit: str, points: list[Point]) -> Chart:
    lines = [
        Line("each step", _thinned(points), 1, thin=True),
        Line("smoothed", _thinned(_smooth(points)), 1),
    ]
    return Chart(title, "step", unit, lines)


def _thinned(points: list[Point]) -> list[Point]:
    return points[:: -(-len(points) // MOST)] + points[-1:] if len(points) > MOST else points


def _smooth(points: list[Point]) -> list[Point]:
    """Exponential mean over about a fiftieth of the run."""
    keep, smooth = 1 - 1 / max(2.0, len(points) / 50), points[:1]
    for step, value in points[1:]:
        smooth.append((step, keep * smooth[-1][1] + (1 - keep) * value))
    return smooth
