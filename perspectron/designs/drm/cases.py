"""Cases of the self-test: the flow of DRM."""

from collections.abc import Iterator

import torch
from torch import Tensor

from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Law, State, Weights
from perspectron.ops.case import LOOSE, Case, Tensors, drawn, rounded, steps

LAW = Law(
    directions=5, rank=3, dt=0.3, radius=2.0, squash=True, strength=0.4, damping=0.3, metric_floor=1e-4, gate_bias=-1.0,
    gate_temperature=1.5, gate_top_k=0, gate_renorm=False, direction_norm=True, geometry_interval=1,
)  # fmt: skip


def cases() -> Iterator[Case]:
    """A prompt and a step, and the prompt in half precision."""
    B = 2
    for T in (30, 1):
        shape = f"B {B}, T {T}, S 7, N 5, R 3"
        yield (case := Case("drm", shape, _drm, ("torch", "auto"), _drm_inputs(B, T), *LOOSE))
        yield steps(case) if T == 1 else rounded(case)


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
