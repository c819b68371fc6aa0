"""What a training run is: the model and how it is trained. Saved, resolved, with every run."""

from dataclasses import dataclass, field
from typing import Literal

from perspectron.config import ModelConfig, one_of, require
from perspectron.train.optim import OptimConfig


@dataclass(frozen=True)
class TrainConfig:
    """steps: optimizer updates, each of batch_size × seq_len × accumulate tokens.

    data: "stdlib", a text file, a folder, a .jsonl or .jsonl.gz, or a folder written by `tokenize`.
    heldout: share of the text that is never trained on. dtype: "auto" takes bfloat16 autocast where it
    measures faster on this model and machine. recompute: activation checkpointing, less memory for more time.
    compile: torch.compile everything but the mixers. eval_every, save_every: in steps, 0 is only at the end.
    eval_tokens: held-out tokens measured, 0 is all. keep: newest checkpoints kept, beside the best.
    """

    data: str = "stdlib"
    heldout: float = 0.05
    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 512
    accumulate: int = 1
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    recompute: bool = False
    compile: bool = False
    eval_every: int = 250
    eval_tokens: int = 65536
    save_every: int = 250
    keep: int = 2
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "accumulate", "keep"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        for name in ("eval_every", "save_every", "eval_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "≥ 0")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        one_of(self.dtype, ("auto", "float32", "bfloat16"), "dtype")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    train: TrainConfig
