"""Line charts and pictures of tori as SVG, drawn with matplotlib, which is imported on first use.

Every colour is a CSS variable with its light value as fallback, so that a picture follows the light or dark scheme of
its page; a standalone file defines the variables itself. Text stays text. The same input gives the same bytes:
identifiers are hashes salted with the slug, and there is no date.
"""

import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

WIDTH, HEIGHT, SIDE = 520, 330, 250  # of a chart and of a torus, in points, which are pixels of the SVG
NARROW = 370  # of a chart in a page, so that its text is readable on a phone
ROW, LEGEND = 24, 18  # height of a row of dots, and of names
NAME = 36  # characters of a name in a line
MARKED = 16  # points of a line that get a mark each; of more, none
# Lines keep a contrast of 4.5 to the ground in both schemes and stay apart for readers without one kind of cone
# (ΔE ≥ 10 in CIELAB); dashes and marks tell them apart without colour.
PALETTE = {  # light, dark
    "ground": ("#fbfaf7", "#14181d"), "ink": ("#1b2430", "#e6e9ec"), "soft": ("#56606b", "#a3abb4"),
    "rule": ("#cbcac4", "#454c55"), "grid": ("#e7e5df", "#272d34"), "bad": ("#a8321a", "#ff9b82"),
    "wash": ("#f4f2ec", "#1b2027"), "shade": ("#cfccc2", "#3d454f"),
    "accent": ("#0f6b6b", "#5cc6c0"), "second": ("#b4531f", "#f0a36b"),
    "s0": ("#1b1d22", "#f0f1f3"), "s1": ("#053f8b", "#96b2f8"),
    "s2": ("#591100", "#f59a56"), "s3": ("#005c32", "#2cb488"), "s4": ("#580e4c", "#d14dbc"),
    "s5": ("#887402", "#d3bf1e"), "s6": ("#5d61d0", "#837eff"), "s7": ("#117796", "#a4d8ee"),
    "s8": ("#ca4753", "#ff455a"),
}  # fmt: skip
COLOURS = 9  # of lines: s0 to s8
STYLES: tuple[tuple[Any, str], ...] = (  # dash and mark
    ("-", "o"), ("-", "s"), ((0, (4, 2)), "^"), ((0, (1.5, 1.5)), "D"), ((0, (5, 2, 1.5, 2)), "v"),
    ((0, (3, 1)), "<"), ((0, (7, 2)), ">"), ((0, (1, 2)), "P"), ((0, (4, 1, 1, 1, 1, 1)), "h"),
)  # fmt: skip
_LIGHT = {light: f"var(--{name},{light})" for name, (light, _) in PALETTE.items()}
_SAID = "said:"  # before a text that is shown when the pointer rests on what it belongs to
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined by a line. style: number of its colour, dash and mark. spans: (low, high) at each point, drawn as a
    band, or at a single point as a bar."""

    name: str
    points: Sequence[Point]
    style: int = 0
    spans: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over common axes. x, y: titles with units. ticks: values marked on x, matplotlib's choice where there are
    none. x_text, y_text: texts of ticks."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] = ()
    x_text: Callable[[float], str] | None = None
    y_text: Callable[[float], str] | None = None


class Dot(NamedTuple):
    """A row of a dot plot: a value, its interval if it has one, and the single values that it is the mean of."""

    name: str
    value: float
    span: tuple[float, float] | None = None
    singles: Sequence[float] = ()
    style: int = 0


class Heat(NamedTuple):
    """Half-lives in tokens, a row of the picture each, over the words of a text."""

    title: str
    words: Sequence[str]
    rows: Sequence[Sequence[float]]


class Dots(NamedTuple):
    """Values on one common axis, a row each, the first on top. marks: values that are drawn across all rows."""

    title: str
    x: str
    dots: Sequence[Dot]
    marks: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Torus:
    """Experts of one routed layer on their torus, unrolled, and the ways that queries take over it.

    lengths: of its axes. cells: coordinates of each expert. shares: of the tokens, for each expert. ways: by name,
    points in [0, 1) along each axis. An axis after the second is drawn as slices side by side; on a torus of one axis
    queries run downwards.
    """

    title: str
    lengths: Sequence[int]
    cells: Sequence[Sequence[int]]
    shares: Sequence[float]
    ways: Mapping[str, Sequence[Sequence[float]]]


def variables(scheme: int) -> str:
    """CSS declarations of the palette: light (0) or dark (1)."""
    return ";".join(f"--{name}:{colours[scheme]}" for name, colours in PALETTE.items())


def draw(charts: Sequence[Chart], *, slug: str = "") -> str:
    """Charts as one <svg>. slug: a name, unique in the page that the picture becomes part of, where it is as narrow as
    a phone and has its legend below; without one it is a file of its own, with two charts in a row."""
    columns = 1 if slug else min(2, len(charts))
    rows, names = -(-len(charts) // columns), max(len(chart.lines) for chart in charts)
    tall = max(_in_lines(line.name).count("\n") + 1 for chart in charts for line in chart.lines)
    beside = 2 if tall == 1 else 1  # long names stand below each other
    width, height = (NARROW, 0.8 * NARROW + LEGEND * tall * -(-names // beside)) if slug else (WIDTH, HEIGHT)
    with _figure(width * columns, height * rows, slug) as figure:
        for index, chart in enumerate(charts):
            axes = figure.add_subplot(rows, columns, index + 1)
            _chart(axes, chart)
            if len(chart.lines) > 1 and slug:
                figure.legend(loc="outside lower left", ncols=beside, borderaxespad=0.2)
            elif len(chart.lines) > 1:
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1.03), borderaxespad=0.2)
        return _svg(figure, " · ".join(chart.title for chart in charts), slug)


def draw_dots(plot: Dots, slug: str) -> str:
    """A dot plot as one <svg>, as high as its rows need; `slug` as in `draw`."""
    lines = max(_in_lines(dot.name).count("\n") + 1 for dot in plot.dots)
    height = 70 + ROW * len(plot.dots) * (1 if lines == 1 else 0.8 * lines)
    with _figure(NARROW, height, slug) as figure:
        axes = figure.add_subplot()
        _dots(axes, plot)
        axes.set_title("")  # names take half of the width, and the title needs all of it
        figure.suptitle(plot.title, x=0.01, ha="left", fontsize=11)
        return _svg(figure, plot.title, slug)


def draw_heat(heat: Heat, slug: str) -> str:
    """Half-lives as colours on a logarithmic scale, as one <svg>; `slug` as in `draw`."""
    from matplotlib.colors import LogNorm

    with _figure(WIDTH * 1.8, SIDE, slug) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(
            heat.rows,
            aspect="auto",
            interpolation="nearest",
            cmap="cividis",
            norm=LogNorm(1, 1000, clip=True),
        )
        axes.set(title=heat.title, ylabel="rows of the memory", yticks=[])
        axes.set_xticks(range(len(heat.words)), heat.words, rotation=90, fontsize=8)
        axes.grid(visible=False)
        bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[1, 10, 100, 1000])
        bar.ax.set_yticklabels(["≤ 1", "10", "100", "≥ 1000"])
        bar.set_label("half-life, tokens")
        return _svg(figure, f"Half-lives of {heat.title}", slug)


def draw_tori(panels: Sequence[Torus], title: str) -> str:
    """Tori below each other, or side by side where they have no slices, as a file of its own."""
    slices = max(math.prod(panel.lengths[2:]) for panel in panels)
    columns = min(4, len(panels)) if slices == 1 else slices
    places = len(panels) if slices == 1 else len(panels) * slices
    rows = -(-places // columns)
    with _figure(max(SIDE * columns, 480), SIDE * rows + 40) as figure:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        for index, panel in enumerate(panels):
            for number, rest in enumerate(itertools.product(*map(range, panel.lengths[2:]))):
                place = index if slices == 1 else index * slices + number
                _torus(figure.add_subplot(rows, columns, place + 1), panel, rest)
        named = [axes.get_legend_handles_labels() for axes in figure.axes]
        handles = {name: handle for pair in named for handle, name in zip(*pair, strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4)
        return _svg(figure, title, "")


@contextmanager
def _figure(width: float, height: float, slug: str = "") -> Iterator[Any]:
    """Figure of so many points, drawn in our style whatever the user's matplotlibrc says."""
    import matplotlib
    from matplotlib.figure import Figure

    light = {name: colours[0] for name, colours in PALETTE.items()}
    with matplotlib.rc_context(), warnings.catch_warnings():
        # the reader's fonts have it, not ours
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "svg.fonttype": "none", "svg.hashsalt": "perspectron" + slug, "text.parse_math": False, "font.size": 11,
            "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
            "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
            "figure.facecolor": "none", "axes.facecolor": "none", "text.color": light["ink"],
            "axes.edgecolor": light["rule"], "axes.labelcolor": light["soft"], "grid.color": light["grid"],
            "xtick.color": light["soft"], "ytick.color": light["soft"], "legend.fontsize": 10,
            "xtick.major.size": 0, "ytick.major.size": 0,
        })  # fmt: skip
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def _chart(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    for line in chart.lines:
        _line(axes, line)
    for axis, log, text in ((axes.xaxis, chart.log_x, chart.x_text), (axes.yaxis, chart.log_y, chart.y_text)):
        if log:
            axis._set_axes_scale("log")
            low, high = axis.get_view_interval()
            parts = (1,) if high > 1e3 * low else (1, 2, 5) if high > 6 * low else (1, 1.5, 2, 3, 4, 5, 7)
            axis.set_major_locator(LogLocator(subs=parts))
            axis.set_minor_locator(NullLocator())
        if log or text:
            axis.set_major_formatter(
                FuncFormatter(lambda value, _, text=text or "{:g}".format: text(float(value)))
            )
    if chart.ticks:
        axes.set_xticks(chart.ticks)


def _in_lines(name: str) -> str:
    """A name, in lines that break behind commas and before brackets if it is long: whole it leaves no room for axes."""
    lines = [""]
    for piece in re.split(r"(?<=,)|(?=\[)", name):
        if lines[-1] and len(lines[-1] + piece) > NAME:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _style_of(number: int) -> tuple[str, Any, str]:
    """Colour, dash and mark: 0 is the reference's; from 1 on the eight colours come again with other dashes and marks,
    so that 64 lines differ."""
    colour, turn = (number - 1) % (COLOURS - 1) + 1 if number else 0, (number - 1) // (COLOURS - 1)
    dash, mark = STYLES[(colour + max(0, turn)) % len(STYLES)] if number else STYLES[0]
    return PALETTE[f"s{colour}"][0], dash, mark


def _dots(axes: Any, plot: Dots) -> None:
    axes.set(title=plot.title, xlabel=plot.x)
    rows = range(len(plot.dots))[::-1]
    for row, dot in zip(rows, plot.dots, strict=True):
        colour, _, mark = _style_of(dot.style)
        if dot.span:
            axes.plot(dot.span, (row, row), color=colour, linewidth=1.4, alpha=0.8, solid_capstyle="butt")
        at = [row] * len(dot.singles)
        axes.plot(dot.singles, at, color=colour, linestyle="", marker="|", markersize=9, alpha=0.7)
        axes.plot(
            dot.value, row, color=colour, linestyle="", marker=mark, markersize=7,
            markeredgecolor=PALETTE["ground"][0], markeredgewidth=0.6, gid=_SAID + dot.name,
        )  # fmt: skip
    for name, value in plot.marks.items():
        axes.axvline(value, color=PALETTE["soft"][0], linewidth=1, linestyle=(0, (3, 3)))
        axes.annotate(
            name, (value, 1), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", va="bottom", fontsize=9, color=PALETTE["soft"][0],
        )  # fmt: skip
    if plot.marks:
        axes.set_title(plot.title, pad=18)
    axes.set_yticks(list(rows), [_in_lines(dot.name) for dot in plot.dots])
    axes.set_ylim(-0.7, len(plot.dots) - 0.3)
    axes.tick_params(axis="y", labelcolor=PALETTE["ink"][0])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _line(axes: Any, line: Line) -> None:
    colour, dash, mark = _style_of(line.style)
    xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
    if line.spans:
        low, high = zip(*line.spans, strict=True)
        if len(xs) > 1:
            axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        else:
            axes.vlines(xs, low, high, color=colour, linewidth=1.4, alpha=0.8)
    mark, dash = mark if len(xs) <= MARKED else "", "" if len(xs) == 1 else dash
    axes.plot(
        xs, ys, color=colour, linestyle=dash, linewidth=1.8, marker=mark, markersize=5,
        markeredgecolor=PALETTE["ground"][0], markeredgewidth=0.6, label=_in_lines(line.name), gid=_SAID + line.name,
    )  # fmt: skip


def _torus(axes: Any, panel: Torus, rest: tuple[int, ...]) -> None:
    """One slice of a torus: where the axes after the second have these values."""
    from matplotlib.patches import Rectangle

    across, up = panel.lengths[0], panel.lengths[1] if len(panel.lengths) > 1 else 1
    for expert, (cell, share) in enumerate(zip(panel.cells, panel.shares, strict=True)):
        if tuple(cell[2:]) == rest:
            x, y = cell[0] / across, (cell[1] if len(cell) > 1 else 0) / up
            shade = 0.6 * min(1.0, share * len(panel.shares) / 3)  # full from three times the even share on
            axes.add_patch(Rectangle(
                (x, y), 1 / across, 1 / up, facecolor=(PALETTE["soft"][0], shade), edgecolor=PALETTE["rule"][0],
                linewidth=0.5, gid=f"{_SAID}expert {expert}: {share:.2%}",
            ))  # fmt: skip
            if max(across, up) <= 6:
                axes.annotate(
                    f"{share:.1%}", (x, y + 1 / up), (3, -3), textcoords="offset points", va="top", fontsize=8
                )
    for style, (name, way) in enumerate(panel.ways.items()):
        _way(axes, name, way, panel.lengths, rest, 1 + style % 8)
    where = ", ".join(f"{'z' if i == 0 else f'axis {3 + i}'} = {cell}" for i, cell in enumerate(rest))
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=" · ".join(filter(None, (panel.title, where))))
    for axis, length in ((axes.xaxis, across), (axes.yaxis, up)):
        shown = range(0, length, -(-length // 16))
        axis.set_ticks([(cell + 0.5) / length for cell in shown], [str(cell) for cell in shown])
    axes.set(xlabel="x", ylabel="y" if len(panel.lengths) > 1 else "← token")
    if len(panel.lengths) == 1:
        axes.set_yticks([])
    axes.grid(visible=False)
    axes.tick_params(labelsize=8)


def _way(
    axes: Any,
    name: str,
    way: Sequence[Sequence[float]],
    lengths: Sequence[int],
    rest: tuple[int, ...],
    style: int,
) -> None:
    """Path of queries through one slice; it breaks where it leaves the slice, and leaves it at one border to come back
    at the other where that is the shorter way."""
    flat, count = len(lengths) == 1, len(way)
    points = [(q[0], 1 - (t + 0.5) / count if flat else q[1]) for t, q in enumerate(way)]
    # A query of 1 - 1e-9 is 1 in float32 and lies in the last cell still.
    inside = [
        tuple(min(int(q * n), n - 1) for q, n in zip(query[2:], lengths[2:], strict=True)) == rest
        for query in way
    ]
    path = list[Point]()
    for t in range(1, count):
        (x, y), (to_x, to_y) = points[t - 1], points[t]
        around_x, around_y = round(to_x - x), 0 if flat else round(to_y - y)
        if inside[t - 1] and inside[t]:
            path += [(x, y), (to_x - around_x, to_y - around_y), (math.nan, math.nan)]
            if around_x or around_y:
                path += [(x + around_x, y + around_y), (to_x, to_y), (math.nan, math.nan)]
    colour = PALETTE[f"s{style}"][0]
    shown = [point for point, here in zip(points, inside, strict=True) if here]
    axes.plot([x for x, _ in path], [y for _, y in path], color=colour, linewidth=1.1, alpha=0.7)
    axes.plot(
        [x for x, _ in shown], [y for _, y in shown], color=colour, linestyle="", marker="o", markersize=3.2,
        markeredgewidth=0, label=f"{name} ({count} tokens)", gid=_SAID + name,
    )  # fmt: skip
    if inside and inside[0]:
        ring = {"marker": "o", "markersize": 8, "color": colour, "markerfacecolor": "none"}
        axes.plot(*points[0], **ring, gid=f"{_SAID}{name}: first")


def _svg(figure: Any, title: str, slug: str) -> str:
    """matplotlib's SVG without what a page does not need, and with our variables in the place of colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", buffer.getvalue(), flags=re.DOTALL
    )
    svg = svg.replace("xlink:href=", "href=")
    used = set(re.findall(r"""(?:href="|url\()#([\w-]+)""", svg))
    svg = re.sub(rf'<g id="{_SAID}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r' id="([^"]*)"', lambda mark: mark[0] if mark[1] in used else "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda at: re.sub(r"(\.\d\d)\d+", r"\1", at[0]), svg)
    svg = re.sub(r' style="[^"]*"', _style, svg)
    head, name = re.search(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', svg), html.escape(title)
    assert head is not None
    parts = f'role="img" aria-label="{name}"><title>{name}</title>'
    if slug:
        return f"<svg {head[1]} {parts}{svg[head.end() :].strip()}"
    style = (
        f":root{{{variables(0)};background:var(--ground);font-family:system-ui,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{:root{{{variables(1)}}}}}"
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {head[1]} {parts}<style>{style}</style>'
    return f"{start}{svg[head.end() :].strip()}\n"


def _style(style: re.Match[str]) -> str:
    """A style with colours as variables and the reader's own font."""
    value = re.sub(r"font-family: [^;\"]*;? ?", "", style[0])
    return re.sub(r"#[0-9a-f]{6}", lambda colour: _LIGHT.get(colour[0], colour[0]), value)
