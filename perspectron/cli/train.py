"""`perspectron train`."""

import itertools
import json
import math
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from perspectron import presets
from perspectron.budget import BYTES_PER_TOKEN, Budget, settled, size_of, sized
from perspectron.cli.fit import CLOSING, fit
from perspectron.cli.options import Sets, assignments, count, differences, needs
from perspectron.cli.progress import Work
from perspectron.config import ModelConfig, load, one_of, require
from perspectron.data import Shards, Tokenizer, absolute, is_encoded, label, open_corpus, open_shards
from perspectron.data.template import PLAIN, Template
from perspectron.data.vocabulary import KINDS, made
from perspectron.errors import ConfigError
from perspectron.files import read_text
from perspectron.machine import memory_kept
from perspectron.opening import describe
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, StagedConfig, TrainConfig
from perspectron.train.extend import extend
from perspectron.train.layout import Layout, launched, processes
from perspectron.train.loggers import Kind

STAGED = "perspective-tiny"  # what the staged recipe trains where no preset is named
MINUTES = 5.0  # where nothing says how long
RUNS = Path("runs")
LARGEST_VOCABULARY = 65536  # of characters, where nothing is said


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

    Adapters: perspectron train --init runs/letters --lora rank=8 --template plain --data pairs.jsonl --out runs/pairs

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
    layout: Layout = field(default_factory=Layout)
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Fields that were typed or stand in the TOML file; of a training, what is not among them is chosen."""
    began: tyro.conf.Suppress[float] = 0.0
    """When the command was typed, by the monotonic clock; before torch was imported."""

    def __call__(self) -> int:
        if not launched():
            for flag in differences(self.layout, Layout()):
                raise ConfigError(f"{flag}: for several processes; start them with torchrun (docs/scale.md)")
            return self._run()
        from perspectron.cli.together import together  # torch.distributed takes long to import

        return together(self._run, self.layout)

    def _run(self) -> int:
        if self.log:
            needs(self.log, self.log)
        options: dict[str, Any] = {"as_json": self.json, "log": self.log, "layout": self.layout}
        if self.resume is not None:
            config, ended = self._resumed(self.resume)
            return fit(self.resume, config, ended=ended, allow_changed=self.allow_changed, **options)
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
            return fit(
                self._folder(),
                RunConfig(model, train, recipe),
                as_json=self.json,
                log=self.log,
                layout=self.layout,
            )
        budget = self._budget(train)
        ends = None if budget.minutes is None else self.began + 60 * budget.minutes

        def settle(config: RunConfig, shards: Shards) -> RunConfig:
            return settled(config, frozenset(self.given), budget, shards, _left(ends))

        config = RunConfig(self._model(train, budget, ends), train)
        return fit(
            self._folder(),
            config,
            as_json=self.json,
            settle=settle,
            ends=ends,
            log=self.log,
            layout=self.layout,
        )

    def _settings(self) -> TrainConfig:
        """The training, with its text and other runs by their full paths. A run's text is the default of one from its
        weights, and windows are no longer than its table of positions."""
        places: dict[str, Any] = {}
        for name in ("init", "teacher"):
            if origin := getattr(self.train, name):
                places[name] = str(Path(origin).resolve())
                its = describe(Path(origin)).of_run(name)  # an artifact is refused before the text is read
                if name == "init" and "data" not in self.given:
                    places["data"] = its.train.data
                if name == "init" and not self.preset and its.model.positions and "seq_len" not in self.given:
                    places["seq_len"] = min(self.train.seq_len, its.model.positions)
        for name, kinds in (("tokenizer", KINDS), ("template", ("", PLAIN))):
            if (value := getattr(self.train, name)) not in kinds and Path(value).exists():
                places[name] = str(Path(value).resolve())
        return replace(self.train, **{"data": absolute(self.train.data)} | places)

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
        if is_encoded(train.data):
            vocab_size = Tokenizer.load(Path(train.data) / "tokenizer.json").vocab_size
            unique: float = open_shards(Path(train.data)).split("train").tokens
        else:
            with Work("reading the text"):
                template = Template.named(train.template) if train.template else None
                corpus = open_corpus(train.data, train.heldout, template=template)
                unique = size_of(corpus) / (BYTES_PER_TOKEN if train.tokenizer != "bytes" else 1)
                if train.tokenizer != "bpe":
                    most = vocab_size or LARGEST_VOCABULARY
                    vocab_size = made(train.tokenizer, corpus, most).vocab_size
        with Work("timing this machine"), memory_kept():  # as in the training that is timed
            return sized(presets.DESIGN, budget, train, unique, _left(ends), vocab_size)

    def _folder(self) -> Path:
        """The folder of a new run: --out, or the first free one that is called after the text."""
        if self.out is not None:
            return self.out
        name = label(self.train.data)
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(RUNS / free for free in names if not (RUNS / free).exists())

    def _resumed(self, run: Path) -> tuple[RunConfig, list[Path] | None]:
        """The run's config, and None; where more steps are asked for, both as `extend` tells them.

        ConfigError that names a flag which asks for something else."""
        saved = resumed(run)
        typed = replace(self, resume=None, allow_changed=False, json=False, log="", given=(), began=0.0)
        typed = replace(typed, layout=Layout())
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
    """Seconds of one process for the training until `ends`, a time of the monotonic clock. Several have so many times
    as much together, and what that leaves out the training itself corrects."""
    return math.inf if ends is None else (ends - time.monotonic() - CLOSING) * processes()
