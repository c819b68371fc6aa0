"""`perspectron chat --keep`: a talk goes on after any end of the program, as if there had been none."""

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import perspectron
from perspectron import presets
from perspectron.cli import kept
from perspectron.cli.main import main
from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.decode.session import Session
from tests.cli.small import PLAIN
from tests.refusals import names
from tests.waiting import until

QUICK = ["--seq-len", "32", "--batch-size", "2", "--dtype", "float32", "--steps", "2"]
TEMPLATE = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"""


@pytest.fixture(scope="module", params=["plain", "template"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log.\n" * 80)
    command = ["train", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), *PLAIN, *QUICK]
    assert main(command) == 0
    if request.param == "template":
        Template(TEMPLATE, "test").save(folder / "run")
    return folder / "run"


@pytest.fixture
def talk(run, capsys, monkeypatch):
    """Say some lines; (exit code, answers, what was said beside them)."""

    def talk(*lines: str, options: tuple[str, ...] = (), folder: Path = run):
        capsys.readouterr()
        text = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        code = main(["chat", str(folder), "--max-tokens", "8", "--temperature", "1", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return talk


def test_a_talk_in_parts_is_one_talk(talk, tmp_path):
    whole = talk("the cat", "the dog", "", "a log")[1]
    keep = ("--keep", str(tmp_path / "talk.state"))
    parts = [talk(*lines, options=keep) for lines in (("the cat",), ("the dog", ""), ("a log",))]
    assert [code for code, _, _ in parts] == [0, 0, 0]
    assert "".join(said for _, said, _ in parts) == whole
    assert not (tmp_path / "talk.state.asked").exists()


@pytest.mark.slow
def test_a_kill_in_the_middle_of_an_answer_loses_nothing(run, tmp_path):
    """The second answer is drawn again, all of it, and the third is what it would have been."""
    command = [
        sys.executable,
        "-m",
        "perspectron",
        "chat",
        str(run),
        "--max-tokens",
        "400",
        "--temperature",
        "1",
    ]
    lines = b"the cat\nthe dog\na log\n"
    whole = subprocess.run(
        [*command, "--keep", str(tmp_path / "whole")], input=lines, capture_output=True, check=True
    )
    command += ["--keep", str(tmp_path / "talk.state")]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, env={**os.environ, "COLUMNS": "80"}
        )
        assert process.stdin is not None
        process.stdin.write(b"the cat\n")
        process.stdin.flush()
        until(lambda: (tmp_path / "talk.state").exists())
        first = (tmp_path / "out").stat().st_size
        process.stdin.write(b"the dog\n")
        process.stdin.flush()
        until(lambda: (tmp_path / "out").stat().st_size > first + 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()
    before = (tmp_path / "out").read_bytes()
    assert (tmp_path / "talk.state.asked").exists()
    again = subprocess.run(command, input=b"a log\n", capture_output=True, check=True)
    assert whole.stdout.startswith(before)
    assert before[:first] + again.stdout == whole.stdout
    states = [load_file(tmp_path / name) for name in ("talk.state", "whole")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_was_being_answered_before_something_else_was_said_is_not_answered(talk, tmp_path):
    """A message is of the memory that it was read after."""
    keep = ("--keep", str(tmp_path / "talk.state"))
    talk("the cat", options=keep)
    (tmp_path / "talk.state.asked").write_text('{"message": "the dog", "drawn": 3}')
    assert talk(options=keep)[:2] == (0, "")


def test_a_kill_right_after_an_answer_was_kept_does_not_answer_again(run, talk, tmp_path, monkeypatch):
    """Also where the template leaves out what was said before, so that no more tokens stand there than before."""
    if not (run / "chat_template.jinja").exists():
        pytest.skip("of templates")
    own = tmp_path / "run"
    shutil.copytree(run, own)
    Template("{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}[a]",
             "short").save(own)  # fmt: skip
    keep, asked = ("--keep", str(tmp_path / "talk.state")), tmp_path / "talk.state.asked"
    talk("the cat", options=keep, folder=own)
    with monkeypatch.context() as still:
        still.setattr(kept, "remove", lambda path: None)  # killed before it
        talk("the dog", options=keep, folder=own)
    assert asked.exists()
    assert talk(options=keep, folder=own)[:2] == (0, "")


def test_new_begins_another_talk(talk, tmp_path):
    keep = ("--keep", str(tmp_path / "talk.state"))
    _, said, _ = talk("the cat", "/new", "the cat", options=keep)
    assert said == 2 * said[: len(said) // 2]
    assert talk("/new", options=keep)[0] == 0 and not (tmp_path / "talk.state").exists()


def test_a_blank_line_of_a_script_with_nothing_to_continue_is_passed_over(run, talk):
    if Template.of(run):
        code, answers, _ = talk("", "hello")
        assert code == 0 and (code, answers) == talk("hello")[:2]


def test_a_talk_on_a_trained_memory_keeps_it(run, talk, tmp_path):
    """From its first message on, after /new, and in the next program."""
    text, file, linear = (tmp_path / name for name in ("text.txt", "talk.state", "gla"))
    text.write_text("the dog sat on the mat, and the cat sat on the log.\n" * 80)
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    model = perspectron.build(presets.small("gla", vocab_size=tokenizer.vocab_size, d_model=32, seq_len=32))
    perspectron.save(model, tokenizer, linear)
    if template := Template.of(run):
        template.save(linear)
    trained = ["train", "--init", str(linear), "--data", str(text), "--state", "first", "--out", str(file)]
    assert main([*trained, "--steps", "4", "--batch-size", "2", "--seq-len", "32", "--lr", "10"]) == 0
    started = Session(model, tokenizer).loaded(file)

    def begins_with_it() -> Session:
        kept = Session(model, tokenizer).loaded(file)
        for one, other in zip(tree_leaves(kept.start), tree_leaves(started.start), strict=True):
            assert torch.equal(one, other)
        return kept

    given = {"folder": linear, "options": ("--keep", str(file))}
    assert talk("hello", **given)[0] == 0 and begins_with_it().tokens
    assert talk("/new", **given)[0] == 0 and not begins_with_it().tokens
    assert (
        talk("/fork", "hello", "/back", "hello", "/new", "hello", **given)[0] == 0 and begins_with_it().tokens
    )


@pytest.fixture
def typed(run, capsys, monkeypatch):
    """Type some lines on a terminal; (answers, what was said beside them)."""

    def typed(lines: list[str], folder: Path = run):
        rest = iter(lines)

        def line(prompt: str) -> str:
            for line in rest:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", line)
        monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
        capsys.readouterr()
        assert main(["chat", str(folder), "--max-tokens", "4"]) == 0
        return capsys.readouterr()

    return typed


def test_a_terminal_keeps_its_talk_in_the_run_by_default(run, typed):
    whole = typed(["the cat", "the dog"]).out
    (run / "chat.state").unlink()
    assert typed(["the cat"]).out + typed(["the dog"]).out == whole
    (run / "chat.state").unlink()


def test_a_talk_with_a_checkpoint_is_not_kept_where_training_would_remove_it(run, typed):
    step, *_ = (run / "checkpoints").iterdir()
    before = set(run.rglob("*"))
    said, beside = typed(["the cat"], step)
    assert said.strip("\n") and names(beside, step, "--keep")
    assert set(run.rglob("*")) == before


def test_a_talk_that_cannot_be_kept_says_so(run, typed, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    _, beside = typed(["the cat"])
    assert names(beside, run, "--keep") and not (run / "chat.state").exists()


def test_a_talk_of_another_model_is_refused(talk, tmp_path):
    keep = ("--keep", str(tmp_path / "talk.state"))
    Path(keep[1]).write_bytes(b"no state")
    code, said, beside = talk("the cat", options=keep)
    assert (code, said) == (2, "") and keep[1] in beside and beside.count("\n") == 1
    assert talk("x", options=(*keep, "--load-state", keep[1]))[0] == 2
