"""`perspectron train`."""

import itertools
import math
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from perspectron import presets
from perspectron.cli.fit import CLOSING, fit
from perspectron.cli.options import Encoding, Sets, assignments, count, differences, needs
from perspectron.cli.progress import Work
from perspectron.cli.tune import tune
from perspectron.data import (
    Shards,
    Tokenizer,
    absolute,
    is_encoded,
    label,
    open_corpus,
    open_shards,
    with_encoding,
)
from perspectron.data.template import OWN, PLAIN
from perspectron.data.vocabulary import KINDS, made
from perspectron.eval.budget import BYTES_PER_TOKEN, Budget, largest_vocabulary, settled, size_of, sized
from perspectron.model.config import ModelConfig
from perspectron.opening import describe
from perspectron.train import checkpoint, memory
from perspectron.train.config import Layout, RunConfig, StagedConfig, TrainConfig, launched, processes
from perspectron.train.loggers import Kind
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import asked_template, held_out_before
from perspectron.train.resume import extend
from perspectron.util.config import load, one_of, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_text
from perspectron.util.machine import memory_kept

STAGED = "perspective-tiny"  # what the staged recipe trains where no preset is named
MINUTES = 5.0  # where nothing says how long
LENGTHS = ("minutes", "tokens", "epochs")  # of a training, in place of --steps
RUNS = Path("runs")


@dataclass(frozen=True)
class Train:
    """Train a model on your text, or resume a run that was stopped.

    Example: perspectron train --data letters.txt

    The command times this machine for a few seconds, then chooses a model size, a learning rate and a number of updates
    that take 5 minutes. Longer: perspectron train --data letters.txt --minutes 30 --out runs/letters

    Your own choices: perspectron train --data letters.txt --preset transformer-tiny --set layers=2 --lr 4e-3 --steps 20

    Resume after an interruption: perspectron train --resume runs/letters

    A run that can be extended: perspectron train --data letters.txt --schedule constant --steps 2000 --out runs/open

    Then, later: perspectron train --resume runs/open --steps 4000

    Starting from the weights of another run: perspectron train --init runs/letters --data other.txt --minutes 2

    Adapters: perspectron train --init runs/letters --lora rank=8 --template plain --data pairs.jsonl --out runs/pairs

    A memory: perspectron train --init runs/letters --state offset --data other.txt --out other.state

    In stages, from one network to ternary experts on a torus: perspectron train --recipe staged --data letters.txt

    With options from a file: perspectron train --config letters.toml

    The file has the tables [model] (preset = "transformer-tiny" and its sizes), [train] (data = "letters.txt", steps =
    20; the options below, with _ for -) and [train.optim] (lr = 4e-3, warmup and so on).
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--data", "--out", "--minutes", "--preset", "--set", "--steps", "--lr", "--resume", "--init", "--template",
    )  # fmt: skip
    out: Path | None = None
    """Folder of the new run (default: in runs/, named after the text)."""
    resume: Path | None = None
    """Folder of a run to resume; all other options come from there, except that --steps may be larger."""
    minutes: float | None = None
    """End after this many minutes; the number of updates, and the size unless it is given, are chosen to fit
    (default: 5 if --tokens, --epochs and --steps are not given either)."""
    tokens: str | None = None
    """Train on this many tokens, such as 20M, instead of --steps."""
    epochs: float | None = None
    """Train on this many passes over the text, instead of --steps."""
    encoding: Encoding = ""
    preset: str = ""
    """Model to train; `perspectron list` shows the choices (default: perspective2 at a size that fits the time or the
    tokens; with --init, the model of that run)."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE; vocab_size alone leaves the model's size open."""
    config: Path | None = None
    """TOML file with [model] (preset and sizes) and [train] tables; flags override it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    recipe: Literal["plain", "staged"] = "plain"
    """ "staged" trains experts in stages: dense, clone, differentiate, ternary, align, router; --steps counts all
    stages."""
    staged: StagedConfig = field(default_factory=StagedConfig)
    state: str = ""
    """Train a memory instead of weights, of the model named by --init, which stays frozen: "offset" of what every read
    of a matrix memory gives, "gates" (biases of decays) and "first" (the memory that a text begins with), such as
    offset,gates. --out is then a state file, with which `generate`, `chat` and `serve` begin conversations."""
    allow_changed: bool = False
    """With --resume: continue although config.json has changed since the last checkpoint."""
    json: bool = False
    """Print metrics as JSON lines instead of a progress bar."""
    log: Kind = ""
    """Log to TensorBoard (RUN/tensorboard), Weights & Biases or Trackio as well."""
    layout: Layout = field(default_factory=Layout)
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Fields that were typed or stand in the TOML file; settings of a training that are not among them are chosen."""
    sizes: tyro.conf.Suppress[Mapping[str, Any]] = field(default_factory=dict)
    """Sizes of the TOML file, or of a call from Python, which `set` overrides."""
    began: tyro.conf.Suppress[float] = 0.0
    """Time at which the command was typed, by the monotonic clock: before torch was imported."""
    design: tyro.conf.Suppress[str] = presets.DESIGN
    """The design whose size is chosen, or solved for `params`."""
    params: tyro.conf.Suppress[int] = 0
    """Parameters of a model of the design; 0 is what the budget can train."""

    def __call__(self) -> int:
        if not launched():
            for flag in differences(self.layout, Layout()):
                raise ConfigError(
                    f"{flag} is for several processes; start them with torchrun (docs/scale.md)"
                )
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
        if self.state:
            return self._memory()
        if self.out is None and not self.train.init and not {"data", "config"} & set(self.given):
            raise ConfigError("train needs --data PATH (a file, a folder, or stdlib), or --resume RUN")
        require(not self.allow_changed, "allow_changed", True, "left out without --resume")
        if self.out is not None and (self.out / "config.json").exists():
            raise ConfigError(f"out: {self.out} is a run already; use --resume {self.out}, or a new --out")
        train = self._settings()
        recipe = self.staged if self.recipe == "staged" else None
        if recipe is None and self.staged != StagedConfig():
            (flag, *_) = differences(self.staged, StagedConfig())
            raise ConfigError(f"{flag} is an option of the staged recipe; add --recipe staged")
        if recipe is not None:
            for name in LENGTHS:
                value = getattr(self, name)
                require(value is None, name, value, "left out with a recipe; use --steps")
            model = presets.get(self.preset or STAGED, **self._sizes())
            if "groups" not in self.given:
                train = replace(train, optim=replace(train.optim, groups="own"))
            return fit(self.folder(), RunConfig(model, train, recipe), **options)
        budget = self._budget(train)
        ends = None if budget.minutes is None else self.began + 60 * budget.minutes

        def settle(config: RunConfig, shards: Shards) -> RunConfig:
            return settled(config, frozenset(self.given), budget, shards, _left(ends))

        config = RunConfig(self._model(train, budget, ends), train)
        ternary = any(getattr(block.ffn, "ternary", False) for block in config.model.blocks)
        for name in ("ternary_from", "ternary_until"):
            asked, usual = getattr(train, name), getattr(TrainConfig(), name)
            known = f"{usual} for {config.model.name}, none of whose experts are ternary"
            require(ternary or asked == usual, name, asked, known)
        return fit(self.folder(), config, settle=settle, ends=ends, **options)

    def _memory(self) -> int:
        """Train a memory of a run's model: a state file."""
        require(self.train.init != "", "state", self.state, "beside --init, the run whose memory it is of")
        require(self.out is not None, "out", None, "a file for the state, such as other.state")
        require(not launched(), "state", self.state, "left out for several processes")
        used = {"out", "encoding", "config", "train", "state", "json", "given", "began"}
        typed = {f.name for f in fields(self) if getattr(self, f.name) != getattr(Train(), f.name)} - used
        ends = {name for name in ("eval_every", "save_every") if getattr(self.train, name) == 0}  # as it is
        typed |= (set(self.given) & memory.LEFT_OUT) - ends
        for name in sorted(typed):
            places = (self, self.train, self.train.optim)
            value = next(getattr(place, name) for place in places if hasattr(place, name))
            require(False, name, value, "left out with --state, which trains no weights")
        assert self.out is not None
        return tune(self.out, self._settings(), self.state, frozenset(self.given), as_json=self.json)

    def _settings(self) -> TrainConfig:
        """The training, with its text and other runs by their full paths. Windows are no longer than the table of
        positions of the run whose weights are taken, and nothing of a text is held out that a run named here was
        trained on. ConfigError where that is asked for."""
        places: dict[str, Any] = {"data": self.text()}
        for name in ("init", "teacher"):
            if origin := getattr(self.train, name):
                places[name] = str(Path(origin).resolve())
                its = describe(Path(origin)).of_run(name)  # an artifact is refused before the text is read
                if name == "init" and not self.preset and its.model.positions and "seq_len" not in self.given:
                    places["seq_len"] = min(self.train.seq_len, its.model.positions)
        if "heldout" in self.given and is_encoded(places["data"]):
            bound = f"left out: {places['data']} was split when it was encoded"
            require(False, "heldout", self.train.heldout, bound)
        if shares := held_out_before(replace(self.train, **places)):
            least, typed = min(shares), "heldout" in self.given
            require(
                not typed or self.train.heldout <= least,
                "heldout",
                self.train.heldout,
                f"≤ {least}, what a run that this one starts or learns from held out of the same text",
            )
            places["heldout"] = self.train.heldout if typed else least
        teacher, weight, heat = self.train.teacher, self.train.teacher_weight, self.train.teacher_temperature
        right = weight == 1 or (teacher != "" and self.train.teacher_mix == 0)
        require(right, "teacher_weight", weight, "1 without teacher, and beside teacher_mix")
        right = heat == 1 or bool(teacher or self.staged.distill or self.staged.distill_mix)
        require(right, "teacher_temperature", heat, "1 without teacher, a run to distil from")
        cooldown, usual = self.train.optim.cooldown, OptimConfig().cooldown
        right = self.train.optim.schedule == "constant" or cooldown == usual
        require(right, "cooldown", cooldown, f"{usual} without --schedule constant, whose rate it lets fall")
        for name, kinds in (("tokenizer", KINDS), ("template", ("", PLAIN, OWN))):
            if (value := getattr(self.train, name)) not in kinds and Path(value).exists():
                places[name] = str(Path(value).resolve())
        return replace(self.train, **places)

    def _budget(self, train: TrainConfig) -> Budget:
        """The one budget of minutes, tokens, epochs and steps that is given; ConfigError for two of them."""
        asked = {name: getattr(self, name) for name in LENGTHS}
        asked = {name: value for name, value in asked.items() if value is not None}
        if "steps" in self.given:
            asked["steps"] = train.steps
        if len(asked) > 1:
            one, other, *_ = (f"--{name}" for name in asked)
            raise ConfigError(f"{one} and {other} both set the length of the training; give only one of them")
        if "steps" in asked:
            return Budget(tokens=train.steps * train.batch_size * train.seq_len * train.accumulate)
        if self.tokens is not None:
            return Budget(tokens=count(self.tokens, "tokens"))
        if self.epochs is not None:
            return Budget(passes=self.epochs)
        return Budget(MINUTES if self.minutes is None else self.minutes)

    def _model(self, train: TrainConfig, budget: Budget, ends: float | None) -> ModelConfig:
        """The preset's model with its sizes replaced; with `init` alone, the one of that run; with neither, the default
        design at the size that the budget can train."""
        sizes = self._sizes()
        if train.init and not self.preset:
            if sizes:
                typed = " ".join(f"{key}={value}" for key, value in sizes.items())
                raise ConfigError(
                    f"set: {typed} are sizes of a preset; name the preset with --preset, or leave the sizes out"
                )
            return describe(Path(train.init)).model
        if self.preset:
            return presets.get(self.preset, **sizes)
        if sizes.keys() - {"vocab_size"}:
            design, given = presets.variant(self.design)
            return presets.table.made(design.make, self.design, given | sizes)
        vocab_size = sizes.get("vocab_size", 0)
        require(
            type(vocab_size) is int and (not sizes or vocab_size >= 257), "vocab_size", vocab_size, "≥ 257"
        )
        if is_encoded(train.data):
            vocab_size = Tokenizer.load(Path(train.data) / "tokenizer.json").vocab_size
            unique: float = open_shards(Path(train.data)).split("train").tokens
        else:
            with Work("reading the text"):
                corpus = open_corpus(train.data, train.heldout, template=asked_template(train), out=self.out)
                each = BYTES_PER_TOKEN
                if train.teacher or train.tokenizer != "bpe":
                    if train.teacher:
                        tokenizer = Tokenizer.load(checkpoint.run_of(Path(train.teacher)) / "tokenizer.json")
                    else:
                        tokenizer = made(train.tokenizer, corpus, vocab_size or largest_vocabulary(train))
                    vocab_size = (vocab_size if train.teacher else 0) or tokenizer.vocab_size
                    text = next(corpus.documents("train")).text
                    each = len(text.encode()) / max(1, len(tokenizer.encode(text)))  # none is refused later
                unique = size_of(corpus) / each
        if self.params:
            vocab_size = vocab_size or presets.vocabulary(self.params)
            return presets.solve(self.design, self.params, vocab_size=vocab_size, seq_len=train.seq_len)
        with Work("timing this machine"), memory_kept():  # as in the training that is timed
            return sized(self.design, budget, train, unique, _left(ends), vocab_size)

    def _sizes(self) -> dict[str, Any]:
        return {**self.sizes, **assignments(self.set)}

    def text(self) -> str:
        """The text to train on, by its full path: where none is named, that of the run whose weights are taken."""
        if self.train.init and "data" not in self.given:
            return with_encoding(describe(Path(self.train.init)).of_run("init").train.data, self.encoding)
        return absolute(with_encoding(self.train.data, self.encoding))

    def folder(self) -> Path:
        """The folder of a new run: --out, or the first free one that is called after the text."""
        if self.out is not None:
            return self.out
        name = label(self.text())
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(RUNS / free for free in names if not (RUNS / free).exists())

    def _resumed(self, run: Path) -> tuple[RunConfig, list[Path] | None]:
        """(the run's config, None), or what `extend` returns if more steps are asked for.

        ConfigError, naming the flag: one that asks for something else."""
        saved = resumed(run)
        typed = replace(self, resume=None, allow_changed=False, json=False, log="", given=(), began=0.0)
        typed = replace(typed, layout=Layout())
        changed = differences(typed, of_run(saved))
        steps, _ = changed.pop("--steps", (saved.train.steps, 0))
        for flag in changed:
            raise ConfigError(
                f"{flag} cannot be changed with --resume, which takes only a new --steps; "
                f"for a new run from its weights: --init {run} --out NEW"
            )
        return (saved, None) if steps == saved.train.steps else extend(run, steps)


def defaults(arguments: list[str]) -> Train:
    """The command whose values are the defaults of flags left out: those of a TOML file or of a run to resume, which
    the arguments name, else its own."""
    split = (a.split("=", 1) if a.startswith("--") else [a] for a in arguments)  # not names of folders
    values = dict(itertools.pairwise(itertools.chain.from_iterable(split)))
    if "--resume" in values:
        return of_run(resumed(Path(values["--resume"])))
    typed = [a[2:].partition("=")[0].replace("-", "_") for a in arguments if a.startswith("--")]
    known = from_toml(values["--config"]) if "--config" in values else Train()
    # a length that was typed takes the place of the file's
    kept = (name for name in known.given if name != "steps" or not set(LENGTHS) & set(typed))
    return replace(known, given=(*kept, *typed))


def resumed(run: Path) -> RunConfig:
    """The config of a run to resume. ConfigError for one of its checkpoints, and for an artifact."""
    whole = checkpoint.run_of(run)
    bound = f"the run's folder, {whole}: it resumes from the latest of its checkpoints"
    require(whole == run, "resume", str(run), bound)
    return describe(run).of_run("resume")


def of_run(config: RunConfig) -> Train:
    """The command that a run's config describes, except for the model."""
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
    model = tables.get("model", {})
    require(isinstance(model, dict), f"{path}: model", model, "a table")
    sizes = {key: value for key, value in model.items() if key != "preset"}
    preset = load(str, model.get("preset", ""), f"{path}: model.preset")
    train = load(TrainConfig, tables.get("train", {}), f"{path}: train")
    stages = load(StagedConfig, tables.get("staged", {}), f"{path}: staged")
    recipe: Literal["plain", "staged"] = "staged" if "staged" in tables else "plain"
    given = tables.get("train", {})
    names = (*given, *given.get("optim", {}))
    return Train(preset=preset, sizes=sizes, train=train, recipe=recipe, staged=stages, given=names)


def _left(ends: float | None) -> float:
    """Seconds of one process for the training until `ends`, a time of the monotonic clock. Several have so many times
    as much together, and what that leaves out the training itself corrects."""
    return math.inf if ends is None else (ends - time.monotonic() - CLOSING) * processes()
