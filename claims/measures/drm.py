"""Measures of the DRM's geometry and law, on something small.

Shapes: B batch, T time, N directions, S state width.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from claims.claim import Evidence
from claims.measures.common import (
    apart,
    below,
    first,
    made,
    text,
)
from claims.measures.gates import gates
from perspectron import presets
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import Geometry, State
from perspectron.designs.drm.mixer import DRM
from perspectron.model.model import build


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
    """The least eigenvalue of G over those tokens, at least the floor."""
    return torch.linalg.eigvalsh(drm.metric(geometry()[0]).double()).min().item()


def energy_error() -> Evidence:
    """The error of the action term against mean Δzᵀ G Δz."""
    now, trace = geometry()
    v = trace.v_BTS.flatten(0, 1)
    energy = (v[:, None] @ drm.metric(now) @ v[:, :, None]).mean()
    _, _, terms = made("drm-104k").train().hidden(text())
    made("drm-104k").eval()
    return below(abs(energy - terms["action"].value).item() / energy.item(), 1e-5)


def solve_error() -> Evidence:
    """The error of the fast loop's Woodbury solve against a dense one."""
    mixer, model = first("drm-104k", DRM), made("drm-104k")
    with torch.no_grad():
        state = mixer.init_state(2, torch.device("cpu"), torch.float32)
        before = State(state.z_BD, state.geometry_BF, state.length_B)
        inputs = (model.embedding(text()), before, mixer.weights(), mixer.law())
        return below(apart(drm.scan(*inputs)[0], drm.scan(*inputs, backend="naive")[0]), 1e-4)


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
