"""Every design through the commands a user types: training that learns, stops, goes on, and a conversation that
is kept."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.data import Tokenizer, open_shards
from perspectron.train import checkpoint
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.page import PAGE

STEPS = 40
SIZES = {"vocab_size": 300, "d_model": 32, "layers": 2, "heads": 2, "hidden": 48, "positions": 128}
DESIGNS = {
    "perspective": ("perspective-tiny", {"rank": 8, "kv_heads": 1, "window": 16, "layers": 4}),
    "adr": ("adr-tiny", {}),
    "adr pre-norm": ("adr-tiny", {"norm": "pre", "share_heads": True}),
    "lens": ("lens-tiny", {"anneal": 0.01, "anneal_after": 10}),
    "drm": ("drm-104k", {"geometry_interval": 4, "bptt": 16, "gate_top_k": 3, "risk": True}),
    "transformer": ("transformer-tiny", {}),
    "gpt2": ("gpt2-tiny", {}),
    "gla": ("gla-tiny", {}),
    "ssd": ("ssd-tiny", {"head_dim": 16, "state": 8}),
    "gdn": ("gdn-tiny", {}),
    "kda": ("kda-tiny", {}),
    "gdn2": ("gdn2-tiny", {"negative": True}),
    "rwkv7": ("rwkv7-tiny", {"head_dim": 16}),
}
every_design = pytest.mark.parametrize("design", DESIGNS)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 60)
    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, text):
    """The run of a design, trained once."""
    made: dict[str, Path] = {}

    def run(design: str) -> Path:
        if design not in made:
            preset, own = DESIGNS[design]
            known = presets.sizes(preset)
            sizes = {key: value for key, value in SIZES.items() if known.get(key) is not None} | own
            out = tmp_path_factory.mktemp("runs") / design.replace(" ", "-")
            command = ["train", "--preset", preset, "--data", str(text), "--out", str(out)]
            command += ["--set", *(f"{key}={json.dumps(value)}" for key, value in sizes.items())]
            command += [
                "--steps",
                str(STEPS),
                "--keep",
                "4",
                "--batch-size",
                "4",
                "--seq-len",
                "48",
                "--lr",
                "0.005",
            ]
            assert main([*command, "--eval-every", "10", "--save-every", "20", "--dtype", "float32"]) == 0
            made[design] = out
        return made[design]

    return run


@every_design
def test_the_held_out_loss_falls(design, run_of):
    metrics = read_metrics(run_of(design))
    held = [line["heldout_bits_per_byte"] for line in metrics if "heldout_bits_per_byte" in line]
    assert len(held) == STEPS // 10
    assert held[-1] < 0.8 * held[0] and held[-1] == min(held)


@every_design
def test_what_the_design_reports_is_written_and_drawn(design, run_of):
    run = run_of(design)
    last = [line for line in read_metrics(run) if "loss" in line][-1]
    wanted = {
        "lens": {"route_gate"},
        "drm": {"action", "dim_sparsity", "dim_entropy", "condition_number", "metric_u_norm"},
    }.get(design, set())
    assert wanted <= set(last.get("aux", {}))
    page = (run / PAGE).read_text()
    assert all(name.replace("_", " ") in page for name in last.get("aux", {}))


@every_design
def test_stopped_and_resumed_it_is_the_same_run(design, run_of, tmp_path):
    run, config = run_of(design), checkpoint.load_config(run_of(design))
    tokenizer, shards = Tokenizer.load(run / "tokenizer.json"), open_shards(run / "data")
    other = tmp_path / "run"
    other.mkdir()
    for until in (7, 13, 20):
        Trainer(other, config, tokenizer, shards).fit(until=until)
    for name in (checkpoint.MODEL, checkpoint.TRAINING):
        whole, pieces = (load_file(checkpoint.path_of(r, 20) / name) for r in (run, other))
        assert whole.keys() == pieces.keys()
        assert [key for key in whole if not torch.equal(whole[key], pieces[key])] == []


@every_design
def test_a_conversation_goes_on_from_disk(design, run_of, tmp_path, capsys):
    run, state = str(run_of(design)), str(tmp_path / "kept.state")
    capsys.readouterr()

    def text(*options: str) -> str:
        assert main(["generate", run, *options, "--temperature", "0.8", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["texts"][0]

    whole = text("the cat", "--max-tokens", "24")
    first = text("the cat", "--max-tokens", "11", "--save-state", state)
    assert first + text("--max-tokens", "13", "--load-state", state) == whole


@every_design
def test_inspect_counts_all_of_it(design, run_of, capsys):
    capsys.readouterr()
    assert main(["inspect", str(run_of(design)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, _ = perspectron.load(run_of(design))
    assert found["parameters"] == sum(p.numel() for p in model.parameters()) == sum(found["groups"].values())
    assert all(flops > 0 for flops in found["flops_per_token_at"].values())
