"""`perspectron train`."""

import json
import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from perspectron import presets
from perspectron.config import ModelConfig, load, one_of, require
from perspectron.errors import ConfigError
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.loop import CURVE, Metrics, Trainer
from perspectron.train.prepare import prepare


@dataclass(frozen=True)
class Train:
    """Train a model on your text, or go on with a run that was stopped.

    Example: perspectron train --preset perspective-tiny --data my_texts/ --out runs/mine --steps 2000

    Go on: perspectron train --resume runs/mine

    Your own sizes: --set rank=64 window=256
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
        train = replace(self.train, data=resolved(self.train.data))
        return fit(self.out, RunConfig(self.model(), train), as_json=self.json)

    def model(self) -> ModelConfig:
        return presets.get(self.preset, **dict(map(assignment, self.set)))


def resolved(data: str) -> str:
    """A corpus by its full path, so that a run goes on from any folder."""
    return data if data == "stdlib" else str(Path(data).resolve())


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
        one_of(name, ("model", "train"), f"{path}: table")
    model = dict(tables.get("model", {}))
    preset = model.pop("preset", Train.preset)
    sizes = tuple(f"{key}={json.dumps(value)}" for key, value in model.items())
    return Train(preset=preset, set=sizes, train=load(TrainConfig, tables.get("train", {}), f"{path}: train"))


def fit(run: Path, config: RunConfig, *, as_json: bool = False, console: Console | None = None) -> int:
    """Prepare the data, train, and say where the results are; the command's exit code."""
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    tokenizer, shards, summary = prepare(run, config)
    if tokenizer.vocab_size < config.model.vocab_size:
        config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    config = same_as_before(run, config)
    trainer = Trainer(run, config, tokenizer, shards)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(summary)
    console.print(
        f"{config.model.name}: {parameters / 1e6:.1f} M parameters, {trainer.config.train.dtype}, "
        f"{trainer.device}, step {trainer.progress.step} of {config.train.steps}"
    )
    if trainer.damaged is not None:
        console.print(f"warning: {trainer.damaged}; going on from step {trainer.progress.step}")
    stopped = _fit(trainer, as_json, console)
    if stopped is not None:
        console.print(f"stopped and saved at step {trainer.progress.step}; go on with --resume {run}")
        return 128 + stopped
    if trainer.best < math.inf:
        console.print(f"best held-out: {trainer.best:.3f} bits per byte; curve: {run / CURVE}")
    return 0


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


def _fit(trainer: Trainer, as_json: bool, console: Console) -> int | None:
    steps = trainer.config.train.steps
    if as_json:
        return trainer.fit(report=lambda line: print(json.dumps(line), flush=True))
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
