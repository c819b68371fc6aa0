"""The README's first impression: short, and with the numbers and the picture that the committed results give."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def front():
    spec = importlib.util.spec_from_file_location("front", ROOT / "docs" / "front.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 900


def test_the_pages_are_what_the_results_say(front):
    for path, text in front.pages(front.read()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/front.py"


def test_every_reference_run_is_in_the_joined_results(front):
    joined = {row.name for row in front.read().rows}
    files = (ROOT / "results" / "reference").glob("*.json")
    assert joined == {name for path in files for name in json.loads(path.read_text())["designs"]}


def test_the_picture_has_a_mark_for_each_design_and_is_small(front):
    svg = front.PICTURE.read_text(encoding="utf-8")
    said = [title.text for title in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert {row.title for row in front.read().rows} <= set(said)
    assert len(svg) < 40_000 and "prefers-color-scheme" in svg
    assert "docs/images/front.svg" in README.read_text(encoding="utf-8")


def test_a_changed_result_changes_the_page(front):
    measured = front.read()
    row = measured.rows[0]
    row.losses[0] += 0.5
    changed = front.rewritten(README.read_text(encoding="utf-8"), front.readme_table(measured))
    assert changed != README.read_text(encoding="utf-8")
    kept = [re.sub(r"\|.*", "", text) for text in (changed, README.read_text(encoding="utf-8"))]
    assert kept[0] == kept[1], "only the table is rewritten"


def test_a_design_that_was_not_timed_is_named_with_the_command(front, monkeypatch):
    real = front._json
    monkeypatch.setattr(
        front, "_json", lambda name: {"results": {}} if name == "contexts.json" else real(name)
    )
    with pytest.raises(SystemExit, match=r"python benchmarks/contexts\.py --json"):
        front.read()
