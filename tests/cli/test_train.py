"""A first run: what is chosen for it, what it says before, while and after it trains, and what it refuses."""

import io
import json
import re
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import perspectron
from perspectron import presets
from perspectron.cli import fit as fit_room
from perspectron.cli import train as train_room
from perspectron.cli.console import Console
from perspectron.cli.fit import Speed
from perspectron.cli.main import main
from perspectron.cli.train import defaults
from perspectron.data import open_shards
from perspectron.eval import budget, perplexity
from perspectron.model.census import active_parameters
from perspectron.train import checkpoint, estimate
from perspectron.train.optim import OptimConfig
from perspectron.train.pace import Pace
from tests.cli.small import PLAIN
from tests.refusals import in_a_line, names

QUICK = ["--seq-len", "32", "--batch-size", "2", "--dtype", "float32"]


@pytest.fixture
def play(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = (f"KING {i}: The cat number {i * 7} sat on the mat.\n" for i in range(700))
    (tmp_path / "play.txt").write_text("".join(lines))
    return tmp_path / "play.txt"


@pytest.mark.slow
def test_a_text_is_all_that_it_needs(play, capsys, monkeypatch):
    """By a time that no machine exceeds; tests/train/test_pace.py asks whether a training ends on time."""
    monkeypatch.setattr(train_room, "MINUTES", 30.0)
    monkeypatch.setattr(budget, "seconds_of", lambda model, train: 15.0)
    monkeypatch.setattr(Pace, "steps", lambda pace, step, steps, pauses: steps)
    assert main(["train", "--data", "play.txt"]) == 0
    said = capsys.readouterr().err
    config = checkpoint.load_config(Path("runs/play"))
    train, size = config.train, active_parameters(config.model)
    assert presets.design_of(config.model) == presets.DESIGN
    assert train.optim.lr == presets.rate(presets.DESIGN, size)
    assert f"{size / 1e6:.2f} M parameters" in said
    for words in (" passes over", "GB of memory", "tokens/s", " left", "done in", "(gzip -9", "xz -9"):
        assert words in said, words
    assert re.search(r"about \d+ min( \d+ s)?, until \d\d:\d\d", said)
    commands = re.findall(r"^  perspectron (.*)$", said, re.MULTILINE)
    assert len(commands) == 3
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO())
    )  # of a chat in which nobody says anything
    for command in commands:
        assert main(command.split()) == 0, command


SMALL = ["--preset", "transformer-tiny", "--set", "layers=1", "d_model=16", "heads=2", "--seq-len", "32",
         "--batch-size", "2", "--dtype", "float32"]  # fmt: skip


def test_the_last_line_is_what_eval_says_of_the_same_bytes(play, capsys):
    """Though what was measured on the way, and chose the best checkpoint, is a sample of them."""
    assert main(["train", "--data", "play.txt", *SMALL, "--steps", "20", "--eval-tokens", "64"]) == 0
    [said] = re.findall(r"done in \d+ s: (.* on the same bytes\))", capsys.readouterr().err)
    assert main(["eval", "runs/play"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"transformer-tiny: {said}"
    size = open_shards(Path("runs/play/data")).split("heldout").text_bytes
    assert names(said, size, "gzip")
    kept = json.loads(Path("runs/play/heldout.json").read_text())
    assert perplexity.said(kept) == said and kept["whole"] and kept["text_bytes"] == size
    assert main(["eval", "runs/play", "--tokens", "64"]) == 0
    assert names(capsys.readouterr().out, 63)


def test_where_all_of_the_held_out_text_takes_long_the_last_line_says_that_it_is_of_a_sample(
    play, capsys, monkeypatch
):
    monkeypatch.setattr(fit_room, "_patience", lambda _: 0.0)
    assert main(["train", "--data", "play.txt", *SMALL, "--steps", "3", "--eval-tokens", "64"]) == 0
    said = capsys.readouterr().err
    whole = open_shards(Path("runs/play/data")).split("heldout").tokens
    assert re.search(rf"best held-out \d\.\d+ bits per byte on 64 of {whole:,} tokens of it, a sample", said)
    assert "xz -9" not in said and not Path("runs/play/heldout.json").exists()


def test_a_text_of_another_encoding_is_trained_on_resumed_and_measured(play, capsys):
    Path("wide.txt").write_bytes(play.read_text().encode("utf-16"))
    train = ["train", "--data", "wide.txt", *SMALL, "--steps", "3", "--out", "run"]
    assert main(train) == 2
    in_a_line(capsys.readouterr().err, "wide.txt", "--encoding", "utf-16")
    assert main([*train, "--encoding", "utf16"]) == 0
    assert checkpoint.load_config(Path("run")).train.data == f"{Path('wide.txt').resolve()}#encoding=utf-16"
    assert main(["train", "--resume", "run"]) == 0
    assert main(["train", "--resume", "run", "--encoding", "utf-16"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "--encoding", "--resume")
    assert main(["eval", "run", "--data", "wide.txt", "--encoding", "utf-16"]) == 0
    assert main(["eval", "run", "--encoding", "utf-16"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "encoding", "utf-16", "--data")
    assert main(["train", "--init", "run", "--encoding", "utf-16", "--steps", "1", "--out", "next"]) == 0


def test_too_few_minutes_are_refused_with_how_many_it_takes(play, capsys, monkeypatch):
    monkeypatch.setattr(budget, "seconds_of", lambda model, train: 3.0)
    assert main(["train", "--data", "play.txt", "--minutes", "0.2", *PLAIN, *QUICK]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "minutes", 0.2, 3)
    assert not list(Path("runs").iterdir())


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", 1), ("float32", 0)])
def test_a_precision_that_is_slow_here_is_told_once(play, capsys, monkeypatch, dtype, said):
    monkeypatch.setattr(estimate, "products", lambda _, of: 3.0 if of == torch.bfloat16 else 1.0)
    assert main(["train", "--data", "play.txt", "--steps", "1", *PLAIN, *QUICK[:-1], dtype]) == 0
    assert capsys.readouterr().err.count("--dtype float32") == said


def test_a_second_run_of_a_text_has_a_folder_of_its_own(play, capsys):
    for _ in range(2):
        assert main(["train", "--data", "play.txt", "--steps", "1", *PLAIN, *QUICK]) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["play", "play-2"]


def test_passes_and_tokens_become_updates(play, capsys):
    assert main(["train", "--data", "play.txt", "--epochs", "0.5", "--out", "a", *PLAIN, *QUICK]) == 0
    a = checkpoint.load_config(Path("a")).train
    text = perspectron.data.open_shards(Path("a/data")).split("train")
    assert a.steps == -(-text.tokens // 2 // 64)
    assert main(["train", "--data", "play.txt", "--tokens", "1K", "--out", "b", *PLAIN, *QUICK]) == 0
    b = checkpoint.load_config(Path("b")).train
    assert b.steps == 16 and b.optim.warmup == 3
    assert b.optim.lr == presets.rate(
        "transformer", active_parameters(checkpoint.load_config(Path("b")).model)
    )


def test_a_first_document_without_tokens_is_refused(play, capsys):
    words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "king": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save("words.json")
    texts = [" ", *(f"king over {i}" for i in range(500))]
    Path("some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--data", "some.jsonl", "--tokenizer", "words.json", "--seq-len", "16", "--steps", "1"]
    assert main(["train", *options]) == 2
    in_a_line(capsys.readouterr().err, "text")


def test_what_is_typed_or_in_the_file_is_not_chosen(play, capsys):
    Path("c.toml").write_text("[train]\nsteps = 3\n[train.optim]\nlr = 1e-3\n")
    options = ["--config", "c.toml", "--warmup", "2", "--eval_every=2", "--out", "r"]
    assert main(["train", "--data", "play.txt", *options, *PLAIN, *QUICK]) == 0
    train = checkpoint.load_config(Path("r")).train
    assert (train.steps, train.optim.lr, train.optim.warmup, train.eval_every) == (3, 1e-3, 2, 2)
    assert set(defaults(["--lr", "1", "--batch_size=3"]).given) == {"lr", "batch_size"}


def test_a_length_that_is_typed_takes_the_place_of_the_files(play, capsys):
    Path("c.toml").write_text("[train]\nsteps = 3\nseq_len = 16\n")
    for flag in ("minutes", "tokens", "epochs"):
        assert set(defaults(["--config", "c.toml", f"--{flag}", "1"]).given) == {"config", "seq_len", flag}
    options = ["--data", "play.txt", "--config", "c.toml", "--tokens", "256", "--out", "r"]
    assert main(["train", *options, *PLAIN, *QUICK]) == 0
    assert checkpoint.load_config(Path("r")).train.steps == 4


def test_a_change_is_accepted_only_of_a_run_to_resume(play, capsys):
    assert main(["train", "--data", "play.txt", "--allow-changed", "--out", "r", *PLAIN, *QUICK]) == 2
    in_a_line(capsys.readouterr().err, "allow_changed", "--resume")
    assert not Path("r").exists()


def test_a_run_from_anothers_weights_reads_its_text(play, capsys):
    assert main(["train", "--data", "play.txt", "--steps", "1", "--out", "a", *PLAIN, *QUICK]) == 0
    assert main(["train", "--init", "a", "--steps", "1", "--out", "b", *QUICK]) == 0
    a, b = (checkpoint.load_config(Path(name)) for name in ("a", "b"))
    assert a.train.data == b.train.data == str(play) and a.model == b.model


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("model = 3", ["model", 3]),
        ("[model]\nlayers = 2020-01-01", ["layers", "2020"]),
        ('[model]\npreset = ["transformer-tiny"]', ["preset"]),
        ('[model]\npreset = "transformer-tiny"\nname = "mine"', ["name"]),
    ],
)
def test_what_no_size_of_a_file_can_be_is_refused(table, named, play, capsys):
    Path("c.toml").write_text(f"{table}\n")
    assert main(["train", "--config", "c.toml", "--data", "play.txt", "--out", "r", "--steps", "1"]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not Path("r").exists()


def test_a_run_from_anothers_weights_is_called_after_its_text(play, capsys):
    assert main(["train", "--data", "play.txt", "--steps", "1", "--out", "a", *PLAIN, *QUICK]) == 0
    assert main(["train", "--init", "a", "--steps", "1", *QUICK]) == 0
    assert sorted(Path("runs").iterdir()) == [Path("runs/play")]


def test_a_run_from_anothers_weights_warms_up_in_a_part_of_its_updates(play, capsys):
    assert main(["train", "--data", "play.txt", "--steps", "1", "--out", "a", *PLAIN, *QUICK]) == 0
    for name, more in {"b": [], "c": ["--lora", "rank=2"], "d": ["--warmup", "7"]}.items():
        assert main(["train", "--init", "a", "--steps", "20", *more, "--out", name, *QUICK]) == 0
    optims = [checkpoint.load_config(Path(name)).train.optim for name in "bcd"]
    assert [optim.warmup for optim in optims] == [presets.warmup(20), presets.warmup(20), 7]
    assert [optim.lr for optim in optims] == [OptimConfig.lr] * 3


def test_encoded_text_holds_out_what_it_did(play, capsys):
    assert main(["tokenize", "play.txt", "--out", "encoded", "--vocab-size", "300"]) == 0
    train = ["train", "--data", "encoded", *PLAIN, *QUICK, "--steps", "1"]
    assert main([*train, "--heldout", "0.5", "--out", "a"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "heldout", 0.5, "encoded")
    assert not Path("a").exists()
    assert main(train) == 0


def test_the_vocabulary_is_the_teachers(play, capsys):
    signs = "".join(map(chr, range(0x4E00, 0x4E00 + 700)))
    Path("signs.txt").write_text("\n".join([signs] * 30))
    train = ["train", "--data", "signs.txt", *QUICK]
    options = [
        "--tokenizer",
        "characters",
        "--preset",
        "transformer-tiny",
        "--set",
        "vocab_size=800",
        "layers=1",
    ]
    assert main([*train, *options, "--steps", "1", "--out", "a"]) == 0
    assert main([*train, "--teacher", "a", "--tokens", "2k", "--out", "b"]) == 0
    a, b = (checkpoint.load_config(Path(name)).model.vocab_size for name in ("a", "b"))
    assert a == b > 700
    capsys.readouterr()
    assert main([*train, "--teacher", "a", "--set", "vocab_size=300", "--tokens", "2k", "--out", "c"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "vocab_size", 300, a)


def test_a_weight_beside_a_share_is_refused(play, capsys):
    assert main(["train", "--data", "play.txt", "--steps", "1", "--out", "a", *PLAIN, *QUICK]) == 0
    capsys.readouterr()
    shares = ["--teacher", "a", "--teacher-mix", "0.5", "--teacher-weight", "7", "--teacher-temperature", "2"]
    assert main(["train", "--data", "play.txt", "--steps", "1", *shares, *PLAIN, *QUICK]) == 2
    in_a_line(capsys.readouterr().err, "teacher_weight", 7.0, "teacher_mix")


@pytest.mark.parametrize("named", ["init", "teacher"])
def test_what_another_run_was_trained_on_is_not_held_out_after_it(named, play, capsys):
    train = ["train", "--steps", "1", *QUICK]
    assert main([*train, "--data", "play.txt", "--heldout", "0.02", "--out", "a", *PLAIN]) == 0
    Path("other.txt").write_text(Path("play.txt").read_text())
    train += [f"--{named}", "a", *(PLAIN if named == "teacher" else [])]
    assert main([*train, "--data", "other.txt", "--out", "e"]) == 0
    assert checkpoint.load_config(Path("e")).train.heldout == 0.05
    train += ["--data", "play.txt"]
    assert main([*train, "--out", "b"]) == 0
    assert checkpoint.load_config(Path("b")).train.heldout == 0.02
    held = [perspectron.data.open_shards(Path(name) / "data").split("heldout") for name in ("a", "b")]
    assert held[0].text_bytes == held[1].text_bytes
    capsys.readouterr()
    assert main([*train, "--heldout", "0.05", "--out", "c"]) == 2
    in_a_line(capsys.readouterr().err, "heldout", 0.05, 0.02)
    assert not Path("c").exists()
    assert main([*train, "--heldout", "0.01", "--out", "d"]) == 0
    assert checkpoint.load_config(Path("d")).train.heldout == 0.01


def test_nor_is_that_of_a_mixture_or_of_a_run_further_back(play, capsys):
    Path("logs.txt").write_text("".join(f'{{"at": {i}, "level": "info"}}\n' for i in range(700)))
    train = ["train", "--steps", "1", *QUICK]
    assert main([*train, "--data", "play.txt", "--heldout", "0.02", "--out", "a", *PLAIN]) == 0
    assert main([*train, "--init", "a", "--data", "logs.txt", "--out", "b"]) == 0
    replay = ["--data", "old=0.3:play.txt", "--data", "new=0.7:logs.txt"]
    for init, data, share in (("a", replay, 0.02), ("b", ["--data", "play.txt"], 0.02), ("b", replay, 0.02)):
        out = f"after-{len(list(Path().iterdir()))}"
        assert main([*train, "--init", init, *data, "--out", out]) == 0
        assert checkpoint.load_config(Path(out)).train.heldout == share
    capsys.readouterr()
    assert main(["tokenize", "play.txt", "--out", "encoded", "--tokenizer", "a/tokenizer.json"]) == 0
    assert main([*train, "--init", "b", "--data", "encoded", "--out", "c"]) == 0
    assert any(names(line, "encoded", "b") for line in capsys.readouterr().err.splitlines())


REFUSED = [
    (["--minutes", "0.01"], ["minutes", 0.01, 0.1]),
    (["--minutes", "0"], ["minutes", 0.0]),
    (["--minutes", "-3"], ["minutes", -3.0]),
    (["--minutes", "nan"], ["minutes", "nan"]),
    (["--tokens", "0"], ["tokens", "'0'"]),
    (["--steps", "3000000000"], ["steps", 3000000000]),
    (["--data", "play.txt#body"], ["#body"]),
    (["--data", "play.txt", "--encoding", "klingon"], ["encoding", "klingon"]),
    (["--data", "stdlib", "--encoding", "utf-16", "--steps", "1"], ["encoding", "utf-16", "stdlib"]),
    (["--minutes", "1", "--epochs", "2"], ["--minutes", "--epochs"]),
    (["--steps", "1", "--tokens", "2M"], ["--tokens", "--steps"]),
    (["--tokens", "many"], ["tokens", "many"]),
    (["--epochs", "0"], ["epochs", 0.0]),
    (["--preset", "perspective-1t", "--steps", "1"], ["perspective-1t"]),
    (["--data", "https://example.org/a/play.txt"], ["https://example.org/a/play.txt"]),
    (["--data", "short.txt"], [257, "seq_len"]),
    (["--data", "short.txt"], ["--seq-len"]),
    (["--data", "empty.txt"], ["empty.txt"]),
    (["--data", "none"], ["none", 1]),
    (["--recipe", "staged", "--minutes", "1"], ["minutes", 1.0]),
    (["--set", "vocab_size=3"], ["vocab_size", 3]),
    (["--teacher-weight", "0.5", "--steps", "1"], ["teacher_weight", 0.5, "teacher"]),
    (["--teacher-temperature", "2", "--steps", "1"], ["teacher_temperature", 2.0, "teacher"]),
    (["--cooldown", "0.5", "--steps", "1"], ["cooldown", 0.5, "--schedule"]),
    (["--ternary-from", "0.1", "--steps", "1", "--preset", "gla-tiny"], ["ternary_from", 0.1, "gla-tiny"]),
    (["--ternary-until", "0.9", "--steps", "1", "--preset", "gla-tiny"], ["ternary_until", 0.9, "gla-tiny"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(options, named, play, capsys):
    Path("short.txt").write_text("Two hundred bytes of a play, in which a king says nothing of note.\n" * 3)
    Path("empty.txt").touch()
    Path("none").mkdir()
    Path("none/picture").write_bytes(b"\x89PNG\xff")
    data = [] if "--data" in options else ["--data", "play.txt"]
    assert main(["train", *data, *options]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(("lines", "advice"), [(3, r"--seq-len \d+"), (9, r"--set vocab_size=\d+")])
def test_what_a_short_text_is_told_to_do_works(lines, advice, play, capsys):
    Path("short.txt").write_text(
        "A few hundred bytes of a play, in which a king says nothing of note.\n" * lines
    )
    command = ["train", "--data", "short.txt", "--steps", "1", "--preset", "transformer-tiny"]
    assert main(command) == 2
    [told] = re.findall(advice, capsys.readouterr().err)
    assert main([*command, *told.split()]) == 0


def test_numbers_that_run_away_end_with_what_to_do(play, capsys):
    command = ["train", "--data", "play.txt", "--steps", "30", "--out", "run", "--lr", "1e30", "--clip", "0"]
    assert main([*command, *PLAIN, *QUICK]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--lr 5e+29 --out run-2" in said


def test_a_stopped_run_says_how_to_go_on_and_where_from(play, capsys, monkeypatch):
    command = [
        "train",
        "--data",
        "play.txt",
        "--steps",
        "6",
        "--save-every",
        "3",
        "--out",
        "run",
        *PLAIN,
        *QUICK,
    ]
    with monkeypatch.context() as patch:
        patch.setattr(fit_room.Trainer, "fit", lambda self, **_: 15 if self.save() else None)
        assert main(command) == 128 + 15
    assert "perspectron train --resume run" in capsys.readouterr().err
    trainer_fit = fit_room.Trainer.fit
    with monkeypatch.context() as patch:
        patch.setattr(fit_room.Trainer, "fit", lambda self, **more: trainer_fit(self, until=4, **more) or 2)
        assert main(["train", "--resume", "run"]) == 130
    assert main(["train", "--resume", "run"]) == 0
    said = capsys.readouterr().err
    assert names(said, 4, 6)


def test_without_a_terminal_there_is_a_line_at_least_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    speed, said = Speed(0), []
    for step in range(1, 101):
        now[0] += 3.0
        line = {"step": step, "loss": 2.5, "tokens": 64 * step, "tokens_per_second": 21.3}
        if speed.due(step, 100):
            said.append(speed.line(line, 100, None))
        else:
            speed.line(line, 100, None)
    assert len(said) == 26
    assert said[1] == "step 5/100  loss 2.500  21 tokens/s  4 min 45 s left"


@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_of_any_width_and_without_colours(columns, play, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    told = {"highlight": False, "soft_wrap": True, "markup": False}
    monkeypatch.setattr(
        fit_room, "progress", lambda: Console(stderr=True, force_terminal=True, width=columns, **told)
    )
    assert main(["train", "--data", "play.txt", "--steps", "3", "--out", "run", *PLAIN, *QUICK]) == 0
    said = capsys.readouterr().err
    assert "\x1b[3" not in said and "step 3/3" in said
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", said))
    drawn = [line for line in lines if "%" in line and "held out (" not in line]
    assert drawn and max(map(len, drawn)) <= columns


def test_the_json_lines_stay_alone_on_standard_output(play, capsys):
    assert (
        main(["train", "--data", "play.txt", "--steps", "2", "--out", "run", "--json", *PLAIN, *QUICK]) == 0
    )
    captured = capsys.readouterr()
    assert [json.loads(line)["step"] for line in captured.out.splitlines()] == [1, 1, 2, 2]
