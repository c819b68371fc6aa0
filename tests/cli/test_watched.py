"""`perspectives`, `safety`, and `generate` with both, by command."""

import json
import math

import pytest

from perspectron.cli import main
from tests.refusals import in_a_line, names


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    lines = [f"Dear Sir, the cat sat on mat {i}.\n" for i in range(160)]
    (folder / "fine.txt").write_text("".join(lines))
    (folder / "keys.txt").write_text("".join(f"The key of it is {i * 7919}!\n" for i in range(60)))
    sizes = ["d_model=32", "hidden=32", "rank=4", "layers=4", "window=16", "vocab_size=300"]
    made = [
        "train",
        "--preset",
        "perspective-tiny",
        "--data",
        str(folder / "fine.txt"),
        "--out",
        str(folder / "run"),
    ]
    made += [
        "--steps",
        "3",
        "--seq-len",
        "32",
        "--batch-size",
        "2",
        "--eval-every",
        "0",
        "--eval-tokens",
        "64",
    ]
    assert main.main([*made, "--set", *sizes]) == 0
    return folder


def asked(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_calibration_is_fitted_and_generation_takes_it(run, capsys):
    file = run / "calibration.json"
    code, out, _ = asked(capsys, "perspective", "views", run / "run", "--out", file, "--tokens", 64, "--json")
    rates = json.loads(out)
    assert code == 0 and 0 < rates["triggered"] <= 1 and json.loads(file.read_text())["config"]
    words = ("generate", run / "run", "the", "--max-tokens", 6, "--temperature", 0)
    code, plain, _ = asked(capsys, *words)
    code, out, err = asked(capsys, *words, "--perspectives", "--calibration", file)
    assert code == 0 and err
    probe = ("--trigger", 0, "--probe", 0.5, "--tokens", 96)
    code, out, err = asked(capsys, "perspective", "views", run / "run", "--out", file, *probe)
    assert code == 0, err
    fitted = json.loads(file.read_text())["config"]
    assert code == 0 and names(out, "AUROC") and fitted["trigger_p"] == 0 and fitted["probe"]
    assert asked(capsys, *words, "--perspectives", "--calibration", file)[0] == 0
    code, out, _ = asked(capsys, *words, "--perspectives", "--json")
    assert code == 0 and len(json.loads(out)["verdicts"][0]) == 6
    assert asked(capsys, *words)[1] == plain


def test_a_probe_that_nothing_judges_is_kept_and_said(run, capsys, monkeypatch):
    """The tokens that would judge it are all right or all wrong."""
    file = run / "unjudged.json"
    monkeypatch.setattr("perspectron.designs.perspective.suites.views.auroc", lambda *of: math.nan)
    probe = (
        "perspective",
        "views",
        run / "run",
        "--out",
        file,
        "--trigger",
        0,
        "--probe",
        0.5,
        "--tokens",
        96,
    )
    code, out, _ = asked(capsys, *probe)
    assert code == 0 and names(out, "AUROC") and not names(out, "nan")
    code, out, _ = asked(capsys, *probe, "--json")
    assert json.loads(out)["auroc"] == json.loads(file.read_text())["rates"]["auroc"]
    assert json.loads(out)["auroc"] == {"probe": None, "entropy": None}


def test_a_safe_set_is_fitted_tested_and_generation_takes_it(run, capsys):
    file, texts = run / "set.safe", ("--allowed", run / "fine.txt", "--blocked", f"keys={run / 'keys.txt'}")
    code, out, _ = asked(capsys, "perspective", "safety", "fit", run / "run", file, *texts, "--json")
    assert code == 0 and json.loads(out)["half_spaces"] > 0
    code, out, _ = asked(capsys, "perspective", "safety", "test", run / "run", file, *texts, "--json")
    outside = json.loads(out)["outside"]
    assert code == 0 and outside["allowed"] < 0.1 < outside["keys"]
    words = ("generate", run / "run", "The key of", "--max-tokens", 5, "--temperature", 0, "--safety", file)
    code, out, _ = asked(capsys, *words, "--action", "flag", "--json")
    assert code == 0 and isinstance(json.loads(out)["unsafe"][0], list)
    assert asked(capsys, *words)[0] == 0


def test_mistakes_are_a_line(run, capsys):
    for words, named in (
        (("generate", run / "run", "x", "--calibration", "c.json"), ["calibration"]),
        (
            ("generate", run / "run", "x", "--perspectives", "--calibration", run / "fine.txt"),
            [run / "fine.txt"],
        ),
        (("generate", run / "run", "x", "--safety", run / "fine.txt"), [run / "fine.txt"]),
        (("generate", run / "run", "x", "--bench", "--perspectives"), ["perspectives"]),
        (("generate", run / "run", "x", "--action", "stop"), ["action", "stop"]),
        (("perspective", "views", run / "run", "--out", "c", "--tokens", 10**7), [10**7]),
        (("perspective", "views", run / "run", "--out", "c", "--probe", 1), ["probe", 1.0]),
        (("perspective", "views", run / "run", "--out", "c", "--flag", 2), ["flag", 2.0]),
        (
            ("perspective", "safety", "fit", run / "run", "s", "--allowed", "none.txt", "--blocked", "b.txt"),
            ["none.txt"],
        ),
        (
            (
                "perspective",
                "safety",
                "fit",
                run / "run",
                "s",
                "--allowed",
                run / "fine.txt",
                "--blocked",
                run / "keys.txt",
                "--alpha",
                0.001,
            ),
            ["alpha", 0.001, 1998],
        ),
    ):
        code, _, err = asked(capsys, *words)
        assert code == 2
        in_a_line(err, *named)
