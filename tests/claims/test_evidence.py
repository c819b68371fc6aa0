"""What a row rests on: evidence that was once of another thing, or kinder than the claim."""

import math
import sys
from pathlib import Path

import pytest

from claims import ledger
from claims.claim import CONDITION, FAILS, HOLDS, MISSING, UNCOMMITTED, UNTESTABLE, judge
from claims.measures import built, pdr
from claims.results import Results
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.ops import pdr as scan
from tests.claims.conftest import cell, comparison, recalled, recalls

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def row(kept):
    """A row, judged by the results that are given."""

    def of(id, **results):
        (claim,) = ledger.claims([id])
        return judge(claim, Results(kept(**results)))

    return of


def test_renormalisation_comes_too_late_where_entries_grow_most(row):
    """γ = 1 and k = v = 3: 9 with every token."""
    evidence = pdr.before_the_first(3.0)
    assert evidence.values == (9.0 * 8192,) and "after 7,279 tokens" in evidence.shown
    assert pdr.before_the_first(1.0).values == (8192.0,)
    judged = row("pdr-renorm")
    assert (judged.verdict, judged.why) == (CONDITION, "where keys and values are N(0, 1)")


def test_an_empty_state_has_no_norm_to_be_brought_to(row):
    assert math.isnan(pdr.renormalised(an_empty=0.0).values[0])
    judged = row("pdr-renorm-norm")
    assert judged.verdict == CONDITION and "nan of an empty state" in judged.measured


def documents(**changes):
    """Results of benchmarks/documents.py, made up: all that the documents say holds, where it can."""
    slope = {"values": [0.1] * 3, "mean": 0.1, "low": 0.05, "high": 0.15}
    text = {"repeated_4grams": 0.1, "names_again": 0.5, "bits_per_byte": 2.0}
    paths = {name: {"median": 1.0} for name in ("model_over_relaxed", "model_over_straight")}
    moved = {"paths": paths, "torus": {"verdict": "no sign"}, "lyapunov": {"exponent": -0.2, "noisy": -0.1}}
    rank = {"brackets": -1.0, "block": -0.5, "call": -0.5, "name": 1.0}
    states = {"1024": {name: {"more": 0.0, "bytes": 1} for name in ("full", "float16", "int8")}}
    found = {
        "seeds": 3,
        "halflives": {"layers": [[[16.0], [20.0]]] * 3, "slope": slope},
        "coherence": {"adr": [text] * 3, "gpt2": [{key: value + 0.1 for key, value in text.items()}] * 3},
        "geometry": [moved] * 3,
        "depth": [{"rank": rank, "layers": [{}] * 3, "contrast": [0.0, 0.2, 0.3]}] * 3,
        "states": states,
        "gate": {"conditions": [{"name": "a", "measured": "b", "holds": True}] * 4, "verdict": "proceed"},
    }
    return {"conditions": {"commit": "abc"}, "results": found | changes}


ROWS = (
    *("adr-hierarchy", "adr-coherence-repeats", "adr-coherence-judged", "drm-low-action", "drm-stable"),
    *("drm-torus-convergence", "pdr-specialise", "pdr-gate-used", "pdr-state-fp16", "topology-plan-gate"),
)


@pytest.mark.parametrize("id", ROWS)
def test_what_small_trained_models_say_holds_for_them(row, id):
    judged = row(id, documents=documents())
    assert judged.verdict == CONDITION and "seed" in judged.why


def test_a_slope_whose_interval_has_zero_is_none(row):
    slope = {"values": [0.0] * 3, "mean": 0.05, "low": -0.02, "high": 0.12}
    found = documents(halflives={"layers": [[[16.0], [20.0]]] * 3, "slope": slope})
    assert row("adr-hierarchy", documents=found).verdict == UNTESTABLE
    down = documents(halflives={"layers": [[[16.0], [20.0]]] * 3, "slope": slope | {"high": -0.01}})
    assert row("adr-hierarchy", documents=down).verdict == FAILS


def test_paths_of_much_action_and_a_condition_that_fails(row):
    good = documents()["results"]
    far = {name: {"median": 69.0} for name in ("model_over_relaxed", "model_over_straight")}
    assert (
        row(
            "drm-low-action", documents=documents(geometry=[good["geometry"][0] | {"paths": far}] * 3)
        ).verdict
        == FAILS
    )
    three = [good["gate"]["conditions"][0] | {"holds": on} for on in (True, True, True, False)]
    judged = row(
        "topology-plan-gate", documents=documents(gate={"conditions": three, "verdict": "do not proceed: a"})
    )
    assert judged.verdict == FAILS and "do not proceed" in judged.measured


def test_names_that_come_again_are_more_of_the_better_text(row):
    assert row("adr-coherence-names", documents=documents()).verdict == FAILS


def test_a_half_life_is_that_of_the_product_of_gates(row):
    """Shorter than that of the mean gate, and W_p has a part in it from the start."""
    lives = pdr.start_halflives().values
    assert all(8.5 < life < 9.1 for life in lives)
    assert row("pdr-slow-decay").verdict == FAILS


def test_depth_is_not_blamed_for_the_size_of_embeddings():
    """Half the embeddings, twice the gradient that the first norm gives back; the layers are the same."""
    large, small = pdr.gradient_through(4, 1.0), pdr.gradient_through(4, 0.02)
    assert 0.1 < large < 10 < small
    assert pdr.gradient_flow(4).values == (large,)


@pytest.mark.parametrize(("gate", "verdict"), [(0.86, FAILS), (0.65, CONDITION)])
def test_a_shift_counts_from_where_the_documents_table_has_a_smaller_cache(row, gate, verdict):
    cells = [cell(seed, 1.7, gates={"route_gate": [gate, gate + 0.01]}) for seed in range(3)]
    assert row("lens-route-learns", compare=comparison({"lens": cells})).verdict == verdict


def test_recall_of_the_window_is_measured_without_pdr(row, monkeypatch):
    arms = {"needle: perspective": recalled([1.0] * 3, "needle")}
    assert row("topology-window-recall", recall=recalls(arms)).verdict == MISSING
    arms |= {"needle: window 32": recalled([1.0] * 3, "needle")}
    assert row("topology-window-recall", recall=recalls(arms)).verdict == CONDITION
    monkeypatch.syspath_prepend(BENCHMARKS)
    recall = __import__("recall")
    config, setting, _ = recall.arms(8, 32, 600, recall.Options())["needle: window 32"]
    assert {type(block.mixer) for block in config.blocks} == {WindowGQAConfig}
    assert setting.task.distance < config.blocks[0].mixer.window == 32
    for name in ("recall", "common"):
        sys.modules.pop(name)


@pytest.mark.parametrize("changed", [False, True])
def test_results_of_uncommitted_code_are_flagged(row, changed):
    paired = {"ratio": {"median": 1.0}, "ratio_middle_half": {"low": 0.9, "high": 1.1}}
    paired |= {"contexts": [1024, 65536], "pairs": 200}
    found = {
        "conditions": {"commit": "39310b9f2f8e" + " with changes" * changed},
        "results": {"paired": paired},
    }
    judged = row("pdr-o1-time", decode=found)
    assert judged.verdict == CONDITION and (UNCOMMITTED in judged.why) == changed
    kernels = {"conditions": found["conditions"], "results": {"drm": {"late_to_early": 1.0}}}
    assert row("drm-o1-time", kernels=kernels).verdict == (CONDITION if changed else HOLDS)


def test_the_length_of_chunks_is_really_changed():
    """A measure of other chunks than the scan's own must not see the scan's own."""
    works = [built.scan_work(1024, chunk) for chunk in (64, 128, 256, 512)]
    assert works == sorted(set(works))
    with built.chunks(7):
        assert len(scan.TREE.spans(21)) == 3
    assert scan.TREE.size == scan.CHUNK
