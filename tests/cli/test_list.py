"""`perspectron list`: a line for each mixer and preset, with its source."""

import json
import re

import pytest

from perspectron import presets
from perspectron.cli import catalogue
from perspectron.cli.main import main
from perspectron.model.mixer import mixers


def test_everything_there_is_has_a_line_with_its_source(capsys):
    assert main(["list"]) == 0
    *found, where = capsys.readouterr().out.split("\n\n")
    assert "docs/" in where
    tables = dict(zip(("mixers", "designs", "presets"), found, strict=True))
    for title, entries in {
        "mixers": mixers(),
        "designs": presets.DESIGNS,
        "presets": presets.PRESETS,
    }.items():
        for name, entry in entries.items():
            (line,) = [line for line in tables[title].splitlines() if line.split()[:1] == [name]]
            assert entry.about in line and line.endswith(entry.source)


def test_as_json_with_parameters_counted(capsys):
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {preset["name"]: preset["parameters"] for preset in found["presets"]}
    assert sizes["gpt2-124m"] == 124_439_808 and sizes["lens-gpt2-124m"] == 209_420_988


def test_what_is_kept_is_what_the_tables_say():
    assert catalogue.read() == catalogue.counted(), (
        "catalogue.json is old: python -m perspectron.cli.catalogue"
    )


def test_a_name_with_a_size_says_the_size_of_the_whole():
    for preset in catalogue.read()["presets"]:
        if said := re.search(r"-(\d+(?:\.\d+)?)([kmbt])\b", preset["name"]):
            size = float(said[1]) * {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[said[2]]
            grown = preset["name"] in (
                "lens-gpt2-124m",
                "perspective-1t-dense",
            )  # named after what they are made of
            assert grown or abs(preset["parameters"] / size - 1) < 0.05, preset["name"]


@pytest.mark.parametrize("source", sorted({entry.source for entry in mixers().values()}))
def test_sources_name_a_document(source):
    assert source.startswith(("docs/designs/", "arXiv "))
