"""What people bring from elsewhere and cannot be read: one line that says what would work, and nothing is written."""

import json
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
    ("import empty --out run", "empty/config.json: no such file"),
    ("import play.txt --out run", "play.txt/config.json: "),
    ("import nowhere --out run", "nowhere/config.json: no such file"),
    (
        "import llama --out run",
        "llama: weights model.layers.0.mlp.gate_proj.weight have shape [48, 32], must have [64, 32]",
    ),
    (
        "import bert --out run",
        "bert/config.json: model_type is 'bert', which cannot be read; perspectron, gpt2, llama, mistral, ",
    ),
    (
        "train --out run --data chats.parquet",
        "chats.parquet: no column 'text', its columns are id, body; name the one with the text: ",
    ),
    (
        "train --out run --data table.csv#nosuch",
        "table.csv: no column 'nosuch', its columns are id, body; name the one",
    ),
    (
        "tokenize wide.txt --out run",
        "wide.txt: not UTF-8 text, it looks like utf-16, at byte 0: --encoding utf-16 reads",
    ),
    ("compare --out run --encoding nosuch", "encoding = 'nosuch', must be one that Python has"),
    ("quickstart --out run --steps 0", "steps = 0, must be ≥ 1"),
    (MIXED.format("0.7", "0.2", "play.txt"), "the weights sum to 0.9 (prose 0.7, code 0.2), must sum to 1"),
    (MIXED.format("0.7", "0.4", "play.txt"), "the weights sum to 1.1 (prose 0.7, code 0.4), must sum to 1"),
    (MIXED.format("1", "0", "play.txt"), "weight of code is '0', must be above 0 and at most 1"),
    (MIXED.format("1.5", "-0.5", "play.txt"), "weight of prose is '1.5', must be above 0 and at most 1"),
    (MIXED.format("0.5", "nan", "play.txt"), "weight of code is 'nan', must be above 0 and at most 1"),
    (MIXED.format("0.7", "0.3", "nowhere.txt"), "source code: "),
    (MIXED.format("0.7", "0.3", "chats.parquet"), "source code: "),
    ("train --out run --data nowhere.txt", "nowhere.txt: no such file or folder"),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_it_is_refused_in_a_line(
    there: Path, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_logger_that_is_not_installed_comes_with_its_command(
    there: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert main(["train", "--out", "run", "--data", "play.txt", "--log", kind]) == 2
    assert capsys.readouterr().err == (
        f"perspectron: error: {kind} is not installed: pip install 'perspectron[{kind}]'\n"
    )


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
    said = capsys.readouterr().err
    assert f"{option} = 999999999999, must be ≤ 1,000,000,000" in said and said.count("\n") == 1
    assert not any(tmp_path.iterdir())
