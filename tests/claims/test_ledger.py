"""The ledger is whole: every document, no empty cell, no command that does not run, and the file that is committed is
the one that the commands give."""

import json
import shlex
from dataclasses import astuple
from pathlib import Path

import pytest

from perspectron.claims import ledger
from perspectron.claims.claim import MISSING, Row
from perspectron.claims.results import Results
from perspectron.cli import main

ROOT = Path(__file__).resolve().parents[2]
LEDGER, RESULTS = ROOT / "docs" / "claims.md", ROOT / "docs" / "results"
CLAIMS = ledger.claims()


def test_every_document_has_its_claims_under_ids_of_its_own():
    assert len(CLAIMS) > 60
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for name, (_, found) in ledger.DOCUMENTS.items():
        assert len(found) >= 20
        assert all(claim.id.startswith(f"{name}-") for claim in found)


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS} - {""}))
def test_what_takes_long_is_a_command_that_there_is(command):
    program, *arguments = shlex.split(command)
    if program == "perspectron":
        main._parse(arguments)
    else:
        script = ROOT / arguments[0]
        text = script.read_text() + (ROOT / "benchmarks/common.py").read_text()
        assert program == "python"
        assert all(f'"{option}"' in text for option in arguments if option.startswith("--"))
        assert f'"{script.stem}"' in (ROOT / "tests/test_benchmarks.py").read_text()  # where it is run


def test_every_row_is_what_its_command_gives(capsys):
    rows = []
    for claim in CLAIMS:
        assert main.main(["claims", "--id", claim.id, "--results", str(RESULTS), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["claims"]
        rows.append(Row(**found))
    assert ledger.markdown(rows, Results(RESULTS)) == LEDGER.read_text(encoding="utf-8"), (
        "docs/claims.md is old: perspectron claims --out docs/claims.md"
    )
    for row in rows:
        assert all(cell.strip() for cell in (*astuple(row)[:6], row.judged, row.command)), row
        assert f"| {row.id} |" in LEDGER.read_text(encoding="utf-8")


def test_every_row_is_measured():
    missing = [
        line.split("|")[1].strip() for line in LEDGER.read_text().splitlines() if f"| {MISSING}: " in line
    ]
    assert missing == []


def test_of_a_person_at_the_terminal(capsys, tmp_path):
    assert main.main(["claims", "--id", "pdr-flops", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "   claimed: ~110 M FLOPs",
        "  measured: 110.1 M FLOPs",
        "   verdict: holds",
    ]
    out = tmp_path / "claims.md"
    assert main.main(["claims", "--id", "lens-each", "--results", str(tmp_path), "--out", str(out)]) == 0
    assert "| lens-each | §Total |" in out.read_text()


def test_mistakes_are_one_line(capsys, tmp_path):
    assert main.main(["claims", "--id", "pdr-flopz"]) == 2
    assert "pdr-flops" in capsys.readouterr().err
    (tmp_path / "kernels.json").write_text("{")
    assert main.main(["claims", "--id", "drm-o1-time", "--results", str(tmp_path)]) == 2
    (tmp_path / "kernels.json").write_text('{"results": {}}')
    assert main.main(["claims", "--id", "drm-o1-time", "--results", str(tmp_path)]) == 2
    assert "kernels.json: has no drm" in capsys.readouterr().err
