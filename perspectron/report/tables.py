"""The tables of a comparison."""

import math
from collections.abc import Sequence
from typing import Any

from perspectron.report.document import Cell, Table
from perspectron.report.figures import Styles, averaged, measured
from perspectron.report.numbers import (
    NONE,
    context,
    fixed,
    grouped,
    known,
    percent,
    probability,
    rate,
    short,
    signed,
    size,
)
from perspectron.report.significance import Paired
from perspectron.report.summary import Row, leader
from perspectron.report.verdicts import states


def ranking(
    rows: Sequence[Row], style: Styles, reference: str, compressors: dict[str, Any], noun: str
) -> Table:
    """Every arm by rank, then the compressors, which have a loss and nothing else."""
    best, whole = leader(rows), not any(row.faults for row in rows)
    title = "the best" if whole else "the best complete one"
    others = [(title, best)] if best is not None and best.name != reference else []
    others.append((reference, next(row for row in rows if row.name == reference)))
    ends = _ends(rows)
    head = [noun, "rank", "bits per byte", "spread over seeds", *(f"against {name}" for name, _ in others)]
    head += ["parameters", "tokens", "learning rate", "training tokens/s"]
    head += [f"state at {context(end)}" for end in ends]
    body, place = list[list[Cell]](), 0
    for row in rows:
        place += not row.faults
        name = Cell(row.name, _fault_note(row), style=style[row.name])
        mean = Cell(fixed(row.mean), row.count if row.faults and row.losses else "", _kind(row, best))
        body.append([name, Cell(str(place) if not row.faults else NONE), mean, _spread(row)])
        body[-1] += [*(_difference(row, other) for _, other in others), *_sizes(row, ends)]
    for compressor, bits in compressors.items():
        gaps = [Cell(_gap(bits, other.mean if other is not None else None)) for _, other in others]
        blank = [Cell("")] * (len(head) - 4 - len(gaps))
        body.append([Cell(compressor, "compressor"), Cell(""), Cell(fixed(bits)), Cell(""), *gaps, *blank])
    return Table("Held-out bits per byte, mean over the seeds that finished; lower is better", head, body)


def _sizes(row: Row, ends: Sequence[int]) -> list[Cell]:
    parameters, active = known(row.entry.get("parameters")), known(row.entry.get("active_parameters"))
    note = f"{short(active)} active" if active is not None and active != parameters else ""
    cells = [
        Cell(short(parameters, 4), note),
        Cell(short(row.average("tokens"))),
        Cell(rate(row.entry.get("lr"))),
    ]
    cells.append(Cell(short(row.speed)))
    values = states(row)
    return [*cells, *(Cell(size(values.get(end))) for end in ends)]


def _ends(rows: Sequence[Row]) -> list[int]:
    """The shortest and the longest context of which states are known."""
    contexts = {at for row in rows for at in states(row)}
    return sorted({min(contexts), max(contexts)}) if contexts else []


def _fault_note(row: Row) -> str:
    return "; ".join(f"seed {fault.seed} {fault.status}" for fault in row.faults)


def _kind(row: Row, best: Row | None) -> str:
    return "best" if best is not None and row.name == best.name else ""


def _spread(row: Row) -> Cell:
    spread, deviation = row.spread, row.deviation
    if spread is None or deviation is None:
        return Cell(NONE, "one seed" if row.losses else "")
    return Cell(f"{fixed(spread[0])} to {fixed(spread[1])}", f"s.d. {fixed(deviation, 4)}")


def _difference(row: Row, other: Row | None) -> Cell:
    if other is None or other.name == row.name:
        return Cell(NONE, kind="quiet")
    pair = row.against(other)
    return Cell(NONE, "no seed in common") if pair is None else Cell(signed(pair.mean), _sureness(pair))


def _sureness(pair: Paired) -> str:
    if pair.low is None:
        return "no test"
    return f"{signed(pair.low)} to {signed(pair.high)}\n{probability(pair.p)}, {pair.n} seeds"


def _gap(bits: Any, mean: float | None) -> str:
    number = known(bits)
    return NONE if number is None or mean is None else signed(number - mean)


def cells(rows: Sequence[Row], noun: str) -> Table:
    """Every training of the plan, those without a loss too."""
    body = []
    for row in rows:
        by_seed = {cell["seed"]: cell for cell in row.cells}
        faults = {fault.seed: fault for fault in row.faults}
        for seed in sorted({*by_seed, *faults}):
            cell, fault = by_seed.get(seed, {}), faults.get(seed)
            status = Cell(
                fault.status if fault else "finished", fault.why if fault else "", "bad" if fault else ""
            )
            digest = str(cell.get("losses_sha256") or NONE)[:12]
            numbers = [
                fixed(row.losses.get(seed), 4),
                grouped(cell.get("steps")),
                grouped(cell.get("tokens")),
            ]
            numbers += [short(cell.get("seconds")), short(cell.get("tokens_per_second")), digest]
            body.append([Cell(row.name), Cell(str(seed)), status, *map(Cell, numbers)])
    head = [noun, "seed", "status", "held-out bits per byte", "steps", "tokens", "seconds", "tokens/s"]
    head.append("losses, SHA-256")
    return Table(
        "Every training; the digest is of its training losses, equal for equal ones", head, body, (0, 2)
    )


def rates(rows: Sequence[Row], noun: str) -> Table | None:
    """Held-out bits per byte of each learning rate tried; the chosen one is strong."""
    tried = sorted(
        {lr for row in rows for line in row.entry.get("rates", []) if (lr := known(line["lr"])) is not None}
    )
    if not tried:
        return None
    body = []
    for row in rows:
        lines = {known(line["lr"]): line for line in row.entry.get("rates", [])}
        body.append(
            [Cell(row.name), *(_tried(lines.get(lr), lr == known(row.entry.get("lr"))) for lr in tried)]
        )
    return Table(
        "Held-out bits per byte after a short training; the chosen rate is strong",
        [noun, *map(rate, tried)],
        body,
    )


def _tried(line: dict[str, Any] | None, chosen: bool) -> Cell:
    if line is None:
        return Cell("not tried", kind="quiet")
    bits = known(line.get("heldout_bits_per_byte"))
    if bits is None:
        return Cell("no loss", str(line.get("why") or ""), "bad")
    return Cell(fixed(bits), kind="chosen" if chosen else "")


def calibration(rows: Sequence[Row], noun: str) -> Table | None:
    body = []
    for row in rows:
        suites = row.suite("calibration")
        if suites:
            ece, brier = _mean(suites, "ece"), _mean(suites, "brier")
            bounds = [(suite.get("ece_low"), suite.get("ece_high")) for suite in suites]
            spans = ", ".join(
                NONE if known(low) is None or known(high) is None else f"{fixed(low)} to {fixed(high)}"
                for low, high in bounds
            )
            body.append([Cell(row.name), Cell(fixed(ece)), Cell(spans), Cell(fixed(brier))])
            body[-1].append(Cell(grouped(_mean(suites, "tokens"))))
    head = [noun, "ECE", "its interval, seed by seed", "Brier score", "tokens"]
    return Table("Calibration, mean over seeds; less is better", head, body) if body else None


def robustness(rows: Sequence[Row], noun: str) -> Table | None:
    """The loss read whole, resumed from disk, and after a harmed context, means over seeds."""
    measured_rows = [(row, suites) for row in rows if (suites := row.suite("robustness"))]
    if not measured_rows:
        return None
    harms = list(
        dict.fromkeys(name for _, suites in measured_rows for suite in suites for name in _harmed(suite))
    )
    head = [noun, "read whole, nats per token", "resumed from disk", "equal", *harms]
    body = []
    for row, suites in measured_rows:
        equal = [suite.get("resumed_equal") for suite in suites]
        said = "yes" if all(equal) else f"no, in {sum(not value for value in equal)} of {len(equal)}"
        body.append(
            [Cell(row.name), Cell(fixed(_mean(suites, "whole"), 4)), Cell(fixed(_mean(suites, "resumed"), 4))]
        )
        body[-1].append(Cell(said, kind="" if all(equal) else "bad"))
        harmed = [_harmed(suite) for suite in suites]
        body[-1] += [Cell(fixed(_mean(harmed, name))) for name in harms]
    return Table(
        "Nats per token read whole and resumed; after a harmed context, bits per byte; means over seeds",
        head,
        body,
    )


def _harmed(suite: dict[str, Any]) -> dict[str, Any]:
    """Bits per byte by what was done to the context."""
    given = {"context as it is": suite.get("bits_per_byte"), "no context": suite.get("no_context")}
    given |= {f"shuffled: {name.replace('_', ' ')}": harm for name, harm in suite.get("shuffled", {}).items()}
    given |= {f"{percent(harm['share'], 0)} corrupted": harm for harm in suite.get("corrupted", [])}
    bits = {
        name: harm.get("bits_per_byte") if isinstance(harm, dict) else harm for name, harm in given.items()
    }
    return {name: value for name, value in bits.items() if value is not None}


def costs(rows: Sequence[Row], noun: str) -> Table | None:
    """Of the cost suite, what is not drawn: training speed and memory, and decoding at the longest context."""
    given = {row.name: row.cost for row in rows if row.cost}
    if not given:
        return None
    contexts = {at for cost in given.values() for at in measured(cost.get("decode_ms", {}))}
    ends = sorted({min(contexts), max(contexts)}) if contexts else []
    head = [noun, "training tokens/s", "peak memory in training"]
    head += [f"decoding at {context(end)}, ms per token" for end in ends]
    head += [f"state at {context(end)}" for end in ends]
    body = []
    for name, cost in given.items():
        times, bytes_ = measured(cost.get("decode_ms", {})), measured(cost.get("state_bytes", {}))
        line = [
            Cell(name),
            Cell(short(cost.get("train_tokens_per_second"))),
            Cell(size(cost.get("train_peak_bytes"))),
        ]
        line += [Cell(short(times.get(end))) for end in ends]
        body.append([*line, *(Cell(size(bytes_.get(end))) for end in ends)])
    return Table("Cost, all designs measured in one interleaved run", head, body)


def terms(rows: Sequence[Row], noun: str) -> Table | None:
    """What the models report beside the loss at the end of training, over the finished seeds."""
    body = []
    for row in rows:
        names = dict.fromkeys(name for cell in row.finished for name in cell.get("terms", {}))
        for name in names:
            values = [
                value
                for cell in row.finished
                if (value := known(cell.get("terms", {}).get(name))) is not None
            ]
            if values:
                spread = f"{short(min(values))} to {short(max(values))}" if len(values) > 1 else NONE
                mean = math.fsum(values) / len(values)
                body.append([Cell(row.name), Cell(name.replace("_", " ")), Cell(short(mean)), Cell(spread)])
    head = [noun, "quantity", "mean", "spread over seeds"]
    return Table("Reported beside the loss, last value of training", head, body, (0, 1)) if body else None


def _mean(lines: Sequence[dict[Any, Any]], key: Any) -> float | None:
    return averaged([line.get(key) for line in lines])
