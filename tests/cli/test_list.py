"""`perspectron list`: a line for each mixer and preset, with its source."""

import json

import pytest

from perspectron import presets
from perspectron.cli.main import main
from perspectron.mixers import MIXERS


def test_everything_there_is_has_a_line_with_its_source(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, entry in MIXERS.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert entry.about in line and line.endswith(entry.source)
    for name, preset in presets.PRESETS.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert preset.summary in line and line.endswith(preset.source)


def test_as_json_with_parameters_counted(capsys):
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [mixer["name"] for mixer in found["mixers"]] == list(MIXERS)
    sizes = {preset["name"]: preset["parameters"] for preset in found["presets"]}
    assert list(sizes) == presets.names()
    assert sizes["gpt2-124m"] == 124_439_808 and sizes["lens-gpt2-124m"] == 209_420_988


@pytest.mark.parametrize("source", sorted({entry.source for entry in MIXERS.values()}))
def test_sources_name_a_document(source):
    assert source.startswith(("seeds/", "decisions.md §"))
