"""The staged recipe: a dense network is copied to all experts, which are differentiated, made ternary and placed on
the torus so that similar ones are neighbours; then the router is trained
(docs/designs/perspective.md#training-the-experts).

RUN/stages/1-dense, 2-clone, 3-differentiate, 4-ternary, 5-align and 6-router are runs of their own, trained or
converted from the previous stage. Each depends only on the previous one, so that the recipe resumes bit for bit.
RUN/stages.json records how each ended, and RUN itself holds the result of the last.

Shapes: E experts, F hidden width, D model width.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch

from perspectron.compare.ablations import with_experts
from perspectron.data import Shards, Tokenizer
from perspectron.designs.perspective.align import arrange, distances
from perspectron.designs.perspective.stats import delta, loads, mean, numbers, use
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import RoutedConfig
from perspectron.experts.stats import experts_of
from perspectron.experts.torus import hops
from perspectron.model.block import Block
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import SwiGLU, SwiGLUConfig, TiedConfig
from perspectron.model.model import LanguageModel, build
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.page import PAGE, History, Shown, rendered
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError, NonFiniteError
from perspectron.util.files import read_json, write_json, write_text
from perspectron.util.schema import checked

ROWS, STAGES = "stages.json", "stages"
ROUTER = ("*.route_proj.*", "*.offset_EA")


class Measured(TypedDict):
    """Measurements of a finished stage: held-out loss; for each layer of experts how even their use is (Gini), the
    share of them reached and how unlike neighbours are; and the means of these. None: no layer has experts."""

    heldout_bits_per_byte: float
    heldout_perplexity: float
    gini: float | None
    reach: float | None
    delta: float | None
    layers: dict[str, dict[str, float]]


class Row(Measured):
    """How a stage ended."""

    stage: str
    steps: int


class Stage(NamedTuple):
    """number: from 1. steps: 0 where weights are only rearranged. train: what differs from the run's config."""

    number: int
    name: str
    steps: int
    model: ModelConfig
    train: dict[str, Any]

    def folder(self, run: Path) -> Path:
        return run / STAGES / f"{self.number}-{self.name}"


def plan(run: Path, config: RunConfig) -> list[Stage]:
    """The stages of a recipe in order. ConfigError when the model has no experts or a stage would have no step."""
    recipe, steps, model = config.recipe, config.train.steps, config.model
    assert recipe is not None
    layers = routed_in(model)
    require(bool(layers), "recipe", "staged", f"left out: {model.name} has no experts")
    for ffn in layers:
        torus = "'torus' in the staged recipe, which sets experts on it"
        require(ffn.router == "torus", "router", ffn.router, torus)
        require(ffn.gate != "none", "gate", ffn.gate, "one that lets the router learn in the staged recipe")
    shares = (recipe.dense_share, recipe.differentiate_share, recipe.ternary_share)
    ends = [0, *(round(share * steps) for share in itertools.accumulate(shares)), steps]
    dense, differentiate, ternary, router = (end - start for start, end in itertools.pairwise(ends))
    shortest = min(dense, differentiate, ternary, router)
    require(shortest >= 1, "steps", steps, "enough for each stage to have one")
    flat: dict[str, Any] = {"router": "switch"} if recipe.flat_first else {}
    float_model = with_experts(model, ternary=False, int8_activations=False, **flat)
    last = with_experts(model, ternary=True)
    teacher: dict[str, Any] = {}
    if recipe.distill or recipe.distill_mix:
        float_run = run / STAGES / "3-differentiate"
        teacher = {
            "teacher": str(float_run.resolve()), "teacher_weight": recipe.distill,
            "teacher_mix": recipe.distill_mix,
        }  # fmt: skip
    only = ROUTER if all(ffn.offsets for ffn in layers) else ROUTER[:1]
    return [
        Stage(1, "dense", dense, seed_of(model), {}),
        Stage(2, "clone", 0, float_model, {}),
        Stage(3, "differentiate", differentiate, float_model, {}),
        Stage(4, "ternary", ternary, with_experts(last, **flat), teacher),
        Stage(5, "align", 0, last, {}),
        Stage(6, "router", router, last, {"only": only, "ternary_from": 0.0, "ternary_until": 0.0} | teacher),
    ]


def routed_in(model: ModelConfig) -> list[RoutedConfig]:
    """The configs of a model's layers of experts."""
    return [block.ffn for block in model.blocks if isinstance(block.ffn, RoutedConfig)]


def seed_of(model: ModelConfig) -> ModelConfig:
    """The model before it has experts: layers of experts use the network of the next layer that has a SwiGLU of
    the same width, as in the preset's "seed"; where there is none, one of their own."""
    blocks = list(model.blocks)
    for i, block in enumerate(model.blocks):
        if isinstance(block.ffn, RoutedConfig):
            own = SwiGLUConfig(block.ffn.hidden)
            shared = [j for j in range(i + 1, len(blocks)) if model.blocks[j].ffn == own]
            blocks[i] = replace(block, ffn=TiedConfig(shared[0]) if shared else own)
    return replace(model, blocks=tuple(blocks))


def staged(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    shards: Shards,
    *,
    fit: Callable[[Trainer, Stage], int | None] = lambda trainer, stage: trainer.fit(),
    report: Callable[[Row], None] = lambda row: None,
    allow_changed: bool = False,
) -> int | None:
    """Do what is left of the recipe in the folder `run`; `fit` trains a stage, `report` is called as each ends.

    Returns the number of the signal that stopped it, or None. `tokenizer` and `shards` as `prepare` gives them.
    """
    stages = plan(run, config)
    config = replace(config, model=stages[-1].model)
    checkpoint.save_config(run, config)
    rows = rows_of(run)
    before: Path | None = None
    for stage in stages:
        folder = stage.folder(run)
        if stage.number > len(rows):
            tokenizer.save(folder / "tokenizer.json")
            if stage.steps:
                own = _config(config, stage, folder, before)
                trainer = Trainer(folder, own, tokenizer, shards, allow_changed=allow_changed)
                signal = fit(trainer, stage)
                if signal is not None:
                    return signal
            elif before is not None and not checkpoint.paths(folder):
                changed = transform(stage, before, config.train.seed)
                stands = replace(config, model=stage.model)
                checkpoint.export(folder, stands, tokenizer, changed, checkpoint.Progress())
            found = measure(folder, config, tokenizer, shards)
            rows.append(row := Row(stage=stage.name, steps=stage.steps, **found))
            write_json(run / ROWS, rows)
            report(row)
        before = folder
    _finish(run, config, tokenizer, stages, rows[-1]["heldout_bits_per_byte"])
    return None


def rows_of(run: Path) -> list[Row]:
    """How the finished stages of a run ended; none if the run has no stages. CheckpointError: a damaged file."""
    if not (run / ROWS).is_file():
        return []
    rows: list[Row] = checked(read_json(run / ROWS, CheckpointError), list[Row], CheckpointError, run / ROWS)
    return rows


def _finish(run: Path, config: RunConfig, tokenizer: Tokenizer, stages: list[Stage], bits: float) -> None:
    """Hold the last stage's result in the run itself, with the tokens and the time of all and the precision that the
    last settled on, and show the stages' losses one after another."""
    if not checkpoint.path_of(run, config.train.steps).exists():
        done = [checkpoint.found_in(stage.folder(run))[-1].progress for stage in stages]
        tokens, seconds = sum(each.tokens for each in done), sum(each.seconds for each in done)
        progress = checkpoint.Progress(config.train.steps, tokens, seconds, heldout=bits)
        last = checkpoint.open_run(stages[-1].folder(run))
        config = replace(config, train=replace(config.train, dtype=last.config.train.dtype))
        checkpoint.export(run, config, tokenizer, last.model, progress)
    course, counts = History(), ("step", "tokens", "seconds")
    for stage in stages:
        before = {name: course.last.get(name, 0) for name in counts}
        for line in read_metrics(stage.folder(run)):
            course.note(line | {name: before[name] + line[name] for name in counts if name in line})
    write_text(run / PAGE, rendered(run, config, course, (), Shown("finished, all stages one after another")))


def _config(config: RunConfig, stage: Stage, folder: Path, before: Path | None) -> RunConfig:
    """Config of the stage's own run. Each stage reads the text in an order of its own, so that none sees only its
    beginning; a dtype that was settled stays."""
    train = config.train
    if (folder / "config.json").is_file():
        train = replace(train, dtype=checkpoint.load_config(folder).train.dtype)
    optim = replace(train.optim, warmup=min(train.optim.warmup, stage.steps // 5))
    init = "" if before is None else str(before.resolve())
    train = replace(train, steps=stage.steps, seed=train.seed + stage.number - 1, init=init, optim=optim)
    return replace(config, model=stage.model, train=replace(train, **stage.train), recipe=None)


def transform(stage: Stage, before: Path, seed: int) -> LanguageModel:
    """The model that "clone" and "align" make of the run before them; a router that is new is drawn from `seed`."""
    model, _ = checkpoint.load_run(before)
    if stage.name == "clone":
        return clone(model, stage.model, seed)
    for ffn in experts_of(model).values():
        align(ffn)
    return model if model.config == stage.model else rerouted(model, stage.model, seed)


@torch.no_grad()
def rerouted(model: LanguageModel, config: ModelConfig, seed: int) -> LanguageModel:
    """The model with the routers of a config, which are new."""
    made = build(config, seed)
    routing = ("route_proj.weight", "route_proj.bias", "offset_EA", "bias_E", "load_E")
    kept = {name: value for name, value in model.state_dict().items() if not name.endswith(routing)}
    made.load_state_dict(made.state_dict() | kept)
    return made


@torch.no_grad()
def clone(dense: LanguageModel, config: ModelConfig, seed: int) -> LanguageModel:
    """A model with experts, each a copy of the network that its layer had: it computes the same, whatever the
    router chooses, as long as the gate does not scale the output."""
    model = build(config, seed)
    known, weights = model.state_dict(), dense.state_dict()
    model.load_state_dict(known | {name: weights[name] for name in known if name in weights})
    pairs = zip(cast("list[Block]", model.blocks), cast("list[Block]", dense.blocks), strict=True)
    for block, own in pairs:
        if not isinstance(block.config.ffn, RoutedConfig):
            continue
        ffn, network = cast(RoutedSwiGLU, block.ffn), cast(SwiGLU, dense.ffn_of(own))
        matrices = (network.gate_proj.weight, network.up_proj.weight, network.down_proj.weight)
        if block.config.ffn.base:
            for base, weight in zip(
                (ffn.base_gate_FD, ffn.base_up_FD, ffn.base_down_DF), matrices, strict=True
            ):
                base.copy_(weight)
        for copies, weight in zip((ffn.gate_EFD, ffn.up_EFD, ffn.down_EDF), matrices, strict=True):
            copies.copy_(weight) if not block.config.ffn.base else copies.zero_()
    return model


@torch.no_grad()
def align(ffn: RoutedSwiGLU) -> None:
    """Put experts that are alike side by side; positions and balance stay with the cells."""
    torus = ffn.config.torus
    expert_E = arrange(distances(numbers(ffn)), hops(torus) == 1, torus)
    for weight in (ffn.gate_EFD, ffn.up_EFD, ffn.down_EDF):
        weight.copy_(weight[expert_E])


def measure(folder: Path, config: RunConfig, tokenizer: Tokenizer, shards: Shards) -> Measured:
    """Measure a finished stage. NonFiniteError: its loss is not finite."""
    model, _ = checkpoint.load_run(folder)
    train = config.train
    with loads(model) as load_by_layer:
        result = heldout(
            model,
            shards.split("heldout"),
            tokenizer,
            seq_len=train.seq_len,
            batch_size=train.batch_size,
            limit_tokens=train.eval_tokens or None,
            spread=True,
            masked=True,
        )
    if not math.isfinite(result.bits_per_byte):
        raise NonFiniteError(f"{folder}: held-out loss is {result.bits_per_byte}")
    layers: dict[str, dict[str, float]] = use(load_by_layer)
    for name, ffn in experts_of(model).items():
        layers[name]["delta"] = delta(ffn)
    return {
        "heldout_bits_per_byte": result.bits_per_byte,
        "heldout_perplexity": result.perplexity,
        "gini": mean(layers, "gini"),
        "reach": mean(layers, "reach"),
        "delta": mean(layers, "delta"),
        "layers": layers,
    }
