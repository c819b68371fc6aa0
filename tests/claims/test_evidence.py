"""What a row rests on: evidence that was once of another thing, or kinder than the claim."""

import math
import sys
from pathlib import Path

import pytest

from claims import ledger
from claims.claim import CONDITION, FAILS, HOLDS, MISSING, UNCOMMITTED, UNTESTABLE, judge
from claims.measures import built, pdr
from claims.results import Results
from perspectron.mixers.window_gqa import WindowGQAConfig
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


def test_a_spread_over_all_tokens_says_nothing_of_alike_ones(row):
    gates = {"pdr_gate_spread": [0.36] * 3}
    cells = [cell(seed, 1.7, gates=gates) for seed in range(3)]
    assert row("pdr-gate-used", compare=comparison({"perspective": cells})).verdict == UNTESTABLE


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
