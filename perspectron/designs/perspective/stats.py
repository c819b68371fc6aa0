"""Statistics of experts on the torus: how evenly they are used, and how much neighbours differ.

Shapes: E experts, N tokens, M numbers of an expert.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.stats import experts_of
from perspectron.experts.torus import gini, neighbour_pairs
from perspectron.ops.experts import load
from perspectron.util.hooks import hooked


@contextlib.contextmanager
def loads(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context that counts, by layer, the tokens that each expert gets [E] while the model reads, without padding."""
    layers = experts_of(model)
    found = {name: torch.zeros(len(ffn.gate_EFD), dtype=torch.int64) for name, ffn in layers.items()}
    hooks = []
    for name, ffn in layers.items():

        def count(module: RoutedSwiGLU, inputs: tuple[Tensor, ...], masks: Any, name: str = name) -> None:
            expert_N = module.router.route(module.read(*inputs[:2]).flatten(0, 1)).expert_N
            if (pad_BT := masks.get("pad_BT")) is not None:
                expert_N = expert_N[~pad_BT.flatten()]
            found[name] += load(expert_N, len(found[name])).cpu()

        hooks.append(ffn.register_forward_pre_hook(count, with_kwargs=True))
    with hooked(hooks):
        yield found


def numbers(ffn: RoutedSwiGLU) -> Tensor:
    """All weights of every expert as they are used [E,M]."""
    with torch.no_grad():
        return torch.cat([weight.flatten(1) for weight in ffn.weights()], 1)


def delta(ffn: RoutedSwiGLU) -> float:
    """Mean over lattice neighbours of Σ|difference|, in terms of an expert's mean Σ|weight|; 0 without neighbours."""
    weight_EM = numbers(ffn)
    total, pairs = 0.0, 0
    for one, other in neighbour_pairs(weight_EM, ffn.config.torus):
        total += float((one - other).abs().sum())
        pairs += one.numel() // weight_EM.shape[1]
    return total / max(pairs, 1) / (float(weight_EM.abs().sum()) / len(weight_EM))


def use(load_by_layer: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Gini coefficient of each layer's load, and the share of experts that it reaches."""
    return {
        name: {"gini": float(gini(load_E)), "reach": float((load_E > 0).double().mean())}
        for name, load_E in load_by_layer.items()
    }


def mean(layers: dict[str, dict[str, Any]], what: str) -> float | None:
    """Mean of one statistic over layers; None where no layer has it."""
    values = [layer[what] for layer in layers.values() if what in layer]
    return sum(values) / len(values) if values else None
