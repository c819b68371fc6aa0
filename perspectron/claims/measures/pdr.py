"""Measures of PDR, of the blocks around it and of its experts' weights, on something small.

Shapes: B batch, T time, D model width, R state rank.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.claims.claim import Found
from perspectron.claims.measures.common import (
    apart,
    below,
    drawn,
    first,
    made,
    text,
)
from perspectron.mixers.pdr import PDR, PDRState
from perspectron.ops import pdr
from perspectron.quant.ternary import trits
from perspectron.state import load_state, save_state
from perspectron.stream.delta import encode

LONG = 1 << 17  # tokens


def _recurrence(tokens: int, dtype: torch.dtype, D: int = 16, R: int = 8) -> list[Tensor]:
    """q, k, v of unit size and gates about 0.95."""
    q, k, v, p = (drawn(1, tokens, n, seed=i, dtype=torch.float64) for i, n in enumerate((R, R, D, D)))
    return [x.to(dtype) for x in (q, k, v, torch.sigmoid(p + 2.944))]


def scan_error() -> Found:
    """Of the scan over 256 tokens against the plain loop."""
    o, S = pdr.scan(*_recurrence(256, torch.float64))
    expected, S_expected = pdr.scan(*_recurrence(256, torch.float64), backend="reference")
    return below(max(apart(o, expected), apart(S, S_expected)), 1e-12)


def chunked(tokens: int) -> Found:
    """Change of the outputs when the scan's chunks are so long."""
    given, usual = _recurrence(1024, torch.float64), pdr.CHUNK
    expected = pdr.scan(*given)[0]
    try:
        pdr.CHUNK = tokens
        found = below(apart(pdr.scan(*given)[0], expected), 1e-12)
    finally:
        pdr.CHUNK = usual
    return Found(found.values, f"change of outputs {found.shown}; built with {usual}, the fastest on a CPU")


def associativity() -> Found:
    """Of (A₂, B₂) ⊕ (A₁, B₁) = (A₂ A₁, A₂ B₁ + B₂)."""

    def then(late: tuple[Tensor, Tensor], early: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return late[0] * early[0], late[0] * early[1] + late[1]

    a, b, c = ((drawn(8, 1, seed=i).double(), drawn(8, 4, seed=9 + i).double()) for i in range(3))
    return below(max(map(apart, then(then(c, b), a), then(c, then(b, a)))), 1e-12)


@cache
def _states(dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return pdr.scan(*_recurrence(LONG, dtype), backend="torch")[1]


def drift() -> Found:
    """Relative error of a float32 state after 131,072 tokens."""
    exact = _states(torch.float64)
    return below(((_states(torch.float32).double() - exact).norm() / exact.norm()).item(), 1e-5)


def largest() -> float:
    """Entry of the state after 131,072 tokens, never renormalised."""
    return round(_states(torch.float64).abs().max().item(), 2)


def renormalised(scale: float) -> Found:
    """‖S‖ over √(D·R) after the document's renormalisation of a state of that size, and after ours."""
    S = scale * drawn(1, 16, 8)
    alpha = (16 * 8) ** 0.5
    written = (S * (alpha / torch.linalg.vector_norm(S))).norm().item() / alpha
    ours = pdr.renormalise(S).norm().item() / alpha
    return Found((written,), f"{written:.3g} as written; {ours:.3g} with min(1, α/‖S‖), as built")


def empty_states() -> float:
    """Σ|S| of all states before any token."""
    layers = made("perspective-tiny-dense").init_state(2).layers
    return sum(layer.memory_BDR.abs().sum().item() for layer in layers if isinstance(layer, PDRState))


@cache
def noise_norm(width: int = 4096) -> float:
    """Spectral norm of a matrix of N(0, 1), by power iteration."""
    N = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    x = torch.ones(width)
    for _ in range(30):
        x = F.normalize(N.T @ (N @ x), dim=0)
    return round((N @ x).norm().item(), 1)


def bias_gate() -> float:
    return torch.sigmoid(first("perspective-tiny-dense", PDR).p_proj.bias[0]).item()


def gate_rank() -> tuple[int, int]:
    """(rank of W_p, its width)."""
    weight = first("perspective-tiny-dense", PDR).p_proj.weight
    return int(torch.linalg.matrix_rank(weight)), len(weight)


def resumed() -> float:
    """Change of the logits when the state goes through a file in the middle of a text."""
    model, ids = made("perspective-tiny-dense"), text()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        state, path = model(ids[:, :32]).state, Path(folder) / "state"
        save_state(path, state, model)
        return apart(model(ids[:, 32:], state).logits, model(ids[:, 32:], load_state(path, model)).logits)


def gradient_through(layers: int) -> float:
    """Gradient of the loss by the first block's input over that by the last's output, in norm."""
    model, ids = made("perspective-tiny-dense", ("layers", layers), ("d_model", 64), ("hidden", 64)), text()
    kept: list[Tensor] = []

    def keep(_: Any, given: tuple[Any, ...]) -> None:
        given[0].requires_grad_().retain_grad()
        kept.append(given[0])

    hooks = [m.register_forward_pre_hook(keep) for m in (model.blocks[0], model.norm)]
    model(ids, targets=ids).objective().backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    first_norm, last_norm = (cast(Tensor, x.grad).norm().item() for x in kept)
    return float(f"{first_norm / last_norm:.2g}")


def zeros_of(kind: str) -> float:
    """Share of zeros when weights of a distribution become ternary: "normal" or "laplace"."""
    weight = drawn(512, 512)
    if kind == "laplace":
        weight = torch.distributions.Laplace(0.0, 1.0).icdf(torch.special.ndtr(weight.double()))
    return round((trits(weight)[0] == 0).double().mean().item(), 3)


def delta_bytes(share: float, weights: int) -> float:
    """Bytes of an expert of so many weights stored as its difference from another, when such a share of them changed:
    from a 64th of them."""
    random = np.random.default_rng(0)
    before = random.integers(0, 3, (weights // 64 // 5, 5), np.uint8)
    step = random.integers(1, 3, before.shape, np.uint8) * (random.random(before.shape) < share)
    places = np.array([1, 3, 9, 27, 84])
    codes = [(trits @ places).astype(np.uint8) for trits in (before, (before + step) % 3)]
    found = encode(codes[0], codes[1], codes[0].size)
    assert found is not None
    return 64 * (len(found.quotients) + len(found.remainders) + len(found.steps))
