"""Routes as SVG: each routed layer's torus, unrolled, with the load of its experts and the way of some queries.

An axis that is longer than 1 and comes third or later is drawn as slices side by side; on a torus of one axis the
tokens run downwards.
Shapes: T time, E experts, A axes of the torus; N points of a path in the plane.
"""

import itertools
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from perspectron.eval.routes import Measures, Routes
from perspectron.files import atomic
from perspectron.routing import cells, wrap

SIDE, GAP, LEFT, TOP, BOTTOM, WIDE = 240, 14, 46, 62, 46, 1100
COLOURS = 4
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px; font-weight: 600 }
.back { fill: #fff } .small { font-size: 10px }
.share { paint-order: stroke; stroke: #fff; stroke-width: 3px } .cell { fill: #7a7f8c; stroke: #999; stroke-width: .5 }
.way { fill: none; stroke-width: 1.1; stroke-opacity: .7; stroke-linejoin: round }
.w0 { stroke: #1f5fae } .p0 { fill: #1f5fae } .w1 { stroke: #b4460f } .p1 { fill: #b4460f }
.w2 { stroke: #1b7a3d } .p2 { fill: #1b7a3d } .w3 { stroke: #8a2fa0 } .p3 { fill: #8a2fa0 }
.start { fill: #fff; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .back { fill: #16181d } .share { stroke: #16181d }
  .cell { fill: #8b93a5; stroke: #666 } .start { fill: #16181d }
  .w0 { stroke: #7db4f0 } .p0 { fill: #7db4f0 } .w1 { stroke: #f0a070 } .p1 { fill: #f0a070 }
  .w2 { stroke: #7fd69a } .p2 { fill: #7fd69a } .w3 { stroke: #d99be8 } .p3 { fill: #d99be8 } }
"""


def draw(
    routes: Sequence[Routes], measures: Sequence[Measures], runs: dict[str, tuple[int, int]], path: Path
) -> None:
    """One panel a layer. `runs`: by name, the tokens [start, stop) of row 0 whose way is drawn."""
    slices = max(math.prod(layer.torus[2:]) for layer in routes)
    width, height = LEFT + slices * (SIDE + GAP) + GAP, TOP + SIDE + BOTTOM
    columns = max(1, min(len(routes), WIDE // width))
    body = []
    for index, (layer, measured) in enumerate(zip(routes, measures, strict=True)):
        x, y = index % columns * width, 48 + index // columns * height
        body.append(f'<g transform="translate({x} {y})">{"".join(_panel(layer, measured, runs))}</g>')
    ways = " · ".join(
        f'<tspan class="p{i % COLOURS}">{escape(name)} ({stop - start} tokens)</tspan>'
        for i, (name, (start, stop)) in enumerate(runs.items())
    )
    legend = [
        f'<text class="title" x="{LEFT}" y="22">way of the queries: {ways}; ring: the first</text>',
        f'<text x="{LEFT}" y="40">numbers and shades: each expert’s share of the tokens</text>',
    ]
    width, height = max(columns * width, 480), 48 + -(-len(routes) // columns) * height
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<style>{STYLE}</style><rect class="back" width="{width}" height="{height}"/>'
        f"{''.join([*legend, *body])}</svg>\n"
    )
    with atomic(path) as temporary:
        temporary.write_text(svg, encoding="utf-8")


def _panel(layer: Routes, measured: Measures, runs: dict[str, tuple[int, int]]) -> list[str]:
    said = f"Gini {measured.gini:.2f}"
    if measured.rates:
        said += f", same {measured.rates.same:.0%}, 1-hop {measured.rates.one_hop:.0%}"
    body = [
        f'<text class="title" x="{LEFT}" y="16">layer {layer.layer}</text>',
        f'<text x="{LEFT}" y="33">{said}</text>',
    ]
    for index, rest in enumerate(itertools.product(*map(range, layer.torus[2:]))):
        x = LEFT + index * (SIDE + GAP)
        if rest:
            where = ", ".join(f"{_axis(2 + i)} = {cell}" for i, cell in enumerate(rest))
            body.append(f'<text x="{x + SIDE / 2}" y="{TOP - 9}" text-anchor="middle">{where}</text>')
        body += _labels(layer.torus, x, first=index == 0)
        inside, shares = _cells(layer.torus, rest, measured)
        for colour, (start, stop) in enumerate(runs.values()):
            inside += _way(layer.query_BTA[0, start:stop], layer.torus, rest, colour % COLOURS)
        body.append(f'<svg x="{x}" y="{TOP}" width="{SIDE}" height="{SIDE}">{"".join(inside + shares)}</svg>')
    return body


def _axis(index: int) -> str:
    return "xyz"[index] if index < 3 else f"axis {index + 1}"


def _labels(torus: Sequence[int], x: float, *, first: bool) -> list[str]:
    """Numbers of the cells below, and left of the first slice."""
    middle, below = TOP + SIDE / 2, TOP + SIDE
    body = [f'<text x="{x + SIDE / 2}" y="{below + 34}" text-anchor="middle">x</text>']
    for cell in range(0, torus[0], -(-torus[0] // 16)):
        at = x + (cell + 0.5) / torus[0] * SIDE
        body.append(f'<text class="small" x="{at:.1f}" y="{below + 16}" text-anchor="middle">{cell}</text>')
    if first:
        name = "y" if len(torus) > 1 else "← token"
        turned = f"rotate(-90 {x - 30} {middle})"
        body.append(
            f'<text x="{x - 30}" y="{middle}" text-anchor="middle" transform="{turned}">{name}</text>'
        )
        for cell in range(0, torus[1], -(-torus[1] // 16)) if len(torus) > 1 else ():
            at = below - (cell + 0.5) / torus[1] * SIDE
            body.append(f'<text class="small" x="{x - 8}" y="{at + 4:.1f}" text-anchor="end">{cell}</text>')
    return body


def _cells(torus: Sequence[int], rest: tuple[int, ...], measured: Measures) -> tuple[list[str], list[str]]:
    """The experts of one slice, fully shaded from three times the even share; and their shares to write on top."""
    wide, high = SIDE / torus[0], SIDE / (torus[1] if len(torus) > 1 else 1)
    body, shares = list[str](), list[str]()
    for expert, cell in enumerate(cells(tuple(torus)).tolist()):
        if tuple(cell[2:]) != rest:
            continue
        share = measured.load[expert] / max(measured.tokens, 1)
        x, y = cell[0] * wide, SIDE - (cell[1] + 1 if len(torus) > 1 else 1) * high
        shade = 0.6 * min(1.0, share * len(measured.load) / 3)
        body.append(
            f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
            f' fill-opacity="{shade:.2f}"><title>expert {expert}: {share:.2%}</title></rect>'
        )
        if min(wide, high) >= 36:
            place = f'x="{x + 4:.1f}" y="{y + 12:.1f}"'
            shares.append(f'<text class="small share" {place}>{share:.1%}</text>')
    return body, shares


def _way(query_TA: Tensor, torus: Sequence[int], rest: tuple[int, ...], colour: int) -> list[str]:
    """The path through one slice. It breaks where it leaves the slice or the square, and goes on where it wraps."""
    T = len(query_TA)
    # A query of 1 − 1e-9 is 1 in float32: the last cell still.
    lengths_A = torch.tensor(torus)
    cell_TA = (query_TA * lengths_A).long().minimum(lengths_A - 1)
    inside_T = (cell_TA[:, 2:] == torch.tensor(rest, dtype=torch.int64)).all(1).tolist()
    point_T2 = query_TA[:, :2]
    if len(torus) == 1:
        point_T2 = torch.stack([query_TA[:, 0], 1 - (torch.arange(T) + 0.5) / T], 1)
    points, drawn = point_T2.tolist(), list[str]()
    pen = ""
    for t in range(1, T):
        if inside_T[t - 1] and inside_T[t]:
            for ends in segments(points[t - 1], points[t]):
                here, there = (f"{x * SIDE:.1f},{SIDE - y * SIDE:.1f}" for x, y in ends)
                drawn.append(f"L{there}" if pen == here else f"M{here}L{there}")
                pen = there
    body = [f'<path class="way w{colour}" d="{"".join(drawn)}"/>'] if drawn else []
    for t, (x, y) in enumerate(points):
        if inside_T[t]:
            look, r = (f"start w{colour}", 4) if t == 0 else (f"p{colour}", 1.8)
            place = f'cx="{x * SIDE:.1f}" cy="{SIDE - y * SIDE:.1f}"'
            body.append(f'<circle class="{look}" {place} r="{r}"/>')
    return body


Point = tuple[float, float]


def segments(start: Sequence[float], stop: Sequence[float]) -> list[tuple[Point, Point]]:
    """The shorter way round from one point of the unit torus to another, cut where it leaves the square."""
    begin = torch.tensor(start, dtype=torch.float64)
    moved = wrap(torch.tensor(stop, dtype=torch.float64) - begin)
    cuts = [0.0, 1.0]
    for at, by in zip(begin.tolist(), moved.tolist(), strict=True):
        for border in (0.0, 1.0):
            if by != 0 and 0 < (border - at) / by < 1:
                cuts.append((border - at) / by)
    pieces = []
    for low, high in itertools.pairwise(sorted(cuts)):
        home = (begin + (low + high) / 2 * moved).floor()
        ends = [(begin + part * moved - home).tolist() for part in (low, high)]
        pieces.append(((ends[0][0], ends[0][1]), (ends[1][0], ends[1][1])))
    return pieces
