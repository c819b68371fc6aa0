"""Measures of PDR, of the blocks around it and of its experts' weights, on something small.

Shapes: B batch, T time, D model width, R state rank.
"""

import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from claims.claim import Evidence
from claims.measures import built
from claims.measures.common import (
    apart,
    below,
    drawn,
    first,
    made,
    text,
)
from perspectron import presets
from perspectron.decode.reading import read
from perspectron.designs.perspective.pdr import PDR, PDRState
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.experts.ternary import Rule, trits
from perspectron.model.model import build
from perspectron.model.state import load_state, save_state
from perspectron.ops import pdr
from perspectron.util.hooks import hooked

LONG = 1 << 17  # tokens
HALF_MAX = 65504  # of an FP16 number


def _recurrence(
    tokens: int, dtype: torch.dtype, D: int = 16, R: int = 8, shift: float = 2.944
) -> list[Tensor]:
    """q, k, v of unit size and gates σ(N + shift), about 0.95."""
    q, k, v, p = (drawn(1, tokens, n, seed=i, dtype=torch.float64) for i, n in enumerate((R, R, D, D)))
    return [x.to(dtype) for x in (q, k, v, torch.sigmoid(p + shift))]


def scan_error() -> Evidence:
    """The error of the scan over 256 tokens against the plain loop."""
    o, S = pdr.scan(*_recurrence(256, torch.float64))
    expected, S_expected = pdr.scan(*_recurrence(256, torch.float64), backend="naive")
    return below(max(apart(o, expected), apart(S, S_expected)), 1e-12)


def chunked(tokens: int) -> Evidence:
    """Change of the outputs when the scan's chunks are so long."""
    inputs = _recurrence(1024, torch.float64)
    expected = pdr.scan(*inputs)[0]
    with built.chunks(tokens):
        change = below(apart(pdr.scan(*inputs)[0], expected), 1e-12)
    return Evidence(change.values, f"change of outputs {change.shown}; built with {pdr.CHUNK}")


def associativity() -> Evidence:
    """The error of (A₂, B₂) ⊕ (A₁, B₁) = (A₂ A₁, A₂ B₁ + B₂)."""

    def then(late: tuple[Tensor, Tensor], early: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return late[0] * early[0], late[0] * early[1] + late[1]

    a, b, c = ((drawn(8, 1, seed=i).double(), drawn(8, 4, seed=9 + i).double()) for i in range(3))
    return below(max(map(apart, then(then(c, b), a), then(c, then(b, a)))), 1e-12)


@cache
def _states(dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return pdr.scan(*_recurrence(LONG, dtype), backend="torch")[1]


def drift() -> Evidence:
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


def before_the_first(size: float = 3.0, every: int = 8192) -> Evidence:
    """The largest entry that a state reaches before its first renormalisation, at γ = 1, where every key and value has
    this size."""
    ones = torch.ones(1, every, 1, dtype=torch.float64)
    entry = pdr.scan(ones, size * ones, size * ones, ones)[1].item()
    past = int(HALF_MAX // (entry / every)) + 1
    shown = f"{entry:,.0f} at γ = 1 and k = v = {size:g}"
    return Evidence((entry,), f"{shown}, past {HALF_MAX:,} after {past:,} tokens" if past <= every else shown)


def renormalised(**sizes: float) -> Evidence:
    """‖S‖ over α = √(D·R) after the document's renormalisation, of states of these sizes, by what they are called."""
    alpha, ratios = (16 * 8) ** 0.5, dict[str, float]()
    for name, size in sizes.items():
        S = size * drawn(1, 16, 8, dtype=torch.float64)
        ratios[name] = (S * (alpha / torch.linalg.vector_norm(S))).norm().item() / alpha
    shown = ", ".join(f"{ratio:.3g} of {name} state" for name, ratio in ratios.items())
    return Evidence(tuple(ratios.values()), shown.replace("_", " "))


def gradient_left(tokens: int) -> float:
    """The gradient of a state by the state so many tokens before, at untrained gates."""
    q, k, v, gamma = _recurrence(tokens, torch.float64)
    start = torch.zeros(1, 16, 8, dtype=torch.float64, requires_grad=True)
    pdr.scan(q, k, v, gamma, start)[1].sum().backward()
    assert start.grad is not None
    return float(f"{start.grad.mean().item():.1g}")


def direct_gradient(back: int) -> Evidence:
    """Gradient of the last token's output along one direction by the embedding `back` tokens before, with and without
    GQA layers. Not of its square: a norm makes that the same number for every input."""
    norms = []
    for every in (4, 0):
        model = made("perspective-tiny-dense")
        if not every:
            mixer = model.config.blocks[0].mixer
            model = build(
                replace(model.config, blocks=tuple(replace(b, mixer=mixer) for b in model.config.blocks))
            )
        kept: list[Tensor] = []

        def keep(_: Any, inputs: tuple[Any, ...], kept: list[Tensor] = kept) -> None:
            kept.append(inputs[0].requires_grad_())
            inputs[0].retain_grad()

        with model.blocks[0].register_forward_pre_hook(keep):
            last_BD = model.hidden(text(tokens=256))[0][:, -1]
        (last_BD * drawn(*last_BD.shape)).sum().backward()
        model.zero_grad()
        norms.append(cast(Tensor, kept[0].grad)[:, -1 - back].norm().item())
    ratio = float(f"{norms[0] / norms[1]:.1g}")
    return Evidence((ratio,), f"{ratio:g} times that without GQA, {back} tokens back, untrained")


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


def start_halflives() -> Evidence:
    """Tokens after which half of a memory is left, by layer, of the median channel on random text, W_p included. What
    is left after some tokens is the product of their gates, so their logarithms are averaged."""
    model, lives = made("perspective-tiny-dense"), list[float]()

    def keep(mixer: PDR, inputs: tuple[Any, ...]) -> None:
        gamma_BTD = torch.sigmoid(mixer.p_proj(mixer.p_down(inputs[0])).double())
        halflife_D = math.log(0.5) / gamma_BTD.log().flatten(0, 1).mean(0)
        lives.append(round(halflife_D.median().item(), 1))

    hooks = [m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, PDR)]
    with hooked(hooks), torch.no_grad():
        model.hidden(text())
    return Evidence(tuple(lives), f"{min(lives):.1f} to {max(lives):.1f} tokens by layer, W_p included")


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


def gradient_through(layers: int, embedding_std: float) -> float:
    """Norm of the loss's gradient by the first block's input over that by the last's output, untrained."""
    config = presets.get("perspective-tiny-dense", layers=layers, d_model=64, hidden=64, embedding_norm=False)
    model, ids = build(replace(config, embedding_std=embedding_std)).eval(), text()
    kept: list[Tensor] = []

    def keep(_: Any, inputs: tuple[Any, ...]) -> None:
        inputs[0].requires_grad_().retain_grad()
        kept.append(inputs[0])

    hooks = [m.register_forward_pre_hook(keep) for m in (model.blocks[0], model.norm)]
    with hooked(hooks):
        model(ids, targets=ids).objective().backward()
    first_norm, last_norm = (cast(Tensor, x.grad).norm().item() for x in kept)
    return float(f"{first_norm / last_norm:.2g}")


def gradient_flow(layers: int) -> Evidence:
    """The same with embeddings of unit size, about which the document says nothing; the first RMSNorm multiplies the
    gradient by what it takes to make them so, and that is no matter of depth."""
    ratio, own = gradient_through(layers, 1.0), gradient_through(layers, 0.02)
    shown = f"{ratio:g} times the last's in {layers} layers of width 64; {own:,.0f} with embeddings of 0.02, which "
    return Evidence((ratio,), shown + "the first RMSNorm divides by", "embeddings of unit size, untrained")


def zeros_of(kind: str, rule: Rule = "absmean") -> float:
    """Share of zeros when weights of a distribution become ternary: "normal" or "laplace"."""
    weight = drawn(512, 512)
    if kind == "laplace":
        weight = torch.distributions.Laplace(0.0, 1.0).icdf(torch.special.ndtr(weight.double()))
    return round((trits(weight, rule)[0] == 0).double().mean().item(), 3)


def delta_bytes(share: float, weights: int) -> float:
    """Bytes of an expert of so many weights stored as its changes from another, when such a share of them changed: the
    gaps between changes as the best Rice code, a bit for each step; from a 64th of the weights."""
    random = np.random.default_rng(0)
    shape = (weights // 64 // 5, 5)
    for least in (0, 1):  # old values and steps, which do not count; the ledger's figure drew them first
        random.integers(least, 3, shape, np.uint8)
    gaps = np.diff(np.flatnonzero(random.random(shape) < share), prepend=-1) - 1
    unary, low = min(
        ((int((gaps >> rice).sum()) + len(gaps), rice * len(gaps)) for rice in range(40)), key=sum
    )
    return 64 * sum(-(-bits // 8) for bits in (unary, low, len(gaps)))


@torch.inference_mode()
def diverged() -> float:
    """States that differ after 64 tokens, of a small model with experts as it starts, each read from a view of its
    own."""
    model = made("perspective-tiny", ("vocab_size", 250))
    looked = Perspectives(model, PerspectivesConfig())
    ids = text()[:1].tolist()
    _, base = read(model, ids, model.init_state(1), fresh=[True], reset=0)
    _, others = looked.others(ids, looked.copies(model.init_state(1)), fresh=[True], reset=0)
    rows = torch.cat([cast(PDRState, state.layers[1]).memory_BDR for state in (base, others)])
    return float(len(torch.unique(rows, dim=0)))
