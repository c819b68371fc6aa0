"""Cases of the self-test: attention with three scores."""

from collections.abc import Iterator

from torch import Tensor

from perspectron.designs.lens import op as lens
from perspectron.ops import attention
from perspectron.ops.case import LOOSE, Case, Tensors, drawn


def cases() -> Iterator[Case]:
    """The case of a prompt."""
    B, T, K = 2, 70, 16
    q, k, v, u, w = drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, K), (2, K), (2, 3))
    yield Case("lens", f"B {B}, T {T}, H 2, K {K}", _lens, ("torch",), (q, k, v, u, w), *LOOSE)


def _lens(backend: str, q: Tensor, k: Tensor, v: Tensor, u: Tensor, w: Tensor) -> Tensors:
    if backend == "naive":
        return (lens.naive(q, k, v, u, w),)
    return (attention.attend(*lens.features(q, k, u, w), v, causal=True, scale=q.shape[-1] ** -0.5),)
