"""Texts of several kinds and places, from the command line to a run."""

import json
from pathlib import Path

import pytest

from perspectron.cli.main import _one_source, main
from perspectron.data import Tokenizer, open_shards
from perspectron.train import checkpoint
from tests.refusals import in_a_line, names

TINY = ["--preset", "transformer-tiny", "--set", "layers=1", "d_model=16", "heads=2", "--steps", "2"]
TINY += ["--seq-len", "16", "--batch-size", "2", "--eval-tokens", "64", "--dtype", "float32"]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    (tmp_path / "code.txt").write_text("def main(): pass\n" * 200)
    (tmp_path / "prose.jsonl").write_text(
        "".join(json.dumps({"text": f"Text {i}."}) + "\n" for i in range(99))
    )
    return [f"code=0.7:{tmp_path / 'code.txt'}", f"prose=0.3:{tmp_path / 'prose.jsonl'}"]


def test_several_sources_are_one_text(texts: list[str]) -> None:
    first, second = texts
    arguments = ["--data", first, "--steps", "2", f"--data={second}"]
    assert _one_source(arguments) == ["--data", f"{first} {second}", "--steps", "2"]
    assert _one_source(["--data", "stdlib"]) == ["--data", "stdlib"]


def test_training_on_several_sources_goes_on_with_them(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    data = [word for text in texts for word in ("--data", text)]
    assert main(["train", *data, *TINY, "--tokenizer", "characters", "--out", str(run)]) == 0
    assert names(capsys.readouterr().err, "MB")
    config = checkpoint.load_config(run)
    assert config.train.data == " ".join(texts) and config.train.tokenizer == "characters"
    assert [source.name for source in open_shards(run / "data").split("train").sources] == ["code", "prose"]
    assert Tokenizer.load(run / "tokenizer.json").vocab_size == 257 == config.model.vocab_size
    assert main(["train", "--resume", str(run)]) == 0
    # Half of it, gone on with, ends with the same weights.
    half = tmp_path / "half"
    constant = ["--schedule", "constant", "--steps"]
    tiny = TINY[: TINY.index("--steps")] + TINY[TINY.index("--steps") + 2 :]
    for steps, where in (("4", run.with_name("whole")), ("2", half)):
        assert (
            main(["train", *data, *tiny, "--tokenizer", "bytes", *constant, steps, "--out", str(where)]) == 0
        )
    assert main(["train", "--resume", str(half), "--steps", "4"]) == 0
    one, other = (checkpoint.path_of(p, 4) / "model.safetensors" for p in (run.with_name("whole"), half))
    assert one.read_bytes() == other.read_bytes()


def test_a_text_is_tokenized_once_and_by_any_tokenizer(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "corpus", tmp_path / "other"
    assert main(["tokenize", " ".join(texts), "--out", str(out), "--vocab-size", "300", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["vocab_size"] <= 300 and said["train"]["documents"] > 50
    assert main(["tokenize", str(tmp_path / "code.txt"), "--out", str(other), "--tokenizer",
                 str(out / "tokenizer.json")]) == 0  # fmt: skip
    assert Tokenizer.load(other / "tokenizer.json").fingerprint == open_shards(out).tokenizer_fingerprint
    assert main(["train", "--data", str(out), *TINY, "--out", str(tmp_path / "run")]) == 0


def test_an_output_in_the_folder_of_the_text_is_no_part_of_it(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, digests = tmp_path / "deep" / "corpus", set[str]()
    command = ["tokenize", str(tmp_path), "--out", str(out), "--tokenizer", "bytes", "--json"]
    for time in range(3):
        assert main(command) == 0
        said = json.loads(capsys.readouterr().out)
        digests.add(said["digest"])
        assert [names(line, out) for line in said["notes"]].count(True) == (time > 0)
    assert len(digests) == 1
    run = ["train", "--data", str(tmp_path), *TINY, "--out"]
    assert main([*run, str(tmp_path / "one")]) == 0 == main([*run, str(tmp_path / "two")])
    one, other = (open_shards(tmp_path / name / "data") for name in ("one", "two"))
    assert one.corpus_fingerprint == other.corpus_fingerprint
    assert names(capsys.readouterr().err, out, tmp_path / "one")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "{0}", "--data", "plain.txt"], ["data", "plain.txt", 2]),
        (["--data", "code=0.7:a.txt", "--data", "prose=0.2:b.txt"], [0.9, "code", 0.7, "prose", 0.2]),
        (["--data", "code=0.7:no.txt", "--data", "prose=0.3:b.txt"], ["code", "no.txt"]),
        (["--data", "code=1:{1}", "--tokenizer", "letters"], ["tokenizer", "letters", "bpe"]),
    ],
)
def test_sources_that_make_no_sense_leave_nothing_behind(
    texts: list[str],
    tmp_path: Path,
    arguments: list[str],
    named: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [word.format(texts[0], tmp_path / "code.txt") for word in arguments]
    assert main(["train", *filled, *TINY, "--out", str(tmp_path / "run")]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not (tmp_path / "run").exists()
