"""What the ledger reads from a comparison's results."""

import json

import pytest

from perspectron.claims.claim import Claim, judge, worded
from perspectron.claims.measures import trained
from perspectron.claims.results import Results

PLAN = {"params": 2_000_000, "tokens": 3_000_320, "data": "stdlib"}
SCALE = "at 2 M parameters and 3 M tokens of stdlib"


def cell(seed, bits, status="finished", **more):
    return {"seed": seed, "status": status, "heldout_bits_per_byte": bits, "suites": {}} | more


@pytest.fixture
def results(tmp_path):
    def write(**designs):
        text = json.dumps(
            {"plan": PLAN, "designs": {name: {"cells": cells} for name, cells in designs.items()}}
        )
        for name in ("compare", "ablate-one"):
            (tmp_path / f"{name}.json").write_text(text)
        return Results(tmp_path)

    return write


def row(measure, results, low=trained.LOWER[0], high=trained.LOWER[1]):
    return judge(Claim("x", "§1", "text", worded("lower", low, high), measure), results)


def test_lower_with_every_seed_holds_at_that_size(results):
    found = results(one=[cell(0, 2.0), cell(1, 2.1)], other=[cell(1, 2.3), cell(0, 2.1)])
    lower = row(trained.versus("one", "other"), found)
    assert lower.judged == f"holds with a condition: {SCALE}"
    assert lower.measured == "one 2.050, other 2.200 bits per byte; difference -0.200 to -0.100"
    assert row(trained.versus("other", "one"), found).judged == f"fails: {SCALE}"
    assert row(trained.without("one", "other"), found).verdict == lower.verdict


def test_seeds_that_disagree_show_nothing(results):
    found = results(one=[cell(0, 2.0), cell(1, 2.4)], other=[cell(0, 2.1), cell(1, 2.3)])
    assert row(trained.versus("one", "other"), found).judged == "untestable here: the seeds disagree"


def test_a_seed_that_diverged_is_left_out(results):
    found = results(one=[cell(0, None, "diverged"), cell(1, 2.0)], other=[cell(0, 1.0), cell(1, 2.3)])
    assert "one seed" in row(trained.versus("one", "other"), found).measured
    none = results(one=[cell(0, None, "diverged")], other=[cell(0, 1.0)])
    assert row(trained.versus("one", "other"), none).judged == "untestable here: no seed finished in both"


def test_a_design_that_was_not_trained_is_missing(results):
    assert row(trained.versus("one", "third"), results(one=[cell(0, 2.0)])).verdict == "not measured yet"


def test_gates_are_averaged_over_seeds(results):
    found = results(one=[cell(0, 2.0, gates={"g": [0.8, 0.6]}), cell(1, 2.0, gates={"g": [0.7, 0.5]})])
    measure = trained.of_gates("one", "g", lambda g: [min(g), max(g)], "{:.2f} to {:.2f}")
    assert row(measure, found, 0, 1).measured == "0.55 to 0.75"
    assert row(trained.of_gates("one", "h", min, ""), found).verdict == "not measured yet"


def test_positions_that_both_have_are_compared(results):
    def bins(*bits):
        return {
            "position": {"bins": [{"to": 2**i, "tokens": 10, "bits_per_byte": b} for i, b in enumerate(bits)]}
        }

    one, other = cell(0, 2.0, suites=bins(3, 2, 9)), cell(0, 2.0, suites=bins(3, 2.5))
    measure = trained.at_positions("one", "other", lambda found: found[-1:])
    assert row(measure, results(one=[one], other=[other])).measured.startswith("one 2.000, other 2.500 bits")


def test_recall_is_that_of_the_best_seed(tmp_path):
    arms = {
        name: {"accuracy": right, "task": "mqar"}
        for name, right in (("one", [0.1, 0.9]), ("other", [0.2, 0.3]))
    }
    (tmp_path / "recall.json").write_text(json.dumps({"results": {"arms": arms}}))
    found = Results(tmp_path)
    assert row(trained.recall("one", "other"), found, 0.5, 1).measured.startswith(
        "one 0.90, other 0.30 of mqar right"
    )
    assert row(trained.recall("one"), found, 0.95, 1).verdict == "fails"
    assert row(trained.recall("third"), found).verdict == "not measured yet"
