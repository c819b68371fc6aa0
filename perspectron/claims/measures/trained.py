"""Measures read from a comparison: designs, or one design with parts removed, trained on the same tokens.

The files are results.json of `compare` and `ablate`, kept as compare.json and ablate-DESIGN.json.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from perspectron.claims.claim import Found, Measure
from perspectron.claims.results import Missing, Results, command

LOWER = (float("-inf"), -1e-9)
"""Of a difference: less than."""


def scale(results: Results, file: str) -> str:
    """At what size a comparison was made."""
    plan = results.get(file)["plan"]
    size, tokens, data = plan["params"] / 1e6, plan["tokens"] / 1e6, Path(plan["data"]).name
    return f"at {size:.3g} M parameters and {tokens:.3g} M tokens of {data}"


def cells(results: Results, file: str, design: str) -> dict[int, dict[str, Any]]:
    """The finished ones, by seed. Missing where the design is not in the file."""
    found = results.get(file)["designs"].get(design)
    if found is None:
        raise Missing(f"`{command(file)}`")
    return {cell["seed"]: cell for cell in found["cells"] if cell["status"] == "finished"}


def paired(values: dict[str, dict[int, float]], proviso: str, unit: str) -> Found:
    """The first less the second, seed by seed."""
    first, second = values
    differences = [values[first][s] - values[second][s] for s in sorted(values[first]) if s in values[second]]
    if not differences:
        return Found((), "no seed finished in both", excuse="no seed finished in both")
    means = [statistics.fmean(values[name].values()) for name in values]
    spread = f"{min(differences):+.3f} to {max(differences):+.3f}" if len(differences) > 1 else "one seed"
    shown = f"{first} {means[0]:.3f}, {second} {means[1]:.3f} {unit}; difference {spread}"
    return Found(tuple(differences), shown, proviso=proviso)


def losses(found: dict[int, dict[str, Any]]) -> dict[int, float]:
    """Held-out bits per byte, by seed."""
    return {seed: cell["heldout_bits_per_byte"] for seed, cell in found.items()}


def versus(first: str, second: str, file: str = "compare") -> Measure:
    """Held-out bits per byte of one design less another's."""

    def measure(results: Results) -> Found:
        values = {name: losses(cells(results, file, name)) for name in (first, second)}
        return paired(values, scale(results, file), "bits per byte")

    return measure


def without(design: str, arm: str, whole: str = "") -> Measure:
    """Held-out bits per byte of a design (or of another arm, `whole`) less those of the arm that lacks a part: below 0
    where the part helps."""
    return versus(whole or design, arm, f"ablate-{design}")


def at_positions(
    first: str, second: str, wanted: Callable[[Sequence[dict[str, Any]]], Iterable[dict[str, Any]]]
) -> Measure:
    """The same over some places of the context only, chosen from the bins that both designs have."""

    def over(cell: dict[str, Any], ends: set[int]) -> float:
        bins = cell["suites"]["position"]["bins"]
        chosen = list(wanted([b for b in bins if b["to"] in ends]))
        tokens = sum(b["tokens"] for b in chosen)
        return sum(b["bits_per_byte"] * b["tokens"] for b in chosen) / tokens

    def measure(results: Results) -> Found:
        both = {name: cells(results, "compare", name) for name in (first, second)}
        every = [cell for found in both.values() for cell in found.values()]
        if not every or not all("position" in cell.get("suites", {}) for cell in every):
            raise Missing(f"`{command('compare')}`")
        ends = set.intersection(*({b["to"] for b in cell["suites"]["position"]["bins"]} for cell in every))
        values = {name: {s: over(cell, ends) for s, cell in found.items()} for name, found in both.items()}
        return paired(values, scale(results, "compare"), "bits per byte")

    return measure


def of_gates(design: str, name: str, reduce: Callable[[list[Any]], Sequence[float]], form: str) -> Measure:
    """Of a gate after training: `reduce` makes of the list over layers the numbers that are compared; a seed's are
    averaged with the other seeds'. form: the words for them, {every} for all in a row."""

    def measure(results: Results) -> Found:
        found = [cell.get("gates", {}).get(name) for cell in cells(results, "compare", design).values()]
        if not found or None in found:
            raise Missing(f"`{command('compare')}`")
        values = tuple(statistics.fmean(column) for column in zip(*map(reduce, found), strict=True))
        every = ", ".join(f"{value:.3f}" for value in values)
        return Found(values, form.format(*values, every=every), proviso=scale(results, "compare"))

    return measure


def recall(arm: str, other: str = "") -> Measure:
    """Best accuracy over the seeds of a small model trained to recall (less another's), of `benchmarks/recall.py`."""

    def best(results: Results, name: str) -> float:
        arms = results.get("recall")["results"]["arms"]
        if name not in arms:
            raise Missing(f"`{command('recall')}`")
        return float(max(arms[name]["accuracy"]))

    def measure(results: Results) -> Found:
        told = {name: best(results, name) for name in (arm, other) if name}
        task = results.get("recall")["results"]["arms"][arm]["task"]
        value = told[arm] - told.get(other, 0.0)
        shown = ", ".join(f"{name} {right:.2f}" for name, right in told.items())
        return Found(
            (value,), f"{shown} of {task} right, best seed", "of width 64, two layers, a few hundred steps"
        )

    return measure
