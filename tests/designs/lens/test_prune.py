"""Attention taken out of blocks: the same function as attention that gives nothing, and a smaller cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.designs.lens.prune import prune, route_gates
from perspectron.model.config import BlockConfig
from perspectron.train import checkpoint
from perspectron.train.weights import fill
from perspectron.util.config import dump
from perspectron.util.errors import CheckpointError, ConfigError
from tests.refusals import in_a_line, refused

SIZES = {"vocab_size": 64, "d_model": 16, "layers": 4, "heads": 2, "hidden": 24, "positions": 64}


@torch.no_grad()
def lens(**switches) -> perspectron.LanguageModel:
    model = perspectron.build(presets.get("lens-tiny", **SIZES, **switches)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    for block, raw in zip(model.blocks, (0.3, -2.0, 1.0, -0.5), strict=True):
        block.route.raw_1.fill_(raw)
    return model


def ids(B: int, T: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (B, T), generator=torch.Generator().manual_seed(seed))


def test_gates_are_given_lowest_first():
    gates = route_gates(lens())
    assert [block for _, block in gates] == [1, 3, 0, 2]
    assert gates[0][0] == pytest.approx(torch.tensor(-2.0).sigmoid().item())
    with refused(ConfigError, "model", "lens-tiny"):
        route_gates(perspectron.build(presets.get("lens-tiny", **SIZES, route=False)))


@pytest.mark.parametrize(
    "switches", [{}, {"context": False}, {"context_rank": 3}, {"reciprocity": False}], ids=str
)
@pytest.mark.parametrize("removed", [[1], [1, 3], [0, 1, 2, 3]], ids=str)
def test_a_pruned_model_computes_what_silent_mixers_would(removed, switches):
    model = lens(**switches)
    pruned = prune(model, removed)
    for index in removed:
        model.blocks[index].mixer.register_forward_hook(
            lambda module, args, out: (torch.zeros_like(out[0]), *out[1:])
        )
    text = ids(2, 40)
    expected = model(text).logits
    torch.testing.assert_close(pruned(text).logits, expected, rtol=1e-12, atol=1e-12)
    whole = model.init_state(1, capacity=64).nbytes - 8  # the position is kept
    assert pruned.init_state(1, capacity=64).nbytes - 8 == whole * (4 - len(removed)) // 4
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.inference_mode():
        state, logits = None, []
        for t in range(40):
            output = pruned(text[:, t : t + 1], state)
            state = output.state
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected.detach(), rtol=1e-9, atol=1e-9)
    assert pruned.config != model.config and perspectron.ModelConfig(**vars(pruned.config)) == pruned.config


def test_matrices_of_16_bits_stay_so():
    whole = lens().bfloat16()
    with torch.device("meta"):
        model = perspectron.LanguageModel(whole.config)
    fill(model, whole.state_dict(), Path())
    pruned = prune(model, [1])
    model.blocks[1].mixer.register_forward_hook(lambda module, args, out: (0 * out[0], *out[1:]))
    torch.testing.assert_close(pruned(ids(2, 9)).logits, model(ids(2, 9)).logits)
    assert {x.dtype for x in pruned.parameters()} == {x.dtype for x in model.parameters()}


def test_the_original_is_left_alone():
    model = lens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in prune(model, [1]).parameters():
            assert parameter.is_contiguous()
            parameter.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, the dog sat on the log. " * 50)
    out = folder.parent / "run"
    sizes = ["--set", "vocab_size=300", "d_model=16", "layers=3", "heads=2", "hidden=16", "positions=64"]
    steps = ["--steps", "8", "--batch-size", "2", "--seq-len", "32", "--eval-tokens", "64"]
    command = ["train", "--preset", "lens-tiny", "--data", str(folder), "--out", str(out), *sizes, *steps]
    assert main(command) == 0
    return out


def test_loss_against_cache_for_every_number_and_an_export_that_runs(run, tmp_path, capsys):
    out = tmp_path / "small"
    assert main(["lens", "prune-attention", str(run), "--blocks", "2", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert [row["removed"] for row in rows] == [0, 1, 2, 3]
    assert [row["g"] for row in rows[1:]] == sorted(row["g"] for row in rows[1:])
    caches = [row["cache_bytes"] - 8 for row in rows]
    assert caches == [caches[0] * n // 3 for n in (3, 2, 1, 0)]
    assert len({row["bits_per_byte"] for row in rows}) == 4
    model, tokenizer = perspectron.load(out)
    assert [block.mixer is None for block in model.config.blocks].count(True) == 2
    assert main(["generate", str(out), "the cat", "--max-tokens", "5"]) == 0
    assert main(["inspect", str(out)]) == 0
    capsys.readouterr()
    assert main(["eval", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] == pytest.approx(rows[2]["bits_per_byte"])
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(CheckpointError, checkpoint.found_in(out)[0].path):
        checkpoint.restore(checkpoint.found_in(out)[0], model, tokenizer, optimizer)
    assert main(["train", "--resume", str(out)]) == 2


def test_the_table_alone_writes_nothing(run, capsys):
    before = sorted(run.parent.iterdir())
    assert main(["lens", "prune-attention", str(run)]) == 0
    assert "lowest route gate first" in capsys.readouterr().out
    assert sorted(run.parent.iterdir()) == before


@pytest.mark.parametrize(("blocks", "made"), [([], []), (["--blocks", "1"], ["run-without-1"])], ids=str)
def test_the_folder_that_one_is_in_can_be_the_run(run, tmp_path, capsys, monkeypatch, blocks, made):
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert main(["lens", "prune-attention", ".", "--tokens", "64", *blocks]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", *made]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--blocks", "0"], ["blocks", 0]),
        (["--blocks", "4"], ["blocks", 4]),
        (["--context", "0"], ["context", 0]),
        (["--blocks", "1", "--out", "."], ["out"]),
        (["--out", "nowhere"], ["out", "nowhere", "--blocks"]),
    ],
)
def test_mistakes_are_one_line(run, capsys, options, named):
    assert main(["lens", "prune-attention", str(run), *options]) == 2
    in_a_line(capsys.readouterr().err, *named)


def test_blocks_without_a_mixer_survive_a_round_trip():
    config = prune(lens(), [0, 2]).config
    assert (
        perspectron.util.config.load(perspectron.ModelConfig, json.loads(json.dumps(dump(config)))) == config
    )
    assert isinstance(config.blocks[0], BlockConfig)
