"""The report of the made-up comparison of conftest.py."""

import copy
import itertools
import math
import re
import time
from html.parser import HTMLParser

import pytest

from perspectron.eval.recall import PROFILES
from perspectron.report import html, markdown
from perspectron.report.charts import apart
from perspectron.report.figures import SIZES, _power
from perspectron.report.significance import paired
from perspectron.report.summary import ranked
from perspectron.report.verdicts import Field, findings


@pytest.fixture(scope="module")
def results(make_results):
    return make_results()


@pytest.fixture(scope="module")
def page(results):
    return html(results)


@pytest.fixture(scope="module")
def notes(results):
    return markdown(results)


class Parsed(HTMLParser):
    """Checks that tags are balanced; gathers ids, the text outside of style, and the cells of tables."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.text, self.rows, self.tags = [], [], [], [], []
        self.feed(page)
        assert self.open == []

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


def rows_of(page, first):
    return next(row for row in Parsed(page).rows if len(row) > 1 and first in row[:2])


# The page


def test_it_is_well_formed_and_alone(page):
    parsed = Parsed(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "img", "iframe"}
    assert "http" not in page and "url(" not in page.replace("url(#", "") and "@import" not in page
    for tag, attrs in parsed.tags:
        if tag == "th":
            assert attrs["scope"] in ("col", "row")
        if tag == "svg" and attrs.get("aria-hidden") != "true":
            assert all(name in parsed.ids for name in attrs["aria-labelledby"].split())
        if tag == "a":
            assert attrs["href"].removeprefix("#") in parsed.ids


def test_it_follows_the_systems_scheme(page):
    assert "prefers-color-scheme:dark" in page and "@media print" in page
    assert not re.search(r'(fill|stroke)="#', page)


def test_every_design_has_a_row_a_paragraph_and_a_line(results, page, notes):
    text = " ".join(Parsed(page).text)
    for name in results["designs"]:
        assert rows_of(page, name)
        assert f"<strong>{name}</strong>" in page and f"**{name}**" in notes
        assert text.count(name) > 5


def test_the_same_results_give_the_same_bytes(make_results, results, page, notes):
    again = make_results()
    assert html(again) == page and markdown(again) == notes
    assert again == results


def test_it_is_quick(results):
    start = time.process_time()
    html(results)
    assert time.process_time() - start < 2


def test_nothing_reads_nan_or_none(page, notes):
    seen = " ".join(Parsed(page).text) + notes
    assert not re.search(r"\b(nan|None|inf|null|True|False)\b", seen)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("finance", "")


def test_what_a_user_wrote_is_only_text(results):
    hostile = copy.deepcopy(results)
    hostile["plan"]["data"] = "<script>alert('x')</script>|`*"
    hostile["conditions"]["command"] = 'perspectron --data "</pre><script>" ```'
    hostile["designs"]["drm"]["cells"][2]["why"] = "<b>|</b>\nnan"
    page = html(hostile)
    assert not any(tag in ("script", "b") for tag, _ in Parsed(page).tags)
    assert "&lt;script&gt;" in page
    notes = markdown(hostile)
    assert "<script>" not in re.sub(r"````\n.*?\n````", "", notes, flags=re.DOTALL)
    assert "````\nperspectron --data" in notes
    table = [line for line in notes.splitlines() if line.startswith("| drm | 2 |")]
    assert len(table) == 1 and "&lt;b&gt;\\|&lt;/b&gt; nan" in table[0]


# Its numbers


def test_the_ranking_shows_what_the_results_say(results, page):
    transformer = results["designs"]["transformer"]["cells"]
    for name in ("perspective", "adr", "gla"):
        cells = [c for c in results["designs"][name]["cells"] if c["status"] == "finished"]
        losses = [cell["heldout_bits_per_byte"] for cell in cells]
        row = rows_of(page, name)
        assert row[2] == f"{sum(losses) / len(losses):.3f}"
        assert row[3] == f"{min(losses):.3f} to {max(losses):.3f}"
        others = [transformer[cell["seed"]]["heldout_bits_per_byte"] for cell in cells]
        pair = paired(losses, others)
        assert row[4] == f"{pair.mean:+.3f}"
        assert f"{pair.low:+.3f} to {pair.high:+.3f}\np ".replace("-", "−") in page
        parameters = results["designs"][name]["parameters"]
        assert row[5] == f"{parameters / 1e6:.4g}M" and row[7] == "0.003"


def test_complete_designs_come_first(results):
    names = [row.name for row in ranked(results)]
    assert names[-2:] == ["gla", "drm"]
    means = [row.mean for row in ranked(results)[:-2]]
    assert means == sorted(means)


def test_faults_are_shown(page, notes):
    assert rows_of(page, "gla")[1] == "–" and rows_of(page, "drm")[1] == "–"
    for text in (page, notes):
        assert "seed 2 diverged" in text and "seed 2 missing" in text
        assert "of 2 of 3 seeds" in text
        assert "the loss is not finite at step 611" in text and "trained for 310 of 1465 steps" in text
        assert "the loss is not finite at step 40" in text  # of a learning rate
    assert 'class="cross' in page


def incomplete_leader(results):
    """gla has by far the lowest mean, below gzip's 2.087, of two of three seeds."""
    return shifted(results, "gla", [1.70, 1.71, None])


def test_an_incomplete_design_can_be_lowest(results):
    changed = incomplete_leader(results)
    short = " ".join(Parsed(html(changed)).text).split("Conditions", 2)[1]
    best = ranked(changed)[0]
    assert best.name == "transformer"
    assert f"Lowest mean of the complete ones: transformer, {best.mean:.3f} bits per byte." in short
    assert "Lower, but incomplete: gla, 1.705, of 2 of 3 seeds." in short
    assert "better than xz -9 (1.752)" not in short and "gzip" not in short
    said = verdict(changed, "transformer")
    assert "Lowest mean loss of the complete designs" in said["held"]
    assert "On the seeds that both finished it loses to gla, which lacks a seed." in said["failed"]
    assert "gla" not in said["open"]
    assert "Its mean, 1.705, is below that of every complete design" in verdict(changed, "gla")["open"]
    assert "against the best complete one" not in html(changed)  # the best is the reference
    assert "against the best complete one" in html(shifted(changed, "lens", [2.0, 2.01, 2.02]))


def test_compressors_are_held_against_the_lowest_of_all(results):
    page = html(shifted(results, "gla", [1.80, 1.81, None]))
    assert "No design compresses the held-out text better than xz -9 (1.752)." in page


def without(results, seeds, names):
    changed = copy.deepcopy(results)
    for name in names:
        cells = changed["designs"][name]["cells"]
        changed["designs"][name]["cells"] = [cell for cell in cells if cell["seed"] not in seeds]
    return changed


def test_equal_faults_are_one_line(results):
    text = " ".join(Parsed(html(without(results, (1, 2), results["designs"]))).text)
    assert text.count("Seeds 1 and 2 are missing of: ") == 1
    line = text.split("Seeds 1 and 2 are missing of: ")[1].split(".")[0]
    assert sorted(line.split(", ")) == sorted(results["designs"])
    assert "No design is complete. Lowest mean so far: transformer" in text
    assert "Lowest mean loss" not in text and "against the best" not in text


def test_the_same_fault_of_two_seeds_is_one_finding(results):
    changed = without(results, (1, 2), ["ssd"])
    said = verdict(changed, "ssd")["open"]
    assert "Seeds 1 and 2 are missing (it has not been run); no mean here holds them." in said
    assert (
        "Seed 2 is missing (trained for 310 of 1465 steps); no mean here holds it."
        in verdict(results, "gla")["open"]
    )


def test_different_faults_are_lines_of_their_own(page):
    text = " ".join(Parsed(page).text)
    assert "Seed 2 diverged in: drm." in text and "Seed 2 is missing of: gla." in text


def test_no_claim_is_supported_by_a_design_that_has_not_finished(results):
    results = recalling(results, "drm", 0.99)
    assert "this run supports that" in verdict(results, "drm")["held"]
    changed = without(results, (0, 1, 2), ["drm"])
    assert "leaves that open: no seed has finished" in verdict(changed, "drm")["open"]
    short = " ".join(Parsed(html(changed)).text)
    assert not re.search(r"This run supports the claim of [^.]*drm", short)
    assert re.search(r"This run leaves open the claim of [^.]*drm", short)


def test_compressors_stand_beside_the_designs(results, page):
    best = ranked(results)[0]
    row = rows_of(page, "xz -9")
    assert row[2] == "1.752" and row[4] == f"{1.752 - best.mean:+.3f}".replace("-", "−")


def test_it_says_what_three_seeds_allow(page, notes):
    for text in (page, notes):
        assert "no p below 0.25" in text and "normal" in text
        assert "of 7 true zeros, 0.35 would" in text


def test_one_seed_has_no_spread(make_results):
    page = html(make_results(seeds=(0,)) | {"compressors": {}})
    assert "One seed: there is no spread and no test" in page
    assert rows_of(page, "perspective")[3] == "–"
    assert "interval" not in page.replace("its interval, seed by seed", "")


# Verdicts


def verdict(results, name):
    rows = ranked(results)
    row = next(row for row in rows if row.name == name)
    field = Field(rows, "transformer", results["compressors"])
    return {
        kind: " ".join(f.text for f in findings(row, field) if f.kind == kind)
        for kind in ("failed", "held", "open", "cost")
    }


def shifted(results, name, losses):
    changed = copy.deepcopy(results)
    for cell, loss in zip(changed["designs"][name]["cells"], losses, strict=True):
        cell["heldout_bits_per_byte"] = loss
    return changed


def test_rules_of_losses(results):
    base = [cell["heldout_bits_per_byte"] for cell in results["designs"]["transformer"]["cells"]]
    worse = shifted(results, "lens", [loss + 0.1 + 0.001 * i for i, loss in enumerate(base)])
    assert "Loses to transformer by 0.101 bits per byte" in verdict(worse, "lens")["failed"]
    better = shifted(results, "lens", [loss - 0.1 - 0.001 * i for i, loss in enumerate(base)])
    assert "Beats transformer by 0.101 bits per byte" in verdict(better, "lens")["held"]
    assert "Lowest mean loss" in verdict(better, "lens")["held"]
    unsure = shifted(results, "lens", [base[0] + 0.1, base[1] - 0.08, base[2] + 0.01])
    assert "Not told apart from transformer: +0.010" in verdict(unsure, "lens")["open"]
    assert (
        "Does not compress better than gzip -9 (2.087) and xz -9 (1.752)"
        in verdict(results, "lens")["failed"]
    )


def test_a_share_is_of_the_seeds_that_both_finished(results):
    short = shifted(results, "transformer", [2.0, 2.0, 8.0])
    short = shifted(short, "lens", [2.2, 2.2002, None])
    assert "by 0.200 bits per byte (10.0%;" in verdict(short, "lens")["failed"]


def test_rules_of_claims(results):
    whole = recalling(results, "drm", 0.99)
    assert (
        "supports that: it solves every task of recall that transformer solves; its state stays the same size"
        in (verdict(whole, "drm")["held"])
    )
    grows = copy.deepcopy(whole)
    grows["designs"]["drm"]["suites"]["cost"]["state_bytes"]["262144"] *= 2
    assert "its state grows with the context" in verdict(grows, "drm")["failed"]
    assert "does not support that" in verdict(results, "adr")["failed"]
    gpt2 = [cell["heldout_bits_per_byte"] for cell in results["designs"]["gpt2"]["cells"]]
    better = shifted(results, "adr", [loss - 0.1 - 0.001 * i for i, loss in enumerate(gpt2)])
    assert (
        "supports that: −0.101 bits per byte against gpt2"
        in (verdict(recalling(better, "adr", 0.99), "adr")["held"])
    )
    alone = copy.deepcopy(results)
    del alone["designs"]["gpt2"]
    assert "leaves that open: its loss was not compared with that of gpt2" in verdict(alone, "adr")["open"]


def test_who_claims_memory_has_to_recall(results):
    """What another design solves; what that one does not solve says nothing."""
    assert (
        "at mqar, which transformer solves, it has 12.0% right"
        in (verdict(recalling(results, "drm", 0.12), "drm")["failed"])
    )
    blank = recalling(recalling(results, "drm", 0.12), "transformer", 0.5)
    assert "leaves that open: transformer solves no task of recall" in verdict(blank, "drm")["open"]
    del blank["designs"]["drm"]["suites"]["recall"]
    assert (
        "leaves that open: its recall was not measured beside that of transformer"
        in (verdict(blank, "drm")["open"])
    )


def recalling(results, name, accuracy):
    """With this accuracy at every task."""
    found = copy.deepcopy(results)
    for task in found["designs"][name]["suites"]["recall"]["tasks"].values():
        for setting in task["settings"]:
            setting["accuracy"] = [accuracy] * 3
    return found


def test_a_cache_that_was_not_pruned_decides_nothing(results):
    gpt2 = [cell["heldout_bits_per_byte"] for cell in results["designs"]["gpt2"]["cells"]]
    better = shifted(results, "lens", [loss - 0.1 - 0.001 * i for i, loss in enumerate(gpt2)])
    larger = better["designs"]["lens"]["suites"]["cost"]["state_bytes"]
    larger |= {at: 1.5 * size for at, size in larger.items()}
    said = verdict(better, "lens")
    assert "Its document" not in said["failed"] + said["held"]
    assert "leaves that open: −0.101 bits per byte against gpt2" in said["open"]
    assert "attention was not pruned by its gates" in said["open"]
    assert "(whole it is 1.5 times that of gpt2 at 256k tokens)" in said["open"]
    worse = shifted(results, "lens", [loss + 0.1 + 0.001 * i for i, loss in enumerate(gpt2)])
    assert "does not support that: +0.101 bits per byte against gpt2" in verdict(worse, "lens")["failed"]


def test_rules_of_suites(results):
    transformer, perspective, adr = (verdict(results, name) for name in ("transformer", "perspective", "adr"))
    assert "No sure gain from more context than 512 tokens." in transformer["failed"]
    assert "More context than 512 tokens lowers its loss." in perspective["held"]
    assert "A gain from more context than 512 tokens could not be measured" in adr["open"]
    assert "On average over 3 seeds (profile full) it solves mqar and needle." in transformer["held"]
    assert "over 3 seeds (profile full) it does not solve parity (at chance, 51.2%)." in transformer["failed"]
    assert "mqar (1 of 4 settings)" in perspective["held"]
    assert "Its state is 123 kB from 1k to 256k tokens." in perspective["cost"]
    assert "Its cache grows from 295 kB at 1k" in transformer["cost"]
    assert "times transformer's time" in perspective["cost"]
    assert "ECE 0.031, between" in perspective["open"]
    assert "0.0015, is the lowest that was tried" in verdict(results, "gpt2")["open"]
    assert (
        "Not measured: position, calibration, robustness, recall and cost." in verdict(results, "ssd")["open"]
    )


def changed_recall(results, **options):
    """The options of every design's recall, and one seed of it."""
    changed = copy.deepcopy(results)
    for design in changed["designs"].values():
        if recall := design["suites"].get("recall"):
            recall["options"] |= options
            for setting in (setting for task in recall["tasks"].values() for setting in task["settings"]):
                setting |= {"accuracy": setting["accuracy"][:1], "beyond": setting["beyond"][:1]}
    return changed


def test_recall_says_of_how_many_seeds_and_which_tasks(results, page, notes):
    for text in (page, notes):
        assert (
            "2 layers of width 64, trained from scratch on each task. Profile full, 3 seeds of each." in text
        )
        assert "Accuracy over 3 seeds, by pairs / length" in text
    quick = changed_recall(results, profile="quick")
    for text in (html(quick), markdown(quick)):
        assert "Profile quick (fewer tasks and seeds than full), one seed of each." in text
        assert "Accuracy over one seed, by pairs / length" in text and "over 3 seeds, by pairs" not in text
    assert "With one seed (profile quick) it solves mqar and needle." in verdict(quick, "transformer")["held"]


def test_recall_past_the_trained_length_is_shown(results, page, notes):
    solver = verdict(results, "perspective")
    assert "it solves mqar (1 of 4 settings), needle (1 of 3 settings) and parity." in solver["held"]
    assert "Past the length trained on it does not keep parity (52.0%)." in solver["failed"]
    assert "Past the length trained on it keeps mqar" in solver["held"]
    assert (
        "parity (52" not in verdict(results, "transformer")["failed"]
    )  # not solved, so there is nothing to keep
    assert "past its length 52.0%" in page and "(past its length 52.0%)" in notes
    unread = copy.deepcopy(results)
    for setting in unread["designs"]["perspective"]["suites"]["recall"]["tasks"]["parity"]["settings"]:
        setting["beyond"] = [None] * 3
    assert "keep parity" not in verdict(unread, "perspective")["failed"]


def test_settings_are_told_apart_by_sizes_alone(results):
    plain, nested = copy.deepcopy(results), copy.deepcopy(results)
    for changed in (plain, nested):
        for i, design in enumerate(changed["designs"].values()):
            for task in design["suites"].get("recall", {}).get("tasks", {}).values():
                for setting in task["settings"]:
                    setting["measured_later"] = i  # what it was found to be is not what was asked
                    if changed is nested:
                        setting["sizes"] = {
                            key: setting.pop(key) for key in ("pairs", "length") if key in setting
                        }
    assert html(plain) == html(results) == html(nested)


def test_every_size_of_a_task_tells_settings_apart():
    tasks = [setting.task for profile in PROFILES.values() for setting in profile.settings]
    assert {key for task in tasks for key in task.sizes()} <= set(SIZES)


def test_an_interval_that_was_not_measured_is_a_dash(results):
    changed = copy.deepcopy(results)
    for cell in changed["designs"]["adr"]["cells"]:
        cell["suites"]["calibration"] |= {"ece_low": None, "ece_high": None}
    assert "– to –" not in html(changed)
    assert ["adr", "0.031", "–, –, –", "0.612", "11 000".replace(" ", "\u202f")] in Parsed(html(changed)).rows


REPEATED = "timed with the table of 256 repeated"


def test_contexts_that_a_design_cannot_read_are_named(results, page, notes):
    for text in (" ".join(Parsed(page).text), notes):
        beneath = f"lens, gpt2 and adr: {REPEATED}; as trained, nothing past it can be read."
        assert text.count(beneath) == 2  # of the ranking's state, and of the costs
    assert (
        f"times transformer's time (gpt2 {REPEATED}, which is all it reads)."
        in verdict(results, "gpt2")["cost"]
    )
    assert f"at 256k tokens (gpt2 {REPEATED}, which is all it reads)." in verdict(results, "gpt2")["cost"]
    assert "repeated" not in verdict(results, "transformer")["cost"]


def test_what_was_not_timed_is_named(results):
    changed = copy.deepcopy(results)
    cost = changed["designs"]["transformer"]["suites"]["cost"]
    cost["decode_ms"]["262144"] = None
    cost["skipped"] = {
        "262144": "its cache of 9.1 GB is more than half of what is free",
        "peak": "no memory is left",
    }
    for text in (" ".join(Parsed(html(changed)).text), markdown(changed)):
        assert "Not measured, transformer, at 256k: its cache of 9.1 GB" in text
        assert "Not measured, transformer, peak: no memory is left." in text
    assert "Not timed, at 256k: its cache of 9.1 GB" in verdict(changed, "transformer")["cost"]
    assert "At 64k tokens it decodes a token in" in verdict(changed, "gla")["cost"]


def test_rules_of_calibration_and_resuming(results):
    changed = copy.deepcopy(results)
    for cell, ece in zip(changed["designs"]["adr"]["cells"], (0.01, 0.02, 0.015), strict=True):
        cell["suites"]["calibration"]["ece"] = ece
    changed["designs"]["adr"]["cells"][1]["suites"]["robustness"]["resumed_equal"] = False
    assert "Calibrated: ECE 0.015" in verdict(changed, "adr")["held"]
    assert "its loss differs in 1 of 3 seeds" in verdict(changed, "adr")["failed"]
    changed["designs"]["adr"]["cells"][0]["suites"]["calibration"]["ece"] = 0.4
    assert "Not calibrated: ECE 0.145" in verdict(changed, "adr")["failed"]


# What is not there


def test_sections_without_measurements_say_so(results):
    bare = copy.deepcopy(results)
    for design in bare["designs"].values():
        design |= {"suites": {}, "rates": []}
        for cell in design["cells"]:
            cell |= {"suites": {}, "curve": []}
    for text in (html(bare), markdown(bare)):
        for what in ("Loss by position", "Recall", "Cost against context", "Calibration", "Robustness"):
            assert f"{what}: not measured in this run" in text
        assert "One learning rate was given" in text and "No training has a curve" in text


def test_nothing_finished(results):
    empty = copy.deepcopy(results)
    for design in empty["designs"].values():
        design["cells"] = []
    page = html(empty)
    assert "No training has finished" in page and page.count("it has not been run") >= 24
    Parsed(page)


def test_losses_that_are_null_are_faults(results):
    changed = shifted(results, "lens", [2.5, None, math.nan])
    row = next(row for row in ranked(changed) if row.name == "lens")
    assert row.losses == {0: 2.5} and [fault.seed for fault in row.faults] == [1, 2]
    assert "seed 1 without a loss" in html(changed)


def test_an_ablation_is_held_against_its_first_arm(results):
    arms = copy.deepcopy(results)
    arms["kind"] = "ablations"
    arms["plan"]["reference"] = "whole"
    cut = ("adr", "lens", "gpt2")
    arms["designs"] = {
        name: arms["designs"][old] for name, old in zip(("whole", "no decay", "no law 5"), cut, strict=True)
    }
    page = html(arms)
    assert "Comparison of 3 arms" in page and "against whole" in page
    assert rows_of(page, "no decay")


@pytest.mark.parametrize(
    ("match", "what", "allows"),
    [("flops", "FLOPs", "what as many FLOPs allow"), ("time", "time", "what as much time allows")],
)
def test_other_matches_give_other_tokens(results, page, match, what, allows):
    assert "Trained on 3M tokens of stdlib, 3 seeds, at equal parameters and tokens;" in page
    changed = copy.deepcopy(results)
    changed["plan"]["match"] = match
    for text in (html(changed), markdown(changed)):
        assert f"Trained on 3M tokens of stdlib (transformer; the others on {allows}), 3 seeds, at " in text
        assert f"at equal parameters and training {what};" in text
        assert f"same batches in the same order, of which each reads {allows}." in text


# Labels


@pytest.mark.parametrize(
    "wanted", [[5, 5, 5, 5], [0, 1, 99, 100], [50, 10, 50.5, 49], [100] * 6, [0] * 6, [3]]
)
def test_names_keep_their_distance(wanted):
    places = apart(wanted, 15, 0, 100)
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
    ordered = sorted(places)
    assert all(b - a >= 15 - 1e-6 for a, b in itertools.pairwise(ordered))
    assert [wanted[i] for i in sorted(range(len(wanted)), key=lambda i: places[i])] == sorted(wanted)


def test_names_without_need_stay():
    assert apart([80, 20, 50], 15, 0, 100) == [80, 20, 50]
    assert apart([50, 50], 10, 0, 100) == pytest.approx([45, 55])


def test_curves_of_a_part_of_the_text_say_so(results, notes):
    assert "On the way 32 768 held-out tokens are read; the ranking is of all." in notes
    whole = copy.deepcopy(results)
    whole["plan"]["curve_tokens"] = whole["plan"]["heldout_tokens"]
    assert "On the way" not in markdown(whole)


def test_seconds_are_by_speeds_measured_in_turns(results, page):
    """Where all were measured so; here one was not."""
    by = "by speeds measured in turns"
    assert by not in page
    whole = copy.deepcopy(results)
    whole["designs"]["ssd"]["suites"]["cost"] = whole["designs"]["gla"]["suites"]["cost"]
    paused = copy.deepcopy(whole)
    for entry in paused["designs"].values():
        for line in (line for cell in entry["cells"] for line in cell.get("curve", [])):
            line["seconds"] += 5000.0
    assert by in html(whole)
    assert html(paused) == html(whole)


def test_ticks_of_powers_are_told_apart():
    assert [_power(value) for value in (1e13, 1.5e13, 2e13)] == ["10¹³", "1.5·10¹³", "2·10¹³"]
