"""Measures that run something small: an operation, a model that was just initialised, a gate that is set.

All are seeded, and rounded where processors differ. Shapes: B batch, T time, D model width, R state rank, H heads, K
head width, N directions, S state width.
"""

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import presets
from perspectron.block import Block, RouteGate
from perspectron.claims.claim import Found
from perspectron.config import RouteGatedConfig
from perspectron.eval.gates import gates
from perspectron.mixers.adr import ADR
from perspectron.mixers.drm import DRM
from perspectron.mixers.lens import Lens
from perspectron.mixers.pdr import PDR
from perspectron.model import LanguageModel, build
from perspectron.ops import drm, gru, lens, pdr
from perspectron.ops.drm_law import Geometry, State
from perspectron.prune import prune
from perspectron.quant.ternary import trits
from perspectron.state import load_state, save_state
from perspectron.stream.delta import encode

LONG, SHORT = 1 << 17, 1 << 10  # tokens


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1), the same in every precision."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def below(error: float, bound: float) -> Found:
    """An error of rounding, which differs from processor to processor: shown as what it stays under."""
    return Found((error,), f"below {bound:.0e}" if error < bound else f"{error:.2g}")


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@cache
def made(name: str, *sizes: tuple[str, Any]) -> LanguageModel:
    """A preset as it starts."""
    return build(presets.get(name, **dict(sizes))).eval()


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
    """How much the logits of earlier tokens change when the last token does."""
    ids = text().clone()
    with torch.no_grad():
        before = made(name)(ids).logits[:, :-1]
        ids[:, -1] = (ids[:, -1] + 1) % 250
        return apart(before, made(name)(ids).logits[:, :-1])


# ---------------------------------------------------------------- PDR


def _recurrence(tokens: int, dtype: torch.dtype, D: int = 16, R: int = 8) -> list[Tensor]:
    """q, k, v of unit size and gates about 0.95."""
    q, k, v, p = (
        drawn(1, tokens, n, seed=i, dtype=torch.float64) for i, n in enumerate((R, R, D, D))
    )
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
    return sum(layer.memory_BDR.abs().sum().item() for layer in made("perspective-tiny-dense", ("layers", 3)).init_state(2).layers)


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
    model(ids, targets=ids).objective().backward()  # type: ignore[no-untyped-call]
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
    found = encode(*codes, codes[0].size)
    assert found is not None
    return 64 * (len(found.quotients) + len(found.remainders) + len(found.steps))


# ---------------------------------------------------------------- lens


@cache
def _heads() -> tuple[Tensor, ...]:
    """q, k, v [1,2,16,8], u [2,8] and a mixture [2,3]."""
    q, k, v = (drawn(1, 2, 16, 8, seed=i).double() for i in range(3))
    return q, k, v, drawn(2, 8, seed=3).double(), drawn(2, 3, seed=4).double().softmax(-1)


def diagonal() -> float:
    """|S − Sᵀ| on the diagonal."""
    q, k, *_ = _heads()
    S = q @ k.mT
    return apart(S.diagonal(dim1=-2, dim2=-1), S.mT.diagonal(dim1=-2, dim2=-1))


def centred() -> Found:
    """Change of the outputs when the mean is taken off d: a shift of u by what all keys have in common."""
    q, k, v, u, w = _heads()
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)
    d = torch.einsum("bhtk,hk->bht", k, u)
    outputs = []
    for shift in (d, d - d.mean(-1, keepdim=True)):
        scores = w[:, 0, None, None] * (q @ k.mT) * 8**-0.5 + w[:, 2, None, None] * shift[:, :, None]
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    return below(apart(*outputs), 1e-12)


def as_query_bias() -> Found:
    """Difference between discoverability and a bias on the queries."""
    q, k, v, u, w = _heads()
    with_u = lens.reference(q, k, v, u, w * torch.tensor([1.0, 0.0, 1.0]))
    biased = q + (w[:, 2:] / w[:, :1] * 8**0.5 * u)[:, None]
    return below(apart(with_u, lens.reference(biased, k, v, u, w * torch.tensor([1.0, 0.0, 0.0]))), 1e-12)


def mixture() -> tuple[float, ...]:
    """The lenses' weights at the start."""
    return tuple(round(x, 4) for x in first("lens-tiny", Lens).weights()[0].tolist())


def mixture_sum() -> float:
    return round(first("lens-tiny", Lens).weights().sum(-1).mean().item(), 6)


def finder_spread() -> float:
    """Standard deviation of all u."""
    found = [m.u_HK.flatten() for m in made("lens-20m").modules() if isinstance(m, Lens)]
    return round(torch.cat(found).std().item(), 4)


def cache_at(g: float) -> float:
    """Bytes of a lens model's cache with every route gate at g, over those as it starts."""
    model = build(presets.get("lens-tiny"))
    with torch.no_grad():
        for block in cast("list[Block]", model.blocks):
            block.route.raw_1.fill_(math.log(g / (1 - g)))
        return model(text()).state.nbytes / made("lens-tiny")(text()).state.nbytes


def cache_without(removed: int) -> float:
    """Bytes of the cache with attention taken out of so many of ten blocks, over those with all."""
    whole = made("lens-tiny", ("layers", 10))
    sizes = [m.init_state(1, capacity=1024).nbytes for m in (whole, prune(whole, range(removed)))]
    return round(sizes[1] / sizes[0], 4)


def anneal(steps: int, delta: float = 1e-4) -> float:
    """g after so many updates of the schedule."""
    gate = RouteGate(RouteGatedConfig(1.0, delta, 0))
    with torch.no_grad():
        gate.init_weights(torch.Generator())
    gate.set_step(steps)
    return round(gate().item(), 4)


@cache
def _routed(g: float, scale: float) -> tuple[float, float]:
    """Parts of a lens block's output that are attention's and its network's: slopes by either, GPT-2's being 1 and 1."""
    model = build(presets.get("lens-tiny", route_scale=scale, context=False))
    block, x_BTD = cast(Block, model.blocks[0]), drawn(1, 4, 128)
    with torch.no_grad():
        block.route.raw_1.fill_(math.log(g / (1 - g)))
        state = block.init_state(1, torch.device("cpu"), torch.float32)
        y_BTD = block(x_BTD, state, block.ffn, None, None)[0]
        a_BTD = block.mixer(block.mixer_norm(x_BTD), state)[0]
        m_BTD = block.ffn(block.ffn_norm(x_BTD + a_BTD), a_BTD)[0]
        parts = torch.stack([a_BTD.flatten(), m_BTD.flatten()], 1).double()
        slopes = torch.linalg.lstsq(parts, (y_BTD - x_BTD).flatten()[:, None].double()).solution[:, 0]
    attention, network = (round(slope, 3) for slope in slopes.tolist())
    return attention, network


def routed(g: float, scale: float = 1.0) -> Found:
    values = _routed(g, scale)
    return Found(values, f"attention {values[0]:.0%}, MLP {values[1]:.0%}")


def routed_part(g: float, part: str) -> float:
    """ "attention" or "mlp"."""
    return _routed(g, 1.0)[part == "mlp"]


# ---------------------------------------------------------------- ADR


def largest_memory(tokens: int = 2000) -> float:
    """|h| after so many tokens of size 100."""
    mixer = first("adr-tiny", ADR)
    H, K = mixer.config.heads, mixer.input_GKF.shape[1]
    x = 100 * drawn(1, tokens, 2 * H, 1, K)
    with torch.no_grad():
        memories, _, _ = gru.scan(x, mixer.cells(), mixer.config.gamma, torch.zeros(1, 2 * H, 1, K))
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


# ---------------------------------------------------------------- DRM


@cache
def geometry() -> tuple[Geometry, Any]:
    """Directions, gates and metric at what 128 random tokens met, and what each met."""
    mixer, law = first("drm-104k", DRM), first("drm-104k", DRM).law()
    model = made("drm-104k")
    with torch.no_grad():
        state = mixer.init_state(2, torch.device("cpu"), torch.float32)
        before = State(state.z_BD, state.geometry_BF, state.length_B)
        _, _, trace = drm.scan(model.embedding(text()), before, mixer.weights(), law)
        assert trace is not None
        h = F.gelu(mixer.read(trace.before_BTS.flatten(0, 1)))
        return drm.geometry(h, mixer.weights(), law), trace


def least_eigenvalue() -> float:
    """Of G over those tokens, at least the floor."""
    return torch.linalg.eigvalsh(drm.metric(geometry()[0]).double()).min().item()


def energy_error() -> Found:
    """Of the action term against mean Δzᵀ G Δz."""
    now, trace = geometry()
    v = trace.v_BTS.flatten(0, 1)
    energy = (v[:, None] @ drm.metric(now) @ v[:, :, None]).mean()
    _, _, terms = made("drm-104k").train().hidden(text())
    made("drm-104k").eval()
    return below(abs(energy - terms["action"].value).item() / energy.item(), 1e-5)


def solve_error() -> Found:
    """Of the fast loop's Woodbury solve against a dense one."""
    mixer, model = first("drm-104k", DRM), made("drm-104k")
    with torch.no_grad():
        state = mixer.init_state(2, torch.device("cpu"), torch.float32)
        before = State(state.z_BD, state.geometry_BF, state.length_B)
        given = (model.embedding(text()), before, mixer.weights(), mixer.law())
        return below(apart(drm.scan(*given)[0], drm.scan(*given, backend="reference")[0]), 1e-4)


def outside_span(step: int) -> float:
    """Share of |v|² outside the span of the directions after so many updates of the warm-up, in hundredths of a
    percent."""
    model = build(presets.get("drm-104k"))
    model.set_step(step)
    return round(gates(model, text())["drm_outside"][0], 4)


def strength(step: int) -> float:
    mixer = build(presets.get("drm-104k")).blocks[0].mixer
    assert isinstance(mixer, DRM)
    mixer.set_step(step)
    return round(float(mixer.strength), 4)
