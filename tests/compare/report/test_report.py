"""The page of the made-up comparison of conftest.py."""

import copy
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.stats

from perspectron.compare.report import figures
from perspectron.compare.report.page import html, sections
from perspectron.compare.report.summary import STREAMING, WINDOWS, ranked
from perspectron.compare.report.tables import estimate, varied_of
from perspectron.presets import title
from perspectron.util import plot
from perspectron.util.errors import ConfigError
from tests.refusals import names, refused


@pytest.fixture(scope="module")
def results(make_results):
    return make_results()


@pytest.fixture(scope="module")
def page(results):
    return html(results)


@pytest.fixture
def drawn():
    """Asked for by tests that need real pictures without the page."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """No pictures where nobody looks at them."""
    if not {"page", "drawn"} & set(request.fixturenames):
        monkeypatch.setattr(figures, "draw", lambda charts, slug: f"<svg>{charts[0].x}</svg>")
        monkeypatch.setattr(figures, "draw_dots", lambda dots, slug: f"<svg>{dots.x}</svg>")


class Parsed(HTMLParser):
    """Checks that tags are balanced; gathers tags, ids, visible text, and the cells of tables without their notes."""

    VOID = ("meta", "use")

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.text, self.rows, self.tags = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open or not data.strip():
            return
        self.text.append(data)
        if ("td" in self.open or "th" in self.open) and "small" not in self.open:
            self.rows[-1][-1] += data


def tables_of(results, slug):
    return next(section.tables for section in sections(results) if section.slug == slug)


def ranking(results):
    table, *_ = tables_of(results, "ranking")
    return {row[0].text: row for row in table.rows}


# The page


def test_it_is_well_formed_and_alone(page):
    parsed = Parsed(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "img", "image", "iframe"}
    assert "http" not in page and "@import" not in page
    for tag, attrs in parsed.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("href", "src"):
            if name in attrs:
                assert tag in ("a", "use") and attrs[name].startswith("#")
        if tag == "a":
            assert attrs["href"].removeprefix("#") in parsed.ids
        if tag == "th":
            assert attrs["scope"] in ("col", "row")
    assert len(page) < 2_000_000


def test_every_picture_is_well_formed_and_named(page):
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 7  # the ranking by each score, 3 losses, 2 costs
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.get("aria-label") and root.find("title").text
        assert "nan" not in picture


def test_it_follows_the_systems_scheme_and_prints(page):
    style = page[page.index("<style>") : page.index("</style>")]
    assert "color-scheme:light dark" in style and "@media print" in style
    light, dark = style.split("@media screen and (prefers-color-scheme:dark)")
    names = set(re.findall(r"var\(--(\w+)", page))
    assert len(names) > 10
    for name in names:
        assert f"--{name}:#" in light and f"--{name}:#" in dark
    bare = re.sub(r"var\([^)]*\)", "", page[page.index("</style>") :])
    assert not re.search(r"(fill|stroke|color): ?#", bare)


def test_every_design_is_in_the_tables_and_the_legends(results, page):
    cells = [row[0] for row in Parsed(page).rows if row]
    for name in results["designs"]:
        assert sum(cell == title(name) for cell in cells) >= 5  # ranking, rates, three trainings
        pictures = 7 - 2 * (name == "ssd") - (name in ("adr", "lens", "gpt2"))  # costs; with memory carried
        assert page.count(f">{title(name)}</text>") == pictures


def test_the_same_results_give_the_same_bytes(make_results, results, page):
    again = make_results()
    assert html(again) == page
    assert again == results


def test_nothing_reads_nan_or_none(page):
    seen = " ".join(Parsed(page).text)
    assert not re.search(r"\b(nan|None|inf|null|True|False)\b", seen)


def test_what_a_user_wrote_is_only_text(results):
    hostile = copy.deepcopy(results)
    hostile["plan"]["data"] = "<script>alert('x')</script>|`*"
    hostile["conditions"]["command"] = 'perspectron --data "</pre><script>" ```'
    hostile["designs"]["drm"]["cells"][2]["why"] = "<b>|</b>\nbold"
    hostile["designs"]["<i>arm"] = hostile["designs"].pop("ssd")
    page = html(hostile)
    assert not any(tag in ("script", "b", "i") for tag, _ in Parsed(page).tags)
    assert "&lt;script&gt;" in page and "&lt;i&gt;arm" in page


@pytest.mark.parametrize("wrong", [[], {}, {"version": 1}, {"version": 9, "designs": {"a": {}}}, None])
def test_what_is_no_comparison_is_refused(wrong):
    with refused(ConfigError):
        html(wrong)


# Its numbers


def test_intervals_are_scipys(results):
    transformer = results["designs"]["transformer"]["cells"]
    for name in ("perspective", "adr", "gla"):
        cells = [c for c in results["designs"][name]["cells"] if c["status"] == "finished"]
        losses = [cell["heldout_bits_per_byte"] for cell in cells]
        row = ranking(results)[title(name)]
        assert row[2].text == f"{np.mean(losses):.3f}"
        low, high = scipy.stats.t.interval(0.95, len(losses) - 1, np.mean(losses), scipy.stats.sem(losses))
        assert row[2].note == f"{low:.3f} to {high:.3f}".replace("-", "−")
        test = scipy.stats.ttest_rel(losses, [transformer[c["seed"]]["heldout_bits_per_byte"] for c in cells])
        low, high = test.confidence_interval(0.95)
        assert row[3].note.splitlines()[0] == f"{low:+.3f} to {high:+.3f}".replace("-", "−")
        assert row[3].note.splitlines()[1].endswith(f"{len(losses)} seeds")


def test_an_estimate_by_hand():
    # Mean 2, deviation 1, error 1/√3, Student's 4.30265 at two degrees of freedom.
    cell = estimate([1.0, 2.0, 3.0])
    assert (cell.text, cell.note) == ("2.000", "−0.484 to 4.484")
    assert (estimate([1.5]).text, estimate([1.5]).note) == ("1.500", "")
    assert estimate([1.0, None, 3.0]).text == estimate([]).text == "–"


def test_complete_designs_come_first(results):
    names = [row.name for row in ranked(results)]
    assert names[-2:] == ["gla", "drm"]
    means = [row.mean for row in ranked(results)[:-2]]
    assert means == sorted(means)
    assert [row[1].text for row in ranking(results).values()][:8] == ["1", "2", "3", "4", "5", "6", "–", "–"]
    assert next(iter(ranking(results).values()))[2].kind == "best"


def test_the_first_sentence_says_who_won_by_how_much(results):
    lede = re.search(r'<p class="lede">(.*?)</p>', html(results))[1]
    first, second = ranked(results)[:2]
    pair = second.against(first)
    assert lede.startswith(f"{first.title} has the lowest held-out loss, {first.mean:.3f} bits per byte (")
    assert f", {pair.mean:.3f} below {second.title} (" in lede
    near = copy.deepcopy(results)
    for mine, best in zip(near["designs"][second.name]["cells"], first.entry["cells"], strict=True):
        mine["heldout_bits_per_byte"] = best["heldout_bits_per_byte"] + (0.004, -0.002, 0.001)[mine["seed"]]
    lede = re.search(r'<p class="lede">(.*?)</p>', html(near))[1]
    assert f"These seeds do not separate it from {second.title}." in lede
    one = copy.deepcopy(results)
    one["designs"] = {first.name: one["designs"][first.name]}
    one["plan"]["reference"] = first.name
    assert f"has the lowest held-out loss, {first.mean:.3f}" in html(one)


def test_differences_are_strong_red_or_open(results):
    for table, score in zip(tables_of(results, "ranking")[1:], (WINDOWS, STREAMING), strict=True):
        differences_are(table, [row for row in ranked(results, score) if not row.faults])


def differences_are(table, whole):
    assert list(table.head) == ["design", *(row.title for row in whole)]
    for line, row in zip(table.rows, whole, strict=True):
        for cell, other in zip(line[1:], whole, strict=True):
            if row is other:
                assert cell.text == ""
                continue
            test = scipy.stats.ttest_rel(list(row.losses.values()), list(other.losses.values()))
            low, high = test.confidence_interval(0.95)
            assert cell.kind == ("best" if high < 0 else "bad" if low > 0 else "quiet")
            assert float(cell.text.replace("−", "-")) == pytest.approx(row.mean - other.mean, abs=6e-3)


def test_a_design_has_one_colour_whatever_it_is_compared_with():
    alone = figures.styles(["ssd", "gla"], "ssd")
    among = figures.styles(["transformer", "gla", "drm", "ssd"], "transformer")
    assert alone == {name: among[name] for name in alone} and among["transformer"] == 0
    looks = {plot._style_of(number) for number in range(65)}
    assert len(looks) == 65
    arms = figures.styles(["whole", "without route"], "whole")
    assert arms["whole"] == 0 != arms["without route"]


def test_faults_are_shown(results):
    page = html(results)
    assert ranking(results)["DRM"][0].note == "seed 2 diverged"
    assert ranking(results)["GLA"][0].note == "seed 2 missing"
    for words in ("not finite at step 611", "trained for 310 of 1465 steps", "not finite at step 40"):
        assert words in page


def test_compressors_stand_beside_the_designs(results):
    row = ranking(results)["xz -9"]
    mean = next(row.mean for row in ranked(results) if row.name == "transformer")
    assert (row[2].text, row[3].text) == ("1.752", f"{1.752 - mean:+.3f}".replace("-", "−"))


def test_both_scores_stand_in_one_table_and_what_has_no_second_says_why(results):
    reference = [cell["streaming_bits_per_byte"] for cell in results["designs"]["transformer"]["cells"]]
    cells = [cell["streaming_bits_per_byte"] for cell in results["designs"]["perspective"]["cells"]]
    row = ranking(results)["Perspective"]
    assert row[4].text == f"{np.mean(cells):.3f}"
    low, high = scipy.stats.ttest_rel(cells, reference).confidence_interval(0.95)
    assert row[5].note.splitlines()[0] == f"{low:+.3f} to {high:+.3f}".replace("-", "−")
    assert row[6].text == "90.1 kB"
    assert (ranking(results)["Lens"][4].text, ranking(results)["Lens"][6].text) == ("–", "–")
    assert ranking(results)["Lens"][4].note == "lens: positions = 256, must be 0"
    first = ranked(results, STREAMING)[0]
    assert ranking(results)[first.title][4].kind == "best"
    lede = re.search(r'<p class="lede">(.*?)</p>', html(results))[1]
    assert f"With memory carried, {first.title} has" in lede
    note = next(section.note for section in sections(results) if section.slug == "ranking")
    assert names(note, "Windows", "Streaming", 256, 126) and "4\u202f711" in note


def test_results_of_one_score_have_dashes_for_the_other(results):
    old = copy.deepcopy(results)
    del old["plan"]["context"]
    for design in old["designs"].values():
        del design["streaming"]
        for cell in design["cells"]:
            del cell["streaming_bits_per_byte"]
    for name in old["designs"]:
        row = ranking(old)[title(name)]
        assert [cell.text for cell in row[4:7]] == ["–", "–", "–"] and row[2] == ranking(results)[
            title(name)
        ][2]
    assert len(tables_of(old, "ranking")) == 2
    assert "With memory carried" not in html(old)


def test_one_seed_has_no_interval(make_results):
    results = make_results((0,))
    assert {row[2].note for row in ranking(results).values()} == {""}
    assert "One seed gives no interval" in html(results)
    (table,) = tables_of(results, "calibration")
    assert {row[1].note for row in table.rows} == {"0.024 to 0.037"}  # bootstrapped windows


def test_missing_suites_leave_no_section(results):
    assert [section.slug for section in sections(results)] == [
        "ranking", "loss", "position", "recall", "cost", "calibration", "robustness", "trainings", "conditions",
    ]  # fmt: skip
    bare = copy.deepcopy(results)
    for design in bare["designs"].values():
        design["suites"] = {}
        for cell in design["cells"]:
            cell["suites"] = {}
    assert [section.slug for section in sections(bare)] == ["ranking", "loss", "trainings", "conditions"]
    assert "Robustness" not in html(bare)
    for section in sections(bare):
        assert section.figures or section.tables or section.facts


def test_a_design_without_a_suite_is_named(results):
    notes = {section.slug: section.note for section in sections(results)}
    for slug in ("position", "recall", "cost", "calibration", "robustness"):
        assert notes[slug].endswith("Not measured: Mamba-2.")


def test_nothing_finished(results):
    broken = copy.deepcopy(results)
    for design in broken["designs"].values():
        for cell in design["cells"]:
            cell |= {"status": "missing", "why": "stopped", "heldout_bits_per_byte": None}
        design["suites"] = {}
    page = html(broken)
    assert "No design has finished all of its seeds." in page
    assert [section.slug for section in sections(broken)] == ["ranking", "trainings", "conditions"]


def test_losses_that_are_null_are_faults(results):
    changed = copy.deepcopy(results)
    changed["designs"]["adr"]["cells"][0]["heldout_bits_per_byte"] = None
    assert ranking(changed)["ADR"][0].note == "seed 0 without a loss"


def test_an_ablation_is_of_arms_against_the_whole(results):
    changed = copy.deepcopy(results) | {"kind": "ablations"}
    changed["plan"]["reference"] = "perspective"
    table, *_ = tables_of(changed, "ranking")
    assert table.head[0] == "arm" and table.head[3] == "against Perspective"
    assert "Comparison of 8 arms" in html(changed)


@pytest.mark.parametrize(
    ("match", "words"), [("flops", "equal training FLOPs allow"), ("time", "equal time allows")]
)
def test_other_matches_give_other_tokens(results, match, words):
    changed = copy.deepcopy(results)
    changed["plan"]["match"] = match
    assert words.replace("training ", "") in html(changed)


def test_seconds_are_by_speeds_measured_in_turns(results):
    assert "seconds of training (log)" in html(results)  # ssd has no cost suite
    timed = copy.deepcopy(results)
    timed["designs"]["ssd"]["suites"]["cost"] = timed["designs"]["gla"]["suites"]["cost"]
    assert "seconds of training, from speeds of the cost suite (log)" in html(timed)
    for entry in timed["designs"].values():
        entry["suites"]["cost"] = entry["suites"]["cost"] | {"train_tokens_per_second": None}
    assert "seconds of training (log)" in html(timed)


def test_a_design_is_left_out_for_what_it_lacks(results):
    """GPT-2, which has a table of positions, has no score with memory carried; ended seeds of it are not missing."""
    whole = copy.deepcopy(results)
    for entry in whole["designs"].values():
        for i, cell in enumerate(entry["cells"]):
            entry["cells"][i] = next(c for c in entry["cells"] if c["status"] == "finished") | {
                "seed": cell["seed"]
            }
    page = html(whole)
    assert "which has no such score" in page and "seeds are missing" not in page
    whole["designs"]["gla"]["cells"][0] |= {"status": "diverged", "why": "the loss is nan", WINDOWS: None}
    assert "of which seeds diverged" in html(whole)


def test_sizes_that_were_not_trained_have_a_table(results):
    changed = copy.deepcopy(results)
    task = changed["designs"]["perspective"]["suites"]["recall"]["tasks"]["parity"]
    task["settings"][0]["also"] = {"length 128": [0.5, 0.75], "length 999": [None, None]}
    *_, table = tables_of(changed, "recall")
    assert table.head == ["design", "length 128", "length 999"]
    row = next(row for row in table.rows if row[0].text == "Perspective")
    assert [cell.text for cell in row[1:]] == ["62.5%", "–"]


def test_recall_tables_have_each_setting_and_what_is_past_it(results):
    mqar, needle, parity = tables_of(results, "recall")
    assert mqar.head == ["design", *["4/32", "8/64", "16/128", "32/256"], *[
        f"{place}, beyond its length" for place in ("4/32", "8/64", "16/128", "32/256")]]  # fmt: skip
    task = results["designs"]["perspective"]["suites"]["recall"]["tasks"]["parity"]
    row = next(row for row in parity.rows if row[0].text == "Perspective")
    assert row[1].text == f"{100 * np.mean(task['settings'][0]['accuracy']):.1f}%"
    assert row[3].text == f"{100 * np.mean(task['settings'][0]['beyond']):.1f}%"
    assert [cell.text for cell in needle.rows[-1]][:2] == ["chance", "6.2%"]


def test_costs_have_the_range_of_their_measurements(results):
    changed = copy.deepcopy(results)
    cost = changed["designs"]["adr"]["suites"]["cost"]
    times = cost["decode_ms"].items()
    cost["decode_ms_spread"] = {at: {"low": ms / 2, "high": 2 * ms, "median": ms} for at, ms in times}
    cost["skipped"] = {"1048576": "no memory for it"}
    (table,) = tables_of(changed, "cost")
    row = next(row for row in table.rows if row[0].text == "ADR")
    ms = cost["decode_ms"]["1024"]
    assert row[3].note == f"{ms / 2:.3g} to {2 * ms:.3g}"
    note = next(section.note for section in sections(changed) if section.slug == "cost")
    assert "ADR, at 1M: not measured, no memory for it." in note and "table of 256 repeated" in note


def test_settings_are_told_apart_by_sizes_alone():
    settings = [(("pairs", 4), ("length", 1024), ("keys", 8)), (("pairs", 8), ("length", 1024), ("keys", 16))]
    assert varied_of(settings) == ("pairs / keys", ["4/8", "8/16"])
    assert varied_of(settings[:1]) == ("pairs", ["4"])


def test_the_committed_results_have_a_page(drawn, pytestconfig):
    folder = pytestconfig.rootpath / "results"
    results = json.loads((folder / "compare.json").read_text())
    pages = [(folder / "compare.html").read_text(), html(results)]
    # What cuts a picture is named after its edges, whose last bits differ from machine to machine.
    assert len({re.sub(r"\bp[0-9a-f]{10}\b", "", page) for page in pages}) == 1
