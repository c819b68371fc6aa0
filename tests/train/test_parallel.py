"""Several gloo processes against one: the same losses, gradients and weights, whatever they share; checkpoints that any
number of them read; and how all end when one does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perspectron import presets
from perspectron.cli.main import main
from perspectron.train import checkpoint
from perspectron.train.config import Layout, RunConfig, TrainConfig
from perspectron.train.parallel import ParallelTrainer
from perspectron.train.team import Team
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.ranks import Ranks, all_reduce_sum, shared, together
from tests.refusals import in_a_line, refused
from tests.train.ranks import LAYOUTS
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.train.ranks", str(runs.data), str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(out: Path, name: str):
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.parametrize("run", [run for *_, run in LAYOUTS])
def test_ranks_train_as_one_process_would(out, run):
    apart = read(out, "apart")[run]
    assert apart["loss"] <= 1e-12
    assert apart["grad_norm"] <= 1e-8
    assert apart["weights"] <= 1e-6
    assert apart["aux"] <= 1e-12
    assert apart["heldout_bits_per_byte"] <= 1e-9


def test_all_ranks_end_well(out):
    assert read(out, "equal2") == [0, 0]
    assert read(out, "equal4") == [0] * 4


def test_a_run_goes_on_with_any_number_of_ranks(out):
    assert read(out, "reshard") == [[0] * 4, [0] * 2, [0] * 4]
    whole, resumed = read(out, "losses")
    assert len(whole) == 4
    assert resumed == pytest.approx(whole, abs=1e-12)


def test_one_process_opens_what_ranks_wrote(out):
    shards = sorted(path.name for path in checkpoint.paths(out / "fsdp4")[-1].iterdir())
    assert shards == [
        "checkpoint.json",
        *(f"shard-{n:05d}-model-00001-of-00001.safetensors" for n in (1, 2, 3, 4)),
    ]
    _, weights = torch.load(out / "fsdp4.pt", weights_only=True)
    torch.set_default_dtype(torch.float64)  # as the run was
    try:
        model, _ = checkpoint.load_run(out / "fsdp4")
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "more"])
def test_a_damaged_shard_is_found(out, damage, tmp_path, flip):

    path = shutil.copytree(checkpoint.paths(out / "fsdp4")[-1], tmp_path / "step-00000002")
    shard = path / "shard-00003-model-00001-of-00001.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif damage == "flipped":
        flip(shard, shard.stat().st_size - 9, 3)
    elif damage == "missing":
        shard.unlink()
    else:
        shutil.copy(shard, path / "shard-00009-model-00001-of-00001.safetensors")
    with refused(CheckpointError, "shard-00003-model" if damage != "more" else "shard-00009-model"):
        checkpoint.verify(checkpoint.read(path))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("missing", ["rank", 2, 3]),
        ("rows", ["batch_size", 4, 3]),
        ("differ", ["data", 2]),
        ("command", ["command", 1]),
        ("full", ["step-00000003", 1]),
    ],
)
def test_ranks_that_cannot_train_together_end_with_one_line(out, case, named):
    found = read(out, "bad")[case]
    assert set(found["codes"]) == {2}
    (said,) = found["said"]
    in_a_line(said, 0, *named)


def test_a_signal_to_one_rank_ends_all_after_the_same_update(out):
    assert read(out, "signalled") == {"codes": [15, 15], "steps": [1]}


def test_a_full_disk_leaves_nothing_half_written(out):
    assert read(out, "left") == []


def test_ranks_end_when_one_is_killed_and_the_run_goes_on(out):
    for row in read(out, "killed"):
        codes = [code for rank, code in enumerate(row["codes"]) if rank != row["victim"]]
        assert set(codes) == {2}
        assert row["codes"][row["victim"]] == -9
    resumed, whole = read(out, "killed-losses")
    assert len(whole) >= 6
    assert resumed == pytest.approx(whole, abs=1e-12)


def test_flags_for_several_processes_ask_for_torchrun(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    assert main(["train", "--data", str(tmp_path / "text.txt"), "--expert-parallel", "2"]) == 2
    in_a_line(capsys.readouterr().err, "--expert-parallel", "torchrun")


@pytest.mark.parametrize("fields", [{"lora": "rank=2", "init": "run"}, {"template": "plain"}])
def test_adapters_and_templates_are_for_one_process(tmp_path, fields):
    name, value = next(iter(fields.items()))
    config = RunConfig(presets.get("transformer-tiny"), TrainConfig(**fields))
    team = SimpleNamespace(rank=0)
    with refused(ConfigError, name, value):
        ParallelTrainer(team, Layout(), tmp_path, config)


@pytest.mark.parametrize(
    ("layout", "size", "local", "shards"),
    [
        (Layout("fsdp"), 8, 4, 8),
        (Layout("hsdp"), 8, 4, 4),
        (Layout("ddp"), 8, 4, 1),
        (Layout("fsdp", context_parallel=8), 8, 8, 1),
        (Layout("hsdp", context_parallel=4), 16, 8, 2),
        (Layout("hsdp", context_parallel=8), 16, 4, 1),
    ],
)
def test_the_ranks_of_a_window_share_no_weights(monkeypatch, layout, size, local, shards):
    assert layout.shards(size, local) == shards
    for name, value in (("RANK", 0), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, str(value))
    assert layout.held("cuda") == 1 / shards and layout.held("cpu") == local / shards


def test_processes_that_no_launcher_counts_are_on_one_machine(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    assert Layout("ddp").held("cpu") == Team().locals == 4


def test_items_are_shared_so_that_every_rank_gets_as_many():
    for rows in (1, 2, 3, 4):
        found = []
        for row in range(rows):
            with together(Ranks(None, rows, row, rows)):
                found.append(list(shared(range(7))))
        assert len({len(part) for part in found}) == 1
        assert sorted(item for part in found for item, counts in part if counts) == list(range(7))


def test_a_process_alone_adds_nothing_up():
    x = torch.ones(3, requires_grad=True)
    assert all_reduce_sum(x) is x
