"""The ledger is whole: every document, no empty cell, no command that does not run, and the file that is committed is
the one that the commands give."""

import json
import shlex
from dataclasses import astuple
from pathlib import Path

import pytest

from claims import ledger
from claims.__main__ import main as ask
from claims.claim import AS_BUILT, MISSING, Row, judge
from claims.results import COMMANDS, COMPARISONS, Results, command
from perspectron.cli import main
from perspectron.util.config import between_commas
from tests.claims.conftest import ARMS
from tests.refusals import in_a_line

ROOT = Path(__file__).resolve().parents[2]
LEDGER, RESULTS = ROOT / "docs" / "claims.md", ROOT / "results"
CLAIMS = ledger.claims()


def test_every_document_has_its_claims_under_ids_of_its_own():
    assert len(CLAIMS) > 60
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for name, document in ledger.DOCUMENTS.items():
        assert len(document.claims) >= 20
        assert all(claim.id.startswith(f"{name}-") for claim in document.claims)


@pytest.mark.parametrize("name", [*COMMANDS, *COMPARISONS])
def test_what_takes_long_is_a_command_that_puts_its_results_where_the_ledger_reads_them(name, tmp_path):
    made, *copied = [shlex.split(part) for part in command(name).split("&&")]
    target = f"results/{name}.json"
    if made[0] == "perspectron":
        asked = main._parse(made[1:])
        if name == "compare":
            assert copied == [["python", "-m", "claims.keep", str(asked.out), target]]
        else:
            assert copied == [["cp", f"{asked.out}/results.json", target]]  # where compare.results writes
    else:
        script = ROOT / made[1]
        text = script.read_text() + (ROOT / "benchmarks/common.py").read_text()
        assert (made[0], copied, made[-2:]) == ("python", [], ["--json", target])
        assert all(f'"{option}"' in text for option in made if option.startswith("--"))
        assert f'"{script.stem}"' in (ROOT / "tests/test_benchmarks.py").read_text()  # where it is run


def test_the_reference_run_in_one_command_has_the_designs_and_settings_of_the_joined_runs():
    words = shlex.split(command("reference/results"))
    kept = json.loads((RESULTS / "reference" / "results.json").read_text())
    asked = main._parse(words[1 : words.index("&&")])
    assert set(between_commas(asked.designs)) == set(kept["designs"])
    assert [*asked.rates] == kept["plan"]["rates"] and [*asked.warmups] == kept["plan"]["warmups"]


def test_a_row_names_the_command_of_the_file_that_it_reads(tmp_path):
    empty = Results(tmp_path)
    for claim in CLAIMS:
        if claim.command:
            found = judge(claim, empty)
            assert (found.verdict, found.why) == (MISSING, f"run `{claim.command}`"), claim.id


def test_what_was_kept_is_what_its_command_makes():
    """With other options at most where things are put, in which order, and what is the default."""
    for name, found in Results(RESULTS):
        if name in COMMANDS:
            assert set(shlex.split(COMMANDS[name])) <= set(shlex.split(found["conditions"]["command"])), name


@pytest.mark.slow
def test_the_ledger_is_what_the_command_gives(capsys):
    """All rows at once; that a row alone is the same, of some."""
    assert ask(["--results", str(RESULTS), "--json"]) == 0
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)["claims"]]
    assert [row.id for row in rows] == [claim.id for claim in CLAIMS]
    assert ledger.markdown(rows, Results(RESULTS)) == LEDGER.read_text(encoding="utf-8"), (
        "docs/claims.md is old: python -m claims --out docs/claims.md"
    )
    for row in rows:
        assert all(cell.strip() for cell in (*astuple(row)[:6], row.judged, row.command)), row
        assert row.verdict != MISSING or "results/" in row.command, row
    for row in rows[::40]:
        assert ask(["--id", row.id, "--results", str(RESULTS), "--json"]) == 0
        assert Row(**json.loads(capsys.readouterr().out)["claims"][0]) == row


def test_every_row_is_measured_whose_results_are_kept():
    """A row may wait for a file that is not there, or for recall while its arms come one by one; for nothing else."""
    results = Results(RESULTS)
    kept = dict(results)
    if not set(ARMS) <= set(_arms(kept)):
        kept.pop("recall", None)
    absent = {command(name) for name in (*COMMANDS, *COMPARISONS) if name not in kept}
    rows = [judge(claim, results) for claim in CLAIMS if claim.command]
    assert [row.id for row in rows if row.verdict == MISSING and row.command not in absent] == []


def _arms(kept):
    return kept["recall"]["results"]["arms"] if "recall" in kept else {}


def test_with_all_results_every_row_is_measured(kept):
    results = Results(kept())
    rows = [judge(claim, results) for claim in CLAIMS if claim.command]
    asked = {command(name) for name in (*COMPARISONS, "recall")}
    assert {row.command for row in rows} >= asked  # of all files some claim is read
    assert [row.id for row in rows if row.verdict == MISSING and row.command in asked] == []


def test_what_the_library_took_over_it_has():
    """Every part that a document names and the library has is as the document has it."""
    own = Results(RESULTS)
    rows = [judge(claim, own) for claim in CLAIMS if claim.built and not claim.command]
    assert [row.id for row in rows if row.judged != AS_BUILT] == []


def test_of_a_person_at_the_terminal(capsys, tmp_path):
    assert ask(["--id", "pdr-flops", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "   claimed: ~110 M FLOPs",
        "  measured: 110.1 M FLOPs",
        "   verdict: holds",
    ]
    out = tmp_path / "claims.md"
    assert ask(["--id", "lens-each", "--results", str(tmp_path), "--out", str(out)]) == 0
    assert "| lens-each | §Total |" in out.read_text()


def test_mistakes_are_one_line(capsys, tmp_path):
    def refused(id, folder=tmp_path):
        assert ask(["--id", id, "--results", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "pdr-flops" in refused("pdr-flopz")
    in_a_line(refused("pdr-flops", tmp_path / "none"), "results")
    kernels, compare = tmp_path / "kernels.json", tmp_path / "compare.json"
    kernels.write_text("{")
    in_a_line(refused("drm-o1-time"), kernels)
    kernels.write_text('{"results": {}}')
    in_a_line(refused("drm-o1-time"), "kernels.json", "drm")
    kernels.unlink()
    compare.write_text(
        '{"version": 1, "kind": "designs", "settings": {}, "arms": {}}'
    )  # the plan of a comparison
    in_a_line(refused("adr-loss"), "compare.json")
    compare.write_text('{"version": 9, "plan": {}, "designs": {}}')
    in_a_line(refused("adr-loss"), "compare.json", 9, 1)
