"""`perspectron train`."""

import contextlib
import itertools
import json
import math
import time
import tomllib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from perspectron import presets
from perspectron.budget import BYTES_PER_TOKEN, Budget, settled, size_of, sized
from perspectron.cli.options import Sets, assignments, count, differences, needs, resolved
from perspectron.cli.progress import Work, duration
from perspectron.config import ModelConfig, load, one_of, require
from perspectron.data import Shards, Tokenizer, open_corpus, open_shards
from perspectron.errors import ConfigError, NonFiniteError, PerspectronError, StorageError
from perspectron.eval.perplexity import compressors
from perspectron.files import locked, read_text, remove
from perspectron.machine import keep_memory, pick_device
from perspectron.opening import describe
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, StagedConfig, TrainConfig
from perspectron.train.estimate import Estimate, require_room
from perspectron.train.extend import extend, how_to_go_on
from perspectron.train.loggers import Kind, logger
from perspectron.train.loop import CURVE, Metrics, Trainer, measured, read_metrics, training_batches
from perspectron.train.pace import Pace
from perspectron.train.prepare import prepare
from perspectron.train.recipe import ROWS, Row, Stage, plan, staged

STAGED = "perspective-tiny"  # what the staged recipe trains where no preset is named
MINUTES = 5.0  # where nothing says how long
RUNS = Path("runs")
CLOSING = 3.0  # seconds from the last checkpoint to the end: the curve, compressors


@dataclass(frozen=True)
class Train:
    """Train a model on your text, or go on with a run that was stopped.

    Example: perspectron train --data letters.txt

    It times this machine for a few seconds and chooses a size, a learning rate and a number of updates that take
    5 minutes. Longer: perspectron train --data letters.txt --minutes 30 --out runs/letters

    Your own choice: perspectron train --data letters.txt --preset transformer-tiny --set layers=2 --lr 4e-3 --steps 20

    Go on after a stop: perspectron train --resume runs/letters

    With updates that may grow: perspectron train --data letters.txt --schedule constant --steps 2000 --out runs/open

    And later: perspectron train --resume runs/open --steps 4000

    From the weights of another run: perspectron train --init runs/letters --data other.txt --minutes 2

    By stages, from one network to ternary experts on a torus: perspectron train --recipe staged --data letters.txt

    From a file: perspectron train --config letters.toml

    Its tables are [model] with preset = "transformer-tiny" and sizes of it, [train] with data = "letters.txt", steps =
    20 and the like (options here, _ for -), and [train.optim] with lr = 4e-3, warmup and the like.
    """

    out: Path | None = None
    """Folder of the run, made by this command (default: in runs/, called after the text)."""
    resume: Path | None = None
    """Folder of a run to go on with; everything else comes from there, but --steps may be more."""
    minutes: float | None = None
    """End after so many minutes: the size, unless it is given, and the number of updates are chosen for it (default: 5,
    where --tokens, --epochs and --steps are left out too)."""
    tokens: str | None = None
    """Train on so many tokens, such as 20M, in place of --steps."""
    epochs: float | None = None
    """Train on so many passes over the text, in place of --steps."""
    preset: str = ""
    """Which model (perspectron list shows them); without one, perspective2 of a size that fits the time or the tokens,
    or with --init the model of that run."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE; vocab_size alone leaves the model's size open."""
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
    log: Kind = ""
    """Log to TensorBoard (RUN/tensorboard), Weights & Biases or Trackio, too."""
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Fields that were typed or stand in the TOML file; of a training, what is not among them is chosen."""
    began: tyro.conf.Suppress[float] = 0.0
    """When the command was typed, by the monotonic clock; before torch was imported."""

    def __call__(self) -> int:
        if self.log:
            needs(self.log, self.log)
        if self.resume is not None:
            config, ended = self._resumed(self.resume)
            return fit(
                self.resume,
                config,
                ended=ended,
                allow_changed=self.allow_changed,
                as_json=self.json,
                log=self.log,
            )
        if self.out is None and not self.train.init and not {"data", "config"} & set(self.given):
            raise ConfigError("train needs --data PATH (a file, a folder, or stdlib), or --resume RUN")
        if self.out is not None and (self.out / "config.json").exists():
            raise ConfigError(f"out: {self.out} is a run already; use --resume {self.out}, or a new --out")
        train = self._settings()
        recipe = self.staged if self.recipe == "staged" else None
        if recipe is None and self.staged != StagedConfig():
            (flag, *_) = differences(self.staged, StagedConfig())
            raise ConfigError(f"{flag}: an option of the staged recipe; add --recipe staged")
        if recipe is not None:
            for name in ("minutes", "tokens", "epochs"):
                require(
                    getattr(self, name) is None, name, getattr(self, name), "left out of a recipe: --steps"
                )
            model = presets.get(self.preset or STAGED, **assignments(self.set))
            return fit(self._folder(), RunConfig(model, train, recipe), as_json=self.json, log=self.log)
        budget = self._budget(train)
        ends = None if budget.minutes is None else self.began + 60 * budget.minutes

        def settle(config: RunConfig, shards: Shards) -> RunConfig:
            return settled(config, frozenset(self.given), budget, shards, _left(ends))

        config = RunConfig(self._model(train, budget, ends), train)
        return fit(self._folder(), config, as_json=self.json, settle=settle, ends=ends, log=self.log)

    def _settings(self) -> TrainConfig:
        """The training, with its text and other runs by their full paths. A run's text is the default of one from its
        weights, and windows are no longer than its table of positions."""
        places: dict[str, Any] = {}
        for name in ("init", "teacher"):
            if origin := getattr(self.train, name):
                places[name] = resolved(origin)
                its = describe(Path(origin)).of_run(name)  # an artifact is refused before the text is read
                if name == "init" and "data" not in self.given:
                    places["data"] = its.train.data
                if name == "init" and not self.preset and its.model.positions and "seq_len" not in self.given:
                    places["seq_len"] = min(self.train.seq_len, its.model.positions)
        return replace(self.train, **{"data": resolved(self.train.data)} | places)

    def _budget(self, train: TrainConfig) -> Budget:
        """The one budget of minutes, tokens, epochs and steps that is given; ConfigError for two of them."""
        asked = {name: getattr(self, name) for name in ("minutes", "tokens", "epochs")}
        asked = {name: value for name, value in asked.items() if value is not None}
        if "steps" in self.given:
            asked["steps"] = train.steps
        if len(asked) > 1:
            one, other, *_ = (f"--{name}" for name in asked)
            raise ConfigError(f"{one} and {other}: each says how long; leave one out")
        if "steps" in asked:
            return Budget(tokens=train.steps * train.batch_size * train.seq_len * train.accumulate)
        if self.tokens is not None:
            return Budget(tokens=count(self.tokens, "tokens"))
        return Budget(passes=self.epochs) if self.epochs is not None else Budget(self.minutes or MINUTES)

    def _model(self, train: TrainConfig, budget: Budget, ends: float | None) -> ModelConfig:
        """The preset's model with its sizes replaced; with `init` alone, the one of that run; with neither, the default
        design at the size that the budget can train."""
        sizes = assignments(self.set)
        if train.init and not self.preset:
            if self.set:
                typed = " ".join(text for texts in self.set for text in texts)
                raise ConfigError(
                    f"set: {typed} are sizes of a preset; name it with --preset, or leave them out"
                )
            return describe(Path(train.init)).model
        if self.preset or sizes.keys() - {"vocab_size"}:
            return presets.get(self.preset or presets.DESIGN, **sizes)
        vocab_size = sizes.get("vocab_size", 0)
        require(
            type(vocab_size) is int and (not sizes or vocab_size >= 257), "vocab_size", vocab_size, "≥ 257"
        )
        if (Path(train.data) / "manifest.json").is_file():
            vocab_size = Tokenizer.load(Path(train.data) / "tokenizer.json").vocab_size
            unique: float = open_shards(Path(train.data)).split("train").tokens
        else:
            with Work("reading the text"):
                unique = size_of(open_corpus(train.data, train.heldout)) / BYTES_PER_TOKEN
        keep_memory()  # as in the training that is timed
        with Work("timing this machine"):
            return sized(presets.DESIGN, budget, train, unique, _left(ends), vocab_size)

    def _folder(self) -> Path:
        """The folder of a new run: --out, or the first free one that is called after the text."""
        if self.out is not None:
            return self.out
        name = Path(self.train.data).name.split(".")[0] or "run"
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(RUNS / free for free in names if not (RUNS / free).exists())

    def _resumed(self, run: Path) -> tuple[RunConfig, list[Path] | None]:
        """The run's config, and None; where more steps are asked for, both as `extend` tells them.

        ConfigError that names a flag which asks for something else."""
        saved = resumed(run)
        typed = replace(self, resume=None, allow_changed=False, json=False, log="", given=(), began=0.0)
        changed = differences(typed, of_run(saved))
        steps, _ = changed.pop("--steps", (saved.train.steps, 0))
        for flag in changed:
            raise ConfigError(
                f"{flag} cannot stand beside --resume, where only --steps can change; "
                f"for a new run from its weights: --init {run} --out NEW"
            )
        return (saved, None) if steps == saved.train.steps else extend(run, steps)


def defaults(arguments: list[str]) -> Train:
    """The command whose values flags left out have: those of a TOML file or of a run to resume, which the arguments
    name, else its own."""
    split = (a.split("=", 1) if a.startswith("--") else [a] for a in arguments)  # not the name of a folder
    values = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--resume" in values:
        return of_run(resumed(Path(values["--resume"])))
    typed = (a[2:].partition("=")[0].replace("-", "_") for a in arguments if a.startswith("--"))
    known = from_toml(values["--config"]) if "--config" in values else Train()
    return replace(known, given=(*known.given, *typed))


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
    given = tables.get("train", {})
    names = (*given, *given.get("optim", {}))
    return Train(preset=preset, set=sizes, train=train, recipe=recipe, staged=stages, given=names)


def _left(ends: float | None) -> float:
    """Seconds for the training until `ends`, a time of the monotonic clock."""
    return math.inf if ends is None else ends - time.monotonic() - CLOSING


def fit(
    run: Path,
    config: RunConfig,
    *,
    ended: list[Path] | None = None,
    allow_changed: bool = False,
    as_json: bool = False,
    settle: Callable[[RunConfig, Shards], RunConfig] = lambda config, _: config,
    ends: float | None = None,
    log: Kind = "",
) -> int:
    """Prepare the data, train, and say where the results are; the command's exit code. A run that cannot start leaves
    nothing behind. ended: for a run that gets more steps, its checkpoints as `extend` tells them. settle: fills in
    what of the config depends on the text. ends: time of the monotonic clock to keep to. StorageError: another process
    trains in the folder."""
    console, started = Console(stderr=True, highlight=False, soft_wrap=True, markup=False), time.monotonic()
    if config.recipe is not None:
        plan(run, config)  # what it cannot do, it says before the text is read
    require_room(config, pick_device(config.train.device))
    keep_memory()
    new = not run.is_dir()
    with locked(run, checkpoint.RUN_LOCK):
        trainer, before = None, {path for path in run.iterdir() if path.name != checkpoint.RUN_LOCK}
        try:
            with Work("reading and encoding the text"):
                tokenizer, shards, summary = prepare(run, config)
            if tokenizer.vocab_size < config.model.vocab_size:
                config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
            training_batches(config, shards)  # too little text is said before anything is measured
            with Work("timing this machine"):
                config = settle(config, shards)
            if ended is None:
                config = same_as_before(run, config)
            if config.recipe is None:
                with Work(f"building {config.model.name}"):
                    trainer = Trainer(
                        run, config, tokenizer, shards, ended=ended or (), allow_changed=allow_changed
                    )
        except PerspectronError as error:
            if not isinstance(error, StorageError) and not (run / "config.json").exists():
                for path in [run] if new and not before else set(run.iterdir()) - before:
                    remove(path)
            raise
        console.print(summary)
        finished = checkpoint.path_of(run, config.train.steps).is_dir()
        if trainer is None:
            code = _fit_staged(run, config, tokenizer, shards, allow_changed, as_json, console, log)
        else:
            code = _fit_plain(trainer, as_json, console, started, ends, log)
    if finished and code == 0:
        console.print(f"the run was finished before: {config.train.steps} steps; {how_to_go_on(run, config)}")
    return code


def _fit_plain(
    trainer: Trainer, as_json: bool, console: Console, started: float, ends: float | None, log: Kind
) -> int:
    run, begun = trainer.run_dir, trainer.progress.step
    try:
        stopped = _fit(trainer, as_json, console, ends=ends, log=log)
    except NonFiniteError as error:
        rate, saved = trainer.config.train.optim.lr, checkpoint.found_in(run)
        kept = f"; {run} holds step {saved[-1].progress.step}" if saved else ""
        raise NonFiniteError(
            f"{error}{kept}. Start again with a lower rate, in another folder: --lr {rate / 2:g} --out {run}-2"
        ) from None
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(
                f"stopped and saved at step {trainer.progress.step}; go on with: perspectron train --resume {run}"
            )
        return 128 + stopped
    if trainer.progress.step > begun and trainer.best < math.inf:
        for line in _ending(trainer, time.monotonic() - started):
            console.print(line)
    return 0


def _ending(trainer: Trainer, seconds: float) -> list[str]:
    """The closing lines of a run: its result beside compressors of the same text, and what to do next."""
    run, train = trainer.run_dir, trainer.config.train
    on = {"heldout": "held-out"}.get(train.measured_on, "dev")
    text = trainer.measured_text()
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in compressors(text).items())
    lines = [
        f"done in {duration(seconds)}: best {on} {trainer.best:.3f} bits per byte ({others}, of the same "
        f"{len(text):,} bytes); curve: {run / CURVE}"
    ]
    course = [bits for line in read_metrics(run) if "loss" not in line for _, bits in [measured(line)]]
    if course[-1] > 1.01 * trainer.best:
        lines.append(
            f"the loss rose to {course[-1]:.3f} at the end, the best was kept: fewer --epochs, or more text"
        )
    return [
        *lines,
        "next:",
        f"  perspectron generate {run} --max-tokens 200",
        f"  perspectron chat {run}",
        f"  perspectron eval {run}",
    ]


def _fit_staged(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    shards: Shards,
    allow_changed: bool,
    as_json: bool,
    console: Console,
    log: Kind,
) -> int:
    def train(trainer: Trainer, stage: Stage) -> int | None:
        console.print(f"{stage.number}  {stage.name}")
        return _fit(trainer, as_json, console, {"stage": stage.name}, log=log)

    def report(row: Row) -> None:
        if as_json:
            print(json.dumps(row), flush=True)
        console.print(stage_line(row))

    stopped = staged(run, config, tokenizer, shards, fit=train, report=report, allow_changed=allow_changed)
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(f"stopped and saved; go on with: perspectron train --resume {run}")
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
    trainer: Trainer,
    as_json: bool,
    console: Console,
    beside: dict[str, str] | None = None,
    ends: float | None = None,
    log: Kind = "",
) -> int | None:
    """Train to the end with a bar, or with JSON lines, each of which also says what is `beside`. ends: time to keep
    to."""
    if trainer.damaged is not None:
        console.print(f"warning: {trainer.damaged}; going on from step {trainer.progress.step}")
    if trainer.progress.step < trainer.config.train.steps:
        with Work("a first pass"):
            estimate = trainer.estimate()
        for line in _plan(trainer, estimate, ends):
            console.print(line)
    pace = None if ends is None else Pace(ends, closing=CLOSING)
    text = trainer.shards.split("train")
    with logger(log, trainer.run_dir, trainer.config, text, trainer.progress.step) as logged:
        if as_json:

            def lines(line: Metrics) -> None:
                print(json.dumps((beside or {}) | line), flush=True)
                logged(line)

            return trainer.fit(report=lines, pace=pace)
        return _fit_with_a_bar(trainer, console, pace, ends, logged)


def _fit_with_a_bar(
    trainer: Trainer,
    console: Console,
    pace: Pace | None,
    ends: float | None,
    logged: Callable[[Metrics], None],
) -> int | None:
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    ) as bar:
        speed = Speed(trainer.progress.step)
        task = bar.add_task("", total=trainer.config.train.steps, completed=trainer.progress.step)

        def report(line: Metrics) -> None:
            logged(line)
            steps = trainer.config.train.steps
            said = speed.line(line, steps, ends)
            if "loss" in line:
                bar.update(task, completed=line["step"], total=steps, description=said)
            if "loss" not in line or (not console.is_terminal and speed.due(line["step"], steps)):
                console.print(said)

        return trainer.fit(report=report, pace=pace)


def _plan(trainer: Trainer, estimate: Estimate, ends: float | None) -> list[str]:
    """The opening lines of a run: what will be trained, for how long and in what memory."""
    config, step = trainer.config, trainer.progress.step
    train, steps = config.train, config.train.steps
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    batch = train.batch_size * train.seq_len * train.accumulate
    passes = steps * batch / (trainer.loader.windows * train.seq_len)
    seconds = ends - time.monotonic() if ends is not None else estimate.whole(config, step)
    begin = f"going on from step {step} of {steps}" if step else f"{steps:,} updates of {batch:,} tokens"
    return [
        f"{config.model.name}: {size / 1e6:.2f} M parameters, {train.dtype}, {trainer.device}, "
        f"learning rate {train.optim.lr:g}",
        f"{begin}: {steps * batch / 1e6:.3g} M tokens, {passes:.2g} passes over the text",
        f"about {duration(seconds)}, until {time.strftime('%H:%M:%S', time.localtime(time.time() + seconds))}; "
        f"{estimate.bytes / 1e9:.1f} GB of memory",
    ]


class Speed:
    """The lines that a training prints as it goes, with its speed and the time left, of the last updates."""

    EVERY = 10.0  # seconds between lines where there is no terminal

    def __init__(self, step: int) -> None:
        self._recent = deque([(time.monotonic(), step, 0)], maxlen=32)
        self._said = -math.inf

    def line(self, line: Metrics, steps: int, ends: float | None) -> str:
        """A line of metrics, in words."""
        head = f"step {line['step']:,}/{steps:,}"
        if "loss" not in line:
            text, bits = measured(line)
            return f"{head}  {text} {bits:.3f} bits per byte"
        now = time.monotonic()
        self._recent.append((now, line["step"], line["tokens"]))
        first, last = self._recent[0], self._recent[-1]
        each = (now - first[0]) / max(1, last[1] - first[1])
        left = (steps - line["step"]) * each if ends is None else max(0.0, ends - now)
        return f"{head}  loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s  {duration(left)} left"

    def due(self, step: int, steps: int) -> bool:
        """Whether a line is to be printed where lines are not written over."""
        now = time.monotonic()
        if now - self._said < self.EVERY and step < steps:
            return False
        self._said = now
        return True
