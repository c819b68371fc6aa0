"""The config of a training run: its model and how it is trained. Saved, resolved, with every run."""

import os
from dataclasses import dataclass, field, replace
from typing import Literal

from perspectron.data.corpus import RULE
from perspectron.data.shuffle import ORDER
from perspectron.model.config import ModelConfig
from perspectron.train.lora import LoraConfig
from perspectron.train.optim import OptimConfig
from perspectron.util.config import at_least, positive, require, require_choices


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training: `steps` updates of batch_size × seq_len × accumulate tokens each."""

    data: str = "stdlib"
    """ "stdlib", "sources" or "prose" (of the packages installed), "books", a text file, .jsonl, .json, .csv, .tsv or
    .parquet (PATH#FIELD, if its text is not under "text"), also .gz or .zst, a folder or a pattern of such files,
    hf:NAME[:SPLIT], or a folder written by `tokenize`. Several with weights: --data code=0.7:PATH --data
    prose=0.3:PATH."""
    tokenizer: str = "bpe"
    """ "bpe" is learned from the text; "bytes", "characters", or a tokenizer.json to use."""
    heldout: float = 0.05
    """Share of the text that is never trained on; with --init or --teacher, on the text of that run, as much as it
    held out."""
    measured_on: Literal["heldout", "dev"] = "heldout"
    """Split on which the loss is measured during training. "dev", if the text has one, keeps choices away from the
    held-out text."""
    steps: int = 1000
    """Number of optimizer updates. `perspectron train` chooses it, and the options marked *, unless they are given."""
    batch_size: int = 8
    """Windows in a batch."""
    seq_len: int = 256
    """Tokens in a window."""
    accumulate: int = 1
    """Batches whose gradients are accumulated for one update, with equal weight for every target: the same as one
    larger batch, except for losses that are not means over tokens. Those are computed for each
    batch and averaged: balance, condition, metric_u_target, dim_variance, active_fraction, smooth, stability and
    recurrence. (Routing biases follow the whole update.)"""
    seed: int = 0
    """Seed of the weights and of the order of the windows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast; "auto" takes bfloat16 if it is measured to be faster for this model on this machine; with --state it is
    float32."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    recompute: bool = False
    """Activation checkpointing: less memory for more time."""
    compile: bool = False
    """torch.compile everything but the mixers."""
    eval_every: int = 250
    """Steps between held-out measurements; 0 is only at the end. *"""
    eval_tokens: int = 65536
    """Held-out tokens measured each time, spread over the text; 0 is all. *"""
    save_every: int = 250
    """Steps between checkpoints; 0 is only at the end and at a new best. *"""
    keep: int = 2
    """Number of newest checkpoints kept, besides the best and the last before a constant rate falls."""
    init: str = ""
    """Folder of a run to take the initial weights from."""
    lora: str = ""
    """Train low-rank adapters of the linear layers of the run named by `init`, instead of its weights, such as
    "rank=8" or "rank=8,alpha=16,targets=q_proj+v_proj" (PEFT; default targets: every linear layer of the blocks).
    Checkpoints hold the merged weights."""
    template: str = ""
    """Chat template: "plain", "own" (that of the run named by `init`), or a file with one in Jinja. Each record of the
    data then has a prompt and a completion, and only completions are learned."""
    only: tuple[str, ...] = ()
    """Train only parameters whose names match one of these patterns, such as "*.route_proj.*" (default: all)."""
    ternary_from: float = 0.0
    """Share of the steps after which experts start to become ternary."""
    ternary_until: float = 0.5
    """Share of the steps after which they are fully ternary."""
    teacher: str = ""
    """Folder of a run to distil from, in addition to the text (forward KL)."""
    teacher_weight: float = 1.0
    """Weight of the distillation term."""
    teacher_mix: float = 0.0
    """Share of the loss that is distillation's, that of the text being the rest; 0 adds distillation by
    teacher_weight."""
    teacher_temperature: float = 1.0
    """Temperature at which teacher and student are compared."""
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        at_least(1, self, "steps", "batch_size", "seq_len", "accumulate", "keep")
        at_least(0, self, "eval_every", "save_every", "eval_tokens", "teacher_weight")
        require(
            self.eval_tokens != 1,
            "eval_tokens",
            self.eval_tokens,
            "0, for all, or ≥ 2: the first is no target",
        )
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2⁶³)")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        require_choices(self)
        require(0 <= self.ternary_from <= 1, "ternary_from", self.ternary_from, "in [0, 1]")
        least = self.ternary_from
        require(least <= self.ternary_until <= 1, "ternary_until", self.ternary_until, f"in [{least}, 1]")
        positive(self, "teacher_temperature")
        require(0 <= self.teacher_mix <= 1, "teacher_mix", self.teacher_mix, "in [0, 1]")
        bound = "0 without teacher, a run to distil from"
        require(not self.teacher_mix or self.teacher != "", "teacher_mix", self.teacher_mix, bound)
        bound = "false with recompute, which torch.compile does not read"
        require(not (self.compile and self.recompute), "compile", self.compile, bound)
        if self.lora:
            LoraConfig.parse(self.lora)
            require(self.init != "", "lora", self.lora, "beside init, the run whose weights it adapts")
            require(not self.only, "only", self.only, "left out with lora, which trains adapters alone")

    @property
    def ternary_between(self) -> tuple[float, float]:
        """Updates from which and until which experts become ternary. Rounded, as the shares of a run that was given
        more steps are not exact to the last bit."""
        return round(self.ternary_from * self.steps, 6), round(self.ternary_until * self.steps, 6)


@dataclass(frozen=True)
class StagedConfig:
    """The staged recipe: each stage's share of the steps (the router gets the rest), and options."""

    dense_share: float = 0.25
    """Share of the steps for the dense network that all experts start from."""
    differentiate_share: float = 0.35
    """Share of the steps in which the experts, copies at first, are differentiated."""
    ternary_share: float = 0.3
    """Share of the steps in which they become ternary."""
    distill: float = 0.0
    """Weight of distillation from the float experts while they become ternary and while the router is trained."""
    distill_mix: float = 0.0
    """Share of the loss that this distillation is instead, that of the text being the rest."""
    flat_first: bool = False
    """Train experts behind a switch, and put them on the torus with a new router when they are ternary."""

    def __post_init__(self) -> None:
        positive(self, "dense_share", "differentiate_share", "ternary_share")
        total = self.dense_share + self.differentiate_share + self.ternary_share
        require(total < 1, "dense_share + differentiate_share + ternary_share", total, "< 1")
        at_least(0, self, "distill")
        require(0 <= self.distill_mix <= 1, "distill_mix", self.distill_mix, "in [0, 1]")
        require(not (self.distill and self.distill_mix), "distill", self.distill, "0 beside distill_mix")


@dataclass(frozen=True)
class Turn:
    """A change of a run's length while it was trained, to keep to a time: before update `at` (0-based), `steps` updates
    were planned."""

    at: int
    steps: int

    def __post_init__(self) -> None:
        require(
            0 <= self.at < self.steps, "at", self.at, f"in [0, {self.steps}), the updates there were to be"
        )


@dataclass(frozen=True)
class RunConfig:
    """A model and how it is trained. recipe: the staged recipe; the model is then that of the last stage. order:
    version of the shuffle (`perspectron.data.shuffle`). rule: version of the way its text is read and split
    (`perspectron.data.corpus`). turns: changes of its length; `train.steps` is the final one. id: the run's id, stored
    in its checkpoints; "" before a trainer has created the run. taught: fingerprint of the model that `train.teacher`
    is, also stored there; "" without one."""

    model: ModelConfig
    train: TrainConfig
    recipe: StagedConfig | None = None
    order: int = ORDER
    rule: int = RULE
    turns: tuple[Turn, ...] = ()
    id: str = field(default="", compare=False)
    taught: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("init", "only", "teacher") if self.recipe else ():
            value = getattr(self.train, name)
            require(not value, name, value, "left out with a recipe, whose stages each have their own")
        last = 0
        for turn, end in zip(self.turns, self._ends(), strict=True):
            require(last <= turn.at < end, "turns: at", turn.at, f"in [{last}, {end})")
            last = turn.at

    def _ends(self) -> list[int]:
        """The number of updates that was planned after each turn."""
        return [turn.steps for turn in self.turns[1:]] + [self.train.steps] * bool(self.turns)

    @property
    def schedule(self) -> TrainConfig:
        """The training as it was planned at first, with the length that schedules are written for."""
        return replace(self.train, steps=self.turns[0].steps) if self.turns else self.train

    def place(self, step: int) -> float:
        """The place of an update (0-based) on `schedule`. After a turn the rest of the schedule is stretched or
        shortened evenly over the updates that are left, so that the run ends where the schedule does."""
        at, place, pace = 0, 0.0, 1.0
        for turn, end in zip(self.turns, self._ends(), strict=True):
            if step < turn.at:
                break
            place += (turn.at - at) * pace
            at, pace = turn.at, (self.turns[0].steps - place) / (end - turn.at)
        return place + (step - at) * pace if self.turns else float(step)


Shard = Literal["ddp", "fsdp", "hsdp"]


def launched() -> bool:
    """True if this process is one of several that train together."""
    return processes() > 1


def processes() -> int:
    """The number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@dataclass(frozen=True)
class Layout:
    """Options for a command that torchrun starts on several processes."""

    shard: Shard = "fsdp"
    """ "ddp" gives every process all weights, "fsdp" a part to each, "hsdp" a part within each machine."""
    context_parallel: int = 1
    """Processes that share each window, so that windows can be longer."""
    expert_parallel: int = 1
    """Processes that share the experts of each layer; tokens are sent to their experts."""

    def held(self, device: str) -> float:
        """Share of the weights that is held in one memory, by all processes of a machine or by a GPU's one; more than 1
        if there are copies."""
        size = processes()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        each = 1 / self.shards(size, local)
        return each if device == "cuda" else each * local

    def shards(self, size: int, local: int) -> int:
        """Number of parts the weights are split into, with `size` processes in all and `local` on a machine. Processes
        of one window do not split weights, as they are not at the same layer at the same time."""
        rows = max(1, size // self.context_parallel)
        within = min(max(1, local // self.context_parallel), rows)
        return {"ddp": 1, "fsdp": rows, "hsdp": within}[self.shard]

    def __post_init__(self) -> None:
        require_choices(self)
        at_least(1, self, "context_parallel", "expert_parallel")
