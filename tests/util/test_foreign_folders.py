"""Folders that somebody else made: what their names and links lead to, what is no file in them, and numbers that no
program of ours wrote, behind right digests. Every refusal is one line, and nothing outside is touched."""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import perspectron
from perspectron.cli.main import main
from perspectron.compare import plan as plans
from perspectron.compare import run as comparison
from perspectron.compare.plan import Arm, Plan, Settings, models_of_designs
from perspectron.data import Tokenizer, encode, open_corpus, open_shards
from perspectron.eval.recall import _done
from perspectron.train import checkpoint
from perspectron.util.errors import CheckpointError, ConfigError, DataError, PerspectronError, StorageError
from tests.refusals import in_a_line, names, refused
from tests.train.test_shared_folders import held
from tests.waiting import PATIENCE

RUN = Path("tests/vectors/run")
LAST = "checkpoints/step-00000006"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Who waits for a pipe is let go in the end, so that the test fails and does not hang."""
    ended = threading.Event()

    def feed() -> None:
        while not ended.wait(PATIENCE):
            for path in waiting:
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    waiting.clear()
    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    before = time.monotonic()
    yield
    ended.set()
    assert not waiting or time.monotonic() - before < PATIENCE


waiting: list[Path] = []


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    waiting.append(path)


def one_line(error: pytest.ExceptionInfo[PerspectronError]) -> str:
    said = str(error.value)
    assert "\n" not in said and len(said) < 500
    return said


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reindex(run: Path, change: Callable[[dict[str, Any]], object] = lambda index: None) -> None:
    """Change the index of the last checkpoint, with right sizes and digests."""
    path = run / LAST / "checkpoint.json"
    index = json.loads(path.read_text())
    for name in index["files"]:
        part = path.with_name(name)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()
        index["files"][name] = {"bytes": part.stat().st_size, "sha256": digest}
    change(index)
    index.pop("digest")
    index["digest"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index))


def last(run: Path) -> tuple[torch.nn.Module, Tokenizer]:
    """Of a run whose other checkpoint is gone, so that no older one takes the place."""
    shutil.rmtree(run / "checkpoints/step-00000003", ignore_errors=True)
    return perspectron.load(run)


# Links


@pytest.mark.parametrize("name", ["checkpoints", "data"])
def test_a_folder_of_a_run_that_is_elsewhere_is_refused(run, tmp_path, name, capsys):
    shutil.move(run / name, tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    assert main(["train", "--resume", str(run)]) == 2
    in_a_line(capsys.readouterr().err, run, name)
    after = {path: value for path, value in snapshot(tmp_path).items() if not path.endswith(".lock")}
    assert after == before
    if name == "checkpoints":
        with refused(CheckpointError, run, "checkpoints"):
            perspectron.load(run)


def test_links_that_stay_inside_and_a_run_that_is_a_link_are_fine(run, tmp_path):
    for name in ("checkpoints", "data"):
        (run / name).rename(run / f"real-{name}")
        (run / name).symlink_to(f"real-{name}")
    (tmp_path / "link").symlink_to(run)
    model, _ = perspectron.load(tmp_path / "link")
    assert torch.equal(*(next(m.parameters()) for m in (model, perspectron.load(RUN)[0])))
    open_shards(tmp_path / "link" / "data")
    assert main(["train", "--resume", str(tmp_path / "link")]) == 0


def test_a_checkpoint_and_its_files_that_are_elsewhere_are_refused(run, tmp_path):
    shutil.move(run / LAST, tmp_path / "elsewhere")
    (run / LAST).symlink_to(tmp_path / "elsewhere")
    with refused(CheckpointError, run, "step-00000006"):
        perspectron.load(run)
    (run / LAST).unlink()
    shutil.copytree(tmp_path / "elsewhere", run / LAST)
    for name in ("model.safetensors", "checkpoint.json"):
        (run / LAST / name).unlink()
        (run / LAST / name).symlink_to(tmp_path / "elsewhere" / name)
        with refused(CheckpointError, name):
            last(run)


def test_shards_that_are_elsewhere_are_refused(run, tmp_path):
    for name in ("train-00000.bin", "train-00000.starts", "manifest.json"):
        folder = Path(shutil.copytree(run / "data", tmp_path / name))
        shutil.move(folder / name, tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with refused(DataError, name):
            open_shards(folder)


# No files


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
def test_a_pipe_in_a_checkpoint_is_named(run, name):
    pipe(run / LAST / name)
    with refused(CheckpointError, run / LAST / name):
        last(run)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_pipe_in_a_run_is_named(run, name):
    pipe(run / name)
    with refused(PerspectronError, run if name == "config.json" else run / name):
        perspectron.load(run)


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.starts", "manifest.json"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_pipe_among_shards_is_named(run, name, verify):
    pipe(run / "data" / name)
    with refused(DataError, run / "data" / name):
        open_shards(run / "data", verify)


def test_a_pipe_as_a_config_or_a_text_is_named(tmp_path, capsys):
    for name in ("config.toml", "text.txt"):
        (tmp_path / name).touch()
        pipe(tmp_path / name)
    assert main(["train", "--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / "out")]) == 2
    assert (
        main(
            [
                "perspective",
                "routes",
                str(RUN),
                "--text",
                str(tmp_path / "text.txt"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert [
        names(line, path) for line, path in zip(said.splitlines(), ("config.toml", "text.txt"), strict=True)
    ] == [True] * 2
    assert not (tmp_path / "out").exists()


# Numbers


INDEXES: list[tuple[Callable[[dict[str, Any]], object], list[object]]] = [
    (lambda i: i["files"].pop("model.safetensors"), ["training.safetensors"]),
    (lambda i: i.update(files={}), ["files"]),
    (lambda i: i.update(files=[]), ["files"]),
    (lambda i: i["files"].update({"../../x": {"bytes": 1, "sha256": ""}}), ["files", "../../x"]),
    (lambda i: i["files"].update({"model.safetensors": 3}), ["files[...]"]),
    (lambda i: i["files"]["model.safetensors"].update(bytes=-1), ["files[...].bytes"]),
    (lambda i: i["files"]["model.safetensors"].update(bytes=True), ["files[...].bytes"]),
    (lambda i: i["files"]["model.safetensors"].update(sha256=None), ["files[...].sha256"]),
    (lambda i: i["files"]["model.safetensors"].update(bytes=2**62), [78932, 2**62]),
    (lambda i: i["progress"].update(step=-1), ["progress.step"]),
    (lambda i: i["progress"].update(tokens=-1), ["progress.tokens"]),
    (lambda i: i["progress"].update(tokens=1.5), ["progress.tokens"]),
    (lambda i: i.update(config=None), ["config"]),
    (lambda i: i.update(tokenizer=None), ["tokenizer"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_nobody_wrote_is_refused_by_its_field(run, change, named):
    reindex(run, change)
    with refused(CheckpointError, run / LAST, *named) as error:
        last(run)
    assert one_line(error).startswith(str(run / LAST))


def moments(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name)
        if value is not None:
            tensors[name] = value

    return change


BIAS = "blocks.0.mixer.p_proj.bias"
TRAININGS = [
    (moments("rng.cpu", None), ["rng.cpu"]),
    (moments("rng.cpu", torch.zeros(7, dtype=torch.uint8)), []),
    (moments("rng.cpu", torch.zeros(5056)), []),
    (moments(f"exp_avg.{BIAS}", torch.zeros(3)), [f"exp_avg.{BIAS}"]),
    (moments(f"exp_avg_sq.{BIAS}", None), [BIAS]),
    (moments(f"step.{BIAS}", torch.tensor(-1.0)), [f"step.{BIAS}", -1.0]),
    (moments(f"step.{BIAS}", torch.tensor(float("nan"))), [f"step.{BIAS}", "nan"]),
    (moments(f"step.{BIAS}", torch.tensor([1.0, 2.0])), [f"step.{BIAS}"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), TRAININGS, ids=range(len(TRAININGS)))
def test_moments_and_random_states_of_another_kind_are_refused(run, change, named, capsys):
    path = run / LAST / "training.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    reindex(run)
    shutil.rmtree(run / "checkpoints/step-00000003")
    model, tokenizer = perspectron.load(RUN)
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(CheckpointError, *named):
        checkpoint.restore(checkpoint.read(run / LAST), model, tokenizer, optimizer)
    assert main(["train", "--resume", str(run), "--steps", "8"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_weights_of_another_dtype_are_refused_by_name(run):
    path = run / LAST / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {BIAS: tensors[BIAS].double()}, path)
    reindex(run)
    with refused(CheckpointError, BIAS, "float64", "float32"):
        last(run)


RECORDS: list[tuple[Callable[[dict[str, Any]], object], list[object]]] = [
    (lambda m: m.update(vocab_size=2**40), ["vocab_size"]),
    (lambda m: m.update(shard_tokens=2**62), ["shard_tokens"]),
    (lambda m: m["splits"]["train"][0].update(tokens=2**61), ["tokens"]),
    (lambda m: m["splits"]["train"][0].update(tokens=2**39), ["train-00000.bin"]),
    (lambda m: m["splits"]["train"][0].update(documents=2**39), ["documents"]),
    (lambda m: m["splits"]["train"][0].update(text_bytes=0), ["text_bytes"]),
    (lambda m: m["splits"]["train"][0].update(text_bytes=2**62), ["text_bytes"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), RECORDS, ids=range(len(RECORDS)))
@pytest.mark.parametrize("verify", [True, False])
def test_numbers_of_shards_are_bounded(run, change, named, verify):
    path = run / "data" / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with refused(DataError, *named) as error:
        open_shards(run / "data", verify)
    one_line(error)


# Encoding


def test_two_processes_do_not_encode_into_one_folder(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    out = tmp_path / "out"
    with held(out, ".lock"):
        assert main(["tokenize", str(tmp_path / "text.txt"), "--out", str(out)]) == 2
        in_a_line(capsys.readouterr().err, out)
        tokenizer = Tokenizer.train(["the cat"], 300)
        with refused(StorageError, out):
            encode(open_corpus(str(tmp_path / "text.txt")), tokenizer, out)
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert main(["tokenize", str(tmp_path / "text.txt"), "--out", str(out)]) == 0


def test_what_was_encoded_by_somebody_is_verified_before_it_is_taken(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    corpus, tokenizer = open_corpus(str(tmp_path / "text.txt")), Tokenizer.train(["the cat"], 300)
    encode(corpus, tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")
    with refused(DataError, "train-00000.bin"):
        encode(corpus, tokenizer, tmp_path / "out")


# Comparisons


def planned(name: str = "transformer") -> Plan:
    settings = Settings(
        ("transformer",), 200_000, 4096, 1, vocab_size=300, seq_len=32, batch_size=4, dtype="float32"
    )
    ((model, about, source),) = models_of_designs(settings).values()
    return Plan("designs", settings, {name: Arm(model, 4, 1.0, about, source)})


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp/elsewhere", "..", "a//b", ""])
def test_arms_do_not_lead_out_of_a_comparison(tmp_path, name):
    """Their names are keys of compare.json."""
    what = planned(name)
    with refused(ConfigError, *([name] if name else [])):
        comparison.cells(tmp_path, what, {name: comparison.Rate(1e-3, 0.1)})
    with refused(ConfigError, *([name] if name else [])):
        comparison.trials(tmp_path, what, {name: [comparison.Rate(1e-3, 0.1)]})


def test_links_do_not_lead_out_of_a_comparison(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    for name in ("cells", "data"):
        (out / name).symlink_to(tmp_path / "elsewhere")
    with refused(ConfigError, "cells"):
        comparison.cells(out, planned(), {"transformer": comparison.Rate(1e-3, 0.1)})
    with refused(ConfigError, "data"):
        plans.prepare(out, planned().settings)


def test_a_data_folder_that_no_comparison_made_is_not_deleted(tmp_path, capsys):
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "data" / "thesis.txt").write_text("years of work")
    command = [
        "compare",
        "--designs",
        "transformer",
        "--params",
        "200k",
        "--tokens",
        "4k",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 2
    assert names(capsys.readouterr().err, tmp_path / "out" / "data")
    assert (tmp_path / "out" / "data" / "thesis.txt").read_text() == "years of work"


def test_results_of_recall_that_are_none_are_refused_with_their_file(tmp_path):
    for text in ("[]", "{", '{"done": 3}'):
        (tmp_path / "kept").write_text(text)
        with refused(ConfigError, tmp_path / "kept"):
            _done(tmp_path / "kept", {})
