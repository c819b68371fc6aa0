"""What a training run is: the model and how it is trained. Saved, resolved, with every run."""

from dataclasses import dataclass, field
from typing import Literal

from perspectron.config import ModelConfig, one_of, require
from perspectron.train.optim import OptimConfig


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained: on `steps` updates of batch_size × seq_len × accumulate tokens each."""

    data: str = "stdlib"
    """ "stdlib", a text file, a folder, a .jsonl or .jsonl.gz, or a folder written by `tokenize`."""
    heldout: float = 0.05
    """Share of the text that is never trained on."""
    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 8
    """Windows in a batch."""
    seq_len: int = 512
    """Tokens in a window."""
    accumulate: int = 1
    """Batches whose gradients make one update."""
    seed: int = 0
    """Of the weights and of the order of the windows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast; "auto" takes bfloat16 where it measures faster on this model and machine."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    recompute: bool = False
    """Activation checkpointing: less memory for more time."""
    compile: bool = False
    """torch.compile everything but the mixers."""
    eval_every: int = 250
    """Steps between held-out measurements; 0 is only at the end."""
    eval_tokens: int = 65536
    """Held-out tokens measured each time; 0 is all."""
    save_every: int = 250
    """Steps between checkpoints; 0 is only at the end and at a new best."""
    keep: int = 2
    """Newest checkpoints kept, beside the best."""
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "accumulate", "keep"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        for name in ("eval_every", "save_every", "eval_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "≥ 0")
        require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2⁶³)")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        one_of(self.dtype, ("auto", "float32", "bfloat16"), "dtype")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    train: TrainConfig
