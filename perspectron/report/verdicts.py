"""What held and what did not, of each design, by rules from the numbers.

Every rule returns findings of a kind: "failed", "held", "open" (the numbers do not decide) or "cost".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perspectron.eval.suites import OF_TEXT
from perspectron.report.figures import averaged, measured
from perspectron.report.numbers import context, fixed, known, percent, rate, seeds, short, signed, size
from perspectron.report.promises import CLAIMS, Claim
from perspectron.report.significance import LEVEL, Paired
from perspectron.report.summary import Row, leader, lower

CALIBRATED, MISCALIBRATED = 0.02, 0.05  # ECE below which it holds, above which it fails
AT_CHANCE = 0.02  # above chance, and still no more than it


@dataclass(frozen=True)
class Finding:
    """claim: whether it says what became of the claim in the design's document."""

    kind: str
    text: str
    claim: bool = False


@dataclass(frozen=True)
class Field:
    """All designs in their ranks, the name of the reference, and the compressors."""

    rows: Sequence[Row]
    reference: str
    compressors: dict[str, Any]

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


def findings(row: Row, field: Field) -> list[Finding]:
    """All of a design's, in the order of the rules."""
    found = [*_faults(row), *_claim(row, field)]
    if row.mean is not None:
        found += [*_rank(row, field), *_reference(row, field), *_compressors(row, field)]
        found += [*_position(row), *_calibration(row), *_robustness(row)]
    return [*found, *_recall(row), *_cost(row, field), *_unmeasured(row), *_rate(row)]


def interval(pair: Paired) -> str:
    """As "95% interval −0.010 to +0.050 over 3 seeds"."""
    if pair.low is None:
        return "one seed, which allows no test"
    return f"{LEVEL:.0%} interval {signed(pair.low)} to {signed(pair.high)} over {pair.n} seeds"


def versus(row: Row, other: Row) -> Finding:
    """This design's loss against another's."""
    pair = row.against(other)
    if pair is None:
        return Finding("open", f"It shares no finished seed with {other.name}, so the two are not compared.")
    if pair.n == 1:
        side = "above" if pair.mean > 0 else "below"
        return Finding(
            "open", f"{fixed(abs(pair.mean))} bits per byte {side} {other.name}, with {interval(pair)}."
        )
    if pair.sure:
        share = percent(abs(pair.mean) / pair.other)
        verb, kind = ("Loses to", "failed") if pair.mean > 0 else ("Beats", "held")
        return Finding(
            kind, f"{verb} {other.name} by {fixed(abs(pair.mean))} bits per byte ({share}; {interval(pair)})."
        )
    return Finding(
        "open",
        f"Not told apart from {other.name}: {signed(pair.mean)} bits per byte ({interval(pair)}).",
    )


def _faults(row: Row) -> list[Finding]:
    """One for the seeds that the same befell."""
    found, seeds_of = list[Finding](), dict[tuple[str, str], list[str]]()
    for fault in row.faults:
        seeds_of.setdefault((fault.status, fault.why), []).append(str(fault.seed))
    for (status, given), names in seeds_of.items():
        why, one = f" ({given})" if given else "", len(names) == 1
        kind = "failed" if status == "diverged" else "open"
        verb = status if status == "diverged" else f"{'is' if one else 'are'} {status}"
        word, them = ("Seed", "it") if one else ("Seeds", "them")
        found.append(Finding(kind, f"{word} {listed(names)} {verb}{why}; no mean here holds {them}."))
    if row.mean is None:
        found.append(Finding("failed", "No seed has finished, so there is no loss to compare."))
    return found


def _claim(row: Row, field: Field) -> list[Finding]:
    claim = CLAIMS.get(row.name)
    if claim is None:
        return []
    checks = [(check, text) for check, text in _checks(row, claim, field)]
    reasons = "; ".join(text for _, text in checks)
    said = f"Its document says that {claim.clause} ({claim.source})"
    if row.mean is None:
        return [Finding("open", f"{said}; this run leaves that open: no seed has finished.", claim=True)]
    if any(check is False for check, _ in checks):
        return [Finding("failed", f"{said}; this run does not support that: {reasons}.", claim=True)]
    if all(check for check, _ in checks):
        return [Finding("held", f"{said}; this run supports that: {reasons}.", claim=True)]
    return [Finding("open", f"{said}; this run leaves that open: {reasons}.", claim=True)]


def _checks(row: Row, claim: Claim, field: Field) -> list[tuple[bool | None, str]]:
    """(whether it holds, how), of each thing that the claim needs."""
    checks = list[tuple[bool | None, str]]()
    rival = field.row(claim.rival) if claim.rival else None
    if claim.rival:
        checks.append(_beats(row, rival, claim.rival))
    if claim.recalls:
        checks.append(_recalls(row, field.row(claim.recalls), claim.recalls))
    if claim.flat_state:
        start = flat_from(states(row))
        text = "its state grows with the context" if start is None else "its state stays the same size"
        checks.append(
            (start is not None, text) if len(states(row)) > 1 else (None, "its state was not measured")
        )
    if claim.pruned:
        checks.append((None, _unpruned(row, rival)))
    return checks


def _beats(row: Row, rival: Row | None, name: str) -> tuple[bool | None, str]:
    pair = row.against(rival) if rival is not None else None
    if pair is None:
        return None, f"its loss was not compared with that of {name}"
    text = f"{signed(pair.mean)} bits per byte against {name}"
    if not pair.sure:
        return None, f"{text}, no sure difference"
    return pair.mean < 0, text


def _recalls(row: Row, rival: Row | None, name: str) -> tuple[bool | None, str]:
    """Whether it solves what the other solves, task by task and setting by setting."""
    if rival is None or not rival.recall or not row.recall:
        return None, f"its recall was not measured beside that of {name}"
    own, others = _scores(row), _scores(rival)
    asked = [at for at, (score, goal) in others.items() if at in own and score >= goal]
    if not asked:
        return None, f"{name} solves no task of recall, so none tells whether it does as much"
    lost = [at for at in asked if own[at][0] < own[at][1]]
    if not lost:
        return True, f"it solves every task of recall that {name} solves"
    worst = min(lost, key=lambda at: own[at][0])
    return False, f"at {worst[0]}, which {name} solves, it has {percent(own[worst][0])} right"


def _scores(row: Row) -> dict[tuple[str, int], tuple[float, float]]:
    """(accuracy, at which it is solved) by task and number of the setting, where there is one."""
    return {
        (name, i): (score, float(task["solved"]))
        for name, task in row.recall.get("tasks", {}).items()
        for i, setting in enumerate(task["settings"])
        if (score := averaged(setting["accuracy"])) is not None
    }


def _unpruned(row: Row, rival: Row | None) -> str:
    """A comparison drops no attention, so its sizes decide nothing of a cache that shrinks by that (decisions §5)."""
    own, other = states(row), states(rival) if rival is not None else {}
    shared = sorted(set(own) & set(other))
    text = "attention was not pruned by its gates, so whether its cache shrinks was not measured"
    if rival is None or not shared:
        return text
    at = shared[-1]
    return f"{text} (whole it is {short(own[at] / other[at])} times that of {rival.name} at {context(at)} tokens)"


def _rank(row: Row, field: Field) -> list[Finding]:
    """Of the leader: whom it is not set apart from. Of an incomplete design: that a lower mean gives it no rank."""
    best = leader(field.rows)
    if best is None:
        return []
    if row.name != best.name:
        if row not in lower(field.rows, best):
            return []
        text = f"Its mean, {fixed(row.mean)}, is below that of every complete design; lacking a seed, it has no rank."
        return [Finding("open", text)]
    others = [other for other in field.rows[1:] if other.mean is not None]
    pairs = {other.name: other.against(row) for other in others}
    surely = {name: pair.mean for name, pair in pairs.items() if pair is not None and pair.sure}
    ahead = [name for name, mean in surely.items() if mean < 0]
    unsure = [name for name in pairs if name not in surely]
    of = "of the complete designs" if any(other.faults for other in field.rows) else "of this comparison"
    found = [Finding("held", f"Lowest mean loss {of}, {fixed(row.mean)} bits per byte.")]
    if ahead:
        text = f"On the seeds that both finished it loses to {listed(ahead)}, which {_lack(ahead)} a seed."
        found.append(Finding("failed", text))
    if unsure:
        found.append(Finding("open", f"The seeds do not set it apart from {listed(unsure)}."))
    return found


def _lack(names: Sequence[str]) -> str:
    return "lacks" if len(names) == 1 else "lack"


def _reference(row: Row, field: Field) -> list[Finding]:
    other = field.row(field.reference)
    return [] if other is None or other.name == row.name or other.mean is None else [versus(row, other)]


def _compressors(row: Row, field: Field) -> list[Finding]:
    better = {
        name: bits
        for name, given in field.compressors.items()
        if (bits := known(given)) is not None and row.mean is not None and bits <= row.mean
    }
    worse = [f"{name} ({fixed(bits)})" for name, bits in better.items()]
    return [Finding("failed", f"Does not compress better than {listed(worse)}.")] if worse else []


def _position(row: Row) -> list[Finding]:
    """By the suite's own test: the same targets, read with and without the context before the last so many tokens."""
    suites = row.suite("position")
    falls, stays, differs, unread = list[str](), list[str](), list[str](), list[str]()
    for place in dict.fromkeys(place for suite in suites for place in suite.get("falls_past", {})):
        given = [suite.get("falls_past", {}).get(place) for suite in suites]
        seen = [value for value in given if value is not None]
        kind = unread if not seen else falls if all(seen) else differs if any(seen) else stays
        share = f" (in {sum(seen)} of {len(seen)} seeds)" if kind is differs else ""
        kind.append(context(int(place)) + share)
    found = []
    if stays:
        found.append(Finding("failed", f"No sure gain from more context than {listed(stays)} tokens."))
    if falls:
        found.append(Finding("held", f"More context than {listed(falls)} tokens lowers its loss."))
    if differs:
        found.append(
            Finding("open", f"Its seeds differ on a gain from more context than {listed(differs)} tokens.")
        )
    if unread:
        found.append(
            Finding("open", f"A gain from more context than {listed(unread)} tokens could not be measured.")
        )
    return found


def _calibration(row: Row) -> list[Finding]:
    errors = [value for suite in row.suite("calibration") if (value := known(suite.get("ece"))) is not None]
    if not errors:
        return []
    error = math.fsum(errors) / len(errors)
    if error <= CALIBRATED:
        return [Finding("held", f"Calibrated: ECE {fixed(error)}, at most {CALIBRATED}.")]
    if error > MISCALIBRATED:
        return [Finding("failed", f"Not calibrated: ECE {fixed(error)}, above {MISCALIBRATED}.")]
    return [Finding("open", f"ECE {fixed(error)}, between {CALIBRATED} and {MISCALIBRATED}.")]


def _robustness(row: Row) -> list[Finding]:
    equal = [suite["resumed_equal"] for suite in row.suite("robustness") if "resumed_equal" in suite]
    if not equal:
        return []
    if all(equal):
        return [Finding("held", "Resumes from a state on disk with an equal loss.")]
    return [
        Finding(
            "failed",
            f"Resumed from a state on disk, its loss differs in {equal.count(False)} of {len(equal)} seeds.",
        )
    ]


def _recall(row: Row) -> list[Finding]:
    tasks = row.recall.get("tasks", {})
    solved, failed = list[str](), list[str]()
    for name, task in tasks.items():
        scores = [averaged(setting["accuracy"]) for setting in task["settings"]]
        goal, count = float(task["solved"]), len(scores)
        chances = [known(setting.get("chance", task.get("chance"))) or 0.0 for setting in task["settings"]]
        over = [
            (score - chance, score)
            for score, chance in zip(scores, chances, strict=True)
            if score is not None
        ]
        through = sum(score is not None and score >= goal for score in scores)
        if through:
            solved.append(name if through == count else f"{name} ({through} of {count} settings)")
        elif over:
            gain, _ = max(over)
            best = max(score for _, score in over)
            failed.append(f"{name} ({'at chance' if gain <= AT_CHANCE else 'at best'}, {percent(best)})")
    found = [Finding("failed", f"{_basis(row)} it does not solve {listed(failed)}.")] if failed else []
    found += [Finding("held", f"{_basis(row)} it solves {listed(solved)}.")] if solved else []
    return [*found, *_past(row)]


def _past(row: Row) -> list[Finding]:
    """Of the settings that are solved, whether they are past the length trained on too, in texts of twice it."""
    kept, lost = list[str](), list[str]()
    for name, task in row.recall.get("tasks", {}).items():
        goal = float(task["solved"])
        solved = [
            s for s in task["settings"] if (score := averaged(s["accuracy"])) is not None and score >= goal
        ]
        past = [score for s in solved if (score := averaged(s.get("beyond") or [])) is not None]
        if past:
            (kept if min(past) >= goal else lost).append(f"{name} ({percent(min(past))})")
    found = (
        [Finding("failed", f"Past the length trained on it does not keep {listed(lost)}.")] if lost else []
    )
    return (
        [*found, Finding("held", f"Past the length trained on it keeps {listed(kept)}.")] if kept else found
    )


def _basis(row: Row) -> str:
    """Over how many seeds and which profile recall is."""
    tasks = row.recall.get("tasks", {}).values()
    count = seeds(len(setting["accuracy"]) for task in tasks for setting in task["settings"])
    text = f"With {count}" if count == "one seed" else f"On average over {count}"
    profile = row.recall.get("options", {}).get("profile")
    return f"{text} (profile {profile})" if profile else text


def _cost(row: Row, field: Field) -> list[Finding]:
    found, state = list[Finding](), states(row)
    if len(state) > 1:
        first, last = min(state), max(state)
        start = flat_from(state)
        if start is not None:
            text = f"Its state is {size(state[last])} from {context(start)} to {context(last)} tokens."
        else:
            ends = (
                f"{size(state[first])} at {context(first)} to {size(state[last])} at {context(last)} tokens"
            )
            text = f"Its cache grows from {ends}{_repeated(row)}."
        found.append(Finding("cost", text))
    other = field.row(field.reference)
    if other is not None and other.name != row.name:
        own, theirs = decoding(row), decoding(other)
        shared = sorted(set(own) & set(theirs))
        if shared:
            ratio = own[shared[-1]] / theirs[shared[-1]]
            text = f"At {context(shared[-1])} tokens it decodes a token in {short(ratio)} times {other.name}'s time"
            found.append(Finding("cost", f"{text}{_repeated(row, other)}."))
    found += [Finding("cost", f"Not timed, {what}: {why}.") for what, why in skipped(row)]
    return found


def _repeated(*rows: Row) -> str:
    """In brackets, whose times and sizes at long contexts are of a table that the trained model does not have."""
    said = [
        f"{row.name} {row.cost['positions']}, which is all it reads"
        for row in rows
        if row.cost.get("positions")
    ]
    return f" ({'; '.join(said)})" if said else ""


def skipped(row: Row) -> list[tuple[str, str]]:
    """(what, why) of all that the cost suite left out."""
    given = row.cost.get("skipped", {}).items()
    return [(f"at {context(int(what))}" if what.isdigit() else what, why) for what, why in given]


def _unmeasured(row: Row) -> list[Finding]:
    if not row.finished:
        return []
    lacking = [name for name in OF_TEXT if not row.suite(name)]
    lacking += [name for name in ("recall", "cost") if not row.entry.get("suites", {}).get(name)]
    return [Finding("open", f"Not measured: {listed(lacking)}.")] if lacking else []


def _rate(row: Row) -> list[Finding]:
    grid = [value for tried in row.entry.get("rates", []) if (value := known(tried.get("lr"))) is not None]
    chosen = known(row.entry.get("lr"))
    if chosen is None or len(grid) < 2 or chosen not in (min(grid), max(grid)):
        return []
    end = "lowest" if chosen == min(grid) else "highest"
    return [
        Finding(
            "open",
            f"Its learning rate, {rate(chosen)}, is the {end} that was tried; a better one may lie beyond.",
        )
    ]


def states(row: Row) -> dict[int, float]:
    """Bytes by context, as the cost suite measured them, else as counted from the model."""
    return measured(row.cost.get("state_bytes", {})) or measured(row.entry.get("state_bytes", {}))


def decoding(row: Row) -> dict[int, float]:
    """Milliseconds a token by context."""
    return measured(row.cost.get("decode_ms", {}))


def flat_from(values: dict[int, float]) -> int | None:
    """The least context from which on the value is that at the longest, None where that is the longest itself."""
    start = None
    for at in sorted(values, reverse=True)[1:]:
        if values[at] != values[max(values)]:
            break
        start = at
    return start


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
