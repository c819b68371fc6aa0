"""Measures read from a comparison: designs, or one design with parts removed, trained on the same tokens.

The files are results.json of `compare` and `ablate`, kept as compare.json, reference/results.json (embeddings normed,
losses alone) and ablate-DESIGN.json. A difference of losses is judged as the report judges it: by the interval of the
mean over seeds (`perspectron.util.stats`).
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from claims.claim import Evidence, Measure
from claims.measures.common import text
from claims.measures.gates import gates
from claims.results import Missing, Results, command
from perspectron import presets
from perspectron.model.model import build
from perspectron.util.errors import DataError
from perspectron.util.files import read_json
from perspectron.util.stats import LEVEL, paired

LOWER = (float("-inf"), -1e-9)
"""Of a difference: less than."""
NO_HIGHER = (float("-inf"), 0.01)
"""Bits per byte that count as none."""
MOVED = 0.01
"""By which a gate has to leave its start, and by more than its seeds differ."""
TARGETS = 4096
"""Fewer than so many, the same for all seeds, tell of those texts and not of texts."""
DISAGREE = "the seeds disagree"
Cells = dict[int, dict[str, Any]]


def scale(results: Results, file: str) -> str:
    """At what size a comparison was made."""
    plan = results.get(file)["plan"]
    size, tokens, data = plan["params"] / 1e6, plan["tokens"] / 1e6, Path(plan["data"]).name
    seeds = f"{len(plan['seeds'])} seed{'s' if len(plan['seeds']) > 1 else ''}"
    start = "" if file == "reference/results" else ", version 0.1 (superseded: embeddings of 0.02)"
    return f"at {size:.3g} M parameters and {tokens:.3g} M tokens of {data}, {seeds}{start}"


def cells(results: Results, file: str, design: str) -> Cells:
    """The cells of a design, by seed. Missing where the design is not in the file."""
    own = results.get(file)["designs"].get(design)
    if own is None:
        raise Missing(f"`{command(file)}`")
    return {cell["seed"]: cell for cell in own["cells"]}


def finished(every: Cells) -> Cells:
    return {seed: cell for seed, cell in every.items() if cell["status"] == "finished"}


def compared(
    both: dict[str, Cells],
    value: Callable[[dict[str, Any]], float | None],
    plan: dict[str, Any],
    proviso: str,
) -> Evidence:
    """The first less the second, in bits per byte, seed by seed. A design that diverged with any seed has lost; a pair
    that lacks a number shows nothing."""
    first, second = both
    lost = {name: [s for s, c in sorted(both[name].items()) if c["status"] == "diverged"] for name in both}
    told = "; ".join(
        f"{name} diverged with seed {', '.join(map(str, at))}" for name, at in lost.items() if at
    )
    if lost[first] and not lost[second]:
        return Evidence((math.inf,), told, proviso=proviso)
    if len(lost[second]) == len(plan["seeds"]) and not lost[first]:
        return Evidence((-math.inf,), told, proviso=proviso)
    values = {name: {s: value(c) for s, c in finished(own).items()} for name, own in both.items()}
    one, other = ({s: x for s, x in values[name].items() if x is not None} for name in both)
    seeds = sorted(set(one) & set(other))
    wanted = len(plan["seeds"])
    if len(seeds) < wanted or wanted < 2:
        short = f"{len(seeds)} of {wanted} seeds finished in both"
        why = short if wanted > 1 else "one seed allows no test"
        return Evidence((), "; ".join(filter(None, (told, short))), excuse=why)
    return difference(
        {first: [one[s] for s in seeds], second: [other[s] for s in seeds]}, "bits per byte", proviso
    )


def difference(values: dict[str, list[float]], unit: str, proviso: str) -> Evidence:
    """The interval of the mean of the first less the second, each a list over the same seeds."""
    gap = paired(*values.values())
    assert gap is not None
    assert gap.low is not None
    assert gap.high is not None
    means = ", ".join(f"{name} {statistics.fmean(each):.3f}" for name, each in values.items())
    interval = f"{LEVEL:.0%} interval {gap.low:+.3f} to {gap.high:+.3f} over {gap.n} seeds"
    shown = f"{means}{unit and ' ' + unit}; difference {gap.mean:+.3f}, {interval}"
    return Evidence((gap.low, gap.high), shown, proviso, unsure=f"no significant difference {proviso}")


def versus(first: str, second: str, file: str = "reference/results") -> Measure:
    """Held-out bits per byte of one design less another's."""

    def measure(results: Results) -> Evidence:
        both = {name: cells(results, file, name) for name in (first, second)}
        plan = results.get(file)["plan"]
        return compared(both, lambda cell: cell["heldout_bits_per_byte"], plan, scale(results, file))

    return measure


def beside(first: str, second: str, file: str, note: str) -> Measure:
    """`versus`, and with it, without a say in the verdict, the same with the runs of one of them in another file. note:
    how those differ. Where that file is not there, `versus` alone."""

    def measure(results: Results) -> Evidence:
        found, path = versus(first, second)(results), results.path(file)
        assert isinstance(found, Evidence)
        if not found.values or not path.is_file():
            return found
        theirs = read_json(path, DataError)
        both = {name: cells(results, "reference/results", name) for name in (first, second)}
        name = second if second in theirs["designs"] else first
        both[name] = {cell["seed"]: cell for cell in theirs["designs"][name]["cells"]}
        other = compared(both, lambda cell: cell["heldout_bits_per_byte"], theirs["plan"], "")
        return replace(found, shown=f"{found.shown}; {note} (results/{file}.json): {other.shown}")

    return measure


def without(design: str, arm: str, whole: str = "") -> Measure:
    """Held-out bits per byte of a design (or of another arm, `whole`) less those of the arm that lacks a part: below 0
    where the part helps."""
    return versus(whole or design, arm, f"ablate-{design}")


CONVERTED = (
    "in transformers of 2 M parameters, converted by 0.4 M tokens of stdlib, "
    "with windows of 256 (512 in the document)"
)


def converted(results: Results, value: Callable[[dict[str, Any], str], float]) -> dict[str, list[float]]:
    """A value of conversions to PDR 2 that keep attention in one layer of four, and of those that keep none, by seeds.
    value: of the results of the benchmark and the name of an arm."""
    found, values = results.get("convert")["results"], dict[str, list[float]]()
    for keep, shown in ((4, "windows in one of four"), (0, "none")):
        names = [
            f"perspective2, 1 in {keep}, 0.1 of the tokens, seed {seed}"
            for seed in range(len(found["teachers"]))
        ]
        if not all(name in found["arms"] and name in found["beside"] for name in names):
            raise Missing(f"`{command('convert')}`")
        values[shown] = [value(found, name) for name in names]
    return values


def kept(results: Results) -> Evidence:
    """Held-out bits per byte of conversions that keep attention in one layer of four, less those of ones without."""

    def end(found: dict[str, Any], arm: str) -> float:
        return float(found["arms"][arm]["rows"][-1]["bits_per_byte"])

    return difference(converted(results, end), "bits per byte", CONVERTED)


def over_bins(bins: Sequence[dict[str, Any]]) -> float:
    """Bits per byte over some bins of positions. Older results lack their bytes: there their tokens weigh."""
    weighed = [(b["bits_per_byte"], w) for b in bins if (w := b.get("bytes", b["tokens"]))]
    return float(sum(bits * w for bits, w in weighed) / sum(w for _, w in weighed))


def drifts(results: Results) -> Evidence:
    """The rise of bits per byte from tokens 512 to 4,095 to those after them, with attention in one layer of four less
    without. Where they do not rise without it either, there is no drift that it could correct."""

    def rise(found: dict[str, Any], arm: str) -> float:
        bins = found["beside"][arm]["position"]["converted"]["bins"]

        def mean(first: float, last: float) -> float:
            return over_bins([b for b in bins if first <= b["from"] < last])

        return mean(4096, math.inf) - mean(512, 4096)

    values = converted(results, rise)
    unit = "bits per byte more from position 4,096 on than from 512 to there"
    found = difference(values, unit, f"{CONVERTED}, the same 4 texts for all seeds")
    if statistics.fmean(values["none"]) > 0:
        return found
    return replace(
        found,
        values=(),
        excuse=f"the loss does not rise with the position without attention, either; {CONVERTED}",
    )


def at_positions(
    first: str, second: str, wanted: Callable[[Sequence[dict[str, Any]]], Iterable[dict[str, Any]]]
) -> Measure:
    """The same over some places of the context only, chosen from the bins that both designs have."""

    def over(cell: dict[str, Any], ends: set[int]) -> tuple[float | None, int]:
        """(bits per byte, of how many targets)."""
        bins = cell["suites"]["position"]["bins"]
        chosen = list(wanted([b for b in bins if b["to"] in ends]))
        tokens = sum(b["tokens"] for b in chosen)
        if any(b["bits_per_byte"] is None for b in chosen):
            return None, tokens
        return over_bins(chosen), tokens

    def measure(results: Results) -> Evidence:
        both = {name: cells(results, "compare", name) for name in (first, second)}
        every = [cell for own in both.values() for cell in finished(own).values()]
        if not every or not all("position" in cell.get("suites", {}) for cell in every):
            raise Missing(f"`{command('compare')}`")
        ends = set.intersection(*({b["to"] for b in cell["suites"]["position"]["bins"]} for cell in every))
        targets = min(over(cell, ends)[1] for cell in every)
        of = f"{targets:,} targets, the same for all seeds"
        proviso = f"{scale(results, 'compare')}; {of}"
        evidence = compared(both, lambda cell: over(cell, ends)[0], results.get("compare")["plan"], proviso)
        if targets < TARGETS and evidence.values:
            return Evidence((), evidence.shown, excuse=f"{of}, are too few")
        return evidence

    return measure


def of_gates(
    design: str,
    name: str,
    reduce: Callable[[list[Any]], Sequence[float]],
    form: str,
    start: Sequence[float] = (),
) -> Measure:
    """A measure of a gate after training: `reduce` makes of the list over layers the numbers that are compared, with
    every seed. form: the words for one of them. start: what they are before training; one that has not left it proves
    nothing."""

    def measure(results: Results) -> Evidence:
        ended = finished(cells(results, "compare", design))
        if any(cell.get("gates", {}).get(name) is None for cell in ended.values()):
            raise Missing(f"`{command('compare')}`")
        seeds, proviso = len(results.get("compare")["plan"]["seeds"]), scale(results, "compare")
        lists = [cell["gates"][name] for cell in ended.values()]
        if len(lists) < seeds or any(value is None for each in lists for value in _flat(each)):
            why = f"{len(lists)} of {seeds} seeds finished with a number"
            return Evidence((), why, excuse=why)
        rows = [tuple(reduce(each)) for each in lists]
        columns = list(zip(*rows, strict=True))
        shown = ", ".join(span(column, form) for column in columns)
        if start and not any(_left(column, at) for column, at in zip(columns, start, strict=True)):
            at = ", ".join(form.format(value) for value in dict.fromkeys(start))
            return Evidence((), f"{shown}; {at} at the start", excuse=f"as at the start, {proviso}")
        if start:
            shown += "; " + ", ".join(form.format(value) for value in dict.fromkeys(start)) + " at the start"
        values = tuple(value for row in rows for value in row)
        return Evidence(values, shown, proviso, unsure=DISAGREE, each=len(rows[0]))

    return measure


def span(values: Sequence[float], form: str) -> str:
    """Least to greatest over seeds."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _left(values: Sequence[float], start: float) -> bool:
    """Whether a number over seeds is further from its start than its seeds are from each other."""
    away = min(abs(value - start) for value in values)
    return away > max(MOVED, max(values) - min(values)) and len({value > start for value in values}) == 1


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@cache
def _untrained(design: str, params: int, vocab_size: int, seq_len: int) -> dict[str, list[Any]]:
    config = presets.solve(design, params, vocab_size=vocab_size, seq_len=seq_len)
    # The comparison that the rows read was of models whose embeddings were not normed.
    return gates(build(replace(config, embedding_norm=False)).eval(), text())


def grown(design: str, name: str, reduce: Callable[[list[Any]], float], form: str) -> Measure:
    """A gate's number after training less that of the same model before, on random text."""

    def measure(results: Results) -> Evidence:
        whole = of_gates(design, name, lambda each: [reduce(each)], form)(results)
        assert isinstance(whole, Evidence)
        plan = results.get("compare")["plan"]
        if not whole.values:
            return whole
        if len(whole.values) < 2:
            return Evidence((), whole.shown, excuse="one seed allows no test")
        before = reduce(_untrained(design, int(plan["params"]), plan["vocab_size"], plan["seq_len"])[name])
        values = {"trained": list(whole.values), "untrained": [before] * len(whole.values)}
        return difference(values, "", whole.proviso)

    return measure


def recall(arm: str, other: str = "") -> Measure:
    """Accuracy of small models trained to recall, by seed (less another's), of `benchmarks/recall.py`."""

    def measure(results: Results) -> Evidence:
        kept = results.get("recall")
        arms = kept["results"].get("arms", {})
        if not all(name in arms for name in (arm, other) if name):
            raise Missing(f"`{command('recall')}`")
        asked = {name: arms[name] for name in (arm, other) if name}
        values = {name: each["accuracy"] for name, each in asked.items()}
        if any(value is None for each in values.values() for value in each):
            return Evidence((), "no number", excuse="a seed has no accuracy")
        shown = "; ".join(f"{name} {span(each, '{:.3f}')}" for name, each in values.items())
        shown += f" of {task(asked[arm])} right"
        proviso = _small(kept, asked[arm])
        if not other:
            return Evidence(tuple(values[arm]), shown, proviso, unsure=DISAGREE)
        solved = kept["results"]["solved"]
        if all(value >= solved for each in values.values() for value in each):
            why = f"both solve it (≥ {solved:g}), so it tells nothing apart"
            return Evidence((0.0,), f"{shown}: both ≥ {solved:g}", proviso, excuse=f"{why}, {proviso}")
        if len({len(each) for each in values.values()}) > 1 or len(values[arm]) < 2:
            return Evidence((), shown, excuse="fewer than two seeds of both")
        return difference(values, f"of {task(asked[arm])} right", proviso)

    return measure


def task(arm: dict[str, Any]) -> str:
    """The task of a recall result, with its sizes."""
    pairs = f" of {arm['pairs']} pairs" if "pairs" in arm else ""
    return f"{arm['task']}{pairs} in {arm['length']} tokens"


def _small(kept: dict[str, Any], arm: dict[str, Any]) -> str:
    shapes = re.search(r"d_model=(\d+), layers=(\d+)", kept.get("conditions", {}).get("shapes", ""))
    size = f"width {shapes[1]}, {shapes[2]} layers, " if shapes else ""
    return f"for models of {size}{len(arm['accuracy'])} seeds"
