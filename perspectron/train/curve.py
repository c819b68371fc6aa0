"""Curves of a run as SVG: its loss, and what its model reports beside it."""

from pathlib import Path
from typing import Any

from perspectron.axes import Linear
from perspectron.files import atomic

PANELS = 2
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 60, 60, 40, 48
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px; font-weight: 600 }
.grid { stroke: #ddd } .raw { stroke: #2a6fbb; opacity: .3 } .loss { stroke: #2a6fbb; stroke-width: 2 }
.held { stroke: #c2571a; stroke-width: 2; fill: none } .dot { fill: #c2571a } .back { fill: #fff }
.tloss { fill: #2a6fbb } .theld { fill: #c2571a } polyline { fill: none; stroke-linejoin: round }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .grid { stroke: #444 } .back { fill: #16181d } .tloss { fill: #7db4f0 }
  .raw, .loss { stroke: #7db4f0 } .held { stroke: #f0a070 } .dot, .theld { fill: #f0a070 } }
"""


def draw(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training loss (thin as it came, thick smoothed) and held-out bits per byte of these metrics lines; with fewer
    than two steps there is none to draw."""
    losses = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    held = [
        (line["step"], line["heldout_bits_per_byte"]) for line in metrics if "heldout_bits_per_byte" in line
    ]
    if len(losses) < 2:
        return
    last = losses[-1][0]
    left = _Axis([value for _, value in losses])
    body = [*left.grid(LEFT - 8, "end"), *_steps(last), _line("raw", losses, last, left)]
    body.append(_line("loss", _smooth(losses), last, left))
    legend = '<tspan class="tloss">training loss, nats per token</tspan>'
    if held:
        right = _Axis([value for _, value in held])
        points = [(_x(step, last), right.at(value)) for step, value in held]
        body.append(_line("held", held, last, right))
        body += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        body += right.labels(WIDTH - RIGHT + 8, "start")
        legend += f' · <tspan class="theld">held-out bits per byte {held[-1][1]:.3f} (right)</tspan>'
    title = f'<text class="title" x="{LEFT}" y="24">{legend}</text>'
    _write(path, WIDTH, HEIGHT, [title, *body])


def draw_terms(metrics: list[dict[str, Any]], path: Path) -> None:
    """A panel for each quantity that the model reported ("aux" in the metrics); nothing where there is none."""
    lines = [line for line in metrics if "aux" in line]
    if len(lines) < 2:
        return
    last, body = lines[-1]["step"], list[str]()
    names = list(lines[-1]["aux"])
    for index, name in enumerate(names):
        points = [(line["step"], line["aux"][name]) for line in lines if name in line["aux"]]
        axis = _Axis([value for _, value in points])
        title = f"{name.replace('_', ' ')} {points[-1][1]:.3g}"
        panel = [*axis.grid(LEFT - 8, "end"), *_steps(last), _line("raw", points, last, axis)]
        panel.append(_line("loss", _smooth(points), last, axis))
        panel.append(f'<text class="title" x="{LEFT}" y="24">{title}</text>')
        x, y = index % PANELS * WIDTH, index // PANELS * HEIGHT
        body.append(f'<g transform="translate({x} {y})">{"".join(panel)}</g>')
    _write(path, WIDTH * min(PANELS, len(names)), HEIGHT * -(-len(names) // PANELS), body)


def _write(path: Path, width: int, height: int, body: list[str]) -> None:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<style>{STYLE}</style><rect class="back" width="{width}" height="{height}"/>'
        f"{''.join(body)}</svg>\n"
    )
    with atomic(path) as temporary:
        temporary.write_text(svg, encoding="utf-8")


class _Axis(Linear):
    """A vertical axis of the panel."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(values, HEIGHT - BOTTOM, TOP)

    def labels(self, x: float, anchor: str) -> list[str]:
        return [
            f'<text x="{x}" y="{self.at(v) + 4:.1f}" text-anchor="{anchor}">{self.label(v)}</text>'
            for v in self.ticks()
        ]

    def grid(self, x: float, anchor: str) -> list[str]:
        return [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.at(v):.1f}" y2="{self.at(v):.1f}"/>'
            for v in self.ticks()
        ] + self.labels(x, anchor)


def _x(step: float, last: int) -> float:
    return LEFT + step / last * (WIDTH - LEFT - RIGHT)


def _steps(last: int) -> list[str]:
    y = HEIGHT - BOTTOM + 18
    marks = [
        f'<text x="{_x(last * i / 4, last):.1f}" y="{y}" text-anchor="middle">{round(last * i / 4):,}</text>'
        for i in range(5)
    ]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    return [*marks, f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">step</text>']


def _line(kind: str, points: list[tuple[int, float]], last: int, axis: _Axis) -> str:
    stride = max(1, len(points) // 1000)
    shown = points[::stride] + points[-1:]
    pairs = " ".join(f"{_x(step, last):.1f},{axis.at(value):.1f}" for step, value in shown)
    return f'<polyline class="{kind}" points="{pairs}"/>'


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential mean over about a fiftieth of the run."""
    keep, mean, smooth = 1 - 1 / max(2.0, len(points) / 50), points[0][1], []
    for step, value in points:
        mean = keep * mean + (1 - keep) * value
        smooth.append((step, mean))
    return smooth
