"""The layout by which processes that torchrun or Slurm started share a training."""

import os
from dataclasses import dataclass
from typing import Literal

from perspectron.config import at_least, one_of

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
        """The share of the weights that the processes with one memory hold together: those of a machine, or a GPU's
        one; more than 1 for copies."""
        size, local = processes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        each = {"ddp": 1.0, "fsdp": 1 / size, "hsdp": 1 / local}[self.shard] if size > 1 else 1.0
        return each if device == "cuda" else each * local

    def __post_init__(self) -> None:
        one_of(self.shard, ("ddp", "fsdp", "hsdp"), "shard")
        at_least(1, self, "context_parallel", "expert_parallel")
