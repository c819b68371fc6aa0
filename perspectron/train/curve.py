"""Charts of a run: its losses, and the quantities that its model reports."""

from pathlib import Path
from typing import Any

from perspectron.plot import Chart, Line, Point, write
from perspectron.plot import draw as picture

MOST = 1000  # points of a line


def draw(metrics: list[dict[str, Any]], path: Path) -> None:
    """Write training loss (thin as it came, thick smoothed) and held-out bits per byte of these lines of metrics.
    Nothing is written for fewer than two steps."""
    losses = _points(metrics, "loss")
    charts = [_chart("training loss", "nats per token", losses)]
    for text, split in (("held-out", "heldout"), ("dev", "dev")):
        if bits := _points(metrics, f"{split}_bits_per_byte"):
            title = f"{text} bits per byte {bits[-1][1]:.3f}"
            charts.append(Chart(title, "step", "bits per byte", [Line(text, bits, 1)]))
    if len(losses) > 1:
        write(path, picture(charts))


def draw_terms(metrics: list[dict[str, Any]], path: Path) -> None:
    """Write a chart for each quantity that the model reported ("aux" in the metrics); nothing where there is none."""
    lines = [{"step": line["step"], **line["aux"]} for line in metrics if "aux" in line]
    if len(lines) > 1:
        terms = {name: _points(lines, name) for name in lines[-1] if name != "step"}
        charts = [_chart(f"{name.replace('_', ' ')} {at[-1][1]:.3g}", "", at) for name, at in terms.items()]
        write(path, picture(charts))


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
