"""The page of long memories, from the committed results: python docs/memory.py

It rewrites the tables of docs/long-memory.md and draws docs/images/long-memory.svg from results/long_memory.json
(written by benchmarks/long_memory.py). A test compares them with what it would write.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "benchmarks")]

import front  # noqa: E402
import long_memory  # noqa: E402

from perspectron.compare.report.figures import REFERENCE, styles  # noqa: E402
from perspectron.presets import title  # noqa: E402
from perspectron.util import plot  # noqa: E402
from perspectron.util.numbers import size  # noqa: E402

RESULTS = ROOT / "results" / "long_memory.json"
PAGE, PICTURE = ROOT / "docs" / "long-memory.md", ROOT / "docs" / "images" / "long-memory.svg"
HELD_HEAD = "| design | state | pairs held | bits | 8 pairs in 64 tokens | 256 | 1,024 | 4,096 | 8,192 |"
FACTS_HEAD = "| design | Depo, 1 hop | 2 hops | 3 hops | Brevo | Mano, 1 operation | 2 operations |"
TALK_HEAD = "| model | tokens ago | right | drawn greedily | state | answers |"
LENGTHS = (256, 1024, 4096, 8192)
Cells = Mapping[str, Mapping[str, Any]]


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    return found


def known(cells: Cells) -> list[tuple[str, Mapping[str, Any], dict[str, float]]]:
    """Designs whose recall was measured, with that cell and what the state holds, most first."""
    found = [
        (name, each["mqar"], long_memory.recalled(each["mqar"]))
        for name, each in cells.items()
        if "mqar" in each
    ]
    return sorted(found, key=lambda one: -one[2]["bits"])


def held_table(cells: Cells) -> str:
    """What each state holds, and 8 pairs at growing distances."""
    lines = [HELD_HEAD, "|---|---|---|---|---|---|---|---|---|"]
    for name, cell, most in known(cells):
        far = {64: long_memory.loads(cell)[8], **long_memory.far(cell)}
        texts = [_mean(far.get(length)) for length in (64, *LENGTHS)]
        row = [title(name), size(cell["state_bytes"]), f"{most['pairs']:.1f}", f"{most['bits']:.0f}", *texts]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def facts_table(cells: Cells) -> str:
    """Depo, Brevo and Mano; designs that were trained on none of them are left out."""
    lines = [FACTS_HEAD, "|---|---|---|---|---|---|---|"]
    chance = ["chance", *[""] * 6]
    for name, each in cells.items():
        row = [title(name)]
        for task, asked in (("depo", ("hops 1", "hops 2, fewest 2", "fewest 3")), ("brevo", ("",)),
                            ("mano", ("operations 1", "fewest 2"))):  # fmt: skip
            cell = each.get(task)
            row += [_mean(cell and (cell["also"][other] if other else cell["accuracy"])) for other in asked]
            if cell:
                at = len(row) - len(asked)
                chance[at : len(row)] = [f"{cell['chance']:.2f}"] * len(asked)
        if set(row[1:]) != {"–"}:
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, f"| {' | '.join(chance)} |"]) + "\n"


def talk_table(conversations: Mapping[str, Any]) -> str:
    """Facts told in a conversation."""
    lines = [TALK_HEAD, "|---|---|---|---|---|---|"]
    for name, found in conversations.items():
        for each in found["distances"].values():
            if each is not None:
                row = [name, f"{each['tokens']:,.0f}", f"{each['accuracy']:.2f}", f"{each['exact']:.2f}"]
                lines.append(f"| {' | '.join([*row, size(each['state_bytes']), str(each['answers'])])} |")
    return "\n".join(lines) + "\n"


def picture(cells: Cells) -> str:
    """Bits held by bytes of state, a mark for each design; accuracy by the length of a text."""
    style = styles(list(cells), REFERENCE)
    marks = [
        plot.Line(title(name), [(cell["state_bytes"], most["bits"])], style[name])
        for name, cell, most in known(cells)
    ]
    curves = []
    for name, cell, _ in known(cells):
        far = {64: long_memory.loads(cell)[8], **long_memory.far(cell)}
        points = [(float(length), sum(each) / len(each)) for length, each in far.items() if each is not None]
        curves.append(plot.Line(title(name), points, style[name]))
    return plot.draw([
        plot.Chart("What a state holds; upper left is better", "bytes of state after 64 tokens",
                   "bits of pairs recalled", marks, log_x=True),
        plot.Chart("8 pairs, asked in the second half of a text", "tokens of the text (trained on 64)",
                   "share of right answers", curves, log_x=True),
    ])  # fmt: skip


def _mean(each: list[float] | None) -> str:
    return "–" if not each else f"{sum(each) / len(each):.2f}"


def pages(found: Mapping[str, Any]) -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    page = PAGE.read_text(encoding="utf-8")
    for table in (
        held_table(found["cells"]),
        facts_table(found["cells"]),
        talk_table(found["conversations"]),
    ):
        page = front.rewritten(page, table)
    return {PAGE: page, PICTURE: picture(found["cells"])}


if __name__ == "__main__":
    for path, text in pages(read()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
