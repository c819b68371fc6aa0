"""A number of a document is a range, and a verdict follows from what lies in it."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from claims.claim import Claim, Evidence, at_most, digits, judge, stated, worded
from claims.results import Missing, Results

HERE = Results(Path(__file__).parent)


def verdict(claimed, *values, condition=None, **found):
    claim = Claim("x", "§1", "text", claimed, lambda _: Evidence(values, **found), condition)
    return judge(claim, HERE).judged


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("768 params", [768], [767, 769]),
        ("32 768", [32768], [32767]),
        ("33.6 M FLOPs", [33554432, 33.6e6], [33.2e6, 34e6]),
        ("~110 M", [104.5e6, 115.5e6], [104.4e6, 115.6e6]),
        ("0.02 M", [0.015e6, 0.025e6], [0.0149e6]),
        ("< 0.01 %", [-1, 0, 0.0001], [0.000101]),
        ("1 039 B", [1.0388e12], [1.02e12]),
        ("70–80 ms", [0.07, 0.08], [0.068, 0.082]),
        ("2 : 1", [2], [2.001]),
        ("4 K FLOPs", [4096, 3500], [3400]),
        ("120 MB", [120e6], [125.8e6]),
        ("≥ 3", [3, inf], [2.9]),
    ],
)
def test_what_a_documents_number_allows(text, inside, outside):
    assert all(value in stated(text) for value in inside)
    assert not any(value in stated(text) for value in outside)


def test_a_measurement_is_shown_in_the_claims_unit():
    assert stated("33.6 M FLOPs").show(33554432) == "33.554 M FLOPs"
    assert stated("67 %").show(0.9991) == "99.91 %"
    assert stated("12–14 tokens/s").show(10.9) == "10.9 tokens/s"
    assert [digits(x) for x in (0.0, 1234567.0, 0.00050791, 1e-14)] == [
        "0",
        "1,234,567",
        "0.00050791",
        "1.00e-14",
    ]


def test_less_than_stated_is_as_good():
    assert 0.0 in at_most("0.07 ms")
    assert 0.001 not in at_most("0.07 ms")


def test_a_verdict_is_of_the_numbers_and_of_what_excuses_them():
    assert verdict("60", 60) == "holds"
    assert verdict("60", 40) == "fails"
    assert verdict("60", nan) == "fails"
    assert verdict("60", 60, proviso="at 2 M") == "holds with a condition: at 2 M"
    assert verdict("60", 40, proviso="at 2 M") == "fails: at 2 M"
    assert verdict("60", 40, excuse="no GPU") == "untestable here: no GPU"
    assert verdict("60", excuse="not built", shown="not built") == "untestable here: not built"
    assert verdict(worded("less", -inf, 0), -1, 2) == "fails"
    assert verdict(worded("less", -inf, 0), -1, 2, excuse="no GPU") == "untestable here: no GPU"
    seeds = {"unsure": "the seeds disagree", "each": 2}
    assert verdict(worded("less", -inf, 0), -1, -1, -1, 2, **seeds) == "untestable here: the seeds disagree"
    assert verdict(worded("less", -inf, 0), -1, 2, -1, 2, **seeds) == "fails"


def test_what_the_library_took_over_is_no_finding():
    claim = Claim("x", "§1", "text", "60", lambda _: 60, built=True)
    assert judge(claim, HERE).judged == "as built"
    assert judge(replace(claim, measure=lambda _: 40), HERE).judged == "as built: otherwise"


def test_a_condition_is_tried_only_where_the_claim_fails():
    assert verdict("60", 60, condition=("never", lambda _: pytest.fail("measured"))) == "holds"
    assert verdict("60", 40, condition=("in FP16", lambda _: 60)) == "holds with a condition: in FP16"
    assert verdict("60", 40, condition=("in FP16", lambda _: 30)) == "fails"


def test_at_what_size_stands_beside_a_condition():
    small = Evidence((60,), proviso="of small models")
    assert verdict("60", 40, condition=("in FP16", lambda _: small)) == (
        "holds with a condition: in FP16, of small models"
    )
    assert verdict("60", 40, proviso="of small models", condition=("in FP16", lambda _: 30)) == (
        "fails: of small models"
    )


def test_what_is_missing_is_said_with_the_command():
    def measure(results):
        raise Missing("`make it`")

    row = judge(Claim("x", "§1", "text", "60", measure, command="make it"), HERE)
    assert (row.judged, row.measured) == ("not measured yet: run `make it`", "–")
