"""A comparison from the command to the report: the same numbers twice, and after being killed."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import perspectron
from claims import keep
from perspectron import presets
from perspectron.cli.ablate import Ablate
from perspectron.cli.compare import QUICK
from perspectron.cli.main import main
from perspectron.compare import measure, results, run
from perspectron.compare.plan import Settings, models_of_designs, plan, prepare, read
from perspectron.compare.report.page import html
from perspectron.compare.run import Cell, Rate
from perspectron.data import Tokenizer, open_shards
from perspectron.train import checkpoint
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.files import remove
from tests.refusals import in_a_line, names, refused

pytestmark = pytest.mark.slow

STEPS = 40
SHORT = ["--seq-len", "32", "--batch-size", "2", "--dtype", "float32", "--steps", "2"]
COMMAND = [
    "compare", "--designs", "transformer,adr", "--params", "120k", "--tokens", str(STEPS * 4 * 32), "--seeds", "1",
    "--vocab-size", "300", "--seq-len", "32", "--batch-size", "4", "--rates", "0.004", "--warmups", "0.05",
    "--dtype", "float32", "--suites", "calibration", "--jobs", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 80)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text) -> Path:
    """A comparison that was not disturbed."""
    out = tmp_path_factory.mktemp("compared") / "whole"
    assert main([*COMMAND, "--data", str(text), "--out", str(out)]) == 0
    return out


def tokenised(whole: Path) -> list[str]:
    """The command on text that is encoded already, whose vocabulary it has."""
    command = [*COMMAND, "--data", str(whole / "data")]
    command[command.index("--vocab-size") + 1] = "0"
    return command


def cells(results: dict) -> dict:
    return {name: design["cells"][0] for name, design in results["designs"].items()}


def test_a_first_look_says_what_it_is_and_takes_what_is_typed(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--data", str(text), "--designs", "transformer,gla", "--tokens", "2048", "--seq-len", "32",
             "--batch-size", "4", "--vocab-size", "300", "--dtype", "float32"]  # fmt: skip
    assert main(["compare", "--quick", *small]) == 0
    assert names(capsys.readouterr().err.splitlines()[0], "seeds", 1, "tokens", 2048)
    settings = read(QUICK["out"]).settings
    assert (settings.params, settings.seeds, settings.suites) == (300_000, 1, ())
    assert (
        main(["compare", "--quick", *small, "--seeds", "3"]) == 2
    )  # typed, as the default of others is, and not as there
    in_a_line(capsys.readouterr().err.splitlines()[-1], "seeds", 3)
    assert main(["compare", "--quick", "--resume", str(QUICK["out"])]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "resume")


def test_it_trains_measures_and_reports(whole):
    found = json.loads((whole / "results.json").read_text())
    assert found["plan"]["tokens"] == STEPS * 128
    for name, cell in cells(found).items():
        assert cell["status"] == "finished", name
        assert cell["steps"] == STEPS
        assert cell["curve"][-1]["tokens"] == STEPS * 128
        assert cell["curve"][0]["bits_per_byte"] > cell["heldout_bits_per_byte"]
        assert 0 <= cell["suites"]["calibration"]["ece"] <= 1
    page = (whole / "results.html").read_text()
    assert all(presets.title(name) in page for name in cells(found))
    assert 0 < found["compressors"]["gzip -9, primed"] < found["compressors"]["gzip -9"] < 8
    assert found["plan"]["context"]["windows"] < 32 < found["plan"]["context"]["streaming"]
    both = {name: cell["streaming_bits_per_byte"] for name, cell in cells(found).items()}
    assert both["adr"] is None and "positions" in found["designs"]["adr"]["streaming"]["why"]
    assert both["transformer"] < 8 and found["designs"]["transformer"]["streaming"]["state_bytes"] > 0


def test_the_page_is_made_of_the_results_alone(whole, tmp_path, capsys):
    alone = Path(shutil.copy(whole / "results.json", tmp_path / "mine.json"))
    assert main(["compare", "--report", str(alone)]) == 0
    assert (tmp_path / "mine.html").read_bytes() == (whole / "results.html").read_bytes()
    capsys.readouterr()
    other = tmp_path / "other.json"
    other.write_text('{"version": 1}')
    found = json.loads(alone.read_text())
    found["plan"]["reference"] = "nobody"
    (lost := tmp_path / "lost.json").write_text(json.dumps(found))
    for arguments, *named in (
        (["--report", str(lost)], lost, "nobody"),
        (["--report", str(tmp_path / "none.json")], "none.json"),
        (["--report", str(other)],),
        (["--report", str(alone), "--tokens", "1M"], "report"),
    ):
        assert main(["compare", *arguments]) == 2
        in_a_line(capsys.readouterr().err, *named)


def test_results_of_several_comparisons_are_one_report(whole, tmp_path, capsys):
    """As if they had been one: the same designs with the same numbers."""
    found = json.loads((whole / "results.json").read_text())
    first, *rest = found["designs"]
    for name, designs, warmups in (("a", [first], [0.05]), ("b", rest, [0.05, 0.1])):
        part = found | {"designs": {d: found["designs"][d] for d in designs}}
        part["conditions"] = found["conditions"] | {"commit": name}
        part["plan"] = found["plan"] | {"warmups": warmups}
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["compare", "--report", *paths, "--out", str(tmp_path / "both")]) == 0
    both = json.loads((tmp_path / "both" / "results.json").read_text())
    assert both["designs"] == found["designs"] and both["plan"] == found["plan"] | {"warmups": [0.05, 0.1]}
    assert both["conditions"]["commit"] == "a; b" and both["parts"] == 2
    for design in both["designs"].values():  # as the suite writes it
        design.setdefault("suites", {})["cost"] = {"train_tokens_per_second": 1.0}
    apart, together = html(both), html(both | {"parts": 1})
    assert "Of several comparisons" in apart and "Loss against seconds" not in apart
    assert "interleaved in one run" in together and "Loss against seconds" in together
    assert all(
        presets.title(name) in (tmp_path / "both" / "results.html").read_text() for name in cells(found)
    )
    other = found | {"designs": {}, "plan": found["plan"] | {"tokens": 5}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    capsys.readouterr()
    for arguments, *named in (
        ([*paths, paths[0], "--out", str(tmp_path / "c")],),
        ([paths[0], str(tmp_path / "other.json"), "--out", str(tmp_path / "c")], "other.json", "tokens", 5),
        (paths, "--out"),
        ([*paths, "--out", str(whole)], whole),
    ):
        assert main(["compare", "--report", *arguments]) == 2
        in_a_line(capsys.readouterr().err, *named)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("match", ["tokens", "flops", "time", "state"])
def test_results_of_other_budgets_are_no_report(match, tmp_path):
    """Parts whose designs need 6 and 7 FLOPs for a token, or have 8 and 9 kB of state; then the same."""
    known = dict.fromkeys(results.EQUAL, 1) | {"match": match, "tokens": 100}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for flops, state in ((7.0, 9000), (6.0, 8000), (6.0, None)):
        for path, name, its in zip(paths, ("ssd", "gla"), ((6.0, 8000), (flops, state)), strict=True):
            part = {"version": 1, "kind": "designs", "conditions": {}}
            part["designs"] = {name: {"train_flops_per_token": its[0]}}
            part["plan"] = known | {"reference": name, "state": its[1] if match == "state" else None}
            path.write_text(json.dumps(part))
        same = {"tokens": True, "flops": flops == 6.0, "state": state == 8000, "time": False}[match]
        if same:
            assert list(results.merged(paths)["designs"]) == ["ssd", "gla"]
            continue
        with refused(ConfigError, "budget"):
            results.merged(paths)
    if match in ("flops", "state"):
        paths[0].write_text(paths[1].read_text().replace("train_flops_per_token", "nothing"))
        with refused(ConfigError, "budget", paths[0]):
            results.merged(paths)


def test_results_of_one_text_on_two_machines_are_one_report(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, name, machine in zip(paths, ("ssd", "gla"), ("there", "here"), strict=True):
        known = dict.fromkeys(results.EQUAL, 1) | {"match": "tokens", "text_digest": machine, "ids_digest": 1}
        part = {"version": 1, "kind": "designs", "conditions": {}, "designs": {name: {}}}
        path.write_text(json.dumps(part | {"plan": known | {"reference": name}}))
    assert list(results.merged(paths)["designs"]) == ["ssd", "gla"]
    paths[1].write_text(paths[1].read_text().replace('"ids_digest": 1', '"ids_digest": 2'))
    with refused(ConfigError, "ids_digest", paths[1]):
        results.merged(paths)


def test_the_state_that_all_have_is_in_the_results(text, tmp_path):
    for asked, arm in ((0, "ssd"), (8192, "gla")):
        out = tmp_path / arm
        settings = Settings(
            (arm,), 120_000, 2000, 1, str(text), match="state", vocab_size=300, seq_len=32, batch_size=4, rates=(4e-3,),
            warmups=(0.05,), dtype="float32", suites=(), state=asked,
        )  # fmt: skip
        what = plan(out, "designs", settings, models_of_designs, 1)
        results.note_conditions(out, what, 1)
        found = results.collect(out, what, {arm: Rate(4e-3, 0.05)}, {arm: []})
        of_model = found["designs"][arm]["state_bytes"]["1024"]
        assert found["plan"]["state"] == (asked or of_model)


def test_what_is_done_is_not_done_again(whole, capsys):
    before = (whole / "results.json").read_bytes()
    assert main(["compare", "--resume", str(whole)]) == 0
    assert (whole / "results.json").read_bytes() == before
    assert "bits per byte, dev" not in capsys.readouterr().err  # no training ended


def test_killed_on_the_way_it_ends_with_the_same_losses(whole, text, tmp_path):
    out = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": str(Path(perspectron.__file__).parents[1])}
    command = [*COMMAND, "--designs", "transformer", "--data", str(text), "--out", str(out)]
    whole_command = [sys.executable, "-m", "perspectron", *command]
    metrics = out / "cells" / "transformer" / "0" / "metrics.jsonl"
    for _ in range(20):  # a machine that is busy with other work may kill it too late
        shutil.rmtree(out, ignore_errors=True)
        parent = subprocess.Popen(whole_command, env=environment, stderr=subprocess.DEVNULL)
        while parent.poll() is None and not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 12):
            time.sleep(0.005)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if not (out / "results.json").exists():
            break
    assert not (out / "results.json").exists()
    assert main(command) == 0
    one, other = (
        cells(json.loads((folder / "results.json").read_text()))["transformer"] for folder in (whole, out)
    )
    for what in ("losses_sha256", "heldout_bits_per_byte"):
        assert one[what] == other[what]


def lines(cell: Cell, bits: float | None, steps: int | None = None) -> None:
    """Write what a training of these bits would leave."""
    cell.folder.mkdir(parents=True)
    steps = steps or cell.steps
    metrics = [
        {
            "step": steps,
            "tokens": steps * 128,
            "loss": 1.0,
            "lr": 0.1,
            "grad_norm": 1.0,
            "seconds": 2.0,
            "tokens_per_second": 640.0,
        }
    ]
    if bits is not None:
        metrics.append({"step": steps, "dev_bits_per_byte": bits})
        checkpoint.path_of(cell.folder, steps).mkdir(parents=True)
    (cell.folder / run.METRICS).write_text("".join(json.dumps(line) + "\n" for line in metrics))


def test_rates_go_on_past_the_end_of_the_grid_and_skip_what_diverged(whole, tmp_path, monkeypatch):
    plan = read(whole)
    settings = plan.settings.__class__(
        **vars(plan.settings) | {"rates": (1e-3, 2e-3, 4e-3), "warmups": (0.1,)}
    )
    plan = plan.__class__(plan.kind, settings, plan.arms)
    best = {"transformer": 8e-3, "adr": 2e-3}

    def train(wanted: list[Cell]) -> None:
        for cell in wanted:
            if run.trained(cell).status != "missing":
                continue
            if cell.arm == "adr" and cell.rate.lr == 4e-3:
                cell.folder.mkdir(parents=True)
                (cell.folder / run.FAILED).write_text('{"why": "step 7: loss is nan"}')
            else:
                lines(cell, abs(cell.rate.lr - best[cell.arm]))

    rates, tried = run.choose_rates(tmp_path, plan, train)
    assert {name: rate.lr for name, rate in rates.items()} == best
    assert [t["lr"] for t in tried["transformer"]] == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert tried["adr"][2] == {"lr": 4e-3, "warmup": 0.1, "bits_per_byte": None, "why": "step 7: loss is nan"}


def test_the_chosen_rates_are_kept_and_a_trial_that_failed_stops_the_choice(whole, tmp_path):
    plan = read(whole)
    settings = plan.settings.__class__(
        **vars(plan.settings) | {"rates": (1e-3, 2e-3, 4e-3), "warmups": (0.1,)}
    )
    plan = plan.__class__(plan.kind, settings, plan.arms)

    def train(wanted: list[Cell], without: float = 0.0) -> None:
        for cell in wanted:
            if run.trained(cell).status == "missing" and cell.rate.lr != without:
                lines(cell, abs(cell.rate.lr - 2e-3))

    with refused(CheckpointError, "0.002-0.1"):
        run.choose_rates(tmp_path, plan, lambda wanted: train(wanted, without=2e-3))
    rates, _ = run.choose_rates(tmp_path, plan, train)
    assert rates == dict.fromkeys(("transformer", "adr"), Rate(2e-3, 0.1))
    shutil.rmtree(tmp_path / "rates")
    assert run.choose_rates(tmp_path, plan, train)[0] == rates


def test_where_every_rate_diverged_lower_ones_are_tried(whole, tmp_path):
    plan = read(whole)
    settings = plan.settings.__class__(**vars(plan.settings) | {"rates": (1.0, 2.0)})
    plan = plan.__class__(plan.kind, settings, plan.arms)

    def train(wanted: list[Cell]) -> None:
        for cell in wanted:
            if run.trained(cell).status == "missing":
                cell.folder.mkdir(parents=True)
                (cell.folder / run.FAILED).write_text('{"why": "step 1: loss is nan"}')

    rates, tried = run.choose_rates(tmp_path, plan, train)
    assert [trial["lr"] for trial in tried["adr"]] == [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0]
    assert rates["adr"].lr == 0.0625


def test_the_next_rate_is_tried_while_the_best_is_the_last_and_warm_ups_that_are_alike_once(whole, tmp_path):
    """A trial has 4 updates here, in which 5% and 20% are one, and 60% two."""
    plan = read(whole)
    settings = dataclasses.replace(plan.settings, rates=(1e-3, 2e-3), warmups=(0.05, 0.2, 0.6), dev=0.05)
    plan = dataclasses.replace(plan, settings=settings)
    trained = list[tuple[str, Rate]]()

    def train(wanted: list[Cell]) -> None:
        for cell in wanted:
            if run.trained(cell).status == "missing":
                trained.append((cell.arm, cell.rate))
                best = {"transformer": 1e-2, "adr": 9.0}[cell.arm]
                lines(cell, abs(math.log(cell.rate.lr / best)) + cell.rate.warmup)

    assert run.alike(plan)
    rates, tried = run.choose_rates(tmp_path, plan, train)
    assert len(trained) == len(set(trained))
    assert {rate.warmup for _, rate in trained} == {0.05, 0.6}
    assert rates["transformer"] == Rate(8e-3, 0.05) and not run.at_an_end(
        tried["transformer"], rates["transformer"]
    )
    assert [t["lr"] for t in tried["transformer"] if t["warmup"] == 0.05] == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert rates["adr"].lr == 2e-3 * 2**run.OUTSIDE and run.at_an_end(tried["adr"], rates["adr"])
    assert not run.at_an_end([], Rate(1e-3, 0.1))


def test_suites_measure_the_last_step(whole, tmp_path):
    cell = whole / "cells" / "adr" / "0"
    copy = tmp_path / "adr"
    shutil.copytree(cell, copy)
    shutil.rmtree(copy / "suites")
    found = checkpoint.read(checkpoint.path_of(copy, STEPS))
    model, tokenizer = perspectron.load(copy)
    with torch.no_grad():
        model.norm.weight.zero_()
    best = dataclasses.replace(found.progress, step=STEPS - 1, heldout=0.001)
    checkpoint.export(copy, checkpoint.load_config(copy), tokenizer, model, best)
    assert not perspectron.load(copy)[0].norm.weight.any()  # the best is another than the last
    assert measure.main([str(copy), "perplexity"]) == 0
    told = [json.loads((run / "suites" / "perplexity.json").read_text()) for run in (cell, copy)]
    assert told[0] == told[1]


def test_a_cell_that_began_with_another_rate_is_refused_not_reported(whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "other"))
    what = read(out)
    for rate in (Rate(4e-3, 0.1), Rate(8e-3, 0.05)):
        with refused(CheckpointError, out / "cells" / "transformer" / "0"):
            run.train(out, what, run.cells(out, what, dict.fromkeys(what.arms, rate)), 1)
    run.train(out, what, run.cells(out, what, dict.fromkeys(what.arms, Rate(4e-3, 0.05))), 1)


def test_a_training_that_is_repeated_is_measured_again(whole, tmp_path):
    """Also by a program that trains otherwise: what is kept beside it is of the training that is gone."""
    out = Path(shutil.copytree(whole, tmp_path / "again"))
    cell = next(out.glob("cells/*/0"))
    for path in (cell / "checkpoints", cell / "metrics.jsonl", cell / "config.json"):
        remove(path)
    measured = json.loads((kept := cell / "suites" / "perplexity.json").read_text())
    kept.write_text(json.dumps(measured | {"bits_per_byte": 9.5}))
    assert main(["compare", "--resume", str(out)]) == 0
    assert json.loads(kept.read_text()) == measured


def test_a_loss_that_is_lost_is_told_with_what_to_do(tmp_path):
    lines(cell := Cell("adr", 0, Rate(1e-3, 0.1), 10, tmp_path / "a", 8), 2.0)
    metrics = cell.folder / run.METRICS
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert run.trained(cell).status == "missing" and names(
        run.trained(cell).why, metrics, "delete", cell.folder
    )


def test_without_its_last_checkpoint_a_cell_is_not_finished(whole, tmp_path):
    cell = Cell("adr", 0, Rate(1e-3, 0.1), 10, tmp_path / "a", 8)
    lines(cell, 2.0)
    assert run.trained(cell) == ("finished", "", 2.0)
    checkpoint.path_of(cell.folder, 10).rename(checkpoint.path_of(cell.folder, 9))
    assert run.trained(cell).status == "missing"


def test_what_cannot_be_trained_or_measured_is_told(whole, text, tmp_path, capsys):
    out = tmp_path / "broken"
    shutil.copytree(whole, out)
    (out / "results.json").unlink()
    for cell in ("transformer", "adr"):
        shutil.rmtree(out / "cells" / cell / "0" / "suites")
    model = next((out / "cells" / "adr" / "0" / "checkpoints").glob("*/model.safetensors"))
    model.write_bytes(model.read_bytes()[:-1])
    shutil.rmtree(out / "cells" / "transformer" / "0" / "checkpoints")
    config = out / "cells" / "transformer" / "0" / "config.json"
    config.write_text(config.read_text().replace('"seq_len": 32', '"seq_len": 0'))
    assert main(["compare", "--resume", str(out)]) == 1
    said = capsys.readouterr().err
    assert names(said, "seq_len", "adr")
    found = cells(json.loads((out / "results.json").read_text()))
    assert found["transformer"]["status"] == found["adr"]["status"] == "missing"
    assert "seq_len = 0" in found["transformer"]["why"]


def test_a_cell_stands_as_its_folder_says(whole, tmp_path):
    cell = Cell("adr", 0, Rate(1e-3, 0.1), 10, tmp_path / "a", 8)
    assert run.trained(cell).status == "missing"
    lines(cell, None, steps=4)
    assert run.trained(cell) == ("missing", "trained for 4 of 10 steps", None)
    with (cell.folder / run.METRICS).open("a") as file:
        file.write('{"step": 9, "tok')  # cut short by a crash
    assert run.reached(cell) == 4


def test_a_training_whose_numbers_run_away_is_reported_not_hidden(whole, tmp_path):
    out = tmp_path / "diverged"
    command = [*tokenised(whole), "--designs", "transformer", "--out", str(out)]
    command[command.index("--rates") + 1] = "1e30"
    assert main(command) == 0
    found = json.loads((out / "results.json").read_text())
    (cell,) = cells(found).values()
    assert cell["status"] == "diverged"
    assert "not finite" in cell["why"] or "is nan" in cell["why"] or "is inf" in cell["why"]
    assert cell["heldout_bits_per_byte"] is None
    assert "diverged" in (out / "results.html").read_text()
    assert main(["compare", "--resume", str(out)]) == 0


def test_an_ablation_is_trained_beside_the_whole_design(whole, tmp_path, capsys):
    out = tmp_path / "ablated"
    cell = whole / "cells" / "adr" / "0"
    assert main(["ablate", str(cell), "--suites", "cost", "--out", str(out)]) == 2
    in_a_line(capsys.readouterr().err, "suites", "cost", "position", "calibration", "robustness")
    command = ["ablate", str(cell), "--over", "no_law5", "--suites", "calibration", "--jobs", "2"]
    assert main([*command, "--out", str(out)]) == 0
    found = json.loads((out / "results.json").read_text())
    assert list(found["designs"]) == ["adr", "no_law5"]
    assert found["kind"] == "ablations"
    assert all("ece" in design["cells"][0]["suites"]["calibration"] for design in found["designs"].values())
    full, left = (design["cells"][0] for design in found["designs"].values())
    assert full["losses_sha256"] != left["losses_sha256"]
    one = json.loads((whole / "results.json").read_text())  # on as many threads
    assert full["losses_sha256"] == one["designs"]["adr"]["cells"][0]["losses_sha256"]
    keep.main([str(out), str(tmp_path / "kept.json")])
    kept = json.loads((tmp_path / "kept.json").read_text())
    measured = [design["cells"][0].pop("gates") for design in kept["designs"].values()]
    assert all(shift > 0 for gates in measured for shift in gates["adr_roughness"])
    assert kept == found


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_an_ablation_reads_by_the_tokenizer_of_its_run(kind, text, tmp_path):
    made, data = tmp_path / "run", str(text / "0.txt")
    command = [
        "train",
        "--data",
        data,
        "--heldout",
        "0.2",
        "--preset",
        "transformer-tiny",
        "--tokenizer",
        kind,
    ]
    assert main([*command, *SHORT, "--set", "vocab_size=300", "--out", str(made)]) == 0
    for number, place in enumerate((made, made / "checkpoints" / "step-00000002")):
        settings = Ablate(place).settings(checkpoint.load_config(made), ("transformer",))
        tokenizer, _ = prepare(tmp_path / str(number), settings)
        assert tokenizer.fingerprint == Tokenizer.load(made / "tokenizer.json").fingerprint


def test_an_ablation_of_chats_is_refused_by_name(text, tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    said = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "a cat " * 9}]}
            for i in range(40)]  # fmt: skip
    chats.write_text("".join(json.dumps(one) + "\n" for one in said))
    command = ["train", "--data", str(chats), "--template", "plain", "--preset", "transformer-tiny"]
    assert main([*command, *SHORT, "--set", "vocab_size=300", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert (
        main(["ablate", str(tmp_path / "run"), "--over", "half_depth", "--out", str(tmp_path / "out")]) == 2
    )
    in_a_line(capsys.readouterr().err, "template", "plain")
    assert not (tmp_path / "out" / "data").exists()


def test_an_encoded_text_of_a_small_vocabulary_is_compared(text, tmp_path):
    """One whose tokenizer has 256 ids and no end of a text."""
    letters = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.save(str(tmp_path / "bare.json"))
    corpus = tmp_path / "corpus"
    encoded = ["tokenize", str(text), "--tokenizer", str(tmp_path / "bare.json"), "--dev", "0.1"]
    assert main([*encoded, "--out", str(corpus)]) == 0
    command = [*COMMAND, "--data", str(corpus), "--out", str(tmp_path / "out")]
    del command[command.index("--vocab-size") : command.index("--vocab-size") + 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perspectron.cli.compare.finish", lambda *_: 0)
        assert main(command) == 0
    assert {arm.model.vocab_size for arm in read(tmp_path / "out").arms.values()} == {256}


def test_mistakes_of_an_ablation_are_one_line(whole, tmp_path, capsys):
    cell = whole / "cells" / "transformer" / "0"
    assert main(["ablate", str(cell), "--over", "no_gate", "--out", str(tmp_path / "out")]) == 2
    in_a_line(capsys.readouterr().err, "transformer", "no_gate", "no_rope", "half_depth")
    for over in ("", ","):
        assert main(["ablate", str(cell), "--over", over, "--out", str(tmp_path / "out")]) == 2
        in_a_line(capsys.readouterr().err, "over", "no_rope")
    assert not (tmp_path / "out").exists()
    assert main(["ablate", str(cell), "--tokens", "1M"]) == 2
    in_a_line(capsys.readouterr().err, "tokens", "1M", "--out")


def test_a_pause_does_not_slow_a_cell(tmp_path):
    cell = Cell("transformer", 0, Rate(1e-3, 0.1), 3, tmp_path, 1)
    rates = [1000.0, 2.0, 1000.0]
    metrics = [
        {
            "step": i + 1,
            "tokens": 100 * (i + 1),
            "seconds": 0.1 + 50 * (i > 0),
            "tokens_per_second": rate,
            "loss": 1.0,
            "lr": 0.1,
            "grad_norm": 1.0,
        }
        for i, rate in enumerate(rates)
    ]
    (tmp_path / run.METRICS).write_text("".join(json.dumps(line) + "\n" for line in metrics))
    history = run.history(cell, 2.0)
    assert history["tokens_per_second"] == 1000.0 and history["seconds"] == 50.1


def test_every_commit_that_went_on_is_named(whole, tmp_path, monkeypatch):
    for name, jobs in (("aaaaaaa", 2), ("aaaaaaa", 1), ("bbbbbbb", 1), ("aaaaaaa", 1)):
        monkeypatch.setattr(results.machine, "commit", lambda name=name: name)
        results.note_conditions(tmp_path, read(whole), jobs)
    kept = json.loads((tmp_path / results.CONDITIONS).read_text())
    assert (kept["commit"], kept["jobs"]) == ("aaaaaaa, bbbbbbb", 2)


def test_text_that_is_encoded_already_keeps_its_name(whole):
    shards = open_shards(whole / "data")
    assert results.text_of("somewhere/data", shards) == "somewhere/data"
    shards.corpus_fingerprint = "stdlib:0123"
    assert results.text_of("somewhere/data", shards) == "stdlib"


def test_a_variant_of_a_design_is_an_arm_of_its_own(text, tmp_path):
    arm = "gla[embedding_norm=false,heads=1]"
    command = [*COMMAND, "--designs", arm, "--tokens", "256", "--data", str(text), "--out", str(tmp_path)]
    command[command.index("--suites") + 1] = ""
    assert main(command) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["designs"]) == [arm]
    assert found["designs"][arm]["cells"][0]["status"] == "finished"
    model = checkpoint.load_config(tmp_path / "cells" / arm / "0").model
    assert (model.embedding_norm, model.blocks[0].mixer.heads) == (False, 1)
    assert presets.get("gla").embedding_norm
    assert (tmp_path / "results.html").read_text().count("GLA[embedding_norm=false, heads=1]") >= 1


def test_a_loss_from_before_the_score_with_memory_carried_is_measured_again(tmp_path):
    cell = Cell("adr", 0, Rate(1e-3, 0.1), 10, tmp_path, 8)
    for name, found in (("perplexity", {"bits_per_byte": 2.0}), (measure.COMPRESSORS, {})):
        measure.path_of(cell, name).parent.mkdir(exist_ok=True)
        measure.path_of(cell, name).write_text(json.dumps(found))
    (job,) = measure.jobs(tmp_path, Settings(("adr",), 300_000, 300_000, suites=()), [cell])
    assert job.arguments[-1] == "perplexity"
    measure.path_of(cell, "perplexity").write_text(json.dumps({"bits_per_byte": 2.0, "streaming": None}))
    assert measure.jobs(tmp_path, Settings(("adr",), 300_000, 300_000, suites=()), [cell]) == []
