"""Choosing the precision of training by measurement."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Literal

import torch

from perspectron.data.loader import Batch
from perspectron.model.model import LanguageModel
from perspectron.util import ranks


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast to bfloat16, or to nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


@contextlib.contextmanager
def without_trace(model: LanguageModel) -> Iterator[None]:
    """Passes made here leave no gradient, and buffers as they were: experts count their tokens."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def training_pass(model: LanguageModel, batch: Batch, device: torch.device, dtype: str) -> float:
    """Seconds of a pass forwards and backwards, whose gradients are added to those there are."""
    start = time.perf_counter()
    with autocast(device, dtype):
        ids, targets = (ranks.columns(x).to(device) for x in (batch.ids_BT, batch.targets_BT))
        loss = model(ids, targets=targets).loss
    if loss.requires_grad:  # else the first update says so
        loss.backward()
    loss.item()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def faster(model: LanguageModel, batch: Batch, device: torch.device) -> Literal["float32", "bfloat16"]:
    """ "bfloat16" if a training pass over `batch` is faster with it, by the median of five pairs after one to warm up:
    the passes of a pair follow each other, so that a machine that is busy for a while slows both. A difference below 2%
    is none: float32."""
    with without_trace(model):
        pairs = [
            [training_pass(model, batch, device, dtype) for dtype in ("float32", "bfloat16")]
            for _ in range(6)
        ]
    return "bfloat16" if statistics.median(full / half for full, half in pairs[1:]) > 1.02 else "float32"
