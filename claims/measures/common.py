"""Helpers of the measures that run something small: seeded numbers, models as they start.

All are rounded where processors differ. Shapes: B batch, T time.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from claims.claim import Evidence
from claims.measures.gates import gates
from perspectron import presets
from perspectron.model.model import LanguageModel, build


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1), the same in every precision."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def below(error: float, bound: float) -> Evidence:
    """An error of rounding, which differs from processor to processor: shown as what it stays under."""
    return Evidence((error,), f"below {bound:.0e}" if error < bound else f"{error:.2g}")


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@cache
def made(name: str, *sizes: tuple[str, Any]) -> LanguageModel:
    """A preset as it starts, with embeddings as the documents have them."""
    return build(presets.get(name, embedding_norm=False, **dict(sizes))).eval()


@cache
def text(vocab_size: int = 250, tokens: int = 64) -> Tensor:
    """Random ids [2, T]."""
    return torch.randint(0, vocab_size, (2, tokens), generator=torch.Generator().manual_seed(0))


@cache
def at_start(name: str, *sizes: tuple[str, Any]) -> dict[str, list[Any]]:
    """The gates of a preset as it starts, on random text."""
    return gates(made(name, *sizes), text())


def first(name: str, kind: type, *sizes: tuple[str, Any]) -> Any:
    """The first mixer of that kind."""
    return next(module for module in made(name, *sizes).modules() if isinstance(module, kind))


def seen_from_before(name: str) -> float:
    """The change in the logits of earlier tokens when the last token changes."""
    ids = text().clone()
    with torch.no_grad():
        before = made(name)(ids).logits[:, :-1]
        ids[:, -1] = (ids[:, -1] + 1) % 250
        return apart(before, made(name)(ids).logits[:, :-1])
