"""The layout by which processes that torchrun or Slurm started share a training."""

import os
from dataclasses import dataclass
from typing import Literal

from perspectron.model.config import at_least, one_of

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
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        each = 1 / self.shards(processes(), local)
        return each if device == "cuda" else each * local

    def shards(self, size: int, local: int) -> int:
        """Parts of the weights, of `size` processes in all and `local` on a machine: those of one window share none, as
        they are not at the same layer at the same time."""
        rows = max(1, size // self.context_parallel)
        within = min(max(1, local // self.context_parallel), rows)
        return {"ddp": 1, "fsdp": rows, "hsdp": within}[self.shard]

    def __post_init__(self) -> None:
        one_of(self.shard, ("ddp", "fsdp", "hsdp"), "shard")
        at_least(1, self, "context_parallel", "expert_parallel")
