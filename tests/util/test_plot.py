"""Pictures: well-formed, alone, the same twice, in both schemes, and with what was given where it belongs."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from perspectron.experts.torus import cells
from perspectron.util import plot
from perspectron.util.plot import Chart, Dot, Dots, Line, Torus, draw, draw_dots, draw_tori

SVG = "{http://www.w3.org/2000/svg}"
LINES = [
    Line("a<b & $c$", [(1, 3.0), (10, 2.0), (100, 1.5)], 1, [(2.5, 3.5), (1.5, 2.5), (1, 2)]),
    Line("drei 三", [(1, 2.0), (10, 1.0)], 2),
]
CHART = Chart("Loss <of> $two$", "tokens", "bits", LINES, log_x=True)


def words(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def said(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}title")]


def path_of(svg: str, name: str) -> list[tuple[float, float]]:
    """Points of the line of this name, in pixels."""
    (group,) = groups_of(svg, name)
    return [
        (float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", group.find(f"{SVG}path").get("d"))
    ]


def groups_of(svg: str, name: str) -> list[ET.Element]:
    return [group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.findtext(f"{SVG}title") == name]


def test_a_chart_shows_its_lines_and_names():
    svg = draw([CHART])
    assert {"Loss <of> $two$", "tokens", "bits", "a<b & $c$", "drei 三"} <= set(words(svg))
    first = path_of(svg, "a<b & $c$")
    assert len(first) == 3
    across = [x for x, _ in first]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.1)  # a log axis
    down = [y for _, y in first]
    assert (down[1] - down[0]) == pytest.approx(2 * (down[2] - down[1]), abs=0.1) and down[1] > down[0]


def test_text_is_text_and_colours_are_variables():
    svg = draw([CHART])
    root = ET.fromstring(svg)
    used = {style for element in root.iter() for style in re.findall(r"#\w{6}", element.get("style", ""))}
    variables = re.findall(r"var\(--(\w+),(#\w{6})\)", svg)
    assert {light for _, light in variables} == used
    for name, light in variables:
        assert plot.PALETTE[name][0] == light
    style = root.find(f"{SVG}style").text
    for name in {name for name, _ in variables}:
        light, dark = style.split("prefers-color-scheme:dark")
        assert f"--{name}:{plot.PALETTE[name][0]}" in light and f"--{name}:{plot.PALETTE[name][1]}" in dark
    assert "font-family" not in svg.replace(style, "") and "@font-face" not in svg and "<image" not in svg


def test_the_palette_has_every_colour_once():
    for scheme in (0, 1):
        colours = [pair[scheme] for pair in plot.PALETTE.values()]
        assert len(set(colours)) == len(colours)
    assert len(plot.STYLES) == sum(re.fullmatch(r"s\d", name) is not None for name in plot.PALETTE)


def test_the_same_chart_gives_the_same_bytes_whatever_the_users_style(monkeypatch):
    import matplotlib

    svg = draw([CHART], slug="x-")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert draw([CHART], slug="x-") == svg
        assert matplotlib.rcParams["font.size"] == 30
    assert "2026" not in svg and "matplotlib" not in svg.lower()


def test_charts_of_one_page_share_no_identifier():
    one, two = (draw([CHART], slug=slug) for slug in ("one-", "two-"))
    assert "xmlns" not in one and "http" not in one and "<style" not in one
    ids = [{e.get("id") for e in ET.fromstring(svg).iter() if e.get("id")} for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    for svg, known in zip((one, two), ids, strict=True):
        used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg))
        assert {a or b for a, b in used} == known


def test_a_chart_of_equal_values_and_panels_in_rows():
    flat = Chart("flat", "x", "y", [Line("one", [(0, 1.0), (1, 1.0)])])
    root = ET.fromstring(draw([flat] * 3))
    assert root.get("viewBox") == f"0 0 {2 * plot.WIDTH} {2 * plot.HEIGHT}"


@pytest.mark.parametrize("shape", [(6,), (4, 4), (1, 3), (4, 4, 2), (2, 2, 2, 3)], ids=str)
def test_a_torus_shows_every_expert_and_every_slice(shape):
    count = math.prod(shape)
    shares = [(e + 1) / (count * (count + 1) / 2) for e in range(count)]
    queries = [[((t * 7 + a * 3) % 10) / 10 for a in range(len(shape))] for t in range(12)]
    panels = [Torus(f"layer {i}", shape, cells(shape).tolist(), shares, {"a<b": queries}) for i in (0, 1)]
    svg = draw_tori(panels, "Ways")
    tips = [tip for tip in said(svg) if tip.startswith("expert ")]
    assert sorted(tips) == sorted(2 * [f"expert {e}: {share:.2%}" for e, share in enumerate(shares)])
    assert words(svg).count("x") == 2 * math.prod(shape[2:])
    assert "a<b (12 tokens)" in words(svg)
    slices = [word for word in words(svg) if word.startswith("layer 1")]
    assert len(slices) == math.prod(shape[2:])
    assert said(svg).count("a<b: first") == 2


def test_an_expert_lies_in_its_cell_and_a_query_where_it_is():
    shape, query = (4, 2), [0.375, 0.75]  # in cell (1, 1)
    svg = draw_tori(
        [Torus("layer", shape, cells(shape).tolist(), [1 / 8] * 8, {"way": [query, query]})], "Ways"
    )
    expert = cells(shape).tolist().index([1, 1])
    corners = path_of(svg, f"expert {expert}: 12.50%")
    (group,) = groups_of(svg, "way")
    marks = [(float(use.get("x")), float(use.get("y"))) for use in group.iter(f"{SVG}use")]
    middle = [sum(corner[axis] for corner in set(corners)) / len(set(corners)) for axis in (0, 1)]
    assert len(marks) == 2
    assert marks[0] == pytest.approx(middle, abs=0.1)


def test_a_way_goes_the_shorter_way_round():
    def path(shape, *way):
        """Points of the way, in parts of the square."""
        centre = cells(shape).tolist().index([0, 0]) if len(shape) == 2 else 0
        panel = Torus(
            "", shape, cells(shape).tolist(), [1 / math.prod(shape)] * math.prod(shape), {"way": way}
        )
        svg = draw_tori([panel], "Ways")
        corner = path_of(svg, f"expert {centre}: {1 / math.prod(shape):.2%}")
        left, low = min(x for x, _ in corner), max(y for _, y in corner)
        wide = (max(x for x, _ in corner) - left) * shape[0]
        (line,) = [
            p.get("d") for p in ET.fromstring(svg).iter(f"{SVG}path") if "opacity: 0.7" in p.get("style", "")
        ]
        points = re.findall(r"[ML] (\S+) (\S+)", line)
        return [
            pytest.approx(((float(x) - left) / wide, (low - float(y)) / wide), abs=0.01) for x, y in points
        ]

    assert path((2, 2), (0.2, 0.5), (0.4, 0.5)) == [(0.2, 0.5), (0.4, 0.5)]
    assert path((2, 2), (0.9, 0.5), (0.2, 0.5)) == [(0.9, 0.5), (1.2, 0.5), (-0.1, 0.5), (0.2, 0.5)]


def test_matplotlib_is_imported_when_a_picture_is():
    code = "import sys, perspectron.util.plot, perspectron.cli.compare; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_long_name_leaves_room_for_the_axes():
    """matplotlib warns where it does not, which is an error here; in words the name is whole."""
    name = "Transformer[optimizer=muon, qk_norm=head, relu2=true, zero_outputs=true, first_values=true]"
    dots = draw_dots(Dots("loss", "bits", [Dot(name, 1.5, (1.4, 1.6)), Dot("GLA", 1.7)]), slug="d")
    lines = [Line(name, [(1, 2.0), (2, 1.0)], 1), Line("GLA", [(1, 2.0), (2, 1.5)], 2)]
    chart = draw([Chart("loss", "tokens", "bits", lines)], slug="c")
    for svg in (dots, chart):
        rest = svg.replace(title := f"<title>{name}</title>", "")
        assert title in svg and name not in rest and "zero_outputs=true" in rest
