"""The gates of a trained model, beside what the documents say that training does to them.

Shapes: B batch, T time, D model width, H heads, K head width, N directions, S state width, L lenses. What runs
over rows and tokens together is counted by T.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from perspectron.designs.adr.mixer import ADR, ADRState
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.law import State
from perspectron.designs.drm.mixer import DRM, DRMState
from perspectron.designs.lens.mixer import Lens
from perspectron.designs.lens.prune import route_gates
from perspectron.designs.perspective.pdr import PDR
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.ops import attention
from perspectron.util.hooks import hooked

Gates = dict[str, list[Any]]


@torch.no_grad()
def gates(model: LanguageModel, ids_BT: Tensor) -> Gates:
    """Measures of gates: by name, a list with an entry for each layer that has such a part; a name without any is left
    out. `ids_BT`: text to read, where a gate depends on it.

    lens_weights: of each head, its mixture of the three lenses. route_gate: g. pdr_gate_mean, pdr_gate_spread: of γ
    over tokens, mean over channels. adr_roughness: how much attention shifts from one token to the next, with memories
    of keys over without; left out without such memories. drm_active: Σa. drm_outside: share of |v|² that is not in the
    span of the directions.
    """
    by_name: Gates = {}
    blocks = [block for block in cast("list[Block]", model.blocks) if block.config.mixer is not None]
    reads: list[tuple[Tensor, Any]] = []  # input and state of each mixer

    def keep(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        reads.append((arguments[0], arguments[1]))

    hooks = [block.mixer.register_forward_pre_hook(keep) for block in blocks]
    with hooked(hooks):
        model.hidden(ids_BT)
    for block, (x_BTD, state) in zip(blocks, reads, strict=True):
        for kind, measure in MEASURES.items():
            if isinstance(block.mixer, kind):
                for name, value in measure(block.mixer, x_BTD, state).items():
                    by_name.setdefault(name, []).append(value)
    if any(hasattr(block, "route") for block in blocks):
        by_name["route_gate"] = [g for g, _ in sorted(route_gates(model), key=lambda gate: gate[1])]
    return by_name


def _lens(mixer: Lens, x_BTD: Tensor, state: object) -> dict[str, Any]:
    return {"lens_weights": mixer.weights().tolist()}


def _pdr(mixer: PDR, x_BTD: Tensor, state: object) -> dict[str, Any]:
    gamma_ND = torch.sigmoid(mixer.p_proj(mixer.p_down(x_BTD)).double()).flatten(0, 1)
    return {
        "pdr_gate_mean": gamma_ND.mean().item(),
        "pdr_gate_spread": gamma_ND.std(0).mean().item(),
    }


def _adr(mixer: ADR, x_BTD: Tensor, state: ADRState) -> dict[str, Any]:
    """The total variation of attention between consecutive tokens, over those that both see."""
    if mixer.config.remember == "values":
        return {}
    at = attention.places(state.cache.length_B, x_BTD.shape[1], None, None)
    read = mixer.remember(x_BTD, state, at)
    q_BHTK, plain_BHTK, seen_BHTK = (
        keys.transpose(1, 2).double()
        for keys in (read.plain_BT3HK[:, :, 0], read.plain_BT3HK[:, :, 1], read.seen_BT2HK[:, :, 0])
    )
    return {"adr_roughness": _shift(q_BHTK, seen_BHTK) / _shift(q_BHTK, plain_BHTK)}


def _shift(q_BHTK: Tensor, k_BHTK: Tensor) -> float:
    T, K = q_BHTK.shape[-2:]
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTK.device).triu(1)
    scores = (q_BHTK @ k_BHTK.mT * K**-0.5).masked_fill(future_TT, float("-inf"))
    p_BHTT = scores.softmax(-1)
    earlier, later = p_BHTT[:, :, :-1], p_BHTT[:, :, 1:]
    later = later.masked_fill(future_TT[:-1], 0)
    later = later / later.sum(-1, keepdim=True)
    return (earlier - later).abs().sum(-1).mean().item() / 2


def _drm(mixer: DRM, x_BTE: Tensor, state: DRMState) -> dict[str, Any]:
    """Geometry is that of every token, whatever the interval."""
    law, weights = mixer.law()._replace(geometry_interval=1), mixer.weights()
    before = State(state.z_BD, state.geometry_BF[:, :0], state.length_B)
    _, _, trace = drm.scan(x_BTE, before, weights, law)
    assert trace is not None
    v_NS = trace.v_BTS.flatten(0, 1).double()
    h = torch.nn.functional.gelu(mixer.read(trace.before_BTS.flatten(0, 1)))
    V_TNS = drm.geometry(h, weights, law).V_BNS.double()
    inside = torch.linalg.lstsq(V_TNS.mT, v_NS[..., None], driver="gelsd").solution
    rest_NS = v_NS - (V_TNS.mT @ inside)[..., 0]
    return {
        "drm_active": trace.a_BTN.sum(-1).mean().item(),
        "drm_outside": (rest_NS.square().sum() / v_NS.square().sum()).item(),
    }


MEASURES: dict[type, Callable[..., dict[str, Any]]] = {Lens: _lens, PDR: _pdr, ADR: _adr, DRM: _drm}
