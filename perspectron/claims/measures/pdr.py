"""Measures of PDR, of the blocks around it and of its experts' weights, on something small.

Shapes: B batch, T time, D model width, R state rank.
"""

import tempfile
from dataclasses import replace
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
    at_start,
    below,
    drawn,
    first,
    made,
    text,
)
from perspectron.mixers.pdr import PDR, PDRState
from perspectron.model import build
from perspectron.ops import pdr
from perspectron.quant.ternary import trits
from perspectron.state import load_state, save_state
from perspectron.stream.delta import encode

LONG = 1 << 17  # tokens


def _recurrence(
    tokens: int, dtype: torch.dtype, D: int = 16, R: int = 8, shift: float = 2.944
) -> list[Tensor]:
    """q, k, v of unit size and gates σ(N + shift), about 0.95."""
    q, k, v, p = (drawn(1, tokens, n, seed=i, dtype=torch.float64) for i, n in enumerate((R, R, D, D)))
    return [x.to(dtype) for x in (q, k, v, torch.sigmoid(p + shift))]


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
    return Found(found.values, f"change of outputs {found.shown}; built with {usual}")


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


def half_drift(shift: float) -> float:
    """The same of a state in FP16, whose gates are σ(N + shift)."""
    q, k, v, gamma = _recurrence(LONG, torch.float64, 4, 4, shift)
    with torch.no_grad():
        exact = pdr.scan(q, k, v, gamma, backend="torch")[1][0]
    gates, keys, values = (x[0].half().numpy() for x in (gamma, k, v))
    added = values[:, :, None] * keys[:, None]
    S = np.zeros((4, 4), np.float16)
    for gate, new in zip(gates[:, :, None], added, strict=True):
        S = gate * S + new
    error = (torch.from_numpy(S.astype(np.float64)) - exact).norm() / exact.norm()
    return float(f"{error.item():.2g}")


def largest() -> float:
    """Entry of the state after 131,072 tokens, never renormalised."""
    return round(_states(torch.float64).abs().max().item(), 2)


@cache
def piled_up(every: int = LONG) -> float:
    """Largest entry ever in a state whose gates stay near 1, σ(N + 20), and whose keys and values never change sign,
    renormalised as the document writes it every so many tokens."""
    q, k, v, gamma = _recurrence(LONG, torch.float64, shift=20.0)
    S, largest_entry = torch.zeros(1, 16, 8, dtype=torch.float64), 0.0
    with torch.no_grad():
        for q_, k_, v_, gamma_ in zip(
            *(x.split(every, 1) for x in (q, k.abs(), v.abs(), gamma)), strict=True
        ):
            S = pdr.scan(q_, k_, v_, gamma_, S, backend="torch")[1]
            largest_entry = max(largest_entry, S.abs().max().item())
            S = S * (16 * 8) ** 0.5 / torch.linalg.vector_norm(S)
    return float(round(largest_entry))


def renormalised() -> Found:
    """‖S‖ over √(D·R) after the document's renormalisation, of a large, a small and an empty state."""
    alpha, shown = (16 * 8) ** 0.5, list[float]()
    for scale in (100.0, 0.01, 0.0):
        S = scale * drawn(1, 16, 8, dtype=torch.float64)
        shown.append((S * (alpha / torch.linalg.vector_norm(S))).norm().item() / alpha)
    text = "{:.3g} of a large state, {:.3g} of a small one, {:g} of an empty one; built: min(1, α/‖S‖)"
    return Found(tuple(shown[:2]), text.format(*shown))


def gradient_left(tokens: int) -> float:
    """Of a state's gradient by the state so many tokens before, at untrained gates."""
    q, k, v, gamma = _recurrence(tokens, torch.float64)
    start = torch.zeros(1, 16, 8, dtype=torch.float64, requires_grad=True)
    pdr.scan(q, k, v, gamma, start)[1].sum().backward()
    assert start.grad is not None
    return float(f"{start.grad.mean().item():.1g}")


def direct_gradient(back: int) -> Found:
    """Gradient of the last token's output by the embedding `back` tokens before, with and without GQA layers."""
    found = []
    for every in (4, 0):
        model = made("perspective-tiny-dense")
        if not every:
            mixer = model.config.blocks[0].mixer
            model = build(
                replace(model.config, blocks=tuple(replace(b, mixer=mixer) for b in model.config.blocks))
            )
        kept: list[Tensor] = []

        def keep(_: Any, given: tuple[Any, ...], kept: list[Tensor] = kept) -> None:
            kept.append(given[0].requires_grad_())
            given[0].retain_grad()

        hook = model.blocks[0].register_forward_pre_hook(keep)
        model.hidden(text(tokens=256))[0][:, -1].square().sum().backward()
        hook.remove()
        model.zero_grad()
        found.append(cast(Tensor, kept[0].grad)[:, -1 - back].norm().item())
    ratio = float(f"{found[0] / found[1]:.2g}")
    return Found((ratio,), f"{ratio:g} times that without GQA, {back} tokens back, untrained")


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


def start_gates() -> Found:
    """Half-life by layer on random text, W_p included."""
    gates = at_start("perspective-tiny-dense")
    lives = gates["pdr_halflife"]
    return Found(
        tuple(lives),
        f"{min(lives):.1f} to {max(lives):.1f} tokens by layer, mean γ "
        f"{sum(gates['pdr_gate_mean']) / len(lives):.3f}, W_p included",
    )


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


def gradient_through(layers: int) -> Found:
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
    return Found(
        (float(f"{first_norm / last_norm:.2g}"),),
        f"{float(f'{first_norm / last_norm:.2g}'):,.0f} times the last's in {layers} layers of width 64, untrained: "
        "embeddings start at 0.02, and RMSNorm divides by that",
    )


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
