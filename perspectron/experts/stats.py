"""Statistics of a model's ternary experts."""

import torch
from torch import nn

from perspectron.experts import ternary
from perspectron.experts.layer import RoutedSwiGLU


def experts_of(model: nn.Module) -> dict[str, RoutedSwiGLU]:
    """The model's layers of routed experts, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RoutedSwiGLU)}


@torch.no_grad()
def matrices(model: nn.Module) -> dict[str, dict[str, list[float]]]:
    """Fraction of zeros and scale of each matrix that is, or becomes, ternary: by name, a number for each expert."""
    found = {}
    for name, ffn in experts_of(model).items():
        if not ffn.config.ternary:
            continue
        share_1 = ffn.ternary_share_1.clone()
        ffn.ternary_share_1.zero_()  # use the float weights, from which zeros and scale are computed
        for which, weight in zip(("gate", "up", "down"), ffn.weights(), strict=True):
            zeros_E, scale_E = ternary.stats(weight, ffn.config.ternary_rule)
            found[f"{name}.{which}"] = {"zeros": zeros_E.tolist(), "scale": scale_E.tolist()}
        ffn.ternary_share_1.copy_(share_1)
    return found


def means(matrix: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The statistics of `matrices`, averaged over experts."""
    return {
        name: {what: sum(values) / len(values) for what, values in both.items()}
        for name, both in matrix.items()
    }
