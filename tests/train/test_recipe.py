"""From one network to ternary experts on a torus, stage by stage, stopped anywhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perspectron
from perspectron.cli.main import main
from perspectron.compare.ablations import with_experts
from perspectron.designs.perspective import recipe
from perspectron.designs.perspective.align import distances
from perspectron.designs.perspective.recipe import clone, plan, routed_in, seed_of, staged
from perspectron.designs.perspective.stats import delta, loads, numbers, use
from perspectron.experts.stats import experts_of, matrices
from perspectron.experts.ternary import trits
from perspectron.interop.hf.card import card
from perspectron.model.ffn import SwiGLUConfig, TiedConfig
from perspectron.model.model import build
from perspectron.opening import open_model
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, StagedConfig, TrainConfig
from perspectron.train.metrics import read_metrics
from perspectron.util.config import dump
from perspectron.util.errors import ConfigError
from tests.refusals import names, refused
from tests.waiting import PATIENCE

NAMES = ["dense", "clone", "differentiate", "ternary", "align", "router"]
TRAINED = {"dense": 5, "differentiate": 7, "ternary": 6, "router": 2}
RECIPE = StagedConfig(distill=0.5)


class Stop(Exception):
    pass


def recipe_of(runs, recipe=RECIPE, **sizes) -> RunConfig:
    model = runs.small("perspective-tiny", **({"torus": [3, 2], "bias_rate": 0.1} | sizes))
    plain = runs.config(model, steps=20, eval_every=3, save_every=2, seq_len=16)
    return replace(plain, recipe=recipe)


def begin(runs, run: Path, config: RunConfig, **calls):
    run.mkdir(exist_ok=True)
    runs.tokenizer.save(run / "tokenizer.json")
    return staged(run, config, runs.tokenizer, runs.shards, **calls)


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    run = tmp_path_factory.mktemp("recipe") / "whole"
    assert begin(runs, run, recipe_of(runs)) is None
    return run


def weights(run: Path):
    """Every tensor of every checkpoint that is left in a recipe's folder."""
    return {
        f"{path.relative_to(run)}: {name}": value
        for path in sorted(run.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same_runs(a: Path, b: Path):
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and len(first) > 500
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert (a / "stages.json").read_text() == (b / "stages.json").read_text()
    for stage in a.glob("stages/*"):
        lines = [
            [
                {k: v for k, v in m.items() if k not in ("seconds", "tokens_per_second")}
                for m in read_metrics(run)
            ]
            for run in (stage, b / "stages" / stage.name)
        ]
        assert lines[0] == lines[1]


def model_of(run: Path, stage: str):
    (folder,) = (run / "stages").glob(f"?-{stage}")
    return checkpoint.load_run(folder)[0]


# The whole of it


def test_the_stages_and_what_is_told_of_them(runs, whole):
    rows = json.loads((whole / "stages.json").read_text())
    assert [row["stage"] for row in rows] == NAMES
    assert {row["stage"]: row["steps"] for row in rows if row["steps"]} == TRAINED
    assert rows[0]["layers"] == {} and rows[0]["gini"] is None
    for row in rows[1:]:
        layers = row["layers"].values()
        assert len(layers) == 3
        for what in ("gini", "reach", "delta"):
            assert row[what] == pytest.approx(sum(layer[what] for layer in layers) / 3)
        assert all(0 <= layer["gini"] < 1 and 0 < layer["reach"] <= 1 for layer in layers)
    assert rows[1]["delta"] == 0 < rows[2]["delta"]
    assert rows[1]["heldout_bits_per_byte"] == pytest.approx(rows[0]["heldout_bits_per_byte"], rel=1e-6)
    assert rows[4]["delta"] <= rows[3]["delta"] and rows[5]["delta"] == rows[4]["delta"]
    assert rows[3]["heldout_bits_per_byte"] < rows[0]["heldout_bits_per_byte"]
    page = (whole / "index.html").read_text()
    assert all(f"{row['heldout_bits_per_byte']:.3f}" in page for row in rows if row["steps"])


def test_the_run_holds_the_last_stage(runs, whole):
    model, tokenizer = perspectron.load(whole)
    last = model_of(whole, "router").state_dict()
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    assert tokenizer.fingerprint == runs.tokenizer.fingerprint
    for ffn in experts_of(model).values():
        assert ffn.ternary_share_1.item() == 1
        for weight, used in zip((ffn.gate_EFD, ffn.up_EFD, ffn.down_EDF), ffn.weights(), strict=True):
            values, scale = trits(weight)
            assert torch.equal(used, values * scale)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    assert begin(runs, whole, recipe_of(runs)) is None  # nothing is left to do
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}


def test_the_run_has_the_tokens_and_the_time_of_all_stages_and_the_card_tells_them(whole, tmp_path):
    stages = [checkpoint.found_in(stage)[-1].progress for stage in sorted(whole.glob("stages/*"))]
    opened = open_model(whole)
    last = opened.checkpoint.progress
    assert last.tokens == sum(each.tokens for each in stages) == 20 * 4 * 16
    assert last.seconds == sum(each.seconds for each in stages) > 0
    text = card(opened, "it")
    assert names(text, 20, f"{last.seconds / 60:.1f}", f"{last.heldout:.4f}", f"{last.tokens / 1e6:.3g}")


def test_the_run_has_the_precision_that_was_settled(runs, whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    config = recipe_of(runs)
    assert begin(runs, run, replace(config, train=replace(config.train, dtype="auto"))) is None
    assert open_model(run).folder.run.train.dtype == "float32"


def test_stopped_in_every_stage_and_after_it(runs, tmp_path, whole):
    """One step before its last checkpoint, so that a step is done again, or by a signal; then before the next stage."""
    run = tmp_path / "run"
    for seed, stage in enumerate(TRAINED):

        def fit(trainer, at, stage=stage):
            def report(line):
                if at.name == stage == "ternary" and line["step"] == 3 and "loss" in line:
                    os.kill(os.getpid(), signal.SIGTERM)
                elif at.name == stage and line["step"] == max(1, at.steps - 1):
                    raise Stop

            return trainer.fit(report=report)

        def ended(row, stage=stage):
            if row["stage"] == stage:
                raise Stop

        torch.manual_seed(2 * seed)
        if stage == "ternary":
            assert begin(runs, run, recipe_of(runs), fit=fit) == signal.SIGTERM
            assert not checkpoint.paths(run)
        else:
            with pytest.raises(Stop):
                begin(runs, run, recipe_of(runs), fit=fit)
        torch.manual_seed(2 * seed + 1)
        with pytest.raises(Stop):
            begin(runs, run, recipe_of(runs), report=ended)
    assert begin(runs, run, recipe_of(runs)) is None
    assert_same_runs(run, whole)


KILLER = """
import json, os, random, sys, traceback
from pathlib import Path
import torch
from perspectron.util.config import load
from perspectron.data import Tokenizer, open_shards
from perspectron.train.config import RunConfig
from perspectron.train.loop import Trainer
from perspectron.designs.perspective.recipe import staged
from tests.train.killing import dies_in
torch.set_num_threads(1)
run, data, config, kills = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
config = load(RunConfig, json.loads(config.read_text()))
draw, stages = random.Random(0), set()

while True:
    death = "step", draw.randint(2, 5), draw.randint(1, 3000)
    child = os.fork()
    if not child:
        try:
            if kills:
                dies_in(Trainer, *death)
            staged(run, config, Tokenizer.load(data / "tokenizer.json"), open_shards(data))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    kills = max(0, kills - 1)
    if not os.WIFSIGNALED(status):
        break
    stages.add(len(list(run.glob("stages/*"))))
print(json.dumps({"status": status, "stages": sorted(stages), "left": kills}))
"""


@pytest.mark.nightly
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(runs, tmp_path, whole):
    config = recipe_of(runs)
    (tmp_path / "config.json").write_text(json.dumps(dump(config)))
    root = Path(perspectron.__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    arguments = [tmp_path / "run", runs.data, tmp_path / "config.json", "6"]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *arguments],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == 0, done.stderr
    assert summary["left"] == 0 and len(summary["stages"]) >= 3, "the kills fell into few stages"
    assert_same_runs(tmp_path / "run", whole)


# What stages do


@pytest.mark.parametrize("gate", ["none", "straight_through"])
@pytest.mark.parametrize("base", [False, True])
def test_clones_compute_what_the_dense_model_does(runs, gate, base):
    config = with_experts(runs.small("perspective-tiny", torus=[3, 2]), gate=gate, base=base)
    dense = build(seed_of(config), 1)
    model = clone(dense, config, 2)
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    with loads(model) as found:
        got, expected = model.double()(ids).logits, dense.double()(ids).logits
    assert min(int((load > 0).sum()) for load in found.values()) > 1  # tokens do go different ways
    # Not bit for bit: a product of few rows adds up in another order than one of many.
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for block, own in zip(model.blocks, dense.blocks, strict=True):
        if block.config.ffn in routed_in(config):
            network = dense.ffn_of(own)
            own_weights = (network.gate_proj.weight, network.up_proj.weight, network.down_proj.weight)
            for copies, weight in zip(block.ffn.weights(), own_weights, strict=True):
                assert torch.equal(copies, weight.expand_as(copies))


def test_padding_is_not_counted_as_tokens(runs, whole, monkeypatch):
    seen, (folder,) = [], (whole / "stages").glob("?-differentiate")
    monkeypatch.setattr(recipe, "use", lambda loads: seen.append(loads) or use(loads))
    plain = recipe_of(runs)
    config = replace(plain, train=replace(plain.train, eval_tokens=100, seq_len=160))
    recipe.measure(folder, config, runs.tokenizer, runs.shards)
    assert {int(load.sum()) for load in seen[0].values()} == {99}


def test_the_seed_shares_the_network_of_the_next_layer_that_has_one(runs):
    model = runs.small("perspective-tiny", layers=6)
    ffns = [block.ffn for block in seed_of(model).blocks]
    assert ffns == [TiedConfig(3)] * 3 + [SwiGLUConfig(32)] * 3  # the last two have none after them
    assert seed_of(seed_of(model)) == seed_of(model)


def test_differentiated_experts_differ_and_are_reached(whole):
    for ffn in experts_of(model_of(whole, "differentiate")).values():
        assert not ffn.config.ternary
        apart = distances(numbers(ffn))
        assert (apart + torch.eye(6) > 0).all()


def test_the_ternary_stage_is_chosen_only_when_it_is_ternary(runs, whole):
    measured = checkpoint.found_in(whole / "stages" / "4-ternary")
    lines = {m["step"]: m for m in read_metrics(whole / "stages" / "4-ternary") if "ternary" in m}
    assert list(lines) == [3, 6]  # until half of 6 steps: both are
    assert all(c.progress.heldout is not None for c in measured if c.progress.step in lines)
    file = json.loads((whole / "stages" / "4-ternary" / "ternary.json").read_text())
    assert file["step"] == 6 and len(file["matrices"]) == 9
    for name, both in file["matrices"].items():
        assert len(both["zeros"]) == len(both["scale"]) == 6
        assert lines[6]["ternary"][name]["zeros"] == pytest.approx(sum(both["zeros"]) / 6)
        assert 0.2 < lines[6]["ternary"][name]["zeros"] < 0.5


def test_measurements_under_way_choose_no_checkpoint(runs, tmp_path):
    model = with_experts(runs.small("perspective-tiny", torus=[3, 2]), ternary=True)
    trainer = runs.trainer(tmp_path, model, steps=8, eval_every=2, save_every=1, keep=9, ternary_until=0.6)
    shares = []
    trainer.fit(
        report=lambda line: shares.append(
            next(iter(experts_of(trainer.model).values())).ternary_share_1.item()
        )
    )
    by_step = dict(zip([m["step"] for m in read_metrics(tmp_path)], shares, strict=True))
    assert by_step == pytest.approx({step: min(1, step / 4.8) for step in range(1, 9)})
    held = {c.progress.step: c.progress.heldout for c in checkpoint.found_in(tmp_path)}
    assert [step for step, value in held.items() if value is not None] == [6, 8]
    assert trainer.best == min(held[6], held[8])


def test_zeros_and_scales_are_those_of_the_float_weights(runs):
    model = build(with_experts(runs.small("perspective-tiny", torus=[3, 2]), ternary=True, base=True))
    ffn = next(iter(experts_of(model).values()))
    ffn.ternary_share_1.fill_(0.7)
    whole_of = matrices(model)["blocks.0.ffn.gate"]
    assert ffn.ternary_share_1.item() == pytest.approx(0.7)
    ffn.ternary_share_1.fill_(0)
    weight_EFD, _, _ = ffn.weights()
    assert whole_of["scale"] == pytest.approx(weight_EFD.abs().mean((1, 2)).tolist(), rel=1e-6)


def test_the_router_stage_changes_nothing_but_the_router(whole):
    before, after = model_of(whole, "align").state_dict(), model_of(whole, "router").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    allowed = ("route_proj.weight", "route_proj.bias", "offset_EA", "bias_E", "load_E")
    assert changed and all(name.endswith(allowed) for name in changed)
    assert any(name.endswith("route_proj.weight") for name in changed)


def test_alignment_moves_whole_experts(whole):
    before, after = (experts_of(model_of(whole, stage)) for stage in ("ternary", "align"))
    for name, ffn in before.items():
        old, new = numbers(ffn), numbers(after[name])
        order = [next(i for i in range(6) if torch.equal(old[i], row)) for row in new]
        assert sorted(order) == list(range(6))
        assert torch.equal(ffn.gate_EFD[order], after[name].gate_EFD)
        assert torch.equal(ffn.down_EDF[order], after[name].down_EDF)
        assert torch.equal(ffn.route_proj.weight, after[name].route_proj.weight)
        assert delta(after[name]) <= delta(ffn)


# Bad input, and the command


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ffn": "dense", "bias_rate": 0.05, "torus": [4, 2]}, ["recipe", "staged"]),
        ({"gate": "none"}, ["gate", "none"]),
        ({"router": "switch"}, ["router", "switch"]),
    ],
)
def test_a_model_that_it_is_not_for_is_refused_by_its_field(runs, tmp_path, changes, named):
    with refused(ConfigError, *named):
        plan(tmp_path, recipe_of(runs, **changes))


def test_shares_and_steps_that_cannot_be_are_refused_by_name(runs, tmp_path):
    config = recipe_of(runs)
    short = replace(config, train=replace(config.train, steps=4))
    with refused(ConfigError, "steps", 4):
        plan(tmp_path, short)
    with refused(ConfigError, "dense_share"):
        StagedConfig(dense_share=0.0)
    with refused(ConfigError, "dense_share", 1.15):
        StagedConfig(dense_share=0.5)
    with refused(ConfigError, "distill"):
        StagedConfig(distill=-1.0)
    with refused(ConfigError, "init", "x"):
        RunConfig(recipe_of(runs).model, TrainConfig(init="x"), StagedConfig())


def test_the_command_trains_all_stages_and_goes_on(runs, tmp_path, capsys):
    out, sizes = tmp_path / "run", {"d_model": 32, "hidden": 16, "rank": 4, "window": 8, "vocab_size": 300}
    command = ["train", "--recipe", "staged", "--data", str(runs.data), "--out", str(out), "--steps", "12"]
    command += ["--set", *(f"{key}={value}" for key, value in sizes.items()), "torus=[2,2]"]
    command += ["--batch-size", "2", "--seq-len", "16", "--eval-every", "0", "--eval-tokens", "64"]
    command += ["--dense-share", "0.3", "--dtype", "float32", "--json"]
    assert main(command) == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["stage"] for line in lines if "layers" in line] == NAMES
    assert sum("loss" in line for line in lines) == 12
    assert all(names(said.err, name) for name in NAMES)
    assert checkpoint.load_config(out).recipe == StagedConfig(dense_share=0.3)
    assert all(ffn.ternary for ffn in routed_in(checkpoint.load_config(out).model))
    optims = [checkpoint.load_config(stage).train.optim for stage in out.glob("stages/*")]
    assert {optim.groups for optim in optims} == {"own"}, "positions of experts do not decay"
    assert main(["train", "--resume", str(out)]) == 0
    assert main(["generate", str(out), "the", "--max-tokens", "3"]) == 0
    assert main(["eval", str(out), "--json"]) == 0


def test_experts_behind_a_switch_first(runs, tmp_path):
    """The torus's router is new in the last stage but one; the experts are those of the switch, rearranged."""
    config = recipe_of(runs, StagedConfig(flat_first=True, distill_mix=0.5))
    stages = plan(tmp_path / "run", config)
    routers = [{ffn.router for ffn in routed_in(stage.model)} for stage in stages]
    assert routers == [set(), {"switch"}, {"switch"}, {"switch"}, {"torus"}, {"torus"}]
    assert stages[3].train["teacher_mix"] == stages[5].train["teacher_mix"] == 0.5
    assert begin(runs, tmp_path / "run", config) is None
    before, after = (checkpoint.load_run(stages[i].folder(tmp_path / "run"))[0] for i in (3, 4))
    for name, ffn in experts_of(after).items():
        assert ffn.route_proj.out_features == 2
        own = experts_of(before)[name]
        order = [int((own.up_EFD == expert).all((1, 2)).nonzero()) for expert in ffn.up_EFD]
        assert sorted(order) == list(range(6))
        assert torch.equal(own.down_EDF[order], ffn.down_EDF)


def test_one_way_to_weigh_distillation_is_taken():
    with refused(ConfigError, "distill", 0.5):
        StagedConfig(distill=0.5, distill_mix=0.5)
