"""The cost of a training: memory before a model is built; time, memory and the faster precision, measured."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from perspectron.data.loader import Batch
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, shape_of
from perspectron.train import checkpoint, lora
from perspectron.train.config import RunConfig
from perspectron.train.optim import by_muon, freeze
from perspectron.util import ranks
from perspectron.util.config import require
from perspectron.util.machine import Peak, free_memory, memory, resident, seconds_of

PER_PARAMETER = 16  # bytes in training: weight, gradient and two moments, float32
PER_MOMENT = 4  # bytes
PER_FROZEN = 4  # bytes of a weight that does not learn
PER_LOGIT = 12  # logits, their logarithms of probabilities, their gradient
LONG = 20.0  # seconds, of all ranks, after which no more passes are begun to choose a precision


@dataclass(frozen=True)
class Estimate:
    """Cost of a training. seconds: of an update. bytes: peak memory of the process; on CUDA, of the GPU."""

    seconds: float
    bytes: int

    def whole(self, config: RunConfig, heldout: int, step: int = 0) -> float:
        """Seconds of a run from update `step` on, with its measurements: a token that is only read costs a third.
        heldout: tokens of the split on which the loss is measured."""
        train = config.train
        left = train.steps - step
        measured = 1 + (left // train.eval_every if train.eval_every else 0)
        tokens = min(train.eval_tokens or heldout, heldout)
        batches = tokens / (train.batch_size * train.seq_len * train.accumulate)
        return self.seconds * (left + measured * batches / 3)


def parameters(config: ModelConfig) -> int:
    """Number of parameters of a model, counted without building it."""
    return sum(parameter.numel() for parameter in shape_of(config).parameters())


def room(device: torch.device) -> int:
    """Bytes of memory that are free for a training."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else min(memory(), free_memory())


def require_room(config: RunConfig, device: torch.device, held: float = 1.0) -> None:
    """ConfigError for a model whose training needs more memory than there is, said before it is built. held: share of
    the weights that are in this memory."""
    train = config.train
    model = shape_of(config.model)
    freeze(model, train.only)
    every = list(model.parameters())
    size, learned = (sum(p.numel() for p in own) for own in (every, [p for p in every if p.requires_grad]))
    weights = PER_FROZEN * (size - learned) + PER_PARAMETER * learned
    weights -= PER_MOMENT * sum(p.numel() for p in by_muon(model, train.optim))
    if train.lora:
        adapters, merged = lora.sizes(model, lora.LoraConfig.parse(train.lora))
        weights = PER_FROZEN * (size + merged) + PER_PARAMETER * adapters
    logits = train.batch_size * train.seq_len * config.model.vocab_size
    needs = weights * held + PER_LOGIT * logits * min(held, 1.0)
    if train.teacher:
        its = checkpoint.run_of(Path(train.teacher))
        needs += PER_FROZEN * parameters(checkpoint.load_config(its).model) + PER_LOGIT * logits
    there = room(device)
    bound = (
        f"≤ {there / 1e9:.1f} GB, the memory free here: use a smaller --batch-size, --seq-len or --preset "
        "(perspectron list), or no --preset, and a size that fits is chosen"
    )
    what = f"memory to train {config.model.name}, {size / 1e6:,.1f} M parameters"
    what += f", beside {train.teacher}" if train.teacher else ""
    require(needs <= there, what, f"{needs / 1e9:,.1f} GB or more", bound)


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks share; else all of it."""
    return cast(Tensor, x.to_local()) if hasattr(x, "to_local") else x


def estimate(model: LanguageModel, backward: Callable[[], object], config: RunConfig) -> Estimate:
    """The cost of a training, measured on two calls of `backward`, which adds the gradients of a batch; they leave no
    trace."""
    learned = sum(local_part(p).numel() for p in model.parameters() if p.requires_grad)
    device, before = model.device, resident()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with without_trace(model), Peak() as peak:
        seconds = min(seconds_of(backward, device) for _ in range(2))
    used = torch.cuda.max_memory_allocated(device) if cuda else before + (peak.bytes or 0)
    moments = 2 * learned - sum(local_part(p).numel() for p in by_muon(model, config.train.optim))
    return Estimate(seconds * config.train.accumulate, used + PER_MOMENT * moments)


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast to bfloat16, or to nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@contextlib.contextmanager
def without_trace(model: LanguageModel) -> Iterator[None]:
    """Context whose passes leave no gradient, and no change in buffers, where experts count their tokens."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def training_pass(model: LanguageModel, batch: Batch, device: torch.device, dtype: str) -> float:
    """Seconds of a pass forwards and backwards, whose gradients are added to those there are."""

    def once() -> None:
        with autocast(device, dtype):
            ids, targets = (ranks.columns(x).to(device) for x in (batch.ids_BT, batch.targets_BT))
            loss = model(ids, targets=targets).loss
        if loss.requires_grad:  # else the first update says so
            loss.backward()

    return seconds_of(once, device)


def products(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the three products of a linear layer, forwards and backwards, by the fastest of three."""
    x, w = torch.ones(2, 256, 256, device=device, dtype=dtype)
    return min(seconds_of(lambda: (x @ w.T, x.T @ w, x @ w), device) for _ in range(3))


def precisions(device: torch.device) -> list[Literal["float32", "bfloat16"]]:
    """Precisions worth timing in training: float32 alone where products of bfloat16 take over twice the time.
    Processors without them can need a hundred times as long."""
    full, half = (products(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    slow = ranks.all_reduce_sum(torch.tensor(float(half > 2 * full), device=device)).item()
    return ["float32"] if slow else ["float32", "bfloat16"]


def slow(device: torch.device, dtype: str) -> list[str]:
    """A line that says that this precision is slow here; else nothing."""
    if dtype != "bfloat16" or "bfloat16" in precisions(device):
        return []
    return ["bfloat16 is slow on this processor, which has no products of it; --dtype float32 is faster"]


def faster(model: LanguageModel, batch: Batch, device: torch.device) -> Literal["float32", "bfloat16"]:
    """ "bfloat16" if a training pass over `batch` is faster with it, by the median of five pairs after one to warm up:
    the passes of a pair follow each other, so that a machine that is busy for a while slows both. After LONG no pair is
    begun; if the first takes so long, it decides. A difference below 2% is none: float32."""
    if len(precisions(device)) == 1:
        return "float32"
    ratios, took = list[float](), torch.zeros((), device=device)
    with without_trace(model):
        while len(ratios) < 6 and ranks.all_reduce_sum(took).item() < LONG:
            full, half = (training_pass(model, batch, device, dtype) for dtype in ("float32", "bfloat16"))
            ratios.append(full / half)
            took += full + half
    return "bfloat16" if statistics.median(ratios[1:] or ratios) > 1.02 else "float32"
