"""The record's page, from the committed entries: python docs/records.py

It rewrites the tables of docs/records.md and draws docs/images/records.svg from results/records (written by
benchmarks/speedrun.py). A test compares them with what it would write.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import front  # noqa: E402

from perspectron.util import plot  # noqa: E402

ENTRIES, PAGE, PICTURE = (
    ROOT / "results" / "records",
    ROOT / "docs" / "records.md",
    ROOT / "docs" / "images" / "records.svg",
)
BEST_HEAD = "| text | track | record | seeds | entry |"
ALL_HEAD = "| entry | text | what is new | model, updates | seconds | bits per byte | packed | commit, date |"
LARGEST = 16_000_000  # bytes of an artifact


class Entry(NamedTuple):
    """An entry. seeds: what each gave."""

    name: str
    data: str
    about: str
    seeds: list[dict[str, Any]]
    conditions: dict[str, Any]

    def each(self, key: str) -> list[float]:
        return [float(seed[key]) for seed in self.seeds]

    def packed(self) -> list[float]:
        """Bits per byte of the packed models."""
        return [seed["bits_per_byte"] + seed["packed_loss"] for seed in self.seeds]

    def xz(self) -> float:
        return float(self.seeds[0]["compressors"]["xz -9"])


class Track(NamedTuple):
    """A track. score: of an entry, by seed, where less is better; None where the entry does not qualify."""

    name: str
    score: Callable[[Entry], list[float] | None]
    text: Callable[[float], str]


def _within(minutes: float) -> Callable[[Entry], list[float] | None]:
    return lambda entry: entry.each("bits_per_byte") if max(entry.each("seconds")) <= 60 * minutes else None


def _below(entry: Entry) -> list[float] | None:
    return entry.each("seconds") if max(entry.each("bits_per_byte")) < entry.xz() else None


def _small(entry: Entry) -> list[float] | None:
    small = max(entry.each("packed_bytes")) <= LARGEST and max(entry.each("seconds")) <= 3600
    return entry.packed() if small else None


TRACKS = (
    Track("below xz -9", _below, lambda seconds: f"{seconds:.0f} s"),
    Track("10 minutes", _within(10), lambda bits: f"{bits:.3f}"),
    Track("60 minutes", _within(60), lambda bits: f"{bits:.3f}"),
    Track("16 MB", _small, lambda bits: f"{bits:.3f}"),
)


def read() -> list[Entry]:
    """The entries, oldest first."""
    made = []
    for path in sorted(ENTRIES.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        found = whole["results"]
        made.append(Entry(path.stem, found["data"], found["about"], found["seeds"], whole["conditions"]))
    return sorted(made, key=lambda entry: entry.conditions["date"])


def best(entries: Sequence[Entry]) -> str:
    """The table of records: for each text and track the entry with the least mean."""
    lines = [BEST_HEAD, "|---|---|---|---|---|"]
    for data in sorted({entry.data for entry in entries}, reverse=True):
        for track in TRACKS:
            scored = [(track.score(entry), entry) for entry in entries if entry.data == data]
            known = [(statistics.mean(score), score, entry) for score, entry in scored if score is not None]
            if known:
                mean, score, entry = min(known, key=lambda one: one[0])
                seeds = ", ".join(track.text(value) for value in sorted(score))
                lines.append(f"| {data} | {track.name} | **{track.text(mean)}** | {seeds} | {entry.name} |")
    return "\n".join(lines) + "\n"


def everything(entries: Sequence[Entry]) -> str:
    """The table of all entries."""
    lines = [ALL_HEAD, "|---|---|---|---|---|---|---|---|"]
    for entry in entries:
        size, updates = (statistics.mean(entry.each(key)) for key in ("parameters", "updates"))
        seconds, bits = (statistics.mean(entry.each(key)) for key in ("seconds", "bits_per_byte"))
        packed = f"{statistics.mean(entry.packed()):.3f} in {max(entry.each('packed_bytes')) / 1e6:.1f} MB"
        made = f"{entry.conditions['commit'][:7]}, {entry.conditions['date'][:10]}"
        cells = [entry.name, entry.data, entry.about, f"{size / 1e6:.1f} M, {updates:,.0f}"]
        lines.append("| " + " | ".join([*cells, f"{seconds:.0f}", f"{bits:.3f}", packed, made]) + " |")
    return "\n".join(lines) + "\n"


def picture(entries: Sequence[Entry]) -> str:
    """Curves of all entries' first seeds: held-out bits per byte by seconds of training."""
    lines = [
        plot.Line(entry.name, [tuple(point) for point in entry.seeds[0]["curve"]], style)
        for style, entry in enumerate(entries)
    ]
    title = "Bits per byte by seconds of training; lower left is better"
    return plot.draw(
        [plot.Chart(title, "seconds of training", "bits per byte of 65,536 tokens or fewer", lines)]
    )


def pages(entries: Sequence[Entry]) -> dict[Path, str]:
    """Every file that this script writes, with its text."""
    page = PAGE.read_text(encoding="utf-8")
    for table in (best(entries), everything(entries)):
        page = front.rewritten(page, table)
    return {PAGE: page, PICTURE: picture(entries)}


if __name__ == "__main__":
    for path, text in pages(read()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
