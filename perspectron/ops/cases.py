"""The cases of `perspectron.ops.selftest`: operations on fixed inputs.

Gates are 0, 1 and 1e-30 beside others, states are not empty at the start, and what is carried on is an output.

Bounds: float32 sums of some hundred terms differ by a few units of 6e-8. U is the unit roundoff of bfloat16: an
operation that computes in float32 from bfloat16 inputs is compared on those very inputs, so that its outputs have
float32's bounds and a gradient, which is rounded to bfloat16 once, U beside it; one that computes in bfloat16 rounds a
few times, and has so many U.

Shapes: as the operations have them; B batch, T time, H heads, D and V value widths, R and K columns, N tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.ops import (
    attention,
    conv,
    delta,
    drm,
    eligibility,
    experts,
    fused,
    gla,
    gru,
    lens,
    packed,
    packing,
    pdr,
)
from perspectron.ops.drm_law import Law, State, Weights
from perspectron.ops.triton import scan as on_gpu

Tensors = tuple[Tensor, ...]
FORWARD, GRADIENTS = 2e-6, 1e-5
LOOSE = (1e-5, 1e-4)
U = 2**-8


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


def cases(device: torch.device) -> list[Case]:
    """All cases for a device, their inputs on the CPU; small where Triton is interpreted."""
    return [*_memories(device), *_deltas(device), *_others(device)]


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


def _half(case: Case, forward: float, gradients: float | None) -> Case:
    """The case with inputs of bfloat16. (1e-30 stays what it is but for rounding.)"""
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in case.inputs)
    return replace(case, shape=f"{case.shape}, bf16", inputs=inputs, forward=forward, gradients=gradients)


def _rounded(case: Case) -> Case:
    """The same of an operation that computes in float32."""
    return _half(case, case.forward, None if case.gradients is None else U + case.gradients)


def _steps(case: Case) -> Case:
    """The same without gradients, where other paths run."""
    return replace(case, op=f"{case.op}, no gradients", gradients=None)


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
        q, k, v, state = _drawn((B, T, R), (B, T, R), (B, T, D), (B, D, R))
        shape, backends = f"B {B}, T {T}, D {D}, R {R}", ("torch", *_native(device), *gpu)
        first = Case("pdr", shape, _pdr, backends, (q, k, v, _gates(B, T, D), state))
        q, k, v, state = _drawn((B, 2, T, D), (B, 2, T, D), (B, 2, T, R), (B, 2, D, R))
        shape, others = f"B {B}, T {T}, H 2, K {D}, V {R}", ("torch", "auto", *gpu)
        second = Case("gla", shape, _gla, others, (q, k, v, _gates(B, 2, T, D), state))
        third = Case("ssd", shape, _gla, others, (q[:, :1], k[:, :1], v, _gates(B, 2, T, 1), state))
        for case in (first, second, third):
            yield case
            if T in (1, 63):  # a step, and a prompt
                yield replace(_steps(case), backends=("auto", *(x for x in case.backends if x != "auto")))
            if T == 65:  # the kernels of Triton take float32, to which the operation brings it
                yield _rounded(case)


def _deltas(device: torch.device) -> Iterator[Case]:
    B, K, V = 2, 16, 24
    for T in (7,) if _interpreted(device) else (130, 1, 5, 31, 33, 65):
        q, k, v, state = _drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, V), (B, 2, K, V))
        k, shape = F.normalize(k, dim=-1), f"B {B}, T {T}, H 2, K {K}, V {V}"
        made = []
        for op, width in (("delta", K), ("gated delta", 1)):
            inputs = (q, k, 1.5 * k, v, _gates(B, 2, T, width), state)
            made.append(Case(op, shape, _delta, ("torch", "auto"), inputs, *LOOSE))
        rwkv7 = (q, 0.5 * k, v, -k, 0.5 * k, _gates(B, 2, T, K), state)
        made.append(Case("rwkv7", shape, _rwkv7, ("torch", "auto"), rwkv7, *LOOSE))
        for case in made:
            yield case
            if T == 1:
                yield _steps(case)
            if T == 33:
                yield _rounded(case)


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
    yield from _attentions()
    yield from _pointwise()
    yield from _networks()
    yield from _matrices()


def _recurrent() -> Iterator[Case]:
    B, K = 2, 16
    for T in (70, 1):
        x, wi, wh, bi, bh, h = _drawn(
            (B, T, 2, 2, K), (2, K, 3 * K), (2, K, 3 * K), (2, 3 * K), (2, 3 * K), (B, 2, 2, K)
        )
        shape, cells = f"B {B}, T {T}, G 2, R 2, D {K}", (x, wi / 4, wh / 4, bi, bh, h)
        yield (case := Case("gru", shape, _gru, ("torch", "auto"), cells, *LOOSE))
        yield _steps(case) if T == 1 else _rounded(case)
    for T in (30, 1):
        shape = f"B {B}, T {T}, S 7, N 5, R 3"
        yield (case := Case("drm", shape, _drm, ("torch", "auto"), _drm_inputs(B, T), *LOOSE))
        yield _steps(case) if T == 1 else _rounded(case)
    for T in (1, 65):
        u, window, weight, bias = _drawn((B, T, K), (B, 3, K), (K, 1, 4), (K,))
        begins = torch.arange(T).expand(B, T) % 31 == torch.tensor([[5], [9]])
        inputs = (u, window, weight, bias, begins)
        yield (case := Case("conv", f"B {B}, T {T}, C {K}, W 4", _conv, ("auto",), inputs, *LOOSE))
        yield _steps(case)
    T, D, R, r = 33, 12, 5, 3
    k, v, u, slope, memory, trace = _drawn(
        (B, T, R), (B, T, D), (B, T, r), (B, T, D), (B, D, R), (B, r, D, R)
    )
    traced = (k, v, _gates(B, T, D), u, slope, memory, trace)
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
    e, z, *drawn = _drawn((B, T, E), (B, S), *weights)
    return e, z, *(x * x.shape[-1] ** -0.5 for x in drawn)


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


# ---------------------------------------------------------------- attention


def _attentions() -> Iterator[Case]:
    B, K = 2, 16
    for T in (70, 1, 5, 65):
        shape = f"B {B}, T {T}, H 4, G 2, K {K}"
        q, k, v, old_k, old_v = _drawn((B, 4, T, K), (B, 2, T, K), (B, 2, T, K), (B, 2, 24, K), (B, 2, 24, K))
        whole = Case("attention", shape, _attention, ("auto",), (q, k, v), *LOOSE)
        window = Case("windowed", f"{shape}, W 24", _window, ("auto",), (q, k, v, old_k, old_v), *LOOSE)
        more = Case("cached", f"{shape}, S 24", _cache, ("auto",), (q, k, v, old_k, old_v), *LOOSE)
        yield from (whole, window, more)
        if T in (1, 65):
            yield from map(_steps, (whole, window, more))
        if T == 70:  # weights, products and outputs are rounded
            yield from (_half(case, 4 * U, 8 * U) for case in (whole, window))
            q, k, v, u, w = _drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, K), (2, K), (2, 3))
            yield Case("lens", f"B {B}, T {T}, H 2, K {K}", _lens, ("torch",), (q, k, v, u, w), *LOOSE)
    (x,) = _drawn((B, 3, 65, K))
    yield (case := Case("rope", f"B {B}, T 65, H 3, K {K}", _rope, ("auto",), (x,)))
    yield _half(case, 2 * U, 2 * U)


def _seen(q: Tensor, k: Tensor, v: Tensor, before: int, window: int) -> Tensor:
    """The plain formula: token t of q, the `before + t`-th of the keys, sees so many keys up to its own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    back = torch.arange(before, before + q.shape[2], device=q.device)[:, None]
    back = back - torch.arange(k.shape[2], device=q.device)
    hidden = (back < 0) | (back >= window)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def _attention(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    if backend == "reference":
        return (_seen(q, k, v, 0, q.shape[2]),)
    return (attention.attend(q, k, v, causal=True),)


def _window(backend: str, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensors:
    """A chunk after a full window, and the ring afterwards."""
    B, T, W = len(q), q.shape[2], old_k.shape[2]
    if backend == "reference":
        k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        return _seen(q, k, v, W, W), *(x[:, :, T:].roll(T % W, 2) for x in (k, v))
    before = torch.full((B,), W, device=q.device)
    at = attention.places(before, T, None, None)
    ring = attention.write(old_k, k, before, at), attention.write(old_v, v, before, at)
    if T == 1 and not torch.is_grad_enabled():
        return attention.stepped(q, ring, at), *ring
    return attention.windowed(q, k, v, (old_k, old_v), before, at), *ring


def _cache(backend: str, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensors:
    """A chunk after as many tokens as a third of the cache has slots."""
    B, T, past = len(q), q.shape[2], old_k.shape[2] // 3
    if backend == "reference":
        k, v = torch.cat([old_k[:, :, :past], k], 2), torch.cat([old_v[:, :, :past], v], 2)
        return (_seen(q, k, v, past, k.shape[2]),)
    before = torch.full((B,), past, device=q.device)
    at = attention.places(before, T, None, None)
    return (attention.cached(q, k, v, (old_k, old_v), before, at),)


def _lens(backend: str, q: Tensor, k: Tensor, v: Tensor, u: Tensor, w: Tensor) -> Tensors:
    if backend == "reference":
        return (lens.reference(q, k, v, u, w),)
    return (attention.attend(*lens.features(q, k, u, w), v, causal=True, scale=q.shape[-1] ** -0.5),)


def _rope(backend: str, x: Tensor) -> Tensors:
    at = torch.arange(x.shape[2], device=x.device).expand(len(x), -1) + 1000
    if backend != "reference":
        return (attention.rope(x, attention.angles(at, x.shape[-1], 1e4)),)
    angle = at[:, None, :, None] * 1e4 ** (
        -torch.arange(0, 1, 2 / x.shape[-1], dtype=torch.float64, device=x.device)
    )
    a, b = x.chunk(2, -1)
    return (torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1),)


# ---------------------------------------------------------------- between the products


def _pointwise() -> Iterator[Case]:
    """Each computes in float32 or rounds what it reads again once or twice."""
    x, y, weight, last, mix = _drawn((3, 65, 40), (3, 65, 40), (40,), (3, 40), (2, 40))
    target = torch.arange(65) * 7 % 40
    target[::9] = fused.IGNORE
    begins = torch.arange(65).expand(3, 65) % 20 == 3
    shape = "N 195, D 40"
    for op, run, inputs, forward, gradients in (
        ("entropy", _entropy, (x[0], target), 1e-5, 3 * U),
        ("norm", _norm, (x, weight), 4 * U, 4 * U),
        ("gated", _gated, (x, y), 2 * U, 3 * U),
        ("gelu", _gelu, (x,), 2 * U, 2 * U),
        ("decayed", _decayed, (x, y), 2 * U, 2 * U),
        ("shifted", _shifted, (x, last, mix, begins), 4 * U, 4 * U),
    ):
        yield (case := Case(op, shape, run, ("auto",), inputs, *LOOSE))
        yield _half(case, forward, gradients)


def _entropy(backend: str, logits: Tensor, target: Tensor) -> Tensors:
    if backend != "reference":
        return fused.entropies(logits, target), fused.entropy(logits, target)
    there = target != fused.IGNORE
    picked = logits.log_softmax(-1).gather(1, target.clamp_min(0)[:, None])[:, 0]
    each = -picked.masked_fill(~there, 0)
    return each, each.sum()


def _norm(backend: str, x: Tensor, weight: Tensor) -> Tensors:
    if backend == "reference":
        return (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight,)
    norm = fused.RMSNorm(len(weight), eps=1e-5, device=x.device, dtype=x.dtype)
    return (torch.func.functional_call(norm, {"weight": weight}, (x,)),)


def _gated(backend: str, a: Tensor, b: Tensor) -> Tensors:
    return (a / (1 + (-a).exp()) * b if backend == "reference" else fused.gated(a, b),)


def _gelu(backend: str, x: Tensor) -> Tensors:
    if backend != "reference":
        return (fused.gelu(x),)
    return (0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),)


def _decayed(backend: str, p: Tensor, v: Tensor) -> Tensors:
    gamma = torch.sigmoid(p)
    return (gamma, (1 - gamma**2).sqrt() * v) if backend == "reference" else fused.decayed(p, v)


def _shifted(backend: str, x: Tensor, last: Tensor, mix: Tensor, begins: Tensor) -> Tensors:
    if backend != "reference":
        return fused.shifted(x, last, mix, begins)
    before = torch.cat([last[:, None], x[:, :-1]], 1).masked_fill(begins[:, :, None], 0)
    return tuple((1 - m) * x + m * before for m in mix)


# ---------------------------------------------------------------- networks and packed matrices


def _networks() -> Iterator[Case]:
    """Experts of which the last has no tokens; sorted tokens and mixed ones."""
    K, hidden, E = 16, 24, 4
    for N, order in ((40, "mixed"), (129, "sorted"), (1, "mixed")):
        x, gate, up, down = _drawn((N, K), (E, hidden, K), (E, hidden, K), (E, K, hidden))
        expert = torch.arange(N) % (E - 1)
        expert = expert.sort().values if order == "sorted" else expert
        inputs = (x, gate / 4, up / 4, down / 4, expert)
        shape = f"N {N} {order}, D {K}, F {hidden}, E {E}"
        yield (case := Case("experts", shape, _experts, ("torch",), inputs, *LOOSE))
        yield _steps(case)
        yield _half(case, 4 * U, 8 * U)  # each product and the hidden units are rounded


def _experts(backend: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, expert: Tensor) -> Tensors:
    if backend == "reference":
        return (experts.reference(x, expert, gate, up, down),)
    return (experts.swiglu(x, expert, gate, up, down)[0],)


def _matrices() -> Iterator[Case]:
    """Packed matrices of each format, and a network of ternary ones: there a hidden unit may be rounded to the next of
    127 steps."""
    for format, (N, K), T in (
        ("ternary", (37, 200), 5), ("ternary", (1003, 600), 1), ("ternary", (37, 1030), 33),
        ("2bit", (37, 200), 5), ("4bit", (37, 200), 5), ("int8", (37, 1100), 5),
    ):  # fmt: skip
        x, scales = _drawn((T, K), (N, 2 * (-(-K // packing.ALIGN) * packing.ALIGN // packing.GROUP + 1)))
        layout = packing.LAYOUTS[format]
        codes = layout.lowest + torch.arange(N * K).view(N, K) * 7 % (layout.highest - layout.lowest + 1)
        shape, inputs = f"{format}, T {T}, N {N}, K {K}", (x, scales.abs() + 0.1, codes)
        yield Case("packed", shape, _linear(format), ("torch", "auto"), inputs, 1e-5, None)
    x, scales = _drawn((9, 200), (200,))
    codes = torch.arange(200 * 200).view(200, 200) * 7 % 3
    inputs = (x, scales.abs() + 0.1, codes)
    yield Case("packed swiglu", "T 9, D 200, F 83", _swiglu, ("torch", "auto"), inputs, 1e-2, None)


def _linear(format: str) -> Callable[..., Tensors]:
    def run(backend: str, x: Tensor, scales: Tensor, codes: Tensor) -> Tensors:
        G = packing.sizes(format, (codes.shape[0], codes.shape[1]))[1][1:2]
        if packing.LAYOUTS[format].zero is None:
            scale, offset = scales[:, : G[0]], scales[:, -G[0] :]
            matrix = packing.pack(codes, scale, offset, format)
        else:
            matrix = packing.pack(codes, scales[:, 0], None, format)
        return (packed.linear(x.float(), matrix, backend=backend),)

    return run


def _swiglu(backend: str, x: Tensor, scales: Tensor, codes: Tensor) -> Tensors:
    gate, up, down = (
        packing.pack(codes[first : first + N, :K], scales[:N].float() / 16, None, "ternary")
        for first, N, K in ((0, 83, 200), (90, 83, 200), (0, 200, 83))
    )
    return (packed.swiglu(x.float(), gate, up, down, backend=backend),)
