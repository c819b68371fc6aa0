"""A memory that `train --state` makes, and conversations that begin with it."""

import io
import json
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.decode.conversation import Conversation
from perspectron.decode.session import Session
from perspectron.model.state import load_extra, read_state
from perspectron.model.tuned import parts
from perspectron.opening import Opened, open_model
from perspectron.train.memory import About
from tests.refusals import in_a_line

QUICK = ["--steps", "4", "--seq-len", "32", "--batch-size", "2", "--dtype", "float32"]
RUN = ["--data", "play.txt", "--set", "vocab_size=300", "d_model=32", "layers=2", "hidden=32", *QUICK]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lines = (f"KING {i}: The cat number {i * 7} sat on the mat.\n" for i in range(700))
        (folder / "play.txt").write_text("".join(lines))
        (folder / "logs.txt").write_text("".join(f'{{"at": {i}, "level": "info"}}\n' for i in range(700)))
        sizes = ["--preset", "perspective2-tiny", "--out", "play"]
        assert main(["train", *RUN, *sizes]) == 0
        assert main(["train", *RUN, "--preset", "transformer-tiny", "--out", "plain"]) == 0
        tune = [
            "train",
            "--init",
            "play",
            "--state",
            "first,offset",
            "--data",
            "logs.txt",
            "--out",
            "logs.state",
        ]
        assert main([*tune, *QUICK, "--steps", "12", "--eval-tokens", "512"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(play, monkeypatch):
    monkeypatch.chdir(play)


def test_the_file_says_what_it_was_trained_on_and_what_it_gained() -> None:
    about = About(**load_extra("logs.state")["memory"])
    model = open_model_of("play").model
    assert about.model == model.fingerprint()
    assert list(about.kinds) == ["offset", "first"]
    assert about.data.endswith("logs.txt") and about.digest
    assert (about.steps, about.tokens, about.seq_len) == (12, 12 * 2 * 32, 32)
    assert about.numbers == sum(
        part.offset.numel() + part.first.numel() for part in parts(read_state("logs.state", model)[0])
    )
    assert about.after < about.before, "a model that has seen four updates learns from any text"


def open_model_of(name: str) -> Opened:
    return open_model(Path(name))


def likely(session: Session, ids: list[int]) -> list:
    steps = session.likely(ids, 1)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_prompts_begin_with_it_each_as_alone(capsys) -> None:
    command = ["generate", "play", "--load-state", "logs.state", "--max-tokens", "9", "--json"]
    assert main([*command, "KING", '{"at"', ""]) == 0
    together = json.loads(capsys.readouterr().out)["texts"]
    assert main([*command, "KING"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == together[:1]
    opened = open_model_of("play")
    session = Session.load("logs.state", opened.model, opened.tokenizer)
    assert session.tokens == [] and session.start is not None
    assert session.fork().read("KING").say(9) == together[0]
    ids, bare = opened.tokenizer.encode("KING"), Session(opened.model, opened.tokenizer)
    assert likely(bare, ids) != likely(session, ids)
    assert Conversation.load("logs.state", opened.model).begins


def test_a_chat_begins_with_it_and_so_does_the_next_talk(capsys, monkeypatch) -> None:
    def chat(*lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        assert main(["chat", "play", "--load-state", "logs.state", "--max-tokens", "6"]) == 0
        return capsys.readouterr().out

    opened = open_model_of("play")
    said = Session.load("logs.state", opened.model, opened.tokenizer).read("KING").say(6)
    assert chat("KING") == said + "\n"
    assert chat("QUEEN", "/new", "KING").endswith(said + "\n")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--state", "offsets"], ["state", "offsets"]),
        (["--state", "offset,offset"], ["state"]),
        (["--state", "offset", "--init", "plain"], ["offset", "attention"]),
        (["--state", "offset", "--lora", "rank=2"], ["lora"]),
        (["--state", "offset", "--preset", "gla-tiny"], ["preset"]),
        (["--state", "offset", "--minutes", "1"], ["minutes"]),
        (["--state", "offset", "--weight-decay", "0.2"], ["weight_decay", 0.2]),
        (["--state", "offset", "--groups", "mamba"], ["groups", "mamba"]),
        (["--state", "offset", "--out", "logs.state"], ["out", "logs.state"]),
        (["--state", "offset", "--seq-len", "900000"], ["--seq-len"]),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, named, play, capsys) -> None:
    before = sorted(path.name for path in play.iterdir())
    base = ["train", "--init", "play", "--data", "logs.txt", "--out", "new.state", *QUICK]
    assert main([*base, *options]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert sorted(path.name for path in play.iterdir()) == before, "nothing is left"


def test_it_needs_a_run_and_a_file(capsys) -> None:
    assert main(["train", "--state", "offset", "--data", "logs.txt", "--out", "new.state"]) == 2
    in_a_line(capsys.readouterr().err, "state")
    assert main(["train", "--state", "offset", "--init", "play", "--data", "logs.txt"]) == 2
    in_a_line(capsys.readouterr().err, "out")


def test_another_model_refuses_it(capsys) -> None:
    assert main(["generate", "plain", "a", "--load-state", "logs.state"]) != 0
    in_a_line(capsys.readouterr().err, "logs.state")
