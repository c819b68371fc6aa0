"""Pages of runs, comparisons and studies: one file each, which holds all it needs; their shared frame, style and parts
stand beside this file as templates. Figures are drawn here as lines over which the browser sets the texts, so that
these keep their size on a phone."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perspectron.util.numbers import short
from perspectron.util.plot import variables

if TYPE_CHECKING:
    from jinja2 import Template

Point = tuple[float, float]
EARLY = 0.05  # share of a figure's width in which steep losses do not set its height
SIDE = 1000  # of a figure's own square, which is stretched to its place


@dataclass(frozen=True)
class Cell:
    """note: smaller, beneath the text. kind: "best", "bad" or "quiet"."""

    text: str
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its head. words: columns of text, which are set from the left."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: Sequence[int] = (0,)


class Curve(NamedTuple):
    """Points joined by a line, each with a dot if they are few and measured. colour: of the palette. thin: the raw
    values behind a smoothed line."""

    name: str
    points: Sequence[Point]
    colour: str = "accent"
    thin: bool = False
    dots: bool = False


class Drawn(NamedTuple):
    """A figure as the template sets it. lines: (curve, path, path of its dots). ticks: (per cent, text)."""

    title: str
    x: str
    lines: list[tuple[Curve, str, str]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


@functools.cache
def page_template(package: str, name: str) -> "Template":
    """A page's template, a file of a package; a name in it that is not given is an error."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader(__name__, ".")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"light": variables(0), "dark": variables(1)}
    return environment.get_template(name)


def drawn(
    title: str, x: str, curves: Sequence[Curve], x_text: Callable[[float], str] = short
) -> Drawn | None:
    """A figure of curves over x from 0; None where no curve has a point, or they span more than a float holds."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    end = max(0.0, *(at for curve in curves for at, _ in curve.points)) or 1.0
    shown = [p for curve in curves if not curve.thin for p in curve.points] or curves[0].points
    values = [y for at, y in shown if at >= EARLY * end] or [y for _, y in shown]
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.1 * abs(low) or 1.0
    low, high = low - pad, high + pad
    if not math.isfinite(high - low):
        return None

    def place(at: float, y: float) -> str:
        height = min(max((high - y) / (high - low), -1.0), 2.0)  # what lies outside is cut off
        return f"{SIDE * at / end:.1f} {SIDE * height:.1f}"

    lines = []
    for curve in curves:
        places = [place(*point) for point in curve.points]
        dots = "".join(f"M{at}h0" for at in places) if curve.dots or len(places) == 1 else ""
        lines.append((curve, "M" + "L".join(places), dots))
    x_ticks = [(100 * at / end, x_text(at)) for at in ticks(0.0, end)]
    y_ticks = [(100 * (high - y) / (high - low), short(y, 4)) for y in ticks(low, high)]
    return Drawn(title, x, lines, x_ticks, y_ticks)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values between two, at most so many steps of them; none where floating point has none between them."""
    if not 1e-300 < (high - low) / most < 1e300:
        return []
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
