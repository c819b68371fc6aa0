"""Checkpoints: which are kept, which is loaded, and what damage of any kind leads to."""

import ast
import dataclasses
import errno
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import perspectron
from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.model.model import LanguageModel, build
from perspectron.train import checkpoint, loop, weights
from perspectron.train.heldout import Heldout
from perspectron.util import tensors
from perspectron.util.errors import CheckpointError, ConfigError, StorageError
from tests.long import some
from tests.refusals import refused, warned

FILES = (checkpoint.MODEL, checkpoint.TRAINING, checkpoint.INDEX)


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.paths(run)]


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def scripted(monkeypatch):
    """Held-out results that come as a list says."""

    def scripted(values):
        left = iter(values)
        monkeypatch.setattr(loop, "heldout", lambda *_, **__: Heldout(next(left), 2.0, 10, 10))

    return scripted


def test_weights_that_share_memory_are_parted_when_a_model_takes_them(tmp_path):
    config = presets.get("transformer-tiny", vocab_size=300)
    tensors = {name: x.clone() for name, x in build(config).state_dict().items()}
    first, second = (f"blocks.{i}.mixer_norm.weight" for i in range(2))
    assert tensors[first].shape == tensors[second].shape
    tensors[first] = tensors[second]
    with torch.device("meta"):
        model = LanguageModel(config)
    weights.fill(model, tensors, tmp_path)
    own = model.state_dict()
    assert own[first].data_ptr() != own[second].data_ptr() and torch.equal(own[first], own[second])


@pytest.fixture(scope="module")
def trained(runs, tmp_path_factory):
    """A run with checkpoints at 2, 4 and 6, none of them measured; harm a copy of it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    trainer = runs.trainer(run, steps=8, save_every=2, eval_every=0, keep=3)
    trainer.fit(until=6)
    assert steps(run) == [2, 4, 6]
    return run


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def go_on(runs):
    return lambda run: runs.trainer(run, steps=8, save_every=2, eval_every=0, keep=3)


# Which are kept and which is loaded


def test_the_last_and_the_best_are_kept_and_the_best_is_loaded(runs, tmp_path, scripted):
    scripted([5.0, 3.0, 4.0, 3.5, 6.0])
    trainer = runs.trainer(tmp_path, steps=10, eval_every=2, save_every=2, keep=2)
    weights = {}
    while trainer.progress.step < 10:
        trainer.fit(until=trainer.progress.step + 2)
        weights[trainer.progress.step] = trainer.model.fingerprint()
    assert steps(tmp_path) == [4, 8, 10]
    assert trainer.best == 3.0
    model, tokenizer = checkpoint.load_run(tmp_path)
    assert model.fingerprint() == weights[4] != weights[10]
    assert tokenizer.fingerprint == runs.tokenizer.fingerprint
    assert runs.trainer(tmp_path, steps=10).best == 3.0
    for step in (4, 8, 10):
        path = checkpoint.path_of(tmp_path, step)
        assert checkpoint.load_run(path)[0].fingerprint() == weights[step]
    assert perspectron.load(tmp_path)[0].fingerprint() == weights[4]


def test_a_new_best_is_saved_when_it_comes(runs, tmp_path, scripted):
    scripted([5.0, 5.5, 4.0, 4.5, 4.4])
    trainer = runs.trainer(tmp_path, steps=5, eval_every=1, save_every=0, keep=1)
    trainer.fit()
    assert steps(tmp_path) == [3, 5]


def test_without_a_held_out_result_the_newest_is_loaded(run, runs, go_on):
    assert checkpoint.load_run(run)[0].fingerprint() == go_on(run).model.fingerprint()


def test_a_checkpoint_path_loads_relative_too(run, monkeypatch):
    expected = checkpoint.load_run(checkpoint.path_of(run, 4))[0].fingerprint()
    monkeypatch.chdir(run / "checkpoints")
    assert checkpoint.load_run(Path("step-00000004"))[0].fingerprint() == expected
    assert checkpoint.load_run(run)[0].fingerprint() != expected


def test_a_checkpoint_of_the_same_step_is_replaced_when_it_differs(run, go_on):
    trainer = go_on(run)
    before = checkpoint.read(checkpoint.path_of(run, 6))
    trainer.save()
    assert checkpoint.read(checkpoint.path_of(run, 6)) == before
    trainer.measure()
    trainer.save()
    assert checkpoint.read(checkpoint.path_of(run, 6)).progress.heldout == trainer.best
    assert steps(run) == [2, 4, 6]


# Damage


@pytest.mark.parametrize("name", FILES[:2])
def test_a_flipped_bit_anywhere_is_found(run, flip, name):
    draw = random.Random(name)
    path = checkpoint.path_of(run, 6)
    size = (path / name).stat().st_size
    places = [0, 7, 8, 100, size - 1, *(draw.randrange(size) for _ in range(20))]
    for at in places:
        bit = draw.randrange(8)
        flip(path / name, at, bit)
        with refused(CheckpointError, path / name):
            checkpoint.load_run(path)
        flip(path / name, at, bit)
    checkpoint.load_run(path)


def test_a_flipped_bit_anywhere_in_the_index_is_found(run, flip):
    """Every byte of it (300 in the short form): a wrong step or data position must not pass for the right one."""
    draw = random.Random(0)
    path = checkpoint.path_of(run, 6)
    index, whole = path / checkpoint.INDEX, checkpoint.read(path)
    for at in some(range(index.stat().st_size), 300, 0):
        bit = draw.randrange(8)
        flip(index, at, bit)
        try:
            told = checkpoint.read(path) == whole  # 1e-05 and 1E-05 are the same
        except CheckpointError as error:
            told = str(index) in str(error) and "\n" not in str(error)
        assert told, f"byte {at}, bit {bit}"
        flip(index, at, bit)
    text = index.read_text()
    index.write_text(text.replace('"cursor": ', '"cursor": 1'))
    with refused(CheckpointError, path / checkpoint.INDEX):
        checkpoint.load_run(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied", "deleted", "foreign"])
def test_a_damaged_newest_is_passed_over(run, runs, go_on, flip, tmp_path, name, harm):
    bad = checkpoint.path_of(run, 6) / name
    size = bad.stat().st_size
    if harm == "flipped":
        flip(bad, random.Random(name).randrange(size), 3)
    elif harm == "cut":
        bad.write_bytes(bad.read_bytes()[: size // 2])
    elif harm == "emptied":
        bad.write_bytes(b"")
    elif harm == "deleted":
        bad.unlink()
    else:
        bad.write_bytes(b'["something else"]')
    with warned(bad, "step-00000004"):
        model, _ = checkpoint.load_run(run)
    assert model.fingerprint() == checkpoint.load_run(checkpoint.path_of(run, 4))[0].fingerprint()
    trainer = go_on(run)
    assert trainer.progress.step == 4
    assert isinstance(trainer.damaged, CheckpointError) and str(bad) in str(trainer.damaged)
    assert steps(run) == [2, 4]
    assert (run / "checkpoints" / "damaged-step-00000006").is_dir()
    checkpoint.load_run(run)


def test_going_on_after_damage_equals_never_damaged(run, runs, go_on, flip, tmp_path):
    """Also when more checkpoints are damaged than are kept."""
    whole = runs.trainer(tmp_path / "whole", steps=8, save_every=2, eval_every=0, keep=2)
    whole.fit()
    for step in (4, 6):
        flip(checkpoint.path_of(run, step) / checkpoint.MODEL, 5000, 0)
    trainer = runs.trainer(run, steps=8, save_every=2, eval_every=0, keep=2)
    assert trainer.progress.step == 2 and "step-00000006" in str(trainer.damaged)
    trainer.fit(until=3)
    assert steps(run) == [2, 3]
    trainer = runs.trainer(run, steps=8, save_every=2, eval_every=0, keep=2)
    assert trainer.progress.step == 3 and trainer.damaged is None
    trainer.fit()
    runs.assert_same(runs.outcome(trainer), runs.outcome(whole))
    assert steps(run) == [6, 8]


@pytest.mark.parametrize("name", FILES)
def test_all_damaged_is_an_error_and_nothing_is_touched(run, go_on, flip, name):
    for step in (2, 4, 6):
        flip(checkpoint.path_of(run, step) / name, 30, 2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        go_on(run)
    assert str(checkpoint.path_of(run, 6) / name) in one_line(error)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_foreign_files_and_folders_are_left_alone(run, go_on):
    place = run / "checkpoints"
    (place / "step-by-step").mkdir()
    (place / "notes.txt").write_text("mine")
    trainer = go_on(run)
    assert trainer.progress.step == 6 and trainer.damaged is None
    trainer.fit()
    checkpoint.load_run(run)
    assert (place / "step-by-step").is_dir() and (place / "notes.txt").read_text() == "mine"


def test_leftovers_of_a_kill_are_removed(run, go_on):
    left = f".{2**22 + 1}-0123456789abcdef.tmp"  # of a process that cannot run
    (run / "checkpoints" / left).mkdir()
    (run / "checkpoints" / left / checkpoint.MODEL).write_bytes(b"half")
    (run / left).write_text("{")
    checkpoint.load_run(run)
    go_on(run)
    assert list(run.rglob("*.tmp")) == []


def test_what_is_no_run_is_refused_with_the_file_that_lacks_or_is_damaged(run, tmp_path):
    with refused(CheckpointError, tmp_path / "nowhere"):
        checkpoint.load_run(tmp_path / "nowhere")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("not JSON")
    with refused(CheckpointError, foreign / "config.json"):
        checkpoint.load_run(foreign)
    shutil.rmtree(run / "checkpoints")
    with refused(CheckpointError, run / "checkpoints"):
        checkpoint.load_run(run)


def test_another_format_is_refused(run, index_of):
    path = checkpoint.path_of(run, 6)
    (path / checkpoint.INDEX).write_text(json.dumps(index_of(path) | {"format": "perspectron-checkpoint-9"}))
    with refused(CheckpointError, "perspectron-checkpoint-9"):
        checkpoint.load_run(path)


@pytest.mark.parametrize("sizes", [{"d_model": 16}, {"layers": 3}, {"rank": 4}, {"name": "transformer-tiny"}])
def test_a_checkpoint_of_another_model_is_refused(run, runs, sizes):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        runs.trainer(run, model=runs.small(**sizes), steps=8)
    assert "another model config" in one_line(error)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_config_of_another_model_is_refused(run, runs):
    config = checkpoint.load_config(run)
    checkpoint.save_config(run, dataclasses.replace(config, model=runs.small(d_model=16)))
    with refused(CheckpointError, run):
        checkpoint.load_run(run)


@pytest.mark.parametrize("change", [{"norm_eps": 0.1}, {"window": 15}])
def test_a_config_whose_weights_fit_is_refused_too(run, runs, change):
    config = checkpoint.load_config(run)
    if "window" in change:
        changed = runs.small(**change)
        assert changed != config.model
    else:
        changed = dataclasses.replace(config.model, **change)
    checkpoint.save_config(run, dataclasses.replace(config, model=changed))
    with refused(CheckpointError, run):
        checkpoint.load_run(run)


def test_another_tokenizer_is_refused(run):
    Tokenizer.train(["something else entirely"], 270).save(run / "tokenizer.json")
    with refused(CheckpointError, run):
        checkpoint.load_run(run)


def test_an_unknown_key_in_the_config_is_an_error(run):
    config = json.loads((run / "config.json").read_text())
    config["train"]["optim"]["momentum"] = 0.9
    (run / "config.json").write_text(json.dumps(config))
    for load in (checkpoint.load_config, checkpoint.load_run):
        with refused(ConfigError, "config.json.train.optim", "momentum"):
            load(run)


# A full disk


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("when", ["model", "training", "training in Rust", "index", "rename"])
def test_a_full_disk_leaves_the_last_good_checkpoint(run, go_on, monkeypatch, when):
    trainer = go_on(run)
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    config = (run / "config.json").read_bytes()
    real_save, real_replace, real_write = tensors.save_file, os.replace, Path.write_text

    def save_file(tensors, path, *rest):
        if path.name == f"{when.split()[0]}.safetensors":
            path.write_bytes(b"half of a file")
            raise SafetensorError("I/O error: No space left on device") if "Rust" in when else full()
        real_save(tensors, path, *rest)

    def write_text(path, *rest, **more):
        if when == "index" and path.name == checkpoint.INDEX:
            path.write_bytes(b"{")
            raise full()
        return real_write(path, *rest, **more)

    def replace(a, b):
        if when == "rename" and Path(b).name.startswith("step-"):
            raise full()
        real_replace(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "save_file", save_file)
        patch.setattr(Path, "write_text", write_text)
        patch.setattr(os, "replace", replace)
        with refused(StorageError, "step-00000008"):
            trainer.fit(until=8)
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == before
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert (run / "config.json").read_bytes() == config
    checkpoint.load_run(run)
    (run / "metrics.jsonl").unlink()
    again = go_on(run)
    assert again.progress.step == 6 and again.damaged is None
    again.fit()
    assert steps(run)[-1] == 8


def test_a_run_folder_that_cannot_be_made(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with refused(StorageError, tmp_path / "file"):
        checkpoint.save_config(tmp_path / "file" / "run", runs.config())


# Nothing is unpickled


def test_the_package_never_unpickles():
    """No import of a pickle module, no torch.load but of weights alone, no torch.save, no numpy file that may hold
    objects."""
    modules = ("pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
    found = []
    for path in Path(perspectron.__file__).parent.rglob("*.py"):
        safe = []
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Call) and "weights_only=True" in [
                ast.unparse(word) for word in node.keywords
            ]:
                safe.append(node.func)
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif (
                isinstance(node, ast.ImportFrom) and ast.unparse(node) != "from pickle import UnpicklingError"
            ):
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute) and node not in safe:
                names = [ast.unparse(node)]
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = ["allow_pickle"]
            bad = ("torch.load", "torch.save", "np.load", "numpy.load", "torch.serialization", "allow_pickle")
            found += [(path, name) for name in names if name.split(".")[0] in modules or name in bad]
    assert found == []


def test_loading_a_run_works_without_pickle(run, go_on, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for place, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(place, name, refuse)
    checkpoint.load_run(run)
    assert go_on(run).progress.step == 6


def test_a_run_from_before_a_field_of_the_config_was_there_loads_and_goes_on(run, go_on):
    def without(config):
        for block in config["model"]["blocks"]:
            assert block["mixer"].pop("gate_rank", 0) == 0
        return config

    path = run / "config.json"
    path.write_text(json.dumps(without(json.loads(path.read_text()))))
    for found in checkpoint.paths(run):
        index = json.loads((found / checkpoint.INDEX).read_text())
        without(index["config"])
        index.pop("digest")
        index["digest"] = checkpoint._digest(index)
        (found / checkpoint.INDEX).write_text(json.dumps(index))
    perspectron.load(run)
    assert go_on(run).progress.step == 6
