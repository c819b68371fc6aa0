"""Cases of `perspectron.ops.selftest` for operations that do not recur.

Shapes: as the operations have them; B batch, T time, H heads, G key heads, K head width, D width, N tokens.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perspectron.ops import attention, experts, fused, packed, packing, rope
from perspectron.ops.case import LOOSE, Case, Tensors, U, drawn, half, steps


def cases(gpu: tuple[str, ...] = ()) -> Iterator[Case]:
    """All cases, with inputs on the CPU. gpu: backends of packed matrices beside PyTorch's."""
    yield from _attentions()
    yield from _pointwise()
    yield from _networks()
    yield from _matrices(("torch", "auto", *gpu))


# ---------------------------------------------------------------- attention


def _attentions() -> Iterator[Case]:
    B, K = 2, 16
    for T in (70, 1, 5, 65):
        shape = f"B {B}, T {T}, H 4, G 2, K {K}"
        q, k, v, old_k, old_v = drawn((B, 4, T, K), (B, 2, T, K), (B, 2, T, K), (B, 2, 24, K), (B, 2, 24, K))
        whole = Case("attention", shape, _attention, ("auto",), (q, k, v), *LOOSE)
        window = Case("windowed", f"{shape}, W 24", _window, ("auto",), (q, k, v, old_k, old_v), *LOOSE)
        more = Case("cached", f"{shape}, S 24", _cache, ("auto",), (q, k, v, old_k, old_v), *LOOSE)
        yield from (whole, window, more)
        if T in (1, 65):
            yield from map(steps, (whole, window, more))
        if T == 70:  # weights, products and outputs are rounded
            yield from (half(case, 4 * U, 8 * U) for case in (whole, window))
    (x,) = drawn((B, 3, 65, K))
    yield (case := Case("rope", f"B {B}, T 65, H 3, K {K}", _rope, ("auto",), (x,)))
    yield half(case, 2 * U, 2 * U)


def _seen(q: Tensor, k: Tensor, v: Tensor, before: int, window: int) -> Tensor:
    """The plain formula: token t of q, at place `before + t` among the keys, sees `window` keys up to its own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    back = torch.arange(before, before + q.shape[2], device=q.device)[:, None]
    back = back - torch.arange(k.shape[2], device=q.device)
    hidden = (back < 0) | (back >= window)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def _attention(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    if backend == "naive":
        return (_seen(q, k, v, 0, q.shape[2]),)
    return (attention.attend(q, k, v, causal=True),)


def _window(backend: str, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensors:
    """A chunk after a full window, and the ring afterwards."""
    B, T, W = len(q), q.shape[2], old_k.shape[2]
    if backend == "naive":
        k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        return _seen(q, k, v, W, W), *(x[:, :, T:].roll(T % W, 2) for x in (k, v))
    before = torch.full((B,), W, device=q.device)
    at = attention.places(before, T, None, None)
    ring = attention.write(old_k, k, before, at), attention.write(old_v, v, before, at)
    if T == 1 and not torch.is_grad_enabled():
        return attention.stepped(q, ring, at), *ring
    return attention.windowed(q, k, v, (old_k, old_v), before, at), *ring


def _cache(backend: str, q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensors:
    """A chunk after a third of the cache is filled."""
    B, T, past = len(q), q.shape[2], old_k.shape[2] // 3
    if backend == "naive":
        k, v = torch.cat([old_k[:, :, :past], k], 2), torch.cat([old_v[:, :, :past], v], 2)
        return (_seen(q, k, v, past, k.shape[2]),)
    before = torch.full((B,), past, device=q.device)
    at = attention.places(before, T, None, None)
    return (attention.cached(q, k, v, ([old_k], [old_v]), before, at),)


def _rope(backend: str, x: Tensor) -> Tensors:
    at = torch.arange(x.shape[2], device=x.device).expand(len(x), -1) + 1000
    if backend != "naive":
        return (rope.turned(x, rope.angles(at, x.shape[-1], 1e4)),)
    angle = at[:, None, :, None] * 1e4 ** (
        -torch.arange(0, 1, 2 / x.shape[-1], dtype=torch.float64, device=x.device)
    )
    a, b = x.chunk(2, -1)
    return (torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1),)


# ---------------------------------------------------------------- between the products


def _pointwise() -> Iterator[Case]:
    """Operations on single numbers or rows. Each computes in float32, or rounds what it reads again once or twice."""
    x, y, weight, last, mix = drawn((3, 65, 40), (3, 65, 40), (40,), (3, 40), (2, 40))
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
        yield half(case, forward, gradients)


def _entropy(backend: str, logits: Tensor, target: Tensor) -> Tensors:
    if backend != "naive":
        return fused.entropies(logits, target), fused.entropy(logits, target)
    there = target != fused.IGNORE
    picked = logits.log_softmax(-1).gather(1, target.clamp_min(0)[:, None])[:, 0]
    each = -picked.masked_fill(~there, 0)
    return each, each.sum()


def _norm(backend: str, x: Tensor, weight: Tensor) -> Tensors:
    if backend == "naive":
        return (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight,)
    norm = fused.RMSNorm(len(weight), eps=1e-5, device=x.device, dtype=x.dtype)
    return (torch.func.functional_call(norm, {"weight": weight}, (x,)),)


def _gated(backend: str, a: Tensor, b: Tensor) -> Tensors:
    return (a / (1 + (-a).exp()) * b if backend == "naive" else fused.gated(a, b),)


def _gelu(backend: str, x: Tensor) -> Tensors:
    if backend != "naive":
        return (fused.gelu(x),)
    return (0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),)


def _decayed(backend: str, p: Tensor, v: Tensor) -> Tensors:
    gamma = torch.sigmoid(p)
    return (gamma, (1 - gamma**2).sqrt() * v) if backend == "naive" else fused.decayed(p, v)


def _shifted(backend: str, x: Tensor, last: Tensor, mix: Tensor, begins: Tensor) -> Tensors:
    if backend != "naive":
        return fused.shifted(x, last, mix, begins)
    before = torch.cat([last[:, None], x[:, :-1]], 1).masked_fill(begins[:, :, None], 0)
    return tuple((1 - m) * x + m * before for m in mix)


# ---------------------------------------------------------------- networks and packed matrices


def _networks() -> Iterator[Case]:
    """Experts, the last without tokens; tokens sorted by expert, and mixed."""
    K, hidden, E = 16, 24, 4
    for N, order in ((40, "mixed"), (129, "sorted"), (1, "mixed")):
        x, gate, up, down = drawn((N, K), (E, hidden, K), (E, hidden, K), (E, K, hidden))
        expert = torch.arange(N) % (E - 1)
        expert = expert.sort().values if order == "sorted" else expert
        inputs = (x, gate / 4, up / 4, down / 4, expert)
        shape = f"N {N} {order}, D {K}, F {hidden}, E {E}"
        yield (case := Case("experts", shape, _experts, ("torch",), inputs, *LOOSE))
        yield steps(case)
        yield half(case, 4 * U, 8 * U)  # each product and the hidden units are rounded


def _experts(backend: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, expert: Tensor) -> Tensors:
    if backend == "naive":
        return (experts.naive(x, expert, gate, up, down),)
    return (experts.swiglu(x, expert, gate, up, down)[0],)


def _matrices(backends: tuple[str, ...]) -> Iterator[Case]:
    """Packed matrices of each format, and a ternary network, in which a hidden unit may be rounded to the next of 127
    steps."""
    for format, (N, K), T in (
        ("ternary", (37, 200), 5), ("ternary", (203, 600), 1), ("ternary", (37, 1030), 33),
        ("2bit", (37, 200), 5), ("4bit", (37, 200), 5), ("int8", (37, 1100), 5), ("2bit", (37, 333), 1),
        ("4bit", (37, 200), 1), ("int8", (37, 1100), 1), ("2bit", (37, 200), 70),
    ):  # fmt: skip
        x, scales = drawn((T, K), (N, 2 * (-(-K // packing.ALIGN) * packing.ALIGN // packing.GROUP + 1)))
        layout = packing.LAYOUTS[format]
        codes = layout.lowest + torch.arange(N * K).view(N, K) * 7 % (layout.highest - layout.lowest + 1)
        shape, inputs = f"{format}, T {T}, N {N}, K {K}", (x, scales.abs() + 0.1, codes)
        yield Case("packed", shape, _linear(format), backends, inputs, 1e-5, None)
    codes = torch.arange(200 * 200).view(200, 200) * 7 % 3
    for T in (9, 1):
        x, scales = drawn((T, 200), (200,))
        inputs = (x, scales.abs() + 0.1, codes)
        yield Case("packed swiglu", f"T {T}, D 200, F 83", _swiglu, backends, inputs, 1e-2, None)


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
