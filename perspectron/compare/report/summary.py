"""Designs of a comparison over their seeds: mean loss, rank and differences.

A cell that diverged or is missing has no loss; its design keeps the mean of its other seeds and is ranked behind every
design that finished all seeds.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perspectron.presets import title
from perspectron.util.stats import Paired, paired

WINDOWS, STREAMING = "heldout_bits_per_byte", "streaming_bits_per_byte"
"""Scores of a cell: in windows, and with memory carried."""


@dataclass(frozen=True)
class Row:
    """A design, its entry in the results, and the held-out bits per byte of each seed that finished. faults: of each
    seed without a loss, "diverged" or "missing", and why."""

    name: str
    entry: dict[str, Any]
    losses: dict[int, float]
    faults: dict[int, tuple[str, str]]

    @property
    def title(self) -> str:
        """The name that readers know, such as Mamba-2 for the design `ssd`."""
        return title(self.name)

    @property
    def finished(self) -> list[dict[str, Any]]:
        return [cell for cell in self.entry["cells"] if cell["seed"] in self.losses]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.losses.values()) if self.losses else None

    def order(self) -> tuple[bool, bool, float]:
        """The key that rows are ranked by."""
        return self.mean is None, bool(self.faults), self.mean or 0.0

    def average(self, field: str) -> float | None:
        """Mean of a field over the finished cells that have it."""
        values = [cell[field] for cell in self.finished if cell[field] is not None]
        return statistics.fmean(values) if values else None

    def against(self, other: "Row") -> Paired | None:
        """This design's loss less the other's, over the seeds that both finished; above zero is worse."""
        seeds = [seed for seed in self.losses if seed in other.losses]
        return paired([self.losses[seed] for seed in seeds], [other.losses[seed] for seed in seeds])

    @property
    def why_left_out(self) -> str:
        """Why seeds lack a loss."""
        kinds = {kind for kind, _ in self.faults.values()}
        if kinds == {"diverged"}:
            return DIVERGED
        return UNSCORED if kinds == {"without a loss"} else MISSING

    @property
    def cost(self) -> dict[str, Any]:
        """Results of the cost suite, empty where it was not run."""
        return dict(self.entry["suites"].get("cost") or {})

    @property
    def speed(self) -> float | None:
        """Tokens per second of training: by the cost suite, in which all took turns, else by the cells' own clocks,
        which also count what ran beside them."""
        return self.cost.get("train_tokens_per_second") or self.average("tokens_per_second")

    @property
    def recall(self) -> dict[str, Any]:
        """Results of the recall suite, empty where it was not run."""
        return dict(self.entry["suites"].get("recall") or {})

    def suite(self, name: str) -> list[dict[str, Any]]:
        """Results of a suite, of the finished cells that have them."""
        return [cell["suites"][name] for cell in self.finished if cell["suites"].get(name)]


MISSING, DIVERGED, UNSCORED = (
    "of which seeds are missing",
    "of which seeds diverged",
    "which has no such score",
)
"""Why a design is left out."""


def without(reasons: Iterable[tuple[str, str]]) -> str:
    """ ", without A, B, of which seeds are missing": (title, reason) of each design that is left out; "" of none."""
    titles = dict[str, list[str]]()
    for title_, reason in reasons:
        titles.setdefault(reason, []).append(title_)
    parts = [f"without {', '.join(of)}, {reason}" for reason, of in titles.items()]
    return f", {', and '.join(parts)}" if parts else ""


def ranked(results: dict[str, Any], score: str = WINDOWS) -> list[Row]:
    """Complete designs by their mean score, then those with faults by theirs, then those without any; equals in the
    order of the results."""
    rows = [_row(name, entry, score) for name, entry in results["designs"].items()]
    return sorted(rows, key=Row.order)


def leader(rows: Sequence[Row]) -> Row | None:
    """The complete design with the lowest mean, None where no design is complete."""
    return rows[0] if rows and not rows[0].faults else None


def _row(name: str, entry: dict[str, Any], score: str) -> Row:
    losses, faults = dict[int, float](), dict[int, tuple[str, str]]()
    for cell in entry["cells"]:
        if cell["status"] == "finished" and cell.get(score) is not None:
            losses[cell["seed"]] = cell[score]
        else:
            faults[cell["seed"]] = cell["status"].replace("finished", "without a loss"), cell["why"] or ""
    return Row(name, entry, losses, faults)
