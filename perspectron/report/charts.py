"""Charts as inline SVG whose colours are the page's CSS variables, so that they follow its light or dark scheme.

Each line has a colour, a dash and a mark of its own and its name at its end; `style` gives them by number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 480, 336, 54, 30, 44
GAP = 15.5  # between names at the lines' ends
LETTER = 7.7  # width of a letter, at most, on average
LONGEST = 22  # letters of a name
STYLES = 10
MARKED = 14  # points of a line that get a mark each; of more only the last
_MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",  # circle
    "M-3.2 -3.2h6.4v6.4h-6.4Z",  # square
    "M0 -4.2L4 3H-4Z",  # triangle
    "M0 -4.5L4 0L0 4.5L-4 0Z",  # diamond
    "M0 4.2L4 -3H-4Z",  # triangle, down
    "M-4.2 0L3 4V-4Z",  # triangle, left
    "M4.2 0L-3 4V-4Z",  # triangle, right
    "M-1.3 -4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7Z",  # plus
    "M-2 -4h4l2 4l-2 4h-4l-2 -4Z",  # hexagon
    "M-4 -2.6h8v5.2h-8Z",  # bar
)

Point = tuple[float, float]


class Scale(Protocol):
    """What perspectron.axes has: pixels of values, and the values to mark."""

    def at(self, value: float) -> float: ...
    def ticks(self) -> list[float]: ...


class Places:
    """Equally far places 0, 1, … for things without a measure."""

    def __init__(self, count: int, start: float, end: float) -> None:
        self.count, self.start, self.end = count, start, end

    def at(self, value: float) -> float:
        return self.start + (value + 0.5) / self.count * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [float(i) for i in range(0, self.count, -(-self.count // 8))]


@dataclass(frozen=True)
class Axis:
    """title: with the unit; label: text of a tick."""

    scale: Scale
    title: str
    label: Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """style: its number; mean: the thick line; threads: a thin line for each seed; broken: where a seed ended."""

    name: str
    style: int
    mean: Sequence[Point]
    threads: Sequence[Sequence[Point]] = ()
    broken: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """slug: unique in the page. summary: what it shows, for who cannot see it. levels and uprights: values of an axis
    drawn as a line with a name. x, y: axes made for the frame that `span` gives."""

    slug: str
    title: str
    summary: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    levels: Sequence[tuple[float, str]] = ()
    uprights: Sequence[tuple[float, str]] = field(default=())


def span(names: Sequence[str]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Pixels of the frame: (left, right), (bottom, top), with room at the right for these names."""
    longest = max((min(len(name), LONGEST) for name in names), default=0)
    return (LEFT, WIDTH - 22 - LETTER * longest), (HEIGHT - BOTTOM, TOP)


def draw(chart: Chart) -> str:
    """The chart as an <svg> element."""
    (left, right), (bottom, top) = span([series.name for series in chart.series])
    body = [*_grid(chart.y, left, right), *_marks(chart.x, bottom), *_titles(chart, left, right, bottom)]
    body += [_level(chart.y.scale.at(value), name, left, right) for value, name in chart.levels]
    body += [_upright(chart.x.scale.at(value), name, bottom, top) for value, name in chart.uprights]
    clip = f'<clipPath id="{chart.slug}-frame"><rect x="{left - 5}" y="{top - 5}" '
    clip += f'width="{_n(right - left + 10)}" height="{_n(bottom - top + 10)}"/></clipPath>'
    lines = [_thin(series, chart) for series in chart.series] + [
        _thick(series, chart) for series in chart.series
    ]
    body.append(f'<g clip-path="url(#{chart.slug}-frame)">{"".join(lines)}</g>')
    body += [_cross(series, point, chart) for series in chart.series for point in series.broken]
    body += _names(chart, right, bottom, top)
    return element(chart.slug, chart.title, chart.summary, WIDTH, HEIGHT, clip + "".join(body))


def element(slug: str, title: str, summary: str, width: int, height: int, body: str) -> str:
    """An <svg> element with its title and description."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{slug}-t {slug}-d">'
        f'<title id="{slug}-t">{escape(title)}</title><desc id="{slug}-d">{escape(summary)}</desc>{body}</svg>'
    )


def swatch(style: int) -> str:
    """A short line with its mark, to stand beside a name."""
    return (
        f'<svg class="swatch" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true"><g class="s{style}">'
        f'<path class="mean" d="M1 6H33"/>{mark(style, (17, 6))}</g></svg>'
    )


def mark(style: int, at: Point) -> str:
    return f'<path class="mark" transform="translate({_n(at[0])} {_n(at[1])})" d="{_MARKS[style % STYLES]}"/>'


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places in [low, high] at least `gap` from each other, in the order wanted and as near to it as two passes make
    them; the gap shrinks where there is too little room."""
    if not wanted:
        return []
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [min(max(wanted[i], low), high) for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    overflow = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], overflow)
        overflow = places[i] - gap
    return [place for _, place in sorted(zip(order, _centred(places, wanted, order, gap, low), strict=True))]


def _centred(
    places: list[float], wanted: Sequence[float], order: list[int], gap: float, low: float
) -> list[float]:
    """Runs of touching places moved up so that they stand around what they wanted, as far as there is room."""
    start, above = 0, low - gap
    for end in range(1, len(places) + 1):
        if end < len(places) and places[end] - places[end - 1] <= gap + 1e-6:
            continue
        run = range(start, end)
        excess = math.fsum(places[i] - wanted[order[i]] for i in run) / len(run)
        shift = min(max(0.0, excess), places[start] - above - gap)
        for i in run:
            places[i] -= shift
        start, above = end, places[end - 1]
    return places


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _grid(axis: Axis, left: float, right: float) -> list[str]:
    parts = []
    for tick in axis.scale.ticks():
        y = axis.scale.at(tick)
        parts.append(f'<path class="grid" d="M{_n(left)} {_n(y)}H{_n(right)}"/>')
        text = escape(axis.label(tick))
        parts.append(f'<text class="tick" x="{_n(left - 7)}" y="{_n(y + 4)}" text-anchor="end">{text}</text>')
    return parts


def _marks(axis: Axis, bottom: float) -> list[str]:
    parts = []
    for tick in axis.scale.ticks():
        x, text = axis.scale.at(tick), escape(axis.label(tick))
        parts.append(f'<path class="rule" d="M{_n(x)} {_n(bottom)}v4"/>')
        parts.append(
            f'<text class="tick" x="{_n(x)}" y="{_n(bottom + 18)}" text-anchor="middle">{text}</text>'
        )
    return parts


def _titles(chart: Chart, left: float, right: float, bottom: float) -> list[str]:
    x = (left + right) / 2
    return [
        f'<path class="rule" d="M{_n(left)} {_n(bottom)}H{_n(right)}"/>',
        f'<text class="axis" x="{_n(x)}" y="{_n(bottom + 38)}" text-anchor="middle">{escape(chart.x.title)}</text>',
        f'<text class="axis" x="0" y="12">{escape(chart.y.title)}</text>',
    ]


def _level(y: float, name: str, left: float, right: float) -> str:
    return (
        f'<path class="level" d="M{_n(left)} {_n(y)}H{_n(right)}"/>'
        f'<text class="note" x="{_n(left + 4)}" y="{_n(y - 4)}">{escape(name)}</text>'
    )


def _upright(x: float, name: str, bottom: float, top: float) -> str:
    return (
        f'<path class="level" d="M{_n(x)} {_n(bottom)}V{_n(top)}"/>'
        f'<text class="note" x="{_n(x - 4)}" y="{_n(top + 9)}" text-anchor="end">{escape(name)}</text>'
    )


def _pixels(points: Sequence[Point], chart: Chart) -> list[Point]:
    return [(chart.x.scale.at(x), chart.y.scale.at(y)) for x, y in points]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _thin(series: Series, chart: Chart) -> str:
    paths = [_path(_pixels(points, chart)) for points in series.threads if len(points) > 1]
    return "".join(f'<path class="thread s{series.style}" d="{path}"/>' for path in paths)


def _thick(series: Series, chart: Chart) -> str:
    points = _pixels(series.mean, chart)
    if not points:
        return ""
    line = f'<path class="mean" d="{_path(points)}"/>' if len(points) > 1 else ""
    marked = points if len(points) <= MARKED else points[-1:]
    marks = "".join(mark(series.style, point) for point in marked)
    return f'<g class="s{series.style}">{line}{marks}</g>'


def _cross(series: Series, point: Point, chart: Chart) -> str:
    """Where a seed ended; at the edge of the frame where that is outside it."""
    ((x, y),) = _pixels([point], chart)
    at = f"{_n(max(x, LEFT))} {_n(min(max(y, TOP), HEIGHT - BOTTOM))}"
    return f'<path class="cross s{series.style}" transform="translate({at})" d="M-5 -5L5 5M-5 5L5 -5"/>'


def _names(chart: Chart, right: float, bottom: float, top: float) -> list[str]:
    """Each line's name at its end, led there by a hair where it had to move."""
    named = [series for series in chart.series if series.mean]
    ends = [_pixels(series.mean[-1:], chart)[0] for series in named]
    places = apart([min(max(y, top), bottom) for _, y in ends], GAP, top, bottom)
    parts = []
    for series, (x, y), place in zip(named, ends, places, strict=True):
        name = series.name if len(series.name) <= LONGEST else series.name[: LONGEST - 1] + "…"
        bend = _n(right + 4)
        parts.append(
            f'<path class="lead s{series.style}" d="M{_n(x + 5)} {_n(max(y, top))}L{bend} {_n(max(y, top))}'
            f'L{_n(right + 13)} {_n(place)}"/>'
            f'<text class="name s{series.style}" x="{_n(right + 16)}" y="{_n(place + 4.2)}">{escape(name)}</text>'
        )
    return parts
