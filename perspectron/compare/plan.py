"""What a comparison trains: its arms, each a model, and how long each is trained, so that they match.

An arm is a design, or in an ablation one design with a part removed. The plan is made once, kept in DIR/compare.json,
and decides everything after it.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from perspectron import designs
from perspectron.census import census
from perspectron.config import ModelConfig, dump, load, one_of, require
from perspectron.data import Loader, Shards, Tokenizer, encode, open_corpus, open_shards
from perspectron.device import pick_device
from perspectron.errors import ConfigError
from perspectron.eval.suites import BESIDE_LOSS
from perspectron.files import read_json, remove, write_json
from perspectron.model import build
from perspectron.optim import OptimConfig, adamw
from perspectron.train.config import TrainConfig
from perspectron.train.precision import autocast, faster

VERSION = 1
PLAN, DATA, ASKED = "compare.json", "data", "asked.json"
REFERENCE = "transformer"  # what others are matched to, where it is an arm
CURVE_TOKENS = 32768  # held-out tokens measured on the way
LEAST_VOCABULARY = 512
WARMUP = 50  # updates, where that is no more than a quarter of all
ROUNDS = 5  # of timing, the first left out
Models = dict[str, tuple[ModelConfig, str, str]]
"""By arm: the model, what it is in a line, and where it comes from."""


@dataclass(frozen=True)
class Settings:
    """What was asked for. Parameters, tokens and seeds are those of every arm; `match` "flops" or "time" keeps those
    of the transformer (or of the first arm) at `tokens` tokens instead, and gives each arm as many tokens as they
    buy. vocab_size: 0 follows from the parameters. rates: peak learning rates tried, on `rate_share` of the tokens;
    a single one is taken as it is. threads: of each training; 0 is open. suites: measured afterwards,
    beside the loss. recall: two tasks with one seed, or all with three."""

    arms: tuple[str, ...]
    params: int
    tokens: int
    seeds: int = 3
    data: str = "stdlib"
    heldout: float = 0.05
    match: Literal["tokens", "flops", "time"] = "tokens"
    vocab_size: int = 0
    seq_len: int = 256
    batch_size: int = 8
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    rate_share: float = 0.1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    threads: int = 0
    suites: tuple[str, ...] = BESIDE_LOSS
    recall: Literal["quick", "full"] = "quick"

    def __post_init__(self) -> None:
        require(len(self.arms) >= 1, "designs", self.arms, "one or more")
        for arm in self.arms:
            require(self.arms.count(arm) == 1, "designs", arm, "named once")
        for name in ("params", "seeds", "seq_len", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        least = self.seq_len * self.batch_size
        require(self.tokens >= least, "tokens", self.tokens, f"≥ {least}, one batch")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        room = self.vocab_size == 0 or self.vocab_size >= 257
        require(room, "vocab_size", self.vocab_size, "≥ 257, a byte each and the end of a text; or 0")
        require(len(self.rates) >= 1 and min(self.rates) > 0, "rates", self.rates, "one or more numbers > 0")
        require(0 < self.rate_share <= 1, "rate_share", self.rate_share, "in (0, 1]")
        require(self.threads >= 0, "threads", self.threads, "≥ 0")
        for suite in self.suites:
            one_of(suite, BESIDE_LOSS, "suites")

    @property
    def batch_tokens(self) -> int:
        return self.seq_len * self.batch_size


@dataclass(frozen=True)
class Arm:
    """steps: updates. train_flops_per_token: three times those of reading a token at half the context."""

    model: ModelConfig
    steps: int
    train_flops_per_token: float
    about: str
    source: str


@dataclass(frozen=True)
class Plan:
    """kind: whether the arms are designs or one design's ablations. settings: with all that was open settled."""

    kind: Literal["designs", "ablations"]
    settings: Settings
    arms: dict[str, Arm]

    @property
    def reference(self) -> str:
        return REFERENCE if REFERENCE in self.arms else next(iter(self.arms))


def vocabulary(params: int) -> int:
    """The largest power of two whose square is at most four times the parameters: 2048 at 2 M, 8192 at 20 M."""
    size = LEAST_VOCABULARY
    while (2 * size) ** 2 <= 4 * params:
        size *= 2
    return size


def prepare(out: Path, settings: Settings) -> tuple[Tokenizer, Shards]:
    """The text as ids: DIR/data, made once, or the folder that `tokenize` wrote.

    DataError as the data room raises it, and for a text too short for one window.
    """
    folder = data_of(out, settings)
    if not (folder / "manifest.json").is_file():
        corpus, kept = open_corpus(settings.data, settings.heldout), folder / "tokenizer.json"
        if not kept.is_file():
            texts = (document.text for document in corpus.documents("train"))
            Tokenizer.train(texts, settings.vocab_size or vocabulary(settings.params)).save(kept)
        encode(corpus, Tokenizer.load(kept), folder)
    tokenizer, shards = Tokenizer.load(folder / "tokenizer.json"), open_shards(folder)
    Loader(shards.split("train"), batch_size=1, seq_len=settings.seq_len, seed=0)
    return tokenizer, shards


def data_of(out: Path, settings: Settings) -> Path:
    """The folder with the tokenised text."""
    given = Path(settings.data)
    return given if (given / "manifest.json").is_file() else out / DATA


def plan(
    out: Path,
    kind: Literal["designs", "ablations"],
    settings: Settings,
    models: Callable[[Settings], Models],
    threads: int,
) -> Plan:
    """The plan in `out`, or a new one that is kept there. models: of settled settings.
    threads: of each training, where the settings leave them open.

    ConfigError for a folder of another version or of other settings, and as the models raise it.
    """
    if (out / PLAN).is_file():
        known = read(out)
        _same(out, known, kind, settings)
        size = next(iter(known.arms.values())).model.vocab_size
        for name, (model, _, _) in models(replace(known.settings, vocab_size=size)).items():
            same = model == known.arms[name].model
            require(same, "out", str(out), f"a new folder: {name} is another model there")
        return known
    size = settings.vocab_size or vocabulary(settings.params)
    settings = replace(settings, vocab_size=size, threads=settings.threads or threads)
    _clear(out, settings)
    tokenizer, shards = prepare(out, settings)
    made = models(replace(settings, vocab_size=tokenizer.vocab_size))  # little text has fewer
    with _threads(settings.threads):
        settings = replace(settings, dtype=_dtype(settings, made, shards))
        flops = {name: _train_flops(model, settings) for name, (model, _, _) in made.items()}
        steps = _steps(settings, {name: model for name, (model, _, _) in made.items()}, flops, shards)
    arms = {
        name: Arm(model, steps[name], flops[name], about, source)
        for name, (model, about, source) in made.items()
    }
    result = Plan(kind, settings, arms)
    write_json(out / PLAN, {"version": VERSION} | dump_plan(result))
    return result


def _clear(out: Path, settings: Settings) -> None:
    """Delete text in `out` that was encoded for other settings, by one that never came to a plan."""
    asked = {"data": settings.data, "heldout": settings.heldout, "vocab_size": settings.vocab_size}
    path = out / DATA / ASKED
    if not path.is_file() or read_json(path, ConfigError) != asked:
        remove(out / DATA)
        path.parent.mkdir(parents=True)
        write_json(path, asked)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many as trainings have, so that what is timed here is what they will do."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dump_plan(value: Plan) -> dict[str, object]:
    """As plain JSON values."""
    arms = {name: dump(arm) for name, arm in value.arms.items()}
    return {"kind": value.kind, "settings": dump(value.settings), "arms": arms}


def read(out: Path) -> Plan:
    """The plan in a folder. ConfigError when there is none, or one of another version."""
    found = read_json(out / PLAN, ConfigError)
    version = found.pop("version", None) if isinstance(found, dict) else None
    bound = f"{VERSION}, that of this program: choose a new folder, or the program that wrote it"
    require(version == VERSION, f"{out / PLAN}: version", version, bound)
    result: Plan = load(Plan, found, str(out / PLAN))
    return result


def _same(out: Path, known: Plan, kind: str, asked: Settings) -> None:
    """ConfigError that names the first setting in which the two differ; what was left open in one fits."""
    require(known.kind == kind, f"{out}: kind", kind, known.kind)
    have, want = dump(known.settings), dump(asked)
    for name, value in want.items():
        open_now = (name in ("vocab_size", "threads") and value == 0) or value == "auto"
        same = open_now or value == have[name]
        require(same, name, value, f"{have[name]} as in {out / PLAN}, or out a new folder")


def models_of_designs(settings: Settings) -> Models:
    """The designs at the budget. ConfigError for an unknown one or a budget that does not do."""
    made = {}
    for name in settings.arms:
        model = designs.solve(
            one_of(name, designs.DESIGNS, "designs"),
            settings.params,
            vocab_size=settings.vocab_size or vocabulary(settings.params),
            seq_len=settings.seq_len,
        )
        made[name] = (model, designs.DESIGNS[name].about, designs.DESIGNS[name].source)
    return made


def train_config(
    out: Path, settings: Settings, steps: int, seed: int, rate: float, measured: int
) -> TrainConfig:
    """How a cell is trained: measured and saved so many times, warmed up over a twentieth of its updates, of short
    trainings over more: after 12 of 245 a perspective model may stay at 3.01 bits per byte that has 2.41 after 50."""
    every = max(1, -(-steps // measured))
    return TrainConfig(
        data=str(data_of(out, settings).resolve()), heldout=settings.heldout, steps=steps,
        batch_size=settings.batch_size, seq_len=settings.seq_len, seed=seed, dtype=settings.dtype,
        device=settings.device, eval_every=every, eval_tokens=CURVE_TOKENS, save_every=every, keep=1,
        optim=OptimConfig(lr=rate, warmup=warmup(steps)),
    )  # fmt: skip


def warmup(steps: int) -> int:
    return max(1, steps // 20, min(WARMUP, steps // 4))


def _train_flops(model: ModelConfig, settings: Settings) -> float:
    (flops,) = census(model, [max(1, settings.seq_len // 2)]).flops_per_token.values()
    return 3.0 * flops


def _dtype(settings: Settings, made: Models, shards: Shards) -> Literal["float32", "bfloat16"]:
    """One for all arms: measured on the reference, where it was left open."""
    if settings.dtype != "auto":
        return settings.dtype
    model = made.get(REFERENCE, next(iter(made.values())))[0]
    device = pick_device(settings.device)
    batch = _loader(settings, shards).next_batch()
    return faster(build(model).to(device), batch, device)


def _steps(
    settings: Settings, models: dict[str, ModelConfig], flops: dict[str, float], shards: Shards
) -> dict[str, int]:
    whole = -(-settings.tokens // settings.batch_tokens)
    if settings.match == "tokens":
        return dict.fromkeys(models, whole)
    cost = flops if settings.match == "flops" else seconds_per_step(settings, models, shards)
    reference = REFERENCE if REFERENCE in models else next(iter(models))
    return {name: max(1, round(whole * cost[reference] / cost[name])) for name in models}


def seconds_per_step(settings: Settings, models: dict[str, ModelConfig], shards: Shards) -> dict[str, float]:
    """Of an update of each model: medians of rounds in which all take turns."""
    device, batch = pick_device(settings.device), _loader(settings, shards).next_batch()
    ids, targets = batch.ids_BT.to(device), batch.targets_BT.to(device)
    built = {name: build(model).to(device) for name, model in models.items()}
    optimizers = {name: adamw(model, OptimConfig()) for name, model in built.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in built.items():
            start = time.perf_counter()
            with autocast(device, settings.dtype):
                loss = model(ids, targets=targets).objective()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _loader(settings: Settings, shards: Shards) -> Loader:
    return Loader(shards.split("train"), batch_size=settings.batch_size, seq_len=settings.seq_len, seed=0)


def threads_for(jobs: int) -> int:
    """Of each of so many trainings at once, so that together they fill the processors."""
    return max(1, len(os.sched_getaffinity(0)) // jobs) if hasattr(os, "sched_getaffinity") else 1
