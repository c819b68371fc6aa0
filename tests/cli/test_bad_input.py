"""What people bring from elsewhere and cannot be read: one line that says what would work, and nothing is written."""

import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perspectron.cli import options
from perspectron.cli.main import command_of, commands, main
from perspectron.train.config import TrainConfig
from tests.refusals import in_a_line


def test_a_name_that_is_too_long_or_in_a_folder_that_is_closed_is_refused_in_a_line(
    tmp_path, monkeypatch, capsys
) -> None:
    """As where a prompt stands in the place of the run."""
    assert main(["generate", "the cat sat. " * 400]) == 2
    in_a_line(capsys.readouterr().err, "the")

    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", closed)
    assert main(["generate", str(tmp_path / "run"), "the cat"]) == 2
    in_a_line(capsys.readouterr().err, tmp_path / "run")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a text, a table, folders that are no models, and one whose weights are of other shapes."""
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("KING: to be or not to be.\n" * 50)
    pq.write_table(pa.table({"id": [1, 2], "body": ["a text", "another"]}), "chats.parquet")
    Path("table.csv").write_text("id,body\n1,a text\n2,another\n")
    Path("wide.txt").write_bytes("KING: to be.\n".encode("utf-16") * 9)
    Path("empty").mkdir()
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    from tests.foreign_models import saved, tokenizer

    saved(Path("llama"), "llama", tokenizer())
    values = json.loads(Path("llama/config.json").read_text())
    Path("llama/config.json").write_text(json.dumps(values | {"intermediate_size": 64}))
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


MIXED = "train --out run --data prose={}:play.txt --data code={}:{}"
LINES = [
    ("import empty --out run", ["empty/config.json"]),
    ("import play.txt --out run", ["play.txt", "config.json", ".gguf"]),
    ("import nowhere --out run", ["folder", "nowhere"]),
    ("import llama --out run", ["llama", "model.layers.0.mlp.gate_proj.weight", 48, 64]),
    ("import bert --out run", ["bert/config.json", "model_type", "bert", "gpt2", "llama"]),
    ("train --out run --data chats.parquet", ["chats.parquet", "'text'", "id", "body"]),
    ("train --out run --data table.csv#nosuch", ["table.csv", "'nosuch'", "id", "body"]),
    ("tokenize wide.txt --out run", ["wide.txt", "utf-16", 0, "--encoding"]),
    ("compare --out run --encoding nosuch", ["encoding", "nosuch"]),
    ("compare --out run --quick --recall full", ["recall", "full", "suites"]),
    ("compare --out run --rates 4e-3 --warmups 0.1 --rate-share 0.5", ["rate_share", 0.5]),
    ("quickstart --out run --steps 0", ["steps", 0]),
    (MIXED.format("0.7", "0.2", "play.txt"), [0.9, "prose", 0.7, "code", 0.2]),
    (MIXED.format("0.7", "0.4", "play.txt"), [1.1, "prose", 0.7, "code", 0.4]),
    (MIXED.format("1", "0", "play.txt"), ["weight", "code", "'0'"]),
    (MIXED.format("1.5", "-0.5", "play.txt"), ["weight", "prose", 1.5]),
    (MIXED.format("0.5", "nan", "play.txt"), ["weight", "code", "nan"]),
    (MIXED.format("0.7", "0.3", "nowhere.txt"), ["code"]),
    (MIXED.format("0.7", "0.3", "chats.parquet"), ["code"]),
    ("train --out run --data nowhere.txt", ["nowhere.txt"]),
]


@pytest.mark.parametrize(("line", "named"), LINES, ids=[line for line, _ in LINES])
def test_it_is_refused_in_a_line(
    there: Path, line: str, named: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    in_a_line(capsys.readouterr().err, *named)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_logger_that_is_not_installed_comes_with_its_command(
    there: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert main(["train", "--out", "run", "--data", "play.txt", "--log", kind]) == 2
    in_a_line(capsys.readouterr().err, kind, f"perspectron[{kind}]")


def numbers() -> list[tuple[str, str]]:
    """Every option of every command that is a whole number."""
    found = []
    for name in commands():
        command = command_of(name)
        if isinstance(command, type):
            kinds = {f.name: str(f.type) for f in fields(command)} | (
                {f.name: str(f.type) for f in fields(TrainConfig)} if name == "train" else {}
            )
            found += [(name, option) for option, kind in kinds.items() if re.match(r"(<class ')?int\b", kind)]
    return [(name, option) for name, option in found if option != "seed"]


@pytest.mark.parametrize(("name", "option"), numbers())
def test_a_number_without_bounds_is_refused_by_name(
    name: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = name.split()
    for item in fields(command_of(name)):
        if item.default is MISSING and item.default_factory is MISSING and item.name != option:
            flag = (
                [] if "Positional" in str(item.type) or "Annotated" in str(item.type) else [f"--{item.name}"]
            )
            choices = re.search(r"Literal\['(\w+)", str(item.type))
            words += [*flag, choices[1] if choices else "x"]
    assert main([*words, f"--{option.replace('_', '-')}", "999999999999"]) == 2
    in_a_line(capsys.readouterr().err, option, 999_999_999_999)
    assert not any(tmp_path.iterdir())
