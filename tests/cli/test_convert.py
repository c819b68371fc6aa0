"""`perspectron convert` as a user types it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perspectron.cli.main import main
from perspectron.cli.progress import Work
from perspectron.data.template import Template
from perspectron.model.model import build
from perspectron.opening import open_model, save
from perspectron.train import checkpoint
from perspectron.train.convert.run import config_of, noted
from perspectron.train.loop import Trainer
from tests.cli.small import PLAIN, TRAIN
from tests.refusals import in_a_line

SMALL = ["--tokens", "3000", "--dtype", "float32", "--to", "gdn", "--json"]


def trained(folder: Path, data: Path, *options: str) -> Path:
    given = ["--data", str(data), "--out", str(folder), "--steps", "2", "--dtype", "float32"]
    assert main(["train", *given, *PLAIN, "layers=2", *TRAIN, *options]) == 0
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """A run that learns completions after prompts. It has two checkpoints, the first of which is the better one."""
    folder = tmp_path_factory.mktemp("chats")
    records = [{"prompt": f"What is {i} plus {i}?", "completion": f" It is {2 * i}."} for i in range(200)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = [
        "--template",
        "plain",
        "--save-every",
        "1",
        "--eval-every",
        "1",
        "--lr",
        "3",
        "--eval-tokens",
        "0",
    ]
    return trained(folder / "run", folder / "chats.jsonl", *options)


def test_a_run_that_learned_completions_is_converted_by_its_own_text(chats, tmp_path, capsys):
    """Of a checkpoint it is that one's weights which are taken, not the best one's."""
    first, last = checkpoint.found_in(chats)
    assert first.progress.heldout < last.progress.heldout
    capsys.readouterr()
    assert main(["convert", str(last.path), "--out", str(tmp_path / "out"), *SMALL]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["rows"][0]["bits_per_byte"] == pytest.approx(last.progress.heldout, rel=1e-5)
    assert made["rows"][0]["measured"] < 300  # completions alone
    assert Template.of(tmp_path / "out").text == Template.named("plain").text
    assert config_of(tmp_path / "out").teacher == str(last.path)


def test_one_layer_of_attention_does_not_stay_in_silence(chats, tmp_path, capsys):
    model, tokenizer = checkpoint.load_run(chats)
    one = replace(model.config, blocks=model.config.blocks[:1])
    save(build(one), tokenizer, tmp_path / "run")
    given = ["--data", str(chats.parent / "chats.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["convert", str(tmp_path / "run"), *given, *SMALL]) == 2
    in_a_line(capsys.readouterr().err, "keep_attention", 4, 0)
    assert not (tmp_path / "out").exists()


def test_it_is_told_what_a_model_is_loaded_for(chats, tmp_path, monkeypatch):
    """Of a large one that takes as long as what follows, also where a conversion is resumed."""
    under_way, loaded = list[str](), list[str]()
    enter, leave = Work.__enter__, Work.__exit__

    def noted(where: Any, name: str) -> None:
        whole = getattr(where, name)

        def run(*given: Any, **options: Any) -> Any:
            loaded.extend(under_way[-1:] or ["nothing"])
            return whole(*given, **options)

        monkeypatch.setattr(where, name, run)

    monkeypatch.setattr(Work, "__enter__", lambda work: (under_way.append(work.what), enter(work))[1])
    monkeypatch.setattr(Work, "__exit__", lambda *error: (under_way.pop(), leave(*error))[1])
    noted(checkpoint, "open_run")
    noted(Trainer, "__init__")
    made = tmp_path / "out"
    for command in ([str(chats), "--out", str(made), *SMALL], ["--resume", str(made)]):
        loaded.clear()
        assert main(["convert", *command]) == 0
        notes = json.loads((made / "convert.json").read_text())
        (made / "convert.json").write_text(json.dumps(notes | {"rows": notes["rows"][:-1]}))
        assert loaded[0] == f"loading {chats}" and len(loaded) > 3 and "nothing" not in loaded


def test_a_run_that_learned_to_chat_keeps_its_template_on_another_text(chats, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"A line, number {i}.\n" for i in range(2000)))
    quick = ["--steps", "1", "--seq-len", "32", "--batch-size", "2", "--dtype", "float32"]
    train = ["train", "--init", str(chats), "--data", str(text), *quick]
    assert main([*train, "--out", str(tmp_path / "more")]) == 0
    assert main(["convert", str(tmp_path / "more"), "--out", str(tmp_path / "out"), *SMALL]) == 0
    for name in ("more", "out"):
        assert open_model(tmp_path / name).template().text == Template.named("plain").text
        assert main(["eval", str(tmp_path / name), "--data", str(text), "--tokens", "64"]) == 0


def test_what_a_run_further_back_was_trained_on_is_not_held_out(chats, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    for path in (first, second):
        path.write_text("".join(f"{path.stem} line, number {i}.\n" for i in range(2000)))
    quick = ["--steps", "1", "--seq-len", "32", "--batch-size", "2", "--dtype", "float32"]
    train = ["train", "--init", str(chats), *quick, "--heldout", "0.01", "--data", str(first)]
    assert main([*train, "--out", str(tmp_path / "a")]) == 0
    train = ["train", "--init", str(tmp_path / "a"), *quick, "--data", str(second)]
    assert main([*train, "--out", str(tmp_path / "b")]) == 0
    given = ["--data", str(first), "--out", str(tmp_path / "out")]
    assert main(["convert", str(tmp_path / "b"), *given, *SMALL]) == 0
    assert [checkpoint.load_config(tmp_path / name).train.heldout for name in ("b", "out")] == [0.05, 0.01]


def test_too_few_minutes_leave_no_folder(chats, tmp_path, capsys):
    few = ["--to", "gdn", "--dtype", "float32", "--minutes", "0.0001"]
    assert main(["convert", str(chats), "--out", str(tmp_path / "out"), *few]) == 2
    assert "minutes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_text_shorter_than_a_window_leaves_no_folder(chats, tmp_path, capsys):
    (tmp_path / "few.txt").write_text("too few words")
    given = ["--data", str(tmp_path / "few.txt"), "--out", str(tmp_path / "out")]
    assert main(["convert", str(chats), *given, *SMALL]) == 2
    in_a_line(capsys.readouterr().err, "data", "few.txt", 13, 32)
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_does_not_fit_beside_the_student_is_refused(chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("perspectron.train.convert.config.room", lambda device: 100_000)
    given = ["--data", str(chats.parent / "chats.jsonl"), "--out", str(tmp_path / "out")]
    assert main(["convert", str(chats), *given, *SMALL]) == 2
    in_a_line(capsys.readouterr().err, "memory", "transformer", "GB")
    assert not (tmp_path / "out").exists()


def test_a_template_of_a_file_is_kept_by_its_full_path(chats, tmp_path, monkeypatch):
    """A conversion that was stopped before its text was encoded goes on from another folder."""
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(chats), "--template", "mine.jinja", "--out", "out", *SMALL]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    asked = config_of(tmp_path / "out")
    assert asked.template == str((tmp_path / "mine.jinja").resolve())
    noted(tmp_path / "stopped", asked)
    assert main(["convert", "--resume", str(tmp_path / "stopped")]) == 0


def test_an_imported_model_is_converted_on_chats(chats, tmp_path, capsys):
    """Chats that the run was not trained on: by a template that is named, of answers alone."""
    records = [{"prompt": f"What is {i} times 3?", "completion": f" It is {3 * i}."} for i in range(1500)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    model, tokenizer = checkpoint.load_run(chats)
    save(model, tokenizer, tmp_path / "run")
    given = [str(tmp_path / "run"), "--data", str(tmp_path / "chats.jsonl"), *SMALL, "--tokens", "21K"]
    capsys.readouterr()
    assert main(["convert", *given, "--out", str(tmp_path / "own"), "--template", "own"]) == 2
    in_a_line(capsys.readouterr().err, "template", "own")
    assert not (tmp_path / "own").exists()
    assert main(["convert", *given, "--out", str(tmp_path / "out"), "--template", "plain"]) == 0
    assert open_model(tmp_path / "out").template().text == Template.named("plain").text


def test_a_template_for_a_text_that_was_read_without_one_is_refused(tmp_path, capsys):
    records = [{"text": f"The number {i} comes before {i + 1}."} for i in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = trained(tmp_path / "run", tmp_path / "text.jsonl")
    capsys.readouterr()
    assert main(["convert", str(run), "--template", "plain", "--out", str(tmp_path / "out"), *SMALL]) == 2
    in_a_line(capsys.readouterr().err, "template", "plain", "run")
    assert not (tmp_path / "out").exists()
