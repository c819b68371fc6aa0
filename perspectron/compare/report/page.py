"""Page of a comparison: measured figures of every design, with intervals.

Whether a claim holds is not said here; `python -m claims` judges it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perspectron.compare.report import figures, tables
from perspectron.compare.report.summary import STREAMING, Row, leader, ranked, without
from perspectron.presets import title
from perspectron.util.errors import ConfigError
from perspectron.util.numbers import context, fixed, grouped, short
from perspectron.util.page import Table, page_template
from perspectron.util.stats import LEVEL, interval

VERSION = 1
"""Version of results.json."""
CONDITIONS = {
    "machine": "machine", "jobs": "parallel trainings", "threads": "threads per training", "dtype": "number format",
    "torch": "torch", "commit": "commit", "started": "started",
}  # fmt: skip
MATCHES = {
    "tokens": "equal parameters and tokens",
    "flops": "equal parameters and training FLOPs",
    "time": "equal parameters and training time",
    "state": "equal parameters, tokens and bytes of state",
}
ALLOWS = {"flops": "as many as equal FLOPs allow", "time": "as many as equal time allows"}


@dataclass(frozen=True)
class Section:
    """Part of the page. facts: names and values. code: a command. folded: opened by a click."""

    slug: str
    title: str
    note: str = ""
    figures: Sequence[str] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, str]] = ()
    code: str = ""
    folded: bool = False


def html(results: dict[str, Any]) -> str:
    """The page: no script, nothing fetched, light or dark as the reader's system is, and printable.

    ConfigError for what is not the results of a comparison.
    """
    parts = ("plan", "conditions", "designs")
    whole = isinstance(results, dict) and results.get("version") == VERSION and all(map(results.get, parts))
    if not whole:
        raise ConfigError(
            f"the results are not those of `compare` or `ablate` in version {VERSION}; use their results.json"
        )
    plan, rows, noun = results["plan"], ranked(results), _noun(results)
    streamed = ranked(results, STREAMING)
    heading = (
        f"Comparison of {len(rows)} {noun}{'s' * (len(rows) != 1)} at {short(plan['params'])} parameters"
    )
    return rendered(heading, _lede(plan, rows, streamed, noun), sections(results))


def rendered(title: str, lede: str, sections: Sequence[Section]) -> str:
    """A page of such sections."""
    page = page_template("perspectron.compare.report", "page.html.j2")
    return page.render(title=title, lede=lede, sections=sections)


def sections(results: dict[str, Any]) -> list[Section]:
    """Everything that was measured; a suite that was not run has no section."""
    plan, rows, noun = results["plan"], ranked(results), _noun(results)
    style = figures.styles(list(results["designs"]), plan["reference"])
    apart = results.get("parts", 1) > 1 or "; " in str(results["conditions"].get("started"))  # of before
    parts = [
        _ranking(rows, results, noun, style),
        Section("loss", "Loss", _loss_note(plan), figures.losses(rows, style, apart)),
        _suite("position", "Loss by position in the context", rows, [], [tables.position(rows, noun)]),
        _suite("recall", "Recall", rows, [], tables.recall(rows, noun), _recall_note(rows)),
        _suite("cost", "Cost", rows, figures.cost(rows, style), [tables.costs(rows, noun)],
               _cost_note(rows, apart)),
        _suite("calibration", "Calibration", rows, [], [tables.calibration(rows, noun)],
               "With one seed, the interval comes from bootstrapping windows of text."),
        _suite("robustness", "Robustness", rows, [], [tables.robustness(rows, noun)]),
        Section("trainings", "Trainings", "", (),
                [tables.rates(rows, noun, plan.get("rate_share") == 1), tables.cells(rows, noun)]),
        _conditions(plan, results["conditions"]),
    ]  # fmt: skip
    parts = [replace(part, tables=[table for table in part.tables if table.rows]) for part in parts]
    return [part for part in parts if part.figures or part.tables or part.facts]


def _noun(results: dict[str, Any]) -> str:
    return "arm" if results.get("kind") == "ablations" else "design"


def _lede(plan: dict[str, Any], rows: Sequence[Row], streamed: Sequence[Row], noun: str) -> str:
    others = (
        f" ({title(plan['reference'])}; the others {ALLOWS[plan['match']]})"
        if plan["match"] in ALLOWS
        else ""
    )
    seeds = len(plan["seeds"])
    text = f"Trained on {short(plan['tokens'])} tokens of {plan['data']}{others}, {seeds} seed{'s' * (seeds != 1)}, at "
    carried = f"With memory carried, {winner(streamed, noun)} " if leader(streamed) else ""
    return f"{winner(rows, noun)} {carried}{text}{MATCHES[plan['match']]}."


def winner(rows: Sequence[Row], noun: str) -> str:
    """The design with the lowest loss, by how much, and the others that cannot be told from it."""
    best = leader(rows)
    if best is None or best.mean is None:
        return f"No {noun} has finished all of its seeds."
    text = f"{best.title} has the lowest held-out loss, {fixed(best.mean)} bits per byte"
    span = interval(list(best.losses.values()))
    text += f" ({fixed(span[0])} to {fixed(span[1])})" if span else ""
    others = [(row, row.against(best)) for row in rows if row is not best and not row.faults]
    pairs = [(row, pair) for row, pair in others if pair is not None]
    left = without((row.title, row.why_left_out) for row in rows if row.faults)
    if not pairs:
        return f"{text}{left}."
    row, pair = pairs[0]
    text += f", {fixed(pair.mean)} below {row.title}"
    if pair.low is None or pair.high is None:
        return f"{text}{left}. With one seed there is no interval: a small difference may be chance."
    text += f" ({fixed(pair.low)} to {fixed(pair.high)})"
    open_ = [row.title for row, pair in pairs if pair.low is not None and pair.low <= 0]
    if not open_ and len(pairs) == 1:
        return f"{text}{left}."
    if not open_:
        return f"{text}, and below all others, with intervals that exclude zero{left}."
    return f"{text}{left}. These seeds do not separate it from {', '.join(open_)}."


def _conditions(plan: dict[str, Any], conditions: dict[str, Any]) -> Section:
    heldout = f"{grouped(plan.get('heldout_tokens'))} tokens, {grouped(plan.get('heldout_bytes'))} bytes"
    facts = [
        ("text", str(plan["data"])),
        ("training tokens available", grouped(plan.get("train_tokens"))),
        ("held out", heldout),
        ("vocabulary", grouped(plan.get("vocab_size"))),
        ("context in training", f"{grouped(plan.get('seq_len'))} tokens"),
        ("batch", f"{grouped(plan.get('batch_size'))} windows"),
        ("seeds", ", ".join(map(str, plan["seeds"]))),
        ("matched", MATCHES[plan["match"]]),
    ]
    facts += [
        (name, str(conditions[key])) for key, name in CONDITIONS.items() if conditions.get(key) is not None
    ]
    return Section(
        "conditions", "Conditions", facts=facts, code=str(conditions.get("command", "")), folded=True
    )


def _ranking(rows: Sequence[Row], results: dict[str, Any], noun: str, style: figures.Styles) -> Section:
    plan, packed, streamed = results["plan"], results.get("compressors", {}), ranked(results, STREAMING)
    note = (
        f"{_scores(plan)} {noun.capitalize()}s with a diverged or missing seed rank last, without a number. "
    )
    if len(plan["seeds"]) == 1:
        note += "One seed gives no interval, and a small difference may be chance."
    else:
        note += (
            f"Intervals are {LEVEL:.0%} (Student's t over seeds). Differences are paired by seed, with the p value "
            "of a paired t test; both assume normal differences, and there is no correction for multiple "
            "comparisons. Seeds vary only the training; they say nothing about other texts or sizes."
        )
    both = (rows, "windows"), (streamed, "streaming")
    drawn = [svg for scored, how in both for svg in figures.ranking(scored, style, packed, how)]
    listed = [tables.differences(scored, noun, how) for scored, how in both]
    table = tables.ranking(rows, streamed, plan["reference"], packed, noun)
    return Section("ranking", "Ranking", note, drawn, [table, *listed])


def _scores(plan: dict[str, Any]) -> str:
    """A note on the two scores, and on the third that compressors have."""
    window, before = grouped(plan.get("seq_len")), plan.get("context") or {}
    means = {how: f", {grouped(tokens)} tokens before a target on average" for how, tokens in before.items()}
    return (
        f"Windows: separate windows of {window} tokens, each from an empty state{means.get('windows', '')}. "
        f"Streaming: memory carried through each document from its start{means.get('streaming', '')}, attention to the "
        f"last {window} tokens, and the bytes of that state. Primed compressors read the training text first."
    )


def _loss_note(plan: dict[str, Any]) -> str:
    note = "Mean over the seeds that finished; band: lowest to highest seed. "
    note += f"Each curve starts at {figures.START:.0%} of its training. "
    if plan.get("curve_on") == "dev":
        note += f"Curves are measured on {grouped(plan['curve_tokens'])} dev tokens, not on held-out text."
    elif plan["curve_tokens"] < plan["heldout_tokens"]:
        note += (
            f"Curves are measured on {grouped(plan['curve_tokens'])} held-out tokens; the ranking uses all."
        )
    return note


def _recall_note(rows: Sequence[Row]) -> str:
    options: dict[str, Any] = next((row.recall["options"] for row in rows if "options" in row.recall), {})
    size = f"{options.get('layers')} layers of width {options.get('d_model')}"
    how = f"trained from scratch on each task; profile {options.get('profile')}"
    return f"Models of {size} (or as their names say), {how}."


def _cost_note(rows: Sequence[Row], apart: bool) -> str:
    """A note on times at long contexts and on what was not measured. apart: the rows are of several comparisons."""
    notes = [f"{row.title}: {how}." for row in rows if (how := row.cost.get("positions"))]
    for row in rows:
        for what, why in (row.cost.get("skipped") or {}).items():
            at = f"at {context(int(what))}" if what.isdigit() else what
            notes.append(f"{row.title}, {at}: not measured, {why}.")
    how = "All designs were interleaved in one run."
    if apart:
        how = "Of several comparisons: each was interleaved by itself, so times of two need not compare."
    return " ".join([how, "Small figures: range of the measurements.", *notes])


def _suite(
    slug: str,
    title: str,
    rows: Sequence[Row],
    drawn: Sequence[str],
    listed: Sequence[Table],
    note: str = "",
) -> Section:
    """Section of one suite, which names those that lack it."""
    lacking = [row.title for row in rows if not (row.entry.get("suites", {}).get(slug) or row.suite(slug))]
    missing = f"Not measured: {', '.join(lacking)}." if lacking else ""
    return Section(slug, title, " ".join(filter(None, (note, missing))), drawn, listed)
