"""What a comparison is planned to be: matched, settled once, and refused in one line."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perspectron import presets
from perspectron.cli.compare import _summary
from perspectron.cli.main import main
from perspectron.compare import plan as plans
from perspectron.compare import scaling
from perspectron.compare.plan import Settings, models_of_designs, plan, prepare
from perspectron.model.census import active_parameters
from perspectron.model.model import build
from perspectron.train.optim import OptimConfig
from perspectron.util.config import dump
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import in_a_line, names, refused


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 60)
    return folder


def settings(text: Path, **changes: object) -> Settings:
    own = Settings(
        ("perspective", "transformer", "drm"), 200_000, 4096, 2, str(text), vocab_size=300, seq_len=32,
        batch_size=4, dtype="float32",
    )  # fmt: skip
    return replace(own, **changes)


def test_arms_match_in_parameters_and_tokens(text, tmp_path):
    made = plan(tmp_path, "designs", settings(text), models_of_designs, threads=1)
    assert {arm.steps for arm in made.arms.values()} == {32}
    for arm in made.arms.values():
        assert abs(active_parameters(arm.model) / 200_000 - 1) <= 0.02
        assert 257 <= arm.model.vocab_size <= made.settings.vocab_size == 300
    assert made.reference == "transformer"
    assert plans.read(tmp_path) == made


@pytest.mark.parametrize("design", ["transformer", "perspective"])
def test_training_flops_are_those_of_forward_and_backward(design, text, tmp_path):
    """torch counts the products of one update; the plan's number is for half of the window on average."""
    own = settings(text, arms=(design,))
    (arm,) = plan(tmp_path, "designs", own, models_of_designs, 1).arms.values()
    ids_BT = torch.randint(257, (4, own.seq_len + 1), generator=torch.Generator().manual_seed(0))
    model = build(arm.model)
    with FlopCounterMode(display=False) as counted:
        model(ids_BT[:, :-1], targets=ids_BT[:, 1:]).objective().backward()
    per_token = counted.get_total_flops() / (4 * own.seq_len)
    assert arm.train_flops_per_token == pytest.approx(per_token, rel=0.1)


def test_equal_flops_give_equal_flops(text, tmp_path):
    made = plan(tmp_path, "designs", settings(text, match="flops", tokens=409_600), models_of_designs, 1)
    spent = {name: arm.steps * arm.train_flops_per_token for name, arm in made.arms.items()}
    assert made.arms["transformer"].steps == 3200
    assert max(spent.values()) / min(spent.values()) < 1.002
    assert made.arms["drm"].steps != 3200


def test_equal_time_gives_each_what_its_speed_buys(text, tmp_path, monkeypatch):
    cost = {"perspective": 2.0, "transformer": 1.0, "drm": 4.0}
    monkeypatch.setattr(plans, "_seconds", lambda *_: cost)
    made = plan(tmp_path, "designs", settings(text, match="time", tokens=51_200), models_of_designs, 1)
    assert {name: arm.steps for name, arm in made.arms.items()} == {
        "perspective": 200, "transformer": 400, "drm": 100,
    }  # fmt: skip


def test_seconds_are_measured_of_each(text, tmp_path, monkeypatch):
    told, measured = [], plans._seconds

    def doubled(*args):
        """As measured, but twice as long for one of them: how fast two designs are may well be the same."""
        told.append(measured(*args))
        return {"transformer": 1.0, "drm": 2.0}

    monkeypatch.setattr(plans, "_seconds", doubled)
    own = settings(text, arms=("transformer", "drm"), match="time")
    made = plan(tmp_path, "designs", own, models_of_designs, 1)
    assert [set(seconds) for seconds in told] == [{"transformer", "drm"}] and min(told[0].values()) > 0
    assert made.arms["transformer"].steps == 32
    assert made.arms["drm"].steps == 16


def test_what_is_timed_is_trained_by_the_optimizer_of_its_name(text, tmp_path, monkeypatch):
    from perspectron.compare import measure
    from perspectron.eval import cost, timing

    made, optimizer_of = list[str](), timing.optimizer_of
    monkeypatch.setattr(timing, "optimizer_of", lambda model, config: made.append(config.optimizer)
                        or optimizer_of(model, config))  # fmt: skip
    arms = ("transformer", "transformer[optimizer=muon]")
    its = plan(tmp_path, "designs", settings(text, arms=arms, match="time"), models_of_designs, 1)
    assert made == ["adamw", "muon"]
    monkeypatch.setattr(cost, "peaks", lambda configs, *_: dict.fromkeys(configs, ""))
    measure.costs(its)
    assert made == ["adamw", "muon"] * 2


def test_what_was_open_is_settled_once(text, tmp_path):
    asked = settings(text, vocab_size=0, dtype="auto")
    first = plan(tmp_path, "designs", asked, models_of_designs, threads=2)
    assert first.settings.threads == 2
    assert first.settings.dtype in ("float32", "bfloat16")
    assert first.settings.vocab_size > 257
    assert plan(tmp_path, "designs", asked, models_of_designs, threads=1) == first


@pytest.mark.parametrize(("params", "size"), [(300_000, 1024), (1_000_000, 1024), (2_000_000, 2048)])
def test_the_vocabulary_follows_from_the_parameters(params, size):
    assert presets.vocabulary(params) == size
    assert size**2 <= 4 * params < (2 * size) ** 2


def test_other_settings_are_refused_by_name(text, tmp_path):
    plan(tmp_path, "designs", settings(text), models_of_designs, threads=1)
    with refused(ConfigError, "tokens", 8192):
        plan(tmp_path, "designs", settings(text, tokens=8192), models_of_designs, threads=1)
    with refused(ConfigError, "kind", "ablations"):
        plan(tmp_path, "ablations", settings(text), models_of_designs, threads=1)


def test_a_folder_of_another_version_is_refused(text, tmp_path, capsys):
    plan(tmp_path, "designs", settings(text), models_of_designs, threads=1)
    path = tmp_path / plans.PLAN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 7}))
    assert main(["compare", "--resume", str(tmp_path)]) == 2
    in_a_line(capsys.readouterr().err, "version", 7, 2)


def test_a_text_too_short_for_a_window_is_refused(text, tmp_path):
    with refused(DataError, "train", 9001):
        plan(tmp_path, "designs", settings(text, seq_len=9000, tokens=90_000), models_of_designs, threads=1)


def test_little_held_out_text_is_said_once_and_enough_not(text, tmp_path, capsys):
    few = settings(text, seq_len=256)
    plan(tmp_path / "few", "designs", few, models_of_designs, threads=1)
    tokens = prepare(tmp_path / "few", few)[1].split("heldout").tokens
    assert 0 < tokens < 4 * 256
    in_a_line(capsys.readouterr().err, f"{tokens:,}", 4, "--heldout")
    plan(tmp_path / "enough", "designs", settings(text, seq_len=32), models_of_designs, threads=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--designs", "rwkv"], ["design", "rwkv"]),
        (["--designs", "gpt2,gpt2"], ["designs", "gpt2"]),
        (["--designs", ","], ["designs"]),
        (["--designs", "gla[heads=2,heads=4]"], ["design", "gla[heads=2,heads=4]"]),
        (["--designs", "gla[optimizer=sgd]"], ["optimizer", "sgd"]),
        (["--designs", "gla,gla[vocab_size=64]"], ["gla[vocab_size=64]", "vocab_size", 64]),
        (["--designs", "gla,gpt2[positions=16]"], ["gpt2[positions=16]", "positions", 16, "seq_len", 256]),
        (["--params", "50k", "--vocab-size", "32768"], ["params", 1_048_576]),
        (["--params", "many"], ["params", "many"]),
        (["--params", "5MB"], ["params", "5MB"]),
        (["--tokens", "100"], ["tokens", 100]),
        (["--vocab-size", "100"], ["vocab_size", 100]),
        (["--suites", "taste"], ["suites", "taste"]),
        (["--jobs", "0"], ["jobs", 0]),
        (["--rates", "0"], ["rates"]),
        (["--heldout", "1"], ["heldout"]),
    ],
)
def test_a_users_mistake_is_one_line_before_anything_is_made(options, named, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", "--out", str(out), *options]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not (out / "data").exists()


def test_out_and_resume_are_one_or_the_other(tmp_path, capsys):
    assert main(["compare"]) == 2
    assert main(["compare", "--resume", str(tmp_path)]) == 2
    assert names(capsys.readouterr().err.splitlines()[-1], tmp_path)
    assert main(["compare", "--resume", str(tmp_path), "--tokens", "1M"]) == 2
    in_a_line(capsys.readouterr().err, "resume")
    assert main(["compare", "--resume", str(tmp_path), "--quick"]) == 2
    in_a_line(capsys.readouterr().err, "resume", "--jobs")


def test_text_that_was_encoded_for_other_settings_is_not_taken(text, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(f'{{"text": "a few words, {i}"}}\n' for i in range(40)))
    out = tmp_path / "out"
    with refused(DataError, 9001):
        plan(out, "designs", settings(short, seq_len=9000, tokens=90_000), models_of_designs, threads=1)
    made = plan(out, "designs", settings(text), models_of_designs, threads=1)
    _, shards = plans.prepare(out, made.settings)
    assert shards.split("train").text_bytes > 10_000
    before = (out / "data" / "manifest.json").read_bytes()
    assert plan(out, "designs", settings(text), models_of_designs, threads=1) == made
    assert (out / "data" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["data", "data/.mine", "data/mine"])
def test_what_the_user_has_in_the_place_of_the_text_stays(name, text, tmp_path, capsys):
    (mine := tmp_path / "out" / name).parent.mkdir(parents=True)
    mine.write_text("mine")
    for command in (["compare", "--params", "60k", "--tokens", "3k"], ["scale", "--sizes", "60k,120k"]):
        where = ["--data", str(text), "--out", str(tmp_path / "out")]
        assert main([*command, "--designs", "gla", "--vocab-size", "270", *where]) == ConfigError.exit_code
        in_a_line(capsys.readouterr().err, "out", tmp_path / "out" / "data")
    assert mine.read_text() == "mine"


def test_what_a_killed_process_left_is_not_the_users(text, tmp_path):
    """It was writing what the text is encoded for."""
    (left := tmp_path / "out" / "data" / ".999999999-0123456789abcdef.tmp").parent.mkdir(parents=True)
    left.write_text("{")
    assert plan(tmp_path / "out", "designs", settings(text), models_of_designs, threads=1)
    assert not left.exists()


def test_the_text_of_a_study_is_not_a_comparisons_nor_the_other_way_round(text, tmp_path, capsys):
    out = tmp_path / "out"
    plan(out, "designs", settings(text), models_of_designs, threads=1)
    before = (out / "data" / "tokenizer.json").read_bytes()
    study = ["scale", "--designs", "gla", "--sizes", "60k,120k", "--data", str(text), "--vocab-size", "270"]
    assert main([*study, "--out", str(out)]) == 2
    in_a_line(capsys.readouterr().err, "out", out)
    known = scaling.Study(("gla",), (60_000, 120_000), data=str(text), vocab_size=270)
    kept = {"version": scaling.VERSION, "study": dump(known), "ids": "0", "rates": {}, "cells": []}
    (out / scaling.RESULTS).write_text(json.dumps(kept))
    for again in ([*study, "--out", str(out)], ["scale", "--resume", str(out)]):
        assert main(again) == 2
        in_a_line(capsys.readouterr().err, "out", out)
    assert (out / "data" / "tokenizer.json").read_bytes() == before and not (out / plans.STUDY).exists()
    (other := tmp_path / "study").mkdir()
    (other / plans.STUDY).write_text("{}")
    with refused(ConfigError, "out", other):
        plan(other, "designs", settings(text), models_of_designs, threads=1)


def test_arms_keep_the_optimizer_that_they_began_with(text, tmp_path):
    own = settings(text, arms=("gla",))
    plan(tmp_path, "ablations", own, models_of_designs, threads=1, optim=OptimConfig())
    assert plan(tmp_path, "ablations", own, models_of_designs, threads=1, optim=OptimConfig(beta2=0.99))
    with refused(ConfigError, "out", tmp_path, "gla", "optimizer"):
        plan(tmp_path, "ablations", own, models_of_designs, threads=1, optim=OptimConfig(optimizer="muon"))


def test_a_number_of_groups_is_a_size_and_a_word_the_optimizers(text, tmp_path):
    own = settings(text, arms=("ssd[groups=2]", "ssd[groups=plain]", "perspective2[groups=1]"))
    arms = plan(tmp_path, "designs", own, models_of_designs, threads=1).arms
    mixers = [
        next(block.mixer for block in arm.model.blocks if hasattr(block.mixer, "groups"))
        for arm in arms.values()
    ]
    assert [mixer.groups for mixer in mixers] == [2, 1, 1]
    assert [arm.optim.groups for arm in arms.values()] == ["own", "plain", "own"]


def test_other_models_under_the_same_names_are_refused(text, tmp_path):
    def other(own: Settings) -> plans.Models:
        return models_of_designs(replace(own, seq_len=64))

    plan(tmp_path, "designs", settings(text), models_of_designs, threads=1)
    with refused(ConfigError, "out", "perspective"):
        plan(tmp_path, "designs", settings(text), other, threads=1)


def test_what_is_timed_runs_on_the_threads_of_a_training(text, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plans, "_seconds", lambda _, models: seen.append(torch.get_num_threads())
                        or dict.fromkeys(models, 1.0))  # fmt: skip
    plan(tmp_path, "designs", settings(text, match="time"), models_of_designs, threads=2)
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_a_tokenised_text_brings_its_vocabulary(text, tmp_path, capsys):
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    assert main(["tokenize", str(text), "--out", str(corpus), "--vocab-size", "280"]) == 0
    command = ["compare", "--data", str(corpus), "--out", str(out)]
    for option, value in (("vocab_size", 300), ("heldout", 0.4), ("dev", 0.3)):
        assert main([*command, f"--{option.replace('_', '-')}", str(value)]) == 2
        in_a_line(capsys.readouterr().err, option, value)


def test_an_encoded_text_that_became_another_is_refused(text, tmp_path, capsys):
    """Another text, or other tokens of the same."""
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    asked = settings(corpus, arms=("transformer",), vocab_size=0)
    command = ["tokenize", str(text), "--out", str(corpus), "--dev", "0.05", "--vocab-size", "280"]
    assert main(command) == 0
    made = plan(out, "designs", asked, models_of_designs, threads=1)
    assert made == plans.read(out)
    for changed in (["--heldout", "0.1"], ["--vocab-size", "270"]):
        shutil.rmtree(corpus)
        assert main([*command, *changed]) == 0
        with refused(ConfigError, corpus, out / plans.PLAN):
            plan(out, "designs", asked, models_of_designs, threads=1)
        capsys.readouterr()
        assert main(["compare", "--resume", str(out)]) == 2
        in_a_line(capsys.readouterr().err, corpus)
    path = out / plans.PLAN
    before = json.loads(path.read_text())
    assert before.pop("ids") and before.pop("text")
    path.write_text(json.dumps(before))  # as it was written before
    assert plans.read(out) == replace(made, text="", ids="")


def test_a_text_whose_files_were_only_touched_is_the_same(text, tmp_path):
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    command = ["tokenize", str(text), "--out", str(corpus), "--dev", "0.05", "--vocab-size", "280"]
    asked = settings(corpus, arms=("transformer",), vocab_size=0)
    assert main(command) == 0
    made = plan(out, "designs", asked, models_of_designs, threads=1)
    before = plans.open_shards(corpus)
    for file in text.iterdir():
        os.utime(file, (1, 1))
    shutil.rmtree(corpus)
    assert main(command) == 0
    again = plans.open_shards(corpus)
    assert again.corpus_fingerprint != before.corpus_fingerprint and again.digest == before.digest
    assert plan(out, "designs", asked, models_of_designs, threads=1) == made


def test_several_texts_may_have_a_long_name(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names_of_texts = ["a" * 150, "b" * 150]
    for name in names_of_texts:
        Path(name).symlink_to(text)
    several = f"one=0.5:{names_of_texts[0]} two=0.5:{names_of_texts[1]}"
    _, shards = plans.prepare(tmp_path / "out", settings(several))
    assert shards.split("train").tokens > 0


def test_a_text_without_a_dev_split_says_what_would_work(text, tmp_path, capsys):
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    assert main(["tokenize", str(text), "--out", str(corpus), "--vocab-size", "280"]) == 0
    command = ["compare", "--data", str(corpus), "--out", str(out), "--tokens", "4096", "--params", "100k"]
    assert main(command) == 2
    in_a_line(capsys.readouterr().err, "dev", 0.05, "tokenize", "--dev")


def test_a_dev_split_of_less_than_a_window_says_which_share_would_do(text, tmp_path, capsys):
    command = ["compare", "--data", str(text), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    command += ["--designs", "gla"]
    assert (
        main([*command, "--tokens", "16384", "--params", "100k", "--dev", "1e-9", "--seq-len", "2048"]) == 2
    )
    in_a_line(capsys.readouterr().err, "dev", 1e-09, 2048)


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("5,2", 5), ("none", 0), ("0", 0), (None, 0)])
def test_the_threads_that_the_environment_names_are_those_of_a_training(monkeypatch, said, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = plans.threads_for(1)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert plans.threads_for(1) == (threads or free)
    assert plans.threads_for(10**6) == (threads or 1)


def test_a_comparison_that_began_with_other_threads_says_that_it_keeps_them(text, tmp_path, monkeypatch):
    made = plan(tmp_path, "designs", settings(text), models_of_designs, threads=7)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not any("OMP_NUM_THREADS" in line for line in _summary(made))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert any("OMP_NUM_THREADS is 3; this comparison began with 7" in line for line in _summary(made))
