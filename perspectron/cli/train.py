"""`perspectron train`."""

import contextlib
import itertools
import json
import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from perspectron import presets
from perspectron.cli.options import Sets, assignments, differences, resolved
from perspectron.config import ModelConfig, load, one_of, require
from perspectron.data import Shards, Tokenizer
from perspectron.errors import ConfigError, PerspectronError, StorageError
from perspectron.files import locked, read_text, remove
from perspectron.machine import keep_memory, pick_device
from perspectron.opening import describe
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, StagedConfig, TrainConfig
from perspectron.train.extend import extend, how_to_go_on
from perspectron.train.loop import CURVE, Metrics, Trainer, measured, training_batches
from perspectron.train.prepare import prepare
from perspectron.train.recipe import ROWS, Row, Stage, plan, staged

PRESET = "perspective-tiny"


@dataclass(frozen=True)
class Train:
    """Train a model on your text, or go on with a run that was stopped.

    Example: perspectron train --preset perspective-tiny --data my_texts/ --out runs/mine --steps 2000

    Go on: perspectron train --resume runs/mine

    Longer than planned, of a run with --schedule constant: perspectron train --resume runs/mine --steps 4000

    From the weights of another run: perspectron train --init runs/mine --data other_texts/ --out runs/other

    Your own sizes: --preset perspective-tiny --set rank=64 window=256

    By stages, from one network to ternary experts on a torus: --recipe staged
    """

    out: Path | None = None
    """Folder of the run, made by this command."""
    resume: Path | None = None
    """Folder of a run to go on with; everything else comes from there, but --steps may be more."""
    preset: str = ""
    """Which model (perspectron list shows them): perspective-tiny, or with --init the one of that run."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    config: Path | None = None
    """TOML file with [model] (preset and sizes) and [train] tables; flags override it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    recipe: Literal["plain", "staged"] = "plain"
    """ "staged": dense, clone, differentiate, ternary, align, router; the steps are those of all stages."""
    staged: StagedConfig = field(default_factory=StagedConfig)
    allow_changed: bool = False
    """With --resume: go on though config.json was changed since the last checkpoint."""
    json: bool = False
    """Print metrics as JSON lines instead of a progress bar."""

    def __call__(self) -> int:
        if self.resume is not None:
            config, ended = self._resumed(self.resume)
            return fit(self.resume, config, ended=ended, allow_changed=self.allow_changed, as_json=self.json)
        if self.out is None:
            raise ConfigError("train needs --out FOLDER for a new run, or --resume RUN to go on with one")
        if (self.out / "config.json").exists():
            raise ConfigError(f"out: {self.out} is a run already; use --resume {self.out}, or a new --out")
        places: dict[str, Any] = {"data": resolved(self.train.data)}
        for name in ("init", "teacher"):
            if origin := getattr(self.train, name):
                places[name] = resolved(origin)
                describe(Path(origin)).of_run(name)  # an artifact is refused before the text is read
        recipe = self.staged if self.recipe == "staged" else None
        if recipe is None and self.staged != StagedConfig():
            (flag, *_) = differences(self.staged, StagedConfig())
            raise ConfigError(f"{flag}: an option of the staged recipe; add --recipe staged")
        config = RunConfig(self.model(), replace(self.train, **places), recipe)
        return fit(self.out, config, as_json=self.json)

    def model(self) -> ModelConfig:
        """The preset's model with its sizes replaced; with `init` alone, the one of that run."""
        if self.train.init and not self.preset:
            if self.set:
                sizes = " ".join(text for texts in self.set for text in texts)
                raise ConfigError(
                    f"set: {sizes} are sizes of a preset; name it with --preset, or leave them out"
                )
            return describe(Path(self.train.init)).model
        return presets.get(self.preset or PRESET, **assignments(self.set))

    def _resumed(self, run: Path) -> tuple[RunConfig, list[Path] | None]:
        """The run's config, and None; where more steps are asked for, both as `extend` tells them.

        ConfigError that names a flag which asks for something else."""
        saved = resumed(run)
        changed = differences(replace(self, resume=None, allow_changed=False, json=False), of_run(saved))
        steps, _ = changed.pop("--steps", (saved.train.steps, 0))
        for flag in changed:
            raise ConfigError(
                f"{flag} cannot stand beside --resume, where only --steps can change; "
                f"for a new run from its weights: --init {run} --out NEW"
            )
        return (saved, None) if steps == saved.train.steps else extend(run, steps)


def defaults(arguments: list[str]) -> Train | None:
    """The command whose values flags left out have, where the arguments name a TOML file or a run to resume."""
    split = (a.split("=", 1) if a.startswith("--") else [a] for a in arguments)  # not the name of a folder
    values = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--config" in values:
        return from_toml(values["--config"])
    if "--resume" in values:
        return of_run(resumed(Path(values["--resume"])))
    return None


def resumed(run: Path) -> RunConfig:
    """The config of a run to go on with. ConfigError for one of its checkpoints, and for an artifact."""
    whole = checkpoint.run_of(run)
    bound = f"the run's folder, {whole}: it goes on from the last of its checkpoints"
    require(whole == run, "resume", str(run), bound)
    return describe(run).of_run("resume")


def of_run(config: RunConfig) -> Train:
    """The command as far as a run's config tells it; the model is not said."""
    recipe: Literal["plain", "staged"] = "staged" if config.recipe else "plain"
    return Train(train=config.train, recipe=recipe, staged=config.recipe or StagedConfig())


def from_toml(path: str) -> Train:
    """The command that a TOML file describes. ConfigError for a file that does not read or an unknown key."""
    try:
        tables = tomllib.loads(read_text(Path(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config = {path!r}, must be a readable TOML file ({error})") from None
    for name in tables:
        one_of(name, ("model", "train", "staged"), f"{path}: table")
    model = dict(tables.get("model", {}))
    preset = model.pop("preset", "")
    sizes = (tuple(f"{key}={json.dumps(value)}" for key, value in model.items()),) if model else ()
    train = load(TrainConfig, tables.get("train", {}), f"{path}: train")
    stages = load(StagedConfig, tables.get("staged", {}), f"{path}: staged")
    recipe: Literal["plain", "staged"] = "staged" if "staged" in tables else "plain"
    return Train(preset=preset, set=sizes, train=train, recipe=recipe, staged=stages)


def fit(
    run: Path,
    config: RunConfig,
    *,
    ended: list[Path] | None = None,
    allow_changed: bool = False,
    as_json: bool = False,
) -> int:
    """Prepare the data, train, and say where the results are; the command's exit code. A run that cannot start leaves
    nothing behind. ended: for a run that gets more steps, its checkpoints as `extend` tells them. StorageError: another
    process trains in the folder."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if config.recipe is not None:
        plan(run, config)  # what it cannot do, it says before the text is read
    pick_device(config.train.device)
    keep_memory()
    new = not run.is_dir()
    with locked(run, checkpoint.RUN_LOCK):
        trainer, before = None, {path for path in run.iterdir() if path.name != checkpoint.RUN_LOCK}
        try:
            tokenizer, shards, summary = prepare(run, config)
            if tokenizer.vocab_size < config.model.vocab_size:
                config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
            if ended is None:
                config = same_as_before(run, config)
            if config.recipe is None:
                trainer = Trainer(
                    run, config, tokenizer, shards, ended=ended or (), allow_changed=allow_changed
                )
            else:
                training_batches(config, shards)  # too little text is said before anything is written
        except PerspectronError as error:
            if not isinstance(error, StorageError) and not (run / "config.json").exists():
                for path in [run] if new and not before else set(run.iterdir()) - before:
                    remove(path)
            raise
        console.print(summary)
        finished = checkpoint.path_of(run, config.train.steps).is_dir()
        if trainer is None:
            code = _fit_staged(run, config, tokenizer, shards, allow_changed, as_json, console)
        else:
            code = _fit_plain(trainer, as_json, console)
    if finished and code == 0:
        console.print(f"the run was finished before: {config.train.steps} steps; {how_to_go_on(run, config)}")
    return code


def _fit_plain(trainer: Trainer, as_json: bool, console: Console) -> int:
    run = trainer.run_dir
    stopped = _fit(trainer, as_json, console)
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(f"stopped and saved at step {trainer.progress.step}; go on with --resume {run}")
        return 128 + stopped
    if trainer.best < math.inf:
        on = {"heldout": "held-out"}.get(trainer.config.train.measured_on, "dev")
        console.print(f"best {on}: {trainer.best:.3f} bits per byte; curve: {run / CURVE}")
    return 0


def _fit_staged(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    shards: Shards,
    allow_changed: bool,
    as_json: bool,
    console: Console,
) -> int:
    def train(trainer: Trainer, stage: Stage) -> int | None:
        console.print(f"{stage.number}  {stage.name}")
        return _fit(trainer, as_json, console, {"stage": stage.name})

    def report(row: Row) -> None:
        if as_json:
            print(json.dumps(row), flush=True)
        console.print(stage_line(row))

    stopped = staged(run, config, tokenizer, shards, fit=train, report=report, allow_changed=allow_changed)
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(f"stopped and saved; go on with --resume {run}")
        return 128 + stopped
    console.print(f"stages: {run / ROWS}; curve: {run / CURVE}")
    return 0


def stage_line(row: Row) -> str:
    """The end of a stage, in words."""
    text = f"   {row['stage']}: held-out {row['heldout_bits_per_byte']:.3f} bits per byte"
    if row["layers"]:
        text += f", Gini {row['gini']:.3f}, reach {row['reach']:.2f}, delta {row['delta']:.3f}"
    return text


def same_as_before(run: Path, config: RunConfig) -> RunConfig:
    """The config of the run if it has one, which settled what was "auto". ConfigError when another is asked."""
    if not (run / "config.json").is_file():
        return config
    saved = checkpoint.load_config(run)
    config = replace(config, order=saved.order)
    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype=saved.train.dtype))
    if config == saved:
        return saved
    what = "another model"
    if config.model == saved.model:
        flag, (_, there) = next(iter(differences(config, saved).items()))
        what = f"{flag} {there}"
    raise ConfigError(f"{run}: the run was started with {what}; use --resume {run}, or a new --out")


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
                text, bits = measured(line)
                bar.update(task, held=f"{text} {bits:.3f} bits/byte")
            if not console.is_terminal and ("loss" not in line or line["step"] % max(1, steps // 10) == 0):
                console.print(_plain(line, steps))

        return trainer.fit(report=report)


def _plain(line: Metrics, steps: int) -> str:
    if "loss" in line:
        return (
            f"step {line['step']}/{steps}  loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s"
        )
    text, bits = measured(line)
    return f"step {line['step']}/{steps}  {text} {bits:.3f} bits per byte"
