"""The README's table and picture, from the committed results: python docs/front.py

It rewrites the tables of README.md and results/README.md and draws docs/images/front.svg. A test compares them with
what it would write.
"""

import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.compare.report.summary import STREAMING, WINDOWS, Row, ranked  # noqa: E402
from perspectron.presets import title, variant  # noqa: E402
from perspectron.util.numbers import fixed, signed, size  # noqa: E402
from perspectron.util.stats import interval, paired  # noqa: E402

RESULTS = ROOT / "results"
PICTURE = ROOT / "docs" / "images" / "front.svg"
SHORT, LONG = "1024", "262144"
TITLE = "A transformer slows down as its text grows"
DRAWN = {"transformer": "second", "ssd": "ink", "perspective2": "accent"}
"""The designs of the picture, and the colours of their lines."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 380, 55, 535, 90, 310  # of the picture and its axes
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; stroke: none }
  .ground { fill: #fbfaf7 } .title { font-size: 16px; font-weight: 600; fill: #1b2430 }
  .soft { fill: #55606e } .end { text-anchor: end } .middle { text-anchor: middle }
  .grid { stroke: #e4e0d6 } .line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
  .accent { stroke: #0f6b6b } .second { stroke: #b4531f } .ink { stroke: #55606e }
  text.accent, text.second, text.ink { font-weight: 600; stroke: #fbfaf7; stroke-width: 6; paint-order: stroke }
  text.accent { fill: #0f6b6b } text.second { fill: #b4531f } text.ink { fill: #55606e }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #14181d } .title { fill: #e6e9ec } .soft { fill: #a3adb8 } .grid { stroke: #2c333b }
    .accent { stroke: #5cc6c0 } .second { stroke: #f0a36b } .ink { stroke: #a3adb8 }
    text.accent, text.second, text.ink { stroke: #14181d }
    text.accent { fill: #5cc6c0 } text.second { fill: #f0a36b } text.ink { fill: #a3adb8 }
  }
"""
SCORES = "windows", "streaming"
WINDOW = 256  # tokens of a window of the reference runs
README_HEAD = "| 1 M parameters, 2 M tokens of books, 3 seeds | windows | memory carried | state |"
CLEAN_HEAD = (
    "| 1 M parameters, 2 M tokens of books, 3 seeds | windows | against the first | memory carried | "
    "against the first | state |"
)
OTHERS_HEAD = "| rates chosen at a tenth of the tokens | windows (95%) | against the transformer | state |"
AFTER = "transformer, Muon, all parts, 72 tokens"
"""The row of the clean split after which the one stands that was read later."""
ELSEWHERE = (AFTER, "perspective2, Muon, kv_heads 1, window 256")
"""Rows of the clean split that stand in results/README.md alone."""
SAID = {"rwkv7": "rwkv7, both parts", "kda": "kda, neither part"}
"""What the names of rows in the results do not say."""
PARTS = (
    "transformer", "perspective2-2M", "lens2-2M", "hgrn2-2M", "kda-2M", "gdn-2M", "gla-2M", "ssd-2M", "adr2-2M",
)  # fmt: skip
"""Files of `parts`, each of a design without the two parts, with each of them and, last, with both."""
ALONE = ("small-state", "muon")
"""Files of `parts` of designs that have both parts."""
CALLED = {
    "transformer[optimizer=muon,qk_norm=head,relu2=true,zero_outputs=true,shift=k+v+network,first_values=true]":
        "Transformer, Muon, all parts",
}  # fmt: skip
PARTS_HEAD = (
    "| 2 M parameters, 3 M tokens of `stdlib`, 3 seeds | neither part: windows | against the transformer | "
    "memory carried | both parts: windows | against the transformer | memory carried | state, both |"
)


class Measured(NamedTuple):
    """The committed results: designs of the reference runs, best first; the transformer with neither part and with
    both; each design with neither, where it can be without, and with both; and the reading of the clean split."""

    rows: list[Row]
    transformer: tuple[Row, Row]
    parts: list[tuple[Row | None, Row]]
    clean: dict[str, Any]


def read() -> Measured:
    """The results."""
    pairs = [_neither_and_both(name) for name in PARTS]
    alone = (row for name in ALONE for row in ranked(_json(f"parts/{name}.json")))
    parts = [*pairs, *((None, row) for row in alone)]
    parts.sort(key=lambda pair: pair[1].mean or math.inf)
    clean = _json("clean.json")["results"]["designs"]
    for name, row in _json("clean_one_head.json")["results"][
        "designs"
    ].items():  # read later, beside the first
        first = next(iter(clean.values()))
        for score in SCORES:
            pair = paired(row[score]["seeds"], first[score]["seeds"])
            row[score]["by_seed"] = pair._asdict() if pair else None
        before = [*clean].index(AFTER) + 1
        clean = dict([*[*clean.items()][:before], (name, row), *[*clean.items()][before:]])
    return Measured(ranked(_json("reference/results.json")), pairs[0], parts, clean)


def _neither_and_both(name: str) -> tuple[Row, Row]:
    """The first and the last design of a file of `parts`."""
    results = _json(f"parts/{name}.json")
    rows = {row.name: row for row in ranked(results)}
    first, *_, last = results["designs"]
    return rows[first], rows[last]


def readme_table(measured: Measured) -> str:
    """The table of README.md: bits per byte of the clean split by both scores, of most rows."""
    lines = [README_HEAD, "|---|---|---|---|"]
    for name, row in measured.clean.items():
        if name in ELSEWHERE:
            continue
        losses = [fixed(fmean(row[score]["seeds"])) for score in SCORES]
        lines.append("| " + " | ".join([_called(name), *losses, size(row["state_bytes"])]) + " |")
    return "\n".join(lines) + "\n"


def clean_table(measured: Measured) -> str:
    """The same table for results/README.md, with differences from the first row over paired seeds."""
    lines = [CLEAN_HEAD, "|---|---|---|---|---|---|"]
    for name, row in measured.clean.items():
        cells = [_called(name)]
        for score in SCORES:
            pair = row[score].get("by_seed")
            against = (
                f"{signed(pair['mean'])} ({signed(pair['low'])} to {signed(pair['high'])})" if pair else ""
            )
            cells += [fixed(fmean(row[score]["seeds"])), against]
        lines.append("| " + " | ".join([*cells, size(row["state_bytes"])]) + " |")
    return "\n".join(lines) + "\n"


def _called(name: str) -> str:
    """A row's name as typed, with its design's title, in bold for ours."""
    design, comma, rest = SAID.get(name, name).partition(",")
    words = title(design) + comma + rest
    return f"**{words}**" if _ours(design) else words


def parts_table(measured: Measured) -> str:
    """The table of results/README.md of both scores with and without the two parts, with differences from the
    transformer in the same form over paired seeds."""
    lines = [PARTS_HEAD, "|---|---|---|---|---|---|---|---|"]
    for pair in measured.parts:
        losses = list[str]()
        for row, transformer in zip(pair, measured.transformer, strict=True):
            losses += [
                fixed(row.average(WINDOWS)) if row else "",
                _against(row, transformer),
                fixed(row.average(STREAMING)) if row else "",
            ]
        neither, both = pair
        name = CALLED.get(both.name) or title(neither.name.partition("[")[0] if neither else both.name)
        cells = [f"**{name}**" if _ours(both.name) else name, *losses, size(_streaming(both))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def others_table(measured: Measured) -> str:
    """The same for the designs of the reference runs that have no file in `parts`."""
    lines = [OTHERS_HEAD, "|---|---|---|---|"]
    known = {row.name.partition("[")[0] for _, row in measured.parts}
    for row in measured.rows:
        if row.name.partition("[")[0] not in known:
            cells = [_name(row), _loss(row), _against(row, measured.transformer[0]), size(_streaming(row))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _against(row: Row | None, other: Row) -> str:
    """The difference over paired seeds, with its interval."""
    pair = row.against(other) if row and row is not other else None
    return f"{signed(pair.mean)} ({signed(pair.low)} to {signed(pair.high)})" if pair else ""


def picture(lengths: dict[str, Any]) -> str:
    """Time of a token against the tokens before it, on logarithmic axes; each line has its design's name at its end."""
    curves = {
        name: {int(at): one["decode_seconds"]["median"] * 1e3 for at, one in lengths["results"][name].items()}
        for name in DRAWN
    }
    xs = sorted(next(iter(curves.values())))
    taken = [value for curve in curves.values() for value in curve.values()]
    low, high = math.floor(math.log10(min(taken))), math.log10(max(taken))

    def x(tokens: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(tokens / xs[0]) / math.log(xs[-1] / xs[0])

    def y(milliseconds: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log10(milliseconds) - low) / (high - low)

    parts = [
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(20, 34, TITLE, "title"),
    ]
    processor = lengths["conditions"]["cpu"].split(",")[0].replace("(R)", "").removesuffix(" Processor")
    parts.append(_text(20, 56, f"milliseconds per token; 2 M parameters, one core of an {processor}", "soft"))
    for power in range(low, math.floor(high) + 1):
        at = y(10**power)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>')
        parts.append(_text(LEFT - 10, at + 4, f"{10.0**power:g}", "soft end"))
    parts += [_text(x(tokens), BOTTOM + 24, f"{tokens // 1024}k", "soft middle") for tokens in xs]
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 46, "tokens read before", "soft middle"))
    for name, curve in curves.items():
        points = " ".join(f"{x(tokens):.1f},{y(time):.1f}" for tokens, time in sorted(curve.items()))
        parts.append(f'<polyline class="line {DRAWN[name]}" points="{points}"/>')
        last = curve[xs[-1]]
        below = last == min(one[xs[-1]] for one in curves.values())  # the others' names are above their lines
        named = f"{title(name)}: {last:.{0 if last >= 10 else 2}f} ms"
        parts.append(_text(RIGHT, y(last) + (20 if below else -9), named, f"end {DRAWN[name]}"))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def rewritten(text: str, table: str) -> str:
    """A page with the rows under the table's first line replaced."""
    head = table.partition("\n")[0] + "\n"
    before, found, after = text.partition(head)
    if not found:
        raise SystemExit(f"no table begins with {head}")
    rest = after.splitlines(keepends=True)
    count = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return before + table + "".join(rest[count:])


def pages(measured: Measured) -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    readme, results = ROOT / "README.md", RESULTS / "README.md"
    whole = rewritten(results.read_text(encoding="utf-8"), parts_table(measured))
    whole = rewritten(whole, others_table(measured))
    return {
        readme: rewritten(readme.read_text(encoding="utf-8"), readme_table(measured)),
        results: rewritten(whole, clean_table(measured)),
        PICTURE: picture(_json("lengths.json")),
    }


def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _streaming(row: Row) -> float | None:
    """Bytes of the state with attention to WINDOW tokens: what grows by the token has a ring of these. None for a
    design with a table of positions."""
    known = row.entry["state_bytes"]
    if LONG not in known:
        return None
    token = (known[LONG] - known[SHORT]) / (int(LONG) - int(SHORT))
    return float(known[SHORT] - token * (int(SHORT) - WINDOW))


def _ours(design: str) -> bool:
    source = variant(design)[0].source
    return source.startswith("docs/designs/") and "baselines.md" not in source


def _name(row: Row) -> str:
    return f"**{row.title}**" if _ours(row.name) else row.title


def _loss(row: Row) -> str:
    span = interval(list(row.losses.values()))
    return fixed(row.mean) + (f" ({fixed(span[0])}–{fixed(span[1])})" if span else "")


if __name__ == "__main__":
    for path, text in pages(read()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
