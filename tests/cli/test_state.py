"""`perspectron state`: files of memories, their past, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perspectron.cli.main import main
from perspectron.cli.progress import Work
from perspectron.decode import apart
from perspectron.decode.history import history
from perspectron.opening import load
from tests.refusals import in_a_line

RUN = Path(__file__).parents[1] / "vectors" / "run"


@pytest.fixture
def there(tmp_path, monkeypatch) -> Path:
    """A folder with a run and two memories in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUN, "run")
    Path("a.txt").write_text("the cat sat on the mat, and the dog sat on the log.")
    Path("b.txt").write_text("the cat sat on the mat, and then the mat sat.")
    for name in "ab":
        assert main(["state", "read", f"{name}.txt", "--run", "run", "--out", f"run/{name}.state"]) == 0
    return tmp_path


def told(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["state", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_memory_is_read_compared_and_replayed_with_the_model_of_its_folder(there, capsys) -> None:
    _, tokenizer = load("run")
    text = Path("a.txt").read_text()
    log = told(capsys, "log", "run/a.state", "--run", "run")
    ids = tokenizer.encode(text)
    assert [(e["what"], e["text"]) for e in log["entries"]] == [("read", text)] and log["tokens"] == len(ids)
    found = told(capsys, "diff", "run/a.state", "run/b.state", "--on", text)
    other = tokenizer.encode(Path("b.txt").read_text())
    shared = next(i for i, (x, y) in enumerate(zip(ids, other, strict=False)) if x != y)
    assert found["shared"] == shared and len(found["kl"]) == len(ids)
    for options in (["--onto", "KING", "--after", "2"], ["--onto", "run/b.state"]):
        assert main(["state", "rebase", "run/a.state", *options, "--out", "c.state"]) == 0
    assert list(history(Path("c.state")).ids) == [*other, *ids]
    assert told(capsys, "log", "c.state")["entries"][-1]["what"] == "rebased"
    assert main(["state", "log", "c.state"]) == 0
    assert main(["state", "diff", "run/a.state", "run/b.state"]) == 0


def test_a_memory_without_a_token_is_compared_too(there, capsys, monkeypatch) -> None:
    """It expects nothing, as one that was trained for a tokenizer without a first token has it."""
    whole = apart.diffing

    def none_of_a(*asked: Any, **how: Any) -> Any:
        found = yield from whole(*asked, **how)
        return replace(found, next=((), found.next[1]))

    monkeypatch.setattr(apart, "diffing", none_of_a)
    capsys.readouterr()
    assert main(["state", "diff", "run/a.state", "run/b.state"]) == 0
    assert capsys.readouterr().out.count(" 0.") >= 1


def test_a_text_may_be_longer_than_a_name(there) -> None:
    text = "the cat sat. " * 400
    assert main(["state", "rebase", "run/a.state", "--onto", text, "--out", "c.state"]) == 0
    ids = history(Path("c.state")).ids
    assert load("run")[1].decode(ids).startswith(text)


@pytest.mark.parametrize("command", ["read", "rebase"])
def test_of_a_long_text_it_is_told_how_much_is_read(there, command, monkeypatch) -> None:
    told = list[tuple[int, int]]()
    monkeypatch.setattr(Work, "tell", lambda self, *counts: told.append(counts))
    text, out = "the cat sat. " * 800, ["--out", "c.state"]
    Path("long.txt").write_text(text)
    asked = {"read": ["long.txt", "--run", "run"], "rebase": ["run/a.state", "--onto", text]}
    assert main(["state", command, *asked[command], *out]) == 0
    read, whole = zip(*told, strict=True)
    assert read[0] == 0 < read[1] and whole[0] == whole[1] >= len(load("run")[1].encode(text))


def test_the_past_is_looked_into(there, capsys) -> None:
    """What the model says at the end and not at the start is said from some token on."""
    _, tokenizer = load("run")
    bisected = ["bisect", "run/a.state", "--ask", " ", "--max-tokens", "1"]
    asked = ["--until", "p(the) > 0.999999"]
    assert main(["state", *bisected, *asked]) == 2
    in_a_line(capsys.readouterr().err, "until", 0, len(tokenizer.encode(Path("a.txt").read_text())))


REFUSED = [
    ("bisect run/a.state --ask a --until /(/", ["until"]),
    ("bisect run/a.state --ask a --until p(a)>2", ["until"]),
    ("bisect run/a.state --ask a --until x --max-tokens 0", ["max_tokens", 0]),
    ("bisect a.state --ask a --until x", ["run", "a.state"]),
    ("bisect run/nosuch.state --ask a --until x", ["run/nosuch.state"]),
    ("log run/config.json", ["run/config.json"]),
    ("log nosuch.state", ["nosuch.state"]),
    ("read empty.txt --run run --out c.state", ["text", "empty.txt"]),
    ("read odd.txt --run run --out c.state", ["odd.txt", 1]),
    ("rebase run/a.state --out c.state", ["onto", "model"]),
    ("rebase run/a.state --onto a.txt --out c.state", ["a.txt"]),
    ("rebase run/a.state --onto typo.state --out c.state", ["onto", "typo.state"]),
    ("rebase run/a.state --after 999 --out c.state", ["after", 999]),
    ("rebase run/a.state --after -1 --out c.state", ["after", -1]),
    ("log run/two.state", ["run/two.state"]),
    ("merge run/a.state run/nosuch.state --out c.state", ["run/nosuch.state"]),
]


@pytest.mark.parametrize(("line", "named"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_is_refused_in_a_line(there, capsys, line, named) -> None:
    Path("empty.txt").touch()
    Path("odd.txt").write_bytes(b"a\xff")
    shutil.copy("run/a.state", "a.state")
    assert main(["generate", "run", "a", "b", "--max-tokens", "2", "--save-state", "run/two.state"]) == 0
    capsys.readouterr()
    assert main(["state", *line.split()]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not Path("c.state").exists()
