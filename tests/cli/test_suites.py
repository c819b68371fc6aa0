"""`eval --suite` on a run and on an artifact, and options that are not a suite's."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perspectron.cli.harness import open_answers
from perspectron.cli.main import main
from perspectron.eval import recall, suites
from perspectron.util import registry
from tests.cli.small import SIZES
from tests.refusals import in_a_line, names

OF_TEXT = ("perplexity", "position", "calibration", "robustness")


TRAIN = ["--preset", "perspective-tiny-dense", "--steps", "2", "--batch-size", "2", "--seq-len", "32"]
TRAIN += ["--eval-tokens", "64"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("suites") / "text"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat {i}, and the dog on the log. " * 60)
    return folder


def trained(text: Path, name: str, dtype: str) -> Path:
    given = ["--data", str(text), "--out", str(text.with_name(name)), "--dtype", dtype]
    assert main(["train", *TRAIN, *given, "--set", *SIZES, "layers=2"]) == 0
    return text.with_name(name)


@pytest.fixture(scope="module")
def run(text) -> Path:
    folder = trained(text, "run", "float32")
    assert main(["quantize", str(folder), "--out", str(folder.with_name("packed"))]) == 0
    return folder


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
    assert (len(answer["bins"]), answer["tokens"]) == (4, 200)


@pytest.fixture
def moved(run, text) -> Iterator[Path]:
    """The run, while its text is gone, tokenised and not."""
    gone = [(text, text.with_name("moved")), (run / "data", run.with_name("moved-data"))]
    for here, there in gone:
        here.rename(there)
    yield run
    for here, there in gone:
        there.rename(here)


def test_cost_needs_no_text(moved, capsys):
    tiny = ["contexts=[8,16]", "rounds=1", "visit=1", "seconds=0", "batch_size=1", "seq_len=8"]
    assert main(["eval", str(moved), "--suite", "cost", "--json", "--set", *tiny]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["decode_ms"]) == set(answer["state_bytes"]) == {"8", "16"}
    assert answer["transformer"] or answer["no_transformer"]
    assert main(["eval", str(moved), "--suite", "position"]) == 2  # what reads text says so


def test_recall_needs_no_text(moved, monkeypatch, capsys):
    """On one task, in two steps."""
    quick = recall.PROFILES["quick"]
    tiny = replace(quick, settings=(replace(quick.settings[0], steps=2),))
    monkeypatch.setattr(recall, "PROFILES", {"quick": tiny})
    monkeypatch.setattr(recall, "TEST_TEXTS", 16)
    sizes = ["d_model=32", "layers=2", "batch_tokens=64"]
    for folder in (moved, moved.with_name("packed")):
        assert main(["eval", str(folder), "--suite", "recall", "--json", "--set", *sizes]) == 0
        answer = json.loads(capsys.readouterr().out)
        (setting,) = answer["tasks"]["mqar"]["settings"]
        assert (answer["design"], len(setting["accuracy"]), setting["steps"]) == ("perspective", 1, [2])
    asked = ["--suite", "recall", "--device", "cpu", "--seed", "3", "--json"]
    assert main(["eval", str(moved), *asked, "--set", *sizes]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["seeds"] == [3] and other["tasks"]["mqar"]["settings"][0]["rates"] != setting["rates"]
    assert main(["eval", str(moved), "--suite", "recall", "--set", *sizes]) == 0
    assert names(capsys.readouterr().out, "mqar")


def test_the_harness_computes_as_eval_does(run, text, capsys):
    """A run of bfloat16 in bfloat16, to the likelihoods of plain forwards, unless it is told otherwise."""
    half = trained(text, "half", "bfloat16")
    words = "the cat sat on mat 3, and the dog"
    sums = {}
    for folder in (half, run):
        for dtype in ("auto", "float32", "bfloat16"):
            asked = open_answers(str(folder), dtype=dtype, device="cpu")
            sums[folder.name, dtype] = asked.rolling([words])[0]
            ids = torch.tensor([[*asked.tokenizer.specials.prefix, *asked.tokenizer.encode(words)]])
            with torch.no_grad(), torch.autocast("cpu", asked.dtype, enabled=asked.dtype is not None):
                log_p_TV = asked.model(ids[:, :-1]).logits[0].float().log_softmax(1)
            ours = log_p_TV.gather(1, ids[0, 1:, None]).sum().item()
            assert sums[folder.name, dtype] == pytest.approx(ours, abs=1e-4)
    assert sums["half", "auto"] == sums["half", "bfloat16"] != sums["half", "float32"]
    assert sums["run", "auto"] == sums["run", "float32"] != sums["run", "bfloat16"]
    assert open_answers(str(run.with_name("packed"))).dtype is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "nope"], ["suite", "nope", *suites.names()]),
        (["--suite", "position", "--set", "bins=4"], ["position", "bins", "tokens"]),
        (["--suite", "calibration", "--set", "bins=0"], ["bins", 0]),
        (["--tokens", "1"], ["tokens", 1]),
        (["--suite", "conversion", "--set", "contexts=[]"], ["contexts"]),
        (["--suite", "calibration", "--set", "bins=many"], ["calibration.bins", "many"]),
        (["--suite", "robustness", "--seed", "-1"], ["seed", -1]),
        (["--suite", "position", "--seed", "1"], ["seed", 1, "position"]),
        (["--suite", "cost", "--seed", "0"], ["seed", 0, "cost"]),
        (["--suite", "cost", "--data", "x"], ["data", "x", "cost"]),
        (["--suite", "recall", "--seq-len", "8"], ["seq_len", 8]),
        (["--suite", "recall", "--tokens", "8"], ["recall", "tokens", "profile"]),
        (["--heldout", "0.1"], ["heldout", "--data"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(run, arguments, named, capsys):
    assert main(["eval", str(run), *arguments]) == 2
    said = capsys.readouterr()
    in_a_line(said.err, *named)
    assert said.out == ""


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({}, []),
        ({"WINDOWS": False}, ["seq_len"]),
        ({"DRAWS": False, "READS_TEXT": False}, ["seed", "seq_len", "data"]),
    ],
    ids=str,
)
def test_a_suite_of_a_design_says_which_options_do_nothing(told, refused, monkeypatch, capsys):
    module = SimpleNamespace(Options=suites.SUITES["position"].code.Options, **told)
    monkeypatch.setitem(registry._designs, "toy", registry.Design("toy", suites={"own": module}))
    for field, value in (("seed", "1"), ("seq_len", "8"), ("data", "x")):
        assert main(["eval", "nowhere", "--suite", "own", f"--{field.replace('_', '-')}", value]) == 2
        in_a_line(capsys.readouterr().err, *((field, value, "own") if field in refused else ("nowhere",)))


def test_the_harness_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("perspectron.cli.harness.find_spec", lambda _: None)
    assert main(["lm-eval", "--tasks", "x"]) == 2
    said = capsys.readouterr()
    in_a_line(said.err, "lm-eval", "perspectron[eval]")
    assert main(["lm-eval", "--help"]) == 0
    said = capsys.readouterr()
    assert names(said.out, "lm-eval", "perspectron[eval]")
    assert said.err == ""
