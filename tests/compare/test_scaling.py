"""A scaling study: the lines by hand, a study in slices, and what is refused."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from perspectron.cli.main import main
from perspectron.compare import pool, scaling
from perspectron.compare.report.summary import WINDOWS
from perspectron.compare.scaling import Study
from perspectron.presets.rates import rate
from perspectron.util.errors import ConfigError
from tests.refusals import names, refused

COMMAND = [
    "scale", "--designs", "transformer,ssd", "--sizes", "60k,120k", "--per-parameter", "0.05", "--seeds", "1",
    "--vocab-size", "300", "--seq-len", "32", "--batch-size", "4", "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 80)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text) -> Path:
    out = tmp_path_factory.mktemp("scaled") / "whole"
    assert main([*COMMAND, "--data", str(text), "--out", str(out)]) == 0
    return out


def results(out: Path) -> dict:
    return json.loads((out / scaling.RESULTS).read_text())


def test_every_cell_is_there_with_tokens_by_its_size(whole):
    found = results(whole)
    cells = {(c["design"], c["size"], c["seed"]): c for c in found["cells"]}
    assert len(cells) == 4 == len(found["cells"])
    for (_, size, _), cell in cells.items():
        assert abs(cell["parameters"] / size - 1) < 0.02
        assert cell["tokens"] == math.ceil(0.05 * size / 128) * 128
    rates = {size: {c["rate"] for c in found["cells"] if c["size"] == size} for size in (60_000, 120_000)}
    assert all(len(each) <= 2 for each in rates.values())
    page = (whole / scaling.PAGE).read_text()
    assert (
        "Mamba-2" in page and page.count("<svg") == 2 and "http" not in re.sub(r'xmlns\S*="[^"]*"', "", page)
    )


def test_stopped_on_the_way_it_ends_with_the_same_numbers(whole, tmp_path, monkeypatch, capsys):
    out = Path(shutil.copytree(whole, tmp_path / "slices"))
    shutil.rmtree(out / "120k" / "cells" / "ssd")
    (out / "120k" / "results.json").unlink()

    def stops(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "work", stops)
        before = signal.getsignal(signal.SIGTERM)
        assert main(["scale", "--resume", str(out), "--minutes", "60"]) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before
    assert len(results(out)["cells"]) == 2 and results(out)["lines"][WINDOWS]["ssd"]["alpha"] is None
    assert main(["scale", "--resume", str(out)]) == 0
    plain = [
        [{k: v for k, v in c.items() if k != "seconds"} for c in results(x)["cells"]] for x in (out, whole)
    ]
    assert plain[0] == plain[1] and results(out)["lines"] == results(whole)["lines"]


def cell(design: str, size: int, seed: int, loss: float) -> dict:
    return {"design": design, "size": size, "seed": seed, "parameters": 1.01 * size, WINDOWS: loss}


def test_lines_and_crossings_are_those_of_the_numbers_they_were_made_of():
    """Two laws that cross at 4 million parameters, two seeds with a factor each."""
    study = Study(("a", "b", "c"), (100_000, 300_000, 1_000_000), seeds=2)
    laws = {"a": (20.0, 0.15), "b": (20.0 * (1.01 * 4e6) ** 0.05, 0.2), "c": (60.0, 0.15)}
    cells = [
        cell(name, size, seed, A * (1 + 0.01 * seed) * (1.01 * size) ** -alpha)
        for name, (A, alpha) in laws.items()
        for size in study.sizes
        for seed in range(2)
    ]
    lines = scaling.lines_of(cells, study, WINDOWS)
    for name, (A, alpha) in laws.items():
        told = scaling.told(lines[name])
        assert told["alpha"] == pytest.approx(alpha) and told["off"] < 1e-4
        assert told["A"] == pytest.approx(A * math.sqrt(1.01))
    (cross,) = scaling.crossings(lines, study.sizes)
    assert cross["designs"] == ["a", "b"] and cross["ahead_beyond"] == "b"
    assert cross["parameters"] == pytest.approx(1.01 * 4e6)


def test_rates_go_by_the_cube_root_of_the_parameters(tmp_path):
    study = Study(("transformer", "ssd"), (100_000, 800_000), rates=(8e-3,))
    assert scaling.transferred(tmp_path, study, 100_000) == {"transformer": 8e-3, "ssd": 8e-3}
    assert scaling.transferred(tmp_path, study, 800_000) == {"transformer": 4e-3, "ssd": 4e-3}
    tried = dataclasses.replace(study, rates=(8e-3, 1.6e-2))
    assert scaling.transferred(tmp_path, tried, 100_000) == {}
    (tmp_path / "100k").mkdir()
    chosen = {"transformer": [1.6e-2, 0.2], "ssd": [8e-3, 0.2]}
    (tmp_path / "100k" / "rates.json").write_text(json.dumps({"chosen": chosen, "tried": {}}))
    assert scaling.transferred(tmp_path, tried, 800_000) == {"transformer": 8e-3, "ssd": 4e-3}
    plain = scaling.transferred(tmp_path, dataclasses.replace(study, rates=()), 800_000)
    assert plain == {name: rate(name, 800_000) for name in study.designs}


def test_a_seed_that_lacks_a_size_has_no_line_and_no_interval_comes_of_one():
    study = Study(("a",), (100_000, 200_000), seeds=2)
    cells = [cell("a", 100_000, 0, 3.0), cell("a", 200_000, 0, 2.5), cell("a", 100_000, 1, 3.1)]
    told = scaling.told(scaling.lines_of(cells, study, WINDOWS)["a"])
    assert told["seeds"] == 1 and told["interval"] is None
    assert told["alpha"] == pytest.approx(math.log(3 / 2.5) / math.log(2))
    rng = np.random.default_rng(0)
    noisy = [cell("a", size, seed, 3 + rng.normal()) for size in study.sizes for seed in (0, 1)]
    low, high = scaling.told(scaling.lines_of(noisy, study, WINDOWS)["a"])["interval"]
    assert low < high


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (["--designs", "transformr"], "transformr"), (["--sizes", "2k"], "params"), (["--sizes", "60k,60k"], "sizes"),
        (["--sizes", "120k,60k"], "sizes"), (["--per-parameter", "0"], "per_parameter"), (["--seeds", "0"], "seeds"),
        (["--rates", "-1"], "rates"), (["--minutes", "0"], "minutes"), (["--jobs", "0"], "jobs"),
        (["--per-parameter", "1000"], "per_parameter"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_trained(changed, field, text, tmp_path, capsys):
    assert (
        main([*COMMAND, "--data", str(text), "--out", str(tmp_path / "out"), *changed])
        == ConfigError.exit_code
    )
    assert names(capsys.readouterr().err, field)
    assert not list((tmp_path / "out").glob("*/cells"))


def test_a_folder_of_another_study_is_not_mixed(whole, text, capsys):
    again = [*COMMAND, "--data", str(text), "--out", str(whole), "--seeds", "3"]
    assert main(again) == ConfigError.exit_code and names(capsys.readouterr().err, "seeds")
    assert main(["scale", "--resume", str(whole), "--seeds", "5"]) == ConfigError.exit_code
    with refused(ConfigError):
        scaling.Study(("a",), ())
