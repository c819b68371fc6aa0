"""The plan of a comparison: its arms, each a model, and the training of each, matched as asked.

An arm is a design or, in an ablation, a design with a part removed. The plan is made once, kept in DIR/compare.json,
and determines everything that follows.
"""

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perspectron import presets
from perspectron.data import Shards, Tokenizer, encode, is_encoded, made_in, open_corpus, open_shards
from perspectron.data.loader import Loader
from perspectron.data.vocabulary import BYTES, KINDS
from perspectron.eval.suites import BESIDE_LOSS
from perspectron.eval.timing import Setting, seconds_per_step
from perspectron.model.census import census, state_bytes
from perspectron.model.config import ModelConfig
from perspectron.model.model import build, shape_of
from perspectron.train.config import TrainConfig
from perspectron.train.estimate import faster
from perspectron.train.optim import OptimConfig, recipe_of
from perspectron.util.config import at_least, dump, load, meant_beside, one_of, require
from perspectron.util.errors import ConfigError, DataError, escaped
from perspectron.util.files import LOCK, read_json, remove, safe_join, sweep, write_json
from perspectron.util.machine import pick_device, threads_of

VERSION = 2
PLAN, DATA, ASKED = "compare.json", "data", "asked.json"
STUDY = "scale.json"  # of `perspectron scale`, which has comparisons in folders of its own
REFERENCE = "transformer"  # the arm that others are matched to, if it is one of them
CURVE_TOKENS = 32768  # measured during training
FEW = 4  # windows of held-out text; of fewer the user hears
ROUNDS = 4  # of timing, after one that is left out
Models = dict[str, tuple[ModelConfig, str, str]]
"""Arms by name: the model, one line about it, and its source."""


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison as the user gives them. Every arm has the same parameters, tokens and seeds. With
    `match` "flops" or "time", each arm gets as many tokens as fit into the FLOPs or time that the transformer (or else
    the first arm) needs for `tokens`; with "state", as many bytes of state as the first arm, or `state` if not 0. dev:
    share of the text on which rates are chosen and curves drawn; the held-out text is read once, at the end.
    vocab_size: 0 derives it from the parameters. rates, warmups: peak learning rates and warm-up shares; all pairs are
    tried on `rate_share` of the tokens, shares with equally long warm-ups there once, and a single pair is used without
    a trial. threads: per training; 0 leaves it open. suites: measured after training in addition to the loss. recall:
    "quick" is two tasks with one seed, "full" all with three, "long" many pairs, long texts and facts that are
    combined, with one. tokenizer: as in a training, for text that is not encoded yet."""

    arms: tuple[str, ...]
    params: int
    tokens: int
    seeds: int = 3
    data: str = "stdlib"
    heldout: float = 0.05
    dev: float = 0.05
    match: Literal["tokens", "flops", "time", "state"] = "tokens"
    vocab_size: int = 0
    seq_len: int = 256
    batch_size: int = 8
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    warmups: tuple[float, ...] = (0.05, 0.2)
    rate_share: float = 0.1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    threads: int = 0
    suites: tuple[str, ...] = BESIDE_LOSS
    recall: Literal["quick", "full", "long"] = "quick"
    state: int = 0
    tokenizer: str = "bpe"

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, "designs", self.arms, "one or more")
        for arm in self.arms:
            require(self.arms.count(arm) == 1, "designs", arm, "named once")
        at_least(1, self, "params", "seeds", "seq_len", "batch_size")
        require(self.state >= 0, "state", self.state, "≥ 0")
        require(
            self.state == 0 or self.match == "state", "state", self.state, "left out unless match is state"
        )
        least = self.seq_len * self.batch_size
        require(self.tokens >= least, "tokens", self.tokens, f"≥ {least}, one batch")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        rest = f"in [0, {1 - self.heldout:g}), the share that is not held out"
        require(0 <= self.dev < 1 - self.heldout, "dev", self.dev, rest)
        made = self.tokenizer in KINDS and not is_encoded(self.data)
        room = self.vocab_size == 0 or self.vocab_size >= BYTES or not made
        require(room, "vocab_size", self.vocab_size, "≥ 257 (256 bytes and the end of a text), or 0")
        require(len(self.rates) >= 1 and min(self.rates) > 0, "rates", self.rates, "one or more numbers > 0")
        shares = len(self.warmups) >= 1 and min(self.warmups) >= 0 and max(self.warmups) <= 1
        require(shares, "warmups", self.warmups, "one or more numbers in [0, 1]")
        choices = len(self.rates) * len(self.warmups)
        bound = f"> 0: {choices} rates and warm-ups are chosen on it"
        require(choices == 1 or self.dev > 0, "dev", self.dev, bound)
        require(0 < self.rate_share <= 1, "rate_share", self.rate_share, "in (0, 1]")
        require(self.threads >= 0, "threads", self.threads, "≥ 0")
        for suite in self.suites:
            one_of(suite, BESIDE_LOSS, "suites")

    @property
    def batch_tokens(self) -> int:
        return self.seq_len * self.batch_size


@dataclass(frozen=True)
class Arm:
    """A model and its training. steps: updates. train_flops_per_token: forward and backward, as three times the FLOPs
    of reading a token at half the context. optim: its optimizer, without the rate; None is AdamW with plain groups."""

    model: ModelConfig
    steps: int
    train_flops_per_token: float
    about: str
    source: str
    optim: OptimConfig | None = None


@dataclass(frozen=True)
class Plan:
    """Arms and settings of a comparison, with all open settings resolved. text: fingerprints of the encoded text; ids:
    the digest of its ids; both "" in older files."""

    kind: Literal["designs", "ablations", "search"]
    settings: Settings
    arms: dict[str, Arm]
    text: str = ""
    ids: str = ""

    @property
    def reference(self) -> str:
        return REFERENCE if REFERENCE in self.arms else next(iter(self.arms))


def prepare(out: Path, settings: Settings) -> tuple[Tokenizer, Shards]:
    """Tokenizer and ids of the text: DIR/data, made once, or the folder that `tokenize` wrote.

    DataError for text that cannot be read or is too short for one window.
    """
    folder = data_of(out, settings)
    if folder == Path(settings.data):
        bound = f"left out: {folder} is encoded, and its split is that of `tokenize`"
        require(settings.heldout == Settings.heldout, "heldout", settings.heldout, bound)
        require(settings.dev in (0, Settings.dev), "dev", settings.dev, bound)
    new = not (folder / "manifest.json").is_file()
    if new:
        corpus = open_corpus(settings.data, settings.heldout, dev=settings.dev, out=out)
        size = settings.vocab_size or presets.vocabulary(settings.params)
        encode(corpus, made_in(folder, settings.tokenizer, corpus, size), folder)
        for line in corpus.notes():
            print(f"perspectron: {escaped(line)}", file=sys.stderr)
    tokenizer, shards = Tokenizer.load(folder / "tokenizer.json"), open_shards(folder)
    Loader(shards.split("train"), batch_size=1, seq_len=settings.seq_len, seed=0)
    bound = (
        f"0: {folder} has no dev split; give one rate and one warm-up, or encode it with tokenize --dev 0.05"
    )
    require(settings.dev == 0 or "dev" in shards.splits, "dev", settings.dev, bound)
    tokens = shards.split("dev").tokens if settings.dev else settings.seq_len
    if tokens < settings.seq_len:
        bound = f"{settings.dev * settings.seq_len / tokens:.2g} or above: it has {tokens} tokens"
        raise DataError(f"dev = {settings.dev:g}, must be {bound}, and a window has {settings.seq_len}")
    heldout = shards.split("heldout").tokens
    if new and heldout < FEW * settings.seq_len:
        print(
            f"perspectron: the held-out text has {heldout:,} tokens, fewer than {FEW} windows; intervals are over "
            "seeds and do not say what another text would give: hold out more with --heldout, or give more text",
            file=sys.stderr,
        )
    return tokenizer, shards


def data_of(out: Path, settings: Settings) -> Path:
    """Folder of the tokenised text."""
    return Path(settings.data) if is_encoded(settings.data) else safe_join(out, DATA, ConfigError)


def vocabulary_in(data: str, asked: int) -> int:
    """Size of the vocabulary: as asked for, or that of tokenised text. ConfigError where the two differ."""
    if not is_encoded(data):
        return asked
    has = Tokenizer.load(Path(data) / "tokenizer.json").vocab_size
    require(asked in (0, has), "vocab_size", asked, f"{has}, that of {data}, or left out")
    return has


def plan(
    out: Path,
    kind: Literal["designs", "ablations", "search"],
    settings: Settings,
    models: Callable[[Settings], Models],
    threads: int,
    optim: OptimConfig | None = None,
) -> Plan:
    """Plan that is kept in `out`, made if there is none. models: makes the arms from settled settings. threads: per
    training, where the settings leave them open. optim: of all arms, where their names do not say it.

    ConfigError for a folder of another version or with other settings.
    """
    if (out / PLAN).is_file():
        known = read(out)
        _same(out, known, kind, settings)
        size = next(iter(known.arms.values())).model.vocab_size
        for name, (model, _, _) in models(replace(known.settings, vocab_size=size)).items():
            same = model == known.arms[name].model
            require(same, "out", str(out), f"a new folder: {name} is a different model there")
        for name, arm in known.arms.items():
            same = optim is None or (arm.optim or OptimConfig()).optimizer == optim.optimizer
            require(same, "out", str(out), f"a new folder: {name} is trained by another optimizer there")
        return known
    require(
        not (out / STUDY).is_file(), "out", str(out), "another folder: a study of perspectron scale is there"
    )
    size = settings.vocab_size or presets.vocabulary(settings.params)
    settings = replace(settings, vocab_size=size, threads=settings.threads or threads)
    clear(out, settings)
    tokenizer, shards = prepare(out, settings)
    made = models(replace(settings, vocab_size=tokenizer.vocab_size))  # little text has fewer
    with threads_of(settings.threads):  # as the trainings will, whose dtype and steps follow from timings
        settings = replace(settings, dtype=_dtype(settings, made, shards))
        flops = {name: _train_flops(model, settings) for name, (model, _, _) in made.items()}
        steps = _steps(settings, {name: model for name, (model, _, _) in made.items()}, flops)
    arms = {
        name: Arm(model, steps[name], flops[name], about, source, optim or optimizer_in(name, model))
        for name, (model, about, source) in made.items()
    }
    dumped = {
        "kind": kind,
        "settings": dump(settings),
        "arms": {name: dump(arm) for name, arm in arms.items()},
        "text": (text := _text(shards)),
        "ids": shards.digest,
    }
    write_json(out / PLAN, {"version": VERSION} | dumped)
    return Plan(kind, settings, arms, text, shards.digest)


def clear(out: Path, settings: Settings) -> None:
    """Delete text in `out` that a comparison encoded for other settings and stopped before it had a plan."""
    folder = safe_join(out, DATA, ConfigError)
    path = folder / ASKED
    if not path.is_file() or read_json(path, ConfigError) != asked(settings):
        sweep(folder)  # what a killed process left
        empty = folder.is_dir() and not {entry.name for entry in folder.iterdir()} - {LOCK}
        ours = path.is_file() or empty or not os.path.lexists(folder)
        require(ours, "out", str(out), f"another folder: {folder} exists, and no comparison made it")
        remove(folder)
        folder.mkdir(parents=True)
        write_json(path, asked(settings))


def asked(settings: Settings) -> dict[str, Any]:
    """The settings that the text in a folder is encoded for."""
    return {name: getattr(settings, name) for name in ("data", "heldout", "dev", "vocab_size", "tokenizer")}


def read(out: Path) -> Plan:
    """Plan in a folder. ConfigError when there is none, or one of another version or text."""
    if not (out / PLAN).exists():
        raise ConfigError(f"no comparison at {out}{meant_beside(out)}")
    content = read_json(out / PLAN, ConfigError)
    version = content.pop("version", None) if isinstance(content, dict) else None
    bound = f"{VERSION}, this program's version: choose a new folder, or use the program that wrote it"
    require(version == VERSION, f"{out / PLAN}: version", version, bound)
    result: Plan = load(Plan, content, str(out / PLAN))
    folder = data_of(out, result.settings)
    if result.text and (folder / "manifest.json").is_file():
        now = open_shards(folder, verify=False)
        same = now.digest == result.ids or _text(now) == result.text
        require(same, f"{folder}: text", _text(now), f"{result.text} as in {out / PLAN}")
    return result


def _text(shards: Shards) -> str:
    return f"{shards.corpus_fingerprint} by tokenizer {shards.tokenizer_fingerprint}"


def _same(out: Path, known: Plan, kind: str, asked: Settings) -> None:
    """ConfigError that names the first setting in which the two differ; a setting left open matches any."""
    require(known.kind == kind, f"{out}: kind", kind, known.kind)
    have, want = dump(known.settings), dump(asked)
    for name, value in want.items():
        open_now = (name in ("vocab_size", "threads") and value == 0) or value == "auto"
        same = open_now or value == have[name]
        require(same, name, value, f"{have[name]} as in {out / PLAN}, or give a new folder as --out")


def models_of_designs(settings: Settings) -> Models:
    """Models of the designs at the budget. ConfigError for an unknown design, or a budget that it cannot meet."""
    made, state = Models(), settings.state or None
    budget = {
        "vocab_size": settings.vocab_size or presets.vocabulary(settings.params),
        "seq_len": settings.seq_len,
    }
    for name in settings.arms:
        design, _ = presets.variant(name)
        model = presets.solve(name, settings.params, **budget, state=state)
        vocabulary, positions = budget["vocab_size"], model.positions
        bound = f"left out: every design has the {vocabulary} tokens of the text"
        require(model.vocab_size == vocabulary, f"{name}: vocab_size", model.vocab_size, bound)
        bound = f"≥ seq_len = {settings.seq_len}"
        require(positions == 0 or positions >= settings.seq_len, f"{name}: positions", positions, bound)
        if settings.match == "state" and state is None:
            state = state_bytes(model, settings.seq_len)
            bound = f"a design with a fixed-size state; {name}'s grows with the text"
            require(state is not None, "the first of designs", name, bound)
        made[name] = (model, design.about, design.source)
    return made


def optimizer_in(name: str, model: ModelConfig) -> OptimConfig:
    """The optimizer that an arm's name asks for, as in transformer[optimizer=muon]; else AdamW, with the groups of the
    mixers' authors. ConfigError for groups of a mixer that the model lacks."""
    config: OptimConfig = load(OptimConfig, {"groups": "own"} | presets.training(name), name)
    recipe_of(shape_of(model), config.groups)
    return config


def check_designs(settings: Settings) -> None:
    """ConfigError for a design that is unknown, cannot meet the budget, or asks for a recipe that is not its own."""
    for name, (model, *_) in models_of_designs(settings).items():
        optimizer_in(name, model)


def train_config(
    out: Path,
    settings: Settings,
    steps: int,
    seed: int,
    rate: float,
    warmup: float,
    measured: int,
    optim: OptimConfig | None = None,
) -> TrainConfig:
    """Training settings of a cell that is measured and saved `measured` times. warmup: share of the updates."""
    every = max(1, -(-steps // measured))
    return TrainConfig(
        data=str(data_of(out, settings).resolve()), heldout=settings.heldout,
        measured_on="dev" if settings.dev else "heldout", steps=steps,
        batch_size=settings.batch_size, seq_len=settings.seq_len, seed=seed, dtype=settings.dtype,
        device=settings.device, eval_every=every, eval_tokens=CURVE_TOKENS, save_every=every, keep=1,
        optim=replace(optim or OptimConfig(), lr=rate, warmup=warm_up(warmup, steps)),
    )  # fmt: skip


def warm_up(share: float, steps: int) -> int:
    """Updates of a warm-up that is a share of all."""
    return max(1, round(share * steps))


def _train_flops(model: ModelConfig, settings: Settings) -> float:
    (flops,) = census(model, [max(1, settings.seq_len // 2)]).flops_per_token.values()
    return 3.0 * flops


def _dtype(settings: Settings, made: Models, shards: Shards) -> Literal["float32", "bfloat16"]:
    """Number format of all arms; measured on the reference where it was left open."""
    if settings.dtype != "auto":
        return settings.dtype
    model = made.get(REFERENCE, next(iter(made.values())))[0]
    device = pick_device(settings.device)
    size, length = settings.batch_size, settings.seq_len
    batch = Loader(shards.split("train"), batch_size=size, seq_len=length, seed=0).next_batch()
    return faster(build(model).to(device), batch, device)


def _steps(settings: Settings, models: dict[str, ModelConfig], flops: dict[str, float]) -> dict[str, int]:
    """Updates of each model, such that what `match` names is equal."""
    whole = -(-settings.tokens // settings.batch_tokens)
    if settings.match in ("tokens", "state"):
        return dict.fromkeys(models, whole)
    cost = flops if settings.match == "flops" else _seconds(settings, models)
    reference = REFERENCE if REFERENCE in models else next(iter(models))
    return {name: max(1, round(whole * cost[reference] / cost[name])) for name in models}


def _seconds(settings: Settings, models: dict[str, ModelConfig]) -> dict[str, float]:
    """Median seconds of an update of each model, all taking turns."""
    assert settings.dtype != "auto"
    setting = Setting(settings.batch_size, settings.seq_len, settings.device)
    optims = {name: optimizer_in(name, model) for name, model in models.items()}
    seconds = seconds_per_step(models, setting, [settings.dtype], ROUNDS, optims)
    return {name: statistics.median(times[settings.dtype]) for name, times in seconds.items()}


def threads_for(jobs: int) -> int:
    """Threads per training: OMP_NUM_THREADS, or such that so many trainings at once fill the processors."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # of nested levels, the outermost
    if first.isdecimal() and int(first):
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // jobs) if hasattr(os, "sched_getaffinity") else 1
