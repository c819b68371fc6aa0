"""The README's table and picture, from the committed results: python docs/front.py

It rewrites the tables of README.md and results/README.md and draws docs/images/front.svg. A test compares them with
what it would write.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.compare.report.figures import REFERENCE, styles  # noqa: E402
from perspectron.compare.report.summary import Row, ranked  # noqa: E402
from perspectron.presets import variant  # noqa: E402
from perspectron.util import plot  # noqa: E402
from perspectron.util.numbers import fixed, signed, size  # noqa: E402
from perspectron.util.stats import interval  # noqa: E402

RESULTS = ROOT / "results"
PICTURE = ROOT / "docs" / "images" / "front.svg"
SHORT, LONG = "1024", "262144"
WINDOW = 256  # tokens of a window of the reference runs
RIVALS = 5  # baselines in README.md's table, the best ones, beside the transformer
README_HEAD = (
    "| design | bits per byte (95%) | training, tokens/s | state, 256 tokens | at 256k | ms per token there |"
)
RESULTS_HEAD = (
    "| 2 M parameters, 3 M tokens of `stdlib`, 3 seeds | bits per byte (95%) | against the transformer | "
    "state |"
)


class Measured(NamedTuple):
    """The committed results: designs of the reference runs, best first; speeds of training; decoding by context."""

    rows: list[Row]
    speeds: dict[str, Any]
    contexts: dict[str, Any]

    @property
    def timed(self) -> list[Row]:
        """Those whose speeds were measured by the same machine in turns."""
        return [row for row in self.rows if row.name in self.speeds and row.name in self.contexts]

    @property
    def front(self) -> list[Row]:
        """Of these, our designs, the transformer and the best of the other baselines."""
        rivals = [row for row in self.timed if not _ours(row) and row.name != REFERENCE][:RIVALS]
        return [row for row in self.timed if _ours(row) or row.name == REFERENCE or row in rivals]


def read() -> Measured:
    """The results. A reference design that has not been timed is said to stand on the page of results alone."""
    rows = ranked(_json("reference/results.json"))
    measured = Measured(rows, _json("updates.json")["results"], _json("contexts.json")["results"])
    if untimed := [row.name for row in rows if row not in measured.timed]:
        print(
            f"not in README.md, as benchmarks/updates.py or contexts.py has not timed them: {', '.join(untimed)}"
        )
    return measured


def readme_table(measured: Measured) -> str:
    """The table of README.md: our designs in bold, the transformer and the best of the other baselines."""
    lines = [README_HEAD, "|---|---|---|---|---|---|"]
    for row in measured.front:
        speed = round(measured.speeds[row.name]["tokens_per_second"]["median"], -2)
        decoded = measured.contexts[row.name][LONG]
        taken, state = _milliseconds(decoded["decode_seconds"]), size(decoded["state_bytes"])
        lines.append(
            f"| {_name(row)} | {_loss(row)} | {speed:,.0f} | {size(_streaming(row))} | {state} | {taken} |"
        )
    return "\n".join(lines) + "\n"


def results_table(measured: Measured) -> str:
    """The table of results/README.md, with differences from the transformer over paired seeds."""
    (reference,) = (row for row in measured.rows if row.name == REFERENCE)
    lines = [RESULTS_HEAD, "|---|---|---|---|"]
    for row in measured.rows:
        pair = None if row is reference else row.against(reference)
        against = f" {signed(pair.mean)} ({signed(pair.low)} to {signed(pair.high)})" if pair else ""
        lines.append(f"| {_name(row)} | {_loss(row)} |{against} | {size(_streaming(row))} |")
    return "\n".join(lines) + "\n"


def picture(measured: Measured) -> str:
    """Loss against the time of a token at 256k, a mark for each design with its interval over seeds."""
    style = styles([row.name for row in measured.timed], REFERENCE)
    lines = []
    for row in measured.timed:
        taken = measured.contexts[row.name][LONG]["decode_seconds"]
        span = interval(list(row.losses.values()))
        if taken is not None and row.mean is not None:
            at = (taken["median"] * 1e3, row.mean)
            lines.append(plot.Line(row.title, [at], style[row.name], [span] if span else ()))
    chart = plot.Chart(
        "Loss against time per token after 262,144 tokens; lower left is better",
        "milliseconds per token, one core",
        "held-out bits per byte",
        lines,
        log_x=True,
    )
    return plot.draw([chart])


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
    return {
        readme: rewritten(readme.read_text(encoding="utf-8"), readme_table(measured)),
        results: rewritten(results.read_text(encoding="utf-8"), results_table(measured)),
        PICTURE: picture(measured),
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


def _ours(row: Row) -> bool:
    source = variant(row.name)[0].source
    return source.startswith("docs/designs/") and "baselines.md" not in source


def _name(row: Row) -> str:
    return f"**{row.title}**" if _ours(row) else row.title


def _loss(row: Row) -> str:
    span = interval(list(row.losses.values()))
    return fixed(row.mean) + (f" ({fixed(span[0])}–{fixed(span[1])})" if span else "")


def _milliseconds(taken: Any) -> str:
    if taken is None:
        return "–"
    value = taken["median"] * 1e3
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    for path, text in pages(read()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
