"""What the ledger reads from a comparison's results."""

import json
from math import inf

import pytest

from claims.claim import Claim, judge, worded
from claims.measures import trained
from claims.results import Results
from perspectron.eval.recall import SOLVED
from tests.claims.conftest import SEEDS, bins, cell, comparison, recalled, recalls

SCALE = "at 2 M parameters and 3 M tokens of stdlib, 3 seeds"
FIRST = f"{SCALE}, version 0.1 (superseded: embeddings of 0.02)"  # of the first comparison


@pytest.fixture
def results(kept):
    def write(seeds=SEEDS, **designs):
        found = comparison(designs, seeds=list(seeds))
        return Results(kept(**dict.fromkeys(("compare", "reference/results", "ablate-lens"), found)))

    return write


def cells(*bits, **more):
    return [cell(seed, value, **more) for seed, value in enumerate(bits)]


def row(measure, results, low=trained.LOWER[0], high=trained.LOWER[1]):
    return judge(Claim("x", "§1", "text", worded("lower", low, high), measure), results)


def versus(found):
    return row(trained.versus("one", "other"), found)


def test_a_sure_difference_holds_at_that_size(results):
    found = results(one=cells(2.0, 2.1, 2.2), other=cells(2.31, 2.4, 2.52))
    lower = versus(found)
    assert lower.judged == f"holds with a condition: {SCALE}"
    assert lower.measured == (
        "one 2.100, other 2.410 bits per byte; difference -0.310, 95% interval -0.335 to -0.285 over 3 seeds"
    )
    assert row(trained.versus("other", "one"), found).judged == f"fails: {SCALE}"
    assert row(trained.without("lens", "other", "one"), found).verdict == lower.verdict


def test_one_sign_in_three_seeds_is_no_sure_difference(results):
    found = results(one=cells(2.0, 2.0, 2.0), other=cells(2.01, 2.3, 2.05))
    assert versus(found).judged == f"untestable here: no significant difference {SCALE}"


def test_other_runs_of_the_second_design_have_no_say_in_the_verdict(results, tmp_path):
    found = results(one=cells(2.0, 2.0, 2.0), other=cells(2.01, 2.3, 2.05))
    beside = trained.beside("one", "other", "elsewhere", "at another rate")
    assert row(beside, found) == versus(found)
    (tmp_path / "elsewhere.json").write_text(json.dumps(comparison({"other": cells(1.9, 1.9, 1.9)})))
    both = row(beside, found)
    assert both.judged == versus(found).judged
    assert "at another rate (results/elsewhere.json): one 2.000, other 1.900" in both.measured


def test_divergence_is_a_failure(results):
    other = cells(2.5, 2.5, 2.6)
    one = [*cells(2.0), cell(1, None, "diverged"), cell(2, None, "diverged")]
    lost = versus(results(one=one, other=other))
    assert (lost.judged, lost.measured) == (f"fails: {SCALE}", "one diverged with seed 1, 2")
    both = versus(results(one=one, other=[*other[:2], cell(2, None, "diverged")]))
    assert both.judged == "untestable here: 1 of 3 seeds finished in both"
    never = [cell(seed, None, "diverged") for seed in SEEDS]
    assert versus(results(one=other, other=never)).verdict == "holds with a condition"
    some = [*cells(2.0, 2.1), cell(2, None, "diverged")]
    assert versus(results(one=other, other=some)).judged == "untestable here: 2 of 3 seeds finished in both"


def test_a_pair_that_lacks_a_number_shows_nothing(results):
    other = cells(2.5, 2.5, 2.6)
    for one in (cells(2.0, 2.0, None), cells(2.0, 2.0), [*cells(2.0, 2.0), cell(2, None, "missing")]):
        assert (
            versus(results(one=one, other=other)).judged == "untestable here: 2 of 3 seeds finished in both"
        )
    alone = results(seeds=(0,), one=cells(2.0), other=cells(2.1))
    assert versus(alone).judged == "untestable here: one seed allows no test"


def test_a_design_that_was_not_trained_is_missing(results):
    assert row(trained.versus("one", "third"), results(one=cells(2.0))).verdict == "not measured yet"


def gate(results, *values, start=(), low=0.65, high=0.92):
    found = results(one=[cell(s, 2.0, gates={"g": value}) for s, value in enumerate(values)])
    measure = trained.of_gates("one", "g", lambda g: [min(g), max(g)], "{:.2f}", start)
    return row(measure, found, low, high)


def test_gates_are_judged_seed_by_seed(results):
    inside, below = [0.7, 0.9], [0.6, 0.9]
    assert gate(results, inside, inside, [0.68, 0.9]).measured == "0.68 to 0.70, 0.90"
    assert gate(results, inside, inside, inside).verdict == "holds with a condition"
    assert gate(results, below, below, below).verdict == "fails"  # not: the seeds disagree
    assert gate(results, inside, below, below).judged == "untestable here: the seeds disagree"


def test_a_gate_that_stays_where_it_starts_shows_nothing(results):
    still = [[0.80, 0.81], [0.79, 0.80], [0.80, 0.80]]
    assert gate(results, *still, start=(0.8, 0.8)).judged == f"untestable here: as at the start, {FIRST}"
    moved = [[0.70, 0.86], [0.71, 0.87], [0.70, 0.86]]
    assert gate(results, *moved, start=(0.8, 0.8)).verdict == "holds with a condition"


def test_gates_without_a_number_show_nothing(results):
    assert gate(results, [0.7, None], [0.7], [0.7]).verdict == "untestable here"
    assert gate(results, [0.7], [0.7]).judged == "untestable here: 2 of 3 seeds finished with a number"
    assert gate(results, None, [0.7], [0.7]).verdict == "not measured yet"


def test_positions_that_both_have_are_compared(results):
    one = [cell(s, 2.0, suites=bins(2.0 + s / 100)) for s in SEEDS]
    other = [cell(s, 2.0, suites=bins(2.5 + s / 90, 64)) for s in SEEDS]
    measure = trained.at_positions("one", "other", lambda found: found[-1:])
    few = row(measure, results(one=one, other=other))
    assert few.judged == "untestable here: 600 targets, the same for all seeds, are too few"
    assert few.measured.startswith("one 2.010, other 2.511 bits per byte")
    for found in (*one, *other):
        for each in found["suites"]["position"]["bins"]:
            each["tokens"] = 5000
    enough = row(measure, results(one=one, other=other))
    assert enough.judged == f"holds with a condition: {FIRST}; 5,000 targets, the same for all seeds"
    one[0]["suites"]["position"]["bins"][6]["bits_per_byte"] = None
    assert row(measure, results(one=one, other=other)).verdict == "untestable here"
    one[0]["suites"] = {}
    assert row(measure, results(one=one, other=other)).verdict == "not measured yet"


def test_recall_is_judged_seed_by_seed(kept):
    arms = {
        "one": [0.1, 0.96, 0.97],
        "other": [0.96, 0.99, 0.98],
        "low": [0.2, 0.21, 0.19],
        "gap": [None, 1, 1],
    }
    found = Results(kept(recall=recalls({name: recalled(right) for name, right in arms.items()})))
    small = "for models of width 64, 2 layers, 3 seeds"
    assert row(trained.recall("one"), found, SOLVED, 1).judged == "untestable here: the seeds disagree"
    solved = row(trained.recall("other"), found, SOLVED, 1)
    assert solved.judged == f"holds with a condition: {small}"
    assert solved.measured == "other 0.960 to 0.990 of mqar of 8 pairs in 32 tokens right"
    assert row(trained.recall("low"), found, SOLVED, 1).judged == f"fails: {small}"
    assert row(trained.recall("gap"), found, SOLVED, 1).verdict == "untestable here"
    assert row(trained.recall("third"), found).verdict == "not measured yet"
    assert row(trained.recall("other", "low"), found, 1e-9, inf).verdict == "holds with a condition"
    assert (
        row(trained.recall("one", "low"), found, 1e-9, inf).judged
        == f"untestable here: no significant difference {small}"
    )


def test_a_task_that_both_solve_tells_nothing_apart(kept):
    arms = {"one": [0.99, 0.99, 0.99], "other": [0.98, 0.981, 0.982]}
    found = Results(kept(recall=recalls({name: recalled(right) for name, right in arms.items()})))
    assert "both solve it (≥ 0.95)" in row(trained.recall("one", "other"), found, 1e-9, inf).judged
    assert row(trained.recall("other", "one"), found, 0, inf).verdict == "holds with a condition"  # as many


def conversions(kept, early, late):
    """Of conversions with attention in one layer of four and in none: loss at the end, and by position."""
    arms, beside = {}, {}
    for keep in (4, 0):
        for seed, noise in enumerate((0.0, 0.01, -0.01)):
            name = f"perspective2, 1 in {keep}, 0.1 of the tokens, seed {seed}"
            arms[name] = {
                "rows": [{"bits_per_byte": 9.0}, {"bits_per_byte": 1.5 + (keep == 0) * 0.1 + noise}]
            }
            places = {
                256: 7.0,
                512: early[keep],
                2048: early[keep],
                4096: late[keep] + noise,
                8192: late[keep],
            }
            found = [{"from": at, "tokens": 100, "bits_per_byte": value} for at, value in places.items()]
            beside[name] = {"position": {"converted": {"bins": found}}}
    found = {"teachers": dict.fromkeys("abc"), "arms": arms, "beside": beside}
    return Results(kept(convert={"results": found}))


def test_attention_that_conversions_keep_is_compared_with_none(kept):
    found = row(trained.kept, conversions(kept, {4: 1.5, 0: 1.5}, {4: 1.5, 0: 1.5}))
    assert found.verdict == "holds with a condition"
    assert "1.500, none 1.600 bits per byte; difference -0.100" in found.measured


def test_a_drift_is_corrected_only_where_there_is_one(kept):
    risen = row(trained.drifts, conversions(kept, {4: 1.5, 0: 1.5}, {4: 1.6, 0: 1.9}))
    assert risen.verdict == "holds with a condition" and "0.100, none 0.400" in risen.measured
    fallen = row(trained.drifts, conversions(kept, {4: 1.5, 0: 1.5}, {4: 1.3, 0: 1.4}))
    assert fallen.verdict == "untestable here" and "-0.200, none -0.100" in fallen.measured


def test_bins_weigh_by_their_bytes():
    bins = [
        {"tokens": 1, "bytes": 30, "bits_per_byte": 1.0},
        {"tokens": 9, "bytes": 10, "bits_per_byte": 2.0},
        {"tokens": 5, "bytes": 0, "bits_per_byte": float("nan")},
    ]
    assert trained.over_bins(bins) == pytest.approx(1.25)
    older = [{name: value for name, value in each.items() if name != "bytes"} for each in bins[:2]]
    assert trained.over_bins(older) == pytest.approx(1.9)
