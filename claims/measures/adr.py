"""Measures of ADR's memories, on something small.

Shapes: B batch, T time, H heads, K head width.
"""

import math

import torch
from torch import Tensor

from claims.measures.common import (
    drawn,
    first,
)
from perspectron import presets
from perspectron.designs.adr import gru
from perspectron.designs.adr.mixer import ADR
from perspectron.model.model import build


def largest_memory(tokens: int = 2000, decay: bool = True) -> float:
    """|h| after so many tokens of size 100."""
    mixer = first("adr-tiny", ADR)
    H, K = mixer.config.heads, mixer.input_GKF.shape[1]
    x = 100 * drawn(1, tokens, 2 * H, 1, K)
    with torch.no_grad():
        memories, _, _ = gru.scan(
            x, mixer.cells(), mixer.config.gamma if decay else 0.0, torch.zeros(1, 2 * H, 1, K)
        )
    return round(memories.abs().max().item(), 3)


def halflives(name: str = "adr-tiny") -> tuple[float, ...]:
    """Tokens, by layer."""
    mixers = [block.mixer for block in presets.get(name).blocks]
    return tuple(round(math.log(0.5) / math.log(m.gamma), 2) for m in mixers if m is not None)  # type: ignore[attr-defined]


def remembered() -> float:
    """Share of tokens that change every memory."""
    mixer = first("adr-tiny", ADR)
    H, K = mixer.config.heads, mixer.input_GKF.shape[1]
    with torch.no_grad():
        memories, _, _ = gru.scan(
            drawn(1, 64, 2 * H, 1, K), mixer.cells(), mixer.config.gamma, torch.zeros(1, 2 * H, 1, K)
        )
    changed_T = (memories.diff(dim=1) != 0).flatten(3).any(-1).all(-1)
    return changed_T.double().mean().item()


def gradients_right() -> float:
    """1 where the memories' gradients, weights included, are those of finite differences."""
    mixer = build(presets.get("adr-tiny", d_model=4, heads=2, hidden=4)).double().blocks[0].mixer
    assert isinstance(mixer, ADR)
    x, start = (drawn(1, *shape, dtype=torch.float64).requires_grad_() for shape in ((4, 4, 1, 2), (4, 1, 2)))

    def run(x: Tensor, start: Tensor, *cells: Tensor) -> Tensor:
        return gru.scan(x, gru.Cells(*cells), 0.97, start)[0]

    return float(torch.autograd.gradcheck(run, (x, start, *mixer.cells())))
