"""`perspectron train`."""

import json
import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from perspectron import presets
from perspectron.config import ModelConfig, load, one_of, require
from perspectron.data import Shards, Tokenizer
from perspectron.device import pick_device
from perspectron.errors import ConfigError
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, StagedConfig, TrainConfig
from perspectron.train.loop import CURVE, Metrics, Trainer
from perspectron.train.prepare import prepare
from perspectron.train.recipe import ROWS, Row, Stage, plan, staged


@dataclass(frozen=True)
class Train:
    """Train a model on your text, or go on with a run that was stopped.

    Example: perspectron train --preset perspective-tiny --data my_texts/ --out runs/mine --steps 2000

    Go on: perspectron train --resume runs/mine

    Your own sizes: --set rank=64 window=256

    By stages, from one network to ternary experts on a torus: --recipe staged
    """

    out: Path | None = None
    """Folder of the run, made by this command."""
    resume: Path | None = None
    """Folder of a run to go on with; everything else comes from there."""
    preset: str = "perspective-tiny"
    """Which model (perspectron list shows them)."""
    set: tuple[str, ...] = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    config: Path | None = None
    """TOML file with [model] (preset and sizes) and [train] tables; flags override it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    recipe: Literal["plain", "staged"] = "plain"
    """ "staged": dense, clone, differentiate, ternary, align, router; the steps are those of all stages."""
    staged: StagedConfig = field(default_factory=StagedConfig)
    json: bool = False
    """Print metrics as JSON lines instead of a progress bar."""

    def __call__(self) -> int:
        if (self.out is None) == (self.resume is None):
            raise ConfigError("out = None, must be given, or resume in its place")
        if self.resume is not None:
            given = Train(resume=self.resume, json=self.json)
            require(self == given, "resume", str(self.resume), "alone: everything else comes from the run")
            return fit(self.resume, checkpoint.load_config(self.resume), as_json=self.json)
        assert self.out is not None
        if (self.out / "config.json").exists():
            raise ConfigError(f"out = '{self.out}', must be a new folder; go on with --resume {self.out}")
        places: dict[str, Any] = {"data": resolved(self.train.data)}
        places |= {name: resolved(getattr(self.train, name)) for name in ("init", "teacher")}
        recipe = self.staged if self.recipe == "staged" else None
        fits = recipe is not None or self.staged == StagedConfig()
        require(fits, "recipe", self.recipe, "'staged' where one of its options is given")
        config = RunConfig(self.model(), replace(self.train, **places), recipe)
        return fit(self.out, config, as_json=self.json)

    def model(self) -> ModelConfig:
        return presets.get(self.preset, **dict(map(assignment, self.set)))


def resolved(data: str) -> str:
    """A corpus or a run by its full path, so that a run goes on from any folder."""
    return data if data in ("stdlib", "") else str(Path(data).resolve())


def assignment(text: str) -> tuple[str, Any]:
    """("rank", 64) of "rank=64"; the value is read as TOML, and a bare word as a string."""
    key, equals, value = text.partition("=")
    require(equals == "=" and key != "", "set", text, "KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def from_toml(path: str) -> Train:
    """The command that a TOML file describes. ConfigError for a file that does not read or an unknown key."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config = {path!r}, must be a readable TOML file ({error})") from None
    for name in tables:
        one_of(name, ("model", "train", "staged"), f"{path}: table")
    model = dict(tables.get("model", {}))
    preset = model.pop("preset", Train.preset)
    sizes = tuple(f"{key}={json.dumps(value)}" for key, value in model.items())
    train = load(TrainConfig, tables.get("train", {}), f"{path}: train")
    stages = load(StagedConfig, tables.get("staged", {}), f"{path}: staged")
    recipe: Literal["plain", "staged"] = "staged" if "staged" in tables else "plain"
    return Train(preset=preset, set=sizes, train=train, recipe=recipe, staged=stages)


def fit(run: Path, config: RunConfig, *, as_json: bool = False, console: Console | None = None) -> int:
    """Prepare the data, train, and say where the results are; the command's exit code."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    if config.recipe is not None:
        plan(run, config)  # what it cannot do, it says before the text is read
        pick_device(config.train.device)
    tokenizer, shards, summary = prepare(run, config)
    if tokenizer.vocab_size < config.model.vocab_size:
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    config = same_as_before(run, config)
    if config.recipe is not None:
        console.print(summary)
        return _fit_staged(run, config, tokenizer, shards, as_json, console)
    trainer = Trainer(run, config, tokenizer, shards)
    console.print(summary)
    stopped = _fit(trainer, as_json, console)
    if stopped is not None:
        console.print(f"stopped and saved at step {trainer.progress.step}; go on with --resume {run}")
        return 128 + stopped
    if trainer.best < math.inf:
        console.print(f"best held-out: {trainer.best:.3f} bits per byte; curve: {run / CURVE}")
    return 0


def _fit_staged(
    run: Path, config: RunConfig, tokenizer: Tokenizer, shards: Shards, as_json: bool, console: Console
) -> int:
    def train(trainer: Trainer, stage: Stage) -> int | None:
        console.print(f"{stage.number}  {stage.name}")
        return _fit(trainer, as_json, console, {"stage": stage.name})

    def report(row: Row) -> None:
        if as_json:
            print(json.dumps(row), flush=True)
        console.print(stage_line(row))

    stopped = staged(run, config, tokenizer, shards, fit=train, report=report)
    if stopped is not None:
        console.print(f"stopped and saved; go on with --resume {run}")
        return 128 + stopped
    console.print(f"stages: {run / ROWS}; curve: {run / CURVE}")
    return 0


def stage_line(row: Row) -> str:
    """How a stage ended, in words."""
    text = f"   {row['stage']}: held-out {row['heldout_bits_per_byte']:.3f} bits per byte"
    if row["layers"]:
        text += f", Gini {row['gini']:.3f}, reach {row['reach']:.2f}, delta {row['delta']:.3f}"
    return text


def same_as_before(run: Path, config: RunConfig) -> RunConfig:
    """The config of the run if it has one, which settled what was "auto". ConfigError when another is asked."""
    if not (run / "config.json").is_file():
        return config
    saved = checkpoint.load_config(run)
    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype=saved.train.dtype))
    require(
        config == saved, "config", str(run), "that of the run (see its config.json), or a new folder given"
    )
    return saved


def _fit(
    trainer: Trainer, as_json: bool, console: Console, beside: dict[str, str] | None = None
) -> int | None:
    """Train to the end with a bar, or with JSON lines, each of which also says what is `beside`."""
    config, steps = trainer.config, trainer.config.train.steps
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(
        f"{config.model.name}: {parameters / 1e6:.1f} M parameters, {config.train.dtype}, "
        f"{trainer.device}, step {trainer.progress.step} of {steps}"
    )
    if trainer.damaged is not None:
        console.print(f"warning: {trainer.damaged}; going on from step {trainer.progress.step}")
    if as_json:
        return trainer.fit(report=lambda line: print(json.dumps((beside or {}) | line), flush=True))
    columns = ("loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tokens/s", "{task.fields[held]}")
    with Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TaskProgressColumn(),
        *map(TextColumn, columns),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(
            "train", total=steps, completed=trainer.progress.step, loss=math.nan, speed=0.0, held=""
        )

        def report(line: Metrics) -> None:
            if "loss" in line:
                bar.update(task, completed=line["step"], loss=line["loss"], speed=line["tokens_per_second"])
            else:
                bar.update(task, held=f"held-out {line['heldout_bits_per_byte']:.3f} bits/byte")
            if not console.is_terminal and ("loss" not in line or line["step"] % max(1, steps // 10) == 0):
                console.print(_plain(line, steps))

        return trainer.fit(report=report)


def _plain(line: Metrics, steps: int) -> str:
    if "loss" in line:
        return (
            f"step {line['step']}/{steps}  loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s"
        )
    return f"step {line['step']}/{steps}  held-out {line['heldout_bits_per_byte']:.3f} bits per byte"
