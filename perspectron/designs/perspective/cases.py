"""Cases of the self-test: the traces of an adapter."""

from collections.abc import Iterator

from torch import Tensor

from perspectron.designs.perspective import eligibility
from perspectron.ops.case import Case, Tensors, drawn, gates


def cases() -> Iterator[Case]:
    """Traces after 33 tokens."""
    B = 2
    T, D, R, r = 33, 12, 5, 3
    k, v, u, slope, memory, trace = drawn((B, T, R), (B, T, D), (B, T, r), (B, T, D), (B, D, R), (B, r, D, R))
    traced = (k, v, gates(B, T, D), u, slope, memory, trace)
    yield Case("eligibility", f"B {B}, T {T}, D {D}, R {R}, r {r}", _traces, ("auto",), traced, 1e-5, None)


def _traces(
    backend: str, k: Tensor, v: Tensor, gamma: Tensor, u: Tensor, slope: Tensor, memory: Tensor, trace: Tensor
) -> Tensors:
    if backend != "naive":
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
