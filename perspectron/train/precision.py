"""Which precision to train in: measured, not assumed."""

import time
from typing import Literal

import torch

from perspectron.data.loader import Batch
from perspectron.model import LanguageModel


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast to bfloat16, or to nothing for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def faster(model: LanguageModel, batch: Batch, device: torch.device) -> Literal["float32", "bfloat16"]:
    """ "bfloat16" if a training pass over `batch` is at least 5% faster with it, else "float32".

    One pass each to warm up, then three each in turn; the fastest counts.
    """
    best = {"float32": float("inf"), "bfloat16": float("inf")}
    for repeat in range(4):
        for dtype in best:
            start = time.perf_counter()
            with autocast(device, dtype):
                loss = model(batch.ids_BT.to(device), targets=batch.targets_BT.to(device)).loss
            loss.backward()
            loss.item()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                best[dtype] = min(best[dtype], time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    return "bfloat16" if best["bfloat16"] < 0.95 * best["float32"] else "float32"
