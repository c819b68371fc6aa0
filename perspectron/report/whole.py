"""The report of a comparison, from its results: one HTML page that needs nothing else, and Markdown.

Both are functions of the results alone, so that the same results give the same bytes.
"""

from collections.abc import Sequence
from typing import Any

from perspectron.report import figures, marked, numbers, page, tables
from perspectron.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Figure,
    Gallery,
    Points,
    Section,
    Table,
    Text,
)
from perspectron.report.numbers import fixed, grouped, known, short
from perspectron.report.significance import LEVEL
from perspectron.report.summary import Row, leader, lower, ranked, reference
from perspectron.report.verdicts import Field, Finding, findings, listed, skipped, versus

WORDS = {"failed": "Did not hold. ", "held": "Held. ", "open": "Open. ", "cost": "Cost. "}
CONDITIONS = (
    ("machine", "machine"),
    ("jobs", "trainings at once"),
    ("threads", "threads each"),
    ("dtype", "number format"),
    ("torch", "torch"),
    ("commit", "commit"),
    ("started", "started"),
)
MATCHES = {
    "tokens": "equal parameters and tokens",
    "flops": "equal parameters and training FLOPs",
    "time": "equal parameters and training time",
}
ALLOWS = {"flops": "what as many FLOPs allow", "time": "what as much time allows"}  # as the reference spends


def html(results: dict[str, Any]) -> str:
    """A self-contained page: no script, nothing fetched, light or dark as the reader's system is."""
    return page.write(_document(results))


def markdown(results: dict[str, Any]) -> str:
    """The same without the charts, whose numbers stand in tables."""
    return marked.write(_document(results))


def _document(results: dict[str, Any]) -> Document:
    plan, rows, other = results["plan"], ranked(results), reference(results)
    style = figures.styles(list(results["designs"]), other)
    field = Field(rows, other, results.get("compressors", {}))
    found = {row.name: findings(row, field) for row in rows}
    noun = _noun(results)
    count = f"{len(rows)} {noun}{'' if len(rows) == 1 else 's'}"
    title = f"Comparison of {count} at {short(plan['params'])} parameters"
    seeds = len(plan["seeds"])
    lede = f"Trained on {_tokens(plan, other)}, {numbers.seeds([seeds])}, at "
    lede += f"{MATCHES[plan['match']]}; held-out loss in bits per byte."
    sections = [
        Section("short", "In short", [Points(_short(field, found, seeds, noun))]),
        Section("conditions", "Conditions", _conditions(results)),
        Section("ranking", "Ranking", _ranking(field, style, plan, noun)),
        Section("loss", "Loss", _losses(rows, style, plan)),
        Section("position", "Loss by place in the context", _position(rows, style, plan)),
        Section("recall", "Recall", _recall(rows, style)),
        Section("cost", "Cost", _cost(rows, style, noun)),
        Section("calibration", "Calibration", _calibration(rows, style, noun)),
        Section("robustness", "Robustness", _table(tables.robustness(rows, noun), "Robustness")),
        Section("each", f"Each {noun}", [block for row in rows for block in _each(row, found[row.name])]),
        Section("trainings", "Trainings", _trainings(rows, noun)),
    ]
    return Document(title, lede, sections)


def _tokens(plan: dict[str, Any], other: str) -> str:
    """What each was trained on."""
    text = f"{short(plan['tokens'])} tokens of {plan['data']}"
    return f"{text} ({other}; the others on {ALLOWS[plan['match']]})" if plan["match"] in ALLOWS else text


def _noun(results: dict[str, Any]) -> str:
    return "arm" if results.get("kind") == "ablations" else "design"


def _short(field: Field, found: dict[str, list[Finding]], seeds: int, noun: str) -> list[str]:
    """What a reader has to know first, failures before successes."""
    rows, items = field.rows, list[str]()
    items += _faults(rows)
    other = field.row(field.reference)
    if all(row.mean is None for row in rows):
        return [*items, "No training has finished, so nothing is compared."]
    for kind, verb in (("failed", "does not support"), ("held", "supports"), ("open", "leaves open")):
        names = [
            name for name, lines in found.items() if any(line.claim and line.kind == kind for line in lines)
        ]
        if names:
            items.append(f"This run {verb} the claim of {', '.join(names)} (reasons below).")
    if other is not None and other.mean is not None:
        items += _sides(rows, other)
    items.append(_lowest(rows, noun))
    least = min(row.mean for row in rows if row.mean is not None)
    worse = [f"{name} ({fixed(bits)})" for name, bits in field.compressors.items() if _below(bits, least)]
    if worse:
        items.append(f"No {noun} compresses the held-out text better than {' or '.join(worse)}.")
    if seeds == 1:
        items.append("One seed: there is no spread and no test, and a small difference may be chance.")
    return items


def _faults(rows: Sequence[Row]) -> list[str]:
    """A line for each thing that befell the same seeds of one or more designs, and what follows."""
    groups = dict[tuple[str, tuple[int, ...]], list[str]]()
    for row in rows:
        for status in dict.fromkeys(fault.status for fault in row.faults):
            seeds = tuple(fault.seed for fault in row.faults if fault.status == status)
            groups.setdefault((status, seeds), []).append(row.name)
    items = []
    for (status, seeds), names in groups.items():
        word, verb = ("Seed", "is") if len(seeds) == 1 else ("Seeds", "are")
        befell = "diverged in" if status == "diverged" else f"{verb} {status} of"
        items.append(f"{word} {listed([str(seed) for seed in seeds])} {befell}: {', '.join(names)}.")
    if items and leader(rows) is not None:
        items[-1] += " Who lacks a seed stands behind the complete ones, whatever the mean."
    return items


def _lowest(rows: Sequence[Row], noun: str) -> str:
    """Who leads, and who would if seeds were not missing."""
    best = leader(rows)
    if best is None:
        means = [(row.mean, row) for row in rows if row.mean is not None]
        mean, row = min(means, key=lambda pair: pair[0])
        return f"No {noun} is complete. Lowest mean so far: {row.name}, {fixed(mean)} bits per byte, {row.count}."
    which = " of the complete ones" if any(row.faults for row in rows) else ""
    text = f"Lowest mean{which}: {best.name}, {fixed(best.mean)} bits per byte."
    below = [f"{row.name}, {fixed(row.mean)}, {row.count}" for row in lower(rows, best)]
    return f"{text} Lower, but incomplete: {'; '.join(below)}." if below else text


def _below(bits: Any, mean: float) -> bool:
    number = known(bits)
    return number is not None and number <= mean


def _sides(rows: Sequence[Row], other: Row) -> list[str]:
    """Who surely loses to the reference, is not told apart from it, and surely beats it."""
    sides: dict[str, list[str]] = {"failed": [], "open": [], "held": []}
    for row in rows:
        pair = row.against(other)
        if row.name != other.name and pair is not None and pair.n > 1:
            sides[versus(row, other).kind].append(row.name)
    words = {"failed": "Worse than", "open": "Not told apart from", "held": "Better than"}
    return [f"{words[kind]} {other.name}: {', '.join(names)}." for kind, names in sides.items() if names]


def _conditions(results: dict[str, Any]) -> list[Block]:
    plan, conditions = results["plan"], results["conditions"]
    pairs = [
        ("text", str(plan["data"])),
        ("training tokens there are", grouped(plan.get("train_tokens"))),
        (
            "held out",
            f"{grouped(plan.get('heldout_tokens'))} tokens, {grouped(plan.get('heldout_bytes'))} bytes",
        ),
        ("vocabulary", grouped(plan.get("vocab_size"))),
        ("context in training", f"{grouped(plan.get('seq_len'))} tokens"),
        ("batch", f"{grouped(plan.get('batch_size'))} texts"),
        ("seeds", ", ".join(map(str, plan["seeds"]))),
        ("matched", MATCHES[plan["match"]]),
    ]
    pairs += [
        (name, str(conditions[field])) for field, name in CONDITIONS if conditions.get(field) is not None
    ]
    return [Facts(pairs), Code(str(conditions.get("command", "")))]


def _ranking(field: Field, style: figures.Styles, plan: dict[str, Any], noun: str) -> list[Block]:
    table = tables.ranking(field.rows, style, field.reference, field.compressors, noun)
    assumed = _assumptions(len(field.rows) - 1, len(plan["seeds"]), plan["match"])
    return [table, Text([assumed], "quiet"), *_repeated(field.rows)]


def _assumptions(comparisons: int, seeds: int, match: str) -> str:
    text = "Complete ones first, by mean; without a rank, those with a seed that diverged or is missing. "
    if seeds == 1:
        return text + "With one seed there is no spread and no test of any difference."
    by_chance = fixed((1 - LEVEL) * comparisons, 2)
    read = f", of which each reads {ALLOWS[match]}" if match in ALLOWS else ""
    return text + (
        f"Differences are paired: both sides have the same seed and the same batches in the same order{read}. "
        "Beneath each "
        f"is its {LEVEL:.0%} interval and the p value of a paired t test, which assume that the differences over seeds "
        f"are normal; {seeds} seeds cannot show whether they are. Without that assumption, by the signs of {seeds} "
        f"differences alone, no p below {2.0 ** (1 - seeds):.2g} can be reached, however large they are. Nothing is "
        f"corrected for the number of comparisons: of {comparisons} true zeros, {by_chance} would be called sure by "
        "chance. The best is chosen by the same numbers, so differences to it look a little larger than they are. "
        "Seeds are of the training; another text or another size is not covered by them. Learning rates were chosen by "
        "held-out text that is part of what ranks, the same for all."
    )


def _losses(rows: Sequence[Row], style: figures.Styles, plan: dict[str, Any]) -> list[Block]:
    drawn = figures.losses(rows, style)
    if not drawn:
        return [_absent("No training has a curve")]
    said = "Thick: mean over the seeds that finished. Thin: each seed. A cross: where a seed diverged. "
    said += f"Drawn from {figures.START:.0%} of each training on. "
    if plan["curve_tokens"] < plan["heldout_tokens"]:
        said += f"On the way the first {grouped(plan['curve_tokens'])} held-out tokens are read; the ranking is of all."
    return [Text([said], "quiet"), _gallery(drawn, rows, style)]


def _position(rows: Sequence[Row], style: figures.Styles, plan: dict[str, Any]) -> list[Block]:
    drawn = figures.position(rows, style, plan["seq_len"])
    if drawn is None:
        return [_absent("Loss by position")]
    measured = [row for row in rows if row.suite("position")]
    return [_gallery([drawn], measured, style), *_lacking(rows, measured)]


def _recall(rows: Sequence[Row], style: figures.Styles) -> list[Block]:
    drawn = figures.recall(rows, style)
    if not drawn:
        return [_absent("Recall")]
    measured = [row for row in rows if row.recall]
    said = f"{_small(measured)}, trained from scratch on each task. {_profile(measured)}Dotted: chance. "
    said += "Past its length, in the numbers: of the answers in the last half of texts twice as long as in training."
    return [Text([said], "quiet"), _gallery(drawn, measured, style), *_lacking(rows, measured)]


def _small(rows: Sequence[Row]) -> str:
    """What recall is measured of."""
    options = [row.recall.get("options", {}) for row in rows]
    sizes = {(given.get("layers"), given.get("d_model")) for given in options}
    layers, width = sizes.pop()
    if sizes or layers is None:
        return "Small models of each design"
    return f"Small models of each design, {layers} layers of width {width}"


def _profile(rows: Sequence[Row]) -> str:
    """Which tasks were asked, of how many seeds."""
    names = sorted({str(name) for row in rows if (name := row.recall.get("options", {}).get("profile"))})
    tasks = [task for row in rows for task in row.recall["tasks"].values()]
    count = numbers.seeds(len(setting["accuracy"]) for task in tasks for setting in task["settings"])
    if not names:
        return f"With {count} of each. "
    left = " (fewer tasks and seeds than full)" if names == ["quick"] else ""
    return f"Profile {listed(names)}{left}, {count} of each. "


def _cost(rows: Sequence[Row], style: figures.Styles, noun: str) -> list[Block]:
    table = tables.costs(rows, noun)
    if table is None:
        return [_absent("Cost against context")]
    measured = [row for row in rows if row.cost]
    return [
        _gallery(figures.cost(rows, style), measured, style),
        table,
        *_repeated(rows),
        *_skipped(rows),
        *_lacking(rows, measured),
    ]


def _repeated(rows: Sequence[Row]) -> list[Block]:
    """Whose numbers at long contexts are of a table of positions that the trained model does not have."""
    whose = dict[str, list[str]]()
    for row in rows:
        if how := row.cost.get("positions"):
            whose.setdefault(str(how), []).append(row.name)
    said = [
        f"{listed(names)}: {how}; as trained, nothing past it can be read." for how, names in whose.items()
    ]
    return [Text([" ".join(said)], "quiet")] if said else []


def _skipped(rows: Sequence[Row]) -> list[Block]:
    lines = [f"Not measured, {row.name}, {what}: {why}." for row in rows for what, why in skipped(row)]
    return [Points(lines)] if lines else []


def _calibration(rows: Sequence[Row], style: figures.Styles, noun: str) -> list[Block]:
    table = tables.calibration(rows, noun)
    if table is None:
        return [_absent("Calibration")]
    measured = [row for row in rows if row.suite("calibration")]
    said = (
        "Accuracy of the likeliest token against its probability. On the dotted line they agree; below it, "
    )
    said += "the model is too sure. A bubble's area is its share of the tokens."
    return [
        table,
        Text([said], "quiet"),
        Gallery(figures.reliability(rows, style), small=True),
        *_lacking(rows, measured),
    ]


def _each(row: Row, found: Sequence[Finding]) -> list[Block]:
    about = str(row.entry.get("about") or "").rstrip(".")
    source = f" ({row.entry['source']})" if row.entry.get("source") else ""
    parts = ["", row.name, f": {about}{source}. " if about else f"{source}. "]
    for kind, word in WORDS.items():
        said = " ".join(finding.text for finding in found if finding.kind == kind)
        if said:
            parts += [word, said + " "]
    return [Text(parts)]


def _trainings(rows: Sequence[Row], noun: str) -> list[Block]:
    rates, terms = tables.rates(rows, noun), tables.terms(rows, noun)
    chosen: Block = (
        rates if rates is not None else Text(["One learning rate was given, none was searched."], "quiet")
    )
    return [chosen, tables.cells(rows, noun), *([terms] if terms is not None else [])]


def _gallery(drawn: Sequence[Figure], rows: Sequence[Row], style: figures.Styles) -> Gallery:
    return Gallery(drawn, [(style[row.name], row.name) for row in rows])


def _table(table: Table | None, what: str) -> list[Block]:
    return [table] if table is not None else [_absent(what)]


def _absent(what: str) -> Text:
    return Text([f"{what}: not measured in this run."], "quiet")


def _lacking(rows: Sequence[Row], measured: Sequence[Row]) -> list[Block]:
    names = [row.name for row in rows if row not in measured]
    return [Text([f"Not measured: {', '.join(names)}."], "quiet")] if names else []
