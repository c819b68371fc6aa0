"""What people bring from elsewhere and cannot be read: one line that says what would work, and nothing is written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perspectron.cli import options
from perspectron.cli.main import main


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a text, a table, folders that are no models, and one whose weights are of other shapes."""
    monkeypatch.chdir(tmp_path)
    Path("play.txt").write_text("KING: to be or not to be.\n" * 50)
    pq.write_table(pa.table({"id": [1, 2], "body": ["a text", "another"]}), "chats.parquet")
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
        "bert/config.json: model_type is 'bert', which cannot be read; perspectron, gpt2, llama, mistral, mamba2, "
        "bamba can",
    ),
    (
        "train --out run --data chats.parquet",
        "chats.parquet: no column 'text', its columns are id, body; name the one with the text: ",
    ),
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
