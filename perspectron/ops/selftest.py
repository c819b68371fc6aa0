"""The test of the operations on a device: each backend that runs there, in float32, against the reference in float64.

Inputs are fixed. Gates are 0, 1 and 1e-30 beside others. An error is the largest difference over the largest value, of
each output and each gradient.

Shapes: as the operations have them; B batch, T time, H heads, D and V value widths, R and K columns, N tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.ops import attention, delta, drm, experts, gla, gru, lens, packed, packing, pdr
from perspectron.ops.drm_law import Law, State, Weights
from perspectron.ops.triton import scan as on_gpu

Tensors = tuple[Tensor, ...]
FORWARD, GRADIENTS = 2e-6, 1e-5
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """An operation on fixed inputs: `run(backend, *inputs)` gives its outputs; the backends beside "reference"; the
    bounds of its errors. Without a bound for gradients it has none."""

    op: str
    shape: str
    run: Callable[..., Tensors]
    backends: tuple[str, ...]
    inputs: Tensors
    forward: float = FORWARD
    gradients: float | None = GRADIENTS


@dataclass(frozen=True)
class Row:
    """The largest errors of one backend, their bounds, and the milliseconds of a pass, with its gradients."""

    op: str
    shape: str
    backend: str
    forward: float
    forward_bound: float
    gradients: float | None
    gradients_bound: float | None
    ms: float

    @property
    def holds(self) -> bool:
        return self.forward <= self.forward_bound and (
            self.gradients is None or self.gradients_bound is None or self.gradients <= self.gradients_bound
        )


def run(device: torch.device) -> Iterator[Row]:
    """A row for each operation and backend that runs on the device."""
    for case in cases(device):
        exact = _passed(
            case, "reference", tuple(x.double() if x.is_floating_point() else x for x in case.inputs)
        )
        for backend in case.backends:
            found = _passed(case, backend, case.inputs)
            errors = [_error(a, b) for a, b in zip(found, exact, strict=True)]
            count = len(errors) if case.gradients is None else len(errors) - _leaves(case.inputs)
            yield Row(
                case.op, case.shape, backend, max(errors[:count]), case.forward,
                max(errors[count:], default=None), case.gradients, _ms(case, backend, device),
            )  # fmt: skip


def _leaves(inputs: Tensors) -> int:
    return sum(x.is_floating_point() for x in inputs)


def _passed(case: Case, backend: str, inputs: Tensors) -> Tensors:
    """The outputs and, of a fixed weighting of them, the gradients."""
    if case.gradients is None:
        with torch.no_grad():
            return case.run(backend, *inputs)
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    outputs = case.run(backend, *inputs)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True)
    return *(x.detach() for x in outputs), *gradients


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest value; infinite where something is not finite."""
    error = float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


def _ms(case: Case, backend: str, device: torch.device) -> float:
    """The median milliseconds of a pass, which has been made once before."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _passed(case, backend, case.inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


# ---------------------------------------------------------------- cases


def cases(device: torch.device) -> list[Case]:
    """All cases on the device, small where Triton is interpreted."""
    made = [*_memories(device), *_others()]
    return [Case(**{**vars(case), "inputs": tuple(x.to(device) for x in case.inputs)}) for case in made]


def _drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def _gates(*shape: int) -> Tensor:
    """Gates of which a tenth each is 0, 1 and 1e-30."""
    draw = torch.Generator().manual_seed(2)
    kind, gate = torch.rand(shape, generator=draw), torch.sigmoid(3 * torch.randn(shape, generator=draw) + 2)
    for i, hard in enumerate((0.0, 1.0, 1e-30)):
        gate = gate.masked_fill((kind >= i / 10) & (kind < (i + 1) / 10), hard)
    return gate


def _sizes(device: torch.device) -> list[tuple[int, int, int, int]]:
    """B, T, D and R of the memories."""
    if device.type == "cuda":
        narrow = [(2, 300, 40, R) for R in (1, 2, 3, 8)]
        wide = [(2, 300, 96, 16), (2, 300, 100, 24), (4, 1024, 256, 64), (2, 300, 96, 128), (1, 300, 96, 256)]
        return [*narrow, *wide, (2, 1, 96, 64), (2, 5, 96, 16)]
    if "triton" in _kernels(torch.zeros(1, device=device)):
        return [(1, 19, 5, 3)]
    return [(2, 130, 40, 24), (2, 300, 96, 64)]


def _kernels(like: Tensor) -> tuple[str, ...]:
    """Triton's kernels, where they run."""
    return ("triton",) if on_gpu.obstacle(1, like) is None else ()


def _native(device: torch.device) -> tuple[str, ...]:
    return ("native",) if device.type == "cpu" and native.available() else ()


def _memories(device: torch.device) -> Iterator[Case]:
    """The memories with gates."""
    gpu = _kernels(torch.zeros(1, device=device))
    for B, T, D, R in _sizes(device):
        shape = f"B {B}, T {T}, D {D}, R {R}"
        q, k, v, state = _drawn((B, T, R), (B, T, R), (B, T, D), (B, D, R))
        yield Case("pdr", shape, _pdr, ("torch", *_native(device), *gpu), (q, k, v, _gates(B, T, D), state))
        q, k, v, state = _drawn((B, 2, T, D), (B, 2, T, D), (B, 2, T, R), (B, 2, D, R))
        shape = f"B {B}, T {T}, H 2, K {D}, V {R}"
        others = ("torch", "auto", *gpu)
        yield Case("gla", shape, _gla, others, (q, k, v, _gates(B, 2, T, D), state))
        yield Case("ssd", shape, _gla, others, (q[:, :1], k[:, :1], v, _gates(B, 2, T, 1), state))
    B, T, K = 2, min(T, 130), 16
    for op, width in (("delta", K), ("gated delta", 1)):
        q, k, v, state = _drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, 24), (B, 2, K, 24))
        k, shape = F.normalize(k, dim=-1), f"B {B}, T {T}, H 2, K {K}, V 24"
        inputs = (q, k, 1.5 * k, v, _gates(B, 2, T, width), state)
        yield Case(op, shape, _delta, ("torch", "auto", *gpu), inputs, 1e-5, 1e-4)
    rwkv7 = (q, 0.5 * k, v, -k, 0.5 * k, _gates(B, 2, T, K), state)
    yield Case("rwkv7", shape, _rwkv7, ("torch", "auto", *gpu), rwkv7, 1e-5, 1e-4)


def _pdr(backend: str, *inputs: Tensor) -> Tensors:
    return pdr.scan(*inputs, backend=backend)


def _gla(backend: str, *inputs: Tensor) -> Tensors:
    return gla.scan(*inputs, backend=backend)


def _delta(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan(*inputs, backend=backend)


def _rwkv7(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan_rwkv7(*inputs, backend=backend)


def _others() -> Iterator[Case]:
    """The other operations that have a reference."""
    B, T, K = 2, 70, 16
    shape, loose = f"B {B}, T {T}, H 2, K {K}", (1e-5, 1e-4)
    q, k, v = _drawn((B, 4, T, K), (B, 2, T, K), (B, 2, T, K))
    for op, window in (("attention", T), ("windowed", 24)):
        yield Case(op, shape, _attention(window), ("auto",), (q, k, v), *loose)
    q, k, v, u, w = _drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, K), (2, K), (2, 3))
    yield Case("lens", shape, _lens, ("torch",), (q, k, v, u, w), *loose)
    x, wi, wh, bi, bh, h = _drawn(
        (B, T, 2, 2, K), (2, K, 3 * K), (2, K, 3 * K), (2, 3 * K), (2, 3 * K), (B, 2, 2, K)
    )
    cells = (x, wi / 4, wh / 4, bi, bh, h)
    shape = f"B {B}, T {T}, G 2, R 2, D {K}"
    yield Case("gru", shape, _gru, ("torch", "auto"), cells, *loose)
    yield Case("drm", f"B {B}, T 30, S 7, N 5, R 3", _drm, ("torch", "auto"), _drm_inputs(B, 30), *loose)
    x, gate, up, down = _drawn((40, K), (3, 24, K), (3, 24, K), (3, K, 24))
    networks = (x, gate / 4, up / 4, down / 4, torch.arange(40) % 3)
    yield Case("experts", f"N 40, D {K}, F 24, E 3", _experts, ("torch",), networks, *loose)
    x, scales = _drawn((5, 200), (37,))
    matrix = (x, scales.abs() + 0.1, torch.arange(37 * 200).view(37, 200) % 3)
    yield Case("packed", "T 5, N 37, K 200", _packed, ("torch", "auto"), matrix, 1e-5, None)


def _attention(window: int) -> Callable[..., Tensors]:
    def run(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        (B, _, T, K), G = q.shape, k.shape[1]
        if backend == "reference":
            k, v = (x.repeat_interleave(q.shape[1] // G, 1) for x in (k, v))
            seen = q.new_ones(T, T, dtype=torch.bool).tril() & q.new_ones(T, T, dtype=torch.bool).triu(
                1 - window
            )
            return ((q @ k.mT * K**-0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v,)
        if window == T:
            return (attention.attend(q, k, v, causal=True),)
        before = torch.zeros(B, dtype=torch.int64, device=q.device)
        ring = (k.new_zeros(B, G, window, K), v.new_zeros(B, G, window, K))
        at = attention.places(before, T, None, None)
        return (attention.windowed(q, k, v, ring, before, at, fresh=True),)

    return run


def _lens(backend: str, q: Tensor, k: Tensor, v: Tensor, u: Tensor, w: Tensor) -> Tensors:
    if backend == "reference":
        return (lens.reference(q, k, v, u, w),)
    return (attention.attend(*lens.features(q, k, u, w), v, causal=True, scale=q.shape[-1] ** -0.5),)


def _gru(backend: str, x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, h: Tensor) -> Tensors:
    memories, _, last = gru.scan(x, gru.Cells(wi, wh, bi, bh), 0.9, h, backend=backend)
    return memories, last


LAW = Law(
    directions=5, rank=3, dt=0.3, radius=2.0, squash=True, strength=0.4, damping=0.3, metric_floor=1e-4, gate_bias=-1.0,
    gate_temperature=1.5, gate_top_k=0, gate_renorm=False, direction_norm=True, geometry_interval=1,
)  # fmt: skip


def _drm_inputs(B: int, T: int) -> Tensors:
    """Tokens, the first state and the weights: S 7, E 4, H 6."""
    S, E, H, N, R = 7, 4, 6, LAW.directions, LAW.rank
    weights = [(S,), (3 * H, S), (3 * H,), (H, E), (2, H, H), (2 * H,), (N * (S + 1), H), (N * (S + 1),)]
    weights += [(S + R * S, H), (S + R * S,), (N, H), (N,)]
    e, z, *drawn = _drawn((B, T, E), (B, S), *weights)
    return e, z, *(x * x.shape[-1] ** -0.5 for x in drawn)


def _drm(backend: str, e: Tensor, z: Tensor, *weights: Tensor) -> Tensors:
    B = len(e)
    state = State(z, z.new_zeros(B, 0), torch.zeros(B, dtype=torch.int64, device=z.device))
    states, after, _ = drm.scan(e, state, Weights(*weights), LAW, backend=backend)
    return states, after.z_BS


def _experts(backend: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, expert: Tensor) -> Tensors:
    if backend == "reference":
        return (experts.reference(x, expert, gate, up, down),)
    return (experts.swiglu(x, expert, gate, up, down)[0],)


def _packed(backend: str, x: Tensor, scales: Tensor, codes: Tensor) -> Tensors:
    matrix = packing.pack(codes.to(torch.uint8), scales.float(), None, "ternary")
    return (packed.linear(x.float(), matrix, backend=backend).double(),)
