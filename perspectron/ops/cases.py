"""The cases of `perspectron.ops.selftest`: here the operations that recur, in `perspectron.ops.layer_cases` the others.

Shapes: as the operations have them; B batch, T time, H heads, D and V value widths, R and K columns.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.designs.adr import gru
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Law, State, Weights
from perspectron.designs.perspective import eligibility
from perspectron.ops import conv, delta, gla, layer_cases, pdr
from perspectron.ops.case import LOOSE, Case, Tensors, drawn, gates, rounded, steps
from perspectron.ops.triton import scan as on_gpu


def cases(device: torch.device) -> list[Case]:
    """All cases for a device, their inputs on the CPU; small where Triton is interpreted."""
    return [*_memories(device), *_deltas(device), *_others(device)]


# ---------------------------------------------------------------- memories with gates


def _interpreted(device: torch.device) -> bool:
    return device.type == "cpu" and bool(_kernels(device))


def _sizes(device: torch.device) -> list[tuple[int, int, int, int]]:
    """B, T, D and R of the memories."""
    odd = [(1, T, 96 if device.type == "cuda" else 24, 16) for T in (1, 5, 63, 65, 127, 257)]
    if device.type == "cuda":
        wide = [(4, 1024, 256, 64), (2, 300, 100, 24), (2, 300, 96, 128), (1, 300, 96, 256)]
        return [*odd, *wide, *((2, 300, 40, R) for R in (8, 3, 2, 1))]
    return [(1, 19, 5, 3)] if _interpreted(device) else [(2, 130, 40, 24), *odd]


def _kernels(device: torch.device) -> tuple[str, ...]:
    """Triton's kernels, where they run."""
    return ("triton",) if on_gpu.obstacle(1, torch.zeros(1, device=device)) is None else ()


def _native(device: torch.device) -> tuple[str, ...]:
    return ("native",) if device.type == "cpu" and native.available() else ()


def _memories(device: torch.device) -> Iterator[Case]:
    gpu = _kernels(device)
    for B, T, D, R in _sizes(device):
        q, k, v, state = drawn((B, T, R), (B, T, R), (B, T, D), (B, D, R))
        shape, backends = f"B {B}, T {T}, D {D}, R {R}", ("torch", *_native(device), *gpu)
        first = Case("pdr", shape, _pdr, backends, (q, k, v, gates(B, T, D), state))
        q, k, v, state = drawn((B, 2, T, D), (B, 2, T, D), (B, 2, T, R), (B, 2, D, R))
        shape, others = f"B {B}, T {T}, H 2, K {D}, V {R}", ("torch", "auto", *gpu)
        second = Case("gla", shape, _gla, others, (q, k, v, gates(B, 2, T, D), state))
        third = Case("ssd", shape, _gla, others, (q[:, :1], k[:, :1], v, gates(B, 2, T, 1), state))
        for case in (first, second, third):
            yield case
            if T in (1, 63):  # a step, and a prompt
                yield replace(steps(case), backends=("auto", *(x for x in case.backends if x != "auto")))
            if T == 65:  # the kernels of Triton take float32, to which the operation brings it
                yield rounded(case)


def _deltas(device: torch.device) -> Iterator[Case]:
    B, backends = 2, ("torch", "auto", *_kernels(device))
    sizes = [(T, 16, 24) for T in ((7,) if _interpreted(device) else (130, 1, 5, 31, 33, 65))]
    wide = (
        [(70, 64, 64), (70, 128, 128)] if device.type == "cuda" else []
    )  # as models have them: RWKV-7, the others
    for T, K, V in sizes + wide:
        q, k, v, state = drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, V), (B, 2, K, V))
        k, shape = F.normalize(k, dim=-1), f"B {B}, T {T}, H 2, K {K}, V {V}"
        made = []
        for op, width in (("delta", K), ("gated delta", 1)) if K != 64 else ():
            inputs = (q, k, 1.5 * k, v, gates(B, 2, T, width), state)
            made.append(Case(op, shape, _delta, backends, inputs, *LOOSE))
        rwkv7 = (q, 0.5 * k, v, -k, 0.5 * k, gates(B, 2, T, K), state)
        if K != 128:
            made.append(Case("rwkv7", shape, _rwkv7, backends, rwkv7, *LOOSE))
        for case in made:
            yield case
            if T == 1:
                yield steps(case)
            if T == 33:
                yield rounded(case)


def _pdr(backend: str, *inputs: Tensor) -> Tensors:
    return pdr.scan(*inputs, backend=backend)


def _gla(backend: str, *inputs: Tensor) -> Tensors:
    return gla.scan(*inputs, backend=backend)


def _delta(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan(*inputs, backend=backend)


def _rwkv7(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan_rwkv7(*inputs, backend=backend)


# ---------------------------------------------------------------- others that recur


def _others(device: torch.device) -> Iterator[Case]:
    """The other operations that have a reference."""
    yield from _recurrent()
    yield from layer_cases.cases(_kernels(device))


def _recurrent() -> Iterator[Case]:
    B, K = 2, 16
    for T in (70, 1):
        x, wi, wh, bi, bh, h = drawn(
            (B, T, 2, 2, K), (2, K, 3 * K), (2, K, 3 * K), (2, 3 * K), (2, 3 * K), (B, 2, 2, K)
        )
        shape, cells = f"B {B}, T {T}, G 2, R 2, D {K}", (x, wi / 4, wh / 4, bi, bh, h)
        yield (case := Case("gru", shape, _gru, ("torch", "auto"), cells, *LOOSE))
        yield steps(case) if T == 1 else rounded(case)
    for T in (30, 1):
        shape = f"B {B}, T {T}, S 7, N 5, R 3"
        yield (case := Case("drm", shape, _drm, ("torch", "auto"), _drm_inputs(B, T), *LOOSE))
        yield steps(case) if T == 1 else rounded(case)
    for T in (1, 65):
        u, window, weight, bias = drawn((B, T, K), (B, 3, K), (K, 1, 4), (K,))
        begins = torch.arange(T).expand(B, T) % 31 == torch.tensor([[5], [9]])
        inputs = (u, window, weight, bias, begins)
        yield (case := Case("conv", f"B {B}, T {T}, C {K}, W 4", _conv, ("auto",), inputs, *LOOSE))
        yield steps(case)
    T, D, R, r = 33, 12, 5, 3
    k, v, u, slope, memory, trace = drawn((B, T, R), (B, T, D), (B, T, r), (B, T, D), (B, D, R), (B, r, D, R))
    traced = (k, v, gates(B, T, D), u, slope, memory, trace)
    yield Case("eligibility", f"B {B}, T {T}, D {D}, R {R}, r {r}", _traces, ("auto",), traced, 1e-5, None)


def _gru(backend: str, x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, h: Tensor) -> Tensors:
    memories, raw, last = gru.scan(x, gru.Cells(wi, wh, bi, bh), 0.9, h, backend=backend, raw=True)
    assert raw is not None
    return memories, raw, last


LAW = Law(
    directions=5, rank=3, dt=0.3, radius=2.0, squash=True, strength=0.4, damping=0.3, metric_floor=1e-4, gate_bias=-1.0,
    gate_temperature=1.5, gate_top_k=0, gate_renorm=False, direction_norm=True, geometry_interval=1,
)  # fmt: skip


def _drm_inputs(B: int, T: int) -> Tensors:
    """Tokens, the first state and the weights: S 7, E 4, H 6."""
    S, E, H, N, R = 7, 4, 6, LAW.directions, LAW.rank
    weights = [(S,), (3 * H, S), (3 * H,), (H, E), (2, H, H), (2 * H,), (N * (S + 1), H), (N * (S + 1),)]
    weights += [(S + R * S, H), (S + R * S,), (N, H), (N,)]
    e, z, *others = drawn((B, T, E), (B, S), *weights)
    return e, z, *(x * x.shape[-1] ** -0.5 for x in others)


def _drm(backend: str, e: Tensor, z: Tensor, *weights: Tensor) -> Tensors:
    B = len(e)
    state = State(z, z.new_zeros(B, 0), torch.zeros(B, dtype=torch.int64, device=z.device))
    states, after, _ = drm.scan(e, state, Weights(*weights), LAW, backend=backend)
    return states, after.z_BS


def _conv(backend: str, u: Tensor, window: Tensor, weight: Tensor, bias: Tensor, begins: Tensor) -> Tensors:
    if backend != "reference":
        return conv.convolve(u, window, weight, bias, begins, None)
    T, Z = u.shape[1], window.shape[1]
    all_BSC = torch.cat([window, u], 1)
    document_BS = F.pad(begins.long().cumsum(1), (Z, 0))
    outputs = []
    for t in range(Z, Z + T):
        same = (document_BS[:, t - Z : t + 1] == document_BS[:, t : t + 1])[:, :, None]
        outputs.append(F.silu((all_BSC[:, t - Z : t + 1] * same * weight[:, 0].T).sum(1) + bias))
    same = (document_BS[:, T:] == document_BS[:, -1:])[:, :, None]
    return torch.stack(outputs, 1), all_BSC[:, T:] * same


def _traces(
    backend: str, k: Tensor, v: Tensor, gamma: Tensor, u: Tensor, slope: Tensor, memory: Tensor, trace: Tensor
) -> Tensors:
    if backend != "reference":
        return (eligibility.carried(k, v, gamma, u, memory, trace, slope_BTD=slope),)
    for t in range(k.shape[1]):
        g = gamma[:, t, :, None]
        update = v[:, t, :, None] * k[:, t, None]
        own = (u[:, t, :, None] * slope[:, t, None])[..., None] * update[:, None]
        trace = (
            g[:, None] * trace
            + (u[:, t, :, None] * (g * (1 - g))[:, None, :, 0])[..., None] * memory[:, None]
        )
        trace, memory = trace + own, g * memory + update
    return (trace,)
