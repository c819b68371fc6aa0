"""`eval --suite` on a run and on an artifact, and options that are not a suite's."""

import json
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.eval.suites import SUITES

OF_TEXT = ("perplexity", "position", "calibration", "robustness")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    (folder / "text").mkdir()
    for i in range(6):
        (folder / "text" / f"{i}.txt").write_text(f"the cat sat on mat {i}, and the dog on the log. " * 60)
    sizes = [
        "d_model=32",
        "layers=2",
        "hidden=32",
        "rank=8",
        "heads=2",
        "kv_heads=1",
        "window=16",
        "vocab_size=300",
    ]
    train = [
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--eval-tokens",
        "64",
        "--dtype",
        "float32",
    ]
    train += ["--data", str(folder / "text"), "--out", str(folder / "run")]
    assert main(["train", "--preset", "perspective-tiny-dense", *train, "--set", *sizes]) == 0
    assert main(["quantize", str(folder / "run"), "--out", str(folder / "packed")]) == 0
    return folder / "run"


@pytest.mark.parametrize("suite", OF_TEXT)
def test_a_suite_of_a_run_and_of_an_artifact(run, suite, capsys):
    results = []
    for folder in (run, run.with_name("packed")):
        capsys.readouterr()
        assert main(["eval", str(folder), "--suite", suite, "--tokens", "512", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0].keys() == results[1].keys()
    assert main(["eval", str(run), "--suite", suite, "--tokens", "512"]) == 0
    assert capsys.readouterr().out.startswith("perspective-tiny-dense: ")


def test_options_reach_the_suite(run, capsys):
    given = ["--set", "bins=4", "--tokens", "200", "--seq-len", "20"]
    assert main(["eval", str(run), "--suite", "calibration", *given, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (len(answer["bins"]), answer["tokens"]) == (4, 199)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nope"], f"suite = 'nope', must be one of {', '.join(SUITES)}"),
        (["--suite", "position", "--carry"], "option of suite position = 'carry', must be one of tokens"),
        (
            ["--suite", "position", "--set", "bins=4"],
            "option of suite position = 'bins', must be one of tokens",
        ),
        (["--suite", "calibration", "--set", "bins=0"], "bins = 0, must be ≥ 1"),
        (
            ["--suite", "calibration", "--set", "bins=many"],
            "suite calibration.bins = 'many', must be of type int",
        ),
        (["--suite", "robustness", "--seed", "-1"], "seed = -1, must be in"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(run, arguments, words, capsys):
    assert main(["eval", str(run), *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_the_harness_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("perspectron.cli.harness.find_spec", lambda _: None)
    assert main(["lm-eval", "--tasks", "x"]) == 2
    assert "must be installed: pip install 'perspectron[eval]'" in capsys.readouterr().err
