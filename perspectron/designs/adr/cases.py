"""Cases of the self-test: the memories of ADR."""

from collections.abc import Iterator

from torch import Tensor

from perspectron.designs.adr import gru
from perspectron.ops.case import LOOSE, Case, Tensors, drawn, rounded, steps


def cases() -> Iterator[Case]:
    """A prompt and a step, and the prompt in half precision."""
    B, K = 2, 16
    for T in (70, 1):
        x, wi, wh, bi, bh, h = drawn(
            (B, T, 2, 2, K), (2, K, 3 * K), (2, K, 3 * K), (2, 3 * K), (2, 3 * K), (B, 2, 2, K)
        )
        shape, cells = f"B {B}, T {T}, G 2, R 2, D {K}", (x, wi / 4, wh / 4, bi, bh, h)
        yield (case := Case("gru", shape, _gru, ("torch", "auto"), cells, *LOOSE))
        yield steps(case) if T == 1 else rounded(case)


def _gru(backend: str, x: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor, h: Tensor) -> Tensors:
    memories, raw, last = gru.scan(x, gru.Cells(wi, wh, bi, bh), 0.9, h, backend=backend, raw=True)
    assert raw is not None
    return memories, raw, last
