"""The size of a model, its learning rate and its number of updates for a budget of minutes, tokens or passes over a
text."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron import presets
from perspectron.data import Corpus, Shards
from perspectron.data.loader import Batch
from perspectron.data.vocabulary import BYTES
from perspectron.eval.timing import Dtype, Setting, stepper, take_turns, timed
from perspectron.model.census import active_parameters
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.train import checkpoint, lora
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.distill import divergence
from perspectron.train.estimate import PER_LOGIT, PER_PARAMETER, precisions, room
from perspectron.train.optim import freeze
from perspectron.train.prepare import training_batches
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.machine import pick_device
from perspectron.util.terms import Term

SMALLEST, LARGEST = 200_000, 10**12  # parameters of a model that is chosen
FIRST = 500_000  # parameters of the model that is timed first
GROWTH = 0.8  # exponent with which time grows with the parameters, until a second size was timed
ROUNDS = 2  # of timing, after one that is left out
SLOW = 5.0  # seconds of an update that is timed once
ENOUGH = 64 << 20  # bytes of text that are counted
BYTES_PER_TOKEN = 3.0  # about: before there is a tokenizer
MEASURED = 8  # times that the loss is measured and a checkpoint written
SHARE_MEASURED = 0.05  # of the time of the updates, for these measurements
MOST_ROOM = (
    0.25  # of the memory there is, for what is known in advance: what layers keep of tokens comes on top
)
LEAST_UPDATES = 10
LARGEST_VOCABULARY = 65536  # of characters, where nothing is said


@dataclass(frozen=True)
class Budget:
    """Budget of a training, with exactly one field given. minutes: until all is done, on this machine. tokens: to train
    on. passes: over the text."""

    minutes: float | None = None
    tokens: int | None = None
    passes: float | None = None

    def __post_init__(self) -> None:
        least = "≥ 0.1: reading the text and timing this machine takes seconds"
        require(self.minutes is None or 0.1 <= self.minutes <= 1e6, "minutes", self.minutes, least)
        require(self.passes is None or 0 < self.passes <= 1e6, "epochs", self.passes, "> 0 and ≤ 1,000,000")


def largest_vocabulary(train: TrainConfig) -> int:
    """Largest vocabulary that may follow from the text alone: LARGEST_VOCABULARY, or what half of the memory allowed
    holds; the other half is for the weights."""
    there = MOST_ROOM * room(pick_device(train.device)) / 2
    each = PER_LOGIT * train.batch_size * train.seq_len
    return max(BYTES, min(LARGEST_VOCABULARY, int(there / each)))


def size_of(text: Corpus) -> int:
    """Bytes of a text to train on: counted up to ENOUGH, and after that estimated from the share that was read."""
    total = 0
    for document in text.documents("train"):
        total += len(document.text.encode())
        if total >= ENOUGH:
            return round(total / document.share) if document.share else total
    return total


def sized(
    design: str, budget: Budget, train: TrainConfig, unique: float, seconds: float, vocab_size: int
) -> ModelConfig:
    """The design as large as the budget can train: on TOKENS_PER_PARAMETER tokens a parameter, of which there are at
    most PASSES times the `unique` ones. seconds: what is left of the budget's minutes. vocab_size: 0 follows from the
    parameters; a given one may need a larger model than the budget would take."""

    def model(params: float) -> ModelConfig:
        size = int(float(f"{max(params, SMALLEST):.2g}"))
        vocabulary = vocab_size or presets.vocabulary(size)
        try:
            return presets.solve(design, size, vocab_size=vocabulary, seq_len=train.seq_len)
        except ConfigError:
            if size > LARGEST:
                raise
            return model(1.5 * size)

    ratio = presets.TOKENS_PER_PARAMETER
    most = presets.PASSES * unique / ratio
    if most <= SMALLEST:  # whatever the time
        params = most
    elif budget.minutes is None:
        tokens = unique * budget.passes if budget.passes is not None else float(budget.tokens or 0)
        params = tokens / ratio
    else:
        params = _in_time(model, train, seconds)
    params = min(params, most)
    batch, there = train.batch_size * train.seq_len, room(pick_device(train.device))
    while params > SMALLEST:
        needs = PER_PARAMETER * params + PER_LOGIT * batch * (vocab_size or presets.vocabulary(int(params)))
        if needs < MOST_ROOM * there:
            break
        params /= 2
    return model(params)


def _in_time(model: Callable[[float], ModelConfig], train: TrainConfig, seconds: float) -> float:
    """Parameters for which TOKENS_PER_PARAMETER are read in so many seconds, by timing two sizes here."""
    tokens = max(seconds, 1.0) * train.batch_size * train.seq_len  # none may be left: `settled` says so
    whole = tokens * train.accumulate / presets.TOKENS_PER_PARAMETER

    def timed(params: float) -> tuple[int, float]:
        made = model(params)
        return active_parameters(made), seconds_of(made, train)

    size, each = timed(FIRST)
    params = (whole * size**GROWTH / each) ** (1 / (1 + GROWTH))
    if 2 / 3 < params / size < 3 / 2:
        return params
    second, its = timed(params)
    if second == size:  # the smallest there is
        return params
    growth = min(max(math.log(its / each) / math.log(second / size), 0.2), 1.5)
    return (whole * second**growth / its) ** (1 / (1 + growth))


def seconds_of(model: ModelConfig, train: TrainConfig) -> float:
    """Seconds of an update here, measured on a few, or on a single one that takes SLOW or longer."""
    device = pick_device(train.device)
    setting = Setting(train.batch_size, train.seq_len, train.device)
    step = stepper(model, setting, train.optim, partial(_as_in, train), _teaching(train, device))
    dtypes: list[Dtype] = precisions(device) if train.dtype == "auto" else [train.dtype]
    turns = {dtype: timed(partial(step, dtype), device) for dtype in dtypes}
    found = min(turn() for turn in turns.values())
    if found < SLOW:
        found = min(map(min, take_turns(turns, ROUNDS, warmup=0).values()))
    return found * train.accumulate


def _teaching(train: TrainConfig, device: torch.device) -> Callable[[Tensor, Tensor], Term] | None:
    """The term of distillation for logits and the ids that gave them, by a model of the teacher's shape."""
    if not train.teacher:
        return None
    config = checkpoint.load_config(checkpoint.run_of(Path(train.teacher))).model
    most = config.positions or train.seq_len
    require(train.seq_len <= most, "seq_len", train.seq_len, f"≤ {most}, positions of {train.teacher}")
    teacher = build(config).to(device).requires_grad_(False).eval()

    def term(logits_BTV: Tensor, ids_BT: Tensor) -> Term:
        its_BTV = teacher(ids_BT % config.vocab_size).logits
        shared = min(config.vocab_size, logits_BTV.shape[-1])
        student_NV, teacher_NV = (x_BTV[..., :shared].flatten(0, 1) for x_BTV in (logits_BTV, its_BTV))
        return Term(divergence(student_NV, teacher_NV, train.teacher_temperature), weight=1.0)

    return term


def _as_in(train: TrainConfig, model: LanguageModel, ids_BT: Tensor) -> None:
    """Let a model learn what it does in this training, and recompute what it does."""
    model.recompute = train.recompute
    freeze(model, train.only)
    if train.lora:
        starts_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        lora.adapt(model, lora.LoraConfig.parse(train.lora), Batch(ids_BT, ids_BT, starts_BT, ids_BT.numel()))


def settled(
    config: RunConfig, given: frozenset[str], budget: Budget, text: Shards, seconds: float
) -> RunConfig:
    """The config with all that is not `given`: the number of updates from the budget, the learning rate unless it
    starts from the weights of a run, the warm-up, and how often the loss is measured. seconds: what is left of the
    budget's minutes. ConfigError where they are not enough for LEAST_UPDATES."""
    train = config.train
    batch, steps = train.batch_size * train.seq_len * train.accumulate, train.steps
    if budget.minutes is not None:
        each = seconds_of(config.model, train)
        steps = int(seconds / (each * (1 + SHARE_MEASURED)))
        spent = 60 * budget.minutes - seconds
        bound = f"≥ {(spent + 2 * LEAST_UPDATES * each) / 60:.1f}: an update takes {each:.2g} s here"
        require(steps >= LEAST_UPDATES, "minutes", f"{budget.minutes:g}", bound)
    else:
        tokens: float = budget.tokens or 0
        if budget.passes is not None:
            tokens = budget.passes * training_batches(config, text).windows * train.seq_len
        steps = math.ceil(tokens / batch)
    every = max(1, -(-steps // MEASURED))
    found: dict[str, Any] = {
        "eval_every": every,
        "save_every": every,
        "eval_tokens": min(65536, max(8192, round(SHARE_MEASURED * 3 / MEASURED * steps * batch))),
    }
    found = {name: value for name, value in found.items() if name not in given}
    rates: dict[str, Any] = {"warmup": presets.warmup(steps)}
    if not train.init:
        rates["lr"] = presets.rate(presets.design_of(config.model), active_parameters(config.model))
    rates = {name: value for name, value in rates.items() if name not in given}
    if "groups" not in given and not train.lora:
        rates["groups"] = "own"
    optim = replace(train.optim, **rates)
    return replace(config, train=replace(train, steps=steps, optim=optim, **found))
