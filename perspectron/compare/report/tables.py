"""Tables of a comparison: every figure is a mean over seeds, with its interval beneath it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from perspectron.compare.report.figures import measured
from perspectron.compare.report.summary import STREAMING, Row, leader
from perspectron.util.numbers import (
    NONE,
    context,
    fixed,
    grouped,
    percent,
    probability,
    rate,
    short,
    signed,
    size,
)
from perspectron.util.page import Cell, Table
from perspectron.util.stats import interval

Text = Callable[[Any], str]
Setting = tuple[tuple[str, Any], ...]


def estimate(values: Sequence[Any], text: Text = fixed, kind: str = "") -> Cell:
    """Mean over seeds and its interval; a dash where a seed has no value, for the mean of the others would flatter."""
    if not values or None in values:
        return Cell(NONE)
    span = interval(values)
    return Cell(text(statistics.fmean(values)), f"{text(span[0])} to {text(span[1])}" if span else "", kind)


def ranged(value: Any, spread: dict[str, Any] | None, text: Text) -> Cell:
    """A measurement and the range in which its repetitions lie."""
    return Cell(text(value), f"{text(spread['low'])} to {text(spread['high'])}" if spread else "")


def ranking(
    rows: Sequence[Row],
    streamed: Sequence[Row],
    reference: str,
    compressors: dict[str, Any],
    noun: str,
) -> Table:
    """Every arm by rank in windows, with both scores, then the compressors, which have a loss and nothing else.
    streamed: the rows with their scores with memory carried."""
    carried = {row.name: row for row in streamed}
    other = {row.name: row for row in rows}[reference]
    bold = [best and best.name for best in (leader(rows), leader(streamed))]
    head = [
        noun,
        "rank",
        "windows",
        f"against {other.title}",
        "streaming",
        f"streaming, against {other.title}",
    ]
    head += ["streaming, state", "parameters", "tokens", "learning rate", "training tokens/s"]
    body, place = list[list[Cell]](), 0
    for row in rows:
        place += not row.faults
        faults = "; ".join(f"seed {seed} {status}" for seed, (status, _) in row.faults.items())
        parameters, active = row.entry["parameters"], row.entry["active_parameters"]
        how = row.entry.get("streaming") or {}
        pairs = zip((row, carried[row.name]), (other, carried[reference]), bold, strict=True)
        scores = [
            (
                estimate(list(one.losses.values()), kind="best" if one.name == best else ""),
                _difference(one, to),
            )
            for one, to, best in pairs
        ]
        if how.get("why"):
            scores[1] = Cell(NONE, how["why"]), Cell(NONE, kind="quiet")
        body.append([
            Cell(row.title, faults), Cell(NONE if row.faults else str(place)),
            *scores[0], *scores[1], Cell(size(how.get("state_bytes"))),
            Cell(short(parameters, 4), f"{short(active)} active" if active != parameters else ""),
            Cell(short(row.average("tokens"))), Cell(rate(row.entry["lr"])), Cell(short(row.speed)),
        ])  # fmt: skip
    for compressor, bits in compressors.items():
        gaps = [NONE if to.mean is None else signed(bits - to.mean) for to in (other, carried[reference])]
        cells = [Cell(compressor, "compressor"), Cell("")]
        cells += [cell for gap in gaps for cell in (Cell(fixed(bits)), Cell(gap))]
        body.append([*cells, *[Cell("")] * (len(head) - len(cells))])
    return Table("Held-out bits per byte, mean over the seeds that finished; lower is better", head, body)


def _difference(row: Row, other: Row) -> Cell:
    """Paired difference to the reference; above zero is worse."""
    pair = None if row.name == other.name else row.against(other)
    if pair is None:
        return Cell(NONE, "" if row.name == other.name else "no common seed", "quiet")
    if pair.low is None or pair.p is None:
        return Cell(signed(pair.mean), "one seed, no test")
    note = f"{signed(pair.low)} to {signed(pair.high)}\n{probability(pair.p)}, {pair.n} seeds"
    return Cell(signed(pair.mean), note)


def differences(rows: Sequence[Row], noun: str, how: str) -> Table:
    """Each finished arm's loss less each other's: strong where it is lower, red where it is higher, grey where the
    interval includes zero and it stays open. Without rows if there are fewer than three arms or two seeds."""
    whole = [row for row in rows if row.mean is not None and not row.faults]
    body = [[Cell(row.title), *(_sign(row, other) for other in whole)] for row in whole]
    tested = len(whole) > 2 and all(len(row.losses) > 1 for row in whole)
    caption = (
        f"Bits per byte, {how}, of the {noun} on the left minus the one above. Bold: lower. Red: higher. "
    )
    caption += "Grey: undecided, the interval includes zero"
    return Table(caption, [noun, *(row.title for row in whole)], body if tested else [])


def _sign(row: Row, other: Row) -> Cell:
    pair = None if row is other else row.against(other)
    if pair is None or pair.low is None or pair.high is None:
        return Cell("", kind="quiet")
    kind = "best" if pair.high < 0 else "bad" if pair.low > 0 else "quiet"
    return Cell(signed(pair.mean, 2 if abs(pair.mean) >= 0.1 else 3), kind=kind)


def position(rows: Sequence[Row], noun: str) -> Table:
    """Bits per byte in each bin of places."""
    bins = {
        row.title: [{line["to"]: line for line in suite["bins"]} for suite in row.suite("position")]
        for row in rows
    }
    ends = sorted({end for suites in bins.values() for suite in suites for end in suite})
    body = [
        [
            Cell(name),
            *(estimate([suite.get(end, {}).get("bits_per_byte") for suite in suites]) for end in ends),
        ]
        for name, suites in bins.items()
        if suites
    ]
    caption = "Bits per byte by position in the context, mean over seeds"
    return Table(caption, [noun, *(f"to {context(end)}" for end in ends)], body)


def recall(rows: Sequence[Row], noun: str) -> list[Table]:
    """Accuracy in each setting of each task, and past the length of training where it was measured."""
    tasks = dict[str, dict[str, Any]]()
    for row in rows:
        for name, task in row.recall.get("tasks", {}).items():
            tasks.setdefault(name, {})[row.title] = task
    tables = [_recalled(name, designs, noun) for name, designs in tasks.items()]
    return [*tables, *filter(None, (_varied(name, designs, noun) for name, designs in tasks.items()))]


def _varied(name: str, designs: dict[str, Any], noun: str) -> Table | None:
    """Table of one task in the sizes that models read untrained; None where there are none."""
    found = {
        design: {
            which: each for setting in task["settings"] for which, each in setting.get("also", {}).items()
        }
        for design, task in designs.items()
    }
    places = list(dict.fromkeys(which for each in found.values() for which in each))
    body = [
        [Cell(design), *(estimate(each.get(which, []), percent) for which in places)]
        for design, each in found.items()
    ]
    caption = f"{name.replace('_', ' ')}: accuracy in sizes that were not trained"
    return Table(caption, [noun, *places], body) if places else None


def _recalled(name: str, designs: dict[str, Any], noun: str) -> Table:
    """Table of one task; chance in a setting is as in the last design that has it."""
    lines = {
        design: {tuple(line["sizes"].items()): line for line in task["settings"]}
        for design, task in designs.items()
    }
    every = {at: line for of_design in lines.values() for at, line in of_design.items()}
    varied, places = varied_of(list(every))
    columns = [("accuracy", at) for at in every]
    if any("beyond" in line for line in every.values()):
        columns += [("beyond", at) for at in every]
        places += [f"{place}, beyond its length" for place in places]
    body = [
        [Cell(design), *(estimate(own.get(at, {}).get(key, []), percent) for key, at in columns)]
        for design, own in lines.items()
    ]
    chance = [percent(every[at]["chance"]) if key == "accuracy" else "" for key, at in columns]
    body.append([Cell(text, kind="quiet" if text else "") for text in ("chance", *chance)])
    task = next(iter(designs.values()))
    theory = f" ({task['theory']})" if task.get("theory") else ""
    return Table(f"{name.replace('_', ' ')}: accuracy by {varied}{theory}", [noun, *places], body)


def varied_of(settings: Sequence[Setting]) -> tuple[str, list[str]]:
    """Names of the sizes that differ between settings, and the values of these sizes in each setting."""
    keys = list(dict.fromkeys(key for setting in settings for key, _ in setting))
    differ = [key for key in keys if len({str(dict(setting).get(key)) for setting in settings}) > 1]
    varied = differ or keys[:1]
    values = [[dict(setting).get(key) for key in varied] for setting in settings]
    names = ["/".join(one if isinstance(one, str) else context(one) for one in row) for row in values]
    return " / ".join(key.replace("_", " ") for key in varied) or "setting", names


def costs(rows: Sequence[Row], noun: str) -> Table:
    """Speed and memory of training, time and state of decoding at each context."""
    costs = {row.title: row.cost for row in rows if row.cost}
    times = {name: measured(cost.get("decode_ms")) for name, cost in costs.items()}
    states = {name: measured(cost.get("state_bytes")) for name, cost in costs.items()}
    contexts = sorted({at for values in (*times.values(), *states.values()) for at in values})
    head = [noun, "training tokens/s", "peak memory in training"]
    head += [f"ms per token at {context(at)}" for at in contexts] + [
        f"state at {context(at)}" for at in contexts
    ]
    body = []
    for name, cost in costs.items():
        speed, speeds = cost.get("train_tokens_per_second"), cost.get("train_tokens_per_second_spread") or {}
        spread = next((spread for spread in speeds.values() if spread["median"] == speed), None)
        ranges = cost.get("decode_ms_spread") or {}
        line = [Cell(name), ranged(speed, spread, short), Cell(size(cost.get("train_peak_bytes")))]
        line += [ranged(times[name].get(at), ranges.get(str(at)), short) for at in contexts]
        body.append([*line, *(Cell(size(states[name].get(at))) for at in contexts)])
    return Table("Cost: medians", head, body)


def calibration(rows: Sequence[Row], noun: str) -> Table:
    """Calibration errors beside those of a model whose confidences are exactly right."""
    body = []
    for row in rows:
        if suites := row.suite("calibration"):
            ece = estimate([suite["ece"] for suite in suites])
            if len(suites) == 1 and (low := suites[0]["ece_low"]) is not None:
                ece = ranged(suites[0]["ece"], {"low": low, "high": suites[0]["ece_high"]}, fixed)
            columns = [estimate([suite[name] for suite in suites]) for name in ("ece_calibrated", "brier")]
            tokens = grouped(statistics.fmean(suite["tokens"] for suite in suites))
            body.append([Cell(row.title), ece, *columns, Cell(tokens)])
    head = [noun, "ECE", "ECE if calibrated", "Brier score", "tokens"]
    return Table("Calibration, mean over seeds; lower is better", head, body)


def robustness(rows: Sequence[Row], noun: str) -> Table:
    """Loss read whole, resumed from disk, and after a harmed context."""
    suites = {row.title: suites for row in rows if (suites := row.suite("robustness"))}
    harmed = {name: [_harmed(suite) for suite in each] for name, each in suites.items()}
    harms = list(dict.fromkeys(harm for each in harmed.values() for suite in each for harm in suite))
    body = []
    for name, each in suites.items():
        equal = [suite["resumed_equal"] for suite in each]
        same = "yes" if all(equal) else f"no, in {sum(not value for value in equal)} of {len(equal)}"
        losses = [estimate([suite[k] for suite in each], lambda v: fixed(v, 4)) for k in ("whole", "resumed")]
        after = [estimate([suite.get(harm) for suite in harmed[name]]) for harm in harms]
        body.append([Cell(name), *losses, Cell(same, kind="" if all(equal) else "bad"), *after])
    caption = (
        "Nats per token, read whole and resumed; bits per byte after a damaged context; means over seeds"
    )
    return Table(caption, [noun, "read whole", "resumed from disk", "equal", *harms], body)


def _harmed(suite: dict[str, Any]) -> dict[str, Any]:
    """Bits per byte by what was done to the context."""
    harms = {"intact context": suite["bits_per_byte"], "no context": suite["no_context"]}
    harms |= {f"shuffled: {name.replace('_', ' ')}": bits for name, bits in suite["shuffled"].items()}
    harms |= {f"{percent(harm['share'], 0)} corrupted": harm["bits_per_byte"] for harm in suite["corrupted"]}
    return {name: bits for name, bits in harms.items() if bits is not None}


def rates(rows: Sequence[Row], noun: str, whole: bool = False) -> Table:
    """Loss of each learning rate and warm-up tried; none where a single one was asked for. whole: by whole ones."""
    tried = {row.title: {_rate(line): line for line in row.entry["rates"]} for row in rows}
    columns = sorted({at for lines in tried.values() for at in lines})
    body = []
    for row in rows if columns else ():
        cells = [_tried(tried[row.title].get(at), at == _rate(row.entry)) for at in columns]
        body.append([Cell(row.title), *cells])
    chosen = all(_rate(row.entry) in tried[row.title] for row in rows if tried[row.title])
    caption = (
        f"Bits per byte after a {'whole' if whole else 'short'} training, by learning rate and warm-up; the chosen one "
        f"is bold{'' if chosen else ', or lies between those tried'}"
    )
    heads = [rate(lr) + (f", {percent(warmup, 0)} warm-up" if warmup else "") for lr, warmup in columns]
    return Table(caption, [noun, *heads], body)


def _rate(line: dict[str, Any]) -> tuple[float, float]:
    """Rate and warm-up of a trial or an arm; 0 in results before there were warm-ups."""
    return line["lr"], line.get("warmup", 0.0)


def _tried(line: dict[str, Any] | None, chosen: bool) -> Cell:
    if line is None:
        return Cell("not tried", kind="quiet")
    if line["bits_per_byte"] is None:
        return Cell("no loss", line["why"], "bad")
    return Cell(fixed(line["bits_per_byte"]), kind="best" if chosen else "")


def cells(rows: Sequence[Row], noun: str) -> Table:
    """Every training of the plan, those without a loss too."""
    body = []
    for row in rows:
        for cell in row.entry["cells"]:
            fault = row.faults.get(cell["seed"])
            numbers = [
                fixed(row.losses.get(cell["seed"]), 4),
                fixed(cell.get(STREAMING), 4),
                grouped(cell["steps"]),
                grouped(cell["tokens"]),
            ]
            numbers += [short(cell["seconds"]), short(cell["tokens_per_second"]), cell["losses_sha256"][:12]]
            status = Cell(*fault, "bad") if fault else Cell("finished")
            body.append([Cell(row.title), Cell(str(cell["seed"])), status, *map(Cell, numbers)])
    head = [noun, "seed", "status", "windows", "streaming", "steps", "tokens", "seconds", "tokens/s"]
    caption = "Every training; equal digests mean equal training losses"
    return Table(caption, [*head, "losses, SHA-256"], body, (0, 2))
