"""The config of a conversion, and the lengths and rates of its stages."""

import math
from dataclasses import dataclass, field

import torch

from perspectron import presets
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, shape_of
from perspectron.train.config import TrainConfig
from perspectron.train.estimate import PER_LOGIT, PER_PARAMETER, parameters, room
from perspectron.train.optim import OptimConfig
from perspectron.util.config import at_least, one_of, require

LAYERS, WHOLE, TEXT = "layers", "whole", "text"
SHARES = {LAYERS: 0.3, WHOLE: 0.5, TEXT: 0.2}
"""Shares of the tokens or the time, by stage. Not tuned."""
RATES = {LAYERS: 1.0, WHOLE: 0.03, TEXT: 0.01}
"""Factors of the learning rate for training the target from scratch. The best of those tried on one seed of `sources`
and one of `prose` (2 M parameters, 400,000 tokens; docs/lab-notes.md)."""
LONGER = 4  # windows of the other stages in one of the last stage, at most
WINDOW = 512  # tokens in a window, for models that do not say how they were trained
BATCH = 8
LEAST_UPDATES = 8  # of a stage
ENOUGH = 32  # updates of the last stage, before its windows are made longer
UPDATES = 1536  # of all stages: batches are made smaller for as many
MOST_ROOM = 0.15  # of the memory there is, for logits


@dataclass(frozen=True)
class ConvertConfig:
    """teacher: the run to convert. to: a design whose recurrence takes over, such as perspective2. keep: one attention
    layer in so many is kept; 0 keeps none. window: of attention that is kept; 0 leaves it as it is. tokens: of all
    stages; 0 where `minutes` says how long. seq_len, batch_size: of the first two stages; with `minutes` the batch
    becomes smaller if so many updates do not fit. shares, rates: by stage, `SHARES` and `RATES` of the version that
    began it. template: "own", "plain" or a file where the text has prompts and completions. teacher_mix: the teacher's
    share in the loss of stage whole, beside the text's."""

    teacher: str
    to: str = "perspective2"
    data: str = ""
    keep: int = 4
    window: int = 512
    tokens: int = 0
    minutes: float = 0.0
    seq_len: int = WINDOW
    batch_size: int = BATCH
    heldout: float = 0.05
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    rates: dict[str, float] = field(default_factory=lambda: dict(RATES))
    template: str = ""
    teacher_mix: float = 1.0

    def __post_init__(self) -> None:
        one_of(self.to, presets.DESIGNS, "to")
        at_least(0, self, "keep", "window", "tokens", "minutes")
        at_least(1, self, "seq_len", "batch_size")
        require(0 < self.teacher_mix <= 1, "teacher_mix", self.teacher_mix, "above 0 and ≤ 1")
        lengths = (self.tokens > 0) + (self.minutes > 0)
        require(lengths == 1, "tokens, minutes", f"{lengths} of them", "one of them given")
        for name, by_stage in (("shares", self.shares), ("rates", self.rates)):
            right = by_stage.keys() == SHARES.keys() and all(0 < x < math.inf for x in by_stage.values())
            require(right, name, by_stage, f"a positive number for each of {', '.join(SHARES)}")

    def train(self, stage: str, steps: int, size: int, longest: int, **more: object) -> TrainConfig:
        """The training settings of a stage with `steps` updates. size: parameters of the model. longest: its table of
        positions, or 0."""
        most = min(LONGER, longest // self.seq_len if longest else LONGER)
        if self.tokens > 0:
            most = min(most, int(self.shares[TEXT] * self.tokens / (ENOUGH * self.seq_len)))
        seq_len = self.seq_len * (max(1, most) if stage == TEXT else 1)
        rate = self.rates[stage] * presets.rate(self.to, size)
        values = {
            "data": self.data, "heldout": self.heldout, "template": self.template, "steps": steps,
            "batch_size": max(1, self.batch_size * self.seq_len // seq_len), "seq_len": seq_len,
            "seed": self.seed + list(SHARES).index(stage), "dtype": self.dtype, "device": self.device,
            "eval_every": 0, "save_every": max(1, steps // 8), "keep": 1,
            "optim": OptimConfig(lr=rate, warmup=presets.warmup(steps)),
        }  # fmt: skip
        return TrainConfig(**values | more)  # type: ignore[arg-type]

    def steps(self, stage: str, longest: int) -> int:
        """Updates of a stage, from its share of the tokens. ConfigError: there are too few."""
        train = self.train(stage, 1, 1, longest)
        batch = train.batch_size * train.seq_len
        steps = int(self.shares[stage] * self.tokens / batch)
        least = math.ceil(LEAST_UPDATES * batch / self.shares[stage])
        bound = f"≥ {least:,}: {LEAST_UPDATES} updates of {batch:,} tokens in stage {stage}"
        require(steps >= LEAST_UPDATES, "tokens", self.tokens, bound)
        return steps


def fitting(teacher: ModelConfig, trained: TrainConfig, tokens: int, device: torch.device) -> tuple[int, int]:
    """(seq_len, batch_size): the window of the teacher's training, and a batch so small that its logits leave room for
    the rest and `tokens`, if they are known, are enough for UPDATES."""
    seq_len = trained.seq_len if trained.data else WINDOW
    seq_len, batch_size = min(seq_len, teacher.positions or seq_len), BATCH
    logits = 2 * PER_LOGIT * seq_len * teacher.vocab_size
    while batch_size > 1 and batch_size * logits > MOST_ROOM * room(device):
        batch_size //= 2
    return seq_len, batch_for(tokens, seq_len, batch_size) if tokens else batch_size


def batch_for(tokens: float, seq_len: int, most: int) -> int:
    """A batch of at most so many windows, halved until the tokens are enough for UPDATES."""
    while most > 1 and tokens < UPDATES * most * seq_len:
        most //= 2
    return most


def require_both(
    teacher: ModelConfig, student: ModelConfig, config: ConvertConfig, device: torch.device
) -> None:
    """ConfigError where the teacher does not fit into memory beside the student that is trained."""
    logits = 2 * PER_LOGIT * config.batch_size * config.seq_len * teacher.vocab_size
    own = PER_PARAMETER * parameters(student)
    needs, there = own + 8 * parameters(teacher) + logits, room(device)
    bound = f"≤ {there / 1e9:.1f} GB, the memory free here"
    what = f"memory for {teacher.name} beside the model that it becomes ({own / 1e9:.1f} GB)"
    require(needs <= there, what, f"{needs / 1e9:,.1f} GB or more", bound)


def on_meta(config: ModelConfig) -> LanguageModel:
    """The model without weights."""
    return shape_of(config)
