"""A scaling study: the lines by hand, a study in slices, and what is refused."""

import dataclasses
import errno
import functools
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
from perspectron.compare import laws, pool, run, scaling
from perspectron.compare.laws import Point
from perspectron.compare.report.scaling import crossing_rows, html, sentence
from perspectron.compare.report.summary import STREAMING, WINDOWS
from perspectron.compare.run import Rate
from perspectron.compare.scaling import Study
from perspectron.data import Tokenizer
from perspectron.presets.rates import FALL, rate
from perspectron.train import checkpoint
from perspectron.train.resume import changes
from perspectron.util.config import dump
from perspectron.util.errors import ConfigError, StorageError
from tests.compare.here import in_this_process  # noqa: F401 - a fixture of this module
from tests.refusals import in_a_line, names, refused

pytestmark = pytest.mark.slow

COMMAND = [
    "scale", "--designs", "transformer,ssd", "--sizes", "60k,120k", "--per-parameter", "0.05", "--seeds", "1",
    "--vocab-size", "300", "--seq-len", "32", "--batch-size", "4", "--dtype", "float32",
]  # fmt: skip
POINTS = Point(100_000, 20.0), Point(800_000, 20.0)


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
    shutil.rmtree(out / "120k-0.05" / "cells" / "ssd")
    for path in (out / "120k-0.05" / "results.json", out / scaling.RESULTS):
        path.unlink()

    def stops(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "work", stops)
        before = signal.getsignal(signal.SIGTERM)
        assert main(["scale", "--resume", str(out), "--minutes", "60"]) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == before
    assert re.search(rf"scale --resume {re.escape(str(out))}$", capsys.readouterr().err, re.MULTILINE)
    assert main(["compare", "--resume", str(out / "120k-0.05")]) == 2
    assert names(capsys.readouterr().err.splitlines()[-1], "resume", "scale", out)
    assert len(results(out)["cells"]) == 2 and results(out)["laws"][WINDOWS]["ssd"]["alpha"] is None
    assert main(["scale", "--resume", str(out)]) == 0
    plain = [
        [{k: v for k, v in c.items() if k != "seconds"} for c in results(x)["cells"]] for x in (out, whole)
    ]
    assert plain[0] == plain[1] and results(out)["laws"] == results(whole)["laws"]


def test_a_study_goes_on_from_its_results_alone(whole, text, tmp_path, capsys):
    shutil.copy(whole / scaling.RESULTS, tmp_path)
    assert main(["scale", "--resume", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("2 of 2 trainings are those of") == 2
    assert results(tmp_path) == results(whole) and not list(tmp_path.glob("*-0.05"))
    other = json.dumps(results(whole) | {"ids": "0" * 64})
    (tmp_path / scaling.RESULTS).write_text(other)
    copied = shutil.copytree(text, tmp_path / "copied")  # the same text elsewhere, but for the digest
    again = [*COMMAND, "--data", str(copied), "--out", str(tmp_path), "--sizes", "60k,120k,180k"]
    assert main(again) == ConfigError.exit_code and names(capsys.readouterr().err, "data", scaling.RESULTS)
    assert main([*again, "--seeds", "2"]) == ConfigError.exit_code and names(capsys.readouterr().err, "seeds")
    assert (tmp_path / scaling.RESULTS).read_text() == other
    assert not (tmp_path / "data").exists() and not list(tmp_path.glob("*-0.05"))


def test_a_study_goes_on_from_some_of_its_results(whole, tmp_path, monkeypatch, capsys):
    """Also when it is stopped before what is left has begun."""
    found = results(whole)
    lost = next(c for c in found["cells"] if (c["design"], c["size"]) == ("ssd", 120_000))
    found["cells"].remove(lost)
    (tmp_path / scaling.RESULTS).write_text(json.dumps(found))

    def stops(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "work", stops)
        assert main(["scale", "--resume", str(tmp_path), "--minutes", "60"]) == 128 + signal.SIGTERM
    assert len(results(tmp_path)["cells"]) == 3
    assert main(["scale", "--resume", str(tmp_path)]) == 0
    assert "120k-0.05: 1 of 2 trainings" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "120k-0.05" / "cells").iterdir()] == ["ssd"]
    plain = [
        sorted(str({k: v for k, v in c.items() if k != "seconds"}) for c in results(x)["cells"])
        for x in (tmp_path, whole)
    ]
    assert plain[0] == plain[1] and results(tmp_path)["laws"] == results(whole)["laws"]


def test_results_of_another_study_are_not_taken_for_ones_own(tmp_path):
    """By their number alone: three seeds of two designs, of which one seed is there, as one of two others."""
    known = Study(("kda", "ssd"), (100_000,), seeds=3)
    cells = [cell(name, 100_000, 0, 2.0) for name in known.designs]
    found = {"version": scaling.VERSION, "study": dump(known), "ids": "a", "rates": {}, "cells": cells}
    (tmp_path / scaling.RESULTS).write_text(json.dumps(found))
    assert scaling.kept(tmp_path, known) == {Point(100_000, 20.0): {("kda", 0), ("ssd", 0)}}
    for other in ({"designs": ("gla", "gdn")}, {"batch_size": 4}, {"sizes": (90_000, 100_000)}):
        study = dataclasses.replace(known, **{"seeds": 1} | other)
        assert scaling.kept(tmp_path, study) == {} and scaling.results_in(tmp_path, study) == {}
    one = dataclasses.replace(known, seeds=1)
    found["study"] = dump(one)
    (tmp_path / scaling.RESULTS).write_text(json.dumps(found))
    elsewhere = dataclasses.replace(one, data="/elsewhere", sizes=(100_000, 200_000))
    assert scaling.kept(tmp_path, elsewhere) == {Point(100_000, 20.0): {("kda", 0), ("ssd", 0)}}
    assert scaling.collected(tmp_path, elsewhere)["cells"] == cells
    for broken in ([], {"version": scaling.VERSION}, {"version": scaling.VERSION, "study": 5}):
        (tmp_path / scaling.RESULTS).write_text(json.dumps(broken))
        if broken:
            with refused(ConfigError, scaling.RESULTS):
                scaling.results_in(tmp_path)
        else:
            assert scaling.results_in(tmp_path) == {}


def test_results_alone_say_which_rates_were_best(tmp_path):
    study = Study(("transformer", "ssd"), (100_000, 800_000), rates=(8e-3, 1.6e-2))
    best = {"transformer": 1.1e-2, "ssd": 2.4e-2}
    known = {"version": scaling.VERSION, "study": dump(study), "rates": {"20": best}}
    (tmp_path / scaling.RESULTS).write_text(json.dumps(known))
    share = 8.0**FALL
    assert scaling.transferred(tmp_path, study, POINTS[1]) == pytest.approx(
        {name: rate * share for name, rate in best.items()}, rel=5e-3
    )
    assert scaling.collected(tmp_path, study)["rates"] == {"20": best}
    assert scaling.transferred(tmp_path, study, POINTS[0]) == best
    small = scaling.folder_of(tmp_path, POINTS[0])
    small.mkdir()  # of a size that goes on with these rates
    run.keep_rates(small, {name: Rate(lr, 0.2) for name, lr in best.items()})
    assert scaling.collected(tmp_path, study)["rates"] == {"20": best}
    assert scaling.transferred(tmp_path, study, POINTS[1])["ssd"] == pytest.approx(2.4e-2 * share, rel=5e-3)


def test_lines_of_designs_that_a_study_lacks_are_left_out(whole, tmp_path, capsys):
    """As in results that someone put together of others."""
    found = results(whole)
    more = [cell | {"design": "gla"} for cell in found["cells"]] + [
        cell | {"seed": 1} for cell in found["cells"]
    ]
    (tmp_path / scaling.RESULTS).write_text(json.dumps(found | {"cells": found["cells"] + more}))
    assert main(["scale", "--resume", str(tmp_path)]) == 0
    assert names(capsys.readouterr().err, scaling.RESULTS, len(more))
    assert results(tmp_path) == found


@pytest.mark.parametrize(
    "damage", [{"cells": {}}, {"cells": [{"design": "ssd"}]}, {"cells": [1]}, {"rates": []}], ids=str
)
def test_damaged_results_are_refused_in_a_line(damage, whole, tmp_path, capsys):
    (tmp_path / scaling.RESULTS).write_text(json.dumps(results(whole) | damage))
    assert main(["scale", "--resume", str(tmp_path)]) == ConfigError.exit_code
    in_a_line(capsys.readouterr().err, scaling.RESULTS, "damaged")


def test_a_copy_of_a_study_goes_on_where_the_original_is_still_there(whole, text, tmp_path):
    """A cell that had begun knows the text of the original, which is the same; another text is another."""
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    cell = "120k-0.05/cells/ssd/0"
    saved = checkpoint.load_config(whole / cell)
    now = dataclasses.replace(
        saved, train=dataclasses.replace(saved.train, data=str(out / "120k-0.05" / "data"))
    )
    assert Path(saved.train.data).exists() and saved.train.data != now.train.data
    assert changes(saved, now) == []
    shutil.rmtree(other := Path(now.train.data))
    assert main(["tokenize", str(text), "--out", str(other), "--vocab-size", "260", "--dev", "0.05"]) == 0
    assert [line.split(" was ")[0] for line in changes(saved, now)] == ["data"]


def test_a_full_disk_is_told_in_a_line(text, tmp_path, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", functools.partial(shutil.copytree, copy_function=full))
    assert main([*COMMAND, "--data", str(text), "--out", str(tmp_path)]) == StorageError.exit_code
    in_a_line(capsys.readouterr().err, tmp_path / "60k-0.05" / "data")


def test_a_study_that_was_moved_while_it_trained_goes_on(whole, tmp_path):
    """Its cells know where the text was."""
    out = Path(shutil.copytree(whole, tmp_path / "moved"))
    (out / "120k-0.05" / "results.json").unlink()
    begun, trained = (out / "120k-0.05" / "cells" / name / "0" for name in ("ssd", "transformer"))
    for folder in (begun, trained):
        config = folder / "config.json"
        text = json.loads(config.read_text())
        text["train"]["data"] = text["train"]["data"].replace(str(out), str(tmp_path / "gone"))
        text["train"]["data"] = text["train"]["data"].replace(str(whole), str(tmp_path / "gone"))
        config.write_text(json.dumps(text))
        shutil.rmtree(folder / "suites")
    shutil.rmtree(begun / "checkpoints")
    (begun / "metrics.jsonl").unlink()
    assert main(["scale", "--resume", str(out)]) == 0
    assert [c[WINDOWS] for c in results(out)["cells"]] == [c[WINDOWS] for c in results(whole)["cells"]]


def test_results_of_an_older_version_are_no_study(whole, tmp_path, capsys):
    old = results(whole) | {"version": scaling.VERSION - 1}
    (tmp_path / scaling.RESULTS).write_text(json.dumps(old))
    assert main(["scale", "--resume", str(tmp_path)]) == ConfigError.exit_code
    assert names(capsys.readouterr().err, tmp_path)


def cell(design: str, size: int, seed: int, loss: float, ratio: float = 20.0) -> dict:
    known = {
        "parameters": 1.01 * size,
        "tokens": ratio * size,
        "seconds": 1.0,
        "rate": 1e-3,
        "state_bytes": 1,
    }
    return {"design": design, "size": size, "per_parameter": ratio, "seed": seed, WINDOWS: loss} | known


def test_laws_and_crossings_are_those_of_the_numbers_they_were_made_of():
    """Two laws that cross at 4 million parameters, two seeds with a factor each."""
    study = Study(("a", "b", "c"), (100_000, 300_000, 1_000_000), seeds=2)
    made_of = {"a": (20.0, 0.15), "b": (20.0 * (1.01 * 4e6) ** 0.05, 0.2), "c": (60.0, 0.15)}
    cells = [
        cell(name, size, seed, A * (1 + 0.01 * seed) * (1.01 * size) ** -alpha)
        for name, (A, alpha) in made_of.items()
        for size in study.sizes
        for seed in range(2)
    ]
    found = laws.laws_of(cells, study, WINDOWS)
    for name, (A, alpha) in made_of.items():
        told = laws.told(found[name])
        assert told["alpha"]["mean"] == pytest.approx(alpha) and told["off"] < 1e-4
        assert told["A"] == pytest.approx(A * math.sqrt(1.01)) and told["beta"] is None
    (cross,) = laws.crossings(found, study)
    assert cross["designs"] == ["a", "b"] and cross["ahead_beyond"] == "b"
    assert cross["parameters"] == pytest.approx(1.01 * 4e6) and not cross["trained"]
    known = {"transformer": "a", "kda": "b"}  # names that have titles
    named = [dict(each, design=name) for name, of in known.items() for each in cells if each["design"] == of]
    for sizes, trained, moved in (
        (study.sizes, "no", "1.0"),
        ((100_000, 8_000_000), "yes", "too few points"),
    ):
        within = dataclasses.replace(study, designs=tuple(known), sizes=sizes)
        made = laws.crossings({name: found[of] for name, of in known.items()}, within)
        (row,) = crossing_rows({"study": dump(within), "cells": named, "crossings": {WINDOWS: made}})
        assert row[:2] == ["KDA", "Transformer"] and row[-2:] == [trained, moved]


def test_a_crossing_says_how_far_losses_off_the_lines_move_it():
    """Each loss is 2% above or below its line, whose falls differ by 0.05."""
    study = Study(("kda", "transformer"), (100_000, 300_000, 900_000), seeds=2)
    made_of = {"kda": (20.0, 0.15), "transformer": (20.0 * 4e5**0.05, 0.2)}
    apart = (0.01, -0.02, 0.01)  # which a straight line leaves as it is
    cells = [
        cell(name, size, seed, A * size**-alpha * math.exp(bend))
        for name, (A, alpha) in made_of.items()
        for size, bend in zip(study.sizes, apart, strict=True)
        for seed in range(2)
    ]
    (cross,) = laws.crossings(laws.laws_of(cells, study, WINDOWS), study)
    assert cross["off"] == pytest.approx(2 * (1 - math.exp(-0.02)))
    assert cross["moved"] == pytest.approx(math.exp(0.8), rel=0.02)
    (row,) = crossing_rows({"crossings": {WINDOWS: [cross]}})
    assert row[-1] == "2.2"


def test_a_crossing_of_lines_that_hardly_differ_is_moved_far():
    study = Study(("kda", "ssd"), (100_000, 200_000, 400_000), seeds=1)
    losses = {"kda": (2.0, 1.9, 1.7), "ssd": (2.0 - 2e-6, 1.9, 1.7 + 2e-6)}
    cells = [
        cell(name, size, 0, loss)
        for name, each in losses.items()
        for size, loss in zip(study.sizes, each, strict=True)
    ]
    made = laws.crossings(laws.laws_of(cells, study, WINDOWS), study)
    (row,) = crossing_rows({"crossings": {WINDOWS: made}})
    assert row[-1] == "1,000 or more"


def test_a_law_is_off_by_the_seeds_that_it_is_of():
    study = Study(("a",), (100_000, 200_000, 400_000), seeds=2)
    cells = [cell("a", size, seed, (20 + 9 * seed) * size**-0.2) for size in study.sizes for seed in (0, 1)]
    (law,) = laws.laws_of(cells[:-1], study, WINDOWS).values()
    assert list(law.fits) == [0] and law.off() == pytest.approx(0, abs=1e-9)


def test_more_tokens_for_a_parameter_have_an_exponent_of_their_own():
    study = Study(("a", "b"), (100_000, 400_000), (5.0, 20.0), seeds=2)
    made_of = {"a": (40.0, 0.1, 0.08), "b": (40.0, 0.06, 0.12)}
    cells = [
        cell(name, at.size, seed, A * (1.01 * at.size) ** -alpha * (at.ratio * at.size) ** -beta, at.ratio)
        for name, (A, alpha, beta) in made_of.items()
        for at in study.points
        for seed in range(2)
    ]
    found = laws.laws_of(cells, study, WINDOWS)
    for name, (A, alpha, beta) in made_of.items():
        told = laws.told(found[name])
        exponents = [told[x]["mean"] for x in ("alpha", "beta")]
        assert exponents == pytest.approx([alpha, beta]) and told["A"] == pytest.approx(A)
    page = html({"study": dump(study), "cells": cells, "laws": {
        score: {name: laws.told(law) for name, law in laws.laws_of(cells, study, score).items()}
        for score in scaling.SCORES}, "crossings": {score: [] for score in scaling.SCORES}})  # fmt: skip
    assert page.count("<svg") == len(study.per_parameter) == 2
    one_size = dataclasses.replace(study, sizes=(100_000,))
    told = laws.told(laws.laws_of(cells, one_size, WINDOWS)["a"])
    assert told["alpha"] is None and told["beta"]["mean"] == pytest.approx(0.08)


def test_a_crossing_that_seeds_put_anywhere_is_not_told():
    study, rng = Study(("a", "b"), (100_000, 300_000, 1_000_000), seeds=3), np.random.default_rng(1)
    made_of = {"a": (20.0, 0.15), "b": (20.0 * 4e6**0.002, 0.152)}
    cells = [
        cell(name, size, seed, A * size**-alpha * (1 + 0.003 * rng.normal()))
        for name, (A, alpha) in made_of.items()
        for size in study.sizes
        for seed in range(3)
    ]
    assert laws.crossings(laws.laws_of(cells, study, WINDOWS), study) == []


def test_who_is_level_with_the_best_is_named():
    study = Study(("a", "b", "c"), (100_000, 300_000), seeds=3)
    means = {"transformer": 1.0, "kda": 1.001, "ssd": 1.5}
    cells = [
        cell(name, size, seed, mean + (0.01 * seed if name == "kda" else 0.0))
        for name, mean in means.items() for size in study.sizes for seed in range(3)
    ]  # fmt: skip
    said = sentence({"study": dump(study), "cells": cells, "crossings": {WINDOWS: []}})
    assert "KDA" in said and "Mamba-2" not in said


def test_a_design_that_lacks_a_seed_is_not_ahead():
    study = Study(("kda", "ssd"), (100_000,), seeds=2)
    cells = [cell("kda", 100_000, 0, 2.0), cell("ssd", 100_000, 0, 2.2), cell("ssd", 100_000, 1, 1.9)]
    said = sentence({"study": dump(study), "cells": cells})
    assert "Mamba-2 has the lowest held-out loss, 2.050 " in said
    assert said.endswith(", without KDA, of which seeds are missing.")
    study = dataclasses.replace(study, designs=("kda", "ssd", "gla", "gdn"))
    said = sentence(
        {"study": dump(study), "cells": [*cells, cell("gla", 100_000, 0, 3.0), cell("gla", 100_000, 1, 2.7)]}
    )
    assert (
        "0.800 below GLA (0.800 to 0.800), without KDA, Gated DeltaNet, of which seeds are missing." in said
    )
    said = sentence({"study": dump(study), "cells": cells}, STREAMING)
    assert said == "Nothing has finished yet."
    streamed = [line | {STREAMING: 2.0 if line["design"] == "ssd" else None} for line in cells]
    streamed.append(cell("kda", 100_000, 1, 2.0) | {STREAMING: None})
    said = sentence({"study": dump(study), "cells": streamed}, STREAMING)
    assert "without KDA, which has no such score, and without GLA, Gated DeltaNet, of which seeds are" in said
    page = html({
        "study": dump(study), "cells": cells, "laws": {WINDOWS: {}, STREAMING: {}},
        "crossings": {WINDOWS: [], STREAMING: []},
    })  # fmt: skip
    assert "1 of 2 seeds" in page and "Gated DeltaNet" in page


def test_text_that_is_encoded_is_read_as_it_is(text, tmp_path, capsys):
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    made = ["tokenize", str(text), "--out", str(corpus), "--vocab-size", "280", "--dev", "0.1"]
    assert main(made) == 0
    command = [*COMMAND, "--data", str(corpus), "--out", str(out), "--sizes", "60k", "--designs", "ssd"]
    capsys.readouterr()
    assert main(command) == ConfigError.exit_code and names(capsys.readouterr().err, "vocab_size", 280)
    assert main([*command, "--vocab-size", "0"]) == 0
    plan = json.loads((out / "60k-0.05" / "results.json").read_text())["plan"]
    assert plan["text_digest"] in (corpus / "manifest.json").read_text() and plan["vocab_size"] == 280
    assert not list(out.glob("**/*.bin"))


def test_stopped_while_it_copies_the_text_it_copies_the_rest(text, tmp_path, monkeypatch):
    """After any number of files; the one that was being copied is cut short."""
    study = Study(
        ("transformer",), (60_000,), (0.05,), 1, str(text), vocab_size=300, seq_len=32, batch_size=4
    )
    scaling.encode_text(tmp_path, study)
    (at,), copytree = study.points, shutil.copytree
    folder, whole = (
        scaling.folder_of(tmp_path, at) / "data",
        {path.name for path in tmp_path.glob("data/[!.]*")},
    )
    for many in range(len(whole) - 1):
        copied = list[str]()

        def copy(source: str, target: str, *, many: int = many, copied: list[str] = copied) -> None:
            if len(copied) == many:
                Path(target).write_bytes(Path(source).read_bytes()[:9])
                raise KeyboardInterrupt
            copied.append(shutil.copy2(source, target))

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copytree", functools.partial(copytree, copy_function=copy))
            with pytest.raises(KeyboardInterrupt):
                scaling.text_at(tmp_path, study, at)
        scaling.text_at(tmp_path, study, at)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            name: (tmp_path / "data" / name).read_bytes() for name in whole
        }
        shutil.rmtree(folder)


def test_rates_fall_with_the_parameters(tmp_path):
    study, small, large = Study(("transformer", "ssd"), (100_000, 800_000), rates=(8e-3,)), *POINTS
    assert scaling.transferred(tmp_path, study, small) == {"transformer": 8e-3, "ssd": 8e-3}
    share = 8.0**FALL
    assert scaling.transferred(tmp_path, study, large) == pytest.approx(
        {"transformer": 8e-3 * share, "ssd": 8e-3 * share}, rel=2e-3
    )
    odd = dataclasses.replace(study, rates=(0.0012345,))
    assert scaling.transferred(tmp_path, odd, small)["ssd"] == 0.0012345
    tried = dataclasses.replace(study, rates=(8e-3, 1.6e-2))
    assert scaling.transferred(tmp_path, tried, small) == {}
    folder = scaling.folder_of(tmp_path, small)
    folder.mkdir()
    losses = {"transformer": {8e-3: 1.5, 1.6e-2: 1.4}, "ssd": {4e-3: 1.6, 8e-3: 1.5, 1.6e-2: 1.6}}
    lines = {name: trials(each) for name, each in losses.items()}
    (folder / "rates.json").write_text(json.dumps({"chosen": {}, "tried": lines}))
    assert scaling.transferred(tmp_path, tried, large) == pytest.approx(
        {"transformer": 1.6e-2 * share, "ssd": 8e-3 * share}, rel=2e-3
    )
    plain = scaling.transferred(tmp_path, dataclasses.replace(study, rates=()), large)
    assert plain == {name: rate(name, 800_000) for name in study.designs}


def trials(losses: dict[float, float | None]) -> list[dict[str, float | None]]:
    return [{"lr": lr, "warmup": 0.2, "bits_per_byte": bits} for lr, bits in losses.items()]


def test_a_variant_needs_rates_that_are_tried():
    study = Study(("transformer", "transformer+", "gla[heads=1]"), (100_000, 800_000))
    with refused(ConfigError, "rates", "transformer+"):
        scaling.checked(study)
    scaling.checked(dataclasses.replace(study, designs=("transformer", "gla")))
    scaling.checked(dataclasses.replace(study, rates=(8e-3,)))


def test_the_best_rate_lies_between_those_tried():
    best = 1.1e-2
    parabola = {lr: 1.5 + 0.2 * math.log(lr / best) ** 2 for lr in (3.2e-2, 4e-3, 8e-3, 1.6e-2)}
    assert scaling.lowest(trials(parabola)) == pytest.approx(best)
    assert scaling.lowest(trials(parabola | {1.6e-2: None})) == pytest.approx(best)
    assert scaling.lowest(trials({4e-3: 1.5, 8e-3: 1.4})) == 8e-3  # no one knows what comes after it
    assert scaling.lowest(trials({8e-3: None, 4e-3: None})) == 4e-3


def test_a_seed_that_lacks_a_size_has_no_law_and_no_interval_comes_of_one():
    study = Study(("a",), (100_000, 200_000), seeds=2)
    cells = [cell("a", 100_000, 0, 3.0), cell("a", 200_000, 0, 2.5), cell("a", 100_000, 1, 3.1)]
    told = laws.told(laws.laws_of(cells, study, WINDOWS)["a"])
    assert told["seeds"] == 1 and told["alpha"]["interval"] is None
    assert told["alpha"]["mean"] == pytest.approx(math.log(3 / 2.5) / math.log(2))
    rng = np.random.default_rng(0)
    noisy = [cell("a", size, seed, 3 + rng.normal()) for size in study.sizes for seed in (0, 1)]
    low, high = laws.told(laws.laws_of(noisy, study, WINDOWS)["a"])["alpha"]["interval"]
    assert low < high


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (["--designs", "transformr"], "transformr"), (["--sizes", "3k"], "params"), (["--sizes", "60k,60k"], "sizes"),
        (["--sizes", "120k,60k"], "sizes"), (["--per-parameter", "0"], "per_parameter"), (["--seeds", "0"], "seeds"),
        (["--rates", "-1"], "rates"), (["--minutes", "0"], "minutes"), (["--jobs", "0"], "jobs"),
        (["--per-parameter", "1000"], "per_parameter"),
        (["--per-parameter", "20,5"], "per_parameter"), (["--per-parameter", "many"], "per_parameter"),
        (["--per-parameter", "inf"], "per_parameter"), (["--per-parameter", "0.001"], "per_parameter"),
        (["--per-parameter", "0.05,0.0500000001"], "per_parameter"),
        (["--designs", "rwkv7[groups=mamba]"], "groups"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_trained(changed, field, text, tmp_path, capsys):
    assert (
        main([*COMMAND, "--data", str(text), "--out", str(tmp_path / "out"), *changed])
        == ConfigError.exit_code
    )
    assert names(capsys.readouterr().err, field)
    assert not list((tmp_path / "out").glob("*/cells"))


def test_a_study_that_could_not_be_planned_leaves_its_folder_to_another(text, tmp_path, monkeypatch):
    monkeypatch.setattr("perspectron.cli.scale.finish", lambda *_: 0)
    monkeypatch.setattr("perspectron.cli.scale._estimate", lambda *_: "")
    again = [*COMMAND, "--data", str(text), "--out", str(tmp_path / "out")]
    assert main([*again, "--per-parameter", "1000"]) == ConfigError.exit_code
    assert main([*again, "--vocab-size", "280"]) == 0
    for at in ("", "60k-0.05", "120k-0.05"):
        assert Tokenizer.load(tmp_path / "out" / at / "data" / "tokenizer.json").vocab_size == 280


def test_a_study_grows_by_what_is_larger_and_trains_nothing_again(whole, text, tmp_path):
    shutil.copytree(whole, tmp_path / "grown")
    shutil.rmtree(tmp_path / "grown" / "60k-0.05")
    there = (tmp_path / "grown").glob("*/cells/*/*/*")
    before = {path: path.stat().st_mtime_ns for path in there if path.name != "config.json"}
    again = [*COMMAND, "--data", str(text), "--out", str(tmp_path / "grown")]
    assert main([*again, "--sizes", "60k,120k,50M"]) == ConfigError.exit_code  # the text is too short for it
    assert main([*again, "--per-parameter", "0.001,0.05"]) == ConfigError.exit_code  # less than an update
    assert before and main([*again, "--sizes", "60k,120k,180k"]) == 0
    assert main(["scale", "--resume", str(tmp_path / "grown")]) == 0 == main(again)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    cells = results(tmp_path / "grown")["cells"]
    assert [c for c in cells if c["size"] < 180_000] == results(whole)["cells"] and len(cells) == 6


def test_a_folder_of_another_study_is_not_mixed(whole, text, capsys):
    again = [*COMMAND, "--data", str(text), "--out", str(whole), "--seeds", "3"]
    assert main(again) == ConfigError.exit_code and names(capsys.readouterr().err, "seeds")
    for sizes in ("30k,60k,120k", "60k,240k"):
        again[-2:] = "--sizes", sizes
        assert main(again) == ConfigError.exit_code and names(capsys.readouterr().err, "sizes")
    assert main(["scale", "--resume", str(whole), "--seeds", "5"]) == ConfigError.exit_code
    with refused(ConfigError):
        scaling.Study(("a",), ())
